"""ActivationCheckpointing: the same results with less memory, and a model that is afterwards what it was."""
import pickle
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import DataLoader, TensorDataset

from learner.callback import Callback
from learner.callbacks.compile import Compiled
from learner.callbacks.precision import MixedPrecision
from learner.callbacks.recompute import ActivationCheckpointing
from learner.events import CancelBatchException
from tests.helpers import raises, synth_learner, weights
from tests.loader_helpers import equal


class Block(nn.Module):
    "With dropout, BatchNorm, and a buffer that the forward changes and depends on; counts its calls"
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(spectral_norm(nn.Linear(4, 4)), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(.3))
        self.n_calls = 0

    def forward(self, x, scale=1.):
        self.n_calls += 1
        return x+scale*self.net(x)


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block() for _ in range(3)]), nn.Linear(4, 1)

    def forward(self, x):
        for b in self.blocks: x = b(x, scale=.5)
        return self.head(x)


def learner(cbs=None):
    torch.manual_seed(0)
    x = torch.randn(24, 4)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    return synth_learner(cbs, dls=(DataLoader(data, 8), DataLoader(data, 8)), model=Blocks(), lr=.01)


def n_saved(learn):
    "How many numbers autograd keeps for the backward passes of a fit"
    n = 0
    def pack(t):
        nonlocal n
        n += t.numel()
        return t
    with saved_tensors_hooks(pack, lambda t: t): learn.fit(1)
    return n


def calls(learn): return [b.n_calls for b in learn.model.blocks]


@pytest.mark.parametrize('cbs', [[], [MixedPrecision('bf16')]], ids=['float32', 'bf16'])
@pytest.mark.parametrize('which', [Block, 'blocks.*', lambda m: isinstance(m, nn.Sequential), ['blocks.0', 'head'], ''],
                         ids=['class', 'pattern', 'function', 'list', 'whole'])
def test_same_bits(which, cbs):
    "Weights, buffers and record are those of training without it, bit for bit, also with dropout, BatchNorm, autocast"
    found, learn = [], learner([ActivationCheckpointing(which), *deepcopy(cbs)])
    for k in (learn, learner(deepcopy(cbs))):
        torch.manual_seed(1)
        k.fit(2)
        state = {n: v.clone() for n, v in k.model.state_dict().items()}
        found.append((state, [*k.final_record], torch.get_rng_state()))

    assert equal(*found)

def test_less_is_kept():
    "Autograd keeps less than half; modules are called again in training, and only there"
    learn, plain = learner(ActivationCheckpointing(Block)), learner()

    kept, kept_without = n_saved(learn), n_saved(plain)
    learn.validate()

    assert kept < kept_without/2
    assert calls(learn) == [3+3+3+3]*3 and calls(plain) == [3+3]*3  # training, again, validation twice

def test_model_is_as_before():
    "No trace in attributes, in names of the state, or in modes, whatever ends the batch or the fit"
    learn = learner(ActivationCheckpointing('blocks.*'))
    before = [dict(vars(m)) for m in learn.model.modules()], [*learn.model.state_dict()]
    names = []
    see = Callback(after_pred=lambda cb: names.append([*cb.model.state_dict()]))

    learn.fit(1, cbs=see)
    learn.fit(1, cbs=Callback(after_loss=raises(CancelBatchException())))
    for ex in (KeyboardInterrupt, ValueError):
        with pytest.raises(ex): learn.fit(1, cbs=Callback(after_pred=raises(ex('stop'))))
    learn.lr_find(num_it=4, show_plot=False, suggest_funcs=None)

    assert [vars(m).keys() for m in learn.model.modules()] == [a.keys() for a in before[0]]
    assert all(n == before[1] for n in names) and [*learn.model.state_dict()] == before[1]
    assert not learn.activation_checkpointing._stands

@pytest.mark.parametrize('copied', [deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=['deepcopy', 'pickle'])
@pytest.mark.parametrize('event', ['after_pred', 'after_step', 'save_point'])
def test_copies_in_the_midst_of_a_fit(event, copied, monkeypatch):
    "A copy made at any time is a model of its own, which computes what it would have computed"
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)
        def forward(self, x): return self.a(x).tanh()
    monkeypatch.setitem(globals(), 'Plain', Plain)  # so that it can be pickled
    Plain.__qualname__ = 'Plain'
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    learn = synth_learner(ActivationCheckpointing(Plain), dls=([(x, x)]*2, None), lr=.1,
                          model=nn.Sequential(Plain(), Plain()))
    copies = []
    def copy(cb): copies.append((copied(cb.model), cb.model(x).detach()))

    learn.fit(1, cbs=Callback(**{event: copy}))

    model, out = copies[0]
    assert equal(model(x).detach(), out) and not {*model.modules()} & {*learn.model.modules()}
    assert not equal(weights(learn)[0], next(model.parameters()).detach()) or event == 'save_point'

def test_forward_of_its_own():
    "A module whose `forward` somebody has replaced keeps that one"
    learn = learner(ActivationCheckpointing('head'))
    head: Any = learn.model.head
    head.forward = own = lambda x: nn.functional.linear(x, head.weight)

    learn.fit(1)

    assert vars(head)['forward'] is own

def test_refused():
    "What finds nothing, TorchScript and a compiled model are errors before training, which say what to do"
    with pytest.raises(ValueError, match="'block' finds no module of `Blocks`"):
        learner(ActivationCheckpointing('block')).fit(1)
    with pytest.raises(ValueError, match='the model is compiled.*`learn.uncompile'):
        learner([ActivationCheckpointing(Block), Compiled('eager')]).fit(1)
    with pytest.warns(DeprecationWarning): script = torch.jit.script(nn.Linear(1, 1))
    with pytest.raises(TypeError, match='`0` is TorchScript'):
        synth_learner(ActivationCheckpointing('0'), model=nn.Sequential(script)).fit(1)
