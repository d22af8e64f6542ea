"""Which parameters are trained together: splitters, and the names, kinds and options of parameters.

A splitter takes the model and returns its parameters, in one list or in one list for each group, from input to output.
"""
import re
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # BatchNorm, SyncBatchNorm and InstanceNorm, also the lazy ones
from torch.nn.parameter import is_lazy

__all__ = ['params', 'trainable_params', 'default_split', 'split_blocks', 'split_patterns', 'check_groups', 'all_names',
           'shape', 'find_opts', 'norm_params', 'is_bias']

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


def default_split(
    model: nn.Module,          # an `nn.Sequential`, such as one of a body and a head
) -> list[list[nn.Parameter]]:  # two groups
    """A splitter with two groups: the first child of the model, and the rest; what both share is in the first

    Raises: ValueError if the model is no `nn.Sequential` of two or more."""
    if not isinstance(model, nn.Sequential) or len(model) < 2: raise ValueError(
        f"`default_split` needs an `nn.Sequential` of a body and a head, not a `{type(model).__name__}` with "
        f"{len(list(model.children()))} children; `split_blocks` and `split_patterns` make splitters for other models")
    first = dict.fromkeys(model[0].parameters())
    return [list(first), [p for p in model.parameters() if p not in first]]


def split_blocks(
    *starts: str,  # dotted names of submodules, from input to output; none: every child of the model is a group
) -> Callable[[nn.Module], list[list[nn.Parameter]]]:
    """A splitter whose groups begin at these submodules; the parameters before the first of them are a group too

    A parameter that is shared is in the first group it appears in. The splitter can be pickled.
    Raises: ValueError, when the splitter is called, if a name is no submodule or not in the model's order, or its group
    would be empty; TypeError, at once, if it is no text."""
    _check_names('split_blocks', starts)
    return partial(_split_at, starts=starts) if starts else _split_children


def split_patterns(
    *patterns: str,  # of names of parameters, or of the last part of the name, with wildcards
) -> Callable[[nn.Module], list[list[nn.Parameter]]]:
    """A splitter with a group for each pattern, after a group of all other parameters if there are any

    `split_patterns('head.*')` gives the rest and the head. A parameter that several patterns match is in the group of
    the first of them. The splitter can be pickled.
    Raises: ValueError, when the splitter is called, if a pattern matches nothing that an earlier one has not;
    TypeError, at once, if it is no text."""
    _check_names('split_patterns', patterns)
    return partial(_split_by, patterns=patterns)


def _check_names(owner, names):
    if odd := [n for n in names if not isinstance(n, str)]:
        raise TypeError(f"`{owner}`: {odd[0]!r} is no text; give names one by one, as in {owner}('body', 'head')")


def _split_children(model: nn.Module) -> list[list[nn.Parameter]]:
    groups = defaultdict(list)
    for n, p in model.named_parameters(): groups[n.partition('.')[0] if '.' in n else ''].append(p)
    own = groups.pop('', [])  # of the model itself, come first
    first, *others = groups.values() or [[]]
    return [own+first, *others]


def _split_at(model: nn.Module, starts: tuple[str, ...]) -> list[list[nn.Parameter]]:
    order = {n: i for i, (n, _) in enumerate(model.named_modules(remove_duplicate=False))}
    if unknown := [s for s in starts if s not in order]: raise ValueError(
        f"`split_blocks`: `{type(model).__name__}` has no submodule '{unknown[0]}'; its children are "
        f"{', '.join(n for n, _ in model.named_children())}")
    at = [order[s] for s in starts]
    if wrong := [(a, b) for a, b in zip(starts, starts[1:]) if order[a] >= order[b]]: raise ValueError(
        f"`split_blocks`: '{wrong[0][1]}' does not come after '{wrong[0][0]}' in `{type(model).__name__}`; name the "
        "starts in the model's order")
    groups: list[list[nn.Parameter]] = [[] for _ in range(len(starts)+1)]
    for n, p in model.named_parameters(): groups[bisect(at, order[n.rpartition('.')[0]])].append(p)
    if empty := [s for s, ps in zip(starts, groups[1:]) if not ps]: raise ValueError(
        f"`split_blocks`: the group that begins at '{empty[0]}' has no parameters, or only those of an earlier group")
    return groups if groups[0] else groups[1:]


def _split_by(model: nn.Module, patterns: tuple[str, ...]) -> list[list[nn.Parameter]]:
    names = all_names(model)
    groups: list[list[Any]] = [[] for _ in range(len(patterns)+1)]
    for p, ns in names.items(): groups[next((i for i, s in enumerate(patterns, 1) if _matches(ns, s)), 0)].append(p)
    if empty := [s for s, ps in zip(patterns, groups[1:]) if not ps]: raise ValueError(
        f"`split_patterns`: {empty[0]!r} matches none of {', '.join(ns[0] for ns in names.values())}, or only what an "
        "earlier pattern matches")
    return groups if groups[0] else groups[1:]


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


def _matches(names: list[str], pattern: str) -> bool:
    "Does a name of a parameter, or the last part of one, match `pattern`?"
    return any(fnmatchcase(s, pattern) for n in names for s in (n, n.rpartition('.')[2]))


def find_opts(
    param_opts: dict[str, dict[str, float]],  # options by name, or by last part of the name, with wildcards
    names: dict[Tensor, list[str]],
) -> dict[Tensor, dict[str, float]]:          # of every parameter in `names`; of two patterns the later one counts
    """The options of each parameter

    Raises: ValueError if a pattern matches nothing, or a value is negative."""
    for pattern, opts in param_opts.items():
        if bad := [k for k, v in opts.items() if not 0 <= float(v) < float('inf')]:
            raise ValueError(f"`param_opts`: `{bad[0]}` of {pattern!r} is {opts[bad[0]]}; it must be 0 or more")
    for pattern in param_opts:
        if not any(_matches(ns, pattern) for ns in names.values()): raise ValueError(
            f"`param_opts`: {pattern!r} matches none of {', '.join(ns[0] for ns in names.values())}")
    return {p: {k: float(v) for pattern, o in param_opts.items() if _matches(ns, pattern) for k, v in o.items()}
            for p, ns in names.items()}


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
