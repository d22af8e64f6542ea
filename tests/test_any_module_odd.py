"""Any nn.Module: odd ones. Requirements N7, N10, N11, N15, N19, N25, N27 and N30, by their numbers."""
from collections import namedtuple
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from learner.callback import Callback
from learner.callbacks.training import GradientClip
from learner.data import DataLoaders
from learner.optim import SGD, Adam
from tests.helpers import RegModel, synth_dls, synth_learner, weights
from tests.loader_helpers import equal

find = dict(num_it=3, end_lr=1., stop_div=False, show_plot=False, suggest_funcs=None)
compiled = partial(torch.compile, backend='eager')


def moved(ps, before): return [not p.equal(q) for p, q in zip(ps, before, strict=True)]

def net(): return nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

class Net(nn.Module):
    "A registered layer, and whatever else is given to it, which its forward adds up"
    def __init__(self, **attrs):
        super().__init__()
        self.base = nn.Linear(1, 1)
        for k, v in attrs.items(): setattr(self, k, v)
    def forward(self, x): return self.base(x) + sum(m(x) for m in self.more())
    def more(self): return ()


# ---- N7, N10: what is there twice, and what is frozen

def test_n07_a_module_registered_twice():
    "It is saved under both names, and its parameters are in the optimizer once; its mode comes back"
    shared = nn.Linear(1, 1)
    learn = synth_learner(model=nn.Sequential(shared, nn.BatchNorm1d(1), shared))
    shared.eval()

    with pytest.warns(UserWarning, match='left so while training: 0;'): learn.fit(1)

    assert [k for k in learn.model.state_dict() if 'weight' in k] == ['0.weight', '1.weight', '2.weight']
    assert len(learn.opt.all_params()) == 4 and not shared.training and learn.model[1].training

def test_n10_a_frozen_model_is_not_fitted_and_is_validated():
    "All frozen: fit and lr_find say what to do, validate works, and nothing has changed"
    learn = synth_learner(model=net().requires_grad_(False))
    before = learn.model.state_dict()

    for run in (partial(learn.fit, 1), partial(learn.lr_find, **find)):
        with pytest.raises(ValueError, match='all parameters of `Sequential` are frozen: set `requires_grad`'): run()

    assert learn.validate()['valid_loss'] > 0 and equal(before, learn.model.state_dict())

@pytest.mark.parametrize('opt_func', [partial(SGD, mom=.9), Adam, partial(torch.optim.SGD, momentum=.9),
                                      torch.optim.AdamW, torch.optim.RMSprop])
def test_n10_what_is_frozen_stays(opt_func):
    "Frozen after some steps, a parameter is moved neither by its momentum nor by weight decay; others are trained"
    learn = synth_learner(GradientClip, model=net(), opt_func=opt_func, lr=.1, wd=.1, wd_bn_bias=True)
    learn.fit(1)
    learn.model[0].requires_grad_(False)
    before = weights(learn)

    learn.fit(2)

    assert moved(learn.model.parameters(), before) == [False]*2 + [True]*4

def test_n10_frozen_groups_stay():
    "So it is with groups that `freeze` has frozen, but for their normalisation layers"
    learn = synth_learner(GradientClip, model=net(), lr=.1, wd=.1, splitter=lambda m: [
        [*m[:2].parameters()], [*m[2].parameters()]])
    learn.fit(1)
    learn.freeze()
    before = weights(learn)

    learn.fit(2)

    assert moved(learn.model.parameters(), before) == [False]*2 + [True]*4


# ---- N11, N27: what comes, goes, and is replaced

def added(model): model.extra = nn.Linear(1, 1)
def replaced(model): model.base = nn.Linear(1, 1)
def removed(model): model.drop = None

class Open(Net):
    "Uses what it has"
    def __init__(self): super().__init__(drop=nn.Linear(1, 1))
    def more(self): return [m for k in ('drop', 'extra') if (m := getattr(self, k, None))]

@pytest.mark.parametrize('change,n', [(added, 6), (replaced, 4), (removed, 2)])
def test_n11_surgery_between_fits(change, n):
    "A changed model gets a new optimizer, which is told, and all that it now has is trained"
    learn = synth_learner(model=Open(), lr=.1)
    learn.fit(1)
    change(learn.model)
    before = weights(learn)

    with pytest.warns(UserWarning, match='optimizer is made anew, since `model` changed'): learn.fit(1)

    assert moved(learn.model.parameters(), before) == [True]*n and len(learn.opt.all_params()) == n

@pytest.mark.parametrize('at', ['before_fit', 'before_epoch'])
def test_n11_what_comes_within_a_fit_is_named(at):
    "A layer that a callback adds or replaces once the optimizer is made is named, and trained by the next fit"
    late = Callback(**{at: lambda cb: cb.epoch or added(cb.model)})
    learn = synth_learner(model=Open())

    with pytest.warns(UserWarning, match='without them: extra.weight, extra.bias; `learn.splitter`') as told:
        learn.fit(3, cbs=late)

    assert len(told) == 1
    with pytest.warns(UserWarning, match='made anew'): learn.fit(1)
    assert {*learn.opt.all_params()} == {*learn.model.parameters()}

