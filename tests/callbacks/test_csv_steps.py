"""CSVLogger's rows of optimizer steps: which there are, when they are written, and each once whatever happened."""
import math
from types import SimpleNamespace

import pytest

from learner import every as every_file
from learner.callback import Callback
from learner.callbacks.csv_logger import CSVLogger
from learner.callbacks.recorder import Recorder
from learner.events import CancelStepException
from tests.bench.test_counts import waits
from tests.helpers import raises, synth_learner
from tests.saved_helpers import Rates, Saver, batches, go_on


def step_learner(path, every='1it', *cbs, n=10, **kwargs):
    kwargs = {**dict(dls=(batches(n), batches(2, seed=2))), **kwargs}
    return synth_learner([Recorder(add_time=False), Rates, CSVLogger(every=every), *cbs], path=path, default_cbs=False,
                         **kwargs)

def lines(path): return [line.split(',') for line in (path/'history.csv').read_text().splitlines()]
def steps(path): return [int(line[0]) for line in lines(path)[1:]]


# ---- which rows

def test_a_row_a_step(tmp_path):
    "Each step has its number, epoch, the loss of its batch, the smoothed one and the rate, with all digits"
    learn = step_learner(tmp_path)

    learn.fit(2)
    names, *rows = lines(tmp_path)
    rec = learn.recorder

    assert names == ['step', 'epoch', 'train_loss', 'smooth_loss', 'lr']
    expected = zip(range(1, 21), [0]*10 + [1]*10, rec.raw_losses, rec.losses, rec.lrs)
    assert rows == [[*map(repr, row)] for row in expected] and len(set(rec.lrs)) == 7

@pytest.mark.parametrize('every, expected', [('20it', [20, 40, 60]), ('7it', [*range(7, 61, 7)]), ('99it', None)])
def test_every_kth_step(every, expected, tmp_path):
    "Rows of each k-th step, counted over all epochs, and no file where there is none"
    learn = step_learner(tmp_path, every, n=30)

    learn.fit(2)

    if expected: assert steps(tmp_path) == expected
    else: assert not (tmp_path/'history.csv').exists()

def test_every_kth_epoch(tmp_path):
    "Rows of each k-th epoch, and of the last one"
    learn = step_learner(tmp_path, '2ep')

    learn.fit(5)

    assert steps(tmp_path) == [1, 3, 4] and lines(tmp_path)[0] == ['epoch', 'train_loss', 'valid_loss']

def test_rows_by_time(tmp_path, monkeypatch):
    "With a time, a row comes with the first training batch after it has passed"
    clock = SimpleNamespace(now=0.)
    monkeypatch.setattr(every_file, 'perf_counter', lambda: clock.now)
    def tick(cb): clock.now += 3
    learn = step_learner(tmp_path, '10s', Callback(before_batch=tick), dls=(batches(10), batches(3)))

    learn.fit(2)

    assert steps(tmp_path) == [4, 8, 11, 15, 19]  # at 12, 24, 42, 54 and 66 seconds

def test_only_steps_count(tmp_path):
    "Batches without a step have no row, and evaluations within the fit neither"
    def skip(cb):
        cb.learn.validate()
        if cb.iter % 2 == 0: raise CancelStepException
    learn = step_learner(tmp_path, '1it', Callback(before_step=skip))

    learn.fit(1)

    assert steps(tmp_path) == [1, 2, 3, 4, 5]
    assert [line[2] for line in lines(tmp_path)[1:]] == [*map(repr, learn.recorder.raw_losses[1::2])]

def test_steps_of_several_fits(tmp_path):
    "Steps are counted on from fit to fit, in one file with one header"
    learn = step_learner(tmp_path)

    learn.fit(1)
    learn.fit(1)

    assert steps(tmp_path) == [*range(1, 21)]

def test_a_bad_loss_is_written_as_it_is(tmp_path):
    "A loss that is no number was computed: it stands in the file"
    bad = batches(3)
    bad[1][1][0] = math.nan
    learn = step_learner(tmp_path, dls=(bad, None))

    with pytest.warns(UserWarning, match='batch 1'): learn.fit(1)

    assert [line[2] == 'nan' for line in lines(tmp_path)[1:]] == [False, True, True]

def test_a_removed_recorder(tmp_path):
    "Steps that the Recorder has recorded before it leaves have their rows"
    leave = Callback(after_batch=lambda cb: cb.iter == 3 and cb.learn.remove_cbs(Recorder))

    step_learner(tmp_path, '1it', leave).fit(1)

    assert steps(tmp_path) == [1, 2, 3]

@pytest.mark.parametrize('every', ['1', '0it', '1.5ep', 'it'])
def test_what_means_nothing_is_refused(every):
    "`every` is checked when the logger is made"
    with pytest.raises(ValueError, match='every='): CSVLogger(every=every)


# ---- when they are written

def test_rows_are_written_in_bulk(tmp_path):
    "A hundred rows are written at once, the rest at the end of the epoch's training"
    seen, file = [], tmp_path/'history.csv'
    look = Callback(after_batch=lambda cb: seen.append(len(steps(tmp_path)) if file.exists() else 0))
    look.order = 70
    learn = step_learner(tmp_path, '1it', look, n=250, n_valid=0)

    learn.fit(1)

    assert seen[:250] == [0]*99 + [100]*100 + [200]*51 and seen[250:] == [250]*2

