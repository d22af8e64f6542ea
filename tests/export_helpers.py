"""What the tests of exported models share: Learners whose data is at hand, and what their models give."""
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from learner import export
from learner.data import DataLoaders
from learner.learner import Learner

assert export  # it adds methods to the Learner
close = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-6)


def rows(*sizes, n=12, seed=0):
    "`n` items of random numbers, of each of these sizes"
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(n, *([s] if isinstance(s, int) else s), generator=g) for s in sizes]


def loader(*ts, bs=4): return DataLoader(TensorDataset(*ts), bs)


def images(path):
    "A Learner of small images in three classes, trained a little, so that statistics are not those of the beginning"
    x, y = *rows((3, 6, 6)), torch.arange(12) % 3
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(.5), nn.Flatten(),
                          nn.Linear(64, 3))
    dls = DataLoaders(loader(x, y), loader(x, y))
    dls.vocab = ['cat', 'dog', 'newt']
    learn = Learner(dls, model, nn.CrossEntropyLoss(), default_cbs=False, path=path)
    learn.fit(1, .1)
    return learn


def learner_of(model, *ts, path, loss_func=F.mse_loss):
    "A Learner of what `model` makes, not yet trained, on these tensors, the last of which is the target"
    torch.manual_seed(0)
    return Learner(loader(*ts), model(), loss_func, default_cbs=False, path=path)


def given(learn, *args, **kwargs):
    "What the model gives in eval mode"
    modes = [m.training for m in learn.model.modules()]
    with torch.no_grad(): out = learn.model.eval()(*args, **kwargs)
    for m, training in zip(learn.model.modules(), modes): m.training = training
    return out
