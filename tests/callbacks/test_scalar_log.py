"""ScalarLogger: which numbers are sent when, to a function or a file, and each line once whatever happened."""
import json
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from learner import every as every_file
from learner.callback import Callback
from learner.callbacks.checkpoint import Checkpoint
from learner.callbacks.recorder import Recorder
from learner.callbacks.scalar_log import ScalarLogger
from learner.callbacks.validate_every import ValidateEvery
from learner.events import CancelFitException
from learner.every import Every
from learner.optim import SGD
from tests.bench.test_counts import waits
from tests.helpers import raises, synth_learner, weights
from tests.resume_helpers import AskAt, noisy_learner
from tests.saved_helpers import Rates, batches


class Collects:
    "What is called as a SummaryWriter's `add_scalar` is"
    def __init__(self): self.seen = []
    def add_scalar(self, tag, value, step): self.seen.append((step, tag, value))
    def steps(self, name): return [step for step, tag, _ in self.seen if tag == name]
    def values(self, name): return [v for _, tag, v in self.seen if tag == name]


class Notes(Callback):
    "Notes the number of each training batch, and each prediction's mean in evaluations"
    def after_batch(self):
        if self.training: self.learn.note('train/iter', self.iter)
        else: self.learn.note('valid/mean', self.pred.mean(), len(self.pred))


def lines(path): return [json.loads(line) for line in path.read_text().splitlines()]


# ---- what is sent, and when

def test_losses_rates_and_rows():
    "Means of the loss, by items, and the rate, at each so many steps and the end; rows when they are there"
    board = Collects()
    learn = synth_learner([Rates, ScalarLogger(board.add_scalar, '3it')], dls=(batches(4), batches(2, seed=2)))

    learn.fit(2)
    rec = learn.recorder
    raw = rec.raw_losses

    assert board.steps('loss') == board.steps('lr') == [3, 6, 8]
    means = sum(raw[:3])/3, (3*raw[3]+8*raw[4]+8*raw[5])/19, (8*raw[6]+3*raw[7])/11
    assert board.values('loss') == pytest.approx(means)
    assert board.values('lr') == [rec.lrs[i] for i in (2, 5, 7)]
    assert board.steps('valid_loss') == [4, 8] and board.values('valid_loss') == rec['valid_loss'].values
    assert {tag for _, tag, _ in board.seen} == {'loss', 'lr', *rec.metric_names}

@pytest.mark.parametrize('every, expected', [
    ('50it', [8]), ('1ep', [4, 8]), ('8it', [8]), (Every('50it', last=False), []), (Every('3it', last=False), [3, 6])])
def test_a_short_fit(every, expected):
    "A fit of fewer steps than `every` sends all at its end, unless that says not to; nothing is sent twice"
    board = Collects()

    synth_learner(ScalarLogger(board.add_scalar, every), n=4).fit(2)

    assert board.steps('loss') == expected

def test_by_time(monkeypatch):
    "With a time, it is the first step after it has passed"
    clock, board = SimpleNamespace(now=0.), Collects()
    monkeypatch.setattr(every_file, 'perf_counter', lambda: clock.now)
    def tick(cb): clock.now += 3

    synth_learner([Callback(before_step=tick), ScalarLogger(board.add_scalar, '10s')], n=10).fit(1)

    assert board.steps('loss') == [4, 8, 10]

def test_time_goes_on_from_piece_to_piece(monkeypatch):
    "A time is counted over all pieces of a fit"
    clock, board = SimpleNamespace(now=0.), Collects()
    monkeypatch.setattr(every_file, 'perf_counter', lambda: clock.now)
    def tick(cb): clock.now += 3
    learn = synth_learner([Callback(before_step=tick), ScalarLogger(board.add_scalar, '10s')], n=10)

    for _ in range(9): learn.step(1, n_epoch=1)

    assert board.steps('loss') == [4, 8]

