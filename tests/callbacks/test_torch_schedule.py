"""torch's schedulers as callbacks: the rates of a hand-written loop, what is filled in, refused and put back."""
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    ChainedScheduler, CosineAnnealingLR, CosineAnnealingWarmRestarts, CyclicLR, ExponentialLR, LambdaLR, LinearLR,
    MultiStepLR, OneCycleLR, PolynomialLR, ReduceLROnPlateau, SequentialLR, StepLR)

from learner.callback import Callback
from learner.callbacks.schedule import ParamScheduler
from learner.callbacks.torch_schedule import TorchScheduler
from learner.events import CancelEpochException, CancelFitException, CancelStepException, CancelTrainException
from learner.optim import Adagrad, Adam
from learner.schedules import SchedLin
from tests.helpers import Counts, raises
from tests.schedule_helpers import Window, hypers, late, lrs, momentum, rate, three, unsized

rates = [.1, .02, .3]


def halved(i): return .5**i
def thirds(i): return 1/(1+i)

def in_a_row(opt): return SequentialLR(opt, [LinearLR(opt, total_iters=2), ExponentialLR(opt, .5)], [2])
def at_once(opt): return ChainedScheduler([LinearLR(opt, total_iters=3), StepLR(opt, 2)], optimizer=opt)

by_epoch = {
    'StepLR': partial(StepLR, step_size=2), 'MultiStepLR': partial(MultiStepLR, milestones=[1, 3], gamma=.3),
    'ExponentialLR': partial(ExponentialLR, gamma=.7), 'LinearLR': partial(LinearLR, total_iters=3),
    'CosineAnnealingLR': partial(CosineAnnealingLR, T_max=5, eta_min=.001),
    'CosineAnnealingWarmRestarts': partial(CosineAnnealingWarmRestarts, T_0=2, T_mult=2),
    'PolynomialLR': partial(PolynomialLR, total_iters=4, power=2), 'SequentialLR': in_a_row,
    'ChainedScheduler': at_once, 'LambdaLR': partial(LambdaLR, lr_lambda=[halved, thirds, halved])}
by_step = {
    'OneCycleLR': partial(OneCycleLR, max_lr=[.5, .1, .2], total_steps=20, pct_start=.4),
    'CyclicLR': partial(CyclicLR, base_lr=[.01, .02, .03], max_lr=.4, step_size_up=3)}
every_make = pytest.mark.parametrize('make', [*by_epoch.values(), *by_step.values()], ids=[*by_epoch, *by_step])


def by_hand(make, n_epoch, steps, start=rates, n=4):
    "Rates and momenta of three groups at each batch of a plain loop"
    opt = torch.optim.SGD([dict(params=[nn.Parameter(torch.ones(1))], lr=lr) for lr in start], momentum=.9)
    sched, seen = make(opt), []
    for _ in range(n_epoch):
        for _ in range(n):
            seen.append([(g['lr'], g['momentum']) for g in opt.param_groups])
            opt.step()
            if steps: sched.step()
        if not steps: sched.step()
    return np.array(seen)

def fitted(learn, n_epoch, cbs=None, lr=rates, **kwargs):
    "The same of a fit"
    learn.fit(n_epoch, lr, cbs=cbs, **kwargs)
    return np.stack([learn.recorder.hps['lr'], learn.recorder.hps['mom']], 2)


# ---- the same as by hand

@pytest.mark.parametrize('given', ['fit', 'learner'])
@pytest.mark.parametrize('make,steps', [
    *((make, False) for make in by_epoch.values()), *((make, True) for make in by_step.values())],
    ids=[*by_epoch, *by_step])
def test_by_hand(make, steps, given):
    "Rates are those of a hand-written loop, which steps it as torch's documentation says; given to fit or to Learner"
    cb = make if isinstance(make, partial) else TorchScheduler(make)
    learn = three(cb if given == 'learner' else None)

    found = fitted(learn, 5, cb if given == 'fit' else None)

    assert np.array_equal(found, by_hand(make, 5, steps))

