"""What a fit would do to the hyper-parameters: the same as the fit then does, without a trace; and drawing it."""
import copy
from functools import partial

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    ChainedScheduler, CosineAnnealingLR, CyclicLR, ExponentialLR, LambdaLR, LinearLR, OneCycleLR, ReduceLROnPlateau,
    SequentialLR, StepLR)

import learner  # noqa: F401  # adds the fit methods
from learner.callback import Callback
from learner.callbacks.schedule import ParamScheduler, Scheduler
from learner.callbacks.torch_schedule import TorchScheduler
from learner.learner import Learner
from learner.optim import SGD, Adam
from learner.plot import plot_hypers
from learner.schedules import SchedExp, SchedLin, SchedNo, policy_exp
from tests.helpers import Counts, raises, weights
from tests.schedule_helpers import momentum, rate, three, unsized

matplotlib.use('Agg')

def fall(**kwargs): return ParamScheduler({'lr': SchedLin([.1, .2, .3], 0.)}, **kwargs)
def in_a_row(opt): return SequentialLR(opt, [LinearLR(opt, total_iters=2), ExponentialLR(opt, .5)], [2])
def at_once(opt): return ChainedScheduler([LinearLR(opt, total_iters=3), StepLR(opt, 2)], optimizer=opt)

own_cbs = [fall(end=.5), ParamScheduler({'wd': SchedExp(.1, .2)}, begin='6it')]
torch_cbs = dict(
    step=partial(StepLR, step_size=2), one_cycle=OneCycleLR, cyclic=partial(CyclicLR, base_lr=.01),
    cos=CosineAnnealingLR, cos_step=TorchScheduler(CosineAnnealingLR, by='step'), sequential=TorchScheduler(in_a_row),
    chained=TorchScheduler(at_once), lambdas=partial(LambdaLR, lr_lambda=[lambda i: .5**i, lambda i: 1/(1+i), abs]))
calls = {
    'fit': ('fit', (2,), {}), 'fit lr wd': ('fit', (2, slice(.01, .1)), dict(wd=.2, reset_opt=True)),
    'fit cbs': ('fit', (3, .2), dict(cbs=own_cbs)), 'no epochs': ('fit', (0,), dict(cbs=own_cbs)),
    'fit_one_cycle': ('fit_one_cycle', (3, slice(.001, .1)), dict(start_epoch=1)),
    'fit_one_cycle moms': ('fit_one_cycle', (2,), dict(moms=(.9, .5, .8), wd=[.1, .2, .3])),
    'fit_flat_cos': ('fit_flat_cos', (2, .1), {}), 'fit_sgdr': ('fit_sgdr', (2, 1), {}),
    'fine_tune': ('fine_tune', (2,), {}), 'fine_tune more': ('fine_tune', (2, .1, 2), dict(start_epoch=1, lr_mult=5)),
    **{name: ('fit', (4, [.1, .2, .3]), dict(cbs=cb, start_epoch=1)) for name, cb in torch_cbs.items()}}
every_call = pytest.mark.parametrize('fit,args,kwargs', calls.values(), ids=calls)

@pytest.fixture
def figures():
    yield
    plt.close('all')

def same(a, b): return a.keys() == b.keys() and all(np.array_equal(v, b[k]) for k, v in a.items())


# ---- as the fit

@pytest.mark.parametrize('opt_func', [momentum, Adam])
@every_call
def test_as_the_fit(fit, args, kwargs, opt_func):
    "What is foreseen is what the fit then records, of all hyper-parameters and groups"
    learn = three(opt_func=opt_func)

    seen = learn.simulate_sched(fit, *args, **kwargs)

    getattr(learn, fit)(*args, **kwargs)
    assert same(seen, learn.recorder.hps)

@every_call
def test_after_another_fit(fit, args, kwargs):
    "The same after a fit, with an optimizer whose hyper-parameters were then set by hand"
    learn = three(opt_func=Adam, wd=.3)
    learn.fit(1)
    learn.opt.set_hypers(mom=[.5, .6, .7], eps=1e-3)

    seen = learn.simulate_sched(getattr(learn, fit), *args, **kwargs)

    getattr(learn, fit)(*args, **kwargs)
    assert same(seen, learn.recorder.hps)

