"""Trackers: callbacks that watch a column of the table; saving the best model, and stopping early, also for a NaN.

Whether more or less is better is known of losses, and of metrics that declare it; else `comp` has to say it."""
import math
from pathlib import Path
from typing import Any

import numpy as np
from torch.nn.utils import get_total_norm

from ..callback import Callback
from ..display import say
from ..events import CancelFitException
from ..utils import check_number, warn
from ..weights import model_path

__all__ = ['TrackerCallback', 'SaveModelCallback', 'EarlyStoppingCallback', 'TerminateOnNaNCallback']

is_max: dict[Any, bool] = {'min': False, np.less: False, 'max': True, np.greater: True}


class TrackerCallback(Callback):
    """Watches a column of the table: after each epoch, `new_best` and `best` say what has come of it

    Only finite numbers can be best. An epoch in which the column's phase had no batch says nothing. A column that is
    one of several of a metric's, or a part of the loss, is known with the first row only: it needs `comp`.
    Raises: ValueError or TypeError if a parameter means nothing; at the start of a fit, ValueError if there is no such
    column or nothing says what is better, RuntimeError if there is no Recorder.
    Order: after the Recorder, whose row it reads."""
    order = 60
    run_in = {'fit'}
    state = ('best', 'new_best')
    best: float|None = None  # None until there is one
    new_best = False         # was it reached in the last epoch?
    _max = False             # is more better?
    _looked = False          # has it been looked at this epoch's row?

    def __init__(self,
        monitor: str = 'valid_loss',  # column of a loss or a metric
        comp: Any = None,             # what is better: 'min' (or np.less), 'max' (np.greater); None: as the metric says
        min_delta: float = 0.,        # better by no more than this is not better
        reset_on_fit: bool = True,    # forget `best` when a fit starts
    ):
        if comp is not None and comp not in [*is_max]: raise ValueError(
            f"{self}: comp={comp!r}; give 'min' or 'max' (np.less or np.greater), or None to ask the metric")
        check_number(f'{self}: `min_delta`', min_delta, 0)
        if not isinstance(monitor, str): raise TypeError(
            f"{self}: monitor={monitor!r}; give the name of its column, as "
            f"{getattr(monitor, '__name__', 'valid_loss')!r}")
        self.monitor, self.comp, self.min_delta, self.reset_on_fit = monitor, comp, min_delta, reset_on_fit

    def before_fit(self):
        self._looked = self.new_best = False
        if self.reset_on_fit: self.best = None
        if not hasattr(self.learn, 'recorder'): raise RuntimeError(
            f"`{self}` works with `Recorder`, which this Learner is without; add it")
        columns = [*self.recorder.columns.values()]  # of each phase: its loss, then its metrics
        if not any(self.monitor in names for names in columns) and not self._may_come(columns): raise ValueError(
            self._no_column(name for names in columns for name in names))
        self._max = self._direction(columns)

    def _may_come(self, columns):  # with the first row, as a member of a dict that a metric or the loss returns
        return self.comp is not None and any(
            names[1:] or self.monitor.startswith(names[0].removesuffix('loss')) for names in columns)

    def _no_column(self, names):
        return (f"{self}: there is no column `{self.monitor}` to monitor, only {', '.join(names)}" + (
            "; one that only the first row will have needs `comp`" if self.comp is None else ''))

    def _direction(self, columns):
        if self.comp is not None: return is_max[self.comp]
        if any(self.monitor == names[0] for names in columns): return False
        better = [m.greater_is_better for names in columns if len(names) == len(self.metrics)+1
                  for name, m in zip(names[1:], self.metrics) if name == self.monitor]
        if not better or better[0] is None: raise ValueError(
            f"{self}: nothing says whether high or low values of `{self.monitor}` are better: give comp='max' or "
            "comp='min', or set `greater_is_better` of the metric (of its function)")
        return better[0]

    @property
    def number(self) -> int:
        "Of the row: its step, if ValidateEvery has made it, else its epoch, counted from 0"
        return self._steps().get('step', self.epoch)

    @property
    def place(self) -> str:
        "Where the row is, for messages"
        return f'step {self.number}' if self._steps() else f'epoch {self.epoch+1} of {self.n_epoch}'

    def _steps(self):  # of the row, if ValidateEvery has made it
        row = getattr(getattr(self.learn, 'recorder', None), 'row', {})
        return {k: row[k] for k in ('step',) if k in row}

    def after_epoch(self):
        self._looked = True
        self._look()

    def after_row(self): self.after_epoch()
    def cleanup_row(self): self.cleanup_epoch()

    def cleanup_epoch(self):  # so that the row counts although a callback ends the fit in its `after_epoch`
        looked, self._looked = self._looked, False
        if looked: return
        self.new_best = False
        if self._has_row(): self._look()

    def _has_row(self):
        recorder = getattr(self.learn, 'recorder', None)
        return recorder is not None and recorder.log is not None

    def _look(self):
        value = self._value()
        self.new_best = value is not None and math.isfinite(value) and self._is_better(value)
        self.looked(value)
        if self.new_best: self.best = value

    def _value(self):
        if not self._has_row(): return None  # cancelled before it gave anything
        recorder = self.recorder
        rows, value = recorder.values, recorder.row.get(self.monitor)
        if not any(self.monitor in row.names for row in rows) and not any(map(math.isnan, rows[-1])):
            raise ValueError(self._no_column(rows[-1].names))  # no phase was cancelled that could have given it
        return None if value is None or math.isnan(value) and not self._n_batches() else value

    def _n_batches(self):  # that the column's phase had in this epoch; its values are NaN if there were none
        recorder = self.recorder
        phase = next(phase for (phase, _), names in recorder.columns.items() if self.monitor in names)
        if phase == 'valid' and 'step' in recorder.row: return 1  # by ValidateEvery
        return len(recorder.valid.marks) if phase == 'valid' else len(recorder.train.marks)-(recorder.start or 0)

    def _is_better(self, value):
        if self.best is None: return True
        return value-self.min_delta > self.best if self._max else value+self.min_delta < self.best

    def looked(self,
        value: float|None,  # of this epoch, also NaN; None if it has none
    ) -> None:
        "What a subclass does once an epoch, when `new_best` is known and `best` is still the one before"


