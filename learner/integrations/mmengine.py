"""MMEngine's hooks in a Learner: `learn.fit(5, cbs=as_callback(EMAHook()))`; nothing of MMEngine is imported for it.

All 22 sites of a hook are called when MMEngine's Runner would, with the same arguments, each hook in its place among
the Learner's callbacks. `as_hook` is the way back."""
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from fastcore.basics import camel2snake

from ..callback import Callback
from ..callbacks.averaging import WeightAverage
from ..callbacks.resume import Resuming
from ..callbacks.schedule import Scheduler
from ..callbacks.validate_every import EvalPass
from ..events import CancelFitException
from .mmengine_hook import as_hook, from_sites
from .mmengine_hub import Watched
from .mmengine_runner import Runner, modes, priority_order, sites
from .mmengine_table import counterparts

__all__ = ['as_callback', 'as_hook', 'HookOfMMEngine', 'Runner', 'priority_order', 'sites', 'from_sites',
           'counterparts']

batch_events = {'before_batch': 'before', 'after_batch': 'after'}
instead = {'LoggerHook': 'IterLogger, CSVLogger or ScalarLogger', 'NaiveVisualizationHook': '`learn.show_results()`',
           'PrepareTTAHook': '`learn.tta`'}  # of hooks that work on what only a Runner has


def as_callback(
    hook: Any,              # a hook of MMEngine's, or anything with methods that are named like its sites
    priority: Any = None,   # a name, a number from 0 to 100 or a Priority; None: the hook's own, or 'NORMAL'
    **runner,               # what it also finds as `runner.…`; `param_schedulers`: a list, or a function of torch's
) -> 'HookOfMMEngine':      # optimizer that makes one
    """The callback that runs a hook of MMEngine's, unchanged, in a Learner

    The hook's runner tells what the Learner knows, under MMEngine's names; help(Runner) lists them. What else it asks
    for is an AttributeError that names it, unless it is given here: `as_callback(hook, cfg=…)`. The hook is found as
    `learn.ema_hook.hook`, by the name of its class, the runner as `learn.ema_hook.runner`. What it puts into a
    checkpoint in `before_save_checkpoint` comes back in `after_load_checkpoint`; what it keeps otherwise does not.
    Numbers of `runner.message_hub` are noted as by `learn.note`. The hub is the runner's own: what MMEngine gives as
    `MessageHub.get_current_instance()` is another one, which nothing writes here.
    Raises: TypeError for a config dict, a class, a list, or what has none of the methods; ValueError for an odd
    priority, or a hook that works on what only MMEngine's Runner has, such as LoggerHook."""
    return HookOfMMEngine(hook, priority, runner)


class _Evaluation(NamedTuple):
    "One that a hook has seen begin"
    outer: Any      # the scope around it
    mode: str       # 'val', 'test'; '': the hook is told nothing of it
    own: Any        # the hook's attributes before a guest's, one within a fit; else None
    handled: Any    # the exception that was being handled when it began


