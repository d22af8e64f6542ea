"""ActivationStats and GradientStats: the values they record, when they record, and how the record is read and kept."""
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD

from learner.callback import Callback
from learner.callbacks.checkpoint import Checkpoint
from learner.callbacks.stats import ActivationStats, GradientStats
from learner.events import CancelBackwardException, CancelBatchException, CancelStepException
from tests.bench.test_counts import waits
from tests.helpers import synth_learner, weights
from tests.resume_helpers import AskAt, noisy_learner

matplotlib.use('Agg')
nan, inf = float('nan'), float('inf')


def line(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 4), nn.ReLU(inplace=True), nn.Linear(4, 1), *more)


def learner(cbs, model=None, **kwargs): return synth_learner(cbs, model=line() if model is None else model, **kwargs)


def spread(x, near):
    "Computed directly, in double precision"
    x = x.detach().double().flatten()
    return [x.mean().item(), x.std(correction=0).item(), (x.abs() <= near).double().mean().item()]


class Gives(nn.Module):
    "Gives what it is told to, once a batch; and its input times a weight, for the loss"
    def __init__(self, *outputs):
        super().__init__()
        self.inner, self.w, self.outputs = nn.Identity(), nn.Parameter(torch.ones(1)), iter(outputs)

    def forward(self, x):
        if (out := next(self.outputs)) is not None: self.inner(out)
        return x*self.w


def stats_of(*outputs, **kwargs):
    "The ActivationStats of a layer that gives these outputs"
    cb = ActivationStats(modules='inner', **kwargs)
    synth_learner(cb, model=Gives(*outputs), n=len(outputs), n_valid=0).fit(1)
    return cb


# ---- activations

def test_activations_are_those_of_the_layers():
    "Mean, standard deviation and share near zero are what comes of computing them directly, batch by batch"
    cb, expected = ActivationStats(modules=lambda m: True), []
    def compute(loop):
        with torch.no_grad(): outputs = [loop.model(loop.x), *(loop.model[:i](loop.x) for i in (1, 2, 3))]
        expected.append([spread(o, .05) for o in outputs])
    learn = learner([Callback(before_batch=lambda loop: loop.training and compute(loop)), cb], nn.Sequential(
        nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1)), n=3)

    learn.fit(2)

    values = np.stack([np.stack(cb.layer_stats(i)).T for i in range(4)], 1)
    np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6)
    assert cb.layers == ['', '0', '1', '2'] and cb.marks == [(e, 3*e+i) for e in (0, 1) for i in range(3)]


