"""A learner with three parameter groups, and what the tests of schedules do with it."""
import math
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from learner.callback import Callback
from learner.events import CancelStepException
from learner.schedules import SchedLin
from learner.splitters import split_blocks
from tests.helpers import synth_learner

__all__ = ['rate', 'momentum', 'flat', 'three', 'lrs', 'late', 'hypers', 'falling', 'Window', 'unsized',
           'single']

rate, momentum = .1, partial(torch.optim.SGD, momentum=.9)


def flat(pred, targ): return 0*pred.sum()  # a loss without gradients, so that no learning rate is too high


def three(cbs=None, n=4, n_valid=0, opt_func: Any = momentum, lr: Any = rate, loss_func=flat, **kwargs):
    "A learner with three parameter groups and `n` batches an epoch"
    model = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 2), nn.Linear(2, 1))
    return synth_learner(cbs, n, n_valid, model=model, lr=lr, splitter=split_blocks(), opt_func=opt_func,
                         loss_func=loss_func, **kwargs)

def lrs(n_epoch, cbs=None, learn=None, **kwargs):
    "The learning rate of the last group at each batch of a fit"
    learn = learn or three()
    learn.fit(n_epoch, cbs=cbs, **kwargs)
    return learn.recorder.lrs

def late(**handlers):
    "A callback that acts after all others"
    cb = Callback(**handlers)
    cb.order = 90
    return cb

def hypers(learn): return [dict(h) for h in learn.opt.hypers]

def falling(n, start=.1, end=0.): return [SchedLin(start, end)(i/(n-1)) for i in range(n)]


class Window(Callback):
    "Accumulates: a step once in `k` batches"
    def __init__(self, k): self.k = k
    def before_step(self):
        self.learn.keep_grads = bool((self.iter+1) % self.k)
        if self.keep_grads: raise CancelStepException


class Stream(IterableDataset):
    "16 samples, but no length"
    def __iter__(self): return ((torch.full((1,), i/16), torch.full((1,), i/8)) for i in range(16))

def unsized(cbs=None, **kwargs):
    "A learner with four batches an epoch, which it does not know"
    return synth_learner(cbs, dls=(DataLoader(Stream(), 4), None), lr=rate, **kwargs)

def single(pos, shares):
    "A position as fastai has it: within a combined schedule's part it is rounded to single precision"
    bounds = np.cumsum(np.array([0., *shares], np.float32), dtype=np.float32)
    k = min(int((np.float32(pos) >= bounds).nonzero()[0].max()), len(shares)-1)
    part = float((np.float32(pos)-bounds[k])/(bounds[k+1]-bounds[k]))
    start = math.fsum(shares[:k])
    return start + part*shares[k]
