"""Metrics under fastai's names: equal to scikit-learn's for any split into batches, clear about bad input."""
from functools import partial

import numpy as np
import pytest
import sklearn.metrics as skm
import torch
import torch.nn.functional as F

from learner.metrics import (Dice, DiceMulti, JaccardCoeff, JaccardCoeffMulti, accuracy, accuracy_multi, error_rate,
                             exp_rmspe, foreground_acc, mae, mk_metric, mse, msle, perplexity, rmse, top_k_accuracy)
from tests.metric_helpers import batch, classes, measure, scores, splits


def cross_entropy_of(pred, targ): return F.cross_entropy(pred, targ)


@pytest.mark.parametrize('split', splits)
@pytest.mark.parametrize('metric, oracle', [
    (accuracy, lambda p, t: skm.accuracy_score(t, p.argmax(1))),
    (error_rate, lambda p, t: 1-skm.accuracy_score(t, p.argmax(1))),
    (top_k_accuracy, lambda p, t: skm.top_k_accuracy_score(t, p, k=5)),
    (partial(top_k_accuracy, k=2), lambda p, t: skm.top_k_accuracy_score(t, p, k=2)),
    (cross_entropy_of, lambda p, t: skm.log_loss(t, p.double().softmax(1))),
], ids=lambda o: mk_metric(o).name if o in (accuracy, error_rate, top_k_accuracy, cross_entropy_of) else '')
def test_class_metrics(metric, oracle, split):
    "Metrics of classes equal scikit-learn's whatever the batches"
    pred, targ = scores(20, 7), classes(7, 20)

    assert measure(metric, split, pred, targ) == pytest.approx(oracle(pred, targ), rel=1e-6)


@pytest.mark.parametrize('split', splits)
@pytest.mark.parametrize('metric, oracle', [
    (mse, skm.mean_squared_error), (mae, skm.mean_absolute_error), (msle, skm.mean_squared_log_error),
    (rmse, skm.root_mean_squared_error),
    (exp_rmspe, lambda t, p: np.sqrt(np.mean(((np.exp(t)-np.exp(p))/np.exp(t))**2)))])
def test_value_metrics(metric, oracle, split):
    "Metrics of values equal scikit-learn's whatever the batches: the root of the mean, not the mean of roots"
    pred, targ = scores(20, 3).abs(), scores(20, 3, seed=1).abs()
    pred[7:] *= 10

    expected = oracle(targ.flatten().double().numpy(), pred.flatten().double().numpy())

    assert measure(metric, split, pred, targ) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize('metric', [mse, mae, msle, rmse, exp_rmspe])
def test_value_metrics_in_half_precision(metric):
    "Squares of half-precision values do not overflow, and a trailing dimension of 1 does not broadcast"
    pred, targ = torch.tensor([[300.], [2.]], dtype=torch.float16), torch.tensor([1., 2.], dtype=torch.float16)

    res = metric(pred, targ)

    assert res.dtype == torch.float32
    assert torch.equal(res, metric(pred.float()[:, 0], targ.float()))


@pytest.mark.parametrize('thresh, sigmoid', [(.5, True), (.2, True), (.3, False)])
def test_accuracy_multi(thresh, sigmoid):
    "Labels are predicted above the threshold"
    pred, targ = scores(20, 3), classes(2, 20, 3)

    guess = (pred.sigmoid() if sigmoid else pred) > thresh

    expected = skm.accuracy_score(targ.ravel(), guess.ravel())
    assert accuracy_multi(pred, targ, thresh, sigmoid).item() == pytest.approx(expected)


def test_accuracy_ties_and_axis():
    "Ties go to the lowest class; classes may be along any axis, and a target may keep that axis with size 1"
    assert accuracy(torch.zeros(2, 3), torch.tensor([0, 1])) == .5
    last, targ = scores(4, 6, 5), classes(5, 4, 6)
    first = last.movedim(-1, 1)
    assert accuracy(last, targ, axis=-1) == accuracy(first, targ) == accuracy(first, targ[:, None])
    assert top_k_accuracy(last, targ, 2, axis=-1) == top_k_accuracy(first, targ, 2)


