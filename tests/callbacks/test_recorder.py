"""Recorder: what the numbers mean, rows by name, the history of all fits, and nothing shifted or stale."""
import math
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from learner.callback import Callback
from learner.callbacks.recorder import Losses, Recorder, Row
from learner.data import DataLoaders
from learner.events import (CancelBatchException, CancelEpochException, CancelFitException, CancelTrainException,
                            CancelValidException)
from learner.measure import AccumMetric, AvgMetric, Metric
from tests.helpers import RegModel, raises, synth_dls, synth_learner

nan = math.nan


def mae(pred, targ): return (pred-targ).abs().mean()

def ragged(sizes=(8, 8, 3)):  # a list of batches of these sizes
    g = torch.Generator().manual_seed(4)
    return [(torch.randn(n, 1, generator=g), torch.randn(n, 1, generator=g)) for n in sizes]


# ---- what the numbers mean

def test_train_loss_is_the_epochs_mean_per_item():
    "train_loss weighs each batch of the epoch by its items, and valid_loss those of the validation set"
    learn = synth_learner(dls=(ragged(), ragged((5, 2))), lr=0.)

    learn.fit(2)

    for batches, name in ((ragged(), 'train_loss'), (ragged((5, 2)), 'valid_loss')):
        with torch.no_grad(): losses = [F.mse_loss(learn.model(x), y, reduction='none') for x, y in batches]
        assert learn.recorder.values[1][name] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-6)

def test_smooth_loss_is_fastais():
    "The smoothed loss is an average with beta .98, debiased, over the whole fit; `losses` has it for each batch"
    learn = synth_learner(n=3)

    learn.fit(2)

    rec, smooth = learn.recorder, 0.
    for i, raw in enumerate(rec.raw_losses, 1):
        smooth = .98*smooth + .02*raw
        assert rec.losses[i-1] == pytest.approx(smooth/(1-.98**i), rel=1e-12)
    assert learn.smooth_loss == rec.losses[-1] and rec.iters == [3, 6] and len(rec.losses) == 6

def test_beta_is_used():
    "`beta=0` smooths nothing"
    learn = synth_learner(Recorder(beta=0.), n=4)

    learn.fit(1)

    assert learn.recorder.losses == learn.recorder.raw_losses

def test_smooth_loss_can_be_read_in_every_batch():
    "`smooth_loss` is up to date at each after_batch behind the Recorder"
    seen = []
    cb = Callback(after_batch=lambda cb: cb.training and seen.append(cb.smooth_loss))
    cb.order = 55
    learn = synth_learner(cb, n=4)

    learn.fit(1)

    assert seen == learn.recorder.losses and math.isnan(synth_learner().smooth_loss)

def test_lrs_are_those_of_each_batch():
    "`lrs` holds the last group's learning rate as it was in each batch"
    def step(cb): cb.opt.set_hyper('lr', .1*(cb.train_iter+1))
    learn = synth_learner(Callback(before_batch=lambda cb: cb.training and step(cb)), n=2)

    learn.fit(2)

    assert learn.recorder.lrs == pytest.approx([.1, .2, .3, .4]) and learn.history.lr.tolist() == pytest.approx([.2,
                                                                                                                 .4])

@pytest.mark.parametrize('as_batch', [lambda x, y: (x, y), lambda x, y: {'x': x, 'y': y}, lambda x, y: [x, y]])
def test_s35_uneven_last_batch(as_batch):
    "Accuracies .7, .8, .9 of batches of 256, 256 and 10 average to .7529, weighted by items (S35)"
    def batch(n, share): return as_batch(torch.zeros(n, 1), torch.cat([torch.ones(round(n*share)),
                                                                       torch.zeros(n-round(n*share))]))
    class Net(nn.Module):
        def __init__(self): super().__init__(); self.w = nn.Parameter(torch.ones(1))
        def forward(self, x): return x*self.w
    def share(pred, y): return y.mean()
    batches = [batch(256, .7), batch(256, .8), batch(10, .9)]
    learn = synth_learner(dls=DataLoaders(batches, batches), model=Net(), metrics=share,
                          loss_func=lambda pred, y: F.mse_loss(pred[:, 0], y))

    value = learn.validate()['share']

    whole = sum(round(n*s) for n, s in ((256, .7), (256, .8), (10, .9)))/522
    assert value == pytest.approx(.7529, abs=1e-4) and value == pytest.approx(whole, rel=1e-6)

