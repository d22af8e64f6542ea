"""What `learn.doctor` measures while it trains a few batches: callbacks that fill in a Seen of findings.py."""
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from ..callback import Callback
from ..events import CancelEpochException, CancelFitException
from ..findings import Seen
from ..hooks import Hooks
from ..optim import missing_params
from ..outputs import misfit
from ..tensors import flat_numbers, tensors_in
from ..utils import rng_state, set_rng_state
from ..weights import named_layers, named_params

__all__ = ['Quiet', 'Clock', 'Look', 'Repeat']


class Quiet(Callback):
    "What a fit would warn of is a finding here, or will be told by a fit"
    run_in = {'lr_find'}

    def before_fit(self):
        self.train_eval.said = True
        self.opt.told |= {'no gradient', *missing_params(self.opt, self.model, self.loss_func)}


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
        if not self.waits: return 0.
        wait, work = median(self.waits), median(self.works)
        return wait/(wait+work)


def _spreads(t: Tensor) -> tuple[Tensor, Tensor|None]:  # mean and deviation, and those of each column of a matrix
    whole = torch.stack([t.mean(), t.std(correction=0)])
    return whole, torch.stack([t.mean(0), t.std(0, correction=0)]) if t.ndim == 2 else None


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
        self.norms: list[Tensor] = []          # of the whole gradient, at each step
        self.rms: list[Tensor] = []            # of the gradient of each weight, `(n_weights,)`
        self.ratios: list[Tensor] = []         # of update to weight, likewise
        self.moved: dict[str, Tensor] = {}     # has the parameter ever had a gradient?
        self.alive: dict[str, Tensor] = {}     # has the unit, by its weights? By layer
        self.inputs: dict[str, list] = {}      # means and deviations, batch by batch
        self.norm_layers: dict = {}            # names, by layer
        self.hooks, self.left_out = Hooks([], self._gets), []
        self.misfit: Any = None                # why the outputs cannot match the loss, and what to try

    def before_fit(self):
        layers = dict(named_layers(self.model))
        self.norm_layers = {m: name for name, m in layers.items() if isinstance(m, _BatchNorm)}
        self.unit_layers = {name: m for name, m in layers.items() if _is_unit_layer(m)}
        self.left_out = missing_params(self.opt, self.model, self.loss_func)
        self.hooks = Hooks(self.norm_layers, self._gets, pre=True)

    def cleanup_fit(self): self.hooks.remove()

    def _gets(self, m, inputs):
        if m.training and len(inputs[0]) == 1: self.single[self.norm_layers[m]] = None

    def before_batch(self):
        xb = self.xb.items() if isinstance(self.xb, dict) else ((f'input {i}', x) for i, x in enumerate(self.xb))
        for name, x in xb:
            for i, t in enumerate(t for t in tensors_in(x) if t.is_floating_point() and t.numel()):
                self.inputs.setdefault(f'{name}, part {i}' if i else name, []).append(_spreads(t.detach().float()))

    def after_loss(self):
        if self.loss is None: return
        self.losses.append(self.loss)
        if self.misfit is None: self.misfit = misfit(self.loss_func, self.pred, self.yb)

    def before_step(self):
        start = perf_counter()
        self.params = {n: p for n, p in named_params(self.model, self.loss_func) if p.requires_grad and not is_lazy(p)}
        self.weights = {n: p for n, p in self.params.items() if p.ndim > 1 and p in self.opt.opts}
        grads = {n: flat_numbers(p.grad) for n, p in self.params.items() if p.grad is not None}
        zero = torch.zeros((), device=self.device)
        norms = {n: torch.linalg.vector_norm(g) for n, g in grads.items()}
        for n, norm in norms.items(): self.moved[n] = self.moved.get(n, zero) + norm
        self.norms.append(torch.linalg.vector_norm(torch.stack([*norms.values()] or [zero])))
        self.rms.append(torch.stack([norms.get(n, zero)/p.numel()**.5 for n, p in self.weights.items()] or [zero]))
        for name, m in self.unit_layers.items():
            w: Any = m.weight
            if w.requires_grad and w.grad is not None:
                alive = torch.ne(w.grad, 0).flatten(1).any(1)
                self.alive[name] = self.alive[name] | alive if name in self.alive else alive
        self.old = [p.detach().clone() for p in self.weights.values()]
        self.clock.own += perf_counter()-start

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
                    left_out=self.left_out)
        if self.losses:
            finite = torch.isfinite(torch.stack(self.losses)).tolist()
            seen.bad_loss = None if all(finite) else finite.index(False)
        if self.rms and self.weights:
            seen.gradients = dict(zip(self.weights, _later(self.rms)))
            seen.ratios = dict(zip(self.weights, _later(self.ratios))) if self.ratios else {}
        if self.norms: seen.norm = float(_later([n[None] for n in self.norms])[0])
        if self.norms: seen.no_grad = [n for n in self.params if n not in self.moved or float(self.moved[n]) == 0]
        seen.dead = {name: 1-float(alive.float().mean()) for name, alive in self.alive.items()}
        if self.misfit: seen.output, seen.output_advice = self.misfit
        for name, batches in self.inputs.items():
            wholes, columns = zip(*batches)
            seen.inputs[name] = tuple(torch.stack(wholes).mean(0).tolist())
            if columns[0] is None or any(c.shape != columns[0].shape for c in columns): continue
            pairs = torch.stack(columns).mean(0).T.tolist()
            seen.columns |= {f'{name}, column {i}': (mean, std) for i, (mean, std) in enumerate(pairs)}
        return seen


class Repeat(Callback):
    """Notes the losses of one batch that comes again and again, each time with the same random numbers

    Order: before all that draws any."""
    order = -1000
    run_in = {'lr_find'}

    def __init__(self): self.rng, self.losses = rng_state(), []
    def before_batch(self): set_rng_state(self.rng)
    def after_loss(self): self.losses.append(self.loss)
    def after_train(self): raise CancelEpochException  # no validation
