"""Checkpoint: when it saves, what it keeps, what it leaves alone, and what happens when a disk fails."""
import errno
import os
import re
import shutil
import threading

import pytest
import torch
from torch import nn

from learner import files
from learner.callback import Callback
from learner.callbacks.averaging import EMA
from learner.callbacks.checkpoint import Checkpoint, saved_files
from learner.callbacks.tracker import TrackerCallback
from learner.every import Every
from learner.events import CancelFitException
from learner.files import load_file
from learner.measure import ValueMetric
from learner.optim import SGD
from tests.helpers import raises
from tests.resume_helpers import AskAt, noisy_learner, record, uninterrupted


def names(learn, cb=None): return sorted(p.name for p in (cb or Checkpoint()).folder(learn).iterdir())


def saves_at(tmp_path, cb, n_epoch=3, cbs=()):
    "The steps after which a checkpoint was written in a fit of five batches an epoch"
    learn = noisy_learner(tmp_path)
    cb.keep = None
    learn.fit(n_epoch, 1e-2, cbs=[cb, *cbs])
    return [step for _, step, _ in saved_files(cb.folder(learn))]


@pytest.mark.parametrize(('every', 'steps'), [('4it', [4, 8, 12]), ('1ep', [5, 10, 15]), ('2ep', [10]), ('1h', []),
                                              (Every('4it', begin=5), [5, 9, 13, 15]), ('auto', [])], ids=str)
def test_it_saves_at_intervals(tmp_path, every, steps):
    "Steps, epochs or time; `auto` saves a short fit only at its end"
    assert saves_at(tmp_path, Checkpoint(every, at_end=False)) == steps


def test_it_saves_at_the_end(tmp_path):
    "A fit that ends is saved at its end, unless that is not wanted"
    assert saves_at(tmp_path, Checkpoint('2ep')) == [10, 15]


def test_time_is_chosen_by_what_saving_takes(tmp_path):
    "With `auto` the next save is not before a hundred times what the last one took, and 10 s"
    learn, cb = noisy_learner(tmp_path), Checkpoint()
    learn.fit(1, cbs=cb)

    assert cb.took > 0 and cb.every.n == pytest.approx(max(10, 100*cb.took), abs=.01)


@pytest.mark.parametrize(('keep', 'left'), [(1, [15]), (2, [12, 15]), (None, [3, 6, 9, 12, 15])])
def test_the_newest_are_kept(tmp_path, keep, left):
    "Old files of this run go, by number: 9 is older than 12"
    learn, cb = noisy_learner(tmp_path), Checkpoint('3it', keep=keep)

    learn.fit(3, 1e-2, cbs=cb)

    assert [step for _, step, _ in saved_files(cb.folder(learn))] == left


def test_r7_the_old_one_goes_when_the_new_one_is_there(tmp_path, monkeypatch):
    "With `keep=1` the old file is removed after the new one was written and read again, and not if it is damaged"
    learn, cb, seen = noisy_learner(tmp_path), Checkpoint('5it', keep=1, at_end=False), []
    def verify(path):
        seen.append(names(learn, cb))
        if path.name == 'run1_step10.ckpt': raise files.DamagedFile('odd')
        return True
    monkeypatch.setattr('learner.callbacks.checkpoint.verify_file', verify)

    with pytest.warns(UserWarning, match='step 10 is not saved: DamagedFile: odd'): learn.fit(3, 1e-2, cbs=cb)

    steps = [[int(n) for n in re.findall(r'step(\d+)', ' '.join(fs))] for fs in seen]
    assert [sorted(s) for s in steps] == [[5], [5, 10], [5, 10, 15]]
    assert names(learn, cb) == ['run1_step15.ckpt']


def test_runs_are_apart(tmp_path):
    "A new run in a folder with files of another leaves these alone; the same Checkpoint's next fit is the same run"
    cb = Checkpoint('5it', keep=1)
    noisy_learner(tmp_path).fit(2, 1e-2, cbs=Checkpoint(keep=1))
    learn = noisy_learner(tmp_path, cbs=cb)

    learn.fit(1, 1e-2)
    learn.fit(2, 1e-2)

    assert names(learn) == ['run1_step10.ckpt', 'run2_step15.ckpt']


