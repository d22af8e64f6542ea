"""Can a model's outputs match its loss? By the operation that made them, which autograd knows, and by their values."""
import re
from functools import partial
from math import inf
from typing import Any

from torch import Tensor

__all__ = ['misfit', 'is_regression', 'takes_scores']

# of the operation that made an output: what people call it, and the range of its values
ranges = dict(Sigmoid=('sigmoid', 0, 1), Softmax=('softmax', 0, 1), LogSoftmax=('log-softmax', -inf, 0),
              Tanh=('tanh', -1, 1), Relu=('ReLU', 0, inf), Softplus=('softplus', 0, inf),
              Hardsigmoid=('hardsigmoid', 0, 1))
passing = {'View', 'UnsafeView', 'ReshapeAlias', 'Squeeze', 'Unsqueeze', 'Transpose', 'T', 'Permute', 'ToCopy', 'Alias',
           'Clone', 'Select', 'Slice'}  # operations that leave the values as they are

# what losses take, by the names of torch's and ours
scores_losses = {'cross_entropy', 'CrossEntropyLoss', 'CrossEntropyLossFlat', 'FocalLossFlat',
                'LabelSmoothingCrossEntropy', 'LabelSmoothingCrossEntropyFlat'}
logits_losses = {'binary_cross_entropy_with_logits', 'BCEWithLogitsLoss', 'BCEWithLogitsLossFlat',
                'multilabel_soft_margin_loss', 'MultiLabelSoftMarginLoss'}
log_prob_losses = {'nll_loss', 'NLLLoss'}
values_losses = {'mse_loss', 'MSELoss', 'MSELossFlat', 'l1_loss', 'L1Loss', 'L1LossFlat', 'smooth_l1_loss',
                'SmoothL1Loss', 'huber_loss', 'HuberLoss'}


def misfit(
    loss_func: Any,  # a function, a partial of one, or a module; unknown ones fit everything
    pred: Any,       # what the model gave, with its graph
    yb: tuple,       # the targets
) -> tuple[str, str]|None:  # what is wrong, and what to try
    "Why outputs cannot come near what the loss wants, as after a softmax too many"
    if not isinstance(pred, Tensor): return None
    names, op = _names(loss_func), _made_by(pred.grad_fn)
    word, low, high = ranges.get(op, ('', -inf, inf))
    if names & (logits_losses | scores_losses) and word and not (op == 'LogSoftmax' and names & scores_losses):
        own = 'sigmoid' if names & logits_losses else 'softmax'
        return f'{word} before the loss', f'no {word} last: the loss has its {own}'
    if names & log_prob_losses and op != 'LogSoftmax' and pred.ndim > 1:
        total = float(pred.detach().float().exp().sum(1).mean())
        if abs(total-1) > .01: return f'probabilities sum to {total:.3g}', 'log_softmax last, or CrossEntropyLoss'
    if not (names & values_losses and yb and isinstance(yb[0], Tensor) and yb[0].numel()): return None
    if pred.shape != yb[0].shape and not any(name.endswith('Flat') for name in names):
        return f'{list(pred.shape)} against {list(yb[0].shape)}', 'one shape for both, or MSELossFlat'
    if word:
        least, most = float(yb[0].min()), float(yb[0].max())
        if least < low or most > high: return (
            f'{word}: {low:g} to {high:g}; targets {least:.3g} to {most:.3g}', f'no {word} last, or scale the targets')
    return None


def is_regression(
    loss_func: Any,  # as `misfit` takes it
) -> bool:
    "Does it compare values with values?"
    return bool(_names(loss_func) & values_losses)


def takes_scores(
    loss_func: Any,  # as `misfit` takes it
) -> bool:
    "Does it take scores or logits, of which it takes the exponential?"
    return bool(_names(loss_func) & (scores_losses | logits_losses | log_prob_losses))


def _names(f) -> set[str]:
    while isinstance(f, partial): f = f.func
    return {getattr(f, '__name__', '')} | {c.__name__ for c in type(f).__mro__}


def _made_by(fn) -> str:  # the operation, such as 'Sigmoid'; '' for an input or a parameter
    while fn is not None:
        op = re.sub(r'Backward\d*$', '', fn.name())
        if op not in passing: return op
        fn = fn.next_functions[0][0] if fn.next_functions else None
    return ''
