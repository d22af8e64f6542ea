"""Where a model is right and where it is wrong: worst items, confusion of classes, residuals, curves, tables."""
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from .callbacks.predict import in_words
from .callbacks.preds import Preds
from .callbacks.results import shown
from .display import say
from .learner import Learner
from .pictures import draw_items, word
from .plot import plot_confusion, plot_curves, plot_residuals
from .resampled import in_order, items_of
from .tensors import concat, describe, map_tensors
from .utils import check_number, optional

__all__ = ['Interpretation', 'ClassificationInterpretation', 'RegressionInterpretation']


class Interpretation:
    """Predictions of a whole set with targets and losses, made once, when something is first asked for

    Positions are those in the set, in the dataset's order; of several validation sets the second follows the first.
    Raises: ValueError if the set has no targets, or the Learner no loss."""
    def __init__(self,
        learn: Learner,             # whose model is asked
        ds_idx: int|str = 1,        # 0 for the training loader, 1 for the validation set or sets
        dl: Any = None,             # another loader instead
        act: Callable|None = None,  # what is made of outputs, as `get_preds` takes it
    ): self.learn, self.ds_idx, self.dl, self.act = learn, ds_idx, dl, act

    @classmethod
    def from_learner(cls,
        learn: Learner,             # whose model is asked
        ds_idx: int|str = 1,        # 0 for the training loader, 1 for the validation set or sets
        dl: Any = None,             # another loader instead
        act: Callable|None = None,  # what is made of outputs, as `get_preds` takes it
    ) -> Self:
        """fastai's way to make one

        Nothing is predicted yet: it is the model as it is when something is first asked for that counts."""
        return cls(learn, ds_idx, dl, act)

    @cached_property
    def found(self) -> Preds:  # `preds, targs, decoded, losses`
        "What `get_preds` gives; kept from then on, whatever becomes of the model"
        self._loaders = [in_order(o) for _, o in
                         self.learn.dls.eval_loaders(self.ds_idx, self.dl, self.learn.device)]
        found = [self.learn.get_preds(dl=dl, reorder=False, with_decoded=True, with_loss=True, act=self.act)
                 for dl, _ in self._loaders]
        return Preds(found[0].names, [concat(parts) for parts in zip(*found)])

    @property
    def preds(self) -> Any: "Activated predictions, such as probabilities"; return self.found.preds
    @property
    def targs(self) -> Any: "Targets"; return self.found.targs
    @property
    def decoded(self) -> Any: "Decisions"; return self.found.decoded
    @property
    def losses(self) -> Tensor: "The loss of each item, `(n_items,)`"; return self.found.losses
    @property
    def vocab(self) -> Any: "Names of the classes; None: unknown"; return getattr(self.learn.dls, 'vocab', None)
    def __len__(self) -> int: return len(self.losses)

    def __repr__(self) -> str:
        known = f'{len(self)} items' if 'found' in vars(self) else 'nothing predicted yet'
        return f"{type(self).__name__}({self.learn!r}, {known})"

    def _numbered(self):  # the loader and the numbers of its items; None: there are several, or no numbers
        self.found  # by which it is known
        (dl, ids), *others = self._loaders
        return None if others or ids is None else (dl, ids)

    @cached_property
    def indices(self) -> list:  # one an item
        "Numbers of the items in their dataset; positions where there is no such number"
        numbered = self._numbered()
        return [*range(len(self))] if numbered is None else [*numbered[1]]

    # ---- items

    def top_losses(self,
        k: int|None = None,     # how many; None: all
        largest: bool = True,   # False: the smallest ones
        items: bool = False,    # also their inputs
    ) -> tuple:                 # losses, positions, `[inputs]`
        "The items with the largest losses, the worst first"
        if k is not None: check_number('top_losses: `k`', k, 1, whole=True)
        values, positions = self.losses.topk(min(k or len(self), len(self)), largest=largest)
        return (values, positions, self.inputs(positions.tolist())) if items else (values, positions)

    def inputs(self,
        positions: Sequence[int],  # of the items
    ) -> Any:  # a batch of them
        "Inputs of some items, read anew, as the model gets them"
        if numbered := self._numbered():
            dl, ids = numbered
            few = items_of(getattr(dl, 'dl', dl), [ids[i] for i in positions], len(positions))
            return self.learn.get_preds(dl=few, with_input=True, reorder=False).inputs
        found = concat([self.learn.get_preds(dl=dl, with_input=True, with_preds=False, reorder=False).inputs
                        for dl, _ in self._loaders])
        return [found[i] for i in positions] if isinstance(found, list) else map_tensors(
            lambda t: t[torch.as_tensor(positions)], found)

    def plot_top_losses(self,
        k: int = 9,                  # how many
        largest: bool = True,        # False: the best ones
        show: Callable|None = None,  # `show(xs, texts)` draws instead
    ) -> Any:                        # as `show_results`
        "Show the worst items, each with target, prediction, loss and, of a class, its probability"
        return self.show_results(self.top_losses(k, largest)[1].tolist(), show)

    def show_results(self,
        positions: Sequence[int],    # of the items to show
        show: Callable|None = None,  # `show(xs, texts)` draws instead
    ) -> Any:                        # axes or a DataFrame; in a notebook, which shows it, None for a figure
        "Show items, each with target, prediction, loss and, of a class, its probability"
        if isinstance(positions, int): positions = [positions]
        i, positions = torch.as_tensor(positions), [*positions]
        self._check()
        targs, decoded = self._words(self.targs[i], True), self._words(self.decoded[i])
        titles = dict(target=targs, prediction=decoded, loss=[float(f'{v:.3g}') for v in self.losses[i].tolist()])
        if self.decoded.dtype == torch.int64 and self.preds.ndim == 2:
            titles['probability'] = [float(f'{v:.3g}') for v in self.preds[i].amax(1).tolist()]
        wrong = [t != d for t, d in zip(targs, decoded)] if not self.decoded.is_floating_point() else []
        drawn = draw_items(self.inputs(positions), titles, show, wrong=wrong)
        return drawn if show is not None else shown(drawn)

    def _words(self, ts, are_targs=False) -> list:  # of targets and decisions; where yes or no was decided, of these
        if are_targs and self.decoded.dtype == torch.bool: ts = (ts > .5).reshape(len(ts), *self.decoded.shape[1:])
        return [t.float().tolist() if isinstance(t, Tensor) else t for t in (in_words(t, self.vocab) for t in ts)]

    def _check(self):  # that there is one target and one prediction
        if odd := next((o for o in (self.preds, self.targs) if not isinstance(o, Tensor)), None): raise TypeError(
            f"{type(self).__name__}: a tensor of predictions and one of targets are needed, and there is "
            f"{describe(odd)}; `found` has all")

    def to_frame(self) -> Any:
        """A pandas DataFrame with an item a row: its number, target, decision, loss, and what was predicted

        Predictions of several numbers are a column each, under the names of the classes where these are known."""
        self._check()
        preds = self.preds.float().reshape(len(self), -1).numpy()
        fits = self.vocab is not None and len(self.vocab) == preds.shape[1]
        names = [f'pred_{word(i, self.vocab) if fits else i}' for i in range(preds.shape[1])] if preds.shape[1] > 1 \
            else ['pred']
        table = dict(index=self.indices, target=self._words(self.targs, True), decision=self._words(self.decoded),
                     loss=self.losses.numpy())
        return optional('pandas', 'to_frame').DataFrame({**table, **dict(zip(names, preds.T))})


