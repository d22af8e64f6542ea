"""Mixed precision: what gains from it is computed in half precision, weights and the loss stay as they are."""
import warnings
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from fastcore.basics import patch
from torch import Tensor

from ..callback import Callback
from ..events import CancelStepException
from ..learner import Learner
from ..tensors import map_tensors
from ..utils import check_number, warn

__all__ = ['MixedPrecision']

dtypes = dict(fp16=torch.float16, bf16=torch.bfloat16)


def _whole(t: Tensor) -> Tensor: return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


@contextmanager
def _within(outer, inner):
    with outer, inner: yield


class MixedPrecision(Callback):
    """Model and loss run under torch's autocast, in fits, in the learning-rate finder and in evaluations alike

    Predictions are made float32 again. With 'fp16' the loss is multiplied by a scale, so that small gradients do not
    become 0, and gradients are divided by it just before the step. Where one of them is no finite number, there is no
    step: nothing that counts steps moves, `skipped` counts it, and the scale gets smaller. The scale goes on from fit
    to fit, and is part of checkpoints. A `forward_context` of your own is entered within autocast.
    Raises: ValueError or TypeError if a parameter means nothing, ValueError if weights are float16 already;
    RuntimeError before training if the device cannot do it.
    Order: fastai's: after what changes the loss to go backward from (accumulation, 6), before all that looks at
    gradients of a step or clips them (10.5, 11)."""
    order = 10
    unique = True
    scaler: Any = None      # torch's GradScaler; with 'bf16' None
    skipped = 0             # steps of the fit that were left out
    _kind = ''              # the type of device that `scaler` is for
    _step: Any = None       # stands in for the optimizer: notes whether torch would step it
    _is_on = False          # between `before_fit` and `cleanup_fit`?
    _inner: Any = None      # the `forward_context` that was there before
    _checked = False        # has `scaler` looked at the gradients of this step?

    def __init__(self,
        dtype: str|torch.dtype = 'fp16',     # 'fp16', 'bf16', or torch's float16, bfloat16
        init_scale: float|None = None,       # with 'fp16': the scale at first; None: torch's 65536
        growth_factor: float|None = None,    # what it is multiplied with after `growth_interval` steps; None: 2
        backoff_factor: float|None = None,   # what it is multiplied with after a step was left out; None: .5
        growth_interval: int|None = None,    # steps in a row without one left out until it grows; None: 2000
    ):
        self.dtype: Any = dtypes.get(dtype) if isinstance(dtype, str) else dtype
        if self.dtype not in dtypes.values(): raise ValueError(
            f"MixedPrecision: `dtype` is {dtype!r}; give 'fp16', 'bf16', torch.float16 or torch.bfloat16")
        options = dict(init_scale=init_scale, growth_factor=growth_factor, backoff_factor=backoff_factor,
                       growth_interval=growth_interval)
        self.options: dict[str, Any] = {k: v for k, v in options.items() if v is not None}
        if self.options and self.dtype is torch.bfloat16: raise ValueError(
            f"MixedPrecision: `{next(iter(self.options))}` is for 'fp16': bf16 reaches as far as float32, and needs no "
            "scale")
        ranges: dict[str, dict] = dict(init_scale={}, growth_factor=dict(low=1),
                                       backoff_factor=dict(high=1, below=True), growth_interval=dict(whole=True))
        for k, v in self.options.items():
            check_number(f'MixedPrecision: `{k}`', v, **{'low': 0, 'above': True, **ranges[k]})

    def __repr__(self) -> str:
        given = ''.join(f', {k}={v}' for k, v in self.options.items())
        return f"MixedPrecision({next(k for k, v in dtypes.items() if v is self.dtype)!r}{given})"

    # ---- forward

    def before_fit(self):
        training = self.run_kind in ('fit', 'lr_find')
        self._check_device()
        if training and self.dtype is torch.float16: self._begin()
        self._inner, self._is_on = self.learn.forward_context, True
        self.learn.forward_context = self._context

    def _autocast(self): return torch.autocast(self.learn.device.type, self.dtype)

    def _context(self):
        if not self._is_on: return self._inner() if self._inner else nullcontext()
        return self._autocast() if self._inner is None else _within(self._autocast(), self._inner())

    def _check_device(self):  # by trying: torch only warns where it cannot
        a = torch.ones(1, 1, dtype=torch.float32, device=self.learn.device)
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter('error')
                with self._autocast(): works = (a @ a).dtype is self.dtype
            why = None
        except Exception as e: works, why = False, e
        if not works: raise RuntimeError(
            f"{self}: on {self.learn.device} torch cannot compute in {self.dtype}; `learn.to_fp32()` goes without, and "
            "`to_bf16()` or `to_fp16()` takes the other type") from why

    def after_pred(self): self.learn.pred = map_tensors(_whole, self.pred)

    def cleanup_fit(self):
        if not self._is_on: return
        self._is_on = False
        if self.learn.forward_context == self._context:  # else another has put its own over it
            self.learn.forward_context, self._inner = self._inner, None

    # ---- fp16: the scale

    def _begin(self):
        if half := next((names[0] for p, names in self.opt.names.items()
                         if p.dtype is torch.float16 and p in self.opt.opts), None): raise ValueError(
            f"{self}: `{half}` is float16 already, too coarse to be trained: `learn.model.float()`; what is to be fast "
            "is computed in float16 all the same")
        self.skipped, self._checked = 0, False
        self._make_scaler()

    def _make_scaler(self):
        kind, old = self.learn.device.type, self.scaler
        if old is not None and kind == self._kind: return
        self.scaler, self._kind = torch.amp.GradScaler(kind, **self.options), kind
        if old is not None: self.scaler.load_state_dict(old.state_dict())

    def before_backward(self):
        if self.scaler: self.learn.loss_grad = self.scaler.scale(self.loss_grad)

    def before_step(self):
        groups = self.opt.opt.param_groups
        if not self.scaler or all(p.grad is None for g in groups for p in g['params']): return
        went = []
        step: Any = SimpleNamespace(param_groups=groups, step=lambda: went.append(True))
        self._checked = True
        self.scaler.step(step)  # unscales, and waits for the device, as in every loop with torch's scaler
        if went: return
        self._update()
        self._skip()

    def _update(self):
        self._checked = False
        self.scaler.update()

    def _skip(self):
        self.skipped += 1
        if self.skipped == 1 and self.run_kind == 'fit': warn(
            f"{self}: no step in epoch {self.epoch}, batch {self.iter}, since gradients are inf or nan; the scale is "
            f"{self.scaler.get_scale():g} from now on. That is to be expected a few times, while it is found")
        raise CancelStepException

    def cleanup_step(self):
        if self._checked: self._update()

    def after_fit(self):
        if self.skipped > 1 and self.run_kind == 'fit': warn(
            f"{self}: {self.skipped} steps of this fit were left out, since gradients were inf or nan; the scale is "
            f"{self.scaler.get_scale():g} now")

    def state_dict(self) -> dict[str, Any]:
        "The scale, how long it has been so, and how many steps were left out"
        if not self.scaler: return {}
        state = self.scaler.state_dict()
        return dict(scale=state['scale'], since=state['_growth_tracker'], skipped=self.skipped)

    def load_state_dict(self, state: dict[str, Any]) -> None:  # what `state_dict` gave
        "Go on with that scale, if there is one; what was given here is for how it changes"
        if not state or self.dtype is not torch.float16: return
        self._make_scaler()
        self.scaler.load_state_dict({**self.scaler.state_dict(), 'scale': state['scale'],
                                     '_growth_tracker': state['since']})
        self.skipped = state['skipped']


def _replace(learn, cb):
    old = next((c for c in learn.cbs if isinstance(c, MixedPrecision)), None)
    if old and cb and repr(old) == repr(cb): return learn
    if old: learn.remove_cb(old)
    return learn.add_cb(cb) if cb else learn


@patch
def to_fp16(self: Learner,
    **kwargs,  # of `MixedPrecision`: init_scale, growth_factor, backoff_factor, growth_interval
) -> Learner:
    "Train and evaluate in mixed precision with float16, from now on"
    return _replace(self, MixedPrecision('fp16', **kwargs))


@patch
def to_bf16(self: Learner) -> Learner:
    "Train and evaluate in mixed precision with bfloat16, from now on"
    return _replace(self, MixedPrecision('bf16'))


@patch
def to_fp32(self: Learner) -> Learner:
    "Train and evaluate in full precision again"
    return _replace(self, None)
