"""EMA, an average of the weights over training with which evaluations are done, and what SWA shares with it.

The average is kept beside the model, by the names of its tensors: no module is copied, so that any model will do.
For an evaluation it is copied into the model's own tensors, which optimizers, compiled code, tied and computed weights
refer to, and what they held is put back afterwards; that takes as much memory as the gradients that are not there then.
"""
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from fastcore.basics import patch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..callback import Callback
from ..display import say
from ..learner import Learner
from ..utils import check_number, warn
from ..weights import named_layers, tied, weights_of
from .schedule import steps_of

__all__ = ['WeightAverage', 'EMA']

block = 'block'  # who holds the average in the model, if it is `learn.averaged()`


def _wide(t: Tensor) -> torch.dtype: return t.dtype if t.element_size() >= 4 else torch.float32


class WeightAverage(Callback):
    """What EMA and SWA have in common: the average, evaluations with it, and files

    It begins at `start`; an end of an epoch that is just there counts. Evaluations within a fit, and others as long as
    the callback is there, are done with the average once it has begun.
    `learn.save`, SaveModelCallback and Checkpoint keep the trained weights under their usual names, and the average by
    `'ema'` or `'swa'`: its `'model'` is a `state_dict`. What loads such a file gets both; if there is no average in
    the file, a new one begins. Parameters that come later take part from the next epoch on.
    Raises: ValueError if a parameter means nothing; RuntimeError from a fit within `learn.averaged()`.
    Order: after what changes weights after a step (0, unless it says otherwise), and after clipping (11)."""
    order = 12
    run_in = {'fit', 'validate', 'predict'}
    unique = True
    n_averaged = 0       # how many times weights have come in; 0: there is no average
    first = 0            # value of `learn.n_step` when the fit began
    _holder: Any = None  # what has put the average into the model: the scope of an evaluation, or `block`
    _raw: Any = ()       # each tensor of the model that was overwritten, with a copy of what it held

    def __init__(self,
        start: float|str,  # from where in the fit on: a fraction, 0 to 1, '500it' or '2ep'
    ):
        try: steps_of(start, 1, 1)
        except ValueError as e: raise ValueError(f"{self}: `start`: {e}") from None
        self.start = start
        self._forget()

    def _forget(self):
        self.n_averaged, self._raw, self._holder = 0, (), None
        self.average: dict[str, Tensor] = {}  # by name; half precision would be too coarse for it
        self._unmatched()

    def _unmatched(self):  # the average is from elsewhere
        self.known: dict[str, Tensor] = {}    # the parameters that it is of
        self.places: list[tuple] = []         # the dict and the key where the model has each tensor

    # ---- taking weights in

    def _has_begun(self, done):  # `done`: the share of the fit, 0 to 1
        if isinstance(self.start, str) and self.start.endswith('it'):
            return self.learn.n_step-self.first >= int(self.start[:-2])
        pct = float(self.start[:-2])/self.n_epoch if isinstance(self.start, str) else self.start
        return done*(1+1e-9) >= pct  # sums of shares are rounded

    def _is_averaged(self, m: nn.Module, key: str) -> bool: "Is this parameter or buffer?"; return key in m._parameters

    def _find(self) -> Iterator[tuple[str, tuple]]:  # by name, once each, where the tensors are
        seen = set()
        for prefix, top in (('', self.model), ('loss_func.', self.loss_func)):
            for name, m in named_layers(top) if isinstance(top, nn.Module) else ():
                for where in (m._parameters, m._buffers):
                    for key, t in where.items():
                        if t is None or is_lazy(t) or id(t) in seen or not self._is_averaged(m, key): continue
                        seen.add(id(t))
                        if not t.is_meta and (t.is_floating_point() or t.is_complex()):
                            yield prefix + f'{name}.{key}'.lstrip('.'), (where, key)

    def _match(self):  # bring the average into line with the model as it is now
        places = dict(self._find())
        now = {k: where[key] for k, (where, key) in places.items()}
        fits = {k for k, t in now.items() if k in self.average and self.average[k].shape == t.shape
                and (not isinstance(t, nn.Parameter) or self.known.get(k, t) is t)}
        if self.average and not fits: self._forget()  # another model
        self.average = {k: self.average[k].to(t.device, _wide(t)) if k in fits
                        else t.detach().to(_wide(t), copy=True) for k, t in now.items()}
        self.places = list(places.values())
        self.known = {k: t for k, t in now.items() if isinstance(t, nn.Parameter)}

    @torch.no_grad()
    def _take(self, share):  # of the average, which the weights as they are now are to make up
        if not self.n_averaged: self.average = {}
        if not self.places or not self.n_averaged: self._match()
        average = list(self.average.values())
        if self.n_averaged:
            now = [t if t.dtype == a.dtype else t.to(a.dtype)
                   for a, t in zip(average, [where[key] for where, key in self.places])]
            torch._foreach_lerp_(average, now, share)  # pyright: ignore[reportPrivateImportUsage]
        self.n_averaged += 1

    def before_fit(self):
        if self.learn.run_kind != 'fit': return
        if self._holder is block: raise RuntimeError(
            "a fit within `learn.averaged()` would train the average: leave the block before")
        self._swap_out()
        self.first = self.learn.n_step

    def before_train(self):
        if self.n_averaged: self._match()

    # ---- evaluations

    def _to_swap(self) -> dict[str, tuple[Tensor, Tensor|None]]:
        "By name a tensor of the model, and what it is to hold; None: what it will hold is yet to be found"
        return {k: (where[key], a) for (k, a), (where, key) in zip(self.average.items(), self.places)}

    def _write(self, pairs):  # into `.data`: a batch that is under way can still go backward
        torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
            [t.data for t, _ in pairs], [v for _, v in pairs])

    def _swap_in(self, holder):
        self._match()
        pairs = list(self._to_swap().values())
        self._raw, self._holder = [(t, t.detach().clone()) for t, _ in pairs], holder
        self._write([(t, v) for t, v in pairs if v is not None])

    def _swap_out(self):
        if self._raw:
            try: self._write(self._raw)
            except BaseException:  # an interrupt in its midst
                self._write(self._raw)
                raise
        self._raw, self._holder = (), None

    def before_validate(self):
        if self.n_averaged and not self._raw: self._swap_in(self.learn._scope)

    def cleanup_validate(self):
        is_there = any(cb is self for cb in self.learn.cbs)  # else it is being removed, within whatever scope
        if self._holder is self.learn._scope or not is_there and self._holder is not block: self._swap_out()

    def after_fit(self):
        if self.learn.run_kind != 'fit' or self.learn.rehearsing or self.learn.paused: return
        if not self.n_averaged and self.learn.n_step > self.first: warn(
            f"{self}: there is no average, since it begins at {self.start!r}, and the fit had "
            f"{self.learn.n_step-self.first} steps in {self.n_epoch} epochs")
        elif any(cb is self for cb in self.learn.passing): say(
            f"{self}: the average goes with this fit: what is evaluated from now on has the weights as they are. Give "
            "it to `Learner(cbs=…)` or `learn.add_cb` to keep it")

    def cleanup_fit(self):
        if self._holder is not block: self._swap_out()  # a second interrupt may have struck while that was done

    @contextmanager
    def swapped(self):
        "With the average in the model; nothing changes if it is there already"
        if self._raw:
            yield
            return
        try:
            self._swap_in(block)
            yield
        finally: self._swap_out()

    # ---- files and checkpoints

    def _more(self) -> dict[str, Any]: "What else goes into a file"; return {}
    def _stats(self) -> dict[str, Tensor]: "What is not averaged, but goes with the average"; return {}

    def before_save(self,
        state: dict[str, Any],  # what is being saved: the average joins it
    ):
        if not self.n_averaged: return
        whole = 'callbacks' in state  # by which training goes on
        if self._raw and (whole or self._holder is not block):
            _put(state, {k: raw for k, (_, raw) in zip(self._to_swap(), self._raw)}, tied(self.model, self.loss_func))
        elif self._holder is block: return  # that the average is saved as the model is what is wanted
        kept = state['callbacks'].get(self.name, {}) if whole else {}  # the same tensors: they are in the file once
        values = {**kept.get('average', self.average), **kept.get('stats', self._stats())}
        more = {k: kept.get(k, v) for k, v in self._more().items()}
        new: dict[str, Any] = dict(model=weights_of(self.model), n_averaged=self.n_averaged, **more)
        if isinstance(self.loss_func, nn.Module): new['loss'] = weights_of(self.loss_func)
        _put(new, values, tied(self.model, self.loss_func))
        state[self.name] = new

    def after_load(self,
        state: dict[str, Any],  # what was loaded
    ):
        if whole := state.get('callbacks', {}).get(self.name): return self.load_state_dict(deepcopy(whole))
        found = state.get(self.name)
        if not isinstance(found, dict) or 'n_averaged' not in found: return self._forget()
        loss = {f'loss_func.{k}': v for k, v in found.get('loss', {}).items()}
        weights = {k: v for k, v in {**found['model'], **loss}.items() if isinstance(v, Tensor)}
        self._forget()
        self.average = {k: weights[k].clone() for k, _ in self._find() if k in weights}
        self.n_averaged = found['n_averaged']*bool(self.average)
        self._loaded(found, weights)

    def _loaded(self, found: dict, weights: dict) -> None: "Take what else a file has"

    def state_dict(self) -> dict[str, Any]:
        "The average, and where it stands"
        return dict(n_averaged=self.n_averaged, first=self.first, average=dict(self.average))

    def load_state_dict(self, state: dict[str, Any]) -> None:  # what `state_dict` gave
        "Go on with that average"
        for k, v in state.items(): setattr(self, k, v)
        self._unmatched()


