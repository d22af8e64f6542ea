"""ValidateEvery: validation at intervals, instead of at the ends of epochs, each with a row in the table.

It is done at a `save_point`, where nothing is under way: so it can be given up for a Ctrl-C, and is done again when the
fit goes on."""
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from time import perf_counter
from typing import Any

from ..callback import Callback
from ..events import CancelFitException, CancelValidException, declare_event
from ..every import Every
from ..loader import Loader
from ..state import snapshot
from ..utils import check_number, replacing
from .control import ShortEpochCallback
from .series import contents

__all__ = ['WithoutValidation', 'ValidateEvery']

declare_event('after_row')    # a row of ValidateEvery's is in the table: what `after_epoch` is to the row of an epoch
declare_event('cleanup_row')  # follows, whatever happened
ends = frozenset({'stop', 'interrupt', 'exit'})  # requests that end a fit


class WithoutValidation(Callback):
    "Leaves out the validation at the end of each epoch; `learn.validate()` works as ever"
    run_in = {'fit'}
    run_valid = False
    skips = False    # is it being left out?
    own: Any = None  # what another has put in place of the Learner's method

    def before_epoch(self):
        learn, self.own, self.skips = self.learn, vars(self.learn).get('_do_epoch_validate'), True
        def validate(*args):
            if not self.skips or learn.run_kind != 'fit': type(learn)._do_epoch_validate(learn, *args)
        vars(learn)['_do_epoch_validate'] = validate

    def cleanup_epoch(self):
        if not self.skips: return
        vars(self.learn).pop('_do_epoch_validate', None)
        if self.own: vars(self.learn)['_do_epoch_validate'] = self.own
        self.own, self.skips = None, False


class EvalPass(ShortEpochCallback):
    "One evaluation: so many batches of each set; it is given up when the fit is asked to end"
    run_in = {'validate'}
    plans_fit = False
    given_up = False

    def __init__(self,
        n_batches: dict[str, int],  # of the sets that are not evaluated as a whole
    ): self.n_batches = n_batches

    def before_fit(self): "It is for evaluations only"

    def before_validate(self):
        self.n = self.n_batches.get(self.learn.valid_name)
        if self.n: self._shorten()

    def before_batch(self):
        if not any(k in ends for k, _ in self.learn._stop._asked): return
        self.given_up = True
        raise CancelValidException


