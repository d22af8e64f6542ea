"""Weights under the names that the model's author gave them, whatever wraps the model or a part of it."""
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

__all__ = ['unwrapped', 'clean', 'named_params', 'named_layers', 'weights_of', 'loose_buffers', 'versions_of',
           'with_versions', 'put_weights', 'tied', 'misfits', 'model_path']

inside = dict(DistributedDataParallel='module', DataParallel='module', OptimizedModule='_orig_mod')  # class → its model


def unwrapped(
    model: nn.Module,
) -> nn.Module:
    "The model inside DistributedDataParallel, DataParallel and `torch.compile`"
    while (inner := inside.get(type(model).__name__)) and inner in model._modules: model = getattr(model, inner)
    return model


def clean(
    name: str,
) -> str:
    "A name of a parameter or module without the part that `torch.compile` of a submodule puts in"
    return '.'.join(part for part in name.split('.') if part != '_orig_mod')


def _cleaner(model: nn.Module) -> Callable[[str], str]:
    "What takes out of a name the parts that wrappers within `model` put in; a submodule may be called `module` as well"
    wraps = [(f'{k}.'.lstrip('.'), part) for k, m in model.named_modules(remove_duplicate=False)
             if (part := inside.get(type(m).__name__)) and part in m._modules]
    def cleaned(name):
        for prefix, part in reversed(wraps):  # inner ones first: what is before them is still as the model has it
            if f'{name}.'.startswith(f'{prefix}{part}.'): name = (prefix+name[len(prefix)+len(part)+1:]).rstrip('.')
        return name
    return cleaned


def _parts(model, loss_func) -> Iterator[tuple[str, nn.Module, Callable[[str], str]]]:
    "What precedes the names, the module, and what cleans them: of the model, and of the loss if it is a module"
    for prefix, m in (('', model), ('loss_func.', loss_func)):
        if isinstance(m, nn.Module): yield prefix, (inner := unwrapped(m)), _cleaner(inner)


def named_params(
    model: nn.Module,
    loss_func: Any = None,            # its parameters too, as `loss_func.…`, if it is a module
) -> Iterator[tuple[str, Tensor]]:
    "All parameters by their clean names"
    for prefix, m, cleaned in _parts(model, loss_func):
        for name, p in m.named_parameters(): yield prefix+cleaned(name), p


def named_layers(
    model: nn.Module,
) -> Iterator[tuple[str, nn.Module]]:
    "All modules by their clean names, each once, as the author's: what is inside a wrapper stands for it"
    inner, seen = unwrapped(model), set()
    cleaned = _cleaner(inner)
    for name, m in inner.named_modules():
        if (m := unwrapped(m)) not in seen: yield cleaned(name), m
        seen.add(m)


def weights_of(
    model: nn.Module,
    loss_func: Any = None,  # its state too, as `loss_func.…`, if it is a module
) -> dict[str, Any]:
    "The model's `state_dict` under clean names: its own tensors, not copies"
    return {prefix+cleaned(k): v for prefix, m, cleaned in _parts(model, loss_func) for k, v in m.state_dict().items()}


def loose_buffers(
    model: nn.Module,
) -> dict[str, Tensor]:
    "The buffers that its `state_dict` leaves out, by clean names"
    _, m, cleaned = next(_parts(model, None))
    kept = {*m.state_dict()}
    return {cleaned(k): b for k, b in m.named_buffers() if k not in kept}


def versions_of(
    model: nn.Module,
) -> dict[str, Any]:
    "What a `state_dict` says beside the weights: the version of each module's class, under its clean name"
    _, m, cleaned = next(_parts(model, None))
    return {cleaned(k): v for k, v in getattr(m.state_dict(), '_metadata', {}).items()}


def with_versions(
    state: Mapping[str, Any],       # as `weights_of` gives it
    versions: dict[str, Any]|None,  # as `versions_of` gives them; None: not known
) -> OrderedDict[str, Any]:
    "`state` as torch's modules give it"
    new: Any = OrderedDict(state)
    if versions is not None: new._metadata = versions
    return new


def put_weights(
    model: nn.Module,
    state: Mapping[str, Any],  # under clean names; what the model does not have is left out
    loss_func: Any = None,     # it too gets what is named `loss_func.…`, if it is a module
) -> None:
    "Copy weights into the model; they are of the present version of each module, unless `state` says of which"
    versions = getattr(state, '_metadata', {})
    for prefix, m, cleaned in _parts(model, loss_func):
        own = m.state_dict()
        names = {k: prefix+cleaned(k) for k in own}
        known = {k: versions.get(prefix+cleaned(k), v) for k, v in getattr(own, '_metadata', {}).items()}
        m.load_state_dict(with_versions({k: state[n] for k, n in names.items() if n in state}, known), strict=False)


def tied(
    model: nn.Module,
    loss_func: Any = None,  # also with it, if it is a module
) -> list[list[str]]:
    "The names of each tensor that has several"
    names = defaultdict(list)
    for prefix, m, cleaned in _parts(model, loss_func):
        for k, t in chain(m.named_parameters(remove_duplicate=False), m.named_buffers(remove_duplicate=False)):
            names[t].append(prefix+cleaned(k))
    return [ns for ns in names.values() if len(ns) > 1]


def misfits(
    model: nn.Module,
    state: Mapping[str, Any],  # as `weights_of` gives it
    loss_func: Any = None,     # looked at too, if it is a module
) -> tuple[list[str], list[str], list[str]]:
    """Names that the model has and `state` lacks, those that only `state` has, and those of another shape or type

    What is there under another name of the same tensor is not lacking. A type is another one if the model's
    cannot hold what the file's can: fractions, or imaginary parts."""
    own = weights_of(model, loss_func)
    there = {n for names in tied(model, loss_func) if any(n in state for n in names) for n in names}
    return ([k for k in own if k not in state and k not in there], [k for k in state if k not in own],
            [k for k in own if k in state and not _fits(k, own[k], state[k])])


def _fits(name, own, new) -> bool:
    if name.endswith('_extra_state') or not isinstance(own, Tensor): return True  # only its module knows
    if not isinstance(new, Tensor) or not torch.can_cast(new.dtype, own.dtype): return False
    return is_lazy(own) or not is_lazy(new) and (new.shape, new.layout) == (own.shape, own.layout)


def model_path(
    learn: Any,        # the Learner
    file: str|Path,    # below its `path/model_dir`, unless absolute
    suffix: str,       # added unless it has one of those that such files have
    there: bool = False,  # is it to be read? Then it may also be below the working folder
) -> Path:
    "The file in which a model of that name is kept"
    known = '.pth', '.pt', '.ckpt', '.bin', '.safetensors'
    name = Path(file if str(file).endswith(known) else f'{file}{suffix}')
    path = Path(learn.path)/learn.model_dir/name
    return name if there and not path.exists() and name.exists() else path
