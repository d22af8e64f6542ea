"""Hyper-parameters read batch by batch: what a Reading holds, what the Recorder and the history make of it."""
import copy
from functools import partial

import numpy as np
import pytest
import torch

from learner.callback import Callback
from learner.callbacks.schedule import ParamScheduler
from learner.events import CancelTrainException
from learner.hypers import stack_readings
from learner.optim import SGD, Adagrad, Adam, make_opt, params
from learner.schedules import SchedExp, SchedLin
from tests.helpers import raises, synth_learner
from tests.optim_helpers import by_layer, net, one_group, ours
from tests.schedule_helpers import falling, late, momentum, rate, three

theirs = [torch.optim.SGD, momentum, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad,
          torch.optim.Adadelta, torch.optim.NAdam, torch.optim.ASGD, torch.optim.Rprop]
every_opt = pytest.mark.parametrize('opt_func', [*ours, *theirs])


def four(opt_func=Adam, **kwargs):
    "An optimizer with four groups of its own rates"
    model = net()
    return make_opt(opt_func, by_layer(model), model, slice(.001, .1), **kwargs)

def shown(opt): return {name: [h[name] for h in opt.hypers] for name in opt.places}


# ---- Optimizer.read

@every_opt
@pytest.mark.parametrize('param_opts', [
    None, {'0.*': dict(lr_mult=10)}, {'0.weight': dict(lr_mult=0), '4.weight': dict(lr=.5)}, {'bias': dict(lr_mult=3)}])
def test_reads_what_hypers_show(opt_func, param_opts):
    "All hyper-parameters of all groups are read, without multipliers and fixed values"
    opt = four(opt_func, param_opts=param_opts)

    assert opt.read().values == shown(opt)
    assert opt.read().values['lr'] == pytest.approx([.001, .1**(7/3), .1**(5/3), .1])

def hyper_of_one(opt): opt.hypers[2].update(lr=.3, mom=.4)
def torch_group(opt):
    for g in opt.opt.param_groups: g.update(lr=.1*g['group'], eps=.1)
def torch_betas(opt): opt.opt.param_groups[0]['betas'] = (.4, .5)
def decay_apart(opt): opt.set_hyper('wd', [0., .1, .2, .3])
def loaded(opt):
    other = four(torch.optim.AdamW)
    other.set_hypers(lr=[.1, .2, .3, .4], wd=.3, mom=.1)
    opt.load_state_dict(other.state_dict())
def tensors(opt):
    for g in opt.opt.param_groups: g['lr'] = torch.tensor(.25)
def tensors_loaded(opt):
    tensors(other := four(torch.optim.AdamW))
    opt.load_state_dict(other.state_dict())

@pytest.mark.parametrize('change', [
    lambda opt: opt.set_hyper('lr', .2), lambda opt: opt.set_hypers(mom=.1, sqr_mom=.2, eps=.3, wd=[.4, .3, .2, .1]),
    hyper_of_one, torch_group, torch_betas, decay_apart, loaded, tensors, tensors_loaded])
@pytest.mark.parametrize('wd', [0., .01])
def test_a_change_is_read(change, wd):
    "Whoever changes a hyper-parameter, and wherever: the next reading has it, the last one stays as it was"
    opt = four(torch.optim.AdamW, wd=wd)
    first = opt.read()
    old = copy.deepcopy(first.values)
    assert opt.read() is first

    change(opt)

    assert opt.read().values == shown(opt) != old == first.values

@every_opt
def test_nothing_new(opt_func):
    "As long as nothing changes the reading is the same object, also over steps, freezing, and the same values set anew"
    opt = four(opt_func)
    first = opt.read()

    opt.freeze_to(2)
    opt.step()
    opt.set_hyper('lr', [h['lr'] for h in opt.hypers])

    assert opt.read() is opt.read() is first

