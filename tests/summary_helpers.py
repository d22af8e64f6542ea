"""Learners and models for what `learn.summary` and `layer_info` show."""
import torch
from torch import nn

from tests.helpers import synth_learner


def mk(model, *xb, y=None, bs=5, **kw):
    "A Learner of `model` with two batches of inputs `xb`, silent"
    y = torch.zeros(bs, 1) if y is None else y
    return synth_learner(dls=([(*xb, y)]*2, None), model=model, **kw)


def net(): return nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Dropout(.5), nn.Linear(20, 1))
def of_net(**kw): return mk(net(), torch.randn(5, 10), **kw)


class Vit(nn.Module):
    "Parameters of its own, attention written out, a layer used twice and one never"
    def __init__(self):
        super().__init__()
        self.cls = nn.Parameter(torch.zeros(1, 1, 4))
        self.qk, self.twice, self.unused = nn.Linear(4, 8), nn.Linear(4, 4), nn.Linear(4, 100)

    def forward(self, x):
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1)
        q, k = self.qk(x).chunk(2, -1)
        return self.twice(self.twice(q@k.transpose(1, 2)@x))[:, 0, :1]


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(10, 4), nn.ReLU()), nn.Linear(5, 1)

    def forward(self, x): return self.head(self.body(x))
