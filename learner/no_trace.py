"""Training for a while without a trace: the Learner with all it has, its data and the random streams as before."""
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from fastcore.foundation import L
from torch.utils.data import DataLoader, Sampler

from .callback import Callback
from .checks import check_fit
from .data import as_dls
from .frame import fit_frame
from .hypers import Hypers
from .interrupt import stop_error
from .keep import is_generator, kept
from .learner import Learner
from .loader import untouched
from .modes import choose_device
from .optim import Optimizer

__all__ = ['no_trace', 'trial_frame', 'trial']

plain_types = FunctionType, BuiltinFunctionType, partial, type, ModuleType  # have no state of their own


@contextmanager
def no_trace(
    learn: Learner,
):
    """Train for a while: afterwards the Learner is as before, with all it has, and the next fit like one without

    The training loader is iterated as a fork, by workers of its own."""
    dls, own, stop = learn.dls, learn.dls.train, learn._stop
    if choose_device(dls.device, learn.model).type == 'cuda': torch.cuda.init()  # else its random stream is not kept
    losses = [o for o in _parts(learn.loss_func) if hasattr(o, '__dict__') and not isinstance(o, plain_types)]
    whole = Learner, Callback, Optimizer, Hypers, *{type(o) for o in losses}
    try:
        with untouched(own), _kept_data(own.dl), kept(learn, *losses, whole=whole):
            learn._dls, learn._metrics = copy(dls), L()
            learn._dls.loaders = [own.fork(), *dls.loaders[1:]]
            try: yield
            finally: stop.held = True
    finally: stop.held = False


@contextmanager
def trial_frame(
    learn: Learner,
    what: str,                   # what it is for, for messages
    done: Callable[[], str],     # tells how much has been done, likewise
):
    """`no_trace`, and what a fit has around it: Ctrl-C between two batches, and modes and workers put back

    Raises: KeyboardInterrupt if it is stopped, saying that all is as before."""
    try:
        with fit_frame(learn):
            with no_trace(learn): yield
            if (late := stop_error(learn, learn._stop.take())): raise late  # it came while things were put back
    except KeyboardInterrupt as e:
        where = f"{what} stopped after {done()}; the Learner is as it was before"
        if str(e).startswith('stopped'): e.args = (where,)  # the loop's own words are for a fit
        else: e.add_note(where)
        raise


def trial(
    learn: Learner,
    cbs: Any,                    # what ends it, and sees what comes of it
    n_epoch: int,                # epochs at most
    what: str,                   # what it is for, for messages
    done: Callable[[], str],     # tells how much has been done, likewise
    lr: Any = None,              # learning rate, as `fit` takes it
    batches: Any = None,         # an iterable of them; None: those of the training loader
) -> None:
    """A fit without a trace, in which only callbacks act whose `run_in` has 'lr_find'

    Raises: KeyboardInterrupt if it is stopped, saying so; ValueError if the training loader can be iterated only once.
    """
    if batches is None and isinstance(learn.dls.train.dl, Iterator): raise ValueError(
        f"{what} would use up the training loader, a `{type(learn.dls.train.dl).__name__}` that can be iterated only "
        "once: give a DataLoader or a list")
    check_fit(learn, 1, 0, None)
    with trial_frame(learn, what, done):
        if batches is not None: learn._dls = as_dls((batches, None))
        learn.n_epoch, learn.epoch, learn.n_steps = n_epoch, 0, None
        learn._fit('lr_find', lr, None, cbs, False)


def _parts(f):  # the objects that a function is made of
    if isinstance(f, partial): return [o for v in (f.func, *f.args, *f.keywords.values()) for o in _parts(v)]
    return [f.__self__] if isinstance(f, MethodType) else [f]


def _data_of(dl):  # what a loader reads from: it, if it is no DataLoader, what collates, and data sets within data sets
    todo, found = [getattr(dl, 'dataset', None), *_parts(getattr(dl, 'collate_fn', None))], {}
    if not isinstance(dl, DataLoader): todo.append(dl)
    while todo:
        o = todo.pop()
        if o is None or id(o) in found: continue
        found[id(o)] = o
        inner = getattr(o, 'datasets', ())
        todo += [getattr(o, 'dataset', None), *(inner if isinstance(inner, (list, tuple)) else ())]
    return list(found.values())


@contextmanager
def _kept_data(dl):  # samplers with all they have, data sets with their attributes and generators, but not their data
    samplers, data = [getattr(dl, k, None) for k in ('sampler', 'batch_sampler')], _data_of(dl)
    attrs = [(vars(o), dict(vars(o))) for o in data if hasattr(o, '__dict__') and not isinstance(o, plain_types)]
    values = [v for _, old in attrs for v in old.values()]
    inner = [v for o in values if isinstance(o, (list, tuple, dict)) and len(o) < 1000
             for v in (o.values() if isinstance(o, dict) else o)]
    own = [dl] if hasattr(type(dl), 'state_dict') else []  # a loader that keeps its own position
    whole = Sampler, *{type(s) for s in samplers if hasattr(s, '__dict__')}
    with kept(*samplers, *filter(is_generator, values+inner), *own, whole=whole, apart=tuple(data)):
        try: yield
        finally:
            for now, old in attrs:
                now.clear()
                now.update(old)
