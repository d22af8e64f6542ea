"""fit_one_cycle, fit_flat_cos, fit_sgdr: fastai's schedules, momentum where there is one, epochs that are skipped."""
import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from learner.callback import Callback
from learner.callbacks.schedule import ParamScheduler
from learner.callbacks.training import GradientAccumulation
from learner.events import CancelFitException
from learner.optim import SGD, Adagrad, Adam
from learner.schedules import SchedLin, policy_exp
from tests.helpers import Counts, raises, synth_learner
from tests.schedule_helpers import Window, hypers, lrs, momentum, rate, single, three, unsized

recorded = json.loads((Path(__file__).parents[1]/'data'/'fastai_schedules.json').read_text())['runs']
close = partial(np.testing.assert_allclose, rtol=1e-12, atol=0)

fits = {'one_cycle': ('fit_one_cycle', (3,)),
        'one_cycle moms': ('fit_one_cycle', (3, .2, 10, 100, .5, None, (.9, .5, .8))),
        'flat_cos': ('fit_flat_cos', (3,)), 'flat_cos early': ('fit_flat_cos', (3, .2, 10, .1)),
        'sgdr': ('fit_sgdr', (2, 1)), 'sgdr equal': ('fit_sgdr', (3, 1, .2, 1))}
every_fit = pytest.mark.parametrize('fit,args', fits.values(), ids=fits)


def fall(**kwargs): return ParamScheduler({'lr': SchedLin(.1, 0.)}, **kwargs)

def hps(learn, fit, *args, **kwargs):
    "The hyper-parameters at each batch of a fit of epochs of four batches, all three groups"
    getattr(learn, fit)(*args, **kwargs)
    return learn.recorder.hps

def half_cos(a, b, pos): return a*math.cos(math.pi*pos/2)**2 + b*math.sin(math.pi*pos/2)**2


# ---- the schedules

@pytest.mark.parametrize('div,div_final,pct_start', [(25., 1e5, .25), (10, 100, .5), (4, 1, 1.)])
def test_one_cycle(div, div_final, pct_start):
    "Half a cosine up, half a cosine down, and momentum the other way; the last step has the end, exactly"
    def cycle(i, start, middle, end):
        pos = i/11
        return half_cos(start, middle, pos/pct_start) if pos < pct_start or pct_start == 1 else \
            half_cos(middle, end, (pos-pct_start)/(1-pct_start))

    found = hps(three(), 'fit_one_cycle', 3, .2, div=div, div_final=div_final, pct_start=pct_start)

    close(found['lr'][:, 0], [cycle(i, .2/div, .2, .2/div_final) for i in range(12)])
    close(found['mom'][:, 2], [cycle(i, .95, .85, .95) for i in range(12)])
    assert pct_start == 1 or (found['lr'][-1, 0], found['mom'][-1, 0]) == (.2/div_final, .95)

@pytest.mark.parametrize('lr,each', [(.2, [.2]*3), (slice(.01, .04), [.01, .02, .04]), (slice(.2), [.02, .02, .2]),
                                     ([.3, .1, .2], [.3, .1, .2]), (None, [rate]*3)])
def test_flat_cos(lr, each):
    "Flat, then half a cosine, each group at its own rate; without a rate it is the Learner's"
    found = hps(three(), 'fit_flat_cos', 3, lr, div_final=50, pct_start=.5)

    close(found['lr'], np.outer([1.]*6 + [half_cos(1, 1/50, (i/11-.5)/.5) for i in range(6, 12)], each))
    assert np.ptp(found['mom']) == 0

@pytest.mark.parametrize('n_cycles,cycle_len,mult,lengths', [(3, 1, 1, [4, 4, 4]), (1, 3, 2, [12]), (2, 1, 2, [4, 8])])
def test_sgdr(n_cycles, cycle_len, mult, lengths):
    "Each cycle begins with the full rate and ends at 0; `cycle_mult=1` gives cycles of the same length"
    found = hps(three(), 'fit_sgdr', n_cycles, cycle_len, .2, mult)['lr'][:, 1]

    wanted = [half_cos(.2, 0., i/(n-1)) for n in lengths for i in range(n)]
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-16)
    assert found[np.cumsum([0, *lengths])[:-1]].tolist() == [.2]*n_cycles and found[-1] == 0

@pytest.mark.parametrize('run,shares', [(recorded[0], [.25, .75]), (recorded[1], [.5, .5]), (recorded[2], [.75, .25])],
                         ids=[r['call'] for r in recorded[:3]])
