"""Any nn.Module: hooks on it and modules found in it: requirements N7, N15 to N17 and N19, by their numbers."""
import gc
import pickle
import weakref
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from learner.callback import Callback
from learner.callbacks.hook import HookCallback
from learner.callbacks.stats import ActivationStats
from learner.events import CancelBatchException, CancelFitException, event_names
from learner.hooks import Hook, Hooks, find_modules, is_compiled
from learner.layers import ParameterModule
from tests.helpers import file_events, raises, synth_learner
from tests.test_hooks import data, entries


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.conv2, self.act = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU()

    def forward(self, x): return self.act(self.conv2(self.conv(x)))


def net(): return nn.Sequential(Block(), nn.Identity(), Block())


def line(): return nn.Sequential(nn.Linear(1, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))


# ---- which modules

block = ['0.conv', '0.conv2', '0.act']


@pytest.mark.parametrize('which, names', [
    (None, ['0.conv', '0.conv2', '2.conv', '2.conv2']), (nn.ReLU, ['0.act', '2.act']), ('0.conv2', ['0.conv2']),
    ('0.*', block), ('*.conv?', ['0.conv2', '2.conv2']), ('', ['']), (Block, ['0', '2']), ('[!2]*.act', ['0.act']),
    (lambda m: getattr(m, 'out_features', 0) == 4, ['0.conv', '0.conv2', '2.conv', '2.conv2']),
    (['2.act', nn.Identity, '0.act'], ['0.act', '1', '2.act']),
    ((nn.ReLU, '2.*'), ['0.act', '2.conv', '2.conv2', '2.act'])])
def test_find_modules(which, names):
    "By name, pattern, class, function, or a list of these; in the order of the model, each once"
    model = net()

    found = find_modules(model, which)

    assert [*found] == names and all(m is model.get_submodule(name) for name, m in found.items())


def test_find_modules_themselves():
    "A module, or several, is found by what it is"
    model = net()

    assert [*find_modules(model, model[2].act)] == ['2.act'] and [*find_modules(model, [model[1], model])] == ['', '1']


@pytest.mark.parametrize('which, message', [
    ('0.cnv', r"'0.cnv' finds no module of `Sequential`; did you mean `0.conv`, `0.conv2`.*\?"),
    (nn.Conv2d, 'Conv2d finds no module of `Sequential`; it has `Sequential`, `Block`'),
    ('zz*', "'zz\\*' finds no module"), ([nn.ReLU, 'cnv'], "'cnv' finds no module"),
    (nn.Linear(1, 1), 'this `Linear` is no module of `Sequential`; it has .* and 1 more')])
def test_nothing_found(which, message):
    "What finds nothing is an error, with near names or what there is, also in a list"
    with pytest.raises(ValueError, match=message): find_modules(net(), which)
    with pytest.raises(ValueError, match=message): synth_learner(HookCallback(which, hook=print), model=net()).fit(1)


def test_what_finds_no_modules():
    "Something that cannot say which modules is an error, as is `which` with a list"
    with pytest.raises(TypeError, match='3 is a `int`; give a module, a class, a name'): find_modules(net(), 3)
    with pytest.raises(TypeError, match='needs a model to look in, not a list'): Hooks([net()], print, which='0')


def test_n07_a_shared_module_is_hooked_once():
    "A module that is registered twice is found, and hooked, once"
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model.again = model[0]

    with Hooks(model, lambda m, *_: m, which=lambda m: True) as hooks: model(data())

    assert len(hooks) == 3 and [h.n_calls for h in hooks] == [1, 2, 1]
    assert [*find_modules(model)] == ['0']


# ---- hooks in a fit

class Outputs(HookCallback):
    def hook(self, m, *values): return values[-1]


kinds = dict(none=None, error=ValueError('no'), ctrl_c=KeyboardInterrupt(), batch=CancelBatchException(),
             fit=CancelFitException())


@pytest.mark.parametrize('event', [e for e in event_names if e.endswith(('batch', 'pred', 'loss', 'backward', 'step'))])
@pytest.mark.parametrize('kind', [*kinds])
@pytest.mark.parametrize('order', [-50, 50])
def test_n17_hooks_are_always_taken_off(kind, event, order):
    "However a fit ends, as many hooks are on the modules as before, and compiled code runs again"
    model = line()
    model[0].register_forward_hook(lambda *args: None)
    ends = Callback(**{event: raises(kinds[kind], nth=2)}) if kinds[kind] else Callback()
    ends.order = order
    learn = synth_learner([Outputs(), Outputs(is_forward=False), ends], model=model, n=3)

    try: learn.fit(1)
    except (ValueError, KeyboardInterrupt): pass
    except RuntimeError as e: assert 'Exception' in str(e)  # a cancel where nothing is left to cancel

    assert entries(model) == 1 and not learn.outputs.open and torch._dynamo.eval_frame._stance.stance == 'default'


