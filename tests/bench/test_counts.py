"""What the loop adds to a hand-written one, counted: calls, waits for the device, imported modules.

Counts are the same on every machine, so they can be asserted; run.py measures times."""
import math
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from torch.optim import SGD
from torch.overrides import TorchFunctionMode

from learner import (EMA, SWA, ActivationStats, ChannelsLast, CollectDataCallback, GradientAccumulation, GradientClip,
                     GradientStats, Learner, MixedPrecision, MixUp, ShortEpochCallback, TerminateOnNaNCallback,
                     TimeLimit, Timer)
from learner.callback import Callback
from learner.callbacks import progress
from learner.callbacks.recorder import Recorder
from learner.display import set_display
from learner.metrics import accuracy, mse
from tests.bench.work import (by_hand, calls_per_batch, cross_entropy, image_loader, image_net, mse_loss, ready_batches,
                              small_net)


@pytest.fixture(autouse=True)
def frozen_bar(monkeypatch):
    "A terminal's bar, shown when a phase begins and not due again, as between two refreshes"
    monkeypatch.setattr(progress, 'perf_counter', lambda: 0.)
    set_display('terminal')
    yield
    set_display('auto')


# ---- calls

def small_learner(k, cbs=None):  # on `k` batches
    return Learner((ready_batches(k), None), small_net(), mse_loss, SGD, lr=1e-3, cbs=cbs)


def learner_fit(k, cbs=None):
    learn = small_learner(k, cbs)
    return lambda: learn.fit(1)


def hand_fit(k):  # the same
    model, batches = small_net(), ready_batches(k)
    opt = SGD(model.parameters(), lr=1e-3)
    return lambda: by_hand(model, opt, mse_loss, batches)


def hand_fit_with_our_opt(k):
    learn, batches = small_learner(k), ready_batches(k)
    opt = learn.create_opt()
    return lambda: by_hand(learn.model, opt, mse_loss, batches)


def test_loop_stays_thin():
    "With default callbacks at most 60 calls a batch are added to a hand-written loop with the same torch SGD (-24 now)"
    assert calls_per_batch(learner_fit)-calls_per_batch(hand_fit) <= 60


def test_loop_is_thin_by_itself():
    "So it is also without what `learn.opt` saves in a step and in dropping gradients (39 now)"
    assert 0 < calls_per_batch(learner_fit)-calls_per_batch(hand_fit_with_our_opt) <= 60


class Helpful(Callback):
    def batch_size(self): return len(self.xb[0])

class AroundFit(Callback):
    def before_fit(self): self.n = 0
    def after_fit(self): self.n += 1
    def cleanup_fit(self): del self.n

class AroundPhases(Callback):
    def before_epoch(self): pass
    def before_train(self): pass
    def cleanup_train(self): pass
    def after_validate(self): pass

class InLRFind(Callback):
    run_in = {'lr_find'}
    def before_batch(self): raise AssertionError
    def after_batch(self): raise AssertionError

class AfterCancel(Callback):
    def after_cancel_batch(self): raise AssertionError


@pytest.mark.parametrize('cls', [Callback, Helpful, AroundFit, AroundPhases, InLRFind, AfterCancel])
def test_idle_callback_costs_nothing(cls):
    "A callback that has nothing to do in a training batch adds no call to it"
    assert calls_per_batch(learner_fit, [cls, cls]) == calls_per_batch(learner_fit)


techniques = {  # calls that each adds to a batch, now, and nearly
    GradientAccumulation: (33, partial(GradientAccumulation, 1, 'batches')), GradientClip: (144, GradientClip),
    EMA: (23, EMA), SWA: (3, SWA), MixUp: (128, MixUp), MixedPrecision: (94, partial(MixedPrecision, 'bf16')),
    TerminateOnNaNCallback: (113, TerminateOnNaNCallback), ShortEpochCallback: (1, partial(ShortEpochCallback, 1.)),
    TimeLimit: (4, partial(TimeLimit, '1h')), Timer: (45, Timer), ChannelsLast: (18, ChannelsLast),
    CollectDataCallback: (73, CollectDataCallback), ActivationStats: (77, partial(ActivationStats, every=10)),
    GradientStats: (38, partial(GradientStats, every=10))}

@pytest.mark.parametrize('cls', techniques, ids=lambda cls: cls.__name__)
def test_a_technique_costs_what_it_did(cls):
    "The calls that it adds to a batch of the smallest network, most of which torch makes for it; a tenth is let pass"
    n, make = techniques[cls]

    assert calls_per_batch(lambda k: learner_fit(k, make()))-calls_per_batch(learner_fit) <= 1.1*n+2


# ---- waits for the device

def t(): return torch.ones(())
def v(): return torch.arange(3.)