@pytest.mark.parametrize('values', [[.05, -.05, .04, .06, -.06, 0.], [-3.], [1e15, -1e15]])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.bfloat16])
def test_spread(values, dtype):
    "The standard deviation is that of the population, and near zero is what is so on either side"
    x = torch.tensor(values, dtype=dtype)

    found = np.concatenate(stats_of(x).layer_stats('inner'))

    np.testing.assert_allclose(found, spread(x.float(), torch.tensor(.05, dtype=torch.float32)), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize('x, expected', [
    (torch.tensor([1+2j, -1j, 0]), torch.tensor([1., 2, 0, -1, 0, 0])), (torch.tensor([0., 3, 0]).to_sparse(),
                                                                         torch.tensor([3.])),
    ((torch.tensor([1, 2]), dict(a=torch.tensor([.5])), torch.ones(9)), torch.tensor([.5]))])
def test_odd_outputs(x, expected):
    "Complex numbers count as two, sparse tensors with what they hold, of several tensors the first with fractions"
    np.testing.assert_allclose(np.concatenate(stats_of(x).layer_stats(0)), spread(expected, .05), rtol=1e-6)


def test_what_gives_nothing_is_nan():
    "A layer that is passed over in a batch, or gives no number, has NaN there; other batches are as they are"
    class Skips(nn.Module):
        def __init__(self): super().__init__(); self.a, self.b, self.n = nn.Linear(1, 1), nn.Linear(1, 1), 0
        def forward(self, x):
            self.n += 1
            return self.a(x) if self.n % 2 else self.b(self.a(x))

    cb, grad = ActivationStats(True), GradientStats(True)
    learner([cb, grad], Skips(), n=4, n_valid=0).fit(1)

    for stats in (cb, grad):
        assert not np.isnan(stats.layer_stats('a')).any()
        assert np.isnan(stats.layer_stats('b')).all(0).tolist() == [True, False]*2
        assert (stats.hist('b').sum(0) > 0).tolist() == [False, True]*2
    assert not stats_of(torch.tensor([3])).values


@pytest.mark.parametrize('x', [[nan, 1., 0.], [inf, 1., 0.], []])
def test_what_is_not_finite(x):
    "It shows in mean and standard deviation; histograms leave out what is no number"
    cb = stats_of(torch.tensor(x), with_hist=True)

    mean, std, near_zero = np.concatenate(cb.layer_stats(0))

    assert not np.isfinite(mean) and not np.isfinite(std) and np.isnan(near_zero) == (not x)
    assert cb.hist(0).sum() == sum(v == v for v in x)


def test_histograms():
    "Each value is in its bin, lowest first, what lies outside in the outermost; counts add up to the number of values"
    x = torch.tensor([-1e9, -inf, -10., -9.9, -.01, 0., .01, .24, 9.99, 10., 11., inf])
    cb = stats_of(x, torch.linspace(-9.99, 9.99, 1000), with_hist=True)

    first, second = cb.hist('inner').T

    assert {i: n for i, n in enumerate(first.tolist()) if n} == {0: 4, 39: 1, 40: 3, 79: 4}
    assert second.tolist() == torch.histc(torch.linspace(-9.99, 9.99, 1000), 80, -10, 10).int().tolist()
    assert cb.hist(0).shape == (80, 2) and first.dtype == np.int64


def test_gradients_of_outputs():
    "With `is_forward=False` it is the gradients that a layer's output gets, also before an operation in place"
    cb, grads = ActivationStats(modules=['0', '2'], is_forward=False), []
    def keep(loop): loop.pred.register_hook(lambda g: grads.append(g))
    model: Any = line()
    learn = learner([cb, Callback(after_pred=lambda loop: loop.training and keep(loop))], model, n=1)
    w = model[2].weight.detach().clone()
    hidden = model[0](learn.dls.train.dataset.tensors[0])

    learn.fit(1)

    expected = [(grads[0] @ w)*(hidden > 0), grads[0]]
    found = np.stack([np.concatenate(cb.layer_stats(i)) for i in range(2)])
    np.testing.assert_allclose(found, [spread(g, .05) for g in expected], rtol=1e-5)


# ---- gradients and steps

def test_gradients_and_update_ratio():
    "They are those of a layer's parameters together; the ratio is the change by the step over the weights before"
    cb, seen = GradientStats(), []
    def before(loop): seen.append([(p.detach().clone(), p.grad.clone()) for p in loop.model.parameters()])
    learn = learner([cb, Callback(before_step=before)], n=3, lr=.1, opt_func=SGD)

    learn.fit(1)

    for i, name in enumerate(['0', '2']):
        layers = [[torch.cat([t.flatten() for t in ts]) for ts in zip(*batch[2*i:2*i+2])] for batch in seen]
        expected = [[*spread(g, 1e-8), (.1*g.norm()/p.norm()).item()] for p, g in layers]
        np.testing.assert_allclose(np.stack(cb.layer_stats(name)).T, expected, rtol=1e-4, atol=1e-7)
    assert cb.layers == ['0', '2'] and cb.marks == [(0, 0), (0, 1), (0, 2)]


def test_gradient_histograms():
    "Of the powers of ten of their amounts; zeros are in the lowest bin"
    def set_grads(loop):
        loop.model.a.grad.fill_(-1e-3*1.1)
        loop.model.b.grad.zero_()
    cb = GradientStats(with_hist=True)
    synth_learner([cb, Callback(before_step=set_grads)], n=1, opt_func=SGD).fit(1)

    counts = cb.hist('')[:, 0]

    assert {i: n for i, n in enumerate(counts.tolist()) if n} == {0: 1, 4*(-3+12): 1}


class Odd(nn.Module):
    "With sparse and complex gradients, parameters without any, a frozen and a tied layer"
    def __init__(self):
        super().__init__()
        self.emb = nn.EmbeddingBag(3, 2, sparse=True, mode='sum')
        self.c = nn.Parameter(torch.ones(2, dtype=torch.cfloat))
        self.unused, self.frozen, self.out = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)
        self.tied = nn.Linear(2, 2)
        self.tied.weight = self.out.weight
        self.a = nn.utils.parametrizations.weight_norm(nn.Linear(2, 1))

    def forward(self, x):
        h = self.emb(torch.ones(len(x), 2, dtype=torch.long))*x*self.c.abs()
        return self.a(self.tied(self.out(self.frozen(h))))


