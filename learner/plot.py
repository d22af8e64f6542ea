"""Drawing with matplotlib: each function takes the axes to draw on and returns them; showing them is the caller's."""
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from typing import Any

import numpy as np

from .display import display_mode
from .utils import optional

__all__ = ['plot_loss', 'plot_hypers', 'plot_lr_find', 'plot_layers', 'plot_histogram', 'plot_look',
           'plot_times', 'plot_confusion', 'plot_curves', 'plot_residuals', 'as_png',
           'show_figure']


def plot_loss(
    losses: Sequence[float],    # smoothed training loss after each batch, `(n_batches,)`
    iters: Sequence[int] = (),  # how many training batches were done at each validation, `(n_valid,)`
    valid_losses: Sequence[float]|Mapping[str, Sequence[float]] = (),  # loss of each validation; or such lists by name
    skip_start: int = 5,        # first batches to leave out; none are where that would leave nothing
    log: bool = False,          # a logarithmic loss axis?
    ax: Any = None,             # matplotlib axes to draw on; new ones if None
) -> Any:                       # the axes
    """Draw the training loss against the number of batches done, and validation losses where they were computed

    A validation loss that is NaN has no point.
    Raises: ValueError if `iters` and validation losses differ in number."""
    ax = ax or optional('matplotlib.pyplot', 'plot_loss').subplots()[1]
    skip = skip_start if skip_start < len(losses) else 0
    ax.plot(np.arange(skip, len(losses))+1, losses[skip:], label='train (smoothed)')
    by_name = valid_losses if isinstance(valid_losses, Mapping) else {'valid_loss': valid_losses}
    for name, values in by_name.items():
        if len(values) != len(iters): raise ValueError(
            f"plot_loss: {len(values)} values of `{name}`, but {len(iters)} `iters`, which say at which batch each was")
        points = [(i, v) for i, v in zip(iters, values) if i > skip and not np.isnan(v)]
        if points: ax.plot(*zip(*points), marker='o', label=name.removesuffix('_loss'))
    ax.set(xlabel='batch', ylabel='loss', yscale='log' if log else 'linear')
    ax.legend()
    return ax


def plot_hypers(
    hps: Mapping[str, np.ndarray],        # `(n_steps, n_groups)` by name of a hyper-parameter
    names: Iterable[str]|None = None,     # which ones; None: `lr`, `mom`, and whatever else changes
    axs: Sequence[Any]|None = None,       # matplotlib axes, one for each; new ones if None
) -> Sequence[Any]:                       # the axes
    """Draw hyper-parameters step by step, each on axes of its own, with a line for each group

    Raises: ValueError if there is no such hyper-parameter, or the number of axes is another."""
    hps = {name: np.asarray(v, dtype=float) for name, v in hps.items()}
    if names is None: names = [n for n, v in hps.items() if n in ('lr', 'mom') or np.ptp(v, axis=0).any()]
    if not (names := list(names)) or not hps:
        raise ValueError("there is nothing to draw: no hyper-parameter, or no step")
    if missing := [n for n in names if n not in hps]:
        raise ValueError(f"there is no `{missing[0]}` to draw, only {', '.join(hps)}")
    found: Any = optional('matplotlib.pyplot', 'plot_hypers').subplots(
        1, len(names), figsize=(5*len(names), 3.5), squeeze=False, layout='constrained')[1][0] if axs is None else axs
    if len(found) != len(names): raise ValueError(f"{len(found)} axes for {len(names)} hyper-parameters")
    for ax, name in zip(found, names):
        lines = {f'group {i}': values for i, values in enumerate(hps[name].T)}
        if (hps[name] == hps[name][:, :1]).all(): lines = {'all groups': hps[name][:, 0]}
        for label, values in lines.items(): ax.plot(np.arange(len(values))+1, values, label=label)
        ax.set(xlabel='batch', ylabel=name)
        ax.legend()
    return found


def plot_lr_find(
    lrs: np.ndarray,                 # learning rates tried, `(n, n_groups)`
    losses: Sequence[float],         # the smoothed loss at each, `(n,)`
    suggestions: Mapping[str, tuple[Sequence[float], float]]|None = None,  # by name: rates of the groups, and the loss
    ax: Any = None,                  # matplotlib axes to draw on; new ones if None
) -> Any:                            # the axes
    """Draw the loss against the learning rate, with a line for each group that has a sweep of its own

    What is suggested stands as a point at exactly that rate, with its value in the legend."""
    ax = ax or optional('matplotlib.pyplot', 'plot_lr_find').subplots()[1]
    lrs = np.asarray(lrs, dtype=float)
    groups = [0] if (lrs == lrs[:, :1]).all() else range(lrs.shape[1])
    lines = [ax.plot(lrs[:, i], losses, label=f'group {i}' if len(groups) > 1 else None)[0] for i in groups]
    for k, (name, (rates, loss)) in enumerate((suggestions or {}).items()):
        for i, line in zip(groups, lines):
            which = f'{name}, group {i}' if len(groups) > 1 else name
            ax.plot([rates[i]], [loss], 'osDv^P*X'[k % 8], color=line.get_color() if len(groups) > 1 else f'C{k+1}',
                    label=f'{which}: {rates[i]:.2e}')
    ax.set(xlabel='learning rate', ylabel='loss (smoothed)', xscale='log')
    if ax.get_legend_handles_labels()[0]: ax.legend()
    return ax


