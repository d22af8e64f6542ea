"""Losses: equal to torch's functions or the paper's formula for any axis and reduction; what predictions mean."""
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from learner.losses import (BCEWithLogitsLossFlat, CrossEntropyLossFlat, DiceLoss, FocalLossFlat, L1LossFlat,
                            LabelSmoothingCrossEntropy, LabelSmoothingCrossEntropyFlat, MSELossFlat, loss_activation,
                            loss_decodes)

gen = torch.Generator().manual_seed(0)
scores, targs = torch.randn(4, 3, 5, generator=gen), torch.randint(3, (4, 5), generator=gen)  # classes along axis 1
weight = torch.tensor([1., 2, .5])
reductions = ['mean', 'sum', 'none']


def focal(pred, targ, gamma=2., weight=None, reduction='mean'):
    "The formula, position by position"
    p = pred.softmax(1).gather(1, targ[:, None])[:, 0]
    alpha = 1 if weight is None else weight[targ]
    loss = -alpha*(1-p)**gamma*p.log()
    return loss if reduction == 'none' else getattr(loss, reduction)()


def dice(pred, targ, reduction='sum', square=False):
    "The formula, item by item and class by class"
    p = pred.softmax(1)
    loss = torch.stack([torch.stack([
        1 - (2*p[i, c][targ[i] == c].sum()+1e-6)/((p[i, c]**2 if square else p[i, c]).sum()+(targ[i] == c).sum()+1e-6)
        for c in range(pred.shape[1])]) for i in range(len(pred))])
    return loss if reduction == 'none' else getattr(loss, reduction)()


@pytest.mark.parametrize('reduction', reductions)
@pytest.mark.parametrize('loss, expected', [
    (CrossEntropyLossFlat, F.cross_entropy),
    (partial(CrossEntropyLossFlat, weight), partial(F.cross_entropy, weight=weight)),
    (partial(CrossEntropyLossFlat, ignore_index=1), partial(F.cross_entropy, ignore_index=1)),
    (LabelSmoothingCrossEntropyFlat, partial(F.cross_entropy, label_smoothing=.1)),
    (partial(LabelSmoothingCrossEntropyFlat, .3, weight), partial(F.cross_entropy, label_smoothing=.3, weight=weight)),
    (FocalLossFlat, focal), (partial(FocalLossFlat, gamma=.5, weight=weight), partial(focal, gamma=.5, weight=weight)),
    (partial(FocalLossFlat, gamma=0), F.cross_entropy)])
@pytest.mark.parametrize('flatten', [True, False])
def test_class_losses(loss, expected, reduction, flatten):
    "Whatever the class axis and flattened or not, the loss is torch's, or the formula's"
    wanted = expected(scores, targs, reduction=reduction)

    torch.testing.assert_close(loss(reduction=reduction, flatten=flatten, axis=1)(scores, targs), wanted)
    torch.testing.assert_close(loss(reduction=reduction, flatten=flatten)(scores.movedim(1, -1), targs), wanted)


@pytest.mark.parametrize('dtype', [torch.uint8, torch.int32, torch.int8, torch.int64])
@pytest.mark.parametrize('loss', [CrossEntropyLossFlat(axis=1), FocalLossFlat(axis=1), LabelSmoothingCrossEntropy(),
                                  DiceLoss()])
def test_targets_of_any_integer_type(loss, dtype):
    "Indices may be of any integer type, such as a mask's uint8"
    assert torch.equal(loss(scores, targs.to(dtype)), loss(scores, targs))


@pytest.mark.parametrize('flatten', [True, False])
@pytest.mark.parametrize('reduction', reductions)
def test_class_probabilities_as_targets(flatten, reduction):
    "Soft targets in the shape of the predictions are taken as torch takes them"
    soft = scores.flip(0).softmax(1)

    loss = CrossEntropyLossFlat(flatten=flatten, reduction=reduction)

    expected = F.cross_entropy(scores, soft, reduction=reduction)
    torch.testing.assert_close(loss(scores.movedim(1, -1), soft.movedim(1, -1)), expected)


