"""What changes a training step: accumulating gradients over several batches, and clipping them."""
from collections.abc import Callable
from functools import partial
from math import ceil, inf, isfinite
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.data import DataLoader, IterableDataset

from ..callback import Callback
from ..events import CancelBackwardException, CancelStepException
from ..losses import unreduced
from ..tensors import n_items
from ..utils import check_number, warn
from .control import ShortEpochCallback
from .schedule import Scheduler
from .turns import TakeTurns

__all__ = ['GradientAccumulation', 'GradientClip']


class GradientAccumulation(Callback):
    """One step for several batches, with the gradient of the mean over all they hold: exactly that of one big batch

    A window ends with the batch that fills it. The last one of an epoch is stepped as it is, unless `drop_last`. What
    is cancelled before its backward pass counts nothing; with TakeTurns a part's mean is that over its own batches.
    `loss_func` has to give a mean, of whatever `weight` counts.
    A fit that was given no `n_steps` gets it from here, so that schedules know how many steps there are.
    Raises: ValueError or TypeError if a parameter means nothing, if the epoch has no step, or for a weight below 0.
    Order: fastai's: before mixed precision (10), which unscales, and clipping (11), which are for whole windows."""
    order = 6
    plans_fit = True
    run_before = ('FreezeUntil',)  # which asks at the start of a fit how many steps there are
    run_in = {'fit', 'lr_find'}
    run_valid = False
    unique = True
    state = ('count', 'totals', 'first')
    count: Any = 0      # what the open window holds, in `unit`
    totals: Any = {}    # the sum of its weights, by the part of the model whose turn it was; '': there are no turns
    first: Any = 1.     # the weight of its first batch: others are relative to it, so that losses keep their size
    pending: Any = None  # what the present batch adds to `count` and `totals`, once its gradients are there
    went = False        # are they?
    flushing = False    # is what is left being stepped?
    turns: Any = None   # the fit's TakeTurns

    def __init__(self,
        n_acc: int = 32,         # a step once a window holds so many
        unit: str = 'items',     # of what: 'items', 'batches', or 'tokens', which are what `weight` counts
        weight: Callable|None = None,  # `weight(learn)`: of how much a batch's loss is the mean, 0 or more; None: items
        drop_last: bool = False,  # leave out what an epoch ends with, if the window is not full
    ):
        check_number('GradientAccumulation: `n_acc`', n_acc, 1, whole=True)
        if unit not in ('items', 'batches', 'tokens'): raise ValueError(
            f"GradientAccumulation: `unit` is {unit!r}; give 'items', 'batches' or 'tokens'")
        if unit == 'tokens' and weight is None: raise ValueError(
            "GradientAccumulation: unit='tokens' needs `weight`: a function of the Learner that counts the batch's")
        if weight is not None and not callable(weight): raise TypeError(
            f"GradientAccumulation: `weight` is a `{type(weight).__name__}`, not a function of the Learner")
        self.n_acc, self.unit, self.weight, self.drop_last = n_acc, unit, weight, drop_last

    # ---- how many steps an epoch has

    def _the(self, cls): return next((cb for cb in self.learn.ordered if isinstance(cb, cls)), None)

    def before_fit(self):
        if unreduced(self.loss_func)[1] == 'sum': raise ValueError(
            "GradientAccumulation: the loss is a sum (reduction='sum'), and would be divided as if it was a mean: give "
            "it reduction='mean'")
        short, self.turns = self._the(ShortEpochCallback), self._the(TakeTurns)
        n = self._steps(short)
        if n == 0 and not self.learn.rehearsing: raise ValueError(
            f"GradientAccumulation: no window of {self.n_acc} {self.unit} fills in an epoch of {self.dls.train!r}, and "
            "drop_last=True leaves out what is not full: no step would be made")
        if self.learn.run_kind == 'lr_find': return
        bs = self._sizes(self.dls.train, 1)[0]
        if self.unit == 'items' and bs and 1 < self.n_acc <= bs: warn(
            f"GradientAccumulation: nothing adds up, since a batch of {bs} items fills a window of {self.n_acc}; "
            "unit='batches' counts batches")
        if self.n_steps and not (short and short.planned): return
        if n: self.learn.n_steps = n
        elif n is None and (sched := self._the(Scheduler)): warn(
            f"GradientAccumulation: how many steps an epoch has cannot be known here, so {sched} takes it for one "
            "step a batch: give the fit `n_steps=…`")

    def _steps(self, short):  # None: unknown
        dl, n = self.dls.train, self.dls.train.n_batches
        if not n: return None
        bs, last = (1, 1) if self.unit == 'batches' else self._sizes(dl, n)
        if not bs or self.unit == 'tokens': return None
        if short and short.limit(n) < n: n, last = short.limit(n), bs
        k = ceil(self.n_acc/bs)  # batches that fill a window
        if not self.drop_last: return ceil(n/k)
        return n//k - (n % k == 0 and (k-1)*bs+last < self.n_acc)

    def _sizes(self, dl, n) -> tuple[Any, Any]:  # of a batch, and of the last one
        bs = getattr(dl, 'batch_size', None)
        if not isinstance(dl.dl, DataLoader) or isinstance(dl.dataset, IterableDataset) or bs is None: return None, None
        return bs, bs if dl.drop_last else len(dl.sampler)-(n-1)*bs

    # ---- a window: open as long as `learn.keep_grads`

    def before_train(self): self._reset()

    def _reset(self): self.count, self.totals, self.first = 0, {}, 1.

    def _weight(self):
        if self.weight is None: return n_items(self.xb, self.yb)
        w = self.weight(self.learn)
        if isinstance(w, Tensor):
            # only what says whether the window is full has to be known now: that waits for a GPU
            if self.unit != 'tokens': return w.detach().to(torch.float32 if w.device.type == 'mps' else torch.float64)
            w = w.item()
        if not (w >= 0 and isfinite(w)): raise ValueError(
            f"GradientAccumulation: `weight` gave {w!r} for a batch; it must be 0 or more")
        return w

    def before_backward(self):  # not `after_loss`: by now all that is to be part of the loss has been added to it
        w, self.went, self.pending = self._weight(), False, None
        if not isinstance(w, Tensor) and w == 0: raise CancelBackwardException  # the mean of nothing is no number
        if not self.count: self.first = w.clamp(min=1) if isinstance(w, Tensor) else w
        self.pending = dict(items=n_items(self.xb, self.yb), batches=1, tokens=w)[self.unit], w
        ratio, loss = w/self.first, self.learn.loss_grad
        if isinstance(ratio, Tensor) or ratio != 1: loss = loss*(ratio.to(loss) if isinstance(ratio, Tensor) else ratio)
        loss.register_hook(self._goes)  # tells that the backward pass has begun, whoever cancels what then
        self.learn.loss_grad = loss

    def _goes(self, grad): self.went = True

    def cleanup_backward(self):
        if self.went: self._add()

    def _add(self):
        count, weight = self.pending
        part = self.turns.now.module if self.turns and self.turns.now else ''
        self.count, self.totals = self.count+count, {**self.totals, part: self.totals.get(part, 0.)+weight}
        self.pending, self.went = None, False

    def before_step(self):
        if self.pending: self._add()  # another callback went backward from a loss of its own
        last = not self.drop_last and self.n_iter is not None and self.iter+1 >= self.n_iter
        if self.count < self.n_acc and not last and not self.flushing:
            self.learn.keep_grads = True
            raise CancelStepException
        self.learn.keep_grads = False
        for ps, total in self._parts():
            share = total/self.first
            if isinstance(share, Tensor): self._divide(ps(), share.clamp(min=1e-30))  # where nothing was, 0 stays 0
            elif share != 1: self._divide(ps(), share)

    def _parts(self):  # parameters, and what the batches in which they were trained weigh together
        if not self.turns: return [(self.learn.opt.all_params, self.totals.get('', 0.))]
        by_parts: dict[tuple, list] = {}
        for p in self.opt.all_params():
            if p.grad is not None: by_parts.setdefault(self.turns.parts_of(p), []).append(p)
        return [(partial(list, ps), sum(self.totals.get(part, 0.) for part in parts)) for parts, ps in by_parts.items()]

    def _divide(self, ps, by):
        grads = [p.grad for p in ps if p.grad is not None]
        for device in {g.device for g in grads}:
            own = [g for g in grads if g.device == device]
            torch._foreach_div_(own, by.to(device) if isinstance(by, Tensor) else by)  # pyright: ignore[reportPrivateImportUsage]

    def cleanup_batch(self):
        self.pending, self.went = None, False
        if not self.learn.keep_grads: self._reset()  # they have been stepped, or dropped with a batch or a step

    def after_train(self):  # the last batch was cancelled, or nobody knew that it was the last
        if not self.learn.keep_grads or self.drop_last: return
        self.flushing, self.learn.stepped = True, False
        try: self.learn._with_events(self.learn._do_step, 'step', CancelStepException)
        finally: self.flushing = False

    def cleanup_train(self):
        if self.learn.keep_grads or self.count: self._drop()

    def _drop(self):
        self.learn.keep_grads = False
        self.learn._zero_grad()
        self._reset()


