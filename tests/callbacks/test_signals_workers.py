"""SignalCallback and processes: workers that share the main process's signals, and what kills the process itself."""
import multiprocessing
import os
import random
import signal
import sys
import time
from itertools import count

import pytest
from torch.utils.data import DataLoader

from learner.callback import Callback
from learner.callbacks.signals import SignalCallback
from tests.file_helpers import python
from tests.resume_helpers import Noisy, noisy_learner
from tests.signal_helpers import Begun, fit, saved_steps, send

n_stops = 8  # in each of two tests; more by hand
run_here = 'import sys; from tests.callbacks import test_signals_workers as t; t.{}(*sys.argv[1:])'


def make(path, data=Noisy, n=2, **kwargs):
    "A Learner whose batches, five of training and two of validation, come from workers"
    return noisy_learner(path, dls=[DataLoader(d, 8, num_workers=n, **kwargs) for d in (data(), Noisy(16))])


def said_by(name, *args, on_ready=lambda pgid: None):
    "What a function of this file prints in a process group of its own, and its exit status; acts when it is ready"
    env = os.environ | dict(LEARNER_DISPLAY='off', OMP_NUM_THREADS='1')
    with python(run_here.format(name), *args, start_new_session=True, env=env) as p:
        said = []
        assert p.stdout and p.stderr
        for line in p.stdout:
            if line == 'ready\n': on_ready(p.pid)
            else: said.append(line.strip())
        sys.stderr.write(p.stderr.read())  # for whoever looks into a failure
    return said, p.returncode


class Slow(Noisy):
    "Its worker sends a signal while the main process waits for it"
    def __getitem__(self, i):
        if i == 20 and multiprocessing.parent_process():
            time.sleep(.2)
            os.kill(os.getppid(), signal.SIGTERM)
            time.sleep(.5)
        return super().__getitem__(i)


@pytest.mark.parametrize('kept', [False, True])
@pytest.mark.parametrize('action', ['save+stop', 'save+interrupt'])
def test_r10_a_stop_while_waiting_for_workers(tmp_path, kept, action):
    "A signal that comes while the loop waits for workers ends the fit with the batch they work at"
    whole = make(tmp_path/'whole', n=1, persistent_workers=kept)
    fit(whole, n_epoch=2)
    learn, begun = make(tmp_path, Slow, n=1, persistent_workers=kept), Begun()

    try: fit(learn, SignalCallback(sigterm=action), begun, n_epoch=2)
    except KeyboardInterrupt: assert action == 'save+interrupt'
    again = make(tmp_path, n=1, persistent_workers=kept)
    fit(again, n_epoch=2, resume=True)

    assert learn.stopped_by == 'SIGTERM' and begun.n == 1 and saved_steps(learn) == [learn.n_step] == [3]
    assert again.state_hash() == whole.state_hash()


def stopped_again_and_again(path, kept):
    "Goes on with a fit that is stopped from outside, `n_stops` times; then with one that is not, to its end"
    def learner(path): return make(path, persistent_workers=kept == 'True')
    for _ in range(n_stops):
        learn, begun, ready = learner(path), Begun(), Callback(before_fit=lambda cb: print('ready', flush=True))
        fit(learn, SignalCallback(), ready, begun, n_epoch=10**6, resume=True)
        print(learn.stopped_by, begun.n <= 1, saved_steps(learn)[-1] == learn.n_step, flush=True)
    again, n_epoch = learner(path), learn.epoch+2
    fit(again, n_epoch=n_epoch, resume=True)
    print(again.n_step == 5*n_epoch)
    whole = learner(path + '/whole')
    fit(whole, n_epoch=n_epoch)
    print(again.state_hash() == whole.state_hash())


@pytest.mark.parametrize('kept', [False, True])
def test_r10_a_group_is_stopped_at_any_moment(tmp_path, kept):
    "SIGTERM to main process and workers alike, as schedulers send it: saved, ended in order, and gone on with exactly"
    rng = random.Random(0)
    def stop(pgid):
        time.sleep(.15*rng.random())
        os.killpg(pgid, signal.SIGTERM)

    said, status = said_by('stopped_again_and_again', tmp_path, kept, on_ready=stop)

    assert said == ['SIGTERM True True']*n_stops + ['True', 'True'] and status == 0


def saved_again_and_again(path, kept, context):
    "Fits; the workers may be there before the signals are listened to"
    def learner(path): return make(path, persistent_workers=kept == 'True', multiprocessing_context=context)
    whole = learner(path + '/whole')
    for n_epoch in (1, 20): fit(whole, n_epoch=n_epoch)
    learn, begun = learner(path), count()
    fit(learn, n_epoch=1)
    ready = Callback(after_batch=lambda cb: next(begun) % 7 or print('ready', flush=True))
    fit(learn, SignalCallback(sighup='save', sigusr1='save', sigusr2='save'), ready, n_epoch=20)
    print(learn.stopped_by or 'whole', len(saved_steps(learn)), learn.state_hash() == whole.state_hash())


@pytest.mark.parametrize(('kept', 'context'), [(False, 'fork'), (True, 'fork')])
def test_r10_workers_do_not_mind(tmp_path, kept, context):
    "SIGHUP, SIGUSR1 and SIGUSR2 to main process and workers alike: it saves, they go on, the fit is as without"
    def signals(pgid):
        for n in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2): os.killpg(pgid, n)

    said, status = said_by('saved_again_and_again', tmp_path, kept, context, on_ready=signals)

    assert said == ['whole 2 True'] and status == 0


def signalled_twice(path, name):
    def twice(cb):
        print('begun', flush=True)
        send(signal.Signals[name], 2)
        print('still there', flush=True)
    fit(noisy_learner(path), SignalCallback(**{name.lower(): 'save+stop'}), Callback(after_pred=twice))


@pytest.mark.parametrize('name', ['SIGTERM', 'SIGUSR1'])
def test_r10_a_second_signal_ends_the_process_at_once(tmp_path, name):
    "A second signal before the first was obeyed does what it would have done without the callback"
    said, status = said_by('signalled_twice', tmp_path, name)

    assert said == ['begun'] and status == -signal.Signals[name]
