"""What a fit shows, whatever way it ends, and what that costs a batch."""
import math
import sys

import pytest
from torch import nn

from learner.callback import Callback
from learner.callbacks import progress
from learner.callbacks.progress import ProgressCallback, ShowGraphCallback
from learner.callbacks.recorder import Recorder
from learner.display import Live, LogLive, TerminalLive
from learner.events import CancelEpochException, CancelFitException, CancelTrainException
from learner.learner import Learner
from learner.metrics import Metric
from tests.helpers import RegModel, raises, synth_dls, synth_learner


class Shown(Live):
    "A display that keeps what it is given, and wants a bar after each batch"
    interval = 0.

    def __init__(self): self.calls = []
    def start(self, columns): self.calls.append(('start', [*columns]))
    def update(self, bar): self.calls.append(('update', bar))
    def row(self, row): self.calls.append(('row', row))
    def graph(self, curves): self.calls.append(('graph', curves))
    def close(self, note=''): self.calls.append(('close', note))

    def got(self, kind): return [o for k, o in self.calls if k == kind]
    def bars(self): return [(b.phase, b.i, b.n) for b in self.got('update') if b]


def shown_learner(*cbs, **kwargs):  # a learner, and where it shows itself
    shown = Shown()
    return synth_learner([Recorder, ProgressCallback(lambda: shown), *cbs], default_cbs=False, **kwargs), shown


# ---- what is shown when

def test_bars_and_rows():
    "A bar at the start of a phase and after each batch, the line freed after a phase, a row after an epoch"
    learn, shown = shown_learner(n=2, n_valid=1)

    learn.fit(2)
    row = shown.got('row')[1]

    assert shown.got('start') == [['epoch', 'train_loss', 'valid_loss', 'time']]
    assert shown.bars() == [('train', 0, 2), ('train', 1, 2), ('train', 2, 2), ('valid', 0, 1), ('valid', 1, 1)]*2
    without_bars = [k for k, o in shown.calls if k != 'update' or o is None]
    assert without_bars == ['start', *['update', 'update', 'row']*2, 'close']
    assert [*row] == ['epoch', 'train_loss', 'valid_loss', 'time'] and row['epoch'] == 1
    assert row['valid_loss'] == learn.recorder.values[1]['valid_loss']
    assert shown.got('close') == ['']


def test_bar_says_loss_and_speed():
    "A training bar has the smoothed loss once there is one, and a speed from its second batch on; validation no loss"
    learn, shown = shown_learner(n=3)

    learn.fit(1)
    train, valid = [[b for b in shown.got('update') if b and b.phase == p] for p in ('train', 'valid')]

    assert [b.loss for b in train] == [None, *learn.recorder.losses]
    assert [b.rate is None for b in train] == [True, True, False, False]
    assert [b.loss for b in valid] == [None, None]
    assert all(0 <= a.elapsed <= b.elapsed for a, b in zip(train, train[1:]))


def test_loader_without_length():
    "Without a length the bars have no end"
    class Unsized:
        def __init__(self, dl): self.dl = dl
        def __iter__(self): return iter(self.dl)
    learn, shown = shown_learner(dls=tuple(map(Unsized, synth_dls(n=2))))

    learn.fit(1)

    assert {n for _, _, n in shown.bars()} == {None} and ('train', 2, None) in shown.bars()


def test_no_validation():
    "Without a validation set there is no bar for it"
    learn, shown = shown_learner(n_valid=0)

    learn.fit(1)

    assert {phase for phase, _, _ in shown.bars()} == {'train'} and len(shown.got('row')) == 1


def test_each_fit_has_its_own_display():
    "Each fit shows itself anew, and nothing is held between fits"
    seen = []
    learn = synth_learner([Recorder, ProgressCallback(lambda: seen.append(Shown()) or seen[-1])], default_cbs=False)

    for _ in range(2): learn.fit(1)

    assert [[k for k, _ in s.calls if k in ('start', 'row', 'close')] for s in seen] == [['start', 'row', 'close']]*2
    assert learn.progress.live is None


