"""Solver: training by iterations under Caffe's names, put together from a Learner and its callbacks.

The order of things is Caffe's: test, `on_start`, gradients, line, `on_gradients_ready`, update, request, snapshot. What
comes between two iterations happens at the Learner's `save_point`, so that a snapshot goes on bit for bit."""
import math
import signal
import threading
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .callbacks.iter_log import DebugInfo
from .callbacks.regularize import L1
from .callbacks.solving import ClipSum, Loop, Outputs, TestBatches
from .callbacks.training import GradientAccumulation
from .display import say
from .files import load_file, save_file
from .learner import Learner
from .plain import from_plain, to_plain
from .solver_param import SolverParam
from .state import learner_state, snapshot
from .utils import check_number, set_seed
from .weights import model_path

__all__ = ['Solver', 'Tested']


class Tested(NamedTuple):
    "What a test has given"
    outputs: dict[str, Any]  # by name the mean over batches, each counting alike: metrics, outputs, perhaps the loss
    row: Any                 # loss and metrics over items, as `learn.validate` gives them


class Solver:
    """Caffe's Solver for a Learner: `Solver(learn, base_lr=.01, lr_policy='fixed', max_iter=10_000)`

    Fields are those of SolverParam; `Solver.from_prototxt` reads them. The Learner gets Caffe's optimizer and decay,
    its validation sets are the test nets, in their order, and its data goes round without validation at the end of
    epochs. What an epoch's end leaves of `iter_size` batches makes an update by itself. A test begins at the start of
    its set. Gradients are clipped by the norm of their sum over `iter_size` batches, before decay is added.
    `net`, `test_nets`, `param`, `iter`, `learn` may be read. `apply_update` may be overridden.
    Ctrl-C and SIGHUP do what `sigint_effect` and `sighup_effect` say while it runs: 'stop', 'snapshot' or 'none'.
    Raises: TypeError or ValueError for fields that mean nothing; ValueError if tests and validation sets differ in
    number; OSError if snapshots cannot be written where they should be."""
    test_batches = 0                      # done in the last test
    action_request: Callable|None = None  # called after each update, and before each batch of a test until it gives
                                          # None: what is wanted, 'stop' or 'snapshot'; or None

    def __init__(self,
        learn: Learner,                   # its optimizer, rate and decay are set
        sigint_effect: str = 'stop',      # of Ctrl-C: 'stop', 'snapshot' or 'none'
        sighup_effect: str = 'snapshot',  # of the signal, likewise
        **fields: Any,                    # of SolverParam
    ):
        for name, effect in dict(sigint_effect=sigint_effect, sighup_effect=sighup_effect).items():
            if effect not in ('stop', 'snapshot', 'none'): raise ValueError(
                f"Solver: {name}={effect!r}; give 'stop', 'snapshot' or 'none'")
        self.learn, self.param = learn, SolverParam.of(fields)
        self.effects = dict(interrupt=sigint_effect, stop='stop', exit='stop', save='snapshot', hangup=sighup_effect)
        self.callbacks: list[tuple] = []
        self.stopped = False   # has a request ended it?
        self.action: Any = None
        self._file = self._tested_at = self._saved_at = self._shot = None
        self._target, self._final = 0, False
        self.loop = Loop(self)
        self._check()
        self._set_up()

    @classmethod
    def from_prototxt(cls,
        text: str|Path,     # a solver's settings in text format, or the path of a file with them
        learn: Learner,     # as the class takes it
        **kwargs: Any,      # `sigint_effect`, `sighup_effect`, and fields that differ from the text
    ) -> 'Solver':
        """A solver with the settings that Caffe has in a file; networks, which that names, are the Learner's business

        Raises: ValueError naming the line that cannot be read; as the class does."""
        given = SolverParam.from_prototxt(text)
        fields = {k: v for k, v in vars(given).items() if k != 'ignored'}
        return cls(learn, **{**fields, **given.ignored, **kwargs})

    def _check(self):
        p, n = self.param, len(self.learn.dls.valid_sets)
        if p.test_iter and len(p.test_iter) != n: raise ValueError(
            f"Solver: `test_iter` has {len(p.test_iter)} numbers, and there are {n} validation sets: give one for each")
        if p.test_interval and not p.test_iter: raise ValueError(
            "Solver: `test_interval` is given, and no `test_iter`: how many batches a test has")
        if p.snapshot or p.snapshot_after_train: self._path().parent.mkdir(parents=True, exist_ok=True)
        if p.ignored: say(f"Solver: without effect here: {', '.join(p.ignored)}")

    def _set_up(self):
        p, learn = self.param, self.learn
        if p.random_seed >= 0: set_seed(p.random_seed)
        l1 = p.regularization_type == 'L1' and p.weight_decay
        learn.opt_func, learn.lr, learn.wd_bn_bias = p.opt_func, p.base_lr, True
        learn.wd, learn.opt = None if l1 else p.weight_decay, None
        learn.add_cbs([self.loop, *([DebugInfo(f'{p.display}it')] if p.debug_info and p.display else []),
                       *([L1(p.weight_decay)] if l1 else []),
                       *([ClipSum(p.clip_gradients, p.iter_size)] if p.clip_gradients >= 0 else []),
                       *([GradientAccumulation(p.iter_size, 'batches', weight=_one)] if p.iter_size > 1 else [])])
        for file in p.weights: learn.load(file, with_opt=False)

    # ---- what may be read

    @property
    def iter(self) -> int: "Updates so far"; return self.loop.count
    @property
    def net(self) -> Any: "The model"; return self.learn.model
    @property
    def test_nets(self) -> list: "The model, once for each validation set"; return [self.net]*len(self.param.test_iter)
    @property
    def smoothed_loss(self) -> float:
        "Mean loss of the last `average_loss` iterations; NaN before there was one"
        return math.fsum(map(float, self.loop.losses))/len(self.loop.losses) if self.loop.losses else math.nan

    def lr_at(self,
        iter: int,  # counted from 0
    ) -> float:
        "The learning rate of an iteration"
        return self.param.lr_at(iter)

    def add_callback(self,
        on_start: Callable|None = None,            # before the gradients of an iteration
        on_gradients_ready: Callable|None = None,  # when they are there, before they are clipped
    ) -> None:
        "Call functions, without arguments, in each iteration"
        self.callbacks.append((on_start, on_gradients_ready))

    # ---- what may be done

    def solve(self,
        resume: str|Path|None = None,  # a snapshot to begin with
    ) -> None:
        "Train until `max_iter`, with tests, lines and snapshots; a request to stop ends it"
        if self.param.max_iter is None: raise ValueError("Solver: `solve` needs `max_iter`; `step(n)` goes on for ever")
        if resume: self.restore(resume)
        self.stopped = False
        self._run(self.param.max_iter-self.iter, final=True)
        if self.stopped: return
        p = self.param
        if p.display and self.iter % p.display == 0: self._look()
        if p.test_interval and self.iter % p.test_interval == 0: self.test_all()

    def step(self,
        n: int,  # updates to make
    ) -> None:
        "Train for some iterations; the next call goes on"
        check_number('Solver: `n`', n, 0, whole=True, of='iterations')
        self._run(n)

    def apply_update(self) -> None:
        "Update the weights by their gradients, which have been clipped; a subclass may do it by a rule of its own"
        self.learn.opt.step()

    def test_all(self) -> list[Tested]:  # of each validation set; fewer if a request stops it
        "Test on all sets"
        found = []
        for i in range(len(self.param.test_iter)):
            if self.stopped: break
            if (tested := self.test(i)) is not None: found.append(tested)
        return found

    def test(self,
        i: int,  # number of the validation set
    ) -> Tested|None:  # None if a request has stopped it
        "Test on `test_iter[i]` batches of a set, from its start, and around again if it has fewer"
        name, dl = [*self.learn.dls.valid_sets.items()][i]
        batches, outputs = TestBatches(self, dl, self.param.test_iter[i]), Outputs(self.param.test_compute_loss)
        try: row = self.learn.validate(dl=batches, cbs=outputs)
        except ValueError:
            if batches.done or not self.stopped: raise
            row = None  # stopped before its first batch
        if batches.done < batches.n:
            self._told(f"Test net #{i} interrupted after {batches.done} of {batches.n} batches")
            return None
        means = outputs.means()
        shown = ', '.join(f'{k} = {v:.6g}' for k, v in means.items() if isinstance(v, float))
        self._told(f"Iteration {self.iter}, test net #{i}{f' ({name})'*bool(name)}: {shown or 'no single numbers'}")
        return Tested(means, row)

    def snapshot(self) -> Path:  # of the file
        "Save all, as `{snapshot_prefix}_iter_{iter}.ckpt`"
        path, self._saved_at = self._path(), self.iter
        shot = self._shot or (self.learn.paused and not self.learn._scope and self.learn.paused.state)
        state = learner_state(self.learn, shot or None)
        self.learn('before_save', state)
        save_file(to_plain(state, 'learner'), path)
        self._told(f"Snapshot to {path}")
        return path

    def restore(self,
        file: str|Path,  # what `snapshot` has written
    ) -> None:
        """Go on from there: the next `step` or `solve` makes the next update

        Raises: ValueError for weights, or a snapshot of another type of solver; DamagedFile; FileNotFoundError."""
        path = file if (file := Path(file)).exists() else model_path(self.learn, file, '.ckpt', there=True)
        state = from_plain(load_file(path))
        known = state.get('callbacks', {}).get('solver_loop') if isinstance(state, dict) else None
        if not known: raise ValueError(f"Solver: `{path}` is no snapshot of a Solver, but weights or another state: "
                                       "`weights=[…]` begins with weights")
        if known['type'] != self.param.type: raise ValueError(
            f"Solver: `{path}` is of a solver of type {known['type']}, and this one is {self.param.type}")
        self.learn.load_state(path)
        self.loop.load_state_dict(known)
        self.learn.paused, self._file = None, path

    # ---- how it is done

    def _path(self): return Path(self.learn.path)/f'{self.param.snapshot_prefix}_iter_{self.iter}.ckpt'

    def _told(self, text): say(text)

    def _run(self, n, final=False):
        self._tested_at, self._target, self._final, file = None, self.iter+n, final, self._file
        if not file: self.loop.losses = []
        if n > 0 or final: self._fit(max(n, 0), file)

    def _fit(self, n, file):
        with self._listening():
            self.loop.is_on = True
            try:
                if n: self.learn.step(n, resume=file)
                elif self._final and self.param.snapshot_after_train and self._saved_at != self.iter: self.snapshot()
                self._file = None
            finally: self.loop.is_on = False

    def _look(self):  # at the loss of the next batch, without an update
        self.loop.is_on = self.loop.only_forward = True
        try: self.learn.step(1)
        finally: self.loop.is_on = self.loop.only_forward = False

    def update(self) -> None:
        "What the loop calls"
        with torch.no_grad(): self.apply_update()

    def call(self,
        what: str,  # 'on_start' or 'on_gradients_ready'
    ) -> None:
        "Call the functions of `add_callback`"
        for on_start, ready in self.callbacks:
            if f := on_start if what == 'on_start' else ready: f()

    def show(self,
        final: bool = False,  # after the last update?
    ) -> None:
        "The line of an iteration"
        self._told(f"Iteration {self.iter}, loss = {self.smoothed_loss:.6g}, lr = {self.lr_at(self.iter):.6g}")

    def between(self,
        asked: dict[str, str],  # what has been asked of the fit; 'pause' is added to end it
    ) -> None:
        "What is done between two iterations, with nothing under way"
        if self.loop.only_forward: return
        for k in self.effects.keys() & asked.keys():
            self.action, _ = self.action or self.effects[k], asked.pop(k)
        if self.learn.keep_grads: return  # the iteration is not over
        action, self.action, p = self.action, None, self.param
        if action == 'stop': self.stopped = True
        due = p.snapshot and self.iter and self.iter % p.snapshot == 0 or action == 'snapshot'
        over = self._final and p.snapshot_after_train and (self.stopped or self.iter >= self._target)
        if (due or over) and (self._saved_at != self.iter or action == 'snapshot'): self.snapshot()
        if not self.stopped and self.iter < self._target and self._is_test_due(): self._test_between()
        if self.stopped: asked['pause'] = ''

    def _is_test_due(self):
        p = self.param
        if not p.test_interval or self._tested_at == self.iter or self.iter % p.test_interval: return False
        return bool(self.iter or p.test_initialization)

    def _test_between(self):
        self._tested_at, self._shot = self.iter, snapshot(self.learn)
        try: self.test_all()
        finally: self._shot = None
        if self.stopped and self._final and self.param.snapshot_after_train and self._saved_at != self.iter:
            self.snapshot()

    # ---- requests

    def requested(self) -> Any:  # 'stop', 'snapshot' or None
        "What is asked for since the last time, by a signal, a thread or `action_request`"
        asked = self.learn._stop.take() if self.learn._stop.requested else {}
        for k in asked.keys() & {'pause'}: self.learn._stop.ask(k, by=asked[k])
        found = {effect for k, effect in self.effects.items() if k in asked}
        if found - {'none'}: return 'stop' if 'stop' in found else 'snapshot'
        return self.action_request() if self.action_request else None

    def stops_test(self) -> bool:
        "Obey all that is asked for before a batch of a test: is it to be stopped?"
        while action := self.requested():
            if action == 'snapshot': self.snapshot()
            else: self.stopped = True
        return self.stopped

    @contextmanager
    def _listening(self):  # to SIGHUP; Ctrl-C is the fit's own
        n = getattr(signal, 'SIGHUP', None)
        if n is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        old = signal.signal(n, lambda *_: self.learn._stop.ask('hangup'))
        try: yield
        finally: signal.signal(n, old)


def _one(learn): return 1
