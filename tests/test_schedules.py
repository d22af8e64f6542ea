"""Promises of learner.schedules: closed forms, exact ends, and equality with Caffe, fastai and torch's schedulers."""
import json
import math
import pickle
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from learner import schedules
from learner.schedules import (
    SchedCos, SchedExp, SchedLin, SchedNo, SchedPoly, combine_scheds, combined_cos, cos_restarts, policy_cos_restarts,
    policy_exp, policy_fixed, policy_inv, policy_multistep, policy_poly, policy_sigmoid, policy_step, policy_warmup,
    sched_cos, sched_exp, sched_lin, sched_no, sched_poly, three_phase_cos)

data = Path(__file__).parent/'data'
caffe, fastai = (json.loads((data/f'{name}.json').read_text()) for name in ('lr_policies', 'fastai_schedules'))

close = partial(np.testing.assert_allclose, rtol=1e-12, atol=0)
groups, one = [1e-4, .03, 2.], SchedNo(1., 1.)

makers = {'lin': SchedLin, 'cos': SchedCos, 'no': SchedNo, 'exp': SchedExp, 'poly': partial(SchedPoly, power=3),
          'root': partial(SchedPoly, power=.5),
          'combined': lambda start, end: combined_cos(.3, start, 7., end),
          'combined at once': lambda start, end: combined_cos(0, 7., start, end),
          'combined all': lambda start, end: combined_cos(1, start, end, 7.),
          'three phases': lambda start, end: three_phase_cos(.3, start, 7., end),
          'restarts': lambda start, end: cos_restarts(start, end, 7, 1.3),
          'ten': lambda start, end: combine_scheds([.1]*10, [SchedLin(start, end)]*9 + [SchedExp(start, end)])}
every_sched = pytest.mark.parametrize('make', makers.values(), ids=makers)

policies = {'fixed': policy_fixed, 'step': partial(policy_step, gamma=.5, stepsize=3),
            'exp': partial(policy_exp, gamma=.9), 'inv': partial(policy_inv, gamma=.1, power=.75),
            'multistep': partial(policy_multistep, gamma=.1, stepvalue=[2, 4]),
            'poly': partial(policy_poly, power=.5, max_iter=8),
            'sigmoid': partial(policy_sigmoid, gamma=-.5, stepsize=5),
            'warmup': partial(policy_warmup, warmup_iters=6, start_factor=.1),
            'restarts': partial(policy_cos_restarts, cycle_len=3, cycle_mult=2, min_lr=1e-5)}
every_policy = pytest.mark.parametrize('policy', policies.values(), ids=policies)


def half_cos(a, b, pos): return a*math.cos(math.pi*pos/2)**2 + b*math.sin(math.pi*pos/2)**2


# ---- functions of a position

@pytest.mark.parametrize('pos', [0., .1, .37, .5, .93, 1.])
@pytest.mark.parametrize('sched,made,form', [
    (sched_lin, SchedLin, lambda a, b, pos: a+(b-a)*pos),
    (sched_cos, SchedCos, half_cos),
    (sched_no, SchedNo, lambda a, b, pos: a),
    (sched_exp, SchedExp, lambda a, b, pos: a*math.exp(pos*math.log(b/a))),
    (lambda a, b, pos: sched_poly(a, b, 3, pos), partial(SchedPoly, power=3), lambda a, b, pos: a+(b-a)*pos*pos*pos)],
    ids=['lin', 'cos', 'no', 'exp', 'poly'])
@pytest.mark.parametrize('start,end', [(2., .5), (.001, .1)])
def test_closed_form(sched, made, form, start, end, pos):
    "Each schedule is its closed form, as a function of three arguments and of the position alone"
    close(sched(start, end, pos), form(start, end, pos))
    assert made(start, end)(pos) == sched(start, end, pos)


@every_sched
@pytest.mark.parametrize('start,end', [(.1, 1e-5), (1e-4, .3), (1/3, 1/7), (groups, [.3, 1/7, 1e-6])])
def test_ends_are_exact(make, start, end):
    "Position 0 gives the start and position 1 the end, bit for bit"
    f = make(start, end)

    assert np.array_equal(f(0.), start)
    assert np.array_equal(f(1.), start if make is SchedNo else end)


