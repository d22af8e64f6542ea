"""The Learner: it trains exactly as a hand-written loop, whatever the batch, and keeps what it should between fits."""
import copy
import weakref
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from fastcore.basics import patch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from learner.callback import Callback
from learner.callbacks.recorder import Recorder
from learner.data import DataLoaders
from learner.events import CancelBatchException, CancelFitException
from learner.learner import Learner
from tests.helpers import RegModel, Tracer, raises, synth_dls, synth_learner, trace, weights


class Items(Dataset):
    "An ordinary map dataset that draws random numbers for each item"
    def __init__(self, n=40):
        g = torch.Generator().manual_seed(7)
        self.x, self.y = torch.randn(n, 5, generator=g), torch.randint(3, (n,), generator=g)
    def __len__(self): return len(self.x)
    def __getitem__(self, i): return self.x[i] + .1*torch.randn(5), self.y[i]


def net(): return nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(.4), nn.Linear(16, 3))


def by_hand(train, valid, model, opt, n_epoch):
    "The loop that a PyTorch user writes; its validation inside `fork_rng`"
    for _ in range(n_epoch):
        model.train()
        for xb, yb in train:
            F.cross_entropy(model(xb), yb).backward()
            opt.step()
            opt.zero_grad()
        if valid is None: continue
        with torch.random.fork_rng(), torch.no_grad():
            model.eval()
            for xb, yb in valid: F.cross_entropy(model(xb), yb)


@pytest.mark.parametrize('data', ['tensors', 'items'])
@pytest.mark.parametrize('with_valid', [True, False])
@pytest.mark.parametrize('opt_func', [torch.optim.AdamW, partial(torch.optim.SGD, momentum=.9, weight_decay=.1),
                                      partial(torch.optim.SGD, momentum=.9, nesterov=True), torch.optim.RMSprop],
                         ids=['adamw', 'sgd', 'nesterov', 'rmsprop'])
def test_bit_equal_to_a_hand_written_loop(data, with_valid, opt_func):
    "With shuffle, dropout and batch norm, weights, buffers and random stream equal a loop by hand's, bit by bit"
    ds = Items() if data == 'items' else TensorDataset(Items().x, Items().y)
    def loaders(): return DataLoader(ds, 8, shuffle=True), DataLoader(ds, 8) if with_valid else None
    torch.manual_seed(1)
    a, b = net(), net()
    b.load_state_dict(a.state_dict())
    train, valid = loaders()
    torch.manual_seed(2)
    by_hand(train, valid, a, opt_func(a.parameters(), lr=.01), 3)
    left = torch.rand(3)

    learn = Learner(loaders(), b, F.cross_entropy, opt_func=opt_func, lr=.01, wd_bn_bias=True,
                    default_cbs=dict(progress=None))
    torch.manual_seed(2)
    learn.fit(3)

    assert all(p.equal(q) for p, q in zip(a.state_dict().values(), b.state_dict().values(), strict=True))
    assert torch.rand(3).equal(left)


# ---- fits

def test_fit_again_trains_on():
    "A second fit goes on from the first one's weights and optimizer state"
    a, b = synth_learner(lr=.01), synth_learner(lr=.01)

    a.fit(2)
    b.fit(1)
    opt = b.opt
    b.fit(1)

    assert all(p.equal(q) for p, q in zip(weights(a), weights(b))) and b.opt is opt and b.n_step == 4

def test_reset_opt():
    "`reset_opt=True` begins with a new optimizer"
    learn = synth_learner()
    learn.fit(1)
    opt = learn.opt

    learn.fit(1, reset_opt=True)

    assert learn.opt is not opt

def test_fit_zero():
    "`fit(0)` fires before_fit and after_fit, and trains nothing"
    learn = synth_learner()
    before = weights(learn)

    assert trace(learn, n_epoch=0) == ['before_fit', 'after_fit', 'cleanup_fit']
    assert all(p.equal(q) for p, q in zip(before, weights(learn)))

