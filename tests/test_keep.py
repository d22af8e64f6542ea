"""Promises of learner.keep: whatever a block does to what is kept, afterwards it is as before."""
import random
from collections import Counter, OrderedDict, defaultdict, deque
from copy import deepcopy

import numpy as np
import pytest
import torch
from fastcore.foundation import L
from torch import nn

from learner.keep import kept
from tests.loader_helpers import equal


class Net(nn.Module):
    "Parameters, buffers of both kinds, and attributes of its own"
    def __init__(self):
        super().__init__()
        self.lin, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.register_buffer('seen', torch.zeros(2), persistent=False)
        self.plain, self.array, self.calls, self.log = torch.ones(3), np.ones(3), 0, [1, {'a': [2]}]

    def forward(self, x): return self.norm(self.lin(x))


class Box:
    "An object that is kept only if its class is named"
    def __init__(self, **attrs): vars(self).update(attrs)


class Saved:
    "An object with state_dict"
    def __init__(self): self.scale, self.steps = torch.ones(1), []
    def state_dict(self): return {'scale': self.scale, 'steps': self.steps}
    def load_state_dict(self, state): self.scale, self.steps = state['scale'], state['steps']


class Fixed(OrderedDict):
    "A dict that refuses to be changed but by its items, as those that Hugging Face's models return"
    def update(self, *args, **kwargs): raise TypeError
    def clear(self): raise TypeError


# ---- containers

def more(o): o.append(9)
def new_item(o): o[0] = 9

@pytest.mark.parametrize('make,change', [
    (lambda: [1, 2], more), (lambda: [1, 2], list.clear), (lambda: [1, 2], list.reverse), (lambda: [1, 2], new_item),
    (lambda: deque([1, 2], 3), more), (lambda: deque([1, 2], 3), lambda o: o.rotate()),
    (lambda: L(1, 2), more), (lambda: L(1, 2), new_item), (lambda: L(1, 2), lambda o: vars(o).update(items=[])),
    (lambda: {1, 2}, lambda o: o.add(9)), (lambda: {1, 2}, set.clear),
    (lambda: {'a': 1, 'b': 2}, lambda o: o.update(c=3)), (lambda: {'a': 1, 'b': 2}, lambda o: o.pop('a')),
    (lambda: Counter('aab'), lambda o: o.update('ab')), (lambda: defaultdict(list), lambda o: o['new'].append(1)),
    (lambda: Fixed(a=1, b=2), lambda o: o.__setitem__('a', 3)), (lambda: Fixed(a=1, b=2), lambda o: o.popitem()),
    (lambda: OrderedDict(a=1, b=2), lambda o: o.move_to_end('a'))])
def test_container(make, change):
    "A container gets its content back, in its order, and stays the same object"
    o = make()

    with kept(o): change(o)

    assert type(o) is type(make()) and o == make() and list(o) == list(make())

@pytest.mark.parametrize('make', [
    lambda inner: [inner], lambda inner: (inner, 1), lambda inner: {'a': inner}, lambda inner: deque([inner]),
    lambda inner: L([inner]), lambda inner: [({'a': [(inner,)]},)]])
def test_nested(make):
    "What lies in a container, in another one, in a tuple, is kept too"
    inner = [1, torch.zeros(2)]
    o = make(inner)

    with kept(o):
        inner[1] += 1
        inner.append(2)

    assert len(inner) == 2 and equal(inner[1], torch.zeros(2))

def test_replaced_and_changed_in_place():
    "A list that was changed, and then replaced, is back with its content; the other one is left alone"
    o, old, new = {}, [1], [5]
    o['a'] = old

    with kept(o):
        old.append(2)
        o['a'] = new

    assert o['a'] is old and (old, new) == ([1], [5])

def test_same_list_twice():
    "A list that is found in two places is one list afterwards, with its content once"
    shared = [1]
    o = [shared, {'a': shared}]

    with kept(o):
        shared.append(2)
        o[1]['a'] = []

    assert o[0] is o[1]['a'] is shared and shared == [1]

def test_cycle():
    "Things that contain each other are kept, each once"
    a, b, net = [1], {}, Net()
    a.append(b)
    b['a'], net.owner = a, b
    b['net'] = net

    with kept(net):
        a.append(3)
        b['a'] = net.calls = 1

    assert len(a) == 2 and a[1] is b and b['a'] is a and b['net'] is net and net.calls == 0


# ---- tensors, arrays, generators

def grown(t): t.data = torch.zeros(9)
def other_type(t): t.data = t.data.double()
def other_memory(t): t.data = torch.zeros(3)
def in_place(t): t.data.add_(1)
def in_graph(t): t += nn.Parameter(torch.ones(1)).sum()

