"""Looking into a model while it runs: hooks on modules, by name, type or predicate, that are always taken off again.

A hook is on its module only as long as it is open; in a copy of the module, or in a file, it does nothing. Compiled
code does not see hooks, so while one is open what `torch.compile` made runs as plain Python."""
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from .gradients import GradientWatch
from .layers import has_params, is_leaf
from .tensors import map_tensors, to_detach
from .weights import named_layers, unwrapped

__all__ = ['Hook', 'Hooks', 'hook_output', 'hook_outputs', 'hook_input', 'hook_inputs', 'find_modules', 'is_compiled',
           'can_hook']


# ---- compiled code does not see hooks

class _Uncompiled:
    "What `torch.compile` made runs as plain Python while somebody needs that, in whatever order they come and go"
    n_open = 0
    stack = ExitStack()

    def enter(self):
        if not self.n_open: self.stack.enter_context(torch.compiler.set_stance('force_eager'))
        self.n_open += 1

    def leave(self):
        self.n_open -= 1
        if not self.n_open: self.stack.close()

_uncompiled = _Uncompiled()


def is_compiled(
    model: nn.Module,
) -> bool:
    "Has `torch.compile` made something of it, or of a module in it?"
    return any(type(m).__name__ == 'OptimizedModule' or m._compiled_call_impl is not None for m in model.modules())


def can_hook(
    m: nn.Module,
) -> bool:
    "Does it call hooks, as all but TorchScript does?"
    return not isinstance(m, torch.jit.ScriptModule)


# ---- one hook

def _nothing(*args): "What a hook is in a copy of its module"

def _make_nothing(): return _nothing


class _OnModule:
    "The function that is put on a module: in a copy of the module, or in a file, it is `_nothing`"
    def __init__(self, f): self.f = f
    def __call__(self, *args): return self.f(*args)
    def __reduce__(self): return _make_nothing, ()


class Hook:
    """Calls a function each time a module runs, and keeps what it returned last as `stored`; a context, or `remove` it

    Forward, it is `hook_func(module, inputs, output)`, where `inputs` is a tuple of what the module was called with,
    also by keyword; with `pre=True`, before the module runs, `hook_func(module, inputs)`. Backward it is
    `hook_func(module, grad_inputs, grad_outputs)`, tuples with the gradient of each tensor in inputs and output, None
    for one that has none; with `pre=True` `hook_func(module, grad_outputs)`, which comes also where no input has a
    gradient. Backward, tensors are watched and not modules, so that the module and what follows may work in place.
    What `hook_func` returns changes nothing in the model. While a hook is open, nothing runs compiled.
    Raises: TypeError if `m` is no module, or TorchScript."""
    def __init__(self,
        m: nn.Module,            # whose calls are watched
        hook_func: Callable,     # called at each; what it returns is `stored`
        is_forward: bool = True,  # False: backward, with gradients
        detach: bool = True,     # give it tensors that are cut from their graph
        cpu: bool = False,       # and copied to the CPU, which waits for a GPU
        pre: bool = False,       # before the module runs
    ):
        if not isinstance(m, nn.Module): raise TypeError(
            f"Hook: {str(m):.60} is {'a class' if isinstance(m, type) else f'a `{type(m).__name__}`'}, no module; "
            "`find_modules(model, 'name' or class)` finds some")
        if not callable(hook_func): raise TypeError(
            f"Hook: hook_func={hook_func!r:.60} cannot be called; give a function `f(module, inputs, output)`")
        if not can_hook(m): raise TypeError(
            f"Hook: `{m.original_name}` is TorchScript, which calls no hooks: hook what it was made from, or what is "
            "around it")
        self.m, self.hook_func, self.is_forward, self.pre = m, hook_func, is_forward, pre
        self.detach, self.cpu = detach, cpu
        self.stored: Any = None  # what `hook_func` returned last
        self.n_calls = 0         # how often it was called
        self._under_way: list = []  # backward: the calls that the module is working on
        with ExitStack() as stack:  # takes off what there is, should the rest fail
            self._handles = [stack.enter_context(handle) for handle in self._register()]
            _uncompiled.enter()
            stack.pop_all()

    def _register(self):
        before = partial(self.m.register_forward_pre_hook, with_kwargs=True)
        after = partial(self.m.register_forward_hook, with_kwargs=True)
        if not self.is_forward:
            if not self.pre: yield before(_OnModule(self._watch_inputs))
            yield after(_OnModule(self._watch_outputs), always_call=True)  # also to forget the inputs of a failed call
        elif self.pre: yield before(_OnModule(self._before))
        else: yield after(_OnModule(self._after))

    def _call(self, *values):
        if not self._handles: return  # removed, between forward and backward
        if self.detach: values = to_detach(values, cpu=self.cpu)
        self.n_calls += 1
        self.stored = self.hook_func(self.m, *values)

    def _before(self, m, args, kwargs): self._call((*args, *kwargs.values()))
    def _after(self, m, args, kwargs, output): self._call((*args, *kwargs.values()), output)

    def _watch_inputs(self, m, args, kwargs):  # before the module may change them in place
        if not torch.is_grad_enabled(): return
        call = GradientWatch(self._call)
        self._under_way.append(call)
        return call.watch_inputs(args, kwargs)

    def _watch_outputs(self, m, args, kwargs, output):
        if not torch.is_grad_enabled(): return
        if not self.pre and not self._under_way: return  # another's hook has failed before the one above
        call = GradientWatch(self._call) if self.pre else self._under_way.pop()
        return None if output is None else call.watch_outputs(output)  # None: the module failed

    def remove(self) -> None:
        "Take it off; `stored` stays"
        handles, self._handles = self._handles, []
        for h in handles: h.remove()
        if handles: _uncompiled.leave()

    def __repr__(self) -> str:
        kind = ('pre-'*self.pre)+('forward' if self.is_forward else 'backward')
        return f"Hook({type(self.m).__name__}, {kind}, {f'{self.n_calls} calls' if self._handles else 'removed'})"

    def __enter__(self) -> Self: return self
    def __exit__(self, *args) -> None: self.remove()


