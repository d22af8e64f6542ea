"""The learning-rate finder: a sweep of rates over real training steps, which leaves no trace, and what it suggests."""
import math
from bisect import bisect_left
from collections import namedtuple
from collections.abc import Callable, Sequence
from functools import partial
from keyword import iskeyword
from time import perf_counter
from typing import Any

import numpy as np
from fastcore.basics import patch
from fastcore.foundation import L

from ..callback import Callback
from ..display import Bar
from ..events import CancelEpochException, CancelFitException
from ..hypers import per_group, stack_readings
from ..learner import Learner
from ..no_trace import trial
from ..plot import plot_lr_find, show_figure
from ..schedules import sched_exp
from ..utils import check_number, warn
from .recorder import Row

__all__ = ['LRFinder', 'valley', 'steep', 'minimum', 'slide']


# ---- suggestions: of the curve without its first tenth and its last 5 points

def valley(
    lrs: np.ndarray,     # learning rates, rising, `(n,)`
    losses: np.ndarray,  # the smoothed loss at each, `(n,)`
    num_it: int,         # iterations that were asked for
) -> float:
    """The rate half-way down the longest valley: the longest run of ever lower losses, others in between left out

    Raises: ValueError if the loss falls less than three times.
    Source: fastai's `valley`; longest decreasing subsequence by patience sorting, in O(n log n)."""
    tails, best, end = [], 0, 0  # tails[k]: the least negative loss at which a run of k+1 can end
    for i, v in enumerate(-x for x in losses):
        k = bisect_left(tails, v)
        tails[k:k+1] = [v]
        if k+1 > best: best, end = k+1, i
    if best < 3: raise ValueError("the loss does not fall")
    third = best/3
    return float(lrs[end-best+int(third)+int(third/2)])


def steep(
    lrs: np.ndarray,     # learning rates, rising, `(n,)`
    losses: np.ndarray,  # the smoothed loss at each, `(n,)`
    num_it: int,         # iterations that were asked for
) -> float:
    """The rate at which the loss falls most steeply over the logarithm of the rate

    Raises: ValueError if it does not fall.
    Source: fastai's `steep`."""
    slopes = np.diff(losses)/np.diff(np.log(lrs))
    if not len(slopes) or slopes.min() >= 0: raise ValueError("the loss does not fall")
    return float(lrs[slopes.argmin()])


def minimum(
    lrs: np.ndarray,     # learning rates, rising, `(n,)`
    losses: np.ndarray,  # the smoothed loss at each, `(n,)`
    num_it: int,         # iterations that were asked for
) -> float:
    """A tenth of the rate at which the loss is lowest

    Source: fastai's `minimum`."""
    return float(lrs[losses.argmin()])/10


def slide(
    lrs: np.ndarray,            # learning rates, rising, `(n,)`
    losses: np.ndarray,         # the smoothed loss at each, `(n,)`
    num_it: int,                # iterations that were asked for
    lr_diff: int = 15,          # how many points the interval is wide
    thresh: float = .005,       # slopes at its two ends that differ by no more than this are alike
    adjust_value: float = 1.,   # what the rate is multiplied with
) -> float:
    """The left end of an interval that slides down from the end of the curve until the slopes at its ends are alike

    Raises: ValueError if there are not more points than the interval is wide.
    Source: fastai's `slide`."""
    if len(losses) <= lr_diff: raise ValueError(f"{len(losses)} points are too few for an interval of {lr_diff}")
    slopes, left = np.gradient(losses), len(losses)-1-lr_diff
    at = left
    while left >= 0 and abs(slopes[left+lr_diff]-slopes[left]) > thresh: at, left = left, left-1
    return float(lrs[at])*adjust_value


# ---- the sweep

