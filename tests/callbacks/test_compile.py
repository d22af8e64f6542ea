"""`learn.compile`: in place, seldom anew, and with the same results; what was compiled can be seen."""
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from learner.callback import Callback
from learner.callbacks.averaging import EMA
from learner.callbacks.compile import Compiled
from learner.callbacks.precision import MixedPrecision
from learner.callbacks.schedule import ParamScheduler
from learner.callbacks.stats import ActivationStats
from learner.callbacks.torch_schedule import TorchScheduler
from learner.hooks import is_compiled
from learner.optim import Adam, RMSProp
from learner.schedules import SchedLin
from tests.helpers import raises, synth_learner, weights
from tests.loader_helpers import equal
from tests.resume_helpers import network

# what torch imports when it first compiles a step
pytestmark = pytest.mark.filterwarnings('ignore:.torch.jit.script_method. is deprecated')


def graph_only(gm, inputs): "A backend that changes nothing"; return gm.forward


def net():
    torch.manual_seed(0)
    return network()


def loaders(n=21, n_valid=35):
    "Batches of 8, 8 and 5; for validation of 16, 16 and 3"
    x = torch.randn(n+n_valid, 4, generator=torch.Generator().manual_seed(0))
    y = (x.sum(1) > 0).long()
    return DataLoader(TensorDataset(x[:n], y[:n]), 8), DataLoader(TensorDataset(x[n:], y[n:]), 16)


def learner(cbs=None, model=None, **kwargs):
    return synth_learner(cbs, dls=loaders(), model=model or net(), loss_func=nn.CrossEntropyLoss(), lr=1e-2,
                         **{'opt_func': torch.optim.AdamW, **kwargs})


def test_it_is_seldom_compiled_anew():
    "With smaller last batches and validation, three epochs need four graphs at most, and a second fit no further ones"
    learn = learner().compile(graph_only)

    learn.fit(3)
    first = [*learn.compiled.graphs]
    learn.fit(2)
    learn.validate()

    assert 2 <= len(first) <= 4 and learn.compiled.graphs == first
    assert first[0] == 'model, with gradients, for float32[8, 4]'
    assert any(g.startswith('model, without gradients, for float32[') for g in first)
    assert repr(learn.compiled) == f'Compiled({len(first)} graphs)'

def test_the_result_is_the_same():
    "In place: a fit gives the same bits, names and hash as one that is not compiled; `uncompile` goes back"
    compiled, plain = learner().compile(graph_only), learner()
    names, model = [*plain.model.state_dict()], compiled.model

    for learn in (compiled, plain):
        torch.manual_seed(1)
        learn.fit(2)

    assert compiled.model is model and [*model.state_dict()] == names and is_compiled(model)
    assert equal(weights(compiled), weights(plain))
    torch.manual_seed(2)
    a, b = compiled.state_hash(), plain.state_hash()
    assert a == b
    assert not is_compiled(compiled.uncompile().model) and not hasattr(compiled, 'compiled')

def test_calls_chain_and_replace():
    "Each returns the Learner; compiling again replaces what was there; a new model is compiled by the next fit"
    learn = learner()

    first = learn.compile(graph_only).compiled
    second = learn.compile('eager', dynamic=True).compiled
    learn.model = other = net()
    learn.fit(1)

    assert first is not second and first.graphs == [] and len(second.graphs) == 2
    assert is_compiled(other) and learn.uncompile().uncompile() is learn and not is_compiled(other)

def test_copies_and_files_are_not_compiled(tmp_path):
    "A copy of the model runs as plain Python; weights go to and from a Learner that does not compile"
    learn, other = learner(path=tmp_path).compile(graph_only), learner(path=tmp_path)
    learn.fit(1)

    copied = deepcopy(learn.model)
    learn.save('m')
    other.load('m')

    assert not is_compiled(copied) and is_compiled(learn.model)
    assert equal(weights(learn), weights(other))

def test_hooks_see_everything():
    "While hooks are open nothing runs compiled, so ActivationStats measures what it measures without"
    seen, kept = [], []
    for compiled in (False, True):
        learn = learner(ActivationStats(every=2))
        if compiled: learn.compile(graph_only)
        torch.manual_seed(1)
        learn.fit(2)
        seen.append(repr(learn.activation_stats.layer_stats(0)))
        kept.append(weights(learn))

    assert seen[0] == seen[1] and equal(*kept)

