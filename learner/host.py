"""Host: the list of callbacks, who of them acts at which event, and the scopes that run them and clean up."""
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any, Self

from fastcore.basics import noop
from fastcore.foundation import L

from .callback import Callback, TrainEvalCallback, run_kinds
from .events import CancelException, LoopState, event, events_of, inner_events, no_event, scopes
from .interrupt import stop_error
from .order import sort_by_run
from .state import pause
from .utils import warn

__all__ = ['Host', 'default_callbacks', 'callback_makers', 'as_callback']

default_callbacks: dict[str, type[Callback]] = {}  # what every Learner has besides TrainEvalCallback, by key
callback_makers: list[Callable[[Any], Callback|None]] = []  # each makes a callback of something else, or returns None


def as_callback(
    o: Any,  # a callback, a class of one, or what one of `callback_makers` knows
) -> Any:    # whatever else it is, it is left as it is
    "What `o` stands for where callbacks are given"
    made = next((cb for make in callback_makers if (cb := make(o)) is not None), o)
    return made() if isinstance(made, type) else made


def check_new(host: Any, cb: Any) -> Callback|None:  # the callback of a class now defined anew, which `cb` replaces
    """Whether `cb` may join `host`

    Raises: TypeError or ValueError if it may not, saying what to do."""
    if not isinstance(cb, Callback):
        hook = ", or `as_callback(hook)` of learner.integrations.mmengine"*hasattr(cb, 'before_train_iter')
        raise TypeError(f"`{cb!r}` is no callback: give a Callback, a class of one, or `Callback(after_batch=f)`{hook}")
    if odd := set(L(cb.run_in)) - run_kinds:
        raise ValueError(f"`{cb}`: run_in has {', '.join(map(repr, odd))}; there are {', '.join(sorted(run_kinds))}")
    if cb.learn is not None: raise ValueError(
        f"`{cb}` is part of this Learner already" if cb.learn is host else
        f"`{cb}` belongs to another Learner: make a second one, or remove it there first")
    if cb.name not in vars(host): mine = hasattr(type(host), cb.name)
    else: mine = not isinstance(vars(host)[cb.name], Callback)
    if mine: raise ValueError(f"`{cb}` would be found as `learn.{cb.name}`, which is something else: rename its class, "
                              "or give it another `name`")
    if lacks := [k for k in cb.state if k not in vars(cb) and not hasattr(type(cb), k)]: raise ValueError(
        f"`{cb}`: its `state` names `{lacks[0]}`, which it does not have: set it in `__init__`, or in the class")
    for old in host.cbs:
        same = (type(old).__module__, type(old).__qualname__) == (type(cb).__module__, type(cb).__qualname__)
        if same and type(old) is not type(cb) and '<locals>' not in type(cb).__qualname__: return old
        if cb.unique and isinstance(old, next(c for c in type(cb).__mro__[::-1] if vars(c).get('unique'))):
            raise ValueError(f"there is a `{old}` already, and a `{cb}` would undo its work: "
                             f"`learn.remove_cb(learn.{old.name})` first, or give yours to `Learner(cbs=…)`")


def _has(cbs, cb): return any(c is cb for c in cbs)  # by identity: a callback may define `==`