@pytest.mark.parametrize('pos', [0., .2, .6, .95, 1.])
@every_sched
def test_a_value_for_each_group(make, pos):
    "A list or an array gives an array with what each number alone gives, also beside a number"
    ends = [.3, 1/7, 1e-6]

    close(make(groups, np.array(ends))(pos), [make(a, b)(pos) for a, b in zip(groups, ends)])
    close(make(groups, .5)(pos), [make(a, .5)(pos) for a in groups])


@pytest.mark.parametrize('sched', [sched_lin, sched_cos, sched_no, sched_exp, partial(sched_poly, power=2)])
def test_lists_without_a_maker(sched):
    "The functions of three arguments take lists too"
    close(sched(groups, [.5]*3, pos=.3), [sched(a, .5, pos=.3) for a in groups])


@pytest.mark.parametrize('kind', [float, int, np.float64, np.float32])
@every_sched
def test_number_gives_float(make, kind):
    "Numbers of every kind give floats"
    assert [isinstance(make(kind(1), kind(2))(pos), float) for pos in (0., .3, 1.)] == [True]*3


@every_sched
def test_pickles(make):
    "Each function of the position can be pickled, and is the same afterwards"
    f = make(.2, .01)

    again = pickle.loads(pickle.dumps(f))

    assert [again(p) for p in (0., .123, .5, .77, 1.)] == [f(p) for p in (0., .123, .5, .77, 1.)]


@every_sched
def test_pure(make):
    "Neither a change of the array that was given nor one of the array that came back changes the schedule"
    start, end = np.array(groups), np.ones(3)
    f = make(start, end)

    for a in (start, end, f(0.), f(1.)): a[:] = -1

    assert f(0.).tolist() == groups and -1 not in f(1.)


def test_combined_shares():
    "Each schedule runs over its share; where two meet, the later one's start is taken"
    f = combine_scheds([.25, .5, .25], [SchedLin(0., 1.), SchedLin(5., 7.), SchedCos(3., 2.)])

    close([f(p) for p in (.125, .25, .5, .75, .875, 1.)], [.5, 5., 6., 3., 2.5, 2.])


@pytest.mark.parametrize('pcts', [[0, .5, 0, .5, 0], [0., .5, 1-.7-.3, .5, 1-.7-.3]])
def test_empty_shares_are_passed_over(pcts):
    "A schedule with share 0, exactly or by rounding, is never asked"
    never = SchedNo(9., 9.)
    f = combine_scheds(pcts, [never, SchedLin(0., 1.), never, SchedLin(2., 3.), never])

    close([f(p) for p in (0., .25, .5, .75, 1.)], [0., .5, 2., 2.5, 3.])


@pytest.mark.parametrize('n', [3, 7, 10, 49, 1000])
def test_rounding_misses_no_boundary(n):
    "Each of `n` equal parts begins at `k/n`, and at sums of `1/n`, however these round"
    f = combine_scheds([1/n]*n, [SchedLin(1., 0.)]*n)

    assert [f(k/n) for k in range(n)] == [1.]*n
    assert [f(s) for s in np.cumsum([1/n]*(n-1))] == [1.]*(n-1)
    assert [f(p) for p in (1., np.nextafter(1, 0), np.nextafter(1, 2), sum([1/n]*n))] == [0.]*4


def test_shares_may_be_rounded():
    "Shares that sum to 1 within 1e-6 are enough, and equal ones stay equal"
    f = combine_scheds([.3333333]*3, [SchedLin(k, k+1.) for k in range(3)])

    close([f(p) for p in (1/6, 1/2, 5/6, 1.)], [.5, 1.5, 2.5, 3.])


@pytest.mark.parametrize('pos', [.01, .2, .5, .85])
@pytest.mark.parametrize('pct', [0, .25, .5, 1])
def test_combined_cos(pct, pos):
    "Half a cosine over `pct`, another over the rest; with 0 or 1 there is only one of them"
    form = half_cos(.1, 1., pos/pct) if pos < pct else half_cos(1., 1e-4, (pos-pct)/(1-pct))

    close(combined_cos(pct, .1, 1., 1e-4)(pos), form)


