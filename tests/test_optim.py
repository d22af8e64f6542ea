"""Promises of learner.optim: hyper-parameters and freezing."""
from functools import partial

import numpy as np
import pytest
import torch
from fastcore.foundation import L
from torch import nn

from learner.optim import SGD, Adam, make_opt, params, trainable_params
from tests.optim_helpers import backward, by_layer, net, one_group, same, train, weights


# ---- hyper-parameters

@pytest.mark.parametrize('value,expected', [
    (.3, [.3]*4), (np.float32(.5), [.5]*4), (1, [1.]*4),
    (slice(1e-5, 1e-2), [1e-5, 1e-4, 1e-3, 1e-2]), (slice(1e-2), [1e-3, 1e-3, 1e-3, 1e-2]),
    ([1., 2., 3., 4.], [1., 2., 3., 4.]), ((1, 2, 3, 4), [1., 2., 3., 4.]), (L(1, 2, 3, 4), [1., 2., 3., 4.]),
    (np.array([1, 2, 3, 4]), [1., 2., 3., 4.]), (torch.tensor([1., 2., 3., 4.]), [1., 2., 3., 4.])])
def test_set_hyper_spreads_values_over_groups(value, expected):
    "A number is for all groups, `slice(a, b)` geometric with exact ends, `slice(b)` a tenth for all but the last"
    model = net()
    opt = make_opt(SGD, by_layer(model), model, value)

    found = [h['lr'] for h in opt.hypers]

    assert found == pytest.approx(expected, rel=1e-14) and (found[0], found[-1]) == (expected[0], expected[-1])


@pytest.mark.parametrize('value', [slice(1e-5, 1e-2), slice(1e-2), [1e-2], 1e-2])
def test_a_single_group_gets_the_last_value(value):
    "With one group a slice is its end"
    assert [h['lr'] for h in one_group(SGD, net(), value).hypers] == [1e-2]


@pytest.mark.parametrize('opt_func', [Adam, torch.optim.AdamW, partial(SGD, mom=.9)])
def test_hypers_hold_from_the_next_step(opt_func):
    "Values set between steps count in the next one, fused too, and momenta go on: as if torch's groups were written to"
    by_hand, model = net(), net()
    torch_opt, opt = opt_func(by_hand.parameters(), lr=.01), one_group(opt_func, model, .01, wd_bn_bias=True)
    train(by_hand, torch_opt)
    train(model, opt)

    group = torch_opt.param_groups[0]
    group.update({'lr': .2, 'momentum': .5} if 'momentum' in group else {'lr': .2, 'betas': (.5, group['betas'][1])})
    opt.set_hypers(lr=.2, mom=.5)
    train(by_hand, torch_opt)
    train(model, opt)

    assert same(weights(by_hand), weights(model))


def test_hypers_can_be_written_to():
    "`opt.hypers[-1]['lr'] = …` changes the last group alone"
    model = net()
    opt = make_opt(Adam, by_layer(model), model, .1)

    opt.hypers[-1]['lr'] = 1e-3
    opt.hypers[0].update(mom=.5)

    assert [h['lr'] for h in opt.hypers] == [.1, .1, .1, 1e-3]
    assert [h['mom'] for h in opt.hypers] == [.5, .9, .9, .9]
    assert {g['lr'] for g in opt.opt.param_groups if g['group'] == 3} == {1e-3}


def test_hypers_show_what_torch_has():
    "What a torch scheduler does to the groups is what `hypers` says, and it finds that the optimizer has stepped"
    model = net()
    opt = one_group(SGD, model, .1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt.opt, .5)

    train(model, opt, 1)
    scheduler.step()

    assert [h['lr'] for h in opt.hypers] == [.05]


@pytest.mark.parametrize('name,value,message', [
    ('lr', [1, 2], r'2 values of `lr` for 4 groups:\nSGD\ngroup  tensors .*0\.weight … 0\.bias'),
    ('lr', -1., '`lr` must be 0 or more, not -1.0'), ('lr', float('nan'), '`lr` must be 0 or more, not nan'),
    ('mom', .9, r'this SGD has no `mom`, only lr, wd; give it a momentum when it is made, .* partial\(SGD, mom=0.9\)'),
    ('momentum', .9, 'this SGD has no `momentum`, only lr, wd')])
def test_impossible_hypers(name, value, message):
    "A wrong number of values, a bad value, and what the optimizer has not: errors, and nothing has changed"
    model = net()
    opt = make_opt(SGD, by_layer(model), model, .1)

    with pytest.raises(ValueError, match='(?s)'+message): opt.set_hyper(name, value)

    assert opt.hypers == [dict(lr=.1, wd=0.)]*4 and all(g['momentum'] == 0 for g in opt.opt.param_groups)
    assert 'mom' not in opt.hypers[0] and opt.hypers[0].get('mom') is None


