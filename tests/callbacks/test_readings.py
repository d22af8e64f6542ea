"""What the Recorder has, by name, and numbers that anybody notes beside it."""
import math
from threading import Thread

import pytest
import torch
from torch import nn

import learner.callbacks.readings as readings
from learner.callback import Callback
from learner.callbacks.checkpoint import Checkpoint
from learner.callbacks.recorder import Recorder
from learner.callbacks.schedule import ParamScheduler
from learner.callbacks.validate_every import ValidateEvery
from learner.data import DataLoaders
from learner.events import CancelValidException
from learner.metrics import Metric
from learner.optim import SGD
from learner.schedules import SchedLin
from tests.bench.test_counts import waits
from tests.helpers import raises, synth_dls, synth_learner
from tests.resume_helpers import AskAt, noisy_learner, record
from tests.saved_helpers import Rates, batches

assert readings


class Norms(Callback):
    "Notes the norm of the gradients before each step, and each batch of an evaluation"
    def before_step(self):
        self.learn.note('train/norm', torch.stack([p.grad.norm() for p in self.model.parameters()]).norm())

    def after_batch(self):
        if not self.training: self.learn.note('valid/mean', self.pred.mean(), len(self.pred))


# ---- what the Recorder has

def test_columns_by_row():
    "A column has a value for each row of the last fit; each counts alike"
    def mae(p, y): return (p-y).abs().mean()
    learn = synth_learner(metrics=mae, n=3)
    learn.fit(2)
    learn.fit(3)
    rec, table = learn.recorder, learn.history[2:]

    for name in ('train_loss', 'valid_loss', 'mae', 'smooth_loss', 'epoch', 'time'):
        assert rec[name].values == [*table[name]] and rec[name].counts == [1]*3 and name in rec

    assert rec['valid_loss'].current() == learn.final_record['valid_loss'] and rec['epoch'].max() == 2

def test_losses_by_batch():
    "'loss' has the raw loss of each batch, by its items"
    learn = synth_learner(dls=(batches(4), None))
    learn.fit(2)

    losses = learn.recorder['loss']

    assert losses.values == learn.recorder.raw_losses and losses.counts == [8, 8, 8, 3]*2
    assert losses.mean(4) == pytest.approx(learn.recorder['train_loss'].current(), rel=1e-12)

def test_hypers_by_batch():
    "Hyper-parameters have a value for each batch: the last group's, and where there are several each group's"
    learn = synth_learner(Rates, n=8, opt_func=SGD, splitter=lambda m: [[m.a], [m.b]])
    learn.fit(1, slice(1e-3, 1e-2))
    sched = ParamScheduler({'wd': SchedLin(0., .7)})
    learn.fit(1, cbs=sched)
    rec = learn.recorder

    assert rec['lr'].values == rec['lr_1'].values == rec.lrs and len({*rec['lr'].values}) == 7
    assert rec['wd_0'].values == [*rec.hps['wd'][:, 0]] and 'mom' not in rec and 'lr_2' not in rec

def test_before_there_is_anything():
    "A fit that has just begun has all its columns, without values; a new Learner too, as far as they are known"
    sizes = []
    def look(cb): sizes.extend(len(cb.recorder[k]) for k in ('valid_loss', 'loss', 'lr', 'time'))
    learn = synth_learner(Callback(before_epoch=look))

    assert math.isnan(learn.recorder['loss'].mean()) and len(learn.recorder['lr']) == 0
    learn.fit(1)

    assert sizes == [0]*4

def test_a_value_that_is_not_there():
    "A phase that was cancelled leaves NaN in its place; rows stay aligned"
    learn = synth_learner(Callback(before_validate=raises(CancelValidException, nth=2)))

    learn.fit(3)
    values = learn.recorder['valid_loss'].values

    assert [math.isnan(v) for v in values] == [False, True, False] and learn.recorder['valid_loss'].max() == max(
        values[::2])

def test_rows_of_validate_every():
    "Its rows are rows too, with their steps"
    learn = synth_learner(ValidateEvery('2it'), n=4)

    learn.fit(1)

    assert learn.recorder['step'].values == [0, 2, 4] and len(learn.recorder['valid_loss']) == 3

@pytest.mark.parametrize('name, near', [('val_loss', 'valid_loss'), ('lrs', 'lr'), ('train/nrm', 'train/norm')])
def test_an_unknown_name(name, near):
    "It is an error that names the nearest, and all there are"
    learn = synth_learner(Norms)
    learn.fit(1)

    with pytest.raises(KeyError, match=f'no `{name}`; did you mean `{near}`') as e: learn.recorder[name]
    for known in ('valid_loss', 'loss', 'lr', 'time', 'train/norm', 'valid/mean'): assert f' {known}' in str(e.value)
    assert name not in learn.recorder
    with pytest.raises(KeyError, match='no `0`; there are epoch'): learn.recorder[0]


