"""Fine-tuning by groups: freezing, `fine_tune`, BnFreeze, and the table of groups."""
import math
from numbers import Real
from typing import Any

import numpy as np
from fastcore.basics import patch
from fastcore.foundation import L
from torch.nn.parameter import is_lazy

from ..callback import Callback
from ..frame import current_opt
from ..hypers import value_at
from ..layers import running_norms
from ..learner import Learner
from ..schedules import combined_cos
from ..splitters import shape
from ..utils import check_number, optional, warn
from .fits import check_numbers, mom_sched
from .schedule import ParamScheduler, steps_of

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
    """Trains the last parameter group alone at first, and all of them from some place in the fit on

    As with a ParamScheduler what counts is the optimizer's steps: '1ep' is as many as an epoch has.
    Raises: ValueError at the start of a fit if there is only one group, with the table of groups, or no such place.
    Order: before all that look at what is frozen."""
    run_in = {'fit'}
    run_valid = False
    order = -20
    state = ('first', 'begun', 'frozen')
    first = 0        # value of `learn.n_step` at the fit's very first step
    begun = 0        # the same at the first step of this process
    until = 0        # the step that trains all groups
    ends = math.inf  # the fit's number of steps
    flags: Any = ()  # each parameter, and whether it was trained before
    frozen = False

    def __init__(self,
        when: float|str,  # as a ParamScheduler's `begin`: a fraction of the fit, '500it' or '2ep'
    ): self.when = when

    def before_fit(self):
        n, self.begun = self.n_steps or self.dls.train.n_batches, self.learn.n_step
        self.flags = [(p, p.requires_grad) for p in self.opt.all_params()]
        total = self.learn.total_steps or (None if n is None else n*self.n_epoch)
        self.until, self.ends = steps_of(self.when, n, self.n_epoch, total), math.inf if total is None else total
        self.first = self.begun - steps_of(f'{self.epoch}ep' if self.epoch else 0, n, self.n_epoch)
        self.frozen = self.begun-self.first < self.until
        self.opt.freeze_to(-1 if self.frozen else 0)

    def before_epoch(self): self._thaw()
    def before_batch(self): self._thaw()

    def _thaw(self):
        if not self.frozen or self.learn.n_step-self.first < self.until: return
        self.opt.unfreeze()
        self.frozen = False

    def cleanup_fit(self):
        flags, self.flags = self.flags, ()
        if self.learn.n_step == self.begun:  # refused before training
            for p, trained in flags: p.requires_grad_(trained)
        elif self.frozen and self.until < self.ends and not self.learn.paused: warn(
            "the fit ended while only the last group was trained: `learn.unfreeze()` makes all trainable")


@patch
def fine_tune(self: Learner,
    epochs: int,                   # epochs that train all groups
    base_lr: float|list|slice = 2e-3,  # highest rate of the last group while the others are frozen; then half of it
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
    resume: Any = None,            # True or a file: go on from a checkpoint, as `fit` does
    allow: Any = (),               # what may differ from it, as `fit` takes it
) -> None:
    """Train the last group alone, then all of them with lower rates for the earlier ones: two one-cycles in one fit

    Where `base_lr` is a list or slice, such as `lr_find` may suggest, it gives all groups their rates, and `lr_mult` is
    not used. A fit that ends in the first part leaves the groups frozen, and says so.
    Raises: ValueError or TypeError, before training; with the table of groups if there is only one."""
    _check_epochs(epochs=epochs, freeze_epochs=freeze_epochs)
    check_numbers(lr_mult=lr_mult, div=div, div_final=div_final, pct_start=pct_start)
    if len((opt := current_opt(self)).hypers) == 1 and freeze_epochs: opt.freeze()  # raises
    one = isinstance(base_lr, Real)
    rates = opt.values_of('base_lr', slice(base_lr) if one else base_lr)
    later = opt.values_of('base_lr', slice(rates[-1]/2/lr_mult, rates[-1]/2)) if one else [lr/2 for lr in rates]
    scheds, begin = [], 0
    for n, lr, pct, start_div in [(freeze_epochs, rates, .99, 25.), (epochs, later, pct_start, div)]:
        lr = np.array(lr)
        if n: scheds.append(ParamScheduler(
            {'lr': combined_cos(pct, lr/start_div, lr, lr/div_final), **mom_sched(self, pct, moms)},
            begin=f'{begin}ep', end=f'{begin+n}ep'))
        begin += n
    cbs = L(cbs)+FreezeUntil(f'{freeze_epochs}ep')+scheds
    self.fit(begin, later, wd, cbs, reset_opt, start_epoch, n_steps, resume, allow)


def _check_epochs(**numbers):
    for name, n in numbers.items():
        check_number(f'fine_tune: `{name}`', n, 0, whole=True, of='epochs')


class BnFreeze(Callback):
    """Keeps the running statistics of frozen normalisation layers as they are: it leaves them in eval while training

    A layer is frozen if its parameters are; one without parameters, if all of the module around it are. With the
    Learner's default `train_bn=True` `freeze` leaves such layers trainable: give `train_bn=False` too. What `unfreeze`
    makes trainable moves on; parameters frozen by hand and left out by the splitter (`trainable_params`) stay.
    Order: after TrainEvalCallback, which switches the model to train."""
    order = -9
    state = ('kept',)
    kept: Any = ()  # numbers of the layers that this epoch's training leaves in eval, though they were not before

    def before_train(self):
        layers = self._layers()
        frozen = [m for m, is_frozen in layers if is_frozen]
        if layers and not frozen and self.train_bn and any(not p.requires_grad for p in self.opt.all_params()): warn(
            "BnFreeze keeps nothing: the normalisation layers of frozen groups are trained; `Learner(train_bn=False)` "
            "freezes them too")
        self.kept = [i for i, (m, is_frozen) in enumerate(layers) if is_frozen and m.training]
        for m in frozen: m.eval()

    def cleanup_train(self):
        layers = [m for m, _ in self._layers()]
        for i in self.kept:
            if i < len(layers): layers[i].train()  # else another model has been put in
        self.kept = []

    def _layers(self):  # with statistics, and whether they are frozen
        return [pair for m in self.modules for pair in running_norms(m)]


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
