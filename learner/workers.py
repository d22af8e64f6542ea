"""Worker processes of a loader: each index batch brings its own seed, so it matters not which worker fetches it."""
import os
import random
import signal
from collections.abc import Iterator
from functools import cache
from threading import Event
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

__all__ = ['fetch_items', 'end_workers', 'end_all_workers', 'is_worker_error', 'worker_pool']

_running: Any = WeakKeyDictionary()  # torch's iterations by workers, and the user's loader that each is of


def fetch_items(
    dataset: Any,
    ids: Any,  # the indices of a batch
) -> Any:
    "The items of a batch, by the dataset's own method for many if it has one"
    many = getattr(dataset, '__getitems__', None)
    return many(ids) if many else [dataset[i] for i in ids]


class _Feed:
    "The (batch) sampler of a pool of workers: seeded index batches, new ones each epoch"
    batches: Iterator
    def __iter__(self): return self.batches


class _Seeded(Dataset):
    "A dataset that seeds all generators before each index batch, so that it matters not which worker fetches it"
    def __init__(self, dataset): self.dataset = dataset
    def __getitem__(self, seeded): return self.dataset[_seed(*seeded)]
    def __getitems__(self, seeded): return fetch_items(self.dataset, _seed(*seeded))


def _seed(seed, ids):
    "Seed all generators for the items of `ids`, and return these"
    torch.default_generator.manual_seed(seed)  # 1 µs; `torch.manual_seed` takes 300, since it seeds GPUs too
    np.random.seed(seed % 2**32)
    random.seed(seed)
    return ids


def end_workers(
    shutdown: Any,  # the method of torch's iteration that ends its workers
    pid: int,       # of the process that started them
) -> None:
    "End workers, unless this is a forked worker that frees its copy of a loader: it has none to end"
    while os.getpid() == pid:
        try:
            it = shutdown.__self__
            if not all(w.is_alive() for w in it._workers):
                it._workers_done_event = Event()  # the dead may hold a lock of torch's, which would be waited for forever
                for w in it._workers: w.terminate()
            return shutdown()
        except RuntimeError as e:
            if not is_worker_error(e): raise


def end_all_workers(
    dl: DataLoader,  # the user's
) -> None:
    "End whatever workers fetch from `dl`, also those of an iteration that was left and that something still refers to"
    for it, of in [*_running.items()]:
        if of is dl: end_workers(it._shutdown_workers, os.getpid())


def is_worker_error(e: BaseException) -> bool:
    "Is it the one by which torch tells that a worker has died? It has no type of its own"
    return isinstance(e, RuntimeError) and str(e).startswith('DataLoader worker (pid')


class _WorkerInit:
    "Lets workers ignore signals that are for the main process, and shows the user's function the user's dataset"
    def __init__(self, init_fn): self.init_fn = init_fn
    def __call__(self, worker_id):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for name in ('SIGHUP', 'SIGUSR1', 'SIGUSR2'):  # they may be sent to all processes of a terminal or job
            n = getattr(signal, name, None)
            if n is not None and signal.getsignal(n) is signal.SIG_DFL: signal.signal(n, signal.SIG_IGN)
        info: Any = get_worker_info()
        if isinstance(info.dataset, _Seeded): object.__setattr__(info, 'dataset', info.dataset.dataset)
        if self.init_fn is not None: self.init_fn(worker_id)


class _Pool:
    "Notes its iterations"
    users_dl: Any
    def __iter__(self):
        it = super().__iter__()  # pyright: ignore[reportAttributeAccessIssue]
        _running[it] = self.users_dl
        return it


@cache
def _pool_type(cls): return type(cls.__name__, (_Pool, cls), {})


def worker_pool(
    dl: DataLoader,  # the user's, which stays as it is
    device: Any,     # where batches go; their memory is pinned for a GPU
    planned: bool,   # is it given seeded index batches? Else it draws its own
) -> DataLoader:
    "A shallow copy of `dl`, made past DataLoader's `__setattr__`, which forbids these changes"
    new = dict(users_dl=dl, _iterator=None, worker_init_fn=_WorkerInit(dl.worker_init_fn),
               pin_memory=dl.pin_memory or device is not None and torch.device(device).type == 'cuda')
    if planned:
        new |= {'sampler' if dl.batch_sampler is None else 'batch_sampler': _Feed(), 'dataset': _Seeded(dl.dataset)}
    pool: Any = object.__new__(_pool_type(type(dl)))
    vars(pool).update(vars(dl), **new)
    return pool