# ---- what is noted

def test_notes_are_read_by_name():
    "Means, the last one, the highest, of what was noted; also in evaluations, each value with its items"
    norms = []
    learn = synth_learner([Norms, Callback(before_step=lambda cb: norms.append(cb.learn.model.a.grad.item()))], n=5,
                          n_valid=3)
    learn.fit(2)
    noted = learn.recorder['train/norm']

    assert len(noted) == len(norms) == 10 and noted.mean(4) == pytest.approx(sum(noted.values[-4:])/4)
    assert noted.current() == noted.values[-1] and noted.max() == max(noted.values)
    assert learn.recorder['valid/mean'].counts == [8]*6 and 'train/norm' not in learn.history

def test_noting_waits_for_nothing():
    "Batches that note tensors wait for no device; they are read when what the epoch has left is taken down"
    def n_waits(cbs, n): return len(waits(lambda: synth_learner(cbs, n=n).fit(1)))

    assert n_waits(Norms, 20)-n_waits(Norms, 10) == n_waits(Callback, 20)-n_waits(Callback, 10)

def test_evaluations_keep_what_they_note():
    "Notes of a validation that is called for, in a fit or after it, stay"
    def look(cb):
        if cb.iter == 0: cb.learn.validate()
    learn = synth_learner([Norms, Callback(after_step=look)])

    learn.fit(1)
    in_fit = len(learn.recorder['valid/mean'])
    learn.validate()

    assert (in_fit, len(learn.recorder['valid/mean'])) == (2, 3)

def test_notes_belong_to_a_fit():
    "The next fit starts without; what is noted in between belongs to the one before"
    learn = synth_learner()
    learn.note('a', 1)
    assert learn.recorder['a'].values == [1]
    learn.fit(1)
    assert 'a' not in learn.recorder
    learn.note('a', 2)
    learn.note('a', torch.tensor(3))

    assert learn.recorder['a'].values == [2, 3]

def test_what_the_learning_rate_finder_notes_is_gone(tmp_path):
    "`lr_find` leaves the notes as they were"
    learn = synth_learner(Norms, n=20, path=tmp_path)
    learn.fit(1)
    before = list(learn.recorder['train/norm'].values)

    learn.lr_find(num_it=10, show_plot=False, suggest_funcs=None)

    assert learn.recorder['train/norm'].values == before

@pytest.mark.parametrize('name', ['loss', 'lr', 'lr_0', 'mom_12', 'eps', 'train_loss', 'valid_loss', 'time', 'step',
                                  'epoch', 'smooth_loss', 'mae'])
def test_names_of_the_recorder(name):
    "A name that the Recorder uses itself is refused"
    def mae(p, y): return (p-y).abs().mean()
    learn = synth_learner(metrics=mae)
    learn.fit(1)

    with pytest.raises(ValueError, match=f"`{name}` is a name that the Recorder uses itself; .*'my/{name}'"):
        learn.note(name, 1)

@pytest.mark.parametrize('name', ['', 3, None])
def test_what_is_no_name(name):
    "So is what is no text"
    with pytest.raises(TypeError, match='the name is'): synth_learner().note(name, 1)

@pytest.mark.parametrize('value, error', [(torch.ones(2), ValueError), ('1', TypeError), (None, TypeError)])
def test_what_is_no_value(value, error):
    "The error says which note it is of, and nothing is noted"
    learn = synth_learner()

    with pytest.raises(error, match='note: `a`: the value is'): learn.note('a', value)
    assert 'a' not in learn.recorder

def test_without_recorder():
    "Nobody would keep it: an error, also where an evaluation has a Recorder of its own"
    learn = synth_learner(default_cbs=False)
    in_evaluation = Callback(after_batch=lambda cb: cb.learn.note('a', 1))

    for do in (lambda: learn.note('a', 1), lambda: learn.validate(cbs=in_evaluation)):
        with pytest.raises(RuntimeError, match='`a` would be kept by the `Recorder`'): do()
    learn.fit(1, cbs=[Recorder(), Callback(after_epoch=lambda cb: cb.learn.note('a', 1))])

