"""Predictions of a whole set, complete and in its order: `learn.get_preds()`."""
from collections.abc import Callable
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from fastcore.basics import patch
from fastcore.foundation import L

from ..callback import Callback
from ..frame import guest_frame, run_frame
from ..learner import Learner
from ..losses import item_losses, loss_activation, loss_decodes
from ..resampled import in_order
from ..tensors import concat, describe, map_tensors, n_items

__all__ = ['GatherPredsCallback', 'Preds', 'one_at_a_time']

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
    frame: Any = None   # the scope of its evaluation: another one, within that, is nothing to it
    held: Any = None    # the targets, while they are kept from the loss
    losses: Any = None  # of the batch's items
    inputs: Any = None  # the batch's, before the model may write into them

    def __init__(self,
        names: tuple[str, ...],  # what is kept, of 'inputs', 'preds', 'targs', 'decoded', 'losses'
        keep: Callable,          # called with the Preds of each batch
        act: Callable|None = None,  # what is made of the model's output; None: the loss's activation
    ): self.names, self.keep, self.act = names, keep, act

    def _is_mine(self):
        scope = self.learn._scope
        while scope and scope[0] != 'frame': scope = scope[1]
        if self.frame is None: self.frame = scope
        return scope is self.frame

    def before_validate(self): self._is_mine()

    def before_batch(self):
        if self._is_mine(): self.losses, self.inputs = None, 'inputs' in self.names and _copied(_only(self.learn.xb))

    def after_pred(self):
        if not self._is_mine(): return
        learn = self.learn
        if 'losses' in self.names:
            if learn.loss_func is None or not learn.yb: raise ValueError(
                "get_preds: `with_loss` needs a `loss_func` of the Learner, and targets in the batches")
            self.losses = learn._in_context(lambda: self._items(learn))
        self.held, learn.yb = learn.yb, ()

    def _items(self, learn): return item_losses(learn.loss_func, learn.pred, learn.yb, n_items(learn.xb, learn.yb))

    def after_loss(self): self._give_back()

    def _give_back(self):
        if self.held is not None and self._is_mine(): self.learn.yb, self.held = self.held, None

    def after_batch(self):
        if not self._is_mine(): return
        self._give_back()
        learn, f = self.learn, self.learn.loss_func
        if learn.pred is None or 'losses' in self.names and self.losses is None: raise RuntimeError(
            f"get_preds: batch {self.iter} was cancelled before it had a prediction, or a loss that is asked for")
        pred = (loss_activation(f) if self.act is None else self.act)(learn.pred)
        parts = dict(inputs=self.inputs, preds=pred, targs=_only(learn.yb), losses=self.losses,
                     decoded=loss_decodes(f)(pred) if 'decoded' in self.names else None)
        self.losses = self.inputs = None
        self.keep(Preds(self.names, [_copied(parts[k]) for k in self.names]))

    def _cancelled(self):
        if self._is_mine(): raise RuntimeError("get_preds: a callback has ended it: not all items are predicted")

    after_cancel_validate = after_cancel_epoch = after_cancel_fit = _cancelled


def _copied(b):  # on the CPU: the model may write into what it has returned
    return map_tensors(lambda t: t.detach().to('cpu', copy=True), b)


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
    with_loss: bool = False,     # the loss of each item by itself too, whatever the loss is, `(n_items,)`
    act: Callable|None = None,   # what is made of outputs; None: the loss's activation, if it has one; `noop`: nothing
    inner: bool = False,         # without `before_fit`, `before_epoch` …, as always within a fit
    reorder: bool = True,        # all items once, in the dataset's order; False: as the loader gives them
    cbs: Any = None,             # callbacks for this only
    save_preds: str|Path|None = None,  # a folder: predictions go there, a file a batch; their paths come back
    save_targs: str|Path|None = None,  # likewise for targets; files of earlier calls are replaced
    with_preds: bool = True,     # False: None in their place
    with_targs: bool = True,     # False: None in their place
    concat_dim: int|None = 0,    # along which batches are joined; None: lists of batches come back
    pickle_protocol: int = 2,    # of these files
    reduce: Callable|None = None,  # `total = reduce(total, found)` for each batch, from None on: all that stays
) -> Any:                        # Preds: `[inputs], preds, targs, [decoded], [losses]`; with `reduce` what it gave
    """Predictions and targets, on the CPU; nothing else changes, wherever it is called from

    Outputs and targets may be nested: tensors are joined wherever they are. A single target stands for itself, several
    are a tuple, none is None.
    Raises: ValueError if there is nothing to predict, or batches cannot be joined; RuntimeError if a callback cancels
    what predictions of all items need; TypeError if `act` or `reduce` is no function."""
    if dl is None and ds_idx == 1 and not self.dls.valid_sets:
        raise ValueError("there is no validation set: `get_preds(dl=…)` takes any loader")
    for name, f in dict(act=act, reduce=reduce).items():
        if f is not None and not callable(f): raise TypeError(f"get_preds: {name}={f!r}; give a function")
    if save_preds and save_targs and Path(save_preds).resolve() == Path(save_targs).resolve(): raise ValueError(
        f"get_preds: predictions and targets would both go to `{save_preds}`: give each its own folder")
    optional = dict(inputs=with_input, preds=True, targs=True, decoded=with_decoded, losses=with_loss)
    names, left_out = tuple(k for k, wanted in optional.items() if wanted), {'preds': with_preds, 'targs': with_targs}
    files = {k: _Files(Path(p), pickle_protocol) for k, p in dict(preds=save_preds, targs=save_targs).items() if p}
    found, total = [], None
    def keep(batch):
        nonlocal total
        parts = {k: files[k].add(v) if k in files else v if left_out.get(k, True) else None
                 for k, v in zip(names, batch)}
        batch = Preds(names, parts.values())
        if reduce is None: found.append(batch)
        else: total = reduce(total, batch)
    gather = GatherPredsCallback(names, keep, act)
    _run(self, ds_idx, dl, reorder, inner, gather, L(cbs))
    if reduce is not None: return total
    return Preds(names, [_joined([*batches], concat_dim, k in files) for k, batches in zip(names, zip(*found))])


def _joined(batches, dim, are_files):
    if are_files or dim is None: return batches
    return concat(batches, dim)


class _Files:
    "A folder with a file for each batch"
    def __init__(self, folder, protocol):
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob('[0-9]'*6+'.pt'): old.unlink()
        self.folder, self.protocol, self.n = folder, protocol, 0

    def add(self, batch):
        path = self.folder/f'{self.n:06}.pt'
        torch.save(batch, path, pickle_protocol=self.protocol)
        self.n += 1
        return path


def _run(learn, ds_idx, dl, reorder, inner, gather, cbs):
    left_out = [cb for cb in learn.cbs if cb.remove_on_fetch and cb.run]
    for cb in left_out: cb.run = False
    try:
        with one_at_a_time, guest_frame(learn), run_frame(learn, 'predict'), \
                learn.added_cbs([gather, _GivesBack(gather), *cbs]):
            gather.frame = learn._scope
            loaders = [in_order(o)[0] if reorder else o for _, o in learn.dls.eval_loaders(ds_idx, dl, learn.device)]
            def epoch():
                for o in loaders: learn._do_epoch_validate(dl=o)
            if inner or learn._scope[1]: epoch()
            else: learn._with_events(lambda: learn._with_events(epoch, 'epoch'), 'fit')
    finally:
        for cb in left_out: cb.run = True
