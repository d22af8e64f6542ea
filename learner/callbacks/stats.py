"""ActivationStats and GradientStats: how each layer's values are spread as training goes on.

What a batch gives is computed on the device and stays there until somebody looks, so that recording never waits for a
GPU; all layers of all batches come over in one copy."""
from collections.abc import Sequence
from itertools import chain
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..callback import Callback
from ..hooks import find_modules
from ..layers import own_params
from ..plot import plot_histogram, plot_layers
from ..tensors import flat_numbers, tensors_in
from ..utils import optional, warn
from .hook import HookCallback, check_every

__all__ = ['LayerStats', 'ActivationStats', 'GradientStats']


def _spread(x: Tensor, near: float) -> Tensor:
    "Mean, standard deviation and share near zero: `(3,)`"
    mean = x.mean()
    # a hundredth of what `std_mean` takes on a CPU; of the population, so that one value has one too
    std = torch.linalg.vector_norm(x-mean)/x.numel()**.5
    return torch.stack([mean, std, (x.abs() <= near).sum()/x.numel()])


def _norm(ts: list[Tensor]) -> Tensor: return torch.linalg.vector_norm(torch.cat([flat_numbers(t) for t in ts]))


class LayerStats(Callback):
    """What ActivationStats and GradientStats have in common: the record, as a table and as pictures

    It begins anew with each fit, and a checkpoint keeps it. A layer that gives nothing in a batch has NaN there.
    Raises: TypeError if `with_hist` is neither True nor False."""
    run_in = {'fit'}
    run_valid = False
    columns: Sequence[str] = ('mean', 'std', 'near_zero')
    near: float = 0.              # values up to this far from zero are near it
    bins: tuple = (0., 1., 1)     # of histograms: from, to, how many
    unit = 'value'                # what a histogram is of

    def __init__(self,
        with_hist: bool = False,  # histograms too
    ):
        if not isinstance(with_hist, bool): raise TypeError(
            f"{self}: with_hist={with_hist!r}; give True or False, and the layers as `modules=`")
        self.with_hist = with_hist

    def _begin(self, layers):
        self.layers: list[str] = list(layers)  # names, as the model has them
        self.marks: list[tuple] = []           # epoch, and batches done in the fit, of each record
        self.values: list[Tensor] = []         # of each record, `(n_layers, n_columns)`, on the device
        self.hists: list[Tensor] = []          # likewise `(n_layers, n_bins)`, counts

    def _tell_changed(self, names):  # of the layers now: those of the same name go on
        if new := [n for n in names if n not in self.layers]: warn(
            f"{self}: not recorded, since they were not there when the fit began: {', '.join(new)}")

    def _scaled(self, x: Tensor) -> Tensor: "What a histogram is made of"; return x

    def _measure(self, x: Tensor) -> tuple[Tensor, Tensor|None]:  # of a tensor, and the counts if there are histograms
        x = flat_numbers(x.detach())
        return _spread(x, self.near), self._counts(self._scaled(x)) if self.with_hist else None

    def _counts(self, x):  # what is outside counts as outermost, what is no number not at all
        low, high, n = self.bins
        place = ((x-low)*(n/(high-low))).clamp_(0, n-1).nan_to_num_(nan=n).long()
        counts = torch.zeros(n+1, dtype=torch.int64, device=x.device)
        return counts.scatter_add_(0, place, counts.new_ones(1).expand_as(place))[:n]

    def _add(self, found: dict):  # by layer what `_measure` gave
        if not found: return
        spread, counts = next(iter(found.values()))
        nothing = torch.full_like(spread, torch.nan), counts if counts is None else torch.zeros_like(counts)
        rows = [found.get(name, nothing) for name in self.layers]
        self.marks.append((self.epoch, self.learn.train_iter))
        self.values.append(torch.stack([row.to(self.device) for row, _ in rows]))
        if self.with_hist: self.hists.append(torch.stack([row.to(self.device) for _, row in rows]))

    def _index(self, layer):
        if isinstance(layer, str) and layer in self.layers: return self.layers.index(layer)
        if isinstance(layer, Integral) and -len(self.layers) <= int(layer) < len(self.layers): return int(layer)
        if not self.layers: raise KeyError(f"{self} has recorded nothing yet: fit with it first")
        raise KeyError(f"{self}: no layer {layer!r}; give a position from 0 to {len(self.layers)-1}, or a name: "
                       f"{', '.join(map(repr, self.layers))}")

    def _read(self):  # `(n_batches, n_layers, n_columns)`
        if not self.values: return np.empty((0, len(self.layers), len(self.columns)))
        return torch.stack(self.values).cpu().numpy()

    @property
    def table(self) -> Any:  # a pandas DataFrame
        "A row for each batch and layer: `epoch`, `batch` (how many the fit had done before it), `layer`, and `columns`"
        values = self._read()
        marks = np.repeat(np.array(self.marks, dtype=int).reshape(-1, 2), len(self.layers), 0)
        frame = dict(epoch=marks[:, 0], batch=marks[:, 1], layer=self.layers*len(values))
        numbers = zip(self.columns, values.reshape(-1, len(self.columns)).T)
        return optional('pandas', f'{self}.table').DataFrame({**frame, **dict(numbers)})

    def layer_stats(self,
        layer: int|str,    # its position in `layers`, negative from the end, or its name
    ) -> list[np.ndarray]:  # for each of `columns` the values, batch by batch
        """What was recorded of one layer: means, standard deviations, shares near zero …

        Raises: KeyError if there is no such layer."""
        return [*self._read()[:, self._index(layer)].T]

    def hist(self,
        layer: int|str,  # its position in `layers`, negative from the end, or its name
    ) -> np.ndarray:     # counts, `(n_bins, n_batches)`, lowest values first
        """The histogram of one layer's values, batch by batch; what lies outside of `bins` is in the outermost

        Raises: KeyError if there is no such layer, ValueError without `with_hist=True`."""
        i = self._index(layer)
        if not self.with_hist: raise ValueError(f"{self} keeps no histograms: make it with `with_hist=True`")
        return torch.stack(self.hists)[:, i].T.cpu().numpy() if self.hists else np.empty((self.bins[2], 0), int)

    def color_dim(self,
        layer: int|str,   # its position in `layers`, negative from the end, or its name
        ax: Any = None,   # matplotlib axes to draw on; new ones if None
    ) -> Any:             # the axes
        """Draw the histograms of one layer: batches from left to right, values upward, the log of counts as colour

        Raises: as `hist`."""
        name, batches = self.layers[self._index(layer)], [n for _, n in self.marks]
        return plot_histogram(self.hist(layer), batches, self.bins[:2], self.unit, name, ax)

    def plot_layer_stats(self,
        layers: Any = None,  # a number or name, or a list of them; None: all
        axs: Any = None,     # matplotlib axes, one for each of `columns`; new ones if None
    ) -> Any:                # the axes
        """Draw each of `columns` against the batch, with a line a layer

        Raises: KeyError if there is no such layer, ValueError if nothing was recorded."""
        if not self.values: raise ValueError(f"{self} has recorded nothing to draw: fit with it first")
        chosen = range(len(self.layers)) if layers is None else [layers] if isinstance(layers, int|str) else layers
        indices, values = [self._index(layer) for layer in chosen], self._read()
        series = {name: values[:, indices, k] for k, name in enumerate(self.columns)}
        return plot_layers(series, [n for _, n in self.marks], [self.layers[i] for i in indices], axs)

    def state_dict(self) -> dict[str, Any]:
        "The record"
        return dict(layers=self.layers, marks=[list(m) for m in self.marks],
                    values=torch.stack(self.values) if self.values else None,
                    hists=torch.stack(self.hists) if self.hists else None)

    def load_state_dict(self, state: dict[str, Any]) -> None:  # what `state_dict` gave
        "Put the record back"
        self._begin(state['layers'])
        self.marks = [tuple(m) for m in state['marks']]
        device = self.device if self.learn else 'cpu'  # where what is still to come will be
        self.values, self.hists = ([] if state[k] is None else [*state[k].to(device)] for k in ('values', 'hists'))


