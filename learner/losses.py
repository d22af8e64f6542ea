"""Losses that know what their predictions mean, under fastai's names.

Each has `activation`, which makes probabilities (or values) of the model's output, and `decodes`, which decides by what
`activation` returned. All are torch modules: `weight` moves with them, `reduction` can be set at any time, and with
`reduction='none'` the first dimension of the loss still counts items. `loss_activation` and `loss_decodes` find the two
for plain torch losses as well.
"""
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from fastcore.basics import noop
from torch import Tensor, nn

from .loss_value import total_loss
from .tensors import describe, map_tensors
from .utils import replacing
from .weights import unwrapped

__all__ = ['CrossEntropyLossFlat', 'LabelSmoothingCrossEntropyFlat', 'LabelSmoothingCrossEntropy', 'FocalLossFlat',
           'BCEWithLogitsLossFlat', 'MSELossFlat', 'L1LossFlat', 'DiceLoss', 'loss_activation', 'loss_decodes',
           'unreduced', 'item_losses']


class CrossEntropyLossFlat(nn.CrossEntropyLoss):
    """`nn.CrossEntropyLoss` for classes along any axis and integer targets of any type

    Raises: ValueError in the call if the predictions without `axis` have not as many elements as the targets."""
    def __init__(self,
        weight: Tensor|None = None,   # weight of each class, `(n_classes,)`; 1 if none
        ignore_index: int = -100,     # target that does not count
        reduction: str = 'mean',      # 'mean', 'sum' or 'none'
        label_smoothing: float = 0.,  # share of each target spread evenly over all classes, 0 to 1
        axis: int = -1,               # the class axis of the predictions
        flatten: bool = True,         # False: targets must have the shape of the predictions without `axis`
    ):
        super().__init__(weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
        self.axis, self.flatten = axis, flatten

    def forward(self,
        pred: Tensor,  # scores, `(bs, *d)` with classes along `axis`
        targ: Tensor,  # class indices, as many as there are positions; or class probabilities in the shape of `pred`
    ) -> Tensor:       # 0-d; with `reduction='none'` one loss a position
        "The loss of one batch"
        soft = targ.is_floating_point()
        shape = targ.select(self.axis, 0).shape if soft else targ.shape
        if (n := pred.shape[self.axis])*shape.numel() != pred.numel():
            raise ValueError(f"{type(self).__name__}: `pred` {tuple(pred.shape)} has {n} classes along axis {self.axis}"
                             f" for {pred.numel()//n} targets, but `targ` is {tuple(targ.shape)}; is `axis` right?")
        if not soft: targ = targ.long()
        elif not self.flatten: targ = targ.movedim(self.axis, 1)
        if not self.flatten: return self._loss(pred.movedim(self.axis, 1), targ)
        loss = self._loss(self._rows(pred), self._rows(targ) if soft else targ.flatten())
        return loss.view(shape) if self.reduction == 'none' else loss

    def _rows(self, t): return t.movedim(self.axis, -1).reshape(-1, t.shape[self.axis])
    def _loss(self, pred, targ): return super().forward(pred, targ)

    def activation(self,
        pred: Tensor,  # scores, as the loss takes them
    ) -> Tensor:       # of the same shape
        "Probabilities, by the softmax of scores"
        return pred.softmax(self.axis)

    def decodes(self,
        pred: Tensor,  # what `activation` returned, or scores where that makes no difference
    ) -> Tensor:
        "Index of the most probable class"
        return pred.argmax(self.axis)


class LabelSmoothingCrossEntropyFlat(CrossEntropyLossFlat):
    """Cross entropy with targets smoothed by `eps`, classes along any axis

    Source: Szegedy et al. 2016, Rethinking the Inception Architecture, section 7."""
    def __init__(self,
        eps: float = 0.1,            # share of each target spread evenly over all classes, 0 to 1
        weight: Tensor|None = None,  # weight of each class, `(n_classes,)`; 1 if none
        reduction: str = 'mean',     # 'mean', 'sum' or 'none'
        axis: int = -1,              # the class axis of the predictions
        flatten: bool = True,        # False: targets must have the shape of the predictions without `axis`
    ):
        super().__init__(weight, reduction=reduction, label_smoothing=eps, axis=axis, flatten=flatten)


class LabelSmoothingCrossEntropy(LabelSmoothingCrossEntropyFlat):
    "`LabelSmoothingCrossEntropyFlat` with classes along axis 1 and nothing flattened, as torch's losses have it"
    def __init__(self,
        eps: float = 0.1,            # share of each target spread evenly over all classes, 0 to 1
        weight: Tensor|None = None,  # weight of each class, `(n_classes,)`; 1 if none
        reduction: str = 'mean',     # 'mean', 'sum' or 'none'
    ):
        super().__init__(eps, weight, reduction, axis=1, flatten=False)


class FocalLossFlat(CrossEntropyLossFlat):
    """Focal loss: cross entropy in which positions already predicted well weigh less

    A position of probability p for its target loses `-weight*(1-p)**gamma*log(p)`; the mean is over positions.
    Source: Lin et al. 2017, Focal Loss for Dense Object Detection, equation 5 (its alpha is `weight`)."""
    def __init__(self,
        gamma: float = 2.,           # how fast the weight falls with p; 0 is cross entropy
        weight: Tensor|None = None,  # weight of each class, `(n_classes,)`; 1 if none
        reduction: str = 'mean',     # 'mean', 'sum' or 'none'
        ignore_index: int = -100,    # target that does not count
        axis: int = -1,              # the class axis of the predictions
        flatten: bool = True,        # False: targets must have the shape of the predictions without `axis`
    ):
        super().__init__(weight, ignore_index, reduction, axis=axis, flatten=flatten)
        self.gamma = gamma

    def _loss(self, pred, targ):
        if targ.is_floating_point(): raise TypeError(f"FocalLossFlat: targets are class indices, not {describe(targ)}")
        ce = F.cross_entropy(pred, targ, ignore_index=self.ignore_index, reduction='none')
        loss = (1-torch.exp(-ce))**self.gamma*ce
        counts = targ != self.ignore_index
        if self.weight is not None: loss = loss*self.weight[targ.where(counts, 0)]
        return loss.sum()/counts.sum() if self.reduction == 'mean' else _reduced(loss, self.reduction)


def _reduced(loss, reduction):
    return loss.mean() if reduction == 'mean' else loss.sum() if reduction == 'sum' else loss


def _alike(pred, targ, flatten):
    "Predictions in single precision at least, targets in their type and, if `flatten`, their shape"
    if pred.dtype in (torch.float16, torch.bfloat16): pred = pred.float()
    if flatten and pred.shape != targ.shape:
        if pred.numel() != targ.numel():
            raise ValueError(f"the loss got predictions {describe(pred)} and targets {describe(targ)}; they must have "
                             "the same number of elements")
        targ = targ.reshape(pred.shape)
    return pred, targ.to(pred.dtype)


class BCEWithLogitsLossFlat(nn.BCEWithLogitsLoss):
    """`nn.BCEWithLogitsLoss` for 0 and 1 targets of any type and any shape with as many elements

    Raises: ValueError in the call if predictions and targets differ in their number of elements."""
    def __init__(self,
        weight: Tensor|None = None,      # weight of each element, broadcast over the predictions
        reduction: str = 'mean',         # 'mean', 'sum' or 'none'
        pos_weight: Tensor|None = None,  # weight of the positive targets of each label, broadcast over the predictions
        thresh: float = 0.5,             # probability above which `decodes` decides for 1
        flatten: bool = True,            # False: targets must have the shape of the predictions
    ):
        super().__init__(weight, reduction=reduction, pos_weight=pos_weight)
        self.thresh, self.flatten = thresh, flatten

    def forward(self,
        pred: Tensor,  # scores before the sigmoid
        targ: Tensor,  # 0 or 1 for each
    ) -> Tensor:       # 0-d; with `reduction='none'` in the shape of `pred`
        "The loss of one batch"
        return super().forward(*_alike(pred, targ, self.flatten))

    def activation(self,
        pred: Tensor,  # scores, as the loss takes them
    ) -> Tensor:       # of the same shape
        "Probabilities, by the sigmoid of scores"
        return pred.sigmoid()

    def decodes(self,
        pred: Tensor,  # what `activation` returned, or scores where that makes no difference
    ) -> Tensor:
        "Whether each probability is above `thresh`; takes what `activation` returned, not scores"
        return pred > self.thresh


class _ValueLoss:
    "What the losses of values have in common: the output is the decision"
    def __init__(self,
        reduction: str = 'mean',  # 'mean', 'sum' or 'none'
        flatten: bool = True,     # False: shapes are broadcast against each other, as torch does
    ):
        super().__init__(reduction=reduction)  # a torch loss comes next  # pyright: ignore[reportCallIssue]
        self.flatten = flatten

    def forward(self,
        pred: Tensor,  # values
        targ: Tensor,  # values
    ) -> Tensor:       # 0-d; with `reduction='none'` in the shape of `pred`
        "The loss of one batch"
        return super().forward(*_alike(pred, targ, self.flatten))  # pyright: ignore[reportAttributeAccessIssue]

    activation = decodes = staticmethod(noop)


class MSELossFlat(_ValueLoss, nn.MSELoss):
    """`nn.MSELoss` for targets of any type and any shape with as many elements, so that nothing is broadcast

    Raises: ValueError in the call if predictions and targets differ in their number of elements."""


class L1LossFlat(_ValueLoss, nn.L1Loss):
    """`nn.L1Loss` for targets of any type and any shape with as many elements, so that nothing is broadcast

    Raises: ValueError in the call if predictions and targets differ in their number of elements."""


class DiceLoss(nn.Module):
    """Dice loss for segmentation: 1 - the overlap of softmax probabilities and target, for each item and class

    Source: Milletari et al. 2016, V-Net, section 3, whose squared sizes are `square_in_union`.
    Raises: ValueError in the call if the predictions without `axis` differ in shape from the targets."""
    def __init__(self,
        axis: int = 1,                 # the class axis of the predictions
        smooth: float = 1e-6,          # added above and below the fraction: a class that is nowhere has overlap 1
        reduction: str = 'sum',        # 'mean', 'sum' or 'none', over items and classes
        square_in_union: bool = False, # square the probabilities in the denominator
    ):
        super().__init__()
        self.axis, self.smooth, self.reduction, self.square_in_union = axis, smooth, reduction, square_in_union

    def forward(self,
        pred: Tensor,  # scores, `(bs, n_classes, *d)` with classes along `axis`
        targ: Tensor,  # class indices, `(bs, *d)`; an index that is no class belongs to none
    ) -> Tensor:       # 0-d; with `reduction='none'` `(bs, n_classes)`
        "The loss of one batch"
        shape = pred.select(self.axis, 0).shape
        if targ.shape != shape:
            raise ValueError(f"DiceLoss: `pred` {tuple(pred.shape)} without its class axis {self.axis} is "
                             f"{tuple(shape)}, but `targ` is {tuple(targ.shape)}")
        probs = self.activation(pred).movedim(self.axis, 1)
        probs = probs.reshape(*probs.shape[:2], -1)
        mask = targ.reshape(len(targ), 1, -1) == torch.arange(probs.shape[1], device=targ.device)[:, None]
        size = (probs.square() if self.square_in_union else probs).sum(2) + mask.sum(2)
        return _reduced(1 - (2*(probs*mask).sum(2)+self.smooth)/(size+self.smooth), self.reduction)

    def activation(self,
        pred: Tensor,  # scores, as the loss takes them
    ) -> Tensor:       # of the same shape
        "Probabilities, by the softmax of scores"
        return pred.softmax(self.axis)

    def decodes(self,
        pred: Tensor,  # what `activation` returned, or scores where that makes no difference
    ) -> Tensor:
        "Index of the most probable class"
        return pred.argmax(self.axis)


def _over_half(pred): return pred > 0.5


_softmax, _argmax = partial(torch.softmax, dim=1), partial(torch.argmax, dim=1)
# torch's losses of classification: what makes probabilities of the output, and what decides; for others both are noop
_torch_losses = {
    nn.CrossEntropyLoss: (_softmax, _argmax),     F.cross_entropy: (_softmax, _argmax),
    nn.NLLLoss: (torch.exp, _argmax),             F.nll_loss: (torch.exp, _argmax),
    nn.BCEWithLogitsLoss: (torch.sigmoid, _over_half),
    F.binary_cross_entropy_with_logits: (torch.sigmoid, _over_half),
    nn.BCELoss: (noop, _over_half),               F.binary_cross_entropy: (noop, _over_half)}


def _known(loss_func, attr, i) -> Callable[[Tensor], Any]:
    "The loss's own method, or else entry `i` of the table"
    loss_func = getattr(loss_func, 'unmixed', loss_func)
    f = loss_func.func if isinstance(loss_func, partial) else loss_func
    if callable(own := getattr(f, attr, None)): return own
    return next((o[i] for k, o in _torch_losses.items() if f is k or isinstance(k, type) and isinstance(f, k)), noop)


def loss_activation(
    loss_func: Any,               # any loss: a module, a function, a partial of one, or None
) -> Callable[[Tensor], Any]:     # the loss's own if it has one; noop for losses of values and unknown ones
    "What turns the model's output into probabilities or values"
    return _known(loss_func, 'activation', 0)


def loss_decodes(
    loss_func: Any,               # any loss: a module, a function, a partial of one, or None
) -> Callable[[Tensor], Any]:     # the loss's own if it has one; noop for losses of values and unknown ones
    "What turns the result of `loss_activation` into a decision"
    return _known(loss_func, 'decodes', 1)


def unreduced(
    loss_func: Any,  # a module or another object with a `reduction`, or a function that takes one
) -> tuple[Callable|None, Any]:  # None if it has none; and what its `reduction` is
    "A loss that gives its terms, where `loss_func` gives their mean or sum"
    reduction = getattr(loss_func, 'reduction', None)
    if isinstance(reduction, str):
        if isinstance(loss_func, nn.Module) and unwrapped(loss_func) is not loss_func: return None, None  # compiled
        return partial(_terms, loss_func), reduction
    try: takes = inspect.signature(loss_func).parameters
    except (TypeError, ValueError): return None, None
    if 'reduction' not in takes: return None, None
    return partial(loss_func, reduction='none'), takes['reduction'].default


def _terms(loss_func, *args):
    with replacing(loss_func, reduction='none'): return loss_func(*args)


def item_losses(
    loss_func: Callable,  # any loss
    pred: Any,            # as it takes it, of a batch of several items
    yb: tuple,            # targets, likewise
    n: int,               # how many
) -> Tensor:              # `(n,)`
    """The loss of each item by itself

    Where `loss_func` has a `reduction`, and its mean counts all terms alike, they are computed at once; else it is
    called with one item after the other. A loss that is a dict counts by its sum. A single class that is ignored has 0.
    Raises: ValueError or TypeError if it gives no number for an item."""
    loss_func = getattr(loss_func, 'unmixed', loss_func)
    terms, reduction = unreduced(loss_func)
    found = terms(pred, *yb) if terms and _setting(loss_func, 'weight') is None else None
    if isinstance(found, Tensor) and found.ndim and found.numel() and found.numel() % n == 0:
        found = found.reshape(n, -1)
        if reduction in ('sum', 'batchmean'): return found.sum(1)
        if found.shape[1] == 1 or _setting(loss_func, 'ignore_index') is None: return found.mean(1)
    def one(i):
        loss = loss_func(*(_one_item(o, i) for o in (pred, *yb)))
        return total_loss(loss.mean() if isinstance(loss, Tensor) else loss, loss_func, False)[0]
    return torch.stack([one(i) for i in range(n)])  # pyright: ignore[reportArgumentType]


def _setting(loss_func, name):  # of a loss, or of a function that takes one
    if isinstance(loss_func, nn.Module): return getattr(loss_func, name, None)
    inner = loss_func.keywords if isinstance(loss_func, partial) else {}
    takes = inspect.signature(loss_func).parameters if callable(loss_func) else {}
    return inner.get(name, takes[name].default if name in takes else None)


def _one_item(o, i):
    if isinstance(o, list) and o and all(isinstance(m, Mapping) for m in o): return o[i:i+1]  # a dict an item
    return map_tensors(lambda t: t[i:i+1], o)
