"""Which parameters are trained together: splitters, and the names, kinds and options of parameters.

A splitter takes the model and returns its parameters, in one list or in one list for each group, from input to output.
"""
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # BatchNorm, SyncBatchNorm and InstanceNorm, also the lazy ones
from torch.nn.parameter import is_lazy

__all__ = ['params', 'trainable_params', 'check_groups', 'all_names', 'shape', 'find_opts', 'norm_params', 'is_bias']

norm_layers = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
bias_name = re.compile(r'(^|\.)\w*bias\w*(\.original\d*)?$')  # also `in_proj_bias`, `bias_hh_l0`, a parametrized bias


def params(
    model: nn.Module,  # whose parameters are trained
) -> list[nn.Parameter]:
    "The default splitter: all parameters in one group, also those frozen by hand, which `unfreeze` makes trainable"
    return list(model.parameters())


def trainable_params(
    model: nn.Module,  # whose parameters are trained
) -> list[nn.Parameter]:
    "A splitter with one group of the parameters that now require gradients; `unfreeze` does not reach the others"
    return [p for p in model.parameters() if p.requires_grad]


def check_groups(
    groups: Iterable,                 # what a splitter returned
    names: dict[Tensor, list[str]],   # the parameters that may be in it
    owner: str,                       # the model's name, for messages
) -> list[list[Tensor]]:              # a list for each group
    """The groups of a splitter as lists

    Raises: ValueError if they are empty, or a parameter is in them twice or is not in `names`; TypeError if they hold
    something else than parameters."""
    def is_one(o) -> bool: return isinstance(o, (Tensor, nn.Module, Mapping)) or not isinstance(o, Iterable)
    items: list[Any] = [groups] if is_one(groups) else list(groups)
    if not items:
        raise ValueError(f"`splitter` returned no parameters of `{owner}`" if names else f"`{owner}` has no parameters")
    lists: list[list[Any]] = [items] if all(map(is_one, items)) else [[o] if is_one(o) else list(o) for o in items]
    seen: dict[Tensor, int] = {}
    for i, ps in enumerate(lists):
        if not ps: raise ValueError(f"group {i} of the {len(lists)} that `splitter` returned is empty")
        for p in ps:
            if not isinstance(p, Tensor): raise TypeError(
                f"`splitter` must return lists of parameters, one for each group; group {i} has a `{type(p).__name__}`")
            if p not in names: raise ValueError(
                f"group {i} from `splitter` has a tensor of shape {shape(p)}, no parameter of `{owner}` or of the loss")
            if p in seen: raise ValueError(
                f"`splitter` must return each parameter once; `{names[p][0]}` is in group {seen[p]} and in group {i}")
            seen[p] = i
    return lists


def all_names(
    model: nn.Module,
    loss_func: Any = None,      # its parameters too, if it is a module
) -> dict[Tensor, list[str]]:   # a tied parameter has several
    "The names of every parameter"
    names = defaultdict(list)
    for prefix, m in (('', model), ('loss_func.', loss_func)):
        if isinstance(m, nn.Module):
            for n, p in m.named_parameters(remove_duplicate=False): names[p].append(prefix+n)
    return dict(names)


def shape(
    p: Tensor,
) -> list[int]|None:  # None: lazy, not known before the first batch
    "The shape of a parameter as plain values"
    return None if is_lazy(p) else list(p.shape)


def find_opts(
    param_opts: dict[str, dict[str, float]],  # options by name, or by last part of the name, with wildcards
    names: dict[Tensor, list[str]],
) -> dict[Tensor, dict[str, float]]:          # of every parameter in `names`; of two patterns the later one counts
    """The options of each parameter

    Raises: ValueError if a pattern matches nothing, or a value is negative."""
    for pattern, opts in param_opts.items():
        if bad := [k for k, v in opts.items() if not 0 <= float(v) < float('inf')]:
            raise ValueError(f"`param_opts`: `{bad[0]}` of {pattern!r} is {opts[bad[0]]}; it must be 0 or more")
    def matches(pattern, p): return any(fnmatchcase(s, pattern) for n in names[p] for s in (n, n.rpartition('.')[2]))
    for pattern in param_opts:
        if not any(matches(pattern, p) for p in names): raise ValueError(
            f"`param_opts`: {pattern!r} matches none of {', '.join(ns[0] for ns in names.values())}")
    return {p: {k: float(v) for pattern, o in param_opts.items() if matches(pattern, p) for k, v in o.items()}
            for p in names}


def norm_params(
    *modules: Any,  # what is no module is passed over
) -> set[Tensor]:
    "The parameters of all normalisation layers"
    return {p for top in modules if isinstance(top, nn.Module) for m in top.modules() if isinstance(m, norm_layers)
            for p in m.parameters()}


def is_bias(
    names: list[str],  # all names of a parameter
) -> bool:
    "Is it a bias, by one of its names?"
    return any(map(bias_name.search, names))
