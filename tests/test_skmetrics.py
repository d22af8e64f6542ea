"""scikit-learn's metrics: its values for any split into batches, fastai's names, an error where the library lacks."""
import inspect
import pickle
import sys
from copy import deepcopy

import numpy as np
import pytest
import sklearn.metrics as skm
from fastcore.docments import docments
from scipy import stats

from learner import skmetrics
from learner.measure import AccumMetric, mk_metric
from learner.skmetrics import (APScoreBinary, APScoreMulti, BalancedAccuracy, BrierScore, BrierScoreMulti, CohenKappa,
                               ExplainedVariance, F1Score, F1ScoreMulti, FBeta, FBetaMulti, HammingLoss,
                               HammingLossMulti, Jaccard, JaccardMulti, MatthewsCorrCoef, MatthewsCorrCoefMulti,
                               PearsonCorrCoef, Precision, PrecisionMulti, R2Score, Recall, RecallMulti, RocAuc,
                               RocAucBinary, RocAucMulti, SpearmanCorrCoef, skm_to_fastai)
from tests.metric_helpers import classes, measure, scores, splits

makers = [getattr(skmetrics, n) for n in skmetrics.__all__ if n != 'skm_to_fastai']


def guess(p): return p.argmax(1)
def probs(p): return p.softmax(1).numpy()
def prob(p): return p.softmax(1)[:, 1].numpy()
def labels(p): return (p.sigmoid() >= .5).numpy()


@pytest.mark.parametrize('split', splits)
@pytest.mark.parametrize('metric, expected', [
    (F1Score(), lambda t, p: skm.f1_score(t, guess(p))), (FBeta(2), lambda t, p: skm.fbeta_score(t, guess(p), beta=2)),
    (Precision(), lambda t, p: skm.precision_score(t, guess(p))),
    (Recall(), lambda t, p: skm.recall_score(t, guess(p))), (Jaccard(), lambda t, p: skm.jaccard_score(t, guess(p))),
    (HammingLoss(), lambda t, p: skm.hamming_loss(t, guess(p))),
    (F1Score(pos_label=0), lambda t, p: skm.f1_score(t, guess(p), pos_label=0)),
    (BalancedAccuracy(adjusted=True), lambda t, p: skm.balanced_accuracy_score(t, guess(p), adjusted=True)),
    (MatthewsCorrCoef(), lambda t, p: skm.matthews_corrcoef(t, guess(p))),
    (CohenKappa(), lambda t, p: skm.cohen_kappa_score(t, guess(p))),
    (APScoreBinary(), lambda t, p: skm.average_precision_score(t, prob(p))),
    (RocAucBinary(), lambda t, p: skm.roc_auc_score(t, prob(p))),
    (RocAucBinary(max_fpr=.5), lambda t, p: skm.roc_auc_score(t, prob(p), max_fpr=.5)),
    (BrierScore(), lambda t, p: skm.brier_score_loss(t, prob(p)))])
def test_binary(metric, expected, split):
    "Two scores an item: decisions by argmax, probabilities of class 1 by softmax"
    pred, targ = scores(20, 2), classes(2, 20)

    assert measure(metric, split, pred, targ) == pytest.approx(expected(targ.numpy(), pred), rel=1e-6)


@pytest.mark.parametrize('split', splits)
@pytest.mark.parametrize('metric, expected', [
    (F1Score(average='macro'), lambda t, p: skm.f1_score(t, guess(p), average='macro')),
    (Precision(average='weighted'), lambda t, p: skm.precision_score(t, guess(p), average='weighted')),
    (Recall(average='micro', labels=[0, 2]),
     lambda t, p: skm.recall_score(t, guess(p), average='micro', labels=[0, 2])),
    (BalancedAccuracy(), lambda t, p: skm.balanced_accuracy_score(t, guess(p))),
    (CohenKappa(weights='quadratic'), lambda t, p: skm.cohen_kappa_score(t, guess(p), weights='quadratic')),
    (MatthewsCorrCoef(), lambda t, p: skm.matthews_corrcoef(t, guess(p))),
    (RocAuc(), lambda t, p: skm.roc_auc_score(t, probs(p), multi_class='ovr')),
    (RocAuc(multi_class='ovo', average='weighted'),
     lambda t, p: skm.roc_auc_score(t, probs(p), multi_class='ovo', average='weighted')),
    (BrierScore(), lambda t, p: ((probs(p)-np.eye(3)[t])**2).sum(1).mean()),
    (F1Score(average='macro', sample_weight=np.arange(20)),
     lambda t, p: skm.f1_score(t, guess(p), average='macro', sample_weight=np.arange(20)))])
def test_multiclass(metric, expected, split):
    "Three scores an item, and arguments other than the defaults"
    pred, targ = scores(20, 3), classes(3, 20)

    assert measure(metric, split, pred, targ) == pytest.approx(expected(targ.numpy(), pred), rel=1e-6)


@pytest.mark.parametrize('split', splits)
@pytest.mark.parametrize('metric, expected', [
    (F1ScoreMulti(), lambda t, p: skm.f1_score(t, labels(p), average='macro')),
    (FBetaMulti(.5), lambda t, p: skm.fbeta_score(t, labels(p), beta=.5, average='macro')),
    (PrecisionMulti(average='samples', thresh=.2),
     lambda t, p: skm.precision_score(t, p.sigmoid() >= .2, average='samples', zero_division=0)),
    (RecallMulti(thresh=0, sigmoid=False), lambda t, p: skm.recall_score(t, p >= 0, average='macro')),
    (JaccardMulti(average='micro'), lambda t, p: skm.jaccard_score(t, labels(p), average='micro')),
    (HammingLossMulti(), lambda t, p: skm.hamming_loss(t, labels(p))),
    (MatthewsCorrCoefMulti(), lambda t, p: skm.matthews_corrcoef(t.ravel(), labels(p).ravel())),
    (APScoreMulti(), lambda t, p: skm.average_precision_score(t, p)),
    (RocAucMulti(), lambda t, p: skm.roc_auc_score(t, p)),
    (RocAucMulti(sigmoid=False, average='micro'), lambda t, p: skm.roc_auc_score(t, p, average='micro')),
    (BrierScoreMulti(), lambda t, p: ((p.sigmoid().numpy()-t)**2).mean())])
