"""A small network, and what the tests of optimizers do with it."""
import torch
from torch import nn

from learner.optim import SGD, Adadelta, Adagrad, Adam, Adamax, NAdam, RAdam, RMSProp, make_opt, params

__all__ = ['net', 'by_layer', 'backward', 'train', 'weights', 'same', 'one_group', 'ours']

ours = [SGD, RMSProp, Adam, RAdam, NAdam, Adagrad, Adadelta, Adamax]


def net(*, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2)).to(dtype)


def by_layer(model): return [list(m.parameters()) for m in model if list(m.parameters())]


def backward(model, i=0):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(i)).to(next(model.parameters()))
    model(x).pow(2).sum().backward()


def train(model, opt, n=4, first=0):
    "`n` steps on batches that are the same for the same `first`; the model"
    for i in range(first, first+n):
        backward(model, i)
        opt.step()
        opt.zero_grad()
    return model


def weights(model): return [p.detach().clone() for p in model.parameters()]
def same(a, b): return all(map(torch.equal, a, b))
def one_group(opt_func, model, lr=.1, **kwargs): return make_opt(opt_func, params(model), model, lr, **kwargs)
