"""Loader: any user's loader as the Learner iterates it, with order and draws exactly those of torch's DataLoader.

For a torch DataLoader over a map dataset, the index batches of an epoch come from one place, a `Plan`, made before the
first item is loaded. `Loader.record` (random states at the start of the epoch) and `Loader.position` (batches given)
are all that `start_at` needs to go on in the middle of an epoch, in another process, without loading what came before.
The user's loader is never modified: worker processes belong to a shallow copy.
"""
import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from random import SystemRandom
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, default_collate

from .keep import is_generator
from .plan import Plan
from .tensors import exact_device, pinned, to_cuda, to_device
from .utils import rng_state, set_rng_state, warn
from .workers import end_workers, fetch_items, watch_workers, worker_pool

__all__ = ['Loader', 'untouched']

@contextmanager
def untouched(
    *loaders: 'Loader',  # loaders that the block iterates
):
    "Put all random streams back after the block: python's, numpy's and torch's, and the `loaders`' own generators"
    rng, own = rng_state(), [(g, g.get_state()) for dl in loaders for g in dl.generators()]
    try: yield
    finally:
        set_rng_state(rng)
        for g, s in own: g.set_state(s)


class _Stream:
    "A generator of numpy's or python's under the names that torch's has"
    def __init__(self, g): self.g = g
    def get_state(self): return self.g.bit_generator.state if hasattr(self.g, 'bit_generator') else self.g.getstate()
    def set_state(self, state):
        if hasattr(self.g, 'bit_generator'): self.g.bit_generator.state = state
        else: self.g.setstate(state)


