"""Checkpoint: saves everything while training, so that nothing is lost; and finding again what was saved."""
import re
import shutil
from pathlib import Path
from time import perf_counter
from typing import Any
from weakref import ref

from fastcore.basics import patch
from fastcore.foundation import L
from torch import Tensor
from torch.nn.parameter import is_lazy

from ..callback import Callback
from ..display import say
from ..every import Every
from ..files import DamagedFile, load_file, remove_temps, save_file, verify_file
from ..learner import Learner
from ..meta import made_now, meta_of
from ..plain import from_plain, to_plain
from ..state import keyed, learner_state, states_of
from ..utils import check_number, warn
from ..weights import weights_of
from .tracker import TrackerCallback

__all__ = ['Checkpoint', 'newest', 'saved_files', 'was_written_by_another']

writers: dict[Path, Any] = {}  # by file of this process, a weak reference to the Learner that wrote it


class Checkpoint(Callback):
    """Saves the whole state while training, where nothing is under way: `fit(…, resume=True)` goes on bit for bit

    Files are `run1_step500.ckpt`, `run1_best_accuracy.ckpt`: a run is what one Checkpoint saves, in however many fits;
    those of other runs are left alone. `learn.load('checkpoints/run1_best_accuracy.ckpt')` takes the best weights.
    A file is written beside its place, checked, and moved there; older ones go only then. A stop (Ctrl-C, a signal)
    saves before it ends the fit; one in validation saves when that has been cleaned up, and it is run again. So does an
    error in validation, or in what follows it. One in the midst of training has left nothing that could be gone on with
    exactly: then the weights and the optimizer go to `run1_error.pth`, which `learn.load` takes.
    Raises: OSError, ValueError or TypeError at the start of a fit if the folder cannot be written to, a monitored
    column is not there, or a callback wants kept, or `learn.meta` has, what a file cannot hold.
    Order: after all others."""
    order = 1000
    run_in = {'fit'}
    run_valid = False
    state = ('n_run', 'best')
    not_hashed = ('n_run',)
    n_run: int|None = None  # number of its run, once it has saved
    due = False           # shall the next save point be used?
    took = 0.             # seconds of the last save
    reached: Any = ()     # monitored columns whose best value is the last epoch's
    begun = 0             # value of `learn.n_step` when the fit began
    over = False          # has the fit come to its end?
    stopped = False       # has a save point been used that ends the fit?
    saved: int|None = None  # the step of the newest file of this fit
    n_failed = 0          # saves that have failed since the last one that has not

    def __init__(self,
        every: str|Every = 'auto',      # '500it', '2ep', '10min'; 'auto': so seldom that it takes under 1 % of the time
        keep: int|None = 2,             # how many of this run's files stay, the newest ones; None: all
        monitor: Any = None,            # columns whose best epochs are kept too: names, or TrackerCallbacks with `comp`
        path: str|Path|None = None,     # folder below `learn.path`; None: `checkpoints` where its models go
        at_end: bool = True,            # also when the fit ends, however it does
        on_error: str = 'warn',         # if it cannot be saved: 'warn' and go on, or 'raise'
    ):
        if keep is not None: check_number('Checkpoint: `keep`', keep, 1, whole=True, of='files that stay')
        if on_error not in ('warn', 'raise'): raise ValueError(
            f"Checkpoint: on_error={on_error!r}; give 'warn' or 'raise'")
        self.auto = every == 'auto'
        self.every, self.keep = Every('10s' if self.auto else every, last=False), keep
        self.path, self.at_end, self.on_error = path, at_end, on_error
        self.trackers = [o if isinstance(o, TrackerCallback) else TrackerCallback(o) for o in L(monitor)]

    @property
    def best(self) -> dict[str, float|None]:
        "The best value so far of each monitored column; None before there is one"
        return {t.monitor: t.best for t in self.trackers}
    @best.setter
    def best(self, best):
        for t in self.trackers: t.best = best.get(t.monitor)

    def folder(self,
        learn: Any,  # the Learner
    ) -> Path:
        "Where the files are"
        return Path(learn.path)/(self.path or Path(learn.model_dir)/'checkpoints')

    def before_fit(self):
        self.due, self.reached, self.over, self.begun = False, (), False, self.learn.n_step
        self.stopped, self.saved, self.n_failed = False, None, 0
        for t in self.trackers:
            t.learn, t.reset_on_fit = self.learn, False
            t.before_fit()
        folder = self.folder(self.learn)
        folder.mkdir(parents=True, exist_ok=True)
        for place in {folder, Path(self.learn.path)/self.learn.model_dir}: remove_temps(place)
        to_plain(states_of(self.learn), 'learner.callbacks')  # what no file can hold is an error now
        meta_of(self.learn)
        weights = [v for v in weights_of(self.learn.model).values() if isinstance(v, Tensor) and not is_lazy(v)]
        need = 3*sum(v.numel()*v.element_size() for v in weights)  # an optimizer may come to hold two numbers for each
        if (free := shutil.disk_usage(folder).free) < need: warn(
            f"Checkpoint: a file may need {need/2**10:,.0f} KiB, and `{folder}` has room for {free/2**10:,.0f}")
        if not self.learn.going_on: self.every.start()  # else the time goes on, as in `learn.step`

    def after_batch(self):
        if self.every.at_step(self.learn): self._ask()

    def _ask(self):
        self.due = True
        self.learn._stop.ask('due')  # for a save point after this batch

    def cleanup_epoch(self):  # also if another callback ends the fit in its `after_epoch`
        if self.every.at_epoch(self.learn): self.due = True
        if any(t._has_row() for t in self.trackers): self.cleanup_row()

    def cleanup_row(self):  # a row has come
        for t in self.trackers: t.cleanup_epoch()
        self.reached = [t.monitor for t in self.trackers if t.new_best]

    def save_point(self):
        asked = self.learn.asked
        ends = bool(asked.keys() & {'stop', 'interrupt', 'exit'})
        self._save_best()  # first: a state that knows of a best epoch is not on disk before that one is
        if self.due or 'save' in asked or ends and self.at_end: self._save()
        self.stopped = ends

    def after_fit(self):
        self.over = True
        if self.learn.paused or self.learn.n_step == self.begun: return  # saved where it stopped; or nothing was done
        self._save_best()
        if self.at_end: self._save(done=True)

    def cleanup_fit(self):
        paused, trained = self.learn.paused, self.learn.n_step > self.begun
        in_validation = paused and self.learn.stopped_by and not self.stopped  # the model has its own weights again
        if in_validation and (self.at_end or 'save' in self.learn.asked): self._save(shot=paused.state)
        if paused and self.learn.stopped_by and self.saved == self.learn.n_step: say(
            f"Checkpoint: stopped by {self.learn.stopped_by} after step {self.saved}, and saved: `fit(…, resume=True)` "
            f"goes on from `{self._file(f'step{self.saved}', '.ckpt')}`")
        if not (self.over or paused) and self.at_end and trained: self._save_after_error()
        if self.n_failed: warn(f"Checkpoint: the last {self.n_failed} files could not be written" + (
            '' if self.saved is None else f"; the newest one is of step {self.saved}"))
        for t in self.trackers: t.learn = None

    def _save_best(self):
        for name in self.reached: self._save('best_' + re.sub(r'[^\w.-]', '_', name))  # a column may be named 'a/b'
        self.reached = ()

    def _save(self, name='', done=False, shot=None):
        start, learn = perf_counter(), self.learn
        def write(path):
            state: dict[str, Any] = learner_state(learn, shot) | dict(done=done, meta=self._meta())
            for k, known in state['callbacks'].items():  # a snapshot may be from before it had a number
                if keyed(learn).get(k) is self: state['callbacks'][k] = known | dict(n_run=self.n_run)
            learn('before_save', state)
            save_file(to_plain(state, 'learner'), path)
            verify_file(path)
            writers[path.resolve()] = ref(learn)
            self._remove_old()
        saved = self._written(name or f'step{learn.n_step}', '.ckpt', write)
        if name: return
        if saved: self.saved = learn.n_step
        self.due, self.took = False, perf_counter()-start
        if self.auto: self.every = Every(f'{max(10., 100*self.took):.2f}s', last=False)

    def _meta(self):
        try: return meta_of(self.learn)
        except TypeError as e:  # it has come into `learn.meta` during the fit
            warn(f"Checkpoint: saved without `learn.meta`: {e}")
            return made_now()

    def _save_after_error(self):
        if self.learn._trained:
            self._save(shot=self.learn._trained)
            if self.saved == self.learn.n_step: say(
                f"Checkpoint: all is saved as it was before the validation, after step {self.saved}: `fit(…, "
                "resume=True)` goes on with that")
        elif self._written('error', '.pth', lambda path: self.learn.save(path.absolute(), with_opt=True)): say(
            f"Checkpoint: weights and optimizer as they were at the error are in `{self._file('error', '.pth')}`, for "
            "`learn.load`; `fit(…, resume=True)` goes on from the last checkpoint")

    def _file(self, name, suffix):
        self._number()
        return self.folder(self.learn)/f'run{self.n_run}_{name}{suffix}'

    def _number(self):  # a new run has the next one
        if self.n_run is not None: return
        found = [re.match(r'run(\d+)_', p.name) for p in self.folder(self.learn).iterdir()]
        self.n_run = max((int(m[1]) for m in found if m), default=0)+1

    def load_state_dict(self, state: dict[str, Any]) -> None:  # what `state_dict` gave
        "Go on with that run; if it had gone further, as a new one, so that neither overwrites the other"
        super().load_state_dict(state)
        if self.learn is None: return
        files = saved_files(self.folder(self.learn))
        if any(run == self.n_run and step > self.learn.n_step for run, step, _ in files): self.n_run = None
        self.begun = -1  # the end of this fit is yet to be saved, also if no step is left

    def after_load(self, state):  # of a fit that was over: it has been saved
        if state.get('done'): self.begun = self.learn.n_step

    def _written(self, name, suffix, write):
        try: write(self._file(name, suffix))
        except Exception as e:  # whatever it is, what was trained is not to be lost by it
            if self.on_error == 'raise': raise
            self.n_failed += 1
            if self.n_failed == 1: warn(f"Checkpoint: step {self.learn.n_step} is not saved: {type(e).__name__}: {e}")
            return False
        self.n_failed = 0
        return True

    def _remove_old(self):
        mine = [path for run, _, path in saved_files(self.folder(self.learn)) if run == self.n_run]
        for path in mine[:-self.keep] if self.keep else ():
            try: path.unlink()
            except OSError as e: warn(f"Checkpoint: an old file stays: {e}")


