"""What the tests share: a tiny learner, the events that a fit fires, and functions that raise."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from learner.callback import Callback
from learner.events import event_names
from learner.learner import Learner


file_events = 'before_save', 'before_load', 'after_load'  # those that get the state


class RegModel(nn.Module):
    "y = a*x + b"
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(1)), nn.Parameter(torch.randn(1))

    def forward(self, x): return x*self.a + self.b


def synth_dls(n=2, n_valid=1, bs=8, shuffle=False):
    "Loaders of `n` and `n_valid` batches of y = 2x + 3 and a little noise"
    g = torch.Generator().manual_seed(1)
    x = torch.randn((n+n_valid)*bs, 1, generator=g)
    y = 2*x + 3 + .1*torch.randn(x.shape, generator=g)
    return (DataLoader(TensorDataset(x[:n*bs], y[:n*bs]), bs, shuffle=shuffle),
            DataLoader(TensorDataset(x[n*bs:], y[n*bs:]), bs) if n_valid else None)


def synth_learner(cbs=None, n=2, n_valid=1, bs=8, shuffle=False, model=None, lr=1e-3, dls=None, **kwargs):
    "A linear regression, by default silent, on `n` training and `n_valid` validation batches"
    torch.manual_seed(0)
    kwargs.setdefault('default_cbs', dict(progress=None))
    return Learner(dls or synth_dls(n, n_valid, bs, shuffle), RegModel() if model is None else model,
                   kwargs.pop('loss_func', nn.functional.mse_loss), cbs=cbs, lr=lr, **kwargs)


class Reads(Callback):
    "Notes what it reads at each loss"
    def __init__(self): self.seen = []
    def after_loss(self): self.seen.append((self.epoch, self.iter, self.training, float(self.loss), self.lr))


class Counts(Callback):
    "Counts batches"
    state = ('n',)
    def __init__(self): self.n = 0
    def after_batch(self): self.n += 1


class Tracer(Callback):
    "Notes every event before any other callback sees it"
    order = -1000

    def __init__(self, cleanup=True):
        self.seen = []
        super().__init__(**{e: Note(self.seen, e) for e in event_names
                            if e not in ('save_point', *file_events)
                            and (cleanup or not e.startswith('cleanup'))})


class Note:
    def __init__(self, seen, name): self.seen, self.name = seen, name
    def __call__(self, cb): self.seen.append(self.name)


def trace(learn, first=None, last=None, n_epoch=1):
    "The events of `learn.fit(n_epoch)`, from the first `first` to the first `last` after it"
    tracer = Tracer()
    learn.fit(n_epoch, cbs=tracer)
    seen = tracer.seen[tracer.seen.index(first):] if first else tracer.seen
    return seen[:seen.index(last)+1] if last else seen


class raises:
    "A handler that raises `ex` the `nth` time it is called, and `when` the learner trains or not (None: either)"
    def __init__(self, ex, when=None, nth=1): self.ex, self.when, self.left = ex, when, nth

    def __call__(self, cb):
        if self.when is not None and cb.training != self.when: return
        self.left -= 1
        if not self.left: raise self.ex


def weights(learn): return [p.detach().clone() for p in learn.model.parameters()]