@pytest.mark.parametrize('by', ['step', 'epoch'])
@every_make
def test_by(make, by):
    "`by` says when it is stepped, whichever it is"
    found = fitted(three(), 5, TorchScheduler(make, by=by))

    assert np.array_equal(found, by_hand(make, 5, by == 'step'))

@pytest.mark.parametrize('cls,make', [
    (LinearLR, LinearLR), (OneCycleLR, partial(OneCycleLR, max_lr=rates, total_steps=20)),
    (CosineAnnealingLR, partial(CosineAnnealingLR, T_max=5)), (ReduceLROnPlateau, partial(StepLR, step_size=9))])
def test_class(cls, make):
    "A class is enough: `total_steps`, `max_lr` and `T_max` are the fit's"
    assert np.array_equal(fitted(three(n_valid=1), 5, cls), by_hand(make, 5, cls is OneCycleLR))

@pytest.mark.parametrize('make,by,whole', [
    (CosineAnnealingLR, 'step', partial(CosineAnnealingLR, T_max=20)),
    (OneCycleLR, 'epoch', partial(OneCycleLR, max_lr=rates, total_steps=5)),
    (partial(OneCycleLR, max_lr=.5), None, partial(OneCycleLR, max_lr=.5, total_steps=20)),
    (partial(OneCycleLR, epochs=7, steps_per_epoch=4), None, partial(OneCycleLR, max_lr=rates, total_steps=28)),
    (partial(CyclicLR, base_lr=.01), None, partial(CyclicLR, base_lr=.01, max_lr=rates)),
    (partial(CosineAnnealingLR, eta_min=.01), None, partial(CosineAnnealingLR, T_max=5, eta_min=.01))])
def test_what_is_filled_in(make, by, whole):
    "What is not given is filled in, in steps or epochs as it is stepped"
    found = fitted(three(), 5, TorchScheduler(make, by))

    assert np.array_equal(found, by_hand(whole, 5, by == 'step' or by is None and whole.func is not CosineAnnealingLR))

@pytest.mark.parametrize('made', [*by_epoch.values(), *by_step.values()], ids=[*by_epoch, *by_step])
def test_instance(made):
    "An instance is over the Learner's optimizer, and goes on in the next fit where it was"
    learn = three(lr=rates)
    sched = made(learn.create_opt().opt)

    found = [fitted(learn, n, sched, None) for n in (2, 3)]

    whole = by_hand(made, 5, made in by_step.values())
    assert np.array_equal(np.concatenate(found)[..., 0], whole[..., 0])

def test_instance_from_a_later_epoch():
    "An instance is at the place where it is, whichever epoch the fit starts with"
    learn = three(lr=rates)
    sched = StepLR(learn.create_opt().opt, 1, .5)

    assert fitted(learn, 4, sched, None, start_epoch=2)[::4, 0, 0].tolist() == [.1, .05]

@pytest.mark.parametrize('mode,values,expected', [
    ('min', [3, 2, 2.5, 2.1, 1, 4, 3], [1, 1, 1, 1, .5, .5, .5]),
    ('max', [1, 2, 2, 1, 0, 1, 0], [1, 1, 1, 1, .5, .5, .25])])
def test_plateau(mode, values, expected):
    "ReduceLROnPlateau watches a column of the table: here that of a metric"
    def score(pred, targ): return torch.tensor(float(values[learn.epoch]))
    learn = three(n_valid=2, metrics=score)
    make = partial(ReduceLROnPlateau, mode=mode, factor=.5, patience=1)

    found = fitted(learn, 7, TorchScheduler(make, monitor='score'))

    opt = torch.optim.SGD([nn.Parameter(torch.ones(1))], rate)
    sched, lrs = make(opt), []
    for v in values:
        lrs.append(opt.param_groups[0]['lr'])
        sched.step(v)
    assert found[::4, 0, 0].tolist() == lrs == [rate*f for f in expected]

