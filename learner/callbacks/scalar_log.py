"""ScalarLogger: the numbers of a fit, sent to TensorBoard, Weights & Biases or whatever takes name, value and step."""
import json
import math
import os
from functools import partial
from pathlib import Path
from typing import Any

from ..callback import Callback
from ..every import Every
from ..scalars import Scalars
from ..tensors import n_items
from ..utils import warn

__all__ = ['ScalarLogger']


class ScalarLogger(Callback):
    """Sends numbers to `write(name, value, step)`, or appends them to a file, a line of JSON each time

    At each `every`, means since the last time: of the training loss, 'loss', and of its parts, 'loss_part'; and the
    present 'lr', with several parameter groups 'lr_0', 'lr_1' and so on. With each row of the table what stands in it,
    NaN where a phase was cancelled. With either, means of what `learn.note` has noted since. `step` is `learn.n_step`.
    Nothing is read from a device before it is sent.
    TensorBoard is `ScalarLogger(SummaryWriter('runs/1').add_scalar)`, Weights & Biases
    `ScalarLogger(lambda name, value, step: run.log({name: value}, step=step))`.
    In a file, which is added to if it is there, what is not finite is null. A resumed fit goes on in it: lines that
    will come again are cut off. A function is given them again.
    What cannot be sent is a warning, the first time in a fit, which goes on.
    Raises: TypeError for what is no function and no path; ValueError if `every` is no interval; at the start of a fit,
    RuntimeError without Recorder, OSError if the file cannot be opened.
    Order: after the Recorder, whose rows it sends.
    Example:
    >>> seen = []
    >>> logger = ScalarLogger(lambda name, value, step: seen.append((step, name, value)), every='10it')
    """
    order = 60
    run_in = {'fit'}
    run_valid = False
    not_hashed = ('since', 'n_noted', 'size')  # with an interval in seconds, they go by the clock
    file: Any = None       # while a fit runs
    kept: int|None = None  # the size to which it is to be cut before the next line
    failed = False         # has there been something in this fit that could not be sent?

    def __init__(self,
        write: Any,           # `write(name, value, step)`; or a file for lines of JSON, below `learn.path`
        every: Any = '50it',  # '50it' (optimizer steps), '1ep', '10s' or an Every, which also says if at the end
    ):
        if not isinstance(write, str|Path) and not callable(write): raise TypeError(
            f"ScalarLogger: `write` is a `{type(write).__name__}`; give a function of name, value and step, as the "
            "`add_scalar` of a SummaryWriter is, or a path")
        self.write: Any = write
        self.every = Every(every)
        self._begin()

    def _begin(self):
        self.since: dict[str, Scalars] = {}  # losses that are not sent yet
        self.n_noted: dict[str, int] = {}    # how many of each note are

    def before_fit(self):
        if not hasattr(self.learn, 'recorder'): raise RuntimeError(
            f"`{self}` works with `Recorder`, which this Learner is without; add it")
        self._begin()
        self.failed = False
        if not self.learn.going_on: self.every.start()  # else the time goes on, as in `learn.step`
        if isinstance(self.write, str|Path): self._open(Path(self.path)/self.write)

    def _open(self, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open('a+b', buffering=0)
        if not self._size(): return
        self.file.seek(-1, os.SEEK_END)
        if self.file.read() != b'\n': self._append(b'\n')  # the last line was cut short

    def _size(self): return os.fstat(self.file.fileno()).st_size

    def after_batch(self):
        learn = self.learn
        if learn.loss is not None:
            n = n_items(learn.xb, learn.yb)
            parts = {f'loss_{k}': v for k, v in (learn.loss_parts or {}).items()}
            for name, v in {'loss': learn.loss, **parts}.items(): self.since.setdefault(name, Scalars()).add(v, n)
        if self.every.at_step(learn): self._report()

    def after_train(self):  # gradients that were left over may have been stepped
        if self.since and (self.every.at_step(self.learn) or self.every.at_epoch(self.learn)): self._report()

    def cleanup_epoch(self):  # so that the row is sent although a callback ends the fit in its `after_epoch`
        recorder: Any = getattr(self.learn, 'recorder', None)
        if recorder is None or recorder.log is None: return
        found = dict(zip(recorder.metric_names, recorder.log, strict=True))
        if ('step', '') in recorder.columns: del found['step']  # of ValidateEvery, and sent as such
        self._send(found | self._noted())

    def cleanup_row(self): self.cleanup_epoch()

    def after_fit(self):  # a callback has ended it in the midst of an epoch
        if self.since and self.every.last and not self.learn.paused: self._report()

    def _report(self):
        losses, self.since = {k: values.mean() for k, values in self.since.items()}, {}
        lrs = [h['lr'] for h in self.opt.hypers]
        self._send(losses | {f'lr_{i}' if len(lrs) > 1 else 'lr': v for i, v in enumerate(lrs)} | self._noted())

    def _noted(self):  # means of what has been noted since this was asked last
        notes = self.recorder.notes if hasattr(self.learn, 'recorder') else {}
        new = {k: len(values)-self.n_noted.get(k, 0) for k, values in notes.items()}
        self.n_noted = {k: len(values) for k, values in notes.items()}
        return {k: notes[k].mean(n) for k, n in new.items() if n > 0}

    def _send(self, values):
        step = self.n_step
        if self.file is None:
            for name, v in values.items(): self._try(name, partial(self.write, name, v, step))
        else:
            plain = {k: v if math.isfinite(v) else None for k, v in values.items()}
            line = json.dumps({'step': step, **plain})
            self._try(', '.join(values), partial(self._append, line.encode()+b'\n'))

    def _try(self, names, send):
        try: send()
        except Exception as e:  # whatever it is, the fit is not to be lost by it
            if not self.failed: warn(f"{self}: `{names}` of step {self.n_step} cannot be sent; if more cannot, nothing "
                                     f"is said in this fit: {type(e).__name__}: {e}")
            self.failed = True

    def _append(self, data):  # all of it or nothing
        self._cut()
        size = self._size()
        try:
            while data: data = data[self.file.write(data):]
        except BaseException:
            self.file.truncate(size)
            raise

    def _cut(self):
        kept, self.kept, size = self.kept, None, self._size()
        if kept is None: return
        if size < kept: warn(f"{self}: `{self.file.name}` is shorter than when the fit was saved: it lacks lines")
        if size > kept: self.file.truncate(kept)

    def cleanup_fit(self):
        if self.file is not None: self.file.close()
        self.file = None

    def before_save(self, state):  # what refers to the lines must not be on disk before them
        if (file := self.file) is None: return
        try: os.fsync(file.fileno())
        except OSError as e: warn(f"{self}: the lines in `{file.name}` may not be on disk: {e}")

    def state_dict(self) -> dict[str, Any]:
        "What is not sent yet, and how far the file is written; None outside of a fit, or without a file"
        size = self.kept if self.file is None or self.kept is not None else self._size()
        return dict(since={k: values.pack() for k, values in self.since.items()}, n_noted=dict(self.n_noted), size=size)

    def load_state_dict(self, state: dict[str, Any]) -> None:  # what `state_dict` gave
        """Go on there; within a fit, what the file has more is cut off before the next line

        If the fit was over, that may be the first one of the fit after it."""
        self.since = {k: Scalars.unpack(values) for k, values in state['since'].items()}
        self.n_noted = dict(state['n_noted'])
        if self.file is not None: self.kept = state['size']
