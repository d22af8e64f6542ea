"""GradientClip: the same weights as a hand-written loop that clips by torch's functions, or by formula."""
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

from learner.callback import Callback
from learner.callbacks.training import GradientClip
from tests.bench.test_counts import waits
from tests.helpers import synth_dls, synth_learner, weights
from tests.schedule_helpers import Window

sgd = torch.optim.SGD


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1))

def by_hand(clip, n=4, n_epoch=2, acc=1, params=nn.Module.parameters):
    "The weights after a plain loop that calls `clip(parameters)` before each step, one in `acc` batches"
    model = net()
    opt = sgd(params(model), lr=.1)
    for _ in range(n_epoch):
        for i, (x, y) in enumerate(synth_dls(n)[0]):
            nn.functional.mse_loss(model(x), y).backward()
            if (i+1) % acc: continue
            clip(opt.param_groups[0]['params'])
            opt.step()
            model.zero_grad()
    return [p.detach() for p in model.parameters()]

def fitted(*cbs, **kwargs):
    "The weights after a fit"
    learn = synth_learner(cbs, n=4, model=net(), opt_func=sgd, lr=.1, **kwargs)
    learn.fit(2)
    return weights(learn)

def same(a, b): return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize('max_norm', [.05, 1., 1000.])
@pytest.mark.parametrize('norm_type', [1., 2., 3.5, math.inf])
def test_same_as_torch(max_norm, norm_type):
    "Bit for bit the weights of a loop that clips with torch's function, whatever the norm"
    expected = by_hand(lambda ps: clip_grad_norm_(ps, max_norm, norm_type))

    assert same(fitted(GradientClip(max_norm, norm_type)), expected)
    assert same(expected, by_hand(lambda ps: None)) == (max_norm == 1000.)  # it mattered

def test_defaults_are_fastais():
    "Unless said otherwise the 2-norm is at most 1"
    assert same(fitted(GradientClip), by_hand(lambda ps: clip_grad_norm_(ps, 1., 2.)))

def test_norm_is_of_what_is_trained():
    "Gradients of parameters that the optimizer does not have count for nothing, nor do those that are missing"
    def last(model):
        model[2].bias.requires_grad_(False)
        return [*model[2].parameters()]
    expected = by_hand(lambda ps: clip_grad_norm_(ps, .05), params=last)

    with pytest.warns(UserWarning, match='0.weight'): seen = fitted(GradientClip(.05), splitter=last)

    assert same(seen, expected)

def test_clips_after_unscaling():
    "What scales the loss and, as mixed precision at order 10, unscales the gradients before the step, changes nothing"
    def scale(cb): cb.learn.loss_grad *= 1024
    def unscale(cb):
        for p in cb.opt.all_params(): p.grad /= 1024
    scaler = Callback(before_backward=scale, before_step=unscale)
    scaler.order = 10

    assert same(fitted(GradientClip(.05), scaler), fitted(GradientClip(.05)))

def test_clips_once_a_step():
    "Gradients that are being accumulated are clipped when they are complete"
    expected = by_hand(lambda ps: clip_grad_norm_(ps, .05), acc=2)

    assert same(fitted(GradientClip(.05), Window(2)), expected)

def test_steps_see_clipped_gradients():
    "The total norm at each step is what was asked for, also in the fit of which it is a callback"
    norms = []
    def look(cb): norms.append(get_total_norm([p.grad for p in cb.opt.all_params()]).item())
    learn = synth_learner(Callback(after_step=look), n=3)

    learn.fit(1, cbs=GradientClip(.1))

    assert norms == pytest.approx([.1]*3)

def test_waits_for_nothing():
    "Clipping reads nothing from the device"
    def seen(cbs):
        learn = synth_learner(cbs, n=4)
        return [o for o in waits(lambda: learn.fit(1)) if o != 'to']  # torch moves norms to the device they are on

    assert seen(GradientClip) == seen(None)

# ---- by value, and by ratio

@pytest.mark.parametrize('value', [.01, .5, 1000.])
def test_by_value_as_torch(value):
    "Bit for bit the weights of a loop that clips with torch's `clip_grad_value_`"
    expected = by_hand(lambda ps: nn.utils.clip_grad_value_(ps, value))

    assert same(fitted(GradientClip(value, by='value')), expected)
    assert same(expected, by_hand(lambda ps: None)) == (value == 1000.)