def plot_layers(
    series: Mapping[str, np.ndarray],  # `(n_batches, n_layers)` by name
    batches: Sequence[int],            # numbers of the batches
    layers: Sequence[str],             # names of the layers
    axs: Sequence[Any]|None = None,    # matplotlib axes, one for each series; new ones if None
) -> Sequence[Any]:                    # the axes
    """Draw each series on axes of its own, with a line a layer from dark (first) to light (last)

    What is called a ratio is drawn on a logarithmic axis.
    Raises: ValueError if the number of axes is another."""
    plt = optional('matplotlib.pyplot', 'plot_layers')
    found: Any = plt.subplots(1, len(series), figsize=(4*len(series), 3.5), squeeze=False,
                              layout='constrained')[1][0] if axs is None else axs
    if len(found) != len(series): raise ValueError(f"{len(found)} axes for {len(series)} series: {', '.join(series)}")
    colours = plt.get_cmap('viridis')(np.linspace(0, .9, len(layers)))
    for ax, (name, values) in zip(found, series.items()):
        for i, (line, layer, colour) in enumerate(zip(values.T, layers, colours)):
            if np.isnan(line).all(): continue
            label = f"({layer or 'the model'})" if layer[:1] in ('', '_') else layer  # else no legend
            if len(layers) > 12 and i not in (0, len(layers)-1): label = None  # too many to tell apart
            ax.plot(batches, line, label=label, color=colour, marker='.' if len(batches) < 30 else '')
        log = 'ratio' in name and np.any(values > 0)
        ax.set(xlabel='batch', title=name.replace('_', ' '), yscale='log' if log else 'linear')
    if found[-1].get_legend_handles_labels()[0]:
        found[-1].legend(fontsize='small', loc='center left', bbox_to_anchor=(1, .5))
    return found


def plot_histogram(
    counts: np.ndarray,          # `(n_bins, n_batches)`, lowest values first
    batches: Sequence[int],      # numbers of the batches
    span: Sequence[float],       # where the first bin begins and the last one ends
    unit: str = 'value',         # what the values are
    title: str = '',             # above the picture
    ax: Any = None,              # matplotlib axes to draw on; new ones if None
) -> Any:                        # the axes
    "Draw histograms side by side: batches from left to right, values upward, colour for the logarithm of the shares"
    ax = ax or optional('matplotlib.pyplot', 'plot_histogram').subplots(layout='constrained')[1]
    step = batches[-1]-batches[-2] if len(batches) > 1 else 1
    ends = (batches[0], batches[-1]+step) if len(batches) else (0, 1)
    shares = counts/np.maximum(counts.sum(0), 1)*counts.sum(0).max(initial=0)  # an epoch's last batch may have fewer
    ax.imshow(np.log1p(shares), origin='lower', aspect='auto', extent=(*ends, *span), interpolation='nearest')
    ax.set(xlabel='batch', ylabel=unit, title=title)
    return ax


def plot_look(
    gradients: Mapping[str, float],  # root mean square of the gradient, by layer
    ratios: Mapping[str, float],     # of update to weight, by layer
    usual: tuple[float, float],      # between which ratios are usual
    losses: Sequence[float],         # on one batch, again and again
    axs: Sequence[Any]|None = None,  # three matplotlib axes; new ones if None
) -> Sequence[Any]:                  # the axes
    "Draw what `learn.doctor` has measured: gradients and updates by layer, and the loss on one batch"
    found: Any = optional('matplotlib.pyplot', 'plot_look').subplots(
        1, 3, figsize=(14, 3.5), layout='constrained')[1] if axs is None else axs
    for ax, values, title in zip(found, (gradients, ratios), ('gradient (root mean square)', 'update / weight')):
        ax.plot(list(values.values()), 'o')
        ax.set(title=title, yscale='log')
        ax.set_xticks(range(len(values)), values, rotation=90, fontsize='small')
    found[1].axhspan(*usual, alpha=.15, color='C2', label='usual')
    found[1].legend()
    found[2].plot(losses)
    found[2].set(title='loss on one batch', xlabel='step')
    return found


