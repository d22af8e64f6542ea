"""The fits that are named after their schedules, `fit_one_cycle`, `fit_flat_cos`, `fit_sgdr`; and `scaled_lr`."""
from collections.abc import Callable
from itertools import accumulate, pairwise
from math import ceil, inf
from typing import Any

import numpy as np
import torch.distributed as dist
from fastcore.basics import patch
from fastcore.foundation import L

from ..frame import current_opt
from ..learner import Learner
from ..schedules import SchedCos, combined_cos
from ..utils import check_number
from .schedule import ParamScheduler
from .training import GradientAccumulation

__all__ = ['mom_sched', 'group_rates', 'check_numbers']


def check_numbers(
    **values: float,  # by name; `pct_start` from 0 to 1, all others above 0
) -> None:
    "Refuse, by name, what cannot be"
    for name, v in values.items():
        if name == 'pct_start': check_number('`pct_start`, a share of the steps,', v, 0, 1)
        else: check_number(f'`{name}`', v, 0, inf, above=True)


def group_rates(
    learn: Learner,
    lr: Any,          # as `fit` takes it; None: the Learner's
) -> Any:             # a float if they are all the same, else an array `(n_groups,)`
    """Learning rates of all groups

    Raises: ValueError or TypeError if there is not one for each."""
    rates = current_opt(learn).values_of('lr', learn.lr if lr is None else lr)
    return rates[0] if len({*rates}) == 1 else np.array(rates)


def mom_sched(
    learn: Learner,
    pct: float,         # share of the steps until the middle, 0 to 1
    moms: tuple|None,   # at start, middle and end; None: the Learner's own, which are for optimizers that have one
) -> dict[str, Callable]:
    """The schedule of the momentum, by name; empty where there is none, and none was asked for

    Raises: ValueError if there are not three."""
    asked, moms = moms is not None, learn.moms if moms is None else moms
    if np.shape(moms) != (3,): raise ValueError(f"`moms` is {moms}: give it for the start, the middle and the end")
    if 'mom' in current_opt(learn).places or asked and any(moms): return {'mom': combined_cos(pct, *moms)}
    return {}


@patch
def fit_one_cycle(self: Learner,
    n_epoch: int,                           # epochs to train
    lr_max: float|slice|list|None = None,   # highest learning rate, also one per group; None: `self.lr`
    div: float = 25.,                       # it starts at `lr_max/div`
    div_final: float = 1e5,                 # the last step has `lr_max/div_final`
    pct_start: float = .25,                 # share of the steps in which it rises, 0 to 1
    wd: float|list|None = None,             # weight decay, for this fit only; None: `self.wd`
    moms: tuple|None = None,                # momentum at start, middle, end; None: `self.moms`, if there is momentum
    cbs: Any = None,                        # callbacks for this fit only
    reset_opt: bool = False,                # begin with a new optimizer
    start_epoch: int = 0,                   # skip the epochs before this one; the schedule begins where they end
    n_steps: int|None = None,               # optimizer steps an epoch; None: one a training batch
    resume: Any = None,                     # True or a file: go on from a checkpoint, as `fit` does
    allow: Any = (),                        # what may differ from it, as `fit` takes it
) -> None:
    """Fit with the learning rate rising along half a cosine and then falling along another, momentum the other way

    Raises: ValueError if `moms` are given and the optimizer has no momentum, or a number cannot be.
    Source: Smith 2018, "A disciplined approach to neural network hyper-parameters", arXiv 1803.09820."""
    check_numbers(div=div, div_final=div_final, pct_start=pct_start)
    lr = group_rates(self, lr_max)
    scheds = {'lr': combined_cos(pct_start, lr/div, lr, lr/div_final), **mom_sched(self, pct_start, moms)}
    self.fit(n_epoch, lr_max, wd, L(cbs)+ParamScheduler(scheds), reset_opt, start_epoch, n_steps, resume, allow)


