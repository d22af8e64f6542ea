"""Metrics under fastai's names: functions of one batch, and classes for what is no mean over items.

All scores are 0-d tensors on the predictions' device. What makes a metric of a function is in measure.py, whose public
names can be imported from here as well.
"""
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from .measure import (AccumMetric, ActivationType, AvgLoss, AvgMetric, Metric, TorchMetric, ValueMetric, flatten_check,
                      mk_metric, mk_metrics)

__all__ = ['Metric', 'AvgMetric', 'AvgLoss', 'ValueMetric', 'ActivationType', 'AccumMetric', 'TorchMetric', 'mk_metric',
           'mk_metrics', 'flatten_check', 'accuracy', 'error_rate', 'top_k_accuracy', 'accuracy_multi',
           'foreground_acc', 'mse', 'mae', 'msle', 'rmse', 'exp_rmspe', 'DiceMulti', 'JaccardCoeffMulti', 'Dice',
           'JaccardCoeff', 'Perplexity', 'perplexity']

F = TypeVar('F', bound=Callable)


def _declare(**attrs) -> Callable[[F], F]:
    "Set attributes on a metric function"
    def decorate(f):
        f.__dict__.update(attrs)
        return f
    return decorate


def _class_targ(name, pred, targ, axis):
    "`targ` in the shape of `pred` without its class axis"
    if not -pred.ndim <= axis < pred.ndim or pred.shape[axis] == 1:
        raise ValueError(f"{name}: `pred` {tuple(pred.shape)} has no scores of several classes along axis {axis}; "
                         "for one score an item use accuracy_multi")
    if targ.ndim == pred.ndim and targ.shape[axis] == 1: targ = targ.squeeze(axis)  # such as a mask with a channel
    shape = pred.select(axis, 0).shape
    if targ.shape != shape:
        raise ValueError(f"{name}: `pred` {tuple(pred.shape)} gives classes {tuple(shape)} along axis {axis}, "
                         f"but `targ` is {tuple(targ.shape)}; is `axis` the class axis?")
    return targ


@_declare(greater_is_better=True)
def accuracy(
    pred: Tensor,   # scores, `(bs, n_classes, *d)`
    targ: Tensor,   # class indices, `(bs, *d)`, int64
    axis: int = 1,  # the class axis of `pred`
) -> Tensor:        # share correct, 0 to 1, a 0-d float tensor on `pred`'s device
    """Share of positions where the highest-scoring class is the target; ties go to the lowest index

    Raises: ValueError if `pred` without `axis` differs in shape from `targ`.
    Source: top-1 accuracy, equal to `sklearn.metrics.accuracy_score` on flattened input."""
    targ = _class_targ('accuracy', pred, targ, axis)
    return (pred.argmax(axis) == targ).float().mean()


@_declare(greater_is_better=False)
def error_rate(
    pred: Tensor,   # scores, `(bs, n_classes, *d)`
    targ: Tensor,   # class indices, `(bs, *d)`
    axis: int = 1,  # the class axis of `pred`
) -> Tensor:        # share wrong, 0 to 1
    "1 - `accuracy`"
    targ = _class_targ('error_rate', pred, targ, axis)
    return (pred.argmax(axis) != targ).float().mean()


@_declare(greater_is_better=True)
def top_k_accuracy(
    pred: Tensor,   # scores, `(bs, n_classes, *d)`
    targ: Tensor,   # class indices, `(bs, *d)`
    k: int = 5,     # how many of the highest-scoring classes count, at most `n_classes`
    axis: int = 1,  # the class axis of `pred`
) -> Tensor:        # share, 0 to 1
    "Share of positions where the target is among the `k` highest-scoring classes"
    targ = _class_targ('top_k_accuracy', pred, targ, axis)
    return (pred.topk(k, axis).indices == targ.unsqueeze(axis)).any(axis).float().mean()


@_declare(greater_is_better=True)
def accuracy_multi(
    pred: Tensor,           # one score a label, any shape
    targ: Tensor,           # 0 or 1 for each
    thresh: float = 0.5,    # a label is predicted above it
    sigmoid: bool = True,   # apply the sigmoid to the scores first
) -> Tensor:                # share correct, 0 to 1
    "Share of labels predicted correctly, each by itself: for multi-label problems, or one score an item"
    pred, targ = flatten_check(pred, targ, 'accuracy_multi')
    return (((pred.sigmoid() if sigmoid else pred) > thresh) == targ.bool()).float().mean()


def _foreground(pred, targ, bkg_idx=0, axis=1):
    "Number of foreground positions predicted correctly, and of all foreground positions"
    targ = _class_targ('foreground_acc', pred, targ, axis)
    seen = targ != bkg_idx
    return ((pred.argmax(axis) == targ) & seen).sum(), seen.sum()


