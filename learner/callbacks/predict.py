"""`learn.predict` of an item, in the words of its data, and `learn.tta`: predictions of inputs changed at random."""
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from fastcore.basics import noop, patch
from fastcore.foundation import L
from torch import Tensor

from ..callback import Callback
from ..learner import Learner
from ..losses import loss_activation, loss_decodes
from ..pictures import word
from ..tensors import describe, forward_keys, map_tensors, split_batch
from ..utils import check_number, replacing, set_seed, warn
from .preds import one_at_a_time

__all__ = ['in_words']


# ---- one item

@patch
def predict(self: Learner,
    item: Any,                 # an input: a tensor, an array, a row of a DataFrame; several inputs: a tuple; a dict
    with_input: bool = False,  # the input as the model gets it too, first
    batch: bool = False,       # is it a whole batch, also where that cannot be told by its dimensions?
) -> tuple:                    # `[input]`, the decision in words of `dls.vocab`, the decision, the activated output
    """Predict an item, or a batch, as fits and evaluations would; several threads may, one after the other

    What has as many dimensions as the inputs of training batches is taken for a batch; numbers become of their type.
    Of a batch the first result is a list.
    Raises: TypeError for what holds no numbers; ValueError for an item of other dimensions; what the model raises."""
    with one_at_a_time: xb, is_batch = _inputs(item, _example(self), batch)  # of which one draws random numbers
    with one_at_a_time, replacing(self, n_inp=None if isinstance(xb, Mapping) else len(xb)):
        found = self.get_preds(dl=[xb], with_input=with_input, with_decoded=True)
    vocab = getattr(self.dls, 'vocab', None)
    if vocab is not None and loss_activation(self.loss_func) is loss_decodes(self.loss_func) is noop: warn(
        f"predict: how the loss, `{getattr(self.loss_func, '__name__', type(self.loss_func).__name__)}`, decides is "
        "not known, so outputs are given as they are: give it `activation` and `decodes`, or take one of torch's")
    def first(o): return o if is_batch else _first(o)
    decoded = first(found.decoded)
    shown = [in_words(d, vocab) for d in _items(found.decoded)] if isinstance(found.decoded, Tensor) else [decoded]
    inputs = [first(found.inputs)] if with_input else []
    return *inputs, shown if is_batch else shown[0], decoded, first(found.preds)


def _parts(item) -> dict:  # its inputs by name or place
    if isinstance(item, Mapping): return dict(item)
    if isinstance(item, list) and item and not any(hasattr(o, '__len__') for o in item): return {0: item}  # numbers
    return dict(enumerate(item if isinstance(item, (tuple, list)) else [item]))


examples: WeakKeyDictionary = WeakKeyDictionary()  # by DataLoaders: inputs of a training batch, with one item


def _example(learn) -> dict:  # by name or place; {} if there is none to be had
    if learn.dls not in examples:
        try: b = learn.dls.one_batch()
        except (TypeError, ValueError): b = None  # it would be used up, or there is no data
        xb = () if b is None else split_batch(b, learn.n_inp, forward_keys(learn.model))[0]
        examples[learn.dls] = map_tensors(lambda t: t[:1] if t.ndim else t, _parts(xb))
    return examples[learn.dls]


def _inputs(item, like, is_batch):  # of a batch, as `like` has them; and was it one?
    given = {k: v if isinstance(v, str) else _tensor(v) for k, v in _parts(item).items()}
    tensors = {k: (t, like[k]) for k, t in given.items()
               if given.keys() == like.keys() and isinstance(t, Tensor) and isinstance(like[k], Tensor)}
    is_batch = is_batch or any(t.ndim == known.ndim for t, known in tensors.values())
    for k, (t, known) in tensors.items():
        if t.ndim != known.ndim-(not is_batch): raise ValueError(
            f"predict: an item is given as {describe(t)}, and batches have {describe(known)}, whose first dimension "
            "counts items")
        if known.is_floating_point() or not t.is_floating_point(): given[k] = t.to(known.dtype)
    xb = {k: t if is_batch else [t] if isinstance(t, str) else t[None] for k, t in given.items()}
    xb = map_tensors(Tensor.clone, xb)  # the model may write into them
    return xb if isinstance(item, Mapping) else tuple(xb.values()), is_batch


