"""Schedules as pure functions: of a position (0 to 1), and policies as functions of the step.

The callback that follows them is callbacks/schedule.py. A value may be a number, or a sequence with one for each
parameter group: then the result is an array `(n_groups,)`. Functions that return a function return one that pickles.
A position outside 0 to 1 is the caller's to clamp. The first step is 0, and
`partial(policy_step, base_lr=.1, gamma=.5, stepsize=3)` is a function of the step alone.
"""
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

__all__ = ['sched_lin', 'sched_cos', 'sched_no', 'sched_exp', 'sched_poly', 'SchedLin', 'SchedCos', 'SchedNo',
           'SchedExp', 'SchedPoly', 'combine_scheds', 'combined_cos', 'three_phase_cos', 'cos_restarts', 'policy_fixed',
           'policy_step', 'policy_exp', 'policy_inv', 'policy_multistep', 'policy_poly', 'policy_sigmoid',
           'policy_warmup', 'policy_cos_restarts']

Value = float|Sequence[float]|np.ndarray
Sched = Callable[[float], Any]

hair = 1e-12  # positions closer than this are the same: `i/(n-1)` and a sum of shares round differently


def values(v: Any) -> Any:
    "A number as a float, a sequence as an array of floats that nobody else holds"
    return float(v) if isinstance(v, (float, int)) else np.array(v, dtype=float)[()]  # `[()]`: no array without axes


def require(ok: bool, who: str, name: str, value: Any, rule: str) -> None:
    "Refuse an argument that is not `ok`"
    if not ok: raise ValueError(f"{who}: `{name}` is {value}; it must be {rule}")


def above_0(who: str, name: str, v: Any) -> Any:
    "Its `values`, all of which must be above 0"
    v = values(v)
    require((v if isinstance(v, float) else v.min()) > 0, who, name, v, 'above 0')
    return v


def mix(start: Any, end: Any, w: float) -> Any:
    "From `start` (`w=0`) to `end` (`w=1`), exact at both, which `start + (end-start)*w` is not"
    return start*(1-w) + end*w


def sched_lin(
    start: Value,  # at position 0
    end: Value,    # at position 1
    pos: float,    # 0 to 1
) -> Any:          # a float, or an array `(n_groups,)`
    "A straight line from `start` (`pos=0`) to `end` (`pos=1`)"
    return mix(values(start), values(end), pos)


def sched_cos(
    start: Value,  # at position 0
    end: Value,    # at position 1
    pos: float,    # 0 to 1
) -> Any:          # a float, or an array `(n_groups,)`
    "Half a cosine from `start` (`pos=0`) to `end` (`pos=1`), flat at both ends"
    return mix(values(start), values(end), (1-math.cos(math.pi*pos))/2)


def sched_no(
    start: Value,  # at every position
    end: Value,    # not used
    pos: float,    # not used
) -> Any:          # a float, or an array `(n_groups,)`
    "`start` all along"
    return values(start)


def sched_exp(
    start: Value,  # at position 0, above 0
    end: Value,    # at position 1, above 0
    pos: float,    # 0 to 1
) -> Any:          # a float, or an array `(n_groups,)`
    """An exponential from `start` (`pos=0`) to `end` (`pos=1`): equal steps change it by equal factors

    Raises: ValueError if `start` or `end` is not above 0."""
    return above_0('sched_exp', 'start', start)**(1-pos) * above_0('sched_exp', 'end', end)**pos


def sched_poly(
    start: Value,  # at position 0
    end: Value,    # at position 1
    power: float,  # above 0; 1 is a straight line, more stays longer near `start`
    pos: float,    # 0 to 1
) -> Any:          # a float, or an array `(n_groups,)`
    """From `start` (`pos=0`) to `end` (`pos=1`) along a power of the position

    Raises: ValueError if `power` is not above 0."""
    require(power > 0, 'sched_poly', 'power', power, 'above 0')
    return mix(values(start), values(end), pos**power)


