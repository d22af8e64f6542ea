"""Bad input: one row each; an error or a warning that names the object, the value and what to do."""
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from learner.callback import Callback
from learner.events import CancelEpochException
from learner.learner import Learner
from learner.measure import AvgMetric
from learner.optim import Adam, ranger
from tests.helpers import RegModel, synth_dls, synth_learner, weights

x = torch.randn(6, 1)


def frozen():
    model = RegModel()
    model.requires_grad_(False)
    return model

def loss_of(what): return lambda pred, y: what(F.mse_loss(pred, y, reduction='none'))

def under(context):
    def run():
        learn = synth_learner()
        with context(): learn.fit(1)
    return run

def nested(cb): cb.learn.fit(1)

class Odd:  # a "batch" that nothing can be made of
    def __init__(self): self.size = 4


def own_groups(groups, lr): return torch.optim.SGD([{'params': [p]} for g in groups for p in g['params']], lr)

def used_up():
    learn = synth_learner(dls=(iter([(x, x)]), None))
    learn.fit(1)
    learn.fit(1)


few = DataLoader(TensorDataset(x, x), 8, drop_last=True)

fits = {  # name: (arguments of the Learner, arguments of fit, error, message)
    'loss is a tuple': (dict(loss_func=loss_of(lambda t: (t.mean(), 1))), {}, TypeError,
                        'returned a loss of type `tuple`.*must be a 0-d tensor or a dict'),
    'loss is a float': (dict(loss_func=loss_of(lambda t: t.mean().item())), {}, TypeError, 'a loss of type `float`'),
    'loss is unreduced': (dict(loss_func=nn.MSELoss(reduction='none')), {}, ValueError,
                          r"`MSELoss` returned a loss of shape \(8, 1\).*reduction='mean'"),
    'loss parts are unreduced': (dict(loss_func=loss_of(lambda t: {'a': t})), {}, TypeError, 'of type `dict`'),
    'loss without gradient': (dict(loss_func=lambda p, y: F.mse_loss(p.detach(), y)), {}, ValueError,
                              'does not depend on any parameter'),
    'targets missing': (dict(dls=([(x,)], None)), {}, ValueError, 'no loss to train with.*the batch has no targets'),
    'no loss anywhere': (dict(dls=([{'x': x}], None), loss_func=None), {}, ValueError,
                         'no loss to train with.*neither the Learner nor its data has a `loss_func`'),
    'unsplittable batch': (dict(dls=([Odd()], None)), {}, TypeError, 'Odd.*collate_fn'),
    'batch of text': (dict(dls=([['a', 'b']], None)), {}, TypeError, r'\[str, str\].*collate_fn'),
    'n_inp too large': (dict(n_inp=3), {}, ValueError, r'`n_inp=3` does not fit a batch of 2 members'),
    'empty loader': (dict(dls=([], None)), {}, ValueError, 'the train loader gives no batch'),
    'empty validation loader': (dict(dls=([(x, x)], [])), {}, ValueError, 'the valid loader gives no batch'),
    'empty dataset': (dict(dls=(DataLoader(TensorDataset(x[:0], x[:0])), None)), {}, ValueError, 'train.*is empty'),
    'drop_last with too few': (dict(dls=(few, None)), {}, ValueError, '6 items, less than one batch of 8.*drop_last'),
    'wrong number of rates': ({}, dict(lr=[.1, .2]), ValueError, '2 values of `lr` for 1 group'),
    'negative rate': ({}, dict(lr=-1.), ValueError, '`lr` must be 0 or more, not -1'),
    'no such hyper-parameter': (dict(opt_func=torch.optim.Rprop), dict(wd=.1), ValueError, 'has no `wd`'),
    'frozen everything': (dict(model=frozen()), {}, ValueError, 'all parameters of `RegModel` are frozen'),
    'no parameters': (dict(model=nn.Identity()), {}, ValueError, '`Identity` has no parameters'),
    'epochs not whole': ({}, dict(n_epoch=1.5), TypeError, '`n_epoch` is 1.5; give a whole number'),
    'epochs negative': ({}, dict(n_epoch=-1), ValueError, '`n_epoch` is -1'),
    'start_epoch too late': ({}, dict(n_epoch=2, start_epoch=2), ValueError, '`start_epoch=2` leaves nothing'),
    'no optimizer': (dict(opt_func=3), {}, TypeError, '`opt_func` must be a torch.optim class'),
}

