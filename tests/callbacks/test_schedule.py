"""ParamScheduler: what it sets at each step, how several work together, what it counts, tells and puts back."""
import copy
import math
import pickle
from functools import partial

import numpy as np
import pytest

from learner.callback import Callback
from learner.callbacks.schedule import ParamScheduler
from learner.events import CancelFitException, CancelStepException, CancelTrainException
from learner.optim import SGD, Adam
from learner.schedules import (SchedCos, SchedExp, SchedLin, policy_exp, policy_multistep, policy_step, policy_warmup)
from tests.helpers import Counts, raises
from tests.schedule_helpers import Window, falling, hypers, late, lrs, momentum, rate, three

close = partial(np.testing.assert_allclose, rtol=1e-12, atol=0)

def fall(**kwargs): return ParamScheduler({'lr': SchedLin(.1, 0.)}, **kwargs)


# ---- what is set when

@pytest.mark.parametrize('name,start,end', [
    ('lr', [.1, .02, .003], [0., .01, .05]), ('mom', .9, .5), ('sqr_mom', .99, [.9, .95, .999]), ('eps', 1e-8, 1e-4),
    ('wd', [0., .1, .2], .3)])
def test_each_hyper_of_each_group(name, start, end):
    "Each hyper-parameter of each group goes from its start to its end, and the others stay"
    learn = three(n=5, opt_func=Adam)

    learn.fit(1, cbs=ParamScheduler({name: SchedLin(start, end)}))

    hps = learn.recorder.hps
    close(hps.pop(name), np.linspace(start*np.ones(3), end*np.ones(3), 5), atol=1e-17)
    assert [np.ptp(v, axis=0).max() for v in hps.values()] == [0]*4

def test_several_hypers_at_once():
    "One scheduler can set several hyper-parameters, and multiply others"
    learn = three(n=3)

    learn.fit(1, cbs=ParamScheduler({'mom': SchedLin(.9, .8)}, {'lr': SchedLin(1., [.5, .1, 0.])}))

    close(learn.recorder.hps['mom'][:, 1], [.9, .85, .8])
    close(learn.recorder.hps['lr'], rate*np.array([[1., 1., 1.], [.75, .55, .5], [.5, .1, 0.]]))

@pytest.mark.parametrize('n', [2, 3, 7, 10, 49])
def test_the_end_is_reached(n):
    "Step `i` of `n` is at `i/(n-1)`, so that the last batch has the final value, bit for bit"
    seen = []
    def asked(pos): return (seen.append(pos), SchedLin(.1, 1/7)(pos))[1]
    learn = three(n=n)

    assert lrs(1, ParamScheduler({'lr': asked}), learn)[-1] == 1/7
    assert seen[2:] == [i/(n-1) for i in range(n)]  # both ends were asked for before training

@pytest.mark.parametrize('begin,end,first,last', [
    (0, 1, 0, 12), (.25, .75, 3, 9), ('2it', '6it', 2, 6), ('1ep', '2ep', 4, 8), ('0.5ep', '11it', 2, 11),
    (0., '7it', 0, 7), ('2it', 1., 2, 12)])
def test_begin_and_end(begin, end, first, last):
    "It acts from `begin` until before `end`; before that nothing is set, after that what was set last stays"
    sched = ParamScheduler({'lr': SchedLin(.5, .01)}, begin=begin, end=end)

    assert lrs(3, sched) == [rate]*first + falling(last-first, .5, .01) + [.01]*(12-last)

@pytest.mark.parametrize('turn', [1, -1])
def test_one_after_the_other(turn):
    "A warm-up and a cosine in a row, in whichever order they are given"
    warm, cos = SchedLin(.001, .1), SchedCos(.1, 0.)
    scheds = [ParamScheduler({'lr': warm}, end='4it'), ParamScheduler({'lr': cos}, begin='4it')]

    assert lrs(3, scheds[::turn]) == [warm(i/3) for i in range(4)] + [cos(i/7) for i in range(8)]