@patch
def fit_flat_cos(self: Learner,
    n_epoch: int,                       # epochs to train
    lr: float|slice|list|None = None,   # learning rate, also one per group; None: `self.lr`
    div_final: float = 1e5,             # the last step has `lr/div_final`
    pct_start: float = .75,             # share of the steps in which it stays `lr`, 0 to 1
    wd: float|list|None = None,         # weight decay, for this fit only; None: `self.wd`
    cbs: Any = None,                    # callbacks for this fit only
    reset_opt: bool = False,            # begin with a new optimizer
    start_epoch: int = 0,               # skip the epochs before this one; the schedule begins where they end
    n_steps: int|None = None,           # optimizer steps an epoch; None: one a training batch
    resume: Any = None,                 # True or a file: go on from a checkpoint, as `fit` does
    allow: Any = (),                    # what may differ from it, as `fit` takes it
) -> None:
    "Fit with a constant learning rate that falls along half a cosine at the end"
    check_numbers(div_final=div_final, pct_start=pct_start)
    rate = group_rates(self, lr)
    sched = ParamScheduler({'lr': combined_cos(pct_start, rate, rate, rate/div_final)})
    self.fit(n_epoch, lr, wd, L(cbs)+sched, reset_opt, start_epoch, n_steps, resume, allow)


@patch
def fit_sgdr(self: Learner,
    n_cycles: int,                          # how often the learning rate starts anew
    cycle_len: int,                         # epochs of the first cycle
    lr_max: float|slice|list|None = None,   # learning rate at the start of each, also one per group; None: `self.lr`
    cycle_mult: int = 2,                    # each cycle is so many times as long as the one before
    cbs: Any = None,                        # callbacks for this fit only
    reset_opt: bool = False,                # begin with a new optimizer
    wd: float|list|None = None,             # weight decay, for this fit only; None: `self.wd`
    start_epoch: int = 0,                   # skip the epochs before this one; the schedule begins where they end
    n_steps: int|None = None,               # optimizer steps an epoch; None: one a training batch
    resume: Any = None,                     # True or a file: go on from a checkpoint, as `fit` does
    allow: Any = (),                        # what may differ from it, as `fit` takes it
) -> None:
    """Fit with the learning rate falling to 0 along half a cosine, again and again, for longer each time

    Raises: ValueError if a number of cycles or epochs is none.
    Source: Loshchilov and Hutter 2017, "SGDR: Stochastic Gradient Descent with Warm Restarts", arXiv 1608.03983."""
    for name, n in dict(n_cycles=n_cycles, cycle_len=cycle_len, cycle_mult=cycle_mult).items():
        check_number(f'fit_sgdr: `{name}`', n, 1, whole=True)
    ends = [0, *accumulate(cycle_len*cycle_mult**i for i in range(n_cycles))]
    falling = {'lr': SchedCos(lr := group_rates(self, lr_max), lr*0)}
    scheds = [ParamScheduler(falling, begin=f'{a}ep', end=f'{b}ep') for a, b in pairwise(ends)]
    self.fit(ends[-1], lr_max, wd, L(cbs)+scheds, reset_opt, start_epoch, n_steps, resume, allow)


@patch
def scaled_lr(self: Learner,
    lr: float|slice|list,  # learning rate that is good for steps of `base_bs` items, as `fit` takes it
    base_bs: int,          # items that it is for
) -> Any:                  # of the same form
    """A learning rate for the items that one step has here, by the linear rule: twice as many, twice the rate

    They are those of a batch, of all processes (torch.distributed) and of the batches that a GradientAccumulation among
    `learn.cbs` adds up. With large batches the rate should rise to it in the first epochs, as in `fit_one_cycle`.
    Raises: TypeError or ValueError for what is no number; ValueError if nobody knows how many items a step has.
    Source: Goyal et al. 2017, "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", arXiv 1706.02677."""
    check_number('scaled_lr: `base_bs`', base_bs, 1, whole=True, of='items')
    n = _items_a_step(self)
    def scaled(rate):
        check_number('scaled_lr: `lr`', rate, 0)
        return rate*n/base_bs
    if isinstance(lr, slice): return slice(None if lr.start is None else scaled(lr.start), scaled(lr.stop))
    return [scaled(rate) for rate in lr] if isinstance(lr, (list, tuple)) else scaled(lr)


def _items_a_step(learn):
    dl = learn.dls.train
    bs, n_ranks = getattr(dl, 'bs', None), dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if bs is None: raise ValueError(
        f"scaled_lr: the train loader, a `{type(dl.dl).__name__}`, has no batch size: multiply the rate by the items "
        "of a step over `base_bs` yourself")
    for cb in learn.cbs:
        if not isinstance(cb, GradientAccumulation): continue
        if cb.unit == 'tokens': raise ValueError(
            f"scaled_lr: how many items `{cb}` adds up depends on their tokens: multiply the rate yourself")
        bs *= cb.n_acc if cb.unit == 'batches' else ceil(cb.n_acc/bs)
    return bs*n_ranks
