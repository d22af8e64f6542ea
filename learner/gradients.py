"""The gradients of one call of a module, by watching tensors and not the module, so that it may work in place."""
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .tensors import map_tensors, tensors_in

__all__ = ['GradientWatch']


class GradientWatch:
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
