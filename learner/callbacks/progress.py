"""What a fit shows and logs as it runs: the epochs' table with a bar, a live loss graph, and a CSV file.

How it looks is display.py's; here is only what is shown when. Numbers are read from the device when a bar is due."""
import csv
import math
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from ..callback import Callback
from ..display import Bar, Live, new_live
from ..utils import optional, warn

__all__ = ['ProgressCallback', 'ShowGraphCallback', 'CSVLogger']


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


def _require(cb, **needed):  # before training starts, not at the first row
    for name, cls in needed.items():
        if not hasattr(cb.learn, name):
            raise RuntimeError(f"`{cb}` works with `{cls}`, which this Learner is without; add it")


class ShowGraphCallback(Callback):
    """Draws the losses so far under the live table of a notebook

    Raises: RuntimeError at the start of a fit without Recorder or ProgressCallback.
    Order: after ProgressCallback, in whose display it draws."""
    order = 65
    run_in = {'fit'}
    unique = True

    def before_fit(self):
        _require(self, recorder='Recorder', progress='ProgressCallback')
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


class CSVLogger(Callback):
    """Writes each epoch's row to a CSV file, from the first row on; each is in the file as soon as the epoch is over

    What one CSVLogger writes in several fits is one file. A row that cannot be written is a warning.
    Raises: RuntimeError at the start of a fit without Recorder; ValueError if a file to be added to has other columns.
    Order: after the Recorder, whose row it writes."""
    order = 60
    run_in = {'fit'}
    state = ('begun',)  # a resumed fit adds to the file that the interrupted one began

    def __init__(self,
        fname: str|Path = 'history.csv',  # relative to the Learner's path
        append: bool = False,             # add to a file that is already there, rather than replace it
    ): self.fname, self.append, self.begun, self.header, self.log_path = fname, append, False, [], Path(fname)

    def before_fit(self):
        _require(self, recorder='Recorder')
        self.header = []

    def cleanup_epoch(self):  # so that the row is written although a callback ends the fit in its `after_epoch`
        recorder = getattr(self.learn, 'recorder', None)
        if recorder is None or (row := recorder.log) is None: return
        row = {c: '' if v != v else v for c, v in zip(recorder.metric_names, row, strict=True)}
        self.log_path = Path(self.path)/self.fname
        try:
            if not self.header: self._begin([*row])
            if new := [c for c in row if c not in self.header]: self._widen(new)
            with self._file('a') as f: csv.DictWriter(f, self.header).writerow(row)
        except OSError as e: warn(f"CSVLogger: the row of epoch {self.epoch} is not in `{self.log_path}`: {e}")

    def read_log(self) -> Any:  # a pandas DataFrame, one row an epoch
        "What the file holds now"
        path = self.log_path if self.learn is None else Path(self.path)/self.fname
        return optional('pandas', 'CSVLogger.read_log').read_csv(path)

    def _file(self, mode): return self.log_path.open(mode, newline='', encoding='utf-8')

    def _widen(self, new):  # columns that a metric has only now: the rows before have nothing in them
        with self._file('r') as f: rows = list(csv.DictReader(f))
        self.header = [*self.header, *new]
        with self._file('w') as f:
            writer = csv.DictWriter(f, self.header)
            writer.writeheader()
            writer.writerows(rows)

    def _begin(self, columns):
        header = []
        if (self.append or self.begun) and self.log_path.exists():
            with self._file('r') as f: header = next(csv.reader(f), [])
            if header and not self.log_path.read_bytes().endswith(b'\n'):  # cut short, or edited by hand
                with self._file('a') as f: f.write('\r\n')
        if not header:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            with self._file('w') as f: csv.writer(f).writerow(columns)
        elif set(header) != set(columns):
            raise ValueError(f"CSVLogger: `{self.log_path}` has the columns {', '.join(header)}, but this fit has "
                             f"{', '.join(columns)}; give another `fname`, or a new CSVLogger with `append=False`")
        self.header, self.begun = header or columns, True
