"""Bad input gets a clear error before training starts."""
from collections.abc import Iterator
from functools import partial
from itertools import islice
from numbers import Integral
from typing import Any

import torch
from torch import nn

from .optim import missing_params
from .tensors import describe
from .utils import warn
from .weights import clean, unwrapped

__all__ = ['check_fit', 'check_trained', 'batch_note']

containers = list, tuple, dict


def check_fit(
    learn: Any,        # the Learner
    n_epoch: Any,      # as `fit` got it
    start_epoch: Any,  # as `fit` got it
    n_steps: Any,      # as `fit` got it
) -> None:
    """What can be known before anything of a fit has run

    Raises: TypeError, ValueError or RuntimeError, saying what to do."""
    for name, n in dict(n_epoch=n_epoch, start_epoch=start_epoch).items():
        if not isinstance(n, Integral) or isinstance(n, bool):
            raise TypeError(f"fit: `{name}` is {n!r}; give a whole number of epochs")
        if n < 0: raise ValueError(f"fit: `{name}` is {n}; it cannot be negative")
    if n_steps is not None and (not isinstance(n_steps, Integral) or isinstance(n_steps, bool) or n_steps < 1):
        raise ValueError(f"fit: `n_steps` is {n_steps!r}; give the number of optimizer steps an epoch, 1 or more")
    if start_epoch and start_epoch >= n_epoch: raise ValueError(
        f"fit: `start_epoch={start_epoch}` leaves nothing of `n_epoch={n_epoch}`, which counts skipped epochs too")
    if learn._scope: raise RuntimeError(
        f"fit was called within a {learn.run_kind} that is still running; callbacks may call `validate`")
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled(): raise RuntimeError(
        "fit was called with gradients switched off: leave the `torch.no_grad()` or `inference_mode()` block")
    if not any(True for m in learn.modules for _ in m.parameters()):
        raise ValueError(f"`{type(learn.model).__name__}` has no parameters, so there is nothing to fit")
    if n_epoch: learn.dls.check()
    loaders = {'train': learn.dls.train, **learn.dls.valid_sets}
    once = [name or 'valid' for name, dl in loaders.items() if isinstance(dl.dl, Iterator)]
    if once and n_epoch-start_epoch > 1: raise ValueError(
        f"the {once[0]} loader can be iterated once only, not for {n_epoch-start_epoch} epochs: give a DataLoader or "
        "a list")


def check_trained(
    learn: Any,  # the Learner, before the training of an epoch
) -> None:
    """That something is trained, and a warning that names what is not

    Raises: ValueError if all parameters are frozen."""
    if not any(p.requires_grad for ps in learn.opt.param_lists for p in ps): raise ValueError(
        f"all parameters of `{type(learn.model).__name__}` are frozen: set `requires_grad` of those to be trained")
    if names := [n for n in missing_params(learn.opt, learn.model, learn.loss_func) if n not in learn.opt.told]:
        learn.opt.told |= {*names}
        more = f" and {len(names)-5} more" if len(names) > 5 else ''
        warn(f"not trained, since the optimizer was made without them: {', '.join(names[:5])}{more}; `learn.splitter` "
             "says what it gets, `learn.create_opt()` makes it anew; `requires_grad_(False)` marks what is to stay so")
    if names := [n for n in _unseen(learn) if n not in learn.opt.told]:
        learn.opt.told |= {*names}
        warn(f"not trained, since torch does not see what is in a plain list, tuple or dict: {', '.join(names[:5])}"
             f"{f' and {len(names)-5} more'*(len(names) > 5)}; use `nn.ModuleList`, `nn.ModuleDict` or "
             "`nn.ParameterList`; `requires_grad_(False)` marks what is to stay so")
    vars(learn.opt)['step'] = partial(_first_step, learn.opt)


def _first_step(opt):  # of an epoch, which also looks whether it changes anything
    vars(opt).pop('step', None)  # the steps after it are made by the class's own method
    if 'no gradient' not in opt.told and all(p.grad is None for p in opt.all_params()):
        opt.told |= {'no gradient'}
        warn("the first step changes nothing, since no parameter of the optimizer has a gradient: none of them took "
             "part in the loss")
    opt.step()


def _unseen(learn) -> Iterator[str]:  # where trainable ones are that neither a module nor the optimizer has registered
    known = {*learn.opt.opts, *(p for m in learn.modules for p in m.parameters())}
    for top in map(unwrapped, learn.modules):
        for name, m in top.named_modules():
            for attr, v in vars(m).items():
                entries = _entries(v, 2) if isinstance(v, containers) and v else ()
                for keys, o in islice(entries, 1000):  # no walk through data that a module may have
                    ps = o.parameters() if isinstance(o, nn.Module) else [o]*isinstance(o, nn.Parameter)
                    if any(p.requires_grad and p not in known for p in ps):
                        path = '.'.join(filter(None, [type(top).__name__, clean(name), attr]))
                        yield path + ''.join(f'[{k!r}]' for k in keys)


def _entries(o, depth) -> Iterator[tuple[list, Any]]:  # what a container holds, each with its keys
    if not depth or not isinstance(o, containers): return
    for k, v in o.items() if isinstance(o, dict) else enumerate(o):
        yield [k], v
        yield from (([k, *more], inner) for more, inner in _entries(v, depth-1))


def batch_note(
    learn: Any,      # the Learner, in a batch
    forward: bool,   # did the model fail, or the loss?
) -> str:
    "Where an error in model or loss came from, and with which batch"
    who, given = 'the loss', f'prediction {describe(learn.pred)}, targets {describe(learn.yb)}'
    if forward: who, given = 'the model', f'inputs {describe(learn.xb)}'
    hint = '; `Learner(n_inp=…)` tells how many members of a batch are inputs' if forward and len(learn.xb) > 1 else ''
    return f'raised by {who} with {given}, epoch {learn.epoch}, batch {learn.iter}{hint}'
