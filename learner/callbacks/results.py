"""`learn.show_batch()` and `learn.show_results()`: items as the model gets them, with targets and what it decides."""
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from fastcore.basics import patch
from fastcore.foundation import L
from torch import Tensor

from ..callback import Callback
from ..display import display_mode, show_result
from ..events import CancelBatchException, CancelEpochException, CancelFitException
from ..learner import Learner
from ..loader import Loader, untouched
from ..no_trace import trial
from ..pictures import draw_items, is_picture, word
from ..plot import show_figure
from ..resampled import in_order, items_of
from ..tensors import describe, find_bs, n_items, to_detach
from ..utils import check_number, replacing
from .look import Quiet

__all__ = ['shown']


class _Arrival(Callback):
    "Takes a batch as the model would get it, and ends the run; order: after all that changes batches"
    order = 1000
    run_in = {'lr_find', 'validate'}
    found: Any = None  # inputs and targets

    def before_batch(self):
        self.found = to_detach((self.xb, self.yb), cpu=True)
        raise CancelFitException if self.training else CancelBatchException

    def after_train(self): raise CancelEpochException  # all batches were cancelled: no validation


@patch
def show_batch(self: Learner,
    n: int = 9,                  # items at most
    dl: Any = None,              # another loader, whose first batch is shown as an evaluation gets it
    ds_idx: int = 0,             # 0 for the training loader; 1 for the validation set, as an evaluation gets it
    show: Callable|None = None,  # `show(xs, texts)` draws instead, and what it returns is returned
    vocab: Any = None,           # words by the number of a token, for texts; None: numbers
) -> Any:                        # axes, a 2-d array, or a DataFrame; in a notebook, which shows it, None for a figure
    """Show the first items of a batch as the model gets them, with their targets, in words of `dls.vocab`

    Of training it is the batch with which the next fit begins (unless workers persist from an earlier one), as
    callbacks make it: mixed, augmented. Nothing is trained and nothing changes, no random stream either; callbacks that
    act in fits alone, by `run_in`, do not act. With MixUp, targets that are classes are the batch's own. What is drawn
    how is said by `draw_items`.
    A notebook shows it at once; in a script a table is printed, and a figure waits for `plt.show()` or `savefig`.
    Raises: TypeError for tensors that cannot be drawn without `show`, or if a loader would be used up; ValueError if
    there is nothing to show; RuntimeError if a callback cancels the batch; for training what a fit would raise."""
    check_number('show_batch: `n`', n, 1, whole=True, of='items')
    arrival = _Arrival()
    if dl is None and ds_idx == 0: trial(self, [Quiet, arrival], 1, 'show_batch', lambda: 'no step')
    else:
        batches = _batches(_loader(self, 'show_batch', ds_idx, dl), 1)
        with replacing(self, _metrics=L()): self.validate(dl=batches, cbs=arrival)
    if arrival.found is None: raise RuntimeError("show_batch: a callback cancelled the batch before the model got it")
    xb, yb = arrival.found
    return _show(self, xb, yb, None, n, n_items(xb, yb), show, vocab)


@patch
def show_results(self: Learner,
    ds_idx: int = 1,             # 0 for the training loader, 1 for the validation set, of several the first
    dl: Any = None,              # another loader instead
    n: int = 9,                  # items at most; only the batches they are in are predicted
    shuffle: bool = False,       # draw the items at random? Else they are the first ones, in the dataset's order
    seed: int|None = None,       # decides which ones; None: others each time
    show: Callable|None = None,  # `show(xs, texts)` draws instead, and what it returns is returned
    vocab: Any = None,           # words by the number of a token, for texts; None: numbers
) -> Any:                        # axes, a 2-d array, or a DataFrame; in a notebook, which shows it, None for a figure
    """Show items with their target and what the model decides, as 'target / prediction', in words of `dls.vocab`

    Wrong classes are red. Targets and predictions that are images, masks or curves are drawn beside the input; tables
    and texts get columns `target` and `prediction`. No random stream moves. What is drawn how is said by `draw_items`,
    what is decided by the loss's `decodes`.
    A notebook shows it at once; in a script a table is printed, and a figure waits for `plt.show()` or `savefig`.
    Raises: TypeError for tensors that cannot be drawn without `show`, if a loader would be used up, or if it has no
    items that could be drawn at random; ValueError if there is nothing to predict, or if items of several batches
    differ in shape."""
    check_number('show_results: `n`', n, 1, whole=True, of='items')
    loader, ids = in_order(_loader(self, 'show_results', ds_idx, dl))
    if shuffle: loader = _drawn(loader, ids, n, seed)
    batches = _batches(loader if isinstance(loader, Loader) else Loader(loader, self.device), n)
    found = self.get_preds(dl=batches, reorder=False, with_input=True, with_decoded=True)
    return _show(self, found.inputs, found.targs, found.decoded, n, sum(map(find_bs, batches)), show, vocab)


def shown(
    drawn: Any,  # what `draw_items` gave
) -> Any:        # the same, but None for a figure that a notebook has shown
    "Show items where they are asked for: a figure in a notebook, a table in a script"
    if hasattr(drawn, 'iloc'): show_result(str(drawn))
    elif display_mode() in ('notebook', 'off'):
        show_figure(drawn[0, 0])  # a notebook shows whatever is left open
        if display_mode() == 'notebook': return None  # it would print an array of axes
    return drawn


# ---- which items