class Host(LoopState):
    "The part of a Learner that keeps callbacks and runs them"
    cbs: Any = L()                           # callbacks in the order of adding
    run_kind: str = ''                       # 'fit', 'validate', 'predict' or 'lr_find' while one runs
    passes: int = 0                          # over the training data before this fit, to which `set_epoch` adds
    total_steps: int|None = None             # steps by which the fit ends, as `fit_iters` does; None: by epochs
    rehearsing: bool = False                 # a fit of which nothing will be left, on a few batches of each epoch?
    asked: dict[str, str] = {}               # at a `save_point`: what is asked for ('save', 'stop' …), and by whom
    passing: list = []                       # those of `cbs` that are there for a block, such as a fit's own
    stopped_by: str = ''                     # who stopped the last fit: 'Ctrl-C', a signal, 'request_stop'
    paused: Any = None                       # where the last fit was stopped, for `learn.resume()`
    going_on: bool = False                   # does the present fit go on from there?
    _left: Any = None                        # where `fit_iters` has left the training data, for the next call
    _stop: Any                               # the StopFlag, which takes requests at any time
    _trained: Any = None                     # the snapshot made before the present validation, or this epoch's
    _handlers: dict[str, tuple] = {}         # (callback, function) pairs by event, in order
    _scope: Any = None                       # innermost open scope: [name, the one around it, its cleanups]
    _at_work: Any = None                     # (callback, event, what was at work before) of the running handler
    _busy: frozenset = frozenset()           # handlers at work when the current evaluation started

    @cached_property
    def meta(self) -> dict[str, Any]:
        "What checkpoints shall tell of this run, plain values: `learn.meta['dataset'] = 'v3'`; see `checkpoint_meta`"
        return {}

    # ---- the list

    def _defaults(self, wanted, given):  # default callbacks, but for those whose class the user gives
        if not isinstance(wanted, (bool, dict)): raise TypeError(f"default_cbs: {wanted!r} is no bool and no dict")
        own = wanted if isinstance(wanted, dict) else {}
        if odd := [k for k, v in own.items() if v is None and k not in default_callbacks]:
            raise KeyError(f"default_cbs: `{odd[0]}` is no default callback; they are {', '.join(default_callbacks)}")
        def is_given(cls): return any(isinstance(c, cls) or isinstance(c, type) and issubclass(c, cls) for c in given)
        kept = {k: cls for k, cls in default_callbacks.items() if wanted is not False and not is_given(cls)}
        return [cb for cb in {**kept, **own}.values() if cb is not None]

    def add_cbs(self, cbs: Any) -> Self:  # one callback or a list, classes or instances
        "Add callbacks for good; all of them, or none if one cannot be added"
        old = list(self.cbs)
        try:
            for cb in L(cbs): self.add_cb(cb)
        except BaseException:
            self.remove_cbs([c for c in self.cbs if not _has(old, c)])
            raise
        return self

    def add_cb(self,
        cb: Any,                      # a callback, or a class of one
        order: float|str|None = None,  # overrides the callback's own
    ) -> Self:
        """Add a callback for good; during a run it first gets `before_x` of the scopes that are open

        Raises: TypeError or ValueError if it is none, is there already, or its name is taken; CallbackOrderError."""
        cb = as_callback(cb)
        replaced = check_new(self, cb)
        if order is not None: cb.order = order
        sort_by_run([*self.cbs, cb])
        if replaced:
            warn(f"`{cb}` replaces the callback of its name, whose class has been defined anew")
            self.remove_cb(replaced)
        cb.learn = self
        self.cbs.append(cb)
        vars(self)[cb.name] = cb
        if self.run_kind: self._resolve()
        try:
            for scope in [*self._scopes(inner=True)][::-1]:
                before, _, _, cleanup = events_of[scope[0]]
                scope[2] += [h for h in self._handlers[cleanup] if h[0] is cb and self._acts(cb, cleanup)]
                self._fire(before, [h for h in self._handlers[before] if h[0] is cb])
        except Exception as e:
            if not isinstance(e, CancelException): self.remove_cb(cb)  # it cannot join
            raise
        return self

    def remove_cbs(self, cbs: Any) -> Self:  # callbacks, or classes: all of their instances
        "Remove callbacks"
        for cb in L(cbs): self.remove_cb(cb)
        return self

    def remove_cb(self, cb: Any) -> Self:  # a callback, or a class: all its instances, if there are any
        """Remove a callback; during a run it first gets `cleanup_x` of the scopes that are open

        Raises: ValueError if it is not there, or is the TrainEvalCallback."""
        if isinstance(cb, type): return self.remove_cbs(self.cbs.filter(lambda c: isinstance(c, cb)))
        if not _has(self.cbs, cb) or isinstance(cb, TrainEvalCallback):
            why = "the loop needs it" if _has(self.cbs, cb) else "it is not there"
            raise ValueError(f"`{cb}` cannot be removed: {why}")
        self.cbs = self.cbs.filter(lambda c: c is not cb)
        twins = [c for c in self.cbs if c.name == cb.name]
        if twins: vars(self)[cb.name] = twins[-1]
        else: vars(self).pop(cb.name, None)
        if self.run_kind: self._resolve()
        with ExitStack() as stack:  # runs, last one first, all that it is given, whatever fails
            stack.callback(setattr, cb, 'learn', None)
            for scope in [*self._scopes()][::-1]:
                stack.callback(self._clean_up, [h for h in scope[2] if h[0] is cb], events_of[scope[0]][3], None)
                scope[2][:] = [h for h in scope[2] if h[0] is not cb]
        return self

    @contextmanager
    def added_cbs(self, cbs: Any):  # callbacks, or classes of them
        "Callbacks for the block only"
        cbs = [as_callback(cb) for cb in L(cbs)]
        old, self.passing = (list(self.cbs), self.passing), [*self.passing, *cbs]
        try: yield self.add_cbs(cbs)
        finally:
            old, self.passing = old
            self.remove_cbs([c for c in self.cbs if _has(cbs, c) and not _has(old, c)])

    @contextmanager
    def removed_cbs(self, cbs: Any):  # callbacks, or classes: all their instances
        "Without these callbacks for the block; the same ones come back to their places"
        old = list(self.cbs)
        try: yield self.remove_cbs(cbs)
        finally:
            self.add_cbs([c for c in old if c.learn is None])
            self.cbs = L([c for c in old if _has(self.cbs, c)] + [c for c in self.cbs if not _has(old, c)])

    @property
    def ordered(self) -> list[Callback]: "The callbacks in the order they run"; return sort_by_run(self.cbs)

    def ordered_cbs(self, name: str) -> list[Callback]:  # of the event `name`
        """The callbacks that act at an event, in order

        Raises: TypeError if there is no such event."""
        if name not in vars(event): raise TypeError(no_event(name, 'ordered_cbs: '))
        return [cb for cb in sort_by_run(self.cbs) if cb.handler(name)]

    def __call__(self,
        names: str|list,  # one event or several
        *args,            # what their handlers get
    ) -> None:
        """Fire events

        Raises: TypeError if there is no such event."""
        for name in L(names):
            if name not in vars(event): raise TypeError(no_event(name, 'learn: '))
            if not self.run_kind: self._resolve()
            self._fire(name, self._handlers.get(name, ()), *args)

    def _resolve(self):  # who acts at which event of this kind of run, in order
        cbs = [cb for cb in sort_by_run(self.cbs) if (self.run_kind or 'fit') in L(cb.run_in)]
        self._handlers = {e: tuple((cb, f) for cb in cbs if (f := cb.handler(e)) and (id(cb), e) not in self._busy)
                          for e in vars(event)}

    def _acts(self, cb, name):
        return cb.run and (name not in inner_events or (cb.run_train if self.training else cb.run_valid))

    def _fire(self, name, handlers, *args, always=False):  # always: cleanups, decided upon when their scope was entered
        outer, inner, training = self._at_work, name in inner_events, self.training
        try:
            for cb, f in handlers:
                if not always:
                    if cb.learn is None or not cb.run: continue  # removed or switched off a moment ago
                    if inner and not (cb.run_train if training else cb.run_valid): continue
                self._at_work = cb, name, outer
                f(*args)
        except Exception as e:
            where = f"`{cb}` at `{name}`, epoch {self.epoch}, batch {self.iter}"
            if isinstance(e, CancelException): e.origin = e.origin or where
            else: e.add_note(f"raised by {where}")
            raise
        finally: self._at_work = outer

    # ---- scopes

    def _with_events(self, f, event_type, ex=None, final=noop):
        "Run `f` in a scope: `before_x`, `f`, on a cancel `after_cancel_x`, then `after_x`, `cleanup_x` and `final`"
        before, cancelled, after, cleanup = events_of[event_type]
        self._scope = scope = [event_type, self._scope, []]
        if cleaners := self._handlers[cleanup]: scope[2] += [h for h in cleaners if self._acts(h[0], cleanup)]
        error, ended, ex = None, True, ex or scopes[event_type]
        try:
            try:
                if handlers := self._handlers[before]: self._fire(before, handlers)
                f()
            except ex:
                ended = False
                if handlers := self._handlers[cancelled]: self._fire(cancelled, handlers)
            if handlers := self._handlers[after]: self._fire(after, handlers)
            return ended
        except BaseException as e:
            error = e
            raise
        finally:
            try:
                if scope[2]: self._clean_up(scope[2], cleanup, error)
            finally:
                self._scope, error = scope[1], None  # no cycle of exception and frame, which would keep the batch
                if final is not noop: final()

    def _clean_up(self, handlers, name, error):  # all of them, whatever fails; the gravest error is raised
        errors = [error] if error else []
        while handlers:
            try: self._fire(name, [handlers.pop()], always=True)
            except CancelException as e:
                errors.append(RuntimeError(f"{type(e).__name__} raised by {e.origin}: nothing is left to cancel there"))
            except BaseException as e: errors.append(e)
        def gravity(e): return 2 if not isinstance(e, Exception) else not isinstance(e, CancelException)
        worst = max(errors, key=gravity, default=None)  # the first of the gravest
        for e in errors:
            if worst and e is not worst: worst.add_note(f"and then {type(e).__name__}: {e}")
        try:
            if worst is not None and worst is not error: raise worst
        finally: errors = worst = error = e = None  # no cycle of exception and frame

    def _scopes(self, inner=False):  # the open scopes, innermost first; inner: of the present evaluation or fit only
        scope = self._scope
        while scope and not (inner and scope[0] == 'frame'):
            if scope[0] != 'frame': yield scope
            scope = scope[1]

    def _rest(self):  # between batches, phases or epochs, with nothing under way: what is saved here resumes exactly
        self.asked, scopes = self._stop.take(), {scope[0] for scope in self._scopes()}
        if scopes and 'validate' not in scopes: self('save_point')  # there a callback may have put in other weights
        if (error := stop_error(self, self.asked)) is None:
            for k, by in self.asked.items() if 'validate' in scopes else (): self._stop.ask(k, by=by)  # soon
            return
        if self._scope and self.run_kind == 'fit': self.paused = pause(self)
        try: raise error
        finally: error = None  # no cycle of exception and frame, which would keep the batch

    def agree(self,
        flag: bool,  # what this process would do
    ) -> bool:
        "`flag`; where several processes train together, what they decide together"
        return flag