@pytest.mark.parametrize('loss', [CrossEntropyLossFlat(), FocalLossFlat()])
def test_wrong_axis(loss):
    "Targets that do not fit the class axis are an error that names the loss, the shapes and the axis"
    match = r"`pred` \(4, 3, 5\) has 5 classes along axis -1 for 12 targets, but `targ` is \(4, 5\)"
    with pytest.raises(ValueError, match=f"{type(loss).__name__}: {match}"): loss(scores, targs)


def test_label_smoothing_definition():
    "A share `eps` of each target is spread over all classes"
    smooth = F.one_hot(targs, 3).movedim(-1, 1)*.9 + .1/3

    expected = -(smooth*scores.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(LabelSmoothingCrossEntropy()(scores, targs), expected)


@pytest.mark.parametrize('weight', [None, weight])
def test_focal_ignores(weight):
    "Positions of the ignored index do not count, not even in the mean"
    some = targs.clone()
    some[0] = 255

    loss = FocalLossFlat(weight=weight, ignore_index=255, axis=1)(scores, some)

    torch.testing.assert_close(loss, focal(scores[1:], targs[1:], weight=weight))


def test_focal_takes_indices_only():
    "Class probabilities as targets are refused"
    with pytest.raises(TypeError, match="targets are class indices, not float32"):
        FocalLossFlat()(scores, scores.softmax(-1))


@pytest.mark.parametrize('reduction', reductions)
@pytest.mark.parametrize('loss, expected', [
    (MSELossFlat, F.mse_loss), (L1LossFlat, F.l1_loss), (BCEWithLogitsLossFlat, F.binary_cross_entropy_with_logits),
    (partial(BCEWithLogitsLossFlat, pos_weight=weight[:, None]),
     partial(F.binary_cross_entropy_with_logits, pos_weight=weight[:, None])),
    (partial(BCEWithLogitsLossFlat, weight[:, None]),
     partial(F.binary_cross_entropy_with_logits, weight=weight[:, None]))])
def test_element_losses(loss, expected, reduction):
    "Targets of any type and of any shape with as many elements are compared element by element, never broadcast"
    targ = torch.randint(2, (4, 15), generator=gen)

    res = loss(reduction=reduction)(scores, targ)

    torch.testing.assert_close(res, expected(scores, targ.view(4, 3, 5).float(), reduction=reduction))


@pytest.mark.parametrize('loss', [MSELossFlat(), L1LossFlat(), BCEWithLogitsLossFlat()])
def test_element_losses_types(loss):
    "Double targets do not make the loss double, half-precision predictions are compared in single precision"
    pred, targ = scores.flatten()[:, None], (scores.flatten() > 0).double()

    assert loss(pred, targ).dtype == loss(pred.half(), targ).dtype == torch.float32
    assert torch.equal(loss(pred.bfloat16(), targ), loss(pred.bfloat16().float(), targ))


@pytest.mark.parametrize('loss', [MSELossFlat(), L1LossFlat(), BCEWithLogitsLossFlat()])
def test_element_losses_refuse_other_sizes(loss):
    "Differing numbers of elements are an error that shows both"
    with pytest.raises(ValueError, match=r"predictions float32\[4, 3, 5\] and targets int64\[4, 5\]"):
        loss(scores, targs)


def test_unflattened_values_broadcast():
    "`flatten=False` compares as torch does, warning included"
    with pytest.warns(UserWarning, match='target size'):
        loss = MSELossFlat(flatten=False)(torch.ones(2, 3), torch.zeros(1, 3))

    assert loss == 1


@pytest.mark.parametrize('reduction', reductions)
@pytest.mark.parametrize('square', [False, True])
@pytest.mark.parametrize('axis', [1, -1])
def test_dice_loss(reduction, square, axis):
    "One minus the overlap of each item and class"
    loss = DiceLoss(axis=axis, reduction=reduction, square_in_union=square)(scores.movedim(1, axis), targs)

    torch.testing.assert_close(loss, dice(scores, targs, reduction, square))


def test_dice_loss_edges():
    "Images of any dimension; perfect predictions lose nothing; an index that is no class belongs to none"
    targ = torch.randint(2, (3, 4, 4), generator=gen)
    sure = F.one_hot(targ, 2).movedim(-1, 1)*200.-100

    assert DiceLoss()(sure, targ).item() == pytest.approx(0, abs=1e-5)
    assert DiceLoss(reduction='none')(sure, torch.full_like(targ, 255)).min() > .999
    with pytest.raises(ValueError, match=r"`pred` \(3, 2, 4, 4\) without its class axis 1 is \(3, 4, 4\), but `targ`"):
        DiceLoss()(sure, targ[:, None])


losses = [CrossEntropyLossFlat(weight), LabelSmoothingCrossEntropyFlat(), LabelSmoothingCrossEntropy(), FocalLossFlat(),
          BCEWithLogitsLossFlat(thresh=.3), MSELossFlat(), L1LossFlat(), DiceLoss()]


@pytest.mark.parametrize('loss', losses, ids=lambda o: type(o).__name__)
def test_losses_are_modules(loss):
    "Each pickles, has no parameters, and its reduction can be changed at any time"
    twin = pickle.loads(pickle.dumps(loss))
    pred = torch.randn(6, 3, generator=gen)
    of_values = isinstance(loss, (MSELossFlat, L1LossFlat, BCEWithLogitsLossFlat))
    targ = pred*2 if of_values else torch.tensor([0, 1, 2, 0, 1, 2])

    assert torch.equal(twin(pred, targ), loss(pred, targ)) and not list(loss.parameters())
    twin.reduction = 'none'
    assert len(twin(pred, targ)) == 6


p = torch.randn(6, 3, generator=gen)


@pytest.mark.parametrize('loss, activated', [
    *((o, p.softmax(1)) for o in (CrossEntropyLossFlat(), LabelSmoothingCrossEntropyFlat(), FocalLossFlat(), DiceLoss(),
                                  LabelSmoothingCrossEntropy(), nn.CrossEntropyLoss(), F.cross_entropy,
                                  partial(F.cross_entropy, label_smoothing=.1))),
    *((o, p.exp()) for o in (nn.NLLLoss(), F.nll_loss)),
    *((o, p.sigmoid()) for o in (BCEWithLogitsLossFlat(), nn.BCEWithLogitsLoss(), F.binary_cross_entropy_with_logits,
                                 partial(F.binary_cross_entropy_with_logits, reduction='sum'))),
    *((o, p) for o in (MSELossFlat(), L1LossFlat(), nn.MSELoss(), nn.L1Loss(), nn.SmoothL1Loss(), nn.HuberLoss(),
                       nn.BCELoss(), F.binary_cross_entropy, F.mse_loss, partial(F.l1_loss), lambda p, t: p.mean(),
                       None))])
def test_loss_activation(loss, activated):
    "The loss's own activation, that of a plain torch loss, or none"
    act = pickle.loads(pickle.dumps(loss_activation(loss)))

    assert torch.equal(act(p), activated)


@pytest.mark.parametrize('loss, decoded', [
    *((o, p.argmax(1)) for o in (CrossEntropyLossFlat(), DiceLoss(), FocalLossFlat(), nn.CrossEntropyLoss(),
                                 F.cross_entropy, nn.NLLLoss(), F.nll_loss)),
    *((o, p.sigmoid() > .5) for o in (BCEWithLogitsLossFlat(), nn.BCEWithLogitsLoss(), nn.BCELoss(),
                                      partial(F.binary_cross_entropy, reduction='sum'))),
    (BCEWithLogitsLossFlat(thresh=.2), p.sigmoid() > .2),
    *((o, p.sigmoid()) for o in (MSELossFlat(), nn.MSELoss(), F.smooth_l1_loss, None))])
def test_loss_decodes(loss, decoded):
    "What is decided from activated predictions: the class, whether above the threshold, or the value itself"
    activated = p.sigmoid()  # keeps the order of classes

    assert torch.equal(loss_decodes(loss)(activated), decoded)


def test_decodes_follow_the_axis():
    "Activation and decision go along the loss's own axis"
    loss = CrossEntropyLossFlat(axis=1)

    assert torch.equal(loss.activation(scores), scores.softmax(1))
    assert torch.equal(loss.decodes(scores), scores.argmax(1))


def test_an_attribute_named_activation_is_no_function():
    "A loss with a plain attribute of that name is treated by its type"
    loss = nn.BCEWithLogitsLoss()
    loss.activation = 'relu'

    assert torch.equal(loss_activation(loss)(p), p.sigmoid())
