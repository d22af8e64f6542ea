"""SyncBuffersCallback: what each of several processes has gathered in buffers, such as running means, is averaged."""
import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy

from ..callback import Callback
from ..display import say
from .validate_every import EvalPass, ValidateEvery

__all__ = ['SyncBuffersCallback']


class SyncBuffersCallback(Callback):
    """Averages the model's floating-point buffers over all processes when an epoch's training is over

    So all of them validate, and save, the same running statistics. In a fit with ValidateEvery, or by `fit_iters`, it
    is done before each evaluation of ValidateEvery's, and at the end, instead: there epochs mean nothing. Evaluations
    that a user makes do not do it, as one process may make them alone. Whole numbers stay each process's own.
    All processes have to come to the same epochs, or steps: an epoch that one of them cancels is averaged at its end,
    and what ends a fit has to end it in all of them.
    Raises: ValueError at the start of a fit with a ValidateEvery by time, which processes come to at different steps.
    Order: before averages of weights (12), which put others in for an evaluation."""
    run_in = {'fit', 'validate'}
    unique = True
    trains = False    # is this a fit with other processes?
    averaged = False  # has it been done in this epoch?
    told = False

    def before_fit(self):
        if self.learn.run_kind != 'fit': return
        self.averaged = False
        self.trains = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if self.trains and any(e.unit == 's' for cb in self._validates() for e in cb.everys): raise ValueError(
            f"{self}: each process comes to a time at another step, and would wait for the others for ever: give "
            "ValidateEvery steps ('500it') or epochs ('1ep')")
        if self.trains or self.told: return
        self.told = True
        say(f"{self}: this is the only process of its group (`torch.distributed.init_process_group` makes one of "
            "several), so nothing is averaged")

    def _validates(self): return [cb for cb in self.learn.cbs if isinstance(cb, ValidateEvery)]

    def _by_steps(self): return self.learn.total_steps is not None or bool(self._validates())

    def after_train(self):
        if self._by_steps(): return  # passes over the data may be of other lengths in other processes
        self.averaged = True
        self._average()

    def before_validate(self):  # one that a user makes within the fit, perhaps in one process only, must not wait
        if self.learn.run_kind == 'validate' and any(isinstance(cb, EvalPass) for cb in self.learn.cbs):
            self._average()

    def after_epoch(self):  # the others average in their `after_train`, which a cancelled epoch may not have reached
        if not (self.averaged or self.learn.trained or self._by_steps()): self._average()

    # nothing is averaged after an error or interrupt: this process could wait for ever for others that have one too
    def cleanup_epoch(self): self.averaged = False

    def after_fit(self):
        if not self.learn.paused and self._by_steps(): self._average()

    def cleanup_fit(self):
        if self.learn.run_kind == 'fit': self.trains = False

    @torch.no_grad()
    def _average(self):
        if not self.trains: return
        found = [b for b in self.model.buffers() if b.is_floating_point() and not is_lazy(b)]
        for device in dict.fromkeys(b.device for b in found):
            own = [b for b in found if b.device == device]
            # in double precision, where a sum of equal numbers is exact: constants stay as they are, bit for bit
            mean = torch.cat([b.detach().reshape(-1).double() for b in own])
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
            for b, new in zip(own, mean.split([b.numel() for b in own])): b.copy_(new.view_as(b))
