"""ParamScheduler: hyper-parameters that change while training, and the fits that are named after their schedules.

The schedules themselves are pure functions (schedules.py). What is counted is the optimizer's steps, `learn.n_step`."""
import math
import re
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral
from operator import attrgetter
from typing import Any

import numpy as np
from fastcore.basics import patch
from fastcore.foundation import L

from ..callback import Callback
from ..frame import current_opt
from ..learner import Learner
from ..schedules import combined_cos, cos_restarts
from ..utils import warn

__all__ = ['Scheduler', 'ParamScheduler', 'steps_of', 'mom_sched']


def steps_of(
    when: Any,            # 0 to 1, a fraction of the fit; `'500it'` or `'2ep'`
    per_epoch: int|None,  # optimizer steps an epoch; None: unknown
    n_epoch: int,         # epochs of the fit
) -> int:
    """A place in a fit as a number of optimizer steps

    Raises: ValueError if it is none of these, or cannot be known without the length of an epoch."""
    text = re.fullmatch(r'(\d+)it|(\d+(?:\.\d+)?)ep', when) if isinstance(when, str) else None
    if text and text[1]: return int(text[1])
    if not text and not (isinstance(when, (int, float)) and 0 <= when <= 1): raise ValueError(
        f"{when!r} is no place in a fit: give a fraction from 0 to 1, '500it' (optimizer steps) or '2ep' (epochs)")
    if when == 0: return 0
    if per_epoch is None: raise ValueError("the training loader has no length, so the schedule cannot know how long an "
                                           "epoch is: `n_steps=…`, of every fit method, says how many steps it has")
    return round(float(text[2])*per_epoch if text else float(when)*per_epoch*n_epoch)


class Scheduler(Callback):
    """What changes hyper-parameters in the course of a fit

    Order: late, so that a batch which another callback cancels has not been counted."""
    order = 60
    run_valid = False
    run_in = {'fit'}

    def per_epoch(self) -> int|None:  # None if the loader has no length and the fit was given no `n_steps`
        "Optimizer steps that an epoch has"
        return self.n_steps or self.dls.train.n_batches

    def _steps_done(self) -> int:  # 0 at the start of a fit, but for the steps of skipped epochs
        """Optimizer steps that this fit should have made by now

        Raises: ValueError if that needs the length of an epoch, and it is unknown."""
        share = self.pct_train if self.train_iter else self.epoch and self.epoch/self.n_epoch
        return steps_of(share, self.per_epoch(), self.n_epoch)


