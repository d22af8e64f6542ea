"""Training by iterations: `learn.fit_iters(n)` makes exactly `n` steps; data that is used up begins again."""
from collections.abc import Iterator
from math import ceil, inf
from typing import Any

from fastcore.basics import patch
from fastcore.foundation import L

from ..callback import Callback
from ..events import CancelFitException, CancelTrainException
from ..learner import Learner
from ..utils import check_number
from .resume import Resuming
from .saved_state import refuse
from .schedule import Scheduler
from .validate_every import WithoutValidation

__all__ = ['Iterations', 'LastStep']

most_idle = 100  # epochs without a step: a loss scaler that begins much too high leaves out some twenty


class Iterations(WithoutValidation):
    """Ends a fit after so many steps of the optimizer; `fit_iters` adds it

    `learn.total_steps` is their number, by which schedules go, and `n_epoch` the number of passes over the data that it
    takes, which grows if it takes more.
    Raises: ValueError if the data is used up before, or what is resumed has another number of steps.
    Order: after GradientAccumulation, which says how many steps an epoch has, and before what asks for that."""
    order = 6
    run_after = ('GradientAccumulation',)
    run_before = ('FreezeUntil',)
    plans_fit = True
    unique = True
    state = ('n', 'first', 'begun', 'data_epoch', 'left')
    first = 0          # value of `learn.n_step` at the fit's very first step
    begun = False      # has the first epoch?
    data_epoch = 0     # number of the pass over the data, for `set_epoch`, that the fit's first epoch is
    left: Any = None   # where in an epoch the last step was made; None: at its end, or it is yet to be made
    place: Any = None  # where the fit before has left the loader
    idle = 0           # epochs in a row without a step
    seen = 0           # value of `learn.n_step` at the last look
    over = False       # has the fit come to its end, by itself or by a cancel?

    def __init__(self,
        n: int,  # steps
    ):
        check_number('fit_iters: `n`', n, 1, whole=True, of='steps')
        self.n = int(n)

    @property
    def done(self) -> int: "Steps made"; return self.learn.n_step-self.first

    def before_fit(self):
        learn = self.learn
        learn.total_steps, self.first, self.seen, self.idle = self.n, learn.n_step, learn.n_step, 0
        self.begun, self.over, self.left, self.place, self.data_epoch = False, False, None, None, 0
        if learn._left: self._go_on_from(*learn._left)
        learn.passes = self.data_epoch
        self._refuse_others()
        if learn.epoch < learn.n_epoch: learn.n_epoch = max(learn.n_epoch, self._n_epoch())  # else all is over

    def _go_on_from(self, data_epoch, place):
        dl = self.dls.train
        is_there = place and dl.record is place['record'] and dl.position == place['position']
        self.place, self.data_epoch = (place, data_epoch) if is_there else (None, data_epoch+bool(place))

    def _n_epoch(self):
        per, n = self.n_steps or self.dls.train.n_batches, self.dls.train.n_batches
        if not per or not n: return 1  # unknown
        rest = per-self.place['position']*per//n if self.place else 0
        return bool(self.place)+max(0, ceil((self.n-rest)/per))

    def _refuse_others(self):
        for cb in self.learn.cbs:
            if not isinstance(cb, Resuming) or cb.paused or not cb.data: continue
            n = (then := cb.data['callbacks'].get('iterations', {})).get('n')
            if n is None: raise ValueError(
                f"{cb.source} is of another fit method than `fit_iters`: that one can go on with it")
            made = cb.data['counters']['n_step']-then['first']
            if n != self.n and (cb.data.get('done') or made > self.n): raise ValueError(
                f"{cb.source} is of a fit that has made {made} of {n} steps: one of {self.n} cannot go on with it")
            if n != self.n and any(isinstance(o, Scheduler) for o in self.learn.cbs): refuse(
                {'n_epoch': f"it is of a fit of {n} steps, and this one has {self.n}, over which schedules stretch"},
                cb.allow, cb.source)

    def before_epoch(self):
        if self.done >= self.n: raise CancelFitException  # resumed when it was over
        super().before_epoch()

    def before_train(self):
        dl, place = self.learn.dl, self.place
        if not self.begun and place:
            if dl._held is not None: dl.start_at(place['record'], place['position'])
            else: dl.go_to(place)
        self.begun, self.learn.pct_train = True, min(1., self.done/self.n)

    def after_batch(self): self.learn.pct_train = min(1., self.done/self.n)
    def after_train(self): self._plan()
    def after_epoch(self): self._plan()  # a cancelled one has no `after_train`

    def _plan(self):  # how many epochs there are
        learn = self.learn
        if self.done >= self.n: learn.n_epoch = learn.epoch+1
        elif learn.epoch+1 >= learn.n_epoch:
            if isinstance(learn.dls.train.dl, Iterator): raise ValueError(
                f"fit_iters: the train loader, a `{type(learn.dls.train.dl).__name__}` that can be iterated once only, "
                f"is used up after {self.done} of {self.n} steps: give a DataLoader, or another that can begin again")
            self.idle, self.seen = 0 if learn.n_step > self.seen else self.idle+1, learn.n_step
            if self.idle >= most_idle: raise RuntimeError(
                f"fit_iters: {most_idle} epochs have led to no step; {self.done} of {self.n} were made")
            learn.n_epoch = learn.epoch+2

    def after_fit(self): self.over = not self.learn.paused

    def cleanup_fit(self):  # not earlier: one that was over has its state put back in `after_fit`
        learn, self.place = self.learn, None
        learn.total_steps, learn.passes = None, 0
        if not self.over: return
        last = min(learn.epoch, learn.n_epoch-1)
        learn._left = self.data_epoch+last+(not self.left), self.left

    def load_state_dict(self, state: dict[str, Any]) -> None:  # what `state_dict` gave
        "Go on there"
        n = self.n
        super().load_state_dict(state)
        self.n = n
        if self.learn is None or self.learn.run_kind != 'fit': return
        self.learn.passes = self.data_epoch
        self.dls.train.set_epoch(self.data_epoch+self.epoch)
        if self.left: self.dls.train.record, self.dls.train.position = self.left['record'], self.left['position']


