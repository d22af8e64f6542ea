"""The metric protocol: what is passed as a metric is averaged exactly, named sensibly, never waits for the device."""
import math
import pickle
from copy import deepcopy
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fastcore.foundation import L
from torch import nn

from learner.metrics import (AccumMetric, AvgLoss, AvgMetric, Dice, DiceMulti, JaccardCoeffMulti, Metric, TorchMetric,
                             ValueMetric, accuracy, foreground_acc, mk_metric, mk_metrics, mse, rmse, top_k_accuracy)
from tests.metric_helpers import Stream, batch, classes, measure, median_gap, scores


def per_item(pred, targ): return (pred-targ).abs()
def both(pred, targ): return {'low': pred.min(), 'err': (pred-targ).abs().mean()}
def as_float(pred, targ): return float((pred-targ).abs().mean())
def nothing(pred, targ): pass
def word(pred, targ): return 'x'


def test_batches_weigh_by_items():
    "A batch of 3 counts three times as much as a batch of 1"
    assert measure(lambda p, t: p.mean(), (3, 1), torch.tensor([1., 1, 1, 5]), torch.zeros(4)) == 2


def test_dict_gives_columns():
    "A dict of numbers is averaged column by column"
    pred, targ = scores(20), scores(20, seed=1)

    res = measure(both, (7, 13), pred, targ)

    low = (7*pred[:7].min() + 13*pred[7:].min())/20
    assert res == pytest.approx({'low': low.item(), 'err': (pred-targ).abs().mean().item()})


@pytest.mark.parametrize('result', [.5, 1, np.float32(.5), True, np.bool_(True), torch.tensor(2), torch.tensor(True)])
def test_numbers_of_any_kind(result):
    "Python's, NumPy's and torch's numbers are taken"
    assert measure(lambda p, t: result, (1, 3), torch.zeros(4), torch.zeros(4)) == float(result)


@pytest.mark.parametrize('f, what', [(per_item, r'float32\[4\]'), (lambda p, t: {'a': p}, r'float32\[4\]'),
                                     (lambda p, t: [1.], r'\[float\]'), (nothing, 'NoneType'), (word, 'str')])
def test_other_results_are_refused(f, what):
    "What is no number is refused, naming metric and result"
    name = mk_metric(f).name

    with pytest.raises(TypeError, match=f"metric `{name}` returned {what}.*take a mean, or use AccumMetric"):
        measure(f, (4,), torch.zeros(4), torch.zeros(4))


@pytest.mark.parametrize('metric', [accuracy, partial(top_k_accuracy, k=1), foreground_acc, AvgLoss, Dice,
                                    JaccardCoeffMulti, AccumMetric(median_gap, 1), TorchMetric(Stream())])
def test_nothing_seen(metric):
    "Without a batch, and again after a reset, the value is NaN and no warning escapes"
    metric = mk_metric(metric)
    assert math.isnan(metric.value)

    metric.accumulate(batch(scores(4, 2), classes(2, 4), loss=torch.tensor(1.)))
    metric.reset()

    assert math.isnan(metric.value)


def test_empty_batch_changes_nothing():
    "A batch of no items, whose mean is NaN, does not make the whole NaN"
    assert measure(mse, (2, 0), torch.ones(2), torch.zeros(2)) == 1


def test_sums_are_exact():
    "Means over very many batches do not drift, since they are added in double precision"
    metric, b = AvgMetric(lambda p, t: p.mean()), batch(torch.full((1,), .1), torch.zeros(1))
    for _ in range(3000): metric.accumulate(b)

    assert metric.value == pytest.approx(float(torch.tensor(.1)), rel=1e-14)


def test_loss_metric():
    "AvgLoss is the mean over items; no loss is skipped, an unreduced one averaged"
    metric = AvgLoss()
    for n, loss in [(1, torch.tensor(2.)), (3, torch.tensor([3., 4., 5.])), (5, None)]:
        metric.accumulate(batch(None, torch.zeros(n), loss=loss))

    assert (metric.name, metric.value, metric.greater_is_better) == ('loss', 3.5, False)


