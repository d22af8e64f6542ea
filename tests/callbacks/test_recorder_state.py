"""The Recorder's state: a resumed fit records what the uninterrupted one does, bit for bit, wherever it was saved."""
import io
import math
from copy import deepcopy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from learner.callback import Callback
from learner.callbacks import recorder as recorder_file
from learner.callbacks.recorder import Recorder
from learner.data import DataLoaders
from learner.events import CancelBatchException, CancelEpochException, CancelTrainException, CancelValidException
from learner.measure import AccumMetric, TorchMetric
from learner.metrics import mae
from learner.optim import SGD, Adam
from learner.plain import digest, to_plain
from tests.helpers import raises, synth_learner
from tests.saved_helpers import Rates, Saver, Stream, batches, go_on

places = [('batch', 0, 1), ('batch', 1, 0), ('batch', 1, 3), ('valid', 1), ('epoch', 0), ('epoch', 1)]
every_place = pytest.mark.parametrize('place', places, ids=lambda p: '-'.join(map(str, p)))


# ---- fits of three epochs of four batches

class NewOpt(Callback):
    "Another optimizer from the second batch of epoch 1 on"
    order = -50
    def before_batch(self):
        if self.training and (self.epoch, self.iter) == (1, 1):
            self.learn.opt_func = partial(SGD, mom=.9)
            self.learn.create_opt()

class Cancels(Callback):
    "Cuts short the training of epoch 0 and the validation of epoch 1"
    def after_batch(self):
        if self.training and (self.epoch, self.iter) == (0, 2): raise CancelTrainException
    def before_validate(self):
        if self.epoch == 1: raise CancelValidException

class Skips(Callback):
    "Leaves out every fourth batch"
    def before_batch(self):
        if self.iter % 4 == 0: raise CancelBatchException

def parts(pred, y): return {'mse': F.mse_loss(pred, y), 'l1': .1*F.l1_loss(pred, y)}
def columns(pred, y): return {'a': (pred-y).abs().mean(), 'b': pred.mean()}
def two_groups(model): return [[model.a], [model.b]]

makes = dict(
    plain=dict(),
    groups=dict(splitter=two_groups, param_opts={'a': dict(lr_mult=10)}, wd=.1),
    new_opt=dict(cbs=NewOpt),
    dict_loss=dict(loss_func=parts),
    sets=dict(dls=DataLoaders(batches(), {'a': batches(2, seed=2), 'b': batches(3, seed=3)}), metrics=[mae, columns]),
    no_valid=dict(dls=(batches(), None)),
    metrics=dict(rec=dict(train_metrics=True), metrics=lambda: [mae, columns, AccumMetric(mae), TorchMetric(Stream())]),
    cancels=dict(cbs=Cancels, rec=dict(train_metrics=True), metrics=mae),
    skips=dict(cbs=Skips, loss_func=parts, rec=dict(beta=.5, valid_metrics=False), metrics=mae),
)
every_make = pytest.mark.parametrize('make', makes)


def mk_learner(make='plain', more=()):
    kwargs = dict(dict(dls=(batches(), batches(2, seed=2)), opt_func=Adam), **makes[make])
    metrics = kwargs.pop('metrics', None)
    cbs = [Recorder(**kwargs.pop('rec', {})), Rates, *more, *filter(None, [kwargs.pop('cbs', None)])]
    return synth_learner(cbs, metrics=metrics() if callable(metrics) and metrics is not mae else metrics, **kwargs)

def saved_at(place, make='plain', n_epoch=3, more=()):
    "A Learner after its fit, and what was saved at the place"
    learn = mk_learner(make, [saver := Saver(*place), *more])
    learn.fit(n_epoch)
    return learn, saver.saved

def content(rec): return {k: v for k, v in rec.state_dict().items() if k not in Recorder.not_hashed}

def shown(learn):
    "All that the Recorder tells, but for times"
    rec = learn.recorder
    history = learn.history.drop(columns='time')
    return repr([rec.losses, rec.raw_losses, rec.lrs, {k: v.tolist() for k, v in rec.hps.items()}, rec.iters,
                 [(r.names, *r) for r in rec.values], learn.smooth_loss, [*history], history.to_dict(), rec.n_fit,
                 (learn.final_record.names, *learn.final_record), rec.columns, rec.metric_names])


# ---- resumed fits

@every_place
@every_make
def test_a_resumed_fit_records_the_same(make, place):
    "Losses, rates, rows and history of a fit that was saved anywhere and resumed are those of the uninterrupted one"
    learn, saved = saved_at(place, make)

    resumed = go_on(mk_learner(make), saved, 3)

    assert shown(resumed) == shown(learn) and digest(content(resumed.recorder)) == digest(content(learn.recorder))
    assert resumed.final_record is resumed.recorder.values[-1] and len(learn.recorder.raw_losses) > 6

