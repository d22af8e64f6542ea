"""torch's schedulers beside others, in fits of another length than planned, and over optimizers that change."""
from functools import partial

import pytest
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR, ReduceLROnPlateau

from learner.callbacks.schedule import ParamScheduler
from learner.callbacks.torch_schedule import TorchScheduler
from learner.metrics import mae
from learner.optim import SGD, Adam
from learner.schedules import SchedLin
from tests.helpers import Counts
from tests.schedule_helpers import late, three


@pytest.mark.parametrize('cbs', [
    lambda: [partial(ExponentialLR, gamma=.5), ParamScheduler({'lr': SchedLin(.1, 0.)})],
    lambda: [ParamScheduler(factors={'lr': SchedLin(.1, 0.)}), partial(ExponentialLR, gamma=.5)],
    lambda: [OneCycleLR, ParamScheduler({'mom': SchedLin(.1, 0.)})]])
def test_both_schedule_the_rate(cbs):
    "One of torch's schedulers and a ParamScheduler that would undo each other's work are refused before training"
    learn = three(counts := Counts())

    with pytest.raises(ValueError, match='both set `(lr|mom)`.*one would undo the other'): learn.fit(2, cbs=cbs())

    assert counts.n == 0

@pytest.mark.parametrize('others', [[OneCycleLR], [partial(ExponentialLR, gamma=.5)]])
def test_two_of_torchs(others):
    "One that gives the rates itself is refused beside another; those that change what is set can be chained"
    with pytest.raises(ValueError, match='both set `lr`'): three().fit(1, .1, cbs=[OneCycleLR, *others])

    learn = three()
    learn.fit(2, .1, cbs=[partial(ExponentialLR, gamma=.5), partial(ExponentialLR, gamma=.1)])
    assert learn.recorder.lrs[4] == pytest.approx(.1*.5*.1)

def test_more_steps_than_planned():
    "A scheduler that plans its steps stays at its end when the fit goes on, and says so once"
    learn = three()

    with pytest.warns(UserWarning, match='made for 3 steps, and the fit goes on') as said:
        learn.fit(1, .1, cbs=OneCycleLR, n_steps=3)

    assert len(said) == 1 and learn.recorder.lrs[-1] == learn.recorder.lrs[2] < 1e-5

def test_fewer_steps_than_planned():
    "That its end was not reached is told"
    with pytest.warns(UserWarning, match='made for 20 steps, but the fit took 4'):
        three().fit(1, .1, cbs=OneCycleLR, n_steps=20)

def test_decay_that_begins_in_mid_fit():
    "Parameters that are set apart for their decay were so before the scheduler was made"
    learn = three(opt_func=partial(Adam, wd=0.))

    learn.fit(3, .1, cbs=[partial(ExponentialLR, gamma=.5), ParamScheduler({'wd': SchedLin(0., .1)})])

    assert learn.recorder.lrs[::4] == pytest.approx([.1, .05, .025]) and learn.recorder.hps['wd'][-1, 0] == .1

def test_fixed_rates_stay():
    "A rate that `param_opts` fixes is not scheduled"
    seen, learn = [], three(param_opts={'*bias': dict(lr=1e-3)})

    learn.fit(2, .1, cbs=[partial(ExponentialLR, gamma=.5),
                          late(before_step=lambda cb: seen.append({g['lr'] for g in cb.opt.opt.param_groups}))])

    assert seen[0] == {1e-3, .1} and seen[-1] == {1e-3, .05}

def test_a_new_optimizer_in_mid_fit():
    "A scheduler that is left with the old optimizer says so"
    def anew(cb): return cb.epoch == 1 and cb.create_opt()

    with pytest.warns(UserWarning, match='made anew during the fit'):
        three().fit(3, cbs=[partial(ExponentialLR, gamma=.5), late(before_epoch=anew)])

def test_momentum_is_put_back():
    "What a ParamScheduler has set for the moment is not what a scheduler added in mid-fit puts back"
    sched = ParamScheduler({'mom': SchedLin(.5, .9)})
    def swap(cb):
        if cb.epoch == 1: cb.learn.add_cb(TorchScheduler(partial(ExponentialLR, gamma=.5)))
        if cb.epoch == 2: cb.learn.remove_cb(sched)
    learn = three(late(before_epoch=swap), opt_func=partial(SGD, mom=.9))

    learn.fit(3, cbs=sched)

    assert learn.opt.hypers[0]['mom'] == .9

@pytest.mark.parametrize('mode,fine', [('min', True), ('max', False)])
def test_direction_of_a_metric(mode, fine):
    "A metric that says which way is better is not watched the other way"
    learn = three(metrics=mae, n_valid=1)
    cb = TorchScheduler(partial(ReduceLROnPlateau, mode=mode), monitor='mae')
    if fine: return learn.fit(1, cbs=cb)

    with pytest.raises(ValueError, match="watches `mae`, which is better low: give it mode='min'"): learn.fit(1, cbs=cb)

def test_partials_name_their_arguments():
    "torch's optimizer comes first, so a positional argument is refused"
    with pytest.raises(TypeError, match='name what you give'): three().fit(1, cbs=partial(ExponentialLR, .5))
