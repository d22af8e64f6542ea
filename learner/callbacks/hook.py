"""HookCallback: hooks on a model's modules during the batches of a fit."""
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from ..callback import Callback
from ..display import say
from ..hooks import Hooks, find_modules, is_compiled
from ..utils import check_number, warn

__all__ = ['HookCallback', 'check_every']


def check_every(
    cb: Callback,       # for the message
    every: int|None,    # as it was given
) -> int:
    """`every`, or 1 if it is None

    Raises: ValueError or TypeError if it is no whole number of 1 or more."""
    if every is None: return 1
    check_number(f'{cb}: `every`, 10 for one batch in ten,', every, 1, whole=True)
    return int(every)


class _Watched(NamedTuple):
    "A batch whose hooks are on"
    scope: Any                # of the batch; an evaluation that a callback starts within it has others
    stored: dict[str, Any]    # what each hook returned last, by name of the module
    hooks: Hooks


class HookCallback(Callback):
    """Calls `hook` each time one of the modules runs in a training batch, as a Hook does

    A subclass has a method `hook(m, inputs, output)` (with `pre` or `is_forward=False` it gets what a Hook gives), or
    a function is given; what it returns is in `stored`, by name of the module, until the batch is over. Hooks are on
    the modules during these batches only, in which nothing runs compiled. `run_valid = True` in a subclass adds
    the batches of evaluations.
    Raises: TypeError or ValueError if there is no `hook`, for an odd `every`, and at the start of a fit if `modules`
    finds nothing."""
    run_valid = False
    modules: Any = None               # these four also where a subclass has an `__init__` of its own
    every = 1
    options: dict[str, bool] = {}
    open: Any = ()                    # the batch whose hooks are on, within it an evaluation's
    names: dict[nn.Module, str] = {}  # of the modules
    told = False  # that nothing runs compiled

    def __init__(self,
        modules: Any = None,       # as `find_modules` takes them; None: those with parameters and without children
        every: int|None = None,    # only in one of so many batches; None: in all
        is_forward: bool = True,   # False: backward, with gradients
        detach: bool = True,       # give `hook` tensors that are cut from their graph
        cpu: bool = False,         # and copied to the CPU, which waits for a GPU
        pre: bool = False,         # before the module runs
        hook: Callable|None = None,  # called in place of the method
    ):
        self.modules, self.every = modules, check_every(self, every)
        self.options = dict(is_forward=is_forward, detach=detach, cpu=cpu, pre=pre)
        if hook is not None: self.hook = hook
        if not callable(vars(self).get('hook') or getattr(type(self), 'hook', None)): raise TypeError(
            f"{self} has no `hook` to call: give `hook=f`, or write a method `hook(self, m, inputs, output)`")

    def before_fit(self):
        self.open = []
        self.names = {m: name for name, m in find_modules(self.model, self.modules).items()}

    def before_train(self):  # other modules may have been put in
        try: names = {m: name for name, m in find_modules(self.model, self.modules).items()}
        except ValueError as e: return warn(f"{self}: {e}: nothing is hooked from epoch {self.epoch} on")
        if names.keys() != self.names.keys(): self.changed(names)

    def changed(self,
        names: dict[nn.Module, str],  # of the modules now
    ) -> None:
        "The model has other modules than at the start of the fit: these are hooked from now on"
        self.names = names

    def before_batch(self):
        if (self.learn.train_iter if self.training else self.iter) % self.every: return
        if not self.told and is_compiled(self.model):
            self.told = True
            say(f"{self}: in one of {self.every} batches, those with hooks on, the compiled model runs as plain Python")
        scope, stored = self._batch(), {}
        self.open.append(_Watched(scope, stored, Hooks(self.names, partial(self._keep, scope, stored), **self.options)))

    def _batch(self): return next((s for s in self.learn._scopes() if s[0] == 'batch'), None)  # the innermost

    def _keep(self, scope, stored, m, *values):
        if self._batch() is not scope: return  # in an evaluation that a callback has started
        try: stored[self.names[m]] = self.hook(m, *values)
        except Exception as e:
            e.add_note(f"raised by the hook of `{self}` on module `{self.names[m]}`")
            raise

    @property
    def stored(self) -> dict[str, Any]:
        "What `hook` returned in this batch, by name of the module"
        return self.open[-1].stored if self.open else {}

    def cleanup_batch(self):
        is_there = any(cb is self for cb in self.learn.cbs)  # else it is being removed, within whatever scope
        while self.open and (self.open[-1].scope is self._batch() or not is_there): self.open.pop().hooks.remove()