def saved_files(
    folder: Path,
) -> list[tuple[int, int, Path]]:
    "Numbers of run and step, and the path, of each regular checkpoint in a folder, the newest one last"
    files = folder.iterdir() if folder.is_dir() else ()
    named = [(re.fullmatch(r'run(\d+)_step(\d+)\.ckpt', p.name), p) for p in files]
    return sorted((int(m[1]), int(m[2]), p) for m, p in named if m)


def newest(
    folders: list[Path],
    n_fit: int,   # number of the fit that is to go on, among those of its Learner
) -> tuple[Path|None, dict|None]:  # no state: that fit is over, and only a file of a later one is there
    """The newest sound checkpoint of a fit, and what is in it; None if there is none

    Damaged files are skipped, with a warning that names them."""
    later = None
    for _, _, path in sorted((f for folder in folders for f in saved_files(folder)), reverse=True):
        try: state = from_plain(load_file(path))
        except (DamagedFile, OSError) as e:
            warn(f"resume: `{path}` is skipped: {e}")
            continue
        n = state['counters']['n_fit']
        if n == n_fit: return path, state
        if n < n_fit: break  # of fits before this one
        later = later or path
    return later, None


def was_written_by_another(
    learn: Any,   # the Learner
    path: Path,
) -> bool:
    "Is a file that of another Learner of this process?"
    return path.resolve() in writers and writers[path.resolve()]() is not learn


@patch
def request_stop(self: Learner) -> bool:  # False: no fit is running
    "Ask the running fit, from any thread, to end quietly after the present batch; it can be gone on with"
    return _request(self, 'stop')


@patch
def request_save(self: Learner) -> bool:  # False: no fit is running
    """Ask the running fit, from any thread, to save a checkpoint after the present batch

    Raises: RuntimeError if it has no Checkpoint."""
    if self._stop.running and not any(isinstance(cb, Checkpoint) for cb in self.cbs): raise RuntimeError(
        "request_save: the running fit has no Checkpoint among its callbacks, which would save")
    return _request(self, 'save')


def _request(learn, what):
    if learn._stop.running: learn._stop.ask(what, by=f'request_{what}')
    return learn._stop.running
