"""`learn.find_batch_size()`: the largest batch with which real training steps fit in memory."""
import gc
import os
import resource
import sys

import torch
from fastcore.basics import patch

from ..callback import Callback
from ..display import say
from ..events import CancelFitException
from ..learner import Learner
from ..no_trace import trial
from ..resampled import remade
from ..utils import check_number

__all__ = []  # a method of the Learner only

class _Steps(Callback):
    "Ends the trial after some steps; order: after all others"
    order = 1000
    run_in = {'lr_find'}
    run_valid = False

    def __init__(self, n): self.n, self.done = n, 0

    def after_batch(self):
        self.done += 1
        if self.done >= self.n: raise CancelFitException


def _is_out_of_memory(e: BaseException) -> bool:
    if isinstance(e, (torch.OutOfMemoryError, MemoryError)): return True
    return isinstance(e, RuntimeError) and any(s in str(e).lower() for s in ('out of memory', "can't allocate memory"))


def _peak() -> int:  # bytes that this process has used at most
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == 'darwin' else peak*1024


def _too_much(device, before: int) -> str:  # on a CPU: would twice what the last size took be more than there is?
    if device.type != 'cpu': return ''
    there = os.sysconf('SC_PAGE_SIZE')*os.sysconf('SC_PHYS_PAGES')
    need = _peak()+2*(_peak()-before)
    return f"may need {need/2**30:.1f} of {there/2**30:.1f} GiB" if need > .9*there else ''


@patch
def find_batch_size(self: Learner,
    start: int|None = None,  # the first size that is tried; None: the present one
    most: int|None = None,   # the largest one that is tried; None: as many items as there are
    n_steps: int = 3,        # training steps at each size, since optimizers take memory at the first
) -> int:
    """Double the batch size until training steps no longer fit in memory, or halve it until they do; nothing changes

    Make the DataLoaders anew with what is found. On a CPU, where the system would end the process, it stops before a
    size that may need more than nine tenths of the machine's memory.
    Raises: TypeError if the training loader is no DataLoader of items; ValueError or TypeError for odd numbers; the
    out-of-memory error if a single item does not fit; whatever else a fit would raise."""
    dl = self.dls.train.dl
    remade(dl, 'find_batch_size')  # raises if it cannot be
    n_items = len(dl.dataset)
    first, last = self.dls.bs if start is None else start, n_items if most is None else most
    for name, n in dict(start=first, most=last, n_steps=n_steps).items():
        check_number(f'find_batch_size: `{name}`', n, 1, whole=True)
    last = min(last, n_items)
    size, best, before = min(first, last), 0, _peak()
    while not (why := _tried(self, dl, size, n_steps) or ''):
        best = size
        if size == last or (why := _too_much(self.device, before)): break
        size = min(2*size, last)
    while not best:  # the first one did not fit
        size //= 2
        if not _tried(self, dl, size, n_steps): best = size
    more = f'twice that: {why}' if why else 'which is all there are' if best == n_items else 'the most asked for'
    say(f"find_batch_size: {best} items, {more}")
    return best


def _tried(learn, dl, size, n_steps) -> str:  # '' if it fits, else why not
    steps = _Steps(n_steps)
    try: trial(learn, steps, n_steps, 'find_batch_size', lambda: f'{steps.done} steps of {size} items',
               batches=remade(dl, 'find_batch_size', batch_size=size, drop_last=True))
    except Exception as e:
        if not _is_out_of_memory(e) or size == 1: raise
        e.__traceback__ = None  # its frames hold the batch
        gc.collect()
        if learn.device.type == 'cuda': torch.cuda.empty_cache()
        return 'out of memory'
    return ''
