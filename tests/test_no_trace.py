"""The finder puts back what the data and the loss have: samplers, data sets, collating and loss objects."""
import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Sampler, default_collate

from learner.callback import Callback
from learner.learner import Learner
from tests.helpers import synth_learner

find = partial(Learner.lr_find, num_it=8, end_lr=1., stop_div=False, show_plot=False, suggest_funcs=None)


class Drawn(Sampler):
    "Draws the order from a generator of its own"
    def __init__(self, rng): self.rng = rng
    def __len__(self): return 16
    def __iter__(self):
        if isinstance(self.rng, random.Random): return iter(self.rng.sample(range(16), 16))
        return iter(self.rng.permutation(16).tolist())

class Counted(Sampler):
    "Begins each epoch one item later"
    epoch = 0
    def __len__(self): return 16
    def __iter__(self):
        self.epoch += 1
        return iter([(i+self.epoch) % 16 for i in range(16)])

class Noisy(Dataset):
    "Adds noise from a generator of its own, and counts"
    def __init__(self): self.rng, self.n = np.random.default_rng(0), 0
    def __len__(self): return 16
    def __getitem__(self, i):
        self.n += 1
        return torch.full((1,), i/16 + self.rng.normal() + self.n/100, dtype=torch.float32), torch.ones(1)

def drawn_by(rng): return lambda: DataLoader(Noisy(), 4, sampler=Drawn(rng()))

@pytest.mark.parametrize('loader', [
    drawn_by(lambda: np.random.default_rng(0)), drawn_by(lambda: random.Random(0)),
    drawn_by(lambda: np.random.RandomState(0)), lambda: DataLoader(Noisy(), 4, sampler=Counted()),
    lambda: DataLoader(Noisy(), batch_sampler=[[0, 1], [2, 3]]), lambda: DataLoader(Noisy(), 4, shuffle=True)])
def test_data_with_a_state(loader):
    "Samplers and datasets with generators and counters of their own go on as without the finder"
    def losses(finds):
        learn = synth_learner(dls=(loader(), None))
        if finds: find(learn)
        learn.fit(2)
        return learn.recorder.raw_losses

    assert losses(True) == losses(False)

class CountingLoss:
    "A loss that is no module"
    n = 0
    def __call__(self, pred, targ):
        self.n += 1
        return (pred-targ).pow(2).mean()

class Counts(nn.Module):
    "A loss with a buffer"
    def __init__(self):
        super().__init__()
        self.register_buffer('n', torch.zeros(1))
    def forward(self, pred, targ, power=2):
        self.n += 1
        return (pred-targ).abs().pow(power).mean()
    def method(self, pred, targ): return self(pred, targ)

class Slots:
    __slots__ = ('n',)
    def __call__(self, pred, targ): return (pred-targ).pow(2).mean()

@pytest.mark.parametrize('wrap', [lambda o: o, lambda o: partial(o, power=3), lambda o: o.method,
                                  lambda o: partial(o.method)])
def test_loss_within(wrap):
    "A loss object is found in a partial and behind a method"
    find(synth_learner(loss_func=wrap(loss := Counts())))

    assert loss.n == 0

def test_loss_with_slots():
    "A loss without attributes of its own is left as it is"
    find(learn := synth_learner(loss_func=Slots()))

    assert learn.n_step == 0

class Counting(Dataset):
    def __init__(self): self.n, self.rngs = 0, [np.random.default_rng(0)]
    def __len__(self): return 16
    def __getitem__(self, i):
        self.n += 1
        return torch.full((1,), self.rngs[0].normal(), dtype=torch.float32), torch.ones(1)

class Wraps(Dataset):
    def __init__(self, dataset): self.dataset = dataset
    def __len__(self): return 16
    def __getitem__(self, i): return self.dataset[i]

class Itself(Counting):
    def __init__(self):
        super().__init__()
        self.dataset = self

class Collate:
    n = 0
    def __call__(self, items):
        self.n += 1
        return default_collate(items)

class Hand:
    "A loader of one's own"
    n = 0
    def __iter__(self):
        self.n += 1
        return iter([(torch.ones(4, 1), torch.ones(4, 1))]*3)

@pytest.mark.parametrize('wrap', [lambda d: d, Wraps, lambda d: Wraps(Wraps(d)), lambda d: ConcatDataset([d, d])])
@pytest.mark.parametrize('make', [Counting, Itself])
def test_data_within_data(wrap, make):
    "Counters and generators of a data set are put back wherever it is"
    data, collate = make(), Collate()
    state = data.rngs[0].bit_generator.state

    find(synth_learner(dls=(DataLoader(wrap(data), 4, collate_fn=collate), None)))

    assert data.n == collate.n == 0 and data.rngs[0].bit_generator.state == state

def test_own_loader():
    "A loader of one's own has its attributes back"
    find(synth_learner(dls=(hand := Hand(), None)))

    assert hand.n == 0

@pytest.mark.parametrize('shuffle', [True, False])
def test_data_is_not_copied(shuffle, monkeypatch):
    "Data in a plain list is not looked into"
    seen = []
    class Item(torch.Tensor):
        def clone(self, *args): return seen.append(1)
    data = [(torch.ones(1).as_subclass(Item), torch.ones(1)) for _ in range(16)]

    find(synth_learner(dls=(DataLoader(data, 4, shuffle=shuffle, collate_fn=lambda items: [torch.ones(4, 1)]*2), None)))

    assert seen == []

class Lists(Callback):
    "Collects in a list of its class"
    seen: list = []
    def after_loss(self): self.seen.append(float(self.loss))

def test_loss_object_and_lists_of_classes():
    "A loss that is an object is as before, and so is what a callback collects in a list of its class"
    learn = synth_learner(Lists, loss_func=CountingLoss())

    find(learn)

    assert learn.loss_func.n == 0 and Lists.seen == []