class GradientClip(Callback):
    """Makes gradients smaller, just before each step, where they are too large; `grad_norms` tells how large they were

    They are those of the optimizer's parameters, sparse ones too. `by` says what is bounded:
    - 'norm': the norm of all of them together, by what torch's own `clip_grad_norm_` is made of.
    - 'value': each entry, as by torch's `clip_grad_value_`.
    - 'adaptive': for each unit the ratio of its gradient's norm to that of its weights, max(‖W‖, eps); what is above
      `max_norm` is scaled down to it. A unit is a row of a matrix, a filter of a convolution, a vector as a whole. The
      paper takes .01 for large batches, and leaves the last layer out, which is clipped here like all others.
    With GradientAccumulation the mean of a window is clipped; Caffe clips the sum, as Solver does. Nothing waits for
    the device.
    Raises: ValueError or TypeError if a parameter means nothing.
    Source: Brock et al. 2021, "High-Performance Large-Scale Image Recognition Without Normalization", equation 3 and
    the ε given with it, arXiv 2102.06171.
    Order: after mixed precision (10), which unscales the gradients."""
    order = 11
    run_in = {'fit', 'lr_find'}
    run_valid = False
    unique = True
    not_hashed = ('norms',)

    def __init__(self,
        max_norm: float = 1.,   # largest total norm allowed; by 'value' the largest magnitude, by 'adaptive' ratio
        norm_type: float = 2.,  # p of the p-norm; `inf` bounds the largest single entry
        by: str = 'norm',       # what is bounded: 'norm', 'value' or 'adaptive'
        eps: float = 1e-3,      # by 'adaptive': norms of weights count as no less
    ):
        for name, value in dict(max_norm=max_norm, norm_type=norm_type, eps=eps).items():
            check_number(f'GradientClip: `{name}`', value, 0, inf, above=True)
        if by not in ('norm', 'value', 'adaptive'): raise ValueError(
            f"GradientClip: `by` is {by!r}; give 'norm', 'value' or 'adaptive'")
        self.max_norm, self.norm_type, self.by, self.eps = max_norm, norm_type, by, eps
        self.norms: list[Tensor] = []  # on the device: stacks of them, and what has come since

    def before_fit(self): self.norms = []

    def before_step(self):
        ps = [p for p in self.opt.all_params() if p.grad is not None]
        for p in ps:
            if p.grad.is_sparse: p.grad = p.grad.coalesce()  # so that each of its values is there once
        grads = [p.grad.values() if p.grad.is_sparse else p.grad for p in ps]
        norm = get_total_norm(grads, self.norm_type)
        self.norms.append(norm.detach().reshape(1))
        if len(self.norms) > 512: self._pack()  # each takes 512 bytes of a GPU
        if self.by == 'norm': clip_grads_with_norm_(ps, self.max_norm, norm)
        elif self.by == 'adaptive': self._clip_units(ps, grads)
        elif grads:
            torch._foreach_clamp_min_(grads, -self.max_norm)  # pyright: ignore[reportPrivateImportUsage]
            torch._foreach_clamp_max_(grads, self.max_norm)  # pyright: ignore[reportPrivateImportUsage]

    @torch.no_grad()
    def _clip_units(self, ps, grads):
        for p, g in zip(ps, grads):
            w = p[tuple(p.grad.indices())] if p.grad.is_sparse else p
            most = self.max_norm*self._unit_norm(w).clamp(min=self.eps)
            g.mul_((most/self._unit_norm(g)).clamp(max=1))  # where the gradient is 0 that is inf, and so 1

    def _unit_norm(self, t):  # such that it can be multiplied with `t`
        dims = tuple(range(1, t.ndim)) or None
        return torch.linalg.vector_norm(t, self.norm_type, dims, keepdim=dims is not None)

    def _pack(self):
        if self.norms: self.norms = [torch.cat([n.to(self.norms[-1].device) for n in self.norms])]

    @property
    def grad_norms(self) -> list[float]:
        "The total norm at each step of the fit, before clipping; reading it copies all from the device at once"
        self._pack()
        return self.norms[0].tolist() if self.norms else []

    def state_dict(self) -> dict[str, Any]:
        "The norms"
        self._pack()
        return dict(norms=self.norms[0] if self.norms else None)

    def load_state_dict(self, state: dict[str, Any]) -> None:  # what `state_dict` gave
        "Go on with these"
        self.norms = [] if state['norms'] is None else [state['norms']]
