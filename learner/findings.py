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
    slack=Limit(10., "how much larger than that the mean over layers may be as a fit starts, when Adam moves each "
                "weight by nearly the whole rate; measured up to 7 in fits that go well, and below 1 later on"),
    one_layer=Limit(100., "how much further out a single layer may be, since wide ones have small weights; measured up "
                    "to 11 in fits that go well"),
    first_step=Limit(1., "of the weights: a step as large as they are leaves nothing of how they started"),
    vanishing=Limit(1e-4, "of the largest layer's; X. Glorot and Y. Bengio (2010), figure 7: healthy layers are within "
                    "a factor of some ten; measured 0.03 and more in healthy networks"),
    exploding=Limit(100., "norm of a gradient times norm of its weights over the loss: the share by which the loss "
                    "changes where the weights change by theirs; measured up to 14 in healthy networks, 6000 in twenty "
                    "tanh layers that start too large"),
    outputs=Limit(100., "deviation of scores, whose exponential no float32 holds; or of values, beside that of the "
                  "targets; measured up to 2 in healthy networks"),
    dead=Limit(.4, "share of a layer's units; CS231n, 'Commonly used activation functions', tells of 40 % with rates "
               "set too high; measured up to 0.1 in healthy networks, 0.34 behind an untrained frozen body"),
    scale=Limit(10., "of mean and deviation; Y. LeCun et al., 'Efficient BackProp' (1998), section 4.3: 0 and 1"),
    small=Limit(.01, "of the deviation; the same"),
    waiting=Limit(.2, "share of the time; TensorFlow's profiler calls a program that waits so long highly input-bound"),
    fall=Limit(1e-3, "share by which the loss must fall on one batch that is repeated 30 times; A. Karpathy, 'A Recipe "
               "for Training Neural Networks' (2019): overfit one batch; measured 0.02 and more in healthy networks"),
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
    first: dict[str, float] = field(default_factory=dict)      # the same of the first step
    n_steps: int = 0                                           # of the optimizer
    loss: float = math.nan                                     # of the first batch
    pull: dict[str, float] = field(default_factory=dict)       # by parameter, as limits['exploding'] says; first step
    spread: float = 0.                                         # of the outputs, as limits['outputs'] says; first batch
    dead: dict[str, float] = field(default_factory=dict)       # share of units whose weights never had a gradient
    no_grad: Sequence[str] = ()                                # parameters that never had one
    zero_grad: Sequence[str] = ()                              # those that had one, which was always 0
    hidden: Sequence[str] = ()                                 # where parameters are that torch does not see
    left_out: Sequence[str] = ()                               # parameters that the optimizer does not have
    bad_loss: int|None = None                                  # first batch whose loss was no finite number
    single: Sequence[str] = ()                                 # batch normalisation that got a batch of one item
    last_of_one: bool = False                                  # will an epoch's last batch have one item?
    has_batchnorm: bool = False
    output: str = ''                                           # why the outputs cannot match the loss
    output_advice: str = ''
    targets: tuple[float, float] = (0., 1.)                    # mean and deviation, where they are values
    n_workers: int = 0                                         # of the training loader
    alike: bool = False                                        # have all items of each batch the same class?
    inputs: dict[str, tuple[float, float]] = field(default_factory=dict)   # mean and deviation of each
    columns: dict[str, tuple[float, float]] = field(default_factory=dict)  # likewise of each column of a matrix
    in_eval: Sequence[str] = ()                                # modules left in eval
    waiting: float = 0.                                        # share of the time in which the next batch is waited for
    repeated: Sequence[float] = ()                             # losses on one batch, trained on again and again


def findings(
    seen: Seen,
) -> list[Finding]:  # the gravest first
    "What is beyond the limits"
    judges = (_loss, _no_gradient, _modes, _batchnorm, _output, _inputs, _targets, _gradients, _dead, _updates,
              _repeated, _waiting)
    return [f for judge in judges for f in judge(seen)]


def _names(names) -> str:
    names = [n or 'the model' for n in names]
    if sum(map(len, names[:2])) > 36: names = [n if len(n) <= 18 else f'{n[:6]}…{n[-11:]}' for n in names]
    return ', '.join(names[:2]) + (f' and {len(names)-2} more' if len(names) > 2 else '')


