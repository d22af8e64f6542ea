"""GradientClip: the same weights as a hand-written loop with torch's `clip_grad_norm_`."""
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

@pytest.mark.parametrize('kwargs', [dict(max_norm=0), dict(max_norm=-1.), dict(max_norm=math.nan),
                                    dict(norm_type=0.), dict(norm_type=-math.inf), dict(norm_type=math.nan)])
def test_norm_that_means_nothing(kwargs):
    "Norms must be above 0; the error says which and what it is"
    (name, value), = kwargs.items()

    with pytest.raises(ValueError, match=f'GradientClip: `{name}` is {value}; give a number above 0'):
        GradientClip(**kwargs)