others = {
    'generator for two epochs': (lambda: synth_learner(dls=(iter([(x, x)]), None)).fit(2), ValueError,
                                 'the train loader can be iterated once only, not for 2 epochs'),
    'used-up generator': (used_up, ValueError, 'the train loader gave no batch.*once'),
    'too many inputs': (lambda: synth_learner(dls=([(x, x, x)], None)).fit(1), TypeError, 'positional arguments'),
    'fit under no_grad': (under(torch.no_grad), RuntimeError, 'leave the `torch.no_grad'),
    'fit under inference_mode': (under(torch.inference_mode), RuntimeError, 'inference_mode'),
    'fit within a fit': (lambda: synth_learner(Callback(after_batch=nested)).fit(1), RuntimeError,
                         'within a fit that is still running'),
    'loss is a class': (lambda: synth_learner(loss_func=nn.MSELoss), TypeError, r'a class: write `MSELoss\(\)`'),
    'groups of its own': (lambda: synth_learner(opt_func=own_groups).fit(1), ValueError,
                          '`own_groups` returned others: `splitter` makes groups'),
    'torch groups': (lambda: synth_learner().create_opt().param_groups, AttributeError, 'learn.opt.opt.param_groups'),
    'no module': (lambda: Learner(synth_dls(), lambda x: x), TypeError, '`model` is a `function`, not an nn.Module'),
    'no data': (lambda: Learner(x, RegModel()), TypeError, 'Tensor'),
    'optimizer of fastai only': (lambda: ranger([]), Exception, 'ranger'),
    'no metric': (lambda: synth_learner(metrics='accuracy'), TypeError, 'accuracy'),
    'unknown event': (lambda: synth_learner()('after_btach'), TypeError, 'did you mean `after_batch`'),
    'no such loader': (lambda: synth_learner().validate(5), IndexError, 'no loader number 5'),
}


@pytest.mark.parametrize('name', fits)
def test_bad_fit(name):
    "A fit that cannot work says so before any step, with the object, the value and what to do; nothing is lost"
    kwargs, call, error, message = fits[name]
    learn = synth_learner(**kwargs)
    before = weights(learn)

    with pytest.raises(error, match=f'(?s){message}'): learn.fit(**{'n_epoch': 1, **call})

    assert all(p.equal(q) for p, q in zip(before, weights(learn))) and learn.n_step == 0
    learn.dls, learn.loss_func, learn.n_inp = synth_dls(), F.mse_loss, None
    learn.opt_func, learn.model = Adam, RegModel()
    learn.opt = None
    learn.fit(1)
    assert learn.n_step == 2


@pytest.mark.parametrize('name', others)
def test_bad_input(name):
    "What cannot work says so, with the object, the value and what to do"
    run, error, message = others[name]

    with pytest.raises(error, match=f'(?s){message}'): run()


def test_wrong_split_is_pointed_out():
    "A forward that gets more inputs than it takes points at `n_inp`"
    with pytest.raises(TypeError) as e: synth_learner(dls=([(x, x, x)], None)).fit(1)

    assert 'the model with inputs (float32[6, 1], float32[6, 1]), epoch 0, batch 0' in e.value.__notes__[0]
    assert '`Learner(n_inp=…)` tells how many' in e.value.__notes__[0]


def test_errors_in_the_loss_show_what_it_got():
    "An error in the loss says with which prediction and targets, in which batch"
    with pytest.raises(IndexError) as e:
        synth_learner(dls=([(x, torch.full((6,), 3))], None), loss_func=F.cross_entropy).fit(1)

    assert 'the loss with prediction float32[6, 1], targets (int64[6],), epoch 0, batch 0' in e.value.__notes__[0]


def test_errors_in_a_metric_name_it():
    "A metric whose value is no number is named"
    class Bad(AvgMetric):
        def value(self): return 1.
    metric = Bad(F.l1_loss)

    with pytest.raises(TypeError) as e: synth_learner(metrics=metric).fit(1)

    assert 'metric `l1_loss`' in e.value.__notes__[0]


def test_nan_loss_is_told_once():
    "A loss that is no number is told once a fit, with its epoch and batch"
    class Data(list): pass
    batches = Data((x, x.clone()) for _ in range(4))
    batches[2][1][0] = float('nan')
    learn = synth_learner(dls=(batches, None), lr=0.)

    with pytest.warns(UserWarning, match='the training loss is nan in epoch 0, batch 2') as told: learn.fit(3)

    assert len([w for w in told if 'training loss' in str(w.message)]) == 1


def test_parts_of_a_model_on_different_devices():
    "A model spread over devices is left alone, and a warning says so"
    class Spread(RegModel):
        def __init__(self): super().__init__(); self.far = nn.Linear(1, 1, device='meta')
    learn = synth_learner(model=Spread())

    with pytest.warns(UserWarning, match='`Spread` is spread over cpu, meta and is left there'): learn.validate()


def test_a_cancel_that_nothing_catches_names_its_scope():
    "A cancel raised where its scope is not open becomes an error that names exception, callback, event and scope"
    def late(cb): raise CancelEpochException
    learn = synth_learner(Callback(after_fit=late))

    with pytest.raises(RuntimeError,
                       match='CancelEpochException, raised by `Callback` at `after_fit`.*no `epoch` scope'):
        learn.fit(1)
