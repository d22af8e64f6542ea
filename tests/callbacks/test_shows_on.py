"""Display, files and loaders go on whatever happens to them in the midst of a fit."""
import sys

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from learner.callback import Callback
from learner.callbacks.csv_logger import CSVLogger
from learner.callbacks.progress import ShowGraphCallback
from learner.callbacks.recorder import Recorder
from learner.data import DataLoaders
from learner.events import CancelValidException
from tests.helpers import raises, synth_learner

x = torch.randn(10, 1)


class Breaks:
    "A stdout whose reader has gone"
    def write(self, text): raise BrokenPipeError(32, 'gone')
    def flush(self): pass

@pytest.mark.parametrize('cbs', [None, ShowGraphCallback])
def test_a_broken_output_costs_the_display_only(cbs, monkeypatch):
    "Where nothing can be printed any more, training goes on, with one warning"
    learn = synth_learner(cbs, default_cbs=True)
    monkeypatch.setattr(sys, 'stdout', Breaks())

    with pytest.warns(UserWarning, match='nothing more is shown of this fit: BrokenPipeError') as told: learn.fit(3)

    assert len(learn.history) == 3 and len(told) == 1

@pytest.mark.parametrize('name', ['progress', 'csv_logger', 'recorder'])
@pytest.mark.parametrize('at', ['before_epoch', 'after_batch'])
def test_switched_on_in_the_midst_of_a_fit(name, at, tmp_path):
    "A callback of ours that is off when the fit begins and on later does not fail"
    learn = synth_learner([CSVLogger], default_cbs=True, path=tmp_path)
    getattr(learn, name).run = False

    learn.fit(2, cbs=Callback(**{at: lambda cb: setattr(getattr(learn, name), 'run', True)}))

    assert learn.n_step == 4

def test_removed_recorder(tmp_path):
    "The Recorder may leave in the midst of a fit: the others go on without rows"
    learn = synth_learner([CSVLogger], default_cbs=True, path=tmp_path)

    learn.fit(2, cbs=Callback(after_batch=lambda cb: cb.learn.remove_cbs(Recorder)))

    assert learn.n_step == 4

def test_csv_with_a_column_that_comes_late(tmp_path):
    "A metric's new column widens the file; the rows before have nothing in it"
    def keys(pred, y): return {'a': y.mean()*0, **({'b': y.mean()*0 + 1} if keys.n else {})}
    keys.n = 0
    learn = synth_learner([CSVLogger, Callback(after_epoch=lambda cb: setattr(keys, 'n', 1))], metrics=keys,
                          path=tmp_path)

    learn.fit(2)

    df = learn.csv_logger.read_log()
    assert df.b.isna().tolist() == [True, False] and df.epoch.tolist() == [0, 1] and df.a.tolist() == [0, 0]

def test_csv_appended_to_a_file_without_a_last_newline(tmp_path):
    "A file that was cut short gets its line ended first"
    learn = synth_learner(CSVLogger(append=True), path=tmp_path)
    learn.fit(1)
    file = tmp_path/'history.csv'
    file.write_bytes(file.read_bytes().rstrip())
    learn.csv_logger.begun = False

    learn.fit(1)

    assert learn.csv_logger.read_log().epoch.tolist() == [0, 0]

def test_cancelled_validation_with_a_dict_metric(tmp_path):
    "Columns that a cancelled first validation could not tell come with the second"
    def both(pred, y): return {'u': y.mean(), 'v': y.mean()}
    learn = synth_learner([CSVLogger, Callback(before_validate=raises(CancelValidException))], metrics=both,
                          path=tmp_path)

    learn.fit(2)

    assert learn.csv_logger.read_log().u.notna().tolist() == [False, True]

def test_two_learners_on_one_loader():
    "A Learner fitted inside another's callback does not end the other's iteration of a shared loader"
    dls = DataLoaders(DataLoader(TensorDataset(x, x), 2, num_workers=1, persistent_workers=True))
    def inner(cb):
        if cb.iter == 1: synth_learner(dls=dls).fit(1)
    learn = synth_learner(Callback(after_batch=inner), dls=dls)

    learn.fit(1)

    assert learn.n_step == 5