class ParamScheduler(Scheduler):
    """Sets hyper-parameters before each step of the optimizer, as functions of how far the fit is

    Between `begin` and `end` each function gets: with `by='pos'` the position from 0 to 1, step `i` of `n` being at
    `i/(n-1)`, so that the last one is at 1; with `'step'` the number of the step, with `'epoch'` that of the epoch,
    both counted from `begin`. Outside nothing is set, and what was set last stays. Several ParamSchedulers work
    together: of those that set the same hyper-parameter the one that acted last counts, and factors multiply.
    After the fit the hyper-parameters are again what they were.
    Raises: ValueError or TypeError, at the latest at the start of a fit, saying what does not fit."""
    state = ('first', 'set_to', 'scaled_by', 'acted_at')
    first = 0                  # value of `learn.n_step` at the fit's very first step
    acted_at = -1              # the step at which this one acted last
    step_i = -1                # the step whose values are set now
    start: Any = None          # the hyper-parameters before the fit, by name
    peers: Any = ()            # all ParamSchedulers of the fit, in order; the last one writes what they have made of it
    written: Any = None        # what it has written, by name
    reading: Any = None        # and what the optimizer then had
    said = cancelled = _to_end = False

    def __init__(self,
        scheds: Mapping[str, Callable]|None = None,   # a function of `by` for each hyper-parameter: its value
        factors: Mapping[str, Callable]|None = None,  # likewise, but what it is multiplied with
        by: str = 'pos',                   # what the functions get: 'pos', 'step' or 'epoch'
        begin: float|str = 0,              # where in the fit: 0 to 1, '500it' or '2ep'
        end: float|str = 1,                # where it ends; that step is the first one outside
        groups: Iterable[int]|None = None,  # numbers of the parameter groups to be set; None: all
    ):
        self.scheds, self.factors = dict(scheds or {}), dict(factors or {})
        self.by, self.begin, self.end = by, begin, end
        self.only = None if groups is None else list(groups)
        self.set_to, self.scaled_by = {}, {}  # the last value, and the last factor, of each: one for each group
        if by not in ('pos', 'step', 'epoch'): raise ValueError(f"by={by!r}: give 'pos', 'step' or 'epoch'")
        if not (self.scheds or self.factors): raise ValueError("ParamScheduler needs `scheds`: {'lr': SchedCos(…)}")
        if self.only == []: raise ValueError("ParamScheduler: `groups` is empty; None sets all groups")
        for name, f in [*self.scheds.items(), *self.factors.items()]:
            if not callable(f): raise TypeError(f"ParamScheduler: `{name}` is a `{type(f).__name__}`, not a function")

    def before_fit(self):
        self.step_i, self.acted_at, self.reading, self.said, self.cancelled = -1, -1, None, False, False
        self.set_to, self.scaled_by, n = {}, {}, self.per_epoch()
        self.begins = steps_of(self.begin, n, self.n_epoch)
        self.ends = math.inf if self.end == 1 and self.by != 'pos' else steps_of(self.end, n, self.n_epoch)
        self._to_end = n is not None and self.ends == steps_of(1, n, self.n_epoch)
        if self.n_epoch and self.begins >= self.ends: raise ValueError(
            f"{self}: from step {self.begins} on and until step {self.ends} there is no step in this fit")
        old = [cb for cb in self.learn.ordered if isinstance(cb, ParamScheduler) and cb is not self and cb.start]
        self.first = old[0].first if old else self.learn.n_step-self._steps_done()
        self.start = old[0].start if old else {n: [h[n] for h in self.opt.hypers] for n in self.opt.places}
        peers = [cb for cb in self.learn.ordered if isinstance(cb, ParamScheduler) and cb.start]
        for cb in peers: cb.peers = peers
        self._check()

    def _check(self):  # before training, not at the step where it would go wrong
        n = len(self.opt.hypers)
        if odd := [g for g in self.only or () if not 0 <= g < n]: raise ValueError(
            f"{self}: there is no group {odd[0]}:\n{self.opt}")
        for name, f in [*self.scheds.items(), *self.factors.items()]:
            if name not in self.opt.places: raise ValueError(
                f"{self}: this {type(self.opt.opt).__name__} has no `{name}` to schedule, only "
                f"{', '.join(self.opt.places)}" + ("; give it a momentum when it is made, as in partial(SGD, mom=0.9)"
                                                   if name == 'mom' else ''))
            for x in (0., 1.) if self.by == 'pos' else (0,): self._each(name, f(x))

    def _each(self, name, value):  # one number for each group
        n = len(self.learn.opt.hypers)
        values = [value]*n if type(value) is float else np.ravel(value).tolist()
        if not np.ndim(value) and len(values) == 1: values *= n
        if len(values) != n: raise ValueError(f"{self}: {len(values)} values of `{name}` for {n} groups:\n{self.opt}")
        if bad := [v for v in values if not 0 <= v < math.inf]:
            raise ValueError(f"{self}: `{name}` would be {bad[0]}; it must be 0 or more")
        return values

    def before_batch(self):
        i = self.learn.n_step-self.first
        if i == self.step_i: return  # no step since, as while gradients are accumulated
        self.step_i = i
        last = i if i < self.ends else self.ends-1  # the end of one that was over before the fit, or this one, began
        if self.begins <= last != self.acted_at:
            x, self.acted_at = self._x(last), last
            for name, f in self.scheds.items(): self.set_to[name] = self._each(name, f(x))
            for name, f in self.factors.items(): self.scaled_by[name] = self._each(name, f(x))
        if i == self.ends and self._to_end: warn(
            f"{self}: was made for {i} steps, and the fit goes on: it stays at the end; `n_steps=…` says how many "
            "steps an epoch has")
        if self.peers[-1] is self: self._write()

    def _x(self, i):
        if self.by == 'pos': return (i-self.begins)/max(1, self.ends-1-self.begins)  # the last one is at 1
        if self.by == 'step': return i-self.begins
        n, epoch = self.per_epoch(), self.epoch
        return (epoch if i == self.step_i else i//n) - self.begins//n if n else epoch

    def _write(self):  # what all of them together have made of it
        opt, peers, now = self.learn.opt, self.peers, {}
        if self.reading is not None and opt.read() is not self.reading: self._tell_lost()
        for cb in sorted(peers, key=attrgetter('acted_at')):
            for name, values in cb.set_to.items(): now[name] = cb._merged(now.get(name) or self.start[name], values)
        for cb in peers:
            for name, values in cb.scaled_by.items():
                old = now.get(name) or self.start[name]
                now[name] = cb._merged(old, [v*f for v, f in zip(old, values)])
        for name, values in now.items():
            for h, v in zip(opt.hypers, values): h[name] = v
        self.written, self.reading = now, opt.read()

    def _merged(self, old, new):  # of the groups that this one is for, the new values
        return new if self.only is None else [new[k] if k in self.only else v for k, v in enumerate(old)]

    def _tell_lost(self):  # somebody else has set what is about to be overwritten
        for name, values in self.written.items():
            now = [h[name] for h in self.opt.hypers]
            if self.said or np.allclose(now, values, rtol=1e-6, atol=0): continue  # a multiplier may round
            self.said = True
            warn(f"`{name}` was set to {now} while {self} schedules it: that is overwritten, and so lost")

    def after_cancel_fit(self): self.cancelled = True

    def after_fit(self):
        if self.cancelled or not self._to_end: return
        done, n = self.learn.n_step-self.first, self.ends
        if done < .9*n: warn(  # .9: steps that a loss scaler skips are no fault of the plan
            f"{self}: was made for {n} steps, but the fit took {done}, so its end was not reached; `n_steps=…` says "
            "how many steps an epoch has")

    def cleanup_fit(self):
        if self.start is None: return  # an error came before
        for name in {*self.set_to, *self.scaled_by}:
            for h, v in zip(self.opt.hypers, self.start[name]): h[name] = v
        peers = [cb for cb in self.peers if cb is not self]
        for cb in peers: cb.peers, cb.reading, cb.step_i = peers, None, -1  # they set theirs again, if the fit goes on
        self.start, self.peers = None, ()

    def __repr__(self) -> str: return f"ParamScheduler({', '.join([*self.scheds, *self.factors])})"


# ---- the fits

def mom_sched(
    learn: Learner,
    pct: float,         # share of the steps until the middle, 0 to 1
    moms: tuple|None,   # at start, middle and end; None: the Learner's own, which are for optimizers that have one
) -> dict[str, Callable]:
    """The schedule of the momentum, by name; empty where there is none, and none was asked for

    Raises: ValueError if there are not three."""
    asked, moms = moms is not None, learn.moms if moms is None else moms
    if np.shape(moms) != (3,): raise ValueError(f"`moms` is {moms}: give it for the start, the middle and the end")
    if 'mom' in current_opt(learn).places or asked and any(moms): return {'mom': combined_cos(pct, *moms)}
    return {}


@patch
def fit_one_cycle(self: Learner,
    n_epoch: int,                           # epochs to train
    lr_max: float|slice|list|None = None,   # highest learning rate, also one per group; None: `self.lr`
    div: float = 25.,                       # it starts at `lr_max/div`
    div_final: float = 1e5,                 # the last step has `lr_max/div_final`
    pct_start: float = .25,                 # share of the steps in which it rises, 0 to 1
    wd: float|list|None = None,             # weight decay, for this fit only; None: `self.wd`
    moms: tuple|None = None,                # momentum at start, middle, end; None: `self.moms`, if there is momentum
    cbs: Any = None,                        # callbacks for this fit only
    reset_opt: bool = False,                # begin with a new optimizer
    start_epoch: int = 0,                   # skip the epochs before this one; the schedule begins where they end
    n_steps: int|None = None,               # optimizer steps an epoch; None: one a training batch
) -> None:
    """Fit with the learning rate rising along half a cosine and then falling along another, momentum the other way

    Raises: ValueError if `moms` are given and the optimizer has no momentum.
    Source: Smith 2018, "A disciplined approach to neural network hyper-parameters", arXiv 1803.09820."""
    sched = ParamScheduler(mom_sched(self, pct_start, moms), {'lr': combined_cos(pct_start, 1/div, 1., 1/div_final)})
    self.fit(n_epoch, lr_max, wd, L(cbs)+sched, reset_opt, start_epoch, n_steps)


@patch
def fit_flat_cos(self: Learner,
    n_epoch: int,                       # epochs to train
    lr: float|slice|list|None = None,   # learning rate, also one per group; None: `self.lr`
    div_final: float = 1e5,             # the last step has `lr/div_final`
    pct_start: float = .75,             # share of the steps in which it stays `lr`, 0 to 1
    wd: float|list|None = None,         # weight decay, for this fit only; None: `self.wd`
    cbs: Any = None,                    # callbacks for this fit only
    reset_opt: bool = False,            # begin with a new optimizer
    start_epoch: int = 0,               # skip the epochs before this one; the schedule begins where they end
    n_steps: int|None = None,           # optimizer steps an epoch; None: one a training batch
) -> None:
    "Fit with a constant learning rate that falls along half a cosine at the end"
    sched = ParamScheduler(factors={'lr': combined_cos(pct_start, 1., 1., 1/div_final)})
    self.fit(n_epoch, lr, wd, L(cbs)+sched, reset_opt, start_epoch, n_steps)


@patch
def fit_sgdr(self: Learner,
    n_cycles: int,                          # how often the learning rate starts anew
    cycle_len: int,                         # epochs of the first cycle
    lr_max: float|slice|list|None = None,   # learning rate at the start of each, also one per group; None: `self.lr`
    cycle_mult: int = 2,                    # each cycle is so many times as long as the one before
    cbs: Any = None,                        # callbacks for this fit only
    reset_opt: bool = False,                # begin with a new optimizer
    wd: float|list|None = None,             # weight decay, for this fit only; None: `self.wd`
    start_epoch: int = 0,                   # skip the epochs before this one; the schedule begins where they end
    n_steps: int|None = None,               # optimizer steps an epoch; None: one a training batch
) -> None:
    """Fit with the learning rate falling to 0 along half a cosine, again and again, for longer each time

    Raises: ValueError if a number of cycles or epochs is none.
    Source: Loshchilov and Hutter 2017, "SGDR: Stochastic Gradient Descent with Warm Restarts", arXiv 1608.03983."""
    for name, n in dict(n_cycles=n_cycles, cycle_len=cycle_len, cycle_mult=cycle_mult).items():
        if not isinstance(n, Integral) or n < 1: raise ValueError(f"fit_sgdr: `{name}` is {n!r}; give 1 or more")
    n_epoch = cycle_len*sum(cycle_mult**i for i in range(n_cycles))
    sched = ParamScheduler(factors={'lr': cos_restarts(1., 0., n_cycles, cycle_mult)})
    self.fit(n_epoch, lr_max, wd, L(cbs)+sched, reset_opt, start_epoch, n_steps)
