"""Predictions: `learn.get_preds()` of a whole set, complete and in its order, `predict` of an item, `tta`."""
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np
import torch
from fastcore.basics import patch
from fastcore.foundation import L
from torch import Tensor

from ..callback import Callback
from ..frame import guest_frame, run_frame
from ..learner import Learner
from ..losses import item_losses, loss_activation, loss_decodes
from ..resampled import in_order
from ..tensors import concat, describe, map_tensors, n_items, to_detach
from ..utils import check_number, replacing, set_seed

__all__ = ['GatherPredsCallback', 'Preds', 'in_words']

one_at_a_time = RLock()  # random streams and modes, which an evaluation puts back, are there once


class Preds(tuple):
    "What was predicted, in fastai's order: `[inputs], preds, targs, [decoded], [losses]`; by name too: `found.preds`"
    names: tuple[str, ...]

    def __new__(cls,
        names: tuple,  # of the members
        parts: Any,    # the members: each of all items, or of one batch; None: not wanted, or not there
    ):
        found = super().__new__(cls, parts)
        found.names = tuple(names)
        return found

    def __getnewargs__(self): return self.names, tuple(self)

    def __getattr__(self, name: str) -> Any:
        if name == 'names' or name not in self.names: raise AttributeError(
            f"these `Preds` have no `{name}`, only {', '.join(self.__dict__.get('names', ()))}")
        return self[self.names.index(name)]

    def __repr__(self) -> str: return f"Preds({', '.join(f'{n}: {describe(v)}' for n, v in zip(self.names, self))})"


class GatherPredsCallback(Callback):
    """Keeps what the model predicts in an evaluation, batch by batch, on the CPU; `get_preds` is made with it

    Without `with_loss` no loss is computed: targets need not suit it.
    Raises: RuntimeError for a batch that a callback has cancelled before there was a prediction; ValueError if there is
    no loss that could be kept.
    Order: after all others, but for what runs toward the end."""
    order = 1000
    held: Any = None    # the targets, while they are kept from the loss
    losses: Any = None  # of the batch's items

    def __init__(self,
        names: tuple[str, ...],  # what is kept, of 'inputs', 'preds', 'targs', 'decoded', 'losses'
        keep: Callable,          # called with the Preds of each batch
        act: Callable|None = None,  # what is made of the model's output; None: the loss's activation
    ): self.names, self.keep, self.act = names, keep, act

    def before_batch(self): self.held = self.losses = None

    def after_pred(self):
        learn = self.learn
        if 'losses' in self.names:
            if learn.loss_func is None or not learn.yb: raise ValueError(
                "get_preds: `with_loss` needs a `loss_func` of the Learner, and targets in the batches")
            self.losses = learn._in_context(lambda: self._items(learn))
        self.held, learn.yb = learn.yb, ()

    def _items(self, learn): return item_losses(learn.loss_func, learn.pred, learn.yb, n_items(learn.xb, learn.yb))

    def after_loss(self): self._give_back()

    def _give_back(self):
        if self.held is not None: self.learn.yb, self.held = self.held, None

    def after_batch(self):
        self._give_back()
        learn, f = self.learn, self.learn.loss_func
        if learn.pred is None: raise RuntimeError(
            f"get_preds: batch {self.iter} was cancelled before it had a prediction, so that its items have none")
        pred = (loss_activation(f) if self.act is None else self.act)(learn.pred)
        parts = dict(inputs=_only(learn.xb), preds=pred, targs=_only(learn.yb), losses=self.losses,
                     decoded=loss_decodes(f)(pred) if 'decoded' in self.names else None)
        self.losses = None
        self.keep(Preds(self.names, [to_detach(parts[k], cpu=True) for k in self.names]))


class _GivesBack(Callback):
    "Lets all others see the targets as soon as the loss has been passed by; order: before all others"
    order = -1000
    def __init__(self, gather): self.gather = gather
    def after_loss(self): self.gather._give_back()


def _only(b): return b if isinstance(b, dict) or len(b) > 1 else b[0] if b else None


