"""SWA: the average of the weights that ends of epochs give, with statistics of batch normalisation of its own."""
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from ..callback import Callback
from ..events import CancelBatchException, CancelValidException
from ..every import Every
from ..modes import restore_modes
from ..weights import named_layers
from .averaging import WeightAverage
from .schedule import ParamScheduler

__all__ = ['SWA']


class _Statistics(Callback):
    """Lets an evaluation of the training data fill the statistics of batch normalisation; no loss, no metrics

    Order: after TrainEvalCallback (-10), which switches to eval."""
    run_in = {'validate'}
    def __init__(self, modes, n): self.modes, self.n = modes, n
    def before_validate(self): restore_modes(self.modes)
    def after_pred(self): raise CancelBatchException
    def after_batch(self):
        if self.n is not None and self.iter+1 >= self.n: raise CancelValidException


class SWA(WeightAverage):
    """Averages the weights that ends of epochs give, all with the same share, and evaluates with that average

    Each fit begins a new one. The statistics of batch normalisation are those of the averaged weights: before they are
    evaluated with, and at the end of the fit, the training data goes through the model once, as by torch's `update_bn`.
    Raises: ValueError also if `swa_lr` meets another schedule, or data for these statistics can be had only once.
    Order: as WeightAverage.
    Source: Izmailov et al. 2018, "Averaging Weights Leads to Wider Optima and Better Generalization", arXiv 1803.05407.
    """
    stale = False     # are the statistics yet to be found?
    evals: Any = ()    # names of modules that are in eval while training
    n_batches: int|None = None  # of the last epoch of training

    def __init__(self,
        start: float|str = .75,    # from where in the fit on: a fraction, 0 to 1, '500it' or '5ep'
        every: str = '1ep',        # how often from then on: '2ep', '500it'
        swa_lr: float|list|None = None,  # learning rate from there on; None: as it would be
    ):
        super().__init__(start)
        self.every, self.swa_lr = Every(every, last=False), swa_lr
        if self.every.unit == 's': raise ValueError(
            f"SWA: every={every!r} is a time, by which no two fits average alike: give '1ep' or '500it'")
        self.sched = None if swa_lr is None else ParamScheduler({'lr': partial(_constant, swa_lr)}, begin=start)

    def _forget(self):
        super()._forget()
        self.stale, self.stats = False, {}

    def before_fit(self):
        super().before_fit()
        if self.learn.run_kind != 'fit': return
        if self._norms() and isinstance(self.dls.train.dl, Iterator): raise ValueError(
            f"SWA: batch normalisation needs its statistics anew, and the training loader, a "
            f"`{type(self.dls.train.dl).__name__}`, can be iterated only once: give a DataLoader or a list")
        self._forget()
        if self.sched and self.sched.learn is None: self.learn.add_cb(self.sched)  # else it goes on with a fit

    def cleanup_fit(self):
        super().cleanup_fit()
        if self.sched and self.sched.learn is self.learn: self.learn.remove_cb(self.sched)

    def after_step(self):
        if self.every.at_step(self.learn) and self._has_begun(self.pct_train): self._add()

    def before_train(self): self._see_modes()  # an evaluation within the epoch asks for them too

    def _see_modes(self): self.evals = [k for k, m in named_layers(self.model) if not m.training]

    def after_train(self):
        self._see_modes()
        self.n_batches = self.dl.position  # not `iter`: no batch may have been left to a fit that went on
        if self.every.at_epoch(self.learn) and self._has_begun((self.epoch+1)/self.n_epoch): self._add()

    def _add(self):
        self._take(1/(self.n_averaged+1))
        self.stale = True

    def after_fit(self):
        super().after_fit()
        if self.learn.run_kind != 'fit' or not self.stale or self.learn.paused: return
        with self.swapped(): pass

    # ---- statistics of batch normalisation

    def _norms(self):  # the layers by name; those that were kept in eval keep their statistics
        return {k: m for k, m in named_layers(self.model)
                if isinstance(m, _BatchNorm) and m.track_running_stats and k not in self.evals}

    def _buffers(self):
        return {f'{name}.{key}'.lstrip('.'): b for name, m in self._norms().items() for key, b in m._buffers.items()
                if b is not None and not is_lazy(b)}

    def _to_swap(self):
        stats = {} if self.stale else self.stats
        return {**super()._to_swap(), **{k: (b, stats.get(k)) for k, b in self._buffers().items()}}

    def _swap_in(self, holder):
        super()._swap_in(holder)
        norms = [m for m in self._norms().values()  # those that something has run through
                 if not any(b is not None and is_lazy(b) for b in m._buffers.values())]
        if self.stale and norms: self._fill(norms)
        self.stale = False

    def _fill(self, norms):
        momenta = [m.momentum for m in norms]
        own = [(m._buffers, k, b) for m in norms for k, b in m._buffers.items() if b is not None]
        try:
            for buffers, k, b in own: buffers[k] = b.detach().clone()  # a batch under way may have to go backward
            for m in norms:
                m.reset_running_stats()
                m.momentum = None  # a plain average over batches
            modes = [(m, k not in self.evals) for k, m in named_layers(self.model)]
            self.learn.validate(0, cbs=_Statistics(modes, self.n_batches))
        finally:
            for m, momentum in zip(norms, momenta): m.momentum = momentum
            for buffers, k, b in own:
                b.data.copy_(buffers[k])
                buffers[k] = b
        self.stats = {k: b.detach().clone() for k, b in self._buffers().items()}

    def _more(self): return dict(stale=self.stale)
    def _stats(self): return self.stats

    def _loaded(self, found, weights):
        self.stale = found.get('stale', False)
        self.stats = {k: weights[k].clone() for k in self._buffers() if k in weights}

    def state_dict(self) -> dict[str, Any]:
        "The average, and where it stands"
        return {**super().state_dict(), 'stats': dict(self.stats), 'stale': self.stale, 'evals': self.evals,
                'n_batches': self.n_batches}


def _constant(value, pos): return value
