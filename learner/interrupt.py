"""Ctrl-C between two batches instead of in the midst of one, and freeing the memory that a stored traceback holds."""
import gc
import signal
import sys
import threading
from contextlib import contextmanager

import torch

__all__ = ['StopFlag', 'deferred_interrupt', 'free_frames', 'frees_memory']


class StopFlag:
    "A signal handler that only remembers the first Ctrl-C; the second one acts at once"
    requested = False  # has a stop been asked for and not yet been obeyed?
    held = False       # is something going on that must not be cut short, so that a second one waits too?

    def __init__(self): self.previous = signal.default_int_handler

    def __call__(self, signum, frame):
        if self.requested and not self.held: return self.previous(signum, frame)
        self.requested = True
        try: sys.stderr.write("\nStopping: the batch is being finished first; interrupt again to stop at once.\n")
        except Exception: pass  # closed, missing, or in the midst of another write: the flag is what counts


@contextmanager
def deferred_interrupt(
    flag: StopFlag,  # what the signal sets
):
    "Let Ctrl-C set `flag` for the block; in the main thread only, and only where a Python function handles it now"
    flag.requested = False
    old = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if not callable(old):  # in another thread; or a handler in C; or the process is to ignore the signal, or die of it
        yield
        return
    flag.previous = old
    signal.signal(signal.SIGINT, flag)
    try: yield
    finally:
        signal.signal(signal.SIGINT, old)
        flag.requested = False  # what was not obeyed, since something else ended the fit, is over too


def free_frames(
    e: BaseException,                      # an interrupt or an out-of-memory error that is on its way to the user
    handled: BaseException|None = None,    # what the caller was handling: it and all before it stay as they are
) -> None:
    "Let go of the batches and graphs that the finished frames of `e` hold, so that a notebook's memory is free again"
    todo, seen = [e], {id(handled)}
    while todo:
        e = todo.pop()
        if e is None or id(e) in seen: continue
        seen.add(id(e))
        todo += [e.__cause__, e.__context__, *getattr(e, 'exceptions', ())]
        tb = e.__traceback__
        while tb:
            try: tb.tb_frame.clear()
            except RuntimeError: pass    # still running: this frame and its callers
            else: tb.tb_frame.f_locals   # reading it drops what a debugger's earlier look has cached
            tb = tb.tb_next
    gc.collect()  # cells of closures that refer to themselves


def frees_memory(e: BaseException) -> bool:
    "Is `e` one whose stored traceback only costs memory: an interrupt, or being out of memory?"
    return isinstance(e, (KeyboardInterrupt, torch.OutOfMemoryError, MemoryError))
