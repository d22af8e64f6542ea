"""What batches hold, kept."""
import torch

from learner.callbacks.collect import CollectDataCallback, FetchPredsCallback
from tests.helpers import synth_learner


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