class ClassificationInterpretation(Interpretation):
    """Which classes are taken for which, of a set with a class an item (or a pixel)

    Raises: ValueError if predictions are no scores of classes."""
    @cached_property
    def classes(self) -> tuple[np.ndarray, np.ndarray]:  # both `(n,)`, integers
        "Targets and decisions, flattened, without targets that are no class; of yes and no, 1 is yes"
        self._check()
        targs, decided = self.targs, self.decoded
        if self._is_binary: targs, decided = (targs.reshape(decided.shape) > .5).long(), decided.long()
        elif targs.is_floating_point() and targs.ndim > 1: targs = targs.argmax(self._axis)
        loss = self.learn.loss_func
        if targs.is_floating_point() or decided.dtype != torch.int64: raise ValueError(
            f"{type(self).__name__}: targets are {describe(self.targs)} and decisions {describe(self.decoded)}, which "
            f"are no classes: how the loss, `{getattr(loss, '__name__', type(loss).__name__)}`, decides is said by its "
            "`activation` and `decodes`; of torch's own losses that is known")
        self._known = ((targs >= 0) & (targs < self.n_classes)).flatten().numpy()  # others count nothing in the loss
        return targs.flatten().numpy()[self._known], decided.flatten().numpy()[self._known]

    @property
    def _is_binary(self): return self.decoded.dtype == torch.bool and self.decoded[0].numel() == 1

    @property
    def _axis(self): return getattr(self.learn.loss_func, 'axis', 1)  # of the classes

    @property
    def n_classes(self) -> int: "How many there are"; return 2 if self._is_binary else self.preds.shape[self._axis]
    @property
    def names(self) -> list[str]:
        "Of the classes; their numbers where they are unknown"
        fits = self.vocab is not None and len(self.vocab) == self.n_classes
        return [str(word(i, self.vocab) if fits else i) for i in range(self.n_classes)]

    def confusion_matrix(self,
        normalize: bool = False,  # shares of each true class instead of counts
    ) -> np.ndarray:              # `(n_classes, n_classes)`: true classes are rows, decisions columns
        "How often each class was taken for each; a class that is not there has a row of zeros"
        targs, decided = self.classes
        counts = np.bincount(targs*self.n_classes+decided, minlength=self.n_classes**2)
        counts = counts.reshape(self.n_classes, self.n_classes)
        return counts/np.maximum(counts.sum(1, keepdims=True), 1) if normalize else counts

    def plot_confusion_matrix(self,
        normalize: bool = False,  # shares of each true class instead of counts
        norm_dec: int = 2,        # decimals of shares
        plot_txt: bool = True,    # write the numbers?
        cmap: str = 'Blues',      # matplotlib's name of the colours
        title: str = '',          # above the picture
        ax: Any = None,           # matplotlib axes to draw on; new ones if None
    ) -> Any:                     # the axes
        "Draw the confusion matrix"
        return plot_confusion(self.confusion_matrix(normalize), self.names, norm_dec if normalize else 0, plot_txt,
                              cmap, title, ax)

    def most_confused(self,
        min_val: int = 1,  # only what has happened at least so often
    ) -> list[tuple[Any, Any, int]]:  # true class, decision, how often; the most frequent first
        "The confusions of classes"
        matrix = self.confusion_matrix()
        np.fill_diagonal(matrix, 0)
        found = [(self.names[i], self.names[j], int(matrix[i, j])) for i, j in np.argwhere(matrix >= max(min_val, 1))]
        return sorted(found, key=lambda row: -row[2])

    def classification_report(self) -> Any:
        "Precision, recall, f1 and number of items by class, as a pandas DataFrame, by scikit-learn"
        report = optional('sklearn.metrics', 'classification_report', 'scikit-learn').classification_report
        targs, decided = self.classes
        found = report(targs, decided, labels=[*range(self.n_classes)], target_names=self.names, output_dict=True,
                       zero_division=0)
        columns = 'precision', 'recall', 'f1-score'
        if 'accuracy' in found: found['accuracy'] = dict.fromkeys(columns, found['accuracy'])
        return optional('pandas', 'classification_report').DataFrame(found).T

    def print_classification_report(self) -> None:
        "fastai's form of it"
        say(self.classification_report().to_string(float_format=lambda v: f'{v:.3f}'))

    def plot_curves(self,
        kind: str = 'roc',  # 'roc', or 'pr' for precision and recall
        ax: Any = None,     # matplotlib axes to draw on; new ones if None
    ) -> Any:               # the axes
        """Draw a curve for each class against all others, with the area below it, by scikit-learn

        Raises: ValueError for another kind."""
        metrics = optional('sklearn.metrics', 'plot_curves', 'scikit-learn')
        if kind not in ('roc', 'pr'): raise ValueError(f"plot_curves: {kind=}; give 'roc' or 'pr'")
        (targs, _), probs, curves = self.classes, self._probabilities(), {}
        for i, name in enumerate(self.names):
            is_it = targs == i
            if is_it.all() or not is_it.any(): continue  # there is no curve
            if kind == 'roc':
                xs, ys, _ = metrics.roc_curve(is_it, probs[:, i])
                area = metrics.auc(xs, ys)
            else:
                ys, xs, _ = metrics.precision_recall_curve(is_it, probs[:, i])
                area = metrics.average_precision_score(is_it, probs[:, i])
            curves[f'{name} ({area:.3f})'] = xs, ys
        x, y, what = ('false positives', 'true positives', 'area under the curve') if kind == 'roc' else (
            'recall', 'precision', 'average precision')
        return plot_curves(curves, x, y, what, ax)

    def _probabilities(self):  # `(n, n_classes)`
        preds = self.preds.float()
        if self._is_binary: found = torch.stack([1-preds.flatten(), preds.flatten()], 1)
        else: found = preds.movedim(self._axis, -1).reshape(-1, self.n_classes)
        return found.numpy()[self._known]


class RegressionInterpretation(Interpretation):
    "How far predicted values are from true ones"
    @cached_property
    def residuals(self) -> Tensor:  # `(n_items, n_values)`
        """Predicted less true values

        Raises: ValueError if they differ in number."""
        preds, targs = (t.reshape(len(self), -1).float() for t in (self.preds, self.targs))
        if preds.shape != targs.shape: raise ValueError(
            f"residuals: predictions {tuple(preds.shape)} and targets {tuple(targs.shape)} differ in shape")
        return preds-targs

    def plot_residuals(self,
        i: int = 0,                # which of the values, if an item has several
        axs: Sequence[Any]|None = None,  # two matplotlib axes to draw on; new ones if None
    ) -> Sequence[Any]:            # the axes
        "Draw predicted against true values, and how residuals are distributed"
        residuals = self.residuals[:, i].numpy()
        return plot_residuals(self.targs.reshape(len(self), -1)[:, i].numpy(), residuals, axs)