def test_metric_that_adds_columns():
    "A metric that returns a dict gives its columns with the first row"
    class Extremes(Metric):
        name = 'extremes'
        def reset(self): self.seen = []
        def accumulate(self, learn): self.seen.append(learn.pred.flatten())
        @property
        def value(self): return dict(low=min(p.min() for p in self.seen), high=max(p.max() for p in self.seen))
    learn, shown = shown_learner(metrics=Extremes())

    learn.fit(2)

    assert {tuple(r) for r in shown.got('row')} == {('epoch', 'train_loss', 'valid_loss', 'low', 'high', 'time')}


def test_evaluation_shows_nothing():
    "Evaluation shows nothing, outside a fit and inside one"
    inside, shown = shown_learner(Callback(after_batch=lambda cb: cb.learn.validate() if cb.training else None), n=1)
    outside, unused = shown_learner()

    outside.validate()
    inside.fit(1)

    assert unused.calls == []
    assert shown.bars() == [('train', 0, 1), ('train', 1, 1), ('valid', 0, 1), ('valid', 1, 1)]


@pytest.mark.parametrize('kwargs, rows', [(dict(), [0, 1, 2]), (dict(start_epoch=2), [2])])
def test_rows_of_skipped_epochs(kwargs, rows):
    "An epoch that was skipped has no row"
    learn, shown = shown_learner()

    learn.fit(3, **kwargs)

    assert [r['epoch'] for r in shown.got('row')] == rows


def test_row_of_cancelled_epoch():
    "An epoch cancelled before anything ran has no row, also not that of the epoch before"
    learn, shown = shown_learner(Callback(before_epoch=raises(CancelEpochException, nth=2)))

    learn.fit(3)

    assert [r['epoch'] for r in shown.got('row')] == [0, 2]


def test_row_of_cancelled_phase():
    "A training phase cancelled before its first batch leaves NaN in its own column"
    learn, shown = shown_learner(Callback(before_train=raises(CancelTrainException)))

    learn.fit(1)
    row, = shown.got('row')

    assert math.isnan(row['train_loss']) and not math.isnan(row['valid_loss'])


@pytest.mark.parametrize('bar', [True, False])
def test_no_bar(bar, capsys, monkeypatch):
    "`create_mbar=False` gives plain lines instead of the display"
    monkeypatch.delenv('LEARNER_DISPLAY', raising=False)
    learn, shown = shown_learner()
    learn.create_mbar = bar

    learn.fit(1)

    assert ('row' in dict(shown.calls)) == bar
    assert len(capsys.readouterr().out.splitlines()) == (0 if bar else 2)


def test_logger_gets_the_rows():
    "Where a logger takes the rows there is only the bar"
    learn, shown = shown_learner()
    learn.logger = (logged := []).append

    learn.fit(1)

    assert len(logged) == 2 and shown.bars() and not shown.got('row') and shown.got('start') == [[]]


def test_without_recorder():
    "Without a Recorder there is only the bar, and no loss in it"
    shown = Shown()
    learn = synth_learner(ProgressCallback(lambda: shown), default_cbs=False)

    learn.fit(1)

    assert {b.loss for b in shown.got('update') if b} == {None} and not shown.got('row')


# ---- the end, however it comes

