"""The metric protocol: what is measured batch by batch and read at the end of a phase.

A `Metric` is reset when a phase starts, accumulates batches, and then has a `value`. `mk_metric` makes one of whatever
is passed as `metrics=`: most are functions of one batch, averaged over all items by `AvgMetric`. Nothing waits for the
device until `value` is read.
"""
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import partial
from numbers import Real
from typing import Any

import numpy as np
import torch
from fastcore.basics import camel2snake, class2attr
from fastcore.foundation import L
from torch import Tensor, nn

from .tensors import concat, describe, map_tensors, n_items, to_detach

__all__ = ['Metric', 'AvgMetric', 'AvgLoss', 'ValueMetric', 'ActivationType', 'AccumMetric', 'TorchMetric', 'mk_metric',
           'mk_metrics', 'flatten_check']


class Metric(ABC):
    "What a learner measures: subclass it with `reset`, `accumulate` and the property `value`"
    greater_is_better: bool|None = None  # unknown: a tracker asks rather than guesses
    _name: str|None = None

    @property
    def name(self) -> str:
        "Column under which the value is recorded; the class's name in snake case unless set"
        return self._name or class2attr(self, 'Metric')

    @name.setter
    def name(self, name: str): self._name = name

    @abstractmethod
    def reset(self) -> None:
        "Forget all batches"

    @abstractmethod
    def accumulate(self,
        learn: Any,  # read `pred`, `yb` (a tuple), `xb` and `loss` (a 0-d tensor or None) from it
    ) -> None:
        "Take in the learner's current batch"

    @property
    @abstractmethod
    def value(self) -> float|dict[str, float]:
        "The result over all batches since `reset`, NaN if there were none; a dict is several columns"


# ---- tools of the metrics below

def _func_name(f):
    "A column name for `f`: its name, that of the function inside a partial, or that of its class in snake case"
    f = f.func if isinstance(f, partial) else f
    name = getattr(f, '__name__', None) or camel2snake(type(f).__name__)
    return 'metric' if name == '<lambda>' else name


def _declared(f, attr, default=None) -> Any:
    "An attribute that a metric function declares, also seen through a partial"
    return getattr(f.func if isinstance(f, partial) else f, attr, default)


def _follow(o, pred):
    "Move a module to the device of the predictions"
    if isinstance(pred, Tensor) and hasattr(o, 'to'): o.to(pred.device)


def _n_items(learn): return n_items(learn.xb, learn.yb)


def _wide(t):
    "A detached number in double precision, which only MPS lacks"
    return t.detach().to(torch.float32 if t.device.type == 'mps' else torch.float64)


def _columns(v, name):
    "A final result as a float, or as a dict of floats if it has several members"
    if isinstance(v, (Tensor, np.ndarray)) and v.ndim == 1: v = {f'{name}_{i}': o for i, o in enumerate(v.tolist())}
    if isinstance(v, Mapping):
        cols = {}
        for k, o in v.items():
            o = _columns(o, str(k))
            cols.update(o if isinstance(o, dict) else {str(k): o})
        return cols
    if isinstance(v, (Tensor, np.ndarray)) and v.ndim == 0 or isinstance(v, (Real, np.generic)): return float(v)
    raise TypeError(f"the value of metric `{name}` is {describe(v)}; it can be a number, a vector, or a dict of these")


def _float(t): return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t
def _to_np(t): return t.numpy(force=True)
def _kept(t): return _float(t.detach()).clone()  # the buffer may be reused; a view would hold its base


def flatten_check(
    pred: Any,       # predictions, any shape
    targ: Any,       # targets, any shape of as many elements
    name: str,       # whose arguments these are, for the message
) -> tuple[Tensor, Tensor]:
    """Predictions and targets as vectors

    Raises: ValueError if they differ in length or are no tensors."""
    if not (isinstance(pred, Tensor) and isinstance(targ, Tensor) and pred.numel() == targ.numel()):
        raise ValueError(f"{name}: predictions {describe(pred)} and targets {describe(targ)} must be tensors with the "
                         "same number of elements")
    return pred.flatten(), targ.flatten()


