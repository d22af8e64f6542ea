"""Promises of the state of learner.optim's Optimizer."""
import copy
import io
from functools import partial

import pytest
import torch
from torch import nn

from learner.optim import SGD, Adagrad, Adam, RMSProp, make_opt
from tests.optim_helpers import by_layer, net, one_group, ours, same, train, weights


@pytest.mark.parametrize('opt_func', [*ours, partial(SGD, mom=.9, wd=.1), torch.optim.AdamW, torch.optim.ASGD])
def test_state_round_trip(opt_func):
    "A new optimizer with the state loaded, from a file opened with `weights_only`, goes on bit for bit"
    model, file = net(), io.BytesIO()
    opt = make_opt(opt_func, by_layer(model), model, slice(1e-4, 1e-2))
    train(model, opt, 2)
    opt.set_hyper('lr', .005)
    torch.save(dict(opt=opt.state_dict(), model=model.state_dict()), file)
    train(model, opt, 2, first=2)

    other = net(seed=1)
    opt = make_opt(opt_func, by_layer(other), other, .1)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other.load_state_dict(saved['model'])
    opt.load_state_dict(saved['opt'])
    train(other, opt, 2, first=2)

    assert same(weights(other), weights(model)) and [h['lr'] for h in opt.hypers] == [.005]*4


@pytest.mark.parametrize('before,after', [(0., .1), (.1, 0.)])
def test_state_fits_whatever_the_decay(before, after):
    "A state saved with decay loads into an optimizer without, and the other way round: the saved decay counts"
    model, other = net(), net()
    saved = one_group(partial(SGD, mom=.9), model, .01, wd=before)
    train(model, saved, 2)
    loaded = one_group(partial(SGD, mom=.9), other, .01, wd=after)
    other.load_state_dict(model.state_dict())

    loaded.load_state_dict(copy.deepcopy(saved.state_dict()))
    for m, o in zip((model, other), (saved, loaded)):
        train(m, o, 2, first=2)
        o.set_hyper('wd', .3)
        train(m, o, 2, first=4)

    assert same(weights(other), weights(model))


def test_loaded_momentum_of_some_parameters():
    "SGD goes on after unfreezing also if its state was loaded while some parameters had no momentum yet"
    model = net()
    opt = one_group(partial(SGD, mom=.9), model)
    model[0].requires_grad_(False)
    train(model, opt)
    opt.load_state_dict(opt.state_dict())
    before = weights(model)

    opt.unfreeze()
    train(model, opt)

    assert not any(map(torch.equal, weights(model)[:1], before))


@pytest.mark.parametrize('make,message', [
    (lambda m: one_group(SGD, m), 'a state of SGD with lr, wd does not fit AdamW with lr, mom, sqr_mom, eps, wd'),
    (lambda m: make_opt(Adam, by_layer(m), m, .1), r'a state of groups with \[2, 2, 2, 2\] tensors does not fit these'),
    (lambda m: one_group(Adam, nn.Sequential(nn.Linear(7, 5), *m[1:])),
     r"does not fit 1 of the parameters:\n`0.weight` \[5, 7\] in the state, `0.weight` \[5, 6\] here"),
    (lambda m: one_group(Adam, m, wd_bn_bias=True), r'does not fit 5 of the parameters:\n`0.bias` \[5\] in the')])
def test_state_that_does_not_fit(make, message):
    "The state of another optimizer, or of other groups, shapes or options, is refused by name and changes nothing"
    opt = one_group(Adam, net(), .1)
    before = opt.state_dict()

    with pytest.raises(ValueError, match=message): opt.load_state_dict(make(net()).state_dict())

    assert opt.state_dict() == before


@pytest.mark.parametrize('opt_func', [Adam, Adagrad, partial(SGD, mom=.9), torch.optim.RMSprop])
def test_clear_state_starts_afresh(opt_func):
    "After `clear_state` an optimizer steps as a new one would"
    model, other = net(), net()
    opt = one_group(opt_func, model)
    train(model, opt)
    other.load_state_dict(model.state_dict())

    opt.clear_state()
    train(model, opt)
    train(other, one_group(opt_func, other))

    assert same(weights(other), weights(model))


@pytest.mark.parametrize('opt_func', [partial(SGD, mom=.9), RMSProp, Adam])
def test_copies_decay_too(opt_func):
    "A deep copy of model and optimizer steps as the original does, decay and momentum included"
    model = net()
    opt = one_group(opt_func, model, .01, wd=.5)
    train(model, opt, 2)

    other, other_opt = copy.deepcopy((model, opt))
    for m, o in ((model, opt), (other, other_opt)): train(m, o, 2, first=2)

    assert same(weights(other), weights(model))


def test_state_to_device_in_place():
    "Where parameters and state are together, `state_to_device` leaves the same tensors"
    model = net()
    opt = one_group(Adam, model)
    train(model, opt)
    before = [id(t) for s in opt.opt.state.values() for t in s.values()]

    opt.state_to_device()

    assert before == [id(t) for s in opt.opt.state.values() for t in s.values()]