@pytest.mark.parametrize('ex', [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize('event, nth, training, note', [
    ('after_loss', 6, True, 'stopped in epoch 2/3 at training batch 2/4'),
    ('after_loss', 2, False, 'stopped in epoch 2/3 during validation'),
    ('after_validate', 1, None, 'stopped in epoch 1/3 during validation'),
    ('before_train', 2, None, 'stopped in epoch 2/3'),
    ('after_train', 2, None, 'stopped in epoch 2/3 at training batch 4/4'),
    ('before_fit', 1, None, ''),
    ('after_epoch', 1, None, 'stopped in epoch 1/3')])
def test_stopped(ex, event, nth, training, note):
    "After an error or an interrupt the display is closed once, and says where the fit stopped"
    learn, shown = shown_learner(Callback(**{event: raises(ex, training, nth)}), n=4)
    learn.cbs[-1].order = 59 if event != 'before_fit' else 61

    with pytest.raises(ex): learn.fit(3)

    assert shown.got('close') == [note] and learn.progress.live is None


def test_ended_early():
    "A fit that a callback ends has not stopped anywhere: its table is complete"
    learn, shown = shown_learner(Callback(after_epoch=raises(CancelFitException, nth=2)))
    learn.cbs[-1].order = 61

    learn.fit(5)

    assert len(shown.got('row')) == 2 and shown.got('close') == ['']


def test_display_that_does_not_start(monkeypatch):
    "An unknown display is an error before training, with nothing to close"
    monkeypatch.setenv('LEARNER_DISPLAY', 'tty')
    learn = synth_learner([Recorder, ProgressCallback], default_cbs=False)

    with pytest.raises(ValueError, match='LEARNER_DISPLAY'): learn.fit(1)

    assert learn.train_iter == 0


# ---- what it costs

def calls(f):
    "Python and C calls made by `f()`"
    seen = []
    sys.setprofile(lambda _, what, __: seen.append(what) if what in ('call', 'c_call') else None)
    try: f()
    finally: sys.setprofile(None)
    return len(seen)


def test_batch_costs_two_calls(monkeypatch):
    "A batch after which no bar is due costs one call of the handler and one of the clock"
    monkeypatch.setattr(progress, 'perf_counter', lambda: 0.)
    def extra(n):
        with_bar, without = [synth_learner([Recorder, *cbs], n=n, default_cbs=False)
                             for cbs in ([ProgressCallback(TerminalLive)], [])]
        for learn in (with_bar, without): learn.fit(1)  # what happens once only
        return calls(lambda: with_bar.fit(1)) - calls(lambda: without.fit(1))

    assert extra(60)-extra(10) <= 2*50


@pytest.mark.parametrize('step, n_read', [(0., 0), (.03, 5), (1., 20)])
def test_loss_is_read_when_a_bar_is_due(step, n_read, monkeypatch):
    "The loss is read from the device only for a bar that is due, and a bar is due each `interval`"
    reads, clock = [], [0.]
    class Reading(Learner):
        @property
        def smooth_loss(self): return reads.append(self.iter) or .5
    def tick():
        clock[0] += step
        return clock[0]
    class Every(Shown): interval = .1
    monkeypatch.setattr(progress, 'perf_counter', tick)
    learn = Reading(synth_dls(n=20), RegModel(), nn.functional.mse_loss, default_cbs=False,
                    cbs=[Recorder, ProgressCallback(Every)])

    learn.fit(1)

    assert len(reads) == n_read


def test_log_reads_no_loss(monkeypatch):
    "Where no bar is shown the loss is never read during the epoch"
    class Unread(Learner):
        @property
        def smooth_loss(self): raise AssertionError("read")
    learn = Unread(synth_dls(), RegModel(), nn.functional.mse_loss, default_cbs=False,
                   cbs=[Recorder, ProgressCallback(LogLive)])

    learn.fit(1)

    assert learn.train_iter == 2


# ---- the graph

def test_graph():
    "The graph is drawn from the losses so far, the validation losses at their batch"
    learn, shown = shown_learner(ShowGraphCallback, n=3)
    kept = []
    learn.add_cb(Callback(after_fit=lambda cb: kept.append(shown.got('graph')[0]())))

    learn.fit(2)

    assert kept == [{'train (smoothed)': (range(1, 7), learn.recorder.losses),
                     'valid': ([3, 6], [row['valid_loss'] for row in learn.recorder.values])}]


def test_graph_leaves_out_the_start():
    "Of a longer curve the first batches are left out"
    learn, shown = shown_learner(ShowGraphCallback, n=30, n_valid=0)
    kept = []
    learn.add_cb(Callback(after_fit=lambda cb: kept.append(shown.got('graph')[0]())))

    learn.fit(1)

    assert kept == [{'train (smoothed)': (range(6, 31), learn.recorder.losses[5:])}]


@pytest.mark.parametrize('cbs, missing', [([Recorder], 'ProgressCallback'), ([ProgressCallback], 'Recorder')])
def test_graph_needs_its_callbacks(cbs, missing):
    "What the graph cannot do without is named before training"
    learn = synth_learner([*cbs, ShowGraphCallback], default_cbs=False)

    with pytest.raises(RuntimeError, match=f'`ShowGraphCallback` works with `{missing}`'): learn.fit(1)


@pytest.mark.parametrize('ex', [CancelFitException, ValueError])
def test_row_of_an_epoch_that_ends_the_fit(ex):
    "The row of the epoch whose `after_epoch` ends the fit is shown too"
    learn, shown = shown_learner(Callback(after_epoch=raises(ex, nth=2)))

    try: learn.fit(5)
    except ValueError: pass

    assert [r['epoch'] for r in shown.got('row')] == [0, 1]