@pytest.mark.parametrize('policy', [partial(policy_step, gamma=.5, stepsize=3), partial(policy_exp, gamma=.9)])
@pytest.mark.parametrize('begin', [0, 5])
def test_policies_by_step(policy, begin):
    "`by='step'` gives the number of the step, counted from `begin`"
    sched = ParamScheduler({'lr': partial(policy, base_lr=[.1, .2, .3])}, by='step', begin=f'{begin}it')

    assert lrs(3, sched) == [rate]*begin + [policy(i, .3) for i in range(12-begin)]

@pytest.mark.parametrize('begin,end,epochs', [
    (0, 1, [0, 1, 2, 3]), ('1ep', 1, [None, 0, 1, 2]), ('1ep', '3ep', [None, 0, 1, 1])])
def test_policies_by_epoch(begin, end, epochs):
    "`by='epoch'` gives the number of the epoch, counted from `begin`"
    sched = ParamScheduler({'lr': partial(policy_exp, base_lr=1., gamma=.5)}, by='epoch', begin=begin, end=end)

    assert lrs(4, sched) == [rate if e is None else .5**e for e in epochs for _ in range(4)]

@pytest.mark.parametrize('warm_up', [
    ParamScheduler(factors={'lr': SchedLin(.1, 1.)}, end='4it'),
    ParamScheduler(factors={'lr': partial(policy_warmup, base_lr=1., warmup_iters=3, start_factor=.1)}, by='step')])
def test_factors_multiply(warm_up):
    "A warm-up times drops at epochs 2 and 3, as MMEngine chains a LinearLR and a MultiStepLR"
    drops = partial(policy_multistep, base_lr=1., gamma=.1, stepvalue=[2, 3])

    values = lrs(4, [warm_up, ParamScheduler(factors={'lr': drops}, by='epoch')])

    close(values, [.01, .04, .07, .1, *[.1]*4, *[.01]*4, *[.001]*4])

def test_factors_of_what_another_sets():
    "A factor multiplies what a scheduler has set, whichever comes first"
    scheds = [ParamScheduler(factors={'lr': SchedLin(1., 3.)}), ParamScheduler({'lr': SchedLin(.1, .2)})]

    close(lrs(1, scheds, three(n=3)), [.1, .3, .6])

def test_groups():
    "`groups` are set, each to its own value, and the others stay"
    learn = three(n=3)

    learn.fit(1, cbs=[ParamScheduler({'lr': SchedLin(.5, [.4, .3, .2])}, groups=[0, 2]),
                      ParamScheduler(factors={'lr': SchedLin(1., 3.)}, groups=range(1, 3))])

    close(learn.recorder.hps['lr'], [[.5, .1, .5], [.45, .2, .7], [.4, .3, .6]])


# ---- what is counted