class Loader:
    """Any iterable of batches, wrapped; other attributes are those of the user's own loader `dl`, also when set

    A torch DataLoader over a map dataset runs by a plan and can `start_at` any batch without loading those before it.
    Its custom samplers are drawn lazily; then this is exact unless they draw from a global stream between batches.
    A DataLoader over an IterableDataset, one with its own `__iter__`, or any other iterable is iterated as it is.
    One iteration at a time: to iterate it again meanwhile, use a `fork`.

    Raises: TypeError if `dl` is data, not an iterable of batches."""
    dl: Any                                  # the user's loader
    device: torch.device | str | int | None  # where batches go; None leaves them where they are
    record: dict[str, Any] | None            # random states when the current epoch started, for `start_at`
    position: int                            # batches given in the current epoch, skipped ones included
    _start: tuple[Any, int] | None           # what `start_at` asked for
    _held: Any                               # an iteration that `hold` keeps, to be gone on with
    _moved: bool                             # has the user's loader gone to that place by itself?
    on_failure: Any                          # what is called when workers fail, before their error is raised
    _live: Any                               # weak reference to the newest iteration
    _pool: DataLoader | None                 # the copy of `dl` that has the persistent workers
    _end: Any                                # ends them
    _last: Any                               # ends the workers of the newest iteration, if they are its own
    _base: tuple[int, int] | None            # base seed of the persistent workers, epochs they have run
    _told: bool                              # has it been said that `set_epoch` does not reach them?

    def __init__(self,
        dl: Any,                                         # a torch DataLoader, or any iterable of batches
        device: torch.device | str | int | None = None,  # where batches go; None leaves them where they are
    ):
        if isinstance(dl, (str, Mapping)) or hasattr(dl, 'shape') or not hasattr(dl, '__iter__'):
            raise TypeError(f"`{type(dl).__name__}` is no loader of batches; wrap a dataset in a torch DataLoader (or "
                            "`DataLoaders.from_dsets`), give arrays and tensors to `DataLoaders.from_tensors`")
        self.dl, self.device, self.record, self.position = dl, device, None, 0
        self._start = self._held = self._live = self._pool = self._end = self._last = self._base = None
        self._moved, self._told, self.on_failure = False, False, None

    def __getattr__(self, name):
        if name.startswith('__') or name == 'dl': raise AttributeError(name)  # asked for while copying or unpickling
        try: return getattr(self.dl, name)
        except AttributeError as e:
            raise AttributeError(f"neither `Loader` nor its `{type(self.dl).__name__}` has `{name}`") from e

    def __setattr__(self, name, value):
        if name in Loader.__annotations__: object.__setattr__(self, name, value)
        else: setattr(self.dl, name, value)

    def __getstate__(self):
        return {**vars(self), **dict.fromkeys(('_start', '_held', '_live', '_pool', '_end', '_last', '_base'))}

    def __len__(self): return len(self.dl)
    def __bool__(self): return True  # a loader is one, also without batches or a length
    def __repr__(self): return f"Loader({self.dl!r})"

    @property
    def n_batches(self) -> int | None:
        "Batches in a whole epoch; None if the loader cannot tell"
        try: return len(self.dl)
        except Exception: return None  # a loader's `__len__` raises whatever its dataset's does

    @property
    def bs(self) -> int:
        "Items in a batch"
        n = getattr(self.dl, 'batch_size', None) or getattr(getattr(self.dl, 'batch_sampler', None), 'batch_size', None)
        if n is None: raise AttributeError  # `__getattr__` goes on from here
        return n

    def generators(self) -> list[Any]:  # each with `get_state` and `set_state`
        "The random generators of the loader and its samplers, each once: torch's, numpy's or python's"
        found, todo = {}, [self.dl]
        for o in todo:
            own = getattr(o, '__dict__', {})
            found.update({id(g): g for g in own.values() if is_generator(g) and not isinstance(g, SystemRandom)})
            todo += [own[k] for k in ('batch_sampler', 'sampler') if k in own]
        return [g if hasattr(g, 'set_state') else _Stream(g) for g in found.values()]

    def fork(self) -> 'Loader':
        "A loader of the same data with workers, record and position of its own"
        return Loader(self.dl, self.device)

    def for_eval(self) -> 'Loader':
        "This loader, or a fork if it is being iterated, whose workers draw their seeds afresh whatever ran before"
        if self.in_use: return self.fork()
        self._base = None
        return self

    @property
    def in_use(self) -> bool:
        "Is it being iterated?"
        live = self._live and self._live()
        return live is not None and live.gi_frame is not None and live is not self._held

    def restart_workers(self) -> None:
        "End the kept worker processes: the next epoch starts new ones, which see the dataset as it is then"
        if self._end is not None: self._end()
        self._pool = self._end = self._base = None

    def start_at(self,
        record: dict[str, Any],  # `record` of the epoch to go on with
        position: int,           # the first batch to be given, counted from 0
    ) -> None:
        """Let the next iteration go on in the middle of an epoch; global random streams stay as they are then

        Index batches are drawn again and skipped; only what is iterated as it is must be loaded up to `position`."""
        self._start = record, position

    def hold(self) -> None:
        "Keep the present iteration with its workers, for a `start_at` that goes on with it"
        self._held = self._live and self._live()

    def set_epoch(self,
        n: int,  # number of the pass over the data, from 0
    ) -> None:
        "Tell it to whatever has a `set_epoch`: the user's loader, its samplers, its dataset"
        dl, batches = self.dl, getattr(self.dl, 'batch_sampler', None)
        data = getattr(dl, 'dataset', None)
        parts: Any = dl, getattr(dl, 'sampler', None), batches, getattr(batches, 'sampler', None), data
        for o in {id(o): o for o in parts if hasattr(o, 'set_epoch')}.values(): o.set_epoch(n)
        if not hasattr(data, 'set_epoch') or not getattr(dl, 'persistent_workers', False) or self._told: return
        self._told = True
        warn(f"`{type(data).__name__}.set_epoch` does not reach the copies that persistent workers have: make the "
             "loader with `persistent_workers=False`")

    def place(self,
        mid: bool,         # within the epoch, between two batches? Else before the next one
    ) -> dict[str, Any]:   # for `go_to`
        """What is needed to go on from here, also in another process

        A loader with `state_dict` and `load_state_dict`, and a dataset with both and no workers, keep their own."""
        own = dict(record=self.record, position=self.position) if mid else dict(
            generators=[g.get_state() for g in self.generators()], base=self._base)
        return own | {k: o.state_dict() for k, o in self._stateful().items()}

    def go_to(self,
        place: dict[str, Any],  # what `place` gave
    ) -> None:
        "Let the next iteration go on from there"
        for k, o in self._stateful().items():
            if k in place: o.load_state_dict(place[k])
        self._moved = 'loader' in place and hasattr(type(self.dl), 'load_state_dict')
        if 'record' in place: return self.start_at(place['record'], place['position']) if place['record'] else None
        for g, s in zip(self.generators(), place['generators']): g.set_state(s)
        self._base = place['base']

    def _stateful(self):
        inner = dict(loader=self.dl)
        if not getattr(self.dl, 'num_workers', 0): inner['dataset'] = getattr(self.dl, 'dataset', None)
        return {k: o for k, o in inner.items()
                if all(callable(getattr(type(o), m, None)) for m in ('state_dict', 'load_state_dict'))}

    def _failed(self):
        self.restart_workers()
        if self.on_failure: self.on_failure()

    def close(self) -> None:
        "End the present iteration and its workers, unless it is kept by `hold`"
        live = self._live and self._live()
        if live is not None and live is self._held: return
        if live is not None: live.close()
        if self._last is not None: self._last()  # one that was left before its first batch has not ended them

    def why_empty(self) -> str:
        "Why an epoch has no batch, and what to do about it"
        kind, data, bs = type(self.dl).__name__, getattr(self.dl, 'dataset', None), getattr(self, 'bs', 0)
        n = len(data) if hasattr(data, '__len__') else None  # pyright: ignore[reportArgumentType]
        if n == 0: return f"its dataset, a `{type(data).__name__}`, is empty"
        if n and n < bs: return (f"its dataset holds {n} items, less than one batch of {bs}, which `drop_last` drops; "
                                 "lower the batch size or set `drop_last=False`")
        if not isinstance(self.dl, Iterator): return f"its `{kind}` yields nothing"
        return f"its `{kind}` can be iterated only once and is used up; pass a DataLoader or a list of batches"

    # ---- an epoch

    def __iter__(self) -> Iterator:
        "The batches of one epoch; draws that precede the first batch are made here, in the order of torch's DataLoader"
        if self._start is None:
            own, self._held = [g.get_state() for g in self.generators()], None
            self.record, self.position = dict(rng=rng_state(), generators=own, base=self._base), 0
            it = self._given(*self._batches(0))
        else:
            (record, position), self._start = self._start, None
            held, self._held = self._held, None
            # one that is over was closed by what shortened its epoch
            if held is not None and held.gi_frame is not None and record is self.record and position == self.position:
                return held
            self.record, self.position = record, position
            with untouched():
                set_rng_state(record['rng'])
                for g, s in zip(self.generators(), record['generators'], strict=True): g.set_state(s)
                self._base = record['base']
                it = self._given(*self._batches(0 if self._moved else self.position))
                self._moved = False
        self._live = weakref.ref(it)
        return it

    def _given(self, batches, ahead):
        "Move the batches and count them"
        state, device = self.__dict__, None if self.device is None else exact_device(self.device)
        if device is not None and device.type == 'cuda': batches = to_cuda(batches, device, ahead)
        for b in batches:
            state['position'] += 1  # past `__setattr__`, which would cost two calls a batch
            yield b if device is None else to_device(b, device)

    def _batches(self, k):
        "Batches from number `k` on, and whether they may be fetched ahead, because that draws nothing here"
        dl = self.dl
        stock = isinstance(dl, DataLoader) and all(getattr(type(dl), name) is getattr(DataLoader, name)
                                                   for name in ('__iter__', '_get_iterator', '_index_sampler'))
        if not stock or isinstance(dl.dataset, IterableDataset):
            batches = self._from_workers() if stock and dl.num_workers else iter(dl)
            for _ in islice(batches, k): pass
            return batches, isinstance(dl, (list, tuple)) or stock and dl.num_workers > 0
        plan = Plan(dl, self._base)
        if dl.num_workers: return self._from_workers(plan, k), True
        if found := _indexable(dl, plan): return _indexed(*found, plan.starts(k), plan.bs), True
        batches = map(partial(_fetch, dl), plan.batches(k))
        return map(pinned, batches) if dl.pin_memory and torch.cuda.is_available() else batches, False

    def _from_workers(self, plan=None, k=0):
        "Batches fetched by torch's worker processes, which belong to a copy of the loader"
        pool, keep = self._pool, self.dl.persistent_workers
        if pool is None: pool = worker_pool(self.dl, self.device, plan is not None)
        if plan is not None:
            seed, age = plan.base
            if keep: self._base = seed, age+1
            pool.generator = torch.Generator().manual_seed(seed)  # torch would draw from the user's a second time
            feed: Any = pool._index_sampler
            feed.batches = plan.seeded(k)
        try: it: Any = iter(pool)
        except BaseException:
            self._failed()
            raise
        watch_workers(it)
        # `it` would do this itself when freed, but waits 5 s in vain if the garbage collector freed its queues before
        end = self._end or weakref.finalize(self, end_workers, it._shutdown_workers, os.getpid())
        if keep: self._pool, self._end = pool, end
        else: self._last = end
        return self._guarded(it, end, keep)

    def _guarded(self, it, end, keep):
        "End the workers if fetching is cut short: a queue left in the middle of a message cannot be read again"
        try:
            while True:
                try: b = next(it)
                except StopIteration: return
                except BaseException:
                    self._failed()
                    raise
                yield b
        finally:
            if not keep: end()


