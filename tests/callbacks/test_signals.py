"""SignalCallback: each signal does what it is told to, between two batches, and leaves no trace in the process."""
import multiprocessing
import os
import re
import signal
import threading
import time
from contextlib import nullcontext

import pytest

from learner.callback import Callback
from learner.callbacks.checkpoint import Checkpoint
from learner.callbacks.signals import SignalCallback
from learner.events import event_names
from tests.helpers import file_events, raises
from tests.resume_helpers import noisy_learner, noisy_loaders, record, uninterrupted
from tests.signal_helpers import Begun, SendAt, fit, saved_steps, send

signals = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD
# batches of three epochs, each of five training batches and two of validation: first, last, in validation, at borders
stopped = KeyboardInterrupt('stopped in epoch 2 of 3, after train batch 1 of 5; `learn.resume()` goes on from there')
places = 1, 4, 5, 6, 7, 8, 19, 20, 21


def resumed(path, **kwargs):
    "A new Learner that has gone on to the end of the fit"
    learn = noisy_learner(path, **kwargs)
    fit(learn, resume=True)
    return learn


@pytest.fixture
def handled():
    "Lets a test set handlers, which are as before afterwards"
    old = {n: signal.getsignal(n) for n in signals}
    yield signal.signal
    for n, f in old.items(): signal.signal(n, f)


# ---- what is done

