"""The two parts of `fine_tune`: where one ends and the other begins, what it takes, and what is refused."""
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from learner.callback import Callback
from learner.callbacks.finetune import BnFreeze, FreezeUntil
from learner.callbacks.schedule import ParamScheduler
from learner.events import CancelEpochException, CancelTrainException
from learner.schedules import SchedNo
from learner.splitters import split_blocks
from tests.helpers import Counts, synth_learner
from tests.schedule_helpers import Window, late


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

def tuned(cbs=None, n=4, **kwargs):
    return synth_learner(cbs, n=n, model=net(), splitter=split_blocks('1', '2'), train_bn=False, **kwargs)

def watch(seen):
    "Notes at each step whether the body is frozen, and the head's rate"
    return late(before_step=lambda cb: seen.append((not cb.model[0].weight.requires_grad, cb.opt.hypers[-1]['lr'])))

def is_frozen(learn): return not learn.model[0].weight.requires_grad


# ---- where the parts meet

@pytest.mark.parametrize('when,step', [('1ep', 4), ('3it', 3), (.5, 4), (0, 0)])
def test_freeze_until(when, step):
    "The place is given as for a ParamScheduler"
    learn, seen = tuned(), []

    learn.fit(2, cbs=[FreezeUntil(when), watch(seen)])

    assert [frozen for frozen, _ in seen] == [True]*step + [False]*(8-step)

@pytest.mark.parametrize('when', ['a', 2, None, '1.5it'])
def test_no_such_place(when):
    "What is no place is refused before training"
    counts = Counts()

    with pytest.raises(ValueError, match='is no place in a fit'): tuned().fit(2, cbs=[FreezeUntil(when), counts])

    assert counts.n == 0

@pytest.mark.filterwarnings('ignore:.*was made for .* steps, but the fit took')
@pytest.mark.filterwarnings('ignore:.*its end is not reached')
def test_epochs_cut_short():
    "Where epochs have fewer steps than planned, the body is frozen as long as the rates are those of the first part"
    def short(cb):
        if cb.training and cb.iter == 2: raise CancelTrainException
    seen, learn = [], tuned()

    learn.fine_tune(2, 2e-3, cbs=[Callback(after_batch=short), watch(seen)])

    first, second = [lr for frozen, lr in seen if frozen], [lr for frozen, lr in seen if not frozen]
    assert len(first) == 4 and len(second) == 5 and max(first) > 1e-3 > max(second)

def test_place_without_a_length():
    "A place in steps needs no length of an epoch; that it was not reached is no error, for it cannot be known"
    data = list(synth_learner(n=4).dls.train)
    class Stream:
        def __iter__(self): return iter(data)
    learn = synth_learner(model=net(), splitter=split_blocks('1', '2'), dls=(Stream(), None))

    with pytest.warns(UserWarning, match='ended while only the last group was trained'):
        learn.fit(1, cbs=FreezeUntil('500it'))

    assert learn.n_step == 4 and is_frozen(learn)

def test_accumulation():
    "With `n_steps` the parts are those of the optimizer's steps"
    seen, learn = [], tuned()

    learn.fine_tune(1, cbs=[Window(2), watch(seen)], n_steps=2)

    assert [frozen for frozen, _ in seen] == [True]*2 + [False]*2

def test_thawing_epoch_is_cancelled():
    "A callback that cancels the epoch in which all groups would be trained first only puts it off"
    def cancel(cb):
        if cb.epoch == 1: raise CancelEpochException
    first = Callback(before_epoch=cancel)
    first.order = -50
    learn, seen = tuned(), []

    learn.fit(3, cbs=[first, FreezeUntil('1ep'), watch(seen)])

    assert [frozen for frozen, _ in seen] == [True]*4 + [False]*4

def test_refused_before_training():
    "A fit that is refused leaves trainable what was"
    learn = tuned(opt_func=partial(torch.optim.SGD, momentum=0.))
    learn.model[1].weight.requires_grad_(False)

    with pytest.raises(ValueError, match='no `mom`'): learn.fine_tune(1, moms=(.9, .8, .9))

    assert [p.requires_grad for p in learn.model.parameters()] == [True]*2 + [False] + [True]*3

