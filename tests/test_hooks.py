"""hooks.py: what a Hook is told, that it changes nothing, and that nothing of it is left; which modules are found."""
import pickle
from copy import deepcopy
from dataclasses import make_dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from learner.hooks import Hook, Hooks, hook_input, hook_inputs, hook_output, hook_outputs
from learner.tensors import tensors_in


def data(*size): return torch.randn(*size or (3, 4), generator=torch.Generator().manual_seed(0))


def wants(x): return x.requires_grad_().clone()  # a tensor with a history


def entries(model):
    "How many hooks are on the modules of a model"
    return sum(len(d) for m in model.modules() for k, d in vars(m).items() if 'hooks' in k and isinstance(d, dict))


def told(ms, run, **kwargs):
    "What hooks on modules are told while `run()` goes on, and its result"
    seen = []
    with Hooks(ms, lambda m, *values: seen.append((m, *values)), **kwargs): result = run()
    assert not any(map(entries, ms if isinstance(ms, list) else [ms]))
    return seen, result


Out = make_dataclass('Out', ['a', 'b'])


class Takes(nn.Module):
    "Gives `2a`, `ab` in a container of some kind"
    def __init__(self, make=tuple): super().__init__(); self.make = make
    def forward(self, a, *, b): return self.make([2*a, a*b])


def as_dict(ts): return dict(zip('ab', ts))
def as_out(ts): return Out(*ts)


# ---- forward

@pytest.mark.parametrize('make', [tuple, list, as_dict, as_out])
@pytest.mark.parametrize('pre', [False, True])
def test_forward_hook_is_told_all_inputs(make, pre):
    "Inputs come in a tuple, those by keyword too, and the output in its own structure, all without history"
    m, a, b = Takes(make), wants(data()), data()+1

    seen, out = told([m], lambda: m(a, b=b), pre=pre)

    (who, inputs, *output), = seen
    assert who is m and isinstance(inputs, tuple) and inputs[0].equal(a) and inputs[1].equal(b)
    assert pre == (not output) and all(type(o) is type(out) for o in output)
    assert not any(t.requires_grad for t in tensors_in((inputs, output))) and a.requires_grad


def test_stored_and_n_calls():
    "`stored` is what the function returned last; of a module called several times, it is called at each"
    m = nn.Linear(4, 4)

    with Hook(m, lambda m, inputs, output: output.sum().item()) as hook: m(m(m(data())))

    assert hook.n_calls == 3 and hook.stored == pytest.approx(m(m(m(data()))).sum().item())


@pytest.mark.parametrize('kwargs', [{}, dict(pre=True), dict(is_forward=False), dict(is_forward=False, pre=True)])
def test_what_a_hook_returns_changes_nothing(kwargs):
    "Output and gradients are those of the bare model, bit for bit, in any mode"
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(.5), nn.ReLU(inplace=True), nn.Linear(4, 2)), data(5, 3, 4)
    def run():
        torch.manual_seed(0)
        model.zero_grad()
        (out := model(x)).square().sum().backward()
        return out, [p.grad for p in model.parameters()]
    bare = run()

    with Hooks(model, lambda *values: torch.ones(1), which=lambda m: True, **kwargs): hooked = run()

    assert all(a.equal(b) for a, b in zip(tensors_in(bare), tensors_in(hooked), strict=True)) and not entries(model)


# ---- backward

modules = dict(linear=lambda: nn.Linear(4, 2), norm=lambda: nn.BatchNorm1d(4), relu=nn.ReLU, identity=nn.Identity,
               no_dropout=lambda: nn.Dropout().eval(), net=lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()))


@pytest.mark.parametrize('kind', [*modules])
def test_backward_hook_is_told_what_torchs_is(kind):
    "Gradients of inputs and output are those that torch's own full backward hook gets"
    m, theirs = modules[kind](), []
    def run(): (3*m(wants(data()))).square().sum().backward()
    with m.register_full_backward_hook(lambda m, gi, go: theirs.append((gi, go))): run()

    seen, _ = told([m], run, is_forward=False)

    (_, gi, go), = seen
    assert gi[0].equal(theirs[0][0][0]) and go[0].equal(theirs[0][1][0])


def test_gradient_comes_through_this_module_alone():
    "Where an input is used elsewhere too, or twice, each use has its own gradient"
    class Product(nn.Module):
        def forward(self, a, b, c): return 2*a + 3*b
    m, x = Product(), wants(data())

    seen, _ = told([m], lambda: (m(x, x+0, x) + 5*x).sum().backward(), is_forward=False)
    again, _ = told([m], lambda: (m(x, x, data()) + 5*x).sum().backward(), is_forward=False)

    assert [None if g is None else g.unique().tolist() for g in seen[0][1]] == [[2.], [3.], [2.]]
    assert [None if g is None else g.unique().tolist() for g in again[0][1]] == [[5.], [5.], None]


