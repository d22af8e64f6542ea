"""ParamScheduler: hyper-parameters that change while training.

The schedules themselves are pure functions (schedules.py). What is counted is the optimizer's steps, `learn.n_step`."""
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Real
from operator import attrgetter
from typing import Any, NoReturn

import numpy as np
from fastcore.foundation import L

from ..callback import Callback
from ..display import say
from ..utils import warn

__all__ = ['Scheduler', 'ParamScheduler', 'steps_of', 'refuse_both']

limits = dict(mom=1., sqr_mom=1.)  # averages that forget nothing never come down


def steps_of(
    when: Any,            # 0 to 1, a fraction of the fit; `'500it'` or `'2ep'`
    per_epoch: int|None,  # optimizer steps an epoch; None: unknown
    n_epoch: int,         # epochs of the fit
    total: int|None = None,  # optimizer steps of the fit; None: `n_epoch` times `per_epoch`
) -> int:
    """A place in a fit as a number of optimizer steps

    Raises: ValueError if it is none of these, or cannot be known without the length of an epoch."""
    text = re.fullmatch(r'(\d+)it|(\d+(?:\.\d+)?)ep', when) if isinstance(when, str) else None
    if text and text[1]: return int(text[1])
    is_share = isinstance(when, Real) and not isinstance(when, bool) and 0 <= float(when) <= 1
    if not text and not is_share: raise ValueError(
        f"{when!r} is no place in a fit: give a fraction from 0 to 1, '500it' (optimizer steps) or '2ep' (epochs)")
    if when == 0: return 0
    if per_epoch is None and (text or total is None): raise ValueError(
        "the training loader has no length, so the schedule cannot know how long an epoch is: `n_steps=…`, of every "
        "fit method, says how many steps it has")
    total = (per_epoch or 0)*n_epoch if total is None else total
    return round(float(text[2])*(per_epoch or 0) if text else float(when)*total)


class Scheduler(Callback):
    """What changes hyper-parameters in the course of a fit; after it they are again what they were

    Order: late, so that a batch which another callback cancels has not been counted."""
    order = 60
    run_valid = False
    run_in = {'fit'}
    first = 0                    # value of `learn.n_step` at the fit's very first step
    start: Any = None            # the hyper-parameters before the fit, by name
    planned: Any = None          # steps of the fit by which it will have come to its end; None: it ends before
    cancelled = False

    def per_epoch(self) -> int|None:  # None if the loader has no length and the fit was given no `n_steps`
        "Optimizer steps that an epoch has"
        return self.n_steps or self.dls.train.n_batches

    def total(self) -> int|None:  # None if it cannot be known
        "Optimizer steps that the fit has"
        n = self.per_epoch()
        return self.learn.total_steps or (None if n is None else n*self.n_epoch)

    def _steps_done(self) -> int:  # 0 at the start of a fit, but for the steps of skipped epochs
        """Optimizer steps that this fit should have made by now

        Raises: ValueError if that needs the length of an epoch, and it is unknown."""
        share = self.pct_train if self.train_iter else self.epoch and self.epoch/self.n_epoch
        return steps_of(share, self.per_epoch(), self.n_epoch, self.total())

    def _begin(self):  # returns the other schedulers that are at work
        others = [cb for cb in self.learn.ordered if isinstance(cb, Scheduler) and cb is not self and cb.start]
        self.start = others[0].start if others else {n: [h[n] for h in self.opt.hypers] for n in self.opt.places}
        self.cancelled, self.planned = False, None
        return others

    def _put_back(self, names):
        for name in names:
            for h, v in zip(self.opt.hypers, self.start[name]): h[name] = v
        self.start = None

    def gone_on(self,
        new: Collection[str],  # hyper-parameters that the fit is to have another value of than when it was begun
    ) -> None:
        "What was saved is put back, and the optimizer has the new values: go by these"
        if self.start: self.start = self.start | {n: [h[n] for h in self.opt.hypers] for n in new if n in self.start}

    def after_cancel_fit(self): self.cancelled = True

    def after_fit(self):
        if self.cancelled or self.planned is None: return
        done = self.learn.n_step-self.first
        if done < .9*self.planned: warn(  # .9: steps that a loss scaler skips are no fault of the plan
            f"{self}: was made for {self.planned} steps, but the fit took {done}, so its end was not reached; "
            "`n_steps=…` says how many steps an epoch has")


def refuse_both(
    cb: Scheduler,
    other: Scheduler,  # at work already
    name: str,         # of a hyper-parameter
) -> NoReturn:
    "Refuse two schedulers of which one would undo the other's work"
    raise ValueError(f"{cb} and {other} both set `{name}` at the same steps, and one would undo the other: leave one "
                     "out, give ParamSchedulers a `begin` and `end`, or make one of them a factor")