def _put(state, values, ties):  # values by name, into a file's 'model' and 'loss', also by the other names of each
    names = {n: next((o for o in group if o in values), n) for group in ties for n in group}
    for part, prefix in (('model', ''), ('loss', 'loss_func.')):
        if part in state: state[part] = {k: values.get(names.get(prefix+k, prefix+k), v)
                                         for k, v in state[part].items()}


class EMA(WeightAverage):
    """Keeps an exponential moving average of the weights, and evaluates with it

    It begins as the weights after the first step; after each later one (of `every`) it is `d*average + (1-d)*weights`.
    It goes on from fit to fit; one that is given to a single fit goes with it, and `learn.add_cb` brings it back.
    Raises: ValueError if a parameter means nothing; RuntimeError from a fit within `learn.averaged()`.
    Order: as WeightAverage.
    Source: Polyak and Juditsky 1992, "Acceleration of stochastic approximation by averaging"; the warm-up is that of
    TensorFlow's `ExponentialMovingAverage` with `num_updates`."""
    steps = 0  # of the optimizer, since it began

    def __init__(self,
        decay: float = .999,      # what of the average stays at each step, 0 to 1; .999 halves it in 693 of them
        start: float|str = 0,     # from where in the fit on: a fraction, 0 to 1, '500it' or '2ep'
        every: int = 1,           # only at one of so many steps
        buffers: str = 'copy',    # the model's own ('copy'), or 'average': those of fractions are averaged too
        warmup: bool = True,      # let `d` be `(1+n)/(10+n)` while that is less; `n`: how often weights have come in
    ):
        super().__init__(start)
        check_number('EMA: `decay`', decay, 0, 1, below=True)
        check_number('EMA: `every`', every, 1, whole=True, of='steps')
        if buffers not in ('copy', 'average'): raise ValueError(
            f"EMA: `buffers` is {buffers!r}; give 'copy' or 'average'")
        self.decay, self.every, self.buffers, self.warmup = decay, every, buffers, warmup

    def _is_averaged(self, m, key):
        if super()._is_averaged(m, key): return True
        return self.buffers == 'average' and key not in m._non_persistent_buffers_set

    def after_step(self):
        if not self.learn.stepped or not (self.n_averaged or self._has_begun(self.pct_train)): return
        self.steps = self.steps+1 if self.n_averaged else 0
        if self.steps % self.every: return
        n = self.n_averaged
        self._take(1-(min(self.decay, (1+n)/(10+n)) if self.warmup else self.decay))

    def state_dict(self) -> dict[str, Any]:
        "The average, and where it stands"
        return {**super().state_dict(), 'steps': self.steps}


@patch
@contextmanager
def averaged(self: Learner):
    """The model with averaged weights, for a block: to predict, to export it, to save it as a model by itself

    Raises: ValueError if there is no EMA or SWA, or it has not begun."""
    cb = next((cb for cb in self.cbs if isinstance(cb, WeightAverage)), None)
    if cb is None: raise ValueError("averaged: there is no EMA or SWA among the callbacks: `Learner(cbs=EMA())`")
    if not cb.n_averaged: raise ValueError(f"averaged: `{cb}` has no average yet: it begins at {cb.start!r} of a fit")
    with cb.swapped(): yield self.model