def test_start_epoch_skips_without_events():
    "Epochs before `start_epoch` fire nothing and leave no row"
    learn = synth_learner(n=1, n_valid=0)
    seen = []

    learn.fit(3, start_epoch=2, cbs=Callback(before_epoch=lambda cb: seen.append((cb.epoch, cb.n_epoch))))

    assert seen == [(2, 3)] and len(learn.recorder.values) == 1 and learn.history.epoch.tolist() == [2]

def test_no_validation_set():
    "Without a validation set the phase is skipped, and its columns are not there"
    learn = synth_learner(n_valid=0)

    assert not any('validate' in e for e in trace(learn))
    assert learn.recorder.metric_names == ['epoch', 'train_loss', 'time']
    with pytest.raises(ValueError, match='there is no validation set'): learn.validate()

class Endless(IterableDataset):
    def __init__(self, n): self.n = n
    def __iter__(self): return ((torch.ones(1)*i, torch.ones(1)) for i in range(self.n))

def test_unsized_loaders():
    "Loaders without a length train, validate and record"
    learn = synth_learner(dls=(DataLoader(Endless(10), 4), DataLoader(Endless(6), 4)))
    n_iter = []

    learn.fit(2, cbs=Callback(after_batch=lambda cb: n_iter.append(cb.n_iter)))

    assert n_iter == [None]*10 and learn.n_step == 6 and learn.history.valid_loss.notna().all()

def test_lists_and_one_iterable_serve_as_loaders():
    "A list of batches is a loader, and one iterable alone is a training set"
    batches = [(torch.randn(4, 1), torch.randn(4, 1)) for _ in range(3)]

    pair, single = synth_learner(dls=(batches, batches[:1])), synth_learner(dls=batches)
    pair.fit(1)
    single.fit(1)

    assert pair.n_step == single.n_step == 3 and 'valid_loss' not in single.history

def test_validate_before_any_fit():
    "`validate` needs no fit before it, and makes no optimizer"
    learn = synth_learner()

    assert learn.validate(1)[0] > 0 and learn.validate(0)[0] > 0 and learn.opt is None

def test_validate_another_loader():
    "`validate(dl=…)` takes any loader; `stage` tells it from the validation set"
    learn, stages = synth_learner(), []
    dl = synth_dls(5, 0)[0]

    row = learn.validate(dl=dl, cbs=Callback(after_batch=lambda cb: stages.append(cb.stage)))

    assert stages == ['test']*5 and row['valid_loss'] > 0

def test_stage_and_run_kind():
    "`stage` and `run_kind` say what is going on, and nothing when nothing is"
    learn, seen = synth_learner(n=1), []
    look = Callback(before_batch=lambda cb: seen.append((cb.run_kind, cb.stage)))

    learn.fit(1, cbs=look)
    learn.validate(cbs=look)

    assert seen == [('fit', 'train'), ('fit', 'valid'), ('validate', 'valid')] and (learn.run_kind,
                                                                                    learn.stage) == ('', '')

def test_pct_train_is_fastais():
    "`pct_train` is the share of all batches of the fit that is done, and ends at 1"
    seen = []
    learn = synth_learner(Callback(before_batch=lambda cb: cb.training and seen.append(round(cb.pct_train, 6))), n=4)

    learn.fit(2)

    assert seen == [0, .125, .25, .375, .5, .625, .75, .875] and learn.pct_train == 1

def test_patch_extends_learner_from_a_cell():
    "A method added with @patch works on existing Learners"
    learn = synth_learner()

    @patch
    def fit_twice(self: Learner, lr): self.fit(1, lr), self.fit(1, lr)
    learn.fit_twice(.1)

    assert learn.n_step == 4
    del Learner.fit_twice

