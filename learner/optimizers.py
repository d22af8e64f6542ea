"""torch's optimizers under fastai's names and defaults, and what is done with an `opt_func`.

Each function makes torch's own optimizer, in its fused form where there is one (SGD, Adam, Adagrad on CPU and CUDA) and
no parameter forbids it. Decay is decoupled: by torch in Adam, RAdam and NAdam; in the others the parameters that have a
gradient shrink by `lr*wd` in a hook just before the step, and torch's groups keep that `wd` under its own name.
"""
import inspect
import math
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, optim

__all__ = ['SGD', 'RMSProp', 'Adam', 'RAdam', 'NAdam', 'Adagrad', 'Adadelta', 'Adamax', 'OptimWrapper', 'QHAdam',
           'Larc', 'Lamb', 'Lookahead', 'ranger', 'opt_lr', 'torch_opt', 'attach_hooks']


def opt_lr(
    opt_func: Any,  # what a learner takes as `opt_func`
) -> float|None:    # None if it brings none
    "The learning rate inside a partial"
    if not isinstance(opt_func, partial): return None
    return opt_func.keywords['lr'] if 'lr' in opt_func.keywords else opt_lr(opt_func.keywords.get('opt'))


def torch_opt(
    opt_func: Any,                    # a torch.optim class, a partial of one, or a function of groups and `lr`
    param_lists: list[list[Tensor]],  # the parameters of each group
    lr: float,
) -> optim.Optimizer:                 # has exactly these groups
    """Call `opt_func`, and check what it returns

    Raises: TypeError if it cannot be called or returns no optimizer to use; ValueError if that has other groups."""
    if not callable(opt_func):
        raise TypeError("`opt_func` must be a torch.optim class, a partial of one, or a function that makes an "
                        f"optimizer; this is a `{type(opt_func).__name__}`")
    name, groups = getattr(opt_func, '__name__', opt_func), [{'params': list(ps)} for ps in param_lists]
    try: inspect.signature(opt_func).bind(groups, lr=lr)
    except TypeError as e:
        raise TypeError(f"`opt_func` gets groups of parameters and `lr`, which {name} does not take: {e}") from e
    opt: Any = opt_func(groups, lr=lr)
    if not isinstance(opt, optim.Optimizer):
        raise TypeError(f"`opt_func` must return a torch.optim.Optimizer; {name} returned a `{type(opt).__name__}`")
    if [[id(p) for p in g['params']] for g in opt.param_groups] != [[id(p) for p in ps] for ps in param_lists]:
        raise ValueError(
            f"`opt_func` must keep the groups of parameters it is given; `{name}` returned others: `splitter` makes "
            "groups, and fit's `lr=[…]` gives each its rate")
    closure = inspect.signature(opt.step).parameters.get('closure')
    if closure and closure.default is inspect.Parameter.empty:
        raise TypeError(f"{type(opt).__name__} runs the model by itself (its `step` needs a closure), which a Learner "
                        "does not offer: use another optimizer")
    return opt


# ---- what our optimizers do beyond torch's

class _Velocity(defaultdict):
    """State of SGD in which a momentum starts at 0 when it is first asked for, which gives the values torch gives

    In torch 2.13 a fused SGD raises if only some parameters of a group have a momentum, as after unfreezing."""
    def __missing__(self, p):
        self[p] = state = {'momentum_buffer': torch.zeros_like(p)}
        return state


def _use_velocity(opt: optim.Optimizer): opt.state = _Velocity(None, opt.state)


def _decay(opt: optim.Optimizer, args, kwargs):
    for g in opt.param_groups:
        if g['wd'] and (ps := [p for p in g['params'] if p.grad is not None]):
            with torch.no_grad():
                torch._foreach_mul_(ps, 1-g['lr']*g['wd'])  # pyright: ignore[reportPrivateImportUsage]


@torch.no_grad()
def _step_by_velocity(opt: optim.Optimizer, args, kwargs):  # torch's own step then finds no gradient
    for g in opt.param_groups:
        g['grads'] = [p.grad for p in g['params']]
        mom, lr = g['momentum'], float(g['lr'])
        for p in g['params']:
            if p.grad is None: continue
            step = p.grad.add(p, alpha=g['weight_decay'])*lr
            if mom:
                state = opt.state[p]
                v = state['momentum_buffer'] = state.get('momentum_buffer', torch.zeros_like(p)).mul_(mom).add_(step)
                step = v*mom+step if g['nesterov'] else v
            p.sub_(step)
            p.grad = None


def _grads_back(opt: optim.Optimizer, args, kwargs):
    for g in opt.param_groups:
        for p, grad in zip(g['params'], g.pop('grads')): p.grad = grad


