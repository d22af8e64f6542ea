"""Training of recurrent models: their hidden state, outputs that carry more than a prediction, and AR and TAR."""
from typing import Any

from torch import Tensor, nn

from ..callback import Callback
from ..tensors import describe, tensors_in, to_device
from ..utils import check_number
from ..weights import unwrapped

__all__ = ['ModelResetter', 'RNNCallback', 'RNNRegularizer', 'rnn_cbs']


class ModelResetter(Callback):
    """Calls the model's `reset()` before the training and the validation of each epoch, and after the fit

    A checkpoint keeps the hidden state: public attributes of the model's modules that are tensors, or lists, tuples and
    dicts of them, but no parameters and buffers. A validation in the midst of training leaves it as it was.
    Raises: TypeError at the start of a run if the model has no `reset()`."""
    unique = True
    held: Any = None  # within `validate()`: the hidden state before it, and what was held then

    def before_fit(self):
        if not callable(getattr(unwrapped(self.model), 'reset', None)): raise TypeError(
            f"ModelResetter: `{type(unwrapped(self.model)).__name__}` has no `reset()`, which forgets its hidden state")

    def _reset(self): unwrapped(self.model).reset()  # pyright: ignore[reportCallIssue]

    def before_train(self): self._reset()

    def before_validate(self):
        if self.run_kind in ('validate', 'predict'):
            hidden = [(attrs, k, v, [t.detach().clone() for t in tensors_in(v)]) for _, attrs, k, v in self._hidden()]
            self.held = hidden, self.held
        self._reset()

    def cleanup_validate(self):
        if self.held is None: return  # it is the fit's own, between two trainings
        self._reset()
        hidden, self.held = self.held
        for attrs, k, v, values in hidden:
            attrs[k] = v
            for t, value in zip(tensors_in(v), values): t.data.copy_(value)  # a `reset` may have written into it

    def cleanup_fit(self):  # also after an error: it may hold a graph
        if hasattr(unwrapped(self.model), 'reset'): self._reset()

    def _hidden(self):
        return [(name, vars(m), k, v) for name, m in unwrapped(self.model).named_modules() for k, v in vars(m).items()
                if not k.startswith('_') and _is_hidden([*tensors_in(v)])]

    def state_dict(self) -> dict[str, Any]:
        "The hidden state: a dict of attributes for each module that has some"
        state: dict[str, Any] = {}
        for name, _, k, v in self._hidden() if self.learn else (): state.setdefault(name, {})[k] = v
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:  # what `state_dict` gave
        "Put it back, on the device of the Learner"
        modules = dict(unwrapped(self.model).named_modules())
        for name, attrs in state.items():
            if name not in modules: continue  # another model, which was allowed
            for k, v in attrs.items(): setattr(modules[name], k, to_device(v, self.device))


def _is_hidden(ts): return bool(ts) and not any(isinstance(t, nn.Parameter) for t in ts)


def _last(o): return o[-1] if isinstance(o, (list, tuple)) else o  # of the outputs of several layers


class RNNCallback(Callback):
    """For models that return `(pred, raw_out, out)`: `pred` alone is the prediction, the others are kept in the batch

    The others are outputs of the recurrent layers, before and after dropout, `(bs, time, n)`; of lists the last one.
    Raises: TypeError if the model returns anything else."""
    unique = True
    raw_out: Any = None  # None outside of a batch, as `out`
    out: Any = None
    around: Any = None   # in an evaluation: those of the batch within which it runs, and what was around that

    def before_validate(self): self.around = self.raw_out, self.out, self.around

    def after_pred(self):
        pred = self.pred
        if not isinstance(pred, (tuple, list)) or len(pred) != 3: raise TypeError(
            f"{self}: the model has to return `(pred, raw_out, out)`, and returned {describe(pred)}")
        self.learn.pred, self.raw_out, self.out = map(_last, pred)

    def cleanup_batch(self): self.raw_out = self.out = None  # they hold the graph

    def cleanup_validate(self):
        if self.around is not None: self.raw_out, self.out, self.around = self.around


class RNNRegularizer(Callback):
    """Adds to the loss that is trained with, not to the one that is recorded, what keeps activations small and slow

    AR is `alpha` times the mean square of the last layer's output after dropout, TAR `beta` times that of the
    difference of its outputs before dropout from one time step to the next.
    Raises: ValueError or TypeError if `alpha` or `beta` is no number of 0 or more; RuntimeError at the start of a fit
    without RNNCallback.
    Source: Merity et al. 2017, "Revisiting Activation Regularization for Language RNNs", arXiv 1708.01009.
    Order: after the RNNCallback, and what makes the loss another one."""
    order = RNNCallback.order + 1
    run_in = {'fit', 'lr_find'}
    run_valid = False

    def __init__(self,
        alpha: float = 0.,  # weight of AR; 0: none
        beta: float = 0.,   # weight of TAR; 0: none
    ):
        for name, value in dict(alpha=alpha, beta=beta).items():
            check_number(f'RNNRegularizer: `{name}`', value, 0)
        self.alpha, self.beta = alpha, beta

    def before_fit(self):
        if not hasattr(self.learn, 'rnn'): raise RuntimeError(
            "RNNRegularizer works with RNNCallback, which keeps the outputs: add it; `rnn_cbs()` makes all three")

    def after_loss(self):
        learn, rnn = self.learn, self.learn.rnn
        if learn.loss_grad is None: return
        if self.alpha: learn.loss_grad = learn.loss_grad + self.alpha*_mean_square(rnn.out)
        h = rnn.raw_out
        if self.beta and h.shape[1] > 1: learn.loss_grad = learn.loss_grad + self.beta*_mean_square(h[:, 1:]-h[:, :-1])


def _mean_square(t: Tensor) -> Tensor: return t.float().pow(2).mean()


def rnn_cbs(
    alpha: float = 2.,  # weight of AR; 0: none
    beta: float = 1.,   # weight of TAR; 0: none
) -> list[Callback]:    # for `Learner(cbs=…)`
    "The callbacks of recurrent models: ModelResetter, RNNCallback, and a RNNRegularizer if there is anything to add"
    return [ModelResetter(), RNNCallback()] + ([RNNRegularizer(alpha, beta)] if alpha or beta else [])