def SchedLin(
    start: Value,  # at position 0
    end: Value,    # at position 1
) -> Sched:        # a function of the position
    "`sched_lin` as a function of `pos` alone"
    return partial(sched_lin, values(start), values(end))  # a partial pickles, a closure does not


def SchedCos(
    start: Value,  # at position 0
    end: Value,    # at position 1
) -> Sched:        # a function of the position
    "`sched_cos` as a function of `pos` alone"
    return partial(sched_cos, values(start), values(end))


def SchedNo(
    start: Value,  # at every position
    end: Value,    # not used
) -> Sched:        # a function of the position
    "`sched_no` as a function of `pos` alone"
    return partial(sched_no, values(start), end)


def SchedExp(
    start: Value,  # at position 0, above 0
    end: Value,    # at position 1, above 0
) -> Sched:        # a function of the position
    """`sched_exp` as a function of `pos` alone

    Raises: ValueError, at once, if `start` or `end` is not above 0."""
    return partial(sched_exp, above_0('SchedExp', 'start', start), above_0('SchedExp', 'end', end))


def SchedPoly(
    start: Value,  # at position 0
    end: Value,    # at position 1
    power: float,  # above 0; 1 is a straight line, more stays longer near `start`
) -> Sched:        # a function of the position
    """`sched_poly` as a function of `pos` alone

    Raises: ValueError, at once, if `power` is not above 0."""
    require(power > 0, 'SchedPoly', 'power', power, 'above 0')
    return partial(sched_poly, values(start), values(end), power)


def follow(inner: list[float], bounds: list[float], scheds: list[Sched], pos: float) -> Any:
    "The schedule that `pos` falls to, at its own position; `inner` are the bounds between them less a hair"
    i = bisect_right(inner, pos)
    start, end = bounds[i], bounds[i+1]
    if abs(pos-start) <= hair: return scheds[i](0.)
    if abs(pos-end) <= hair: return scheds[i](1.)  # the last one: at other bounds the next one has begun
    return scheds[i]((pos-start)/(end-start))


def combine_scheds(
    pcts: Sequence[float],    # share of each schedule, 0 to 1; together 1
    scheds: Sequence[Sched],  # a function of a position, 0 to 1, for each share
) -> Sched:                   # a function of the position
    """The schedules one after another, each over its share of the positions; a share of 0 is passed over

    Where two meet, the later one's start is taken.
    Raises: ValueError if shares and schedules differ in number, a share is negative, or their sum is not 1."""
    pcts, scheds = list(map(float, pcts)), list(scheds)
    if len(pcts) != len(scheds):
        raise ValueError(f"combine_scheds: {len(pcts)} `pcts` for {len(scheds)} `scheds`; give one share for each")
    require(all(p >= 0 for p in pcts), 'combine_scheds', 'pcts', pcts, '0 or more each')
    total = math.fsum(pcts)
    require(abs(total-1) <= 1e-6, 'combine_scheds', 'sum(pcts)', total, '1')
    kept = [i for i, p in enumerate(pcts) if p > hair]  # `1-.1-.9` is meant as 0
    inner = [c/total for c in accumulate(pcts[i] for i in kept)][:-1]
    return partial(follow, [b-hair for b in inner], [0., *inner, 1.], [scheds[i] for i in kept])


def combined_cos(
    pct: float,     # share of the first half cosine, 0 to 1
    start: Value,   # at position 0
    middle: Value,  # at position `pct`
    end: Value,     # at position 1, if `pct` is less than 1
) -> Sched:         # a function of the position
    """Half a cosine from `start` to `middle`, then one to `end`

    Raises: ValueError if `pct` is not 0 to 1."""
    require(0 <= pct <= 1, 'combined_cos', 'pct', pct, '0 to 1')
    return combine_scheds([pct, 1-pct], [SchedCos(start, middle), SchedCos(middle, end)])