def test_with_average_and_mixed_precision():
    "EMA swaps weights within the compiled model; autocast holds in it"
    types = []
    def look(cb): types.append(cb.pred.dtype)
    compiled, plain = (learner([EMA(), MixedPrecision('bf16'), Callback(after_loss=look)]) for _ in range(2))
    compiled.compile(graph_only)

    for learn in (compiled, plain):
        torch.manual_seed(1)
        learn.fit(2)

    assert compiled.final_record == plain.final_record and {*types} == {torch.float32}

@pytest.mark.parametrize('opt_func', [partial(RMSProp, mom=.9, wd=.1), torch.optim.AdamW, torch.optim.NAdam],
                         ids=['RMSProp', 'AdamW', 'NAdam'])
def test_compiled_step(opt_func):
    "With changing rates too, it is compiled a few times, gives the same weights, and is torch's own afterwards"
    def fit(step):
        torch.manual_seed(0)  # no BatchNorm: the bias before it has no gradient but rounding, which such steps magnify
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        learn = learner(ParamScheduler({'lr': SchedLin(1e-2, 1e-3), 'mom': SchedLin(.9, .8)}), model, opt_func=opt_func)
        learn.compile(graph_only, step=step)
        torch.manual_seed(1)
        learn.fit(4)
        n = len(learn.compiled.graphs)
        learn.fit(4)
        assert len(learn.compiled.graphs) == n
        return learn, n

    (compiled, n), (plain, n_plain) = fit(True), fit(False)

    assert 0 < n-n_plain <= 3
    assert all(torch.allclose(a, b, 1e-4, 1e-6) for a, b in zip(weights(compiled), weights(plain)))
    assert 'step' not in vars(compiled.opt) and compiled.compiled.graphs[-1] == 'step'

def test_compiled_step_with_torch_scheduler():
    "torch's scheduler sees the steps, and does not warn that there was none before its own"
    sched = TorchScheduler(lambda opt: torch.optim.lr_scheduler.StepLR(opt, 1, .5), by='step')
    learn = learner(sched).compile(graph_only, step=True)

    learn.fit(1)

    assert learn.n_step == 3 and 'step' in learn.compiled.graphs

@pytest.mark.parametrize('ex', [KeyboardInterrupt, ValueError])
def test_error_in_a_fit(ex):
    "The optimizer has its own step again, and the model stays compiled"
    learn = learner().compile(graph_only, step=True)

    with pytest.raises(ex): learn.fit(1, cbs=Callback(after_step=raises(ex('stop'))))

    assert 'step' not in vars(learn.opt) and is_compiled(learn.model)

def test_finder_leaves_no_trace():
    "lr_find runs compiled, and everything is as before"
    learn = learner().compile(graph_only, step=True)
    learn.fit(1)
    before = learn.state_hash()

    learn.lr_find(num_it=8, show_plot=False, suggest_funcs=None)

    assert learn.state_hash() == before and is_compiled(learn.model) and 'step' not in vars(learn.opt)

def test_refused():
    "What torch does not know is an error at once, and leaves the Learner as it was"
    learn = learner()

    with pytest.raises(Exception, match='odd_one'): learn.compile('odd_one')
    with pytest.raises(TypeError, match='odd_option'): learn.compile(graph_only, odd_option=1)

    assert not learn.cbs.filter(lambda cb: isinstance(cb, Compiled)) and not is_compiled(learn.model)

def test_steps_that_cannot_be_compiled():
    "An optimizer that torch cannot compile, and a step that somebody has replaced, are refused before training"
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.Embedding(4, 2, sparse=True)
        def forward(self, x): return self.e(x.long()[:, 0].clamp(0, 3))
    learn = learner(model=Sparse(), opt_func=torch.optim.SparseAdam).compile(graph_only, step=True)
    with pytest.raises(TypeError, match='torch does not compile sparse ones'): learn.fit(1)

    learn = learner(opt_func=Adam).compile(graph_only, step=True)
    with pytest.raises(TypeError, match='step=True means nothing for this `AdamW`: its groups are stepped'):
        learn.fit(1)

    learn = learner().compile(graph_only, step=True)
    learn.create_opt()
    vars(learn.opt)['step'] = own = lambda: None
    with pytest.raises(TypeError, match='its `step` has been replaced'): learn.fit(1)

    assert learn.opt.step is own
