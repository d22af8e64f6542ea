"""torch's learning-rate schedulers as callbacks: `learn.fit(5, cbs=partial(StepLR, step_size=2))`."""
import inspect
import math
import warnings
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from ..display import say
from ..host import callback_makers
from ..utils import warn
from .schedule import ParamScheduler, Scheduler, refuse_both

__all__ = ['TorchScheduler']

absolute = OneCycleLR, CyclicLR  # whose rates do not go by those that are set
by_group = {'max_lr', 'base_lr', 'min_lr', 'max_momentum', 'base_momentum', 'lr_lambda'}  # may be lists of one each
# where a scheduler stands; what else it keeps are its arguments
position = {'last_epoch', '_last_lr', '_step_count', '_is_initial', '_get_lr_called_within_step', 'T_cur', 'T_i',
            'best', 'num_bad_epochs', 'cooldown_counter'}


class TorchScheduler(Scheduler):
    """Steps a scheduler of torch's: after each step of the optimizer, or after each epoch

    One that is given as a class or a partial is made at the start of each fit, over that fit's learning rates, and what
    it needs of these is filled in unless it is given: `total_steps`, `T_max`, `max_lr`. An instance goes on where it
    was, with its own rates.
    Rates that `param_opts` fixes stay. A fit that is gone on with by another scheduler, or other arguments, has from
    there on the rates of these, and says so.
    Raises: ValueError at the start of a fit, saying what does not fit; TypeError if it is no scheduler."""
    sched: Any = None     # torch's scheduler, in a fit
    has_step = False      # did torch's optimizer have a `step` of its own before? A scheduler gives it one
    made: Any = None      # its arguments when the fit began
    base: Any = ()        # the rates it was made over, one for each of torch's groups
    changed = False       # is the fit gone on with by another one than it was begun with?

    def __init__(self,
        make: Any,                     # an LRScheduler: class, partial, instance, or a function of torch's optimizer
        by: str|None = None,           # 'step' or 'epoch'; None: 'step' for OneCycleLR and CyclicLR, else 'epoch'
        monitor: str = 'valid_loss',   # the column of the table that ReduceLROnPlateau watches
    ):
        self.make, self.by, self.monitor = make, by, monitor
        if by not in ('step', 'epoch', None): raise ValueError(f"TorchScheduler: by={by!r}; give 'step' or 'epoch'")
        if not isinstance(make, LRScheduler) and not callable(make):
            raise TypeError(f"TorchScheduler: a `{type(make).__name__}` is no scheduler of torch's")
        if isinstance(make, partial) and make.args: raise TypeError(
            f"TorchScheduler: torch's optimizer comes first, so name what you give: partial({make.func.__name__}, "
            f"name={make.args[0]!r})")

    def before_fit(self):
        opt, others = self.opt.opt, self._begin()
        self.has_step, self.said, self.held, self.plans = 'step' in vars(opt), False, 0, False
        if isinstance(self.make, LRScheduler): self._given(self.make)
        elif 'wd' in self.opt.places: self.opt.regroup(by_decay=True)  # now: it would come in mid-fit with a decay
        self.base, self.changed = [g['lr'] for g in opt.param_groups], False
        self.sched = self.make if isinstance(self.make, LRScheduler) else self._made()
        self.made = dict(cls=type(self.sched).__name__, state=self._kept())
        by_step = isinstance(self.sched, absolute)
        self.steps = (self.by or ('step' if by_step else 'epoch')) == 'step'
        total, done = (self.total(), self._steps_done()) if self.steps else (self.n_epoch, self.epoch)
        skipped = 0 if self.sched is self.make else done
        self.first = self.learn.n_step-done
        self.planned = total if self.steps and self.plans and self.n_epoch else None
        self._check((total or 0) - done + skipped)
        for cb in others: self.refuse(cb)
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

    def _made(self):
        for g in self.opt.opt.param_groups: g.pop('initial_lr', None)  # an earlier one's, which torch would take over
        sched = self.make(self.opt.opt, **self._filled())
        if not isinstance(sched, LRScheduler): raise TypeError(
            f"TorchScheduler: {self.make} returned a `{type(sched).__name__}`, no scheduler of torch's")
        return sched

    def _filled(self):  # what a class needs to know of this fit
        f, given = (self.make.func, self.make) if isinstance(self.make, partial) else (self.make, None)
        takes = inspect.signature(f).parameters if isinstance(f, type) else {}
        given = given.keywords if given else {}
        if takes and takes.keys() & {'cycle_momentum'} and given.get('cycle_momentum', True) \
                and 'mom' not in self.opt.places: raise ValueError(
            f"{f.__name__} would give this {type(self.opt.opt).__name__} a momentum, and it has none: "
            f"partial({f.__name__}, cycle_momentum=False) leaves it so")
        by_step = self.by == 'step' or self.by is None and f in absolute
        total = self.total() if by_step else self.n_epoch
        if total == 0: total = self.per_epoch() if by_step else 1  # torch's classes plan for one step at least
        groups, n_groups = self.opt.opt.param_groups, len(self.opt.hypers)
        wanted = dict(max_lr=[g['lr'] for g in groups], total_steps=total, T_max=total)
        if given.keys() & {'epochs', 'steps_per_epoch'}: del wanted['total_steps']
        needs = {k: v for k, v in wanted.items() if k in takes and k not in given}
        self.plans = bool(needs.keys() & {'total_steps', 'T_max'})
        if any(v is None for v in needs.values()): raise ValueError(
            f"the training loader has no length, and {f.__name__} needs one: give the fit `n_steps=…`")
        lists = {k: v for k, v in given.items() if k in by_group and isinstance(v, list) and len(v) == n_groups}
        return needs | {k: [v[g['group']] for g in groups] for k, v in lists.items()}  # torch's groups may be more

    def refuse(self,
        cb: Scheduler,  # another one that is at work
    ) -> None:
        """Let no other one set what this one sets; torch's own can be chained, unless they give the rates themselves

        Raises: ValueError if it would."""
        if isinstance(cb, TorchScheduler):
            if isinstance(self.sched, absolute) or isinstance(cb.sched, absolute): refuse_both(self, cb, 'lr')
        elif isinstance(cb, ParamScheduler) and (both := {*self._sets()} & {*cb.scheds, *cb.factors}): raise ValueError(
            f"{self} and {cb} both set `{min(both)}`, and one would undo the other: leave one out, or use only torch's "
            "schedulers, which can be chained, or only ParamSchedulers, whose factors multiply")

    def _sets(self): return ['lr', *(['mom'] if getattr(self.sched, 'cycle_momentum', False) else [])]

    def _check(self, ahead):  # how many steps the scheduler is to make
        total = getattr(self.sched, 'total_steps', None)
        if total and total < (end := self.sched.last_epoch+ahead): raise ValueError(
            f"{type(self.sched).__name__}: `total_steps` is {total}, but this fit has {end}: give the class without it")
        if not isinstance(self.sched, ReduceLROnPlateau): return
        if self.steps: raise ValueError("ReduceLROnPlateau watches a column of the table, so it goes by='epoch'")
        better = next((m.greater_is_better for m in self.metrics if m.name == self.monitor), None)
        if better is not None and better != (self.sched.mode == 'max'): raise ValueError(
            f"ReduceLROnPlateau watches `{self.monitor}`, which is better {'high' if better else 'low'}: give it "
            f"mode='{'max' if better else 'min'}'")
        names = self.recorder.metric_names if hasattr(self.learn, 'recorder') else []
        if self.monitor not in names: raise ValueError(
            f"ReduceLROnPlateau would watch `{self.monitor}`, and " + (
                f"the table has only {', '.join(names)}" if names else "there is no Recorder") +
            ": give `TorchScheduler(…, monitor=…)`")

    def _advance(self):
        if self.sched.optimizer is not self.opt.opt: return self._say(
            "the optimizer has been made anew during the fit, and this scheduler goes on with the old one")
        total = getattr(self.sched, 'total_steps', None) or math.inf
        if total < math.inf and self.sched.last_epoch+1 >= total:  # it is at its end, where it stays
            self.held += 1
            if self.held > 1: self._say(f"it was made for {total} steps, and the fit goes on: it stays at its end; "
                                        "`n_steps=…` says how many steps an epoch has")
            return
        self._step()
        for g in self.opt.opt.param_groups: g['lr'] = g['opts'].get('lr', g['lr'])  # one that is fixed

    def _say(self, message):
        if not self.said: warn(f"{self}: {message}")
        self.said = True

    def _step(self):
        if not isinstance(self.sched, ReduceLROnPlateau): return self.sched.step()
        row = dict(zip(self.recorder.metric_names, self.recorder.log or ()))
        if row: self.sched.step(row[self.monitor])  # an epoch that was cancelled before it gave anything has none

    def after_batch(self):  # after the Recorder, which notes the rate that the step was made with
        if self.steps and self.learn.stepped: self._advance()

    def after_row(self):  # what goes by the table
        if not self.steps and isinstance(self.sched, ReduceLROnPlateau): self._advance()

    def after_epoch(self):
        with quiet():  # the epoch may have been cancelled
            if not self.steps: self._advance()

    def cleanup_fit(self):
        if self.start is None: return
        self._put_back(self._sets())
        if not self.has_step: vars(self.opt.opt).pop('step', None)
        self.sched = None

    def state_dict(self) -> dict[str, Any]:
        "What torch's scheduler keeps, and where the fit began; empty outside a fit"
        if not self.sched: return {}
        return dict(sched=self._kept(), made=self.made, first=self.first, start=self.start, held=self.held)

    def _kept(self):
        lambdas = getattr(self.sched, 'lr_lambdas', ())
        if all(hasattr(f, '__dict__') for f in lambdas): return deepcopy(self.sched.state_dict())
        # torch asks each that is no plain function for its state, and a built-in one has none
        return deepcopy({k: v for k, v in vars(self.sched).items() if k not in ('optimizer', 'lr_lambdas')}
                        | {'lr_lambdas': [None]*len(lambdas)})

    def load_state_dict(self, state: dict[str, Any]) -> None:  # what `state_dict` gave
        "Let the fit's scheduler go on from there; its arguments stay, and what they give is done in `after_load`"
        if not state or not self.sched: return
        self.first, self.start, self.held = state['first'], state['start'], state['held']
        (cls, now), (was, then) = ((o['cls'], arguments(o['state'])) for o in (self.made, state.get('made', self.made)))
        told = [f"{k}={now.get(k)!r}, which was {then.get(k)!r}" for k in {**now, **then} if now.get(k) != then.get(k)]
        if cls != was: told = [f"{cls}, which was {was}"]
        if told: say(f"{self}: from here on it is {'; '.join(told)}")
        self.changed = bool(told) and not (cls == was == 'ReduceLROnPlateau')  # that one goes by what it has seen
        if not self.changed: self.sched.load_state_dict({**state['sched'], **(now if told else {})})

    def after_load(self,
        state: dict[str, Any],  # what was loaded
    ):
        found = [cb for cb in self.learn.ordered if isinstance(cb, TorchScheduler) and cb.sched]
        if self is not found[-1] or not any(cb.changed for cb in found): return  # once, for all that are chained
        if lost := [cb for cb in found if isinstance(cb.sched, ReduceLROnPlateau) and not cb.changed]: raise ValueError(
            f"{lost[0]} has to be alone if the fit is to go on with another scheduler beside it: what it has made of "
            "the rates cannot be found again")
        for g, lr in zip(self.opt.opt.param_groups, found[0].base): g['lr'] = lr
        with quiet():
            for cb in found: cb._again()

    def _again(self):  # as if the fit had been begun with it
        if self.sched is self.make: self.sched.load_state_dict(self.made['state'])
        else: self.sched = self._made()
        self.changed, self.held = False, 0
        for _ in range(self.learn.n_step-self.first if self.steps else self.epoch): self._advance()

    def __repr__(self) -> str:
        o = self.make.func if isinstance(self.make, partial) else self.make
        return f"TorchScheduler({getattr(o, '__name__', type(o).__name__)})"


def arguments(
    state: Any,   # of a scheduler of torch's
) -> Any:
    "Its state without where it stands"
    if isinstance(state, dict): return {k: arguments(v) for k, v in state.items() if k not in position}
    return [arguments(v) for v in state] if isinstance(state, (list, tuple)) else state


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
