"""`learn.test`: the same as `learn.validate`, on test sets."""
from collections.abc import Mapping
from typing import Any

from fastcore.basics import patch
from torch.utils.data import Dataset, IterableDataset

from ..learner import Learner
from ..metrics import mk_metrics
from .recorder import Row

__all__ = ['test_name']


@patch
def test(self: Learner,
    dl: Any,              # a loader, a dict of loaders by name, or the name of one of the validation sets
    metrics: Any = None,  # what is measured, as the Learner takes it; None: what the Learner measures
    cbs: Any = None,      # callbacks for this evaluation only
) -> Row:                 # loss and metrics, a sequence that can be indexed by name too: `row['test_loss']`
    """Evaluate on a test set, or on those of a dict in turn: as `validate`, but that `learn.stage` is 'test'

    The columns of several sets have their names in front, as in `'new_test_loss'` and `'new_accuracy'`.
    Raises: TypeError for what is no loader; ValueError if there is no such set, or one gives no batch."""
    own = {m.name for m in (self.metrics if metrics is None else mk_metrics(metrics))}
    names, values = [], []
    for name, o in _sets(self, dl).items():
        row = self.validate(dl=o, cbs=cbs, metrics=metrics)
        if row is None: continue  # a callback has cancelled it
        names += [f'{name}_'*bool(name)+test_name(column, own) for column in row.names]
        values += row
    return Row(names, values)


def _sets(learn, dl):
    if isinstance(dl, str):
        if dl in learn.dls.valid_sets: return {'': learn.dls.valid_sets[dl]}
        known = ', '.join(repr(k) for k in learn.dls.valid_sets if k)
        raise ValueError(f"test: there is no validation set {dl!r}, " + (f"but {known}" if known else
                         "and none has a name: give a loader"))
    sets = dl if isinstance(dl, Mapping) else {'': dl}
    if not sets: raise ValueError("test: the dict of loaders is empty: give a loader, or some by name")
    for name, o in sets.items():  # all of them, before the first one is evaluated
        try: _check(learn, o)
        except TypeError as e:
            e.add_note(f"raised by test{f', of its set {name!r}' if name else ''}")
            raise
    return sets


def _check(learn, o):
    if o is None or isinstance(o, Dataset) and not isinstance(o, IterableDataset): raise TypeError(
        f"`{type(o).__name__}` is no loader of batches: give a DataLoader of it, or a list of batches")
    next(learn.dls.eval_loaders(1, o, learn.device))


def test_name(
    column: str,  # of an evaluation
    own: set,     # names of metrics, which may be named as they like
) -> str:
    "What the column is called in a test"
    return column if column in own or not column.startswith('valid_') else f"test_{column.removeprefix('valid_')}"
