"""What a model consists of; and `Module`, an nn.Module that needs no `super().__init__()`."""
from collections.abc import Iterator
from typing import Self

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

__all__ = ['Module', 'ParameterModule', 'has_params', 'requires_grad', 'total_params', 'is_leaf', 'own_params',
           'children_and_parameters', 'flatten_model', 'running_norms', 'is_frozen', 'set_bn_eval', 'registries']

registries = [k for k, v in vars(nn.Module()).items() if isinstance(v, (dict, set))]  # of parameters, modules, hooks …


class Module(nn.Module):
    "An nn.Module whose subclasses need not call `super().__init__()`, and may do so at any time"
    def __new__(cls, *args, **kwargs) -> Self:
        self = super().__new__(cls)
        nn.Module.__init__(self)
        return self

    def __init__(self, *args, **kwargs):  # as the next class takes them
        before = {k: vars(self)[k] for k in registries}
        super().__init__(*args, **kwargs)
        for k, old in before.items():  # nn.Module has made them anew
            old.update(vars(self)[k])
            vars(self)[k] = old


class ParameterModule(Module):
    "A parameter as a module, so that it can stand in a list of layers"
    def __init__(self,
        p: nn.Parameter,  # is its `val`
    ): self.val = p

    def forward(self,
        x: Tensor,  # anything
    ) -> Tensor:    # `x`
        "Nothing: who uses the parameter is its owner"
        return x


# ---- parameters

def has_params(
    m: nn.Module,  # a layer, or a module with layers
) -> bool:
    "Has it parameters, itself or in its submodules?"
    return next(m.parameters(), None) is not None


def requires_grad(
    m: nn.Module,  # a layer, or a module with layers
) -> bool:  # False if it has no parameter
    "Does its first parameter require a gradient?"
    p = next(m.parameters(), None)
    return p is not None and p.requires_grad


def total_params(
    m: nn.Module,  # a layer, or a module with layers
) -> tuple[int|None, bool]:  # None: some are lazy, and not counted before the first batch
    "The number of its parameters, tied ones counted once, and whether any of them is trained"
    ps = list(m.parameters())
    return None if any(map(is_lazy, ps)) else sum(p.numel() for p in ps), any(p.requires_grad for p in ps)


# ---- layers

def _children(m):  # what computes a parametrized weight is a part of its module, and no child
    own = m.parametrizations if is_parametrized(m) else None
    return [child for child in m.children() if child is not own]


def is_leaf(
    m: nn.Module,  # a layer, or a module with layers
) -> bool:
    "Is it without submodules? Those that compute a parametrized weight do not count"
    return not _children(m)


def own_params(
    m: nn.Module,  # whose children are looked into, however deep
) -> dict[str, nn.Parameter]:  # by name, as seen from `m`
    "The parameters that belong to no child; those of a parametrized weight are its module's"
    theirs = {p for child in _children(m) for p in child.parameters()}
    return {name: p for name, p in m.named_parameters() if p not in theirs}


def children_and_parameters(
    m: nn.Module,  # a module with layers
) -> list[nn.Module]:
    "Its children, then each parameter that belongs to none of them as a ParameterModule"
    return [*_children(m), *map(ParameterModule, own_params(m).values())]


def flatten_model(
    m: nn.Module,  # a model, or a layer
) -> list[nn.Module]:
    """The modules without children in the order in which they were registered, each once

    Parameters of a module that has children, and which belong to none of them, follow these as ParameterModules."""
    return list(dict.fromkeys(_flat(m)))


def _flat(m) -> Iterator[nn.Module]:
    if is_leaf(m): yield m
    else:
        for child in children_and_parameters(m): yield from _flat(child)


# ---- normalisation layers

def running_norms(
    m: nn.Module,  # a model, or a layer
) -> Iterator[tuple[nn.Module, bool]]:
    """Its layers with running statistics, and whether each is frozen

    One is frozen if its parameters are; one without parameters, if all of the module around it are."""
    for name, layer in m.named_modules():
        if getattr(layer, 'running_mean', None) is not None: yield layer, is_frozen(m, name)


def is_frozen(
    top: nn.Module,  # a model
    name: str,       # of a module in it
) -> bool:
    "Are its parameters frozen, or, if it has none, those of the smallest module around it that has some?"
    while not (ps := [*top.get_submodule(name).parameters()]) and name: name = name.rpartition('.')[0]
    return not any(p.requires_grad for p in ps)


def set_bn_eval(
    m: nn.Module,           # a model, or a layer
    use_eval: bool = True,  # False: put them in train
) -> None:
    "Put the normalisation layers whose parameters are frozen in eval, so that their running statistics stay"
    for layer, frozen in running_norms(m):
        if frozen: layer.train(not use_eval)
