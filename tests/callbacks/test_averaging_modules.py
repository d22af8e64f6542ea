"""EMA with any nn.Module: requirements N6, N8, N12, N13 and N20, by their numbers, and what comes or goes meanwhile."""
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import weight_norm

from learner.callback import Callback
from learner.callbacks.averaging import EMA
from tests.callbacks.test_averaging import Seen, assert_close, recursion
from tests.helpers import synth_learner, weights
from tests.loader_helpers import equal
from tests.test_any_module_lazy import every_lazy
from tests.test_any_module_state import Tied, normed, wraps


def trained(model, ema=None, *cbs, path='.', n_epoch=2, **kwargs):
    torch.manual_seed(0)
    learn = synth_learner([ema or EMA(.9), seen := Seen(), *cbs], n=4, lr=.05, model=model, path=path, **kwargs)
    learn.fit(n_epoch)
    return learn, seen.seen

def state(model): return {k: v.clone() for k, v in model.state_dict().items()}

def averaged(learn):
    with learn.averaged() as model: return state(model)


def test_n06_ema_of_a_tied_parameter(tmp_path):
    "It is averaged once, is one tensor before, within and after an evaluation, and has both names in the file"
    learn, seen = trained(Tied(), path=tmp_path)
    m, ids = learn.model, []
    learn.validate(cbs=Callback(before_batch=lambda cb: ids.append(m.enc.weight is m.dec.weight)))

    found = torch.load(learn.save('m'))['ema']['model']
    other = synth_learner(EMA(.9), n=4, model=Tied(), path=tmp_path).load('m')

    assert [*learn.ema.average] == ['enc.weight', 'dec.bias'] and all(ids) and m.enc.weight is m.dec.weight
    assert_close(learn.ema.average.values(), recursion(seen, .9))
    assert found['enc.weight'].equal(found['dec.weight']) and not found['enc.weight'].equal(m.enc.weight)
    assert other.model.enc.weight is other.model.dec.weight and equal(averaged(other), averaged(learn))

@every_lazy
def test_n08_ema_of_a_lazy_model(make, tmp_path):
    "It begins with the first step, when there are shapes, also after a sweep and a validation before; files have it"
    learn = synth_learner([EMA(.9), seen := Seen()], n=4, model=make(), path=tmp_path)
    learn.lr_find(num_it=3, stop_div=False, show_plot=False, suggest_funcs=None)
    learn.validate()
    learn.fit(2)

    learn.save('m')
    other = synth_learner(EMA(.9), n=4, model=make(), path=tmp_path).load('m')

    assert_close(learn.ema.average.values(), recursion(seen.seen[-8:], .9))
    assert equal(averaged(other), averaged(learn)) and other.validate() == learn.validate()

def test_n12_ema_averages_originals(tmp_path):
    "Of parametrized weights the originals are averaged, and evaluations compute the weight from their averages"
    learn, seen = trained(normed(), path=tmp_path)
    names = [k for k, _ in learn.model.named_parameters()]

    with learn.averaged() as model:
        weight = model[0].weight
        g, v = (model.get_parameter(f'0.parametrizations.weight.original{i}') for i in (0, 1))
        assert torch.allclose(weight, g*v/v.norm(dim=1, keepdim=True))
    other = synth_learner(EMA(.9), n=4, model=normed(), path=tmp_path).load(learn.save('m'))

    assert [*learn.ema.average] == names and any('original' in k for k in names)
    assert_close(learn.ema.average.values(), recursion(seen, .9))
    assert equal(averaged(other), averaged(learn)) and learn.validate() == other.validate()

def test_n13_ema_of_weight_norm_of_the_old_kind(tmp_path):
    "A module that torch cannot copy is averaged, evaluated, saved and loaded"
    def old():
        with pytest.warns(FutureWarning, match='deprecated'):
            return nn.Sequential(weight_norm(nn.Linear(1, 4)), nn.Linear(4, 1))
    learn, seen = trained(old(), path=tmp_path)

    other = synth_learner(EMA(.9), n=4, model=old(), path=tmp_path).load(learn.save('m'))

    assert '0.weight_g' in learn.ema.average and '0.weight' not in learn.ema.average
    assert_close(learn.ema.average.values(), recursion(seen, .9))
    assert learn.validate() == other.validate() and not equal(averaged(learn), state(learn.model))

