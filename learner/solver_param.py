"""Caffe's SolverParameter: its fields and their defaults, read from solver texts, and what they mean here."""
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from .optim import SGD, Adadelta, Adagrad, Adam, RMSProp
from .prototxt import Word, parse_prototxt
from .schedules import (policy_exp, policy_fixed, policy_inv, policy_multistep, policy_poly, policy_sigmoid,
                        policy_step)
from .utils import check_number, is_near, largest

__all__ = ['SolverParam', 'without_effect']

# of other parts of Caffe: the Learner has model, data and device, and there is one kind of file
without_effect = ('net', 'net_param', 'train_net', 'train_net_param', 'test_net', 'test_net_param', 'train_state',
                  'test_state', 'snapshot_diff', 'snapshot_format', 'solver_mode', 'device_id', 'layer_wise_reduce')
lists = {'test_iter', 'stepvalue', 'weights'}
shares = 'momentum', 'momentum2', 'rms_decay'  # of the past
limits = {  # the least value, and is it a whole number?
    **dict.fromkeys(('test_interval', 'display', 'max_iter', 'snapshot', 'stepvalue'), (0, True)),
    **dict.fromkeys(('average_loss', 'iter_size', 'test_iter', 'stepsize'), (1, True)),
    **dict.fromkeys(('base_lr', 'weight_decay', 'delta', *shares), (0, False)),
    **dict.fromkeys(('gamma', 'power', 'clip_gradients'), (-largest, False)), 'random_seed': (-1, True)}
policies: dict[str, tuple[Callable, tuple[str, ...]]] = dict(
    fixed=(policy_fixed, ()), step=(policy_step, ('gamma', 'stepsize')), exp=(policy_exp, ('gamma',)),
    inv=(policy_inv, ('gamma', 'power')), multistep=(policy_multistep, ('gamma', 'stepvalue')),
    poly=(policy_poly, ('power', 'max_iter')), sigmoid=(policy_sigmoid, ('gamma', 'stepsize')))
types = 'SGD', 'Nesterov', 'AdaGrad', 'RMSProp', 'AdaDelta', 'Adam'
old_types = {name.upper(): name for name in types} | dict(enumerate(types))  # of the field `solver_type`
flags = {'true': True, 'false': False, 't': True, 'f': False, 'True': True, 'False': False, 1: True, 0: False}


