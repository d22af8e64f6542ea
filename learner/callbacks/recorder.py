"""Recorder: losses, learning rates and metrics of a fit, a row an epoch; readings.py says how they are asked for.

Losses stay on the device until somebody reads them or the phase ends, so recording never waits for a GPU."""
import math
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..callback import Callback
from ..hypers import stack_readings
from ..plot import plot_hypers, plot_loss, plot_lr_find
from ..scalars import Scalars
from ..tensors import n_items
from ..utils import replacing, warn
from .series import Losses, contents, gathered, put_back

__all__ = ['Recorder', 'Row']

# names of columns that no metric and no part of a loss may take
own_columns = frozenset({'fit', 'epoch', 'train_loss', 'smooth_loss', 'valid_loss', 'time', 'lr', 'mom', 'wd'})
own_hypers = 'lr', 'mom', 'wd'


def _hyper_columns(values):  # of the last group, and where there are several also of each
    kept = {name: values[name] for name in own_hypers if name in values}
    each = {f'{name}_{i}': v for name, vs in kept.items() for i, v in enumerate(vs) if len(vs) > 1}
    return {name: vs[-1] for name, vs in kept.items()} | each


class Row(tuple):
    "Values that are found by position, as in a tuple, or by name: `row['valid_loss']`"
    names: tuple[str, ...]

    def __new__(cls,
        names: Iterable[str],       # one name a value
        values: Iterable[float],    # NaN for what was not computed
    ):
        row = super().__new__(cls, values)
        row.names = tuple(names)
        return row

    def __getnewargs__(self): return self.names, tuple(self)

    def __getitem__(self, k: Any) -> Any:
        if not isinstance(k, str): return super().__getitem__(k)
        if k not in self.names: raise KeyError(f"no column `{k}`; there are {', '.join(self.names)}")
        return super().__getitem__(self.names.index(k))

    def __repr__(self) -> str: return f"Row({', '.join(f'{n}={v:.6g}' for n, v in zip(self.names, self))})"