@pytest.mark.parametrize('k', [1, 2, 4])
def test_accumulated_batches_are_one_step(k):
    "Steps of the optimizer are counted, not batches: accumulation speeds nothing up, and the end is reached"
    values = lrs(3, [Window(k), fall()], three(n=8), n_steps=8//k)

    assert values == [v for v in falling(24//k) for _ in range(k)]

def test_skipped_steps_do_not_count():
    "A step that is skipped is made at the next batch, with the same values"
    values = lrs(3, [Callback(before_step=raises(CancelStepException, nth=3)), fall()])

    assert values == [v for i, v in enumerate(falling(12)) for _ in range(2 if i == 2 else 1)][:12]

def test_evaluation_in_a_batch_changes_nothing():
    "A `validate` in each batch leaves the schedule alone"
    values = lrs(2, [late(after_batch=lambda cb: cb.training and cb.learn.validate()),
                     fall()], three(n_valid=2))

    assert values == falling(8)

@pytest.mark.parametrize('end', [1, '2ep', '6it'])
def test_more_steps_than_planned(end):
    "After more steps than were planned it stays at the end, and says so once"
    with pytest.warns(UserWarning, match='made for 6 steps, and the fit goes on') as told:
        values = lrs(2, ParamScheduler({'lr': SchedLin(.1, .01)}, end=end), n_steps=3)

    assert len(told) == 1 and values == [*falling(6, .1, .01), .01, .01]

@pytest.mark.parametrize('end', [1, '2ep', '20it'])
def test_fewer_steps_than_planned(end):
    "A fit that ends before its schedule says so"
    with pytest.warns(UserWarning, match='made for 20 steps, but the fit took 8') as told:
        values = lrs(2, fall(end=end), n_steps=10)

    assert len(told) == 1 and values == falling(20)[:8]

@pytest.mark.parametrize('cb,sched', [
    (late(after_batch=raises(CancelFitException, nth=3)), fall()),
    (None, fall(end='7it')),
    (Callback(before_step=raises(CancelStepException, nth=3)), fall())])
def test_no_warning_for_an_end_that_is_meant(cb, sched):
    "A cancelled fit, a schedule that ends earlier, and few skipped steps are no reason to warn"
    learn = three(cb)

    learn.fit(3, cbs=sched)

    assert learn.recorder.lrs[:3] == falling(12 if sched.end == 1 else 7)[:3]


# ---- what is put back

@pytest.mark.parametrize('opt_func', [momentum, Adam])
@pytest.mark.parametrize('at,ex', [
    ('after_batch', None), ('after_batch', CancelFitException), ('after_loss', ValueError),
    ('before_step', KeyboardInterrupt), ('before_step', CancelStepException)])
def test_hypers_come_back(at, ex, opt_func):
    "After a fit, a cancelled one, an error and an interrupt the hyper-parameters are what they were"
    learn = three(Callback(**{at: raises(ex, nth=6 if ex else 99)}), opt_func=opt_func)
    learn.create_opt().set_hypers(lr=[.1, .2, .3], mom=.7, wd=.01)
    learn.lr, before = [.1, .2, .3], hypers(learn)

    scheds = [ParamScheduler({'mom': SchedLin(.5, .6)}, {'wd': SchedLin(2., 1.), 'lr': SchedLin(.1, 1.)}, end='7it'),
              ParamScheduler({'lr': SchedLin([.5, .4, .3], .2)}, begin=.5)]
    if ex in (None, CancelFitException, CancelStepException): learn.fit(3, cbs=scheds)
    else:
        with pytest.raises(ex): learn.fit(3, cbs=scheds)

    assert hypers(learn) == before and learn.n_step > 4

def test_removed_in_mid_fit():
    "One that is removed in mid-fit puts the hyper-parameters back at once"
    sched = ParamScheduler({'lr': SchedLin(.5, 0.)})
    learn = three(late(after_batch=lambda cb: cb.train_iter == 3 and cb.learn.remove_cb(sched)))

    assert lrs(2, sched, learn) == falling(8, .5)[:3] + [rate]*5

@pytest.mark.parametrize('at', ['before_batch', 'after_batch'])
@pytest.mark.parametrize('which', [0, 1])
@pytest.mark.parametrize('k', [1, 2])
def test_one_of_two_is_removed_in_mid_fit(at, which, k):
    "The other one goes on, at once, and nobody is told that anything was lost"
    scheds = [fall(), ParamScheduler(factors={'lr': SchedLin(3., 3.)})]
    done = 3 if at == 'after_batch' else 2
    learn = three(late(**{at: lambda cb: cb.train_iter == done and cb.learn.remove_cb(scheds[which])}))
    falls = np.repeat(falling(8//k), k)
    left = [[.3]*8, falls][which]

    values = lrs(2, [Window(k), *scheds], learn, n_steps=4//k)

    close(values[:2], falls[:2]*3)
    close(values[3:], left[3:])
    assert [h['lr'] for h in learn.opt.hypers] == [rate]*3

@pytest.mark.parametrize('at,when', [
    ('after_batch', lambda cb: cb.train_iter == 2), ('after_batch', lambda cb: cb.train_iter == 7),
    ('after_train', lambda cb: cb.epoch == 1), ('after_epoch', lambda cb: True),
    ('before_epoch', lambda cb: cb.epoch == 2), ('before_train', lambda cb: True)])
@pytest.mark.parametrize('others,before', [([], 1.), ([ParamScheduler(factors={'lr': SchedLin(.7, .7)})], .7)])
@pytest.mark.parametrize('start_epoch', [0, 1])
def test_added_in_mid_fit(at, when, others, before, start_epoch):
    "One that is added in mid-fit is where it would be had it been there from the start"
    sched, since = ParamScheduler({'lr': SchedLin(.1, .02)}), []
    def add(cb):
        if not since and when(cb):
            since.append(cb.learn.n_step)
            cb.learn.add_cb(copy.deepcopy(sched))
    whole = lrs(3, sched, start_epoch=start_epoch)
    learn = three(late(**{at: add}), n_valid=1)

    values = lrs(3, copy.deepcopy(others), learn, start_epoch=start_epoch)

    close(values, [before*rate]*since[0] + [before*v for v in whole[since[0]:]])
    assert hypers(learn)[0]['lr'] == rate

def test_added_after_skipped_steps():
    "Beside another one it is where that one is, however many steps were skipped, and multiplies what was there before"
    half, fade = (ParamScheduler(factors={'lr': f}) for f in (SchedLin(.5, .5), SchedLin(1., 0.)))
    learn = three([Callback(before_step=raises(CancelStepException, nth=3)), half,
                   late(after_batch=lambda cb: cb.train_iter == 6 and cb.learn.add_cb(fade))])

    close(lrs(3, None, learn), [rate/2]*6 + falling(12, rate/2)[5:11])

def test_used_again():
    "The same scheduler begins anew with each fit, also after a fit that failed before it could begin"
    sched, learn = fall(), three()
    lrs(2, sched, learn)

    with pytest.raises(ValueError) as e: learn.fit(2, cbs=[Callback(before_fit=raises(ValueError)), sched])

    assert 'TypeError' not in ' '.join(e.value.__notes__) and lrs(1, sched, learn) == falling(4)

def test_a_scheduler_of_the_learner():
    "One that belongs to the Learner acts in each fit, and in no evaluation"
    learn = three(fall(), n_valid=1)

    assert lrs(1, None, learn) == falling(4) and lrs(2, None, learn) == falling(8)
    before = hypers(learn)
    learn.validate()
    assert hypers(learn) == before


# ---- what is told

@pytest.mark.parametrize('change', [
    lambda cb: cb.opt.set_hyper('lr', 7.), lambda cb: setattr(cb.learn, 'lr', 7.),
    lambda cb: cb.opt.hypers[1].update(lr=7.), lambda cb: cb.opt.opt.param_groups[0].update(lr=7.)])
def test_two_masters(change):
    "Whoever sets what is scheduled is told, once, that it is lost"
    with pytest.warns(UserWarning, match=r'`lr` was set to \[.*7.0.*\] while ParamScheduler\(lr\) sched') as told:
        values = lrs(2, [late(after_batch=change), fall()])

    assert len(told) == 1 and values == falling(8)

def test_others_may_set_what_is_not_scheduled():
    "What no schedule sets is everybody's, and stays"
    learn = three(late(after_batch=lambda cb: cb.opt.set_hypers(wd=.3, mom=.5)))

    assert lrs(2, fall(), learn) == falling(8)
    assert (hypers(learn)[0]['wd'], hypers(learn)[0]['mom']) == (.3, .5)

@pytest.mark.parametrize('sched,message', [
    (partial(ParamScheduler, {'foo': SchedLin(0., 1.)}), 'this SGD has no `foo` to schedule, only lr, wd\n'),
    (partial(ParamScheduler, factors={'mom': SchedLin(0., 1.)}), r'has no `mom`.*momentum.*partial\(SGD, mom=0.9'),
    (partial(ParamScheduler, {'lr': SchedLin([.1, .2], .3)}), '(?s)2 values of `lr` for 3 groups.*0.weight'),
    (partial(ParamScheduler, {'lr': SchedLin(.1, -.1)}), '`lr` would be -0.1; it must be 0 or more'),
    (partial(ParamScheduler, {'wd': SchedLin(math.inf, 1.)}), '`wd` would be inf'),
    (partial(ParamScheduler, factors={'lr': partial(policy_exp, base_lr=math.nan, gamma=.1)}, by='step'), 'be nan'),
    (partial(fall, groups=[0, 3]), '(?s)there is no group 3:.*2.weight'),
    (partial(fall, groups=[-1]), 'there is no group -1'),
    (partial(fall, begin='6it', end='6it'), 'from step 6 on and until step 6 there is no'),
    (partial(fall, begin='3ep'), 'from step 12 on and until step 12'),
    (partial(fall, begin='soon'), "'soon' is no place in a fit: give a fraction"),
    (partial(fall, end='2.5it'), "'2.5it' is no place"),
    (partial(fall, end=1.5), '1.5 is no place'),
    (partial(fall, begin=-.1), '-0.1 is no place'),
    (partial(fall, by='batch'), "by='batch': give 'pos', 'step' or 'epoch'"),
    (partial(fall, groups=[]), '`groups` is empty'),
    (partial(ParamScheduler, {}), 'ParamScheduler needs `scheds`')])
def test_errors_come_before_training(sched, message):
    "What does not fit is told before the first batch, and everything is as it was"
    learn = three(counts := Counts(), opt_func=partial(SGD, mom=0.))
    learn.create_opt()
    before = hypers(learn)

    with pytest.raises(ValueError, match=message): learn.fit(3, cbs=[ParamScheduler({'wd': SchedExp(.1, .2)}), sched()])

    assert counts.n == 0 and hypers(learn) == before and len(learn.cbs) == 3

def test_schedules_are_functions():
    "A number is no schedule"
    with pytest.raises(TypeError, match='`lr` is a `float`, not a function'): ParamScheduler(dict(lr=rate))  # pyright: ignore


# ---- copies

@pytest.mark.parametrize('copied', [lambda o: pickle.loads(pickle.dumps(o)), copy.deepcopy], ids=['pickle', 'deepcopy'])
def test_copies(copied):
    "A scheduler can be pickled and copied, before a fit and after it, and is the same then"
    sched = ParamScheduler({'lr': SchedCos([.1, .2, .3], 0.)}, {'wd': SchedLin(1., 2.)}, begin='2it', groups=[2])
    again = copied(sched)

    values = lrs(2, sched)

    assert lrs(2, again) == lrs(2, copied(sched)) == values and repr(again) == 'ParamScheduler(lr, wd)'

def test_state():
    "The state that was kept in mid-fit lets another one go on from there"
    def keep(cb):
        if cb.train_iter == 6: state.update(copy.deepcopy(sched.state_dict()))
    state, learn = {}, three(late(after_batch=keep))
    whole = lrs(2, sched := ParamScheduler(scheds := {'lr': SchedLin(.1, 0.), 'mom': SchedLin(.9, .5)}), learn)
    other = ParamScheduler(scheds)

    other.load_state_dict(pickle.loads(pickle.dumps(state)))
    assert other.state_dict() == state and state['set_to']['lr'] == [whole[5]]*3
    def go_on(cb):  # as a checkpoint would: counters come back with the states
        cb.learn.n_step = 6
        other.load_state_dict(state)
    learn = three([late(before_train=go_on), late(after_batch=raises(CancelTrainException, nth=2))])
    assert lrs(2, other, learn, start_epoch=1) == whole[6:]
