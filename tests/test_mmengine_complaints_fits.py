"""What users of MMEngine complained about, by number: what a fit does and shows, and how it ends."""
import os
import signal
import traceback
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from learner.callback import Callback
from learner.callbacks.checkpoint import Checkpoint, writers
from learner.callbacks.iter_log import IterLogger
from learner.callbacks.plateau import ReduceLROnPlateau
from learner.callbacks.tracker import EarlyStoppingCallback, SaveModelCallback, TrackerCallback
from learner.callbacks.validate_every import ValidateEvery
from learner.data import DataLoaders
from learner.metrics import AccumMetric, mae
from tests.bench.test_counts import waits
from tests.bench.work import ready_batches, small_net
from tests.callbacks.test_tracker import scripted
from tests.helpers import Tracer, synth_learner, weights
from tests.resume_helpers import noisy_learner, record
from tests.test_mmengine_complaints import StopAfter, two_epochs

watching = [TrackerCallback, SaveModelCallback, EarlyStoppingCallback, ReduceLROnPlateau,
            partial(Checkpoint, monitor='valid_loss')]


# ---- validation

@pytest.mark.parametrize('cb', watching, ids=lambda o: getattr(o, 'func', o).__name__)
def test_8_what_watches_a_fit_lets_evaluations_be(tmp_path, cb):
    "Complaint 8: `validate` alone, before any fit and after one, works with callbacks that keep or act on the best"
    learn = synth_learner(cb := cb(), path=tmp_path)
    first = learn.validate()
    assert first['valid_loss'] > 0 and [*tmp_path.iterdir()] == []
    learn.fit(2)
    state, files = cb.state_dict(), {p: p.read_bytes() for p in tmp_path.rglob('*') if p.is_file()}

    for p in learn.model.parameters(): p.data.zero_()
    learn.validate()

    assert cb.state_dict() == state
    assert {p: p.read_bytes() for p in tmp_path.rglob('*') if p.is_file()} == files


def test_9_validation_before_training():
    "Complaint 9: the first row is, if that is wanted, that of the model as it came, before any step"
    learn = synth_learner(n=5)
    before = learn.validate()['valid_loss']

    learn.fit(2, cbs=ValidateEvery('1ep', first=True))

    assert learn.history.step.tolist() == [0, 5, 10] and learn.history.valid_loss[0] == before


def test_14_the_loss_of_validation_is_there():
    "Complaint 14: without being asked for, each epoch has the loss of the validation set, as its mean over all items"
    learn = synth_learner(n_valid=3)

    learn.fit(2)

    x, y = learn.dls.valid_ds.tensors
    assert learn.recorder.metric_names == ['epoch', 'train_loss', 'valid_loss', 'time']
    assert learn.recorder.values[-1]['valid_loss'] == pytest.approx(float((learn.model(x)-y).detach().pow(2).mean()))


def test_15_several_validation_sets(tmp_path):
    "Complaint 15: each set has columns of its own, that callbacks can watch"
    x = torch.arange(8.)[:, None]/8
    train, near, far = [DataLoader(TensorDataset(x, k*x), 4) for k in (1, 2, 3)]
    learn = synth_learner(dls=DataLoaders(train, dict(near=near, far=far)), metrics=mae, path=tmp_path)

    learn.fit(2, cbs=[SaveModelCallback('far_mae'), EarlyStoppingCallback('near_valid_loss')])

    row = learn.recorder.values[-1]
    assert row.names == ('train_loss', 'near_valid_loss', 'near_mae', 'far_valid_loss', 'far_mae')
    assert row['far_mae'] == pytest.approx(float((learn.model(x)-3*x).detach().abs().mean())) != row['near_mae']


def vector(pred, y): return torch.stack([pred.mean(), y.mean()])

@pytest.mark.parametrize('metric, error, match', [
    (vector, TypeError, r'`vector` returned float32\[2\]; a metric function returns one number'),
    (AccumMetric(vector, name='both'), ValueError, 'no column `both` to monitor, only train_loss, .* both_0, both_1')],
    ids=['function', 'object'])
def test_21_only_numbers_are_compared(tmp_path, metric, error, match):
    "Complaint 21: a metric of several values is no best: the error names it, and what there is"
    name = getattr(metric, '__name__', 'both')

    with pytest.raises(error, match=match): synth_learner(metrics=metric, path=tmp_path).fit(
        1, cbs=SaveModelCallback(name, comp='max'))


@pytest.mark.parametrize('cb', [None, ValidateEvery('2it'), Callback(after_batch=lambda cb: cb.learn.validate())],
                         ids=['epoch', 'every', 'batch'])