@pytest.mark.parametrize('at', ['after_batch', 'before_validate'])
def test_rows_survive_an_error(at, tmp_path):
    "The rows of all steps before an error or an interrupt are in the file"
    learn = step_learner(tmp_path, '1it', stop := Callback(**{at: raises(KeyboardInterrupt, nth=6)}))
    stop.order = 70

    with pytest.raises(KeyboardInterrupt): learn.fit(9)

    assert steps(tmp_path) == [*range(1, learn.n_step+1)] and learn.n_step == dict(after_batch=6).get(at, 60)

def test_a_step_waits_for_nothing(tmp_path):
    "However many batches an epoch has, a fit waits equally often for the device"
    def fit(n): return synth_learner(CSVLogger(every='1it'), dls=(batches(n), None), path=tmp_path).fit(1)

    assert waits(lambda: fit(4)) == waits(lambda: fit(40))

def test_what_waits_can_be_read(tmp_path):
    "`read_log` in the midst of an epoch has all rows so far, and they are not written twice"
    logs = []
    look = Callback(after_batch=lambda cb: cb.training and logs.append(len(cb.csv_logger.read_log())))
    look.order = 70

    step_learner(tmp_path, '1it', look).fit(1)

    assert logs == [*range(1, 11)] == steps(tmp_path)

def test_rows_that_cannot_be_written_are_named(tmp_path):
    "Rows that cannot be written are a warning that says which, and training goes on"
    (tmp_path/'history.csv').mkdir()
    learn = step_learner(tmp_path)

    with pytest.warns(UserWarning, match='the rows of steps 1 to 10 are not in .*history.csv'): learn.fit(1)

    assert learn.n_step == 10

def test_a_file_with_other_columns_is_refused(tmp_path):
    "Rows of steps are not added to a file of epochs"
    step_learner(tmp_path, '1ep').fit(1)
    learn = step_learner(tmp_path)
    learn.csv_logger.append = True

    with pytest.raises(ValueError, match='columns epoch, train_loss, valid_loss, but this fit has step, epoch'):
        learn.fit(1)


# ---- resumed fits

def whole(tmp_path, n_epoch=4):
    "The bytes of an uninterrupted run of 10 steps an epoch"
    step_learner(path := tmp_path/'whole').fit(n_epoch)
    return (path/'history.csv').read_bytes()

@pytest.mark.parametrize('place, at', [
    (('batch', 1, 9), 27), (('batch', 0, 4), 7), (('valid', 1), 27), (('epoch', 1), 27)])
def test_s15_rows_are_neither_wiped_nor_doubled(place, at, tmp_path):
    "Saved at step 20, killed at 27, resumed to 40: 40 rows, each step once, one header, bytes as uninterrupted (S15)"
    kill = Callback(after_batch=raises(OSError, True, at))
    kill.order = 70
    learn = step_learner(tmp_path, '1it', saver := Saver(*place), kill)
    with pytest.raises(OSError): learn.fit(4)
    killed = steps(tmp_path)

    resumed = go_on(step_learner(tmp_path), saver.saved, 4)

    assert killed == [*range(1, at+1)] and steps(tmp_path) == [*range(1, 41)]
    assert (tmp_path/'history.csv').read_bytes() == whole(tmp_path) and len(resumed.history) == 4

def test_rows_are_in_the_file_before_what_refers_to_them(tmp_path):
    "A state holds no row: all are written when it is taken, and on disk when it is saved (R5)"
    seen = []
    def save(cb):
        state = cb.csv_logger.state_dict()
        cb.learn('before_save', state)
        seen.append((state['offset'], (tmp_path/'history.csv').stat().st_size, steps(tmp_path), state['last']))
    cb = Callback(after_batch=lambda cb: cb.training and cb.iter == 2 and save(cb))
    cb.order = 70

    step_learner(tmp_path, '1it', cb).fit(1)

    assert seen == [(seen[0][1], seen[0][1], [1, 2, 3], 'step 3')]

def test_a_wiped_file(tmp_path):
    "If the file is gone when a fit is resumed, a warning says what is missing; what follows is written, with a header"
    step_learner(tmp_path, '1it', saver := Saver('epoch', 1)).fit(2)
    (tmp_path/'history.csv').unlink()

    with pytest.warns(UserWarning, match='is missing, with the rows up to step 20'):
        go_on(step_learner(tmp_path), saver.saved, 3)

    assert steps(tmp_path) == [*range(21, 31)] and lines(tmp_path)[0][0] == 'step'

@pytest.mark.parametrize('cut, left', [(-1, 19), (-60, 18), (-500, 9), (20, 0)])
def test_a_cut_file(cut, left, tmp_path):
    "If the file has lost its end, a warning says which rows, and the file goes on with whole lines"
    step_learner(tmp_path, '1it', saver := Saver('epoch', 1)).fit(2)
    file = tmp_path/'history.csv'
    file.write_bytes(file.read_bytes()[:cut])
    after = f'rows after step {left}, up to step 20' if left else 'rows up to step 20'

    with pytest.warns(UserWarning, match=f'lacks the {after}'): go_on(step_learner(tmp_path), saver.saved, 3)

    assert steps(tmp_path) == [*range(1, left+1), *range(21, 31)]

@pytest.mark.parametrize('first, second', [('1it', '1ep'), ('1ep', '1it')])
def test_rows_of_another_kind_are_refused(first, second, tmp_path):
    "A fit resumed with another kind of row does not spoil the file"
    step_learner(tmp_path, first, saver := Saver('epoch', 0)).fit(1)
    before = (tmp_path/'history.csv').read_bytes()

    with pytest.raises(ValueError, match='but this fit has'): go_on(step_learner(tmp_path, second), saver.saved, 2)

    assert (tmp_path/'history.csv').read_bytes() == before