class Hooks:
    """A Hook on each of several modules: a sequence of them, and a context

    Raises: ValueError, with what there is, if `which` finds nothing; TypeError for what are no modules."""
    def __init__(self,
        ms: nn.Module|Iterable[nn.Module],  # modules; or a model, and `which` of its modules
        hook_func: Callable,     # as for a Hook
        is_forward: bool = True,  # False: backward, with gradients
        detach: bool = True,     # give it tensors that are cut from their graph
        cpu: bool = False,       # and copied to the CPU, which waits for a GPU
        pre: bool = False,       # before the module runs
        which: Any = None,       # with a model: what `find_modules` takes; None: its children
    ):
        if isinstance(ms, nn.Module): ms = ms.children() if which is None else find_modules(ms, which).values()
        elif which is not None: raise TypeError(f"Hooks: `which={which!r}` needs a model to look in, not a list")
        elif isinstance(ms, (str, type)): raise TypeError(
            f"Hooks: {ms!r:.60} is no module: give modules, or a model and `which={getattr(ms, '__name__', repr(ms))}`")
        self.hooks: list[Hook] = []
        try:
            for m in dict.fromkeys(ms): self.hooks.append(Hook(m, hook_func, is_forward, detach, cpu, pre))
        except BaseException:
            self.remove()
            raise

    @property
    def stored(self) -> list[Any]: "What each keeps"; return [h.stored for h in self.hooks]
    def __repr__(self) -> str: return f"Hooks({', '.join(map(repr, self.hooks))})"

    def remove(self) -> None:
        "Take all of them off; what they store stays"
        for h in self.hooks: h.remove()

    def __getitem__(self, i: Any) -> Any: return self.hooks[i]
    def __len__(self) -> int: return len(self.hooks)
    def __iter__(self) -> Iterator[Hook]: return iter(self.hooks)
    def __enter__(self) -> Self: return self
    def __exit__(self, *args) -> None: self.remove()


# ---- what is asked for most

def _output(m, inputs, output): return output
def _input(m, inputs, *_): return inputs[0] if len(inputs) == 1 else inputs
def _grad_inputs(m, grad_inputs, grad_outputs): return grad_inputs
def _grad_outputs(m, grad_outputs): return grad_outputs


def _kept(func, detach):  # by a Hook: a copy, since later layers may change in place what they get
    def keep(*args): return map_tensors(Tensor.clone, func(*args))
    return keep if detach else func