@pytest.mark.parametrize('pct', [.1, .3, .5])
def test_three_phase_cos(pct):
    "There and back over `pct` each, then on to the end"
    f = three_phase_cos(pct, .1, 1., .001)

    close([f(pct/2), f(pct), f(1.5*pct)], [.55, 1., .55])
    if pct < .5: close([f(2*pct), f(pct+.5)], [.1, (.1+.001)/2])


def test_three_phase_cos_of_nothing():
    "With share 0 only the way from start to end is left"
    close([three_phase_cos(0, .1, 1., .001)(p) for p in (0., .3)], [.1, half_cos(.1, .001, .3)])


@pytest.mark.parametrize('mult,starts', [(1, [0, 1/3, 2/3, 1]), (2, [0, 1/7, 3/7, 1]), (.5, [0, 4/7, 6/7, 1])])
def test_cos_restarts(mult, starts):
    "Each cycle goes from start to end, and is `cycle_mult` times as long as the one before"
    f = cos_restarts(2., 1., 3, mult)

    assert [f(p) for p in starts] == [2., 2., 2., 1.]
    close([f(a+.3*(b-a)) for a, b in zip(starts, starts[1:])], [half_cos(2., 1., .3)]*3)


# ---- policies

@every_policy
@pytest.mark.parametrize('iter', [0, 1, 2, 5, 6, 7, 8, 30])
def test_policy_for_each_group(policy, iter):
    "A policy gives a float for a number, an array for a list or an array"
    expected = [policy(iter, base_lr=lr) for lr in groups]

    close(policy(iter, base_lr=groups), expected)
    close(policy(iter, np.array(groups)), expected)
    assert {type(v) for v in expected} == {float}


@pytest.mark.parametrize('case', caffe['examples'], ids=lambda c: f"{c['policy']}-{c['params']}")
def test_caffe(case):
    "The policies give Caffe's learning rates"
    policy = partial(getattr(schedules, f"policy_{case['policy']}"), **case['params'])

    close([policy(int(k)) for k in case['lr']], list(case['lr'].values()), rtol=1e-6)


@pytest.mark.parametrize('iter', [0, 1, 3, 4, 9])
@pytest.mark.parametrize('name,form', [
    ('fixed', lambda i: 1.), ('step', lambda i: .5**math.floor(i/3)), ('exp', lambda i: math.exp(i*math.log(.9))),
    ('inv', lambda i: 1/(1+.1*i)**.75), ('multistep', lambda i: .1**((i >= 2)+(i >= 4))),
    ('poly', lambda i: math.sqrt(max(0, 1-i/8))), ('sigmoid', lambda i: (1+math.tanh(-.25*(i-5)))/2),
    ('warmup', lambda i: .1+.9*min(i, 6)/6),
    ('restarts', lambda i: half_cos(1., 1e-5, i/3 if i < 3 else (i-3)/6 if i < 9 else (i-9)/12))])
def test_policy_closed_form(name, form, iter):
    "Each policy is its closed form"
    close(policies[name](iter, base_lr=1.), form(iter))


@pytest.mark.parametrize('case,expected', [
    (caffe['quirks'][0], {2: 1e-3, 3: 1e-3}), (caffe['quirks'][1], {10: 1e-4, 11: 1e-4, 12: 1e-4})])
def test_caffe_quirks_are_not_ours(case, expected):
    "A step listed twice drops twice at once, and the value depends on the step alone, where Caffe takes several steps"
    policy = partial(policy_multistep, **case['params'])

    close([policy(i) for i in expected], list(expected.values()))
    assert [policy(i) for i in expected] != [pytest.approx(case['lr'][str(i)]) for i in expected]


@pytest.mark.parametrize('power', [0, .5, 1., 2.])
def test_poly_ends(power):
    "From `max_iter` on the value is 0, never negative or complex"
    assert [policy_poly(i, .1, power, 10) for i in (10, 11, 1000)] == [0., 0., 0.]
    assert policy_poly(9, .1, power, 10) > 0