class LastStep(Callback):
    """Ends the training when Iterations are done; `fit_iters` adds it

    Order: after all others, which the batch is to be over for."""
    order = inf
    toward_end = True
    run_in = {'fit'}
    run_valid = False

    def __init__(self,
        counter: Iterations,
    ): self.counter = counter

    def after_batch(self):
        if self.counter.done < self.counter.n or self.iter+1 == self.n_iter: return  # at its end an epoch ends anyway
        self.counter.left = self.learn.dl.place(True)
        self.learn.dl.hold()
        raise CancelTrainException


@patch
def fit_iters(self: Learner,
    n: int,                             # steps of the optimizer
    lr: float|slice|list|None = None,   # learning rate, also one per group; None: `self.lr`
    wd: float|list|None = None,         # weight decay, for this fit only; None: `self.wd`
    cbs: Any = None,                    # callbacks for this fit only
    reset_opt: bool = False,            # begin with a new optimizer
    resume: Any = None,                 # True or a file: go on from a checkpoint, as `fit` does
    allow: Any = (),                    # what may differ from it, as `fit` takes it
) -> None:
    """Train for exactly `n` steps of the optimizer, over a training loader that begins again as often as it takes

    It is a fit whose epochs are the passes over the data; the last one ends with step `n`. The next call goes on with
    the next batch (until then the loader waits with its workers), and `learn.n_step` counts over all calls. What has a
    `set_epoch` (loader, samplers, dataset) gets the number of the pass. Schedules span the `n` steps. There is no
    validation, but for what ValidateEvery does.
    Raises: as `fit`; ValueError if the data is used up before."""
    counter = Iterations(n)
    n_batches = self.dls.train.n_batches
    self.fit(ceil(n/n_batches) if n_batches else 1, lr, wd, [*L(cbs), counter, LastStep(counter)], reset_opt,
             resume=resume, allow=allow)
