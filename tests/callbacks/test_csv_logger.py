"""CSVLogger: what is in the file, when, what happens to a file that is already there, and to one of a resumed fit."""
import os
import resource

import pytest
from fastcore.foundation import L

from learner.callback import Callback
from learner.callbacks.csv_logger import CSVLogger
from learner.callbacks.recorder import Recorder
from learner.events import CancelTrainException
from learner.metrics import mae
from tests.helpers import raises, synth_learner
from tests.saved_helpers import Saver, batches, go_on


def csv_learner(tmp_path, *cbs, **kwargs):
    return synth_learner([Recorder, *cbs], default_cbs=False, path=tmp_path, **kwargs)


def lines(tmp_path, name='history.csv'): return [line.split(',') for line in (tmp_path/name).read_text().splitlines()]
def epochs(tmp_path): return [line[0] for line in lines(tmp_path)]


def test_csv(tmp_path):
    "The file has the names and a row an epoch, with all digits"
    learn = csv_learner(tmp_path, CSVLogger)

    learn.fit(2)
    names, *rows = lines(tmp_path)
    log = learn.csv_logger.read_log()

    assert names == ['epoch', 'train_loss', 'valid_loss', 'time'] and [r[0] for r in rows] == ['0', '1']
    assert [(float(r[1]), float(r[2])) for r in rows] == [tuple(row) for row in learn.recorder.values]
    assert [*log.columns] == names and log['valid_loss'][1] == learn.recorder.values[1]['valid_loss']


def test_csv_read_after_its_fit(tmp_path):
    "A logger of one fit only can be read after it; folders are made"
    log = CSVLogger('runs/a.csv')

    csv_learner(tmp_path).fit(1, cbs=log)

    assert len(log.read_log()) == 1 and (tmp_path/'runs'/'a.csv').exists()


def test_csv_missing_value(tmp_path):
    "A value that was not computed is an empty cell in its own column"
    learn = csv_learner(tmp_path, CSVLogger, Callback(before_train=raises(CancelTrainException)))

    learn.fit(1)
    _, row = lines(tmp_path)

    assert row[1] == '' and float(row[2]) == learn.recorder.values[0]['valid_loss']


def test_csv_replaces_an_old_file_with_its_first_row(tmp_path):
    "An old file is replaced, but not before there is a row"
    (tmp_path/'history.csv').write_text('old\n')
    learn = csv_learner(tmp_path, CSVLogger, Callback(after_batch=raises(ValueError)))

    with pytest.raises(ValueError): learn.fit(1)
    before = epochs(tmp_path)
    learn.fit(1)

    assert (before, epochs(tmp_path)) == (['old'], ['epoch', '0'])


def test_csv_of_several_fits(tmp_path):
    "What one logger writes in several fits is one file, also with evaluation in between"
    learn = csv_learner(tmp_path, CSVLogger)

    learn.fit(2)
    learn.validate()
    learn.fit(1)

    assert epochs(tmp_path) == ['epoch', '0', '1', '0']


@pytest.mark.parametrize('append, expected', [(False, ['epoch', '0']), (True, ['epoch', '0', '1', '0'])])
def test_csv_append(append, expected, tmp_path):
    "A new logger replaces the file, or adds to it without repeating its header"
    csv_learner(tmp_path, CSVLogger).fit(2)

    csv_learner(tmp_path, CSVLogger(append=append)).fit(1)

    assert epochs(tmp_path) == expected


def test_csv_append_by_name(tmp_path):
    "Rows go into the columns of the file, whatever their order there"
    (tmp_path/'history.csv').write_text('time,valid_loss,train_loss,epoch\n')
    learn = csv_learner(tmp_path, CSVLogger(append=True))

    learn.fit(1)

    assert lines(tmp_path)[1][3] == '0' and float(lines(tmp_path)[1][1]) == learn.recorder.values[0]['valid_loss']


def test_csv_append_to_other_columns(tmp_path):
    "Rows with other columns than the file's are refused, and both are named"
    (tmp_path/'history.csv').write_text('epoch,f1\n0,1\n')
    learn = csv_learner(tmp_path, CSVLogger(append=True))

    with pytest.raises(ValueError, match='columns epoch, f1, but this fit has epoch, train_loss, valid_loss, time'):
        learn.fit(1)

    assert epochs(tmp_path) == ['epoch', '0']


def test_csv_of_a_second_fit_with_other_columns(tmp_path):
    "A second fit of a logger is not added to its file if it has other columns"
    learn = csv_learner(tmp_path, CSVLogger)
    learn.fit(1)
    learn.metrics = mae

    with pytest.raises(ValueError, match='but this fit has epoch, train_loss, valid_loss, mae, time'): learn.fit(1)

    assert epochs(tmp_path) == ['epoch', '0']


