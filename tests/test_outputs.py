"""Which outputs cannot match which loss."""
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from learner.losses import BCEWithLogitsLossFlat, CrossEntropyLossFlat, MSELossFlat
from learner.outputs import is_regression, misfit

x = torch.linspace(-3, 3, 12).view(4, 3).requires_grad_()*1
classes = (torch.tensor([0, 1, 2, 0]),)

class Weighted(nn.CrossEntropyLoss): "A loss of a user's"


@pytest.mark.parametrize('loss', [F.cross_entropy, partial(F.cross_entropy, reduction='sum'), nn.CrossEntropyLoss(),
                                  CrossEntropyLossFlat(), Weighted()])
@pytest.mark.parametrize('last, word', [(lambda x: x.softmax(1), 'softmax'), (torch.sigmoid, 'sigmoid'),
                                        (torch.relu, 'ReLU'), (torch.tanh, 'tanh'), (F.softplus, 'softplus')])
def test_scores_have_no_bounds(loss, last, word):
    "Cross entropy has a softmax of its own: any other last activation keeps it from certainty"
    assert misfit(loss, last(x), classes) == (f'{word} before the loss', f'no {word} last: the loss has its softmax')

@pytest.mark.parametrize('loss', [F.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss(), BCEWithLogitsLossFlat()])
def test_logits_have_no_bounds(loss):
    "Nor has a binary loss with logits"
    assert misfit(loss, x.sigmoid(), classes) == (
        'sigmoid before the loss', 'no sigmoid last: the loss has its sigmoid')

@pytest.mark.parametrize('view', [lambda t: t.view(2, 6), lambda t: t.squeeze(), lambda t: t[:, :2], lambda t: t.T,
                                  lambda t: t.double(), lambda t: t.unsqueeze(0).clone()])
def test_the_last_activation_is_seen_behind_views(view):
    "What only gives values another shape or type is looked through"
    assert misfit(nn.CrossEntropyLoss(), view(x.sigmoid()), classes)

@pytest.mark.parametrize('loss, pred', [
    (F.cross_entropy, x), (F.cross_entropy, x.log_softmax(1)), (F.cross_entropy, 2*x.sigmoid()),
    (F.cross_entropy, F.leaky_relu(x)), (F.nll_loss, x.log_softmax(1)), (F.nll_loss, x.softmax(1).log()),
    (F.binary_cross_entropy, x.sigmoid()), (lambda pred, y: pred.sum(), x.sigmoid()), (None, x.sigmoid()),
    (F.cross_entropy, dict(out=x.sigmoid())), (F.cross_entropy, torch.ones(2, 3)), (F.cross_entropy, x.detach())])
def test_what_fits_or_is_not_known_is_left_alone(loss, pred):
    "No false alarm"
    assert misfit(loss, pred, classes) is None

@pytest.mark.parametrize('pred, total', [(x*0 + math.log(.5), 1.5), (x*0, 3)])
def test_log_probabilities_sum_to_one(pred, total):
    "`nll_loss` wants logarithms of probabilities, and takes anything"
    assert misfit(F.nll_loss, pred, classes) == (f'probabilities sum to {total:.3g}',
                                                'log_softmax last, or CrossEntropyLoss')

@pytest.mark.parametrize('loss', [F.mse_loss, nn.L1Loss(), nn.SmoothL1Loss(), F.huber_loss, MSELossFlat()])
def test_values_are_within_the_range(loss):
    "Regression: targets outside of what the last activation gives, and none inside"
    pred = x[0, :2]
    def targets(*values): return (torch.tensor(values),)

    assert misfit(loss, pred.sigmoid(), targets(0., 5)) == (
        'sigmoid: 0 to 1; targets 0 to 5', 'no sigmoid last, or scale the targets')
    assert misfit(loss, pred.sigmoid(), targets(0., 1)) is None and misfit(loss, pred, targets(0., 5)) is None
    assert misfit(loss, pred.relu(), targets(-1., 1)) and misfit(loss, pred.relu(), targets(0., 9)) is None
    assert misfit(loss, pred.relu(), ()) is None and is_regression(loss) and not is_regression(F.cross_entropy)

def test_shapes_are_the_same():
    "A column against a row is broadcast to a matrix; losses that flatten do not mind"
    pred, y = x[:, :1], (torch.zeros(4),)

    assert misfit(nn.MSELoss(), pred, y) == ('[4, 1] against [4]', 'one shape for both, or MSELossFlat')
    assert misfit(MSELossFlat(), pred, y) is None and misfit(nn.MSELoss(), pred[:, 0], y) is None