@pytest.mark.parametrize('buffers', ['copy', 'average'])
def test_n20_ema_and_buffers(buffers, tmp_path):
    "Statistics are the model's own or averaged, as asked; counters are the model's own, of their own type, always"
    means = []
    look = Callback(after_step=lambda cb: means.append([cb.model[1].running_mean.double()]))
    def net(): return nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    learn, _ = trained(net(), EMA(.9, buffers=buffers), look, path=tmp_path)

    found, own = averaged(learn), state(learn.model)
    file = torch.load(learn.save('m'))['ema']['model']

    assert found['1.num_batches_tracked'].equal(torch.tensor(8)) and equal(dict(file), found)
    if buffers == 'copy': assert found['1.running_mean'].equal(own['1.running_mean'])
    else: assert_close([found['1.running_mean']], recursion(means, .9))
    assert equal(state(learn.model), own)

def test_buffers_that_are_made_anew():
    "A buffer that `forward` replaces by another tensor is averaged as it is at each step"
    class Anew(nn.Linear):
        def __init__(self):
            super().__init__(1, 1)
            self.register_buffer('mean', torch.zeros(1))
            self.register_buffer('cache', torch.zeros(1), persistent=False)
        def forward(self, x):
            if self.training: self.mean, self.cache = self.mean+1., torch.zeros(len(x))
            return super().forward(x)
    learn, _ = trained(Anew(), EMA(.5, buffers='average', warmup=False))

    expected = recursion([[torch.tensor([float(i)])] for i in range(1, 9)], .5, warmup=False)

    assert [*learn.ema.average] == ['weight', 'bias', 'mean'] and learn.model.mean == 8
    assert_close([averaged(learn)['mean']], expected)

@pytest.mark.parametrize('wrap', wraps.values(), ids=wraps)
def test_n14_ema_has_the_models_own_names(wrap, tmp_path):
    "Whatever wraps the model, the average is by its own names"
    plain = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))
    learn, seen = trained(wrap(plain), path=tmp_path)

    other = synth_learner(EMA(.9), n=4, model=nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1)), path=tmp_path)
    other.load(learn.save('m'))

    assert [*learn.ema.average] == [*plain.state_dict()] and equal(averaged(other), learn.ema.average)
    assert_close(learn.ema.average.values(), recursion(seen, .9))

def test_compiled_code_sees_the_average():
    "A compiled model evaluates with the average and trains on, without being compiled again"
    graphs = []
    def backend(graph, _):
        graphs.append(graph)
        return graph.forward
    def net(): return nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))
    torch._dynamo.reset()
    model = net()
    model.load_state_dict((plain := net()).state_dict())
    models: tuple = torch.compile(model, backend=backend), plain
    learn, other = (synth_learner(EMA(.9), n=4, n_valid=2, model=m, lr=.05) for m in models)
    learn.fit(1)
    n = len(graphs)
    learn.fit(2)
    for k in (1, 2): other.fit(k)

    assert len(graphs) == n and equal(weights(learn), weights(other))
    assert learn.recorder.values == other.recorder.values


# ---- what comes and goes

def test_parameters_that_come_later():
    "A new head begins as it is then, and takes part; the rest goes on"
    learn, _ = trained(nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1)))
    body = learn.ema.average['0.weight'].clone()
    learn.model[1] = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    start = learn.model[1][0].weight.detach().clone()

    with learn.averaged() as model: found = state(model)

    assert found['1.0.weight'].equal(start) and found['0.weight'].equal(body)
    with pytest.warns(UserWarning, match='made anew'): learn.fit(1)
    assert learn.ema.n_averaged == 12 and not learn.ema.average['1.0.weight'].equal(start)

def test_another_model_has_another_average():
    "Nothing of the old model's average is in that of a new one, though names and shapes are alike"
    learn, _ = trained(nn.Linear(1, 1))
    learn.model = nn.Linear(1, 1)
    before = state(learn.model)

    raw = learn.validate()

    assert equal(state(learn.model), before) and learn.ema.n_averaged == 0
    learn.remove_cb(EMA)
    assert learn.validate() == raw

def test_types_other_than_floats():
    "Complex parameters are averaged, whole numbers are left as they are"
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.c = nn.Parameter(torch.ones(1, dtype=torch.complex64))
            self.n = nn.Parameter(torch.tensor([3]), requires_grad=False)
        def forward(self, x): return (x*self.c).real + self.n
    learn = synth_learner(EMA(.9), model=Odd(), opt_func=partial(torch.optim.SGD, foreach=False))

    learn.fit(1)

    assert learn.ema.average['c'].dtype == torch.complex64 and [*learn.ema.average] == ['c']
    assert averaged(learn)['n'].equal(torch.tensor([3]))
