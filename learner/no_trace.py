"""Training for a while without a trace: the Learner with all it has, its data and the random streams as before."""
from contextlib import contextmanager
from copy import copy
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import torch
from fastcore.foundation import L
from torch.utils.data import DataLoader, Sampler

from .callback import Callback
from .hypers import Hypers
from .keep import is_generator, kept
from .learner import Learner
from .loader import untouched
from .modes import choose_device
from .optim import Optimizer

__all__ = ['no_trace']

plain_types = FunctionType, BuiltinFunctionType, partial, type, ModuleType  # have no state of their own


@contextmanager
def no_trace(
    learn: Learner,
):
    """Train for a while: afterwards the Learner is as before, with all it has, and the next fit like one without

    The training loader is iterated as a fork, by workers of its own.
    Raises: ValueError if the model has lazy parameters."""
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