def test_n30_gradients_of_all_kinds():
    "Sparse and complex ones are recorded, what has none is NaN, tied and parametrized ones count once, with the first"
    cb = GradientStats(True)

    learner(cb, Odd(), n=2, opt_func=SGD).fit(1)

    found = {name: ~np.isnan(np.stack(cb.layer_stats(name))) for name in cb.layers}
    assert {k: bool(v.all()) for k, v in found.items() if v.all() or not v.any()} == {
        '': True, 'emb': True, 'unused': False, 'frozen': False, 'out': True, 'tied': True, 'a': True}
    assert {name: int(cb.hist(name)[:, 0].sum()) for name in cb.layers} == {
        '': 4, 'emb': 2, 'unused': 0, 'frozen': 0, 'out': 6, 'tied': 2, 'a': 4}


def test_layers_without_parameters():
    "Modules without parameters of their own are an error, not an empty record"
    with pytest.raises(ValueError, match='GradientStats: none of 1 has parameters of its own'):
        learner(GradientStats(modules=nn.ReLU)).fit(1)


# ---- when

class CancelAt(Callback):
    "Cancels the second batch somehow"
    order = 11
    def __init__(self, event, ex): super().__init__(**{event: lambda cb: cb.cancel(ex)})
    def cancel(self, ex):
        if self.training and self.iter == 1: raise ex


@pytest.mark.parametrize('event, ex', [
    ('before_step', CancelStepException), ('before_backward', CancelBackwardException),
    ('after_loss', CancelBatchException), ('after_backward', CancelBatchException)])
def test_cancelled_steps_are_not_recorded(event, ex):
    "A step that did not come to be has no row, and leaves nothing behind"
    cb = GradientStats()

    learner([cb, CancelAt(event, ex)], n=3).fit(1)

    assert cb.marks == [(0, 0), (0, 2)] and not cb.before and not np.isnan(cb.layer_stats(0)).any()


@pytest.mark.parametrize('cls', [ActivationStats, GradientStats])
def test_every_and_evaluations(cls):
    "One in `every` training batches is recorded; evaluations, also outside of a fit, are not; each fit begins anew"
    cb = cls(every=2)
    learn = learner([cb, Callback(after_pred=lambda loop: loop.training and loop.learn.validate())], n=3, n_valid=2)

    learn.fit(2)
    marks, values = cb.marks, cb.table
    learn.validate()
    again = cb.table
    learn.fit(1)

    assert marks == [(0, 0), (0, 2), (1, 4)] and values.equals(again)
    assert cb.marks == [(0, 0), (0, 2)]


def test_same_weights_with_and_without():
    "Recording changes nothing in training, bit for bit"
    plain, watched = (learner(cbs, line(nn.Dropout(.3)), n=4) for cbs in (
        [], [ActivationStats(True), ActivationStats(True, is_forward=False), GradientStats(True)]))

    for learn in (plain, watched):
        torch.manual_seed(1)
        learn.fit(2)

    assert all(a.equal(b) for a, b in zip(weights(plain), weights(watched), strict=True))


def test_no_waiting_for_the_device():
    "A batch waits for nothing; reading is one copy"
    def fit(n, *cbs):
        learn = learner([*cbs], n=n, n_valid=0)
        return lambda: learn.fit(1)
    def own(n, *cbs): return [w for w in waits(fit(n, *cbs)) if w != 'to']  # on one device, `to` does nothing
    cbs = [lambda: ActivationStats(True), lambda: ActivationStats(is_forward=False), lambda: GradientStats(True)]

    assert own(6, *[cb() for cb in cbs]) == own(6)
    cb = ActivationStats(True)
    fit(6, cb)()
    assert waits(lambda: cb.layer_stats(0)).count('cpu') == waits(lambda: cb.hist(0)).count('cpu') == 1


