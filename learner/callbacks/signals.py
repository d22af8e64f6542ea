"""SignalCallback: what signals do to a fit: save it, end it, or both, between two batches."""
import math
import os
import signal
import threading
from contextlib import ExitStack
from functools import partial
from time import monotonic, sleep
from traceback import walk_tb

from ..callback import Callback
from ..events import CancelFitException
from ..interrupt import tell
from ..learner import Learner
from ..loader import Loader
from ..utils import warn
from ..workers import end_all_workers, end_workers, is_worker_error
from .checkpoint import Checkpoint

__all__ = ['SignalCallback']

endings = {'stop', 'interrupt', 'exit'}


class SignalCallback(Callback):
    """Lets signals save a fit, end it, or both: after the batch under way, or while the loop waits for workers at once

    An action is None (the signal is left as it is) or words joined by '+': 'save', and one of 'stop' (ends quietly,
    `learn.stopped_by` is then 'SIGTERM'; for SIGINT it is 'Ctrl-C'), 'interrupt' (KeyboardInterrupt) and 'exit' (ends
    the process with 128 and the signal's number). With a Checkpoint an ending saves too, unless it has `at_end=False`.
    A second signal of a kind that ends the fit acts at once, as without this callback; one that only saves saves again.
    A function of yours that handled the signal before is called too. A signal that the process ignores (SIGHUP under
    nohup) goes on being ignored, with a warning. Workers of loaders ignore all but SIGTERM; if they die of that
    together with the main process, its fit still ends as asked. Where the system lacks a signal, nothing waits for it.
    Raises: ValueError for a word that is none; at the start of a fit, if there is no Checkpoint that could 'save'.
    Order: before all others, so that signals are heard while these begin and are cleaned up."""
    order = -math.inf
    run_in = {'fit'}
    unique = True

    def __init__(self,
        sigint: str|None = None,          # Ctrl-C, or a notebook's Stop; None: 'interrupt', as without this callback
        sigterm: str|None = 'save+stop',  # of `kill`, `timeout`, schedulers and containers that end
        sighup: str|None = None,          # of a terminal that is closed
        sigusr1: str|None = None,         # of your own choice, such as SLURM's `--signal=USR1@90`
        sigusr2: str|None = None,         # likewise
    ):
        given = dict(SIGINT=sigint, SIGTERM=sigterm, SIGHUP=sighup, SIGUSR1=sigusr1, SIGUSR2=sigusr2)
        self.actions = {name: _words(name, action) for name, action in given.items() if action is not None}
        self.undo = ExitStack()           # puts back what a fit found
        self.old, self.heard = {}, set()  # handlers before ours, and the signals that end this fit, by number

    def before_fit(self):
        self.undo, self.old, self.heard, self.pid = ExitStack(), {}, set(), os.getpid()
        saves = [name for name, words in self.actions.items() if 'save' in words]
        if saves and not any(isinstance(cb, Checkpoint) for cb in self.learn.cbs): raise ValueError(
            f"{self}: {saves[0]} is to save, and there is no Checkpoint among the callbacks, which would: add one, or "
            f"give {saves[0].lower()} an action without 'save'")
        if threading.current_thread() is not threading.main_thread(): return warn(
            f"{self}: signals cannot be handled in this fit, since it runs in a thread other than the main one")
        for name, words in self.actions.items():
            if hasattr(signal, name): self._listen(name, words)
        if self.old: self._be_ready()

    def _listen(self, name, words):
        n, flag = getattr(signal, name), self.learn._stop
        old = signal.getsignal(n)
        if old is flag:  # Ctrl-C, which the fit itself listens to
            self.undo.callback(setattr, flag, 'on_ctrl_c', flag.on_ctrl_c)
            flag.on_ctrl_c = words
        elif old in (signal.SIG_IGN, None):
            warn(f"{self}: {name} is {'ignored by this process' if old else 'handled by a library'}, and left so")
        else:
            self.old[n] = old
            self.undo.callback(signal.signal, n, old)
            signal.signal(n, self._hear)

    def cleanup_fit(self):
        try:
            if self.heard: self._end_workers()
        finally: self.undo.close()

    def _hear(self, signum, frame):
        old, name = self.old[signum], signal.Signals(signum).name
        if os.getpid() != self.pid:  # a process forked from this one: by SIGTERM, multiprocessing ends such
            return self._as_ever(signum, frame) if signum == signal.SIGTERM or callable(old) else None
        if signum in self.heard: return self._as_ever(signum, frame)
        words, ends = self.actions[name], not endings.isdisjoint(self.actions[name])
        self.learn._stop.ask(*words, by=name)
        if ends: self.heard.add(signum)
        if callable(old) and old is not signal.default_int_handler: old(signum, frame)
        tell(f"{name}: {' and '.join(words)}, when the batch is finished" + "; a second one acts at once."*ends)
        if not ends or not self._is_waiting(frame): return
        try: self.learn._rest()
        except BaseException as e:
            self.learn._stop.ask(*words, by=name)  # again: if a `__del__` is at work here, what is raised is lost
            if isinstance(e, CancelFitException): raise _Ended from None
            raise

    def _as_ever(self, signum, frame):  # what the process would do without us
        if callable(old := self.old[signum]): return old(signum, frame)
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)

    # ---- workers that die of the signal too

    def _be_ready(self):
        own, inner = vars(self.learn), self.learn.all_batches
        self.undo.callback(partial(own.update, all_batches=inner) if 'all_batches' in own else
                           partial(own.pop, 'all_batches', None))
        own['all_batches'] = partial(self._all_batches, inner)
        self._watch()

    def _watch(self):  # torch's handler, which would raise its error in the midst of anything
        if not hasattr(signal, 'SIGCHLD'): return
        old = signal.getsignal(signal.SIGCHLD)
        if not callable(old) or getattr(old, 'func', None) == self._child_ended: return
        self.undo.callback(signal.signal, signal.SIGCHLD, old)
        signal.signal(signal.SIGCHLD, partial(self._child_ended, old))

    def _child_ended(self, old, signum, frame):
        while True:  # torch tells of one loader's workers at a time
            try: return old(signum, frame)
            except RuntimeError as e:
                waits = end_workers.__code__ in _stack(frame) or self._is_waiting(frame)  # for what will not come
                if waits or not is_worker_error(e) or not self._is_end(frame): raise

    def _is_end(self, frame):  # is a signal heard that ends the fit, or on its way? Workers may get theirs first
        until, hearing = monotonic()+.5, SignalCallback._hear.__code__ in _stack(frame)
        while not hearing and not self.heard and monotonic() < until: sleep(.01)
        return hearing or self.heard

    def _end_workers(self):  # they may be dead, and kept for the next fit, which makes new ones; or be about to die
        for dl in self.learn.dls.loaders:
            end_all_workers(dl.dl)
            dl.restart_workers()

    def _all_batches(self, inner):  # the Learner's, but for an end that comes while a batch is fetched
        learn, dl = self.learn, self.learn.dl
        learn.dl = _Beginning(self, dl)
        try: return inner()
        except _Ended: raise CancelFitException from None
        except RuntimeError as e:
            in_batch = any(frame.f_code is Learner.one_batch.__code__ for frame, _ in walk_tb(e.__traceback__))
            if in_batch or not is_worker_error(e) or not self._may_end(): raise
        finally: learn.dl = dl
        learn._rest()

    def _may_end(self):  # is an end asked for, in a loop that can be gone on with, and no batch under way?
        learn = self.learn
        return (self.heard and learn._stop.requested and learn.run_kind == 'fit' and
                all(scope[0] != 'batch' for scope in learn._scopes()))

    def _is_waiting(self, frame):  # for workers, with nothing under way in this process?
        loop, seen = SignalCallback._all_batches.__code__, set()
        for code in _stack(frame):
            if code in (loop, Learner.one_batch.__code__, Learner._rest.__code__):
                return code is loop and Loader._guarded.__code__ in seen and self._may_end()
            seen.add(code)


class _Ended(BaseException):
    "A quiet end on its way through torch's code, which takes an Exception for a failure of its own"


class _Beginning:
    "Stands for a loader until its workers and its first batches are planned, which is a place to go on from"
    def __init__(self, cb, dl): self.cb, self.dl = cb, dl
    def __getattr__(self, name): return getattr(self.dl, name)

    def __iter__(self):
        self.cb.learn.dl = self.dl
        batches = iter(self.dl)
        self.cb._watch()  # the first workers of a process bring torch's handler with them
        if self.cb._may_end(): self.cb.learn._rest()
        return batches


def _words(name, action):
    words = tuple(action.split('+')) if isinstance(action, str) else ()
    n_endings = len(endings.intersection(words))
    if not words or {*words} - {'save', *endings} or n_endings > 1 or len({*words}) < len(words): raise ValueError(
        f"SignalCallback: {name.lower()}={action!r}; give None, 'save', one of {', '.join(map(repr, sorted(endings)))},"
        " or both joined, such as 'save+stop'")
    return words


def _stack(frame):  # the code that is at work, innermost first
    while frame:
        yield frame.f_code
        frame = frame.f_back
