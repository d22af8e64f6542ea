"""What a fit would do to the hyper-parameters, before any training: `learn.preview_sched('fit_one_cycle', 5, 3e-3)`."""
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from copy import copy, deepcopy
from typing import Any

import numpy as np
from fastcore.basics import patch
from torch.optim.lr_scheduler import LRScheduler

from ..frame import current_opt, set_rates
from ..host import as_callback
from ..hypers import stack_readings
from ..keep import kept
from ..learner import Learner
from ..plot import plot_hypers
from ..utils import replacing
from .fit_call import fit_calls
from .schedule import Scheduler
from .torch_schedule import quiet

__all__ = []  # methods of the Learner only


@patch
def simulate_sched(self: Learner,
    fit: str|Callable,      # a fit method: `learn.fine_tune`, or its name
    *args: Any,             # what it is called with
    **kwargs: Any,          # likewise
) -> dict[str, np.ndarray]:  # `(n_steps, n_groups)` by name: `lr`, `mom` …, at each step of the optimizer
    """What a fit would set the hyper-parameters to, by ParamSchedulers and torch's schedulers; nothing is trained

    Raises: what the fit would raise before training; ValueError if `fit` is no fit method."""
    readings: list = []
    with replacing(self, opt=self.opt):
        for call in fit_calls(self, 'simulate_sched', fit, args, kwargs):
            cbs = [cb for cb in map(as_callback, call.cbs) if isinstance(cb, Scheduler) or _plans(cb)]
            now = dict(n_epoch=call.n_epoch, epoch=call.start_epoch, n_steps=call.n_steps, stepped=True,
                       n_step=self.n_step, total_steps=None, train_iter=0, final_record=None,
                       _rates=dict(lr=call.lr, wd=call.wd))
            with self.added_cbs(cbs), replacing(self, **now), _stand_ins(self, current_opt(self, call.reset_opt)):
                readings.extend(_dry_run(self))
    return stack_readings(readings)


def _plans(cb): return getattr(type(cb), 'plans_fit', False)  # where it begins, or how many steps it has

def _schedulers(learn): return [cb for cb in learn.ordered if isinstance(cb, Scheduler) and cb.run]


@contextmanager
def _stand_ins(learn, opt):  # what schedules may change: an optimizer like `opt`, themselves, the table they watch
    with ExitStack() as stack:
        learn.create_opt()
        for new, old in zip(learn.opt.hypers, opt.hypers): new.update(old)
        groups = zip(learn.opt.opt.param_groups, opt.opt.param_groups)
        for new, old in groups: new.update({**old, **new})  # what torch's schedulers note there
        set_rates(learn)
        for cb in (cbs := _schedulers(learn)):
            if isinstance(make := getattr(cb, 'make', None), LRScheduler):
                stack.enter_context(replacing(cb, make=deepcopy(make, {id(opt.opt): learn.opt.opt})))
        stack.enter_context(kept(*cbs, whole=(Scheduler,), apart=(learn,)))
        if 'recorder' in vars(learn):
            stack.enter_context(replacing(learn, recorder=copy(learn.recorder)))
            learn.recorder.before_fit()
        for cb in filter(_plans, learn.ordered):
            stack.enter_context(kept(cb, whole=(type(cb),), apart=(learn,)))
            if cb.run: cb.before_fit()
        yield


def _dry_run(learn):
    cbs, readings = _schedulers(learn), []
    n, total = learn.n_steps or learn.dls.train.n_batches or learn.total_steps, learn.total_steps
    if n is None: raise ValueError("the training loader has no length: give `n_steps=…`, the steps of an epoch")
    def fire(name, cbs=cbs):
        for cb in cbs:
            if act := cb.handler(name): act()
    with quiet():
        try:
            fire('before_fit')
            for epoch in range(learn.epoch, learn.n_epoch):
                learn.epoch = epoch
                for _ in range(n if total is None else min(n, total-len(readings))):
                    fire('before_batch')
                    readings.append(learn.opt.read())
                    learn.n_step += 1
                    fire('after_batch')
                fire('after_epoch')
        finally: fire('cleanup_fit', cbs[::-1])
    return readings


@patch
def preview_sched(self: Learner,
    fit: str|Callable,     # a fit method: `learn.fine_tune`, or its name
    *args: Any,            # what it is called with
    names: Any = None,     # hyper-parameters to draw; None: `lr`, `mom`, and whatever else changes
    **kwargs: Any,         # what it is called with
) -> Any:                  # the axes, one for each
    """Draw what a fit would set the hyper-parameters to, before any training

    Raises: what the fit would raise before training."""
    return plot_hypers(self.simulate_sched(fit, *args, **kwargs), [names] if isinstance(names, str) else names)