@patch
def get_preds(self: Learner,
    ds_idx: int = 1,             # 0 for the training loader, 1 for the validation set or sets, one after the other
    dl: Any = None,              # another loader, or an iterable of batches, instead
    with_input: bool = False,    # the inputs too, first
    with_decoded: bool = False,  # what the loss's `decodes` makes of predictions, such as the class, too
    with_loss: bool = False,     # the loss of each item too, whatever the loss is, `(n_items,)`
    act: Callable|None = None,   # what is made of outputs; None: the loss's activation, if it has one; `noop`: nothing
    inner: bool = False,         # without `before_fit`, `before_epoch` …, as always within a fit
    reorder: bool = True,        # all items once, in the dataset's order; False: as the loader gives them
    cbs: Any = None,             # callbacks for this only
    save_preds: str|Path|None = None,  # a folder: predictions go there, a file a batch, and their paths come back
    save_targs: str|Path|None = None,  # likewise for targets
    with_preds: bool = True,     # False: None in their place
    with_targs: bool = True,     # False: None in their place
    concat_dim: int|None = 0,    # along which batches are joined; None: lists of batches come back
    pickle_protocol: int = 2,    # of these files
    reduce: Callable|None = None,  # `total = reduce(total, found)` for each batch, from None on: all that stays
) -> Any:                        # Preds: `[inputs], preds, targs, [decoded], [losses]`; with `reduce` what it gave
    """Predictions and targets, on the CPU; nothing else changes, wherever it is called from

    Outputs and targets may be nested: tensors are joined wherever they are. A single target stands for itself, several
    are a tuple, none is None.
    Raises: ValueError if there is nothing to predict, or batches cannot be joined; RuntimeError if a callback cancels a
    batch before there is a prediction."""
    if dl is None and ds_idx == 1 and not self.dls.valid_sets:
        raise ValueError("there is no validation set: `get_preds(dl=…)` takes any loader")
    optional = dict(inputs=with_input, preds=True, targs=True, decoded=with_decoded, losses=with_loss)
    names, left_out = tuple(k for k, wanted in optional.items() if wanted), {'preds': with_preds, 'targs': with_targs}
    files = {k: _Files(Path(p), pickle_protocol) for k, p in dict(preds=save_preds, targs=save_targs).items() if p}
    found, total = [], None
    def keep(batch):
        nonlocal total
        parts = {k: v if left_out.get(k, True) else None for k, v in zip(names, batch)}
        for k, f in files.items(): parts[k] = f.add(parts[k])
        batch = Preds(names, parts.values())
        if reduce is None: found.append(batch)
        else: total = reduce(total, batch)
    gather = GatherPredsCallback(names, keep, act)
    _run(self, ds_idx, dl, reorder, inner, [gather, _GivesBack(gather), *L(cbs)])
    if reduce is not None: return total
    return Preds(names, [_joined([*batches], concat_dim, k in files) for k, batches in zip(names, zip(*found))])


def _joined(batches, dim, are_files):
    if are_files or dim is None: return batches
    return concat(batches, dim)


class _Files:
    "A folder with a file for each batch"
    def __init__(self, folder, protocol):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.protocol, self.n = folder, protocol, 0

    def add(self, batch):
        path = self.folder/f'{self.n:06}.pt'
        torch.save(batch, path, pickle_protocol=self.protocol)
        self.n += 1
        return path


def _run(learn, ds_idx, dl, reorder, inner, cbs):
    left_out = [cb for cb in learn.cbs if cb.remove_on_fetch and cb.run]
    for cb in left_out: cb.run = False
    try:
        with one_at_a_time, guest_frame(learn), run_frame(learn, 'predict'), learn.added_cbs(cbs):
            loaders = [in_order(o)[0] if reorder else o for _, o in learn.dls.eval_loaders(ds_idx, dl, learn.device)]
            def epoch():
                for o in loaders: learn._do_epoch_validate(dl=o)
            if inner or learn._scope[1]: epoch()
            else: learn._with_events(lambda: learn._with_events(epoch, 'epoch'), 'fit')
    finally:
        for cb in left_out: cb.run = True


# ---- one item

@patch
def predict(self: Learner,
    item: Any,                 # an input: a tensor, an array, a row of a DataFrame; several inputs: a tuple; a dict
    with_input: bool = False,  # the input as the model gets it too, first
    batch: bool = False,       # is it a whole batch? A DataFrame is one
) -> tuple:                    # `[input]`, the decision in words of `dls.vocab`, the decision, the activated output
    """Predict an item, or a batch, as fits and evaluations would; several threads may, one after the other

    Numbers of 64 bits become float32, as by `DataLoaders.from_tensors`.
    Raises: TypeError for what holds no numbers; what the model raises."""
    is_batch = batch or hasattr(item, 'iloc') and item.ndim == 2
    xb = _inputs(item, is_batch)
    with one_at_a_time, replacing(self, n_inp=None if isinstance(xb, Mapping) else len(xb)):
        found = self.get_preds(dl=[xb], with_input=with_input, with_decoded=True)
    vocab = getattr(self.dls, 'vocab', None)
    def first(o): return o if is_batch else map_tensors(lambda t: t[0], o)
    decoded, shown = first(found.decoded), [in_words(d, vocab) for d in _items(found.decoded)]
    given = [first(found.inputs)] if with_input else []
    return *given, shown if is_batch else shown[0], decoded, first(found.preds)


