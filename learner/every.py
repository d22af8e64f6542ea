"""Every: how often something is done, as '500it' (optimizer steps), '2ep' (epochs) or '10min' says."""
import math
import re
from numbers import Real
from time import perf_counter
from typing import Any

__all__ = ['Every']

seconds = dict(s=1, min=60, h=3600)


class Every:
    """How often something is done: at `begin` plus each multiple of what is given, from `begin` to `end`

    Whoever does it calls `start` when a fit starts, then asks `at_step` after each batch and `at_epoch` at the end of
    each epoch. A time that has passed is seen by whichever is asked first, and begins anew.
    Raises: TypeError or ValueError if it is no such text, or would never be due."""
    def __init__(self,
        every: Any,              # '500it', '2ep', '30s', '1.5min' or '1h'; an Every is copied, and has its own `last`
        begin: float = 0,        # in steps (of `learn.n_step`), epochs, or seconds of the fit; 0 itself is never due
        end: float|None = None,  # likewise, and the last that may be due; None: no end
        last: bool = True,       # also at the end of the fit's last epoch, wherever `begin` and `end` are
    ):
        if isinstance(every, Every):
            if begin != 0 or end is not None: raise ValueError(
                f"{every!r} has its own `begin` and `end`: give them there")
            every, begin, end, last = every.text, every.begin, every.end, every.last
        self.text, self.begin, self.end, self.last = every, begin, end, last
        self.n, self.unit = _parsed(every)  # a number of 'it', 'ep' or 's'
        for name, number in dict(begin=begin, end=math.inf if end is None else end).items(): self._check(name, number)
        self._end = math.inf if end is None else end
        if (begin or self.n) > self._end or begin == math.inf: raise ValueError(
            f"{self!r} would never be due: the first time is at {begin or self.n:g}{self.unit}")
        self.start()

    def _check(self, name, number):
        if isinstance(number, bool) or not isinstance(number, Real): raise TypeError(
            f"Every({self.text!r}): `{name}` is {number!r}; give a number in its unit, such as 3 for '3{self.unit}'")
        x = float(number)
        if not x >= 0 or self.unit != 's' and x % 1 and x < math.inf: raise ValueError(
            f"Every({self.text!r}): `{name}` is {number!r}; give a number of {self.unit}, 0 or more")

    def start(self) -> None:
        "A fit starts: time counts from now"
        self._started, self._due = perf_counter(), self.begin or self.n

    def at_step(self,
        learn: Any,  # a Learner, after a batch
    ) -> bool:
        "Is it due with the optimizer step just made, or has the time passed?"
        if self.unit == 'ep': return False
        return self._time_is_due() if self.unit == 's' else learn.stepped and self._hits(learn.n_step)

    def at_epoch(self,
        learn: Any,  # a Learner, at the end of an epoch
    ) -> bool:
        "Is it due with the epoch, or has the time passed, or is this the last epoch?"
        due = self._time_is_due() if self.unit == 's' else self.unit == 'ep' and self._hits(learn.epoch+1)
        if due or not self.last or learn.epoch+1 < learn.n_epoch: return due
        return self.unit != 'it' or not self._hits(learn.n_step)  # with the last step it was due already

    def _hits(self, number):
        return 0 < number and self.begin <= number <= self._end and (number-self.begin) % self.n == 0

    def _time_is_due(self):
        passed = perf_counter()-self._started
        if not self._due <= passed <= self._end: return False
        self._due = passed+self.n
        return True

    def __repr__(self) -> str:
        more = dict(begin=self.begin, end=self.end, last=self.last)
        default = dict(begin=0, end=None, last=True)
        return f"Every({', '.join([repr(self.text), *(f'{k}={v!r}' for k, v in more.items() if v != default[k])])})"


def _parsed(text):
    accepted = "give '500it' (optimizer steps), '2ep' (epochs), or '30s', '10min', '1h' (time)"
    if not isinstance(text, str): raise TypeError(f"every={text!r} has no unit: {accepted}")
    parts = re.fullmatch(r'([0-9]+(?:\.[0-9]+)?) ?(it|ep|s|min|h)', text.strip())
    n = float(parts[1]) if parts else 0.
    unit = parts[2] if parts else ''
    if not 0 < n < math.inf or unit in ('it', 'ep') and n % 1: raise ValueError(f"every={text!r}: {accepted}")
    return (int(n), unit) if unit in ('it', 'ep') else (n*seconds[unit], 's')