def test_losses_stay_on_the_device_in_few_pieces():
    "Waiting losses are stacked, so that a long epoch does not hold one small tensor a batch"
    losses = Losses()

    for i in range(2000): losses.add(torch.tensor(float(i)), 1)

    assert len(losses.waiting) <= 512 and len(losses.stacks) == 3 and losses.read() == list(range(2000))
    assert losses.mean() == 999.5 and losses.mean(1998) == 1998.5 and math.isnan(Losses().mean())


# ---- rows

def test_rows_by_position_and_name():
    "A row is a tuple that also takes names, and says which there are"
    row = Row(('a', 'b'), (1., nan))

    assert row[0] == row['a'] == 1 and len(row) == 2 and math.isnan(row['b']) and row[:1] == (1,)
    assert pickle.loads(pickle.dumps(row)).names == ('a', 'b') and repr(row) == 'Row(a=1, b=nan)'
    with pytest.raises(KeyError, match='no column `c`; there are a, b'): row['c']

def test_values_have_no_epoch_and_time():
    "`values` holds losses and metrics, as in fastai; `log` is the row as shown, aligned with `metric_names`"
    logs = []
    learn = synth_learner(Callback(after_epoch=lambda cb: logs.append(cb.recorder.log)), metrics=mae)

    learn.fit(1)

    rec, (log,) = learn.recorder, logs
    assert rec.values[0].names == ('train_loss', 'valid_loss', 'mae') and learn.final_record is rec.values[0]
    assert rec.metric_names == ['epoch', 'train_loss', 'valid_loss', 'mae', 'time'] and rec.log is None
    assert log[:-1] == [0, *rec.values[0]] and 0 < log[-1] < 10

@pytest.mark.parametrize('n_valid', [0, 1])
def test_every_after_epoch_can_read_the_row(n_valid):
    "A callback of any order finds the epoch's row in its `after_epoch`, and can end the fit by it"
    def stop(cb):
        if len(cb.recorder.values) == 2 and cb.recorder.values[-1]['train_loss'] < 1e9: raise CancelFitException
    cb = Callback(after_epoch=stop)
    cb.order = -50
    learn = synth_learner(cb, n_valid=n_valid)

    learn.fit(5)

    assert learn.history.epoch.tolist() == [0, 1]

def test_without_time():
    "`add_time=False` leaves the column out of the table"
    logs = []
    learn = synth_learner([Recorder(add_time=False), Callback(after_epoch=lambda cb: logs.append(cb.recorder.log))])

    learn.fit(1)

    assert learn.recorder.metric_names == ['epoch', 'train_loss', 'valid_loss'] and len(logs[0]) == 3

def test_without_valid_metrics():
    "`valid_metrics=False` computes metrics on the training batches only, if asked to"
    learn = synth_learner(Recorder(train_metrics=True, valid_metrics=False), metrics=mae)

    learn.fit(1)

    assert learn.recorder.values[0].names == ('train_loss', 'train_mae', 'valid_loss')

@pytest.mark.parametrize('at, ex, missing', [
    ('before_train', CancelTrainException, {'train_loss', 'train_mae'}),
    ('before_validate', CancelValidException, {'valid_loss', 'valid_mae'}),
    ('before_validate', CancelEpochException, {'valid_loss', 'valid_mae'}), ('after_loss', CancelTrainException, set()),
    ('after_train', CancelEpochException, {'valid_loss', 'valid_mae'})])
