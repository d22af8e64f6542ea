"""DataLoaders made from others: of other weights, of a part, of the first batches, of another size, in order."""
from collections.abc import Iterator, Sequence
from copy import copy
from itertools import cycle, islice
from numbers import Integral
from typing import Any

import torch
from fastcore.basics import patch
from torch import Tensor
from torch.utils.data import (BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler,
                              WeightedRandomSampler)

from .data import DataLoaders
from .keep import kept
from .loader import Loader, untouched
from .tensors import map_tensors
from .utils import check_number

__all__ = ['Repeated', 'remade', 'in_order', 'items_of']

kept_options = ('num_workers', 'collate_fn', 'pin_memory', 'timeout', 'worker_init_fn', 'multiprocessing_context',
                'generator', 'persistent_workers', 'in_order')  # of a DataLoader, beside what draws its items
fresh = 'generator', 'persistent_workers'  # of these, what a loader made for one use has its own of
whole = SequentialSampler, RandomSampler  # training draws by them, from all there is


class Repeated:
    "A loader of a few batches, given again and again; as copies, since callbacks may change a batch in place"
    def __init__(self,
        batches: Sequence,  # what is repeated, in turn
        n: int,             # how many are given in an epoch
    ): self.batches, self.n = batches, n

    def __len__(self) -> int: return self.n
    def __iter__(self) -> Iterator: return (map_tensors(Tensor.clone, b) for b in islice(cycle(self.batches), self.n))


def remade(
    dl: Any,        # a torch DataLoader of a dataset with a length
    what: str,      # what it is for, for messages
    **new: Any,     # what differs: `batch_size`, `sampler`, `shuffle`
) -> DataLoader:
    """A DataLoader of the same items, that draws them in another way

    Raises: TypeError if it is no DataLoader, or its batches are drawn by a batch sampler of the user's."""
    if not isinstance(dl, DataLoader) or dl.batch_size is None: raise TypeError(
        f"{what} needs a torch DataLoader that makes batches of items, not a `{type(dl).__name__}`"
        f"{' with batches of its own' if isinstance(dl, DataLoader) else ''}")
    old = {k: getattr(dl, k) for k in kept_options if hasattr(dl, k)}
    if dl.num_workers: old['prefetch_factor'] = dl.prefetch_factor
    if 'shuffle' not in new and 'sampler' not in new: new['sampler'] = dl.sampler
    return DataLoader(dl.dataset, **{'batch_size': dl.batch_size, 'drop_last': dl.drop_last, **old, **new})


def _numbers(sampler) -> Any:  # of the items that its epochs are made of
    data: Any = getattr(sampler, 'data_source', None)
    if type(sampler) in whole and hasattr(data, '__len__'): return range(len(data))
    if type(sampler) is WeightedRandomSampler: return range(len(sampler.weights))
    drawn = [i for b in sampler for i in (b if isinstance(b, (list, tuple)) else [b])]
    ids = dict.fromkeys(int(i) if isinstance(i, (Integral, Tensor)) else i for i in drawn)
    return sorted(ids) if all(isinstance(i, int) for i in ids) else [*ids]


def in_order(
    loader: Loader,
) -> tuple[Any, Any]:  # a loader, and the numbers of its items in the dataset; None: it does not go by numbers
    """A loader that gives all items once and in the dataset's order, whatever shuffles, weighs or drops them

    A sampler of another class than torch's own for whole sets says which items there are: all that one epoch of it
    draws. What does not go by numbers, such as an IterableDataset or a list of batches, is as it is, but drops no last
    batch."""
    dl: Any = loader.dl
    if not isinstance(dl, DataLoader) or type(dl).__iter__ is not DataLoader.__iter__: return loader, None
    if isinstance(dl.dataset, IterableDataset):
        return (items_of(dl, None, dl.batch_size) if dl.drop_last else loader), None
    outer = dl.batch_sampler or dl.sampler  # without `batch_sampler` the dataset makes batches itself
    plain = type(outer) is BatchSampler
    inner = outer.sampler if plain else outer
    own = [o for o in (dl.batch_sampler, dl.sampler, inner) if hasattr(o, '__dict__')]
    with untouched(loader), kept(*own, whole=(Sampler, *map(type, own))):
        ids = _numbers(inner)
        sizes = [] if plain or inner is dl.sampler else [len(b) for b in outer]
    if not len(ids) or type(inner) is SequentialSampler and not getattr(outer, 'drop_last', False): return loader, ids
    # of batches by a sampler of its own, what is longest goes into the smallest ones
    bs = outer.batch_size if plain else min(sizes[:-1] or sizes, default=dl.batch_size)
    return items_of(dl, ids, bs), ids