def test_csv_rows_survive_an_error(tmp_path):
    "The rows before an error are in the file while the fit still runs, and after it"
    seen = []
    def look(cb): seen.append(len(lines(tmp_path)))
    learn = csv_learner(tmp_path, CSVLogger, Callback(after_epoch=raises(KeyboardInterrupt, nth=2)),
                        Callback(cleanup_epoch=look))
    learn.cbs[-1].order = -100  # cleaned up last

    with pytest.raises(KeyboardInterrupt): learn.fit(5)

    assert seen == [2, 3] and epochs(tmp_path) == ['epoch', '0', '1']


def test_csv_that_cannot_be_written(tmp_path):
    "A file that cannot be written costs a warning, not the training"
    (tmp_path/'history.csv').mkdir()
    learn = csv_learner(tmp_path, CSVLogger)

    with pytest.warns(UserWarning, match='row of epoch 0 is not in .*history.csv'): learn.fit(1)

    assert learn.train_iter == 2


def test_csv_removed_in_the_midst_of_a_fit(tmp_path):
    "A file that is removed while the fit runs is begun anew, with its header"
    remove = Callback(before_train=lambda cb: cb.epoch == 1 and (tmp_path/'history.csv').unlink())

    csv_learner(tmp_path, CSVLogger, remove).fit(3)

    assert epochs(tmp_path) == ['epoch', '1', '2']


def test_csv_needs_recorder(tmp_path):
    "Without a Recorder the logger says so before training"
    learn = synth_learner(CSVLogger, default_cbs=False, path=tmp_path)

    with pytest.raises(RuntimeError, match='`CSVLogger` works with `Recorder`'): learn.fit(1)

    assert learn.train_iter == 0


def test_csv_resumes_its_file(tmp_path):
    "A logger with the state of an earlier one goes on in the file of that"
    csv_learner(tmp_path, first := CSVLogger()).fit(2)
    second = CSVLogger()

    second.load_state_dict(first.state_dict())
    csv_learner(tmp_path, second).fit(1)

    assert epochs(tmp_path) == ['epoch', '0', '1', '0']


# ---- resumed fits

every_place = pytest.mark.parametrize('place', [('batch', 1, 2), ('valid', 1), ('epoch', 0), ('epoch', 1)], ids=str)

def saving_learner(path, *cbs, log=CSVLogger, n_valid=2, **kwargs):  # its rows have no times
    dls = batches(), batches(n_valid, seed=2) if n_valid else None
    return synth_learner([Recorder(add_time=False), *L(log), *cbs], dls=dls, default_cbs=False, path=path, **kwargs)

def killed(path, place, at=7, **kwargs):
    "What was saved at the place, in a fit that an error ended after `at` epochs"
    learn = saving_learner(path, saver := Saver(*place), Callback(cleanup_epoch=raises(OSError, nth=at)), **kwargs)
    with pytest.raises(OSError): learn.fit(4)
    return saver.saved

def uninterrupted(path, **kwargs):
    saving_learner(path, **kwargs).fit(4)
    return (path/'history.csv').read_bytes()


@pytest.mark.parametrize('n_valid', [0, 2])
@every_place
def test_csv_of_a_resumed_fit(place, n_valid, tmp_path):
    "The file of a fit that was saved, went on, was killed and resumed has the bytes of the uninterrupted one's"
    saved = killed(tmp_path/'a', place, 3, n_valid=n_valid)
    assert len(epochs(tmp_path/'a')) == 4

    go_on(saving_learner(tmp_path/'a', n_valid=n_valid), saved, 4)

    assert (tmp_path/'a'/'history.csv').read_bytes() == uninterrupted(tmp_path/'b', n_valid=n_valid)

@pytest.mark.parametrize('old', [b'', b'epoch,train_loss,valid_loss\n7,1.0,2.0\n'])
@pytest.mark.parametrize('place', [('batch', 0, 2), ('epoch', 1)])
@pytest.mark.parametrize('append', [False, True])
def test_csv_of_a_resumed_fit_on_an_old_file(append, place, old, tmp_path):
    "What was there before is replaced, or added to, as in the uninterrupted run, also if there was no row yet"
    def log(): return CSVLogger(append=append)
    for folder in (tmp_path/'a', tmp_path/'b'):
        folder.mkdir()
        if old: (folder/'history.csv').write_bytes(old)
    saved = killed(tmp_path/'a', place, 3, log=log())

    go_on(saving_learner(tmp_path/'a', log=log()), saved, 4)

    assert (tmp_path/'a'/'history.csv').read_bytes() == uninterrupted(tmp_path/'b', log=log())