def test_no_targets():
    "A function of the predictions alone is weighed by the inputs"
    metric = mk_metric(lambda pred: pred.mean())
    for x in (torch.ones(3), torch.full((1,), 5.)): metric.accumulate(SimpleNamespace(pred=x, yb=(), xb={'a': x}))

    assert metric.value == 2


@pytest.mark.parametrize('metric', [accuracy, rmse, foreground_acc, both, DiceMulti, AvgLoss,
                                    AccumMetric(median_gap, 1)])
def test_accumulate_reads_no_value(metric):
    "Nothing waits for the device: even tensors without data can be accumulated"
    metric = mk_metric(metric)
    pred, targ = torch.zeros(4, 3, device='meta'), torch.zeros(4, device='meta', dtype=torch.long)

    metric.accumulate(batch(pred[:, 0] if metric.name in ('rmse', 'both') else pred, targ, loss=pred.sum()))

    with pytest.raises((RuntimeError, NotImplementedError), match='meta'): metric.value  # reading does wait


@pytest.mark.parametrize('metric', [mse, both, AccumMetric(median_gap), TorchMetric(Stream())])
def test_no_graph_is_kept(metric):
    "The graph of a training batch is free as soon as the batch is over"
    metric = mk_metric(metric)
    pred = torch.zeros(4, requires_grad=True)*2
    metric.accumulate(batch(pred, torch.zeros(4)))

    state = vars(getattr(metric, 'metric', metric)).values()  # of a stream its own
    kept = [t for v in state if isinstance(v, (dict, list)) for t in (v.values() if isinstance(v, dict) else v)]

    assert {t.requires_grad for t in kept if isinstance(t, torch.Tensor)} == {False}


def test_module_follows_the_predictions():
    "A module used as a metric is moved to the predictions' device at the first batch"
    metric, stream = mk_metric(nn.CrossEntropyLoss(weight=torch.ones(3))), Stream()
    pred, targ = torch.zeros(4, 3, device='meta'), torch.zeros(4, device='meta', dtype=torch.long)

    for m in (metric, mk_metric(stream)): m.accumulate(batch(pred, targ))

    assert metric.func.weight.device == stream.device == torch.device('meta')


class Mine(Metric):
    "A metric as a user writes it"
    def reset(self): self.n = 0
    def accumulate(self, learn): self.n += len(learn.pred)
    @property
    def value(self): return float(self.n)


class HingeMargin(nn.Module):
    def forward(self, pred, targ): return (pred-targ).mean()


@pytest.mark.parametrize('m, kind, name', [
    (accuracy, AvgMetric, 'accuracy'), (partial(accuracy, axis=-1), AvgMetric, 'accuracy'),
    (lambda p, t: 0., AvgMetric, 'metric'), (partial(lambda p, t, k: 0., k=1), AvgMetric, 'metric'),
    (torch.dist, AvgMetric, 'dist'), (HingeMargin(), AvgMetric, 'hinge_margin'),
    (HingeMargin, AvgMetric, 'hinge_margin'), (partial(HingeMargin()), AvgMetric, 'hinge_margin'),
    (nn.BCEWithLogitsLoss(), AvgMetric, 'bce_with_logits_loss'),
    (Mine, Mine, 'mine'), (Mine(), Mine, 'mine'), (Dice, Dice, 'dice'), (Stream(), TorchMetric, 'stream'),
    (Stream, TorchMetric, 'stream'), (AccumMetric(median_gap, name='gap'), AccumMetric, 'gap')])
def test_mk_metric(m, kind, name):
    "Functions, partials, lambdas, modules, streams, metrics and classes of these become metrics with sensible names"
    metric = mk_metric(m)

    assert (type(metric), metric.name) == (kind, name)


@pytest.mark.parametrize('m', ['accuracy', 3, None, dict, [accuracy]], ids=['name', 'number', 'None', 'dict', 'list'])
def test_mk_metric_refuses(m):
    "What is no metric is refused, naming it and what is accepted"
    with pytest.raises(TypeError, match="is no metric: pass a Metric, a function of"): mk_metric(m)