def test_path(tmp_path):
    "The folder is the Learner's unless another is given, relative to its path"
    learn = noisy_learner(tmp_path)
    learn.fit(1, cbs=[Checkpoint(), Checkpoint(path='elsewhere'), Checkpoint(path=tmp_path/'third')])

    assert all((tmp_path/p/'run1_step5.ckpt').exists() for p in ('models/checkpoints', 'elsewhere', 'third'))


def test_the_folder_can_move(tmp_path):
    "Nothing in the files says where they are"
    learn = noisy_learner(tmp_path/'old')
    learn.fit(2, 1e-2, cbs=[Checkpoint(), AskAt(8, 'stop')])
    (tmp_path/'old').rename(tmp_path/'new')
    whole = uninterrupted(tmp_path, 2)

    learn = noisy_learner(tmp_path/'new')
    learn.fit(2, 1e-2, cbs=Checkpoint(), resume=True)

    assert learn.final_hash == whole.final_hash
    assert not re.search(rb'/old', (tmp_path/'new/models/checkpoints/run1_step6.ckpt').read_bytes())


# ---- the best

def scored(tmp_path, values):
    "A Learner with a metric that has these values, epoch by epoch"
    learn = noisy_learner(tmp_path)
    metric = ValueMetric(lambda: values[learn.epoch], 'score')
    metric.greater_is_better = True
    learn.metrics = [metric]
    return learn


def test_the_best_epoch_is_kept(tmp_path):
    "The state of the best epoch stays, with its optimizer, whatever comes later"
    learn, seen = scored(tmp_path, [.2, .9, .5, float('nan')]), []
    cb = Checkpoint(monitor=['score', 'valid_loss'])

    learn.fit(4, 1e-2, cbs=[cb, Callback(after_epoch=lambda cb: seen.append(cb.learn.model[0].weight.clone()))])

    best = load_file(cb.folder(learn)/'run1_best_score.ckpt')
    assert torch.equal(best['model']['0.weight'], seen[1]) and best['counters']['n_step'] == 10 and best['opt']['state']
    assert cb.best['score'] == .9 and 'run1_best_valid_loss.ckpt' in names(learn)


def test_s13_the_best_is_remembered(tmp_path):
    "After resuming, a worse epoch does not replace the best file, and no early file is overwritten"
    values = [.4, .9, .5, .5]
    learn = scored(tmp_path, values)
    cb = Checkpoint('1ep', keep=None, monitor='score')
    learn.fit(4, 1e-2, cbs=[cb, AskAt(15, 'stop')])
    before = {n: (cb.folder(learn)/n).read_bytes() for n in names(learn)}

    again, cb = scored(tmp_path, values), Checkpoint('1ep', keep=None, monitor='score')
    again.fit(4, 1e-2, cbs=cb, resume=True)

    assert cb.best == {'score': .9}
    assert {n: (cb.folder(again)/n).read_bytes() for n in before} == before
    assert set(names(again)) - set(before) == {'run1_step15.ckpt', 'run1_step20.ckpt'}


def test_direction(tmp_path):
    "What is better is known from the metric; else it is asked for, before training"
    learn = noisy_learner(tmp_path)
    learn.metrics = lambda pred, targ: pred.mean()

    with pytest.raises(ValueError, match='comp'): learn.fit(1, cbs=Checkpoint(monitor='metric'))
    learn.fit(1, cbs=Checkpoint(monitor=TrackerCallback('metric', comp='max')))

    assert 'run1_best_metric.ckpt' in names(learn)


# ---- requests

@pytest.mark.parametrize('at', [1, 3, 5, 6, 7, 14])
def test_a_save_is_asked_for(tmp_path, at):
    "A save asked for in training or in validation is made where it can be gone on from, and training goes on"
    whole = uninterrupted(tmp_path, 3)
    learn = noisy_learner(tmp_path)
    learn.fit(3, 1e-2, cbs=[Checkpoint(at_end=False), AskAt(at, 'save')])
    steps = at//7*5 + min(at % 7, 5)

    again = noisy_learner(tmp_path)
    again.fit(3, 1e-2, cbs=Checkpoint(at_end=False), resume=True)

    assert names(learn) == [f'run1_step{steps}.ckpt']
    assert again.final_hash == whole.final_hash and record(again) == record(whole)


