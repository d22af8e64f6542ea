"""Passing: a loader in place of another one for a phase, as to end it early or to look at its batches."""
from collections.abc import Iterator
from typing import Any

__all__ = ['Passing']


class Passing:
    "A loader that gives the batches of another, of which it has all else, also what is set; a subclass says which"
    own = frozenset({'inner'})  # attributes that are not the other's

    def __init__(self,
        inner: Any,  # the loader, or another of these
    ): self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name in self.own: raise AttributeError(name)  # asked for while copying
        return getattr(self.inner, name)

    def __setattr__(self, name, value):
        if name in self.own: object.__setattr__(self, name, value)
        else: setattr(self.inner, name, value)

    def __len__(self) -> int: return len(self.inner)

    def __iter__(self) -> Iterator:
        batches = iter(self.inner)  # now, since it makes the draws that precede the first batch
        return self._given(batches)

    def _given(self, batches):
        try: yield from self.through(batches)
        finally:
            if batches is not self.inner._held: batches.close()  # else its loader would be in use

    def through(self, batches: Iterator) -> Iterator: "The batches that are given, of all"; return batches