class SaveModelCallback(TrackerCallback):
    """Saves the model at each new best, and loads the best one when the fit is over or was cancelled

    A line says so if that is not the last epoch's. Nothing is loaded after an error, an interrupt or a stop, so that
    training can go on, and no file but what this callback wrote. If a file cannot be written or read, that is a
    warning; what was not saved is not the best model.
    With `n_best` those of the `n_best` best epochs are kept, as `fname_epoch`, and no others: `kept` has their values
    and names, the best first.
    With `every_epoch` or `at_end` nothing is watched, and nothing loaded.
    Raises: ValueError if a parameter means nothing, or another such callback writes the same file.
    Order: after plain trackers, before what stops the fit."""
    order = TrackerCallback.order + 1
    state = (*TrackerCallback.state, 'has_saved', 'last_saved_path', 'kept', 'best_at')
    not_hashed = ('last_saved_path',)  # the folder may be another
    has_saved = False                  # is the best model in the file?
    best_at: Any = None                # `place` of the row with which it was saved; None until there is one
    begun = False                      # has this fit reached it? One that was cancelled before has saved nothing
    last_saved_path: Path|None = None  # what was written last

    def __init__(self,
        monitor: str = 'valid_loss',    # column of a loss or a metric
        comp: Any = None,               # what is better: 'min' (or np.less), 'max' (np.greater); None: the metric says
        min_delta: float = 0.,          # better by no more than this is not better
        fname: str = 'model',           # as `learn.save` takes it
        every_epoch: bool|int = False,  # True: save each epoch as `fname_epoch`; n: those that n divides, from 0 on
        at_end: bool = False,           # save when the fit is over or was cancelled
        with_opt: bool = False,         # also save, and load, the optimizer's state
        reset_on_fit: bool = True,      # forget `best`, and which files are kept, when a fit starts
        n_best: int|None = None,        # keep so many; None: the best one, as `fname`
    ):
        super().__init__(monitor, comp, min_delta, reset_on_fit)
        if not isinstance(every_epoch, bool):
            check_number(f'{self}: `every_epoch`', every_epoch, 0, whole=True, of='epochs')
        if every_epoch and at_end: raise ValueError(f"{self}: give `every_epoch` or `at_end`, or two callbacks")
        if n_best is not None: check_number(f'{self}: `n_best`', n_best, 1, whole=True, of='files to keep')
        if n_best and (every_epoch or at_end): raise ValueError(
            f"{self}: `n_best` keeps the best, and `every_epoch` and `at_end` any: give two callbacks")
        self.fname, self.every_epoch, self.at_end, self.with_opt = fname, every_epoch, at_end, with_opt
        self.n_best, self.kept = n_best, []  # values and names

    def before_fit(self):
        same = [cb for cb in self.learn.cbs if isinstance(cb, SaveModelCallback) and cb.fname == self.fname
                and bool(cb.every_epoch or cb.n_best) == bool(self.every_epoch or self.n_best)]
        if len(same) > 1: raise ValueError(f"{len(same)} of {self} write to `{self.fname}`: give each its own `fname`")
        self.begun = True
        if self.reset_on_fit: self.has_saved, self.kept = False, []
        if not (self.every_epoch or self.at_end): super().before_fit()

    def _value(self): return None if self.every_epoch or self.at_end else super()._value()

    def looked(self, value):
        if self.every_epoch and self.epoch % self.every_epoch == 0: self._save(f'{self.fname}_{self.number}')
        if self.n_best: self.new_best = self._rank(value) and self.new_best
        elif self.new_best: self.new_best = self._save(self.fname)
        self.has_saved = self.has_saved or self.new_best
        if self.new_best: self.best_at = self.place

    def _rank(self, value):  # is it saved, as one of the best?
        if value is None or not math.isfinite(value): return False
        place = sum(v >= value if self._max else v <= value for v, _ in self.kept)
        names, taken = [f'{self.fname}_{self.number}'], [name for _, name in self.kept]
        names += [f'{names[0]}_{i}' for i in range(2, len(taken)+2)]  # those of an earlier fit may be kept too
        if place == self.n_best or not self._save(name := next(n for n in names if n not in taken)): return False
        kept = [*self.kept[:place], [value, name], *self.kept[place:]]
        self.kept, dropped = kept[:self.n_best], kept[self.n_best:]
        for _, name in dropped: self._remove(name)
        return True

    def _remove(self, name):
        try: model_path(self.learn, name, '.pth').unlink(missing_ok=True)
        except OSError as e: warn(
            f"{self}: `{name}` is no longer among the best {self.n_best}, and cannot be removed: {e}")

    def after_fit(self):
        if self.learn.paused or not self.begun: return  # a request has stopped it, and it can be gone on with
        if self.at_end: self._save(self.fname)
        elif self.has_saved: self._load()
        elif not self.every_epoch and self.recorder.values: warn(
            f"{self}: no model was saved, since `{self.monitor}` gave no new best or it failed, so none is loaded: the "
            "weights are those of the last epoch")

    def cleanup_fit(self): self.begun = False

    def _save(self, name):
        try: self.last_saved_path = self.learn.save(name, with_opt=self.with_opt)
        except OSError as e:
            warn(f"{self}: the model of epoch {self.epoch} was not saved as `{name}`: {type(e).__name__}: {e}")
            return False
        return True

    def _load(self):
        try: self.learn.load(self.kept[0][1] if self.n_best else self.fname, with_opt=self.with_opt)
        except OSError as e: warn(f"{self}: the best model cannot be loaded, so the weights are those of the last "
                                  f"epoch: {type(e).__name__}: {e}")
        else:
            if self.best_at and self.best_at != self.place: say(
                f"The weights are those after {self.best_at}, the best: `{self.monitor}` was {self.best:g}")


