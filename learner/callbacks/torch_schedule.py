"""torch's learning-rate schedulers as callbacks: `learn.fit(5, cbs=partial(StepLR, step_size=2))`."""
import inspect
import warnings
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from ..host import callback_makers
from .schedule import Scheduler

__all__ = ['TorchScheduler']

by_group = {'max_lr', 'base_lr', 'min_lr', 'max_momentum', 'base_momentum', 'lr_lambda'}  # may be lists of one each


class TorchScheduler(Scheduler):
    """Steps a scheduler of torch's: after each step of the optimizer, or after each epoch

    One that is given as a class or a partial is made at the start of each fit, over that fit's learning rates, and what
    it needs of these is filled in unless it is given: `total_steps`, `T_max`, `max_lr`. An instance goes on where it
    was, with its own rates. After the fit the hyper-parameters are again what they were.
    Raises: ValueError at the start of a fit, saying what does not fit; TypeError if it is no scheduler."""
    sched: Any = None     # torch's scheduler, in a fit
    old: Any = None       # the hyper-parameters before
    has_step = False      # did torch's optimizer have a `step` of its own before? A scheduler gives it one

    def __init__(self,
        make: Any,                     # an LRScheduler: class, partial, instance, or a function of torch's optimizer
        by: str|None = None,           # 'step' or 'epoch'; None: 'step' for OneCycleLR and CyclicLR, else 'epoch'
        monitor: str = 'valid_loss',   # the column of the table that ReduceLROnPlateau watches
    ):
        self.make, self.by, self.monitor = make, by, monitor
        if by not in ('step', 'epoch', None): raise ValueError(f"TorchScheduler: by={by!r}; give 'step' or 'epoch'")
        if not isinstance(make, LRScheduler) and not callable(make):
            raise TypeError(f"TorchScheduler: a `{type(make).__name__}` is no scheduler of torch's")

    def before_fit(self):
        opt = self.opt.opt
        self.old, self.has_step = [dict(h) for h in self.opt.hypers], 'step' in vars(opt)
        if isinstance(self.make, LRScheduler): self.sched = self._given(self.make)
        else:
            for g in opt.param_groups: g.pop('initial_lr', None)  # an earlier scheduler's, which torch would take over
            self.sched = self.make(opt, **self._filled())
            if not isinstance(self.sched, LRScheduler): raise TypeError(
                f"TorchScheduler: {self.make} returned a `{type(self.sched).__name__}`, no scheduler of torch's")
        by_step = isinstance(self.sched, (OneCycleLR, CyclicLR))
        self.steps = (self.by or ('step' if by_step else 'epoch')) == 'step'
        n, done = (self.per_epoch(), self._steps_done()) if self.steps else (1, self.epoch)
        skipped = 0 if self.sched is self.make else done
        self._check((n or 0)*self.n_epoch - done + skipped)
        with quiet():
            for _ in range(skipped): self._advance()

    def _given(self, sched):
        if sched.optimizer is not self.opt.opt: raise ValueError(
            f"this {type(sched).__name__} is over another optimizer: make it over `learn.create_opt().opt`, or give "
            "its class or a partial")
        if self.learn._rates.get('lr') is not None: raise ValueError(
            f"this {type(sched).__name__} has rates of its own: fit without `lr`, or give its class or a partial")
        if len(sched.get_last_lr()) != len(sched.optimizer.param_groups): raise ValueError(
            f"this {type(sched).__name__} was made before the optimizer's groups were laid out anew for their decay: "
            "give its class or a partial")
        for g, lr in zip(sched.optimizer.param_groups, sched.get_last_lr()): g['lr'] = lr
        return sched

    def _filled(self):  # what a class needs to know of this fit
        f, given = (self.make.func, self.make) if isinstance(self.make, partial) else (self.make, None)
        takes = inspect.signature(f).parameters if isinstance(f, type) else {}
        given = {**given.keywords, **dict(zip([*takes][1:], given.args))} if given else {}
        if takes and takes.keys() & {'cycle_momentum'} and given.get('cycle_momentum', True) \
                and 'mom' not in self.opt.places: raise ValueError(
            f"{f.__name__} would give this {type(self.opt.opt).__name__} a momentum, and it has none: "
            f"partial({f.__name__}, cycle_momentum=False) leaves it so")
        n = self.per_epoch()
        by_step = self.by == 'step' or self.by is None and f in (OneCycleLR, CyclicLR)
        n_epoch = max(1, self.n_epoch)  # torch's classes plan for one step at least
        total = n and n*n_epoch if by_step else n_epoch
        groups, n_groups = self.opt.opt.param_groups, len(self.opt.hypers)
        wanted = dict(max_lr=[g['lr'] for g in groups], total_steps=total, T_max=total)
        if given.keys() & {'epochs', 'steps_per_epoch'}: del wanted['total_steps']
        needs = {k: v for k, v in wanted.items() if k in takes and k not in given}
        if any(v is None for v in needs.values()): raise ValueError(
            f"the training loader has no length, and {f.__name__} needs one: give the fit `n_steps=…`")
        lists = {k: v for k, v in given.items() if k in by_group and isinstance(v, list) and len(v) == n_groups}
        return needs | {k: [v[g['group']] for g in groups] for k, v in lists.items()}  # torch's groups may be more

    def _check(self, ahead):  # how many steps the scheduler is to make
        total = getattr(self.sched, 'total_steps', None)
        if total and total < (end := self.sched.last_epoch+ahead): raise ValueError(
            f"{type(self.sched).__name__}: `total_steps` is {total}, but this fit has {end}: give the class without it")
        if not isinstance(self.sched, ReduceLROnPlateau): return
        if self.steps: raise ValueError("ReduceLROnPlateau watches a column of the table, so it goes by='epoch'")
        names = self.recorder.metric_names if hasattr(self.learn, 'recorder') else []
        if self.monitor not in names: raise ValueError(
            f"ReduceLROnPlateau would watch `{self.monitor}`, and " + (
                f"the table has only {', '.join(names)}" if names else "there is no Recorder") +
            ": give `TorchScheduler(…, monitor=…)`")

    def _advance(self):
        if not isinstance(self.sched, ReduceLROnPlateau): return self.sched.step()
        row = dict(zip(self.recorder.metric_names, self.recorder.log or ()))
        if row: self.sched.step(row[self.monitor])  # an epoch that was cancelled before it gave anything has none

    def after_batch(self):  # after the Recorder, which notes the rate that the step was made with
        if self.steps and self.learn.stepped: self._advance()

    def after_epoch(self):
        with quiet():  # the epoch may have been cancelled
            if not self.steps: self._advance()

    def cleanup_fit(self):
        if self.old is None: return
        for h, old in zip(self.opt.hypers, self.old): h.update(old)
        if not self.has_step: vars(self.opt.opt).pop('step', None)
        self.sched = self.old = None

    def state_dict(self) -> dict[str, Any]:
        "What torch's scheduler keeps; empty outside a fit"
        return self.sched.state_dict() if self.sched else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # what `state_dict` gave
        "Let the fit's scheduler go on from there"
        if state: self.sched.load_state_dict(state)

    def __repr__(self) -> str:
        o = self.make.func if isinstance(self.make, partial) else self.make
        return f"TorchScheduler({getattr(o, '__name__', type(o).__name__)})"


@contextmanager
def quiet():
    "Without torch's warnings that no step of the optimizer came before one of the scheduler"
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', '(Detected call|Seems like) .*optimizer.step', UserWarning)
        yield


@callback_makers.append
def from_torch(
    o: Any,
) -> TorchScheduler|None:  # None if it is no scheduler of torch's
    "A scheduler given where callbacks are given"
    cls = o.func if isinstance(o, partial) else o
    is_one = isinstance(cls, LRScheduler) or isinstance(cls, type) and issubclass(cls, LRScheduler)
    return TorchScheduler(o) if is_one else None