def _count(names, noun) -> str: return f'{len(names)} {noun}{"s"*(len(names) != 1)}'


def _loss(seen):
    if seen.n_batches and not seen.n_steps and seen.bad_loss is None and not seen.single: yield Finding(
        'no step', 'the optimizer', f'0 in {seen.n_batches} batches', '1 or more', 'n_batches, if gradients add up')
    if seen.bad_loss is not None and not [*_inputs(seen), *_targets(seen)]: yield Finding(
        'loss is not finite', f'batch {seen.bad_loss}', 'NaN or infinite', 'finite',
        'a lower lr; look for 0 in log, sqrt, /')


def _no_gradient(seen):
    if seen.no_grad: yield Finding(
        'no gradient', _names(seen.no_grad), f'none in {seen.n_batches} batches', 'one in each',
        'use it in forward, or requires_grad_(False)')
    if seen.zero_grad and seen.loss: yield Finding(
        'gradient is 0', _names(seen.zero_grad), f'0 in {seen.n_batches} batches', 'not 0',
        'dead ReLUs, zero weights? apply_init, a lower lr')
    if seen.hidden: yield Finding(
        'not registered', _names(seen.hidden), 'in a list, tuple or dict', 'in a module',
        'nn.ModuleList …, or requires_grad_(False)')
    if seen.left_out: yield Finding(
        'not in the optimizer', _names(seen.left_out), _count(seen.left_out, 'parameter'), 'none',
        'learn.create_opt(), or look at the splitter')


def _modes(seen):
    if seen.in_eval: yield Finding('left in eval', _names(seen.in_eval), _count(seen.in_eval, 'module'), 'none',
                                   'learn.model.train(), unless it is meant')


def _batchnorm(seen):
    advice = 'larger batches, GroupNorm or LayerNorm'
    if seen.single: yield Finding('batch norm of one item', _names(seen.single), 'batch size 1', '2 or more', advice)
    elif seen.last_of_one and seen.has_batchnorm: yield Finding(
        'batch norm of one item', "each epoch's last batch", 'batch size 1', '2 or more', 'drop_last=True')


def _output(seen):
    if seen.output: yield Finding('outputs do not fit the loss', 'the last layer', seen.output,
                                  'what the loss expects', seen.output_advice)


def _not_finite(stats) -> list[str]: return [k for k, v in stats.items() if not math.isfinite(sum(v))]


def _inputs(seen):
    big, small = limits['scale'].value, limits['small'].value
    if names := _not_finite(seen.columns) or _not_finite(seen.inputs):
        yield Finding('inputs are not finite', _names(names), 'NaN or infinite', 'finite', 'leave out, or fill them')
        return
    odd, columns = (sorted((k for k, v in values.items() if max(abs(v[0]), v[1]) > big),
                           key=lambda k: -max(map(abs, values[k]))) for values in (seen.inputs, seen.columns))
    if columns and 2*len(columns) < len(seen.columns) or not odd: odd = columns  # the worst first
    odd = odd or [k for k, v in seen.inputs.items() if 0 < v[1] < small]
    if odd: yield Finding(
        'inputs not normalised', odd[0] + f' and {len(odd)-1} more'*(len(odd) > 1),
        'mean {:.3g}, std {:.3g}'.format(*(seen.inputs | seen.columns)[odd[0]]), 'mean 0, std 1',
        'subtract the mean, divide by the std')


def _targets(seen):
    mean, std = seen.targets
    if _not_finite(dict(targets=seen.targets)): yield Finding(
        'targets are not finite', 'the targets', 'NaN or infinite', 'finite', 'leave out, or fill them')
    if max(abs(mean), std) > limits['scale'].value: yield Finding(
        'targets not normalised', 'the targets', f'mean {mean:.3g}, std {std:.3g}', 'mean 0, std 1',
        'subtract the mean, divide by the std')
    if seen.alike: yield Finding('no variety in a batch', 'the targets', 'one class in each batch', 'several',
                                 'shuffle=True')


def _exploding(seen): return [k for k, v in seen.pull.items() if not v <= limits['exploding'].value]