@pytest.mark.parametrize('make', [tuple, list, as_dict, as_out])
@pytest.mark.parametrize('pre', [False, True])
def test_backward_hook_has_a_gradient_for_each_tensor(make, pre):
    "Tuples have one gradient for each tensor in inputs and output, None for what has none"
    m, a = Takes(make), wants(data())

    seen, _ = told([m], lambda: next(tensors_in(m(a, b=data()))).sum().backward(), is_forward=False, pre=pre)

    (_, *grads), = seen
    assert [[g is not None for g in gs] for gs in grads] == [[True, False]]*(2-pre)


class Times(nn.Module):
    def __init__(self, inplace): super().__init__(); self.inplace = inplace
    def forward(self, x): return x.mul_(3) if self.inplace else x*3


def layers(inplace):  # in which something in place follows, or is hooked; all that they get and give are hooked
    act = partial(nn.ReLU, inplace)
    return dict(linear=[nn.Linear(4, 4), act()], rows=[nn.Unflatten(0, (1, 3)), nn.Linear(4, 4), act()],
                flatten=[nn.Conv1d(3, 3, 1), nn.Flatten(), act()], identity=[nn.Linear(4, 4), nn.Identity(), act()],
                twice=[nn.Linear(4, 4), Times(inplace), nn.Identity(), Times(inplace)])


@pytest.mark.parametrize('kind', [*layers(False)])
@pytest.mark.parametrize('pre', [False, True])
def test_n18_backward_hooks_and_operations_in_place(kind, pre):
    "Before, in and after operations in place the gradients are those of the same network without them"
    def grads(inplace):
        torch.manual_seed(0)
        model, x = nn.Sequential(*layers(inplace)[kind]), wants(data(1, 3, 4) if kind == 'flatten' else data(3, 4))
        seen, _ = told(model, lambda: model(x).square().sum().backward(), is_forward=False, pre=pre)
        return {[*model].index(m): values for m, *values in seen}

    expected, found = grads(False), grads(True)

    assert found.keys() == expected.keys() and len(found) == len(layers(True)[kind])
    assert all(a.equal(b) for i in found for a, b in zip(tensors_in(found[i]), tensors_in(expected[i]), strict=True))


def test_hooks_on_a_module_its_parent_and_itself():
    "Parent and child are told each for itself; a module within itself at each of its calls, innermost first"
    class Twice(nn.Module):
        def __init__(self): super().__init__(); self.lin = nn.Linear(4, 4)
        def forward(self, x, n=2): return self.lin(x if n == 0 else self(x, n-1))
    m = Twice()

    seen, _ = told([m, m.lin], lambda: m(wants(data())).sum().backward(), is_forward=False)
    forward, _ = told([m, m.lin], lambda: m(data()))

    assert [o[0] for o in seen].count(m) == [o[0] for o in seen].count(m.lin) == 3
    assert [o[0] for o in forward] == [m.lin, m]*3


def test_backward_again_and_in_part():
    "A graph that is gone through twice is told twice; what a gradient is not asked for of is not told"
    m = nn.Linear(4, 4)
    def run():
        x = wants(data())
        out = m(x).sum()
        out.backward(retain_graph=True)
        (2*out).backward(retain_graph=True)
        torch.autograd.grad(out, m.weight)

    seen, _ = told([m], run, is_forward=False)

    assert [go[0].unique().tolist() for _, _, go in seen] == [[1.], [2.]]


@pytest.mark.parametrize('pre', [False, True])
def test_backward_hook_without_gradients(pre):
    "Without autograd nothing is told; an input that has no gradient is None, unless there is nothing else"
    m = nn.Linear(4, 4)

    with torch.no_grad(): nothing, _ = told([m], lambda: m(data()), is_forward=False, pre=pre)
    frozen, _ = told([m.requires_grad_(False)], lambda: m(data()), is_forward=False, pre=pre)
    seen, _ = told([m.requires_grad_()], lambda: m(data()).sum().backward(), is_forward=False, pre=pre)

    assert not nothing and not frozen and len(seen) == 1 and (pre or seen[0][1] == (None,))


@pytest.mark.parametrize('reentrant', [False, True])
def test_activation_checkpointing(reentrant):
    "A module that is computed again for backward is told of its gradient once, and gives the same gradients"
    lin, x = nn.Linear(4, 4), wants(data())
    net: Any = nn.Sequential(lin, nn.ReLU(inplace=True))
    def run(): checkpoint(net, x, use_reentrant=reentrant).sum().backward()
    run()
    expected: Any = lin.weight.grad
    lin.weight.grad = None

    seen, _ = told([lin], run, is_forward=False)

    assert len(seen) == 1 and expected.equal(lin.weight.grad)


odd = dict(lstm=(nn.LSTM(4, 2), (data(),)), attention=(nn.MultiheadAttention(4, 2), (data(),)*3),
           bag=(nn.EmbeddingBag(5, 2, sparse=True), (torch.tensor([[1, 2]]),)),
           spectral=(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 2)), (data(),)),
           encoder=(nn.TransformerEncoderLayer(4, 2, 4), (data(),)))


