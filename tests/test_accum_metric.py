"""AccumMetric: its function sees all predictions and targets of a phase, prepared as asked; several columns."""
import numpy as np
import pytest
import torch

from learner.metrics import AccumMetric, ActivationType, ValueMetric
from tests.metric_helpers import batch, measure, median_gap, scores, splits

items, labels = torch.tensor([[0., 2], [3, 1], [-1, 1], [-1, -1]]), torch.tensor([1, 0, 1, 0])


def seen(**kwargs):
    "What the function of an AccumMetric with these arguments gets, for 4 items of 2 scores"
    got = []
    measure(AccumMetric(lambda *args, **kw: got.append((*args, kw)) or 0, **kwargs), (3, 1), items, labels)
    return got[0]


@pytest.mark.parametrize('split', splits)
def test_accum_sees_all_items(split):
    "The function gets all predictions and targets, flat, in order"
    pred, targ = scores(20, 3), scores(20, 3, seed=1)

    assert measure(AccumMetric(median_gap), split, pred, targ) == pytest.approx((pred-targ).flatten().median().item())


@pytest.mark.parametrize('kwargs, expected', [
    (dict(dim_argmax=1), items.argmax(1)),
    (dict(dim_argmax=-1, thresh=1), items.argmax(1) >= 1),
    (dict(thresh=0, flatten=False), items >= 0),
    (dict(activation='sigmoid', flatten=False), items.sigmoid()),
    (dict(activation=ActivationType.Sigmoid, thresh=.5, flatten=False), items.sigmoid() >= .5),
    (dict(activation='softmax', flatten=False), items.softmax(1)),
    (dict(activation='softmax', dim_argmax=1, flatten=False), items.softmax(1)),
    (dict(activation='binarysoftmax'), items.softmax(1)[:, 1]),
    (dict(activation='no', flatten=False), items)])
def test_accum_prepares_predictions(kwargs, expected):
    "Activation or argmax, then the threshold, 0 included"
    preds, targs, kw = seen(**kwargs)

    assert torch.equal(preds, expected) and torch.equal(targs, labels)
    assert kw == {}


def test_accum_argmax_along_the_first_dimension():
    "`dim_argmax=0` is a dimension like any other"
    metric = AccumMetric(median_gap, dim_argmax=0)
    metric.accumulate(batch(items, labels[:2]))

    assert torch.equal(metric.preds[0], items.argmax(0))


def test_accum_calls_as_told():
    "Arrays, scikit-learn's order of arguments and further keywords are passed as asked"
    targs, preds, kw = seen(to_np=True, invert_arg=True, dim_argmax=1, beta=2)

    assert isinstance(preds, np.ndarray) and preds.tolist() == items.argmax(1).tolist()
    assert isinstance(targs, np.ndarray) and targs.tolist() == labels.tolist()
    assert kw == {'beta': 2}


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_accum_widens_half_precision(dtype):
    "What NumPy cannot read, or half precision would blur, is computed in single precision"
    got = []
    metric = AccumMetric(lambda p, t: got.append(p) or 0, activation='softmax', to_np=True, flatten=False)

    measure(metric, (4,), items.to(dtype), labels)

    assert got[0].dtype == np.float32
    assert np.abs(got[0]-items.softmax(1).numpy()).max() < 1e-7


def test_accum_keeps_copies():
    "A buffer that is filled again by the next batch does not change what was seen"
    metric, pred, targ = AccumMetric(median_gap), torch.zeros(2), torch.zeros(2)
    for v in (1., 2.):
        pred.fill_(v)
        metric.accumulate(batch(pred, targ))

    assert (metric.value, metric.value) == (1, 1)  # reading it again changes nothing
    metric.accumulate(batch(torch.full((8,), 7.), torch.zeros(8)))
    assert metric.value == 7


def test_accum_several_targets():
    "Several targets reach the function as a tuple"
    def gap(preds, targs): return (preds-targs[0]-targs[1]).abs().max()

    assert measure(AccumMetric(gap, flatten=False), (3, 1), items, items-1, torch.ones(4, 2)) == 0


def test_accum_on_given_predictions():
    "Called with predictions it computes the value of these alone"
    assert AccumMetric(median_gap)(torch.ones(3), torch.zeros(3)) == 1


@pytest.mark.parametrize('result, expected', [
    (torch.tensor([.1, .2]), {'f_0': pytest.approx(.1), 'f_1': pytest.approx(.2)}), (np.array([1.]), {'f_0': 1.}),
    ({'a': 1, 'b': np.float32(2)}, {'a': 1., 'b': 2.}), ({'a': torch.tensor([1, 2])}, {'a_0': 1., 'a_1': 2.}),
    (torch.tensor(3), 3.)])
def test_final_results_of_several_columns(result, expected):
    "A vector or a dict gives a column for each member"
    res = AccumMetric(lambda p, t: result, name='f')(items, labels)

    assert res == expected
    assert ValueMetric(lambda: result, 'f').value == expected


@pytest.mark.parametrize('result, what', [(torch.eye(2), r'float32\[2, 2\]'), (None, 'NoneType'),
                                          ((1, 2), r'\(int, int\)')])
def test_other_final_results_are_refused(result, what):
    "A result that cannot be a column is refused, naming metric and result"
    with pytest.raises(TypeError, match=f"the value of metric `f` is {what}"): ValueMetric(lambda: result, 'f').value


def test_accum_errors():
    "An unknown activation fails at once, other errors say what the metric was given"
    with pytest.raises(ValueError, match="activation 'relu' is none of no, sigmoid, softmax, binarysoftmax"):
        AccumMetric(median_gap, activation='relu')
    with pytest.raises(ValueError, match=r"median_gap: predictions float32\[4, 2\] and targets int64\[4\]"):
        measure(AccumMetric(median_gap), (4,), items, labels)
    with pytest.raises(TypeError, match=r"predictions \(float32\[4, 2\], float32\[4, 2\]\) are no tensor; choose"):
        AccumMetric(median_gap, thresh=0).accumulate(batch((items, items), labels))
    with pytest.raises(ZeroDivisionError) as e: AccumMetric(lambda p, t: 1/0, name='f')(items, labels)
    assert e.value.__notes__ == ["metric `f`: predictions float32[4, 2], targets int64[4]"]
