"""layers.py: a Module without `super().__init__()`, what a model consists of, and its normalisation layers."""
import copy
import pickle
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from learner.layers import (Module, ParameterModule, children_and_parameters, flatten_model, has_params, is_leaf,
                            own_params, requires_grad, running_norms, set_bn_eval, total_params)


class Scaled(Module):
    "Its `__init__` takes arguments, and calls nobody's"
    def __init__(self, n, bias=True):
        self.lin, self.scale = nn.Linear(n, n, bias=bias), nn.Parameter(torch.ones(n))
        self.register_buffer('seen', torch.zeros(1))

    def forward(self, x): return self.lin(x)*self.scale


class Late(Module):
    "Calls `super().__init__()` when all is set"
    def __init__(self):
        self.lin, self.p = nn.Linear(2, 3), nn.Parameter(torch.ones(1))
        self.register_buffer('kept', torch.ones(1))
        self.register_buffer('loose', torch.ones(1), persistent=False)
        super().__init__()


class Early(Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(2, 3)


class Mixin:
    def __init__(self, size, **kwargs):
        super().__init__(**kwargs)
        self.size = size


class Mixed(Mixin, Module):
    def __init__(self):
        self.lin = nn.Linear(2, 3)
        super().__init__(size=7)


class Chain(Module, nn.Sequential):
    "Has a parameter before its layers"
    def __init__(self, *layers):
        self.p = nn.Parameter(torch.ones(1))
        super().__init__(*layers)


class Bare(Module, nn.Sequential): "Without an `__init__` of its own"


class OtherWay(nn.Sequential, Module): "Sequential comes first"


@dataclass(eq=False)
class Data(Module):
    n: int
    def __post_init__(self): self.lin = nn.Linear(self.n, self.n)


class Vit(nn.Module):
    "Has a parameter of its own beside its children"
    def __init__(self):
        super().__init__()
        self.cls_token, self.body = nn.Parameter(torch.zeros(1, 4)), nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def tied():
    m = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    m[1].weight = m[0].weight
    return m


# ---- Module

def test_module_needs_no_super_init():
    "Layers, parameters and buffers are found though nobody called `super().__init__()`"
    m = Scaled(3, bias=False)

    assert [n for n, _ in m.named_parameters()] == ['scale', 'lin.weight'] and 'seen' in m.state_dict()
    assert m(torch.ones(2, 3)).shape == (2, 3) and m.training

def test_module_keeps_what_was_set_before_super_init():
    "`super().__init__()` at the end drops nothing, and it may come first as well"
    m = Late()

    assert [*m.state_dict()] == ['p', 'kept', 'lin.weight', 'lin.bias'] and 'loose' in dict(m.named_buffers())
    assert [*Early().state_dict()] == ['lin.weight', 'lin.bias']

@pytest.mark.parametrize('make, names', [
    (Mixed, ['lin.weight', 'lin.bias']),
    (lambda: Chain(nn.Linear(1, 1, bias=False), nn.ReLU()), ['p', '0.weight']),
    (lambda: Bare(nn.Linear(1, 1, bias=False)), ['0.weight']),
    (lambda: OtherWay(nn.Linear(1, 1, bias=False)), ['0.weight']),
    (lambda: Data(2), ['lin.weight', 'lin.bias'])])
def test_module_mixes(make, names):
    "Mixins, nn.Sequential on either side and dataclasses go together with it"
    assert [*make().state_dict()] == names

@pytest.mark.parametrize('again', [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize('make', [lambda: Scaled(3), Late, lambda: Chain(nn.Linear(1, 1))])
def test_module_is_copied_and_pickled(make, again):
    "A copy, deep or not, and what comes out of a pickle have the same state; all but the first their own layers"
    m = make().eval()

    new = again(m)

    assert type(new) is type(m) and not new.training
    assert again is copy.copy or new._modules is not m._modules
    assert all(torch.equal(a, b) for a, b in zip(new.state_dict().values(), m.state_dict().values(), strict=True))

def test_module_is_saved_whole(tmp_path):
    "torch.save keeps it, and its state goes into another one"
    m = Scaled(2)
    torch.save(m, tmp_path/'m.pt')

    new = torch.load(tmp_path/'m.pt', weights_only=False)

    assert torch.equal(new.lin.weight, m.lin.weight)
    assert Scaled(2).load_state_dict(m.state_dict()) == ([], [])

def test_module_refuses_arguments_that_nobody_takes():
    "Arguments are refused, as nn.Module refuses them"
    with pytest.raises(TypeError, match='1'): Module(1)


# ---- parameters

@pytest.mark.parametrize('m, wanted', [
    (nn.Linear(10, 20), (220, True)), (nn.Conv2d(3, 8, 5, bias=False), (600, True)), (tied(), (15, True)),
    (nn.ReLU(), (0, False)), (nn.Linear(2, 2).requires_grad_(False), (6, False)), (nn.LazyLinear(3), (None, True))])
def test_total_params(m, wanted):
    "Counts each parameter once, tells whether any is trained, and does not guess what lazy ones will be"
    assert total_params(m) == wanted

def test_total_params_of_a_partly_frozen_model():
    "It is trained if any parameter is, though the first is frozen; `requires_grad` looks at the first"
    m = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))

    assert total_params(m) == (12, True)
    assert [requires_grad(o) for o in (m, m[1], nn.ReLU())] == [False, True, False]
    assert [has_params(o) for o in (m, nn.ReLU())] == [True, False]


# ---- layers

def test_flatten_model_loses_nothing():
    "Leaves depth first; what belongs to no child follows its siblings; all parameters are there"
    m = nn.Sequential(Vit(), nn.Sequential(nn.Conv2d(1, 1, 1), nn.Sequential(nn.Flatten())))

    flat = flatten_model(m)

    assert [type(o).__name__ for o in flat] == ['Linear', 'ReLU', 'ParameterModule', 'Conv2d', 'Flatten']
    assert flat[2].val is m[0].cls_token and flat[2](3) == 3
    assert {p for o in flat for p in o.parameters()} == {*m.parameters()}

def test_flatten_model_gives_each_module_once():
    "A layer that is shared is there once; a leaf is a list of itself"
    lin = nn.Linear(2, 2)

    assert flatten_model(nn.Sequential(lin, nn.Sequential(lin), nn.ReLU()))[:1] == [lin]
    assert len(flatten_model(nn.Sequential(lin, nn.Sequential(lin)))) == 1
    assert flatten_model(lin) == [lin]

@pytest.mark.parametrize('norm', [spectral_norm, weight_norm])
def test_parametrized_module_is_a_leaf(norm):
    "What computes a weight is no layer, and its parameters are those of the module"
    m = nn.Sequential(norm(nn.Linear(2, 3)), nn.ReLU())

    assert flatten_model(m) == [m[0], m[1]] and is_leaf(m[0]) and not is_leaf(m)
    assert {*own_params(m[0]).values()} == {*m.parameters()} and own_params(m) == {}

def test_own_parameters_of_attention():
    "nn.MultiheadAttention has some beside its child's, also if one of them is parametrized"
    m = nn.MultiheadAttention(4, 2)
    assert [*own_params(m)] == ['in_proj_weight', 'in_proj_bias']

    torch.nn.utils.parametrize.register_parametrization(m, 'in_proj_weight', nn.Identity())

    assert [type(o) for o in children_and_parameters(m)[1:]] == [ParameterModule]*2
    assert {p for o in flatten_model(m) for p in o.parameters()} == {*m.parameters()}

def test_a_childs_parameter_is_not_its_parents():
    "A parameter that a module shares with its child belongs to the child"
    m = nn.Sequential(nn.Linear(2, 2))
    m.weight = m[0].weight

    assert own_params(m) == {} and children_and_parameters(m) == [m[0]]


# ---- normalisation layers

def test_set_bn_eval_is_recursive_with_its_flag():
    "Frozen layers go to eval and back at any depth; trained ones, and layers without statistics, stay"
    frozen = nn.BatchNorm1d(2).requires_grad_(False)
    m = nn.Sequential(nn.Sequential(nn.Sequential(frozen)), nn.BatchNorm1d(2), nn.LayerNorm(2).requires_grad_(False))

    set_bn_eval(m)
    assert [o.training for o in (frozen, m[1], m[2], m)] == [False, True, True, True]

    set_bn_eval(m, False)
    assert frozen.training

def test_set_bn_eval_without_parameters():
    "Layers without parameters follow the module around them; the model may be such a layer itself"
    norms = [nn.BatchNorm1d(2, affine=False) for _ in range(2)]
    m = nn.Sequential(nn.Sequential(nn.Linear(2, 2).requires_grad_(False), norms[0]),
                      nn.Sequential(nn.Linear(2, 2), norms[1]))

    set_bn_eval(m)
    set_bn_eval(own := nn.BatchNorm2d(3).requires_grad_(False))

    assert [o.training for o in norms] == [False, True] and not own.training
    assert [*running_norms(m)] == [(norms[0], True), (norms[1], False)]
