"""What `learn.doctor` measures while it trains a few batches: callbacks that fill in a Seen of findings.py."""
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.utils.data import RandomSampler, WeightedRandomSampler

from ..callback import Callback
from ..checks import unseen
from ..events import CancelEpochException, CancelFitException
from ..findings import Seen
from ..hooks import Hooks
from ..layers import is_leaf
from ..optim import missing_params
from ..outputs import is_regression, misfit, takes_scores
from ..splitters import norm_layers
from ..tensors import flat_numbers, tensors_in
from ..utils import rng_state, set_rng_state
from ..weights import named_layers, named_params

__all__ = ['Quiet', 'Clock', 'Look', 'Repeat']

random_samplers = RandomSampler, WeightedRandomSampler


class Quiet(Callback):
    "What a fit would warn of is a finding here, or will be told by a fit"
    run_in = {'lr_find'}

    def before_fit(self):
        self.train_eval.said = True
        self.opt.told |= {'no gradient', *missing_params(self.opt, self.model, self.loss_func), *unseen(self.learn)}


class Clock(Callback):
    """Measures how long each batch is waited for, and how long worked on

    Order: before all others, and in cleanups behind them."""
    order = -1000
    run_valid = False
    run_in = {'lr_find'}

    def __init__(self):
        self.begun = self.ended = self.own = 0.
        self.waits: list[float] = []  # seconds
        self.works: list[float] = []

    def before_batch(self):
        self.begun, self.own = perf_counter(), 0.
        if self.ended: self.waits.append(self.begun-self.ended)  # not for the first batch, for which workers start

    def cleanup_batch(self):
        if self.device.type != 'cpu': torch.accelerator.synchronize(self.device)  # else it has only been asked for
        self.ended = perf_counter()
        self.works.append(self.ended-self.begun-self.own)  # without the time that measuring took

    def share(self) -> float:  # 0 to 1
        "Of the time, how much the usual batch was waited for"
        wait, work = (float(np.median(seconds or [0.])) for seconds in (self.waits, self.works))
        return wait/(wait+work) if wait > .001 else 0.  # less is as good as none


def _spreads(t: Tensor) -> tuple[Tensor, Tensor|None]:  # mean and deviation, and those of each column of a matrix
    is_matrix = t.ndim == 2 and t.layout is torch.strided and not t.is_nested
    flat, t = flat_numbers(t.detach()), t.detach().float()
    whole = torch.stack([flat.mean(), flat.std(correction=0)])
    return whole, torch.stack([t.mean(0), t.std(0, correction=0)]) if is_matrix else None