@pytest.mark.parametrize('monitor', ['valid_loss', 'train_loss'])
@pytest.mark.parametrize('nth,rows', [(9, [.02, .02, .01, .005, .0025]), (3, [.02, .02, .01, .005])])
def test_plateau_of_a_loss(nth, rows, monitor):
    "It watches a loss, which stays 0 here, so that the first epoch is the best; an epoch without a row does not count"
    learn = three(Callback(before_epoch=raises(CancelEpochException, nth=nth)), n_valid=1)

    found = fitted(learn, 5, TorchScheduler(partial(ReduceLROnPlateau, patience=0, factor=.5), monitor=monitor))

    assert found[::4, 1, 0].tolist() == rows


# ---- fits

@every_make
def test_each_fit_begins_anew(make):
    "A scheduler that is made for each fit begins at that fit's rates"
    learn, cb = three(), TorchScheduler(make)
    first = fitted(learn, 2, cb)
    other = [.01, .03, .02]

    assert np.array_equal(fitted(learn, 2, cb, other), by_hand(make, 2, make in by_step.values(), other))
    assert np.array_equal(fitted(learn, 2, cb), first)

@pytest.mark.parametrize('by', ['step', 'epoch'])
@every_make
def test_start_epoch(make, by):
    "Rates are those of the whole fit's last epochs"
    found = fitted(three(), 5, TorchScheduler(make, by=by), start_epoch=3)

    assert np.array_equal(found, by_hand(make, 5, by == 'step')[12:])

