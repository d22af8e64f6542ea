"""Scalars: numbers as they come, means over the last so many, and no wait for a GPU until somebody reads them."""
import math
from typing import Any

import torch
from torch import Tensor

__all__ = ['Scalars']

stack_at = 512  # tensors on the device that wait; each takes 512 bytes of a GPU


class Scalars:
    """The values of one name, each with the items that it stands for; on the device until they are read

    Means weigh each value by its items. All are NaN where there is no value yet."""
    def __init__(self,
        values: Any = (),        # numbers
        counts: Any = None,      # the items that each stands for; None: one each
    ):
        self._values: list[float] = [float(v) for v in values]
        self.counts: list[float] = [1.]*len(self._values) if counts is None else list(counts)
        self._waiting: list[Tensor] = []

    def add(self,
        value: Any,      # a number, or a tensor of one
        n: float = 1,    # items that it stands for
    ) -> None:
        """Add a value; a tensor is copied from its device when somebody reads it

        Raises: ValueError for a tensor of more than one number; TypeError for what is no number."""
        if isinstance(value, Tensor):
            if value.numel() != 1: raise ValueError(f"a value to be recorded is a tensor of shape {(*value.shape,)}: "
                                                    "give one number")
            self._waiting.append(value.detach().reshape(()).clone())
            if len(self._waiting) > stack_at: self._read()
        else:
            self._read()
            self._values.append(float(value))
        self.counts.append(n)

    def _read(self):
        if self._waiting: self._values += torch.stack([v.double() for v in self._waiting]).tolist()
        self._waiting.clear()

    @property
    def values(self) -> list[float]: "All of them, in the order they came"; self._read(); return self._values

    def __len__(self) -> int: return len(self.counts)
    def __repr__(self) -> str: return f"Scalars({len(self)} values, the last one {self.current():.6g})"

    def current(self) -> float: "The last value"; return self.values[-1] if self.counts else math.nan

    def mean(self,
        window: int|None = None,  # over the last so many values; None: over all
    ) -> float:
        """Mean, each value weighed by its items

        Raises: ValueError if `window` is less than 1."""
        values, counts = self._last(window)
        n = math.fsum(counts)
        return math.fsum(v*c for v, c in zip(values, counts))/n if n else math.nan

    def min(self,
        window: int|None = None,  # of the last so many values; None: of all
    ) -> float:
        "The lowest value; raises as `mean`"
        return min(self._last(window)[0], default=math.nan)

    def max(self,
        window: int|None = None,  # of the last so many values; None: of all
    ) -> float:
        "The highest value; raises as `mean`"
        return max(self._last(window)[0], default=math.nan)

    def _last(self, window):
        if window is not None and window < 1: raise ValueError(f"window={window!r}: give a number of values, 1 or more")
        n = len(self) if window is None else min(window, len(self))
        return self.values[len(self)-n:], self.counts[len(self)-n:]
