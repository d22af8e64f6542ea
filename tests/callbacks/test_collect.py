"""What batches hold, kept."""
import torch
from torch import nn

from learner import SWA, Callback, DataLoaders
from learner.callbacks.collect import CollectDataCallback, FetchPredsCallback
from tests.helpers import synth_dls, synth_learner


def norms(): return nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def test_batches_are_kept():
    "Inputs, targets, prediction and loss of each, without their graph; anew with each fit"
    learn = synth_learner(collect := CollectDataCallback(), n=3, n_valid=2)

    for _ in range(2): learn.fit(1)

    assert len(collect.data) == 5
    (x,), (y,), pred, loss = collect.data[-1]
    assert torch.equal(pred, learn.model(x).detach()) and not pred.requires_grad
    assert torch.equal(loss, learn.loss_func(pred, y))

def test_a_part_of_them():
    "Those of evaluations alone, also of one by itself"
    learn = synth_learner(collect := CollectDataCallback(run_train=False), n=3, n_valid=2)
    learn.fit(1)
    assert len(collect.data) == 2

    learn.validate(0)

    assert len(collect.data) == 3

def test_predictions_of_each_epoch():
    "Of the validation set in its order, by the weights of that epoch; the fit is as without"
    learn, plain = synth_learner(fetch := FetchPredsCallback(), n_valid=2), synth_learner(n_valid=2)
    assert fetch.preds is None
    learn.fit(2)
    plain.fit(2)

    x, y = (torch.cat(ts) for ts in zip(*learn.dls.valid))
    assert torch.equal(fetch.preds, learn.model(x).detach()) and torch.equal(fetch.targs, y)
    assert plain.recorder.values == learn.recorder.values

def test_evaluations_within_a_fit_are_not_its_batches():
    "Those of others, as predictions of each epoch or averages; what is given to such an evaluation keeps its own"
    collect = CollectDataCallback()
    learn = synth_learner([FetchPredsCallback(), SWA(0.), collect], n=3, n_valid=2, model=norms())

    learn.fit(2)

    assert len(collect.data) == 10 and all(loss is not None for *_, loss in collect.data)
    learn.validate(0)
    assert len(collect.data) == 3

def test_what_goes_with_one_evaluation():
    "Within a fit, also if it was in a fit before"
    collect, n = CollectDataCallback(), []
    def look(cb):
        cb.learn.validate(cbs=collect)
        n.append(len(collect.data))
    learn = synth_learner(n=3, n_valid=2)
    learn.fit(1, cbs=collect)

    learn.fit(1, cbs=Callback(after_train=look))

    assert n == [7] and len(collect.data) == 7

def test_several_validation_sets_are_predicted_once():
    "Of all sets, in their order, after the last one"
    n, (train, valid) = [], synth_dls(n=2, n_valid=2)
    learn = synth_learner(fetch := FetchPredsCallback(cbs=Callback(after_batch=lambda cb: n.append(1))),
                          dls=DataLoaders(train, dict(a=valid, b=valid)))

    learn.fit(2)

    assert len(n) == 2*2*2 and len(fetch.preds) == len(fetch.targs) == 2*16