@pytest.mark.parametrize('k', [1, 2, 4])
def test_steps_are_the_optimizers(k):
    "By step it goes by the optimizer's steps, also while gradients are accumulated"
    found = fitted(three(), 3, [Window(k), OneCycleLR], n_steps=4//k)

    whole = by_hand(partial(OneCycleLR, max_lr=rates, total_steps=12//k), 3, True, n=4//k)
    assert np.array_equal(found, whole.repeat(k, 0))

def test_skipped_steps():
    "A step that is skipped does not advance it, nor does it make torch complain"
    cb = Callback(before_step=raises(CancelStepException))

    found = fitted(three(cb), 1, TorchScheduler(partial(ExponentialLR, gamma=.5), by='step'))

    assert found[:, 0, 0].tolist() == [.1, .1, .05, .025]

def test_an_epoch_without_training():
    "An epoch counts, also one without any step, and torch does not complain about that"
    learn = three(Callback(before_train=raises(CancelTrainException)))

    assert fitted(learn, 3, partial(ExponentialLR, gamma=.5))[::4, 0, 0].tolist() == [.05, .025]

@pytest.mark.parametrize('opt_func', [momentum, Adam, torch.optim.AdamW])
@pytest.mark.parametrize('at,ex', [('after_batch', None), ('after_loss', CancelFitException), ('after_loss', KeyError)])
@pytest.mark.parametrize('make', [partial(StepLR, step_size=1), OneCycleLR, partial(CyclicLR, base_lr=.01), in_a_row])
def test_all_is_as_before(make, at, ex, opt_func):
    "After a fit, however it ends, hyper-parameters and torch's optimizer are as before; its `step` is its own"
    learn = three(Callback(**{at: raises(ex, nth=6 if ex else 99)}), opt_func=opt_func)
    learn.create_opt().set_hyper('mom', .7)
    before = hypers(learn)

    if ex in (None, CancelFitException): learn.fit(2, cbs=TorchScheduler(make))
    else:
        with pytest.raises(ex): learn.fit(2, cbs=TorchScheduler(make))

    assert hypers(learn) == before and 'step' not in vars(learn.opt.opt)

@pytest.mark.parametrize('make', [by_epoch['LambdaLR'], *by_step.values()])
def test_one_value_for_each_group(make):
    "Lists have a value for each of the Learner's groups, into however many of torch's these are split for their decay"
    learn = three(opt_func=torch.optim.AdamW)

    found = fitted(learn, 5, make)[..., 0]

    assert len(learn.opt.opt.param_groups) == 6
    assert np.array_equal(found, by_hand(make, 5, make in by_step.values())[..., 0])

def test_removed_and_added_in_mid_fit():
    "One removed in mid-fit puts the rates back at once, one added then is where it would be"
    cb, other = (TorchScheduler(partial(ExponentialLR, gamma=.5), by='step') for _ in range(2))
    def change(cb_):
        if cb_.train_iter == 3: cb_.learn.remove_cb(cb)
        if cb_.train_iter == 6: cb_.learn.add_cb(other)

    values = lrs(2, cb, three(late(after_batch=change)))

    assert values == [*(rate*.5**i for i in range(3)), rate, rate, rate, rate*.5**6, rate*.5**7]

def test_two_at_once():
    "Two of torch's schedulers work together as they do in torch, and both are gone afterwards"
    learn = three()
    makes = [partial(LinearLR, total_iters=3), partial(StepLR, step_size=2)]

    found = fitted(learn, 5, makes)

    assert np.array_equal(found, by_hand(at_once, 5, False))
    assert [h['lr'] for h in learn.opt.hypers] == rates and 'step' not in vars(learn.opt.opt)

def test_other_hypers_may_be_scheduled():
    "A ParamScheduler of another hyper-parameter goes along with it"
    found = fitted(three(), 2, [partial(ExponentialLR, gamma=.5), ParamScheduler({'mom': SchedLin(.9, .2)})])

    assert found[:, 0, 0].tolist() == [.1]*4+[.05]*4
    np.testing.assert_allclose(found[:, 0, 1], np.linspace(.9, .2, 8))

@pytest.mark.parametrize('cbs', [OneCycleLR, [CosineAnnealingLR, ReduceLROnPlateau]])
def test_no_epochs(cbs):
    "A fit of no epochs works with each of them"
    learn = three(n_valid=1)

    learn.fit(0, cbs=cbs)

    assert learn.n_step == 0 and 'step' not in vars(learn.opt.opt)

def test_state():
    "What a scheduler keeps can be kept, and another one goes on from there"
    state, learn = {}, three(late(after_batch=lambda cb: cb.train_iter == 6 and state.update(sched.state_dict())))
    whole = lrs(2, sched := TorchScheduler(OneCycleLR), learn)
    state, other = pickle.loads(pickle.dumps(state)), TorchScheduler(OneCycleLR)

    def go_on(cb):
        other.load_state_dict(state)
        cb.opt.set_hyper('lr', other.sched.get_last_lr()[0])
        cb.learn.n_step = 6
    learn = three([late(before_train=go_on), late(after_batch=raises(CancelTrainException, nth=2))])
    assert lrs(2, other, learn, start_epoch=1) == whole[6:] and other.state_dict() == {}


# ---- what is refused

def elsewhere(learn): return StepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))], .1), 2)