class LRFinder(Callback):
    """Trains with ever higher learning rates, one an iteration, until the loss diverges or is no number any more

    Raises: ValueError or TypeError at the start if the rates do not rise, or are not one for each group.
    Order: late, as the schedules, which take no part in it."""
    order = 60
    run_valid = False
    run_in = {'lr_find'}
    unique = True
    bad = False       # was the last loss no number?
    low = math.inf    # lowest loss, smoothed
    diverged = False  # is the loss, smoothed, above its lowest value by more than three times that?
    shown: Any = None  # the ProgressCallback that shows the bar

    def __init__(self,
        start_lr: Any = 1e-7,     # first rate; a list or slice for each group its own
        end_lr: Any = 10,         # last rate, likewise
        num_it: int = 100,        # iterations
        stop_div: bool = True,    # stop once the loss diverges
    ):
        self.start_lr, self.end_lr, self.num_it, self.stop_div = start_lr, end_lr, num_it, stop_div
        self.i, self.smooth, self.lrs = 0, 0., np.empty((0, 1))
        self.losses, self.readings = [], []  # smoothed losses, and the Reading of the optimizer that gave each
        self.reading: Any = None  # what the last step was made with

    def before_fit(self):
        n = len(self.opt.hypers)
        try: start, end = (np.array(per_group(lr, n)) for lr in (self.start_lr, self.end_lr))
        except TypeError: raise TypeError(f"lr_find: from `start_lr` {self.start_lr} to `end_lr` {self.end_lr}: give "
                                          "numbers, lists of them, or slices") from None
        if len(start) != n or len(end) != n: raise ValueError(
            f"lr_find: {len(start)} values of `start_lr` and {len(end)} of `end_lr` for {n} groups:\n{self.opt}")
        if not ((0 < start) & (start <= end) & (end < math.inf)).all() or (start == end).all(): raise ValueError(
            f"lr_find: from `start_lr` {self.start_lr} to `end_lr` {self.end_lr}: the rate must rise, from above 0 to "
            "a finite one")
        self.lrs = np.stack([sched_exp(start, end, i/(self.num_it-1)) for i in range(self.num_it)])
        if hasattr(self.learn, 'progress') and self.create_mbar: self._show()

    def _show(self):  # by the ProgressCallback, which survives a display that fails, and gets its attributes back
        bar = self.progress
        bar.live, self.began = bar.show(), perf_counter()
        self.shown = bar
        bar._shows(bar.live.start, [])
        bar.due = 0. if math.isfinite(bar.live.interval) else math.inf

    def before_batch(self): self.opt.set_hyper('lr', self.lrs[self.i])

    def before_step(self): self.reading = self.learn.opt.read()

    def after_batch(self):
        if not self.learn.stepped: self.reading = self.learn.opt.read()
        if (loss := self.learn.loss) is not None: self._add(float(loss))  # waits for a GPU: a NaN shall stop at once
        self.i += 1
        if self.shown and perf_counter() >= self.shown.due: self._update(self.shown)
        stop = self.agree(self.bad or self.stop_div and self.diverged)
        if stop or self.i >= self.num_it: raise CancelFitException

    def _add(self, loss):
        self.bad = not math.isfinite(loss)
        if self.bad: return
        self.readings.append(self.reading)
        # fastai's debiased average, so written that the average of equal losses is exactly that loss
        self.smooth += .02/(1-.98**len(self.readings))*(loss-self.smooth)
        self.losses.append(self.smooth)
        self.low = min(self.low, self.smooth)
        self.diverged = self.i > self.num_it//10 and self.smooth-self.low > 3*abs(self.low)

    def after_train(self): raise CancelEpochException  # no validation; the next epoch goes on with the sweep

    def _update(self, bar):
        elapsed = perf_counter()-self.began
        loss = self.losses[-1] if self.losses else None
        bar.due = perf_counter()+bar.live.interval
        bar._shows(bar.live.update, Bar(0, 1, 'lr_find', self.i, self.num_it, loss, elapsed, self.i/elapsed))

    def cleanup_fit(self):
        if self.shown: self.shown._shows(self.shown.live.close)


