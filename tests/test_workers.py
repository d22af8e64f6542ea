"""Worker processes: they ignore Ctrl-C, are kept or ended as asked, and leave the loader usable."""
import gc
import os
import signal
from itertools import islice
from multiprocessing.util import Finalize
from pathlib import Path

import pytest
import torch
from torch.utils.data import (DataLoader, Dataset, IterableDataset, get_worker_info)

from learner.loader import Loader
from tests.loader_helpers import (Plain, n, y)


class Witness(Dataset):
    "Tells what a worker sees"
    def __init__(self): self.mark = 0
    def __len__(self): return 8
    def __getitem__(self, i): return os.getpid(), signal.getsignal(signal.SIGINT) is signal.SIG_IGN, self.mark


def set_mark(_): get_worker_info().dataset.mark = 7


class WitnessStream(Witness, IterableDataset):
    def __iter__(self): return (self[i] for i in range(4))


def witness(persistent=True, kind=Witness, **kwargs):
    return Loader(DataLoader(kind(), 2, num_workers=2, persistent_workers=persistent, **kwargs))


def pids(dl): return {int(p) for b in dl for p in b[0]}


@pytest.mark.parametrize('kind', [Witness, WitnessStream])
def test_workers_ignore_interrupts_and_run_the_init_function(kind):
    "Ctrl-C does not reach a worker, and the user's `worker_init_fn` finds the user's own dataset in it"
    _, ignored, mark = zip(*witness(False, kind, worker_init_fn=set_mark))

    assert torch.cat(ignored).all()
    assert set(torch.cat(mark).tolist()) == {7}


@pytest.mark.parametrize('kind', [Witness, WitnessStream])
def test_persistent_workers_stay_until_restarted(kind):
    "Persistent workers serve all epochs; after `restart_workers` new ones see what has changed in the dataset"
    dl = witness(kind=kind)
    first, second = pids(dl), pids(dl)
    dl.dataset.mark = 3

    dl.restart_workers()
    new, marks = pids(dl), {int(m) for b in dl for m in b[2]}

    assert first == second and len(first) == 2
    assert not first & new
    assert marks == {3}


def test_other_workers_end_with_their_epoch():
    "Workers that are not persistent are new ones in each epoch"
    dl = witness(persistent=False)

    assert not pids(dl) & pids(dl)


@pytest.mark.parametrize('kind', [Witness, WitnessStream])
def test_forgotten_workers_end_properly(kind, tmp_path):
    "Workers of a loader that is lost in a reference cycle, as a learner is, end by themselves and need not be killed"
    def init(i): Finalize(None, Path.touch, (tmp_path/str(i),), exitpriority=1)  # not called if the process is killed
    dl, cycle = witness(kind=kind, worker_init_fn=init), {}
    next(iter(dl))
    cycle.update(cycle=cycle, dl=dl)

    del dl, cycle
    gc.collect()

    assert sorted(p.name for p in tmp_path.iterdir()) == ['0', '1']


@pytest.mark.parametrize('persistent', [False, True])
def test_usable_after_leaving_early(persistent):
    "An epoch left in the middle does not disturb the next one"
    dl = Loader(DataLoader(Plain(), 2, num_workers=2, persistent_workers=persistent))
    for _ in islice(dl, 3): pass

    assert torch.equal(torch.cat([b[1] for b in dl]), y)


class Broken(Plain):
    def __getitem__(self, i):
        if i == 7: raise ZeroDivisionError('item 7')
        return super().__getitem__(i)


@pytest.mark.parametrize('workers', [0, 1])
def test_error_in_a_dataset_keeps_its_type(workers):
    "The error of an item is raised as it is, and the loader can be iterated again"
    dl = Loader(DataLoader(Broken(), 2, num_workers=workers, persistent_workers=workers > 0))
    with pytest.raises(ZeroDivisionError, match='item 7'): list(dl)

    assert torch.equal(next(iter(dl))[1], y[:2])


class Interrupting(Plain):
    "Its worker sends Ctrl-C to the main process, once"
    def __getitem__(self, i):
        if i == 9 and not self.loaded: os.kill(os.getppid(), signal.SIGINT)
        return super().__getitem__(i)


@pytest.mark.parametrize('persistent', [False, True])
def test_usable_after_an_interrupt_while_waiting_for_workers(persistent):
    "An interrupt in the middle of fetching reaches the caller, and the next epoch is whole"
    dl = Loader(DataLoader(Interrupting(), 3, num_workers=1, persistent_workers=persistent, sampler=[9, *range(n)]))
    with pytest.raises(KeyboardInterrupt): list(dl)
    dl.dataset.loaded.append(9)

    assert torch.equal(torch.cat([b[1] for b in dl])[1:], y)


@pytest.mark.parametrize('persistent', [False, True])
def test_a_worker_that_was_killed_with_a_lock_is_noticed(persistent):
    "One that dies while it asks whether to end keeps the lock of that for ever: its death is an error, and no hang"
    dl = Loader(DataLoader(range(9), 1, num_workers=1, persistent_workers=persistent, collate_fn=list))  # no tensors
    batches = iter(dl)
    next(batches)
    it = (dl._end or dl._last).peek()[2][0].__self__  # torch's iteration
    it._workers_done_event.shared._cond.acquire()
    ignored = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would tell at once

    os.kill(it._workers[0].pid, signal.SIGKILL)
    try:
        with pytest.raises(RuntimeError, match=r'worker \(pid\(s\) \d+\) exited unexpectedly'): list(batches)
    finally: signal.signal(signal.SIGCHLD, ignored)