@pytest.mark.parametrize('cbs', [fall, lambda: partial(StepLR, step_size=1)])
def test_schedulers_of_the_learner(cbs):
    "Schedulers that belong to the Learner act too, unless they are switched off"
    learn = three(cbs())

    seen = [learn.simulate_sched('fit', 2)]
    learn.fit(2)
    fitted = [learn.recorder.hps]
    for cb in learn.cbs: cb.run = not isinstance(cb, Scheduler)
    seen.append(learn.simulate_sched('fit', 2))
    learn.fit(2)

    assert same(seen[0], fitted[0]) and same(seen[1], learn.recorder.hps) and np.ptp(seen[1]['lr']) == 0

@pytest.mark.parametrize('make', [
    in_a_row, at_once, partial(OneCycleLR, max_lr=.1, total_steps=20), partial(ExponentialLR, gamma=.5)])
def test_instances_of_torch(make):
    "A scheduler over the Learner's optimizer is where it was, and goes on from there in the fit"
    learn = three(lr=[.1, .2, .3])
    sched = make(learn.create_opt().opt)
    first = learn.simulate_sched('fit', 2, cbs=sched)
    learn.fit(2, cbs=sched)
    assert same(first, learn.recorder.hps)

    second = learn.simulate_sched('fit', 3, cbs=sched)
    learn.fit(3, cbs=sched)
    assert same(second, learn.recorder.hps) and (second['lr'][0] != first['lr'][0]).all()

@pytest.mark.parametrize('fits', [0, 1])
def test_plateau(fits):
    "What depends on results is foreseen as far as it can be: without any change; a column that is not there is told"
    learn = three(n_valid=1)
    for _ in range(fits): learn.fit(1)

    seen = learn.simulate_sched('fit', 3, cbs=ReduceLROnPlateau)

    assert (seen['lr'] == rate).all() and seen['lr'].shape == (12, 3)
    with pytest.raises(ValueError, match='watch `acc`, and the table has only epoch, train_loss, valid_loss, time'):
        learn.simulate_sched('fit', 3, cbs=TorchScheduler(ReduceLROnPlateau, monitor='acc'))

@pytest.mark.parametrize('n_steps', [1, 4, 7])
@pytest.mark.parametrize('learn', [three, unsized])
def test_number_of_steps(n_steps, learn):
    "There is a value for each step: `n_steps` an epoch if it is given"
    lr = learn().simulate_sched('fit_flat_cos', 2, .1, n_steps=n_steps)['lr']

    assert len(lr) == 2*n_steps and lr[0, 0] == .1 and lr[-1, 0] == .1/1e5

def test_s40_unsized_data():
    "Without a length there is nothing to be foreseen, and that is told (S40)"
    with pytest.raises(ValueError, match='no length: give `n_steps=…`'): unsized().simulate_sched('fit', 1)

def test_other_callbacks_do_not_act():
    "Nothing but schedulers acts"
    learn = three([counts := Counts(), Callback(before_fit=raises(KeyError), before_epoch=raises(KeyError))])

    learn.simulate_sched('fit_one_cycle', 2, cbs=Callback(before_fit=raises(KeyError)))

    assert counts.n == 0


# ---- without a trace

def held(learn):
    "All attributes of a learner and of its callbacks, by name"
    owners = {'learn': learn, **{f'{i} {cb}': cb for i, cb in enumerate(learn.cbs)}}
    return {f'{name}.{k}': v for name, o in owners.items() for k, v in vars(o).items() if k != 'cbs'}

def content(learn):
    "What is changed in place: values in torch's groups, the state of torch's optimizer and of the schedulers"
    groups = learn.opt and [{**g, 'params': None} for g in learn.opt.opt.param_groups]
    states = [cb.state_dict() for cb in learn.cbs if isinstance(cb, Scheduler)]
    return copy.deepcopy([groups, states]), learn.opt and [*vars(learn.opt.opt)]

