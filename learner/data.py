"""DataLoaders: the loaders of a training and of its validation sets, and what may stand in their place.

Any torch DataLoader or other iterable of batches serves; each is wrapped in a `Loader` (loader.py), which iterates it.
"""
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fastcore.meta import delegates
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from .loader import Loader, untouched
from .losses import MSELossFlat

__all__ = ['DataLoaders', 'as_dls']

only_train = 'sampler', 'batch_sampler', 'drop_last', 'generator'  # DataLoader options that are not for validation sets


class DataLoaders:
    """A training loader and, if there are any, validation sets, with the device that batches go to

    The second loader is the validation set; None: there is none; a dict: several, by name. Further loaders are there
    by number only. `c`, `vocab`, `loss_func` and `n_inp` can be set; the first two are else looked for in the training
    loader and its dataset.

    Raises: TypeError if a loader is missing, or is no iterable of batches."""
    valid_sets: dict[str, Loader]  # validation loaders by name; a single one is named ''
    loaders: list[Loader]          # all of them: training, validation, others
    n_inp: int | None = None       # how many of a batch's members are inputs; None: all but the last

    def __init__(self,
        *loaders: Any,                                   # training, validation (or None, or a dict of them), others
        device: torch.device | str | int | None = None,  # where batches go; None leaves it to the Learner
        path: str | Path = '.',                          # where a Learner writes files
    ):
        if not loaders or loaders[0] is None: raise TypeError("DataLoaders: the first loader, for training, is missing")
        train, valid, *others = *loaders, *[None]*(len(loaders) == 1)
        if others and valid is None: raise TypeError("DataLoaders: a third loader needs a validation loader before it")
        sets = valid if isinstance(valid, Mapping) else {} if valid is None else {'': valid}
        self.valid_sets = {k: _wrap(dl) for k, dl in sets.items()}
        self.loaders = [_wrap(train), *self.valid_sets.values(), *map(_wrap, others)]
        self.device, self.path = device, Path(path)

    @classmethod
    @delegates(DataLoader, but=['dataset', 'batch_size'])  # pyright: ignore[reportArgumentType]
    def from_dsets(cls,
        train: Any,                     # training dataset
        valid: Any = None,              # validation dataset, a dict of several, or None
        bs: int = 64,                   # items in a batch
        shuffle: bool | None = None,    # shuffle the training set; None: unless it is iterable or has a sampler
        device: torch.device | str | int | None = None,  # where batches go; None leaves it to the Learner
        path: str | Path = '.',         # where a Learner writes files
        **kwargs,
    ) -> 'DataLoaders':
        """Torch DataLoaders of datasets; samplers, `generator` and `drop_last` are for the training set only

        Raises: ValueError if a dataset is empty, TypeError for `batch_size`."""
        if 'batch_size' in kwargs: raise TypeError("the number of items in a batch is `bs` here, not `batch_size`")
        sets = valid if isinstance(valid, Mapping) else {} if valid is None else {'': valid}
        for name, ds in {'train': train, **sets}.items():
            if hasattr(ds, '__len__') and len(ds) == 0: raise ValueError(f"the {name or 'valid'} dataset is empty")
        if shuffle is None:
            shuffle = not isinstance(train, IterableDataset) and not {'sampler', 'batch_sampler'} & kwargs.keys()
        size = {} if 'batch_sampler' in kwargs else dict(batch_size=bs)
        others = {k: v for k, v in kwargs.items() if k not in only_train}
        make = partial(DataLoader, batch_size=bs, **others)
        return cls(DataLoader(train, shuffle=shuffle or None, **size, **kwargs),
                   {k: make(ds) for k, ds in sets.items()} or None, device=device, path=path)

    @classmethod
    @delegates(from_dsets)
    def from_tensors(cls,
        x: Any,                               # inputs, one a row: tensor, array, data frame or nested list
        y: Any,                               # targets of the same length: integers are classes, floats are values
        valid: tuple[Any, Any] | None = None,  # `(x, y)` of the validation set; None splits some off
        valid_pct: float = .2,                # part of the rows that is split off, 0 to 1; 0: no validation set
        seed: int = 42,                       # decides which ones, and nothing else
        **kwargs,
    ) -> 'DataLoaders':
        """DataLoaders of tables and tensors in memory, which are indexed by the batch; float64 becomes float32

        Sets `loss_func`, cross entropy for classes and mean squared error for values, and `c`, for classes
        by `vocab`.

        Raises: TypeError for text, ValueError if lengths differ or if a split leaves one part empty."""
        sets = [_pair(x, y, 'x', 'y')]
        if valid is not None: sets.append(_pair(*valid, 'valid x', 'valid y'))
        elif valid_pct: sets = _split(*sets[0], valid_pct, seed)
        train, valid_ds = *[TensorDataset(*s) for s in sets], *[None]*(len(sets) == 1)
        dls = cls.from_dsets(train, valid_ds, **kwargs)
        targs = [s[1] for s in sets]
        if targs[0].is_floating_point(): dls.loss_func, dls.c = MSELossFlat(), targs[0][0].numel()
        elif (low := int(min(t.min() for t in targs))) < 0: raise ValueError(
            f"y: integers are classes, counted from 0, but one is {low}; give floats if they are values")
        else: dls.loss_func, dls.vocab = nn.CrossEntropyLoss(), range(int(max(t.max() for t in targs)) + 1)
        return dls

    @property
    def train(self) -> Loader: "The training loader; another may be set"; return self.loaders[0]
    @train.setter
    def train(self, dl):
        self.loaders[0] = _wrap(dl)
        self.loaders[0].device = self.device

    @cached_property
    def loss_func(self) -> Any:
        "What a Learner without a loss takes: what was set, or what the training loader or its dataset have"
        return _known(self.train, 'loss_func')

    @property
    def valid(self) -> Loader | None: "The first validation loader"; return next(iter(self.valid_sets.values()), None)
    @property
    def train_ds(self) -> Any: "The training dataset"; return self.train.dataset
    @property
    def valid_ds(self) -> Any: "The first validation dataset"; return None if self.valid is None else self.valid.dataset
    @property
    def bs(self) -> int: "Items in a training batch"; return self.train.bs

    @cached_property
    def c(self) -> int:
        "Number of classes, or of values in a target: what was set, or what the loader, its dataset or `vocab` tell"
        found = _known(self.train, 'c')
        if found is None: found = len(self.vocab)
        return found

    @cached_property
    def vocab(self) -> Any:
        """The classes: what was set, or what the loader or its dataset tell

        Raises: AttributeError if none of them knows."""
        found = _known(self.train, 'vocab', 'classes')
        if found is None: raise AttributeError("neither the train loader nor its dataset knows the classes: set "
                                               "`dls.vocab`, or `dls.c` to their number")
        return found

    def __getitem__(self, i: int) -> Loader: "Loader number `i`; 0 is the training loader"; return self.loaders[i]
    def __len__(self): return len(self.loaders)

    def __repr__(self):
        named = {'train': self.train, **{name or 'valid': dl for name, dl in self.valid_sets.items()}}
        sizes = {k: '?' if dl.n_batches is None else dl.n_batches for k, dl in named.items()}
        return f"DataLoaders({', '.join(f'{k}: {n} batches' for k, n in sizes.items())})"

    @property
    def device(self) -> Any: "Where batches go; None leaves it to the Learner"; return self._device
    @device.setter
    def device(self, device):
        self._device = device
        for dl in self.loaders: dl.device = device

    def to(self,
        device: torch.device | str | int | None,  # where batches go from now on
    ) -> 'DataLoaders':                           # itself
        "Send batches to `device`"
        self.device = device
        return self

    def cuda(self) -> 'DataLoaders': "Send batches to the current GPU"; return self.to('cuda')
    def cpu(self) -> 'DataLoaders': "Leave batches on the CPU"; return self.to('cpu')

    def loader(self,
        i: int,                                    # its number; 0 is the training loader
        device: torch.device | str | int | None,   # where its batches go in this epoch
    ) -> Loader:
        "Loader number `i` to be iterated for training; a fork of it while it is in use, as by another Learner"
        dl = self[i].fork() if self[i].in_use else self[i]
        dl.device = device
        return dl

    def eval_loaders(self,
        ds_idx: int,                               # 1 for the validation sets, else a loader's number
        dl: Any,                                   # an iterable of batches instead, or None
        device: torch.device | str | int | None,   # where batches go
    ) -> Iterator[tuple[str, Loader]]:             # names ('' if there is one set only) and loaders
        """Loaders to be iterated in an evaluation, at any time: a training loader, or one in use, is iterated as a fork

        Raises: IndexError if there is no such loader, TypeError if `dl` is a batch."""
        if isinstance(dl, (tuple, Mapping)) and _is_batch(dl): raise TypeError(
            f"a `{type(dl).__name__}` of tensors is a batch, not a loader: give `[batch]`, or a DataLoader")
        if dl is None and isinstance(ds_idx, str) and ds_idx in self.valid_sets: dl = self.valid_sets[ds_idx]
        if dl is None and not isinstance(ds_idx, int): raise TypeError(
            f"ds_idx={ds_idx!r}: give 0 for the training loader, 1 for the validation sets, the name of one of "
            f"{[*self.valid_sets]}, or a loader as `dl=…`")
        if dl is None and not 0 <= ds_idx < max(2, len(self)):
            raise IndexError(f"there is no loader number {ds_idx}, but {len(self)}, counted from 0")
        sets = {'': dl if isinstance(dl, Loader) else Loader(dl)} if dl is not None else \
            self.valid_sets if ds_idx == 1 else {'': self[ds_idx]}
        for name, o in sets.items():
            o = o.fork() if o is self.train else o.for_eval()
            o.device = device
            yield name, o

    def one_batch(self) -> Any:  # as the training loader gives it, on `device` if that is set
        """The first batch of a training epoch; no random stream moves

        Raises: TypeError if that would use up a batch of an iterator, ValueError if there is no batch."""
        if isinstance(self.train.dl, Iterator):
            raise TypeError(f"one_batch would use up a batch of the train loader, a `{type(self.train.dl).__name__}`")
        with untouched(self.train):
            batches: Any = iter(self.train.fork())
            try:
                for b in batches: return b
            finally: batches.close()
        raise ValueError(f"the train loader gives no batch: {self.train.why_empty()}")

    def check(self) -> None:
        """See that training and validation have a batch to give, as far as that can be known without loading one

        Raises: ValueError naming the loader and what to do."""
        for name, dl in [('train', self.train), *self.valid_sets.items()]:
            if dl.n_batches == 0: raise ValueError(f"the {name or 'valid'} loader gives no batch: {dl.why_empty()}")