@patch
def lr_find(self: Learner,
    start_lr: float|list|slice = 1e-7,   # first rate; a list or slice: each parameter group has a sweep of its own
    end_lr: float|list|slice = 10,       # last rate, which is reached unless the loss diverges before; likewise
    num_it: int = 100,                   # iterations, over as many epochs as that takes
    stop_div: bool = True,               # stop once the loss diverges, after a tenth of them at the earliest
    show_plot: bool = True,              # show the plot; `learn.recorder.plot_lr_find()` draws it again, anywhere
    suggest_funcs: Callable|Sequence[Callable]|None = valley,  # `f(lrs, losses, num_it)` gives a rate, like `valley`
) -> Any:                                # named tuple: a rate for each function, or a Row of one for each group
    """Try learning rates from low to high, one an iteration, and suggest one; the Learner is left exactly as it was

    What cannot be suggested is None, and a warning says why. None at all if there are no functions.
    What it cannot see into is as the sweep leaves it: other objects that a callback holds, unless they have a
    `state_dict`, data that a dataset changes, and what is outside the process.
    Raises: ValueError, TypeError or RuntimeError, before training, if anything does not fit."""
    funcs = [] if suggest_funcs is None else L(suggest_funcs)
    _check(num_it, funcs)
    curve = _sweep(self, LRFinder(start_lr, end_lr, num_it, stop_div))
    lrs, losses = curve['lrs'], curve['losses']
    found = _suggested(funcs, lrs, np.array(losses), num_it)
    curve['suggestions'] = {name: point for name, point in found.items() if point}
    if show_plot and losses:
        try: show_figure(plot_lr_find(**curve))
        except Exception as e: warn(f"lr_find: the plot cannot be shown: {type(e).__name__}: {e}")
    if suggest_funcs is None: return None
    same, groups = bool((lrs == lrs[:, :1]).all()), [f'group {i}' for i in range(lrs.shape[1])]
    return suggested_lrs([*found], [p and (p[0][0] if same else Row(groups, p[0])) for p in found.values()])


def _sweep(learn, finder):
    try: trial(learn, finder, finder.num_it, 'lr_find', lambda: f'{finder.i} of {finder.num_it} iterations')
    except KeyboardInterrupt:
        _remember(learn, finder)
        raise
    return _remember(learn, finder)


def _remember(learn, finder):  # the curve, for `plot_lr_find`
    lrs = stack_readings(finder.readings).get('lr', finder.lrs[:0])
    curve: dict[str, Any] = dict(lrs=lrs, losses=finder.losses, suggestions={})
    if hasattr(learn, 'recorder'): learn.recorder.lr_curve = curve
    return curve


def suggested_lrs(
    names: Sequence[str],   # of the functions that made the suggestions
    values: Sequence[Any],  # a rate, a Row of rates, or None, for each
) -> tuple:
    "A named tuple, which pickles though its class is made here"
    cls = namedtuple('SuggestedLRs', names)
    cls.__reduce__ = lambda self: (suggested_lrs, (self._fields, (*self,)))  # pyright: ignore
    return cls(*values)


def _check(num_it, funcs):
    if odd := [f for f in funcs if not callable(f)]:
        raise TypeError(f"lr_find: `suggest_funcs` has {odd[0]!r}; give functions, as `valley`, without quotes")
    check_number('lr_find: `num_it`', num_it, 2, whole=True, of='iterations')


def _suggested(funcs, lrs, losses, num_it):  # by name: a rate for each group and the loss there, or None
    found, cut = {}, slice(num_it//10, -5)
    with np.errstate(all='ignore'):
        spans = np.log(lrs[-1]/lrs[0]) if len(lrs) else np.zeros(lrs.shape[1])
    own = lrs[:, k := int(spans.argmax())]  # of the group with the widest sweep
    for func in funcs:
        name = _name(func, found)
        found[name] = None
        try:
            if len(own[cut]) < 2: raise ValueError(f"of {num_it} iterations {len(own)} gave a loss, which are too few: "
                                                   "the first tenth of them and the last 5 are left out")
            if (np.diff(own) <= 0).any(): raise ValueError("the learning rate did not rise: something else sets it")
            given = func(own[cut], losses[cut], num_it)
            if isinstance(given, tuple): given = given[0]  # fastai's functions also return a point
            lr = math.nan if given is None else float(given)
            if not 0 < lr < math.inf: raise ValueError(f"it gave {given}, which is no learning rate")
            at = math.log(lr/own[0])/spans[k]
            rates = lrs[0]*np.exp(spans*at)
            rates[k] = lr  # exactly
            found[name] = rates.tolist(), float(np.interp(math.log(lr), np.log(own), losses))
        except Exception as e:
            warn(f"lr_find: `{name}` suggests nothing: {e if isinstance(e, ValueError) else repr(e)}")
    return found


def _name(func, others):
    while isinstance(func, partial): func = func.func
    name = str(getattr(func, '__name__', type(func).__name__))
    if not name.isidentifier() or iskeyword(name) or name.startswith('_'): name = 'suggestion'
    return next(n for n in (name, *(f'{name}_{i}' for i in range(2, 99))) if n not in others)
