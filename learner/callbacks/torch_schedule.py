"""torch's learning-rate schedulers as callbacks: `learn.fit(5, cbs=partial(StepLR, step_size=2))`."""
import inspect
import math
import warnings
from collections.abc import Collection
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
in_groups = 'lr', 'initial_lr', 'max_lr', 'min_lr', 'max_momentum', 'base_momentum'  # what one keeps in torch's groups


class TorchScheduler(Scheduler):
    """Steps a scheduler of torch's: after each step of the optimizer, or after each epoch

    One that is given as a class or a partial is made at the start of each fit, over that fit's learning rates, and what
    it needs of these is filled in unless it is given: `total_steps`, `T_max`, `max_lr`. An instance goes on where it
    was, with its own rates.
    Rates that `param_opts` fixes stay. A fit that is gone on with from a file by another scheduler, or with other
    arguments, another `by` or another rate, has from there on the rates of these, and says so.
    Raises: ValueError at the start of a fit, saying what does not fit; TypeError if it is no scheduler."""
    sched: Any = None     # torch's scheduler, in a fit
    has_step = False      # did torch's optimizer have a `step` of its own before? A scheduler gives it one
    made: Any = None      # what it was when the fit began
    base: Any = ()        # what each of torch's groups had for it then
    behind = 0            # steps of its own that it is yet to make, until it is where the fit is
    lowered: Any = ()     # the factors by which ReduceLROnPlateau had made the rates lower, for each of torch's groups
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
        opt, others, is_given = self.opt.opt, self._begin(), isinstance(self.make, LRScheduler)
        self.has_step, self.said, self.held, self.plans = 'step' in vars(opt), False, 0, False
        if is_given: self._given(self.make)
        elif 'wd' in self.opt.places: self.opt.regroup(by_decay=True)  # now: it would come in mid-fit with a decay
        keys = in_groups if is_given else ('lr',)
        self.base, self.changed = deepcopy([{k: g[k] for k in keys if k in g} for g in opt.param_groups]), False
        if not is_given and not any(isinstance(cb, TorchScheduler) for cb in others):
            for g in opt.param_groups: g.pop('initial_lr', None)  # of an earlier fit, which torch would take over
        self.sched = self.make if is_given else self._made()
        self.steps = (self.by or ('step' if isinstance(self.sched, absolute) else 'epoch')) == 'step'
        self.made = dict(cls=type(self.sched).__name__, by='step' if self.steps else 'epoch',
                         lr=[b['lr'] for b in self.base], state=self._kept())
        total, done = (self.total(), self._steps_done()) if self.steps else (self.n_epoch, self.epoch)
        self.behind = 0 if is_given else done
        self.first = self.learn.n_step - (done if self.steps else done*(self.per_epoch() or 0))
        self.planned = total if self.steps and self.plans and self.n_epoch else None
        if not self.learn.going_on: self._check((total or 0) - done + self.behind)  # an instance is in mid-epoch there
        for cb in others: self.refuse(cb)
        chain = self._chain()
        if all(cb.sched for cb in chain): catch_up(chain)  # they begin one after the other

    def _chain(self): return [cb for cb in self.learn.ordered if isinstance(cb, TorchScheduler) and cb.run]

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
        self._keep_fixed()

    def _keep_fixed(self):
        for g in self.opt.opt.param_groups: g['lr'] = g['opts'].get('lr', g['lr'])

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
        return dict(sched=self._kept(), made=self.made, first=self.first, start=self.start, held=self.held,
                    rates=[g['lr'] for g in self.opt.opt.param_groups])

    def _kept(self):
        lambdas = getattr(self.sched, 'lr_lambdas', ())
        if all(hasattr(f, '__dict__') for f in lambdas): return deepcopy(self.sched.state_dict())
        # torch asks each that is no plain function for its state, and a built-in one has none
        return deepcopy({k: v for k, v in vars(self.sched).items() if k not in ('optimizer', 'lr_lambdas')}
                        | {'lr_lambdas': [None]*len(lambdas)})

    def load_state_dict(self, state: dict[str, Any]) -> None:  # what `state_dict` gave
        "Let the fit's scheduler go on from there, unless it is another one by now: for `gone_on`"
        if not state or not self.sched: return
        self.first, self.start, self.held, self.behind = state['first'], state['start'], state['held'], 0
        was = {**self.made, **state.get('made', {})}
        if self.learn.going_on: self.made, told = was, []  # of this process, so it is the same one
        else: told = differing(self.made, was)
        if told: say(f"{self}: from here on it is {'; '.join(told)}")
        is_plateau = self.made['cls'] == was['cls'] == 'ReduceLROnPlateau'  # that one goes by what it has seen
        self.changed = bool(told) and not is_plateau
        if not self.changed: self.sched.load_state_dict(
            {**state['sched'], **(arguments(self.made['state']) if told else {})})
        if self.learn.going_on: self._each_its_own(state['rates'])
        self.lowered = reductions(state['sched'], was['lr']) if is_plateau else []

    def _each_its_own(self, rates):  # an `eta_min` is reached by all of torch's groups that one hyper-parameter is for
        groups = self.opt.opt.param_groups
        for h in self.opt.hypers:
            k, *_ = h.readers['lr']
            if not math.isclose(groups[k]['lr'], rates[k], rel_tol=1e-9): continue  # somebody has changed it since
            for j in h.own: groups[j]['lr'] = rates[j]

    def gone_on(self,
        new: Collection[str],  # hyper-parameters that the fit is to have another value of than when it was begun
    ) -> None:
        """Have the rates that there would be if the fit had been begun as it is now

        Raises: ValueError if nobody can know them."""
        super().gone_on(new)
        found = [cb for cb in self._chain() if cb.sched]
        again = 'lr' in new or any(cb.changed for cb in found)
        if self.learn.going_on or not again or self is not found[-1]: return  # once, for all that are chained
        plateau = next((cb for cb in found if isinstance(cb.sched, ReduceLROnPlateau) and not cb.changed), None)
        if plateau and len(found) > 1: raise ValueError(
            f"{plateau} has to be alone if the fit is to go on with another scheduler beside it, or another rate: what "
            "it has made of the rates cannot be found again")
        if plateau: return self._lower_again()
        for g, b in zip(self.opt.opt.param_groups, found[0].base):
            g.pop('initial_lr', None)
            g.update(deepcopy(b))
        for cb in found: cb._again()
        catch_up(found)

    def _lower_again(self):
        for g, factors, least in zip(self.opt.opt.param_groups, self.lowered, self.sched.min_lrs):
            for f in factors: g['lr'] = max(g['lr']*f, min(least, g['lr']))
        self._keep_fixed()

    def _again(self):
        if self.sched is self.make: self.sched.load_state_dict(self.made['state'])
        else: self.sched = self._made()
        self.changed, self.held, self.behind = False, 0, self.learn.n_step-self.first if self.steps else self.epoch

    def __repr__(self) -> str:
        o = self.make.func if isinstance(self.make, partial) else self.make
        return f"TorchScheduler({getattr(o, '__name__', type(o).__name__)})"


