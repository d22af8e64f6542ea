"""EmptyCacheCallback: memory of the accelerator that torch keeps for later is given back while training."""
from typing import Any

import torch

from ..callback import Callback
from ..utils import warn

__all__ = ['EmptyCacheCallback']


class EmptyCacheCallback(Callback):
    """Gives memory that torch has freed and keeps for itself back to the GPU, for other processes or larger pieces

    Torch has to ask for it again, so it costs time, after each batch much of it. It frees nothing that is in use.
    Raises: ValueError if all are False.
    Order: after all others, which may let go of memory."""
    order = 1000
    run_in = {'fit'}
    free: Any = None  # what does it on the device; None: there is nothing that could be freed
    told = False

    def __init__(self,
        before_epoch: bool = False,  # before each epoch
        after_epoch: bool = True,    # after each epoch, its validation included
        after_batch: bool = False,   # after each batch, of training and validation
    ):
        chosen = dict(before_epoch=before_epoch, after_epoch=after_epoch, after_batch=after_batch)
        if not any(chosen.values()): raise ValueError(
            f"EmptyCacheCallback: {', '.join(chosen)} are all False, so it would do nothing: choose one")
        super().__init__(**{name: EmptyCacheCallback._empty for name, wanted in chosen.items() if wanted})

    def before_fit(self):
        self.free = getattr(torch.get_device_module(self.device), 'empty_cache', None)
        if self.free is not None or self.told: return
        self.told = True
        warn(f"{self}: there is no accelerator whose memory could be freed; the fit is on `{self.device}`")

    def _empty(self):
        if self.free: self.free()

    def cleanup_fit(self): self.free = None
