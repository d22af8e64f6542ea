"""What a model gives for a dummy image; its modes and buffers, and the random streams, stay as they are."""
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from .hooks import Hooks, can_hook
from .keep import kept
from .layers import flatten_model
from .loader import untouched
from .tensors import describe, map_tensors

__all__ = ['in_channels', 'dummy_eval', 'model_sizes', 'num_features_model']


def _first_conv(m):  # the first layer that tells how many channels an image has, their number, and its weight
    for layer in flatten_model(m):
        weight = dict(layer.named_parameters()).get('weight')
        if isinstance(layer, _ConvNd): return layer, layer.in_channels, next(layer.parameters())
        if weight is not None and not is_lazy(weight) and weight.ndim > 2: return layer, weight.shape[1], weight
    raise ValueError(f"`{type(m).__name__}` has no convolution that tells how many channels an image has; "
                     "`learn.summary()` shows the sizes for a batch of the data")


def in_channels(
    m: nn.Module,  # a model for images, or for sequences or volumes
) -> int:
    """How many channels its first convolution takes

    Raises: ValueError if it has none, or one that knows only after the first batch."""
    layer, n, _ = _first_conv(m)
    if not n: raise ValueError(f"the first convolution of `{type(m).__name__}`, a `{type(layer).__name__}`, knows its "
                               "channels after the first batch only: run one")
    return n


def dummy_eval(
    m: nn.Module,                      # a model for images; also for sequences or volumes, by `size`
    size: Sequence[int]|int = (64, 64),  # of one item, without its channels; a number: of a square
) -> Any:                              # what the model returns
    """The model's output for a batch of one random image, in eval mode and without autograd

    Raises: ValueError if it has no convolution, or one of another number of dimensions."""
    size, n, (conv, _, weight) = (size, size) if isinstance(size, int) else tuple(size), in_channels(m), _first_conv(m)
    if isinstance(conv, _ConvNd) and len(size) != len(conv.kernel_size): raise ValueError(
        f"dummy_eval: size={size} has {len(size)} numbers for a `{type(conv).__name__}`; give {len(conv.kernel_size)}, "
        "without the channels")
    with untouched(), kept(m), torch.no_grad():
        m.eval()
        return m(torch.empty(1, n, *size, dtype=weight.dtype, device=weight.device).uniform_(-1, 1))


def model_sizes(
    m: nn.Module,                      # as for `dummy_eval`
    size: Sequence[int]|int = (64, 64),  # of one item, without its channels; a number: of a square
) -> list[Any]:  # a `torch.Size` for each child; of one that returns several tensors, that structure; None: not called
    """The shapes of what its children give for a batch of one image

    Raises: ValueError if it has no convolution."""
    def shapes(child, inputs, output): return map_tensors(lambda t: t.shape, output)
    children = [*m.children()]
    with Hooks([child for child in children if can_hook(child)], shapes) as hooks:
        dummy_eval(m, size)
        found = {h.m: h.stored for h in hooks}
        return [found.get(child) for child in children]


def num_features_model(
    m: nn.Module,  # a model for images, such as a body
) -> int:
    """The number of channels that it gives, found with the smallest image that it takes, of 32 pixels or more

    Raises: ValueError if it has no convolution or returns something else than a tensor; the model's own error if it
    takes no image up to 2048 pixels."""
    size = 32
    while True:
        try: output = dummy_eval(m, (size, size))
        except Exception:
            size *= 2
            if size > 2048: raise
        else: break
    if isinstance(output, torch.Tensor) and output.ndim > 1: return output.shape[1]
    raise ValueError(f"`{type(m).__name__}` returns {describe(output)}, which has no channels to count")