@pytest.mark.parametrize('event', ['before_batch', 'after_pred', 'before_backward', 'before_step', 'after_batch'])
@pytest.mark.parametrize('comes', [True, False])
def test_added_and_removed_within_a_batch(event, comes):
    "A callback that comes or goes in whatever scope of a batch has its hooks off after it"
    cb, seen = Outputs(), []
    def change(loop):
        if loop.training and loop.iter == 1: (loop.learn.add_cb if comes else loop.learn.remove_cb)(cb)
    def count(loop): seen.append(entries(loop.model))
    learn = synth_learner([Callback(cleanup_train=count), *([] if comes else [cb])], model=line(), n=2)

    learn.fit(1, cbs=Callback(**{event: change}))

    assert seen == [0] and not cb.open and (cb in learn.cbs) == comes


def test_removed_within_an_evaluation_in_a_batch():
    "A callback that is removed by an evaluation within a batch takes its hooks off"
    cb = Outputs()
    def remove(loop):
        if cb.learn: loop.learn.remove_cb(cb)
    def evaluate(loop):
        if loop.training: loop.learn.validate(cbs=Callback(after_pred=remove))
    learn = synth_learner([cb, Callback(after_pred=evaluate)], model=line())

    learn.fit(1)

    assert not entries(learn.model) and not cb.open


@pytest.mark.parametrize('is_forward', [True, False])
def test_n17_copies_taken_in_a_fit(is_forward):
    "A copy that is made at any event can be pickled, and running it calls nothing"
    copies, calls = [], []
    def copy(loop): copies.append(deepcopy(loop.model))
    learn = synth_learner(model=line(), n=1)
    learn.add_cb(Outputs(is_forward=is_forward, hook=lambda *values: calls.append(1)))

    learn.fit(1, cbs=Callback(**{e: copy for e in event_names if e not in ('save_point', *file_events)}))
    n = len(calls)
    for m in copies: pickle.loads(pickle.dumps(m))(torch.ones(2, 1)).sum().backward()

    assert n == 2 and len(calls) == n and len(copies) > 20


def test_n19_a_forward_that_fails_in_a_fit():
    "The user's own always-called hook runs, ours are gone, the Learner can fit on"
    class Fails(nn.Module):
        n = 0
        def forward(self, x):
            self.n += 1
            if self.n == 2: raise KeyError('second batch')
            return x
    model, own = nn.Sequential(*line(), Fails()), []
    model[0].register_forward_hook(lambda *args: own.append('done'))
    model[3].register_forward_hook(lambda *args: own.append('always'), always_call=True)
    learn = synth_learner([ActivationStats(), Outputs(is_forward=False)], model=model, n=2, n_valid=0)

    with pytest.raises(KeyError, match='second batch'): learn.fit(1)
    left = entries(model)
    learn.fit(1)

    assert own == ['done', 'always']*4 and left == entries(model) == 3 and learn.n_step == 3
    assert len(learn.activation_stats.values) == 2 and not learn.run_kind


class Marked(torch.autograd.Function):
    "Passes on what it gets; a node of the graph that a weak reference can tell the end of"
    @staticmethod
    def forward(ctx: Any, x, refs):
        ctx.mark = Counted()
        refs.append(weakref.ref(ctx.mark))
        return x+0

    @staticmethod
    def backward(ctx: Any, *grads): return grads[0], None


class Marks(nn.Module):
    def __init__(self): super().__init__(); self.refs = []
    def forward(self, x): return Marked.apply(x, self.refs)


@pytest.mark.parametrize('pre', [True, False])
@pytest.mark.parametrize('backward', [True, False])
def test_n32_graphs_are_freed(pre, backward):
    "Backward hooks keep no graph alive, be it gone through or not: it is freed at once, without garbage collection"
    marks, x = Marks(), torch.ones(2, 1)
    model = nn.Sequential(nn.Linear(1, 1), marks, nn.ReLU(inplace=True), marks, nn.Linear(1, 1), nn.Flatten())
    gc.disable()

    with Hooks(model, lambda *values: None, is_forward=False, pre=pre, which=lambda m: True):
        out = model(x)
        if backward: out.sum().backward()
        del out
        alive = sum(r() is not None for r in marks.refs)

    gc.enable()
    assert alive == 0 and len(marks.refs) == 2