def test_fastai(run, shares):
    "As functions of the position the schedules are fastai's, for each group, but for its single precision"
    made, args = [], {k: eval(v) if isinstance(v, str) else v for k, v in run['args'].items()}
    learn = three([Callback(before_fit=lambda cb: made.append((cb.param_scheduler, hypers(cb.learn)))),
                   Callback(before_epoch=raises(CancelFitException))], opt_func=Adam)

    getattr(learn, run['call'])(**args)

    sched, start = made[0]
    at = [single(i/len(run['lr']), shares) for i in range(len(run['lr']))]
    mom = sched.scheds.get('mom', lambda pos: start[0]['mom'])
    close([np.broadcast_to(sched.scheds['lr'](pos), 3) for pos in at], run['lr'], rtol=1e-9)
    close([[mom(pos)]*3 for pos in at], run['mom'], rtol=1e-9)
    close([mom(i/len(at)) for i in range(len(at))], [m[0] for m in run['mom']], rtol=1e-6)
    assert sched.by == 'pos' and (sched.begin, sched.end, sched.only) == (0, 1, None)

def test_fastai_sgdr():
    "Each cycle is fastai's as a function of the position in it, but for its single precision"
    run, made = recorded[3], []
    learn = three(opt_func=Adam)
    learn.fit = lambda n, lr, wd, cbs, *rest: made.extend(cbs)

    learn.fit_sgdr(**run['args'])

    n = len(run['lr'])
    at = [(k, single(i/n, [1/3, 2/3])) for i in range(n) for k in [0 if i < n/3 else 1]]
    close([[made[k].scheds['lr'](3*pos if k == 0 else (pos-1/3)*1.5)]*3 for k, pos in at], run['lr'], rtol=1e-9,
          atol=1e-12)
    assert [(cb.begin, cb.end) for cb in made] == [('0ep', '1ep'), ('1ep', '3ep')]

@every_fit
def test_nothing_stays(fit, args):
    "After the fit momentum and decay are what they were, the rate is the one given, and the callbacks are gone"
    learn = three()
    learn.create_opt().set_hypers(mom=.7, wd=.1)
    cbs = list(learn.cbs)

    getattr(learn, fit)(*args)

    assert hypers(learn) == [dict(lr=.2 if .2 in args else rate, mom=.7, wd=.1)]*3 and list(learn.cbs) == cbs

@pytest.mark.parametrize('fit,args', [('fit_one_cycle', (2,)), ('fit_flat_cos', (2,)), ('fit_sgdr', (2, 1, None, 1))])
def test_arguments_reach_the_fit(fit, args):
    "`wd`, `cbs`, `reset_opt` and `n_steps` are those of `fit`"
    learn = three(opt_func=Adam)
    old = learn.create_opt()

    found = hps(learn, fit, *args, wd=.3, cbs=[counts := Counts(), Window(2)], reset_opt=True, n_steps=2)

    assert counts.n == 8 and learn.n_step == 4 and learn.opt is not old and (found['wd'] == .3).all()
    assert (found['lr'][::2] == found['lr'][1::2]).all()

@pytest.mark.parametrize('fit', ['fit_one_cycle', 'fit_flat_cos'])
def test_no_epochs(fit):
    "A fit of no epochs has no steps to plan"
    learn = three(counts := Counts())

    getattr(learn, fit)(0)

    assert counts.n == learn.n_step == 0 and [h['lr'] for h in learn.opt.hypers] == [rate]*3

@pytest.mark.parametrize('args,message', [
    ((0, 1), '`n_cycles` is 0; give a whole number, 1 or more'),
    ((1, 0), '`cycle_len` is 0'), ((2, 1, None, 0), '`cycle_mult` is 0'),
    ((2, 1, None, 1.5), '`cycle_mult` is 1.5'), ((2.5, 1), '`n_cycles` is 2.5')])
def test_bad_cycles(args, message):
    "Cycles come in whole numbers"
    with pytest.raises((ValueError, TypeError), match=f'fit_sgdr: {message}'): three().fit_sgdr(*args)


# ---- momentum

without = pytest.mark.parametrize('opt_func', [torch.optim.SGD, torch.optim.Adagrad, Adagrad, partial(SGD, mom=0.)])