@pytest.mark.parametrize('change', [in_place, grown, other_type, other_memory, in_graph, lambda t: t.resize_(5),
                                    lambda t: t.requires_grad_(), lambda t: setattr(t, 'grad', t+1)])
def test_tensor(change):
    "A tensor has its numbers, type, shape and place outside any graph back, and still shares its memory"
    t = torch.arange(3.)
    view = t[1:]

    with kept([t]): change(t)

    assert equal(t, torch.arange(3.)) and t.is_leaf and not t.requires_grad and t.grad is None
    view += 5
    assert t.tolist() == [0, 6, 7]

@pytest.mark.parametrize('make', [
    lambda: torch.eye(2).to_sparse(), lambda: torch.arange(3), lambda: torch.ones(3, 2).T, lambda: torch.ones(2, 0),
    lambda: torch.tensor(1.), lambda: torch.tensor([True]), lambda: torch.ones(3, dtype=torch.complex64)])
def test_kinds_of_tensors(make):
    "Sparse, transposed and empty tensors, and those of any type, get their numbers back"
    t = make()

    with kept(t): t.detach().zero_()

    assert torch.equal(t.to_dense(), make().to_dense())

@pytest.mark.parametrize('shape', [(2, 1), (1,), ()])
def test_expanded_tensor(shape):
    "A buffer that is expanded, so that several of its elements are one, is put back without an error"
    t = torch.ones(shape).expand(2, 5)

    with kept([t]): t[:, 0].zero_() if len(shape) == 2 else t[0, 0].zero_()

    assert torch.equal(t, torch.ones(2, 5)) and t.stride(1) == 0

@pytest.fixture
def frozen_tensor():
    with torch.inference_mode(): return torch.ones(2)

def test_inference_tensor(frozen_tensor):
    "A tensor that was made in inference mode, such as a model's cache, is put back without an error"
    with kept([frozen_tensor]), torch.inference_mode(): frozen_tensor.add_(1)

    assert frozen_tensor.tolist() == [1, 1]

def test_inside_a_graph():
    "A tensor inside a graph stays there"
    w = nn.Parameter(torch.ones(2))
    t = w*2

    with kept([t]): t.detach().add_(1)

    t.sum().backward()
    assert t.tolist() == [2, 2] and w.grad.tolist() == [2, 2]

@pytest.mark.parametrize('change', [
    lambda p: p.grad.zero_(), lambda p: setattr(p, 'grad', None), lambda p: setattr(p, 'grad', torch.zeros(2)),
    lambda p: p.requires_grad_(False), lambda p: p.data.mul_(3), other_type])
def test_gradient(change):
    "A parameter has its gradient back: the same tensor, with its numbers"
    p = nn.Parameter(torch.ones(2))
    p.grad = grad = torch.full((2,), 5.)

    with kept([p]): change(p)

    assert p.grad is grad and grad.tolist() == [5, 5] and p.requires_grad and p.tolist() == [1, 1]

def test_swapped_memory():
    "Weights that were exchanged with an average, and not changed back, are both as before"
    w, average = nn.Parameter(torch.zeros(2)), torch.ones(2)

    with kept([w, average]):
        w.data, average.data = average.data, w.data
        w.data.add_(5)

    assert (w.tolist(), average.tolist()) == ([0, 0], [1, 1])

def test_array():
    "An array gets its numbers back; one that cannot be written to is left alone"
    a, fixed, both = np.arange(3), np.arange(3), np.arange(3)
    fixed.flags.writeable = False

    with kept([a, fixed, {'both': (both, both)}]):
        a[0] = both[1] = 7

    assert [o.tolist() for o in (a, fixed, both)] == [[0, 1, 2]]*3

@pytest.mark.parametrize('make,draw', [
    (lambda: torch.Generator().manual_seed(3), lambda g: torch.rand(1, generator=g).item()),
    (lambda: random.Random(3), lambda g: g.gauss(0, 1)),
    (lambda: np.random.default_rng(3), lambda g: g.normal()),
    (lambda: np.random.RandomState(3), lambda g: g.normal())])
def test_generators(make, draw):
    "A random generator draws again what it drew in the block"
    g = make()

    with kept({'rng': g}): drawn = [draw(g) for _ in range(3)]

    assert [draw(g) for _ in range(3)] == drawn

def test_state_dict():
    "An object with state_dict gets its state back, which was copied"
    o = Saved()

    with kept([o]):
        o.scale += 1
        o.steps.append(1)

    assert o.scale.item() == 1 and o.steps == []


# ---- attributes

