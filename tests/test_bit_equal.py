"""A fit equals a hand-written PyTorch loop, bit for bit."""
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from learner.learner import Learner


class Items(Dataset):
    "An ordinary map dataset that draws random numbers for each item"
    def __init__(self, n=40):
        g = torch.Generator().manual_seed(7)
        self.x, self.y = torch.randn(n, 5, generator=g), torch.randint(3, (n,), generator=g)
    def __len__(self): return len(self.x)
    def __getitem__(self, i): return self.x[i] + .1*torch.randn(5), self.y[i]


def net(): return nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(.4), nn.Linear(16, 3))


def by_hand(train, valid, model, opt, n_epoch):
    "The loop that a PyTorch user writes; its validation inside `fork_rng`"
    for _ in range(n_epoch):
        model.train()
        for xb, yb in train:
            F.cross_entropy(model(xb), yb).backward()
            opt.step()
            opt.zero_grad()
        if valid is None: continue
        with torch.random.fork_rng(), torch.no_grad():
            model.eval()
            for xb, yb in valid: F.cross_entropy(model(xb), yb)


@pytest.mark.parametrize('data', ['tensors', 'items'])
@pytest.mark.parametrize('with_valid', [True, False])
@pytest.mark.parametrize('opt_func', [torch.optim.AdamW, partial(torch.optim.SGD, momentum=.9, weight_decay=.1),
                                      partial(torch.optim.SGD, momentum=.9, nesterov=True), torch.optim.RMSprop],
                         ids=['adamw', 'sgd', 'nesterov', 'rmsprop'])
def test_bit_equal_to_a_hand_written_loop(data, with_valid, opt_func):
    "R14: with shuffle, dropout and batch norm, weights, buffers and random stream equal a loop by hand's, bit by bit"
    ds = Items() if data == 'items' else TensorDataset(Items().x, Items().y)
    def loaders(): return DataLoader(ds, 8, shuffle=True), DataLoader(ds, 8) if with_valid else None
    torch.manual_seed(1)
    a, b = net(), net()
    b.load_state_dict(a.state_dict())
    train, valid = loaders()
    torch.manual_seed(2)
    by_hand(train, valid, a, opt_func(a.parameters(), lr=.01), 3)
    left = torch.rand(3)

    learn = Learner(loaders(), b, F.cross_entropy, opt_func=opt_func, lr=.01, wd_bn_bias=True,
                    default_cbs=dict(progress=None))
    torch.manual_seed(2)
    learn.fit(3)

    assert all(p.equal(q) for p, q in zip(a.state_dict().values(), b.state_dict().values(), strict=True))
    assert torch.rand(3).equal(left)
