"""Parameter groups, hyper-parameters and freezing over any torch optimizer.

`make_opt` builds what `learn.opt` is: an `Optimizer` around torch's own, with one group for each of the splitter's.
Inside torch's optimizer such a group can be several `param_groups` (weights that decay, biases that do not, parameters
with a multiplier); two keys of our own say what each is: `'group'`, the number of the splitter's group, and `'opts'`,
the multipliers and fixed values of its parameters.
"""
import math
from collections.abc import Callable, Iterable
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import _global_optimizer_post_hooks as global_post, _global_optimizer_pre_hooks as global_pre

from .hypers import Hypers, Reading, per_group, places_of, value_at
from .optimizers import (SGD, Adadelta, Adagrad, Adam, Adamax, Lamb, Larc, Lookahead, NAdam, OptimWrapper, QHAdam,
                         RAdam, RMSProp, attach_hooks, opt_lr, ranger, torch_opt)
from .splitters import all_names, check_groups, find_opts, is_bias, norm_params, params, shape, trainable_params

__all__ = ['Optimizer', 'make_opt', 'missing_params', 'params', 'trainable_params', 'opt_lr', 'OptimWrapper',
           'SGD', 'RMSProp', 'Adam', 'RAdam', 'NAdam', 'Adagrad', 'Adadelta', 'Adamax', 'QHAdam', 'Larc', 'Lamb',
           'Lookahead', 'ranger']