def _inputs(item, is_batch):
    def ready(o):
        if isinstance(o, str): return o if is_batch else [o]
        t = _tensor(o)
        return t if is_batch else t[None]
    if isinstance(item, Mapping): return {k: ready(v) for k, v in item.items()}
    return tuple(map(ready, item)) if isinstance(item, (tuple, list)) else (ready(item),)


def _tensor(o) -> Tensor:
    if isinstance(o, Tensor): return o
    a = np.asarray(o)
    if a.dtype.kind == 'O':
        try: a = a.astype(float)
        except (TypeError, ValueError): pass  # said below
    if a.dtype.kind not in 'biuf': raise TypeError(
        f"predict: a `{type(o).__name__}` of `{a.dtype}` holds no numbers: give what the training batches are made of")
    t = torch.tensor(a)
    return t.float() if t.dtype in (torch.float64, torch.bool) else t


def _items(decoded) -> Iterator:  # one after the other
    ts = decoded if isinstance(decoded, Tensor) else None
    yield from [decoded] if ts is None else ts.unbind() if ts.ndim else [ts]


def in_words(
    d: Any,      # what was decided of an item
    vocab: Any,  # names of the classes; None: unknown
) -> Any:
    "A class by its name, several labels by theirs, a number as a number; anything else as it is"
    if not isinstance(d, Tensor): return d
    if vocab is None or d.is_floating_point(): return d.item() if d.numel() == 1 else d
    if d.dtype == torch.bool: return [vocab[i] for i in d.flatten().nonzero().flatten().tolist()]
    return vocab[int(d)] if d.numel() == 1 else d


# ---- test-time augmentation

class _Augmented(Callback):
    "Changes the inputs of an evaluation, each time with other random numbers"
    def __init__(self, f, i): self.f, self.i = f, i
    def before_validate(self): set_seed(int(torch.randint(2**31, ()))+self.i)  # all are put back afterwards
    def before_batch(self):
        xb = self.xb
        new = self.f(xb) if isinstance(xb, dict) else self.f(*xb)
        self.learn.xb = new if isinstance(new, (tuple, dict)) else (new,)


@patch
def tta(self: Learner,
    ds_idx: int = 1,           # 0 for the training loader, 1 for the validation set or sets
    dl: Any = None,            # another loader instead
    augs: Any = None,          # a function of the inputs, on the device, that gives them changed; or several
    n: int = 4,                # how often each is applied
    merge: str|Callable = 'mean',  # of the changed ones: 'mean', 'max', or `f(preds)` of `(n, n_items, …)`
    beta: float|None = .25,    # share of the predictions as they are; None: `(preds, merged, targs)` come back
    **kwargs: Any,             # of `get_preds`: `act`, `cbs`
) -> tuple:                    # predictions, merged, and targets
    """Predict several times with inputs changed at random, and merge

    Raises: TypeError or ValueError for parameters that mean nothing."""
    fs = L(augs)
    if not fs or not all(map(callable, fs)): raise TypeError(
        f"tta: augs={augs!r}; give a function that changes a batch of inputs, as torchvision's transforms, or several")
    check_number('tta: `n`', n, 1, whole=True)
    if beta is not None: check_number('tta: `beta`', beta, 0, 1)
    if merge not in ('mean', 'max') and not callable(merge): raise ValueError(
        f"tta: merge={merge!r}; give 'mean', 'max' or a function")
    by_name: dict[Any, Any] = dict(mean=lambda t: t.mean(0), max=lambda t: t.amax(0))
    plain, targs = self.get_preds(ds_idx, dl, **kwargs)
    cbs = L(kwargs.pop('cbs', None))
    rounds = [self.get_preds(ds_idx, dl, cbs=[*cbs, _Augmented(f, i)], **kwargs)[0]
              for i, f in enumerate([f for f in fs for _ in range(n)])]
    aug = by_name.get(merge, merge)(torch.stack(rounds))
    return (plain, aug, targs) if beta is None else (torch.lerp(aug, plain, beta), targs)
