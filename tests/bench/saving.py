"""What saving and resuming cost: seconds and items loaded until a resumed fit has its first batch, the share of saves.

`python -m tests.bench.saving` prints it; `make bench` puts it into results.md."""
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset

from learner import Learner
from learner.callback import Callback
from learner.callbacks.checkpoint import Checkpoint
from learner.display import set_display


class Items(Dataset):
    "A million items that are made when asked for, and counted"
    n_loaded = 0
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def __getitem__(self, i):
        self.n_loaded += 1
        return torch.full((4,), float(i % 7)), torch.tensor(float(i % 3))


class FirstBatch(Callback):
    "Ends the fit at its first batch, and notes when that was, and what had been loaded"
    def before_batch(self):
        self.at, self.n_loaded = perf_counter(), self.dls.train_ds.n_loaded
        self.learn.request_stop()


class Watch(Callback):
    "Ends the fit after some seconds, and notes what each save took"
    order = Checkpoint.order + 1

    def __init__(self, checkpoint, seconds):
        self.checkpoint, self.seconds, self.took, self.start = checkpoint, seconds, [], perf_counter()

    def save_point(self):
        if self.checkpoint.took not in (0., *self.took): self.took.append(self.checkpoint.took)

    def after_batch(self):
        if perf_counter()-self.start > self.seconds: self.learn.request_stop()


def learner(path, n, bs=1):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1), nn.Flatten(0))
    return Learner((DataLoader(Items(n), bs, shuffle=True), None), model, nn.functional.mse_loss, SGD, 1e-3, path=path)


def resumed_at(k, n):
    "Seconds from the call of fit to its first batch, after `k` of `n` batches, and items loaded until then"
    with TemporaryDirectory() as folder:
        learn = learner(folder, n)
        stop = Callback(after_batch=lambda cb: cb.learn.n_step == k and cb.learn.request_stop())
        learn.fit(1, cbs=[Checkpoint(), stop])
        again, first = learner(folder, n), FirstBatch()
        start = perf_counter()
        again.fit(1, cbs=[Checkpoint(at_end=False), first], resume=True)
        assert again.n_step == k+1
        return first.at-start, first.n_loaded


def share_of_saves(seconds):
    "MiB of a file, milliseconds of a save, and the share of a fit of some seconds, at the cadence that is the default"
    def body(n): return nn.Sequential(*[nn.Linear(n, n) for _ in range(4)])
    with TemporaryDirectory() as folder:
        learn, cb = learner(folder, 10**7, 64), Checkpoint(at_end=False, keep=1)
        learn.model = nn.Sequential(nn.Linear(4, 512), body(512), nn.Linear(512, 1), nn.Flatten(0))
        watch = Watch(cb, seconds)
        learn.fit(1, cbs=[cb, watch])
        size = next(Path(folder).rglob('*.ckpt')).stat().st_size
        return size/2**20, 1e3*cb.took, len(watch.took), sum(watch.took)/(perf_counter()-watch.start)


def lines():
    "What results.md says of it"
    set_display('off')
    seconds, n_loaded = resumed_at(100_000, 1_000_000)
    mib, ms, n, share = share_of_saves(45)
    return [f'Resumed after 100,000 of 1,000,000 batches: {seconds:.2f} s from the call of fit to its first batch '
            f'(aim: under 1), {n_loaded-1} items loaded before it (aim: 0).',
            f'{n} saves of {mib:.1f} MiB in 45 s at the default cadence, {ms:.0f} ms each: {share:.2%} of the time '
            '(aim: under 1 %).']


if __name__ == '__main__': print('\n\n'.join(lines()))