def _vanishing(seen):  # layers; what has no gradient at all is told already
    top = max(seen.gradients.values(), default=0.)
    return [] if _exploding(seen) else [k for k, g in seen.gradients.items() if 0 < g < limits['vanishing'].value*top]


def _gradients(seen):
    usual = limits['outputs'].value
    if seen.spread > usual: yield Finding('exploding outputs', 'the last layer', f'std {seen.spread:.1e}',
                                          f'below {usual:g}', 'smaller initial weights, apply_init, normalisation')
    elif seen.bad_loss is None and (names := _exploding(seen)):
        worst = max(seen.pull[k] for k in names)
        yield Finding('exploding gradients', _names(names), f'times weights, over loss: {worst:.1e}',
                      f"below {limits['exploding'].value:g}", 'smaller initial weights, apply_init, GradientClip')
    if layers := _vanishing(seen):
        share = min(seen.gradients[k] for k in layers)/max(seen.gradients.values())
        yield Finding('vanishing gradients', _names(layers), f"{share:.0e} of the largest layer's",
                      f"above {limits['vanishing'].value:.0e}", 'normalisation, shortcuts, ReLU, apply_init')


def _dead(seen):
    dead = {k: share for k, share in seen.dead.items() if limits['dead'].value < share < 1}  # 1: no gradient at all
    if dead: yield Finding('dead units', _names(dead), f'{max(dead.values()):.0%} of the units',
                           f"at most {limits['dead'].value:.0%}", 'a lower lr, LeakyReLU, apply_init')


def _ratios(seen) -> dict[str, float]:  # by layer, where nothing graver is told of it
    if seen.bad_loss is not None: return {}
    vanishing = _vanishing(seen)
    return {k: r for k, r in seen.ratios.items() if k not in vanishing and seen.gradients.get(k)}


def _mean(ratios) -> float:  # geometric, over layers; NaN if there is none
    with np.errstate(divide='ignore'): return float(np.exp(np.mean(np.log([*ratios] or [math.nan]))))


def _updates(seen):
    (low, high), slack, far = (limits[k].value for k in ('update_ratio', 'slack', 'one_layer'))
    whole = limits['first_step'].value
    ratios = _ratios(seen)
    first = {k: seen.first.get(k, 0.) for k in ratios}
    mean, start = _mean(ratios.values()), _mean(first.values())
    large = [k for k, r in ratios.items() if r > high*far or first[k] > whole]
    small = [k for k, r in ratios.items() if r < low/far]
    usual = f'{low:.0e} to {high:.0e}'
    if (most := mean > high*slack or start > whole) or large:
        now, began = (mean, start) if most else (max(values[k] for k in large) for values in (ratios, first))
        then = f', the first {began:.1e}' if began > whole else ''
        yield Finding('updates too large', 'most layers' if most else _names(large), f'{now:.1e} of the weights{then}',
                      usual, f"a lower lr{' there, by param_opts'*(not most)}")
    if (most := mean < low) or small: yield Finding(
        'updates too small', 'most layers' if most else _names(small),
        f'{mean if most else min(ratios[k] for k in small):.1e} of the weights', usual,
        f"a higher lr{' there, by param_opts'*(not most)}")


def _repeated(seen):
    if len(seen.repeated) < 2 or seen.bad_loss is not None or not seen.repeated[0]: return
    first, last = seen.repeated[0], seen.repeated[-1]
    fall = (first-last)/abs(first) if first else first-last
    too_small = _mean(_ratios(seen).values()) < limits['update_ratio'].value[0]  # is told already
    if fall >= limits['fall'].value or fall >= 0 and too_small: return
    yield Finding('loss does not fall', f'one batch, {len(seen.repeated)} times', f'{first:.4g} to {last:.4g}',
                  'falls', f"the loss, the targets, a {'higher' if fall > 0 else 'lower'} lr")


def _waiting(seen):
    if seen.waiting > limits['waiting'].value: yield Finding(
        'slow data', 'the training loader', f'{seen.waiting:.0%} of the time', f"at most {limits['waiting'].value:.0%}",
        f"{'more '*(seen.n_workers > 0)}num_workers, from_tensors, less per item")
