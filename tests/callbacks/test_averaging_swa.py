"""SWA: the mean of the weights at ends of epochs, and statistics of batch normalisation that belong to it."""
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, TensorDataset

from learner.callback import Callback
from learner.callbacks.averaging import EMA
from learner.callbacks.schedule import ParamScheduler
from learner.callbacks.swa import SWA
from learner.callbacks.training import GradientAccumulation
from learner.events import CancelTrainException
from learner.schedules import SchedLin
from tests.helpers import raises, synth_dls, synth_learner, weights
from tests.loader_helpers import equal


def bn_net(p=0.):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Dropout(p), nn.Linear(4, 1))

def learner(*cbs, **kwargs): return synth_learner([*cbs], **{'n': 4, 'lr': .1, **kwargs})

class Ends(Callback):
    "The weights at ends of the training of each epoch, and after each step"
    order = 20
    def __init__(self): self.ends, self.steps = [], []
    def now(self): return [p.detach().double().clone() for p in self.model.parameters()]
    def after_train(self): self.ends.append(self.now())
    def after_step(self): self.steps.append(self.now())

def assert_mean(learn, seen, tol=1e-6):
    means = [torch.stack(ps).mean(0) for ps in zip(*seen)]
    found = [*learn.swa.average.values()]
    assert max(float((a-b).abs().max()) for a, b in zip(found, means, strict=True)) <= tol


@pytest.mark.parametrize('kwargs,what,which', [
    (dict(), 'ends', slice(2, None)), (dict(start=0), 'ends', slice(None)), (dict(start='3ep'), 'ends', slice(2, None)),
    (dict(start=.5, every='2ep'), 'ends', slice(1, None, 2)),
    (dict(start=.5, every='3it'), 'steps', slice(8, None, 3)),
    (dict(start='10it', every='2it'), 'steps', slice(9, None, 2)), (dict(start='10it'), 'ends', slice(2, None))
], ids=str)
def test_is_the_mean(kwargs, what, which):
    "Of what the ends of epochs, or steps, from `start` on give, in a fit of four epochs of four steps"
    learn = learner(SWA(**kwargs), ends := Ends())

    learn.fit(4)

    assert learn.swa.n_averaged == len(getattr(ends, what)[which])
    assert_mean(learn, getattr(ends, what)[which])

def test_each_fit_has_its_own():
    "A second fit begins a new average, and is trained as without SWA"
    learn, plain = learner(SWA(.5), ends := Ends(), model=bn_net(.2)), learner(model=bn_net(.2))
    for one in (learn, plain):
        torch.manual_seed(0)
        one.fit(2)
        one.fit(4)

    assert learn.swa.n_averaged == 3
    assert_mean(learn, ends.ends[3:])
    assert equal(weights(learn), weights(plain)) and learn.recorder.raw_losses == plain.recorder.raw_losses
    assert equal(dict(learn.model.state_dict()), dict(plain.model.state_dict()))

def test_statistics_are_torchs():
    "They are what torch's `update_bn` gives for the averaged weights; evaluations and the average's files have them"
    x, y = torch.randn(30, 1, generator=torch.Generator().manual_seed(0)), torch.ones(30, 1)
    dls = DataLoader(TensorDataset(x, y), 8), DataLoader(TensorDataset(x[:5], y[:5]), 8)
    learn = learner(SWA(.5), dls=dls, model=bn_net())
    learn.fit(4)
    other = bn_net()
    with torch.no_grad():
        for p, a in zip(other.parameters(), learn.swa.average.values()): p.copy_(a)

    update_bn(dls[0], other)

    with learn.averaged() as model: found = {k: v.clone() for k, v in model.state_dict().items()}
    assert all(torch.allclose(v, found[k], rtol=1e-5) for k, v in other.state_dict().items())
    assert found['1.num_batches_tracked'] == 4 and learn.model[1].num_batches_tracked == 16
    other.eval()
    loss = nn.functional.mse_loss(other(x[:5]), y[:5]).item()
    assert learn.validate()[0] == learn.recorder.values[-1]['valid_loss'] == pytest.approx(loss, rel=1e-5)

def test_statistics_are_of_what_training_sees():
    "Callbacks that prepare batches act in that pass, others' records do not change, and it is done once an average"
    seen = []
    def scale(cb):
        cb.learn.xb = (cb.x*10,)
        seen.append(cb.learn.dl.dl is cb.learn.dls.train.dl and not cb.training)
    learn = learner(SWA(.5), Callback(before_batch=scale), model=bn_net(), metrics=nn.functional.l1_loss)

    learn.fit(4)
    n = sum(seen)
    learn.validate()

    assert n == sum(seen) == 3*4 and len(learn.recorder.values) == 4 == len(learn.history)
    assert learn.swa.stats['1.running_var'].max() > 1

def test_without_validation():
    "The statistics are there when the fit ends"
    learn = learner(SWA(.5), model=bn_net(), n_valid=0)

    learn.fit(2)

    assert learn.swa.stats['1.num_batches_tracked'] == 4 and not learn.swa.stale

