"""SignalCallback: what signals do to a fit: save it, end it, or both, between two batches."""
import math
import os
import signal
import threading
from contextlib import ExitStack
from time import monotonic, sleep

from ..callback import Callback
from ..interrupt import tell
from ..utils import warn
from .checkpoint import Checkpoint

__all__ = ['SignalCallback']

endings = {'stop', 'interrupt', 'exit'}


class SignalCallback(Callback):
    """Lets signals save a fit, end it, or both, when the batch under way is finished

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
        self._hush()

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

    def before_train(self): self.dl.on_failure = self._workers_failed
    def before_validate(self): self.dl.on_failure = self._workers_failed

    def cleanup_fit(self):
        try:
            for dl in self.dls.loaders:
                dl.on_failure = None
                if not self.heard: continue
                dl.close()  # workers may be dead, or about to die, which is no matter as long as this is at work
                dl.restart_workers()
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

    def _as_ever(self, signum, frame):  # what the process would do without us
        if callable(old := self.old[signum]): return old(signum, frame)
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)

    # ---- workers that die of the signal too, if it is sent to all processes of a job

    def _hush(self):  # torch's handler, which raises in the midst of anything; a loader sees dead workers by itself
        from torch.utils.data._utils.signal_handling import _set_SIGCHLD_handler
        if not hasattr(signal, 'SIGCHLD') or not any(getattr(dl, 'num_workers', 0) for dl in self.dls.loaders): return
        _set_SIGCHLD_handler()  # as the first workers of a process do; from then on it is not set again
        if not callable(old := signal.getsignal(signal.SIGCHLD)): return
        def quiet(signum, frame):  # a handler of the user's, which torch's calls, is called as ever
            try: old(signum, frame)
            except RuntimeError as e:
                if not str(e).startswith('DataLoader worker'): raise  # torch has no type of its own for it
        self.undo.callback(signal.signal, signal.SIGCHLD, old)
        signal.signal(signal.SIGCHLD, quiet)

    def _workers_failed(self):  # nothing is under way: what was asked for is done now, and their error is no matter
        until = monotonic()+.5  # they may have got the signal before this process
        while not self.heard and monotonic() < until: sleep(.01)
        if self.heard and self.learn._stop.requested and self.run_kind == 'fit': self.learn._rest()


def _words(name, action):
    words = tuple(action.split('+')) if isinstance(action, str) else ()
    n_endings = len(endings.intersection(words))
    if not words or {*words} - {'save', *endings} or n_endings > 1 or len({*words}) < len(words): raise ValueError(
        f"SignalCallback: {name.lower()}={action!r}; give None, 'save', one of {', '.join(map(repr, sorted(endings)))},"
        " or both joined, such as 'save+stop'")
    return words