@_declare(greater_is_better=True, sums=_foreground)
def foreground_acc(
    pred: Tensor,       # scores, `(bs, n_classes, *d)`
    targ: Tensor,       # class indices, `(bs, *d)` or `(bs, 1, *d)`
    bkg_idx: int = 0,   # class of the background, which does not count
    axis: int = 1,      # the class axis of `pred`
) -> Tensor:            # share, 0 to 1; NaN where all is background
    "Share of foreground positions where the highest-scoring class is the target"
    right, seen = _foreground(pred, targ, bkg_idx, axis)
    return right/seen


def _floats(pred, targ, name):
    "Vectors of one length in single precision at least, so that half-precision squares cannot overflow"
    return [t if t.dtype == torch.float64 else t.float() for t in flatten_check(pred, targ, name)]


@_declare(greater_is_better=False)
def mse(
    pred: Tensor,  # any shape
    targ: Tensor,  # as many elements
) -> Tensor:       # a 0-d tensor
    "Mean squared error"
    pred, targ = _floats(pred, targ, 'mse')
    return (pred-targ).square().mean()


@_declare(greater_is_better=False)
def mae(
    pred: Tensor,  # any shape
    targ: Tensor,  # as many elements
) -> Tensor:       # a 0-d tensor
    "Mean absolute error"
    pred, targ = _floats(pred, targ, 'mae')
    return (pred-targ).abs().mean()


@_declare(greater_is_better=False)
def msle(
    pred: Tensor,  # any shape, above -1
    targ: Tensor,  # as many elements, above -1
) -> Tensor:       # a 0-d tensor
    "Mean squared difference of `log(1+x)`"
    pred, targ = _floats(pred, targ, 'msle')
    return (pred.log1p()-targ.log1p()).square().mean()


@_declare(greater_is_better=False, power=2)
def rmse(
    pred: Tensor,  # any shape
    targ: Tensor,  # as many elements
) -> Tensor:       # a 0-d tensor
    "Root mean squared error; over several batches the root of the mean, not the mean of roots"
    pred, targ = _floats(pred, targ, 'rmse')
    return (pred-targ).square().mean().sqrt()


@_declare(greater_is_better=False, power=2)
def exp_rmspe(
    pred: Tensor,  # logarithms, any shape
    targ: Tensor,  # logarithms, as many elements
) -> Tensor:       # a 0-d tensor
    "Root mean squared relative error of the exponentials; over several batches the root of the mean"
    pred, targ = _floats(pred, targ, 'exp_rmspe')
    return (pred-targ).expm1().square().mean().sqrt()


class DiceMulti(Metric):
    "Dice coefficient of each class over all positions seen, averaged over the classes that occur"
    greater_is_better = True
    inter: Any  # by class: positions of both prediction and target
    total: Any  # by class: positions of prediction plus those of target
    def __init__(self,
        axis: int = 1,  # the class axis of the predictions
    ):
        self.axis = axis
        self.reset()

    def reset(self): self.inter, self.total = 0, 0

    def accumulate(self, learn):
        pred, (targ,) = learn.pred, learn.yb
        targ, n = _class_targ(self.name, pred, targ, self.axis).flatten(), pred.shape[self.axis]
        guess = pred.argmax(self.axis).flatten()
        targ = torch.where((targ >= 0) & (targ < n), targ, n).long()  # a bin of its own for no class, such as -100
        both, *each = (torch.zeros(n+1, dtype=torch.long, device=pred.device).scatter_add(0, i, torch.ones_like(i))[:n]
                       for i in (torch.where(guess == targ, guess, n), guess, targ))
        self.inter, self.total = self.inter + both, self.total + sum(each)

    def _score(self, inter, total): return (2*inter/total).nanmean()

    @property
    def value(self):
        if not isinstance(self.inter, Tensor): return math.nan
        return float(self._score(self.inter.cpu().double(), self.total.cpu()))


class JaccardCoeffMulti(DiceMulti):
    "Jaccard coefficient (intersection over union) of each class, averaged over the classes that occur"
    def _score(self, inter, total): return (inter/(total-inter)).nanmean()


class Dice(DiceMulti):
    """Dice coefficient of class 1 against the background, class 0

    Raises: ValueError in `accumulate` if there are not two classes."""
    def accumulate(self, learn):
        if (n := learn.pred.shape[self.axis]) != 2:
            raise ValueError(f"{self.name}: `pred` {tuple(learn.pred.shape)} has {n} classes along axis {self.axis}, "
                             f"two are needed; use {type(self).__name__}Multi")
        super().accumulate(learn)

    def _score(self, inter, total): return 2*inter[1]/total[1]


class JaccardCoeff(Dice):
    "Jaccard coefficient (intersection over union) of class 1 against the background, class 0"
    def _score(self, inter, total): return inter[1]/(total[1]-inter[1])


class Perplexity(AvgLoss):
    "Perplexity of a language model: the exponential of its mean cross-entropy loss"
    def __init__(self):
        super().__init__()
        self.name = 'perplexity'

    @property
    def value(self): return float(torch.tensor(super().value, dtype=torch.float64).exp())


perplexity = Perplexity  # a class like any other: learners do not share it