class EarlyStoppingCallback(TrackerCallback):
    """Ends the fit when there has been no new best for some epochs; `stopped_epoch` says in which one, `reason` why

    A value that is not finite is no new best. An epoch in which the column's phase had no batch is not counted.
    Raises: ValueError if a parameter means nothing.
    Order: after those that act on a new best."""
    order = TrackerCallback.order + 3
    state = (*TrackerCallback.state, 'wait', 'stopped_epoch', 'reason')
    wait = 0                        # epochs since the last new best
    stopped_epoch: int|None = None  # None if the last fit was not stopped by this callback
    reason = ''                     # '' if it was not
    stopped_at = ''                 # `place` of the row that did it
    _told = ''                      # what the last value says for itself

    def __init__(self,
        monitor: str = 'valid_loss',  # column of a loss or a metric
        comp: Any = None,             # what is better: 'min' (or np.less), 'max' (np.greater); None: as the metric says
        min_delta: float = 0.,        # better by no more than this is not better
        patience: int = 1,            # so many epochs in a row without a new best end the fit
        reset_on_fit: bool = True,    # forget `best` when a fit starts; `wait` begins anew in any case
        stopping_threshold: float|None = None,    # a value as good as this, or better, ends it too
        divergence_threshold: float|None = None,  # so does one that is worse than this
        check_finite: bool = False,   # and one that is infinite or NaN
    ):
        super().__init__(monitor, comp, min_delta, reset_on_fit)
        check_number(f'{self}: `patience`', patience, 1, whole=True, of='epochs')
        for name, limit in dict(stopping_threshold=stopping_threshold,
                                divergence_threshold=divergence_threshold).items():
            if limit is not None: check_number(f'{self}: `{name}`', limit)
        self.patience, self.check_finite = patience, check_finite
        self.stopping_threshold, self.divergence_threshold = stopping_threshold, divergence_threshold

    def before_fit(self):
        super().before_fit()
        self.wait, self.stopped_epoch, self.reason, self._told = 0, None, '', ''

    def looked(self, value):
        self._told = '' if value is None else self._tells(value)
        if value is not None: self.wait = 0 if self.new_best else self.wait+1

    def _tells(self, value):
        goal, worst, sign = self.stopping_threshold, self.divergence_threshold, 1 if self._max else -1
        told = f"`{self.monitor}` is {value:g}"
        if self.check_finite and not math.isfinite(value): return told
        if goal is not None and sign*value >= sign*goal: return f"{told}, and {goal:g} was wanted"
        return f"{told}, worse than {worst:g}" if worst is not None and sign*value < sign*worst else ''

    def after_epoch(self):
        super().after_epoch()
        best = '' if self.best is None else f', the best is {self.best:g}'
        stop = self.learn.agree(bool(self._told) or self.wait >= self.patience)
        self.stopped_epoch = self.epoch if stop else None
        unit = 'row' if self._steps() else 'epoch'
        self.stopped_at = self.place
        self.reason = '' if not stop else self._told or (
            f"`{self.monitor}` gave no new best for {self.wait} {unit}{'s'*(self.wait > 1)}{best}")
        if stop: raise CancelFitException

    def after_fit(self):  # under the last row, which is shown when its epoch is over
        if self.stopped_epoch is not None: say(
            f"Stopped after {self.stopped_at}: {self.reason}")