@pytest.mark.filterwarnings('ignore:.*no predicted labels:sklearn.exceptions.UndefinedMetricWarning')
def test_multilabel(metric, expected, split):
    "One score a label: decisions by the threshold, 0 included, probabilities by the sigmoid unless told otherwise"
    pred, targ = scores(20, 3), classes(2, 20, 3)

    assert measure(metric, split, pred, targ) == pytest.approx(expected(targ.numpy(), pred), rel=1e-6)


@pytest.mark.parametrize('split', splits)
@pytest.mark.parametrize('metric, expected', [
    (R2Score(), skm.r2_score), (ExplainedVariance(), skm.explained_variance_score),
    (PearsonCorrCoef(), lambda t, p: stats.pearsonr(t, p).statistic),
    (SpearmanCorrCoef(), lambda t, p: stats.spearmanr(t, p).statistic),
    (skm_to_fastai(skm.max_error, is_class=False), skm.max_error)])
def test_values(metric, expected, split):
    "Metrics of values take all elements as one vector"
    pred, targ = scores(20, 2), scores(20, 2)+scores(20, 2, seed=1)

    assert measure(metric, split, pred, targ) == pytest.approx(expected(targ.flatten(), pred.flatten()), rel=1e-6)


@pytest.mark.parametrize('kwargs, axis', [(dict(axis=1), 1), ({}, -1)])
def test_axis(kwargs, axis):
    "Classes may be along any axis; positions are flattened"
    pred, targ = scores(20, 2, 4), classes(2, 20, 4)

    res = measure(F1Score(**kwargs), (20,), pred.movedim(1, axis), targ)

    assert res == pytest.approx(skm.f1_score(targ.ravel(), pred.argmax(1).ravel()))


def test_each_class_a_column():
    "`average=None` gives a column for each class"
    pred, targ = scores(20, 3), classes(3, 20)

    res = measure(Recall(average=None), (20,), pred, targ)

    assert list(res) == ['recall_score_0', 'recall_score_1', 'recall_score_2']
    assert list(res.values()) == pytest.approx(skm.recall_score(targ, guess(pred), average=None))


@pytest.mark.parametrize('make', makers, ids=lambda m: m.__name__)
def test_maker(make):
    "Each can be passed to a learner without being called, knows its direction, and survives a copy and a pickle"
    needs_beta = 'beta' in inspect.signature(make).parameters
    metric = make(1) if needs_beta else mk_metric(make)

    assert isinstance(metric, AccumMetric)
    assert metric.greater_is_better is ('Loss' not in make.__name__ and 'Brier' not in make.__name__)
    assert vars(deepcopy(metric)) == vars(pickle.loads(pickle.dumps(metric))) == vars(metric)


@pytest.mark.parametrize('make', makers, ids=lambda m: m.__name__)
def test_maker_is_documented(make):
    "Each has a docstring and a comment on every parameter, and refuses arguments that it has not"
    assert make.__doc__
    assert [n for n, d in docments(make, returns=False).items() if not d and n != 'self'] == []
    with pytest.raises(TypeError, match='nonsense'): make(nonsense=1)


def test_missing_argument_names_the_metric():
    "FBeta without beta says so"
    with pytest.raises(TypeError, match=r"FBeta\(\) missing 1 required positional argument: 'beta'"): mk_metric(FBeta)


@pytest.mark.parametrize('func, better', [(skm.accuracy_score, True), (skm.log_loss, False), (skm.max_error, False),
                                          (skm.mean_poisson_deviance, False), (skm.confusion_matrix, None)])
def test_direction_by_name(func, better):
    "Functions of scikit-learn are better when greater or smaller as their names say; others stay unknown"
    def my_score(t, p): return 0.

    assert skm_to_fastai(func).greater_is_better is better
    assert skm_to_fastai(my_score).greater_is_better is None


@pytest.mark.parametrize('make, lib, pip', [
    (F1Score, 'sklearn.metrics', 'scikit-learn'), (R2Score, 'sklearn.metrics', 'scikit-learn'),
    (PearsonCorrCoef, 'scipy.stats', 'scipy'), (SpearmanCorrCoef, 'scipy.stats', 'scipy')])
def test_missing_library(make, lib, pip, monkeypatch):
    "Without the library the metric fails when it is made, saying what to install"
    monkeypatch.setitem(sys.modules, lib, None)

    with pytest.raises(ImportError, match=f"`{make.__name__}` needs `{lib}`: pip install {pip}$"): make()


def test_names():
    "Columns have scikit-learn's names"
    assert [m.name for m in (F1Score(), RocAucMulti(), PearsonCorrCoef())] == ['f1_score', 'roc_auc_score', 'pearsonr']


def test_bfloat16():
    "Half-precision scores are measured as their single-precision values"
    pred, targ = scores(20, 3).bfloat16(), classes(3, 20)

    assert measure(RocAuc(), (20,), pred, targ) == measure(RocAuc(), (20,), pred.float(), targ)