def hook_output(
    m: nn.Module,         # whose output it is
    detach: bool = True,  # keep a copy; False: the tensor itself, with its graph
    cpu: bool = False,    # on the CPU
    grad: bool = False,   # the gradient instead, when it has been computed
) -> Hook:
    "A Hook whose `stored` is the module's output; with `grad` a tuple: the gradient of each tensor in it"
    return Hook(m, _kept(_grad_outputs if grad else _output, detach), not grad, detach, cpu, pre=grad)


def hook_outputs(
    ms: nn.Module|Iterable[nn.Module],  # modules; or a model, and `which` of its modules
    detach: bool = True,  # keep copies; False: the tensors themselves, with their graph
    cpu: bool = False,    # on the CPU
    grad: bool = False,   # the gradients instead
    which: Any = None,    # with a model: what `find_modules` takes; None: its children
) -> Hooks:
    "`hook_output` of each"
    return Hooks(ms, _kept(_grad_outputs if grad else _output, detach), not grad, detach, cpu, grad, which)


def hook_input(
    m: nn.Module,         # whose input it is
    detach: bool = True,  # keep a copy; False: the tensor itself, with its graph
    cpu: bool = False,    # on the CPU
    grad: bool = False,   # the gradient instead, when it has been computed
) -> Hook:
    "A Hook whose `stored` is the module's input, a tuple if it has several; with `grad` a tuple: a gradient for each"
    return Hook(m, _kept(_grad_inputs if grad else _input, detach), not grad, detach, cpu, pre=not grad)


def hook_inputs(
    ms: nn.Module|Iterable[nn.Module],  # modules; or a model, and `which` of its modules
    detach: bool = True,  # keep copies; False: the tensors themselves, with their graph
    cpu: bool = False,    # on the CPU
    grad: bool = False,   # the gradients instead
    which: Any = None,    # with a model: what `find_modules` takes; None: its children
) -> Hooks:
    "`hook_input` of each"
    return Hooks(ms, _kept(_grad_inputs if grad else _input, detach), not grad, detach, cpu, not grad, which)


# ---- which modules

def find_modules(
    model: nn.Module,   # in which to look
    which: Any = None,  # a module, a class, a name or pattern ('layer*.conv?'), `f(module)`, a list; None: see below
) -> dict[str, nn.Module]:
    """Modules of a model by name, each once, in the order in which they were registered

    A class finds its subclasses too, a function the modules for which it is true, a list what any of it finds. None
    finds the modules with parameters and without children, but not TorchScript, which calls no hooks. Names are those
    of the model that was compiled or wrapped.
    Raises: ValueError if something finds nothing, TypeError if it cannot."""
    layers = dict(named_layers(model))
    if which is None: return {name: m for name, m in layers.items() if is_leaf(m) and has_params(m) and can_hook(m)}
    if isinstance(which, (list, tuple, set)) and not which: raise ValueError("find_modules: which=[] finds no module")
    found: set[str] = set()
    for one in which if isinstance(which, (list, tuple, set)) else [which]:
        names = {name for name, m in layers.items() if _test(one)(name, m)}
        if not names: raise ValueError(_found_nothing(one, layers, model))
        found |= names
    return {name: m for name, m in layers.items() if name in found}


def _test(which) -> Callable[[str, nn.Module], bool]:
    if isinstance(which, str): return lambda name, m: fnmatchcase(name, which)
    if isinstance(which, type): return lambda name, m: isinstance(m, which)
    if isinstance(which, nn.Module): return lambda name, m: m is unwrapped(which)
    if callable(which): return lambda name, m: bool(which(m))
    raise TypeError(f"find_modules: {which!r} is a `{type(which).__name__}`; give a module, a class, a name or "
                    "pattern, a function of a module, or a list of these")


def _found_nothing(which, layers, model):
    name, there = getattr(which, '__name__', repr(which)), [f'`{n}`' for n in layers if n]
    if isinstance(which, type): there = [*dict.fromkeys(f'`{type(m).__name__}`' for m in layers.values())]
    near = [f'`{n}`' for n in get_close_matches(which, layers, 3)] if isinstance(which, str) else []
    listed = ', '.join(near or there[:8])+f' and {len(there)-8} more'*(len(there) > 8 and not near)
    fails = f'this `{type(which).__name__}` is no' if isinstance(which, nn.Module) else f'{name} finds no'
    return (f"find_modules: {fails} module of `{type(model).__name__}`; "
            f"{'did you mean' if near else 'it has'} {listed}{'?' if near else ''}")
