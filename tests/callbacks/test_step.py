"""`learn.step(n)`: a fit in pieces, equal to one in a single piece."""
import multiprocessing
from functools import partial

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from learner.callback import Callback
from learner.callbacks.checkpoint import Checkpoint
from learner.callbacks.schedule import ParamScheduler
from learner.callbacks.tracker import EarlyStoppingCallback
from learner.optim import Adam
from learner.schedules import SchedCos
from tests.helpers import Counts, synth_learner
from tests.resume_helpers import AskAt, noisy_learner, noisy_loaders, record, uninterrupted


@pytest.mark.parametrize('n', [1, 2, 5, 6, 15])
def test_pieces_equal_the_whole(tmp_path, n):
    "Steps of any size, over the borders of epochs and with validation, are one fit bit for bit"
    learn = noisy_learner(tmp_path)

    made = [learn.step(n, 1e-2, n_epoch=3, validate=True) for _ in range(-(-15//n))]

    whole = uninterrupted(tmp_path, 3)
    assert sum(made) == 15 and made[0] == n
    assert learn.final_hash == whole.final_hash and record(learn) == record(whole)
    assert learn.n_fit == 1 and learn.paused is None


@pytest.mark.parametrize('make', [lambda: [ParamScheduler({'lr': SchedCos(1e-2, 1e-4)}), Counts()],
                                  lambda: [OneCycleLR], lambda: [EarlyStoppingCallback(patience=9)]])
def test_callbacks_go_on(tmp_path, make):
    "Callbacks given to the first step stay for those to come, with their states"
    whole = noisy_learner(tmp_path)
    whole.fit(3, 1e-2, cbs=make())
    learn = noisy_learner(tmp_path)

    learn.step(1, 1e-2, cbs=make(), n_epoch=3, validate=True)
    while learn.paused: learn.step(2, validate=True)

    assert learn.final_hash == whole.final_hash and learn.recorder.lrs == whole.recorder.lrs


def test_without_an_end_and_without_validation(tmp_path):
    "By default there is no validation, and no last epoch; the weights are those of a fit"
    learn, whole = noisy_learner(tmp_path), uninterrupted(tmp_path, 3)
    learn = noisy_learner(tmp_path)

    assert [learn.step(4, 1e-2) for _ in range(4)] == [4]*4

    assert learn.n_step == 16 and len(learn.recorder.values) == 3
    learn = noisy_learner(tmp_path)
    learn.step(15, 1e-2)
    assert all(map(torch.equal, learn.model.parameters(), whole.model.parameters()))
    assert learn.history.valid_loss.isna().all()


def test_a_new_rate(tmp_path):
    "A rate given later holds from then on"
    learn = noisy_learner(tmp_path)

    learn.step(3, 1e-2)
    learn.step(2, 1e-3)
    learn.step(2)

    assert learn.recorder.lrs == [1e-2]*3 + [1e-3]*4


@pytest.mark.parametrize('n, pieces', [(3, 3), (4, 2), (8, 1), (9, 1)])
def test_a_loop_over_one_fit(n, pieces):
    "The loop of the docstring ends with the fit, also where its last piece is a whole one"
    learn, seen = synth_learner(n=4), []

    while learn.step(n, n_epoch=2) and learn.paused: seen.append(learn.n_step)

    assert (learn.n_step, learn.n_fit) == (8, 1) and seen == [n*i for i in range(1, pieces)]


def test_what_is_drawn_between_is_no_matter(tmp_path):
    "Random numbers, validations and lr_find between two steps change nothing"
    learn = noisy_learner(tmp_path)

    while learn.step(3, 1e-2, n_epoch=3, validate=True) and learn.paused:
        torch.rand(3)
        learn.validate()
        learn.lr_find(num_it=8, show_plot=False, suggest_funcs=None)

    assert learn.final_hash == uninterrupted(tmp_path, 3).final_hash


@pytest.mark.parametrize('persistent', [False, True])
def test_workers_are_kept(tmp_path, persistent):
    "The workers of an epoch go on over the steps, and the result is that of a fit"
    def dls(): return noisy_loaders(num_workers=1, persistent_workers=persistent)
    before = {p.pid for p in multiprocessing.active_children()}
    learn, workers = noisy_learner(tmp_path, dls=dls()), set()
    for _ in range(4):
        learn.step(1, 1e-2, n_epoch=1, validate=True)
        workers |= {p.pid for p in multiprocessing.active_children()} - before
    learn.step(1, n_epoch=1, validate=True)
    whole = noisy_learner(tmp_path, dls=dls())
    whole.fit(1, 1e-2)

    assert len(workers) == 1
    assert learn.final_hash == whole.final_hash


def test_nothing_is_loaded_twice(tmp_path):
    "Each item is loaded once an epoch, however small the steps"
    learn = noisy_learner(tmp_path)

    for _ in range(5): learn.step(1, n_epoch=1)

    assert sorted(learn.dls.train_ds.asked) == [*range(40)]


def test_it_goes_on_with_a_stopped_fit(tmp_path):
    "A fit that was stopped can be stepped on, and then resumed"
    learn = noisy_learner(tmp_path)
    learn.fit(3, 1e-2, cbs=AskAt(8, 'stop'))

    learn.step(3, validate=True)
    learn.resume()

    assert learn.final_hash == uninterrupted(tmp_path, 3).final_hash


def test_an_interrupt_between(tmp_path):
    "An interrupted step is gone on with by the next"
    learn = noisy_learner(tmp_path)
    with pytest.raises(KeyboardInterrupt): learn.step(9, 1e-2, n_epoch=3, validate=True, cbs=AskAt(4))

    while learn.paused: learn.step(4, validate=True)

    assert learn.final_hash == uninterrupted(tmp_path, 3).final_hash


def test_an_error_in_a_step(tmp_path):
    "After an error in the midst of a batch there is nothing to go on with; the next step begins anew"
    learn = noisy_learner(tmp_path)
    learn.step(2, 1e-2)
    def odd(cb): raise ValueError('odd')

    with pytest.raises(ValueError, match='odd'): learn.step(2, cbs=Callback(after_loss=odd))

    assert learn.paused is None and learn.step(3) == 3 and learn.n_step == 5


def test_the_fit_is_over(tmp_path):
    "Fewer steps than asked for are made when the fit is over; the next call begins another"
    learn, seen = noisy_learner(tmp_path), []
    cb = Callback(after_fit=lambda cb: seen.append(cb.learn.n_step), before_fit=lambda cb: seen.append('begun'))

    made = [learn.step(4, n_epoch=1, cbs=cb), learn.step(4), learn.step(1, n_epoch=1)]

    assert made == [4, 1, 1] and seen == ['begun', 'begun', 5]


@pytest.mark.parametrize('n', [0, -1, 1.5, True, None])
def test_bad_number(tmp_path, n):
    "What is no number of steps is refused"
    with pytest.raises((ValueError, TypeError), match='step: `n`'): noisy_learner(tmp_path).step(n)


def test_nothing_is_shown(tmp_path, capsys, monkeypatch):
    "Steps print nothing, also where fits do"
    monkeypatch.setenv('LEARNER_DISPLAY', 'log')
    learn = noisy_learner(tmp_path, default_cbs=True)

    for _ in range(3): learn.step(3, n_epoch=2)

    assert capsys.readouterr().out == '' and learn.progress.run


def test_steps_are_saved(tmp_path):
    "A Checkpoint saves while stepping, and a fit goes on with it in another process"
    learn = noisy_learner(tmp_path)
    for _ in range(4): learn.step(2, 1e-2, n_epoch=3, validate=True, cbs=[] if learn.paused else Checkpoint('4it'))

    again = noisy_learner(tmp_path)
    again.fit(3, 1e-2, cbs=Checkpoint('4it'), resume=True)

    assert again.final_hash == uninterrupted(tmp_path, 3).final_hash


@pytest.mark.parametrize('sched', [None, partial(StepLR, step_size=1, gamma=.5)], ids=['none', 'StepLR'])
def test_another_decay_leaves_the_rate(sched):
    "`step(wd=…)` sets the decay alone: the learning rate stays what it has become"
    learn = synth_learner(n=4, lr=.1, opt_func=Adam)
    learn.step(6, n_epoch=3, cbs=sched)
    if sched is None: learn.opt.set_hyper('lr', .05)

    learn.step(2, wd=.1)

    assert learn.recorder.lrs[-2:] == [.05]*2 and learn.recorder['wd'].values[-2:] == [.1]*2