def test_pieces_of_a_fit():
    "A fit that is made by steps sends what one in one go does"
    whole, board = Collects(), Collects()
    synth_learner(ScalarLogger(whole.add_scalar, '4it'), n=3).fit(3)
    learn = synth_learner(ScalarLogger(board.add_scalar, '4it'), n=3)

    for _ in range(9): learn.step(1, n_epoch=3, validate=True)

    def but_time(seen): return [o for o in seen if o[1] != 'time']
    assert but_time(board.seen) == but_time(whole.seen) and board.steps('loss') == [4, 8, 9]

def test_a_fit_that_is_ended():
    "What has come since the last time is sent too when a callback ends the fit in the midst of an epoch"
    board = Collects()
    end = Callback(after_step=raises(CancelFitException, nth=5))

    learn = synth_learner([end, ScalarLogger(board.add_scalar, '3it')], n=9)
    learn.fit(2)
    learn.fit_iters(3)

    assert board.steps('loss') == [3, 5, 6, 8]

def test_several_groups():
    "Each has its rate"
    board = Collects()
    learn = synth_learner(ScalarLogger(board.add_scalar), opt_func=SGD, splitter=lambda m: [[m.a], [m.b]])

    learn.fit(1, slice(1e-3, 1e-2))

    assert board.values('lr_0') == [pytest.approx(1e-3)] and board.values('lr_1') == [1e-2]
    assert board.values('lr') == []

def test_parts_of_the_loss():
    "They are sent beside the loss"
    class Parts(nn.Module):
        def forward(self, p, y): return dict(a=(p-y).square().mean(), b=(p-y).abs().mean())
    board = Collects()
    learn = synth_learner(ScalarLogger(board.add_scalar), loss_func=Parts())

    learn.fit(1)
    row = learn.recorder.values[-1]

    assert board.values('loss_a') == [pytest.approx(row['train_a'])] and board.values('train_b') == [row['train_b']]
    assert board.values('loss') == [pytest.approx(row['train_a']+row['train_b'])]

def test_notes():
    "What is noted is sent as its mean since the last time, with the losses or with a row"
    board = Collects()
    learn = synth_learner([Notes, ScalarLogger(board.add_scalar, '3it')], n=4, n_valid=2)

    learn.fit(1)
    learn.fit(1)

    assert board.steps('train/iter') == [3, 4, 6, 8] and board.values('train/iter') == [1, 3, .5, 2.5]
    assert board.steps('valid/mean') == [4, 8]
    assert board.values('valid/mean')[-1] == pytest.approx(learn.recorder['valid/mean'].mean())

def test_rows_of_validate_every():
    "Its rows are sent as they come; the number of the step, which goes with each, is not sent as a value"
    board = Collects()

    synth_learner([ValidateEvery('2it'), ScalarLogger(board.add_scalar, '2it')], n=4).fit(1)

    assert board.steps('valid_loss') == [0, 2, 4] and board.steps('loss') == [2, 4] and 'step' not in {
        tag for _, tag, _ in board.seen}

def test_a_step_waits_for_nothing():
    "However many batches there are between two reports, a fit waits equally often for the device"
    def fit(n): return synth_learner(ScalarLogger(Collects().add_scalar, '99it'), dls=(batches(n), None)).fit(1)

    assert waits(lambda: fit(4)) == waits(lambda: fit(40))

def test_a_removed_recorder():
    "If the Recorder leaves, losses and rates are sent on"
    board = Collects()
    leave = Callback(after_batch=lambda cb: cb.iter == 1 and cb.learn.remove_cbs(Recorder))

    synth_learner([leave, ScalarLogger(board.add_scalar, '2it')], n=4).fit(1)

    assert board.steps('loss') == board.steps('lr') == [2, 4] and board.steps('valid_loss') == []


# ---- what does not work

@pytest.mark.parametrize('write', ['function', 'file'])
def test_what_cannot_be_sent(write, tmp_path, monkeypatch):
    "A backend that fails, or a full disk, is one warning a fit, and training goes on as it would"
    other = synth_learner(n=4)
    other.fit(2)
    def fail(*args): raise OSError(28, "no space left")
    logger = ScalarLogger(fail if write == 'function' else 'x.jsonl', '1it')
    if write == 'file': monkeypatch.setattr(logger, '_append', fail)
    learn = synth_learner(logger, n=4, path=tmp_path)

    with pytest.warns(UserWarning, match='ScalarLogger: `.*loss.*` of step 1 cannot be sent.*no space left') as told:
        learn.fit(2)

    assert len(told) == 1 and all(map(torch.equal, weights(learn), weights(other)))

