"""The loss of one batch: what a loss function may return, and where the loss comes from without targets."""
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from learner.loss_value import loss_without_targets, takes_one, total_loss

one = torch.tensor(1., requires_grad=True)


def state(pred=None, loss_func=None, yb=(), had=False, training=True):  # of a Learner, as far as the loss needs it
    return SimpleNamespace(pred=pred, loss_func=loss_func, yb=yb, _had_targets=had, training=training)


def test_scalars_stay():
    "A 0-d tensor is the loss itself, None is none"
    assert total_loss(one, None, True) == (one, None) and total_loss(None, None, True) == (None, None)

def test_parts_are_summed():
    "A dict of scalars is summed; its parts are detached"
    loss, parts = total_loss({'a': one*2, 'b': one*3}, None, True)

    assert loss == 5 and loss.requires_grad and parts == {'a': 2, 'b': 3} and not parts['a'].requires_grad

@pytest.mark.parametrize('loss, error', [(1., TypeError), ((one,), TypeError), ({}, TypeError), ({'a': 1.}, TypeError),
                                         (torch.ones(3), ValueError), (torch.ones(1), ValueError)])
def test_anything_else_is_an_error(loss, error):
    "What is no scalar tensor is refused, with the name of the loss"
    with pytest.raises(error, match='`MSELoss` returned a loss of'): total_loss(loss, nn.MSELoss(), True)

def test_a_loss_without_gradient():
    "A loss that no parameter decides is an error while training, and none in an evaluation"
    assert total_loss(torch.tensor(1.), None, False)[0] == 1
    with pytest.raises(ValueError, match='`the model` returned does not depend on any parameter'):
        total_loss(torch.tensor(1.), None, True)

@pytest.mark.parametrize('pred', [SimpleNamespace(loss=one), {'loss': one}])
def test_the_models_own_loss(pred):
    "The output's `loss`, as attribute or key, is used where there is no `loss_func`, or it needs targets"
    assert loss_without_targets(state(pred)) is one and loss_without_targets(state(pred, nn.MSELoss())) is one

def test_loss_of_the_prediction_alone():
    "A loss function that can be called without targets is"
    assert loss_without_targets(state(one*4, lambda pred: pred/2)) == 2

def test_emptied_targets_skip_the_loss():
    "Targets that a callback has emptied skip the loss, wherever it would come from"
    assert loss_without_targets(state(SimpleNamespace(loss=one), lambda pred: pred, had=True)) is None

def test_no_loss():
    "Without any loss, training raises and an evaluation goes on"
    assert loss_without_targets(state(one, training=False)) is None
    with pytest.raises(ValueError, match='no loss to train with: the model.s output, a `Tensor`'):
        loss_without_targets(state(one))

@pytest.mark.parametrize('f, takes', [(nn.MSELoss(), False), (lambda p, y=None: p, True), (lambda p: p, True), (max,
                                                                                                                False)])
def test_takes_one(f, takes):
    "Whether a function can be called with one argument is read off its signature"
    assert takes_one(f) == takes