def _correct_eps(opt: optim.Optimizer, args, kwargs):
    for g in opt.param_groups:
        g['n_steps'], g['own_eps'] = g['n_steps']+1, g['own_eps'] or g['eps']
        g['eps'] = g['own_eps']/math.sqrt(1-g['betas'][1]**g['n_steps'])


def _own_eps(opt: optim.Optimizer, args, kwargs):
    for g in opt.param_groups: g['eps'], g['own_eps'] = g['own_eps'], 0.


def attach_hooks(
    opt: optim.Optimizer,  # any; only those made here have hooks
) -> None:
    "Register the hooks that one of our optimizers needs; a pickled or deep-copied one has lost them"
    group = opt.param_groups[0]
    if 'wd' in group: opt.register_step_pre_hook(_decay)
    if 'lr_in_velocity' in group:
        opt.register_step_pre_hook(_step_by_velocity)
        opt.register_step_post_hook(_grads_back)
    if 'own_eps' in group:
        opt.register_step_pre_hook(_correct_eps)
        opt.register_step_post_hook(_own_eps)
    if isinstance(opt, optim.SGD) and group['fused'] and group['momentum']:
        _use_velocity(opt)
        opt.register_load_state_dict_post_hook(_use_velocity)


def _groups(params: Iterable) -> list[dict]:
    "Parameters, lists of them, or groups as torch takes them, as the latter"
    items = list(params)
    if items and isinstance(items[0], Tensor): items = [items]
    groups = [g if isinstance(g, dict) else {'params': g} for g in items]
    return [{**g, 'params': [g['params']] if isinstance(g['params'], Tensor) else list(g['params'])} for g in groups]


def _make(cls: type[optim.Optimizer], params: Iterable, lr: float, wd: float, hook: bool, own: dict|None = None,
          **kwargs) -> optim.Optimizer:
    "`cls` on `params`, fused if it can be, with decay by torch or by our hook, and what other hooks of ours keep"
    groups = _groups(params)
    fused = 'fused' in inspect.signature(cls).parameters and all(
        p.device.type in ('cpu', 'cuda') and not p.is_complex() for g in groups for p in g['params'])
    # Said by group, not to `cls`: GradScaler then skips a bad step itself, and the decay with it.
    for g in groups: g |= ({'fused': True} if fused else {}) | ({'wd': wd} if hook else {}) | (own or {})
    opt = cls(groups, lr=lr, weight_decay=0. if hook else wd, **kwargs)  # pyright: ignore[reportCallIssue]
    attach_hooks(opt)
    return opt


# ---- the optimizers

def SGD(
    params: Iterable,          # parameters, lists of them, or torch's groups
    lr: float,                 # learning rate; the Learner gives it
    mom: float = 0.,           # momentum; 0 for none, which no schedule can change
    wd: float = 0.,            # weight decay
    decouple_wd: bool = True,  # False: add `wd*p` to the gradient instead
    nesterov: bool = False,    # Nesterov's momentum
    lr_in_velocity: bool = False,  # is the rate inside of what the momentum keeps?
) -> optim.Optimizer:
    """Gradient descent, with momentum

    torch keeps a sum of gradients, which the present rate multiplies. With `lr_in_velocity` it is, as in Caffe, a sum
    of steps, `v = mom*v + lr*g`, so that after a fall of the rate the speed there was dies down by `mom` a step."""
    own = {'lr_in_velocity': True} if lr_in_velocity else {}
    return _make(optim.SGD, params, lr, wd, decouple_wd, own, momentum=mom, nesterov=nesterov)


def RMSProp(
    params: Iterable,          # parameters, lists of them, or torch's groups
    lr: float,                 # learning rate; the Learner gives it
    sqr_mom: float = .99,      # decay of the average of squared gradients
    mom: float = 0.,           # momentum of the steps; 0 for none
    wd: float = 0.,            # weight decay
    decouple_wd: bool = True,  # False: add `wd*p` to the gradient instead
    eps: float = 1e-8,         # keeps the division from 0
) -> optim.Optimizer:
    "Gradients divided by the root of the average of their squares"
    return _make(optim.RMSprop, params, lr, wd, decouple_wd, alpha=sqr_mom, momentum=mom, eps=eps)


def Adam(
    params: Iterable,          # parameters, lists of them, or torch's groups
    lr: float,                 # learning rate; the Learner gives it
    mom: float = .9,           # decay of the average of gradients
    sqr_mom: float = .99,      # decay of the average of their squares
    eps: float = 1e-5,         # keeps the division from 0
    wd: float = .01,           # weight decay
    decouple_wd: bool = True,  # False: add `wd*p` to the gradient instead
    eps_hat: bool = False,     # is `eps` added before the bias of averages is corrected, as in Caffe?
) -> optim.Optimizer:
    """torch's AdamW (Adam if not `decouple_wd`) with fastai's defaults

    With `eps_hat` it is the epsilon with a hat at the end of section 2 of Kingma and Ba 2015, arXiv 1412.6980, for
    parameters that have had a gradient at each step."""
    own = {'own_eps': 0., 'n_steps': 0} if eps_hat else {}
    return _make(optim.AdamW if decouple_wd else optim.Adam, params, lr, wd, False, own, betas=(mom, sqr_mom), eps=eps)


