"""Processes that are killed at any moment and started again: they end as if nothing had happened.

The kills at random are made by tests/torture, of which this is the small part: one fit. In the cells 'ema' and 'swa'
are also accumulation, float16 with its scale, mixing, averages and further trackers."""
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from learner import files
from learner.callback import Callback
from learner.callbacks.checkpoint import Checkpoint, newest
from learner.callbacks.csv_logger import CSVLogger
from learner.callbacks.finetune import BnFreeze, FreezeUntil
from learner.callbacks.recorder import Recorder
from learner.callbacks.tracker import SaveModelCallback
from learner.files import load_file
from learner.measure import ValueMetric
from learner.plain import digest
from tests.callbacks.test_resume import Accumulates
from tests.file_helpers import names, python
from tests.helpers import raises
from tests.resume_helpers import AskAt, halves, noisy_learner, noisy_loaders, record

# ---- R1, R2: at random

cells = [*(f'{workers} {dtype}' for workers in ('0', '2', 'persistent') for dtype in ('fp32', 'bf16')), '0 ema',
         '2 swa']
n_kills = 5


@pytest.fixture(scope='module')
def reports():
    "What came of the kills, by cell"
    command = [sys.executable, '-m', 'tests.torture.driver', str(n_kills), *cells, 'changing fp32']
    out = subprocess.run(command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True, check=True).stdout
    return {' '.join(r['cell'].split()[:2]): r for r in map(json.loads, out.splitlines())}


@pytest.mark.parametrize('cell', cells)
def test_r1_killed_at_random(reports, cell):
    """With all callbacks at once: state, history, CSV files and models are, bit for bit, those of a run left alone

    R2: each life goes on at the last finished save or later; no life says anything on stderr; all files are whole."""
    report = reports[cell]

    assert report['mismatches'] == report['exceptions'] == []
    assert report['kills'] >= n_kills and report['lives'] > n_kills


def test_r3_other_workers_in_each_life(reports):
    "The same with 1, 2 and 3 workers in turn"
    test_r1_killed_at_random(reports, 'changing fp32')


# ---- at one moment

def die(): os.kill(os.getpid(), signal.SIGKILL)


def killed(life, path):
    "Run `life(path)`, a function of this file, in a process of its own, in which it is killed"
    process = python(f'import sys; from tests.test_kill import {life.__name__} as f; f(sys.argv[1])', path)
    _, err = process.communicate()
    assert (process.returncode, err) == (-signal.SIGKILL, '')


def steps_logged(path, *cbs):
    "Five steps an epoch; a row for each; saved at 20 and 40"
    learn = noisy_learner(path, cbs=[CSVLogger(every='1it'), Checkpoint('20it')])
    learn.fit(8, 1e-2, cbs=cbs, resume=True)
    return learn

def killed_at_27(path):
    at_27 = Callback(after_batch=lambda cb: cb.learn.n_step == 27 and die())
    at_27.order = 2000
    steps_logged(path, at_27)

def test_s15_rows_are_neither_wiped_nor_doubled(tmp_path):
    "S15: saved at step 20, killed at 27, gone on with to 40: each step once, in the bytes of a run that was left alone"
    killed(killed_at_27, tmp_path)
    rows = (tmp_path/'history.csv').read_text().splitlines()
    whole = steps_logged(tmp_path/'whole')

    learn = steps_logged(tmp_path)

    assert len(rows) == 1+25  # those of the epoch after the save too
    data = (tmp_path/'history.csv').read_bytes()
    assert data == (tmp_path/'whole/history.csv').read_bytes()
    assert [line.split(b',')[0] for line in data.splitlines()] == [b'step', *(b'%d' % i for i in range(1, 41))]
    assert record(learn) == record(whole) and learn.state_hash() == whole.state_hash()


def saved_each_epoch(path):
    learn = noisy_learner(path)
    learn.fit(3, 1e-2, cbs=Checkpoint('1ep'), resume=True)
    return learn

def killed_in_the_second_save(path):
    n_writes = []
    class Dies(files._Hashed):
        def __init__(self, f):
            super().__init__(f)
            n_writes.append(0)

        def write(self, data):
            n_writes[-1] += 1
            if len(n_writes) == 2 and n_writes[1] > n_writes[0]/2: die()
            return super().write(data)

    files._Hashed = Dies
    saved_each_epoch(path)

def test_s17_torn_write(tmp_path):
    "S17: killed half-way through the second checkpoint, it goes on from the first; the torn file is gone afterwards"
    folder = tmp_path/'models/checkpoints'
    killed(killed_in_the_second_save, tmp_path)
    torn, first = names(folder)
    n_bytes = [(folder/name).stat().st_size for name in (torn, first)]

    learn = saved_each_epoch(tmp_path)

    assert re.fullmatch(r'\.run1_step10\.ckpt\.\d+\.tmp', torn) and first == 'run1_step5.ckpt'
    assert 0 < n_bytes[0] < n_bytes[1] and names(folder) == ['run1_step10.ckpt', 'run1_step15.ckpt']
    assert learn.state_hash() == saved_each_epoch(tmp_path/'whole').state_hash()


# ---- what kills have found

@pytest.mark.parametrize('there', [True, False], ids=['another process', 'the same process'])
def test_the_end_is_saved_though_no_step_is_left(tmp_path, there):
    "A fit that goes on in its last validation is saved as one that is over"
    learn, cb = noisy_learner(tmp_path), Checkpoint()
    with pytest.raises(KeyboardInterrupt): learn.fit(2, 1e-2, cbs=[cb, AskAt(13)])
    again = noisy_learner(tmp_path)
    before = newest([cb.folder(learn)], 0)[1] or {}

    if there: again.fit(2, 1e-2, cbs=Checkpoint(), resume=True)
    else: learn.resume()

    after = newest([cb.folder(learn)], 0)[1] or {}
    assert (before['place'], before['done'], after['done']) == ('valid', False, True)


