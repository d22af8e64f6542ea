"""What the Recorder gathers batch by batch, and how a checkpoint holds it: as few tensors, or plain values."""
import math
from copy import deepcopy
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..hypers import Reading
from ..plain import digest
from ..tensors import map_tensors, to_detach, to_device
from ..utils import warn

__all__ = ['Losses', 'contents', 'gathered', 'put_back']


class Losses:
    "Losses batch by batch, with the items each stands for; on the device until read"
    def __init__(self):
        self.values: list[float] = []   # read so far
        self.marks: list[tuple] = []    # (items, number of the batch, epoch, Reading of the optimizer) of each batch
        self.waiting: list[Any] = []    # single losses on the device, where each takes 512 bytes of a GPU
        self.stacks: list[Any] = []     # stacks of 513 of them
        self.packed: dict = dict(values=torch.empty(0, dtype=torch.float64), marks=torch.empty(0, dtype=torch.int64),
                                 readings=[])  # what `pack` has seen so far

    def add(self, loss, *mark):
        self.marks.append(mark)
        self.waiting.append(loss)
        if len(self.waiting) > 512: self._stack()

    def _stack(self):
        self.stacks.append(torch.stack(self.waiting))
        self.waiting.clear()

    def read(self) -> list[float]:  # all values, one a batch
        "Copy what waits from the device, at once"
        if self.waiting: self._stack()
        if self.stacks: self.values += torch.cat(self.stacks).tolist()
        self.stacks.clear()
        return self.values

    def mean(self, start: int = 0) -> float:  # NaN if there are none
        "Mean loss per item, from batch number `start` on"
        pairs = list(zip(self.read()[start:], self.marks[start:]))
        n = sum(mark[0] for _, mark in pairs)
        return math.fsum(v*mark[0] for v, mark in pairs)/n if n else math.nan

    def pack(self) -> dict[str, Any]:
        """All of it: `values` and `marks` as tensors, and the `readings`, of which a mark has the number

        Only what has come since the last call is looked at; the rest is copied as a whole."""
        old, done = self.packed, len(self.packed['values'])
        if not (values := self.read()[done:]): return dict(old)
        marks = [list(m) for m in self.marks[done:]]
        readings, numbers = _add_readings(old['readings'], [m.pop() for m in marks if len(m) > 3])
        for m, number in zip(marks, numbers): m.append(number)
        self.packed = dict(values=torch.cat([old['values'], _tensor(values, float)]),
                           marks=torch.cat([old['marks'], _tensor(marks, np.int64)]), readings=readings)
        return dict(self.packed)

    def is_packed_as(self, state: dict[str, Any]) -> bool:
        "Did `pack` give just this, and has nothing been added since?"
        return self.packed['values'] is state['values'] and len(self.marks) == len(state['values'])

    @classmethod
    def unpack(cls,
        state: dict[str, Any],  # what `pack` gave
    ) -> 'Losses':
        "The same losses and marks; readings that were equal from one batch to the next are one object"
        losses, readings = cls(), []
        for names, mults, raw in state['readings']:
            layout = tuple(names), list(mults)
            readings += [Reading(values, layout) for values in raw.numpy().tolist()]
        losses.packed, losses.values = dict(state), state['values'].tolist()
        *marks, numbers = columns = state['marks'].numpy().T.tolist() or [[]]
        losses.marks = list(zip(*marks, map(readings.__getitem__, numbers)) if readings else zip(*columns))
        return losses


def _tensor(values, dtype): return torch.from_numpy(np.array(values, dtype))  # faster than of a list


def _add_readings(segments, readings):  # segments of one layout each, with the new ones; and the number of each of them
    new, numbers, seen, layout, last = [(names, mults, raw, []) for names, mults, raw in segments], [], None, None, None
    n = sum(len(raw) for _, _, raw in segments)-1
    for r in readings:
        if r.layout is not layout:  # perhaps only another object, as after a resume
            layout, names, mults = r.layout, list(r.layout[0]), list(r.layout[1])
            if not new or (names, mults) != new[-1][:2]:
                new.append((names, mults, torch.empty(0, len(mults), dtype=torch.float64), []))
            _, _, raw, rows = new[-1]
            last = rows[-1] if rows else raw[-1].tolist() if len(raw) else None
        if r is not seen:
            seen, values = r, [float(v) for v in r.raw]
            if values != last:
                rows.append(last := values)
                n += 1
        numbers.append(n)
    return [(names, mults, torch.cat([raw, _tensor(rows, float)]) if rows else raw)
            for names, mults, raw, rows in new], numbers


# ---- what metrics have accumulated, in the midst of a phase

def _holders(metric):  # it, and what it streams into: a torchmetrics object, or a collection of them
    inner = [o for o in vars(metric).values() if _streams(o)]
    return [metric, *(m for o in inner for m in (o.modules() if isinstance(o, nn.Module) else [o]))]


def _streams(o): return all(hasattr(o, k) for k in ('update', 'compute', 'reset'))


def contents(
    metric: Any,  # a Metric
) -> list[dict[str, str|None]]:  # by attribute, of it and of what it streams into; None where a file could not hold it
    "Digests of all that it has"
    def of(v):
        try: return digest(v)
        except (TypeError, ValueError): return None
    return [{k: of(v) for k, v in vars(o).items()} for o in _holders(metric)]


def gathered(
    metric: Any,                       # a Metric
    empty: list[dict[str, str|None]],  # its `contents` when it had just been reset
) -> list[dict[str, Any]]:             # attributes, and whether their tensors are on an accelerator
    "Copies of what has changed since"
    changed = [[k for k, d in now.items() if d and d != old.get(k)] for now, old in zip(contents(metric), empty)]
    def kept(v): return deepcopy(to_detach(v)), map_tensors(Tensor.cpu, v) is not v
    return [{k: kept(vars(o)[k]) for k in names} for o, names in zip(_holders(metric), changed)]


def put_back(
    metric: Any,                        # a Metric, just reset
    state: list[dict[str, Any]]|None,   # what `gathered` gave; None: it was not there
    device: Any,                        # where its batches are
) -> None:
    "Let it go on from `state`; a warning tells what cannot be"
    holders = _holders(metric)
    if state is None or len(state) != len(holders): state, lost = [], ['all of it']
    else: lost = [k for k, d in contents(metric)[0].items() if d is None and not _is_code(vars(metric)[k])]
    for o, kept in zip(holders, state):
        for k, (v, moved) in kept.items(): vars(o)[k] = to_device(v, device) if moved else v
    if lost: warn(f"metric `{metric.name}` goes on in the midst of an epoch without what it had accumulated "
                  f"({', '.join(lost)}): this epoch's value is of the rest; tensors, numbers, lists and dicts are kept")


def _is_code(o): return callable(o) or isinstance(o, Enum) or _streams(o)
