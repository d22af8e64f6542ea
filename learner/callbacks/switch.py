"""SwitchAt: a fit's last epochs are trained another way, such as without strong augmentation or with another loss."""
import sys
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet

from ..callback import Callback
from ..loader import untouched
from ..state import keyed
from ..utils import check_number, rng_state, set_rng_state, warn
from .iterations import Iterations
from .resume import Resuming

__all__ = ['SwitchAt']

left: Any = WeakSet()  # Learners that a fit which is over has left switched


class SwitchAt(Callback):
    """Calls `do(learn)` before the first epoch that is to be trained another way: it changes data, model or loss

    It is called once a fit, before the first epoch from that one on. Workers that the loaders keep are started anew, so
    that they see data sets as they are then. `undo(learn)` is called when the fit is over, also by an error; a fit that
    was stopped and can be gone on with stays as it is. Without `undo` later fits begin so, and say so.
    In a new process `do` is called, with the same random streams, before the state of a fit that had switched is put
    back. That state is compared with the Learner as it was made, so what `do` adds to the optimizer or has exchanged
    for a training loader of another size is refused there.
    Raises: TypeError or ValueError for what is no epoch or no function; at the start of a fit, ValueError for an
    `epoch` below 0 if nobody knows which epochs are the last.
    Order: before all that looks at data, parameters and modes of an epoch (short epochs are at -50, modes at -10);
    after SkipToEpoch (-100), which says where a fit begins."""
    order = -60
    run_in = {'fit'}
    run_valid = False
    rng: Any = None  # the random streams when `do` was called; None: nothing is switched
    told = False     # has it been said that a fit begins with things switched?

    def __init__(self,
        epoch: int,                  # number of that epoch, counted from 0; -15: the last 15, or all if there are fewer
        do: Callable,                # `do(learn)` switches
        undo: Callable|None = None,  # `undo(learn)` puts back what `do` has changed; None: it stays
    ):
        check_number('SwitchAt: `epoch`', epoch, whole=True, of='epochs')
        for name, f in dict(do=do, undo=undo).items():
            if not callable(f) and (name, f) != ('undo', None): raise TypeError(
                f"SwitchAt: `{name}` is a `{type(f).__name__}`, not a function of the Learner")
        self.first, self.do, self.undo = int(epoch), do, undo

    @property
    def switched(self) -> bool: "Is what `do` changes changed?"; return self.rng is not None

    def before_fit(self):
        self._check()
        rng = self._resumed()
        if self.switched and not rng: self._put_back()  # it was stopped, and is not what is gone on with
        if rng and not self.switched:
            with untouched():
                set_rng_state(rng)
                self._switch()
        elif not rng and not self.told and (self.switched or self.learn in left):
            self.told = True
            warn(f"{self}: this fit begins with what an earlier one has switched; `undo=…` puts it back")

    def _check(self):
        n, forever = self.n_epoch, self.n_epoch == sys.maxsize
        by_steps = any(isinstance(cb, Iterations) for cb in self.learn.cbs)
        if self.first < 0 and (by_steps or forever): raise ValueError(
            f"{self}: epoch={self.first} counts from the end, and " + (
                "which passes over the data are the last ones of `fit_iters` is known when they are over"
                if by_steps else "a fit of `learn.step` has none without `n_epoch`") + ": give 0 or more")
        if 0 < n <= self.first and not by_steps: warn(
            f"{self}: this fit has no epoch {self.first}, but {n}, counted from 0: nothing will be switched")

    def _resumed(self):  # the random streams from which the fit that is gone on with has switched, if it had
        for cb in self.learn.cbs:
            if not isinstance(cb, Resuming) or not cb.data: continue
            key = next(k for k, o in keyed(self.learn).items() if o is self)
            return cb.data['callbacks'].get(key, {}).get('rng')
        return None

    def before_epoch(self):  # not `before_train`: by then the loader is chosen, and what is trained has been looked at
        first = self.first if self.first >= 0 else self.n_epoch+self.first
        if not self.switched and self.epoch >= first: self._switch()

    def cleanup_fit(self):  # not `after_fit`: errors have none; there the best model is loaded, and the end is saved
        if not self.switched or self.learn.paused: return
        if self.undo is None and not self.learn.rehearsing: left.add(self.learn)
        self._put_back()

    def _switch(self):
        rng = rng_state()
        self.do(self.learn)
        self.rng = rng
        self._restart()

    def _put_back(self):
        if self.undo is None: return
        self.rng = None  # first: if it fails, trying again would not help
        self.undo(self.learn)
        self._restart()

    def _restart(self):  # workers, and the iteration that `fit_iters` keeps for the next call: it is replayed then
        for dl in self.learn.dls.loaders:
            if not isinstance(dl.dl, Iterator): dl._held = None
            dl.restart_workers()

    def state_dict(self) -> dict[str, Any]:
        "Whether things are switched, and the random streams from which that was done"
        return dict(rng=self.rng)

    def load_state_dict(self, state: dict[str, Any]) -> None:  # what `state_dict` gave
        "Nothing: whether things are switched is a fact, and `before_fit` has made it the one that is gone on with"
