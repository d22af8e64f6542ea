"""How much of a fit is run: parts of epochs, as much as there is time for, later epochs only."""
import re
from itertools import islice
from numbers import Real
from time import perf_counter
from typing import Any

from ..callback import Callback
from ..display import say
from ..events import CancelFitException, CancelTrainException
from ..every import Every
from ..passing import Passing
from ..utils import check_number

__all__ = ['ShortEpochCallback', 'TimeLimit', 'SkipToEpoch']


class _Short(Passing):
    "The first batches of a loader"
    own = frozenset({'inner', 'n'})

    def __init__(self, inner, n):
        super().__init__(inner)
        self.n = n

    def through(self, batches): return islice(batches, max(self.n-getattr(self.inner, 'position', 0), 0))


class ShortEpochCallback(Callback):
    """Trains, and validates, on the first batches of each epoch only: a share or a number of them

    Schedules know of it: they end when the short epochs do. `learn.validate()` is shortened too, as long as it is
    there, and predictions are not.
    Raises: ValueError for an odd `pct` or `n`, and at the start of a fit for a share of a loader without length.
    Order: before all that ask how long an epoch is."""
    order = -50
    plans_fit = True
    planned = False  # are the steps of an epoch that the fit goes by from here, one for each batch?

    def __init__(self,
        pct: float|None = None,    # share of the batches, 0 to 1, one batch at least; None: .01
        short_valid: bool = True,  # shorten validation as well?
        n: int|None = None,        # number of batches, in place of a share
    ):
        if pct is not None and n is not None: raise ValueError(f"ShortEpochCallback: {pct=} and {n=}: give one of them")
        pct = .01 if pct is None else pct
        check_number('ShortEpochCallback: `pct`, a share (`n` is a number of batches),', pct, 0, 1, above=True)
        if n is not None: check_number('ShortEpochCallback: `n`', n, 1, whole=True, of='batches')
        self.pct, self.short_valid, self.n = pct, short_valid, n

    def limit(self,
        n_batches: int|None,  # of the whole epoch; None: unknown
    ) -> int:
        "How many are run"
        if n_batches is None and self.n is None: raise ValueError(
            f"ShortEpochCallback: `pct={self.pct}` of a loader without length: give `n`, a number of batches")
        n = self.n or max(1, round((n_batches or 1)*self.pct))
        return n if n_batches is None else min(n, n_batches)

    def before_fit(self):
        self.planned = self.learn.run_kind not in ('validate', 'predict') and self.n_steps is None
        if self.planned: self.learn.n_steps = self.limit(self.dls.train.n_batches)

    def before_train(self): self._shorten()
    def before_validate(self):
        if self.short_valid and (self.learn.run_kind != 'predict' or self.learn.rehearsing): self._shorten()

    def _shorten(self):
        n = self.limit(self.n_iter)
        self.learn.dl, self.learn.n_iter = _Short(self.dl, n), n


class TimeLimit(Callback):
    """Ends a fit when its time is up: after the batch, and the validation of the epoch that it cuts short

    A resumed fit has what was left.
    Raises: TypeError or ValueError if `limit` is no time.
    Order: after what records the batch."""
    order = 70
    run_in = {'fit'}
    run_valid = False
    not_hashed = ('spent',)
    started = 0.   # when this fit began, or has been gone on with
    before = 0.    # seconds spent before
    over = False

    def __init__(self,
        limit: str|float,  # '90s', '10min', '1.5h', or seconds
    ):
        if isinstance(limit, Real): check_number('TimeLimit: `limit`', limit, 0, above=True, of='seconds')
        elif not isinstance(limit, str) or not re.fullmatch(r'[\d.]+ ?(s|min|h)', limit.strip()): raise ValueError(
            f"TimeLimit: {limit!r} is no time: give '90s', '10min', '1.5h' or seconds")
        self.limit: Any = Every(limit).n if isinstance(limit, str) else limit

    @property
    def spent(self) -> float: "Seconds that the fit has taken"; return self.before + perf_counter()-self.started

    def before_fit(self): self.started, self.before, self.over = perf_counter(), 0., False

    def after_batch(self):
        self.over = self.learn.agree(self.spent >= self.limit)
        if self.over: raise CancelTrainException

    def after_epoch(self):
        self.over = self.over or self.learn.agree(self.spent >= self.limit)
        if not self.over or self.epoch+1 == self.n_epoch: return
        say(f"TimeLimit: {self.limit:g} s are up in epoch {self.epoch+1} of {self.n_epoch}")
        raise CancelFitException

    def state_dict(self) -> dict[str, Any]:
        "The time spent so far"
        return dict(spent=self.spent)

    def load_state_dict(self, state: dict[str, Any]) -> None:  # what `state_dict` gave
        "Go on with the time that was left"
        self.started, self.before = perf_counter(), state['spent']


class SkipToEpoch(Callback):
    """Begins a fit at a later epoch, as `fit(…, start_epoch=…)` does; schedules begin there too

    Raises: TypeError for what is no number; ValueError if that is no epoch of the fit.
    Order: before all that ask where the fit begins."""
    order = -100
    plans_fit = True
    run_in = {'fit'}
    run_valid = False

    def __init__(self,
        epoch: int,  # the first epoch that is run, counted from 0
    ):
        check_number('SkipToEpoch: `epoch`', epoch, 0, whole=True)
        self.first = epoch

    def before_fit(self):
        if self.first >= max(self.n_epoch, 1): raise ValueError(
            f"SkipToEpoch: there is no epoch {self.first!r} in a fit of {self.n_epoch}, which are counted from 0")
        self.learn.epoch = max(self.learn.epoch, int(self.first))