def three_phase_cos(
    pct: float,     # share of the first half cosine and of the second, 0 to 0.5
    start: Value,   # at position 0, and again at position `2*pct`
    middle: Value,  # at position `pct`
    end: Value,     # at position 1, if `pct` is less than 0.5
) -> Sched:         # a function of the position
    """Half a cosine from `start` to `middle`, one back to `start`, then one to `end`

    Raises: ValueError if `pct` is not 0 to 0.5.
    Source: `torch.optim.lr_scheduler.OneCycleLR` with `three_phase=True`."""
    require(0 <= pct <= .5, 'three_phase_cos', 'pct', pct, '0 to 0.5: two phases take that share each')
    return combine_scheds([pct, pct, 1-2*pct], [SchedCos(start, middle), SchedCos(middle, start), SchedCos(start, end)])


def cos_restarts(
    start: Value,           # at the start of each cycle
    end: Value,             # at the end of each cycle
    n_cycles: int,          # 1 or more
    cycle_mult: float = 1,  # above 0; how many times as long as the one before each cycle is
) -> Sched:                 # a function of the position
    """Half a cosine from `start` to `end`, again and again

    Raises: ValueError if `n_cycles` is less than 1, or `cycle_mult` is not above 0.
    Source: SGDR, https://arxiv.org/abs/1608.03983"""
    require(n_cycles >= 1 and n_cycles == int(n_cycles), 'cos_restarts', 'n_cycles', n_cycles, 'whole, 1 or more')
    require(cycle_mult > 0, 'cos_restarts', 'cycle_mult', cycle_mult, 'above 0')
    lengths = [cycle_mult**i for i in range(int(n_cycles))]
    return combine_scheds([n/sum(lengths) for n in lengths], [SchedCos(start, end)]*len(lengths))


def policy_fixed(
    iter: int,       # step, the first is 0; not used
    base_lr: Value,  # at every step
) -> Any:            # a float, or an array `(n_groups,)`
    "`base_lr` all along"
    return values(base_lr)