def _tensor(o) -> Tensor:
    if isinstance(o, Tensor): return o
    a = np.ascontiguousarray(np.asarray(o))  # pandas gives rows from right to left as they are
    if a.dtype.kind == 'O':
        try: a = a.astype(float)
        except (TypeError, ValueError): pass  # said below
    if a.dtype.kind not in 'biuf': raise TypeError(
        f"predict: a `{type(o).__name__}` of `{a.dtype}` holds no numbers: give what the training batches are made of")
    t = torch.tensor(a).reshape(np.shape(o))
    return t.float() if t.dtype in (torch.float64, torch.bool) else t


def _items(decoded) -> Iterator:  # one after the other
    yield from decoded.unbind() if decoded.ndim else [decoded]


def _first(o):  # of a batch of one item
    if isinstance(o, list) and len(o) == 1 and isinstance(o[0], Mapping): return o[0]
    return map_tensors(lambda t: t[0] if t.ndim else t, o)


def in_words(
    d: Any,      # what was decided of an item
    vocab: Any,  # names of the classes; None: unknown
) -> Any:
    "A class by its name, yes or no by one of two, several labels by theirs, a number as a number; else as it is"
    if not isinstance(d, Tensor): return d
    if vocab is None or d.is_floating_point(): return d.item() if d.numel() == 1 else d
    if d.dtype == torch.bool and (d.numel() > 1 or len(vocab) != 2):
        return [word(i, vocab) for i in d.flatten().nonzero().flatten().tolist()]
    return word(int(d), vocab) if d.numel() == 1 else d


# ---- test-time augmentation

class _Augmented(Callback):
    "Changes the inputs of an evaluation, each time with other random numbers"
    def __init__(self, f, i): self.f, self.i = f, i
    def before_validate(self): set_seed(int(torch.randint(2**31, ()))+self.i)  # all are put back afterwards
    def before_batch(self):
        xb = self.xb
        new = self.f(xb) if isinstance(xb, dict) else self.f(*xb)
        if not isinstance(new, (Tensor, tuple, dict)): raise TypeError(
            f"tta: `{getattr(self.f, '__name__', self.f)}` gave {describe(new)}; it has to give the inputs, changed")
        self.learn.xb = new if isinstance(new, (tuple, dict)) else (new,)


@patch
def tta(self: Learner,
    ds_idx: int = 1,           # 0 for the training loader, 1 for the validation set or sets
    dl: Any = None,            # another loader instead
    augs: Any = None,          # a function of the inputs, on the device, that gives them changed; or several
    n: int = 4,                # how often each is applied
    merge: str|Callable = 'mean',  # of the changed ones: 'mean', 'max', or `f(preds)` of `(n, n_items, …)`
    beta: float|None = .25,    # share of the predictions as they are; None: `(preds, merged, targs)` come back
    act: Callable|None = None,  # what is made of outputs, as `get_preds` takes it
    cbs: Any = None,           # callbacks for this only
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
    plain, targs = self.get_preds(ds_idx, dl, act=act, cbs=cbs)
    rounds = [self.get_preds(ds_idx, dl, act=act, cbs=[*L(cbs), _Augmented(f, i)])[0]
              for i, f in enumerate([f for f in fs for _ in range(n)])]
    if odd := [p for p in rounds if not isinstance(p, Tensor)]: raise TypeError(
        f"tta: predictions are {describe(odd[0])}, and tensors are merged: `act=` can take one out of them")
    aug = by_name.get(merge, merge)(torch.stack(rounds))
    return (plain, aug, targs) if beta is None else (torch.lerp(aug, plain, beta), targs)
