"""What the Recorder has, by name: `learn.recorder['valid_loss']`, and numbers of your own, by `learn.note`.

The table as a whole is `learn.history`."""
import math
import re
from difflib import get_close_matches
from threading import get_ident
from typing import Any

from fastcore.basics import patch

from ..hypers import hyper_names
from ..learner import Learner
from ..scalars import Scalars
from .recorder import Recorder, own_columns

__all__ = []

own = {*own_columns, *hyper_names, 'loss', 'step'}
of_group = re.compile(rf"({'|'.join(hyper_names)})_\d+")


@patch
def __getitem__(self: Recorder,
    name: str,      # a column, 'loss', 'lr' or another hyper-parameter, or what was noted by `learn.note`
) -> Scalars:
    """What this fit has under that name, as numbers that can be asked for their means

    A column has a value for each row, NaN where there was none. 'loss' is the training loss of each batch, which counts
    as many as its items. 'lr', 'mom', 'wd' … are those of the last parameter group at each batch; with several groups
    there are also 'lr_0', 'lr_1' and so on.
    Raises: KeyError naming what there is."""
    if name in self.notes: return self.notes[name]
    if name == 'loss': return Scalars(self.raw_losses, [n for n, *_ in self.train.marks])
    hypers, columns = _hypers(self), _columns(self)
    if name in hypers:
        k, i = hypers[name]
        return Scalars(self.hps[k][:, i] if self.train.marks else ())
    if name in columns: return Scalars(row.get(name, math.nan) for row in _rows(self))
    there = [*columns, 'loss', *hypers, *self.notes]
    near = [f'did you mean `{n}`? ' for n in get_close_matches(str(name), there, 1)]
    raise KeyError(f"the Recorder has no `{name}`; {''.join(near)}there are {', '.join(there)}")


@patch
def __contains__(self: Recorder, name: str) -> bool:
    return name == 'loss' or any(name in names for names in (_columns(self), _hypers(self), self.notes))


def _rows(recorder): return recorder.history[len(recorder.history)-len(recorder.values):]  # of the last fit


def _hypers(recorder) -> dict[str, tuple[str, int]]:  # by name: where in `hps`
    if not recorder.train.marks: return {'lr': ('lr', -1)}
    names, mults = recorder.train.marks[-1][3].layout
    n = len(mults)//len(names)
    return {k: (k, -1) for k in names} | {f'{k}_{i}': (k, i) for k in names for i in range(n) if n > 1}


def _columns(recorder) -> list[str]:
    names = dict.fromkeys([*recorder.metric_names, *(k for row in _rows(recorder) for k in row)])
    return [k for k in names if k not in hyper_names and not of_group.fullmatch(k)]


@patch
def note(self: Learner,
    name: str,     # such as 'train/grad_norm'
    value: Any,    # a number, or a tensor of one, which is copied from its device only when somebody reads it
    n: float = 1,  # the items that it stands for, by which means weigh it
) -> None:
    """Note a number, to be found as `learn.recorder[name]`, in the table of no row, and in each checkpoint

    It may be called anywhere, also in a validation or another thread. What is noted outside of a fit belongs to the fit
    before. All is forgotten when the next fit starts.
    Raises: RuntimeError without Recorder, or where it would be forgotten at once; ValueError if the Recorder uses the
    name itself, or the value is too large, or a tensor of more than one number; TypeError for a name that is no text,
    or a value that is no number."""
    recorder: Any = vars(self).get('recorder')
    passes = any(cb is recorder for cb in self.passing) and recorder.n_fit < 0  # an evaluation's own
    if not isinstance(recorder, Recorder) or passes: raise RuntimeError(
        f"note: `{name}` would be kept by the `Recorder`, which this Learner is without; add it")
    if name not in recorder.notes: _check_name(recorder, name)
    _check_place(self, recorder, name)
    series = recorder.notes.get(name, Scalars())
    try: series.add(value, n)
    except (TypeError, ValueError) as e:
        e.args = f"note: `{name}`: {e}",
        raise
    recorder.notes[name] = series
    if self.paused and not self._stop.running:  # the fit goes on from what was taken down when it was stopped
        state = self.paused.state['callbacks'].get(recorder.name)
        if state: state['notes'][name] = series.pack()


def _check_name(recorder, name):
    if not isinstance(name, str) or not name: raise TypeError(f"note: the name is {name!r}; give a text")
    if name in own or of_group.fullmatch(name) or name in _columns(recorder): raise ValueError(
        f"note: `{name}` is a name that the Recorder uses itself; give another, such as 'my/{name}'")


def _check_place(learn, recorder, name):
    if learn._stop.thread != get_ident(): return  # where the fit is has nothing to do with it
    cb, event, _ = learn._at_work or (None, '', None)
    if event != 'before_fit' or learn.run_kind == 'validate': return
    if next(c for c in learn.ordered if c is cb or c is recorder) is cb: raise RuntimeError(
        f"note: `{name}`, which `{cb}` notes at `before_fit`, would be forgotten by the Recorder, which comes later "
        "and begins each fit empty: note it at `before_epoch`")


@patch(as_prop=True)  # pyright: ignore[reportOptionalCall]
def smooth_loss(self: Learner) -> float:
    "The Recorder's moving average of the training loss; NaN before the first batch; reading it may wait for a GPU"
    losses = self.recorder.losses if 'recorder' in vars(self) else ()
    return losses[-1] if losses else math.nan


@patch(as_prop=True)  # pyright: ignore[reportOptionalCall]
def history(self: Learner) -> Any:
    """All epochs of all fits as a DataFrame: fit, epoch, losses, metrics, time (seconds), and hyper-parameters

    `lr`, `mom` and `wd` are the last group's at the epoch's last batch; with several groups there are also `lr_0`,
    `lr_1` and so on. NaN where a phase was skipped or cancelled before it gave anything."""
    import pandas as pd
    return pd.DataFrame(self.recorder.history)
