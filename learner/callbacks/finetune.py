"""Fine-tuning by groups: freezing, `fine_tune`, BnFreeze, and the table of groups."""
import math
from typing import Any

import numpy as np
from fastcore.basics import patch
from fastcore.foundation import L
from torch.nn.parameter import is_lazy

from ..callback import Callback
from ..frame import current_opt
from ..hypers import per_group, value_at
from ..learner import Learner
from ..modes import restore_modes, snapshot_modes
from ..schedules import combined_cos
from ..splitters import shape
from ..utils import optional, warn
from .schedule import ParamScheduler, mom_sched

__all__ = ['BnFreeze', 'FreezeUntil']


@patch
def freeze_to(self: Learner,
    n: int,  # number of groups to freeze; if negative, all but the last `-n`
) -> Learner:
    """Freeze the first parameter groups, and make the others trainable; momenta and averages of all groups stay

    Normalisation layers of frozen groups go on training unless `train_bn=False`.
    Raises: ValueError with the table of groups if there are too few."""
    current_opt(self).freeze_to(n)
    return self


@patch
def freeze(self: Learner) -> Learner:
    """Freeze all parameter groups but the last

    Raises: ValueError with the table of groups if there is only one."""
    return self.freeze_to(-1)


@patch
def unfreeze(self: Learner) -> Learner:
    "Make all parameters trainable, also those frozen by hand"
    return self.freeze_to(0)


class FreezeUntil(Callback):
    """Trains the last parameter group alone at first, and all of them from an epoch on

    Raises: ValueError with the table of groups, at the start of a fit, if there is only one."""
    run_in = {'fit'}
    order = -20  # before all that look at what is frozen

    def __init__(self,
        epoch: int,  # the first epoch that trains all groups, counted from 0
    ): self.until = epoch

    def before_fit(self): self.opt.freeze_to(-1 if self.epoch < self.until else 0)

    def before_epoch(self):
        if self.epoch == self.until: self.opt.unfreeze()


@patch
def fine_tune(self: Learner,
    epochs: int,                   # epochs that train all groups
    base_lr: float = 2e-3,         # highest rate of the last group while the others are frozen; then half of it
    freeze_epochs: int = 1,        # epochs before them that train the last group alone
    lr_mult: float = 100,          # then the first group has `base_lr/2/lr_mult`, those between lie between
    pct_start: float = .3,         # share of the steps in which the rate rises once all are trained, 0 to 1
    div: float = 5.,               # it then starts at its highest over `div`
    div_final: float = 1e5,        # both parts end at their highest over `div_final`
    wd: float|list|None = None,    # weight decay, for this fit only; None: `self.wd`
    moms: tuple|None = None,       # momentum at start, middle, end of both; None: `self.moms`, if there is momentum
    cbs: Any = None,               # callbacks for this fit only
    reset_opt: bool = False,       # begin with a new optimizer
    start_epoch: int = 0,          # skip the epochs before this one, counted over both parts
    n_steps: int|None = None,      # optimizer steps an epoch; None: one a training batch
) -> None:
    """Train the last group alone, then all of them with lower rates for the earlier ones: two one-cycles in one fit

    Raises: ValueError with the table of groups if there is only one."""
    phases = [(freeze_epochs, slice(base_lr), .99, 25.), (epochs, slice(base_lr/2/lr_mult, base_lr/2), pct_start, div)]
    if (n_groups := len((opt := current_opt(self)).hypers)) == 1 and freeze_epochs: opt.freeze()  # raises
    scheds, begin = [], 0
    for n, lr, pct, start_div in phases:
        lrs = np.array(per_group(lr, n_groups))
        if n: scheds.append(ParamScheduler(
            {'lr': combined_cos(pct, lrs/start_div, lrs, lrs/div_final), **mom_sched(self, pct, moms)},
            begin=f'{begin}ep', end=f'{begin+n}ep'))
        begin += n
    self.fit(freeze_epochs+epochs, slice(base_lr/2/lr_mult, base_lr/2), wd, L(cbs)+FreezeUntil(freeze_epochs)+scheds,
             reset_opt, start_epoch, n_steps)


class BnFreeze(Callback):
    """Keeps the running statistics of frozen normalisation layers as they are: it leaves them in eval while training

    A layer is frozen if its parameters are; one without parameters, if all of the module around it are. With the
    Learner's default `train_bn=True` `freeze` leaves such layers trainable: give `train_bn=False` too. What `unfreeze`
    makes trainable moves on; parameters frozen by hand and left out by the splitter (`trainable_params`) stay.
    Order: after TrainEvalCallback, which switches the model to train."""
    order = -9
    modes: Any = None  # of the layers that are kept in eval, before

    def before_train(self):
        layers = [*self._layers()]
        kept = [m for m, frozen in layers if frozen]
        if layers and not kept and self.train_bn and self.opt.frozen_idx: warn(
            "BnFreeze keeps nothing: the normalisation layers of frozen groups are trained; `Learner(train_bn=False)` "
            "freezes them too")
        self.modes = snapshot_modes(*kept)
        for m in kept: m.eval()

    def cleanup_train(self):
        if self.modes: restore_modes(self.modes)
        self.modes = None

    def _layers(self):  # with statistics, and whether they are frozen
        for top in self.modules:
            for name, m in top.named_modules():
                if getattr(m, 'running_mean', None) is not None: yield m, _is_frozen(top, name)


def _is_frozen(top, name):
    while not (ps := [*top.get_submodule(name).parameters()]) and name: name = name.rpartition('.')[0]
    return not any(p.requires_grad for p in ps)


@patch
def summary_groups(self: Learner) -> Any:  # a pandas DataFrame, one row a parameter
    "The parameters by group: name, shape, count, the rates they are trained with, and whether they are frozen"
    opt, rows = current_opt(self), []
    torch_group = {p: g for g in opt.opt.param_groups for p in g['params']}
    for i, ps in enumerate(opt.param_lists):
        for p in ps:
            rates = {n: value_at(torch_group[p], opt.places[n]) if n in opt.places else math.nan for n in ('lr', 'wd')}
            rows.append({'group': i, 'name': opt.names[p][0], 'shape': shape(p),
                         'count': None if is_lazy(p) else p.numel(), **rates, 'frozen': not p.requires_grad})
    return optional('pandas', 'summary_groups').DataFrame(rows)
