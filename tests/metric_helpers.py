"""What the tests of metrics share: stand-ins for a learner and for a torchmetrics object, and data."""
import warnings
from types import SimpleNamespace

import torch

from learner.metrics import mk_metric

splits = [(20,), (7, 13), (6, 9, 5), (1,)*20]  # of 20 items into batches


def batch(pred, *yb, loss=None): return SimpleNamespace(pred=pred, yb=yb, xb=(pred,), loss=loss)


def measure(metric, split, pred, *yb):
    "Value of what `mk_metric` makes of `metric`, over batches of the sizes in `split`"
    metric = mk_metric(metric)
    metric.reset()
    for b in zip(*(t.split(split) for t in (pred, *yb))): metric.accumulate(batch(*b))
    return metric.value


def scores(*shape, seed=0): return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
def classes(n, *shape, seed=1): return torch.randint(n, shape, generator=torch.Generator().manual_seed(seed))


def median_gap(pred, targ): return (pred-targ).median()


class Stream:
    "A stand-in for a torchmetrics object"
    higher_is_better = False

    def __init__(self, result=float): self.result, self.device = result, None
    def reset(self): self.n, self.seen = 0, []
    def to(self, device): self.device = torch.device(device)

    def update(self, pred, targ):
        self.n += len(pred)
        self.seen.append(pred)

    def compute(self):
        if not self.n: warnings.warn("compute before update", stacklevel=2)
        return self.result(self.n)