@dataclass
class SolverParam:
    """The fields of Caffe's SolverParameter under its names, with its defaults; `base_lr` may be set while training

    Raises: TypeError or ValueError naming a field whose value means nothing."""
    base_lr: float = math.nan          # of iteration 0; to be given
    lr_policy: str = ''                # 'fixed', 'step', 'exp', 'inv', 'multistep', 'poly' or 'sigmoid'; to be given
    gamma: float|None = None           # of the policy, as the next ones
    power: float|None = None           # an exponent
    stepsize: int|None = None          # iterations
    stepvalue: list[int] = field(default_factory=list)  # iterations from which on the rate is another
    max_iter: int|None = None          # iterations of `solve`; None: there is no end
    iter_size: int = 1                 # batches whose gradients make an update together
    type: str = 'SGD'                  # or 'Nesterov', 'AdaGrad', 'RMSProp', 'AdaDelta', 'Adam'
    momentum: float = 0.               # for AdaDelta the share of the past in both averages
    momentum2: float = .999            # share of the past in Adam's average of squares
    rms_decay: float = .99             # likewise in that of RMSProp
    delta: float = 1e-8                # what keeps a division from 0
    weight_decay: float = 0.           # of all parameters, times their `wd_mult`
    regularization_type: str = 'L2'    # or 'L1'
    clip_gradients: float = -1.        # the largest norm of the sum over `iter_size` batches; below 0: no limit
    test_iter: list[int] = field(default_factory=list)  # batches of a test, for each validation set
    test_interval: int = 0             # iterations from test to test
    test_compute_loss: bool = False    # also tell the loss?
    test_initialization: bool = True   # also before the first update?
    display: int = 0                   # iterations from line to line; 0: none
    average_loss: int = 1              # iterations whose mean loss is shown
    snapshot: int = 0                  # iterations from file to file; 0: none but the last one
    snapshot_prefix: str = 'solver'    # with which their names begin, below the Learner's path
    snapshot_after_train: bool = True  # also at the end of `solve`, and when it is stopped?
    random_seed: int = -1              # -1: as it is
    debug_info: bool = False           # statistics of layers at each `display`?
    weights: list[str] = field(default_factory=list)  # files to begin with, as `learn.load` takes them
    ignored: dict[str, Any] = field(default_factory=dict)  # fields without effect here

    @classmethod
    def of(cls,
        given: dict[str, Any],  # values by the names of fields, those without effect too
    ) -> 'SolverParam':
        "Raises: TypeError for a field that there is not; as the class does."
        values = dict(given)
        if 'solver_type' in values: values['type'] = _old_type(values.pop('solver_type'))
        ignored = {k: values.pop(k) for k in without_effect if k in values}
        if odd := [k for k in values if k not in known]:
            near = next((f"; did you mean `{k}`?" for k in known if is_near(k, odd[0], 2)), '')
            raise TypeError(f"Solver: there is no field `{odd[0]}`{near or ', but ' + ', '.join(known)}")
        for k in lists & values.keys():
            values[k] = [*values[k]] if isinstance(values[k], (list, tuple)) else [values[k]]
        return cls(**values, ignored=ignored)

    @property
    def settings(self) -> dict[str, Any]: "What a run depends on, but for `base_lr`"; return {
        k: getattr(self, k) for k in fixed if k != 'max_iter' or self.lr_policy == 'poly'}

    def __setattr__(self, name: str, value: Any) -> None:
        if 'ignored' in vars(self) and name not in changeable: raise AttributeError(
            f"SolverParam: `{name}` cannot be set any more; {', '.join(sorted(changeable))} can")
        object.__setattr__(self, name, value)

    def __post_init__(self):
        for k, (low, is_whole) in limits.items():
            values = getattr(self, k) if k in lists else [getattr(self, k)]
            for v in values:
                if v is not None and v == v: check_number(f'Solver: `{k}`', v, low, 1 if k in shares else largest,
                                                          below=k in shares, whole=is_whole)
        if not isinstance(self.snapshot_prefix, str): raise TypeError(
            f"Solver: `snapshot_prefix` is {self.snapshot_prefix!r}; give a text")
        for k in (f.name for f in fields(self) if isinstance(f.default, bool)):
            if not isinstance(getattr(self, k), bool): raise TypeError(
                f"Solver: `{k}` is {getattr(self, k)!r}; give True or False")
        self._check_choices()

    def _check_choices(self):
        for k, choices in dict(type=types, regularization_type=('L2', 'L1'), lr_policy=tuple(policies)).items():
            if getattr(self, k) not in choices: raise ValueError(
                f"Solver: `{k}` is {getattr(self, k)!r}; give one of {', '.join(choices)}")
        needed = ['base_lr', *policies[self.lr_policy][1]]
        def is_given(v): return v not in (None, []) and v == v
        if lacks := [k for k in needed if not is_given(getattr(self, k))]: raise ValueError(
            f"Solver: lr_policy='{self.lr_policy}' needs `{lacks[0]}`")
        if self.type in ('AdaGrad', 'RMSProp') and self.momentum: raise ValueError(
            f"Solver: {self.type} has no momentum, and `momentum` is {self.momentum}")
        if sorted(self.stepvalue) != self.stepvalue: raise ValueError(
            f"Solver: `stepvalue` is {self.stepvalue}; give the iterations in their order")
        if self.test_iter and not self.test_interval: raise ValueError(
            "Solver: with `test_iter` a `test_interval` above 0 is needed: after how many iterations to test")

    def lr_at(self,
        iter: int,  # counted from 0
    ) -> float:
        "The learning rate of an iteration"
        policy, names = policies[self.lr_policy]
        return policy(iter, self.base_lr, **{k: getattr(self, k) for k in names})

    @property
    def opt_func(self) -> Callable:
        "The optimizer, with Caffe's update rule; weight decay is coupled"
        own: dict[str, Any] = dict(decouple_wd=False)
        if self.type == 'AdaGrad': return partial(Adagrad, eps=self.delta, **own)
        if self.type == 'RMSProp': return partial(RMSProp, sqr_mom=self.rms_decay, eps=self.delta, **own)
        if self.type == 'AdaDelta': return partial(Adadelta, sqr_mom=self.momentum, eps=self.delta, **own)
        if self.type == 'Adam': return partial(Adam, mom=self.momentum, sqr_mom=self.momentum2, eps=self.delta, wd=0.,
                                               eps_hat=True, **own)
        nesterov = self.type == 'Nesterov' and self.momentum > 0
        return partial(SGD, mom=self.momentum, nesterov=nesterov, lr_in_velocity=True, **own)

    @classmethod
    def from_prototxt(cls,
        text: str|Path,  # in text format, or the path of a file with it
    ) -> 'SolverParam':
        """Read a solver's settings as Caffe has them

        Raises: ValueError naming the line that cannot be read; as the class does; OSError for a file that is not
        there."""
        if isinstance(text, Path) or text and '\n' not in text and (':' not in text or text.endswith('.prototxt')):
            path = Path(text)
            text = path.read_text(encoding='utf-8')
            found = parse_prototxt(text)
            found.setdefault('snapshot_prefix', [str(path.with_suffix(''))])
        else: found = parse_prototxt(text)
        return cls.of({k: _plain(k, vs) for k, vs in found.items()})


known = [f.name for f in fields(SolverParam) if f.name != 'ignored']
fixed = ('lr_policy', 'gamma', 'power', 'stepsize', 'stepvalue', 'max_iter', 'iter_size', 'momentum', 'momentum2',
         'rms_decay', 'delta', 'weight_decay', 'regularization_type', 'clip_gradients')
changeable = {'base_lr', 'max_iter', 'display', 'average_loss', 'snapshot', 'snapshot_prefix', 'snapshot_after_train',
              'test_interval', 'test_initialization', 'test_compute_loss'}
yes_no = {f.name for f in fields(SolverParam) if isinstance(f.default, bool)}


def _plain(name, values) -> Any:
    def one(v):
        if name in yes_no and v in flags and not isinstance(v, float): return flags[v]
        return str(v) if isinstance(v, Word) else v
    values = [one(v) for v in values]
    if name == 'weights': return [part.strip() for v in values for part in v.split(',')]
    if name in lists or name in without_effect and len(values) > 1: return values
    if len(values) > 1: raise ValueError(f"Solver: `{name}` is given {len(values)} times, and has one value")
    return values[0]


def _old_type(v):
    if v not in old_types: raise ValueError(f"Solver: `solver_type` is {v!r}; give one of {', '.join(types)} as `type`")
    return old_types[v]