def test_only_named_classes():
    "Attributes of other objects are kept if their class is named, also deep inside; else only which object it is"
    inside = Box(n=0)
    o = [{'a': inside}]

    with kept(o, whole=(Box,)): inside.n = 1
    with kept(o):
        inside.m = 1
        o[0]['a'] = None

    assert vars(inside) == {'n': 0, 'm': 1} and o[0]['a'] is inside

def added(net): net.fresh = nn.Linear(2, 2)
def removed(net): del net.lin, net.plain, net.seen
def replaced(net): net.lin, net.plain, net.array, net.log = nn.Linear(2, 3), torch.zeros(1), None, []
def changed(net):
    for p in net.parameters(): p.data.add_(1)
    for o in (net.plain, net.seen, net.array): o += 1
    net.calls += 1
    net.log[1]['a'].append(3)
def buffers(net):
    for late in (True, False): net.register_buffer(f'late_{late}', torch.ones(1), persistent=late)
    net.seen = torch.ones(2)
def hooks(net): net.register_forward_hook(print)
def modes(net):
    net.norm.eval()
    net.requires_grad_(False)
def whole(net): net.double()
def trained(net):
    net(torch.randn(4, 2)).pow(2).sum().backward()
    torch.optim.SGD(net.parameters(), .1).step()

def content(net):
    "Everything a Net has, as it is compared"
    own = {k: v for k, v in vars(net).items() if not k.startswith('_')}
    tensors = {n: (id(t), t.data_ptr(), t.detach().clone(), t.requires_grad, t.grad)
               for n, t in [*net.named_parameters(), *net.named_buffers()]}
    return dict(own=dict(own, plain=own['plain'].clone(), array=own['array'].copy(), log=str(own['log'])),
                ids=[id(o) for o in own.values()], tensors=tensors, state=[*net.state_dict()],
                modes=[(n, id(m), m.training) for n, m in net.named_modules()], hooks=len(net._forward_hooks))

@pytest.mark.parametrize('change', [added, removed, replaced, changed, buffers, hooks, modes, whole, trained])
def test_module(change):
    "A module has its parameters, buffers, submodules, hooks, modes and attributes back, none more and none less"
    net = Net()
    before = content(net)

    with kept(net): change(net)

    assert equal(content(net), before)

def test_script_module():
    "A compiled module, whose tensors are not among its attributes, has its weights back"
    with pytest.warns(DeprecationWarning): net = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    before = [p.detach().clone() for p in net.parameters()]

    with kept(net):
        for p in net.parameters(): p.data.add_(1)

    assert all(map(torch.equal, net.parameters(), before))

@pytest.mark.parametrize('warm', [0, 2])
def test_optimizer(warm):
    "An optimizer of torch's has its state and options back; its parameters are also those of a list, once"
    net = nn.Linear(2, 2)
    opt, ps = torch.optim.Adam(net.parameters(), .1), list(net.parameters())
    def step(n):
        for _ in range(n):
            net(torch.ones(1, 2)).sum().backward()
            opt.step()
    step(warm)
    before = deepcopy(opt.state_dict())
    weights = [p.detach().clone() for p in ps]

    with kept([ps, opt]):
        step(3)
        opt.param_groups[0]['lr'] = 5.
        opt.add_param_group({'params': [torch.zeros(1)]})

    assert equal(opt.state_dict(), before) and all(map(torch.equal, ps, weights))
    assert type(opt.state) is defaultdict and len(opt.state) == 2*bool(warm)


# ---- errors

@pytest.mark.parametrize('error', [ValueError, KeyboardInterrupt, SystemExit])
def test_after_an_error(error):
    "After an error or an interrupt all is back, and the error goes on"
    net = Net()
    before = content(net)

    with pytest.raises(error), kept(net):
        changed(net)
        raise error

    assert equal(content(net), before)

class Stubborn(Saved):
    def load_state_dict(self, state): raise RuntimeError("cannot load")

def test_one_that_fails():
    "What cannot be put back says so, and all else is put back"
    first, last = [1], [2]

    with pytest.raises(RuntimeError, match='cannot load'), kept(first, Stubborn(), last): first[0] = last[0] = 9

    assert (first, last) == ([1], [2])

@pytest.mark.parametrize('model', [nn.LazyLinear(2), nn.LazyBatchNorm1d(affine=False)], ids=['parameter', 'buffer'])
def test_lazy(model):
    "Lazy parameters and buffers are lazy again, so that they can get another shape"
    with kept(model): model(torch.ones(3, 4))

    assert model.has_uninitialized_params() and len(model(torch.ones(3, 2))) == 3