def items_of(
    dl: Any,   # a DataLoader
    ids: Any,  # numbers of items in its dataset, in the order in which they are given; None: what it iterates
    bs: Any,   # items in a batch; None: as the dataset gives them
) -> DataLoader:
    "A loader of some items, made into batches as by `dl`"
    options = {k: getattr(dl, k) for k in kept_options if k not in fresh and hasattr(dl, k)}
    if ids is None: return DataLoader(dl.dataset, bs, **options)
    if dl.batch_sampler is None:  # the dataset takes a list of numbers, or one
        return DataLoader(dl.dataset, None, sampler=ids if bs is None else BatchSampler(ids, bs, False), **options)
    in_place = hasattr(dl.dataset, '__len__') and ids == range(len(dl.dataset))
    return DataLoader(dl.dataset, bs, **(options if in_place else {**options, 'sampler': ids}))


def _with_loaders(dls, train, valid=None):  # a copy with other loaders, which knows what the old ones told
    for k in ('loss_func', 'vocab', 'c'):
        try: getattr(dls, k)  # is kept from then on
        except AttributeError: pass
    new = copy(dls)
    new.loaders = [Loader(train, dls.device), *dls.loaders[1:]]
    if valid is not None: new.loaders[1:] = [Loader(valid, dls.device)]
    if valid is not None: new.valid_sets = {'': new.loaders[1]}
    return new


@patch
def weighted_dataloaders(self: DataLoaders,
    wgts: Any,            # how often each training item is drawn beside the others, `(n_items,)`, 0 or more
    bs: int|None = None,  # items in a batch; None: as before
) -> DataLoaders:         # the same but for the training loader
    """Draw training items by their weights, with repetition, as many an epoch as there are

    Raises: ValueError if the weights are not one for each item; TypeError if the loader is no DataLoader of items."""
    wgts, n = torch.as_tensor(wgts, dtype=torch.double).flatten(), len(self.train_ds)
    if len(wgts) != n or not (wgts >= 0).all() or not 0 < wgts.sum() < torch.inf: raise ValueError(
        f"weighted_dataloaders: {len(wgts)} weights from {wgts.min():g} to {wgts.max():g} for {n} training items; give "
        "one for each, 0 or more")
    sampler = WeightedRandomSampler(wgts, n, generator=getattr(self.train, 'generator', None))
    bs = self.bs if bs is None else bs
    return _with_loaders(self, remade(self.train.dl, 'weighted_dataloaders', batch_size=bs, sampler=sampler))


@patch
def partial_dataloaders(self: DataLoaders,
    partial_n: int,       # training items an epoch
    bs: int|None = None,  # items in a batch; None: as before
) -> DataLoaders:         # the same but for the training loader
    """Shorten each epoch to some training items, drawn anew each time, without repetition

    Raises: ValueError if there are not so many; TypeError if the loader is no DataLoader of items."""
    n = len(self.train_ds)
    check_number('partial_dataloaders: `partial_n`', partial_n, 1, n, whole=True, of='items')
    sampler = RandomSampler(self.train_ds, num_samples=int(partial_n), generator=getattr(self.train, 'generator', None))
    bs = self.bs if bs is None else bs
    return _with_loaders(self, remade(self.train.dl, 'partial_dataloaders', batch_size=bs, sampler=sampler))


@patch
def first_batches(self: DataLoaders,
    n: int = 1,   # batches
) -> DataLoaders:  # training goes through them again and again for as many batches as before; validation once
    """Train and validate on the first training batches alone: whatever can learn gets them right

    Raises: ValueError if there are none; TypeError if that would use up batches of an iterator."""
    check_number('first_batches: `n`', n, 1, whole=True, of='batches')
    if isinstance(self.train.dl, Iterator): raise TypeError(
        f"first_batches would use up batches of the train loader, a `{type(self.train.dl).__name__}`")
    with untouched(self.train):
        batches: Any = iter(self.train.fork())
        try: found = [*islice(batches, n)]
        finally: batches.close()
    if not found: raise ValueError(f"the train loader gives no batch: {self.train.why_empty()}")
    return _with_loaders(self, Repeated(found, self.train.n_batches or n), Repeated(found, len(found)))