class ParamScheduler(Scheduler):
    """Sets hyper-parameters before each step of the optimizer, as functions of how far the fit is

    Between `begin` and `end` each function gets: with `by='pos'` the position from 0 to 1, step `i` of `n` being at
    `i/(n-1)`, so that the last one is at 1; with `'step'` the number of the step, with `'epoch'` that of the epoch,
    both counted from `begin`. Outside nothing is set, and what was set last stays. Several ParamSchedulers work
    together: they set the same hyper-parameter one after the other, and their factors multiply. If the functions are
    others when a saved fit goes on, they hold from there on, and that is said.
    Raises: ValueError or TypeError, at the latest at the start of a fit, saying what does not fit."""
    state = ('first', 'start', 'set_to', 'scaled_by', 'acted_at', 'epoch0')
    acted_at = -1              # the step at which this one acted last
    step_i = -1                # the step whose values are set now
    epoch0 = 0                 # the epoch in which it first acted
    peers: Any = ()            # all ParamSchedulers of the fit, in order; the last one writes what they have made of it
    written: Any = None        # what it has written, by name
    reading: Any = None        # and what the optimizer then had
    wrote_to: Any = None       # the optimizer it was
    said = False

    def __init__(self,
        scheds: Mapping[str, Callable]|None = None,   # a function of `by` for each hyper-parameter: its value
        factors: Mapping[str, Callable]|None = None,  # likewise, but what it is multiplied with
        by: str = 'pos',                   # what the functions get: 'pos', 'step' or 'epoch'
        begin: float|str = 0,              # where in the fit: 0 to 1, '500it' or '2ep'
        end: float|str = 1,                # where it ends; that step is the first one outside
        groups: Iterable[int]|None = None,  # numbers of the parameter groups to be set; None: all
    ):
        for name, given in dict(scheds=scheds, factors=factors).items():
            if not isinstance(given, Mapping|None): raise TypeError(
                f"ParamScheduler: `{name}` is a `{type(given).__name__}`; give functions by name: {{'lr': f}}")
        self.scheds, self.factors = dict(scheds or {}), dict(factors or {})
        self.by, self.begin, self.end = by, begin, end
        self.only = None if groups is None else list(L(groups))
        self.set_to, self.scaled_by = {}, {}  # the last value, and the last factor, of each: one for each group
        if by not in ('pos', 'step', 'epoch'): raise ValueError(f"by={by!r}: give 'pos', 'step' or 'epoch'")
        if not (self.scheds or self.factors): raise ValueError("ParamScheduler needs `scheds`: {'lr': SchedCos(…)}")
        if self.only == []: raise ValueError("ParamScheduler: `groups` is empty; None sets all groups")
        for name, f in [*self.scheds.items(), *self.factors.items()]:
            if not callable(f): raise TypeError(f"ParamScheduler: `{name}` is a `{type(f).__name__}`, not a function")

    def before_fit(self):
        self.step_i, self.acted_at, self.reading, self.said = -1, -1, None, False
        self.set_to, self.scaled_by, n, total = {}, {}, self.per_epoch(), self.total()
        self.begins = steps_of(self.begin, n, self.n_epoch, total)
        self.ends = math.inf if self.end == 1 and self.by != 'pos' else steps_of(self.end, n, self.n_epoch, total)
        total = math.inf if total is None else total
        rounded = self.begins == self.ends < total and self.begin != self.end  # a window of less than half a step
        is_whole = self.n_epoch and not self.learn.rehearsing  # else not all of it can be reached
        if is_whole and self.begins >= min(self.ends, total) and not rounded: raise ValueError(
            f"{self}: from step {self.begins} on and until step {self.ends} there is no step in this fit, which has "
            f"{total}")
        if is_whole and total < self.ends < math.inf: warn(
            f"{self}: ends at step {self.ends}, and the fit has {total}: its end is not reached")
        others = self._begin()
        self.first = counting[0].first if (counting := [cb for cb in others if isinstance(cb, ParamScheduler)]) else \
            self.learn.n_step-self._steps_done()
        self.planned = self.ends if self.ends == total < math.inf else None
        self._check()
        for cb in others: self._refuse_undoing(cb)
        peers = [cb for cb in self.learn.ordered if isinstance(cb, ParamScheduler) and cb.start]
        for cb in peers: cb.peers = peers

    def _refuse_undoing(self, cb):
        if not isinstance(cb, ParamScheduler): return cb.refuse(self)
        apart = self.ends <= cb.begins or cb.ends <= self.begins
        if self.only is not None and cb.only is not None: apart = apart or not {*self.only} & {*cb.only}
        if not apart and (both := self.scheds.keys() & cb.scheds.keys()): refuse_both(self, cb, min(both))

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
        if type(value) is float and 0 <= value < limits.get(name, math.inf): return [value]*n  # nearly always
        values = np.ravel(value).tolist()
        if not np.ndim(value): values *= n
        if len(values) != n: raise ValueError(f"{self}: {len(values)} values of `{name}` for {n} groups:\n{self.opt}")
        if bad := [v for v in values if not isinstance(v, (int, float)) or not 0 <= v < limits.get(name, math.inf)]:
            raise ValueError(f"{self}: `{name}` would be {bad[0]}; it must be 0 or more" + ", and less than 1"*(
                name in limits))
        return values

    def before_batch(self):
        i = self.learn.n_step-self.first
        if i == self.step_i: return  # no step since, as while gradients are accumulated
        self.step_i = i
        at = i if i < self.ends else self.ends-1  # the end of one that was over before the fit, or this one, began
        if self.begins <= at != self.acted_at and self.begins < self.ends:
            if self.acted_at < 0: self.epoch0 = self.epoch
            x, self.acted_at = self._x(at), at
            for name, f in self.scheds.items(): self.set_to[name] = self._each(name, f(x))
            for name, f in self.factors.items(): self.scaled_by[name] = self._each(name, f(x))
        last = self.peers[-1]
        if last is self or not last.run and next(cb for cb in reversed(self.peers) if cb.run) is self: self._write()

    def before_step(self):  # not before a batch: what accumulates gradients may drop the last ones
        if self.step_i == self.planned: warn(
            f"{self}: was made for {self.planned} steps, and the fit goes on: it stays at the end; `n_steps=…` says "
            "how many steps an epoch has")

    def _x(self, i):
        if self.by == 'pos': return (i-self.begins)/max(1, self.ends-1-self.begins)  # the last one is at 1
        if self.by == 'step': return i-self.begins
        n, epoch = self.per_epoch(), self.epoch
        return (epoch if i == self.step_i else i//n) - self.begins//n if n else epoch-self.epoch0

    def _write(self):  # what all of them together have made of it
        opt, peers, now = self.learn.opt, self.peers, {}
        if self.wrote_to is opt and self.reading not in (None, opt.read()): self._tell_lost()
        for cb in sorted(peers, key=attrgetter('acted_at')) if len(peers) > 1 else peers:
            for name, values in cb.set_to.items(): now[name] = cb._merged(now.get(name) or self.start[name], values)
        for cb in peers:
            for name, values in cb.scaled_by.items():
                old = now.get(name) or self.start[name]
                now[name] = cb._merged(old, [v*f for v, f in zip(old, values)])
        for name, values in now.items():
            for h, v in zip(opt.hypers, values): h[name] = v
        self.written, self.reading, self.wrote_to = now, opt.read(), opt

    def _merged(self, old, new):  # of the groups that this one is for, the new values
        return new if self.only is None else [new[k] if k in self.only else v for k, v in enumerate(old)]

    def _tell_lost(self):  # somebody else has set what is about to be overwritten
        for name, values in self.written.items():
            now = [h[name] for h in self.opt.hypers]
            if self.said or np.allclose(now, values, rtol=1e-6, atol=0): continue  # a multiplier may round
            self.said = True
            warn(f"`{name}` was set to {now} while {self} schedules it: that is overwritten, and so lost")

    def cleanup_fit(self):
        if self.start is None: return  # an error came before
        self._put_back({*self.set_to, *self.scaled_by})
        peers = [cb for cb in self.peers if cb is not self]
        for cb in peers: cb.peers, cb.reading, cb.step_i = peers, None, -1  # they set theirs again, if the fit goes on
        self.peers = ()

    def load_state_dict(self, state: dict[str, Any]) -> None:  # what `state_dict` gave
        "Go on there, with the functions that this one has"
        in_fit = self.start is not None
        super().load_state_dict(state)
        if not in_fit or self.acted_at < 0: return
        for given, old in (self.scheds, self.set_to), (self.factors, self.scaled_by):
            for name, f in given.items():
                now, was = self._each(name, f(self._x(self.acted_at))), old.get(name, [])
                if len(was) != len(now) or not np.allclose(now, was, rtol=1e-9, atol=0): say(
                    f"{self}: from here on it is another schedule, whose `{name}` at step {self.acted_at} of the fit "
                    f"is {now[-1]:.6g}" + (f", where it was {was[-1]:.6g}" if was else ''))

    def __repr__(self) -> str: return f"ParamScheduler({', '.join([*self.scheds, *self.factors])})"
