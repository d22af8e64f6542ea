"""Bad input gets a clear error before training starts."""
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import nn

from .layers import registries
from .optim import missing_params
from .tensors import describe
from .utils import check_number, warn
from .weights import clean, unwrapped

__all__ = ['check_fit', 'check_trained', 'end_first_step', 'unseen', 'batch_note']

containers: Any = list, tuple, dict, set, frozenset, deque


def check_fit(
    learn: Any,        # the Learner
    n_epoch: Any,      # as `fit` got it
    start_epoch: Any,  # as `fit` got it
    n_steps: Any,      # as `fit` got it
) -> None:
    """What can be known before anything of a fit has run

    Raises: TypeError, ValueError or RuntimeError, saying what to do."""
    for name, n in dict(n_epoch=n_epoch, start_epoch=start_epoch).items():
        check_number(f'fit: `{name}`', n, 0, whole=True, of='epochs')
    if n_steps is not None:
        check_number('fit: `n_steps`', n_steps, 1, whole=True, of='optimizer steps an epoch')
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
    if names := [n for n in unseen(learn) if n not in learn.opt.told]:
        learn.opt.told |= {*names}
        warn(f"not trained, since torch does not see what is in a plain list, tuple, dict …: {', '.join(names[:5])}"
             f"{f' and {len(names)-5} more'*(len(names) > 5)}; use `nn.ModuleList`, `nn.ModuleDict` or "
             "`nn.ParameterList`; `requires_grad_(False)` marks what is to stay so")
    if 'no gradient' not in learn.opt.told and not isinstance(vars(learn.opt).get('step'), _FirstStep):
        vars(learn.opt)['step'] = _FirstStep(learn.opt)


class _FirstStep:
    "Stands in place of `step` for one step of an epoch, and looks whether it changes anything"
    def __init__(self, opt): self.opt, self.own = opt, vars(opt).get('step')  # what a user has put there

    def __call__(self):
        end_first_step(self.opt)
        if all(p.grad is None for p in self.opt.all_params()):
            self.opt.told |= {'no gradient'}
            warn("the first step changes nothing, since no parameter of the optimizer has a gradient: none of them "
                 "took part in the loss")
        self.opt.step()


def end_first_step(
    opt: Any,  # an Optimizer
) -> None:
    "Let it step as ever"
    if isinstance(look := vars(opt).get('step'), _FirstStep):
        del opt.step
        if look.own is not None: opt.step = look.own


def unseen(
    learn: Any,  # the Learner, with an optimizer
) -> Iterator[str]:
    "Where trainable parameters are that neither a module nor the optimizer has: in a plain list, tuple, dict, set …"
    known = {*learn.opt.opts, *(p for m in learn.modules for p in m.parameters())}
    for top in map(unwrapped, learn.modules):
        for name, m in top.named_modules():
            for attr, v in vars(m).items():
                if attr in registries: continue
                for keys, o in islice(_entries(v, 3), 1000):  # no walk through data that a module may have
                    ps = nn.Module.parameters(o) if isinstance(o, nn.Module) else [o]*isinstance(o, nn.Parameter)
                    if any(p.requires_grad and p not in known for p in ps):
                        path = '.'.join(filter(None, [type(top).__name__, clean(name), attr]))
                        yield path + ''.join(f'[{k!r}]' for k in keys)


def _entries(o, depth) -> Iterator[tuple[list, Any]]:  # what a container holds, each with its keys
    kind = next((k for k in containers if isinstance(o, k)), None)
    if not depth or kind is None: return
    # by the methods of `kind`: those of a subclass may load things, or be forbidden
    for k, v in [*dict.items(o)] if kind is dict else enumerate([*kind.__iter__(o)]):
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
