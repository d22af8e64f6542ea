"""What is asked of a running fit, from anywhere at any time: it is done once, soon, where it can be gone on from."""
import signal
import threading
import time
from random import Random

import pytest

from learner.callback import Callback
from learner.callbacks.checkpoint import Checkpoint
from learner.interrupt import StopFlag
from tests.resume_helpers import noisy_learner, record, uninterrupted
from tests.signal_helpers import saved_steps

batches = dict(last_batch=lambda cb: cb.iter == 4, valid_batch=lambda cb: not cb.training)
# Places in an epoch of five training batches and two of validation: events, or such batches; and the steps done then.
# What is asked while an epoch begins is done before its first batch, what is asked in a batch when that is over.
places = dict(before_fit=0, before_epoch=0, before_train=0, before_batch=1, after_step=1, after_batch=1, last_batch=5,
              after_train=5, before_validate=5, valid_batch=5, after_validate=5, after_epoch=5, cleanup_epoch=5)


# ---- the flag

def test_what_is_asked_is_taken_once():
    "All that was asked for is taken at once, each with who asked last; then nothing is left"
    flag = StopFlag()
    flag.ask('save', 'stop', by='a thread')
    flag.ask('save', by='SIGUSR1')

    assert flag.requested
    assert flag.take() == {'save': 'SIGUSR1', 'stop': 'a thread'}
    assert not flag.requested and flag.take() == {}


def test_ctrl_c_asks_for_what_it_is_told():
    "The first Ctrl-C asks, the second acts; once the first is obeyed, the next one is a first one"
    flag, acted = StopFlag(), []
    flag.on_ctrl_c, flag.previous = ('save', 'stop'), lambda *args: acted.append(args)

    flag(signal.SIGINT, None)
    asked = flag.take()
    flag(signal.SIGINT, None)
    flag(signal.SIGINT, None)

    assert asked == {'save': 'Ctrl-C', 'stop': 'Ctrl-C'} and acted == [(signal.SIGINT, None)]


def test_what_must_not_be_cut_short_is_not():
    "While something is held, a second Ctrl-C waits too"
    flag = StopFlag()
    flag.held, flag.previous = True, lambda *args: pytest.fail('cut short')

    for _ in range(3): flag(signal.SIGINT, None)

    assert flag.take() == {'interrupt': 'Ctrl-C'}


def test_none_is_lost():
    "However threads and the fit's own looks at the flag fall together, what was asked for is taken, each once"
    flag, n, taken = StopFlag(), 20_000, []
    def ask(name):
        for i in range(n): flag.ask(f'{name} {i}')
    threads = [threading.Thread(target=ask, args=(name,)) for name in 'ab']

    for t in threads: t.start()
    while any(t.is_alive() for t in threads) or flag.requested:
        if flag.requested: taken += flag.take()
    for t in threads: t.join()

    assert sorted(taken) == sorted(f'{name} {i}' for name in 'ab' for i in range(n))


# ---- a running fit

class AskFrom(Callback):
    "When it first comes to a place, from an epoch on, asks from another thread, as a notebook's button does"
    order = -1
    def __init__(self, at, *methods, begin=0):
        self.methods, self.begin, self.said, self.is_there = methods, begin, [], batches.get(at, lambda cb: True)
        super().__init__(**{'after_batch' if at in batches else at: lambda cb: cb.ask()})

    def ask(self):
        if self.said or self.epoch < self.begin or not self.is_there(self): return
        thread = threading.Thread(target=lambda: self.said.extend(getattr(self.learn, m)() for m in self.methods))
        thread.start()
        thread.join()


def fit(learn, *cbs, n_epoch=2, **kwargs): learn.fit(n_epoch, 1e-2, cbs=[Checkpoint(at_end=False), *cbs], **kwargs)


def goes_on_like(whole, path):
    "What a new process makes of what was saved"
    learn = noisy_learner(path)
    fit(learn, resume=True)
    assert learn.final_hash == whole.final_hash and record(learn) == record(whole)


@pytest.fixture(scope='module')
def whole(tmp_path_factory): return uninterrupted(tmp_path_factory.mktemp('whole'), 2)