def _later(rows: list[Tensor]) -> list[float]:  # the median of the later half, since a fit's first steps are special
    rows = rows[len(rows)//2:]
    return torch.stack(rows).median(0).values.tolist()


def _is_unit_layer(m): return isinstance(m, nn.Linear) or isinstance(m, _ConvNd) and not m.transposed


class Look(Callback):
    """Measures some training batches; what it needs of them stays on the device until the end

    Order: after mixed precision (10), which unscales the gradients, before clipping (11)."""
    order = 10.5
    run_valid = False
    run_in = {'lr_find'}

    def __init__(self, n_batches: int, clock: Clock):
        self.n_batches, self.clock, self.done = n_batches, clock, 0
        self.single: dict[str, None] = {}      # batch normalisation that got one item
        self.losses: list[Tensor] = []
        self.done_steps = 0                    # gradients that were complete
        self.rms: list[Tensor] = []            # of the gradient of each weight, `(n_weights,)`
        self.ratios: list[Tensor] = []         # of update to weight, likewise
        self.moved: dict[str, Tensor] = {}     # has the parameter ever had a gradient?
        self.alive: dict[str, Tensor] = {}     # has the unit, by its weights? By layer
        self.inputs: dict[str, list] = {}      # means and deviations, batch by batch
        self.norm_layers: dict = {}            # names, by layer
        self.hooks, self.left_out, self.hidden, self.normalises = Hooks([], self._gets), [], [], False
        self.targets: list = []                # means and deviations, batch by batch, where they are values
        self.classes: list[Tensor] = []        # the lowest and the highest of each batch
        self.spread: Any = None                # of the outputs of the first batch
        self.pull: Any = ()                    # of each parameter at the first step
        self.params: dict[str, Tensor] = {}    # those that are trained
        self.weights: dict[str, Tensor] = {}   # those of two or more dimensions that the optimizer has
        self.starts: Any = None                # norms of the weights before the first step
        self.misfit: Any = None                # why the outputs cannot match the loss, and what to try

    def before_fit(self):
        layers = dict(named_layers(self.model))
        self.norm_layers = {m: name for name, m in layers.items() if isinstance(m, _BatchNorm)}
        self.unit_layers = {name: w for name, m in layers.items()  # by a leaf: what is computed has no gradient
                            if _is_unit_layer(m) and isinstance(w := m._parameters.get('weight'), nn.Parameter)}
        self.normalises = isinstance(next((m for m in layers.values() if is_leaf(m)), None), norm_layers)
        self.left_out = missing_params(self.opt, self.model, self.loss_func)
        self.hidden, self.train = [*unseen(self.learn)], self.dls.train
        self.hooks = Hooks(self.norm_layers, self._gets, pre=True)

    def cleanup_fit(self): self.hooks.remove()

    def _gets(self, m, inputs):
        t = next(tensors_in(inputs), None)
        if m.training and t is not None and t.ndim > 1 and len(t) == 1: self.single[self.norm_layers[m]] = None

    def after_pred(self):  # of inputs as callbacks leave them
        if self.normalises: return  # the first layer does that
        xb = self.xb.items() if isinstance(self.xb, dict) else ((f'input {i}', x) for i, x in enumerate(self.xb))
        for name, x in xb:
            for i, t in enumerate(t for t in tensors_in(x) if t.is_floating_point() and t.numel()):
                self.inputs.setdefault(f'{name}, part {i}' if i else name, []).append(_spreads(t))

    def after_loss(self):
        if self.loss is None: return
        self.losses.append(self.loss)
        if self.misfit is None: self.misfit = misfit(self.loss_func, self.pred, self.yb)
        y = self.yb[0].detach() if self.yb and isinstance(self.yb[0], Tensor) else torch.empty(0)
        values = y.is_floating_point() and y.numel() and is_regression(self.loss_func)
        if values: self.targets.append(_spreads(y)[0])
        elif y.ndim == 1 and len(y) >= 8 and not y.is_floating_point(): self.classes.append(torch.stack(y.aminmax()))
        if self.spread is None and isinstance(self.pred, Tensor) and (values or takes_scores(self.loss_func)):
            self.spread = self.pred.detach().float().std(correction=0)
            if values: self.spread = self.spread/self.targets[0][1].clamp(1e-12)

    def before_step(self):
        start = perf_counter()
        if not self.params: self._find()
        grads = {n: flat_numbers(p.grad) for n, p in self.params.items() if p.grad is not None}
        zero = torch.zeros((), device=self.device)
        norms = {n: torch.linalg.vector_norm(g) for n, g in grads.items()}
        for n, norm in norms.items(): self.moved[n] = self.moved.get(n, zero) + norm
        self.rms.append(torch.stack([norms.get(n, zero)/p.numel()**.5 for n, p in self.weights.items()] or [zero]))
        for name, w in self.unit_layers.items():
            if w.requires_grad and w.grad is not None:
                alive = torch.ne(w.grad, 0).flatten(1).any(1)
                self.alive[name] = self.alive[name] | alive if name in self.alive else alive
        if not self.done_steps: self.pull = self._pull(norms)
        self.done_steps += 1
        self.old = [p.detach().clone() for p in self.weights.values()]
        self.clock.own += perf_counter()-start

    def _pull(self, norms):  # see limits['exploding']; a loss that is nearly 0 says nothing
        loss = self.losses[-1].abs() if self.losses else torch.ones(())
        if self.targets: loss = torch.maximum(loss, self.targets[-1][1]**2/100)
        sizes = {n: torch.linalg.vector_norm(flat_numbers(p.detach())) for n, p in self.params.items() if n in norms}
        return {n: norms[n]*size/loss.clamp(1e-3) for n, size in sizes.items()}

    def _find(self):  # what is trained, at the first step: lazy parameters are there by now
        self.params = {n: p for n, p in named_params(self.model, self.loss_func) if p.requires_grad and not is_lazy(p)}
        self.weights = {n: p for n, p in self.params.items() if p.ndim > 1 and p in self.opt.opts}
        self.starts = [torch.linalg.vector_norm(p.detach()) for p in self.weights.values()]

    def after_step(self):
        if not self.learn.stepped: return
        start = perf_counter()
        pairs = zip(self.weights.values(), self.old)
        ratios = [torch.linalg.vector_norm(p.detach()-o)/torch.linalg.vector_norm(o).clamp(1e-12) for p, o in pairs]
        self.ratios.append(torch.stack(ratios or [torch.zeros((), device=self.device)]))
        self.clock.own += perf_counter()-start

    def cleanup_step(self): self.old = []

    def after_batch(self):
        self.done += 1
        if self.done >= self.n_batches: raise CancelFitException

    def after_train(self): raise CancelEpochException  # no validation; the next epoch goes on

    def seen(self) -> Seen:
        "What has been measured, as numbers; of the steps the later half counts"
        seen = Seen(self.done, single=[*self.single], has_batchnorm=bool(self.norm_layers), waiting=self.clock.share(),
                    left_out=self.left_out, hidden=self.hidden, n_steps=len(self.ratios),
                    n_workers=getattr(self.train, 'num_workers', 0))
        self._see_losses(seen)
        self._see_gradients(seen)
        seen.dead = {name: 1-float(alive.float().mean()) for name, alive in self.alive.items()}
        if self.misfit: seen.output, seen.output_advice = self.misfit
        self._see_data(seen)
        return seen

    def _see_losses(self, seen):
        if not self.losses: return
        finite = torch.isfinite(torch.stack(self.losses)).tolist()
        seen.bad_loss, seen.loss = None if all(finite) else finite.index(False), float(self.losses[0])
        if self.spread is not None: seen.spread = float(self.spread)

    def _see_gradients(self, seen):
        if not self.done_steps: return
        seen.no_grad = [n for n in self.params if n not in self.moved]
        seen.zero_grad = [n for n, total in self.moved.items() if float(total) == 0]
        seen.pull = {n: float(v) for n, v in self.pull.items()}
        if self.weights: seen.gradients = dict(zip(self.weights, _later(self.rms)))
        if not self.weights or not self.ratios: return
        rows = [*zip(self.weights, _later(self.ratios), self.ratios[0].tolist(), map(float, self.starts))]
        seen.ratios = {name: r for name, r, _, start in rows if start}  # what starts at 0 has none
        seen.first = {name: first for name, _, first, start in rows if start}

    def _see_data(self, seen):
        if self.targets: seen.targets = tuple(torch.stack(self.targets).mean(0).tolist())
        if len(self.classes) > 1 and not isinstance(getattr(self.train, 'sampler', None), random_samplers):
            low, high = torch.stack(self.classes).T.tolist()
            seen.alike = low == high and len({*low}) > 1
        for name, batches in self.inputs.items():
            wholes, columns = zip(*batches)
            seen.inputs[name] = tuple(torch.stack(wholes).mean(0).tolist())
            if any(c is None or c.shape != columns[0].shape for c in columns): continue
            pairs = torch.stack(columns).mean(0).T.tolist()
            seen.columns |= {f'{name}, column {i}': (mean, std) for i, (mean, std) in enumerate(pairs) if std != 0}


class Repeat(Callback):
    """Notes the losses of one batch that comes again and again, each time with the same random numbers

    Order: before all that draws any."""
    order = -1000
    run_in = {'lr_find'}

    def __init__(self): self.rng, self.losses, self.made_steps = rng_state(), [], 0
    def before_batch(self): set_rng_state(self.rng)
    def after_loss(self): self.losses.append(self.loss)

    def after_step(self): self.made_steps += self.learn.stepped
    def after_train(self): raise CancelEpochException  # no validation
