"""What the tests of signals share: who sends them, who counts what begins after them, and the fit that they end."""
import os
import signal

from learner.callback import Callback
from learner.callbacks.checkpoint import Checkpoint, saved_files


def send(signum=signal.SIGTERM, times=1):
    for _ in range(times): os.kill(os.getpid(), signum)


class SendAt(Callback):
    "Sends a signal while the `n`-th batch is under way, counted over training and validation"
    order = -5

    def __init__(self, n, signum=signal.SIGTERM): self.n, self.signum, self.seen = n, signum, 0

    def after_batch(self):
        self.seen += 1
        if self.seen == self.n: send(self.signum)


class Begun(Callback):
    "Counts the batches that begin once a stop is asked for"
    order = -1000
    n = 0
    def before_batch(self): self.n += self.learn._stop.requested


def fit(learn, *cbs, n_epoch=3, **kwargs): learn.fit(n_epoch, 1e-2, cbs=[Checkpoint(at_end=False), *cbs], **kwargs)


def saved_steps(learn):
    "The steps after which a checkpoint was saved, of those that are kept"
    return [step for _, step, _ in saved_files(Checkpoint().folder(learn))]