class ActivationStats(LayerStats, HookCallback):
    """Records how the outputs of layers are spread: mean, standard deviation, share within 0.05 of zero, and histograms

    The record begins anew with each fit. Of an output with several tensors the first counts, of a layer that runs
    several times in a batch the last.
    Raises: as HookCallback."""
    order = -20
    near = .05             # fastai's
    bins = (-10., 10., 80)
    unit = 'activation'

    def __init__(self,
        with_hist: bool = False,  # histograms too, which take most of the time
        modules: Any = None,      # as `find_modules` takes them; None: those with parameters and without children
        every: int|None = None,   # only in one of so many batches; None: in all
        is_forward: bool = True,  # False: of the gradients of the outputs
    ):
        LayerStats.__init__(self, with_hist)
        HookCallback.__init__(self, modules, every, is_forward, pre=not is_forward)
        self._begin([])

    def before_fit(self):
        HookCallback.before_fit(self)
        self._begin(self.names.values())

    def changed(self, names):
        self.names = names
        self._tell_changed(names.values())

    def hook(self,
        m: nn.Module,   # that has run
        *values: Any,   # what a Hook gives: its inputs and output, or gradients
    ) -> Any:           # what is recorded; None if there is no floating tensor
        "Measure its output"
        t = next((t for t in tensors_in(values[-1]) if t.is_floating_point() or t.is_complex()), None)
        return t if t is None else self._measure(t)

    def after_batch(self): self._add({name: found for name, found in self.stored.items() if found})