def agc(ratio, eps=1e-3):
    "Adaptive clipping by the paper's formula, unit by unit"
    def clip(ps):
        for p in ps:
            units = zip(p.detach(), p.grad) if p.ndim > 1 else [(p.detach(), p.grad)]
            for w, g in units:
                most = ratio*max(w.norm().item(), eps)
                if g.norm() > most: g *= most/g.norm()
    return clip

@pytest.mark.parametrize('ratio,eps', [(.01, 1e-3), (.1, 1e-3), (.1, .7), (1e6, 1e-3)])
def test_adaptive_is_the_papers(ratio, eps):
    "The weights of a loop that scales down the gradient of each row, and of each vector, by its own ratio"
    expected = by_hand(agc(ratio, eps))

    seen = fitted(GradientClip(ratio, by='adaptive', eps=eps))

    assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(seen, expected))
    assert same(seen, by_hand(lambda ps: None)) == (ratio == 1e6)

def test_adaptive_units():
    "A unit of a convolution is a filter; one whose gradient is 0 stays so; a number is a unit of its own"
    conv, scale = nn.Parameter(torch.ones(2, 3, 2, 2)), nn.Parameter(torch.tensor(-2.))
    conv.grad, scale.grad = torch.ones(2, 3, 2, 2), torch.tensor(-5.)
    conv.grad[1] = 0

    GradientClip(.5, by='adaptive')._clip_units([conv, scale], [conv.grad, scale.grad])

    assert torch.allclose(conv.grad[0], torch.tensor(.5)) and conv.grad[1].eq(0).all() and scale.grad == -1

@pytest.mark.parametrize('by', ['norm', 'value', 'adaptive'])
def test_sparse_gradients(by):
    "Are clipped as dense ones are, and stay sparse"
    def run(sparse):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 3, sparse=sparse), nn.Flatten(), nn.Linear(6, 1))
        x = torch.tensor([[1, 2], [2, 5], [5, 5]])
        learn = synth_learner(GradientClip(.05, by=by), dls=([(x, torch.ones(3, 1))]*3, None), model=model, lr=.1,
                              opt_func=sgd)
        kinds = []
        learn.fit(1, cbs=Callback(after_step=lambda cb: kinds.append(cb.model[0].weight.grad.is_sparse)))
        return weights(learn), learn.gradient_clip.grad_norms, kinds
    (dense, norms, _), (seen, sparse_norms, kinds) = run(False), run(True)

    assert kinds == [True]*3 and all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(dense, seen))
    assert sparse_norms == pytest.approx(norms) and min(norms) > .05


# ---- what is recorded

@pytest.mark.parametrize('by', ['norm', 'value', 'adaptive'])
def test_norms_are_recorded(by):
    "Each step's norm before clipping, of the last fit only, whatever is bounded"
    norms = []
    def look(cb): norms.append(get_total_norm([p.grad for p in cb.opt.all_params()]).item())
    before = Callback(before_step=look)
    before.order = 10
    learn = synth_learner([GradientClip(.05, by=by), before], n=4)

    learn.fit(2)
    first = learn.gradient_clip.grad_norms
    learn.fit(1)

    assert first == norms[:8] and learn.gradient_clip.grad_norms == norms[8:]

def test_many_norms():
    "What has come in is packed now and then, and all of it is there"
    learn = synth_learner(GradientClip, n=600, bs=1)

    learn.fit(1)

    assert len(learn.gradient_clip.grad_norms) == 600 and len(learn.gradient_clip.norms) == 1


# ---- refused

def test_unknown_kind():
    "`by` has three values"
    with pytest.raises(ValueError, match="`by` is 'norms'; give 'norm', 'value' or"): GradientClip(by='norms')

@pytest.mark.parametrize('kwargs', [dict(max_norm=0), dict(max_norm=-1.), dict(max_norm=math.nan),
                                    dict(norm_type=0.), dict(norm_type=-math.inf), dict(norm_type=math.nan),
                                    dict(eps=0.)])
def test_norm_that_means_nothing(kwargs):
    "Norms must be above 0; the error says which and what it is"
    (name, value), = kwargs.items()

    with pytest.raises(ValueError, match=f'GradientClip: `{name}` is {value}; give a number above 0'):
        GradientClip(**kwargs)