@pytest.mark.parametrize('epoch', [0, 1])
@pytest.mark.parametrize('at', places)
def test_a_stop_is_asked_for(tmp_path, whole, at, epoch):
    "A stop that a thread asks for, in training, in validation or between, ends the fit there, and it goes on exactly"
    learn, ask = noisy_learner(tmp_path), AskFrom(at, 'request_stop', begin=epoch*(at != 'before_fit'))

    fit(learn, ask)
    n_step, paused = learn.n_step, learn.paused
    learn.resume()

    assert ask.said == [True] and paused and n_step == places[at] + 5*epoch*(at != 'before_fit')
    assert learn.final_hash == whole.final_hash and record(learn) == record(whole)
    assert saved_steps(learn) == []  # it was not asked to


@pytest.mark.parametrize('epoch', [0, 1])
@pytest.mark.parametrize('at', places)
def test_a_save_is_asked_for(tmp_path, whole, at, epoch):
    "A save that a thread asks for anywhere is made there, changes nothing, and can be gone on from"
    learn, ask = noisy_learner(tmp_path), AskFrom(at, 'request_save', begin=epoch*(at != 'before_fit'))

    fit(learn, ask)

    assert ask.said == [True] and saved_steps(learn) == [places[at] + 5*epoch*(at != 'before_fit')]
    assert learn.final_hash == whole.final_hash and learn.stopped_by == '' and learn.paused is None
    goes_on_like(whole, tmp_path)


@pytest.mark.parametrize('methods', [('request_save', 'request_stop'), ('request_stop', 'request_save')])
@pytest.mark.parametrize('at', places)
def test_both_are_asked_for(tmp_path, whole, at, methods):
    "Asked for both, in whatever order, the fit is saved and then ends"
    learn, ask = noisy_learner(tmp_path), AskFrom(at, *methods)

    fit(learn, ask)

    assert ask.said == [True, True] and learn.stopped_by == 'request_stop'
    assert saved_steps(learn) == [places[at]] == [learn.n_step]
    goes_on_like(whole, tmp_path)


def test_a_stop_that_comes_too_late(tmp_path):
    "When all epochs are over nothing is left to stop, and it is to be seen that it was asked for"
    learn, ask = noisy_learner(tmp_path), AskFrom('after_fit', 'request_stop')

    fit(learn, ask)

    assert ask.said == [True] and learn.stopped_by == 'request_stop' and learn.paused is None and learn.n_step == 10


def test_no_fit_runs(tmp_path):
    "Before and after a fit, also one that failed, a request says that none runs, and the next fit is not stopped"
    learn, said = noisy_learner(tmp_path), []
    def ask(): said.extend([learn.request_stop(), learn.request_save()])

    ask()
    fit(learn)
    ask()
    with pytest.raises(KeyError): fit(learn, Callback(after_batch=lambda cb: {}['odd']))
    ask()
    fit(learn)

    assert said == [False]*6 and learn.n_fit == 2 and learn.stopped_by == ''


def test_nobody_who_saves(tmp_path):
    "Without a Checkpoint a request to save is an error where it is made, and the fit goes on"
    learn, said = noisy_learner(tmp_path), []
    def ask():
        with pytest.raises(RuntimeError, match='no Checkpoint') as error: learn.request_save()
        said.append(error.type)
    def from_thread(cb):
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()

    learn.fit(1, cbs=Callback(after_epoch=from_thread))

    assert said == [RuntimeError] and learn.n_step == 5


@pytest.mark.parametrize('seed', range(8))
def test_a_hammering_thread_is_heard(tmp_path, seed):
    "Among any number of requests to save that a thread makes, its one to stop is not lost, nor the last save"
    learn, n, rng = noisy_learner(tmp_path), [0, 0], Random(seed)
    def hammer():
        end = time.monotonic() + .3*rng.random()
        while time.monotonic() < end:
            n[0] += learn.request_save()
            time.sleep(.01*rng.random())
        n[0] += learn.request_save()
        n[1] += learn.request_stop()
    thread = threading.Thread(target=hammer)

    fit(learn, Callback(before_fit=lambda cb: thread.start()), n_epoch=500)
    thread.join()
    n_step = learn.n_step
    fit(again := noisy_learner(tmp_path), AskFrom('before_train', 'request_stop'), n_epoch=500, resume=True)

    assert n[1] == 1 and n[0] > 1 and learn.stopped_by == 'request_stop' and n_step < 2500
    assert saved_steps(learn)[-1] == n_step == again.n_step