class GradientStats(LayerStats):
    """Records how the gradients of layers are spread, and how large a step is beside the weights: `update_ratio`

    They are those of the parameters that a module has itself, all together, before any clipping: mean, standard
    deviation, share within 1e-8 of zero (Adam's eps, below which its steps shrink), and histograms of their powers of
    ten. `update_ratio` is the norm of what a step really changes over the norm of the weights; some 1e-3 is usual.
    The record begins anew with each fit. For the batches recorded the weights are there twice.
    Raises: ValueError or TypeError for an odd `every`, and at the start of a fit if `modules` finds no parameters.
    Order: after mixed precision (10), which unscales the gradients, before clipping (11)."""
    order = 10.5
    columns = ('mean', 'std', 'near_zero', 'update_ratio')
    near = 1e-8
    bins = (-12., 4., 64)
    unit = 'log10 of |gradient|'
    before: Any = ()  # of this step: each layer, what was measured, its parameters, and copies of them

    def __init__(self,
        with_hist: bool = False,  # histograms too
        modules: Any = None,      # as `find_modules` takes them; None: all with parameters of their own
        every: int|None = None,   # only in one of so many steps of the optimizer; None: in all
    ):
        super().__init__(with_hist)
        self.modules, self.every = modules, check_every(self, every)
        self._begin([])

    def before_fit(self):
        self._find()
        self._begin(self.params)

    def before_train(self):  # other modules may have been put in
        old = self.params
        self._find()
        if {*map(id, chain(*old.values()))} != {*map(id, chain(*self.params.values()))}: self._tell_changed(self.params)

    def _find(self):
        modules, seen = find_modules(self.model, own_params if self.modules is None else self.modules), set()
        self.params: dict[str, list[nn.Parameter]] = {}  # by layer; one that is shared is the first's
        for name, m in modules.items():
            if own := [p for p in own_params(m).values() if p not in seen]: self.params[name] = own
            seen.update(own)
        if not self.params: raise ValueError(f"{self}: none of {', '.join(modules)} has parameters of its own")

    def before_step(self):
        if self.learn.n_step % self.every: return
        used = {name: [p for p in ps if p.grad is not None] for name, ps in self.params.items()}
        self.before = [(name, self._measure(torch.cat([flat_numbers(p.grad) for p in ps if p.grad is not None])),
                        ps, [p.detach().clone() for p in ps]) for name, ps in used.items() if ps]

    def after_step(self):
        if not self.learn.stepped: return  # cancelled
        found = {}
        for name, (spread, counts), ps, old in self.before:
            ratio = _norm([p.detach()-o for p, o in zip(ps, old)])/_norm(old)
            found[name] = torch.cat([spread, ratio[None]]), counts
        self._add(found)

    def cleanup_step(self): self.before = ()

    def _scaled(self, x): return x.abs().log10()  # of 0: -inf, which is in the lowest bin