def as_dls(
    o: Any,            # DataLoaders, `(train, valid)`, one loader, or an object with `train` and `valid`
) -> DataLoaders:      # itself if it is one
    """What a Learner takes as data, as DataLoaders

    A tuple or list of two members is a pair of loaders (the second may be None, or a dict of several) unless one of
    them is a batch: a tensor, array, number or text, or a tuple, list or dict that directly holds one of these. Any
    other iterable is one loader, for training.

    Raises: TypeError for data that is not in a loader, or if there are several loaders, but no pair."""
    if isinstance(o, DataLoaders): return o
    if hasattr(o, 'train') and hasattr(o, 'valid'):
        dls = DataLoaders(o.train, o.valid, device=getattr(o, 'device', None), path=getattr(o, 'path', '.'))
        vars(dls).update({k: getattr(o, k) for k in ('loss_func', 'n_inp', 'c', 'vocab') if hasattr(o, k)})
        return dls
    if isinstance(o, (tuple, list)):
        if len(o) == 2 and not any(map(_is_batch, o)): return DataLoaders(*o)
        if len(o) == 2 and all(map(_is_data, o)): raise TypeError(
            "two tensors or arrays are no pair of loaders; use `DataLoaders.from_tensors(x, y)`, or, if they are two "
            "batches without targets, `DataLoaders(batches)`")
        if any(isinstance(m, (DataLoader, Loader, Dataset)) for m in o):
            raise TypeError(f"{len(o)} loaders are no pair; use `DataLoaders(train, valid, …)`")
    return DataLoaders(o)