@pytest.mark.parametrize('iter,gamma,expected', [
    (0, 1., 0.), (0, -1., 1.), (10**7, 1., 1.), (10**7, -1., 0.), (10**6-700, 1., math.exp(-700))])
def test_sigmoid_does_not_overflow(iter, gamma, expected):
    "Far from its centre the sigmoid is 0 or 1, and small values are exact"
    close(policy_sigmoid(iter, 1., gamma, 10**6), expected)


def test_warmup_of_no_steps():
    "With no warmup steps the first value is the full one"
    assert policy_warmup(0, .1, 0) == .1


@pytest.mark.parametrize('mult', [1, 1.5, 2, 3, 10])
def test_restarts_hit_every_start(mult):
    "Each cycle begins with `base_lr` exactly, and just before that the value is near `min_lr`"
    starts = np.cumsum([64*mult**i for i in range(6)])  # whole numbers, also for 1.5

    assert [policy_cos_restarts(int(s), .1, 64, mult) for s in starts] == [.1]*6
    assert [policy_cos_restarts(int(s)-1, .1, 64, mult) < 1e-4 for s in starts] == [True]*6


def torch_lrs(make, n):
    "The learning rate at each of `n` steps of a scheduler that starts from .1"
    opt = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], .1)
    sched, lrs = make(opt), []
    for i in range(n):
        lrs.append(opt.param_groups[0]['lr'])
        opt.step()
        if i < n-1: sched.step()
    return lrs


@pytest.mark.parametrize('policy,make', [
    (partial(policy_warmup, warmup_iters=7, start_factor=.25),
     partial(lr_scheduler.LinearLR, start_factor=.25, total_iters=7)),
    (partial(policy_exp, gamma=.97), partial(lr_scheduler.ExponentialLR, gamma=.97)),
    (partial(policy_step, gamma=.7, stepsize=13), partial(lr_scheduler.StepLR, step_size=13, gamma=.7)),
    (partial(policy_multistep, gamma=.3, stepvalue=[5, 17, 17, 60]),
     partial(lr_scheduler.MultiStepLR, milestones=[5, 17, 17, 60], gamma=.3)),
    (partial(policy_poly, power=1.7, max_iter=80), partial(lr_scheduler.PolynomialLR, total_iters=80, power=1.7)),
    (partial(policy_inv, gamma=.03, power=.75), partial(lr_scheduler.LambdaLR, lr_lambda=lambda i: (1+.03*i)**-.75)),
    *((partial(policy_cos_restarts, cycle_len=n, cycle_mult=mult, min_lr=.001),
       partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=n, T_mult=mult, eta_min=.001))
      for n, mult in ((7, 1), (5, 2), (1, 3)))],
    ids=['linear', 'exp', 'step', 'multistep', 'poly', 'lambda', 'restarts', 'restarts-2', 'restarts-3'])
def test_torch_policy(policy, make):
    "A policy gives what torch's scheduler gives at every step"
    close([policy(i, base_lr=.1) for i in range(130)], torch_lrs(make, 130))


@pytest.mark.parametrize('three_phase,sched', [(False, combined_cos), (True, three_phase_cos)])
@pytest.mark.parametrize('n,pct', [(100, .3), (41, .2), (10, .4)])
def test_torch_one_cycle(three_phase, sched, n, pct):
    "One cycle is torch's, whose first phase ends at step `pct*n - 1` of the last step `n-1`"
    make = partial(lr_scheduler.OneCycleLR, max_lr=.5, total_steps=n, pct_start=pct, three_phase=three_phase,
                   cycle_momentum=False, div_factor=10, final_div_factor=100)

    f = sched((pct*n-1)/(n-1), .05, .5, .0005)

    close([f(i/(n-1)) for i in range(n)], torch_lrs(make, n), atol=1e-15)  # torch's cosine rounds at the size of max_lr


@pytest.mark.parametrize('case', [c for c in fastai['functions'] if 'start' in c], ids=lambda c: c['f'])
def test_fastai(case):
    "The schedules give fastai's values"
    f = getattr(schedules, case['f'])(case['start'], case['end'])

    close([f(p) for p in case['pos']], case['value'], rtol=1e-9)


