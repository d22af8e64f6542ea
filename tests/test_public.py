"""The public interface, pinned: what `learner` offers, with which parameters and defaults, is in data/public.txt.

Whoever changes the interface changes that file: `python -m tests.test_public` writes it anew."""
import inspect
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fastcore.basics import noop, patch, store_attr
from fastcore.foundation import L
from fastcore.meta import delegates
from fastcore.test import test_close as close
from fastcore.test import test_eq as eq
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import learner
from learner import Callback, event_names
from learner.integrations import mmengine
from tests.helpers import synth_learner

pinned = Path(__file__).parent/'data/public.txt'
public = {name: getattr(m, name) for m in (learner, mmengine) for name in m.__all__}
special = '__init__', '__call__', '__getitem__', '__len__'


class Stable:
    "A value whose text is the same in every run"
    def __init__(self, value): self.value = value

    def __repr__(self):
        if isinstance(self.value, (set, frozenset)): return f"{{{', '.join(map(repr, sorted(self.value)))}}}"
        return getattr(self.value, '__qualname__', None) or repr(self.value)


def signature(f):
    "Names, kinds and defaults of parameters; their types are a type checker's business"
    sig = inspect.signature(f)
    params = [p.replace(annotation=p.empty, default=p.default if p.default is p.empty else Stable(p.default))
              for p in sig.parameters.values()]
    return str(sig.replace(parameters=params, return_annotation=sig.empty))


def members(cls):
    "Name and kind of what a class adds to its public bases; what a private base gives it is its own"
    bases = [b for b in cls.__mro__ if b is cls or b.__module__.startswith('learner.') and b not in public.values()]
    found = {name: o for b in reversed(bases) for name, o in vars(b).items()}  # the first of the bases wins
    for name, o in found.items():
        f = getattr(o, '__func__', o)  # of a class method or a static one
        if name.startswith('_') and name not in special or name in event_names: continue
        if getattr(getattr(f, 'fget', f), '__module__', '').startswith('tests.'): continue  # patched in by another test
        if inspect.isfunction(f): yield f'{name}{signature(f)}'
        elif isinstance(o, (bool, int, float, str, tuple, set, frozenset, type(None))): yield f'{name} = {Stable(o)}'
        else: yield f'{name}: {type(o).__name__}'


def describe():
    "The public interface in reading order, a line a name"
    for name, o in public.items():
        if isinstance(o, type):
            yield f"{name}({', '.join(b.__name__ for b in o.__bases__)})"
            yield from (f'    {line}' for line in members(o))
        else: yield f'{name}{signature(o)}' if callable(o) else f'{name}: {type(o).__name__}'


def test_interface_is_pinned():
    "Public names, parameters and defaults are those of data/public.txt; a change of them is a change of that file"
    assert list(describe()) == pinned.read_text(encoding='utf-8').splitlines()


# ---- what notebooks get

beside = dict(torch=torch, nn=nn, F=F, optim=optim, tensor=torch.tensor, Tensor=torch.Tensor, DataLoader=DataLoader,
              TensorDataset=TensorDataset, np=np, partial=partial, Path=Path, patch=patch, L=L, store_attr=store_attr,
              delegates=delegates, noop=noop, test_eq=eq, test_close=close)

@pytest.fixture(scope='module')
def notebook():
    names = {}
    exec('from learner.all import *', names)
    return names

def test_star_import_gives_all_that_is_public(notebook):
    "`from learner.all import *` gives every public name, none of them hidden by another of that name"
    assert {n for n in learner.__all__ if notebook.get(n) is not public[n]} == set()

@pytest.mark.parametrize('name', beside)
def test_star_import_gives_what_notebooks_need(notebook, name):
    "`from learner.all import *` gives torch's, numpy's and fastcore's names that nearly every notebook uses"
    assert notebook[name] is beside[name]

@pytest.mark.parametrize('name, module', [('plt', 'matplotlib.pyplot'), ('pd', 'pandas')])
def test_star_import_gives_plots_and_frames(notebook, name, module):
    "`from learner.all import *` gives `plt` and `pd`"
    assert notebook[name].__name__ == module

def test_star_import_gives_nothing_else(notebook):
    "`from learner.all import *` brings no name that is not listed in its `__all__`"
    assert notebook.keys() == {*learner.__all__, *beside, 'plt', 'pd', '__builtins__'}


# ---- what fastai's users know

known = {
    'learn': """
        dls dl model loss_func opt_func opt lr wd moms metrics cbs path model_dir splitter recorder progress logger
        training epoch n_epoch iter n_iter train_iter pct_train xb yb x y pred loss loss_grad smooth_loss final_record
        fit validate create_opt add_cb add_cbs remove_cb remove_cbs added_cbs removed_cbs ordered_cbs
        show_training_loop no_bar no_logging no_mbar one_batch all_batches
        _end_cleanup _with_events _do_fit _do_epoch _do_epoch_train _do_epoch_validate _do_one_batch _backward _step
        _split""",
    'learn.opt': 'hypers set_hyper freeze_to freeze unfreeze step zero_grad all_params clear_state state_dict',
    'learn.recorder': 'lrs losses iters values metric_names plot_loss',
    'learn.dls': 'train valid train_ds valid_ds bs device path to cuda cpu one_batch',
    'Callback()': 'order run run_train run_valid remove_on_fetch learn name state_dict load_state_dict',
}

@pytest.fixture(scope='module')
def learn():
    learn = synth_learner(default_cbs=True)
    learn.create_opt()
    return learn

@pytest.mark.parametrize('owner, name', [(o, n) for o, names in known.items() for n in names.split()])
def test_fastai_names_are_there(learn, owner, name):
    "What code written for fastai reads and calls has its name here too"
    assert hasattr(eval(owner, {'learn': learn, 'Callback': Callback}), name)

@pytest.mark.parametrize('base', 'Fit Epoch Train Valid Batch Backward Step'.split())
def test_fastai_exceptions_are_there(base):
    "The seven exceptions that end a scope keep their names"
    assert issubclass(public[f'Cancel{base}Exception'], learner.CancelException)


if __name__ == '__main__': pinned.write_text('\n'.join(describe())+'\n', encoding='utf-8')