def test_ends_in_the_first_part():
    "A fit that ends while the body is frozen says so; one that was to end there does not"
    with pytest.warns(UserWarning, match='ended while only the last group was trained: `learn.unfreeze'):
        with pytest.raises(KeyError): tuned().fine_tune(1, cbs=late(after_step=lambda cb: {}['x']))

    learn = tuned()
    learn.fine_tune(0, freeze_epochs=1)

    assert is_frozen(learn)


# ---- what it takes

def test_rates_of_all_groups():
    "A list gives all groups their rates in the first part, and half of them in the second"
    learn = tuned()

    learn.fine_tune(1, rates := [1e-4, 1e-3, 1e-2], div_final=10)

    assert learn.recorder.hps['lr'][3] == pytest.approx(np.array(rates)/10)
    assert learn.recorder.hps['lr'][-1] == pytest.approx(np.array(rates)/20)

def test_what_the_finder_gives():
    "The rates that `lr_find` suggests for the groups can be given"
    learn = tuned()
    found = learn.lr_find([1e-6, 1e-5, 1e-4], [.01, .1, 1.], num_it=40, stop_div=False, show_plot=False).valley

    learn.fine_tune(1, found, div_final=1)

    assert learn.recorder.hps['lr'][3].tolist() == pytest.approx([*found])

@pytest.mark.parametrize('args,kwargs,error,message', [
    ((-1,), {}, ValueError, '`epochs` is -1'), ((1.5,), {}, TypeError, '`epochs` is 1.5'),
    (('1',), {}, TypeError, "`epochs` is '1'"), ((1,), dict(freeze_epochs=-1), ValueError, '`freeze_epochs` is -1'),
    ((1, [1e-3, 1e-2]), {}, ValueError, '2 values of `base_lr` for 3 groups'),
    ((1, None), {}, TypeError, '`base_lr` is None'), ((1, '1e-3'), {}, TypeError, "`base_lr` is '1e-3'"),
    ((1,), dict(div=0), ValueError, '`div` is 0; give a number above 0'),
    ((1,), dict(lr_mult=0), ValueError, '`lr_mult` is 0'),
    ((1,), dict(pct_start=30), ValueError, '`pct_start`, .* is 30')])
def test_bad_input(args, kwargs, error, message):
    "What cannot be is refused by name, before training"
    counts = Counts()

    with pytest.raises(error, match=message): tuned(counts).fine_tune(*args, **kwargs)

    assert counts.n == 0

@pytest.mark.parametrize('fit', [
    lambda learn, cb: learn.fit_one_cycle(1, cbs=cb), lambda learn, cb: learn.fit_flat_cos(1, cbs=cb),
    lambda learn, cb: learn.fit_sgdr(1, 1, cbs=cb), lambda learn, cb: learn.fine_tune(1, cbs=cb)])
@pytest.mark.parametrize('cb', [OneCycleLR, lambda: ParamScheduler({'lr': SchedNo(1e-3, 1e-3)})])
def test_another_schedule_of_the_rate(fit, cb):
    "Another scheduler of the learning rate is refused before training"
    counts, learn = Counts(), tuned()

    with pytest.raises(ValueError, match='both set `lr`'):
        fit(learn, [cb if isinstance(cb, type) else cb(), counts])

    assert counts.n == 0

@pytest.mark.parametrize('n', [1.5, True, None, 'body'])
def test_freeze_to_a_number(n):
    "What is no whole number of groups is refused"
    learn = tuned()

    with pytest.raises(TypeError, match='give the number of groups to freeze, a whole one'): learn.freeze_to(n)

    assert not is_frozen(learn)

def test_bn_freeze_after_a_new_optimizer():
    "That BnFreeze keeps nothing is told also where the optimizer is another than the one that froze"
    learn = synth_learner(n=2, model=net(), splitter=split_blocks('1', '2'))
    learn.freeze().create_opt()

    with pytest.warns(UserWarning, match='BnFreeze keeps nothing'): learn.fit(1, cbs=BnFreeze)

def test_metric_named_like_a_groups_rate():
    "A metric has a column of its own in the history, whatever it is called"
    def lr_0(pred, targ): return (pred-pred).mean() + 7
    learn = tuned(metrics=lr_0)

    learn.fit(1, [1e-3, 1e-2, 1e-1])

    assert learn.history.lr_0.tolist() == [1e-3] and learn.history.lr_0_2.tolist() == [7]