def RAdam(
    params: Iterable,          # parameters, lists of them, or torch's groups
    lr: float,                 # learning rate; the Learner gives it
    mom: float = .9,           # decay of the average of gradients
    sqr_mom: float = .99,      # decay of the average of their squares
    eps: float = 1e-5,         # keeps the division from 0
    wd: float = 0.,            # weight decay
    decouple_wd: bool = True,  # False: add `wd*p` to the gradient instead
) -> optim.Optimizer:
    "Adam without its second average for the first steps, in which that varies most"
    return _make(optim.RAdam, params, lr, wd, False, betas=(mom, sqr_mom), eps=eps, decoupled_weight_decay=decouple_wd)


def NAdam(
    params: Iterable,          # parameters, lists of them, or torch's groups
    lr: float,                 # learning rate; the Learner gives it
    mom: float = .9,           # decay of the average of gradients
    sqr_mom: float = .99,      # decay of the average of their squares
    eps: float = 1e-5,         # keeps the division from 0
    wd: float = 0.,            # weight decay
    decouple_wd: bool = True,  # False: add `wd*p` to the gradient instead
) -> optim.Optimizer:
    "Adam with Nesterov's momentum"
    return _make(optim.NAdam, params, lr, wd, False, betas=(mom, sqr_mom), eps=eps, decoupled_weight_decay=decouple_wd)


def Adagrad(
    params: Iterable,          # parameters, lists of them, or torch's groups
    lr: float,                 # learning rate; the Learner gives it
    eps: float = 1e-10,        # keeps the division from 0
    wd: float = 0.,            # weight decay
    decouple_wd: bool = True,  # False: add `wd*p` to the gradient instead
) -> optim.Optimizer:
    "Gradients divided by the root of the sum of their squares"
    return _make(optim.Adagrad, params, lr, wd, decouple_wd, eps=eps)


def Adadelta(
    params: Iterable,          # parameters, lists of them, or torch's groups
    lr: float,                 # 1 is Adadelta as published
    sqr_mom: float = .9,       # decay of the averages of squared gradients and squared steps
    eps: float = 1e-6,         # keeps the division from 0
    wd: float = 0.,            # weight decay
    decouple_wd: bool = True,  # False: add `wd*p` to the gradient instead
) -> optim.Optimizer:
    "Gradients scaled by the ratio of the averages of past steps and past gradients"
    return _make(optim.Adadelta, params, lr, wd, decouple_wd, rho=sqr_mom, eps=eps)


def Adamax(
    params: Iterable,          # parameters, lists of them, or torch's groups
    lr: float,                 # learning rate; the Learner gives it
    mom: float = .9,           # decay of the average of gradients
    sqr_mom: float = .999,     # decay of their largest size
    eps: float = 1e-8,         # keeps the division from 0
    wd: float = 0.,            # weight decay
    decouple_wd: bool = True,  # False: add `wd*p` to the gradient instead
) -> optim.Optimizer:
    "Adam with the largest gradient in place of the average of squares"
    return _make(optim.Adamax, params, lr, wd, decouple_wd, betas=(mom, sqr_mom), eps=eps)


def OptimWrapper(
    params: Any = None,  # parameters, lists of them, or torch's groups
    opt: Any = None,     # a torch.optim class, or an optimizer, which is returned as it is
    **kwargs,            # given to `opt`
) -> optim.Optimizer:
    """fastai's way to give a torch optimizer, `partial(OptimWrapper, opt=torch.optim.AdamW)`; here the class will do

    Raises: TypeError without `opt`."""
    if opt is None: raise TypeError("`OptimWrapper` needs `opt`, as in partial(OptimWrapper, opt=torch.optim.AdamW)")
    return opt if isinstance(opt, optim.Optimizer) else opt(_groups(params), **kwargs)


def _refuse(name: str, instead: str, *args, **kwargs) -> NoReturn:
    raise ValueError(f"`{name}` is not one of torch's optimizers: use {instead}; or give, as `opt_func`, a "
                     "torch.optim.Optimizer class of another package")


QHAdam = partial(_refuse, 'QHAdam', '`NAdam` or `Adam`')
Larc = partial(_refuse, 'Larc', '`SGD` with gradients clipped')
Lamb = partial(_refuse, 'Lamb', '`Adam`')
Lookahead = partial(_refuse, 'Lookahead', 'the optimizer itself, with its weights averaged')
ranger = partial(_refuse, 'ranger', '`RAdam` with `mom=0.95, wd=0.01, eps=1e-6` and `fit_flat_cos`')
