"""Transfer learning: the body of a trained model, a new head, and how its weights start.

`nn.Sequential(create_body(model), create_head(n, n_out))`, then `init_head`, is the usual order; `default_split` of
splitters.py makes two parameter groups of the result."""
import copy
import re
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from .utils import check_number

__all__ = ['has_pool_type', 'Body', 'create_body', 'AdaptiveConcatPool2d', 'SigmoidRange', 'create_head', 'apply_init',
           'init_head']

pool_name = re.compile(r'Pool[123]d$')  # by name, so that the pooling layers of other libraries count too


# ---- the body

def has_pool_type(
    m: nn.Module,  # a layer, or a module with layers
) -> bool:
    "Is it a pooling layer, by the name of its class, or is there one inside it?"
    return any(pool_name.search(type(o).__name__) for o in m.modules())


class _Reached(BaseException):  # a model that catches exceptions shall not catch this one
    "Carries what came to the cut out of the model's forward: its `args` are the cut's key and that value"


class _Cut(nn.Module):
    "Stands where the body ends, in place of `layer`"
    def __init__(self, layer: nn.Module, key: object):
        super().__init__()
        self.training, self.key, self.kind = layer.training, key, type(layer).__name__

    def forward(self, *args, **kwargs):
        if len(values := [*args, *kwargs.values()]) == 1: raise _Reached(self.key, values[0])
        raise RuntimeError(f"the model gives the {self.kind} at the cut {len(values)} inputs, and a body has one "
                           "output: `cut` it at another layer")


class _Removed(nn.Module):
    "Stands in place of `layer`, which belongs to the head"
    def __init__(self, layer: nn.Module, name: str, cut: str):
        super().__init__()
        self.training, self.name, self.cut = layer.training, name, cut

    def forward(self, *args, **kwargs):
        raise RuntimeError(f"`{self.name}` comes after `{self.cut}` among the children and was removed with the head, "
                           "but the forward uses it in the body: `cut` the model at another layer")
    __iter__ = __getitem__ = forward  # it may have been a ModuleList


class Body(nn.Module):
    """A model's own forward up to one of its layers, whose input is the output

    `model` has the layers of the given one, which stays as it is, but for the cut layer and what has parameters and
    comes after it. What belongs to a child before the cut, or to no child, is kept though the body may not use it.
    `torch.compile` takes it whole, `torch.export` with `strict=True`: the forward is left by an exception.
    Raises: ValueError if there is no such layer, or it is a list of layers; RuntimeError, when it is called, if the
    layer is not reached, or a layer is used that comes after it."""
    def __init__(self,
        model: nn.Module,  # any model, which is not changed
        cut: str,          # dotted name of the layer in front of which the body ends
    ):
        super().__init__()
        self.cut, self.training = cut, model.training
        self.key = object()  # tells this cut from that of a body inside this one
        self.model = self._cut(model, [], cut.split('.'))

    def _cut(self, m: nn.Module, before: list[str], path: list[str]) -> nn.Module:
        "A copy of `m`, found at `before`, that ends at `path`; it shares all that is not on the path"
        if not path:
            if isinstance(m, (nn.ModuleList, nn.ModuleDict)): raise ValueError(
                f"`{self.cut}` is a {type(m).__name__}, which is not called itself; cut at a layer inside it, such as "
                f"'{self.cut}.{next(iter(m._modules), 0)}'")
            return _Cut(m, self.key)
        layers = _children(m)
        if path[0] not in layers: raise ValueError(
            f"there is no layer '{self.cut}': `{'.'.join(before) or type(m).__name__}` has {_listed(layers)}")
        new, at = copy.copy(m), list(layers).index(path[0])
        removed = {n: _Removed(o, '.'.join([*before, n]), self.cut) for i, (n, o) in enumerate(layers.items())
                   if i > at and any(True for _ in o.parameters())}
        new._modules = {**m._modules, **removed, path[0]: self._cut(layers[path[0]], [*before, path[0]], path[1:])}
        return new

    def forward(self,
        *args,     # as the model takes them
        **kwargs,  # as the model takes them
    ) -> Any:      # what the model gives to the layer at the cut
        "Run the model up to the cut"
        try: self.model(*args, **kwargs)
        except _Reached as e:
            key, x = e.args
            if key is not self.key: raise
            return x
        raise RuntimeError(f"the forward of `{type(self.model).__name__}` ended without calling `{self.cut}`, where "
                           "the body should end: `cut` the model at a layer that it calls")