def test_n27_a_module_replaced_while_training():
    "Told when the next epoch begins; the rest is trained on by the same optimizer"
    swap = Callback(after_batch=lambda cb: cb.training and cb.epoch == cb.iter == 0 and replaced(cb.model))
    learn = synth_learner(model=Open(), lr=.1)

    with pytest.warns(UserWarning, match='not trained.* base.weight, base.bias;'): learn.fit(2, cbs=swap)
    before = weights(learn)
    with pytest.warns(UserWarning, match='made anew'): learn.fit(1)

    assert moved(learn.model.parameters(), before) == [True]*4

class Nested(nn.Module):
    "Modules in modules, in torch's containers, and None"
    def __init__(self):
        super().__init__()
        self.none = None
        self.layers = nn.ModuleList([nn.Linear(1, 1), nn.ModuleDict({'a': net(), 'b': nn.ModuleList([nn.Dropout()])})])
        self.scales = nn.ParameterList([torch.ones(1), nn.ParameterDict({'c': torch.zeros(1)})])
        self.register_module('gone', None)

    def forward(self, x):
        first, rest = self.layers
        return rest['b'][0](rest['a'](first(x)))*self.scales[0] + self.scales[1]['c']

def test_n27_nested_modules(tmp_path):
    "All of a nested model is trained, switched, saved and put back"
    learn, other = (synth_learner(model=Nested(), lr=.1, path=tmp_path) for _ in range(2))
    learn.model.layers[1]['b'].eval()
    before, flags = weights(learn), [m.training for m in learn.model.modules()]

    with pytest.warns(UserWarning, match='left so while training: layers.1.b;'): learn.fit(2)
    other.load(learn.save('m'))
    after = weights(learn)
    learn.lr_find(**find)

    assert all(moved(learn.model.parameters(), before)) and [m.training for m in learn.model.modules()] == flags
    assert equal(after, weights(learn)) and equal(after, weights(other))


# ---- N15: torch.compile

def before_learner(make): return synth_learner(model=compiled(make()), lr=.1)
def after_learner(make):
    learn = synth_learner(model=make(), lr=.1)
    learn.create_opt()
    learn.model = compiled(learn.model)
    return learn
def in_place(make):
    learn = synth_learner(model=make(), lr=.1)
    learn.model.compile(backend='eager')
    return learn

@pytest.mark.parametrize('how', [before_learner, after_learner, in_place])
def test_n15_a_compiled_model(how):
    "However it is compiled: modes reach the inner model and come back, and the inner model's parameters are trained"
    made, modes = [], []
    def make():
        torch.manual_seed(3)
        made.append(net())
        return made[-1]
    learn, plain = how(make), synth_learner(model=make(), lr=.1)
    inner = made[0]
    inner[1].eval()
    plain.model[1].eval()
    learn.add_cb(Callback(after_pred=lambda cb: modes.append((cb.training, inner[0].training, inner[1].training))))

    for one in (learn, plain):
        with pytest.warns(UserWarning, match='left so while training'): one.fit(1)

    assert {*modes} == {(True, True, False), (False, False, False)} and inner[0].training and not inner[1].training
    assert all(p is q for p, q in zip(learn.opt.all_params(), inner.parameters(), strict=True))
    assert equal(inner.state_dict(), plain.model.state_dict())


# ---- N19: errors in the forward

class Fails(RegModel):
    "Fails in its `at`-th batch"
    at = n = 0
    def forward(self, x):
        self.n += 1
        if self.n == self.at: raise ValueError('in the forward')
        return super().forward(x)

@pytest.mark.parametrize('at,when', [(2, 'training'), (3, 'validation')])
def test_n19_a_forward_that_fails(at, when):
    "Hooks that are always called are, the Learner is as between two fits, and the next fit is what it would have been"
    calls = []
    learn, fresh = (synth_learner(model=Fails(), lr=.1) for _ in range(2))
    start = {k: v.clone() for k, v in learn.model.state_dict().items()}
    fresh.model.load_state_dict(start)
    learn.model.register_forward_hook(lambda *args: calls.append(1), always_call=True)
    learn.model.at = at

    with pytest.raises(ValueError, match='in the forward') as e: learn.fit(1)

    assert len(calls) == at and 'raised by the model with inputs (float32[8, 1],)' in e.value.__notes__[0]
    assert (learn.pred, learn.loss, learn.loss_grad, learn.xb, learn.dl, learn.run_kind) == (None,)*3 + ((), None, '')
    assert not learn.training and learn.model.training and learn._scope is None and torch.is_grad_enabled()
    learn.model.load_state_dict(start)
    learn.fit(2, reset_opt=True)
    fresh.fit(2)
    assert equal(weights(learn), weights(fresh))