class Late(Callback):
    "A metric with a column that is there in epoch 2 only"
    def __init__(self): self.n = 0
    def __call__(self, pred, y): return {'a': y.mean(), **({'b': y.mean()*0 + 1} if self.n == 2 else {})}
    def before_epoch(self): self.n = self.epoch

@pytest.mark.parametrize('place', [('epoch', 0), ('batch', 3, 0)], ids=str)
def test_csv_that_was_widened_since(place, tmp_path):
    "A column that came after the save is gone after the go_on, until it comes again; one that was there stays"
    def kwargs(): return dict(log=[CSVLogger(), late := Late()], metrics=late)
    saved = killed(tmp_path/'a', place, 4, **kwargs())
    assert lines(tmp_path/'a')[0][-1] == 'b'

    go_on(saving_learner(tmp_path/'a', **kwargs()), saved, 4)

    assert (tmp_path/'a'/'history.csv').read_bytes() == uninterrupted(tmp_path/'b', **kwargs())

def test_csv_second_fit_resumed(tmp_path):
    "The second fit of a logger, resumed before it had a row, keeps the rows of the first"
    learn = saving_learner(tmp_path, saver := Saver('batch', 0, 2))
    learn.fit(2)
    learn.fit(3)

    go_on(saving_learner(tmp_path), saver.saved, 3)

    assert epochs(tmp_path) == ['epoch', '0', '1', '0', '1', '2']

def test_csv_loaded_outside_a_fit(tmp_path):
    "Outside a fit the file is left as it is, and the next fit adds to it"
    saved = killed(tmp_path, ('epoch', 0), 3)
    before = (tmp_path/'history.csv').read_bytes()
    learn = saving_learner(tmp_path)

    learn.csv_logger.load_state_dict(saved['states']['csv_logger'])
    after = (tmp_path/'history.csv').read_bytes()
    learn.fit(1)

    assert after == before and epochs(tmp_path) == ['epoch', '0', '1', '2', '0']

def test_csv_of_another_name(tmp_path):
    "A fit resumed with another file says where the rows before are, leaves them there, and begins the other one anew"
    saved = killed(tmp_path, ('epoch', 1), 3)
    (tmp_path/'b.csv').write_text('old\n')
    before = (tmp_path/'history.csv').read_bytes()

    with pytest.warns(UserWarning, match='rows so far are in `history.csv`, and not in `b.csv`'):
        go_on(saving_learner(tmp_path, log=CSVLogger('b.csv')), saved, 4)

    assert (tmp_path/'history.csv').read_bytes() == before
    assert [line[0] for line in lines(tmp_path, 'b.csv')] == ['epoch', '2', '3']

def test_csv_wiped(tmp_path):
    "If the file is gone, a warning says which rows are missing"
    saved = killed(tmp_path, ('epoch', 1), 3)
    (tmp_path/'history.csv').unlink()

    with pytest.warns(UserWarning, match='history.csv` is missing, with the rows up to epoch 1'):
        go_on(saving_learner(tmp_path), saved, 3)

    assert epochs(tmp_path) == ['epoch', '2']

def test_csv_of_something_else(tmp_path):
    "A file that has become another one is refused, and left alone"
    saved = killed(tmp_path, ('epoch', 1), 3)
    (tmp_path/'history.csv').write_text(text := 'a,b\n' + '1,2\n'*99)

    with pytest.raises(ValueError, match='has the columns a, b'): go_on(saving_learner(tmp_path), saved, 3)

    assert (tmp_path/'history.csv').read_text() == text

def test_csv_is_on_disk_before_a_save(tmp_path, monkeypatch):
    "Before anything is saved, the file is flushed to the disk (R5); a file that is gone is told"
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, 'fsync', lambda fd: (synced.append(os.fstat(fd).st_ino), fsync(fd)))
    learn = csv_learner(tmp_path, CSVLogger)
    learn('before_save', {})
    learn.fit(1)
    file = tmp_path/'history.csv'

    learn('before_save', {})
    inode = file.stat().st_ino
    file.unlink()

    assert synced == [inode]
    with pytest.warns(UserWarning, match='may not be on disk'): learn('before_save', {})

def test_csv_row_is_there_whole_or_not_at_all(tmp_path):
    "A row for which there is room only in part is left out, with a warning; the next one stands in its own line"
    def limit(size=resource.RLIM_INFINITY): resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    def change(cb): limit((tmp_path/'history.csv').stat().st_size + 10) if cb.epoch == 1 else limit()
    learn = csv_learner(tmp_path, CSVLogger, Callback(after_epoch=change))

    try:
        with pytest.warns(UserWarning, match='row of epoch 1 is not in .*File too large'): learn.fit(3)
    finally: limit()

    assert epochs(tmp_path) == ['epoch', '0', '2'] and all(len(line) == 4 for line in lines(tmp_path))
