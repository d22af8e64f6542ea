"""Requests to a running fit, such as Ctrl-C, which it obeys between two batches; and freeing what a traceback holds."""
import gc
import signal
import sys
import threading
from collections import deque
from contextlib import contextmanager
from typing import Any

import torch

from .events import CancelFitException

__all__ = ['StopFlag', 'PauseFit', 'tell', 'stop_error', 'deferred_interrupt', 'free_frames', 'frees_memory']


class PauseFit(BaseException):
    "Ends a fit that is to be gone on with: only `cleanup_x` follow"


class StopFlag:
    """What is asked of a running fit, from any thread; also the handler of Ctrl-C, of which the second acts at once

    'save', 'stop' (ends the fit quietly), 'interrupt' (KeyboardInterrupt), 'exit' (ends the process) or 'pause'."""
    running = False              # does a fit run, that looks here?
    thread: int|None = None      # in which it does, or the last one did
    requested = False            # has something been asked for and not yet been obeyed?
    pressed = False              # was that Ctrl-C?
    held = False                 # is something going on that must not be cut short, so that a second Ctrl-C waits too?
    on_ctrl_c: tuple[str, ...] = ('interrupt',)  # what Ctrl-C asks for
    previous: Any                # the handler that the second one reaches

    def __init__(self): self.previous, self._asked = signal.default_int_handler, deque()

    def ask(self,
        *what: str,    # see above
        by: str = '',  # who asks, for messages
    ) -> None:
        "Ask; safe in signal handlers and threads"
        for k in what: self._asked.append((k, by))
        self.requested = True

    def take(self) -> dict[str, str]:  # by whom each was asked for
        "What has been asked for since the last time"
        self.requested = self.pressed = False
        asked = {}
        while self._asked: asked.update([self._asked.popleft()])
        return asked

    def __call__(self, signum, frame):
        if self.pressed and not self.held: return self.previous(signum, frame)
        self.pressed = True
        self.ask(*self.on_ctrl_c, by='Ctrl-C')
        tell(f"{'Saving' if self.on_ctrl_c == ('save',) else 'Stopping'}: the batch is being finished first; interrupt "
             "again to stop at once.")


def tell(
    message: str,
) -> None:
    "Write a line to stderr from a signal handler"
    try: sys.stderr.write(f"\n{message}\n")
    except Exception: pass  # closed, missing, or in the midst of another write: the request is what counts


def stop_error(
    learn: Any,               # the Learner
    asked: dict[str, str],    # what is asked for, and by whom
) -> BaseException|None:      # None: nothing of what is asked for ends the run
    "What ends the run: KeyboardInterrupt, SystemExit, a cancel, or a pause"
    kind = next((k for k in ('exit', 'interrupt', 'stop', 'pause') if k in asked), None)
    if kind is None: return None
    if kind == 'pause': return PauseFit()
    by = asked[kind]
    if learn.run_kind == 'fit': learn.stopped_by = by
    if kind == 'exit': return SystemExit(128 + signal.Signals['SIGINT' if by == 'Ctrl-C' else by])  # as shells count
    if kind == 'stop': return CancelFitException() if learn._scope else None  # the fit is over anyway
    if not learn._scope: return KeyboardInterrupt("stopped when the fit was over")
    hint = '; `learn.resume()` goes on from there'*(learn.run_kind == 'fit')
    if not learn.stage: return KeyboardInterrupt(f"stopped in epoch {learn.epoch+1} of {learn.n_epoch}{hint}")
    return KeyboardInterrupt(f"stopped in epoch {learn.epoch+1} of {learn.n_epoch}, after {learn.stage} batch "
                             f"{learn.iter+1} of {learn.n_iter or '?'}{hint}")


@contextmanager
def deferred_interrupt(
    flag: StopFlag,  # what the signal sets
):
    "Let Ctrl-C set `flag` for the block; in the main thread only, and only where a Python function handles it now"
    flag.take()
    flag.running, flag.thread = True, threading.get_ident()
    old = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    handled = callable(old)  # not in another thread; by a handler in C; or if the process is to ignore it, or die of it
    try:
        if handled:
            flag.previous = old
            signal.signal(signal.SIGINT, flag)
        yield
    finally:
        if handled: signal.signal(signal.SIGINT, old)
        flag.running = False
        flag.take()  # what was not obeyed, since something else ended the fit, is over too


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
