"""`learn.test`: an evaluation like `validate`, of test sets, under their names."""
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from learner import Row, mae, mse
from learner.callback import Callback
import learner.callbacks.testing  # noqa: F401  # adds `learn.test`
from learner.callbacks.recorder import Recorder
from learner.data import DataLoaders
from learner.events import CancelFitException
from learner.metrics import AvgMetric
from tests.helpers import Counts, raises, synth_dls, synth_learner

data = TensorDataset(x := torch.arange(12.)[:, None], 2*x)
loader = DataLoader(data, 4)


def learner_of(**kwargs): return synth_learner(metrics=kwargs.pop('metrics', mae), **kwargs)

def by_hand(learn, x=x):
    losses = nn.functional.mse_loss, nn.functional.l1_loss
    with torch.no_grad(): return [float(f(learn.model(x), 2*x)) for f in losses]


class Stream(IterableDataset):
    "Batches, one after the other"
    def __iter__(self): return iter(loader)


class Events(Callback):
    "Notes the events of an evaluation, and its stage"
    def __init__(self):
        self.seen = []
        super().__init__(**dict.fromkeys(('before_validate', 'after_validate', 'cleanup_validate'), self.note))
    @staticmethod
    def note(cb): cb.seen.append((cb.learn._at_work[1], cb.stage, cb.training))


# ---- what it gives

@pytest.mark.parametrize('dl', [loader, [*loader], Stream()], ids=lambda o: type(o).__name__)
def test_one_set(dl):
    "Loss and metrics are those of a loop by hand, and the loss is named after the test"
    learn = learner_of()

    row = learn.test(dl)

    assert isinstance(row, Row) and row.names == ('test_loss', 'mae')
    assert row == pytest.approx(by_hand(learn)) and row['test_loss'] == row[0]

def test_several_sets():
    "Sets are evaluated one after the other, and their columns have their names in front"
    learn = learner_of()

    row = learn.test({'all': loader, 'few': DataLoader(data, 4, sampler=range(4)), 'all_valid': loader})

    assert row.names == ('all_test_loss', 'all_mae', 'few_test_loss', 'few_mae', 'all_valid_test_loss', 'all_valid_mae')
    assert row == pytest.approx([*by_hand(learn), *by_hand(learn, x[:4]), *by_hand(learn)])

def test_a_validation_set_by_name():
    "A validation set can be tested on by its name"
    dls = DataLoaders(synth_dls()[0], {'near': loader, 'far': synth_dls()[1]})
    learn = learner_of(dls=dls)

    row, valid = learn.test('near'), learn.validate()

    assert row.names == ('test_loss', 'mae') and (*row,) == (valid['near_valid_loss'], valid['near_mae'])

@pytest.mark.parametrize('metrics,names', [(mse, ['mse']), ([mae, mse], ['mae', 'mse']), ([], [])])
def test_other_metrics(metrics, names):
    "Other metrics are measured if they are given, none for an empty list"
    assert learner_of().test(loader, metrics).names == ('test_loss', *names)

def test_metrics_keep_their_names():
    "A metric may be named like a column of the validation; parts of the loss, and metrics of both phases, are renamed"
    def valid_pixels(pred, y): return pred.mean()
    def loss_func(pred, y): return dict(near=(pred-y).abs().mean(), far=(pred-y).pow(2).mean())

    row = learner_of(metrics=AvgMetric(valid_pixels), loss_func=loss_func).test({'new': loader})
    both = learner_of(cbs=Recorder(train_metrics=True)).test(loader)

    assert row.names == ('new_test_loss', 'new_test_near', 'new_test_far', 'new_valid_pixels')
    assert both.names == ('test_loss', 'test_mae')


# ---- what happens

def test_events_and_stage():
    "The events of a validation fire once a set, with the stage 'test'; callbacks that are given are there for it only"
    learn = learner_of()

    learn.test({'a': loader, 'b': loader}, cbs=(cb := Events()))

    assert cb.seen == [(f'{when}_validate', 'test', False) for when in ('before', 'after', 'cleanup')]*2
    assert cb.learn is None and learn.stage == ''

def test_nothing_changes():
    "Learner, table and random streams are as before, also when it is called within a fit"
    rows, counts = [], Counts()
    tests = Callback(after_batch=lambda cb: rows.append(cb.learn.test({'new': loader}, cbs=counts)))
    whole = learner_of(shuffle=True)
    whole.fit(2)
    wanted = whole.state_hash()

    learn = learner_of(shuffle=True)
    learn.fit(2, cbs=tests)
    before = learn.state_hash()
    last = learn.test(loader)

    assert wanted == before == learn.state_hash()
    assert learn.recorder.values == whole.recorder.values and learn.final_record == whole.final_record
    assert (*rows[-1],) == (*last,) and len(rows) == 6 and counts.n == 18

def test_cancelled():
    "A set whose evaluation a callback cancels has no columns"
    learn, cancels = learner_of(), Callback(before_batch=raises(CancelFitException, nth=2))

    assert learn.test({'a': loader, 'b': loader}, cbs=cancels).names == ('b_test_loss', 'b_mae')


# ---- what is refused

@pytest.mark.parametrize('dl,error,message', [
    (data, TypeError, '`TensorDataset` is no loader of batches'), (None, TypeError, '`NoneType` is no loader'),
    (x, TypeError, '`Tensor` is no loader of batches'), (1, TypeError, '`int` is no loader'),
    ((x, 2*x), TypeError, 'a `tuple` of tensors is a batch, not a loader'),
    ({'x': x, 'y': x}, TypeError, '(?s)`Tensor` is no loader.*'), ({}, ValueError, 'the dict of loaders is empty'),
    ({'a': loader, 'b': data}, TypeError, '`TensorDataset` is no loader'), ({'a': None}, TypeError, '`NoneType`'),
    ('new', ValueError, "no validation set 'new', and none has a name: give a loader"),
    ([], ValueError, 'the test loader gave no batch')], ids=range(11))
def test_bad_input(dl, error, message):
    "What is no loader is refused before anything is evaluated"
    learn = learner_of(cbs=(counts := Counts()))

    with pytest.raises(error, match=message): learn.test(dl)

    assert counts.n == 0

def test_unknown_name():
    "A name that is not there is refused, with those that are"
    learn = learner_of(dls=DataLoaders(loader, {'near': loader, 'far': loader}))

    with pytest.raises(ValueError, match="there is no validation set 'nera', but 'near', 'far'"): learn.test('nera')

def test_the_set_is_named():
    "The error tells which of several sets it is"
    with pytest.raises(TypeError) as e: learner_of().test({'a': loader, 'b': data})

    assert e.value.__notes__ == ["raised by test, of its set 'b'"]