waiting = dict(  # an example of each operation that is noted, by the name that torch has for it
    item=lambda: t().item(), tolist=lambda: v().tolist(), cpu=lambda: v().cpu(), numpy=lambda: v().numpy(),
    to=lambda: v().to('cpu'), copy_=lambda: v().copy_(v()),
    tensor=lambda: torch.tensor(1.), as_tensor=lambda: torch.as_tensor([1.]), new_tensor=lambda: v().new_tensor([1.]),
    nonzero=lambda: v().nonzero(), argwhere=lambda: torch.argwhere(v()), where=lambda: torch.where(v() > 0),
    masked_select=lambda: v().masked_select(v() > 0), unique=lambda: v().unique(),
    unique_consecutive=lambda: v().unique_consecutive(), bincount=lambda: v().long().bincount(),
    repeat_interleave=lambda: v().repeat_interleave(v().long()),
    equal=lambda: torch.equal(v(), v()), allclose=lambda: v().allclose(v()), is_nonzero=lambda: t().is_nonzero(),
    __bool__=lambda: bool(t()), __int__=lambda: int(t()), __float__=lambda: float(t()),
    __complex__=lambda: complex(t()), __index__=lambda: [1, 2, 3][t().long()],
    __format__=lambda: f'{t():.2f}', __repr__=lambda: str(t()),
    __contains__=lambda: 1. in v(), __array__=lambda: np.asarray(v()),
    __getitem__=lambda: v()[torch.ones(3) > 0], __setitem__=lambda: v().__setitem__(torch.ones(3) > 0, 1.),
    index_put_=lambda: v().index_put_((torch.ones(3) > 0,), t()))


def is_mask(i):
    "Does indexing with `i` have to look at values?"
    if isinstance(i, torch.Tensor): return i.dtype in (torch.bool, torch.uint8)
    if isinstance(i, slice): return any(isinstance(o, torch.Tensor) for o in (i.start, i.stop, i.step))
    return isinstance(i, (tuple, list)) and any(map(is_mask, i))


class Waits(TorchFunctionMode):
    "Notes the operations for which a program would wait for a GPU, were the tensors there"
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, rest, kwargs = func.__name__, args[1:], kwargs or {}
        harmless = (name in ('__getitem__', '__setitem__', 'index_put_') and not is_mask(rest[0]) or
                    name == 'to' and isinstance([*rest, *kwargs.values()][0], torch.dtype) or  # a type, no device
                    name == 'where' and rest)
        if name in waiting and not harmless: self.seen.append(name)
        return func(*args, **kwargs)


def waits(run):
    "Names of the operations of `run()` that wait"
    with Waits() as mode: run()
    return mode.seen


others = [  # the same operations, asked for in other ways
    ('to', lambda x: x.to(x)), ('to', lambda x: x.to(device='cpu')),
    ('__bool__', lambda x: x[0] == x[1] or 1), ('__bool__', max), ('__index__', lambda x: range(x[0].int())),
    ('__format__', lambda x: f'{x[0]}'), ('__float__', lambda x: math.isnan(x[0])), ('nonzero', torch.nonzero),
    ('__getitem__', lambda x: x[None, x > 0]), ('__getitem__', lambda x: x[:x[2].int()])]
none = [  # nothing has to be known of the values
    lambda x: x[1:, None], lambda x: x[x.long()], lambda x: x.to(torch.float64).mean(), lambda x: x.detach().clone(),
    lambda x: torch.where(x > 0, x, 0.), lambda x: [*x], lambda x: len(x)]


@pytest.mark.parametrize('name', waiting)
def test_operation_that_waits_is_seen(name):
    "The counter notes each operation that waits"
    assert waits(waiting[name]) == [name]


@pytest.mark.parametrize('name, use', others)
def test_operation_is_seen_in_every_form(name, use):
    "The counter notes it whatever leads to it"
    assert name in waits(partial(use, v()))


@pytest.mark.parametrize('use', none)
def test_work_on_the_device_is_not_seen(use):
    "The counter notes nothing that goes on without the values"
    assert waits(partial(use, v())) == []


works = dict(ready=(ready_batches, small_net, mse_loss, mse),
             images=(image_loader, image_net, cross_entropy, accuracy))



def fit_waits(work, n_train, n_valid, cbs=None):
    "What waits in a fit with default callbacks and our Adam, on so many batches"
    loader, net, loss_func, metric = works[work]
    learn = Learner((loader(n_train), loader(n_valid)), net(), loss_func, metrics=metric, cbs=cbs)
    return waits(lambda: learn.fit(1))


@pytest.mark.parametrize('work', works)
@pytest.mark.parametrize('train_metrics', [False, True])
def test_training_batch_waits_for_nothing(work, train_metrics):
    "However many batches an epoch has, a fit waits equally often: never in a batch, also if it computes metrics there"
    def fit(n): return fit_waits(work, n, 1, Recorder(train_metrics=train_metrics))
    assert fit(12) == fit(4)


@pytest.mark.parametrize('work', works)
def test_validation_batch_waits_for_nothing(work):
    "A validation waits equally often, however many batches it has"
    assert fit_waits(work, 1, 12) == fit_waits(work, 1, 4)


def test_epoch_waits_for_its_results():
    "An epoch on ready batches reads three things: all training losses, all validation losses, and the metric"
    assert fit_waits('ready', 4, 4) == ['tolist', 'tolist', '__float__']


def test_reading_in_a_batch_is_seen():
    "The counter is at work within a fit: a callback that reads the loss of each batch is noted each time"
    reader = Callback(after_batch=lambda cb: cb.loss.item())
    assert fit_waits('ready', 4, 2, reader).count('item') == 6


# ---- imports

def test_import_is_light():
    "`import learner` loads itself and fastcore, beside what torch has loaded: no matplotlib, pandas, IPython"
    code = ("import sys, torch; old = {*sys.modules}; import learner; "
            "print(*sorted({m.partition('.')[0] for m in {*sys.modules}-old}-sys.stdlib_module_names))")

    new = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout.split()

    assert new == ['fastcore', 'learner']