@pytest.mark.parametrize('at', places)
def test_r10_a_stop_saves_and_resumes(tmp_path, at):
    "SIGTERM, wherever it comes, ends the fit with the batch under way, saved; gone on with, it equals the whole"
    whole, learn, begun = uninterrupted(tmp_path, 3), noisy_learner(tmp_path), Begun()

    fit(learn, SignalCallback(), SendAt(at), begun)
    stopped, saved = (learn.stopped_by, begun.n, learn.n_step), saved_steps(learn)
    again = resumed(tmp_path)
    learn.resume()

    assert stopped == ('SIGTERM', 0, at//7*5 + min(at % 7, 5)) and saved == [stopped[-1]]
    assert whole.final_hash == again.final_hash == learn.final_hash
    assert record(whole) == record(again) == record(learn)


@pytest.mark.parametrize('at', [e for e in event_names if e.partition('_')[0] in ('before', 'after', 'cleanup') and
                                'cancel' not in e and e not in ('after_create', *file_events)])
def test_r10_no_further_batch_is_begun(tmp_path, at):
    "At whatever event a signal comes, no batch is begun after the one under way, and all that was done is saved"
    whole, learn, begun, sent = uninterrupted(tmp_path, 2), noisy_learner(tmp_path), Begun(), []
    def send_once(cb):
        if not sent and (cb.epoch == 1 or at.endswith('fit')): sent.append(send())

    fit(learn, SignalCallback(), Callback(**{at: send_once}), begun, n_epoch=2)
    again = noisy_learner(tmp_path)
    fit(again, n_epoch=2, resume=True)

    assert (learn.stopped_by, begun.n) == ('SIGTERM', 0)
    assert saved_steps(learn)[:1] == ([] if at in ('after_fit', 'cleanup_fit') else [learn.n_step])  # it was over
    assert again.final_hash == whole.final_hash


@pytest.mark.parametrize(('action', 'error', 'by'), [
    (dict(sigterm='stop'), None, 'SIGTERM'), (dict(sighup='save+stop'), None, 'SIGHUP'),
    (dict(sigusr1='stop+save'), None, 'SIGUSR1'), (dict(sigusr2='save+interrupt'), stopped, 'SIGUSR2'),
    (dict(sigterm='save+exit'), SystemExit(143), 'SIGTERM'), (dict(sigint='save+exit'), SystemExit(130), 'Ctrl-C'),
    (dict(sigint='stop'), None, 'Ctrl-C'), (dict(sigint='save+interrupt'), stopped, 'Ctrl-C')], ids=str)
def test_endings(tmp_path, action, error, by):
    "A fit ends quietly, with KeyboardInterrupt, or with the exit status that shells give to the signal"
    learn = noisy_learner(tmp_path)
    (name, words), = action.items()
    cbs = SignalCallback(**{'sigterm': None} | action), SendAt(8, getattr(signal, name.upper()))

    with pytest.raises(type(error)) if error else nullcontext() as raised: fit(learn, *cbs)

    assert learn.stopped_by == by and learn.n_step == 6 and learn.paused
    assert saved_steps(learn) == [6]*('save' in words)
    assert not raised or str(error) in str(raised.value)


def test_s23_a_quiet_stop(tmp_path, capsys):
    "Ctrl-C may end a fit quietly: batches that were done are recorded, the bar is closed, it goes on, a new fit works"
    whole = uninterrupted(tmp_path, 3)
    learn = noisy_learner(tmp_path, default_cbs=True)

    learn.fit(3, 1e-2, cbs=[SignalCallback(sigint='stop', sigterm=None), SendAt(10, signal.SIGINT)])
    stopped, live = (learn.stopped_by, learn.n_step, len(learn.recorder.losses)), learn.progress.live
    learn.resume()

    assert stopped == ('Ctrl-C', 8, 8) and live is None and learn.model.training
    assert learn.final_hash == whole.final_hash and record(learn) == record(whole)
    learn.fit(1)
    assert learn.n_step == 20 and 'the batch is being finished first' in capsys.readouterr().err


@pytest.mark.parametrize('name', ['sighup', 'sigusr1', 'sigint'])
@pytest.mark.parametrize('at', [1, 5, 6, 14])
def test_a_save_goes_on(tmp_path, name, at):
    "A signal that saves does just that, and a later one does it again; another process goes on from there"
    whole, learn = uninterrupted(tmp_path, 3), noisy_learner(tmp_path)
    signum = getattr(signal, name.upper())

    fit(learn, SignalCallback(**{name: 'save'}), SendAt(at, signum), SendAt(at+3, signum))
    steps = saved_steps(learn)

    assert steps == [n//7*5 + min(n % 7, 5) for n in (at, at+3)] and learn.stopped_by == ''
    assert whole.final_hash == learn.final_hash == resumed(tmp_path).final_hash


def test_a_late_stop_is_known(tmp_path):
    "A stop that comes when the fit is over cannot end it, and is to be seen all the same"
    learn = noisy_learner(tmp_path)

    fit(learn, SignalCallback(), Callback(after_fit=lambda cb: send()))

    assert learn.n_step == 15 and learn.stopped_by == 'SIGTERM' and learn.paused is None


# ---- a second one

def test_r10_the_second_ctrl_c_acts_at_once(tmp_path):
    "Also where Ctrl-C is to end quietly, the second one interrupts the batch"
    learn = noisy_learner(tmp_path)

    with pytest.raises(KeyboardInterrupt): fit(learn, SignalCallback(sigint='stop'),
                                               Callback(after_pred=lambda cb: send(signal.SIGINT, 2)))
    assert learn.n_step == 0


def test_the_second_one_does_what_python_would(tmp_path, handled):
    "Where SIGTERM raised KeyboardInterrupt before, the second one does"
    handled(signal.SIGTERM, signal.default_int_handler)
    learn = noisy_learner(tmp_path)

    with pytest.raises(KeyboardInterrupt): fit(learn, SignalCallback(), Callback(after_pred=lambda cb: send(times=2)))
    assert learn.n_step == 0


def test_a_save_is_never_a_second_one(tmp_path):
    "Two signals that save, as a terminal that is closed sends them, end nothing"
    learn = noisy_learner(tmp_path)

    fit(learn, SignalCallback(sighup='save'), Callback(after_pred=lambda cb: cb.iter == 2 and send(signal.SIGHUP, 2)))

    assert learn.n_step == 15 and saved_steps(learn) == [8, 13]


# ---- other handlers

def test_r10_handlers_are_chained(tmp_path, handled):
    "A function that handled the signal is called for each, when the stop is asked for; the fit ends as it should"
    seen = []
    def mine(signum, frame): seen.append((signum, learn._stop.requested))
    handled(signal.SIGUSR1, mine)
    learn = noisy_learner(tmp_path)

    fit(learn, SignalCallback(sigusr1='save+stop'),
        Callback(after_pred=lambda cb: cb.learn.n_step == 5 and cb.training and send(signal.SIGUSR1, 2)))

    assert seen == [(signal.SIGUSR1, True)]*2 and learn.n_step == 6 and saved_steps(learn) == [6]
    assert signal.getsignal(signal.SIGUSR1) is mine


@pytest.mark.parametrize('workers', [0, 2])
@pytest.mark.parametrize('way', [dict(), dict(after_batch=raises(ValueError)), dict(before_fit=raises(ValueError)),
                                 dict(after_batch=lambda cb: send()), dict(after_batch=lambda cb: send(signal.SIGINT)),
                                 dict(before_epoch=lambda cb: send(signal.SIGHUP))], ids=[*'abcdef'])
def test_r10_handlers_are_put_back(tmp_path, handled, workers, way):
    "However a fit ends, all handlers are those from before, and the Learner has nothing of ours"
    def mine(signum, frame): pass
    handled(signal.SIGHUP, mine)
    learn = noisy_learner(tmp_path, dls=noisy_loaders(num_workers=workers))
    fit(learn, n_epoch=1)
    before, attrs = [signal.getsignal(n) for n in signals], {*vars(learn)}
    cb = SignalCallback('stop', 'stop', 'stop', 'save', 'save')

    try: fit(learn, cb, Callback(**way), n_epoch=1)
    except ValueError: pass

    assert all(a is b for a, b in zip(before, [signal.getsignal(n) for n in signals]))
    assert learn._stop.on_ctrl_c == ('interrupt',) and {*vars(learn)} == attrs


def test_they_are_there_in_fits_only(tmp_path):
    "A fit listens, an evaluation or the search for a rate does not"
    learn, seen = noisy_learner(tmp_path, cbs=[SignalCallback(), Checkpoint()]), {}
    def look(cb): seen[cb.run_kind] = signal.getsignal(signal.SIGTERM)
    learn.add_cb(Callback(after_batch=look))

    learn.validate()
    learn.lr_find(num_it=20, show_plot=False)
    learn.fit(1)

    assert callable(seen.pop('fit')) and seen == dict(validate=signal.SIG_DFL, lr_find=signal.SIG_DFL)


def test_an_ignored_signal_stays_ignored(tmp_path, handled):
    "Under nohup SIGHUP stays ignored, and a warning says so"
    handled(signal.SIGHUP, signal.SIG_IGN)
    learn = noisy_learner(tmp_path)

    with pytest.warns(UserWarning, match='SIGHUP is ignored by this process, and left so'):
        fit(learn, SignalCallback(sighup='stop'), SendAt(3, signal.SIGHUP))

    assert learn.n_step == 15


def test_another_thread_cannot_listen(tmp_path):
    "A fit in another thread says that signals cannot be handled there, and leaves them alone"
    learn, seen = noisy_learner(tmp_path), []
    def run():
        with pytest.warns(UserWarning, match='cannot be handled in this fit'): fit(learn, SignalCallback())
    learn.add_cb(Callback(after_batch=lambda cb: seen.append([signal.getsignal(n) for n in signals])))
    before = [signal.getsignal(n) for n in signals]

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()

    assert seen == [before]*21


def test_forked_processes_are_left_alone(tmp_path):
    "A process that is forked during a fit ends by SIGTERM as ever, and hands no signal on"
    ended = []
    def fork(cb):
        if cb.learn.n_step != 3: return
        p = multiprocessing.get_context('fork').Process(target=time.sleep, args=(60,))
        p.start()
        assert p.pid
        os.kill(p.pid, signal.SIGUSR1)
        p.join(.2)
        ended.append(p.exitcode)
        p.terminate()
        p.join(10)
        ended.append(p.exitcode)
    learn = noisy_learner(tmp_path)

    fit(learn, SignalCallback(sigusr1='save+stop'), Callback(after_step=fork))

    assert ended == [None, -signal.SIGTERM] and learn.n_step == 15


# ---- what it is told

@pytest.mark.parametrize('action', ['', 'halt', 'save+', 'save,stop', 'stop+exit', 'save+save', True])
def test_bad_words(action):
    "What is no action is refused when the callback is made, naming the signal"
    with pytest.raises(ValueError, match=re.escape(f"sighup={action!r}; give None, 'save', one of")):
        SignalCallback(sighup=action)


def test_no_one_who_saves(tmp_path):
    "Without a Checkpoint a signal cannot save: an error before training names the signal; to stop, none is needed"
    learn = noisy_learner(tmp_path)

    with pytest.raises(ValueError, match="SIGTERM is to save, and there is no Checkpoint.*give sigterm an action"):
        learn.fit(1, cbs=SignalCallback)
    assert learn.n_step == 0
    learn.fit(1, cbs=[SignalCallback(sigterm='stop'), SendAt(2, signal.SIGTERM)])
    assert learn.n_step == 2


def test_systems_that_lack_a_signal(tmp_path, monkeypatch):
    "What a system does not have, as Windows has no SIGUSR1, nothing waits for"
    for name in ('SIGHUP', 'SIGUSR1', 'SIGUSR2', 'SIGCHLD'): monkeypatch.delattr(signal, name)
    learn = noisy_learner(tmp_path)

    fit(learn, SignalCallback(sighup='stop', sigusr1='save', sigusr2='exit'), SendAt(3, signal.SIGTERM))

    assert learn.stopped_by == 'SIGTERM' and learn.n_step == 3