class Optimizer:
    """A torch optimizer with fastai's face; `opt` is torch's own, which GradScaler and torch's schedulers take

    `hypers` has a mapping for each group, which can be written to. A multiplier of `param_opts` goes on top of what is
    set there; a value that `param_opts` fixes stays."""
    made_from: Any = None  # what the learner built it from, to see whether it still is the right one
    frozen_idx = 0         # the groups before this one are frozen
    own_wd: Any = None     # weight decay by group, where a fit has set another for itself
    told: frozenset = frozenset()  # parameters left out that the user was warned of
    _last: Any = None      # the latest Reading

    def __init__(self,
        opt: torch.optim.Optimizer,            # has exactly one group for each of `param_lists`
        param_lists: list[list[Tensor]],       # the parameters of each group
        opts: dict[Tensor, dict[str, float]],  # of each parameter: fixed values by name, multipliers by `name_mult`
        names: dict[Tensor, list[str]],        # all names of each parameter
        always: set[Tensor],                   # parameters that `freeze_to` leaves trainable
    ):
        "Raises: ValueError if `opts` has names that mean nothing to the optimizer."
        self.opt, self.param_lists, self.opts, self.names, self.always = opt, param_lists, opts, names, always
        self.places, self._by_decay = places_of(opt.param_groups[0]), None
        self._all = [p for ps in param_lists for p in ps]
        known = {f'{n}{end}' for n in self.places for end in ('', '_mult')}
        unknown = {k for o in opts.values() for k in o} - known
        if unknown: raise ValueError(f"`param_opts`: {type(opt).__name__} has no {', '.join(sorted(unknown))}, only "
                                     f"{', '.join(sorted(known))}")
        start = [{n: value_at(g, place) for n, place in self.places.items()} for g in opt.param_groups]
        self.hypers = [Hypers(self, i) for i in range(len(param_lists))]
        self.regroup(by_decay=False)
        for h, values in zip(self.hypers, start): h.update(values)

    def __getattr__(self, name):
        hint = f"; torch's own optimizer has it: `learn.opt.opt.{name}`" if hasattr(vars(self).get('opt'), name) else ''
        raise AttributeError(f"`Optimizer` has no `{name}`{hint}", name=name, obj=self)

    def __setstate__(self, state: dict):
        self.__dict__.update(state)
        attach_hooks(self.opt)  # torch does not copy hooks

    def step(self) -> None:
        """One step of torch's optimizer; parameters without gradient stay as they are

        torch wraps every `step` in its hooks and a mark for its profiler; while there is no hook and no profiler, the
        step inside is called, which saves 10 µs and more: as long as small models take for all else."""
        opt, step = self.opt, type(self.opt).step
        listened = opt._optimizer_step_pre_hooks or opt._optimizer_step_post_hooks or global_pre or global_post \
            or 'step' in opt.__dict__ or torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]
        if listened or not hasattr(step, 'hooked'): opt.step()
        else: step.__wrapped__(opt)

    def zero_grad(self) -> None:
        "Drop all gradients, also those of parameters that no group holds: they would add up for ever"
        for p in self.names: p.grad = None

    def all_params(self) -> list[Tensor]:
        "The parameters of all groups"
        return list(self._all)

    def read(self) -> Reading:  # the same object as long as nothing changes
        "The hyper-parameters now; without a look at what they mean, since it is done for every batch"
        groups = self.opt.param_groups
        raw = [groups[k][key] if at is None else groups[k][key][at] for k, key, at in self._reads]
        tensors = Tensor in map(type, raw)
        if tensors or not self._last or self._last.layout is not self._layout or raw != self._last.raw:
            # torch's schedulers change a tensor in place
            raw = [v.clone() if isinstance(v, Tensor) else v for v in raw] if tensors else raw
            self._last = Reading(raw, self._layout)
        return self._last

    def _find(self):  # where the hyper-parameters are in torch's groups, once these have been laid out
        for h in self.hypers: h.find()
        readers = [h.readers[n] for n in self.places for h in self.hypers]
        self._reads = [(k, *place) for k, place, _ in readers]
        self._layout = tuple(self.places), [mult for _, _, mult in readers]

    def regroup(self,
        by_decay: bool,  # do parameters with another decay stand apart? While it is 0 that would only cost time
    ) -> None:
        "Lay out torch's `param_groups` by splitter's group and by options; each takes over the values it had"
        if by_decay == self._by_decay: return
        old = {p: g for g in self.opt.param_groups for p in g['params']}
        new: dict[tuple, dict] = {}
        for i, ps in enumerate(self.param_lists):
            for p in ps:
                opts = {k: v for k, v in self.opts[p].items() if by_decay or k != 'wd_mult'}
                key = i, *sorted(opts.items())
                if key not in new:
                    kept = {k: v.clone() if isinstance(v, Tensor) else v for k, v in old[p].items()}  # each its own
                    new[key] = {**kept, 'params': [], 'group': i, 'opts': opts}
                new[key]['params'].append(p)
        self.opt.param_groups[:] = new.values()
        self._find()
        self._by_decay = by_decay

    def set_hyper(self,
        name: str,   # `lr`, `mom`, `sqr_mom`, `eps` or `wd`
        value: Any,  # a number, a list with one for each group, `slice(a, b)` (geometric), `slice(b)` (b/10 … b/10, b)
    ) -> None:
        """Set a hyper-parameter of all groups, from the next step on

        Raises: ValueError if the optimizer has no such hyper-parameter, or there is not one value for each group, 0 or
        more; TypeError if it is no number."""
        for h, v in zip(self.hypers, self.values_of(name, value)): h[name] = v

    def values_of(self,
        name: str,     # for messages
        value: Any,    # as `set_hyper` takes it
    ) -> list[float]:  # one for each group
        """What a hyper-parameter would be in each group

        Raises: ValueError if there is not one value for each group, 0 or more; TypeError if it is no number."""
        try: values = per_group(value, len(self.hypers))
        except TypeError as e:
            raise TypeError(f"`{name}` is {value!r}: give a number, a list of them, or a slice ({e})") from None
        if len(values) != len(self.hypers):
            raise ValueError(f"{len(values)} values of `{name}` for {len(self.hypers)} groups:\n{self}")
        if bad := [v for v in values if not 0 <= v < math.inf]:
            raise ValueError(f"`{name}` must be 0 or more, not {bad[0]}")
        return values

    def set_hypers(self,
        **hypers,  # values by name, each as `set_hyper` takes it
    ) -> None:
        "`set_hyper` for each of `hypers`"
        for name, value in hypers.items(): self.set_hyper(name, value)

    def freeze_to(self,
        n: int,  # number of groups to freeze; if negative, all but the last `-n`
    ) -> None:
        """Freeze the first groups (but for normalisation layers if `train_bn`) and make the others trainable

        Raises: ValueError if there are too few groups, TypeError if `n` is no whole number."""
        if not isinstance(n, Integral) or isinstance(n, bool): raise TypeError(
            f"`freeze_to({n!r})`: give the number of groups to freeze, a whole one")
        n_groups = len(self.param_lists)
        if not -n_groups <= n < n_groups or (n and n_groups == 1): raise ValueError(
            f"`freeze_to({n})` needs more than {n_groups} group{'s'*(n_groups > 1)}, which a `splitter` that returns "
            f"several lists of parameters makes:\n{self}")
        self.frozen_idx = n % n_groups
        for i, ps in enumerate(self.param_lists):
            for p in ps:
                if not (p.is_floating_point() or p.is_complex()): continue  # integers have no gradient
                p.requires_grad_(i >= self.frozen_idx or p in self.always)
                if not p.requires_grad: p.grad = None  # else torch would step it once more

    def freeze(self) -> None:
        "Freeze all groups but the last"
        self.freeze_to(-1)

    def unfreeze(self) -> None:
        "Make all parameters trainable, also those frozen by hand"
        self.freeze_to(0)

    def clear_state(self) -> None:
        "Forget momenta and averages, as if no step had been made; hyper-parameters stay"
        self.opt.state.clear()

    def state_to_device(self) -> None:
        "Move the state to where its parameters are now"
        for g in self.opt.param_groups:
            for p in g['params']:
                for k, v in self.opt.state.get(p, {}).items():
                    # torch keeps `step` on the CPU, except in the fused and the capturable form
                    if isinstance(v, Tensor) and (k != 'step' or g.get('fused') or g.get('capturable')):
                        self.opt.state[p][k] = v.to(p.device)

    def state_dict(self) -> dict[str, Any]:  # tensors and plain values only
        "torch's `state` and `param_groups`, parameters numbered in the order of the groups, and what they belong to"
        number = {p: i for i, p in enumerate(self._all)}
        order = [number[p] for g in self.opt.param_groups for p in g['params']]
        state = self.opt.state_dict()
        return dict(state={order[k]: s for k, s in state['state'].items()},
                    param_groups=[{**g, 'params': [order[k] for k in g['params']]} for g in state['param_groups']],
                    hypers=[dict(h) for h in self.hypers], kind=self._kind(), groups=self._described(),
                    types=[str(p.dtype) for p in self._all])

    def load_state_dict(self,
        state: dict[str, Any],  # what `state_dict` returned
    ) -> None:
        """Load state and hyper-parameters

        Raises: ValueError if they are of another optimizer, or of other groups, shapes or `param_opts`."""
        if why := self.misfit(state): raise ValueError(why)
        self.opt.param_groups[:] = [{'params': [self._all[k] for k in g['params']]} for g in state['param_groups']]
        self.opt.load_state_dict({k: state[k] for k in ('state', 'param_groups')})
        for k, values in state['state'].items():
            for name, v in values.items():  # torch gives them the parameter's type: right for what had it, else rounded
                mine = self.opt.state[self._all[k]]
                if isinstance(v, Tensor) and mine[name].dtype != v.dtype and str(v.dtype) != state['types'][k]:
                    mine[name] = v.to(mine[name].device)
        self._find()
        self._by_decay = None  # whatever it was when the state was saved

    def misfit(self,
        state: dict[str, Any],             # what `state_dict` returned
        left_out: Iterable[Tensor] = (),   # parameters whose state is not to be loaded
    ) -> str:                              # '' if it fits
        "Why a state cannot be loaded: it is of another optimizer, or of other groups, shapes or `param_opts`"
        if state['kind'] != self._kind(): return f"a state of {state['kind']} does not fit {self._kind()}"
        counts = [len(ps) for ps in state['groups']]
        if counts != [len(ps) for ps in self.param_lists]:
            return f"a state of groups with {counts} tensors does not fit these:\n{self}"
        def tell(options): return f' {options}' if options else ''
        left_out, rows = {*left_out}, zip(self.param_lists, state['groups'], self._described())
        wrong = [f"\n`{name}` {shape}{tell(opts)} in the state, `{n}` {s}{tell(o)} here" for ps, theirs, ours in rows
                 for p, (name, shape, opts), (n, s, o) in zip(ps, theirs, ours)
                 if p not in left_out and (opts != o or shape != s and None not in (shape, s))]  # None: a lazy one
        return f"the state does not fit {len(wrong)} of the parameters:{''.join(wrong[:5])}" if wrong else ''

    def _kind(self) -> str: return f"{type(self.opt).__name__} with {', '.join(self.places)}"

    def _described(self) -> list[list[list]]:
        return [[[self.names[p][0], shape(p), self.opts[p]] for p in ps] for ps in self.param_lists]

    def __repr__(self) -> str:
        rows = [['group', 'tensors', 'parameters', *self.places, 'frozen', 'from … to']]
        for i, (ps, h) in enumerate(zip(self.param_lists, self.hypers)):
            n_frozen = sum(not p.requires_grad for p in ps)
            rows.append([str(i), str(len(ps)), '?' if any(map(is_lazy, ps)) else f'{sum(p.numel() for p in ps):,}',
                         *(f'{v:.3g}' for v in h.values()), {0: 'no', len(ps): 'yes'}.get(n_frozen, 'partly'),
                         f'{self.names[ps[0]][0]} … {self.names[ps[-1]][0]}'])
        widths = [max(map(len, column)) for column in zip(*rows)]
        return '\n'.join([type(self.opt).__name__, *('  '.join(map(str.ljust, r, widths)).rstrip() for r in rows)])