def _children(m: nn.Module) -> dict[str, nn.Module]:
    "Children by name; one that is there twice is listed twice, which `children` does not do"
    return {n: o for n, o in m._modules.items() if o is not None}


def _listed(layers: dict[str, nn.Module]) -> str:
    return ', '.join(f'{n} ({type(m).__name__})' for n, m in layers.items())


def _head_at(model: nn.Module) -> int:
    "At which child the head begins: the last one that is a pooling layer, or the very last if it has one inside"
    layers = _children(model)
    pools = [i for i, m in enumerate(layers.values())
             if pool_name.search(type(m).__name__) or i == len(layers)-1 and has_pool_type(m)]
    def in_body(o): return isinstance(o, _ConvNd) and max(o.kernel_size) > 1  # heads have some of size 1
    at = pools[-1] if pools else 0
    if at and not (rest := [n for n in list(layers)[at:] if any(map(in_body, layers[n].modules()))]): return at
    why = (f"the last pooling layer is followed by convolutions in `{rest[0]}`" if at else
           "no child after the first is a pooling layer")
    raise ValueError(f"where the head of `{type(model).__name__}` begins is not clear: {why}. Give `create_body` "
                     "cut='name' of the first layer of the head, or cut=-1 if that is the last child; the children are "
                     f"{_listed(layers)}")


def create_body(
    model: nn.Module,  # a model with a head, such as a classifier; it is not changed
    cut: int|str|Callable[[nn.Module], nn.Module]|None = None,  # where the body ends; None: at the last pooling
) -> nn.Module:        # shares its layers and parameters with `model`
    """The model without its head

    `cut` is a number of children (negative: counted from the end), the dotted name of the layer in front of which the
    body ends, or a function of the model that returns the body. None: the last child that is a pooling layer, or the
    last of all if it has one inside, and no convolution larger than 1 follows.
    An `nn.Sequential` gives one of its first children. Any other model keeps its own forward, which ends where it
    calls the layer (see `Body`): functional activations and children in another order do no harm, and where the forward
    itself pools, as in torchvision's MobileNetV2, cut='classifier' gives pooled features, `(bs, n)`.
    Raises: ValueError if there is no such layer, nothing comes before it, or None does not find it; TypeError if `cut`
    is something else, or returns no module."""
    if not isinstance(model, nn.Module): raise TypeError(
        f"`model` is {model!r}, no nn.Module" + ("; call it: it makes one" if callable(model) else ""))
    layers, plain = _children(model), type(model).forward is nn.Sequential.forward
    if callable(cut):
        body = cut(model)
        if isinstance(body, nn.Module): return body
        raise TypeError(f"`cut` returned a `{type(body).__name__}`; it must return the body, an `nn.Module`")
    at = _head_at(model) if cut is None else cut
    if isinstance(at, str):
        if not plain or at not in layers: return Body(model, at)
        at = list(layers).index(at)
    if not isinstance(at, Integral) or isinstance(at, bool):
        raise TypeError(f"`cut` is {at!r}: give a number, a name, a function, or None")
    n = int(at+len(layers) if at < 0 else at)
    if not 0 < n < len(layers)+plain: raise ValueError(
        f"cut={cut!r} is no place to cut `{type(model).__name__}` after its first child and before its end; the "
        f"children are {_listed(layers)}")
    if not plain: return Body(model, list(layers)[n])
    body = nn.Sequential(*list(layers.values())[:n])
    body.training = model.training
    return body


# ---- the head

class AdaptiveConcatPool2d(nn.Module):
    "Largest and mean value of each channel side by side: `(bs, n, h, w)` becomes `(bs, 2*n, 1, 1)`, largest first"
    def forward(self,
        x: Tensor,  # `(bs, n, h, w)`
    ) -> Tensor:    # `(bs, 2*n, 1, 1)`
        "The two poolings, concatenated"
        return torch.cat([nn.functional.adaptive_max_pool2d(x, 1), nn.functional.adaptive_avg_pool2d(x, 1)], 1)


class SigmoidRange(nn.Module):
    "A sigmoid between `low` and `high`"
    def __init__(self,
        low: float,   # the limit for large negative input
        high: float,  # the limit for large positive input
    ):
        super().__init__()
        self.low, self.high = low, high

    def forward(self,
        x: Tensor,  # any shape
    ) -> Tensor:    # in the shape of `x`
        "The sigmoid of `x`, scaled"
        return torch.sigmoid(x)*(self.high-self.low) + self.low