# ---- N25: what goes in and comes out

x, y = next(iter(synth_dls(1, 0)[0]))
Pair = namedtuple('Pair', 'out extra')

@dataclass
class Out:
    out: torch.Tensor
    loss: torch.Tensor|None = None

class Forward(RegModel):
    "Calls the function it is given with what `forward` gives"
    def __init__(self, back): super().__init__(); self.back = back
    def forward(self, x): return self.back(super().forward(x))

class Two(RegModel):
    def forward(self, x, other, *rest, scale=1.): return super().forward(x+other)*scale + sum(rest)
class ByName(RegModel):
    def forward(self, *, first, second=0., **kwargs): return super().forward(first+second)
class OneDict(RegModel):
    def forward(self, inputs): return super().forward(inputs['first'])
class OwnLoss(RegModel):
    def forward(self, first, labels=None):
        pred = super().forward(first)
        return {'out': pred} if labels is None else {'out': pred, 'loss': F.mse_loss(pred, labels)}

def out_loss(pred, y): return F.mse_loss(pred.out, y)

signatures = {  # name: (model, batch, loss)
    'two inputs': (Two, (x, x, y), F.mse_loss), 'more inputs': (Two, (x, x, x, x, y), F.mse_loss),
    'by name': (ByName, {'first': x, 'second': x, 'labels': y}, F.mse_loss),
    'more by name': (ByName, {'first': x, 'odd': x, 'labels': y}, F.mse_loss),
    'one dict': (OneDict, ({'first': x}, y), F.mse_loss),
    'tuple': (lambda: Forward(lambda p: (p, [p])), (x, y), lambda pred, y: F.mse_loss(pred[1][0], y)),
    'dict': (lambda: Forward(lambda p: {'out': p}), (x, y), lambda pred, y: F.mse_loss(pred['out'], y)),
    'named tuple': (lambda: Forward(lambda p: Pair(p, None)), (x, y), out_loss),
    'dataclass': (lambda: Forward(Out), (x, y), out_loss),
    'own loss': (OwnLoss, {'first': x, 'labels': y}, None),
    'own loss in a dataclass': (lambda: Forward(lambda p: Out(p, (p-y).abs().mean())), (x,), None),
    'no target': (RegModel, (x,), lambda pred: pred.pow(2).mean()),
    'bare tensor': (RegModel, x, lambda pred: pred.pow(2).mean()),
    'two targets': (RegModel, (x, y, y), lambda pred, a, b: F.mse_loss(pred, a+b))}

@pytest.mark.parametrize('name', signatures)
def test_n25_any_signature(name):
    "Whatever the model takes and returns, it is trained, validated and swept"
    make, batch, loss = signatures[name]
    learn = synth_learner(model=make(), dls=DataLoaders([batch]*2, [batch]), loss_func=loss, lr=.1,
                          n_inp=1 if name == 'two targets' else None)
    before = weights(learn)

    learn.fit(1)
    learn.lr_find(**find)

    assert all(moved(learn.model.parameters(), before)) and learn.validate()['valid_loss'] > 0


# ---- N30: gradients of all kinds

class Odd(nn.Module):
    "A sparse embedding, a complex parameter, and a layer that is not used"
    def __init__(self, sparse=False, kind=torch.complex64):
        super().__init__()
        self.emb, self.unused = nn.Embedding(4, 1, sparse=sparse), nn.Linear(1, 1)
        self.w = nn.Parameter(torch.ones(1, dtype=kind))

    def forward(self, x):
        z = x*self.w
        return (z*(1+1j)).real + self.emb((x > 0).long()[:, 0])

@pytest.mark.parametrize('clip', [None, partial(GradientClip, .1), partial(GradientClip, .1, float('inf'))])
@pytest.mark.parametrize('opt_func,sparse', [
    (Adam, False), (SGD, False), (partial(torch.optim.SGD, momentum=.9), False), (torch.optim.RMSprop, False),
    (SGD, True), (torch.optim.SGD, True), (partial(SGD, mom=.9), True)])
def test_n30_odd_gradients(opt_func, sparse, clip):
    "Missing, sparse and complex gradients are stepped and clipped; what has none stays, also under weight decay"
    wd = {} if sparse else dict(wd=.1, wd_bn_bias=True)
    learn = synth_learner(clip and clip(), model=Odd(sparse, torch.float32 if sparse else torch.complex64), lr=.1,
                          opt_func=opt_func, **wd)
    before = weights(learn)

    learn.fit(2)
    learn.lr_find(**find)

    assert dict(zip(dict(learn.model.named_parameters()), moved(learn.model.parameters(), before))) == {
        'w': True, 'emb.weight': True, 'unused.weight': False, 'unused.bias': False}
