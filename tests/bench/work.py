"""The work that is counted and timed, and the loop by hand that it is compared with.

Everything is small on purpose: what a training loop adds to a batch shows best where a batch takes little time."""
import gc
import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

__all__ = ['cross_entropy', 'mse_loss', 'small_net', 'ready_batches', 'image_net', 'image_loader', 'digits_net',
           'ready_digits', 'by_hand', 'calls', 'calls_per_batch']


def small_net():
    "A network of 1,365 parameters, in 6 tensors"
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 10), nn.ReLU(), nn.Linear(10, 1))


def ready_batches(n: int, bs: int = 64):
    "A list of `n` batches for `small_net`, so that no time goes into making them"
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(bs, 10, generator=g), torch.randn(bs, 1, generator=g)) for _ in range(n)]


def image_net():
    "A network of one layer, 7,850 parameters in 2 tensors, for images of 28×28 and 10 classes"
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def digits_net():
    "The network of `make demo`, 28,938 parameters in 11 tensors, for images of 8×8 and 10 classes"
    torch.manual_seed(0)
    def conv(n_in, n_out):
        return nn.Sequential(nn.Conv2d(n_in, n_out, 3, padding=1, bias=False), nn.BatchNorm2d(n_out), nn.ReLU())
    return nn.Sequential(conv(1, 32), conv(32, 32), nn.MaxPool2d(2), conv(32, 64), nn.MaxPool2d(2),
                         nn.Flatten(), nn.Dropout(.3), nn.Linear(64*2*2, 10))


def ready_digits(n: int, bs: int = 64):
    "A list of `n` batches for `digits_net`"
    g = torch.Generator().manual_seed(1)
    return [(torch.rand(bs, 1, 8, 8, generator=g), torch.randint(10, (bs,), generator=g)) for _ in range(n)]


def image_loader(n: int, bs: int = 64):
    "A shuffling torch DataLoader of `n` batches of random images in memory, the last of 8: 5,000 images if `n` is 79"
    g = torch.Generator().manual_seed(1)
    n_images = (n-1)*bs + 8
    return DataLoader(TensorDataset(torch.rand(n_images, 1, 28, 28, generator=g),
                                    torch.randint(10, (n_images,), generator=g)), bs, shuffle=True)


def by_hand(model, opt, loss_func, batches):
    "The loop that a careful person writes: nothing but training, and no loss read from the device"
    model.train()
    for xb, yb in batches:
        loss = loss_func(model(xb), yb)
        loss.backward()
        opt.step()
        opt.zero_grad()


def calls(run):
    "Python and C calls made by `run()`, when all that is done once has been done"
    seen = []
    for _ in range(2): run()  # what the first run imports empties the caches of `isinstance`
    gc.disable()
    sys.setprofile(lambda _, what, __: seen.append(what) if what in ('call', 'c_call') else None)
    try: run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return len(seen)


def calls_per_batch(make, *args):
    "Calls of each further batch, where `make(k, *args)` gives a function that goes through `k` batches"
    return (calls(make(200, *args))-calls(make(100, *args)))/100