def policy_step(
    iter: int,        # step, the first is 0
    base_lr: Value,   # at step 0
    gamma: float,     # factor of each drop, 0 or more
    stepsize: float,  # steps from a drop to the next, above 0
) -> Any:             # a float, or an array `(n_groups,)`
    """`base_lr * gamma**floor(iter/stepsize)`

    Raises: ValueError if `gamma` is negative, or `stepsize` is not above 0.
    Source: Caffe's policy "step"."""
    require(gamma >= 0, 'policy_step', 'gamma', gamma, '0 or more')
    require(stepsize > 0, 'policy_step', 'stepsize', stepsize, 'above 0')
    return values(base_lr) * gamma**(iter//stepsize)


def policy_exp(
    iter: int,       # step, the first is 0
    base_lr: Value,  # at step 0
    gamma: float,    # factor of each step, 0 or more
) -> Any:            # a float, or an array `(n_groups,)`
    """`base_lr * gamma**iter`

    Raises: ValueError if `gamma` is negative.
    Source: Caffe's policy "exp"."""
    require(gamma >= 0, 'policy_exp', 'gamma', gamma, '0 or more')
    return values(base_lr) * gamma**iter


def policy_inv(
    iter: int,       # step, the first is 0
    base_lr: Value,  # at step 0
    gamma: float,    # how fast it falls, 0 or more, per step
    power: float,    # what power of `1 + gamma*iter` it is divided by
) -> Any:            # a float, or an array `(n_groups,)`
    """`base_lr * (1 + gamma*iter)**-power`

    Raises: ValueError if `gamma` is negative.
    Source: Caffe's policy "inv"."""
    require(gamma >= 0, 'policy_inv', 'gamma', gamma, '0 or more')
    return values(base_lr) * (1+gamma*iter)**-power


def policy_multistep(
    iter: int,                  # step, the first is 0
    base_lr: Value,             # before the first drop
    gamma: float,               # factor of each drop, 0 or more
    stepvalue: Sequence[float], # the steps from which on there is one drop more; one that is there twice drops twice
) -> Any:                       # a float, or an array `(n_groups,)`
    """`base_lr * gamma**k`, where `k` of the `stepvalue` are at most `iter`

    Caffe counts at most one drop a step: there a step listed twice drops at that step and at the next, and training
    that starts at a later step catches up drop by drop. Neither is done here: the value depends on the step alone.
    Raises: ValueError if `gamma` is negative.
    Source: Caffe's policy "multistep"."""
    require(gamma >= 0, 'policy_multistep', 'gamma', gamma, '0 or more')
    return values(base_lr) * gamma**sum([s <= iter for s in stepvalue])


def policy_poly(
    iter: int,        # step, the first is 0
    base_lr: Value,   # at step 0
    power: float,     # 0 or more; 1 is a straight line
    max_iter: float,  # the first step at which it is 0, above 0
) -> Any:             # a float, or an array `(n_groups,)`
    """`base_lr * (1 - iter/max_iter)**power`, and 0 from step `max_iter` on

    Raises: ValueError if `power` is negative, or `max_iter` is not above 0.
    Source: Caffe's policy "poly"."""
    require(power >= 0, 'policy_poly', 'power', power, '0 or more')
    require(max_iter > 0, 'policy_poly', 'max_iter', max_iter, 'above 0')
    return values(base_lr) * ((1-iter/max_iter)**power if iter < max_iter else 0.)


def policy_sigmoid(
    iter: int,        # step, the first is 0
    base_lr: Value,   # what it rises to, or falls from
    gamma: float,     # steepness per step; it falls if negative
    stepsize: float,  # the step at which it is `base_lr/2`
) -> Any:             # a float, or an array `(n_groups,)`
    """`base_lr / (1 + exp(-gamma*(iter-stepsize)))`

    Source: Caffe's policy "sigmoid"."""
    x = gamma*(iter-stepsize)
    small = math.exp(-abs(x))  # `exp(-x)` overflows for a very negative `x`
    return values(base_lr) * (1. if x >= 0 else small)/(1+small)


def policy_warmup(
    iter: int,                 # step, the first is 0
    base_lr: Value,            # from step `warmup_iters` on
    warmup_iters: float,       # 0 or more; 0 is no warmup
    start_factor: float = 0.,  # share of `base_lr` at step 0, 0 or more
) -> Any:                      # a float, or an array `(n_groups,)`
    """A straight line from `start_factor*base_lr` to `base_lr`

    Raises: ValueError if `warmup_iters` or `start_factor` is negative.
    Source: `torch.optim.lr_scheduler.LinearLR`."""
    require(warmup_iters >= 0, 'policy_warmup', 'warmup_iters', warmup_iters, '0 or more')
    require(start_factor >= 0, 'policy_warmup', 'start_factor', start_factor, '0 or more')
    return values(base_lr) * (mix(start_factor, 1., iter/warmup_iters) if iter < warmup_iters else 1.)


def policy_cos_restarts(
    iter: int,              # step, the first is 0
    base_lr: Value,         # at the start of each cycle
    cycle_len: float,       # steps of the first cycle, above 0
    cycle_mult: float = 1,  # 1 or more; how many times as long as the one before each cycle is
    min_lr: Value = 0.,     # what each cycle falls to: its end is the next one's start, so it is not quite reached
) -> Any:                   # a float, or an array `(n_groups,)`
    """Half a cosine from `base_lr` to `min_lr`, again and again, without an end

    Raises: ValueError if `cycle_len` is not above 0, or `cycle_mult` is less than 1.
    Source: `torch.optim.lr_scheduler.CosineAnnealingWarmRestarts`; SGDR, https://arxiv.org/abs/1608.03983"""
    require(cycle_len > 0, 'policy_cos_restarts', 'cycle_len', cycle_len, 'above 0')
    require(cycle_mult >= 1, 'policy_cos_restarts', 'cycle_mult', cycle_mult, '1 or more')
    if cycle_mult == 1: return sched_cos(base_lr, min_lr, iter%cycle_len/cycle_len)
    def start(n): return cycle_len*((cycle_mult**n-1)/(cycle_mult-1))
    n = int(math.log(1+iter/cycle_len*(cycle_mult-1), cycle_mult)+hair)  # `log(243, 3)` is just below 5
    return sched_cos(base_lr, min_lr, (iter-start(n))/(cycle_len*cycle_mult**n))
