"""Evaluation within training: whatever calls it, and whenever, the outer fit goes on as if nothing had happened."""
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from learner.callback import Callback
from learner.events import CancelValidException
from learner.metrics import AccumMetric, AvgMetric, mse
from learner.callbacks.recorder import Recorder
from tests.helpers import Tracer, raises, synth_learner, weights

events = ['before_fit', 'before_epoch', 'before_train', 'before_batch', 'after_pred', 'after_loss', 'before_backward',
          'after_backward', 'before_step', 'after_step', 'after_batch', 'after_train', 'before_validate',
          'after_validate',
          'after_epoch', 'after_fit']


class Net(nn.Sequential):
    def __init__(self): super().__init__(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Dropout(.3), nn.Linear(8, 1))


def mae(pred, targ): return (pred-targ).abs().mean()


def loaders(workers):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(48, 1, generator=g)
    kwargs = dict(num_workers=workers, persistent_workers=True) if workers else {}
    return (DataLoader(TensorDataset(x, 2*x), 8, shuffle=True, generator=torch.Generator().manual_seed(5), **kwargs),
            DataLoader(TensorDataset(x[:16], x[:16]), 8, **kwargs))


def run(cbs, workers=0):
    "A fit of two epochs, and all that it leaves behind"
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    order, tracer = [], Tracer()
    tracer.run_in = frozenset({'fit'})
    look = Callback(before_batch=lambda cb: cb.run_kind == 'fit' and order.append(cb.x.flatten().tolist()))
    learn = synth_learner([look, tracer, Recorder(train_metrics=True), *cbs], dls=loaders(workers), model=Net(),
                          metrics=[mae, AccumMetric(mae)])
    torch.manual_seed(0)
    learn.fit(2)
    rec = learn.recorder
    rows = [tuple(r) for r in rec.values]
    rng = torch.rand(3).tolist(), np.random.rand(), random.random()
    return weights(learn), dict(order=order, events=tracer.seen, losses=rec.losses, raw=rec.raw_losses, rows=rows,
                                rng=rng,
                                iters=rec.iters, buffers=[b.tolist() for b in learn.model.buffers()], lrs=rec.lrs,
                                hypers=[dict(h) for h in learn.opt.hypers], n_step=learn.n_step, pct=learn.pct_train,
                                modes=[m.training for m in learn.model.modules()], names=rec.metric_names,
                                gen=learn.dls.train.generator.get_state().tolist())


@pytest.fixture(scope='module')
def plain(): return {workers: run([], workers) for workers in (0, 2)}


def assert_same(a, b):
    assert all(p.equal(q) for p, q in zip(a[0], b[0], strict=True))
    for k in a[1]: assert a[1][k] == b[1][k] or repr(a[1][k]) == repr(b[1][k]), k


@pytest.mark.parametrize('ds_idx', [0, 1])
@pytest.mark.parametrize('at', events)
def test_validate_at_every_event_changes_nothing(plain, at, ds_idx):
    "`validate()` from a callback at any event, on the training loader too, leaves the outer fit bit for bit as it was"
    rows = []

    with_it = run([Callback(**{at: lambda cb: rows.append(cb.learn.validate(ds_idx))})])

    assert_same(plain[0], with_it)
    assert rows and all(r['valid_loss'] > 0 for r in rows)


@pytest.mark.parametrize('at', events)
def test_validate_with_persistent_workers(plain, at):
    "A loader whose persistent workers are in use can be evaluated in the midst of its own epoch"
    count = []
    def once(cb):
        if len(count) < 2: count.append(cb.learn.validate(0))

    assert_same(plain[2], run([Callback(**{at: once})], workers=2))


def test_validate_in_after_batch_ends():
    "A handler at work is not entered again by the evaluation that it started"
    calls = []
    def handler(cb):
        calls.append(cb.run_kind)
        cb.learn.validate()
    learn = synth_learner(Callback(after_batch=handler), n=2, n_valid=1)

    learn.fit(1)

    assert calls == ['fit']*3


def test_standalone_events():
    "Outside a fit, `validate` fires what fastai fires, and cleans up"
    learn = synth_learner(tracer := Tracer())
    tracer.seen.clear()

    learn.validate()

    assert tracer.seen == ['before_fit', 'before_epoch', 'before_validate', 'before_batch', 'after_pred', 'after_loss',
                           'after_batch', 'cleanup_batch', 'after_validate', 'cleanup_validate', 'after_epoch',
                           'cleanup_epoch', 'after_fit', 'cleanup_fit']