def test_a_cancelled_phase_leaves_nan_in_its_columns(at, ex, missing):
    "A phase that gave nothing has NaN in its own columns, and shifts no other; one cut short has what it computed"
    raiser = Callback(**{at: raises(ex, nth=2)})
    raiser.order = 70
    learn = synth_learner([Recorder(train_metrics=True), raiser], metrics=mae, n=4)

    learn.fit(2)

    names = learn.recorder.values[0].names
    assert names == learn.recorder.values[1].names == ('train_loss', 'train_mae', 'valid_loss', 'valid_mae')
    if at != 'after_loss': assert {n for n, v in zip(names, learn.recorder.values[1]) if math.isnan(v)} == missing

def test_cancelled_epoch_leaves_no_stale_row():
    "An epoch that another callback ends before it began repeats no row"
    learn = synth_learner(Callback(before_epoch=raises(CancelEpochException, nth=2)))

    learn.fit(3)

    assert learn.history.epoch.tolist() == [0, 2] and len(learn.recorder.values) == 2

def test_all_batches_cancelled():
    "If no batch is computed, the losses are NaN, not those of another epoch"
    def skip(cb):
        if cb.epoch: raise CancelBatchException
    learn = synth_learner(Callback(before_batch=skip), metrics=mae)

    learn.fit(2)

    first, second = learn.recorder.values
    assert all(math.isnan(v) for v in second) and not any(math.isnan(v) for v in first)

def test_cancel_fit_keeps_the_finished_epochs():
    "A fit that is cancelled keeps the rows of its finished epochs"
    learn = synth_learner(Callback(before_epoch=raises(CancelFitException, nth=3)))

    learn.fit(5)

    assert learn.history.epoch.tolist() == [0, 1]


# ---- metrics

def test_metrics_of_every_kind():
    "Functions, partials, lambdas, modules and Metrics have sensible columns"
    metrics = [mae, lambda p, y: p.mean(), nn.L1Loss(), AvgMetric(mae), AccumMetric(mae, name='all_mae')]
    learn = synth_learner(metrics=metrics)

    learn.fit(1)

    names = learn.recorder.values[0].names[2:]
    assert names[0] == 'mae' and names[-1] == 'all_mae' and len(set(names)) == 5 and not any('<' in n for n in names)
    row = learn.recorder.values[0]
    assert row['mae'] == pytest.approx(row['all_mae']) == pytest.approx(row['l1_loss'])

def test_dict_metrics_give_columns():
    "A metric that returns a dict gives a column for each key, from the first row on"
    def errors(pred, y): return {'abs': (pred-y).abs().mean(), 'max': (pred-y).abs().max()}
    learn = synth_learner(metrics=[errors, mae])

    learn.fit(2)

    assert learn.recorder.values[0].names == ('train_loss', 'valid_loss', 'abs', 'max', 'mae')
    assert learn.recorder.metric_names[1:-1] == list(learn.recorder.values[1].names)
    assert learn.recorder.values[1]['abs'] == pytest.approx(learn.recorder.values[1]['mae'])

class Stateful(Metric):
    "Counts the batches since its reset"
    name, greater_is_better = 'stateful', None
    def reset(self): self.n = 0
    def accumulate(self, learn): self.n += 1
    @property
    def value(self): return self.n

def test_stateful_metrics_are_reset_for_each_phase():
    "A metric is reset before each phase that it is computed on"
    learn = synth_learner(Recorder(train_metrics=True), metrics=Stateful(), n=3, n_valid=2)

    learn.fit(2)

    assert [(r['train_stateful'], r['valid_stateful']) for r in learn.recorder.values] == [(3, 2)]*2

def test_several_validation_sets():
    "Several validation sets give columns with their names before them, in the table, in history and in `validate`"
    a, b = synth_dls(0, 1)[1], synth_dls(0, 3)[1]
    learn = synth_learner(dls=DataLoaders(synth_dls(2, 0)[0], {'a': a, 'b': b}), metrics=mae)

    learn.fit(1)
    row = learn.validate()

    assert learn.recorder.metric_names == ['epoch', 'train_loss', 'a_valid_loss', 'a_mae', 'b_valid_loss', 'b_mae',
                                           'time']
    assert row.names == ('a_valid_loss', 'a_mae', 'b_valid_loss', 'b_mae')
    assert row['b_mae'] == pytest.approx(learn.validate(dl=b)['mae']) == learn.recorder.values[0]['b_mae']