@without
def test_no_momentum_is_given(opt_func):
    "An optimizer without momentum trains one cycle, and has none then either"
    learn = three(opt_func=opt_func)

    found = hps(learn, 'fit_one_cycle', 2)

    assert 'mom' not in found and found['lr'][-1, 0] == rate/1e5
    assert not any(g.get('momentum') for g in learn.opt.opt.param_groups)
    assert not any('momentum_buffer' in s and s['momentum_buffer'] is not None for s in learn.opt.opt.state.values())

@without
def test_momentum_that_is_asked_for(opt_func):
    "Momentum that is asked for is an error where there is none, before training; none that is asked for is none"
    learn = three(counts := Counts(), opt_func=opt_func)

    with pytest.raises(ValueError, match='has no `mom` to schedule.*give it a momentum'):
        learn.fit_one_cycle(1, moms=(.9, .8, .9))

    assert counts.n == 0
    learn.fit_one_cycle(1, moms=(0, 0, 0))
    assert counts.n == 4

@pytest.mark.parametrize('opt_func', [momentum, Adam, torch.optim.AdamW, partial(torch.optim.RMSprop, momentum=.5)])
def test_momentum_where_there_is_one(opt_func):
    "Momentum goes as `moms` say, else as the Learner's, in SGD and Adam alike"
    learn = three(opt_func=opt_func, moms=(.7, .6, .5))

    close(hps(learn, 'fit_one_cycle', 1, pct_start=1/3)['mom'][:, 0], [.7, .6, .55, .5])
    close(hps(learn, 'fit_one_cycle', 1, pct_start=0, moms=(.3, .2, .1))['mom'][[0, -1], 0], [.2, .1])

@pytest.mark.parametrize('moms', [.9, (.9, .8), [.9]*4])
def test_three_moms(moms):
    "Momentum has a start, a middle and an end"
    with pytest.raises(ValueError, match='`moms` is .*give it for the start, the middle and the end'):
        three().fit_one_cycle(1, moms=moms)


# ---- epochs that are skipped

@every_fit
@pytest.mark.parametrize('start', [1, 2])
def test_start_epoch(fit, args, start):
    "Hyper-parameters are those of the whole fit's last epochs"
    whole = hps(three(), fit, *args)

    tail = hps(three(), fit, *args, start_epoch=start)

    assert {n: v[4*start:].tolist() for n, v in whole.items()} == {n: v.tolist() for n, v in tail.items()}

@every_fit
def test_skipped_epochs_leave_no_row(fit, args):
    "Only epochs that were trained have rows, and are seen by callbacks"
    seen = []
    learn = three(Callback(after_epoch=lambda cb: seen.append((cb.epoch, cb.recorder.log[0]))), n_valid=1)

    getattr(learn, fit)(*args, start_epoch=1)

    assert seen == [(1, 1), (2, 2)] and learn.history.epoch.tolist() == [1, 2]
    assert len(learn.recorder.values) == 2 and len(learn.recorder.lrs) == 8

@pytest.mark.parametrize('make', [
    partial(fall, end='3it'), partial(fall, end='1ep'), partial(fall, begin='6it'),
    partial(fall, begin='2it', end='5it'),
    *(partial(ParamScheduler, {'lr': partial(policy_exp, base_lr=.1, gamma=.5)}, by=by, end=end)
      for by in ('step', 'epoch') for end in (1, '2ep', '1it')),
    partial(ParamScheduler, factors={'lr': SchedLin(.5, .7)}, end='2it')])
@pytest.mark.parametrize('start', [1, 2, 3])
def test_start_epoch_after_an_end(make, start):
    "A schedule that was over before the first epoch that is trained has left its last value"
    assert lrs(4, make(), start_epoch=start) == lrs(4, make())[4*start:]

def test_start_epoch_of_accumulated_steps():
    "Skipped epochs have as many steps as `n_steps` says"
    whole = lrs(3, [Window(2), fall()], n_steps=2)

    assert lrs(3, [Window(2), fall()], start_epoch=2, n_steps=2) == whole[8:]


# ---- data without a length

@pytest.mark.parametrize('sched', [
    fall, partial(fall, begin='1ep'),
    partial(ParamScheduler, {'lr': partial(policy_exp, base_lr=.1, gamma=.9)}, by='step', end=.5)])
def test_s40_unsized_data_needs_a_length(sched):
    "Without a length a schedule that needs one says so before training, and works with `n_steps` (S40)"
    learn = unsized(counts := Counts())

    with pytest.raises(ValueError, match='the training loader has no length.*`n_steps=…`'): learn.fit(2, cbs=sched())

    assert counts.n == 0
    assert lrs(2, sched(), learn, n_steps=4) == lrs(2, sched(), synth_learner(n=4, n_valid=0, lr=rate))

