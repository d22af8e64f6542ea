"""What a fit shows as it runs: the epochs' table with a bar, and a live loss graph.

How it looks is display.py's; here is only what is shown when. Numbers are read from the device when a bar is due."""
import math
from collections.abc import Callable
from time import perf_counter
from typing import Any

from ..callback import Callback
from ..display import Bar, Live, new_live
from ..utils import warn

__all__ = ['ProgressCallback', 'ShowGraphCallback']


class ProgressCallback(Callback):
    """Shows the table of epochs, and a bar for the batches of each phase

    Order: after the Recorder, whose row it shows."""
    name = 'progress'  # pyright: ignore[reportAssignmentType]  # of subclasses too
    order = 60
    run_in = {'fit'}
    unique = True
    has_rows = False  # are there rows to show?
    phase, ended, begun, first_iter = '', False, False, 0  # where the fit is, as far as it has been seen
    live: Any = None  # the Live of this fit; None outside one
    due = math.inf    # when the next bar is due, on the clock of `perf_counter`

    def __init__(self,
        show: Callable[[], Live] = new_live,  # gives what each fit shows itself with: a `Live` class, for instance
    ): self.show = show

    def before_fit(self):
        self.phase, self.ended, self.begun, self.first_iter = '', False, False, 0
        self.has_rows = hasattr(self.learn, 'recorder') and self.learn.logger is None
        self.live = self.show() if self.learn.create_mbar else new_live(bar=False)
        self._shows(self.live.start, self.recorder.metric_names if self.has_rows else [])
        self.due = 0. if math.isfinite(self.live.interval) else math.inf

    def before_train(self):
        self.first_iter = self.train_iter
        self._begin('train')

    def before_validate(self): self._begin('valid')

    def after_batch(self):
        if perf_counter() >= self.due: self._update(self.iter+1)

    def cleanup_train(self): self._shows(self.live and self.live.update, None)
    def after_validate(self): self.phase = ''
    def cleanup_validate(self): self._shows(self.live and self.live.update, None)

    def cleanup_epoch(self):  # so that the row is shown although a callback ends the fit in its `after_epoch`
        recorder = getattr(self.learn, 'recorder', None)
        if self.has_rows and recorder and (row := recorder.log) is not None:
            self._shows(self.live and self.live.row, dict(zip(recorder.metric_names, row, strict=True)))

    def cleanup_row(self): self.cleanup_epoch()
    def after_fit(self): self.ended = True

    def cleanup_fit(self):
        self._shows(self.live and self.live.close, '' if self.ended else self._where())
        self.live, self.due = None, math.inf

    def _shows(self, show, *args):  # what cannot be shown costs the display, not the fit
        try:
            if show: show(*args)
        except (OSError, ValueError) as e:
            self.live, self.due = Live(), math.inf
            warn(f"nothing more is shown of this fit: {type(e).__name__}: {e}")

    def _begin(self, phase):
        self.phase, self.begun, self.started, self.first = phase, True, perf_counter(), None
        if self.started >= self.due: self._update(0)

    def _update(self, i):
        now = perf_counter()
        i0, t0 = self.first or (i, now)
        if i: self.first = i0, t0  # speed is measured from the first bar on: workers start before, a resumed phase at k
        loss = float(self.smooth_loss) if self.training and self.train_iter else math.nan  # reading it may sync
        bar = Bar(self.epoch, self.n_epoch, self.phase, i, self.dl.n_batches, loss if loss == loss else None,
                  now-self.started, (i-i0)/(now-t0) if now > t0 else None)
        self.due = now+self.live.interval
        self._shows(self.live.update, bar)

    def _where(self):
        if not self.begun: return ''  # an error came before the first batch
        where = f'stopped in epoch {self.epoch+1}/{self.n_epoch}'
        if self.phase == 'valid': return f'{where} during validation'
        if self.phase != 'train' or self.train_iter == self.first_iter: return where  # `iter` is of another phase
        return f'{where} at training batch {self.iter+1}' + ('' if self.n_iter is None else f'/{self.n_iter}')


class ShowGraphCallback(Callback):
    """Draws the losses so far under the live table of a notebook

    Raises: RuntimeError at the start of a fit without Recorder or ProgressCallback.
    Order: after ProgressCallback, in whose display it draws."""
    order = 65
    run_in = {'fit'}
    unique = True

    def before_fit(self):
        for name, cls in dict(recorder='Recorder', progress='ProgressCallback').items():
            if not hasattr(self.learn, name):
                raise RuntimeError(f"`{self}` works with `{cls}`, which this Learner is without; add it")
        self.progress._shows(self.progress.live and self.progress.live.graph, self._curves)

    def _curves(self):
        losses = self.recorder.losses
        skip = 5 if len(losses) > 25 else 0  # the first losses would flatten the rest
        curves = {'train (smoothed)': (range(skip+1, len(losses)+1), losses[skip:])}
        rows = [dict(zip(row.names, row)) for row in self.recorder.values]
        for name in self.recorder.metric_names:
            if name.endswith('valid_loss'):  # one a validation set
                curves[name.removesuffix('_loss')] = self.recorder.iters, [row.get(name, math.nan) for row in rows]
        return curves
