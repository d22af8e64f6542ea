"""Promises of learner.optimizers: torch's optimizers as they are, ours, the fused form, and `opt_func`."""
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from learner.optim import SGD, Adadelta, Adagrad, Adam, Adamax, NAdam, RAdam, RMSProp, make_opt
from tests.optim_helpers import by_layer, net, one_group, ours, same, train, weights


# ---- torch's optimizers, as they are

@pytest.mark.parametrize('opt_func', [
    torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop,
    partial(torch.optim.SGD, momentum=.9, nesterov=True, weight_decay=.1),
    partial(torch.optim.AdamW, weight_decay=.3, betas=(.8, .95), amsgrad=True),
    partial(torch.optim.Adam, fused=True)])
def test_torch_class_steps_as_by_hand(opt_func):
    "With `wd_bn_bias=True` a torch class or partial gives bit for bit what the hand-written loop gives"
    by_hand, model = net(), net()

    train(by_hand, opt_func(by_hand.parameters(), lr=.01))
    train(model, one_group(opt_func, model, .01, wd_bn_bias=True))

    assert same(weights(by_hand), weights(model))


@pytest.mark.parametrize('opt_func', [torch.optim.AdamW, partial(torch.optim.SGD, momentum=.9, weight_decay=.1)])
def test_torch_class_without_decay_on_norms_and_biases(opt_func):
    "By default norms and biases do not decay, and nothing else differs from torch"
    by_hand, model = net(), net()
    ps = dict(by_hand.named_parameters())
    decayed = [ps.pop(n) for n in ('0.weight', '2.weight', '4.weight')]

    train(by_hand, opt_func([{'params': decayed}, {'params': ps.values(), 'weight_decay': 0.}], lr=.01))
    train(model, one_group(opt_func, model, .01))

    assert same(weights(by_hand), weights(model))


@pytest.mark.parametrize('opt_func,found', [
    (torch.optim.SGD, dict(lr=.1, wd=0.)),
    (partial(torch.optim.SGD, momentum=.9), dict(lr=.1, mom=.9, wd=0.)),
    (torch.optim.AdamW, dict(lr=.1, mom=.9, sqr_mom=.999, eps=1e-8, wd=.01)),
    (torch.optim.RMSprop, dict(lr=.1, sqr_mom=.99, eps=1e-8, wd=0.)),
    (partial(torch.optim.RMSprop, momentum=.5), dict(lr=.1, mom=.5, sqr_mom=.99, eps=1e-8, wd=0.)),
    (torch.optim.Adadelta, dict(lr=.1, sqr_mom=.9, eps=1e-6, wd=0.)),
    (torch.optim.Adagrad, dict(lr=.1, eps=1e-10, wd=0.)),
    (torch.optim.ASGD, dict(lr=.1, wd=0.)),
    (torch.optim.Adafactor, dict(lr=.1, wd=0.)),
    (torch.optim.Rprop, dict(lr=.1)),
    (SGD, dict(lr=.1, wd=0.)),
    (partial(SGD, mom=.9), dict(lr=.1, mom=.9, wd=0.)),
    (RMSProp, dict(lr=.1, sqr_mom=.99, eps=1e-8, wd=0.)),
    (Adam, dict(lr=.1, mom=.9, sqr_mom=.99, eps=1e-5, wd=.01)),
    (RAdam, dict(lr=.1, mom=.9, sqr_mom=.99, eps=1e-5, wd=0.)),
    (NAdam, dict(lr=.1, mom=.9, sqr_mom=.99, eps=1e-5, wd=0.)),
    (Adagrad, dict(lr=.1, eps=1e-10, wd=0.)),
    (Adadelta, dict(lr=.1, sqr_mom=.9, eps=1e-6, wd=0.)),
    (Adamax, dict(lr=.1, mom=.9, sqr_mom=.999, eps=1e-8, wd=0.))])
def test_hypers_have_fastai_names_and_defaults(opt_func, found):
    "`hypers` shows what the optimizer has, under fastai's names, and nothing that it has not"
    assert one_group(opt_func, net()).hypers == [found]


# ---- ours

def test_adam_is_adamw_with_fastai_defaults():
    "`Adam` gives what torch's fused AdamW with mom .9, sqr_mom .99, eps 1e-5 and wd .01 gives"
    by_hand, model = net(), net()

    plain = torch.optim.AdamW(by_hand.parameters(), .01, betas=(.9, .99), eps=1e-5, weight_decay=.01, fused=True)
    train(by_hand, plain)
    train(model, one_group(Adam, model, .01, wd_bn_bias=True))

    assert same(weights(by_hand), weights(model))