def test_a_fit_begins_with_the_recorder():
    "What is noted in `before_fit` ahead of the Recorder would be lost: an error; behind it, it stays"
    early = Callback(before_fit=lambda cb: cb.learn.note('a', 1))
    late = Callback(before_fit=lambda cb: cb.learn.note('a', 1))
    late.order = 51

    with pytest.raises(RuntimeError, match='note it at `before_epoch`'): synth_learner(early).fit(1)
    known = synth_learner()
    known.note('a', 1)
    with pytest.raises(RuntimeError, match='note it at `before_epoch`'): known.fit(1, cbs=Callback(
        before_fit=lambda cb: cb.learn.note('a', 1)))
    learn = synth_learner(late)
    learn.fit(1)

    assert learn.recorder['a'].values == [1]

def test_a_metric_that_comes_with_a_name_that_is_noted():
    "A column that nobody could know of before gets another name"
    class Late(Metric):
        greater_is_better, n = None, 0
        def __init__(self): self.name = 'late'
        def reset(self): self.n = 0
        def accumulate(self, learn): self.n += 1
        @property
        def value(self): return {'found': 7.} if self.n else math.nan
    learn = synth_learner(Callback(after_loss=lambda cb: cb.learn.note('found', 1)), metrics=Late())

    learn.fit(1)

    assert learn.recorder['found'].max() == 1 and learn.recorder['found_2'].values == [7]


def test_another_thread():
    "A number noted by another thread is kept, at whatever event the fit is"
    def noting(cb): (thread := Thread(target=cb.learn.note, args=('other', cb.learn.n_step))).start() or thread.join()
    early = Callback(before_fit=noting, after_batch=noting)
    early.order = -50
    learn = synth_learner(early, n=2, n_valid=1)

    learn.fit(1)

    assert learn.recorder['other'].values == [1, 2, 2]  # what came before the fit began for the Recorder is forgotten

def test_a_number_too_large_for_a_float():
    "The error says which one it is"
    with pytest.raises(ValueError, match='note: `big`: the value is too large'): synth_learner().note('big', 10**400)

# ---- in files

@pytest.mark.parametrize('at', [3, 6])
def test_a_resumed_fit_has_them(at, tmp_path):
    "A fit that is stopped in training or validation, and gone on with in another Learner, has noted the same"
    whole, learn = (noisy_learner(tmp_path/name, cbs=Norms) for name in ('whole', 'part'))
    whole.fit(3, 1e-2)
    learn = noisy_learner(tmp_path/'part', cbs=Norms)
    with pytest.raises(KeyboardInterrupt): learn.fit(3, 1e-2, cbs=[Checkpoint('2it'), AskAt(at)], resume=True)
    again = noisy_learner(tmp_path/'part', cbs=Norms)

    again.fit(3, 1e-2, cbs=Checkpoint('2it'), resume=True)

    for name in ('train/norm', 'valid/mean'):
        assert again.recorder[name].values == whole.recorder[name].values
        assert again.recorder[name].counts == whole.recorder[name].counts
    assert record(again) == record(whole)

def test_a_fit_in_pieces_has_them():
    "So has one that is made by steps, with what is noted in between"
    whole, pieces = (synth_learner(Norms, n=3) for _ in range(2))
    whole.fit(2)

    for _ in range(3):
        pieces.step(2, n_epoch=2)
        pieces.note('between', pieces.n_step)

    assert pieces.recorder['train/norm'].values == whole.recorder['train/norm'].values
    assert pieces.recorder['between'].values == [2, 4, 6]

def test_evaluations_between_pieces():
    "What an evaluation between two steps notes stays too"
    learn = synth_learner(Norms, n=3)

    for _ in range(3):
        learn.step(1, n_epoch=1)
        learn.validate()

    assert len(learn.recorder['valid/mean']) == 3 and len(learn.recorder['train/norm']) == 3

def test_files_from_before_there_were_notes():
    "A state without notes is loaded"
    learn = synth_learner(Norms)
    learn.fit(1)
    state = learn.state_dict()
    del state['callbacks']['recorder']['notes']

    learn.load_state_dict(state)

    assert 'train/norm' not in learn.recorder and len(learn.recorder['valid_loss']) == 1

def test_notes_are_no_part_of_the_hash():
    "What is noted, which may be a time, decides nothing of how training goes on"
    learn = synth_learner()
    learn.fit(1)
    before = learn.state_hash()
    learn.note('seconds', 1.5)

    assert learn.state_hash() == before

def test_a_loss_of_parts():
    "A loss with parts has a column for each, by key as in the table"
    class Parts(nn.Module):
        def forward(self, p, y): return dict(a=(p-y).square().mean(), b=(p-y).abs().mean())
    learn = synth_learner(loss_func=Parts(), dls=DataLoaders(*synth_dls()))

    learn.fit(2)

    assert learn.recorder['train_a'].values == [*learn.history['train_a']] and len(learn.recorder['valid_b']) == 2