def _loader(learn, what, ds_idx, dl) -> Loader:  # a fork: what is iterated in part is nobody else's
    if dl is None and ds_idx == 1 and not learn.dls.valid_sets:
        raise ValueError(f"{what}: there is no validation set; `dl=…` takes any loader")
    loader = next(o for _, o in learn.dls.eval_loaders(ds_idx, dl, learn.device)).fork()
    if isinstance(loader.dl, Iterator): raise TypeError(
        f"{what} would use up batches of a `{type(loader.dl).__name__}`: give a DataLoader or a list of batches")
    return loader


def _drawn(loader, ids, n, seed):
    dl = loader.dl if isinstance(loader, Loader) else loader
    if ids is None: raise TypeError(
        f"show_results: `shuffle` needs a DataLoader of items with numbers, not a `{type(dl).__name__}`")
    g = torch.Generator()
    if seed is None: g.seed()
    else: g.manual_seed(seed)
    picked = torch.randperm(len(ids), generator=g)[:n].tolist()
    return items_of(dl, [ids[i] for i in picked], min(n, len(ids)))


def _batches(loader, n) -> list:  # the first ones, until they hold `n` items
    found, left = [], n
    with untouched(loader):
        batches: Any = iter(loader)
        try:
            for b in batches:
                found.append(b)
                left -= find_bs(b)
                if left <= 0: break
        finally: batches.close()
    if not found: raise ValueError(f"there is no batch to show: {loader.why_empty()}")
    return found


# ---- what is said of them

def _show(learn, xb, yb, decoded, n, total, show, vocab):
    n = min(n, total)
    xs, targs, decoded = (_first(_only(o), n, total) for o in (xb, yb, decoded))
    targs = _as_decided(targs, decoded)
    parts = {**_parts('target', targs), **_parts('prediction', decoded)}
    beside = {k: t for k, t in parts.items() if is_picture(t) and len(t) == n}
    classes = getattr(learn.dls, 'vocab', None)
    titles = {k: _values(t, n, classes, vocab) for k, t in parts.items() if k not in beside}
    wrong = [] if beside else _is_wrong(targs, decoded, n)
    drawn = draw_items(xs, titles or ['']*n, show, vocab, beside, wrong)
    return drawn if show is not None else shown(drawn)


def _only(b): return b[0] if type(b) is tuple and len(b) == 1 else b


def _first(b, n, total):  # items; a list with a tensor for each item, of any length, has as many members
    if isinstance(b, Mapping): return {k: _first(v, n, total) for k, v in b.items()}
    is_structure = type(b) is list and b and all(isinstance(o, Tensor) and o.shape[:1] == (total,) for o in b)
    if is_structure or type(b) is tuple and not any(isinstance(o, str) for o in b):
        return tuple(_first(o, n, total) for o in b)
    return b[:n] if type(b) in (list, tuple) or isinstance(b, Tensor) and b.ndim else b


def _parts(name, b) -> dict[str, Any]:  # by name: what is one thing has one
    if b is None or type(b) is tuple and not b: return {}
    if isinstance(b, Mapping): return {f'{name} {k}': v for k, v in b.items()}
    if type(b) is tuple and not isinstance(b[0], str): return {f'{name} {i}': o for i, o in enumerate(b)}
    return {name: b}


def _as_decided(targ, decoded):  # yes or no, where that is what was decided
    both = isinstance(targ, Tensor) and isinstance(decoded, Tensor) and targ.numel() == decoded.numel()
    return (targ > .5).reshape(decoded.shape) if both and decoded.dtype == torch.bool else targ


def _is_wrong(targ, decoded, n) -> list[bool]:  # of classes
    if not isinstance(targ, Tensor) or not isinstance(decoded, Tensor) or targ.numel() != decoded.numel(): return []
    if targ.is_floating_point() or decoded.is_floating_point(): return []
    return (targ.reshape(n, -1) != decoded.reshape(n, -1)).any(1).tolist()


def _values(t, n, classes, tokens) -> list:  # numbers as numbers, classes as words
    if isinstance(t, (list, tuple)) and len(t) == n:
        return [o if isinstance(o, (str, int, float)) else describe(o) for o in t]
    if not isinstance(t, Tensor) or not t.ndim or len(t) != n: return [describe(t)]*n
    if t.ndim == 2 and t.shape[1] == 1: t = t[:, 0]
    if t.ndim > 2: return [describe(o) for o in t]
    if t.ndim == 1: return t.tolist() if t.is_floating_point() else [_class(o, classes) for o in t.tolist()]
    is_share = classes is not None and t.shape[1] == len(classes) and bool(((t >= 0) & (t <= 1)).all())
    if t.dtype == torch.bool or is_share: return [_labels(row, classes) for row in t.tolist()]
    if t.is_floating_point(): return [_vector(row) for row in t.tolist()]
    words = tokens if classes is None else classes
    return [' '.join(str(word(i, words)) for i in row) for row in t.tolist()]


def _class(i, classes):
    if isinstance(i, int) and not isinstance(i, bool) or classes is None: return word(i, classes)
    return word(int(i), classes) if len(classes) > 1 else _labels([i], classes)  # yes or no


def _labels(row, classes) -> str:  # those that are true; of shares the largest ones
    found = sorted(((i, v) for i, v in enumerate(row) if v), key=lambda o: -o[1])
    if any(v < 1 for _, v in found): found = found[:3]
    return ', '.join(str(word(i, classes)) + ('' if v == 1 else f' {v:.2g}') for i, v in found) or 'none'


def _vector(row) -> str:
    return f"[{', '.join(f'{v:.3g}' for v in row[:4])}{', …' if len(row) > 4 else ''}]"