def create_head(
    n_in: int,          # channels that the body gives
    n_out: int,         # scores for each item
    lin_ftrs: Sequence[int] = (512,),   # sizes of the layers between
    ps: float|Sequence[float] = .5,     # dropout before each linear layer; a number is for the last, half of it before
    pool: str|None = 'concat',          # 'concat' (largest and mean), 'avg', or None for a body that gives `(bs, n_in)`
    first_bn: bool = True,              # batch normalisation before the first linear layer too?
    y_range: tuple[float, float]|None = None,  # limits of the output, as by a sigmoid; None: no limits
) -> nn.Sequential:     # takes `(bs, n_in, h, w)`, or `(bs, n_in)` if `pool` is None, and gives `(bs, n_out)`
    """Pooling, then batch normalisation, dropout and a linear layer for each size, with ReLU between

    `n_in` is what the body gives: `create_body(model)(x).shape[1]`.
    Raises: ValueError if `pool` is something else, there is not one of `ps` for each linear layer, or `y_range` does
    not rise; TypeError if a size is none."""
    for name, n in dict(n_in=n_in, n_out=n_out).items():
        check_number(f'create_head: `{name}`', n, 1, whole=True)
    if isinstance(lin_ftrs, Integral): raise TypeError(f"create_head: `lin_ftrs` is {lin_ftrs}; give a list of sizes")
    if y_range and not y_range[0] < y_range[1]: raise ValueError(f"create_head: `y_range` {y_range} must rise")
    pools: dict[str|None, list[nn.Module]] = {'concat': [AdaptiveConcatPool2d()], 'avg': [nn.AdaptiveAvgPool2d(1)],
                                              None: []}
    if pool not in pools: raise ValueError(f"`pool` is {pool!r}: give 'concat', 'avg' or None")
    sizes = [n_in*2 if pool == 'concat' else n_in, *lin_ftrs, n_out]
    n_lin = len(sizes)-1
    drops = list(ps) if isinstance(ps, Sequence) else [float(ps)/2]*(n_lin-1)+[float(ps)]
    if len(drops) != n_lin: raise ValueError(
        f"`ps` has {len(drops)} values for {n_lin} linear layers, one for each of `lin_ftrs` and the last; a number is "
        "for all of them")
    layers = [*pools[pool], nn.Flatten()]
    for i, (a, b, p) in enumerate(zip(sizes, sizes[1:], drops)):
        if i: layers.append(nn.ReLU())
        if i or first_bn: layers.append(nn.BatchNorm1d(a))
        layers += [nn.Dropout(p), nn.Linear(a, b)]
    return nn.Sequential(*layers, *([SigmoidRange(*y_range)] if y_range else []))


# ---- how weights start

def _init(m: nn.Module, init: Callable, done: set[Tensor]) -> None:
    "`apply_init`, but for the parameters that are `done`"
    for layer in m.modules():
        if isinstance(layer, (nn.LayerNorm, nn.RMSNorm)): continue  # other norms have weights of one dimension
        ps = dict(layer.named_parameters(recurse=False))  # also `weight_ih_l0`, `in_proj_bias`
        weights = [p for n, p in ps.items() if 'weight' in n and p.ndim > 1]
        biases = [p for n, p in ps.items() if 'bias' in n] if weights else []
        for p, f in [*((p, init) for p in weights), *((p, nn.init.zeros_) for p in biases)]:
            if p not in done: f(p)
            done.add(p)


@torch.no_grad()
def apply_init(
    m: nn.Module,  # whose weights start anew
    init: Callable[[Tensor], Any] = nn.init.kaiming_normal_,  # fills a weight in place
) -> None:
    """Fill the weights of all layers by `init` and their biases with 0, but leave normalisation layers as they are

    Weights are parameters of that name with two or more dimensions; one that is shared is filled once."""
    _init(m, init, set())


@torch.no_grad()
def init_head(
    model: nn.Module,  # an `nn.Sequential` whose last child is the head
    init: Callable[[Tensor], Any] = nn.init.kaiming_normal_,  # fills a weight in place
) -> None:
    """`apply_init` for the head only; what it shares with the body is the body's

    Raises: ValueError if `model` is no `nn.Sequential` of two or more."""
    if not isinstance(model, nn.Sequential) or len(model) < 2: raise ValueError(
        f"`init_head` needs an `nn.Sequential` of a body and a head, not a `{type(model).__name__}` with "
        f"{len(_children(model))} children; `apply_init` takes any module, such as the head itself")
    *body, head = model
    _init(head, init, {p for m in body for p in m.parameters()})
