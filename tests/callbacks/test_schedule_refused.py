"""ParamSchedulers that would be in each other's way, lie beyond the fit, or come and go in the midst of it."""

import numpy as np
import pytest

from learner.callbacks.schedule import ParamScheduler
from learner.optim import Adam
from learner.schedules import SchedLin
from tests.helpers import Counts, synth_learner
from tests.schedule_helpers import falling, late, lrs, three, unsized


def fall(**kwargs): return ParamScheduler({'lr': SchedLin(.1, 0.)}, **kwargs)


@pytest.mark.parametrize('other', [
    dict(begin='3it', end='5it'), dict(end='1it'), dict(begin='7it'), dict(groups=[1], begin='4it')])
def test_two_at_once(other):
    "Two that set the same hyper-parameter of the same group at the same step are refused before training"
    counts = Counts()

    with pytest.raises(ValueError, match='both set `lr` at the same steps, and one would undo the other'):
        lrs(2, [fall(), ParamScheduler({'lr': SchedLin(1., 1.)}, **other), counts])

    assert counts.n == 0

def test_two_beside_each_other():
    "Two that set it of other groups, or one after the other, are not in each other's way"
    cbs = [ParamScheduler({'lr': SchedLin(1., 1.)}, end='3it', groups=[0, 2]), fall(begin='3it', groups=[2]),
           ParamScheduler({'lr': SchedLin(2., 2.)}, groups=[1])]
    learn = three()

    learn.fit(2, cbs=cbs)

    assert learn.recorder.hps['lr'][:, 1].tolist() == [2.]*8 and learn.recorder.hps['lr'][:3, 2].tolist() == [1.]*3

@pytest.mark.parametrize('place', [dict(begin='300it', end='400it'), dict(begin='8it'), dict(begin='2ep', end='3ep')])
def test_beyond_the_fit(place):
    "One that would never act is refused before training"
    with pytest.raises(ValueError, match='there is no step in this fit, which has 8'): lrs(2, fall(**place))

@pytest.mark.parametrize('place', [dict(end=.05), dict(end='0.1ep'), dict(begin='0.4ep', end='0.45ep')])
def test_less_than_a_step(place):
    "A window that is nothing only because it is rounded sets nothing, as a short warm-up in a short fit"
    assert lrs(1, fall(**place)) == [.1]*4

def test_end_beyond_the_fit():
    "That the end of a window will not be reached is told at the start"
    with pytest.warns(UserWarning, match='ends at step 500, and the fit has 8: its end is not reached'):
        assert lrs(2, fall(end='500it'))[0] == .1

def test_refused_in_mid_fit():
    "One that cannot join in mid-fit leaves the list, and the fit goes on"
    def add(cb):
        if cb.epoch: return
        with pytest.raises(ValueError, match='no `foo` to schedule'):
            cb.learn.add_cb(ParamScheduler({'foo': SchedLin(1., 1.)}))
    learn = three(late(before_epoch=add))

    assert lrs(2, fall(), learn) == falling(8) and not any(isinstance(cb, ParamScheduler) for cb in learn.cbs)

def test_switched_off_in_mid_fit():
    "Where the last of several is switched off, the others go on"
    last = ParamScheduler({'mom': SchedLin(.5, .9)})
    def off(cb): last.run = cb.train_iter < 3
    learn = three(late(after_batch=off))

    assert lrs(2, [fall(), last], learn) == falling(8) and learn.recorder.hps['mom'][-1, 0] < .8

@pytest.mark.parametrize('name,value', [('mom', 1.), ('sqr_mom', 1.5)])
def test_averages_that_forget_nothing(name, value):
    "A momentum of 1 or more is refused before training"
    with pytest.raises(ValueError, match=f'`{name}` would be {value}; it must be 0 or more, and less than 1'):
        three(opt_func=Adam).fit(1, cbs=ParamScheduler({name: SchedLin(.5, value)}))

def test_by_epoch_without_a_length():
    "Over data without a length epochs are counted from the one in which the scheduler first acted"
    sched = ParamScheduler({'lr': lambda epoch: .1*(epoch+1)}, by='epoch', begin='4it')

    sized, other = lrs(3, sched, three()), lrs(3, sched, unsized())

    assert other == sized and sized[4::4] == pytest.approx([.1, .2])

@pytest.mark.parametrize('make,message', [
    (lambda: ParamScheduler('lr'), '`scheds` is a `str`; give functions by name'),
    (lambda: ParamScheduler(SchedLin(1., 0.)), '`scheds` is a `partial`; give functions by name'),
    (lambda: ParamScheduler(factors=['lr']), '`factors` is a `list`; give functions by name')])
def test_functions_come_by_name(make, message):
    "What is no mapping is refused when the scheduler is made"
    with pytest.raises(TypeError, match=message): make()

@pytest.mark.parametrize('value', [None, 'a', float('nan')])
def test_functions_give_numbers(value):
    "A function that gives no number is refused before training"
    with pytest.raises(ValueError, match=f'`lr` would be {value}'):
        three().fit(1, cbs=ParamScheduler({'lr': lambda pos: value}))

@pytest.mark.parametrize('place', [np.float32(.5), np.float64(.5), .5])
def test_places_in_numpys_numbers(place):
    "numpy's numbers place a scheduler too; a single group needs no list"
    learn = three()

    learn.fit(2, cbs=fall(begin=place, groups=1))

    assert learn.recorder.hps['lr'][6, 1] < learn.recorder.hps['lr'][4, 1] == learn.recorder.hps['lr'][6, 0] == .1

def test_what_the_step_was_made_with():
    "The Recorder has the values of the step, also where a callback before it sets new ones after the step"
    learn, used = synth_learner(n=4), []
    def note(cb): used.append(cb.opt.hypers[0]['lr'])
    def halve(cb): cb.opt.set_hyper('lr', used[-1]/2)

    learn.fit(1, .1, cbs=late(before_step=note, after_step=halve))

    assert learn.recorder.lrs == used == [.1, .05, .025, .0125]