def test_resumed_three_times_in_an_epoch():
    "A fit that is resumed, saved and resumed again, thrice in an epoch, records the same"
    learn, saved = saved_at(('batch', 1, 0), 'metrics')

    for i in (1, 2):
        go_on(mk_learner('metrics', [saver := Saver('batch', 1, i)]), saved, 3)
        saved = saver.saved

    assert shown(go_on(mk_learner('metrics'), saved, 3)) == shown(learn)

@every_place
def test_the_second_fit_is_resumed_with_the_history_of_the_first(place):
    "History goes on over all fits in a new process, and so does the number of the fit"
    learn = mk_learner()
    learn.fit(2)
    learn.fit(3, cbs=(saver := Saver(*place)))

    resumed = go_on(mk_learner(), saver.saved, 3)

    assert shown(resumed) == shown(learn) and resumed.history.fit.tolist() == [0, 0, 1, 1, 1]

def test_a_cancelled_epoch_has_no_row_after_a_resume_either():
    "An epoch cancelled before it gave anything leaves no row, also if the fit is resumed after it"
    cancel = partial(Callback, before_epoch=raises(CancelEpochException, nth=2))
    learn, saved = saved_at(('epoch', 1), more=[cancel()])

    resumed = go_on(mk_learner(), saved, 3)

    assert shown(resumed) == shown(learn) and learn.history.epoch.tolist() == [0, 2]

@every_make
def test_loaded_outside_of_a_fit(make):
    "In a new process the loaded state shows old epochs and the last record, and the next fit adds to them"
    learn = mk_learner(make)
    learn.fit(2)
    fresh, times = mk_learner(make), learn.history.time.tolist()

    fresh.recorder.load_state_dict(deepcopy(learn.recorder.state_dict()))
    told = shown(fresh)
    fresh.fit(1)

    assert told == shown(learn)
    assert fresh.history.time.tolist()[:2] == times and fresh.history.fit.tolist() == [0, 0, 1]

def test_gone_on_with_in_the_same_process():
    "A fit that is gone on with where it was left does not make its series anew; any other state does"
    learn, seen = mk_learner(), []
    learn.fit(1)
    series, state, other = learn.recorder.train, learn.recorder.state_dict(), deepcopy(learn.recorder.state_dict())
    def load(cb, state):
        cb.recorder.load_state_dict(state)
        seen.append((cb.recorder.train is series, len(cb.recorder.losses)))

    learn.fit(2, start_epoch=1, cbs=Callback(before_epoch=partial(load, state=state)))
    learn.fit(3, start_epoch=2, cbs=Callback(before_epoch=partial(load, state=state)))
    learn.fit(4, start_epoch=3, cbs=Callback(before_epoch=partial(load, state=other)))

    assert seen == [(True, 4), (False, 4), (False, 4)] and len(learn.recorder.losses) == 8

def test_loaded_without_a_learner():
    "A Recorder can be loaded before it joins a Learner"
    learn, rec = mk_learner(), Recorder()
    learn.fit(1)

    rec.load_state_dict(learn.recorder.state_dict())

    assert rec.values == learn.recorder.values and rec.losses == learn.recorder.losses

def test_an_empty_state():
    "What is saved before the first fit can be loaded"
    learn = mk_learner()

    learn.recorder.load_state_dict(mk_learner().recorder.state_dict())
    learn.fit(1)

    assert learn.recorder.n_fit == 0 and len(learn.history) == 1

def test_a_row_is_not_doubled():
    "A state taken in `after_epoch` has the row; a validation that is run once more adds no second one"
    states = []
    learn = mk_learner(more=[Callback(after_epoch=lambda cb: states.append(deepcopy(cb.recorder.state_dict())))])
    learn.fit(1)
    again = mk_learner(more=[Callback(before_validate=lambda cb: cb.recorder.load_state_dict(states[0]))])

    again.fit(1)

    assert shown(again) == shown(learn) and len(again.history) == 1


# ---- what the state is

def test_the_state_opens_plainly():
    "A file of it opens without an allow-list, needs no tags, and holds its series as tensors"
    _, saved = saved_at(('batch', 1, 1), 'metrics')
    state = saved['states']['recorder']

    torch.save(state, f := io.BytesIO())
    f.seek(0)
    opened = torch.load(f, weights_only=True)

    assert digest(opened) == digest(state) and repr(to_plain(state)) == repr(state)
    train = state['train']
    assert train['values'].dtype == torch.float64 and train['marks'].shape == (6, 4)
    assert [raw.dtype for _, _, raw in train['readings']] == [torch.float64]

@pytest.mark.parametrize('make', ['plain', 'new_opt', 'metrics'])
def test_earlier_states_change_nothing(make):
    "The content is the same whether states were taken at each batch or never before"
    learn, often = mk_learner(make), mk_learner(make, [Callback(cleanup_batch=lambda cb: cb.recorder.state_dict())])

    learn.fit(3)
    often.fit(3)

    assert digest(content(often.recorder)) == digest(content(learn.recorder))

