"""torchmetrics objects as metrics: its values for any split into batches, single, several, collections and classes."""
import pickle
from copy import deepcopy

import pytest
import torch

from learner.metrics import TorchMetric, mk_metric, mk_metrics
from tests.metric_helpers import batch, classes, measure, scores, splits

tm = pytest.importorskip('torchmetrics')
tmc = pytest.importorskip('torchmetrics.classification')


@pytest.mark.parametrize('split', splits)
@pytest.mark.parametrize('make', [
    lambda: tmc.MulticlassAccuracy(3, average='micro'), lambda: tmc.MulticlassF1Score(3),
    lambda: tmc.MulticlassAUROC(3), lambda: tm.Accuracy(task='multiclass', num_classes=3)])
def test_value(make, split):
    "The value is what torchmetrics gives for all items at once"
    pred, targ = scores(20, 3).softmax(1), classes(3, 20)  # of scores torchmetrics would guess batch by batch

    assert measure(make(), split, pred, targ) == pytest.approx(make()(pred, targ).item(), rel=1e-6)


@pytest.mark.parametrize('make, name, better', [
    (lambda: tmc.MulticlassF1Score(3), 'multiclass_f1_score', True), (tm.MeanSquaredError, 'mean_squared_error', False),
    (tmc.BinaryAUROC, 'binary_auroc', True),
    (lambda: tm.MetricCollection([tm.MeanAbsoluteError()]), 'metric_collection', None)])
def test_name_and_direction(make, name, better):
    "The name is the class's in snake case, the direction what torchmetrics declares"
    metric = mk_metric(make())

    assert (type(metric), metric.name, metric.greater_is_better) == (TorchMetric, name, better)


@pytest.mark.parametrize('split', splits)
def test_collection(split):
    "A collection gives a column for each of its metrics, and one for each class where a metric does not average"
    ms = tm.MetricCollection({'acc': tmc.MulticlassAccuracy(3, average='micro'),
                              'rec': tmc.MulticlassRecall(3, average=None)})
    pred, targ = scores(20, 3), classes(3, 20)

    res = measure(ms, split, pred, targ)

    expected = ms.clone()(pred, targ)
    assert list(res) == ['acc', 'rec_0', 'rec_1', 'rec_2']
    assert list(res.values()) == pytest.approx([expected['acc'].item(), *expected['rec'].tolist()])


def test_one_alone():
    "A single object is one metric, although torchmetrics objects and collections look like sequences"
    mse, mae = tm.MeanSquaredError, tm.MeanAbsoluteError

    assert [m.name for m in mk_metrics(mse())] == ['mean_squared_error']
    assert [m.name for m in mk_metrics(tm.MetricCollection([mse()]))] == ['metric_collection']
    assert [m.name for m in mk_metrics([mse, mae()])] == ['mean_squared_error', 'mean_absolute_error']


@pytest.mark.parametrize('make', [lambda: tmc.MulticlassAUROC(3),
                                  lambda: tm.MetricCollection([tmc.MulticlassAccuracy(3)])])
@pytest.mark.parametrize('copied', [deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=['deepcopy', 'pickle'])
def test_copies(make, copied):
    "A copy holds what was seen and goes on by itself"
    metric = mk_metric(make())
    metric.accumulate(batch(scores(20, 3), classes(3, 20)))

    twin = copied(metric)
    value = metric.value
    metric.reset()

    assert twin.value == value


def test_reset_and_no_graph():
    "A reset forgets; nothing seen is NaN without a warning; no graph is kept"
    metric = mk_metric(tmc.BinaryAUROC())
    assert metric.value != metric.value

    metric.accumulate(batch(scores(20).requires_grad_().sigmoid(), classes(2, 20)))
    assert not any(t.requires_grad for t in metric.metric.preds)
    metric.reset()

    assert metric.value != metric.value


def test_curves_are_refused():
    "A metric whose result is no column, such as a confusion matrix, says so"
    with pytest.raises(TypeError, match="the value of metric `multiclass_confusion_matrix` is int64"):
        measure(tmc.MulticlassConfusionMatrix(3), (20,), scores(20, 3), classes(3, 20))


def test_moves_to_the_predictions():
    "The metric's state follows the predictions' device"
    metric = mk_metric(tm.MeanSquaredError())
    pred = torch.zeros(4, device='meta')

    metric.accumulate(batch(pred, pred))

    assert metric.metric.sum_squared_error.device.type == 'meta'