@every_fit
def test_s40_fits_of_unsized_data(fit, args):
    "Each fit says that it needs `n_steps`, and with it does what it does with data whose length is known (S40)"
    learn = unsized(counts := Counts(), opt_func=momentum)

    with pytest.raises(ValueError, match='`n_steps=…`, of every fit method'): getattr(learn, fit)(*args)

    assert counts.n == 0
    sized = synth_learner(n=4, n_valid=0, lr=rate, opt_func=momentum)
    assert hps(learn, fit, *args, n_steps=4)['lr'].tolist() == hps(sized, fit, *args)['lr'].tolist()

@pytest.mark.parametrize('sched,values', [
    (ParamScheduler({'lr': SchedLin(.5, .2)}, begin='1it', end='3it'), [rate, .5, .2, *[.2]*5]),
    (ParamScheduler({'lr': partial(policy_exp, base_lr=1., gamma=.5)}, by='step'), [.5**i for i in range(8)]),
    (ParamScheduler({'lr': partial(policy_exp, base_lr=1., gamma=.5)}, by='epoch'), [1.]*4+[.5]*4)])
def test_some_schedules_need_no_length(sched, values):
    "What depends on the number of the step or the epoch alone works with data of unknown length"
    assert lrs(2, sched, unsized(loss_func=lambda pred, y: 0*pred.sum())) == values

@every_fit
def test_wrong_n_steps(fit, args):
    "Too many or too few steps are told, by each fit"
    with pytest.warns(UserWarning, match='the fit goes on: it stays at the end'):
        tail = hps(three(), fit, *args, n_steps=3)['lr'][8:, 0]
    assert np.ptp(tail) == 0
    with pytest.warns(UserWarning, match='was made for 15 steps, but the fit took 12'):
        getattr(three(), fit)(*args, n_steps=5)


# ---- the rate for a batch size

@pytest.mark.parametrize('lr,scaled', [(.1, .025), (slice(.1, .4), slice(.025, .1)), (slice(.4), slice(None, .1)),
                                       ([.1, .2], [.025, .05]), ((0, .4), [0., .1])])
def test_scaled_lr(lr, scaled):
    "A rate for 32 items is, for batches of 8, a quarter, in each form that a fit takes"
    assert synth_learner(bs=8).scaled_lr(lr, 32) == scaled

@pytest.mark.parametrize('kwargs,items', [(dict(n_acc=3, unit='batches'), 24), (dict(n_acc=32), 32),
                                          (dict(n_acc=20), 24), (dict(n_acc=4), 8)])
def test_scaled_lr_of_accumulated_batches(kwargs, items):
    "What batches add up to counts: whole ones, until the window is full"
    assert synth_learner(GradientAccumulation(**kwargs), bs=8).scaled_lr(.5, 8) == .5*items/8

def test_scaled_lr_of_processes(monkeypatch):
    "Batches of all processes are one step"
    monkeypatch.setattr(torch.distributed, 'is_initialized', lambda: True)
    monkeypatch.setattr(torch.distributed, 'get_world_size', lambda: 4)

    assert synth_learner(bs=8).scaled_lr(.1, 8) == .4

@pytest.mark.parametrize('lr,base_bs,error,message', [
    (-1, 8, ValueError, '`lr` is -1'), ('x', 8, TypeError, "`lr` is 'x'"), ([.1, None], 8, TypeError, '`lr` is None'),
    (.1, 0, ValueError, '`base_bs` is 0; give a whole number of items, 1 or more'), (.1, 2.5, TypeError, '`base_bs`')])
def test_bad_scaled_lr(lr, base_bs, error, message):
    "What is no number is refused"
    with pytest.raises(error, match=f'scaled_lr: {message}'): synth_learner().scaled_lr(lr, base_bs)

def test_scaled_lr_without_a_batch_size():
    "A loader without a batch size, and windows by tokens, are named"
    batches = [*synth_learner().dls.train]
    tokens = GradientAccumulation(8, unit='tokens', weight=lambda learn: 1)

    with pytest.raises(ValueError, match='the train loader, a `list`, has no batch size: multiply the rate'):
        synth_learner(dls=(batches, None)).scaled_lr(.1, 8)
    with pytest.raises(ValueError, match='how many items `GradientAccumulation` adds up depends on their tokens'):
        synth_learner(tokens).scaled_lr(.1, 8)