def test_subclass_hooks_are_used():
    "The private methods that fastai's extensions override are called, and may be overridden here too"
    called = []
    class Mine(Learner):
        def _backward(self): called.append('_backward'); super()._backward()
        def _step(self): called.append('_step'); super()._step()
        def _split(self, b): called.append('_split'); super()._split(b)
        def _do_one_batch(self): called.append('_do_one_batch'); super()._do_one_batch()
        def _do_epoch_train(self): called.append('_do_epoch_train'); super()._do_epoch_train()
        def _do_epoch_validate(self, *args): called.append('_do_epoch_validate'); super()._do_epoch_validate(*args)
        def _do_epoch(self): called.append('_do_epoch'); super()._do_epoch()
        def _do_fit(self): called.append('_do_fit'); super()._do_fit()
        def _end_cleanup(self): called.append('_end_cleanup'); super()._end_cleanup()

    Mine(synth_dls(1, 0), RegModel(), F.mse_loss, default_cbs=False).fit(1)

    assert called == ['_do_fit', '_do_epoch', '_do_epoch_train', '_split', '_do_one_batch', '_backward', '_step',
                      '_do_epoch_validate', '_end_cleanup']


# ---- rates

@pytest.mark.parametrize('learner_lr, opt_func, fit_lr, used', [
    (.5, partial(torch.optim.SGD, lr=.3), .2, .2), (.5, partial(torch.optim.SGD, lr=.3), None, .5),
    (None, partial(torch.optim.SGD, lr=.3), None, .3), (None, torch.optim.SGD, None, 1e-3), (0., torch.optim.SGD, None,
                                                                                             0.)])
def test_precedence_of_lr(learner_lr, opt_func, fit_lr, used):
    "fit's argument, then the Learner's, then the one inside a partial, then 1e-3"
    learn = synth_learner(lr=learner_lr, opt_func=opt_func)

    learn.fit(1, fit_lr)

    assert learn.opt.hypers[0]['lr'] == used and learn.lr == (used if fit_lr is None else learner_lr)

def test_wd_of_a_fit_is_for_that_fit():
    "`fit(wd=…)` holds for that fit only; the Learner's own holds for all that give none"
    seen = []
    def look(cb): seen.append(cb.opt.hypers[0]['wd'])
    learn = synth_learner(Callback(before_train=look), wd=.1, opt_func=torch.optim.AdamW)

    learn.fit(1, wd=.3)
    learn.fit(1)
    learn.wd = .2
    learn.fit(1)

    assert seen == [.3, .1, .2]


# ---- what changes between fits

def test_a_new_model_is_trained():
    "Assigning `learn.model` between fits makes a new optimizer, and says so"
    learn = synth_learner()
    learn.fit(1)
    learn.model = RegModel()
    before = weights(learn)

    with pytest.warns(UserWarning, match='made anew, since `model` changed'): learn.fit(1)

    assert not before[0].equal(weights(learn)[0])

@pytest.mark.parametrize('name, value', [('opt_func', torch.optim.SGD), ('splitter', lambda m: [[m.a], [m.b]])])
def test_a_new_optimizer_where_needed(name, value):
    "Assigning opt_func or splitter between fits takes effect, and says so"
    learn = synth_learner()
    learn.fit(1)
    setattr(learn, name, value)

    with pytest.warns(UserWarning, match=f'since `{name}` changed'): learn.fit(1)

    assert len(learn.opt.hypers) == (2 if name == 'splitter' else 1)
    assert isinstance(learn.opt.opt, torch.optim.SGD) == (name == 'opt_func')

def test_new_data_takes_effect():
    "Assigning `learn.dls` between fits trains on the new data"
    learn = synth_learner(n=2)
    learn.fit(1)
    learn.dls = synth_dls(5, 1)

    learn.fit(1)

    assert learn.n_step == 7

def test_a_model_swapped_in_a_fit_keeps_the_optimizer():
    "A callback may wrap the model during a fit; the optimizer, which holds the same parameters, stays"
    class Wrapped(nn.Module):
        def __init__(self, m): super().__init__(); self.m = m
        def forward(self, x): return self.m(x)
    learn = synth_learner()
    learn.fit(1)
    opt = learn.opt

    learn.fit(1, cbs=Callback(before_fit=lambda cb: setattr(cb.learn, 'model', Wrapped(cb.model))))
    learn.fit(1)

    assert learn.opt is opt and learn.n_step == 6