def test_parameters_keep_no_hooks():
    "A module that gives a parameter is told the gradient through this output alone; nothing is left on the parameter"
    m, seen = ParameterModule(nn.Parameter(torch.ones(2))), []
    model = nn.Sequential(m)

    with Hook(m, lambda m, gi, go: seen.append((gi, go)), is_forward=False):
        for _ in range(2): (2*model(m.val) + m.val).sum().backward()

    assert [[g[0].tolist() for g in gs] for gs in seen] == [[[2., 2.], [2., 2.]]]*2
    assert not m.val._backward_hooks


# ---- compiled models

class Counted:
    "A backend that counts how often what it compiled runs"
    n = 0

    def __call__(self, graph, inputs):
        def run(*args):
            self.n += 1
            return graph(*args)
        return run


class Line(nn.Module):
    def __init__(self): super().__init__(); self.a, self.b = nn.Linear(1, 4), nn.Linear(4, 1)
    def forward(self, x): return self.b(self.a(x).relu())


@pytest.fixture
def backend():
    torch._dynamo.reset()
    yield Counted()
    torch._dynamo.reset()


def wrapped(model, backend) -> Any: return torch.compile(model, backend=backend)

def in_place(model, backend):
    model.compile(backend=backend)
    return model


@pytest.mark.parametrize('compiled', [wrapped, in_place])
@pytest.mark.parametrize('which', ['a', ''])
@pytest.mark.parametrize('is_forward', [True, False])
def test_n16_hooks_on_a_compiled_model(backend, compiled, which, is_forward):
    "Hooks on child or model that come after the first compiled call are called; without them compiled code runs again"
    model, x, seen = compiled(Line(), backend), torch.ones(2, 1), []
    model(x)
    runs = backend.n

    with Hooks(model, lambda *values: seen.append(1), is_forward, which=which): model(x).sum().backward()
    hooked = backend.n
    model(x)

    assert runs == hooked == 1 and backend.n == 2 and len(seen) == 1 and is_compiled(model)


def test_n16_hooks_on_the_wrapper_and_on_another_instance(backend):
    "The wrapper can be hooked itself; so can another instance of a class whose code is compiled"
    first, second, seen = wrapped(Line(), backend), wrapped(Line(), backend), []
    first(torch.ones(2, 1))
    second(torch.ones(2, 1))

    with Hook(first, lambda m, *_: seen.append(m)): first(torch.ones(2, 1))
    with Hooks(second, lambda m, *_: seen.append(m), which='a'): second(torch.ones(2, 1))

    assert seen == [first, second.a] and backend.n == 2


def test_hooks_may_be_closed_in_any_order(backend):
    "Compiled code runs again when the last hook is off, be it the first that was put on or not"
    model, x = wrapped(Line(), backend), torch.ones(2, 1)
    a, b = Hook(model.a, print), Hook(model.b, lambda *values: 1)

    a.remove()
    model(x)
    hooked = backend.n
    b.remove()
    model(x)

    assert (hooked, backend.n, b.n_calls) == (0, 1, 1)


def test_n15_a_compiled_model_in_a_fit(backend, capsys):
    "It is said once that batches with hooks run as plain Python; names are those of the model; others run compiled"
    learn = synth_learner(Outputs(every=2), n=4, n_valid=0)
    learn.model = wrapped(Line(), backend)

    learn.fit(2)
    learn.fit(1)

    told = 'Outputs: in one of 2 batches, those with hooks on, the compiled model runs as plain Python'
    assert capsys.readouterr().out.count(told) == 1
    assert [*learn.outputs.names.values()] == ['a', 'b'] and backend.n == 6


def compiled(m): return wrapped(m, 'eager')

@pytest.mark.parametrize('wrap', [compiled, nn.DataParallel, lambda m: compiled(nn.DataParallel(m))])
def test_names_of_wrapped_models(wrap):
    "What is inside a wrapper is found under its own name, and as itself, also by the wrapper"
    model = net()
    outer, model[0] = wrap(model), wrap(model[0])

    assert [*find_modules(outer)] == [*find_modules(net())] and [*find_modules(outer, '0.*')] == block
    assert [*find_modules(outer, outer)] == [''] and [*find_modules(outer, model[0])] == ['0']