def _known(o, *names):
    "The first attribute of `o`, its dataset, and what that is a subset of, that has one of `names` and is not None"
    while o is not None:
        for k in names:
            if (found := getattr(o, k, None)) is not None: return found
        o = getattr(o, 'dataset', None)


def _wrap(dl): return dl if isinstance(dl, Loader) else Loader(dl)


def _is_data(o):  # no loader
    plain = isinstance(o, (str, bytes, int, float)) or hasattr(o, 'shape')
    return plain or is_dataclass(o) and not hasattr(o, '__iter__')


def _is_batch(o):
    members = o if isinstance(o, (tuple, list)) else o.values() if isinstance(o, Mapping) else ()
    return _is_data(o) or any(map(_is_data, members))


# ---- tensors from anything that holds numbers

def _pair(x, y, x_name, y_name):
    "Inputs and targets of equal length; integers and truth values are classes, `(n, 1)` classes are `(n,)`"
    x, y = _tensor(x, x_name), _tensor(y, y_name)
    if len(x) != len(y): raise ValueError(f"from_tensors: `{x_name}` has {len(x)} rows, but `{y_name}` has {len(y)}")
    if x.dtype == torch.bool: x = x.float()
    if not y.is_floating_point(): y = y.long().flatten() if y.ndim == 2 and y.shape[1] == 1 else y.long()
    return x, y


