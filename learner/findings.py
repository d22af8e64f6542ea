"""What `learn.doctor` judges by: the limits, in one table with their sources, and what is found beyond them.

Everything here is numbers in, findings out; callbacks/doctor.py measures."""
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

__all__ = ['limits', 'Limit', 'Finding', 'Seen', 'findings']


class Limit(NamedTuple):
    "A number, and where it is from"
    value: Any
    source: str


limits = dict(
    update_ratio=Limit((1e-4, 1e-2), "Stanford CS231n, 'Ratio of weights:updates': somewhere around 1e-3; a tenth of "
                       "that to ten times that, as A. Karpathy's makemore, part 3, draws it"),
    slack=Limit(3., "how much further out the mean over layers may be as a fit starts, when Adam moves each weight by "
                "nearly the whole rate; measured up to 2 in healthy networks at 1e-3, where later on it is below 1"),
    one_layer=Limit(10., "how much further out a single layer may be, since wide ones have small weights; measured up "
                    "to 3 in healthy networks"),
    vanishing=Limit(1e-4, "of the largest layer's; X. Glorot and Y. Bengio (2010), figure 7: healthy layers are within "
                    "a factor of some ten; measured 0.01 and more in healthy networks"),
    exploding=Limit(1e3, "norm of the whole gradient; R. Pascanu et al. (2013) clip at some ten times its usual size; "
                    "measured up to 5 in healthy networks"),
    dead=Limit(.4, "share of a layer's units; CS231n, 'Commonly used activation functions', tells of 40 % with rates "
               "set too high; measured up to 0.1 in healthy networks, 0.34 behind an untrained frozen body"),
    scale=Limit(10., "of mean and deviation; Y. LeCun et al., 'Efficient BackProp' (1998), section 4.3: 0 and 1"),
    small=Limit(.01, "of the deviation; the same"),
    waiting=Limit(.2, "share of the time; TensorFlow's profiler calls a program that waits so long highly input-bound"),
    fall=Limit(1e-3, "share by which the loss must fall on one batch that is repeated 30 times; A. Karpathy, 'A Recipe "
               "for Training Neural Networks' (2019): overfit one batch; measured 0.08 and more in healthy networks"),
)


class Finding(NamedTuple):
    "One thing that may be wrong"
    finding: str   # what it is
    where: str     # in which layers or parameters
    measured: str  # with its unit
    usual: str     # what it should be
    advice: str    # what to try


@dataclass
class Seen:
    "What a look at a fit has measured; layers by name, with their weights of two or more dimensions"
    n_batches: int = 0
    gradients: dict[str, float] = field(default_factory=dict)  # root mean square, median over the later batches
    ratios: dict[str, float] = field(default_factory=dict)     # of update to weight, likewise
    norm: float = 0.                                           # of the whole gradient, likewise
    dead: dict[str, float] = field(default_factory=dict)       # share of units whose weights never had a gradient
    no_grad: Sequence[str] = ()                                # parameters that never had one other than 0
    left_out: Sequence[str] = ()                               # parameters that the optimizer does not have
    bad_loss: int|None = None                                  # first batch whose loss was no finite number
    single: Sequence[str] = ()                                 # batch normalisation that got a batch of one item
    last_of_one: bool = False                                  # will an epoch's last batch have one item?
    has_batchnorm: bool = False
    output: str = ''                                           # why the outputs cannot match the loss
    output_advice: str = ''
    inputs: dict[str, tuple[float, float]] = field(default_factory=dict)   # mean and deviation of each
    columns: dict[str, tuple[float, float]] = field(default_factory=dict)  # likewise of each column of a matrix
    in_eval: Sequence[str] = ()                                # modules left in eval
    waiting: float = 0.                                        # share of the time in which the next batch is waited for
    repeated: Sequence[float] = ()                             # losses on one batch, trained on again and again


def findings(
    seen: Seen,
) -> list[Finding]:  # the gravest first
    "What is beyond the limits"
    return [f for judge in (_loss, _no_gradient, _modes, _batchnorm, _output, _inputs, _gradients, _dead, _updates,
                            _repeated, _waiting) for f in judge(seen)]


def _names(names) -> str:
    names = [n or 'the model' for n in names]
    return ', '.join(names[:2]) + (f' and {len(names)-2} more' if len(names) > 2 else '')


def _loss(seen):
    if seen.bad_loss is not None: yield Finding(
        'loss is not finite', f'batch {seen.bad_loss}', 'NaN or infinite', 'finite',
        'a lower lr; look for 0 in log, sqrt, /')


def _no_gradient(seen):
    if seen.no_grad: yield Finding(
        'no gradient', _names(seen.no_grad), f'none or 0 in {seen.n_batches} batches', 'not 0',
        'use it in forward, or requires_grad_(False)')
    if seen.left_out: yield Finding(
        'not in the optimizer', _names(seen.left_out), f'{len(seen.left_out)} parameters', '0',
        'learn.create_opt(), or look at the splitter')


