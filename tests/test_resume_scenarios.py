"""Scenarios of resuming that people reported of other libraries, each by its number."""
from functools import partial

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from learner.callback import Callback
from learner.callbacks.checkpoint import Checkpoint
from learner.callbacks.finetune import FreezeUntil
from learner.callbacks.torch_schedule import TorchScheduler
from learner.callbacks.tracker import EarlyStoppingCallback
from learner.measure import ValueMetric
from tests.resume_helpers import AskAt, halves, noisy_learner, record


def stopped_at_ends(path, n_epoch, make, run):
    "A fit that is stopped at the end of each epoch, and begun by the same call each time"
    for epoch in range(n_epoch):
        learn = make(path)
        stop = Callback(after_epoch=lambda cb, epoch=epoch: cb.epoch == epoch < n_epoch-1 and cb.learn.request_stop())
        run(learn, cbs=[Checkpoint(), stop], resume=True)
    return learn


def test_s02_the_same_end(tmp_path):
    "Stopped after an epoch and gone on with: weights, optimizer, rates and the number of steps are the same"
    def run(learn, **kwargs): learn.fit_one_cycle(3, 1e-2, **kwargs)
    whole = noisy_learner(tmp_path/'whole')
    run(whole)

    learn = stopped_at_ends(tmp_path, 3, noisy_learner, run)

    assert learn.final_hash == whole.final_hash and learn.n_step == 15
    assert learn.recorder.lrs == whole.recorder.lrs and record(learn) == record(whole)


def scored(path):
    "A Learner with a score that is best in epoch 4 and so ends the fit in epoch 8, with patience 4 epochs later"
    values = [.1, .2, .3, .4, .9, .8, .8, .8, .8, .8]
    learn = noisy_learner(path)
    metric = ValueMetric(lambda: values[learn.epoch], 'score')
    metric.greater_is_better = True
    learn.metrics = [metric]
    return learn


@pytest.mark.parametrize('killed', [5, 6, 7])
def test_s11_patience_goes_on(tmp_path, killed):
    "Early stopping and a plateau's reductions go on with the patience they had: the stop comes when it was due"
    def run(learn, cbs=(), **kwargs):
        plateau = TorchScheduler(partial(ReduceLROnPlateau, mode='max', patience=1, factor=.5), monitor='score')
        learn.fit(10, 1e-2, cbs=[*cbs, EarlyStoppingCallback('score', patience=4), plateau], **kwargs)
    whole = scored(tmp_path/'whole')
    run(whole)
    with pytest.raises(KeyboardInterrupt): run(scored(tmp_path), cbs=[Checkpoint(), AskAt(7*killed+2)])

    learn = scored(tmp_path)
    run(learn, cbs=[Checkpoint()], resume=True)

    assert len(whole.recorder.values) == 9 and len({*whole.recorder.lrs}) == 2
    assert learn.recorder.lrs == whole.recorder.lrs and learn.final_hash == whole.final_hash


@pytest.mark.parametrize('at', [3, 4])
def test_s16_the_freeze_plan(tmp_path, at):
    "Thawed in the third epoch with a rate of its own: after resuming, the body is trained, with its groups and rates"
    def run(learn, cbs=(), **kwargs): learn.fit(5, [1e-3, 1e-2], cbs=[*cbs, FreezeUntil('2ep')], **kwargs)
    whole = noisy_learner(tmp_path/'whole', splitter=halves)
    run(whole)
    with pytest.raises(KeyboardInterrupt): run(noisy_learner(tmp_path, splitter=halves), [Checkpoint(), AskAt(7*at+2)])

    learn, seen = noisy_learner(tmp_path, splitter=halves), []
    def look(cb): seen.append((cb.learn.model[0].weight.requires_grad, cb.learn.opt.hypers[0]['lr']))
    run(learn, cbs=[Checkpoint(), Callback(before_batch=look)], resume=True)

    assert {*seen} == {(True, 1e-3)}
    assert learn.final_hash == whole.final_hash
    assert all(map(torch.equal, learn.model.parameters(), whole.model.parameters()))