@pytest.mark.parametrize('case,pct,parts,f', [
    (fastai['functions'][5], .25, [SchedCos(.1, 1.), SchedCos(1., 1e-4)], combined_cos(.25, .1, 1., 1e-4)),
    (fastai['functions'][6], .3, [SchedLin(1., 2.), SchedPoly(2., 0., 3)],
     combine_scheds([.3, .7], [SchedLin(1., 2.), SchedPoly(2., 0., 3)]))], ids=['combined_cos', 'combine_scheds'])
def test_fastai_combined(case, pct, parts, f):
    "Combined schedules give fastai's values, which has the position within a part in single precision"
    pct = np.float32(pct)
    rest = np.float32(1)-pct
    def single(pos): return parts[0](float(pos/pct)) if pos < pct else parts[1](float((pos-pct)/rest))

    close([single(np.float32(p)) for p in case['pos']], case['value'], rtol=1e-9)
    close([f(p) for p in case['pos']], case['value'], rtol=1e-6)


@pytest.mark.parametrize('call,message', [
    (lambda: SchedExp(0., 1.), 'SchedExp: `start` is 0.0; it must be above 0'),
    (lambda: SchedExp(1., [.1, -.1]), r'SchedExp: `end` is \[ 0.1 -0.1\]; it must be above 0'),
    (lambda: sched_exp(-1., 1., .5), 'sched_exp: `start` is -1.0'),
    (lambda: SchedPoly(1., 2., 0), 'SchedPoly: `power` is 0; it must be above 0'),
    (lambda: sched_poly(1., 2., -1, .5), 'sched_poly: `power` is -1'),
    (lambda: combine_scheds([.25, .5], [one, one]), r'combine_scheds: `sum\(pcts\)` is 0.75; it must be 1'),
    (lambda: combine_scheds([], []), r'`sum\(pcts\)` is 0.0'),
    (lambda: combine_scheds([.5, .5+2e-6], [one, one]), r'`sum\(pcts\)` is 1.00000'),
    (lambda: combine_scheds([1.5, -.5], [one, one]), r'`pcts` is \[1.5, -0.5\]; it must be 0 or more each'),
    (lambda: combine_scheds([.5, .5], [one]), '2 `pcts` for 1 `scheds`'),
    (lambda: combined_cos(1.2, 0., 1., 0.), 'combined_cos: `pct` is 1.2; it must be 0 to 1'),
    (lambda: three_phase_cos(.6, 0., 1., 0.), 'three_phase_cos: `pct` is 0.6; it must be 0 to 0.5'),
    (lambda: cos_restarts(1., 0., 0), 'cos_restarts: `n_cycles` is 0'),
    (lambda: cos_restarts(1., 0., 2, 0), 'cos_restarts: `cycle_mult` is 0'),
    (lambda: policy_step(0, .1, .5, 0), 'policy_step: `stepsize` is 0; it must be above 0'),
    (lambda: policy_step(0, .1, -.5, 3), 'policy_step: `gamma` is -0.5; it must be 0 or more'),
    (lambda: policy_exp(0, .1, math.nan), 'policy_exp: `gamma` is nan'),
    (lambda: policy_inv(0, .1, -1., .5), 'policy_inv: `gamma` is -1.0'),
    (lambda: policy_multistep(0, .1, -1., [2]), 'policy_multistep: `gamma` is -1.0'),
    (lambda: policy_poly(0, .1, -1., 5), 'policy_poly: `power` is -1.0'),
    (lambda: policy_poly(0, .1, 1., 0), 'policy_poly: `max_iter` is 0'),
    (lambda: policy_warmup(0, .1, -3), 'policy_warmup: `warmup_iters` is -3'),
    (lambda: policy_warmup(0, .1, 3, -.1), 'policy_warmup: `start_factor` is -0.1'),
    (lambda: policy_cos_restarts(0, .1, 0), 'policy_cos_restarts: `cycle_len` is 0'),
    (lambda: policy_cos_restarts(0, .1, 5, .5), 'policy_cos_restarts: `cycle_mult` is 0.5; it must be 1 or more')])
def test_bad_constants(call, message):
    "A constant that makes no sense is an error that names function, argument and value"
    with pytest.raises(ValueError, match=message): call()