def watched(fits, torchs=True):
    "A learner after so many fits, with gradients, a frozen weight, and schedulers of its own"
    cbs = [ParamScheduler({'eps': SchedLin(1e-8, 1e-4)}, end='3it'), *[partial(LinearLR, total_iters=3)]*torchs]
    learn = three(cbs, opt_func=Adam, n_valid=1)
    for _ in range(fits): learn.fit(1)
    for p in learn.model.parameters(): p.grad = torch.ones_like(p)
    next(learn.model.parameters()).requires_grad_(False)
    return learn

@pytest.mark.parametrize('fits', [0, 1])
@pytest.mark.parametrize('name', ['fit cbs', 'fit lr wd', 'fit_one_cycle', 'fine_tune', 'one_cycle', 'sequential'])
def test_no_trace(name, fits):
    "Weights, gradients, optimizer, counters, callbacks, record and random streams are as before"
    (fit, args, kwargs), learn = calls[name], watched(fits, name in ('fit lr wd', 'sequential'))
    learn.simulate_sched(fit, *args, **kwargs)  # fields of the class become the learner's own, with the same values
    old, inside, before, rng = held(learn), content(learn), weights(learn), torch.get_rng_state()

    learn.simulate_sched(fit, *args, **kwargs)

    now = held(learn)
    assert [k for k in {**old, **now} if now.get(k, 0) is not old.get(k, 1)] == [] and content(learn) == inside
    assert (learn.opt is None) == (fits == 0) and torch.equal(rng, torch.get_rng_state())
    assert all(map(torch.equal, before, weights(learn))) and all((p.grad == 1).all() for p in learn.model.parameters())
    assert [p.requires_grad for p in learn.model.parameters()] == [False]+[True]*5

def test_no_trace_of_an_error():
    "Neither does a fit that would fail leave any"
    learn = watched(1, torchs=False)
    learn.simulate_sched('fit', 2)
    old, inside = held(learn), content(learn)

    with pytest.raises(ValueError, match='no `foo` to schedule'):
        learn.simulate_sched('fit', 2, cbs=[fall(), ParamScheduler({'foo': SchedLin(1., 2.)})])

    now = held(learn)
    assert [k for k in {**old, **now} if now.get(k, 0) is not old.get(k, 1)] == [] and content(learn) == inside


# ---- errors

@pytest.mark.parametrize('fit,args,kwargs', [
    ('fit', (1.5,), {}), ('fit', (-1,), {}), ('fit', (2,), dict(start_epoch=2)), ('fit', (2,), dict(n_steps=0)),
    ('fit', (2, [.1, .2]), {}), ('fit', (2,), dict(wd=-1)), ('fit_sgdr', (0, 1), {}),
    ('fit', (2,), dict(cbs=ParamScheduler({'foo': SchedLin(1., 2.)}))), ('fit', (2,), dict(cbs=fall(begin='9it'))),
    ('fit', (2,), dict(cbs=fall(groups=[3]))),
    ('fit', (2,), dict(cbs=partial(OneCycleLR, max_lr=.1, total_steps=7))), ('fit', (2,), dict(cbs=StepLR)),
    ('fit', (2,), dict(cbs=OneCycleLR)), ('fit_one_cycle', (2,), dict(moms=(.9, .8, .9))),
    ('fit_one_cycle', (2,), dict(pct_start=2)), ('fit_one_cycle', (2,), dict(moms=(.9, .8))),
    ('fit', (2,), dict(cbs=StepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))], .1), 2)))])
def test_errors_are_the_fits(fit, args, kwargs):
    "What the fit would refuse is refused in the same words"
    learn = three(opt_func=torch.optim.SGD)
    with pytest.raises((ValueError, TypeError)) as of_fit: getattr(learn, fit)(*args, **kwargs)

    with pytest.raises(of_fit.type) as seen: learn.simulate_sched(fit, *args, **kwargs)

    assert str(seen.value) == str(of_fit.value)

def test_no_such_fit():
    "A fit that is none is told"
    with pytest.raises(ValueError, match='fit_all.* is no fit method'): three().simulate_sched('fit_all', 2)
    with pytest.raises(ValueError, match='lr_find.* is no fit method'): three().simulate_sched('lr_find')
    with pytest.raises(ValueError, match='is no fit method'): three().simulate_sched(partial(Learner.fit, 2))