def catch_up(
    chain: list[TorchScheduler],  # those of a fit, in order
) -> None:
    "Make the steps that each is behind, in the order in which the fit would have made them"
    steps, epochs = (max([cb.behind for cb in chain if cb.steps is by_step], default=0) for by_step in (True, False))
    per = chain[0].per_epoch() or steps/max(1, epochs)
    turns = [(i if cb.steps else i*per, not cb.steps, k) for k, cb in enumerate(chain)
             if not isinstance(cb.sched, ReduceLROnPlateau) for i in range(1, cb.behind+1)]  # that one has seen nothing
    for cb in chain: cb.behind = 0
    with quiet():
        for *_, k in sorted(turns): chain[k]._advance()
    chain[0]._keep_fixed()  # one may have begun with another rate


def arguments(
    state: Any,   # of a scheduler of torch's
) -> Any:
    "Its state without where it stands, and without the fit's rates unless it has its own"
    if isinstance(state, dict):
        not_its_own = position if 'cycle_momentum' in state else position | {'base_lrs'}
        return {k: arguments(v) for k, v in state.items() if k not in not_its_own}
    return [arguments(v) for v in state] if isinstance(state, (list, tuple)) else state


def differing(
    made: dict[str, Any],  # what a scheduler was at the start of the fit
    was: dict[str, Any],   # and that of a file
) -> list[str]:
    "What is another one, as text"
    if made['cls'] != was['cls']: return [f"{made['cls']}, which was {was['cls']}"]
    now, then = (arguments(o['state']) | dict(by=o['by']) for o in (made, was))
    return [f"{k}={now.get(k)!r}, which was {then.get(k)!r}" for k in {**now, **then} if now.get(k) != then.get(k)]


def reductions(
    state: dict[str, Any],  # of torch's ReduceLROnPlateau
    rates: list,            # with which the fit began
) -> list[list[float]]:     # the factor, as often as it has acted, for each rate
    "What it has made of the rates; one that has come to `min_lr` has been lowered no further"
    f = state['factor']
    return [[f]*(math.ceil(math.log(now/old, f)-1e-6) if 0 < now < old and f else 0)  # 1e-6: of rounding
            for now, old in zip(state['_last_lr'], rates)]


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