class HookOfMMEngine(Callback):
    """Calls a hook's methods where MMEngine's Runner would; `as_callback` makes it

    Predictions and `lr_find` call none. A fit that was interrupted and is gone on with is one run. A hook that has been
    in a fit is not begun anew by an evaluation: `before_run` is called then, and what it sets is put back, so that an
    EMAHook goes on with its average. Several validation sets are one validation, whose metrics come at its end. If it
    breaks off, a hook that acts before it is told of its end with `metrics={}`, so that weights which it has swapped
    are put back. `learn.validate()` within a validation calls none, and what one elsewhere in a fit, or `dry_run`, sets
    of a hook's attributes is put back; one outside of fits is what `runner.val()` is, and hooks act on it.
    Raises: TypeError or ValueError as `as_callback`; ValueError from an evaluation, if the hook puts other weights into
    the model for it and another hook, EMA or SWA does so too.
    Order: the hook's priority."""
    run_in = frozenset({'fit', 'validate'})
    not_hashed = ('hub',)  # times too
    trains = False        # has `before_train` been in this fit?
    in_epoch = False      # has `before_train_epoch`?
    goes_on = ''          # where a fit of this process goes on
    set_over = True       # has the present validation set come to its end?
    swaps = False         # did its hook change weights for the present evaluation?
    own: Any = None       # the hook's attributes before a rehearsal
    hypers: Any = ()      # the optimizer's before the fit
    changed: Any = ()     # what the hook has made of them in an evaluation of ValidateEvery's

    def __init__(self,
        hook: Any,                    # as `as_callback` takes it
        priority: Any,                # as `as_callback` takes it
        given: dict[str, Any],        # further attributes of the runner
    ):
        cls = type(hook).__name__
        if isinstance(hook, dict): raise TypeError(
            f"the hook is a config dict, {hook!r:.80}: make the object it describes, as `EMAHook(momentum=1e-4)`")
        if isinstance(hook, type): raise TypeError(f"the hook is a class: write `{hook.__name__}()`")
        if isinstance(hook, (list, tuple)): raise TypeError("as_callback takes one hook: `[*map(as_callback, hooks)]`")
        if other := [instead[c.__name__] for c in type(hook).__mro__ if c.__name__ in instead]: raise ValueError(
            f"a `{cls}` works on what only MMEngine's Runner has; in a Learner it is {other[0]}")
        self.hook, self.given = hook, given
        self.opened: list[_Evaluation] = []  # that have begun, the innermost one last
        self.sites = frozenset(s for s in sites if self._method(s))
        if hasattr(hook, 'get_triggered_stages'): self.sites &= {*hook.get_triggered_stages()}  # which it overrides
        elif not self.sites: raise TypeError(f"a `{cls}` is no hook: it has no method named like {', '.join(sites)}")
        self.order = priority_order(getattr(hook, 'priority', 'NORMAL') if priority is None else priority, f'`{cls}`')

    @property
    def name(self) -> str:  # an EMAHook is `learn.ema_hook`
        "The attribute of the Learner under which it is found"
        name = camel2snake(type(self.hook).__name__)
        return name if name.endswith('hook') else f'{name}_hook'

    @property
    def runner(self) -> Runner:
        "What the hook gets as its runner; all hooks of a Learner share it"
        if '_mmengine' not in vars(self.learn): vars(self.learn)['_mmengine'] = Runner(self.learn, as_callback)
        return vars(self.learn)['_mmengine']

    def handler(self, name: str) -> Callable|None:  # no call a batch for a hook that does nothing in batches
        "What this callback does at event `name`"
        f = super().handler(name)
        if name not in batch_events: return f
        return f if any(s.endswith('_iter') for s in self.sites) else None

    def _method(self, site):  # its own, or its generic one (`_before_iter`) with the mode
        if hasattr(self.hook, site): return getattr(self.hook, site)
        when, mode, what = (*site.split('_'), '')[:3]
        generic = getattr(self.hook, f'_{when}_{what}', None) if mode in modes.values() and what else None
        return generic and (lambda runner, **kwargs: generic(runner, mode=mode, **kwargs))

    def fire_site(self,
        site: str,   # any name; nothing happens if the hook has no such method
        **kwargs,    # what the method gets after the runner
    ) -> None:
        "Call the hook's method"
        if site in sites and site not in self.sites or (f := self._method(site)) is None: return
        try: f(self.runner, **kwargs)
        except Exception as e:
            e.add_note(f"in `{type(self.hook).__name__}.{site}`")
            raise

    @property
    def begun(self) -> bool: "Has its hook been in a fit?"; return getattr(self.hook, '_begun', False)
    @property
    def ready(self) -> bool: "Has it what `before_run` makes?"; return self.begun or 'before_run' not in self.sites

    def _is_first(self): return self.runner.callbacks[:1] == [self]
    def _is_last(self): return self.runner.callbacks[-1:] == [self]
    def _in_fit(self): return self.learn.run_kind == 'fit'

    # ---- a run

    def before_fit(self):
        runner, paused = self.runner, self.learn.paused if self.learn.going_on else None
        self.opened.clear()
        vars(runner).update({k: v for k, v in self.given.items() if k != 'param_schedulers'})
        averages = any(c.__name__ == 'EMAHook' for c in type(self.hook).__mro__)
        if averages and (others := [cb for cb in self.learn.cbs if isinstance(cb, WeightAverage)]): raise ValueError(
            f"{self} and {others[0]} both put averages into the model for evaluations: leave one out")
        if not self._in_fit(): return self._before_evaluation()
        if self.learn.rehearsing: self.own = dict(self._attributes()), runner.held() if self._is_first() else None
        self.goes_on = paused.state['place'] if paused else ''
        if paused and self.begun: return
        if self._is_first(): runner.begin()
        if 'param_schedulers' in self.given: self._make_schedulers(self.given['param_schedulers'])
        self.trains = self.in_epoch = False
        self._attributes()['_begun'] = True
        self.fire_site('before_run')

    def _before_evaluation(self):
        own = dict(self._attributes())
        self.fire_site('before_run')
        if self.begun: self._put_back(own)

    def _attributes(self) -> dict: return getattr(self.hook, '__dict__', {})

    def _put_back(self, own):
        self._attributes().clear()
        self._attributes().update(own)

    def _make_schedulers(self, made):
        others = [cb for cb in self.learn.cbs if isinstance(cb, Scheduler)]
        if others: raise ValueError(f"{self} gets `param_schedulers`, and there is `{others[0]}`: leave one out")
        if 'wd' in self.opt.places: self.opt.regroup(by_decay=True)  # now: it would come in mid-fit with a decay
        self.hypers = [dict(h) for h in self.opt.hypers]
        self.runner.param_schedulers = made(self.opt.opt) if callable(made) else made

    def _loads_later(self):  # a file, when the fit comes to the scope in which it was written
        return any(isinstance(cb, Resuming) and cb.data and not cb.paused for cb in self.learn.cbs)

    def before_epoch(self):
        if self._in_fit() and not self._loads_later(): self._begin_training()

    def _begin_training(self):
        if self.trains: return
        self.trains = self.runner.trains = True
        self.fire_site('before_train')

    def before_train(self):
        runner, goes_on = self.runner, self.goes_on
        self.goes_on = ''
        runner.n_batches = self.n_iter
        self._watch()
        if goes_on != 'train' and not self._loads_later(): self._begin_epoch()

    def _begin_epoch(self):
        if not self.runner.by_iter or not self.in_epoch: self.fire_site('before_train_epoch')
        self.in_epoch = True

    def _watch(self):
        if any(s.endswith('_iter') for s in self.sites) and not isinstance(self.dl, Watched):
            self.learn.dl = Watched(self.dl)

    def before_batch(self): self._batch('before')
    def after_batch(self):
        mode, loss, parts = self.runner.mode, self.loss, self.learn.loss_parts
        outputs = {**({} if loss is None else {'loss': loss}), **(parts or {})} if mode == 'train' else self.pred
        self._batch('after', outputs=outputs)
        if mode == 'train' and self.runner.by_iter and self.runner.train_loop.stop_training:
            self.learn._stop.ask('due')  # for a save point after this batch

    def _batch(self, when, **outputs):
        runner, mode = self.runner, self.runner.mode
        if mode != 'train' and not (self.opened and self.opened[-1].mode): return
        if mode == 'train' and when == 'before': runner.at = self.learn.train_iter
        number = runner.at if mode == 'train' and runner.by_iter else self.iter
        self.fire_site(f'{when}_{mode}_iter', batch_idx=number, data_batch=getattr(self.dl, 'last', None), **outputs)

    def after_train(self):
        if not self.runner.by_iter: self.fire_site('after_train_epoch')

    def save_point(self):  # after an epoch, where nothing that others do at its end is cut short
        where, learn = {scope[0] for scope in self.learn._scopes()}, self.learn
        if learn.asked.keys() & {'stop', 'interrupt', 'exit', 'pause'}: return  # it ends, and can be gone on with
        ended = self.runner.by_iter or where == {'fit'} and self.epoch+1 < self.n_epoch
        if ended and learn.agree(self.runner.train_loop.stop_training): raise CancelFitException

    def after_row(self):  # an evaluation of ValidateEvery's is over, which has put the optimizer's back
        changed, self.changed = self.changed, ()
        for h, new in zip(self.opt.hypers, changed): h.update(new)
        if self.runner.by_iter and self.learn.agree(self.runner.train_loop.stop_training): raise CancelFitException

    def after_fit(self):
        if self.learn.paused and self._in_fit(): return  # it can be gone on with
        if self._in_fit():
            if self.runner.by_iter and self.trains and self._is_first(): self.runner.call_hook('after_train_epoch')
            if self.trains: self.fire_site('after_train')
        if self._is_last(): self.runner.call_hook('after_run')

    def cleanup_epoch(self):  # it was ended between two validation sets
        if self.opened and self.opened[-1].outer is self.learn._scope: self._close({})

    def cleanup_fit(self):
        if self._in_fit() and self.runner.param_schedulers and 'param_schedulers' in self.given:
            vars(self.opt.opt).pop('step', None)  # MMEngine's schedulers put a counter there
            for h, old in zip(self.opt.hypers, self.hypers): h.update(old)
            if not self.learn.paused: self.runner.param_schedulers = None
        (own, held), self.own = self.own or (None, None), None
        if own is not None: self._put_back(own)
        if held: self.runner.put_back(held)

    # ---- an evaluation

    def before_validate(self):
        runner, outer = self.runner, self.learn._scope[1]
        runner.set_values, self.set_over = None, False
        if not (self.opened and self.opened[-1].outer is outer):
            mode = '' if self.opened else runner.mode  # within another one the hook has done its part
            own = dict(self._attributes()) if outer[0] == 'frame' else None
            self.opened.append(_Evaluation(outer, mode, own, sys.exc_info()[1]))
            if mode and own is not None and self._is_first(): runner.before_guest = runner.held()
            if mode: self._begin_evaluation(mode)
        if self.opened[-1].mode: self._watch()

    def _begin_evaluation(self, mode):
        self.runner.values = {}
        if self._is_first(): self.runner.call_hook(f'before_{mode}')
        if (site := f'before_{mode}_epoch') not in self.sites: return
        rivals = [cb for cb in self.learn.ordered if isinstance(cb, WeightAverage)
                  or isinstance(cb, HookOfMMEngine) and cb is not self and site in cb.sites]
        weights = [p.detach().clone() for p in self.model.parameters()] if rivals else []
        self.fire_site(site)
        self.swaps = not all(torch.allclose(p, old, 0, 0, equal_nan=True)
                             for p, old in zip(self.model.parameters(), weights))
        others = [cb for cb in rivals if isinstance(cb, WeightAverage) or cb.swaps]
        if self.swaps and others: raise ValueError(
            f"{self} and {others[0]} both put other weights into the model for evaluations: leave one out")

    def after_validate(self):
        self.set_over = True
        if not self._is_open(): return
        if self.opened[-1].mode: self.runner.collect()
        *_, last = self.learn.dls.valid_sets or ['']
        if self.learn.valid_name not in ('', last): return
        whole = not any(cb.given_up for cb in self._passes())
        self._close(dict(self.runner.values) if whole else {}, whole)

    def _passes(self): return [cb for cb in self.learn.cbs if isinstance(cb, EvalPass)]

    def _is_open(self): return bool(self.opened) and self.opened[-1].outer is self.learn._scope[1]

    def _close(self, metrics, whole=False):
        (_, mode, own, _), self.swaps = self.opened.pop(), False
        if not mode: return
        counts = own is None or whole and self._passes()
        before = [dict(h) for h in self.opt.hypers] if self.opt else []
        try:
            if whole or f'before_{mode}_epoch' in self.sites: self.fire_site(f'after_{mode}_epoch', metrics=metrics)
            if whole and self._is_last(): self.runner.call_hook(f'after_{mode}')
        finally:
            if not counts: self._put_back(own)
            if not counts and (self._is_last() or not whole) and self.runner.before_guest:
                self.runner.put_back(self.runner.before_guest)
        if counts and own is not None: self.changed = [
            {k: v for k, v in dict(h).items() if old[k] != v} for h, old in zip(self.opt.hypers, before)]

    def cleanup_validate(self):  # it broke off
        if self._is_open() and (not self.set_over or sys.exc_info()[1] is not self.opened[-1].handled): self._close({})

    # ---- files

    def state_dict(self) -> dict[str, Any]:
        """So that a fit without the hook does not go on unnoticed; what the hook keeps is in a part of its own

        The first hook has what the runner keeps: the hub's numbers, schedulers, and whether the fit is to stop."""
        return dict(begun=self.begun, **(self.runner.state_dict() if self.learn and self._is_first() else {}))

    def load_state_dict(self, state: dict[str, Any]) -> None:  # what `state_dict` gave
        "Let the runner go on; `before_load` brings the hook what it keeps"
        if 'hub' in state and self.learn: self.runner.load_state_dict(state)

    def before_save(self,
        state: dict[str, Any],  # what is being saved: what the hooks keep joins it
    ):
        if self._is_first(): self.runner.add_to(state)

    def before_load(self,
        state: dict[str, Any],  # what was read, of which the hooks take theirs
    ):
        if self._is_first(): self.runner.take_from(state)

    def after_load(self,
        state: dict[str, Any],  # what was loaded
    ):
        if not self._in_fit() or 'counters' not in state or not self._is_first(): return
        cbs = self.runner.callbacks
        for cb in cbs if self.learn.epoch < self.n_epoch else (): cb._begin_training()
        for cb in cbs if state['place'] == 'train' else (): cb._begin_epoch()

    def __repr__(self) -> str: return f"as_callback({type(self.hook).__name__})"