# ---- history

def test_history_is_tidy():
    "`learn.history` is a DataFrame with a row for each epoch of all fits, and NaN where there is nothing"
    learn = synth_learner(metrics=mae, lr=.1)
    learn.fit(2)
    learn.fit(1, lr=.2, cbs=Callback(before_validate=raises(CancelValidException)))

    df = learn.history

    assert list(df) == ['fit', 'epoch', 'train_loss', 'smooth_loss', 'valid_loss', 'mae', 'time', 'lr', 'mom', 'wd']
    assert df.fit.tolist() == [0, 0, 1] and df.epoch.tolist() == [0, 1, 0] and df.lr.tolist() == [.1, .1, .2]
    assert df.mae.isna().tolist() == [False, False, True] and (df.time > 0).all()
    assert df.smooth_loss[1] != df.train_loss[1]

def test_history_is_empty_before_any_fit():
    "Without a fit, history is an empty frame"
    assert len(synth_learner().history) == 0

def test_evaluation_does_not_touch_the_record():
    "validate leaves losses, values, history and the latest row as they were"
    learn = synth_learner(metrics=mae)
    learn.fit(2)
    rec = learn.recorder
    before = [list(rec.losses), list(rec.values), rec.log, learn.history.to_csv(), learn.final_record]

    learn.validate()
    learn.validate(0)

    assert before == [list(rec.losses), list(rec.values), rec.log, learn.history.to_csv(), learn.final_record]

def test_logger_gets_names_and_rows():
    "`learn.logger` gets the names once a fit and each row"
    learn, seen = synth_learner(metrics=mae), []
    learn.logger = seen.append

    learn.fit(2)

    assert seen[0] == learn.recorder.metric_names and [r[0] for r in seen[1:]] == [0, 1] and len(seen[1]) == 5

def test_plot_loss_draws_validation_at_its_batch():
    "`plot_loss` draws the smoothed loss by batch, and validation points after the batches that they followed"
    learn = synth_learner(n=4)
    learn.fit(3)

    ax = learn.recorder.plot_loss(skip_start=0)

    train, valid = ax.get_lines()
    assert list(train.get_xdata()) == list(range(1, 13)) and np.allclose(train.get_ydata(), learn.recorder.losses)
    assert list(valid.get_xdata()) == [4, 8, 12]
    assert np.allclose(valid.get_ydata(), [r['valid_loss'] for r in learn.recorder.values])

def test_plot_loss_without_validation():
    "`plot_loss` works without validation rows, and with some that are missing"
    learn = synth_learner(n_valid=0)
    learn.fit(1)

    assert len(learn.recorder.plot_loss().get_lines()) == 1

def test_a_bad_loss_is_told_although_the_fit_fails():
    "A fit that ends with an error still tells that the loss was no number before"
    x = torch.full((4, 1), math.inf)
    raiser = Callback(after_batch=raises(ValueError))
    raiser.order = 70
    learn = synth_learner(raiser, dls=([(x, x)], None), model=RegModel())

    with pytest.warns(UserWarning,
                      match='the training loss is nan in epoch 0, batch 0'), pytest.raises(ValueError): learn.fit(1)

def test_batch_number_of_a_bad_loss_counts_cancelled_batches():
    "The batch that a warning names is the one of the loader, also if others were skipped"
    batches = [(torch.ones(4, 1), torch.ones(4, 1)) for _ in range(4)]
    batches[3][1][:] = nan
    def skip(cb):
        if cb.iter < 2: raise CancelBatchException
    learn = synth_learner(Callback(before_batch=skip), dls=(batches, None))

    with pytest.warns(UserWarning, match='epoch 0, batch 3'): learn.fit(1)

def test_recorder_with_workers_and_tensors():
    "Item weights come from the batch, whatever the loader"
    x = torch.randn(10, 1)
    learn = synth_learner(dls=(DataLoader(TensorDataset(x, x), 4, num_workers=1), None))

    learn.fit(1)

    assert [m[0] for m in learn.recorder.train.marks] == [4, 4, 2]