def test_ones_own_fit_stays():
    "Who has replaced `learn.fit` keeps it"
    learn, calls = three(), []
    learn.fit = mine = lambda *args: calls.append(args)

    learn.simulate_sched('fit_one_cycle', 1)

    assert learn.fit is mine and calls == []

def test_within_a_fit():
    "Within a fit there is no other one to be foreseen"
    learn = three(Callback(after_epoch=lambda cb: cb.learn.simulate_sched('fit', 2)))

    with pytest.raises(RuntimeError, match='fit was called within a fit'): learn.fit(1)


# ---- drawing

def lines(ax): return {line.get_label(): line.get_ydata().tolist() for line in ax.get_lines()}

def test_preview(figures):
    "`preview_sched` draws `lr`, `mom` and what else changes, a line for each group, or one where all are the same"
    learn = three(opt_func=Adam)

    axs = learn.preview_sched('fit_one_cycle', 2, slice(.001, .1), wd=.2)

    seen = learn.simulate_sched('fit_one_cycle', 2, slice(.001, .1), wd=.2)
    assert [ax.get_ylabel() for ax in axs] == ['lr', 'mom'] and axs[0].get_xlabel() == 'batch'
    assert lines(axs[0]) == {f'group {i}': seen['lr'][:, i].tolist() for i in range(3)}
    assert lines(axs[1]) == {'all groups': seen['mom'][:, 0].tolist()}
    assert axs[0].get_lines()[0].get_xdata().tolist() == list(range(1, 9)) and axs[0].get_legend()

@pytest.mark.parametrize('names,drawn', [('wd', ['wd']), (['wd', 'lr'], ['wd', 'lr']), (None, ['lr', 'mom', 'wd'])])
def test_names(names, drawn, figures):
    "`names` says what is drawn, in that order, before a fit and after it"
    learn = three(opt_func=Adam)
    cb = ParamScheduler({'wd': SchedLin(.1, .2)}, {'lr': SchedNo(1., 1.)})

    assert [ax.get_ylabel() for ax in learn.preview_sched('fit', 1, cbs=cb, names=names)] == drawn
    learn.fit(1, cbs=cb)
    assert [ax.get_ylabel() for ax in learn.recorder.plot_sched(names)] == drawn

def test_plot_sched(figures):
    "`plot_sched` draws what the last fit had, a line with a label for each group"
    learn = three()
    learn.fit(1, cbs=ParamScheduler({'lr': partial(policy_exp, base_lr=[.1, .2, .3], gamma=.5)}, by='step'))

    lr, mom = learn.recorder.plot_sched()

    assert [t.get_text() for t in lr.get_legend().get_texts()] == ['group 0', 'group 1', 'group 2']
    np.testing.assert_allclose([*lines(lr).values()], np.outer([.1, .2, .3], [1, .5, .25, .125]))
    assert lines(mom) == {'all groups': [.9]*4}

def test_nothing_to_draw(figures):
    "Without a fit, and for what the optimizer has not, there is an error"
    learn = three(opt_func=partial(SGD, mom=0.))

    with pytest.raises(ValueError, match='no batch has been trained yet; `learn.preview_sched` draws'):
        learn.recorder.plot_sched()
    learn.fit(1)
    with pytest.raises(ValueError, match='there is no `mom` to draw, only lr, wd'): learn.recorder.plot_sched('mom')
    with pytest.raises(ValueError, match='there is no `foo`'): learn.preview_sched('fit', 1, names=['lr', 'foo'])

def test_axes_of_ones_own(figures):
    "`plot_hypers` draws on the axes given, one for each, and returns them"
    axs = plt.subplots(1, 2)[1]
    hps = {'lr': np.array([[.1, .2], [.3, .4]]), 'eps': np.ones((2, 2)), 'wd': np.array([[1., 1.], [2., 2.]])}

    assert plot_hypers(hps, axs=axs) is axs
    assert [lines(ax) for ax in axs] == [{'group 0': [.1, .3], 'group 1': [.2, .4]}, {'all groups': [1., 2.]}]
    with pytest.raises(ValueError, match='2 axes for 1 hyper-parameters'): plot_hypers(hps, ['lr'], axs)