class AvgMetric(Metric):
    """Mean of `func(pred, *yb)` over all items seen; each batch weighs as many items as it holds

    `func` returns one number, or a dict of numbers, which become columns of their own. As attributes it may declare
    `greater_is_better`; `power`, where 2 averages squares and takes the root of their mean; and `sums`, a function of
    the same arguments that returns the pair (sum, count) of a batch, for means over something other than items.

    Raises: TypeError in `accumulate` if `func` returns anything else."""
    def __init__(self,
        func: Callable,  # called as `func(pred, *yb)`; returns a 0-d tensor, a number, or a dict of these
    ):
        self.func, self.name = func, _func_name(func)
        self.greater_is_better, self.power = _declared(func, 'greater_is_better'), _declared(func, 'power', 1)
        self.sums = _declared(func, 'sums')
        if self.sums and isinstance(func, partial): self.sums = partial(self.sums, *func.args, **func.keywords)
        self.reset()

    def reset(self): self.total, self.count = {}, {}  # by column; that of a plain number is None

    def accumulate(self, learn):
        if not self.count: _follow(self.func, learn.pred)
        if self.sums: return self._add(None, *self.sums(learn.pred, *learn.yb))
        res, n = self.func(to_detach(learn.pred), *learn.yb), _n_items(learn)
        if not n: return  # the mean of no items is NaN, which no weight of 0 makes harmless
        for k, v in (res if isinstance(res, Mapping) else {None: res}).items():
            v = self._number(v)
            self._add(k, (v if self.power == 1 else v**self.power)*n, n)

    def _number(self, v):
        "A result in double precision, still on its device"
        if isinstance(v, Tensor) and v.ndim == 0: return _wide(v)
        if isinstance(v, (Real, np.generic)): return float(v)
        raise TypeError(f"metric `{self.name}` returned {describe(v)}; a metric function returns one number a batch "
                        "(a 0-d tensor or a float), or a dict of them: take a mean, or use AccumMetric for what needs "
                        "all items at once")

    def _add(self, k, total, n):
        self.total[k], self.count[k] = self.total.get(k, 0.) + total, self.count.get(k, 0) + n

    @property
    def value(self):
        means = {k: float(t/self.count[k])**(1/self.power) for k, t in self.total.items()}
        return means.get(None, means) if means else math.nan


class AvgLoss(AvgMetric):
    "Mean of the loss over all items; batches without a loss are left out, an unreduced loss counts by its mean"
    greater_is_better, power = False, 1
    def __init__(self):
        self.name = 'loss'
        self.reset()

    def accumulate(self, learn):
        if learn.loss is None or not (n := _n_items(learn)): return
        loss = learn.loss.mean() if learn.loss.ndim else learn.loss
        self._add(None, _wide(loss)*n, n)


class ValueMetric(Metric):
    "A number that something else keeps up to date, read by `func()` when a phase ends"
    def __init__(self,
        func: Callable[[], Any],  # returns the value, or a dict of values
        name: str|None = None,    # column name; the function's if none
    ):
        self.func, self.name = func, name or _func_name(func)
        self.greater_is_better = _declared(func, 'greater_is_better')

    def reset(self): pass
    def accumulate(self, learn): pass

    @property
    def value(self): return _columns(self.func(), self.name)


class ActivationType(StrEnum):
    "What `AccumMetric` may apply to predictions; the plain strings serve as well"
    No, Sigmoid, Softmax, BinarySoftmax = 'no', 'sigmoid', 'softmax', 'binarysoftmax'


class AccumMetric(Metric):
    """`func` of all predictions and targets of a phase at once, for what is no mean over batches

    Predictions are prepared batch by batch: the activation is applied, or else the argmax taken, then the threshold.
    Memory: what was prepared is kept, copied, on its device until the value is read, then on the CPU until `reset`.

    Raises: ValueError for an unknown activation. In `accumulate`, ValueError if predictions and targets differ in
    length, TypeError if activation, argmax or threshold is to be applied to predictions that are no tensor."""
    def __init__(self,
        func: Callable,                # called as `func(preds, targs, **kwargs)` with CPU tensors
        dim_argmax: int|None = None,   # dimension of argmax or softmax; None: no argmax, softmax over the last
        activation: str = 'no',        # see ActivationType; 'binarysoftmax' is the probability of the last class
        thresh: float|None = None,     # predictions become `pred >= thresh`; None leaves them
        to_np: bool = False,           # give `func` numpy arrays
        invert_arg: bool = False,      # call `func(targs, preds)`, scikit-learn's order
        flatten: bool = True,          # make predictions and targets one-dimensional
        name: str|None = None,         # column name; the function's if none
        **kwargs,                      # passed on to `func`
    ):
        if activation not in list(ActivationType):
            raise ValueError(f"AccumMetric: activation {activation!r} is none of {', '.join(ActivationType)}")
        self.func, self.dim_argmax, self.activation, self.thresh = func, dim_argmax, activation, thresh
        self.to_np, self.invert_arg, self.flatten, self.kwargs = to_np, invert_arg, flatten, kwargs
        self.name, self.greater_is_better = name or _func_name(func), _declared(func, 'greater_is_better')
        self.reset()

    def reset(self): self.preds, self.targs = [], []

    def accumulate(self, learn):
        pred, targ = self._prepare(to_detach(learn.pred)), learn.yb[0] if len(learn.yb) == 1 else learn.yb
        if self.flatten: pred, targ = flatten_check(pred, targ, self.name)
        self.preds.append(map_tensors(_kept, pred))
        self.targs.append(map_tensors(_kept, targ))

    def _prepare(self, pred):
        "Apply activation or argmax, then the threshold"
        if self.activation == 'no' and self.dim_argmax is None and self.thresh is None: return pred
        if not isinstance(pred, Tensor):
            raise TypeError(f"metric `{self.name}`: predictions {describe(pred)} are no tensor; choose one in a "
                            "callback's `after_pred`, or measure with a function")
        dim = -1 if self.dim_argmax is None else self.dim_argmax
        if self.activation != 'sigmoid' and (self.dim_argmax is not None or self.activation != 'no') and pred.ndim and \
                pred.shape[dim] == 1: raise ValueError(
            f"metric `{self.name}`: predictions {list(pred.shape)} have one score an item, and the largest of several "
            "is looked for: `activation='sigmoid'` and `thresh=.5` decide by one")
        if self.activation == 'sigmoid': pred = _float(pred).sigmoid()
        elif self.activation != 'no': pred = _float(pred).softmax(dim)
        elif self.dim_argmax is not None: pred = pred.argmax(dim)
        if self.activation == 'binarysoftmax': pred = pred.select(dim, -1)
        return pred if self.thresh is None else pred >= self.thresh

    @property
    def value(self):
        if not self.preds: return math.nan
        self.preds, self.targs = ([concat([to_detach(b, cpu=True) for b in bs])] for bs in (self.preds, self.targs))
        return self(self.preds[0], self.targs[0])

    def __call__(self,
        preds: Any,  # all predictions, prepared already
        targs: Any,  # all targets
    ) -> float|dict[str, float]:
        "`func` of these predictions and targets; the batches kept play no part"
        args = [map_tensors(_to_np, o) if self.to_np else o for o in (preds, targs)]
        try: return _columns(self.func(*(args[::-1] if self.invert_arg else args), **self.kwargs), self.name)
        except Exception as e:
            e.add_note(f"metric `{self.name}`: predictions {describe(preds)}, targets {describe(targs)}")
            raise