def test_metric_needs_its_parts():
    "A metric without `accumulate` fails when it is made, not when training is over"
    class Half(Metric):
        def reset(self): pass
        value = 0.
    with pytest.raises(TypeError, match='accumulate'): mk_metric(Half)


def test_metric_is_itself_and_functions_are_not_shared():
    "A Metric is used as it is; a function gives each learner a metric of its own"
    mine = Mine()

    assert mk_metric(mine) is mine
    assert mk_metric(rmse) is not mk_metric(rmse)


@pytest.mark.parametrize('ms, names', [
    (None, []), (accuracy, ['accuracy']), ([accuracy, rmse], ['accuracy', 'rmse']), (L(mse, Mine), ['mse', 'mine']),
    (Stream(), ['stream']), (nn.Sequential(HingeMargin()), ['sequential']),
    ([accuracy, partial(accuracy, axis=-1)], ['accuracy', 'accuracy(axis=-1)']),
    ([partial(top_k_accuracy, k=k, axis=1) for k in (2, 3)], ['top_k_accuracy(k=2)', 'top_k_accuracy(k=3)']),
    ([AccumMetric(median_gap, thresh=t) for t in (None, .5)], ['median_gap', 'median_gap(thresh=0.5)']),
    ([AccumMetric(median_gap, q=q) for q in (1, 2, 2)], ['median_gap(q=1)', 'median_gap(q=2)', 'median_gap(q=2)_2']),
    ([lambda p, t: 0., lambda p, t: 1., mse], ['metric', 'metric_2', 'mse'])])
def test_mk_metrics(ms, names):
    "One metric or several, each with a name of its own; keywords are named only where they tell metrics apart"
    metrics = mk_metrics(ms)

    assert [m.name for m in metrics] == names
    assert [m.name for m in mk_metrics(metrics)] == names


def test_stream():
    "A stream is reset, fed and computed, tells its direction, and may give several columns"
    metric = mk_metric(Stream(lambda n: {'n': torch.tensor(n), 'twice': 2*n}))

    assert metric.greater_is_better is False
    assert measure(metric, (3, 1), scores(4), scores(4)) == {'n': 4., 'twice': 8.}


def test_value_metric():
    "ValueMetric reads a number that others keep"
    box = [1.]
    metric = ValueMetric(partial(box.__getitem__, 0), 'kept')
    metric.reset()
    metric.accumulate(batch(scores(4), scores(4)))
    box[0] = 2

    assert (metric.name, metric.value, metric.greater_is_better) == ('kept', 2., None)


@pytest.mark.parametrize('metric', [
    accuracy, partial(foreground_acc, bkg_idx=1), HingeMargin(), Mine, DiceMulti, AvgLoss, ValueMetric(dict),
    AccumMetric(median_gap, 1, activation='softmax', flatten=False)])
@pytest.mark.parametrize('copied', [deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=['deepcopy', 'pickle'])
def test_copies(metric, copied):
    "Copies hold what was seen so far, and go on by themselves"
    metric = mk_metric(metric)
    metric.reset()
    b = batch(scores(4, 3), classes(3, 4), loss=torch.tensor(2.))
    if metric.name in ('hinge_margin', 'median_gap'): b.yb = (b.pred+1,)
    metric.accumulate(b)

    twin = copied(metric)
    value = metric.value
    metric.reset()

    assert (twin.name, twin.value) == (metric.name, value)


def test_one_score_has_no_largest():
    "Of which the class would always be 0"
    learn = SimpleNamespace(pred=torch.randn(4, 1), yb=(torch.tensor([0, 1, 0, 1]),))
    for kwargs in dict(dim_argmax=-1), dict(activation='binarysoftmax'), dict(activation='softmax'):
        with pytest.raises(ValueError, match='have one score an item'): AccumMetric(len, **kwargs).accumulate(learn)