def plot_times(
    names: Sequence[str],      # what takes the time, in the order in which it happens
    times: Sequence[float],    # microseconds each
    ax: Any = None,            # matplotlib axes to draw on; new ones if None
) -> Any:                      # the axes
    "Draw where a batch's time goes: a bar each, from the top down"
    ax = ax or optional('matplotlib.pyplot', 'plot_times').subplots(
        figsize=(8, 1+.25*len(names)), layout='constrained')[1]
    ax.barh(range(len(names)), times)
    ax.set(xlabel='µs a batch')
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    return ax


def plot_confusion(
    matrix: np.ndarray,       # `(n, n)`: true classes are rows, decisions columns
    names: Sequence[str],     # of the classes
    decimals: int = 0,        # of the numbers that are written
    plot_txt: bool = True,    # write them?
    cmap: str = 'Blues',      # matplotlib's name of the colours
    title: str = '',          # above the picture
    ax: Any = None,           # matplotlib axes to draw on; new ones if None
) -> Any:                     # the axes
    "Draw how often each class was taken for each"
    side = max(3., .45*len(names)+1.5)
    ax = ax or optional('matplotlib.pyplot', 'plot_confusion').subplots(figsize=(side, side), layout='constrained')[1]
    ax.imshow(matrix, cmap=cmap, interpolation='nearest')
    ax.set(xlabel='predicted', ylabel='true', title=title)
    long = any(len(name) > 3 for name in names)
    ax.set_xticks(range(len(names)), names, rotation=90 if long else 0)
    ax.set_yticks(range(len(names)), names)
    for (i, j), v in np.ndenumerate(matrix) if plot_txt else ():
        if not v and len(matrix) > 12: continue  # which would hide the others
        ax.text(j, i, f'{v:.{decimals}f}', ha='center', va='center', fontsize='small',
                color='white' if v > matrix.max()/2 else 'black')
    return ax


def plot_curves(
    curves: Mapping[str, tuple[np.ndarray, np.ndarray]],  # x and y of each, by name
    xlabel: str,       # what x is
    ylabel: str,       # what y is
    title: str = '',   # of the legend
    ax: Any = None,    # matplotlib axes to draw on; new ones if None
) -> Any:              # the axes
    "Draw curves within the unit square, with a legend beside it"
    width = 6+1.5*((len(curves)-1)//20)
    ax = ax or optional('matplotlib.pyplot', 'plot_curves').subplots(figsize=(width, 4.5), layout='constrained')[1]
    for name, (xs, ys) in curves.items(): ax.plot(xs, ys, label=name)
    ax.set(xlabel=xlabel, ylabel=ylabel, xlim=(-.02, 1.02), ylim=(-.02, 1.02))
    if curves: ax.legend(title=title, fontsize='small', loc='center left', bbox_to_anchor=(1, .5),
                         ncols=1+(len(curves)-1)//20)
    return ax


def plot_residuals(
    targs: np.ndarray,       # true values, `(n,)`
    residuals: np.ndarray,   # predicted less true ones, `(n,)`
    axs: Sequence[Any]|None = None,  # two matplotlib axes; new ones if None
) -> Sequence[Any]:          # the axes
    "Draw predicted against true values, and a histogram of residuals"
    found: Any = optional('matplotlib.pyplot', 'plot_residuals').subplots(
        1, 2, figsize=(9, 3.5), layout='constrained')[1] if axs is None else axs
    found[0].plot(targs, targs+residuals, '.', alpha=.6)
    ends = [targs.min(), targs.max()]
    found[0].plot(ends, ends, color='k', lw=1)
    found[0].set(xlabel='true', ylabel='predicted')
    found[1].hist(residuals, bins='auto')
    found[1].axvline(0, color='k', lw=1)
    found[1].set(xlabel='predicted less true', ylabel='items',
                 title=f'mean {residuals.mean():.3g}, deviation {residuals.std():.3g}')
    return found


def as_png(
    ax: Any,  # axes of the figure
) -> bytes:
    "A figure as a PNG file; it is closed"
    buffer = BytesIO()
    try: ax.figure.savefig(buffer, format='png')
    finally: optional('matplotlib.pyplot', 'as_png').close(ax.figure)
    return buffer.getvalue()


def show_figure(
    ax: Any,  # axes of the figure
) -> None:
    "Show a figure now: in a notebook below the cell, elsewhere in a window if there can be one; else it is dropped"
    plt = optional('matplotlib.pyplot', 'show_figure')
    if display_mode() in ('terminal', 'log') and _has_windows(plt.get_backend()): return ax.figure.show()
    try:
        if display_mode() == 'notebook': optional('IPython.display', "set_display('notebook')").display(ax.figure)
    finally: plt.close(ax.figure)


def _has_windows(backend):
    backends = optional('matplotlib.backends', 'show_figure')
    return backend.lower() in backends.backend_registry.list_builtin(backends.BackendFilter.INTERACTIVE)
