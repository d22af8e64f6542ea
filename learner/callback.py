"""Callback: methods named after events, run by the Learner in a known order; and TrainEvalCallback, always there."""
import inspect
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

from fastcore.basics import class2attr

from .events import LoopState, event, no_event, similar_event
from .modes import move, train_mode
from .utils import warn

__all__ = ['Callback', 'TrainEvalCallback', 'before_batch_cb', 'run_kinds']

run_kinds = frozenset({'fit', 'validate', 'predict', 'lr_find'})


class Callback:
    """Code that runs at events: each method named after an event is called at it

    `self.learn` is the Learner; reading `self.anything_else` falls through to it, writing needs `self.learn.x = …`.
    Whatever is acquired in `before_x` is released in `cleanup_x`, which always runs.
    `Callback(after_batch=f)` makes one from functions; each is called with the callback.
    Raises: TypeError for a function or method that is named like an event, and is none."""
    order: Any = 0                   # lower runs earlier: a number or an MMEngine name such as 'VERY_LOW'
    run_after: Any = ()              # classes or class names that must have run before this one
    run_before: Any = ()             # classes or class names that must run later
    toward_end: bool = False         # behind all that are not
    run: bool = True                 # False: takes part in nothing
    run_train: bool = True           # False: not in the events of training batches
    run_valid: bool = True           # False: not in the events of evaluation batches
    run_in: Any = run_kinds          # the kinds of run it acts in
    unique: bool = False             # True: a Learner has at most one of this class
    remove_on_fetch: bool = False    # True: left out while predictions are fetched
    state: tuple[str, ...] = ()      # names of the attributes that `state_dict` holds
    not_hashed: Any = ()             # what of `state_dict` says nothing of how a run goes on, such as times
    learn: Any = None                # the Learner it was added to

    def __init__(self,
        **handlers: Callable,  # functions by event name; each gets the callback
    ):
        for name, f in handlers.items():
            if name not in vars(event): raise TypeError(no_event(name, 'Callback.'))
            vars(self)[name] = partial(f, self)

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        for name, f in [item for c in cls.__mro__ if c not in (Callback, object) for item in vars(c).items()]:
            if inspect.isroutine(f) and not name.startswith('_') and similar_event(name):
                raise TypeError(no_event(name, f'{cls.__name__}.'))
            if name in vars(event) and not inspect.isroutine(f):
                raise TypeError(f"`{cls.__name__}.{name}` is a `{type(f).__name__}`; what acts at an event is a method")

    @property
    def name(self) -> str:  # `ProgressCallback` is `learn.progress`
        "The attribute of the Learner under which this callback is found"
        return class2attr(self, 'Callback')

    def handler(self, name: str) -> Callable|None:  # None if this callback does nothing at the event
        "What this callback does at event `name`: its own function or its class's method, nothing by delegation"
        return vars(self).get(name) or (getattr(self, name) if hasattr(type(self), name) else None)

    def state_dict(self) -> dict[str, Any]:
        "The attributes named in `state`, by name: what a checkpoint keeps of this callback"
        return {k: getattr(self, k) for k in self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # what `state_dict` gave
        "Put the attributes back"
        for k in self.state: setattr(self, k, state[k])

    def __getattr__(self, name: str) -> Any:
        cls = type(self).__name__
        own = inspect.getattr_static(type(self), name, None)
        if self.learn is None or name.startswith('__'):
            raise AttributeError(f"`{cls}` has no `{name}`" + (
                '' if self.learn else ", and is not part of a Learner that might have it"), name=name, obj=self)
        if isinstance(own, property): return own.__get__(self)  # again, so that the property's own error is seen
        try: return getattr(self.learn, name)
        except AttributeError as e:
            if e.obj is not self.learn or e.name != name: raise
            hint = f"; the model has: `self.model.{name}`" if hasattr(self.model, name) else ''
            message = f"`{cls}` has no `{name}`, and neither has its Learner{hint}"
            raise AttributeError(message, name=name, obj=self) from None

    def __repr__(self) -> str: return type(self).__name__


def _loop_field(name):  # a property, so that reading it costs no Python call
    def refuse(self, value):
        raise AttributeError(f"{type(self).__name__}: `{name}` is the loop's: write `self.learn.{name} = …` to set it")
    return property(attrgetter(f'learn.{name}'), refuse, doc=f"The Learner's `{name}`, to be read")

for _name in [k for k in vars(LoopState) if not k.startswith('_')]: setattr(Callback, _name, _loop_field(_name))


def before_batch_cb(
    f: Callable,      # `f(cb, xb, yb)` returns the new `xb, yb`, or None to leave them
) -> type[Callback]:  # pass it to `cbs=` like any other callback
    "Decorator: a callback that changes each batch before the model sees it"
    def before_batch(self):
        if (new := f(self, self.xb, self.yb)) is not None: self.learn.xb, self.learn.yb = new
    return type(f.__name__, (Callback,), dict(before_batch=before_batch, __doc__=f.__doc__, __module__=f.__module__))


class TrainEvalCallback(Callback):
    "Moves model and loss to the device, switches their modes, and counts batches; every Learner has it"
    order = -10
    run_valid = False
    unique = True
    said = False  # has the user been told which modules stay in eval?

    def before_fit(self):
        if self.run_kind in ('fit', 'lr_find'): self.learn.train_iter, self.learn.pct_train = 0, 0.
        moved = [move(m, self.device) for m in self.modules]
        if any(moved) and self.opt: self.opt.state_to_device()

    def before_train(self):
        self.learn.pct_train, whole = self.epoch/self.n_epoch, not self.model.training
        self.dls.train.set_epoch(self.passes+self.epoch)
        kept = [name for m in self.modules for name in train_mode(m)]
        if (kept or whole) and not self.said: warn(
            "the model was in eval mode as a whole, and all of it is trained" if whole else "in eval mode, and left so "
            f"while training: {', '.join(kept)}; `learn.model.train()` before fit trains them")
        self.said = True

    def before_validate(self):
        for m in self.modules: m.eval()

    def after_batch(self):
        learn = self.learn
        learn.train_iter += 1
        if n := learn.n_iter or learn.n_steps:
            learn.pct_train = (learn.epoch + min(1, (learn.iter+1)/n))/learn.n_epoch
