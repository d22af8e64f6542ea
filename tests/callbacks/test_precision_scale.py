"""The scale of fp16: steps that are left out, what looks at gradients, and that a fit which was stopped goes on."""
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from learner.callback import Callback
from learner.callbacks.averaging import EMA
from learner.callbacks.checkpoint import Checkpoint
from learner.callbacks.precision import MixedPrecision
from learner.callbacks.schedule import ParamScheduler
from learner.callbacks.torch_schedule import TorchScheduler
from learner.callbacks.training import GradientAccumulation, GradientClip
from learner.events import CancelStepException
from learner.schedules import SchedLin
from tests.helpers import synth_learner, weights
from tests.loader_helpers import equal
from tests.resume_helpers import AskAt, noisy_learner, record

no_step = pytest.mark.filterwarnings('ignore:MixedPrecision.*inf or nan')


class Overflows(Callback):
    "Makes the gradients of the `n`-th training batches inf"
    def __init__(self, *ns): self.ns = ns

    def after_backward(self):
        if self.train_iter in self.ns: next(self.model.parameters()).grad.fill_(torch.inf)


def scaled(**kwargs: Any): return MixedPrecision('fp16', **{'init_scale': 64., **kwargs})


# ---- steps that are left out

def test_nothing_moves_at_a_skipped_step():
    "S34: neither weights, optimizer, schedule, step counter nor EMA move; it is counted, and said once"
    rates, counts = [], []
    def values(learn): return [p.item() for p in learn.model.parameters()]
    def count(cb): counts.append((cb.learn.n_step, cb.learn.stepped, cb.ema.n_averaged, *values(cb.learn)))
    look = Callback(before_backward=lambda cb: rates.append(cb.opt.hypers[0]['lr']), after_batch=count)
    look.run_valid = False
    learn = synth_learner([scaled(), EMA(), Overflows(0), look], n=4, lr=.1)
    start = 0, False, 0, *values(learn)

    with pytest.warns(UserWarning, match='no step in epoch 0, batch 0, since .* inf or nan; the scale is 32') as told:
        learn.fit(1, cbs=ParamScheduler({'lr': SchedLin(.4, .1)}), n_steps=3)

    assert counts[0] == start and [c[:3] for c in counts[1:]] == [(1, True, 1), (2, True, 2), (3, True, 3)]
    assert learn.mixed_precision.skipped == 1 and len(told) == 1
    assert learn.opt.opt.state[learn.model.a]['step'] == 3 and rates[0] == rates[1] > rates[2] > rates[3]

def test_torch_scheduler_does_not_complain():
    "S34: a scheduler of torch's does not step before the optimizer, and torch does not warn that it did"
    sched = TorchScheduler(lambda opt: torch.optim.lr_scheduler.StepLR(opt, 1, .5), by='step')
    learn = synth_learner([scaled(), Overflows(0), sched], n=3, lr=.1)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        learn.fit(1)

    assert [str(w.message)[:14] for w in told] == ['MixedPrecision'] and learn.n_step == 2

def test_how_often_is_said_at_the_end():
    "One warning at the first, one at the end with the number; the count is that of the fit"
    learn = synth_learner([scaled(), Overflows(0, 2, 3)], n=5)

    with pytest.warns(UserWarning) as told: learn.fit(1)

    assert [str(w.message).split(':')[1][:16] for w in told] == [' no step in epoc', ' 3 steps of this']
    assert learn.mixed_precision.skipped == 3 and learn.n_step == 2
    learn.remove_cb(Overflows)
    learn.fit(1)
    assert learn.mixed_precision.skipped == 0

def test_scale_changes_as_torch_changes_it():
    "It doubles after `growth_interval` steps, falls by `backoff_factor`, and is kept from fit to fit"
    scales = []
    look = Callback(after_batch=lambda cb: scales.append(cb.mixed_precision.scaler.get_scale()))
    look.run_valid = False
    learn = synth_learner([scaled(growth_interval=2, growth_factor=4., backoff_factor=.25), Overflows(2), look], n=3)

    with pytest.warns(UserWarning, match='no step'): learn.fit(1)
    with pytest.warns(UserWarning, match='no step'): learn.fit(1)

    assert scales == [64, 256, 64, 64, 256, 64]

def test_no_gradient_at_all():
    "Where no parameter has a gradient there is nothing to scale: the loop's own warning is what is seen"
    learn = synth_learner([scaled(), Callback(before_step=lambda cb: cb.learn.opt.zero_grad())])
    learn.cbs[-1].order = -5

    with pytest.warns(UserWarning, match='the first step changes nothing') as told: learn.fit(1)

    assert len(told) == 1

def test_step_that_another_cancels():
    "What comes later can cancel a step that was unscaled already; the next one is scaled as ever"
    def cancel(cb):
        if cb.iter == 1: raise CancelStepException
    learn = synth_learner([scaled(), Callback(before_step=cancel)], n=4)
    learn.cbs[-1].order = 30

    learn.fit(1)

    assert learn.n_step == 3 and learn.mixed_precision.skipped == 0


# ---- what looks at gradients