class ValidateEvery(WithoutValidation):
    """Validates while training, at intervals, before the first step and after the last; not at the end of each epoch

    Each time there is a row in the table, with a column `step`: the training loss since the row before, and what the
    validation sets give; epochs have none. Trackers, savers and whoever has a method `after_row` act on it. Metrics on
    training batches (`train_metrics`) and parts of the loss are those since the row before or the epoch's beginning.
    Nothing else changes: modes, random streams and the training loader are as before. A stop during a validation gives
    it up, and it is begun again when the fit goes on.
    Raises: ValueError or TypeError for what is no interval or no set; at the start of a fit, RuntimeError without
    Recorder.
    Order: after the Recorder, to whose table it adds; before what reads that."""
    order = 55
    unique = True
    state = ('begun', 'due', 'seen')
    begun = False  # has it been asked whether to validate before the first step?
    due = False    # is a validation to come at the next save point?
    seen = -1      # the step after which the last one was; -1: none in this fit
    started = 0.   # when the present row began

    def __init__(self,
        every: Any,                # '500it' (optimizer steps), '1ep', '10min', or an Every, which has its own `last`
        first: bool = True,        # also before the first step
        last: bool = True,         # also after the last
        schedule: Any = None,      # other intervals later: `[(6, 2), (9, 1)]`: at 6 and each 2 more, at 9 and each 1
        dls: Mapping|None = None,  # sets by name, loaders or `(loader, n_batches)`; None: the Learner's, as a whole
    ):
        self.everys, self.first = _intervals(every, schedule, last), first
        if dls is not None and not isinstance(dls, Mapping): raise TypeError(
            f"ValidateEvery: `dls` is a `{type(dls).__name__}`; give loaders by name: {{'test': dl}}")
        self.sets, self.n_batches = {}, {}
        for name, o in (dls or {}).items():
            dl, n = o if isinstance(o, (tuple, list)) and len(o) == 2 and isinstance(o[1], int) else (o, None)
            self.sets[name] = dl = dl if isinstance(dl, Loader) else Loader(dl)
            if isinstance(dl.dl, Iterator): raise ValueError(
                f"ValidateEvery: `{name}` is a `{type(dl.dl).__name__}` that can be iterated once only: give a "
                "DataLoader or a list")
            if n is None: continue
            check_number(f'ValidateEvery: `{name}`', n, 1, dl.n_batches or math.inf, whole=True, of='batches')
            self.n_batches[name] = n

    def before_fit(self):
        if not hasattr(self.learn, 'recorder'): raise RuntimeError(
            "`ValidateEvery` works with `Recorder`, which this Learner is without; add it")
        if not self._sets(): raise ValueError(
            "ValidateEvery: there is no validation set; `dls={'test': dl}` gives one")
        self.begun, self.due, self.seen, self.started = False, False, -1, perf_counter()
        if not self.learn.going_on:  # else the time goes on, as in `learn.step`
            for e in self.everys: e.start()
        recorder = self.recorder
        train = {k: names for k, names in recorder.columns.items() if k[0] == 'train'}
        recorder.columns = {('step', ''): ['step'], **train}
        for name in self._sets(): recorder._expect('valid', name, recorder.valid_metrics)
        recorder.active = []

    def _sets(self): return self.sets or self.dls.valid_sets

    def before_train(self):
        recorder = self.recorder
        recorder.start = recorder.iters[-1] if recorder.iters else 0  # the row may have begun in an earlier epoch
        if self.first and not self.begun: self._ask()
        self.begun = True

    def _ask(self):
        self.due = True
        self.learn._stop.ask('due')  # for a save point before the next batch

    def after_batch(self):
        if sum(e.at_step(self.learn) for e in self.everys): self._ask()  # each is asked, since times begin anew

    def after_train(self): self.after_batch()  # gradients that were left over may have been stepped

    def save_point(self):
        learn, recorder = self.learn, self.recorder
        if learn.trained and sum(e.at_epoch(learn) for e in self.everys): self.due = True
        if self.due and self.seen != learn.n_step:
            if ends & learn.asked.keys(): return  # it is due when the fit goes on
            if not self._validate(): return learn._rest()
        self.due = False
        if learn.trained: recorder.row, recorder.start = {}, None  # so that the epoch has no row of its own

    def after_fit(self):  # a callback has ended the fit in the midst of an epoch
        is_new = self.begun and self.seen != self.learn.n_step
        if is_new and not self.learn.paused and any(e.last for e in self.everys):
            with suppress(CancelFitException): self._validate()  # it has ended already

    def load_state_dict(self, state: dict[str, Any]) -> None:  # what `state_dict` gave
        "Go on there"
        super().load_state_dict(state)
        if self.due and self.learn is not None and self.learn.run_kind == 'fit': self._ask()

    def _validate(self):  # False: given up
        learn, tests = self.learn, EvalPass(self.n_batches)
        learn._trained = snapshot(learn)  # if there is an error, it is what can be gone on with
        with replacing(learn.dls, valid_sets=self._sets()): found = learn.validate(cbs=tests)
        learn._trained = None
        if tests.given_up: return False
        self.due, self.seen = False, learn.n_step
        self._add_row(dict(zip(found.names, found)))
        return True

    def _add_row(self, found):
        learn, recorder = self.learn, self.recorder
        training = any(scope[0] == 'train' for scope in learn._scopes())
        if training:
            is_any = len(recorder.train.marks) > (recorder.start or 0)
            recorder.row.update(recorder._results('train', recorder.train, recorder.start or 0, values=is_any))
        elif 'train_loss' not in recorder.row: recorder.row['train_loss'] = recorder.train.mean(
            recorder.iters[-1] if recorder.iters else 0)
        recorder.row.update(found, step=learn.n_step)
        self._expect_more(found)
        recorder.start_time = self.started
        recorder._add_row()
        try: learn('after_row')
        finally:
            try: learn('cleanup_row')
            finally: self._begin_row(training)

    def _expect_more(self, found):  # columns that a metric has only now
        columns = self.recorder.columns
        known = {name for names in columns.values() for name in names}
        for name in (name for name in found if name not in known):
            which = next((s for s in self._sets() if s and name.startswith(f'{s}_')), [*self._sets()][0])
            columns['valid', which] = [*columns['valid', which], name]

    def _begin_row(self, training):
        recorder = self.recorder
        recorder.row, recorder.log, self.started = {}, None, perf_counter()
        recorder.start = len(recorder.train.marks) if training else None
        if not training: return
        recorder._start(recorder.train_metrics)
        recorder.empty = [contents(m) for m in recorder.active]


def _intervals(every, schedule, last):  # an Every for each
    if not schedule: return [Every(every, last=last)]
    whole = Every(every, last=last)
    number, unit = re.fullmatch(r'([\d.]+) ?(\w+)', whole.text.strip()).groups()  # pyright: ignore[reportOptionalMemberAccess]
    if isinstance(every, Every): raise TypeError(
        f"ValidateEvery: with `schedule` `every` is a text, such as {whole.text!r}, and no Every")
    scale, is_time = whole.n/float(number), whole.unit == 's'
    if not isinstance(schedule, (list, tuple)) or not all(isinstance(o, (list, tuple)) and len(o) == 2 and all(
            isinstance(v, (int, float)) for v in o) for o in schedule): raise TypeError(
        f"ValidateEvery: schedule={schedule!r}; give pairs of numbers in the unit of `every`: from where, how often")
    starts = [begin for begin, _ in schedule]
    if any(b <= a for a, b in pairwise([0, *starts])): raise ValueError(
        f"ValidateEvery: schedule={schedule!r} must begin after 0, and each of its intervals after the one before")
    found, until = [], [*starts, math.inf]
    for begin, k, end in zip([0, *starts], [number, *(k for _, k in schedule)], until):
        end = end*scale-(not is_time)  # the next one begins there
        if not begin and float(k)*scale > end: continue  # never due
        found.append(Every(f'{k}{unit}', begin*scale if is_time else begin, None if end == math.inf else end, last))
    return found