def test_nested_events():
    "Inside a fit, only the events of validation and its batches fire, also for callbacks of this evaluation alone"
    inner = Tracer()
    learn = synth_learner(Callback(after_train=lambda cb: cb.learn.validate(cbs=inner)))

    learn.fit(1)

    assert inner.seen == ['before_validate', 'before_batch', 'after_pred', 'after_loss', 'after_batch', 'cleanup_batch',
                          'after_validate', 'cleanup_validate']
    assert inner.learn is None


def test_evaluation_leaves_no_trace():
    "A standalone `validate` leaves record, row, hypers, modes, streams and declared callback state as they were"
    class Counting(Callback):
        state = ('n', 'seen')
        def __init__(self): self.n, self.seen = 0, []
        def after_batch(self):
            self.n += 1
            self.seen.append(self.n)
    learn = synth_learner(cb := Counting(), metrics=mae, n=3)
    learn.fit(2)
    learn.model.train()
    rec, seen = learn.recorder, cb.seen
    before = (repr(learn.history), list(rec.losses), list(rec.values), repr(learn.final_record), cb.n, list(seen),
              torch.get_rng_state().tolist(), learn.train_iter, learn.model.training, learn.run_kind, learn.dl)

    row = learn.validate()

    assert before == (repr(learn.history), list(rec.losses), list(rec.values), repr(learn.final_record), cb.n,
                      list(seen),
                      torch.get_rng_state().tolist(), learn.train_iter, learn.model.training, learn.run_kind, learn.dl)
    assert cb.seen is seen and row.names == ('valid_loss', 'mae')


def test_an_error_in_an_evaluation_restores_all():
    "An evaluation that fails or is cancelled puts everything back too, and a cancel that it cannot use goes to the fit"
    learn = synth_learner(Callback(after_loss=raises(ValueError('bad'), when=False)))
    learn.model.train()
    state = torch.get_rng_state()

    with pytest.raises(ValueError, match='bad'): learn.validate()

    assert learn.model.training and learn._scope is None and torch.is_grad_enabled()
    assert torch.equal(state, torch.get_rng_state()) and learn.validate()['valid_loss'] > 0


def test_cancel_valid_in_a_nested_evaluation():
    "CancelValid ends the nested evaluation only"
    learn = synth_learner(n=1)
    rows = []
    def nested(cb): rows.append(cb.learn.validate(cbs=Callback(before_batch=raises(CancelValidException))))

    learn.fit(1, cbs=Callback(after_train=nested))

    assert np.isnan(rows[0]['valid_loss']) and learn.recorder.values[0]['valid_loss'] > 0


def test_metrics_of_an_evaluation_are_copies():
    "The metric objects that a fit uses are not touched by an evaluation in its midst"
    metric, seen = AvgMetric(mae), []
    def nested(cb): seen.extend([metric.value, cb.learn.validate(0)['mae'], metric.value])
    learn = synth_learner(Callback(after_validate=nested), metrics=metric)

    learn.fit(1)

    assert learn.metrics[0] is metric and seen[0] == seen[2] != seen[1]


def test_metrics_hold_no_predictions_after_a_fit():
    "Metrics that keep predictions are emptied when the fit is over; their values are in the record"
    learn = synth_learner(metrics=AccumMetric(mae))

    learn.fit(1)

    assert np.isnan(learn.metrics[0].value) and learn.recorder.values[0]['mae'] > 0


def test_evaluation_fires_no_grad():
    "No gradient is recorded in an evaluation, and outputs are not inference tensors"
    preds = []
    learn = synth_learner(Callback(after_pred=lambda cb: cb.training or preds.append(cb.pred)))

    learn.fit(1)

    assert not preds[0].requires_grad and not preds[0].is_inference()

def test_any_metrics_for_one_evaluation():
    "In place of the Learner's own, which stay"
    learn = synth_learner(metrics=mse)

    other, none, own = learn.validate(metrics=mae), learn.validate(metrics=[]), learn.validate()

    assert [row.names for row in (other, none, own)] == [('valid_loss', 'mae'), ('valid_loss',), ('valid_loss', 'mse')]
    assert own['mse'] == own['valid_loss'] and 0 < other['mae'] < own['mse']