@pytest.mark.parametrize('opt_func,plain', [
    (Adam, partial(torch.optim.AdamW, betas=(.9, .99), eps=1e-5)),
    (partial(SGD, mom=.9), partial(torch.optim.SGD, momentum=.9)), (Adagrad, torch.optim.Adagrad)])
def test_fused_form_equals_the_plain_one(opt_func, plain):
    "The fused step gives the plain step's weights within a few roundings of float64 (measured: at most 2)"
    by_hand, model = net(dtype=torch.float64), net(dtype=torch.float64)

    train(by_hand, plain(by_hand.parameters(), lr=.01))
    train(model, one_group(opt_func, model, .01, wd_bn_bias=True))

    torch.testing.assert_close(weights(model), weights(by_hand), rtol=1e-14, atol=1e-15)


def test_sgd_decay_is_decoupled():
    "SGD with momentum: p ← p(1-lr·wd) - lr·v, v ← mom·v + g"
    p = nn.Parameter(torch.tensor([3., -2.], dtype=torch.float64))
    opt = one_group(partial(SGD, mom=.9), nn.ParameterDict({'w': p}), .1, wd=.5)
    expected, v = p.detach().clone(), torch.zeros(2, dtype=torch.float64)

    for g in torch.tensor([[1., 2.], [-3., .5], [.25, 4.]], dtype=torch.float64):
        p.grad = g.clone()
        opt.step()
        v = .9*v + g
        expected = expected*(1-.1*.5) - .1*v

    torch.testing.assert_close(p.detach(), expected, rtol=1e-15, atol=0)