def _modes(seen):
    if seen.in_eval: yield Finding('left in eval', _names(seen.in_eval), f'{len(seen.in_eval)} modules', '0',
                                   'learn.model.train() before the fit')


def _batchnorm(seen):
    advice = 'larger batches, GroupNorm or LayerNorm'
    if seen.single: yield Finding('batch norm of one item', _names(seen.single), 'batch size 1', '2 or more', advice)
    elif seen.last_of_one and seen.has_batchnorm: yield Finding(
        'batch norm of one item', "each epoch's last batch", 'batch size 1', '2 or more', 'drop_last=True')


def _output(seen):
    if seen.output: yield Finding('outputs do not fit the loss', 'the last layer', seen.output,
                                  'what the loss expects', seen.output_advice)


def _inputs(seen):
    big, small = limits['scale'].value, limits['small'].value
    odd, columns = ({k: v for k, v in values.items() if not max(abs(v[0]), v[1]) <= big}
                    for values in (seen.inputs, seen.columns))
    if columns and 2*len(columns) < len(seen.columns) or not odd: odd = columns
    odd = odd or {k: v for k, v in seen.inputs.items() if 0 < v[1] < small}
    if odd: yield Finding(
        'inputs not normalised', _names(odd), 'mean {:.3g}, std {:.3g}'.format(*next(iter(odd.values()))),
        'mean 0, std 1', 'subtract the mean, divide by the std')


def _explodes(seen): return seen.bad_loss is None and not seen.norm <= limits['exploding'].value


def _vanishing(seen):  # layers; what has no gradient at all is told already
    top = max(seen.gradients.values(), default=0.)
    return [] if _explodes(seen) else [k for k, g in seen.gradients.items() if 0 < g < limits['vanishing'].value*top]


def _gradients(seen):
    if _explodes(seen):
        largest = sorted(seen.gradients, key=lambda k: -seen.gradients[k])
        yield Finding('exploding gradients', _names(largest[:1]), f'norm {seen.norm:.1e}',
                      f"below {limits['exploding'].value:.0e}", 'apply_init, scaled targets, GradientClip')
    if layers := _vanishing(seen):
        share = min(seen.gradients[k] for k in layers)/max(seen.gradients.values())
        yield Finding('vanishing gradients', _names(layers), f"{share:.0e} of the largest layer's",
                      f"above {limits['vanishing'].value:.0e}", 'normalisation, shortcuts, ReLU, apply_init')


def _dead(seen):
    dead = {k: share for k, share in seen.dead.items() if limits['dead'].value < share < 1}  # 1: no gradient at all
    if dead: yield Finding('dead units', _names(dead), f'{max(dead.values()):.0%} of the units',
                           f"at most {limits['dead'].value:.0%}", 'a lower lr, LeakyReLU, apply_init')


def _ratios(seen) -> dict[str, float]:  # by layer, where nothing graver is told of it
    if seen.bad_loss is not None or _explodes(seen): return {}
    vanishing = _vanishing(seen)
    return {k: r for k, r in seen.ratios.items() if k not in vanishing and seen.gradients.get(k)}


def _mean_ratio(seen) -> float:  # the geometric mean over layers; NaN if there is none
    with np.errstate(divide='ignore'): return float(np.exp(np.mean(np.log([*_ratios(seen).values()] or [math.nan]))))


def _updates(seen):
    (low, high), slack, far = (limits[k].value for k in ('update_ratio', 'slack', 'one_layer'))
    ratios, mean = _ratios(seen), _mean_ratio(seen)
    for name, most, single, worst, advice in (
            ('updates too large', mean > high*slack, [k for k, r in ratios.items() if r > high*far], max, 'a lower lr'),
            ('updates too small', mean < low/slack, [k for k, r in ratios.items() if r < low/far], min, 'a higher lr')):
        measured = mean if most else worst([ratios[k] for k in single], default=0.)
        if most or single: yield Finding(
            name, 'most layers' if most else _names(single), f'{measured:.1e} of the weights',
            f'{low:.0e} to {high:.0e}', advice if most else f'{advice} there, by param_opts')


def _repeated(seen):
    if len(seen.repeated) < 2 or seen.bad_loss is not None: return
    first, last = seen.repeated[0], seen.repeated[-1]
    fall = (first-last)/abs(first) if first else first-last
    if fall >= limits['fall'].value or fall >= 0 and _mean_ratio(seen) < limits['update_ratio'].value[0]: return
    yield Finding('loss does not fall', f'one batch, {len(seen.repeated)} times', f'{first:.4g} to {last:.4g}',
                  'falls', 'the loss, the targets, a lower lr')


def _waiting(seen):
    if seen.waiting > limits['waiting'].value: yield Finding(
        'slow data', 'the training loader', f'{seen.waiting:.0%} of the time', f"at most {limits['waiting'].value:.0%}",
        'num_workers, from_tensors, less work an item')
