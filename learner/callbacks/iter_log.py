"""What is shown by steps: IterLogger, a line each so many of them, and DebugInfo, how large each layer's values are.

What a batch gives stays on the device until a line is due, and is then read in one go."""
import math
from collections import deque
from datetime import timedelta
from time import perf_counter
from typing import Any

import torch
from fastcore.basics import patch
from torch import Tensor, nn

from ..callback import Callback
from ..display import say
from ..every import Every
from ..layers import own_params
from ..tensors import flat_numbers, n_items, tensors_in
from ..utils import check_number, optional
from .hook import HookCallback
from .recorder import Recorder
from .stats import LayerStats

__all__ = ['IterLogger', 'DebugInfo']


def _say(learn, lines):  # where a bar may be
    live = getattr(getattr(learn, 'progress', None), 'live', None)
    if live is not None: live.update(None)
    for line in lines: say(line)


class IterLogger(Callback):
    """Each so many steps a line, and a row in `learn.recorder.iters_table`; one too for what is left at a fit's end

    `loss` is the mean over exactly the last `window` steps, that of a step being the mean over its batches. `lr` is the
    last group's. `items_per_s`, `wait_ms` (for data) and `compute_ms`, a step each, are those since the line before,
    without what is done between batches, such as validations and saving; they are times of the CPU, which does not wait
    for an accelerator. `eta_s` is the time that the rest of the fit takes if it goes on as since its start; it is NaN
    where the number of steps is unknown.
    Raises: TypeError or ValueError if a parameter means nothing; at the start of a fit, RuntimeError without Recorder.
    Order: after all that is done for a batch and at a save point, whose time it leaves out."""
    order = 1001
    run_in = {'fit'}
    run_valid = False
    not_hashed = ('rows',)
    begun = ended = 0.   # when the present batch has begun, and the last one ended, on the clock of `perf_counter`
    reading: Any = None  # what the present step is made with
    seen = 0             # `learn.n_step` after the last batch
    start: Any = None    # when the fit began in this process, and what it had done

    def __init__(self,
        every: Any = 20,      # steps between two lines; or '20it', '10s', or an Every, which also says if at the end
        window: int = 20,     # steps over which the loss is averaged
    ):
        if not isinstance(every, str | Every): check_number('IterLogger: `every`', every, 1, whole=True, of='steps')
        check_number('IterLogger: `window`', window, 1, whole=True, of='steps')
        self.every, self.window = Every(every if isinstance(every, str | Every) else f'{every}it'), window
        if self.every.unit == 'ep': raise ValueError(
            f"IterLogger: every={every!r} is of epochs, of which the table has a row each: give '20it' or '10s'")
        self._begin()

    def _begin(self):
        self.losses: deque[list[Tensor]] = deque(maxlen=self.window)  # of each step the losses of its batches
        self.open: list[Tensor] = []                                  # of the step that is yet to be made
        self._since()

    def _since(self): self.wait, self.compute, self.items, self.steps = 0., 0., 0, 0  # the last line

    def before_fit(self):
        if not hasattr(self.learn, 'recorder'): raise RuntimeError(
            "`IterLogger` works with `Recorder`, which this Learner is without; add it")
        self._begin()
        self.start, self.begun, self.ended = None, 0., 0.
        self.every.start()

    def before_train(self): self.ended = perf_counter()

    def before_batch(self):
        self.begun = perf_counter()
        self.wait += self.begun-self.ended
        self.start = self.start or (self.begun, self.learn.pct_train)

    def before_step(self): self.reading = self.learn.opt.read()  # what the step is made with; later it may change

    def after_batch(self):
        learn = self.learn
        self.items += n_items(learn.xb, learn.yb)
        if learn.loss is not None: self.open.append(learn.loss)
        if learn.stepped:
            self.losses.append(self.open)
            self.open, self.steps = [], self.steps+1
        self.seen, now = learn.n_step, perf_counter()
        self.compute, self.ended = self.compute+now-self.begun, now
        if self.steps and self.every.at_step(learn): self._log(now)

    def after_train(self):  # what is left is stepped by now, or dropped
        if self.begun > self.ended: self.after_batch()  # another callback ended all this before it was reached
        if self.open and self.learn.n_step > self.seen: self.losses.append(self.open)
        self.open = []

    def save_point(self): self.ended = perf_counter()

    def after_epoch(self): self.after_train()  # which a cancel may have passed by

    def after_fit(self):
        self.after_train()
        if self.every.last and self.steps and not self.learn.paused: self._log(perf_counter())

    def cleanup_fit(self): self.reading = None

    def mean_loss(self) -> float:  # NaN if there are none
        "Mean over the last `window` steps; reading it may wait for an accelerator"
        steps = [losses for losses in self.losses if losses]
        if not steps: return math.nan
        values = iter(torch.stack([v for losses in steps for v in losses]).tolist())
        return math.fsum(math.fsum(next(values) for _ in losses)/len(losses) for losses in steps)/len(steps)

    def _log(self, now):
        learn, (t0, pct0), n, pct = self.learn, self.start, self.steps, self.learn.pct_train
        lr, passed = self.reading.values['lr'][-1], now-t0
        row = dict(fit=self.recorder.n_fit, epoch=learn.epoch, step=learn.n_step, loss=self.mean_loss(), lr=lr,
                   items_per_s=self.items/(self.wait+self.compute), wait_ms=1000*self.wait/n,
                   compute_ms=1000*self.compute/n, eta_s=passed*(1-pct)/(pct-pct0) if pct > pct0 else math.nan)
        _rows(self.recorder).append(row)
        eta = f", {timedelta(seconds=round(row['eta_s']))} left" if pct0 < pct < 1 else ''
        _say(learn, [f"step {row['step']}: loss {row['loss']:.6g}, lr {lr:.4g}, {row['items_per_s']:.4g} items/s, data "
                     f"{row['wait_ms']:.3g} ms, compute {row['compute_ms']:.3g} ms{eta}"])
        self._since()

    def state_dict(self) -> dict[str, Any]:
        "The window and the rows"
        batches = [v for losses in [*self.losses, self.open] for v in losses]
        rows = _rows(self.recorder) if self.learn else []
        return dict(losses=torch.stack(batches) if batches else None, counts=[*map(len, self.losses)],
                    rows=[dict(row) for row in rows])

    def load_state_dict(self, state: dict[str, Any]) -> None:  # what `state_dict` gave
        "Go on there"
        self._begin()
        values = iter([] if state['losses'] is None else [*state['losses']])
        for n in state['counts']: self.losses.append([next(values) for _ in range(n)])
        self.open = [*values]
        if self.learn is not None: _rows(self.recorder)[:] = [dict(row) for row in state['rows']]