def best_second(path, *cbs):
    "Three epochs, of which the second is the best, with saves of each and of the best so far"
    learn = noisy_learner(path)
    metric = ValueMetric(lambda: [.4, .9, .5][learn.epoch], 'score')
    metric.greater_is_better, learn.metrics = True, [metric]
    learn.fit(3, 1e-2, cbs=[Checkpoint('1ep', monitor='score'), *cbs], resume=True)
    saved = {p.name: load_file(p) for p in sorted(path.rglob('*.ckpt'))}
    return learn.state_hash(), {k: (o['counters'], o['done'], digest(o['model'])) for k, o in saved.items()}

@pytest.mark.parametrize('nth', [3, 4, 5, 6])  # of the second epoch the best, and the regular one; the third; the end
def test_stopped_at_each_save(tmp_path, nth):
    "Whichever save is the one that does not come about, all files are there at last, and the best epoch's is its own"
    expected, saves = best_second(tmp_path/'whole'), iter(range(1, 7))
    def stop(cb, state):
        if next(saves) == nth: raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): best_second(tmp_path/'run', Callback(before_save=stop))

    assert best_second(tmp_path/'run') == expected
    assert best_second(tmp_path/'run') == expected  # and when it is over
    assert [*expected[1]] == ['run1_best_score.ckpt', 'run1_step10.ckpt', 'run1_step15.ckpt']


def two_fits(path, every, *cbs):
    "Five steps and ten; the Learner's callbacks are those of both"
    own = [CSVLogger(every='1it'), CSVLogger('epochs.csv'), SaveModelCallback(fname='best'), Checkpoint(every)]
    draws = Callback(after_fit=lambda cb: torch.rand(1))
    learn = noisy_learner(path, cbs=[Recorder(add_time=False), draws, *own])
    for n in (1, 2): learn.fit(n, 1e-2, cbs=cbs, resume=True)
    return learn

def results(learn):
    "What is to be as if nothing had happened"
    return learn.state_hash(), record(learn), [p.read_bytes() for p in sorted(learn.path.glob('*.csv'))]

def stopped(path, every, event, when):
    "As if killed at `event` when `when(learn)`, after all other callbacks but those that save"
    stop = Callback(**{event: lambda cb: when(cb.learn) and raises(KeyboardInterrupt)(cb)})
    stop.order = 100
    with pytest.raises(KeyboardInterrupt): two_fits(path, every, stop)

def whole(tmp_path, every):
    "What two fits that are left alone end with, in the same folder"
    expected = results(two_fits(tmp_path, every))
    shutil.rmtree(tmp_path)
    return expected

@pytest.mark.parametrize('lives', [[(6, '2it')], [(7, '2it')], [(10, '2it')], [(14, '2it')], [(11, '1h'), (8, '2it')]])
def test_rows_of_a_later_fit_stay(tmp_path, lives):
    "A fit that is found to be over cuts off no rows of the next one, and none of them is there twice"
    expected = whole(tmp_path, '2it')

    for at, every in lives: stopped(tmp_path, every, 'after_batch', lambda learn, at=at: learn.n_step == at)

    assert results(two_fits(tmp_path, '2it')) == expected


def test_a_fit_that_is_over_stays_as_it_was(tmp_path):
    "It loads no best model of a later fit, whose file has the same name, and draws no random number anew"
    expected = whole(tmp_path, '1ep')

    stopped(tmp_path, '1ep', 'after_epoch', lambda learn: learn.n_fit == 1)  # the model is saved, the state is not

    assert results(two_fits(tmp_path, '1ep')) == expected


@pytest.mark.parametrize('kept', [True, False])
def test_workers_that_are_kept_draw_other_numbers(tmp_path, kept):
    "`persistent_workers` draw one seed for all epochs, as torch's do: a fit with them goes on with them, or is refused"
    def learner(kept): return noisy_learner(tmp_path, noisy_loaders(num_workers=1, persistent_workers=kept))
    with pytest.raises(KeyboardInterrupt): learner(kept).fit(2, 1e-2, cbs=[Checkpoint(), AskAt(3)])

    with pytest.raises(ValueError, match=f'workers: `persistent_workers` was {kept}, and is {not kept}'):
        learner(not kept).fit(2, 1e-2, cbs=Checkpoint(), resume=True)


def test_what_saving_a_model_has_left_is_removed(tmp_path):
    "Temporary files of a process that was killed while it saved a model go with the next fit that has a Checkpoint"
    learn = noisy_learner(tmp_path)
    (tmp_path/'models').mkdir()
    (tmp_path/'models/.best.pth.99999999.tmp').touch()

    learn.fit(1, cbs=Checkpoint())

    assert names(tmp_path/'models') == ['checkpoints']


@pytest.mark.filterwarnings('ignore:the fit ended while only the last group')
def test_layers_kept_in_eval_are_let_go(tmp_path):
    "Layers that BnFreeze keeps in eval when an epoch begins, and that are thawed in it, train again in the next one"
    def fit(path, *cbs):
        learn = noisy_learner(path, splitter=halves, train_bn=False)
        learn.fit(4, 1e-2, cbs=[FreezeUntil('2it'), BnFreeze(), Accumulates(), *cbs], n_steps=2, resume=True)
        return learn
    whole = fit(tmp_path/'whole', Checkpoint())
    with pytest.raises(KeyboardInterrupt): fit(tmp_path/'run', Checkpoint(), AskAt(9))

    assert fit(tmp_path/'run', Checkpoint()).state_hash() == whole.state_hash()