def test_a_state_stays_as_it_was():
    "Training on does not change a state that was taken before"
    states = []
    def take(cb):
        if cb.training: states.append((state := cb.recorder.state_dict(), digest(state)))
    learn = mk_learner('metrics', [Callback(cleanup_batch=take)])

    learn.fit(2)

    assert [digest(state) for state, _ in states] == [before for _, before in states]

def test_rates_in_tensors():
    "Rates that the optimizer holds as tensors come back as the numbers that they were"
    learn = synth_learner(Rates, opt_func=partial(torch.optim.Adam, capturable=False), lr=.1, n=3)
    learn.create_opt()
    for g in learn.opt.opt.param_groups: g['lr'] = torch.tensor(.1)
    learn.fit(1)
    rec = Recorder()

    rec.load_state_dict(learn.recorder.state_dict())

    assert rec.lrs == learn.recorder.lrs == pytest.approx([.01, .02, .03])
    assert rec.hps['lr'].tolist() == learn.recorder.hps['lr'].tolist()

def test_lr_curve_is_left():
    "What lr_find found is no part of the state, and survives loading one"
    learn = mk_learner()
    learn.fit(1)
    learn.recorder.lr_curve = curve = dict(lrs=[1.])

    learn.recorder.load_state_dict(state := learn.recorder.state_dict())

    assert learn.recorder.lr_curve is curve and 'lr_curve' not in state


# ---- times

@pytest.mark.parametrize('place', [('batch', 1, 1), ('valid', 1), ('epoch', 0)], ids=str)
def test_an_epochs_time_goes_on(place, monkeypatch):
    "An epoch's time is what had passed when it was saved and what passes from the resume on"
    clock = SimpleNamespace(now=0.)
    monkeypatch.setattr(recorder_file, 'time', SimpleNamespace(perf_counter=lambda: clock.now))
    def tick(cb): clock.now += cb.training
    learn, saved = saved_at(place, more=[Callback(before_batch=tick)])
    clock.now = 1000.

    resumed = go_on(mk_learner(more=[Callback(before_batch=tick)]), saved, 3)

    assert resumed.history.time.tolist() == learn.history.time.tolist() == [4, 4, 4]
    assert list(resumed.history) == list(learn.history)

def test_times_stand_apart():
    "Two equal fits differ in `times` only, which the Recorder declares, beside what people note, as not hashed"
    learn, again = mk_learner(), mk_learner()
    learn.fit(2)
    again.fit(2)

    a, b = learn.recorder.state_dict(), again.recorder.state_dict()

    assert {k for k in a if digest(a[k]) != digest(b[k])} == {'times'}
    assert {*Recorder.not_hashed} == {'times', 'notes'}


# ---- evaluations, bad losses, cancelled phases

@pytest.mark.parametrize('at', ['after_batch', 'after_train', 'after_validate', 'after_epoch'])
def test_an_evaluation_leaves_the_state(at):
    "`validate` within a fit leaves the Recorder's whole state as it was"
    pairs = []
    def look(cb):
        before = digest(content(cb.recorder))
        cb.learn.validate(cbs=Callback())
        pairs.append((before, digest(content(cb.recorder))))

    mk_learner('metrics', [Callback(**{at: look})]).fit(2)

    assert pairs and all(a == b for a, b in pairs)

def test_a_bad_loss_is_told_once():
    "A loss that is no number is told when it is saved, and not again after the resume"
    bad = batches()
    bad[1][1][0] = math.nan
    def save(cb):
        if cb.iter == 1:
            with pytest.warns(UserWarning, match='epoch 0, batch 1'): cb.recorder.state_dict()
    learn = synth_learner([Rates, saver := Saver('batch', 0, 1), Callback(cleanup_batch=save)], dls=(bad, None),
                          opt_func=Adam)
    learn.fit(1)

    resumed = go_on(synth_learner(Rates, dls=(bad, None), opt_func=Adam), saver.saved, 1)

    assert shown(resumed) == shown(learn)

def test_metrics_are_left_alone_outside_of_a_fit():
    "What metrics had accumulated is put back in the fit that goes on, and nowhere else"
    _, saved = saved_at(('batch', 1, 1), 'metrics')
    learn = mk_learner('metrics')
    learn.fit(1)

    learn.recorder.load_state_dict(saved['states']['recorder'])

    assert all(math.isnan(m.value) for m in learn.metrics)

@pytest.mark.parametrize('at, ex, missing', [
    ('before_train', CancelTrainException, {'train_loss', 'train_mae'}),
    ('before_validate', CancelValidException, {'valid_loss', 'valid_mae'})])
def test_a_phase_cancelled_before_the_recorder_saw_it(at, ex, missing):
    "A phase that an earlier callback cancels has NaN in its columns, not what is left of another phase"
    raiser = Callback(**{at: raises(ex, nth=2)})
    raiser.order = -5
    learn = synth_learner([Recorder(train_metrics=True), raiser], dls=(batches(), batches(2)), metrics=mae)

    learn.fit(2)

    first, second = learn.recorder.values
    assert first.names == second.names and {n for n in second.names if math.isnan(second[n])} == missing
