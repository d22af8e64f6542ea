"""Any nn.Module: parameters that torch does not see, and so never trains (requirement N26)."""
from collections import deque

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from learner.callback import Callback
from learner.events import CancelStepException
from tests.helpers import raises, synth_learner, weights
from tests.loader_helpers import equal
from tests.test_any_module_odd import Net, compiled


class InList(Net):
    def more(self): return self.layers if isinstance(self.layers, (list, tuple)) else ()

hidden = {  # name: (what it is, where the warning finds it)
    'list': (lambda: [nn.Linear(1, 1), nn.Linear(1, 1)], r'Net.layers\[0\], Net.layers\[1\];'),
    'tuple': (lambda: (nn.Linear(1, 1),), r'Net.layers\[0\];'),
    'dict': (lambda: {'a': nn.Linear(1, 1)}, r"Net.layers\['a'\];"),
    'parameters': (lambda: [nn.Parameter(torch.ones(1))], r'Net.layers\[0\];'),
    'within': (lambda: {'a': [nn.ReLU(), nn.Linear(1, 1)]}, r"Net.layers\['a'\]\[1\];"),
    'partly': (lambda: [nn.Linear(1, 1).requires_grad_(False), nn.Linear(1, 1)], r'Net.layers\[1\];'),
    'many': (lambda: [nn.Linear(1, 1) for _ in range(8)], r'Net.layers\[4\] and 3 more;')}

@pytest.mark.parametrize('name', hidden)
def test_n26_what_is_in_a_plain_list_is_named(name):
    "Modules and parameters in plain containers are named when training begins, once, with torch's own containers"
    make, where = hidden[name]
    learn = synth_learner(model=Net(layers=make()))

    with pytest.warns(UserWarning, match=f'(?s)does not see what is in a plain list.*: .*{where} use `nn.ModuleList`') \
            as told: learn.fit(2)
    learn.fit(1)

    assert len(told) == 1

@pytest.mark.parametrize('top', [lambda m: nn.Sequential(m), lambda m: compiled(nn.Sequential(m))])
def test_n26_the_place_is_named(top):
    "In a submodule, compiled or not, and in a loss"
    class Loss(nn.Module):
        def __init__(self): super().__init__(); self.parts = [nn.Linear(1, 1)]
        def forward(self, pred, y): return F.mse_loss(pred, self.parts[0](y))
    learn = synth_learner(model=top(Net(layers=[nn.Linear(1, 1)])), loss_func=Loss())

    with pytest.warns(UserWarning, match=r'Sequential.0.layers\[0\], Loss.parts\[0\];'): learn.fit(1)

@pytest.mark.parametrize('attrs', [
    lambda m: dict(layers=[m.base]), lambda m: dict(layers=[nn.Linear(1, 1).requires_grad_(False)]),
    lambda m: dict(layers=nn.ModuleList([nn.Linear(1, 1)])), lambda m: dict(layers=[nn.ReLU(), 'a', 1, None]),
    lambda m: dict(layers=[[[[nn.Linear(1, 1)]]]]), lambda m: dict(words={str(i): i for i in range(5000)})],
    ids=['registered', 'frozen', 'ModuleList', 'nothing', 'too deep', 'data'])
def test_n26_nothing_to_tell(attrs):
    "Not told of: what is registered as well, is frozen, or lies deeper than three containers"
    model = Net()
    for k, v in attrs(model).items(): setattr(model, k, v)

    synth_learner(model=model).fit(1)

    assert all(p.grad is None for p in model.parameters())

def test_n26_what_the_loss_registers_is_not_hidden():
    "What lies in a plain list and is also the loss's own is trained if the splitter returns it, and nothing is told"
    shared = nn.Linear(1, 1)
    loss = Net(inner=shared)
    loss.forward = lambda pred, y: F.mse_loss(pred, shared(y))
    learn = synth_learner(model=Net(layers=[shared]), loss_func=loss, lr=.1,
                          splitter=lambda m: [[*m.parameters(), *shared.parameters()]])
    loss.base.requires_grad_(False)
    before = shared.weight.detach().clone()

    learn.fit(1)

    assert not shared.weight.equal(before)

class Elsewhere(Net):
    "What it computes comes from a layer that is hidden from torch on purpose"
    def __init__(self): super().__init__(); vars(self)['far'] = nn.Linear(1, 1)
    def forward(self, x): return self.far(x)

def test_n26_a_first_step_without_any_gradient_is_told():
    "If no parameter of the optimizer gets a gradient nothing is trained, which is told at the first step, once"
    learn = synth_learner(model=Elsewhere())
    before = weights(learn)

    with pytest.warns(UserWarning, match='the first step changes nothing.*none of them took part in the loss') as told:
        learn.fit(2)

    assert len(told) == 1 and equal(before, weights(learn)) and 'step' not in vars(learn.opt)

def test_n26_the_look_at_the_first_step_is_over_after_it():
    "It is made once an epoch, and leaves nothing behind; what is trained is trained as always"
    learn, seen = synth_learner(n=3), []
    learn.add_cb(Callback(before_step=lambda cb: seen.append('step' in vars(cb.opt))))

    learn.fit(2)

    assert seen == [True, False, False]*2 and learn.n_step == 6


class Deferred(dict):
    "Loads what it holds when it is looked at"
    def items(self): raise RuntimeError('loaded')
    __iter__ = values = __bool__ = items

def test_n26_containers_that_load_what_they_hold_are_left_alone():
    "Their own methods are not called"
    model = Net()
    model.data = Deferred(a=1)

    synth_learner(model=model).fit(1)

@pytest.mark.parametrize('holder', [lambda m: {m}, lambda m: deque([m]), lambda m: frozenset([m]),
                                    lambda m: dict(a=[(m,)])])
def test_n26_other_containers(holder):
    "Sets, deques, and containers within containers hide as well"
    model = Net()
    model.hidden = holder(nn.Linear(1, 1))

    with pytest.warns(UserWarning, match='not trained.*Net.hidden'): synth_learner(model=model).fit(1)

def test_n26_a_module_that_hides_its_parameters_is_not_blamed():
    "What torch itself has registered is in no plain dict"
    class Hiding(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(1, 1)
        def parameters(self, *args, **kwargs): return iter(())
        def named_parameters(self, *args, **kwargs): return iter(())
    model = Net()
    model.teacher = Hiding()

    synth_learner(model=model).fit(1)

def test_n26_a_step_of_the_users_own_is_made():
    "What stands in place of the optimizer's step is called each time, and is there afterwards"
    learn, n = synth_learner(n=3), []
    step = learn.create_opt().step
    learn.opt.step = own = lambda: (n.append(1), step())

    learn.fit(2)

    assert len(n) == 6 and vars(learn.opt)['step'] is own

def test_n26_a_fit_without_a_step_leaves_nothing():
    "Nor does it warn later"
    learn = synth_learner(Callback(before_step=lambda cb: raises(CancelStepException)(cb)))

    learn.fit(1)

    assert 'step' not in vars(learn.opt)