def test_requests_from_a_thread(tmp_path):
    "A thread, such as a button's, may ask a running fit to save and to stop; without a fit it is told so"
    learn, asked = noisy_learner(tmp_path), []
    def ask(cb):
        if cb.learn.n_step != 6: return
        thread = threading.Thread(target=lambda: asked.extend([cb.learn.request_save(), cb.learn.request_stop()]))
        thread.start()
        thread.join()

    learn.fit(3, 1e-2, cbs=[Checkpoint(at_end=False), Callback(after_batch=ask)])

    assert asked == [True, True] and learn.stopped_by == 'request_stop' and learn.n_step == 6
    assert names(learn) == ['run1_step6.ckpt']
    assert not learn.request_stop() and not learn.request_save()


def test_a_save_without_a_checkpoint_is_refused(tmp_path):
    "Nobody would save: an error says so"
    learn = noisy_learner(tmp_path)

    with pytest.raises(RuntimeError, match='no Checkpoint'):
        learn.fit(1, cbs=Callback(after_batch=lambda cb: cb.learn.request_save()))


def test_an_error_leaves_the_weights(tmp_path):
    "After an error in a batch the weights are in a file, and `resume=True` goes on from the last checkpoint"
    whole = uninterrupted(tmp_path, 3)
    learn = noisy_learner(tmp_path)
    with pytest.raises(ValueError, match='odd'):
        learn.fit(3, 1e-2, cbs=[Checkpoint('4it'), Callback(after_backward=raises(ValueError('odd'), nth=11))])
    left, weights = names(learn), [p.clone() for p in learn.model.parameters()]

    again = noisy_learner(tmp_path)
    again.fit(3, 1e-2, cbs=Checkpoint('4it'), resume=True)
    other = noisy_learner(tmp_path)
    other.load(Checkpoint().folder(learn)/'run1_error.pth')

    assert left == ['run1_error.pth', 'run1_step4.ckpt', 'run1_step8.ckpt']
    assert again.final_hash == whole.final_hash
    assert all(map(torch.equal, weights, other.model.parameters()))


@pytest.mark.parametrize('event', ['before_validate', 'after_pred', 'after_validate', 'after_epoch'])
def test_an_error_after_an_epochs_training(tmp_path, event):
    "If training was over when the error came, that is saved whole: another process goes on with the validation"
    whole = uninterrupted(tmp_path, 3)
    learn, seen = noisy_learner(tmp_path), []
    def fail(cb):
        if cb.epoch == 1 and cb.learn.trained: raise ValueError('odd')
    cbs = [EMA(), Checkpoint(), Callback(**{event: fail})]
    with pytest.raises(ValueError, match='odd'): learn.fit(3, 1e-2, cbs=cbs)

    again = noisy_learner(tmp_path)
    note = Callback(before_batch=lambda cb: seen.append((cb.epoch, cb.training)))
    again.fit(3, 1e-2, cbs=[EMA(), Checkpoint(), note], resume=True)

    assert names(learn) == ['run1_step10.ckpt', 'run1_step15.ckpt'] and seen[0] == (1, False)
    assert all(map(torch.equal, again.model.parameters(), whole.model.parameters()))


def test_an_early_stop_is_over(tmp_path):
    "A fit that a callback ended is not gone on with, unless more epochs are asked for"
    def stop(cb):
        if cb.epoch == 1: raise CancelFitException
    learn = noisy_learner(tmp_path)
    learn.fit(4, 1e-2, cbs=[Checkpoint(), Callback(after_epoch=stop)])

    again = noisy_learner(tmp_path)
    again.fit(4, 1e-2, cbs=Checkpoint(), resume=True)

    assert again.n_step == 10 and again.final_hash == learn.final_hash


# ---- disks that fail