# ---- fetching in this process

def _fetch(dl, ids): return dl.collate_fn(dl.dataset[ids] if dl.batch_sampler is None else fetch_items(dl.dataset, ids))


def _indexable(dl, plan) -> tuple[Any, Any] | None:
    "The tensors and indices to index batch by batch, if the loader does nothing else; where in doubt, item by item"
    if plan.bs is None or not isinstance(plan.ids, (Tensor, range)) or dl.collate_fn is not default_collate: return None
    data, subsets = dl.dataset, []
    while type(data) is Subset: data, subsets = data.dataset, [*subsets, data.indices]
    if type(data) is not TensorDataset or any(type(t) is not Tensor or t.layout is not torch.strided or
                                              t.device != data.tensors[0].device for t in data.tensors): return None
    ids = plan.ids if isinstance(plan.ids, Tensor) else torch.arange(len(plan.ids))
    for indices in subsets: ids = torch.as_tensor(indices, dtype=torch.int64)[ids]
    if len(ids) and not 0 <= ids.min() <= ids.max() < len(data): return None
    return data.tensors, ids.to(data.tensors[0].device)


def _indexed(tensors, ids, starts, bs):
    for i in starts:
        now = ids[i:i+bs]
        yield [t.index_select(0, now) for t in tensors]  # a copy: who changes a batch in place changes no data