def _rows(recorder) -> list[dict]: return vars(recorder).setdefault('iter_rows', [])


@patch(as_prop=True)  # pyright: ignore[reportOptionalCall]
def iters_table(self: Recorder) -> Any:  # a pandas DataFrame
    "What IterLogger has noted in all fits: fit, epoch, step, loss, lr, items_per_s, wait_ms, compute_ms, eta_s"
    return optional('pandas', 'iters_table').DataFrame(_rows(self))


class DebugInfo(LayerStats, HookCallback):
    """Each so many steps the mean absolute outputs, weights and gradients of each layer: a line each, and `table`

    They are those of the step's batch (with GradientAccumulation its last one), gradients as before clipping, weights
    as before the step. A layer without parameters of its own has NaN for these.
    Raises: ValueError if `every` is no number of steps; else as HookCallback.
    Order: as GradientStats, after mixed precision (10), which unscales the gradients, before clipping (11)."""
    order = 10.5
    columns = ('activation', 'weight', 'gradient')

    def __init__(self,
        every: str|Every = '100it',  # how often, in steps of the optimizer
        modules: Any = None,    # as `find_modules` takes them; None: those with parameters and without children
    ):
        LayerStats.__init__(self)
        HookCallback.__init__(self, modules)
        self.when = Every(every, last=False)
        if self.when.unit != 'it': raise ValueError(
            f"DebugInfo: every={every!r}: give a number of steps, such as '100it', which is known before the batch")
        self.found: dict[str, tuple] = {}
        self._begin([])

    def before_fit(self):
        HookCallback.before_fit(self)
        self._begin(self.names.values())

    def changed(self, names):
        self.names = names
        self._tell_changed(names.values())

    def before_batch(self):
        if self.when._hits(self.learn.n_step+1): super().before_batch()

    def hook(self,
        m: nn.Module,   # that has run
        *values: Any,   # its inputs and output
    ) -> Any:           # None if there is no floating tensor
        "Measure its output"
        t = next((t for t in tensors_in(values[-1]) if t.is_floating_point() or t.is_complex()), None)
        return t if t is None else _mean_abs([t])

    def before_step(self):
        if not self.open: return
        for m, name in self.names.items():
            ps, nothing = [*own_params(m).values()], torch.full((), math.nan, device=self.device)
            grads = [p.grad for p in ps if p.grad is not None]
            parts = self.stored.get(name), _mean_abs(ps), _mean_abs(grads)
            self.found[name] = torch.stack([nothing if v is None else v.to(self.device) for v in parts]), None

    def after_step(self):
        if not self.learn.stepped or not self.found: return  # cancelled
        self._add(self.found)
        step, rows = self.learn.n_step, self.values[-1].tolist()
        def told(row): return ', '.join(f'{what} {v:.4g}' for what, v in zip(self.columns, row) if v == v)
        _say(self.learn, [f"step {step}, {name or 'the model'}: {told(row)}" for name, row in zip(self.layers, rows)])

    def cleanup_step(self): self.found = {}


def _mean_abs(ts):  # of all their values, in float32 at least; None if there are none
    flat = [flat_numbers(t.detach()) for t in ts]
    flat = [t for t in flat if t.numel()]
    return torch.cat(flat).abs().mean().float() if flat else None