def test_one_name_that_cannot_be_sent():
    "The others are"
    board = Collects()
    def write(name, value, step):
        if name == 'loss': raise ValueError("no such tag")
        board.add_scalar(name, value, step)

    with pytest.warns(UserWarning, match='`loss` of step 2'): synth_learner(ScalarLogger(write)).fit(1)

    assert board.steps('lr') == [2] and board.steps('loss') == []

@pytest.mark.parametrize('write, every, error', [(None, '50it', TypeError), (3, '50it', TypeError),
                                                 (print, '50', ValueError), (print, 50, TypeError)])
def test_what_means_nothing(write, every, error):
    "It is refused at once"
    with pytest.raises(error): ScalarLogger(write, every)

def test_what_is_known_at_the_start(tmp_path):
    "Without Recorder, or where there can be no file, the fit does not begin"
    (tmp_path/'x').write_text('')

    with pytest.raises(RuntimeError, match='works with `Recorder`'): synth_learner(
        ScalarLogger(print), default_cbs=False).fit(1)
    with pytest.raises(OSError, match='x'): synth_learner(ScalarLogger('x/y.jsonl'), path=tmp_path).fit(1)


# ---- files

def test_lines_of_a_file(tmp_path):
    "A line of JSON for each report and each row, on disk at once; what is not finite is null"
    seen, file = [], tmp_path/'logs/a.jsonl'
    bad = batches(3)
    bad[2][1][0] = math.nan
    look = Callback(after_batch=lambda cb: seen.append(len(lines(file))))
    look.order = 70
    learn = synth_learner([ScalarLogger('logs/a.jsonl', '2it'), look], dls=(bad, batches(1)), path=tmp_path)

    with pytest.warns(UserWarning, match='batch 2'): learn.fit(1)
    first, last, row = lines(file)

    assert seen == [0, 1, 1, 2]
    assert first == dict(step=2, loss=pytest.approx(sum(learn.recorder.raw_losses[:2])/2), lr=1e-3)
    assert last == dict(step=3, loss=None, lr=1e-3) and row['step'] == 3 and row['train_loss'] is None
    assert {*row} == {'step', *learn.recorder.metric_names}

def test_a_file_is_added_to(tmp_path):
    "Also after a last line that was cut short; and it is closed after the fit"
    logger = ScalarLogger(tmp_path/'a.jsonl')
    (tmp_path/'a.jsonl').write_text('{"step": 1}\n{"st')

    learn = synth_learner(logger)
    learn.fit(1)
    learn.fit(1)
    whole, short, *new = (tmp_path/'a.jsonl').read_text().splitlines()

    assert (whole, short) == ('{"step": 1}', '{"st') and logger.file is None
    assert [json.loads(line)['step'] for line in new] == [2, 2, 4, 4]

def test_an_error_leaves_whole_lines(tmp_path):
    "Lines up to an error are there, and the file is closed"
    learn = synth_learner([Callback(after_backward=raises(RuntimeError('x'), nth=6)), ScalarLogger('a.jsonl', '1it')],
                          n=4, path=tmp_path)

    with pytest.raises(RuntimeError): learn.fit(2)

    assert [o['step'] for o in lines(tmp_path/'a.jsonl')] == [1, 2, 3, 4, 4, 5] and learn.scalar_logger.file is None


class NearlyFull:
    "A file of a disk on which each write leaves some bytes before it fails"
    def __init__(self, file): self.file = file
    def __getattr__(self, name): return getattr(self.file, name)
    def write(self, data):
        if len(data) < 9: raise OSError(28, 'no space left')
        return self.file.write(data[:-8])

