"""The calls of a model's modules in a forward: in which order, with which shapes, and what each costs by itself."""
import math
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from itertools import groupby
from typing import Any
from warnings import catch_warnings, filterwarnings

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from .hooks import Hooks, can_hook
from .layers import is_leaf
from .tensors import tensors_in

__all__ = ['Call', 'Calls', 'n_bytes', 'shapes_text', 'flop_counter', 'layer_by_layer']

Shapes = list[tuple[int, ...]]


class Call:
    "One call of a module"
    end: Any = None      # the mark at its end; None: it has failed, or not ended yet
    output: Shapes = []  # of the tensors that it gave
    n_bytes = 0          # of the memory that these take and no earlier output does

    def __init__(self,
        m: nn.Module,  # that is called
        inputs: Any,  # a nested batch
        start: Any,   # the mark at its beginning
    ):
        self.m, self.inputs, self.start = m, _shapes(inputs), start
        self.inner: list[Call] = []  # those that it made


class Calls:
    "The calls of some modules while `run` runs"
    def __init__(self,
        names: dict[nn.Module, str],  # the modules, with their names
        mark: Callable[[], Any],      # gives what stands on some meter, at the beginning and the end of each call
    ):
        self.names, self.mark = names, mark
        self.all: list[Call] = []
        self.open: list[Call] = []  # that have not ended, outermost first
        self.given: set[StorageWeakRef] = set()  # memory that holds the output of an earlier call

    def run(self,
        f: Callable[[], Any],  # runs the model
    ) -> None:
        "Run `f` with hooks on the modules"
        ms = [m for m in self.names if can_hook(m)]
        with Hooks(ms, self._begin, detach=False, pre=True), Hooks(ms, self._end, detach=False): f()

    def _begin(self, m, inputs):
        call = Call(m, inputs, self.mark())
        for outer in self.open[-1:]: outer.inner.append(call)
        self.open.append(call)
        self.all.append(call)

    def _end(self, m, inputs, output):
        while (call := self.open.pop()).m is not m: pass  # calls within it that failed, which the model dealt with
        call.end, call.output = self.mark(), _shapes(output)
        for t in tensors_in(output):
            if t.layout is not torch.strided or t.is_nested: continue
            try: memory = StorageWeakRef(t.untyped_storage())
            except NotImplementedError: continue  # within `vmap` it has none of its own
            if memory not in self.given: call.n_bytes += n_bytes(t)
            self.given.add(memory)

    def costs(self,
        between: Callable[[Any, Any], Any],  # the cost, from two marks
    ) -> dict[nn.Module, Any]:
        "What the calls of each module cost, without those that they made"
        costs = defaultdict(int)
        for call in self.all:
            if call.end is None: continue
            inner = sum(between(c.start, c.end) for c in call.inner if c.end is not None)
            costs[call.m] += between(call.start, call.end)-inner
        return costs

    def where(self) -> str:
        "How far a forward came that failed, and the shapes until then"
        if not self.open: return 'no layer was reached'
        at, done = self.open[-1], [c for c in self.all if c.end is not None and is_leaf(c.m)]
        lines = [f'  {self._name(c.m)}: {shapes_text(c.inputs)} to {shapes_text(c.output)}' for c in done[-10:]]
        where = f"the forward failed in {self._name(at.m)}, which got {shapes_text(at.inputs) or 'no tensor'}"
        return '\n'.join([where, *(['the layers before:'] if lines else []), *lines])

    def _name(self, m): return f'`{self.names[m]}` ({type(m).__name__})' if self.names[m] else f'`{type(m).__name__}`'


def _shapes(b): return [tuple(t.shape) for t in tensors_in(b)]


def shapes_text(
    shapes: Shapes,  # of several tensors
) -> str:
    """Shapes in a few words

    Example:
    >>> shapes_text([(4, 5), (6,), (6,)])
    '(4, 5), 2 × (6,)'
    """
    runs = [(shape, len([*same])) for shape, same in groupby(shapes)]
    return ', '.join(f'{shape}' if n == 1 else f'{n} × {shape}' for shape, n in runs)


def n_bytes(
    t: Tensor,  # strided
) -> int:
    "What its elements take"
    return t.numel()*t.element_size()


# ---- counting

def _rnn_flops(x, weights, *args, **kwargs):  # each weight is used once for each place of each sequence
    return 2*math.prod(x[:-1])*sum(math.prod(w) for w in weights if len(w) == 2)

def _mkldnn_rnn_flops(x, w_input, w_hidden, *args, **kwargs): return _rnn_flops(x, [w_input, w_hidden])


@contextmanager
def flop_counter():  # its value has `get_total_flops`
    "torch's FlopCounterMode, which here knows recurrent layers and attention on the CPU too"
    from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
    aten = torch.ops.aten
    def attention(q, k, v, *args, **kwargs): return sdpa_flop_count(q, k, v)
    counter = FlopCounterMode(display=False, custom_mapping={
        aten.mkldnn_rnn_layer: _mkldnn_rnn_flops, aten._cudnn_rnn: _rnn_flops,
        aten._scaled_dot_product_flash_attention_for_cpu: attention})
    with catch_warnings(), counter:
        filterwarnings('ignore', 'Using `torch.compile')  # the counter's own hooks on all modules
        yield counter


@contextmanager
def layer_by_layer():
    "Let nn.TransformerEncoder call its layers, and no kernel in place of them"
    old = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try: yield
    finally: torch.backends.mha.set_fastpath_enabled(old)
