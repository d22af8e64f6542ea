"""Rehearsals: a fit as it would be, with callbacks, files and rows, of which nothing is left: `learn.dry_run()`."""
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fastcore.basics import patch

from ..display import say
from ..learner import Learner
from ..no_trace import trial_frame
from ..utils import check_number
from .control import ShortEpochCallback
from .fit_call import FitCall, fit_calls

__all__ = ['rehearse']

path_names = 'path', 'fname'  # attributes under which our callbacks have where they write


def _below(path):  # the same place below another folder
    path = Path(path)
    return Path(*[o for o in path.parts if o not in (path.anchor, '..')])

def _move_paths(cb, path, folder):  # where it writes, with the file that it has begun
    for k in path_names:
        if not isinstance(v := vars(cb).get(k), str|Path): continue
        new = _below(v)
        if (path/v).is_file():
            (folder/new).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path/v, folder/new)
        vars(cb)[k] = type(v)(new)


@contextmanager
def rehearse(
    learn: Learner,
    call: FitCall,              # the fit, as `fit_calls` gives it
    cbs: list,                  # further callbacks
    what: str,                  # what it is for, for messages
    done: Callable[[], str],    # tells how much has been done, likewise
) -> Iterator[Path]:            # the folder below which it has written, as long as the block lasts
    """Run a fit as it would be run, in a folder of its own; afterwards the Learner, and all it has, is as before

    Raises: what the fit raises; ValueError for one that is to be resumed."""
    if call.resume: raise ValueError(f"{what}: leave out `resume`, which goes on with what was saved")
    metrics, path = learn.metrics, Path(learn.path)
    with learn.added_cbs([*call.cbs, *cbs]), TemporaryDirectory() as folder, trial_frame(learn, what, done):
        learn._metrics, learn.path, learn.model_dir = metrics, Path(folder), _below(learn.model_dir)
        for cb in learn.cbs: _move_paths(cb, path, Path(folder))
        learn.n_epoch, learn.epoch, learn.n_steps, learn.stopped_by = call.n_epoch, call.start_epoch, call.n_steps, ''
        learn.rehearsing = True
        learn._fit('fit', call.lr, call.wd, None, call.reset_opt)
        yield Path(folder)


@patch
def dry_run(self: Learner,
    fit: str|Callable = 'fit',  # a fit method: `learn.fit_one_cycle`, or its name
    *args: Any,                 # what it is called with; nothing: one epoch
    n_batches: int = 1,         # of each epoch's training, and of its validation
    **kwargs: Any,              # what it is called with
) -> None:
    """Try everything that a fit does on a few batches: training, validation, metrics, schedules, saving, rows

    Files are written below a temporary folder, which is gone afterwards; the Learner is as before. What a callback of
    your own writes elsewhere than below `learn.path` is written there. A schedule that begins later than the few steps
    that are tried does not act.
    Raises: whatever the fit would raise; KeyboardInterrupt if it is stopped."""
    check_number('dry_run: `n_batches`', n_batches, 1, whole=True, of='batches')
    for call in fit_calls(self, 'dry_run', fit, args or (1,), kwargs):
        short, before = ShortEpochCallback(n=n_batches), self.n_step
        with rehearse(self, call, [short], 'dry_run', lambda: f'epoch {self.epoch+1} of {self.n_epoch}') as folder:
            files = [p for p in sorted(folder.rglob('*')) if p.is_file()]
            names = ', '.join(p.relative_to(folder).as_posix() for p in files[:5])+' …'*(len(files) > 5)
            mib = sum(p.stat().st_size for p in files)/2**20
            n, steps = call.n_epoch-call.start_epoch, self.n_step-before
            say(f"dry_run: {n} epoch{'s'*(n != 1)} of {n_batches} batch{'es'*(n_batches > 1)} went through, with "
                f"{steps or 'no'} step{'s'*(steps != 1)}; " + (
                f"written and gone: {names} ({mib:.1f} MiB)" if files else "nothing was written"))