@pytest.mark.parametrize('put', [tensors, tensors_loaded])
def test_rates_that_change_in_place(put):
    "A rate that is a tensor is read by value: what happens to it later does not change the reading"
    opt = four(torch.optim.AdamW)
    put(opt)
    first = opt.read()

    for g in opt.opt.param_groups: g['lr'].fill_(.5)

    assert first.values['lr'] == [.25]*4 and opt.read().values == shown(opt) and opt.read().values['lr'] == [.5]*4

@pytest.mark.parametrize('wd', [0., .1])
def test_tensors_stay_tensors(wd):
    "A rate that is a tensor is set in place, for a compiled step reads it there; parameters set apart have their own"
    opt = four(partial(torch.optim.AdamW, weight_decay=0.), param_opts={'bias': dict(lr_mult=10)})
    tensors(opt)
    opt.set_hyper('wd', wd)  # sets those without decay apart

    opt.set_hyper('lr', .5)

    rates = [g['lr'] for g in opt.opt.param_groups]
    assert all(isinstance(lr, torch.Tensor) for lr in rates) and sorted({float(lr) for lr in rates}) == [.5, 5.]
    assert opt.read().values == shown(opt)


# ---- stacking

def test_stacked():
    "Readings become one array for each name, a row each and a column for each group, across a new layout too"
    opt = four(torch.optim.AdamW, wd=0., param_opts={'0.*': dict(lr_mult=10)})
    readings = [opt.read()]
    for change in (torch_betas, decay_apart, hyper_of_one):
        change(opt)
        readings.append(opt.read())

    hps = stack_readings(readings)

    assert list(hps) == ['lr', 'mom', 'sqr_mom', 'eps', 'wd'] and {v.shape for v in hps.values()} == {(4, 4)}
    assert {n: v[-1].tolist() for n, v in hps.items()} == shown(opt)
    assert hps['mom'].tolist() == [[.9]*4, [.4, .9, .9, .9], [.4, .9, .9, .9], [.4, .9, .4, .9]]
    assert hps['wd'][:, 2].tolist() == [0., 0., .2, .2] and stack_readings([]) == {}

@pytest.mark.parametrize('other', [lambda: four(Adagrad), lambda: one_group(Adam, net()), lambda: four(SGD)])
def test_stacked_with_anothers(other):
    "Readings of an optimizer with other names or groups than the last one are NaN"
    hps = stack_readings([other().read(), (opt := four(Adam)).read()])

    assert all(np.isnan(v[0]).all() for v in hps.values()) and {n: v[1].tolist() for n, v in hps.items()} == shown(opt)


# ---- the Recorder's

@pytest.mark.parametrize('opt_func', [momentum, Adam, torch.optim.AdamW, Adagrad])
def test_hps_of_each_batch(opt_func):
    "`hps` has the hyper-parameters of all groups as each batch was trained with them, `lrs` the last group's rate"
    seen = []
    learn = three(late(before_step=lambda cb: seen.append(shown(cb.opt))), opt_func=opt_func, n_valid=1)

    learn.fit(2, slice(.01, .1), cbs=ParamScheduler({'wd': SchedExp(.1, .2)}, {'lr': SchedLin(1., [.5, .1, 0.])}))

    rec = learn.recorder
    assert {n: v.tolist() for n, v in rec.hps.items()} == {n: [s[n] for s in seen] for n in seen[0]}
    assert rec.lrs == rec.hps['lr'][:, 2].tolist() and len(rec.lrs) == 8

def test_hps_are_the_last_fits():
    "Each fit has its own, and before the first one there are none"
    learn = three(n_valid=1)
    assert (learn.recorder.hps, learn.recorder.lrs) == ({}, [])

    learn.fit(2)
    learn.fit(1, .2)
    learn.validate()

    assert learn.recorder.lrs == [.2]*4 and learn.recorder.hps['mom'].shape == (4, 3)