@pytest.mark.parametrize('f, pred, targ, message', [
    (accuracy, (4, 6, 5), (4, 6), r"accuracy: `pred` \(4, 6, 5\) gives classes \(4, 5\) along axis 1, but `targ` is"),
    (accuracy, (4,), (4,), r"`pred` \(4,\) has no scores of several classes along axis 1; .* accuracy_multi"),
    (error_rate, (4, 1), (4,), r"error_rate: `pred` \(4, 1\) has no scores of several classes"),
    (top_k_accuracy, (4, 6), (5,), r"top_k_accuracy: .* but `targ` is \(5,\)"),
    (foreground_acc, (4, 6, 8), (4, 9), r"foreground_acc: .* but `targ` is \(4, 9\)"),
    (rmse, (4, 1), (5,), r"^rmse: predictions float32\[4, 1\] and targets float32\[5\]"),
    (accuracy_multi, (4, 2), (4,), r"accuracy_multi: predictions float32\[4, 2\]")])
def test_shapes_that_do_not_match(f, pred, targ, message):
    "The error names the metric and both shapes"
    with pytest.raises(ValueError, match=message): f(torch.zeros(pred), torch.zeros(targ))


@pytest.mark.parametrize('split', splits)
@pytest.mark.parametrize('bkg', [0, 2])
def test_foreground_acc(split, bkg):
    "Each foreground position counts alike, however they are spread over batches, some of which have none"
    pred, targ = scores(20, 3, 4, 4), classes(3, 20, 4, 4)
    targ[:6] = bkg
    seen = targ != bkg

    expected = (pred.argmax(1)[seen] == targ[seen]).double().mean()

    assert measure(partial(foreground_acc, bkg_idx=bkg), split, pred, targ) == pytest.approx(expected.item())
    assert foreground_acc(pred, targ[:, None], bkg).item() == pytest.approx(expected.item())
    assert foreground_acc(pred[:6], targ[:6], bkg).isnan()


@pytest.mark.parametrize('split', splits)
@pytest.mark.parametrize('metric, n, oracle', [
    (Dice, 2, skm.f1_score), (JaccardCoeff, 2, skm.jaccard_score),
    (DiceMulti, 4, partial(skm.f1_score, average='macro')),
    (JaccardCoeffMulti, 4, partial(skm.jaccard_score, average='macro'))])
def test_overlap(metric, n, oracle, split):
    "Dice is the F1 score, Jaccard the Jaccard score of all positions; a class that is nowhere is left out of the mean"
    pred, targ = scores(20, n+(n > 2), 3, 3), classes(n, 20, 3, 3)
    if n > 2: pred[:, n] = -9

    expected = oracle(targ.ravel(), pred.argmax(1).ravel())

    assert measure(metric, split, pred, targ) == pytest.approx(expected, rel=1e-12)
    assert measure(metric(axis=-1), split, pred.movedim(1, -1), targ) == pytest.approx(expected, rel=1e-12)


def test_overlap_targets_outside_the_classes():
    "Positions whose target is no class are in no class's target"
    pred, targ = torch.eye(3)[[0, 0, 1, 2]].T[None], torch.tensor([[0, 255, 1, -100]])

    assert measure(DiceMulti, (1,), pred, targ) == pytest.approx((2/3 + 1 + 0)/3)


@pytest.mark.parametrize('metric, hint', [(Dice, 'DiceMulti'), (JaccardCoeff, 'JaccardCoeffMulti')])
def test_overlap_of_two_classes_only(metric, hint):
    "Three classes are refused, naming what takes them"
    with pytest.raises(ValueError, match=f"has 3 classes along axis 1, two are needed; use {hint}"):
        measure(metric, (2,), torch.zeros(2, 3, 4), torch.zeros(2, 4))


def test_perplexity():
    "Perplexity is the exponential of the mean loss; `perplexity` is the class itself, so that learners share nothing"
    metric = perplexity()
    for n, loss in [(1, 2.), (3, 4.)]: metric.accumulate(batch(None, torch.zeros(n), loss=torch.tensor(loss)))

    assert (metric.name, metric.value) == ('perplexity', pytest.approx(np.exp(3.5)))
    assert mk_metric(perplexity) is not mk_metric(perplexity)


def test_perplexity_of_a_diverged_loss():
    "An exponential beyond the largest float is infinite, not an error"
    metric = perplexity()
    metric.accumulate(batch(None, torch.zeros(1), loss=torch.tensor(1e4)))

    assert metric.value == float('inf')


@pytest.mark.parametrize('better, metrics', [
    (True, [accuracy, top_k_accuracy, accuracy_multi, foreground_acc, Dice, DiceMulti, JaccardCoeff,
            JaccardCoeffMulti]),
    (False, [error_rate, mse, mae, msle, rmse, exp_rmspe, perplexity])])
def test_directions(better, metrics):
    "Each metric declares which way is better, also inside a partial"
    assert {mk_metric(m).greater_is_better for m in metrics} == {better}
    assert {mk_metric(partial(m)).greater_is_better for m in metrics if not isinstance(m, type)} == {better}
