"""Trackers: callbacks that watch a column of the table; saving the best model, and stopping early.

Whether more or less is better is known of losses, and of metrics that declare it; else `comp` has to say it."""
import math
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np

from ..callback import Callback
from ..display import say
from ..events import CancelFitException
from ..utils import warn

__all__ = ['TrackerCallback', 'SaveModelCallback', 'EarlyStoppingCallback']

is_max: dict[Any, bool] = {'min': False, np.less: False, 'max': True, np.greater: True}


class TrackerCallback(Callback):
    """Watches a column of the table: after each epoch, `new_best` and `best` say what has come of it

    Only finite numbers can be best. An epoch in which the column's phase had no batch says nothing. A column that is
    one of several of a metric's, or a part of the loss, is known with the first row only: it needs `comp`.
    Raises: ValueError if a parameter means nothing; at the start of a fit, ValueError if there is no such column or
    nothing says what is better, RuntimeError if there is no Recorder.
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
        if not 0 <= min_delta < math.inf: raise ValueError(f"{self}: min_delta={min_delta!r}; give 0 or more")
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
        return (f"{self}: there is no column `{self.monitor}` to monitor, only {', '.join(names)}; one that only the "
                "first row will have needs `comp`")

    def _direction(self, columns):
        if self.comp is not None: return is_max[self.comp]
        if any(self.monitor == names[0] for names in columns): return False
        better = [m.greater_is_better for names in columns if len(names) == len(self.metrics)+1
                  for name, m in zip(names[1:], self.metrics) if name == self.monitor]
        if not better or better[0] is None: raise ValueError(
            f"{self}: nothing says whether high or low values of `{self.monitor}` are better: give comp='max' or "
            "comp='min', or set `greater_is_better` of the metric (of its function)")
        return better[0]

    def after_epoch(self):
        self._looked = True
        self._look()

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

    Nothing is loaded after an error, an interrupt or a stop, so that training can go on, and no file but what this
    callback wrote. If a file cannot be written or read, that is a warning; what was not saved is not the best model.
    With `every_epoch` or `at_end` nothing is watched, and nothing loaded.
    Raises: ValueError if a parameter means nothing, or another such callback writes the same file.
    Order: after plain trackers, before what stops the fit."""
    order = TrackerCallback.order + 1
    state = (*TrackerCallback.state, 'has_saved', 'last_saved_path')
    not_hashed = ('last_saved_path',)  # the folder may be another
    has_saved = False                  # is the best model in the file?
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
        reset_on_fit: bool = True,      # forget `best` when a fit starts
    ):
        super().__init__(monitor, comp, min_delta, reset_on_fit)
        if not isinstance(every_epoch, Integral) or every_epoch < 0: raise ValueError(
            f"{self}: every_epoch={every_epoch!r}; give True, or a whole number of epochs")
        if every_epoch and at_end: raise ValueError(f"{self}: give `every_epoch` or `at_end`, or two callbacks")
        self.fname, self.every_epoch, self.at_end, self.with_opt = fname, every_epoch, at_end, with_opt

    def before_fit(self):
        same = [cb for cb in self.learn.cbs if isinstance(cb, SaveModelCallback) and cb.fname == self.fname
                and bool(cb.every_epoch) == bool(self.every_epoch)]
        if len(same) > 1: raise ValueError(f"{len(same)} of {self} write to `{self.fname}`: give each its own `fname`")
        self.begun = True
        if self.reset_on_fit: self.has_saved = False
        if not (self.every_epoch or self.at_end): super().before_fit()

    def _value(self): return None if self.every_epoch or self.at_end else super()._value()

    def looked(self, value):
        if self.every_epoch and self.epoch % self.every_epoch == 0: self._save(f'{self.fname}_{self.epoch}')
        if self.new_best:
            self.new_best = self._save(self.fname)
            self.has_saved = self.has_saved or self.new_best

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
        try: self.learn.load(self.fname, with_opt=self.with_opt)
        except OSError as e: warn(f"{self}: the best model cannot be loaded, so the weights are those of the last "
                                  f"epoch: {type(e).__name__}: {e}")


class EarlyStoppingCallback(TrackerCallback):
    """Ends the fit when there has been no new best for some epochs; `stopped_epoch` then says in which one

    A value that is not finite is no new best. An epoch in which the column's phase had no batch is not counted.
    Raises: ValueError if a parameter means nothing.
    Order: after those that act on a new best."""
    order = TrackerCallback.order + 3
    state = (*TrackerCallback.state, 'wait', 'stopped_epoch')
    wait = 0                        # epochs since the last new best
    stopped_epoch: int|None = None  # None if the last fit was not stopped by this callback

    def __init__(self,
        monitor: str = 'valid_loss',  # column of a loss or a metric
        comp: Any = None,             # what is better: 'min' (or np.less), 'max' (np.greater); None: as the metric says
        min_delta: float = 0.,        # better by no more than this is not better
        patience: int = 1,            # so many epochs in a row without a new best end the fit
        reset_on_fit: bool = True,    # forget `best` when a fit starts; `wait` begins anew in any case
    ):
        super().__init__(monitor, comp, min_delta, reset_on_fit)
        if not isinstance(patience, Integral) or patience < 1: raise ValueError(
            f"{self}: patience={patience!r}; give a whole number of epochs, 1 or more")
        self.patience = patience

    def before_fit(self):
        super().before_fit()
        self.wait, self.stopped_epoch = 0, None

    def looked(self, value):
        if value is not None: self.wait = 0 if self.new_best else self.wait+1

    def after_epoch(self):
        super().after_epoch()
        stop = self.learn.agree(self.wait >= self.patience)
        self.stopped_epoch = self.epoch if stop else None
        if stop: raise CancelFitException

    def after_fit(self):  # under the last row, which is shown when its epoch is over
        best = '' if self.best is None else f', the best is {self.best:g}'
        if self.stopped_epoch is not None: say(
            f"Stopped after epoch {self.stopped_epoch+1} of {self.n_epoch}: `{self.monitor}` gave no new best for "
            f"{self.wait} epoch{'s'*(self.wait > 1)}{best}")
