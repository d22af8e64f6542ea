"""Hyper-parameters under fastai's names, as torch's optimizers hold them: `lr`, `mom`, `sqr_mom`, `eps`, `wd`."""
import math
from collections.abc import MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

__all__ = ['places_of', 'value_at', 'per_group', 'Hypers', 'Reading', 'stack_readings']

hyper_names = ('lr', 'mom', 'sqr_mom', 'eps', 'wd')
# torch's names → ours; 'wd', the decay done by our own hook, comes after 'weight_decay', which is 0 then
torch_names = dict(lr='lr', momentum='mom', alpha='sqr_mom', rho='sqr_mom', eps='eps', weight_decay='wd', wd='wd')


def places_of(group: dict) -> dict[str, tuple[str, int|None]]:
    "Where a group of torch's keeps each hyper-parameter it has: the key, and the index in its value if that is a tuple"
    where: dict = {ours: (key, None) for key, ours in torch_names.items()
                   if isinstance(group.get(key), (int, float, Tensor))}
    if 'betas' in group: where |= dict(mom=('betas', 0), sqr_mom=('betas', 1))
    if group.get('momentum') == 0: del where['mom']  # off: no schedule shall give a momentum where there was none
    if 'lambd' in group: del where['sqr_mom']        # the alpha of ASGD is the power by which its rate falls
    return {n: where[n] for n in hyper_names if n in where}


def value_at(group: dict, place: tuple[str, int|None]) -> float:
    v, at = group[place[0]], place[1]
    return float(v if at is None else v[at])


def per_group(v, n: int) -> list[float]:
    "`v` for each of `n` groups: a number is for all, `slice(a, b)` geometric, `slice(b)` `b/10` for all but the last"
    if not isinstance(v, slice):
        if type(v).__name__ == 'SuggestedLRs' and len(v) == 1:
            if (v := v[0]) is None: raise TypeError("`lr_find` has suggested nothing")
        elif hasattr(v, '_fields'): raise TypeError(f"{v}: give one of {', '.join(v._fields)}")
        if (a := np.asarray(v)).dtype.kind not in 'fiu' or a.ndim > 1: raise TypeError(f"{v!r} is no number, or list")
        return [float(x) for x in a] if a.ndim else [float(v)]*n
    if v.stop is None or v.start == 0 or v.step is not None:
        raise ValueError(f"{v}: give `slice(a, b)` with both above 0, or `slice(b)`")
    firsts = [v.start*(v.stop/v.start)**(i/(n-1)) for i in range(n-1)] if v.start else [v.stop/10]*(n-1)
    return [*firsts, float(v.stop)]


class Hypers(MutableMapping):
    "The hyper-parameters of one group under fastai's names, read from torch's optimizer and written to it"
    def __init__(self, opt: Any, i: int): self.opt, self.i = opt, i
    def __iter__(self): return iter(self.opt.places)
    def __len__(self): return len(self.opt.places)
    def __repr__(self): return repr(dict(self))
    def __delitem__(self, name): raise TypeError(f"a hyper-parameter cannot be removed; set `{name}` to 0")

    def find(self):
        "Look up which of torch's groups make up this one, and from which of them to read each value"
        groups = self.opt.opt.param_groups
        self.own = [k for k, g in enumerate(groups) if g['group'] == self.i]
        def mult(name, k): return 0. if name in (o := groups[k]['opts']) else o.get(f'{name}_mult', 1.)
        def best(name): return max(self.own, key=lambda k: (mult(name, k) != 0, mult(name, k) == 1))  # as it was set
        self.readers = {n: (k := best(n), place, mult(n, k) or 1.) for n, place in self.opt.places.items()}

    def __getitem__(self, name):
        k, place, mult = self.readers[name]
        return value_at(self.opt.opt.param_groups[k], place)/mult

    def __setitem__(self, name, v):
        opt = self.opt
        if name not in opt.places: raise ValueError(
            f"this {type(opt.opt).__name__} has no `{name}`, only {', '.join(opt.places)}" +
            ("; give it a momentum when it is made, as in partial(SGD, mom=0.9)" if name == 'mom' else ''))
        if not v >= 0: raise ValueError(f"`{name}` must be 0 or more, not {v}")
        if name == 'wd' and v: opt.regroup(by_decay=True)
        key, at = opt.places[name]
        for g in (opt.opt.param_groups[k] for k in self.own):
            x = g['opts'][name] if name in g['opts'] else float(v)*g['opts'].get(f'{name}_mult', 1.)
            if isinstance(g[key], Tensor): g[key].fill_(x)  # it stays one: a compiled or captured step reads it there
            else: g[key] = x if at is None else tuple(x if k == at else b for k, b in enumerate(g[key]))


class Reading(NamedTuple):
    "The hyper-parameters at some moment, as torch's groups held them; made each batch, so only looked at later"
    raw: list      # what was read, by name and then by group
    layout: tuple  # the names, and the multiplier of each value that was read

    @property
    def values(self) -> dict[str, list[float]]:  # one value for each group
        "The values by name"
        names, mults = self.layout
        flat, n = [float(v)/m for v, m in zip(self.raw, mults)], len(mults)//len(names)
        return {name: flat[i*n:(i+1)*n] for i, name in enumerate(names)}


def stack_readings(
    readings: Sequence[Reading],
) -> dict[str, np.ndarray]:       # `(n_readings, n_groups)` by name; empty without readings
    "Readings as arrays; NaN for those of an optimizer with other names or groups than the last one's"
    if not readings: return {}
    (names, mults), n = readings[-1].layout, len(readings)
    fits = np.array([r.layout[0] == names and len(r.layout[1]) == len(mults) for r in readings])
    alike, raw = [r for r, fit in zip(readings, fits) if fit], np.full((n, len(mults)), math.nan)
    raw[fits] = np.array([r.raw for r in alike], dtype=float)/np.array([r.layout[1] for r in alike])
    return {name: values.T for name, values in zip(names, raw.T.reshape(len(names), -1, n))}
