"""CSVLogger: what is in the file, when, and what happens to a file that is already there."""
import pytest

from learner.callback import Callback
from learner.callbacks.progress import CSVLogger
from learner.callbacks.recorder import Recorder
from learner.events import CancelTrainException
from tests.helpers import raises, synth_learner


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