def seen_by_step(cbs, init_scale):
    "Gradients at the first step, after all callbacks, and as a callback at 10.5 sees them"
    seen = []
    def look(cb): seen.append([p.grad.clone() for p in cb.model.parameters()])
    early, late = Callback(before_step=look), Callback(before_step=look)
    early.order, late.order = 10.5, 40
    learn = synth_learner([scaled(init_scale=init_scale), *cbs, early, late], n=1, n_valid=0)
    learn.fit(1)
    return seen, learn

def test_clipping_sees_true_gradients():
    "GradientClip, and whatever looks at gradients of a step, gets them unscaled: the same with any scale"
    (before, after), learn = seen_by_step([GradientClip(.5)], 1.)
    (before_64, after_64), learn_64 = seen_by_step([GradientClip(.5)], 64.)

    assert all(map(torch.equal, before, before_64)) and all(map(torch.equal, after, after_64))
    assert torch.stack(after).norm() == pytest.approx(.5) and torch.stack(before).norm() > .5
    assert learn.gradient_clip.grad_norms == learn_64.gradient_clip.grad_norms

def accumulated(bs, cbs, x, y):
    torch.manual_seed(0)
    learn = synth_learner(cbs, dls=(DataLoader(TensorDataset(x, y), bs), None), lr=.1, opt_func=torch.optim.SGD,
                          model=nn.Linear(1, 1))
    looks = []
    learn.add_cb(Callback(before_step=lambda cb: looks.append([p.grad.clone() for p in cb.opt.opts])), order=40)
    learn.fit(2)
    return weights(learn), looks

def test_accumulation_unscales_once_a_window():
    "Several batches with one step are, but for rounding, one big batch: the scale is taken out once"
    x = torch.randn(20, 1, generator=torch.Generator().manual_seed(0))
    whole, big = accumulated(20, scaled(), x, 2*x)

    parts, small = accumulated(8, [scaled(), GradientAccumulation(20)], x, 2*x)

    assert len(big) == len(small) == 2
    for a, b in zip([*whole, *big[0], *big[1]], [*parts, *small[0], *small[1]]): assert torch.allclose(a, b, 2e-2, 1e-3)

@no_step
def test_overflow_in_a_window():
    "A batch whose gradients overflow spoils its window, and no other; nothing of it stays"
    learn = synth_learner([scaled(), GradientAccumulation(2, 'batches'), Overflows(1)], n=6, n_valid=0)

    learn.fit(1)

    assert learn.n_step == 2 and learn.mixed_precision.skipped == 1
    assert all(p.isfinite().all() and p.grad is None for p in learn.model.parameters())


# ---- files, the finder, other processes

def test_state_is_kept():
    "The scale is part of the Learner's state and of its hash, also before the first fit of another Learner"
    learn, other = synth_learner(scaled(growth_interval=2), n=3), synth_learner(scaled(growth_interval=2), n=3)
    learn.fit(1)

    other.load_state_dict(learn.state_dict())

    assert other.mixed_precision.state_dict() == dict(scale=128., since=1, skipped=0)
    assert other.state_hash() == learn.state_hash()
    learn.mixed_precision.scaler.update(256.)
    assert other.state_hash() != learn.state_hash()

def test_bf16_has_no_state():
    "bf16 needs no scale, and takes no notice of one in a file"
    learn, other = synth_learner(scaled()), synth_learner().to_bf16()
    learn.fit(1)

    other.load_state_dict(learn.state_dict())

    assert other.mixed_precision.state_dict() == {} and other.mixed_precision.scaler is None

@no_step
@pytest.mark.parametrize('at', [3, 10])
@pytest.mark.parametrize('accumulates', [False, True])
def test_resuming_is_exact(tmp_path, accumulates, at):
    "A fit that was stopped goes on bit for bit in another process, in the midst of an epoch or a window too"
    def make(name):
        cbs = [MixedPrecision('fp16', growth_interval=3), *[GradientAccumulation(2, 'batches')]*accumulates]
        return noisy_learner(tmp_path/name, cbs=cbs)
    whole = make('whole')
    whole.fit(3, 1e-2)

    here = make('here')
    with pytest.raises(KeyboardInterrupt): here.fit(3, 1e-2, cbs=[Checkpoint(), AskAt(at)])
    there = make('here')
    there.fit(3, 1e-2, cbs=Checkpoint(), resume=True)
    here.resume()

    assert whole.final_hash == here.final_hash == there.final_hash
    assert record(whole) == record(here) == record(there) and there.mixed_precision.skipped

@no_step
def test_lr_find_leaves_no_trace():
    "The finder works in mixed precision, with a scale of its own, and everything is as before"
    def make():
        torch.manual_seed(0)
        learn = synth_learner(MixedPrecision('fp16'), n=4, model=nn.Linear(1, 1))
        learn.fit(1)
        return learn
    learn, other = make(), make()
    before = learn.state_hash()

    learn.lr_find(num_it=20, stop_div=False, show_plot=False, suggest_funcs=None)

    assert learn.state_hash() == before and learn.forward_context is None
    learn.fit(1)
    other.fit(1)
    assert equal(weights(learn), weights(other))