class Recorder(Callback):
    """Records losses, learning rates, metrics and time

    A row is there as soon as the last phase of its epoch is over, so that each callback's `after_epoch` can read it.
    `state_dict` holds all of it but `lr_curve`, also in the midst of an epoch; what an evaluation puts back is `state`.
    """
    name = 'recorder'  # pyright: ignore[reportAssignmentType]  # of subclasses too
    order = 50
    unique = True
    run_in = frozenset({'fit', 'validate', 'lr_find'})
    state = ('valid', 'parts', 'active', 'begun')
    not_hashed = ('times', 'notes')  # what people note may be times too
    start_time = math.nan  # of the epoch
    reading: Any = None    # what the last step was made with
    begun = False          # has the present phase begun for this callback? Another may cancel it before
    past: Any = None       # the series of the fit before, which may be what is gone on with
    lr_curve: dict|None = None  # what the last `lr_find` found: `lrs`, `losses`, `suggestions`; no fit changes it

    def __init__(self,
        add_time: bool = True,        # record how long each epoch takes, in seconds
        train_metrics: bool = False,  # also compute the metrics on the training batches, while training
        valid_metrics: bool = True,   # compute them on the validation batches
        beta: float = .98,            # weight of the past in `smooth_loss`, 0 to 1; .98 halves it in 34 batches
    ):
        self.add_time, self.train_metrics, self.valid_metrics, self.beta = add_time, train_metrics, valid_metrics, beta
        self.history: list[dict] = []   # a dict a row, over all fits
        self.n_fit = -1
        self._reset()

    def _reset(self):
        self.train, self.valid, self.parts, self.active = Losses(), Losses(), {}, []
        self.iters: list[int] = []      # batches recorded up to the end of each epoch
        self.values: list[Row] = []     # a row an epoch: losses and metrics
        self.log: list|None = None      # this epoch's row as shown, aligned with `metric_names`, once it is there
        self.columns: dict = {}         # (phase, validation set) -> names of its columns
        self.notes: dict[str, Scalars] = {}  # what `learn.note` was given, by name
        self.row: dict = {}             # what the present epoch has given so far
        self.start: int|None = None     # number of the first batch of this epoch's training, once it has begun
        self.empty: list = []           # `contents` of its metrics, as they were then
        self._smooth, self._losses, self._warned = 0., [], False

    @property
    def raw_losses(self) -> list[float]:
        "The training loss of each batch of the fit"
        return self.train.read()

    @property
    def lrs(self) -> list[float]:
        "The learning rate of the last parameter group at each batch of the fit"
        lrs, layout, k = [], ((), []), 0
        for _, _, _, reading in self.train.marks:
            if reading.layout is not layout:
                layout = names, mults = reading.layout
                k = (names.index('lr')+1)*(len(mults)//len(names))-1
            lrs.append(float(reading.raw[k])/layout[1][k])
        return lrs

    @property
    def hps(self) -> dict[str, np.ndarray]:  # `(n_batches, n_groups)` by name: `lr`, `mom`, `sqr_mom`, `eps`, `wd`
        "The hyper-parameters of all groups at each batch of the fit, as far as the optimizer has them"
        return stack_readings([mark[3] for mark in self.train.marks])

    @property
    def losses(self) -> list[float]:
        "The smoothed training loss after each batch of the fit: a debiased moving average that forgets as `beta` says"
        done = len(self._losses)
        for i, v in enumerate(self.raw_losses[done:], done+1):
            self._smooth = self.beta*self._smooth + (1-self.beta)*v
            self._losses.append(self._smooth/(1-self.beta**i))
            if not math.isfinite(v) and not self._warned and self.run_kind != 'lr_find': self._warn(i-1, v)
        return self._losses

    def _warn(self, i, loss):
        self._warned = True
        _, batch, epoch, _ = self.train.marks[i]
        warn(f"the training loss is {loss} in epoch {epoch}, batch {batch}: look at that batch, lower the learning "
             "rate, or clip the gradients")

    @property
    def metric_names(self) -> list[str]:
        "The columns of the table: `epoch`, losses and metrics, `time`"
        return ['epoch', *self._names(), *(['time'] if self.add_time else [])]

    def _names(self): return [n for names in self.columns.values() for n in names]

    def _results(self, phase, losses, start=0, values=True):  # what a phase gives, by column
        which = f'{self.valid_name}_' if self.valid_name else ''
        results = {f'{which}{phase}_loss': losses.mean(start)}
        others = {n for key, names in self.columns.items() if key != (phase, self.valid_name) for n in names}
        of_groups = {f'{n}_{i}' for n in own_hypers for i in range(len(self.opt.hypers) if self.opt else 0)}
        def add(name, value):
            names = (name, *(f'{name}_{i}' for i in range(2, 99)))
            taken = {*results, *others, *own_columns, *of_groups, *self.notes}
            results[next(n for n in names if n not in taken)] = float(value)
        for k, part in self.parts.items(): add(f'{which}{phase}_{k}', part.mean())
        which += f'{phase}_' if self.train_metrics else ''
        for m in self.active:
            try:
                value = m.value if values else math.nan
                columns = value if isinstance(value, dict) else {m.name: value}
                for k, v in columns.items(): add(f'{which}{k}', v)
            except Exception as e:
                e.add_note(f"raised by the value of metric `{m.name}`, a property that must give numbers")
                raise
        return results

    def before_fit(self):
        if self.run_kind == 'validate': return
        self.past = self.train, self._smooth, self._losses, self._warned
        self._reset()
        self.learn.final_record = None
        self.n_fit += 1
        self._expect('train', '', self.train_metrics)
        for name in self.dls.valid_sets: self._expect('valid', name, self.valid_metrics)
        self.active = []

    def _expect(self, phase, name, metrics):  # the columns of a phase, as far as they can be known before it has run
        self.active = self.metrics if metrics else []
        with replacing(self.learn, valid_name=name):
            self.columns[phase, name] = list(self._results(phase, Losses(), values=False))

    def before_epoch(self):
        self.start_time = time.perf_counter()
        self.row = {}

    def before_train(self):
        self.start = len(self.train.marks)
        self._start(self.train_metrics)
        self.empty = [contents(m) for m in self.active]

    def before_validate(self):
        self.valid = Losses()
        self._start(self.valid_metrics)

    def _start(self, metrics):
        self.parts, self.active, self.begun = {}, list(self.metrics) if metrics else [], True
        for m in self.active: m.reset()

    def before_step(self): self.reading = self.learn.opt.read()  # what the step is made with; later it may change

    def after_batch(self):
        learn = self.learn
        if learn.loss is not None:
            n = n_items(learn.xb, learn.yb)
            if learn.training:
                reading = learn.stepped and self.reading or learn.opt.read()
                self.reading = None  # switched on in the midst of the next batch, this callback has not seen its step
                self.train.add(learn.loss, n, learn.iter, learn.epoch, reading)
            else: self.valid.add(learn.loss, n)
            if learn.loss_parts:
                for k, v in learn.loss_parts.items(): self.parts.setdefault(k, Losses()).add(v, n)
        if learn.pred is not None:
            for m in self.active: m.accumulate(learn)

    def after_train(self):
        if not self.begun: self.before_train()  # it gives nothing, rather than what is left of another phase
        self._end('train', self._results('train', self.train, self.start or 0))

    def after_validate(self):
        if not self.begun: self.before_validate()
        results = self._results('valid', self.valid)
        if self.run_kind != 'validate': return self._end('valid', results)
        old = self.final_record or Row((), ())  # of the validation sets before this one
        self.learn.final_record = Row((*old.names, *results), (*old, *results.values()))

    def _end(self, phase, results):
        self.columns[phase, self.valid_name] = list(results)
        self.row.update(results)
        if any(names[0] not in self.row for names in self.columns.values()): return  # it was not the last phase
        for rows in (self.iters, self.values, self.history) if self.log is not None else (): rows.pop()  # this is whole
        self._add_row()

    def after_epoch(self):  # a phase was cancelled: what it did not give is NaN
        if self.log is not None or self.run_kind == 'validate': return
        if self.start is not None: self.row.setdefault('train_loss', self.train.mean(self.start))
        if self.row: self._add_row()

    def _add_row(self):
        seconds = time.perf_counter()-self.start_time
        trained = self.train.marks[self.start:] if self.start is not None else []
        values = (trained[-1][3] if trained else self.opt.read()).values  # those that the last batch was trained with
        smooth = self.losses[-1] if self.losses else math.nan
        row = Row(names := self._names(), [self.row.get(n, math.nan) for n in names])
        self.iters.append(len(self.train.marks))
        self.values.append(row)
        self.learn.final_record = row
        rest = {n: v for n, v in zip(names, row) if n != 'train_loss'}
        self.history.append({'fit': self.n_fit, 'epoch': self.epoch, 'train_loss': row['train_loss'],
                             'smooth_loss': smooth, **rest, 'time': seconds, **_hyper_columns(values)})
        self._show_row()
        if self.logger:
            if len(self.values) == 1: self.logger(self.metric_names)
            self.logger(self.log)

    def _show_row(self):  # the latest one
        last = self.history[-1]
        self.log = [last['epoch'], *self.values[-1], *([last['time']] if self.add_time else [])]

    def cleanup_epoch(self): self.row, self.log, self.start, self.start_time = {}, None, None, math.nan
    def cleanup_train(self):
        self.losses  # noqa: B018  # reads what is left, also after an error: a bad loss is told
        self.begun, self.past = False, None

    def cleanup_validate(self):
        self.valid.read()
        self.begun = False

    def cleanup_fit(self):  # metrics may hold predictions
        for m in self.metrics if self.run_kind != 'validate' else (): m.reset()

    def state_dict(self) -> dict[str, Any]:
        "Tensors and plain values; only `times`, and `notes` of times, differ between two equal fits"
        self.losses  # noqa: B018  # of a bad loss is told now: it is known to have been when this is loaded
        mid = self.start is not None and 'train_loss' not in self.row  # in the midst of training
        return dict(
            n_fit=self.n_fit, iters=list(self.iters), start=self.start, row=dict(self.row),
            has_row=self.log is not None, columns=[(*key, list(names)) for key, names in self.columns.items()],
            values=[dict(zip(row.names, row)) for row in self.values],
            history=[{**h, 'time': None} for h in self.history],  # where it stands among the columns
            notes={k: values.pack() for k, values in self.notes.items()}, train=self.train.pack(),
            parts={k: part.pack() for k, part in self.parts.items()} if mid else {},
            metrics={m.name: gathered(m, e) for m, e in zip(self.active, self.empty)} if mid else None,
            times=dict(history=[h['time'] for h in self.history], epoch=time.perf_counter()-self.start_time))

    def load_state_dict(self, state: dict[str, Any]) -> None:  # what `state_dict` gave
        "Go on from there; within a fit, after `before_train` if that was saved in the midst of training"
        self.n_fit, self.iters, self.row = state['n_fit'], list(state['iters']), dict(state['row'])
        self.columns = {(phase, name): list(names) for phase, name, names in state['columns']}
        self.values = [Row(row, row.values()) for row in state['values']]
        self.history = [{**h, 'time': t} for h, t in zip(state['history'], state['times']['history'], strict=True)]
        self.notes = {k: Scalars.unpack(values) for k, values in state.get('notes', {}).items()}  # old files
        self._load_series(state['train'])
        self.parts = {k: Losses.unpack(part) for k, part in state['parts'].items()}
        self.log = None
        if state['has_row']: self._show_row()
        if state['start'] is not None: self.start = state['start']
        elif self.start is not None: self.start = len(self.train.marks)  # this epoch's training begins now
        passed = state['times']['epoch']
        if not math.isnan(passed): self.start_time = time.perf_counter()-passed
        if self.learn is None: return
        self.learn.final_record = self.values[-1] if self.values else None
        if state['metrics'] is None or self.learn.run_kind != 'fit': return
        for m in self.active: put_back(m, state['metrics'].get(m.name), self.learn.device)

    def _load_series(self, state):  # in a fit that goes on in pieces without a look at all that was before
        past, self.past = self.past, None
        if past and past[0].is_packed_as(state): self.train, self._smooth, self._losses, self._warned = past
        else:
            self.train, self._smooth, self._losses = Losses.unpack(state), 0., []
            self._warned = not all(map(math.isfinite, self.train.values))

    def plot_loss(self,
        skip_start: int = 5,       # leave out the first batches, where the loss falls steeply
        with_valid: bool = True,   # also draw the validation loss, at the batch after which it was computed
        log: bool = False,         # logarithmic axis of losses
        ax: Any = None,            # matplotlib axes to draw on; new ones if None
    ) -> Any:                      # the axes
        "Draw the smoothed training loss of the last fit, batch by batch, and the validation losses"
        names = [cols[0] for (phase, _), cols in self.columns.items() if phase == 'valid']
        valid = {n: [row[n] if n in row.names else math.nan for row in self.values] for n in names if with_valid}
        return plot_loss(self.losses, self.iters, valid, skip_start=skip_start, log=log, ax=ax)

    def plot_sched(self,
        names: str|Iterable[str]|None = None,  # hyper-parameters; None: `lr`, `mom`, and whatever else has changed
    ) -> Any:                                  # the axes, one for each
        """Draw the hyper-parameters of all groups as the last fit had them, batch by batch

        Raises: ValueError if there is no fit, or the optimizer had no such hyper-parameter."""
        if not (hps := self.hps): raise ValueError("plot_sched: no batch has been trained yet; `learn.preview_sched` "
                                                   "draws what a fit would do")
        return plot_hypers(hps, [names] if isinstance(names, str) else names)

    def plot_lr_find(self,
        ax: Any = None,  # matplotlib axes to draw on; new ones if None
    ) -> Any:            # the axes
        """Draw the losses of the last `lr_find` against the learning rate of each group, with what it suggested

        Raises: ValueError if there was none."""
        if self.lr_curve is None: raise ValueError("plot_lr_find: `learn.lr_find()` has not been called yet")
        return plot_lr_find(**self.lr_curve, ax=ax)
