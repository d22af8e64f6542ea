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

from .layers import has_params, is_leaf
from .tensors import map_tensors, tensors_in, to_detach
from .weights import named_layers, unwrapped

__all__ = ['Hook', 'Hooks', 'hook_output', 'hook_outputs', 'hook_input', 'hook_inputs', 'find_modules', 'is_compiled']


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


# ---- one hook

def _nothing(*args): "What a hook is in a copy of its module"

def _make_nothing(): return _nothing


class _OnModule:
    "The function that is put on a module: in a copy of the module, or in a file, it is `_nothing`"
    def __init__(self, f): self.f = f
    def __call__(self, *args): return self.f(*args)
    def __reduce__(self): return _make_nothing, ()


class _BackwardCall:
    """Collects the gradients of one call of a module, each tensor's as it was when the module got or gave it

    It holds no tensor and no node of the graph: they hold it, and such a circle would never be freed."""
    def __init__(self, f):
        self.f, self.sizes, self.wanted = f, {}, set()
        self.found: Any = None  # in this backward pass: gradients by place, None once `f` has been told
        self.backward_pass = -1

    def watch_inputs(self, args, kwargs):  # as views, whose gradients come through this module alone
        views: dict[int, Tensor] = {}
        def view(t):
            if id(t) not in views: views[id(t)] = _alias(t) if t.requires_grad else t
            return views[id(t)]
        args, kwargs = map_tensors(view, (args, kwargs))
        self._watch('inputs', [*tensors_in((args, kwargs))])
        return args, kwargs

    def watch_outputs(self, output):  # a leaf, as a parameter is, outlives the graph, and would keep what is put on it
        output = map_tensors(lambda t: _alias(t) if t.requires_grad and t.is_leaf else t, output)
        self._watch('outputs', [*tensors_in(output)])
        return output

    def _watch(self, which, ts):
        self.sizes[which] = len(ts)
        for i, t in enumerate(ts):
            if not t.requires_grad: continue
            self.wanted.add((which, i))
            t.register_hook(partial(self._got, (which, i), None))
            if _has_base(t): t._base.register_hook(partial(self._got, (which, i), _View(t)))

    def _got(self, place, view, grad):  # of the tensor, or after that of what it is a view of
        if self.backward_pass != (now := torch._C._current_graph_task_id()):
            self.backward_pass, self.found = now, {}
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        if self.found is None: return
        if view is None: self.found[place] = grad
        elif place not in self.found: self.found[place] = view.of(grad) if view.is_changed() else None
        if self.found.keys() >= self.wanted: self._tell()

    def _end(self):  # of the pass: what has not come will not
        if self.found is not None: self._tell()

    def _tell(self):
        found, self.found = self.found, None
        asked = min(which for which, _ in self.wanted)  # inputs, if any has a gradient
        if any(g is not None for (which, _), g in found.items() if which == asked):
            self.f(*(tuple(found.get((which, i)) for i in range(n)) for which, n in self.sizes.items()))


def _alias(t): return t.view_as(t) if t.layout is torch.strided or t.is_nested else t.clone()  # sparse: has no views


def _has_base(t):  # whose gradient can stand for its own
    return t.layout is torch.strided and t._is_view() and not t._base.is_leaf and t._base.dtype == t.dtype


class _View:
    """Where a view is in its base, and whether something in place has come after it

    What changes a view in place is computed from its base, so that the view itself has no gradient any more."""
    def __init__(self, t):
        self.place = t.shape, t.stride(), t.storage_offset()-t._base.storage_offset()
        self.base, self.counter, self.version = (t._base.shape, t._base.stride()), t.detach(), t._version
        self.counter.data = t.new_empty(0)  # goes on counting changes, and holds no memory

    def is_changed(self): return self.counter._version != self.version
    def of(self, grad): return grad.new_empty_strided(*self.base).copy_(grad).as_strided(*self.place)


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
        if not isinstance(m, nn.Module): raise TypeError(f"Hook: {m!r:.60} is a `{type(m).__name__}`, no nn.Module")
        if isinstance(m, torch.jit.ScriptModule): raise TypeError(
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
        call = _BackwardCall(self._call)
        self._under_way.append(call)
        return call.watch_inputs(args, kwargs)

    def _watch_outputs(self, m, args, kwargs, output):
        if not torch.is_grad_enabled(): return
        if not self.pre and not self._under_way: return  # another's hook has failed before the one above
        call = _BackwardCall(self._call) if self.pre else self._under_way.pop()
        return None if output is None else call.watch_outputs(output)  # None: the module failed

    def remove(self) -> None:
        "Take it off; `stored` stays"
        handles, self._handles = self._handles, []
        for h in handles: h.remove()
        if handles: _uncompiled.leave()

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
        self.hooks: list[Hook] = []
        try:
            for m in dict.fromkeys(ms): self.hooks.append(Hook(m, hook_func, is_forward, detach, cpu, pre))
        except BaseException:
            self.remove()
            raise

    @property
    def stored(self) -> list[Any]: "What each keeps"; return [h.stored for h in self.hooks]

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
    finds the modules with parameters and without children. Names are those of the model that was compiled or wrapped.
    Raises: ValueError if something finds nothing, TypeError if it cannot."""
    layers = dict(named_layers(model))
    if which is None: return {name: m for name, m in layers.items() if is_leaf(m) and has_params(m)}
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
    if isinstance(which, nn.Module): which = type(which)
    near = get_close_matches(which, layers, 3) if isinstance(which, str) else []
    there = ', '.join(f'`{n}`' for n in near or [*layers][1:9])
    return (f"find_modules: {getattr(which, '__name__', repr(which))} finds no module of `{type(model).__name__}`; "
            f"{'did you mean' if near else 'it has'} {there}{'?' if near else ''}")