def test_parameters_that_appear_late_are_named():
    "Parameters added in before_fit, when the optimizer exists, are named in a warning"
    def add(cb): cb.model.late = nn.Parameter(torch.ones(1))

    with pytest.warns(UserWarning, match='not trained, since the optimizer was made without them: late'):
        synth_learner(Callback(before_fit=add)).fit(1)


# ---- batches

class TwoIn(nn.Module):
    def __init__(self): super().__init__(); self.lin = nn.Linear(1, 1)
    def forward(self, a, b): return self.lin(a+b)

class TwoOut(nn.Module):
    def __init__(self): super().__init__(); self.lin = nn.Linear(1, 2)
    def forward(self, x): return tuple(self.lin(x).split(1, 1))

class ByName(nn.Module):
    def __init__(self): super().__init__(); self.lin = nn.Linear(1, 1)
    def forward(self, x, scale=1.): return {'out': self.lin(x)*scale}

class OwnLoss(nn.Module):
    def __init__(self): super().__init__(); self.lin = nn.Linear(1, 1)
    def forward(self, x, labels=None):
        @dataclass
        class Output:
            logits: torch.Tensor
            loss: torch.Tensor
        out = self.lin(x)
        return Output(out, F.mse_loss(out, labels))

class Mapped(nn.Module):
    def __init__(self): super().__init__(); self.lin = nn.Linear(1, 1)
    def forward(self, d): return self.lin(d['x'])

@dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor

t = torch.arange(12.).reshape(4, 3)[:, :1]
def mean(pred): return pred.abs().mean()
def two(pred, y1, y2): return F.mse_loss(pred[0], y1) + F.mse_loss(pred[1], y2)
def out_mse(pred, y): return F.mse_loss(pred['out'], y)

@pytest.mark.parametrize('batch, model, loss_func, n_inp, n_yb', [
    ((t, t), RegModel, F.mse_loss, None, 1), ([t, t], RegModel, F.mse_loss, None, 1), ((t, t, t), TwoIn, F.mse_loss,
                                                                                       None, 1),
    ((t, t, t), TwoOut, two, 1, 2), (t, RegModel, mean, None, 0), ((t,), RegModel, mean, None, 0),
    ({'x': t, 'y': t}, ByName, out_mse, None, 1), ({'x': t, 'scale': 2., 'label': t}, ByName, out_mse, None, 1),
    ({'x': t, 'labels': t}, OwnLoss, None, None, 0), ({'x': t, 'other': t}, ByName, out_mse, None, 1),
    (({'x': t}, t), Mapped, F.mse_loss, None, 1), (Batch(t, t), ByName, out_mse, None, 1)],
    ids=['tuple', 'list', 'two inputs', 'two targets', 'tensor', 'one', 'dict', 'dict label', 'own loss',
         'unnamed target',
         'dict and tensor', 'dataclass'])
def test_batches_of_every_structure(batch, model, loss_func, n_inp, n_yb):
    "Whatever the structure of a batch, it is split right and trained on, and validated on (N25)"
    class Look(Callback):
        def before_batch(self): self.n = len(self.yb)
    learn = synth_learner(Look, dls=DataLoaders([batch]*2, [batch]), model=model(), loss_func=loss_func, n_inp=n_inp,
                          lr=.1)
    before = weights(learn)

    learn.fit(1)

    assert learn.look.n == n_yb and not before[0].equal(weights(learn)[0])
    assert learn.recorder.values[0]['valid_loss'] >= 0 and all(m[0] == 4 for m in learn.recorder.train.marks)

def test_bare_tensor_is_the_whole_input():
    "A bare tensor is one input, not a row for each argument"
    shapes = []
    learn = synth_learner(Callback(after_pred=lambda cb: shapes.append(tuple(cb.x.shape))), dls=[torch.randn(4, 1)],
                          loss_func=mean)

    learn.fit(1)

    assert shapes == [(4, 1)]