def test_hps_of_tensors():
    "Rates in tensors, which torch's schedulers change in place, are recorded as they were"
    def to_tensors(cb):
        state = cb.opt.state_dict()
        for g in state['param_groups']: g['lr'] = torch.tensor(rate)
        cb.opt.load_state_dict(state)
    learn = three(Callback(before_fit=to_tensors), opt_func=torch.optim.AdamW)

    learn.fit(2, cbs=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=.5))

    np.testing.assert_allclose(learn.recorder.lrs, [rate]*4+[rate/2]*4)

def test_multipliers_stay_on_top():
    "A multiplier of `param_opts` is on top of what a schedule sets; the record has what was set"
    seen = []
    learn = three(late(after_batch=lambda cb: seen.append({g['lr'] for g in cb.opt.opt.param_groups})), n=3,
                  param_opts={'0.weight': dict(lr_mult=10)})

    learn.fit(1, cbs=ParamScheduler({'lr': SchedLin(.1, .05)}))

    assert seen == [{v, v*10} for v in learn.recorder.lrs] and learn.recorder.lrs == falling(3, .1, .05)


# ---- the history

@pytest.mark.parametrize('opt_func,names', [
    (Adam, ['lr', 'mom', 'wd']), (momentum, ['lr', 'mom', 'wd']), (Adagrad, ['lr', 'wd']),
    (torch.optim.Rprop, ['lr'])])
def test_columns_of_one_group(opt_func, names):
    "A row ends with rate, momentum and decay, as far as there are any"
    learn = synth_learner(opt_func=opt_func, lr=1e-3)

    learn.fit(1)

    assert list(learn.history)[-len(names)-1:] == ['time', *names]
    assert learn.history.iloc[0][names].tolist() == [learn.opt.hypers[0][n] for n in names]

def test_columns_of_several_groups():
    "With several groups there are also columns for each; the ones without a number are the last group's"
    learn = three(opt_func=Adam, n_valid=1)

    learn.fit_one_cycle(3, slice(.001, .1), wd=[.1, .2, .3])

    df, hps = learn.history, learn.recorder.hps
    assert list(df)[-12:] == ['lr', 'mom', 'wd', *(f'{n}_{i}' for n in ('lr', 'mom', 'wd') for i in range(3))]
    assert df[['lr_0', 'lr_1', 'lr_2']].to_numpy().tolist() == hps['lr'][3::4].tolist()
    assert df.lr.tolist() == df.lr_2.tolist() and df.mom.tolist() == df.mom_0.tolist() == hps['mom'][3::4, 0].tolist()
    assert (df.wd_0 == .1).all() and (df.wd == .3).all()

def test_history_is_of_the_last_batch():
    "A row has what the epoch's last batch was trained with, not what was set after it"
    learn = three(Callback(after_train=lambda cb: cb.opt.set_hyper('lr', .7)), n_valid=1)

    learn.fit(2)

    assert learn.history.lr.tolist() == [rate, .7]

def test_history_over_fits():
    "Fits with other rates, groups and optimizers stand below each other, with NaN where there was nothing"
    learn = three(opt_func=Adam)
    learn.fit(1, .2)
    learn.opt_func, learn.splitter = Adagrad, params
    with pytest.warns(UserWarning, match='optimizer is made anew'): learn.fit(1, .3)

    df = learn.history

    assert df.lr.tolist() == [.2, .3] and df.lr_0.isna().tolist() == df.mom.isna().tolist() == [False, True]

def test_epoch_without_training():
    "An epoch whose training was cancelled at once has the hyper-parameters of that time"
    learn = three(Callback(before_train=raises(CancelTrainException, nth=2)), n_valid=1)

    learn.fit(3, cbs=Callback(before_epoch=lambda cb: cb.opt.set_hyper('lr', .1*(cb.epoch+1))))

    np.testing.assert_allclose(learn.history.lr, [.1, .2, .3])
    np.testing.assert_allclose(learn.recorder.lrs, [.1]*4+[.3]*4)
