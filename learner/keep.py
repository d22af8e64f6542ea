"""Keeping things as they are: what `lr_find` and others change for a while is put back in place, whatever happened.

Kept are attributes of models, optimizers, callbacks and Learners, the contents of their tensors and arrays with their
gradients, and of dicts, lists and sets however deep. Random generators are kept by their state, other objects by
`state_dict`, if they have it; else only which object it is. Nothing is written to disk."""
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import torch
from fastcore.foundation import L
from torch import Tensor, nn
from torch.optim import Optimizer as TorchOptimizer

__all__ = ['kept', 'is_generator']

containers: Any = OrderedDict, dict, list, set, deque


@contextmanager
def kept(
    *objects: Any,        # models, optimizers, tensors, dicts of them …
    whole: tuple = (),    # further classes whose attributes are kept wherever one is found
    apart: tuple = (),    # objects that are not looked into wherever one is found
):
    "Put `objects` back as they were after the block, even after an error; what was lazy is so again"
    seen: dict[int, Any] = {id(o): o for o in apart}  # by id, each with a reference that keeps the id its own
    kinds = (nn.Module, TorchOptimizer, L, *whole)
    restores = [back for o in objects for back in _content(o, seen, kinds)]
    with ExitStack() as stack:  # puts all back, last one first, whatever fails
        for back in restores: stack.callback(back)
        yield


def _attributes(o, seen, kinds) -> Iterator[Callable]:
    seen[id(o)], attrs, cls = o, vars(o), type(o)
    old = dict(attrs)
    for v in [*_elsewhere(o), *old.values()]: yield from _content(v, seen, kinds)
    def back():
        attrs.clear()
        attrs.update(old)
        # a lazy module becomes another class by its first batch, one that gets a parametrization a class of its own
        if type(o) is not cls: object.__setattr__(o, '__class__', cls)
    yield back


def _elsewhere(o):  # what belongs to `o` and is not among its attributes
    if isinstance(o, nn.Module):  # a script module; and who overrides these methods may take other arguments
        return [*nn.Module.parameters(o, False), *nn.Module.buffers(o, False), *nn.Module.children(o)]
    return [v for c in type(o).__mro__ for v in vars(c).values() if isinstance(v, containers)]  # a list of the class's


def _content(o, seen, kinds) -> Iterator[Callable]:  # what brings back the content of `o`, itself left where it is
    if id(o) in seen or isinstance(o, (str, bytes, int, float, bool, type(None), type)): return
    if isinstance(o, kinds): yield from _attributes(o, seen, kinds)
    elif isinstance(o, tuple):
        seen[id(o)] = o
        for v in o: yield from _content(v, seen, kinds)
    elif kind := next((k for k in containers if isinstance(o, k)), None):
        seen[id(o)], old = o, kind(o)
        for v in old.values() if isinstance(old, dict) else old: yield from _content(v, seen, kinds)
        def back():  # by the methods of `kind`: those of a subclass may do other things, or be forbidden
            kind.clear(o)
            (kind.update if isinstance(old, (dict, set)) else kind.extend)(o, old)
        yield back
    else:
        seen[id(o)] = o
        back = _simple(o)
        if back is not None: yield back


def is_generator(
    o: Any,
) -> bool:
    "Is it a random generator of torch's, numpy's or python's?"
    return isinstance(o, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random))


def _simple(o: Any) -> Any:  # what brings it back, or None
    if isinstance(o, Tensor): return _tensor(o)
    if isinstance(o, np.ndarray):
        array = o.copy()
        return (lambda: np.copyto(o, array)) if o.flags.writeable else None
    if isinstance(o, np.random.Generator): return partial(setattr, o.bit_generator, 'state', o.bit_generator.state)
    if isinstance(o, (torch.Generator, np.random.RandomState)): return partial(o.set_state, o.get_state())
    if isinstance(o, random.SystemRandom): return None  # has no state
    if isinstance(o, random.Random): return partial(o.setstate, o.getstate())
    if hasattr(type(o), 'state_dict') and hasattr(type(o), 'load_state_dict'):
        try: state = deepcopy(o.state_dict())
        except Exception: return None  # it takes arguments, or cannot be copied: nothing to put back
        return partial(_load, o, state)


def _load(o, state):
    try: o.load_state_dict(state)
    except Exception as e:
        e.add_note(f"`{type(o).__name__}` did not take back the state that it had given before")
        raise


def _tensor(o):
    if nn.parameter.is_lazy(o): return _lazy(o)
    data, leaf, wanted = o.detach(), o.is_leaf, o.requires_grad
    places, size = _places(data), _size(data)
    content, grad = places.clone() if size or not data.numel() else None, o.grad if leaf else None  # None: it has none
    grad_back = None if grad is None else _tensor(grad)
    def back():
        if _size(data) != size: data.untyped_storage().resize_(size)  # it was freed, to be gathered again
        with torch.no_grad():  # what is as before may be read-only
            if content is not None and not _same(places, content): places.copy_(content)
        o.data = data  # the memory it was in, also if it has been moved since, or has another shape or type
        if not leaf: return
        if not o.is_leaf: o.detach_()
        if grad_back: grad_back()
        o.grad, o.requires_grad = grad, wanted
    return back


def _lazy(o):  # has no content yet, and no operation but these
    data, cls, wanted = o.data, type(o), o.requires_grad
    def back():
        o.data, o.grad = data, None
        o.__class__, o.requires_grad = cls, wanted
    return back


def _plain(t): return t.layout is torch.strided and not t.is_nested

def _size(t): return t.untyped_storage().nbytes()*(not t.is_meta) if _plain(t) else -1  # in bytes; 0: freed, or meta

def _same(a, b): return _plain(a) and torch.equal(a, b)


def _places(t):  # `t` with each place in memory once, which expanded dimensions repeat: they cannot be written to
    if not _plain(t) or 0 not in t.stride(): return t
    return t[tuple(slice(1) if step == 0 else slice(None) for step in t.stride())]
