"""The loss of one batch, whatever the loss function takes and the model returns."""
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

__all__ = ['total_loss', 'loss_without_targets', 'takes_one']


def total_loss(
    loss: Any,        # what `loss_func` or the model returned
    loss_func: Any,   # for the message
    training: bool,   # must it have a gradient?
) -> tuple[Tensor|None, dict[str, Tensor]|None]:  # a 0-d loss to go backward from; detached parts if it is a sum
    """`loss` as one tensor: itself, or the sum of a dict of scalars; None stays None

    Raises: TypeError or ValueError if it is anything else."""
    if loss is None: return None, None
    name = getattr(loss_func, '__name__', type(loss_func).__name__) if loss_func else 'the model'
    parts = None
    if isinstance(loss, Mapping) and loss and all(isinstance(v, Tensor) and not v.ndim for v in loss.values()):
        loss, parts = sum(loss.values()), {k: v.detach() for k, v in loss.items()}
    if not isinstance(loss, Tensor): raise TypeError(
        f"`{name}` returned a loss of type `{type(loss).__name__}` ({str(loss)[:60]}); it must be a 0-d tensor or "
        "a dict of them")
    if loss.ndim: raise ValueError(
        f"`{name}` returned a loss of shape {tuple(loss.shape)}; it must be one number: use reduction='mean'")
    if training and not loss.requires_grad: raise ValueError(
        f"the loss that `{name}` returned does not depend on any parameter that is trained: something is frozen, "
        "detached, or computed outside torch")
    return loss, parts


def loss_without_targets(
    learn: Any,  # the Learner, in a batch whose `yb` is empty or whose `loss_func` is None
) -> Any:        # None if there is no loss: while evaluating, or if a callback emptied `yb`
    """`loss_func(pred)` if it can be called so, else the loss that the model's output carries

    Raises: ValueError while training if there is none."""
    if learn._had_targets and not learn.yb: return None
    if learn.loss_func is not None and takes_one(learn.loss_func): return learn.loss_func(learn.pred)
    pred = learn.pred
    loss = pred.get('loss') if isinstance(pred, Mapping) else getattr(pred, 'loss', None)
    if loss is None and learn.training: raise ValueError(
        f"there is no loss to train with: the model's output, a `{type(pred).__name__}`, has no `loss`, and " +
        ("neither the Learner nor its data has a `loss_func`" if learn.loss_func is None else
         "the batch has no targets, without which `loss_func` cannot be called"))
    return loss


def takes_one(
    f: Callable,  # a function or a module
) -> bool:
    "Can `f` be called with one argument?"
    try: inspect.signature(getattr(f, 'forward', f)).bind(None)
    except (TypeError, ValueError): return False
    return True
