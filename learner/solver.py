"""Solver: training by iterations under Caffe's names, put together from a Learner and its callbacks.

The order of things is Caffe's: test, `on_start`, gradients, line, `on_gradients_ready`, update, request, snapshot. What
comes between two iterations happens at the Learner's `save_point`, so that a snapshot goes on bit for bit."""
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .callbacks.iter_log import DebugInfo
from .callbacks.regularize import L1
from .callbacks.solving import ClipSum, Loop, Outputs, TestBatches, listening
from .callbacks.tracker import TrackerCallback
from .callbacks.training import GradientAccumulation
from .display import say
from .every import Every
from .files import load_file, save_file
from .interrupt import deferred_interrupt
from .learner import Learner
from .plain import from_plain, to_plain
from .solver_param import SolverParam
from .state import learner_state, snapshot
from .utils import check_number, set_seed, warn

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
        self.actions: set[str] = set()
        self._file = self._tested_at = self.saved_at = self._shot = None
        self._target, self._final = 0, False
        self.loop, self._pause = Loop(self), None
        self._check()
        for file in self.param.weights: learn.load(file, with_opt=False)
        self._set_up()

    @classmethod
    def from_prototxt(cls,
        text: str|Path,     # a solver's settings in text format, or the path of a file with them
        learn: Learner,     # as the class takes it
        **kwargs: Any,      # `sigint_effect`, `sighup_effect`, and fields that differ from the text
    ) -> 'Solver':
        """A solver with the settings that Caffe has in a file; networks, which that names, are the Learner's business

        Raises: TypeError if `learn` is none; ValueError naming the line that cannot be read; as the class does."""
        if not isinstance(learn, Learner): raise TypeError(
            f"Solver.from_prototxt: `learn` is a `{type(learn).__name__}`; give the text first, then the Learner")
        given = SolverParam.from_prototxt(text)
        fields = {k: v for k, v in vars(given).items() if k != 'ignored'}
        return cls(learn, **{**fields, **given.ignored, **kwargs})

    def _check(self):
        p, n = self.param, len(self.learn.dls.valid_sets)
        if p.debug_info and not p.display: raise ValueError(
            "Solver: `debug_info` is shown with each line: give `display`, the iterations between two")
        if any(isinstance(cb, Loop) for cb in self.learn.cbs): raise ValueError(
            "Solver: this Learner has a Solver already, and two would undo each other's work: make another Learner")
        if trackers := [cb for cb in self.learn.cbs if isinstance(cb, TrackerCallback)]: warn(
            f"Solver: {trackers[0]} acts on rows, and there are none; `learn.fit_iters` with ValidateEvery has some")
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
        debug = [DebugInfo(Every(f'{p.display}it', begin=learn.n_step+1))] if p.debug_info else []
        learn.add_cbs([self.loop, *debug,
                       *([L1(p.weight_decay)] if l1 else []),
                       *([ClipSum(p.clip_gradients)] if p.clip_gradients >= 0 else []),
                       *([GradientAccumulation(p.iter_size, 'batches', weight=_one)] if p.iter_size > 1 else [])])

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
        """Call functions, without arguments, in each iteration

        Raises: TypeError if neither is one."""
        if not any(map(callable, (on_start, on_gradients_ready))): raise TypeError(
            f"add_callback: {on_start=}, {on_gradients_ready=}; give a function for one of them")
        self.callbacks.append((on_start, on_gradients_ready))

    # ---- what may be done

    def solve(self,
        resume: str|Path|None = None,  # a snapshot to begin with
    ) -> None:
        "Train until `max_iter`, with tests, lines and snapshots; a request to stop ends it"
        if self.param.max_iter is None: raise ValueError("Solver: `solve` needs `max_iter`; `step(n)` goes on for ever")
        if resume: self.restore(resume)
        self._run(self.param.max_iter-self.iter, final=True)
        if self.stopped: return
        p = self.param
        if p.display and self.iter % p.display == 0: self._look()
        with listening(self.learn), deferred_interrupt(self.learn._stop):
            if p.test_interval and self.iter % p.test_interval == 0: self.test_all()

    def step(self,
        n: int,  # updates to make
    ) -> None:
        """Train for some iterations; the next call goes on, also after a request has stopped this one

        A stop in it writes no snapshot; `solve` does."""
        check_number('Solver: `n`', n, 0, whole=True, of='iterations')
        self._run(n)

    def apply_update(self) -> None:
        """Update the weights by their gradients; a subclass may do it by a rule of its own

        By now they are means over `iter_size` batches, clipped, with L1's part; L2 is what the optimizer adds here."""
        self.learn.opt.step()

    def test_all(self) -> list[Tested]:  # of each validation set; fewer if a request stops it
        "Test on all sets"
        found = []
        if not self.loop.is_on: self.stopped = False
        for i in range(len(self.param.test_iter)):
            if self.stopped: break
            if (tested := self.test(i)) is not None: found.append(tested)
        return found

    def test(self,
        i: int,  # number of the validation set
    ) -> Tested|None:  # None if a request has stopped it
        """Test on `test_iter[i]` batches of a set, from its start, and around again if it has fewer

        Raises: ValueError if there is no such set."""
        if not isinstance(i, int) or not 0 <= i < len(self.param.test_iter): raise ValueError(
            f"Solver: there is no test net {i!r}, but {len(self.param.test_iter)}, counted from 0")
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
        """Save all, as `{snapshot_prefix}_iter_{iter}.ckpt`

        Raises: RuntimeError in an iteration, where `action_request` may ask for it, or before the first."""
        path, self.saved_at = self._path(), self.iter
        self._told(f"Snapshot to {path}")
        if self._file:  # nothing has been done since
            if path.resolve() != self._file.resolve(): shutil.copy2(self._file, path)
            return path
        learn, shot = self.learn, self._shot
        event = learn._at_work[1] if learn._at_work else ''
        if learn._scope and not shot and event not in ('save_point', 'after_fit'): raise RuntimeError(
            f"Solver: a snapshot at `{event}` would not go on exactly: let `action_request` return 'snapshot'")
        if not learn._scope: shot = learn.paused and learn.paused.state
        if not learn._scope and not shot: raise RuntimeError(
            "Solver: there is no iteration yet that could be gone on with; `learn.save` saves weights")
        state = learner_state(learn, shot)
        learn('before_save', state)
        save_file(to_plain(state, 'learner'), path)
        return path

    def restore(self,
        file: str|Path,  # what `snapshot` has written, also below the Learner's path
    ) -> None:
        """Go on from there: the next `step` or `solve` makes the next update, from exactly what the file holds

        Raises: ValueError for weights, or a snapshot of a solver of another type or with other settings; DamagedFile;
        FileNotFoundError."""
        path = next((o for o in (Path(file), Path(self.learn.path)/file) if o.exists()), Path(file))
        state = from_plain(load_file(path))
        known = state.get('callbacks', {}).get('solver_loop') if isinstance(state, dict) else None
        if not known: raise ValueError(f"Solver: `{path}` is no snapshot of a Solver, but weights or another state: "
                                       "`weights=[…]` begins with weights")
        if known['type'] != self.param.type: raise ValueError(
            f"Solver: `{path}` is of a solver of type {known['type']}, and this one is {self.param.type}")
        if other := [f"`{k}` was {v!r} and is {getattr(self.param, k)!r}" for k, v in known['settings'].items()
                     if v != getattr(self.param, k)]: raise ValueError(
            f"Solver: `{path}` was made with other settings: {', '.join(other)}; `param.base_lr` may be set afterwards")
        self.learn.load_state(path)
        self.loop.load_state_dict(known)
        self.learn.paused, self._file, self.saved_at = None, path, self.iter

    # ---- how it is done

    def _path(self): return Path(self.learn.path)/f'{self.param.snapshot_prefix}_iter_{self.iter}.ckpt'

    def _told(self, text): say(text)

    def _run(self, n, final=False):
        if self.loop.is_on: raise RuntimeError("Solver: it is running, and this was called within an iteration")
        self.stopped, self.actions, file = False, set(), self._file
        if self.learn.paused is not self._pause: self.learn.paused = None  # another fit, which is over with this one
        self._tested_at, self._target, self._final = None, self.iter+n, final
        if not file: self.loop.losses = []
        if n > 0 or final: self._fit(max(n, 0), file)

    def _fit(self, n, file):
        with listening(self.learn):
            self.loop.is_on = True
            try:
                made = self.learn.step(n, resume=file, allow={'lr'} if file else ()) if n else 0
                self._pause = self.learn.paused
                if made < n and not self.stopped:
                    self.stopped = True
                    warn(f"Solver: a callback has ended the training after {self.iter} iterations")
                if not n and self._final and self.param.snapshot_after_train and self.saved_at != self.iter:
                    self.snapshot()
            finally: self.loop.is_on = False
        if self.stopped: self._told(f"Stopped after {self.iter} iterations")

    def _look(self):  # at the loss of the next batch, without an update
        self.loop.is_on = self.loop.only_forward = True
        try: self.learn.step(1, resume=self._file)
        finally: self.loop.is_on = self.loop.only_forward = False

    def update(self) -> None:
        "What the loop calls"
        with torch.no_grad(): self.apply_update()
        self.loop.count += 1

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
        self.actions |= {self.effects[k] for k in self.effects.keys() & asked.keys()}
        for k in self.effects: asked.pop(k, None)
        if self.learn.keep_grads: return  # the iteration is not over
        actions, self.actions, p = self.actions, set(), self.param
        if 'stop' in actions: self.stopped = True
        self._file = None  # something has been done since it was read
        due = p.snapshot and self.iter and self.iter % p.snapshot == 0 or 'snapshot' in actions
        over = self._final and p.snapshot_after_train and (self.stopped or self.iter >= self._target)
        if (due or over) and self.saved_at != self.iter: self.snapshot()
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
        if self.stopped and self._final and self.param.snapshot_after_train and self.saved_at != self.iter:
            self.snapshot()

    # ---- requests

    def requested(self) -> set[str]:  # of 'stop' and 'snapshot'
        """What is asked for since the last time, by signals, threads and `action_request`

        Raises: ValueError if that gives anything else."""
        asked = self.learn._stop.take() if self.learn._stop.requested else {}
        for k in asked.keys() & {'pause'}: self.learn._stop.ask(k, by=asked[k])
        action = self.action_request() if self.action_request else None
        if action not in (None, 'stop', 'snapshot'): raise ValueError(
            f"Solver: `action_request` gave {action!r}; it has to give 'stop', 'snapshot' or None")
        return {effect for k, effect in self.effects.items() if k in asked}-{'none'} | ({action} if action else set())


def _one(learn): return 1