def _tensor(o, name) -> Tensor:
    if not isinstance(o, Tensor): o = _from_numpy(_numpy(o, name), name)
    if not o.ndim: raise ValueError(f"from_tensors: `{name}` is a single number, not rows")
    return o.float() if o.dtype == torch.float64 else o


def _numpy(o, name):
    "A data frame or series as an array of one type"
    if not hasattr(o, 'iloc'): return np.asarray(o)
    frame = o if o.ndim == 2 else o.to_frame()
    kinds = {d.kind for d in frame.dtypes}
    if text := [str(c) for c, d in zip(frame.columns, frame.dtypes) if d.kind not in 'biuf']:
        raise TypeError(f"from_tensors: `{name}` has columns that are no numbers: {', '.join(text)}; encode them with "
                        "`pd.get_dummies(df)` or `.astype('category').cat.codes`")
    return o.to_numpy('bool' if kinds == {'b'} else 'int64' if kinds <= {'i', 'u'} else 'float32')


def _from_numpy(a, name):
    if a.dtype.kind not in 'biuf':
        raise TypeError(f"from_tensors: `{name}` holds `{a.dtype}`, which are no numbers; encode them as integers")
    if a.dtype.kind == 'u' and a.itemsize > 1: a = a.astype('int64')  # torch computes little with larger unsigned types
    return torch.from_numpy(np.require(a, requirements=['C', 'W']))


def _split(x, y, valid_pct, seed):
    "Train and validation rows"
    n_valid = int(len(x)*valid_pct)
    if not 0 < n_valid < len(x):
        raise ValueError(f"from_tensors: `valid_pct={valid_pct}` of {len(x)} rows leaves {len(x)-n_valid} to train and "
                         f"{n_valid} to validate with; `valid_pct=0` trains without validation")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    return [[t[i.to(t.device)] for t in (x, y)] for i in (order[n_valid:], order[:n_valid])]