# ---- making one

def missing_params(
    opt: Optimizer,
    model: nn.Module,
    loss_func: Any = None,  # its parameters too, if it is a module
) -> list[str]:
    "Names of the trainable parameters that no group holds"
    return [ns[0] for p, ns in all_names(model, loss_func).items() if p.requires_grad and p not in opt.opts]


def make_opt(
    opt_func: Callable,         # a torch.optim class, a partial of one, or a function of groups and `lr`
    groups: Iterable,           # what the splitter returned: parameters, or a list of them for each group
    model: nn.Module,
    lr: Any,                    # as `Optimizer.set_hyper` takes it
    wd: Any = None,             # weight decay, likewise; None leaves the optimizer's own
    wd_bn_bias: bool = False,   # also decay biases and normalisation layers?
    train_bn: bool = True,      # do normalisation layers of frozen groups go on training?
    param_opts: dict[str, dict[str, float]]|None = None,  # by name or its last part, with wildcards: `lr_mult`, `wd` …
    loss_func: Any = None,      # may have parameters that the splitter returned
) -> Optimizer:
    """The optimizer that `opt_func` makes, as `learn.opt`

    In `param_opts`, `lr_mult=10` multiplies whatever `lr` is set to, `lr=1e-4` fixes it; so for each hyper-parameter.
    Raises: ValueError if parameters are missing, twice in the groups or foreign, or `param_opts` do not fit;
    TypeError if `opt_func` cannot be used."""
    names = all_names(model, loss_func)
    lists = check_groups(groups, names, type(model).__name__)
    opts = find_opts(param_opts or {}, {p: names[p] for ps in lists for p in ps})
    norms = norm_params(model, loss_func)
    opt = torch_opt(opt_func, lists, float(lr.stop if isinstance(lr, slice) else np.ravel(lr)[-1]))
    if not wd_bn_bias and 'wd' in places_of(opt.param_groups[0]):
        for p, o in opts.items():
            if p in norms or is_bias(names[p]): o.setdefault('wd_mult', 0.)
    if any(getattr(m, 'sparse', None) is True for m in model.modules()):  # an embedding whose gradients nothing fuses
        for g in opt.param_groups: g |= {'fused': None} if g.get('fused') else {}
    opt = Optimizer(opt, lists, opts, names, norms if train_bn else set())
    opt.set_hypers(lr=lr, **({} if wd is None else {'wd': wd}))
    return opt
