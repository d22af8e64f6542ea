"""Scalars: numbers as they come, means over the last so many, and no wait for a GPU until somebody reads them."""
import math
from collections.abc import Iterable
from numbers import Real
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from .utils import check_number

__all__ = ['Scalars']

stack_at = 512  # tensors that wait singly, each of which takes 512 bytes of a GPU


class Scalars:
    """The values of one name, each with the items that it stands for; on the device until they are read

    Means weigh each value by its items; a value of no items counts for nothing in them. NaN is neither lowest nor
    highest. All are NaN where there is no value yet.
    Raises: ValueError if there are not as many counts as values."""
    def __init__(self,
        values: Iterable[Any] = (),         # numbers
        counts: Iterable[Any]|None = None,  # the items that each stands for; None: one each
    ):
        self._values = [float(v) for v in values]  # NaN in the place of one that waits
        self.counts = [1.]*len(self._values) if counts is None else [float(n) for n in counts]
        if len(self.counts) != len(self._values): raise ValueError(
            f"Scalars: {len(self._values)} values have {len(self.counts)} counts: give one for each")
        self._waiting: dict[Any, _Waiting] = {}  # by device and type, which is what can be stacked
        empty = torch.empty(0, dtype=torch.float64)
        self._packed = dict(values=empty, counts=empty)  # what `pack` has seen so far

    def add(self,
        value: Any,    # a number, or a tensor or array of one
        n: float = 1,  # items that it stands for
    ) -> None:
        """Add a value; a tensor is copied from its device when somebody reads it

        Raises: ValueError for a tensor of more than one number, or of a complex one, for what is too large for a float,
        and for `n` below 0; TypeError for what is no number."""
        check_number('`n`', n, 0, of='items')
        if isinstance(value, (np.ndarray, np.generic)) and value.size == 1: value = value.item()
        if isinstance(value, Tensor):
            if value.numel() != 1 or value.is_complex(): raise ValueError(
                f"the value is a tensor of shape {(*value.shape,)} and type {value.dtype}: give one real number")
            waiting = self._waiting.setdefault((value.device, value.dtype), _Waiting())
            waiting.add(len(self._values), value.detach().reshape(()).clone())  # what is counted on may be the original
            value = math.nan
        elif not isinstance(value, Real): raise TypeError(
            f"the value is {value!r}, a `{type(value).__name__}`: give a number, or a tensor of one")
        try: number = float(value)
        except OverflowError: raise ValueError("the value is too large for a float, which ends at 1.8e308") from None
        self._values.append(number)
        self.counts.append(float(n))

    @property
    def values(self) -> list[float]:
        "All of them, in the order they came; reading them may wait for a GPU"
        for waiting in self._waiting.values():
            for i, v in zip(waiting.places, waiting.read()): self._values[i] = float(v)
        self._waiting.clear()
        return self._values

    def __len__(self) -> int: return len(self.counts)
    def __repr__(self) -> str: return f"Scalars({len(self)} values, the last one {self.current():.6g})"

    def current(self) -> float: "The last value"; return self.values[-1] if self.counts else math.nan

    def mean(self,
        window: int|None = None,  # over the last so many values; None: over all
    ) -> float:
        """Mean, each value weighed by its items

        Raises: TypeError or ValueError if `window` is no whole number, 1 or more."""
        pairs = [(v, c) for v, c in zip(self._last(self.values, window), self._last(self.counts, window)) if c]
        n = math.fsum(c for _, c in pairs)
        return _sum([v*c for v, c in pairs])/n if n else math.nan

    def min(self,
        window: int|None = None,  # of the last so many values; None: of all
    ) -> float:
        "The lowest value; raises as `mean`"
        return min((v for v in self._last(self.values, window) if v == v), default=math.nan)

    def max(self,
        window: int|None = None,  # of the last so many values; None: of all
    ) -> float:
        "The highest value; raises as `mean`"
        return max((v for v in self._last(self.values, window) if v == v), default=math.nan)

    def _last(self, numbers, window):
        if window is None: return numbers
        check_number('Scalars: `window`', window, 1, whole=True, of='values')
        return numbers[-window:]

    def pack(self) -> dict[str, Tensor]:  # `values` and `counts`, float64
        "All of it as two tensors; of those only what has come since the last call is made"
        done = len(self._packed['values'])
        for k, v in dict(values=self.values, counts=self.counts).items() if len(self) > done else ():
            self._packed[k] = torch.cat([self._packed[k], torch.tensor(v[done:], dtype=torch.float64)])
        return dict(self._packed)

    @classmethod
    def unpack(cls,
        state: dict[str, Tensor],  # what `pack` gave
    ) -> Self:
        "The same values and counts"
        new = cls(state['values'].tolist(), state['counts'].tolist())
        new._packed = dict(state)
        return new


class _Waiting:
    "Tensors of one device and type, and where among the values they belong"
    def __init__(self):
        self.places: list[int] = []
        self.single: list[Tensor] = []
        self.stacks: list[Tensor] = []

    def add(self, place, value):
        self.places.append(place)
        self.single.append(value)
        if len(self.single) > stack_at: self.stack()

    def stack(self):
        self.stacks.append(torch.stack(self.single))
        self.single.clear()

    def read(self) -> list:  # the one copy from the device
        if self.single: self.stack()
        return torch.cat(self.stacks).tolist()


def _sum(values):
    try: return math.fsum(values)
    except (OverflowError, ValueError): return sum(values)  # too large, or inf-inf