class TerminateOnNaNCallback(Callback):
    """Ends the fit at the first batch whose loss or gradients are infinite or NaN, before they get into the weights

    `reason` says where and what. The Recorder has a row of the epoch up to there, without that batch. This has to wait
    for the device once a batch, since no step may be made before it is known. Steps that mixed precision leaves out
    because its scale was too large are not looked at, but their losses are.
    Order: after all that changes gradients: mixed precision (10), which unscales, and clipping (11)."""
    name = 'terminate_on_nan'  # pyright: ignore[reportAssignmentType]  # where words end cannot be seen in `OnNaN`
    order = 12
    run_in = {'fit'}
    run_valid = False
    unique = True
    reason = ''     # '' if the last fit was not ended by this callback
    _seen = False   # has this batch been looked at?

    def before_fit(self): self.reason = ''
    def before_batch(self): self._seen = False

    def before_step(self):
        self._seen = True
        self._look([(p, p.grad) for p in self.opt.all_params() if p.grad is not None])

    def after_batch(self):  # one without a step, as while gradients are accumulated
        if not self._seen: self._look([])

    def _look(self, grads):
        grads = [(p, g.coalesce().values() if g.is_sparse else g) for p, g in grads]
        values = [v.detach() for v in (self.loss, *(g for _, g in grads)) if v is not None and v.numel()]
        # the largest magnitude, which is never beyond what the type can hold, as a sum of squares may be
        if not self.learn.agree(bool(values) and not math.isfinite(get_total_norm(values, math.inf))): return
        bad = [self.opt.names[p][0] for p, g in grads if not g.isfinite().all()]
        what = "another process found a bad loss or gradient"
        if bad: what = f"the gradient of `{'`, `'.join(bad[:3])}`{' …'*(len(bad) > 3)} is not finite"
        if self.loss is not None and not self.loss.isfinite(): what = f"the loss is {self.loss:g}"
        self.reason = (f"epoch {self.epoch+1} of {self.n_epoch}, batch {self.iter+1}"
                       f"{f' of {self.n_iter}' if self.n_iter else ''}: {what}")
        raise CancelFitException

    def cleanup_train(self):  # what ends in the midst of an epoch has no row otherwise
        recorder = getattr(self.learn, 'recorder', None)
        if self.reason and recorder is not None and recorder.run: recorder.after_epoch()

    def after_fit(self):
        if self.reason: say(f"Stopped in {self.reason}; the weights are those before its step")
