"""The index batches of an epoch, drawn at once where that can be done, by the draws that torch's DataLoader makes."""
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler,
                              SubsetRandomSampler, WeightedRandomSampler)

__all__ = ['Plan']

# They draw nothing from a global stream between batches, so that an epoch can be drawn at once; a subclass may.
finite_samplers = SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler


class Plan:
    "The index batches of one epoch, drawn from one place before the first item is loaded"
    def __init__(self,
        dl: DataLoader,                         # over a map dataset
        base: tuple[int, int] | None = None,    # persistent workers' base seed and age in epochs; None draws a seed
    ):
        sampler: Any = dl.sampler if dl.batch_sampler is None else dl.batch_sampler
        exact = type(sampler) is BatchSampler
        flat: Any = sampler.sampler if exact else sampler
        lazy = type(flat) not in finite_samplers
        self.rest = iter(sampler) if lazy else None  # before the base seed, as in torch
        self.base = base or (_draw_seed(dl.generator), 0)
        self.ids: Any = None if lazy else _all_indices(flat)
        self.bs, self.drop_last = (sampler.batch_size, sampler.drop_last) if exact else (None, False)

    def starts(self, k: int) -> range:
        "Where in `ids` the batches from number `k` on start"
        n, bs = len(self.ids), self.bs or 1
        return range(k*bs, n - n % bs if self.drop_last else n, bs)

    def batches(self, k: int) -> Iterator:
        "The index batches from number `k` on; single indices if the loader does not batch"
        if self.rest is not None:
            for _ in islice(self.rest, k): pass
            return self.rest
        ids: Any = self.ids
        listed: Any = Tensor.tolist if isinstance(ids, Tensor) else list
        return (listed(ids[i:i+self.bs]) if self.bs else listed(ids[i:i+1])[0] for i in self.starts(k))

    def seeded(self, k: int) -> Iterator:
        "Each index batch with a seed of its own, made from the epoch's seed and the batch's number"
        seed = _mix(*self.base)
        return ((_mix(seed, n), ids) for n, ids in enumerate(self.batches(k), k))


def _draw_seed(generator=None): return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def _all_indices(s) -> Tensor | range | list:
    "What a finite sampler gives in an epoch, by the draws that it makes itself"
    if type(s) is SequentialSampler: return range(len(s.data_source))
    if type(s) is not RandomSampler or s.replacement:
        ids = list(s)
        return torch.tensor(ids, dtype=torch.int64) if all(type(i) is int for i in ids) else ids
    n, wanted, g = len(s.data_source), s.num_samples, s.generator or torch.Generator().manual_seed(_draw_seed())
    rounds = [torch.randperm(n, generator=g) for _ in range(wanted//n + 1)]  # the last one even if unused
    return torch.cat([*rounds[:-1], rounds[-1][:wanted % n]])


def _mix(seed: int, n: int) -> int:
    """A seed for number `n`, 64 bits, unlike those of neighbouring numbers and seeds

    Source: SplitMix64; Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014."""
    mask = 2**64 - 1
    z = (seed + (n+1)*0x9E3779B97F4A7C15) & mask
    z = (z ^ z >> 30)*0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27)*0x94D049BB133111EB & mask
    return z ^ z >> 31
