"""Worker processes of a loader: each index batch brings its own seed, so it matters not which worker fetches it."""
import os
import random
import signal
from collections.abc import Iterator
from threading import Event
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

__all__ = ['fetch_items', 'watch_workers', 'end_workers', 'worker_pool']


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


class _Done:
    "Tells workers to end, without waiting for ever for the lock, which a worker that was killed may hold"
    def __init__(self, shared): self.shared, self.done = shared, False
    def is_set(self) -> bool: return self.done

    def set(self) -> None:
        self.done = True
        if not self.shared._cond.acquire(timeout=1): return  # torch ends by force who is not told
        try:
            self.shared._flag.acquire(False)
            self.shared._flag.release()
            self.shared._cond.notify_all()
        finally: self.shared._cond.release()


def watch_workers(
    it: Any,  # torch's iteration over a loader with workers
) -> None:
    "Let it find out that a worker has died, whatever that one was doing"
    if not isinstance(it._workers_done_event, _Done): it._workers_done_event = _Done(it._workers_done_event)


def end_workers(
    shutdown: Any,  # the method of torch's iteration that ends its workers
    pid: int,       # of the process that started them
) -> None:
    "End workers, unless this is a forked worker that frees its copy of a loader: it has none to end"
    if os.getpid() != pid: return
    it = shutdown.__self__
    if not all(w.is_alive() for w in it._workers):
        it._workers_done_event = Event()  # a dead one may hold the lock of the other for ever
        for w in it._workers: w.terminate()
    shutdown()


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


def worker_pool(
    dl: DataLoader,  # the user's, which stays as it is
    device: Any,     # where batches go; their memory is pinned for a GPU
    planned: bool,   # is it given seeded index batches? Else it draws its own
) -> DataLoader:
    "A shallow copy of `dl`, made past DataLoader's `__setattr__`, which forbids these changes"
    new = dict(_iterator=None, worker_init_fn=_WorkerInit(dl.worker_init_fn),
               pin_memory=dl.pin_memory or device is not None and torch.device(device).type == 'cuda')
    if planned:
        new |= {'sampler' if dl.batch_sampler is None else 'batch_sampler': _Feed(), 'dataset': _Seeded(dl.dataset)}
    pool = object.__new__(type(dl))
    vars(pool).update(vars(dl), **new)
    return pool