def test_rmsprop_decay_is_decoupled():
    "RMSProp: p ← p(1-lr·wd) - lr·g/(√s + eps), s ← sqr_mom·s + (1-sqr_mom)·g²"
    p = nn.Parameter(torch.tensor([3., -2.], dtype=torch.float64))
    opt = one_group(RMSProp, nn.ParameterDict({'w': p}), .1, wd=.5)
    expected, s = p.detach().clone(), torch.zeros(2, dtype=torch.float64)

    for g in torch.tensor([[1., 2.], [-3., .5], [.25, 4.]], dtype=torch.float64):
        p.grad = g.clone()
        opt.step()
        s = .99*s + (1-.99)*g*g
        expected = expected*(1-.1*.5) - .1*g/(s.sqrt()+1e-8)

    torch.testing.assert_close(p.detach(), expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize('opt_func', ours)
def test_decay_shrinks_by_lr_times_wd(opt_func):
    "Without any gradient to follow, each of our optimizers shrinks weights by exactly `lr*wd` a step, and no other"
    model = nn.Linear(3, 2).double()
    opt, before = one_group(opt_func, model, .1, wd=.5), weights(model)

    for p in model.parameters(): p.grad = torch.zeros_like(p)
    opt.step()

    torch.testing.assert_close(weights(model), [before[0]*(1-.1*.5), before[1]], rtol=1e-15, atol=0)


@pytest.mark.parametrize('opt_func,plain', [
    (SGD, torch.optim.SGD), (RMSProp, torch.optim.RMSprop), (Adadelta, torch.optim.Adadelta),
    (Adam, partial(torch.optim.Adam, betas=(.9, .99), eps=1e-5)),
    (RAdam, partial(torch.optim.RAdam, betas=(.9, .99), eps=1e-5))])
def test_decay_into_the_gradient_on_request(opt_func, plain):
    "`decouple_wd=False` adds `wd*p` to the gradient, as torch's optimizers do"
    by_hand, model = net(dtype=torch.float64), net(dtype=torch.float64)

    train(by_hand, plain(by_hand.parameters(), lr=.01, weight_decay=.1))
    train(model, one_group(partial(opt_func, wd=.1, decouple_wd=False), model, .01, wd_bn_bias=True))

    torch.testing.assert_close(weights(model), weights(by_hand), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize('opt_func', [SGD, RMSProp, Adam, torch.optim.AdamW])
def test_parameters_without_gradient_do_not_decay(opt_func):
    "A frozen parameter stays bit for bit what it was, whatever the decay"
    model = net()
    opt, before = make_opt(opt_func, by_layer(model), model, .1, wd=.5, train_bn=False), weights(model)

    opt.freeze()
    after = weights(train(model, opt))

    assert same(after[:6], before[:6]) and not same(after[6:], before[6:])


@pytest.mark.parametrize('opt_func', ours)
def test_optimizers_take_parameters_directly(opt_func):
    "Each works without a learner, on parameters, on lists of them and on torch's groups"
    model = net()
    forms = [model.parameters(), by_layer(model), [{'params': model.parameters()}]]

    opts = [opt_func(ps, .1) for ps in forms]

    assert [len(o.param_groups) for o in opts] == [1, 4, 1]
    assert [sum(len(g['params']) for g in o.param_groups) for o in opts] == [8, 8, 8]


# ---- the fused form

@pytest.mark.parametrize('opt_func,fused', [(SGD, True), (Adam, True), (Adagrad, True), (RMSProp, None), (RAdam, None),
                                            (torch.optim.AdamW, None)])
def test_ours_are_fused_where_torch_can(opt_func, fused):
    "Ours are fused where torch has that form, also on the CPU; torch's classes are as torch makes them"
    assert {g.get('fused') for g in one_group(opt_func, net(), wd=.1).opt.param_groups} == {fused}


def test_complex_parameters_are_not_fused():
    "A complex parameter is trained by the plain form"
    model = nn.ParameterDict({'w': nn.Parameter(torch.ones(2, dtype=torch.complex64))})
    opt = one_group(Adam, model, .1, wd=0.)

    (model['w'].abs()**2).sum().backward()
    opt.step()

    assert opt.opt.param_groups[0]['fused'] is None
    assert (model['w'].real < 1).all()


@pytest.mark.parametrize('opt_func', [SGD, partial(SGD, mom=.9), Adagrad])
def test_sparse_gradients_are_not_fused(opt_func):
    "An embedding with sparse gradients is trained by the plain form, from the first step on"
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
    opt, before = one_group(opt_func, model), weights(model)

    with torch.sparse.check_sparse_tensor_invariants(False):  # torch warns if this is not chosen
        for _ in range(2):
            model(torch.tensor([1, 3])).sum().backward()
            opt.step()
            opt.zero_grad()

    changed = (model[0].weight != before[0]).any(1)
    assert changed.tolist() == [False, True, False, True, False]


@pytest.mark.parametrize('opt_func', [partial(SGD, mom=.9), Adam, RMSProp, torch.optim.AdamW])
def test_lazy_modules(opt_func):
    "An optimizer made before a lazy module knows its shapes trains the same parameters afterwards"
    model = nn.Sequential(nn.LazyLinear(4, bias=False), nn.LazyBatchNorm1d(), nn.LazyLinear(2))
    opt = one_group(opt_func, model, .1, wd=.1)
    assert ' ?  ' in repr(opt)

    train(model, opt, 1)
    before = weights(model)
    train(model, opt, 1)

    assert not any(map(torch.equal, weights(model), before))


def test_fused_momentum_of_parameters_that_come_late():
    "SGD with momentum goes on if some parameters of a group get their first gradient later, as torch's plain form does"
    by_hand, model = net(dtype=torch.float64), net(dtype=torch.float64)
    opts = torch.optim.SGD(by_hand.parameters(), .01, momentum=.9), one_group(partial(SGD, mom=.9), model, .01)

    for m, opt in zip((by_hand, model), opts):
        m[0].requires_grad_(False)
        train(m, opt, 2)
        m[0].requires_grad_(True)
        train(m, opt, 2, first=2)

    torch.testing.assert_close(weights(model), weights(by_hand), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize('opt_func', [partial(SGD, mom=.9), Adam, RMSProp])
def test_grad_scaler_skips_the_decay_too(opt_func):
    "GradScaler steps `opt.opt`: a step with infinite gradients changes nothing, a good one is the step without scaler"
    by_hand, model = net(), net()
    plain, opt = one_group(opt_func, by_hand, wd=.1), one_group(opt_func, model, wd=.1)
    scaler = torch.amp.GradScaler('cpu')

    for factor in (np.inf, 1.):
        scaler.scale(model(torch.ones(8, 6)).pow(2).sum()*factor).backward()
        scaler.step(opt.opt)
        scaler.update()
        opt.zero_grad()
    by_hand(torch.ones(8, 6))
    by_hand(torch.ones(8, 6)).pow(2).sum().backward()
    plain.step()

    assert same(weights(by_hand), weights(model))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='no CUDA device')
@pytest.mark.parametrize('opt_func', [partial(SGD, mom=.9), Adam, RMSProp, Adagrad, torch.optim.AdamW])
def test_state_follows_a_model_to_the_gpu(opt_func):
    "A model moved to the GPU between steps trains on as it would have on the CPU"
    stays, moves = net(dtype=torch.float64), net(dtype=torch.float64)
    opts = one_group(opt_func, stays, .01, wd=.1), one_group(opt_func, moves, .01, wd=.1)
    for m, opt in zip((stays, moves), opts): train(m, opt, 2)

    moves.cuda()
    opts[1].state_to_device()
    for m, opt in zip((stays, moves), opts): train(m, opt, 2, first=2)

    torch.testing.assert_close([w.cpu() for w in weights(moves)], weights(stays), rtol=1e-9, atol=1e-12)
