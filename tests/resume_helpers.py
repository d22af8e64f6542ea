"""What the tests of resuming share: a network with dropout and BatchNorm on data with random numbers, and stops."""
import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from learner.callback import Callback
from learner.callbacks.checkpoint import writers
from learner.learner import Learner
from learner.metrics import accuracy
from learner.utils import set_seed


class Noisy(Dataset):
    "Items with noise from torch's, numpy's and python's random streams; notes which ones it was asked for"
    def __init__(self, n=40):
        self.x = torch.randn(n, 4, generator=torch.Generator().manual_seed(0))
        self.y, self.asked = (self.x.sum(1) > 0).long(), []

    def __len__(self): return len(self.x)

    def __getitem__(self, i):
        self.asked.append(i)
        return self.x[i] + .1*torch.randn(4) + .1*random.random() + .1*float(np.random.rand()), self.y[i]


def network(): return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(.3), nn.Linear(8, 2))


def halves(model): return [list(model[:2].parameters()), list(model[2:].parameters())]


def noisy_loaders(bs=8, n=40, **kwargs):
    "Five training batches and two of validation"
    if not kwargs.keys() & {'sampler', 'batch_sampler'}: kwargs.setdefault('shuffle', True)
    return DataLoader(Noisy(n), bs, **kwargs), DataLoader(Noisy(16), 8)


class Hashed(Learner):
    "Notes its hash when a fit is over: the random streams that are part of it are everybody's, and go on"
    final_hash = ''

    def fit(self, *args, **kwargs):
        super().fit(*args, **kwargs)
        self.final_hash = self.state_hash()


def noisy_learner(path, dls=None, model=None, **kwargs):
    "As a script makes it at its start, in a process of its own: the same each time"
    set_seed(3)
    writers.clear()
    kwargs.setdefault('default_cbs', dict(progress=None))
    loss_func = nn.CrossEntropyLoss()
    return Hashed(dls or noisy_loaders(), model or network(), loss_func, metrics=accuracy, path=path, **kwargs)


def uninterrupted(path, n_epoch):
    "A Learner that was trained in one go"
    learn = noisy_learner(path/'whole')
    learn.fit(n_epoch, 1e-2)
    return learn


class AskAt(Callback):
    "Asks for `what` while the `n`-th batch is under way, counted over training and validation"
    order = -5

    def __init__(self, n, *what): self.n, self.what, self.seen = n, what or ('interrupt',), 0

    def after_batch(self):
        self.seen += 1
        if self.seen == self.n: self.learn._stop.ask(*self.what, by='Ctrl-C')


def record(learn):
    "The table without times, as text that shows every bit"
    return learn.history.drop(columns='time').to_csv()