def test_layers_in_eval_keep_theirs():
    "What is not trained with batches' statistics is not given new ones"
    learn = learner(SWA(.5), model=nn.Sequential(bn_net(), nn.BatchNorm1d(1)))
    learn.model[1].eval()
    with pytest.warns(UserWarning, match='in eval mode, and left so'): learn.fit(2)

    assert {k.rpartition('.')[0] for k in learn.swa.stats} == {'0.1'}

def test_layers_in_eval_keep_theirs_within_the_first_epoch_too():
    "In evaluations in the midst of training they have the statistics that they have while training"
    learn = learner(SWA('1it', '1it'), model=nn.Sequential(bn_net(), nn.BatchNorm1d(1)))
    bn, seen = learn.model[1], []
    learn.model[1].eval()
    inner = Callback(after_validate=lambda cb: seen.append((bn.running_mean.item(), bn.num_batches_tracked.item())))
    look = Callback(before_batch=lambda cb: cb.training and cb.iter == 2 and cb.learn.validate(cbs=inner))
    with pytest.warns(UserWarning, match='in eval mode, and left so'): learn.fit(2, cbs=look)

    assert len(seen) >= 2 and {*seen} == {(0., 0)}

@pytest.mark.parametrize('event', ['before_batch', 'after_pred', 'after_loss', 'before_backward', 'before_step'])
def test_backward_goes_on_after_an_evaluation(event):
    "The statistics that the batch under way needs are those it had, in the tensors it had"
    def fitted(*cbs):
        learn = learner(SWA('1it', '1it'), model=bn_net())
        learn.fit(2, cbs=cbs)
        return weights(learn)

    looked = fitted(Callback(**{event: lambda cb: cb.training and cb.learn.validate()}))

    assert all(map(torch.equal, looked, fitted()))

def test_lazy_layer_that_nothing_runs_through():
    "It has no statistics to be found"
    model = bn_net()
    model.unused = nn.LazyBatchNorm1d()
    model.forward = lambda x: nn.Sequential.forward(model[:4], x)
    learn = learner(SWA(.5), model=model)

    learn.fit(2)

    assert [k for k in learn.swa.stats if 'mean' in k] == ['1.running_mean'] and not learn.swa.stale

@pytest.mark.parametrize('ex', [KeyboardInterrupt, ValueError])
def test_pass_that_fails(ex):
    "An error in the midst of that pass leaves the trained weights and statistics, and the momentum"
    states = []
    def stop(cb):
        if cb.learn.dl.dl is cb.learn.dls.train.dl and not cb.training and cb.iter == 1: raise ex
    learn = learner(SWA(.5), Callback(after_pred=stop, after_train=lambda cb: states.append(
        {k: v.clone() for k, v in cb.model.state_dict().items()})), model=bn_net())

    with pytest.raises(ex): learn.fit(2)

    assert equal(dict(learn.model.state_dict()), states[-1]) and learn.model[1].momentum == .1
    assert learn.swa.stale and not learn.swa._raw

def test_training_that_was_cut_short():
    "As many batches as the epoch had, and the window that its end has stepped"
    cut = Callback(after_batch=lambda cb: raises(CancelTrainException)(cb) if cb.training and cb.iter == 2 else None)
    learn = learner(SWA(0), cut, ends := Ends(), GradientAccumulation(2, 'batches'), model=bn_net())

    learn.fit(2)

    assert learn.n_step == 4 and learn.swa.stats['1.num_batches_tracked'] == 3
    assert_mean(learn, ends.ends)

def test_learning_rate():
    "`swa_lr` holds from `start` on, and the one before is back after the fit"
    rates = []
    look = Callback(after_step=lambda cb: rates.append(cb.opt.hypers[0]['lr']))
    learn = learner(SWA(.5, swa_lr=.01), look)

    for _ in range(2): learn.fit(2)

    assert rates == ([.1]*4+[.01]*4)*2 and learn.opt.hypers[0]['lr'] == .1 and len(learn.cbs) == 4
    with pytest.raises(ValueError, match='both set `lr`'): learn.fit(2, cbs=ParamScheduler({'lr': SchedLin(1., 0.)}))
    learn.fit(2)
    learn.fit(2, cbs=ParamScheduler({'lr': SchedLin(.1, 0.)}, end=.5))

def test_what_cannot_be():
    "Is refused before training, by name"
    with pytest.raises(ValueError, match="every='10s' is a time"): SWA(every='10s')
    with pytest.raises(ValueError, match="1.5 is no place in a fit"): SWA(1.5)
    learn = learner(SWA, model=bn_net(), dls=(iter([*synth_dls(4)[0]]), None))
    with pytest.raises(ValueError, match='needs its statistics anew, and the training loader.*only once'): learn.fit(1)
    assert learn.n_step == 0
    with pytest.raises(ValueError, match='would undo its work'): learn.add_cb(EMA)

def test_an_average_that_has_not_begun_is_told_of():
    "At the end of the fit"
    with pytest.warns(UserWarning, match="SWA: there is no average, since it begins at '5ep', and the fit had 4 steps"):
        synth_learner(SWA('5ep'), n=4).fit(1)