class TorchMetric(Metric):
    "A torchmetrics object, or another with `update`, `compute` and `reset`, as a metric"
    def __init__(self,
        metric: Any,  # moved to the predictions' device; several values (a dict or a vector) become several columns
    ):
        self.metric, self.name = metric, _func_name(metric)
        self.greater_is_better = getattr(metric, 'higher_is_better', None)
        self.reset()

    def reset(self):
        self.metric.reset()
        self.updated = False  # torchmetrics warns where a value is asked for before the first batch

    def accumulate(self, learn):
        if not self.updated: _follow(self.metric, learn.pred)
        self.metric.update(to_detach(learn.pred), *learn.yb)
        self.updated = True

    @property
    def value(self): return _columns(self.metric.compute(), self.name) if self.updated else math.nan


def mk_metric(
    m: Any,   # Metric, function of `(pred, *yb)`, partial, nn.Module, torchmetrics object, or a class of these
) -> Metric:  # `m` itself if it is a Metric
    """Make a metric of what was passed as one

    Raises: TypeError if `m` is none of these."""
    streams = all(hasattr(m, o) for o in ('update', 'compute', 'reset'))
    is_class = isinstance(m, type)
    makes = is_class and (streams or issubclass(m, (Metric, nn.Module))) or getattr(m, 'makes_metric', False)
    if makes: return mk_metric(m())
    if isinstance(m, Metric): return m
    if streams: return TorchMetric(m)
    if callable(m) and not is_class: return AvgMetric(m)
    raise TypeError(f"{m!r} is no metric: pass a Metric, a function of `(pred, *yb)`, a partial of one, an nn.Module, "
                    "an object with `update`, `compute` and `reset` (torchmetrics), or a class of these")


def mk_metrics(
    ms: Any,        # what `mk_metric` takes, or a list or tuple of it; None is no metric
) -> list[Metric]:  # metrics of equal names are renamed
    """The metrics of one learner, each with a name of its own

    Equal names get the keyword arguments that tell them apart, or else a number.
    Raises: TypeError if one is no metric."""
    if ms is None: return []
    metrics = [mk_metric(m) for m in (ms if isinstance(ms, (list, tuple, L)) else [ms])]
    for m, name in zip(metrics, _unique_names(metrics)):
        if m.name != name: m.name = name
    return metrics


def _unique_names(metrics):
    names, kws, unique = [m.name for m in metrics], [_keywords(m) for m in metrics], []
    for name, kw in zip(names, kws):
        same = [o for n, o in zip(names, kws) if n == name]
        told = [f'{k}={v}' for k, v in kw.items() if any(o.get(k) != v for o in same)]
        stem = f"{name}({', '.join(told)})" if told else name
        numbered = (f'{stem}_{i}' for i in range(2, len(names)+2))
        unique.append(next(o for o in (stem, *numbered) if o not in unique))
    return unique


def _keywords(m):
    "The plain keyword arguments of a metric's function"
    kw = {**getattr(getattr(m, 'func', None), 'keywords', {}), **getattr(m, 'kwargs', {})}
    return {k: v for k, v in {'thresh': getattr(m, 'thresh', None), **kw}.items() if isinstance(v, (str, Real))}