@pytest.mark.parametrize('code', [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_r8_a_failing_disk(tmp_path, monkeypatch, code):
    "Training goes on with a warning, the last good file stays, no temporary one is left, and the next save is tried"
    learn, cb, real, calls = noisy_learner(tmp_path), Checkpoint('3it'), os.fsync, []
    def fsync(fd):
        calls.append(fd)
        if len(calls) == 3: raise OSError(code, os.strerror(code))
        real(fd)
    monkeypatch.setattr(os, 'fsync', fsync)

    with pytest.warns(UserWarning, match=f'step 6 is not saved: .*{os.strerror(code)}'):
        learn.fit(2, 1e-2, cbs=cb)

    assert learn.n_step == 10 and names(learn) == ['run1_step10.ckpt', 'run1_step9.ckpt']


@pytest.mark.filterwarnings('ignore:Checkpoint. the last', 'ignore:Checkpoint. a file may need')
def test_s19_a_full_disk(tmp_path, small_disk):
    "A disk without room for one more file: a warning, the files before it load, no temporary one, training as ever"
    def big(path):
        torch.manual_seed(0)
        return noisy_learner(path, model=nn.Sequential(nn.Linear(4, 16_000), nn.Linear(16_000, 2)), opt_func=SGD)
    whole = big(tmp_path)
    whole.fit(3, 1e-5)
    learn = big(small_disk)

    with pytest.warns(UserWarning, match='is not saved: OSError: .*No space left'):
        learn.fit(3, 1e-5, cbs=Checkpoint('5it'))

    left = names(learn)
    assert left and all(load_file(Checkpoint().folder(learn)/name) for name in left)
    assert learn.n_step == 15 and learn.final_hash == whole.final_hash


def test_r8_the_error_can_be_asked_for(tmp_path, monkeypatch):
    "on_error='raise' ends the fit with the disk's error"
    def fsync(fd): raise OSError(errno.ENOSPC, 'full')
    monkeypatch.setattr(os, 'fsync', fsync)

    with pytest.raises(OSError, match='full'): noisy_learner(tmp_path).fit(1, cbs=Checkpoint('3it', on_error='raise'))


def test_r8_too_little_room_is_told_before(tmp_path, monkeypatch):
    "A disk that has no room for one more file is a warning when the fit starts"
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: shutil._ntuple_diskusage(100, 90, 10))

    with pytest.warns(UserWarning, match='may need .* KiB'): noisy_learner(tmp_path).fit(1, cbs=Checkpoint())


def test_a_folder_that_cannot_be_made(tmp_path):
    "A path that is no folder is an error before training"
    (tmp_path/'file').write_text('')
    learn = noisy_learner(tmp_path)

    with pytest.raises(OSError, match='file'): learn.fit(1, cbs=Checkpoint(path='file'))
    assert learn.n_step == 0


@pytest.mark.parametrize(('kwargs', 'match'), [(dict(keep=0), '`keep` is 0'), (dict(on_error='no'), "on_error='no'"),
                                               (dict(every='5'), 'every')])
def test_bad_arguments(kwargs, match):
    "What means nothing is refused when the callback is made"
    with pytest.raises((ValueError, TypeError), match=match): Checkpoint(**kwargs)


def test_columns_of_any_name(tmp_path):
    "A column whose name no file can have is kept under one that it can"
    learn = scored(tmp_path, [.1, .2])
    learn.metrics[0].name = 'val/top 1'

    learn.fit(1, cbs=Checkpoint(monitor=TrackerCallback('val/top 1', comp='max')))

    assert 'run1_best_val_top_1.ckpt' in names(learn)


def test_where_it_stopped_is_said(tmp_path, capsys, monkeypatch):
    "A stop says what was saved, and how to go on; without a file it says nothing of one"
    monkeypatch.setenv('LEARNER_DISPLAY', 'log')
    for cb in (Checkpoint(), Checkpoint(at_end=False, path='other')):
        noisy_learner(tmp_path).fit(1, cbs=[cb, AskAt(3, 'stop')])

    said = [line for line in capsys.readouterr().out.splitlines() if 'Checkpoint' in line]
    assert len(said) == 1 and 'stopped by Ctrl-C after step 3, and saved' in said[0] and 'run1_step3.ckpt' in said[0]
