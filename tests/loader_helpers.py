"""Datasets, samplers and loaders of every kind, and their epochs with all that they draw."""
import random

import numpy as np
import torch
from torch.utils.data import (BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler,
                              Sampler, SequentialSampler, Subset, SubsetRandomSampler, TensorDataset,
                              WeightedRandomSampler, get_worker_info)

from learner.loader import Loader
from learner.utils import rng_state, set_seed

n = 22
x, y = torch.randn(n, 3, generator=torch.Generator().manual_seed(0)), torch.arange(n)


class Plain(Dataset):
    "Items as they are; counts what it loads"
    def __init__(self): self.loaded = []
    def __len__(self): return n

    def __getitem__(self, i):
        self.loaded.append(int(i))
        return x[i], y[i]


class Noisy(Plain):
    "Random augmentation from each of the three global streams"
    def __getitem__(self, i): return x[i] + torch.rand(3), y[i] + np.random.rand(), random.random()


class Batched(Noisy):
    "Fetches a whole batch, in an order of its own"
    def __getitems__(self, ids): return [self[i] for i in sorted(ids)]


class Lazy(Sampler):
    "A sampler of the user's that shuffles by the global stream when it starts"
    def __len__(self): return n
    def __iter__(self): yield from torch.randperm(n)


class Eager(Sampler):
    "A batch sampler that draws before its first batch is asked for"
    def __len__(self): return 4
    def __iter__(self): return iter(torch.randperm(n)[:20].view(4, 5).tolist())


class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        for i in range(info.id if info else 0, n, info.num_workers if info else 1): yield x[i] + torch.rand(3), y[i]


class Own(DataLoader):
    "A DataLoader that iterates in its own way"
    def __iter__(self): return ((b, torch.rand(2)) for b in super().__iter__())


def gen(): return torch.Generator().manual_seed(5)
def table(): return TensorDataset(x, y)
def two_parts(items): return [torch.stack([i[0] for i in items]), 'a custom collate']
def negative(): return SubsetRandomSampler([-1, 3, -5, 7])


# Each makes a loader; the first group is indexed by the batch.
loaders = dict(
    shuffle=lambda: DataLoader(table(), 5, shuffle=True),
    sequential=lambda: DataLoader(table(), 5),
    generator=lambda: DataLoader(table(), 5, shuffle=True, generator=gen()),
    sampler_generator=lambda: DataLoader(table(), 5, sampler=RandomSampler(table(), generator=gen())),
    drop_last=lambda: DataLoader(table(), 5, shuffle=True, drop_last=True),
    drop_last_generator=lambda: DataLoader(table(), 11, shuffle=True, drop_last=True, generator=gen()),
    weighted=lambda: DataLoader(table(), 5, sampler=WeightedRandomSampler(y+1., 30)),
    weighted_generator=lambda: DataLoader(table(), 5, sampler=WeightedRandomSampler(y+1., 30, generator=gen())),
    replacement=lambda: DataLoader(table(), 5, sampler=RandomSampler(table(), True, 70)),
    replacement_generator=lambda: DataLoader(table(), 5, sampler=RandomSampler(table(), True, 70, gen())),
    more_than_all=lambda: DataLoader(table(), 5, sampler=RandomSampler(table(), num_samples=50, generator=gen())),
    fewer_than_all=lambda: DataLoader(table(), 5, sampler=RandomSampler(table(), num_samples=9)),
    subset_sampler=lambda: DataLoader(table(), 3, sampler=SubsetRandomSampler(range(3, 12))),
    distributed=lambda: DataLoader(table(), 3, sampler=DistributedSampler(table(), 2, 1)),
    batch_sampler=lambda: DataLoader(table(), batch_sampler=BatchSampler(SequentialSampler(table()), 4, True)),
    subset=lambda: DataLoader(Subset(Subset(table(), [3, -1, 7, 9, 2]), range(1, 5)), 3, shuffle=True),
    one_tensor=lambda: DataLoader(TensorDataset(x), 5, shuffle=True),
    # item by item
    negative=lambda: DataLoader(table(), 3, sampler=negative()),
    tensors_custom_collate=lambda: DataLoader(table(), 5, shuffle=True, collate_fn=two_parts),
    augmented=lambda: DataLoader(Noisy(), 5, shuffle=True),
    getitems=lambda: DataLoader(Batched(), 5, shuffle=True),
    custom_collate=lambda: DataLoader(Noisy(), 5, shuffle=True, collate_fn=two_parts),
    custom_sampler=lambda: DataLoader(Noisy(), 5, sampler=Lazy()),
    list_sampler=lambda: DataLoader(table(), 2, sampler=[4, 2, -1]),
    custom_batch_sampler=lambda: DataLoader(Noisy(), batch_sampler=Eager()),
    unbatched=lambda: DataLoader(Noisy(), batch_size=None, shuffle=True),
    unbatched_sequential=lambda: DataLoader(table(), batch_size=None),
    unbatched_sampler=lambda: DataLoader(Noisy(), batch_size=None, sampler=Lazy()),
    # as it is
    iterable=lambda: DataLoader(Stream(), 5),
    own_iter=lambda: Own(table(), 5, shuffle=True),
    ready=lambda: [(x[i:i+5], y[i:i+5]) for i in range(0, n, 5)],
)
planned = [k for k in loaders if k not in ('iterable', 'own_iter', 'ready')]


def equal(a, b):
    "Whether two nested batches have the same types and the same bits"
    if type(a) is not type(b): return False
    if isinstance(a, torch.Tensor): return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)
    if isinstance(a, np.ndarray): return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict): return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    return len(a) == len(b) and all(map(equal, a, b)) if isinstance(a, (list, tuple)) else a == b


def epochs(dl, user, n_epoch=3, draw=0):
    "Batches of some epochs, and all random states after each; `draw` numbers are drawn with each batch, as by dropout"
    set_seed(1)
    out = []
    for _ in range(n_epoch):
        batches = [(b, torch.rand(draw), np.random.rand()) for b in dl]
        out.append((batches, rng_state(), [g.get_state() for g in Loader(user).generators()]))
    return out


def noisy(workers, persistent=False): return Loader(DataLoader(Noisy(), 5, shuffle=True, num_workers=workers,
                                                               persistent_workers=persistent))