def test_23_modes_stay(cb):
    "Complaint 23: a frozen BatchNorm stays in eval and as it is, and nothing else does, wherever validation comes"
    bn, seen = nn.BatchNorm1d(3).eval(), []
    model = nn.Sequential(nn.Linear(1, 3), bn, nn.Dropout(0.), nn.Linear(3, 1))
    before = [b.clone() for b in bn.buffers()]
    look = Callback(after_pred=lambda cb: seen.append((cb.training, [m.training for m in cb.model])))
    learn = synth_learner([look, *[cb]*(cb is not None)], n=5, model=model)

    with pytest.warns(UserWarning, match='in eval mode, and left so while training: 1;'): learn.fit(2)

    assert [modes for training, modes in seen if training] == [[True, False, True, True]]*10
    assert {any(modes) for training, modes in seen if not training} == {False}
    assert all(map(torch.equal, bn.buffers(), before)) and [m.training for m in model] == [True, False, True, True]


# ---- what is shown, and what that costs

def test_18_a_short_epoch_is_logged():
    "Complaint 18: epochs shorter than the interval have their rows, steps count on over borders, and so the last one"
    learn = synth_learner(n=5)

    learn.fit(5, cbs=IterLogger(12))

    assert learn.history.train_loss.notna().tolist() == [True]*5 and len(learn.recorder.raw_losses) == 25
    assert learn.recorder.iters_table.step.tolist() == [12, 24, 25]


@pytest.mark.parametrize('every, more', [(100, []), (4, ['tolist']*2)])
def test_22_numbers_are_read_when_shown(every, more):
    "Complaint 22: no batch reads a number from the device; a line that is due reads all it shows at once"
    def reads(n):
        learn = synth_learner(IterLogger(every), dls=(ready_batches(n), ready_batches(2)), model=small_net())
        return sorted(waits(lambda: learn.fit(1)))

    assert reads(12) == sorted([*reads(4), *more])


# ---- errors, stops and interrupts

def helper(): raise TypeError('an argument is missing')

@pytest.mark.parametrize('event', ['before_fit', 'before_validate', 'after_batch', 'cleanup_epoch', 'after_fit'])
def test_16_an_error_in_a_callback_keeps_its_traceback(event):
    "Complaint 16: a TypeError in a callback is the one that was raised, with its lines, and says in which callback"
    learn = synth_learner(type('Faulty', (Callback,), {event: lambda cb: helper()}))

    with pytest.raises(TypeError, match='^an argument is missing\n?') as e: learn.fit(1)

    assert e.value.args == ('an argument is missing',) and traceback.extract_tb(e.tb)[-1].name == 'helper'
    assert f'raised by `Faulty` at `{event}`' in e.value.__notes__[0]


bad_from_2 = [.1, .9, .5, .5, .5, .5, .5, .5]  # the best is that of epoch 2: patience 3 ends the fit in epoch 5

def patient(path):
    "As a script makes it in a process of its own"
    writers.clear()
    return scripted(bad_from_2, EarlyStoppingCallback('score', patience=3), better=True, path=path)


def test_17_an_early_stop_is_saved(tmp_path):
    "Complaint 17: a fit that stops early has its last state in a file, and resumed it is over"
    patient(tmp_path).fit(8, cbs=Checkpoint('100ep'))
    learn = patient(tmp_path)

    learn.fit(8, cbs=Checkpoint('100ep'), resume=True)

    assert [p.name for p in (tmp_path/'models/checkpoints').iterdir()] == ['run1_step5.ckpt']
    assert learn.n_step == 5 and len(learn.recorder.values) == 5


@pytest.mark.parametrize('step', [1, 2, 3, 4, 5])
def test_17_patience_is_kept(tmp_path, step):
    "Complaint 17: a fit that was stopped while it waited goes on with its patience: it stops early where it would have"
    patient(tmp_path).fit(8, cbs=[Checkpoint(), StopAfter(step)])
    learn = patient(tmp_path)

    learn.fit(8, cbs=Checkpoint(), resume=True)

    assert learn.early_stopping.stopped_epoch == 4 and learn.n_step == 5


def test_17_the_next_fit_trains(tmp_path):
    "Complaint 17: after an early stop the next fit trains, with new patience, and evaluations work"
    learn = patient(tmp_path)
    learn.fit(8)

    row = learn.validate()
    learn.fit(8)

    assert row.names == ('valid_loss', 'score') and learn.n_step == 10


def test_24_ctrl_c_loses_nothing(tmp_path):
    "Complaint 24: Ctrl-C ends the batch, cleans up and saves before it reaches the caller; the fit goes on exactly"
    whole, tracer = noisy_learner(tmp_path/'whole'), Tracer()
    two_epochs(whole)
    def ctrl_c(cb):
        if cb.training and cb.train_iter == 7: os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        two_epochs(noisy_learner(tmp_path), cbs=[Checkpoint(), tracer, Callback(after_loss=ctrl_c)])
    assert [p.name for p in (tmp_path/'models/checkpoints').iterdir()] == ['run1_step8.ckpt']
    assert tracer.seen[-4:] == ['cleanup_batch', 'cleanup_train', 'cleanup_epoch', 'cleanup_fit']
    learn = noisy_learner(tmp_path)

    two_epochs(learn, cbs=Checkpoint(), resume=True)

    assert learn.final_hash == whole.final_hash and record(learn) == record(whole)
    assert all(map(torch.equal, weights(learn), weights(whole)))
