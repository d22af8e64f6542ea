"""Convolutions with channels last in memory, which GPUs and CPUs are often faster with, above all in half precision."""
from typing import Any

import torch
from fastcore.basics import patch
from torch import Tensor
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from ..callback import Callback
from ..learner import Learner
from ..tensors import map_tensors
from .precision import MixedPrecision

__all__ = ['ChannelsLast']

formats = {4: torch.channels_last, 5: torch.channels_last_3d}


def _channels_last(t: Tensor) -> Tensor:
    if t.ndim not in formats or t.layout is not torch.strided: return t
    return t.contiguous(memory_format=formats[t.ndim])


class ChannelsLast(Callback):
    """Weights of 2-d and 3-d convolutions, and inputs of 4 or 5 dimensions, have their channels last in memory

    So they are during fits, sweeps and evaluations, and afterwards as before; values and shapes stay. What the
    optimizer keeps of a weight goes with it: kernels that take several tensors at once read memory, not strides.
    Order: fastai's: before callbacks that change inputs, after the model has been moved to its device."""
    order = -1
    unique = True
    _weights: Any = ()  # those that have been changed
    _matched = True     # do gradients and the optimizer's state lie in memory as their weights do?

    def before_fit(self):
        ws = dict.fromkeys(m.weight for m in self.model.modules() if isinstance(m, _ConvNd) and not is_lazy(m.weight))
        self._weights = [w for w in ws if w.is_contiguous() and w.ndim in formats]
        for w in self._weights: w.data = _channels_last(w.data)
        if self.run_kind in ('fit', 'lr_find'): self._match()

    def _match(self):
        state = self.opt.opt.state if self.opt else {}
        for w in self._weights:
            if w.grad is not None: w.grad = self._like(w.grad, w)
            for k, t in state[w].items() if w in state else (): state[w][k] = self._like(t, w)
        self._matched = True

    def _like(self, t, w):
        if not isinstance(t, Tensor) or t.shape != w.shape or t.stride() == w.stride(): return t
        return torch.empty_like(w, dtype=t.dtype, requires_grad=False).copy_(t)

    def before_train(self): self._matched = False  # what is resumed from a file is put there later

    def before_batch(self):
        self.learn.xb = map_tensors(_channels_last, self.xb)
        if self.training and not self._matched: self._match()

    def cleanup_fit(self):
        for w in self._weights: w.data = w.data.contiguous()
        if self.run_kind in ('fit', 'lr_find'): self._match()
        self._weights = ()


@patch
def to_channelslast(self: Learner,
    use_amp: bool = True,      # mixed precision too, unless there is some already
    amp_mode: str = 'fp16',    # 'fp16' or 'bf16'
    **kwargs,                  # of `MixedPrecision`
) -> Learner:
    "Train and evaluate with channels last in memory, from now on"
    if not self.cbs.filter(lambda cb: isinstance(cb, ChannelsLast)): self.add_cb(ChannelsLast())
    if use_amp and not self.cbs.filter(lambda cb: isinstance(cb, MixedPrecision)):
        self.add_cb(MixedPrecision(amp_mode, **kwargs))
    return self


@patch
def to_contiguous(self: Learner,
    to_fp32: bool = False,  # in full precision too
) -> Learner:
    "Train and evaluate with memory as torch lays it out, from now on"
    self.remove_cb(ChannelsLast)
    return self.to_fp32() if to_fp32 else self