def test_hypers_cannot_be_removed():
    "Deleting a hyper-parameter is an error that names it"
    with pytest.raises(TypeError, match='set `lr` to 0'): del one_group(SGD, net()).hypers[0]['lr']


# ---- freezing

@pytest.mark.parametrize('n,trained', [(0, [1, 1, 1, 1]), (1, [0, 1, 1, 1]), (3, [0, 1, 0, 1]), (-1, [0, 1, 0, 1]),
                                       (-3, [0, 1, 1, 1]), (-4, [1, 1, 1, 1])])
def test_freeze_to(n, trained):
    "`freeze_to` freezes the groups before `n`, but for normalisation layers; `unfreeze` takes it back"
    model = net()
    opt = make_opt(Adam, by_layer(model), model, .1)

    opt.freeze_to(n)
    found = [all(p.requires_grad for p in ps) for ps in opt.param_lists]
    index = opt.frozen_idx
    opt.unfreeze()

    assert found == list(map(bool, trained)) and index == n % 4
    assert all(p.requires_grad for p in model.parameters()) and opt.frozen_idx == 0


def test_freeze_with_train_bn_off():
    "`train_bn=False` freezes normalisation layers like all others"
    model = net()
    opt = make_opt(Adam, by_layer(model), model, .1, train_bn=False)

    opt.freeze()

    assert [p.requires_grad for p in model.parameters()] == [False]*6 + [True]*2


@pytest.mark.parametrize('splitter,n,message', [
    (params, -1, r'`freeze_to\(-1\)` needs more than 1 group, .*Adam.*0      8        79          0.1 '),
    (params, 1, r'`freeze_to\(1\)` needs more than 1 group, '),
    (by_layer, 4, r'`freeze_to\(4\)` needs more than 4 groups'),
    (by_layer, -5, r'`freeze_to\(-5\)` needs more than 4 groups')])
def test_impossible_freezing(splitter, n, message):
    "Freezing that cannot work is an error that shows the groups, and freezes nothing"
    model = net()
    opt = make_opt(Adam, splitter(model), model, .1)

    with pytest.raises(ValueError, match='(?s)'+message): opt.freeze_to(n)

    assert all(p.requires_grad for p in model.parameters())


def test_freezing_keeps_state():
    "The averages of groups that stay trained are not lost by freezing others"
    model = net()
    opt = make_opt(Adam, by_layer(model), model, .1)
    train(model, opt)
    before = {p: s['exp_avg'].clone() for p, s in opt.opt.state.items()}

    opt.freeze()

    assert before and all(torch.equal(opt.opt.state[p]['exp_avg'], s) for p, s in before.items())


def test_freezing_drops_gradients():
    "A parameter that is frozen after its gradient was computed is not stepped"
    model = net()
    opt, before = make_opt(SGD, by_layer(model), model, .1, wd=.5), weights(model)

    backward(model)
    opt.freeze()
    opt.step()

    assert same(weights(model)[:2], before[:2])


def test_frozen_by_hand():
    "A parameter frozen by hand is in the optimizer, stays as it is, and trains after `unfreeze`"
    model = net()
    model[0].requires_grad_(False)
    opt, before = one_group(Adam, model), weights(model)

    frozen = weights(train(model, opt))
    opt.unfreeze()
    trained = weights(train(model, opt))

    assert same(frozen[:2], before[:2]) and not same(trained[:2], before[:2])


def test_trainable_params_leaves_frozen_ones_out():
    "With the splitter `trainable_params`, what is frozen by hand stays so after `unfreeze`"
    model = net()
    model[0].requires_grad_(False)
    opt = make_opt(Adam, trainable_params(model), model, .1)

    opt.unfreeze()

    assert len(opt.all_params()) == 6 and not model[0].weight.requires_grad


def test_everything_frozen():
    "An optimizer of frozen parameters can be made and stepped, and changes nothing"
    model = net().requires_grad_(False)
    opt, before = one_group(SGD, model, wd=.5), weights(model)

    opt.step()

    assert same(weights(model), before)


def test_integer_parameters_stay_frozen():
    "A parameter that cannot have a gradient does not stop `unfreeze`, nor a step"
    model = net()
    model[3].table = nn.Parameter(torch.arange(3), requires_grad=False)  # in the ReLU
    opt = one_group(Adam, model)

    opt.unfreeze()
    train(model, opt, 1)

    assert model[3].table.tolist() == [0, 1, 2]