@pytest.mark.parametrize('kind', [*odd])
@pytest.mark.parametrize('is_forward', [True, False])
def test_modules_of_all_kinds(kind, is_forward):
    "Recurrent, attention, sparse and parametrized modules are told of once, and left as they were"
    m, inputs = odd[kind]

    seen, _ = told([m], lambda: next(tensors_in(m(*inputs))).sum().backward(), is_forward=is_forward)

    assert len(seen) == 1 and seen[0][0] is m


def test_lazy_module():
    "A hook that was put on before the first batch is told of it"
    m = nn.LazyLinear(2)

    seen, _ = told([m], lambda: m(data()).sum().backward(), is_forward=False)

    assert len(seen) == 1 and type(m) is nn.Linear


# ---- nothing is left

def test_n19_a_failing_forward():
    "A user's own always-called hook runs, the error comes out, and the next call is told rightly"
    m, own = nn.Linear(4, 4), []
    m.register_forward_hook(lambda *args: own.append(1), always_call=True)
    with Hook(m, lambda *values: 1, is_forward=False) as hook:

        with pytest.raises(RuntimeError, match='shapes cannot be multiplied'): m(wants(data(3, 5)))
        m(wants(data())).sum().backward()

    assert len(own) == 2 and hook.n_calls == 1 and not hook._under_way


def test_a_failing_hook_of_the_users():
    "Fails a hook that ran before ours, its error comes out and nothing else, not even a warning"
    m = nn.Linear(4, 4)
    def fail(m, inputs): raise KeyError('mine')
    m.register_forward_pre_hook(fail)

    with Hook(m, lambda *values: 1, is_forward=False), pytest.raises(KeyError, match='mine'): m(data())

    assert entries(m) == 1


def test_n17_copies_do_nothing():
    "A copy of a hooked model, or one from a file, can be copied again, and calls and holds nothing"
    model, seen = nn.Sequential(nn.Linear(4, 4)), []

    with Hooks(model, lambda *v: seen.append(v)), Hooks(model, lambda *v: seen.append(v), is_forward=False):
        copies = deepcopy(model), pickle.loads(pickle.dumps(model))
        for m in copies: pickle.loads(pickle.dumps(m))(wants(data())).sum().backward()
    for m in copies: m(data()).sum().backward()

    assert not seen and not entries(model)


@pytest.mark.parametrize('ms', [[nn.ReLU(), 'no module'], [nn.ReLU(), nn.ReLU, nn.ReLU()]])
def test_hooks_are_put_on_all_or_none(ms):
    "If one cannot be hooked, none is; the error names it"
    with pytest.raises(TypeError, match=r'is a (`str`|class), no module; `find_modules'): Hooks(ms, print)

    assert not entries(ms[0])


def test_hook_fails_half_way():
    "A module on which a second hook cannot be put keeps the first no longer"
    class Half(nn.Linear):
        def register_forward_hook(self, *args, **kwargs): raise RuntimeError('full')
    m = Half(4, 4)

    with pytest.raises(RuntimeError, match='full'): Hook(m, print, is_forward=False)

    assert not entries(m)


@pytest.mark.filterwarnings('ignore:`torch.jit.script` is deprecated')  # there still are models made by it
def test_torchscript_is_refused():
    "TorchScript calls no hooks, which is said where a hook would be put on"
    model = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(4, 4))), nn.ReLU())

    with pytest.raises(TypeError, match='`Linear` is TorchScript, which calls'): Hooks(model, print, which='0.0')
    with pytest.raises(TypeError, match='`Sequential` is TorchScript'): Hooks(model, print)

    assert not entries(model)


def test_removed_between_forward_and_backward():
    "A hook that is taken off is told nothing more; taking it off twice is harmless"
    m, seen = nn.Linear(4, 4), []
    hook = Hook(m, lambda *values: seen.append(1), is_forward=False)
    loss = m(wants(data())).sum()

    hook.remove()
    hook.remove()
    loss.backward()

    assert not seen and not entries(m)


# ---- what is asked for most

@pytest.mark.parametrize('detach', [True, False])
def test_hook_output_and_input(detach):
    "`stored` is a copy that later changes in place leave alone; with `detach=False` the tensor itself"
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), data()
    def positive(t): return bool((t >= 0).all())

    with hook_output(model[0], detach) as out, hook_input(model[0], detach) as inp: result = model(x)

    assert positive(out.stored) != detach and out.stored.requires_grad != detach
    assert inp.stored.equal(x) and (inp.stored is x) != detach and (out.stored is result) != detach


def test_hook_outputs_and_inputs_with_gradients():
    "Of each module by turns; gradients come in tuples; several inputs are a tuple"
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

    with hook_outputs(model, grad=True) as go, hook_inputs(model, grad=True) as gi, hook_outputs(model) as out:
        model(data()).sum().backward()
    with hook_input(m := Takes()) as several: m(data(), b=data())

    assert [tuple(o.shape) for o in out.stored] == [(3, 4), (3, 2)] and go[1].stored[0].equal(torch.ones(3, 2))
    assert gi.stored[0] == (None,) and gi.stored[1][0].equal(go.stored[0][0]) and len(several.stored) == 2
    assert len(out) == 2 and [h.m for h in out] == [*model]
