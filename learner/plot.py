"""Drawing with matplotlib: each function takes the axes to draw on and returns them; showing them is the caller's."""
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .utils import optional

__all__ = ['plot_loss']


def plot_loss(
    losses: Sequence[float],    # smoothed training loss after each batch, `(n_batches,)`
    iters: Sequence[int] = (),  # how many training batches were done at each validation, `(n_valid,)`
    valid_losses: Sequence[float]|Mapping[str, Sequence[float]] = (),  # loss of each validation; or such lists by name
    skip_start: int = 5,        # first batches to leave out; none are where that would leave nothing
    log: bool = False,          # a logarithmic loss axis?
    ax: Any = None,             # matplotlib axes to draw on; new ones if None
) -> Any:                       # the axes
    """Draw the training loss against the number of batches done, and validation losses where they were computed

    A validation loss that is NaN has no point.
    Raises: ValueError if `iters` and validation losses differ in number."""
    ax = ax or optional('matplotlib.pyplot', 'plot_loss').subplots()[1]
    skip = skip_start if skip_start < len(losses) else 0
    ax.plot(np.arange(skip, len(losses))+1, losses[skip:], label='train (smoothed)')
    by_name = valid_losses if isinstance(valid_losses, Mapping) else {'valid_loss': valid_losses}
    for name, values in by_name.items():
        if len(values) != len(iters): raise ValueError(
            f"plot_loss: {len(values)} values of `{name}`, but {len(iters)} `iters`, which say at which batch each was")
        points = [(i, v) for i, v in zip(iters, values) if i > skip and not np.isnan(v)]
        if points: ax.plot(*zip(*points), marker='o', label=name.removesuffix('_loss'))
    ax.set(xlabel='batch', ylabel='loss', yscale='log' if log else 'linear')
    ax.legend()
    return ax
