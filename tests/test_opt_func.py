"""Promises of what is done with an `opt_func`, and what a step costs."""
import sys
from functools import partial

import pytest
import torch

from learner.optim import SGD, Adam, Lamb, Larc, Lookahead, OptimWrapper, QHAdam, opt_lr, ranger
from tests.optim_helpers import backward, net, one_group, same, train, weights


@pytest.mark.parametrize('opt_func', [
    partial(OptimWrapper, opt=torch.optim.AdamW), lambda params, lr: torch.optim.AdamW(params, lr=lr),
    lambda params, lr: OptimWrapper(opt=torch.optim.AdamW(params, lr=lr))])
def test_other_forms_of_opt_func(opt_func):
    "fastai's OptimWrapper, and functions of groups and `lr`, do what the class does"
    by_hand, model = net(), net()

    train(by_hand, one_group(torch.optim.AdamW, by_hand, .01))
    train(model, one_group(opt_func, model, .01))

    assert same(weights(by_hand), weights(model))


@pytest.mark.parametrize('opt_func,error,message', [
    (torch.optim.SGD(net().parameters()), TypeError, 'must be a torch.optim class, .*; this is a `SGD`'),
    (lambda params: None, TypeError, "which <lambda> does not take: got an unexpected keyword argument 'lr'"),
    (lambda params, lr: None, TypeError, '<lambda> returned a `NoneType`'),
    (lambda params, lr: torch.optim.SGD(params[0]['params'][:2], lr), ValueError, 'must keep the groups'),
    (torch.optim.LBFGS, TypeError, 'LBFGS runs the model by itself'),
    (OptimWrapper, TypeError, '`OptimWrapper` needs `opt`'),
    *((f, ValueError, f'`{name}` is not one of torch.s optimizers: use `?{instead}') for f, name, instead in [
        (QHAdam, 'QHAdam', 'NAdam'), (Larc, 'Larc', 'SGD'), (Lamb, 'Lamb', 'Adam'),
        (Lookahead, 'Lookahead', 'the optimizer'), (ranger, 'ranger', 'RAdam'),
        (partial(ranger, wd=.1), 'ranger', 'RAdam')])])
def test_bad_opt_func(opt_func, error, message):
    "What cannot be used as `opt_func` says so, and what to use"
    with pytest.raises(error, match=message): one_group(opt_func, net())


def test_errors_inside_opt_func_are_its_own():
    "A TypeError raised by the optimizer itself is not taken for a wrong signature"
    with pytest.raises(TypeError, match="unexpected keyword argument 'momentun'"):
        one_group(lambda params, lr: torch.optim.SGD(params, lr=lr, momentun=.9), net())


@pytest.mark.parametrize('opt_func,lr', [
    (Adam, None), (partial(torch.optim.SGD, momentum=.9), None), (partial(torch.optim.SGD, lr=.3), .3),
    (partial(OptimWrapper, opt=torch.optim.SGD), None),
    (partial(OptimWrapper, opt=partial(torch.optim.SGD, lr=.3)), .3),
    (partial(OptimWrapper, opt=torch.optim.SGD, lr=.3), .3)])
def test_opt_lr(opt_func, lr):
    "The learning rate inside a partial is found, and one given with the call goes before it"
    assert opt_lr(opt_func) == lr
    assert one_group(opt_func, net(), .7).hypers[0]['lr'] == .7


def calls(model, opt, n=20):  # Python and C calls of `n` steps, gradients not counted
    seen, count = [], lambda _, what, __: seen.append(what) if what in ('call', 'c_call') else None
    for _ in range(n):
        backward(model)
        sys.setprofile(count)
        try:
            opt.step()
            opt.zero_grad()
        finally: sys.setprofile(None)
    return len(seen)/n


@pytest.mark.parametrize('opt_func,plain', [
    (torch.optim.AdamW, torch.optim.AdamW), (torch.optim.SGD, torch.optim.SGD), (Adam, torch.optim.AdamW),
    (SGD, torch.optim.SGD)])
def test_no_more_calls_than_torch(opt_func, plain):
    "A step and `zero_grad` take no more calls than those of the torch optimizer people write, biases apart or not"
    model = net()

    theirs = calls(model, plain(model.parameters(), .01))
    mine = calls(model, one_group(opt_func, model, .01, wd_bn_bias=opt_func is plain))

    assert mine <= theirs


def test_zero_grad_is_one_call():
    "`zero_grad` drops all gradients in one call"
    model = net()
    opt, seen = one_group(Adam, model), []
    backward(model)

    sys.setprofile(lambda _, what, __: seen.append(what) if what in ('call', 'c_call') else None)
    opt.zero_grad()
    sys.setprofile(None)

    assert len(seen) == 2  # the second is `setprofile` itself
    assert all(p.grad is None for p in model.parameters())