def test_emptied_targets_skip_the_loss():
    "A callback that empties `yb` skips loss, backward and step, also if the loss could be called without"
    learn = synth_learner(Callback(before_batch=lambda cb: setattr(cb.learn, 'yb', ())), loss_func=lambda pred,
                          y=None: F.mse_loss(pred, y))
    before = weights(learn)

    learn.fit(1)

    assert all(p.equal(q) for p, q in zip(before, weights(learn))) and learn.n_step == 0
    assert learn.history.train_loss.isna().all()

def test_no_loss_in_evaluation_is_no_error():
    "An evaluation on data without targets runs without a loss"
    seen = []
    learn = synth_learner(Callback(after_batch=lambda cb: seen.append((cb.loss, cb.pred.shape))))

    learn.validate(dl=[t, t])

    assert seen == [(None, (4, 1))]*2

def test_loss_of_parts():
    "A loss that returns a dict of scalars is summed, and its parts are recorded, weighted by items"
    def loss(pred, y): return {'fit': F.mse_loss(pred, y), 'size': .1*pred.abs().mean()}
    learn = synth_learner(loss_func=loss, n=3)

    learn.fit(1)

    row = learn.recorder.values[0]
    assert row.names == ('train_loss', 'train_fit', 'train_size', 'valid_loss', 'valid_fit', 'valid_size')
    assert row['train_loss'] == pytest.approx(row['train_fit'] + row['train_size'])
    assert row['valid_loss'] == pytest.approx(row['valid_fit'] + row['valid_size'])
    assert list(learn.history)[2:] == ['train_loss', 'smooth_loss', *row.names[1:], 'time', 'lr']

def test_loss_from_the_data():
    "Without `loss_func`, the data's own is used"
    ds = TensorDataset(t, t)
    ds.loss_func = F.l1_loss
    learn = Learner((DataLoader(ds, 2), None), RegModel(), default_cbs=False)

    assert learn.loss_func is F.l1_loss

def test_prediction_set_before_a_cancel_is_gathered():
    "A cancelled batch is never recorded with stale values, but a prediction that a callback made counts"
    def own(cb):
        cb.learn.pred = torch.zeros_like(cb.y)
        raise CancelBatchException
    def size(pred, y): return pred.abs().mean()
    learn = synth_learner(metrics=size, n_valid=2)

    row = learn.validate(cbs=Callback(before_batch=own))

    assert row['size'] == 0 and row['valid_loss'] != row['valid_loss']


# ---- any module: N1 to N4, N9, N28, N29, N31 to N33

class Pinned(nn.Sequential):
    "A model whose `train` keeps its batch norm in eval"
    def train(self, mode=True):
        super().train(mode)
        self[1].eval()
        self.calls = [*getattr(self, 'calls', []), mode]
        return self

