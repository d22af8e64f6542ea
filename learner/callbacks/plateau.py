"""ReduceLROnPlateau: a learning rate that falls where the table shows no progress."""
from typing import Any

from ..display import say
from ..utils import check_number
from .schedule import ParamScheduler, Scheduler
from .torch_schedule import TorchScheduler
from .tracker import TrackerCallback

__all__ = ['ReduceLROnPlateau']


class ReduceLROnPlateau(TrackerCallback):
    """Divides the learning rates of all groups by `factor` when there has been no new best for some epochs

    It holds from the next epoch on, and a line says so; the next fit begins with its own rates again. An epoch in which
    the column's phase had no batch is not counted.
    Raises: ValueError or TypeError if a parameter means nothing; ValueError before training if a schedule sets the
    learning rate too.
    Order: after what saves the best model, before what stops the fit."""
    order = TrackerCallback.order + 2
    state = (*TrackerCallback.state, 'wait', 'resting', 'start')
    wait = 0         # epochs since the last new best
    resting = 0      # epochs that are not counted yet
    start: Any = None  # the rates with which the fit began, one a group; None outside of it
    _news = ''       # what is to be said once the row is shown

    def __init__(self,
        monitor: str = 'valid_loss',  # column of a loss or a metric
        comp: Any = None,             # what is better: 'min' (or np.less), 'max' (np.greater); None: as the metric says
        min_delta: float = 0.,        # better by no more than this is not better
        patience: int = 1,            # so many epochs in a row without a new best make it act
        factor: float = 10.,          # what rates are divided by
        min_lr: float = 0.,           # no rate falls below
        cooldown: int = 0,            # so many epochs after it has acted are not counted
        reset_on_fit: bool = True,    # forget `best` when a fit starts; `wait` begins anew in any case
    ):
        super().__init__(monitor, comp, min_delta, reset_on_fit)
        for name, n, least in ('patience', patience, 1), ('cooldown', cooldown, 0):
            check_number(f'{self}: `{name}`', n, least, whole=True, of='epochs')
        check_number(f'{self}: `factor`, by which rates are divided,', factor, 1, above=True)
        check_number(f'{self}: `min_lr`', min_lr, 0)
        self.patience, self.factor, self.min_lr, self.cooldown = patience, factor, min_lr, cooldown

    def before_fit(self):
        super().before_fit()
        self.wait, self.resting, self._news, self.start = 0, 0, '', [h['lr'] for h in self.opt.hypers]

    def before_epoch(self):  # by now all that a callback brings into the fit is there
        for cb in self.learn.ordered:
            if isinstance(cb, ParamScheduler) and 'lr' in {*cb.scheds, *cb.factors} or isinstance(cb, TorchScheduler):
                self._refuse(cb)
        if self._news: say(self._news)
        self._news = ''

    def _refuse(self, cb: Scheduler): raise ValueError(
        f"{self} and {cb} both set `lr`, and {cb} would undo the other's work at the next step: leave one out; `fit` "
        "has no schedule of its own, as `fit_one_cycle` has")

    def looked(self, value):
        if value is None: return
        self.wait = 0 if self.new_best or self.resting else self.wait+1
        self.resting = max(0, self.resting-1)

    def after_epoch(self):
        super().after_epoch()
        if self.wait < self.patience: return
        old = [h['lr'] for h in self.opt.hypers]
        new = [min(lr, max(lr/self.factor, self.min_lr)) for lr in old]
        for h, lr in zip(self.opt.hypers, new): h['lr'] = lr
        if new != old: self._news = (
            f"After epoch {self.epoch+1} of {self.n_epoch} the learning rate is "
            f"{', '.join(f'{lr:.3g}' for lr in new)}: "
            f"`{self.monitor}` gave no new best for {self.wait} epoch{'s'*(self.wait > 1)}")
        self.wait, self.resting = 0, self.cooldown

    def cleanup_fit(self):
        if self.start is None: return  # an error came before
        for h, lr in zip(self.opt.hypers, self.start): h['lr'] = lr
        self.start = None