@pytest.mark.parametrize('make,fit,message', [
    (lambda learn: elsewhere(learn), {}, 'this StepLR is over another optimizer: make it over `learn.create_opt'),
    (lambda learn: StepLR(learn.opt.opt, 2), dict(lr=.1), 'this StepLR has rates of its own: fit without `lr`'),
    (lambda learn: partial(OneCycleLR, max_lr=.1, total_steps=11), {}, '`total_steps` is 11, but this fit has 12'),
    (lambda learn: partial(OneCycleLR, epochs=2, steps_per_epoch=4), {}, '`total_steps` is 8, but this fit has 12'),
    (lambda learn: TorchScheduler(lambda opt: OneCycleLR(opt, .1, 6)), {}, '`total_steps` is 6, but this fit has 12'),
    (lambda learn: OneCycleLR(learn.opt.opt, .1, 9), {}, '`total_steps` is 9, but this fit has 12'),
    (lambda learn: ReduceLROnPlateau, {}, 'watch `valid_loss`, and the table has only epoch, train_loss, time: give'),
    (lambda learn: TorchScheduler(ReduceLROnPlateau, monitor='acc'), {}, 'ReduceLROnPlateau would watch `acc`'),
    (lambda learn: TorchScheduler(ReduceLROnPlateau, by='step', monitor='train_loss'), {}, "so it goes by='epoch'"),
    (lambda learn: partial(StepLR, step_size=2, **{'foo': 1}), {}, "unexpected keyword argument 'foo'"),
    (lambda learn: StepLR, {}, "missing 1 required positional argument: 'step_size'"),
    (lambda learn: TorchScheduler(lambda opt: opt), {}, 'returned a `SGD`, no scheduler of torch')])
def test_errors_come_before_training(make, fit, message):
    "What does not fit is told before the first batch, and all is as it was"
    learn = three(counts := Counts())
    learn.create_opt()
    cb = make(learn)
    learn.fit(0)
    before = hypers(learn)

    with pytest.raises((ValueError, TypeError), match=message): learn.fit(3, cbs=cb, **fit)

    assert counts.n == 0 and hypers(learn) == before

def test_plateau_without_recorder():
    "Without a Recorder there is no column to watch"
    learn = three(counts := Counts(), n_valid=1, default_cbs=False)

    with pytest.raises(ValueError, match='`valid_loss`, and there is no Recorder'): learn.fit(1, cbs=ReduceLROnPlateau)

    assert counts.n == 0

@pytest.mark.parametrize('make', [OneCycleLR, partial(CyclicLR, base_lr=.01), partial(OneCycleLR, cycle_momentum=True)])
@pytest.mark.parametrize('opt_func', [torch.optim.SGD, Adagrad])
def test_no_momentum_is_given(make, opt_func):
    "Schedulers of the momentum are refused where there is none, and do without if they are told to"
    learn = three(counts := Counts(), opt_func=opt_func)

    with pytest.raises(ValueError, match='would give this .* a momentum, and it has none: .*cycle_momentum=False'):
        learn.fit(1, cbs=make)

    assert counts.n == 0
    learn.fit(1, cbs=partial(make, cycle_momentum=False))
    assert counts.n == 4 and not any(g.get('momentum') for g in learn.opt.opt.param_groups)

@pytest.mark.parametrize('make', [OneCycleLR, TorchScheduler(CosineAnnealingLR, by='step')])
def test_s40_unsized_data(make):
    "What needs the length of an epoch says so where it is unknown, and works with `n_steps` (S40)"
    learn = unsized(counts := Counts(), opt_func=momentum)

    with pytest.raises(ValueError, match='and .* needs one: give the fit `n_steps=…`'): learn.fit(2, cbs=make)

    assert counts.n == 0
    assert lrs(2, make, learn, n_steps=4) == lrs(2, make)

@pytest.mark.parametrize('make,error,message', [
    (3, TypeError, "a `int` is no scheduler of torch's"), (nn.Linear(1, 1).weight, TypeError, 'a `Parameter` is no')])
def test_no_scheduler(make, error, message):
    "Other things are refused when they are given"
    with pytest.raises(error, match=message): TorchScheduler(make)
    with pytest.raises(ValueError, match="by='batch'; give 'step' or 'epoch'"): TorchScheduler(StepLR, by='batch')

def test_names():
    "It is shown by the name of what it steps"
    makes = [StepLR, partial(StepLR, step_size=2), elsewhere(None), in_a_row]

    assert [repr(TorchScheduler(m)) for m in makes] == ['TorchScheduler(StepLR)']*3 + ['TorchScheduler(in_a_row)']