# ---- reading and keeping

def test_table_and_layers():
    "The table has a row a batch and layer; a layer is found by number, from the end too, or name"
    cb = ActivationStats()
    learner(cb, n=2).fit(1)

    table = cb.table

    assert [*table.columns] == ['epoch', 'batch', 'layer', 'mean', 'std', 'near_zero'] and len(table) == 4
    assert table['layer'].tolist() == ['0', '2']*2 and table['batch'].tolist() == [0, 0, 1, 1]
    numbers: Any = (0, '0'), (-1, '2'), (np.int64(1), '2')
    for i, name in numbers:
        assert np.array_equal(cb.layer_stats(i), table[table['layer'] == name][[*cb.columns]].to_numpy().T)


@pytest.mark.parametrize('layer', ['1', 2, -3, None, 1.])
def test_no_such_layer(layer):
    "A layer that is not there is an error that names those that are"
    learner(cb := ActivationStats(True), n=1).fit(1)

    for f in (cb.layer_stats, cb.hist, cb.color_dim, lambda layer: cb.plot_layer_stats([layer])):
        with pytest.raises(KeyError, match=r"no layer .*; give a position from 0 to 1, or a name: '0', '2'"): f(layer)


def test_without_histograms_or_record():
    "What was not recorded is an error that says what to do; a record without batches is an empty one"
    learner(cb := ActivationStats(every=9), n=1).fit(1)
    empty = ActivationStats(True)
    learner(empty).fit(0)

    for f in (cb.hist, cb.color_dim):
        with pytest.raises(ValueError, match='keeps no histograms: make it with `with_hist=True`'): f(0)
    with pytest.raises(ValueError, match='ActivationStats has recorded nothing to draw'): empty.plot_layer_stats()
    assert empty.hist(0).shape == (80, 0) and len(empty.table) == len(ActivationStats().table) == 0
    assert [v.shape for v in empty.layer_stats(0)] == [(0,)]*3 and empty.color_dim(0)


def test_pictures():
    "A line a layer for each column; a histogram's picture has the layer's name and the batches of the record"
    import matplotlib.pyplot as plt
    learner([cb := GradientStats(True, every=2)], n=4).fit(1)

    axs, one, ax = cb.plot_layer_stats(), cb.plot_layer_stats('2'), cb.color_dim(-1)

    assert [a.get_title() for a in axs] == ['mean', 'std', 'near zero', 'update ratio'] and len(one[0].lines) == 1
    assert axs[1].lines[1].get_xdata().tolist() == [0, 2] and axs[3].get_yscale() == 'log'
    assert np.array_equal(axs[1].lines[1].get_ydata(), cb.layer_stats('2')[1])
    assert ax.get_title() == '2' and ax.images[0].get_array().shape == (64, 2) and 'log10' in ax.get_ylabel()
    plt.close('all')


@pytest.mark.parametrize('every', [None, 3])
def test_record_goes_on_after_resume(tmp_path, every):
    "After a resume, record and hash are those of a fit in one go"
    def make(folder, *cbs):
        stats = [ActivationStats(True, every=every), GradientStats(True, every=every)]
        return noisy_learner(tmp_path/folder, cbs=[Checkpoint(every='1it'), *stats, *cbs])
    whole = make('whole')
    whole.fit(2, 1e-2)
    with pytest.raises(KeyboardInterrupt): make('cut', AskAt(4)).fit(2, 1e-2)

    learn = make('cut')
    learn.fit(2, 1e-2, resume=True)

    assert learn.final_hash == whole.final_hash
    for a, b in ((learn.activation_stats, whole.activation_stats), (learn.gradient_stats, whole.gradient_stats)):
        assert a.table.equals(b.table) and np.array_equal(a.hist(0), b.hist(0)) and a.marks == b.marks and a.marks