def bn_net(cls=nn.Sequential): return cls(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

def test_n01_modes_are_switched_by_the_models_own_methods():
    "`train()` and `eval()` of the model are called, so that overridden ones work"
    model = bn_net(Pinned)
    learn = synth_learner(model=model)
    model.train()
    stats = model[1].running_mean.clone()
    model.calls = []

    with pytest.warns(UserWarning, match='left so while training: 1'): learn.fit(1)

    assert model.calls[:2] == [True, False] and stats.equal(model[1].running_mean)

@pytest.mark.parametrize('ex', [None, CancelFitException, ValueError, KeyboardInterrupt])
def test_n02_modes_come_back(ex):
    "Every module's mode is as before after fit and validate, however they end"
    model = bn_net().eval()
    model[0].train()
    learn = synth_learner(model=model)
    modes = [m.training for m in model.modules()]

    with pytest.warns(UserWarning, match='in eval mode as a whole, and all of it is trained'):
        try: learn.fit(1, cbs=Callback(after_loss=raises(ex)) if ex else None)
        except (ValueError, KeyboardInterrupt): pass
    learn.validate()

    assert [m.training for m in model.modules()] == modes

def test_n03_a_frozen_batch_norm_stays_frozen():
    "A submodule put in eval by hand keeps its statistics bit for bit, and the user is told, once"
    model = bn_net()
    model[1].eval()
    learn = synth_learner(model=model, n=3)
    stats = {k: v.clone() for k, v in model[1].named_buffers()}

    with pytest.warns(UserWarning, match=r'left so while training: 1; `learn\.model\.train\(\)`'): learn.fit(1)
    learn.fit(1)

    assert all(v.equal(dict(model[1].named_buffers())[k]) for k, v in stats.items()) and not model[1].training

def test_n04_validation_returns_to_the_exact_modes():
    "Modes set by a callback in the midst of an epoch survive an evaluation"
    modes = []
    def switch(cb):
        cb.model[1].eval()
        cb.learn.validate()
        modes.append([m.training for m in cb.model])
    learn = synth_learner(Callback(before_batch=lambda cb: cb.training and switch(cb)), model=bn_net(), n=1)

    learn.fit(1)

    assert modes == [[True, False, True]]

def test_n09_a_model_without_parameters_is_validated_but_not_fitted():
    "No parameters: validate works; fit says that there is nothing to fit"
    learn = synth_learner(model=nn.Identity())

    assert learn.validate()['valid_loss'] > 0
    with pytest.raises(ValueError, match='`Identity` has no parameters'): learn.fit(1)

def test_n29_the_model_is_never_copied_or_replaced():
    "`learn.model` is the very model that was given, also while it trains"
    model, seen = RegModel(), []
    learn = synth_learner(Callback(after_batch=lambda cb: seen.append(cb.model is model)), model=model)

    learn.fit(1)

    assert all(seen) and learn.model is model

class Scaled(nn.Module):
    def __init__(self): super().__init__(); self.scale = nn.Parameter(torch.ones(()))
    def forward(self, pred, y): self.seen = [*getattr(self, 'seen', []),
                                             self.training]; return self.scale*F.mse_loss(pred, y)

def test_n31_a_loss_module_is_switched_and_can_be_trained():
    "A loss that is a module is switched with the model, trained through a splitter that returns its parameters"
    loss = Scaled().eval()
    learn = synth_learner(loss_func=loss, n=1, splitter=lambda m: [list(m.parameters()), list(loss.parameters())])

    learn.fit(1)

    assert loss.seen == [True, False] and not loss.training and loss.scale != 1

def test_n31_untrained_parameters_of_the_loss_are_named():
    "Parameters of the loss that no splitter returns are named in a warning"
    with pytest.warns(UserWarning, match='loss_func.scale'): synth_learner(loss_func=Scaled()).create_opt()

def test_n32_nothing_is_held_after_a_fit():
    "After a fit, learner and callbacks hold no batch, prediction or graph"
    refs = []
    def watch(cb): refs.extend(weakref.ref(o) for o in (cb.x, cb.pred, cb.loss_grad, cb.loss))
    learn = synth_learner(Callback(after_loss=watch), n=3, metrics=F.l1_loss)

    learn.fit(1)

    assert not any(r() is not None for r in refs)

def test_n33_validate_before_fit_changes_nothing():
    "validate before any fit, and two fits on one model, give what fresh ones give"
    a, b = synth_learner(lr=.1), synth_learner(lr=.1)

    a.validate()
    a.fit(1)
    a.fit(1)
    b.fit(2)

    assert all(p.equal(q) for p, q in zip(weights(a), weights(b)))

def test_n28_errors_inside_the_model_are_shown():
    "An AttributeError raised in the model's own code is reported as it is"
    class Broken(RegModel):
        @property
        def size(self): return torch.ones(1).no_such_thing
        def forward(self, x): return super().forward(x)*self.size

    with pytest.raises(AttributeError, match='size|no_such_thing'): synth_learner(model=Broken()).fit(1)


# ---- forward_context, scenarios

def test_forward_context_is_entered_once_for_forward_and_loss():
    "`forward_context` wraps forward and loss, each with a fresh context, and no event"
    entered = []
    class Context:
        def __enter__(self): entered.append(self)
        def __exit__(self, *args): entered.remove(self)
    inside, total = [], []
    class Model(RegModel):
        def forward(self, x): inside.append(len(entered)); total.extend(entered); return super().forward(x)
    def loss(pred, y): inside.append(len(entered)); total.extend(entered); return F.mse_loss(pred, y)
    learn = synth_learner(Callback(after_pred=lambda cb: inside.append(len(entered))), model=Model(), loss_func=loss,
                          n=1, n_valid=0)
    learn.forward_context = Context

    learn.fit(1)

    assert inside == [1, 0, 1] and len(set(map(id, total))) == 2

def test_autocast_as_forward_context():
    "autocast given as a factory computes in bfloat16 within the forward, and is off afterwards, also after an error"
    types = []
    learn = synth_learner(Callback(after_pred=lambda cb: types.append(cb.pred.dtype)), model=nn.Linear(1, 1), n=1,
                          loss_func=lambda p, y: F.mse_loss(p.float(), y))
    learn.forward_context = partial(torch.autocast, 'cpu', torch.bfloat16)

    learn.fit(1)
    with pytest.raises(ValueError): learn.fit(1, cbs=Callback(after_pred=raises(ValueError)))

    assert types[0] == torch.bfloat16 and not torch.is_autocast_enabled('cpu')

def test_s25_cancelled_batches():
    "Every other batch cancelled before its forward: averages and counts are of those computed (S25)"
    def skip(cb):
        if cb.iter % 2: raise CancelBatchException
    def size(pred, y): return y.mean()
    learn = synth_learner(Callback(before_batch=skip), n=4, n_valid=4, metrics=size)

    learn.fit(1)

    ys = [y for _, y in synth_dls(4, 4)[1]]
    assert learn.n_step == 2 == len(learn.recorder.raw_losses)
    assert learn.recorder.values[0]['size'] == pytest.approx(torch.cat(ys[::2]).mean().item())

def test_s24_hooks_of_a_callback_are_gone_after_an_error():
    "A ValueError in one callback is what the user sees; another one's hooks are removed, and it is gone (S24)"
    class Hooks(Callback):
        def before_fit(self): self.handle = self.model.register_forward_hook(lambda *args: None)
        def cleanup_fit(self): self.handle.remove()
    learn = synth_learner()

    with pytest.raises(ValueError, match='at batch 2'):
        learn.fit(1, cbs=[Hooks, Callback(after_batch=raises(ValueError('at batch 2'), nth=2))])

    assert not learn.model._forward_hooks and 'hooks' not in vars(learn)

def test_s40_repeated_fit():
    "`fit(1)` twice trains two epochs (S40)"
    learn = synth_learner(n=3)

    learn.fit(1)
    learn.fit(1)

    assert learn.n_step == 6 and learn.history.fit.tolist() == [0, 1]

def test_learner_can_be_copied_with_its_model():
    "A deep copy of a Learner trains on its own"
    a = synth_learner()
    a.fit(1)

    b = copy.deepcopy(a)
    b.fit(1)

    assert b.model is not a.model and (a.n_step, b.n_step) == (2, 4) and not weights(a)[0].equal(weights(b)[0])

def test_metrics_can_be_reassigned():
    "`learn.metrics = …` wraps what it is given"
    learn = synth_learner()
    learn.metrics = [F.l1_loss]

    learn.fit(1)

    assert learn.recorder.values[0].names == ('train_loss', 'valid_loss', 'l1_loss')

def test_train_metrics():
    "`Recorder(train_metrics=True)` has columns for both phases, as fastai names them"
    learn = synth_learner(Recorder(train_metrics=True), metrics=F.l1_loss)

    learn.fit(1)

    assert learn.recorder.metric_names == ['epoch', 'train_loss', 'train_l1_loss', 'valid_loss', 'valid_l1_loss',
                                           'time']

def test_agree_is_the_identity():
    "In one process, everybody agrees"
    assert synth_learner().agree(True) is True and Tracer().learn is None