def test_half_a_line_does_not_stay(tmp_path):
    "Where a line cannot be written as a whole, nothing of it is there"
    def fill(cb): cb.scalar_logger.file = NearlyFull(cb.scalar_logger.file)
    learn = synth_learner([ScalarLogger('a.jsonl', '1it'), Callback(before_validate=fill)], n=3, path=tmp_path)

    with pytest.warns(UserWarning, match='no space left'): learn.fit(2)

    assert [o['step'] for o in lines(tmp_path/'a.jsonl')] == [1, 2, 3]


# ---- going on

def but_time(found): return [{k: v for k, v in o.items() if k != 'time'} for o in found]

def logged(path, *cbs): return noisy_learner(path, cbs=[Notes, ScalarLogger('a.jsonl', '2it'), *cbs])

@pytest.mark.parametrize('at, saved', [(3, '1it'), (4, '3it'), (6, '1ep'), (7, '1ep'), (9, '3it'), (13, '4it')])
def test_a_killed_fit_goes_on_in_its_file(at, saved, tmp_path):
    "Killed anywhere, and gone on with from what was saved last, it has each line once, as if it had never stopped"
    logged(tmp_path/'whole').fit(3, 1e-2)
    def kill(cb):
        if cb.training and cb.learn.n_step == at: raise KeyboardInterrupt
    last = Callback(after_batch=kill)
    last.order = 80
    with pytest.raises(KeyboardInterrupt): logged(tmp_path/'part', last).fit(3, 1e-2, cbs=Checkpoint(saved))
    before = lines(tmp_path/'part/a.jsonl')

    logged(tmp_path/'part').fit(3, 1e-2, cbs=Checkpoint(saved), resume=True)
    whole, found = (but_time(lines(tmp_path/name/'a.jsonl')) for name in ('whole', 'part'))

    assert before and found == whole

@pytest.mark.parametrize('at', [3, 6])
def test_a_stopped_fit_goes_on(at, tmp_path):
    "So does one that was stopped in training or in validation, with a function too"
    whole, board = Collects(), Collects()
    noisy_learner(tmp_path/'whole', cbs=ScalarLogger(whole.add_scalar, '2it')).fit(2, 1e-2)
    def mk(): return noisy_learner(tmp_path/'part', cbs=ScalarLogger(board.add_scalar, '2it'))
    with pytest.raises(KeyboardInterrupt): mk().fit(2, 1e-2, cbs=[Checkpoint('9it'), AskAt(at)])

    mk().fit(2, 1e-2, cbs=Checkpoint('9it'), resume=True)

    assert [o for o in board.seen if o[1] != 'time'] == [o for o in whole.seen if o[1] != 'time']

def test_a_script_of_two_fits(tmp_path):
    "What the second one had written before it had saved anything is cut off when it begins again"
    def script(learn):
        for _ in range(2): learn.fit(1, 1e-2, cbs=Checkpoint('1ep'), resume=True)
    script(logged(tmp_path/'whole'))
    kill = Callback(after_batch=lambda cb: cb.training and cb.learn.n_step == 8 and _raise())
    with pytest.raises(KeyboardInterrupt): script(logged(tmp_path/'part', kill))

    script(logged(tmp_path/'part'))

    assert but_time(lines(tmp_path/'part/a.jsonl')) == but_time(lines(tmp_path/'whole/a.jsonl'))

def _raise(): raise KeyboardInterrupt

def test_a_file_that_has_lost_lines(tmp_path):
    "It is said, and the fit goes on"
    logged(tmp_path).fit(1, 1e-2, cbs=Checkpoint('2it', keep=None))
    file = tmp_path/'a.jsonl'
    file.write_text(file.read_text().splitlines()[0]+'\n')

    with pytest.warns(UserWarning, match='shorter than when the fit was saved'):
        logged(tmp_path).fit(1, 1e-2, resume=tmp_path/'models/checkpoints/run1_step4.ckpt')

    assert [o['step'] for o in lines(file)] == [2, 5, 5]

def test_it_is_no_part_of_the_hash():
    "What waits to be sent decides nothing of how training goes on"
    one, other = (synth_learner(ScalarLogger(Collects().add_scalar, Every('50it', last=False))) for _ in range(2))
    for learn in (one, other): learn.fit(1)
    other.scalar_logger.since.clear()

    assert one.state_hash() == other.state_hash()
