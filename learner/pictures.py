"""Items of a batch as pictures, curves, texts or a table, whichever their tensors are."""
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from textwrap import wrap
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .tensors import describe
from .utils import optional

__all__ = ['draw_items', 'is_picture', 'word']

least = 4  # pixels on each side of a picture: what is smaller is a few channels, or a few points in time


def draw_items(
    xs: Any,                     # inputs with a row an item: a tensor, a list of str, or these in tuples and dicts
    titles: Sequence[str]|Mapping[str, Sequence],  # a text an item, or columns of values by name; as many are drawn
    show: Callable|None = None,  # `show(xs, texts)` draws instead, and what it returns is returned
    vocab: Any = None,           # words by the number of a token, for texts; None: numbers
    beside: Mapping[str, Tensor]|None = None,  # by name, what is drawn beside each input: images, masks, curves
    wrong: Sequence[bool] = (),  # which titles are red; none if empty
) -> Any:                        # matplotlib axes, a 2-d array; or a pandas DataFrame
    """Draw the items of a batch by what their tensors are: of several the first that can be shown

    - Images: `(n, 1|3|4, h, w)`, or floats or bytes `(n, h, w)`, with at least 4 pixels a side. Bytes are 0 to 255; if
      other values are not all 0 to 1, each image is scaled to its own range, and a fourth channel, which is opacity, is
      left out. Those of `beside` are on the scale of the first of them, beyond which they are cut off.
    - Curves: other floats `(n, channels, time)`, a line a channel.
    - Texts: a list of str, or integers `(n, time)`, in a DataFrame with a column `text`.
    - A table: numbers `(n,)`, floats `(n, k)`, or integers and floats of these shapes, in columns `x0`, `x1` …, or
      by the keys of a dict.

    Raises: TypeError for other shapes, unless there is `show`."""
    columns = titles if isinstance(titles, Mapping) else {'title': titles}
    texts = [' / '.join(map(_text, row)) for row in zip(*columns.values(), strict=True)]
    if show is not None: return show(xs, texts)
    kind, found = _found(xs, len(texts), vocab)
    pictures = {**({'input': found[0][1]} if kind in ('image', 'series') else {}), **(beside or {})}
    if pictures: return _figure(pictures, texts, wrong, ' / '.join(columns) if len(columns) > 1 else '')
    if not kind: raise TypeError(f"draw_items: no picture, curve, text or table can be seen in {describe(xs)}; "
                                 "`show=f` draws them by `f(xs, texts)`")
    data = _table(found, len(texts)) if kind == 'table' else {'text': _texts(found[0][1], vocab)[:len(texts)]}
    columns = {k: [*v] for k, v in columns.items() if any(o != '' for o in v)}
    return optional('pandas', 'draw_items').DataFrame({**data, **columns})


def is_picture(
    x: Any,   # of several items
) -> bool:
    "Can it be drawn beside an input: is it an image, a mask of integers `(n, [1,] h, w)`, or a curve?"
    return _kind(x, True) in ('image', 'mask', 'series')


def word(
    i: int,      # its number
    vocab: Any,  # words by number: a list, or a dict; None: there are none
) -> Any:        # `i` itself if it is no word's
    "The word of a number"
    if vocab is None or i < 0: return i
    try: return getattr(vocab, 'iloc', vocab)[i]
    except (IndexError, KeyError): return i


# ---- which is what

def _kind(x, masks=False):
    "'image', 'mask', 'series', 'text', 'table', or '' for what is none of these"
    if isinstance(x, (list, tuple)): return 'text' if x and all(isinstance(o, str) for o in x) else ''
    if not isinstance(x, Tensor) or x.is_nested or x.layout is not torch.strided or x.is_complex(): return ''
    d, floats, small = x.ndim, x.is_floating_point(), x.dtype in (torch.uint8, torch.bool)
    ints = not floats and x.dtype != torch.bool
    if d in (3, 4) and min(x.shape[-2:]) >= least:
        if masks and ints and (d == 3 or x.shape[1] == 1): return 'mask'
        if x.shape[1] in (1, 3, 4) if d == 4 else floats or small: return 'image'
    if d == 3: return 'series' if floats else ''
    if d == 2 and ints: return 'text'
    return 'table' if d in (1, 2) else ''


def _leaves(b, name='') -> Iterator[tuple[str, Any]]:
    if isinstance(b, Mapping):
        for k, v in b.items(): yield from _leaves(v, str(k))
    elif type(b) in (tuple, list) and not _kind(b):
        for o in b: yield from _leaves(o, name)
    else: yield name, b


def _found(xs, n, vocab):  # what is shown, by name, and what kind it is; what has fewer rows is not of items
    leaves = [(kind, name, x) for name, x in _leaves(xs) for kind in [_kind(x)] if not kind or len(x) >= n]
    kinds = [kind for kind, *_ in leaves]
    numbers = all(isinstance(x, Tensor) and kind in ('text', 'table') for kind, _, x in leaves)
    if numbers and 'table' in kinds and vocab is None: return 'table', [o[1:] for o in leaves]
    return next(((kind, [(name, x)]) for kind, name, x in leaves if kind), ('', []))


# ---- tables

def _text(v):
    if not isinstance(v, float): return str(v)
    return f'{v:.0f}' if 1e4 <= abs(v) < 1e9 else f'{v:.4g}'


def _table(leaves, n):
    data: dict[str, list] = {}
    unnamed = 0
    for name, x in leaves:
        rows = x[:n].flatten(1) if x.ndim > 1 else x[:n, None]
        for i, column in enumerate(rows.T.tolist()):
            key = name if name and x.ndim == 1 else f'{name}{i}' if name else f'x{unnamed+i}'
            data[key] = column
        if not name: unnamed += rows.shape[1]
    return data


def _texts(x, vocab):
    if not isinstance(x, Tensor): return [*x]
    return [' '.join(str(word(i, vocab)) for i in row) for row in x.tolist()]


# ---- figures

def _figure(pictures, texts, wrong, title):
    n, k = len(texts), len(pictures)
    kinds = {name: _kind(x, name != 'input') for name, x in pictures.items()}
    painters = _painters({name: x[:n].detach().cpu() for name, x in pictures.items()}, kinds)
    n_cols = k if k > 1 else math.ceil(n**.5)
    n_rows = math.ceil(n*k/n_cols)
    side = 1.7 if k == 1 else 1.3  # inches
    width = side*1.5 if 'series' in kinds.values() else side
    axs = optional('matplotlib.pyplot', 'draw_items').subplots(
        n_rows, n_cols, figsize=(width*n_cols, (side+.1)*n_rows), squeeze=False, layout='constrained')[1]
    if title: axs[0, 0].figure.suptitle(title, fontsize=8)
    cells = iter(axs.flat)
    for i, text in enumerate(texts):
        colour = {'color': 'red'} if i < len(wrong) and wrong[i] else {}
        for j, (name, paint) in enumerate(painters.items()):
            paint(ax := next(cells), i)
            lines = wrap(text, int(width*15), max_lines=3, placeholder='…') if j == 0 else []
            if k > 1 and i == 0: lines.insert(0, name)
            ax.set_title('\n'.join(lines), fontsize=8, parse_math=False, **colour)
    for ax in cells: ax.set_axis_off()
    return axs


def _painters(pictures, kinds) -> dict[str, Callable]:  # each draws item `i` on axes
    masks = [x.flatten() for name, x in pictures.items() if kinds[name] == 'mask']
    codes = torch.cat(masks).unique().numpy() if masks else None
    first = next((x for name, x in pictures.items() if name != 'input' and kinds[name] == 'image'), None)
    def painter(name, x):
        if kinds[name] == 'series': return partial(_curves, x.float().mT.numpy())
        if kinds[name] == 'mask': return partial(_image, *_colours(x.reshape(len(x), *x.shape[-2:]).numpy(), codes))
        like = x if name == 'input' or first is None or first.shape != x.shape else first
        return partial(_image, _levels(x, like), dict(cmap='gray', vmin=0, vmax=1))
    return {name: painter(name, x) for name, x in pictures.items()}


def _curves(a, ax, i):
    ax.plot(a[i])
    ax.tick_params(labelsize=6)


def _image(a, options, ax, i):
    ax.imshow(a[i], interpolation='nearest', **options)
    ax.set_axis_off()


def _colours(a, codes):  # by the rank among all numbers there are, such as 255 for a border; below 0 is left white
    cmap, n = next(((name, n) for name, n in (('tab10', 10), ('tab20', 20)) if len(codes) <= n),
                   ('nipy_spectral', len(codes)))
    return np.ma.masked_where(a < 0, np.searchsorted(codes, a)), dict(cmap=cmap, vmin=0, vmax=n-1)


def _levels(x, scale):  # 0 to 1, as `scale` goes; what is not a number is black
    a, like = (_pixels(t) for t in (x, scale))
    finite = np.isfinite(like)
    if (like[finite] < 0).any() or (like[finite] > 1).any():
        if a.ndim == 4: a, like, finite = (o[..., :3] for o in (a, like, finite))
        sides = tuple(range(1, a.ndim))
        low = np.where(finite, like, np.inf).min(sides, keepdims=True)
        high = np.where(finite, like, -np.inf).max(sides, keepdims=True)
        with np.errstate(invalid='ignore'): a = (a-low)/np.where(high > low, high-low, 1)
    return np.nan_to_num(a, nan=0).clip(0, 1)


def _pixels(x):  # `(n, h, w)`, or with 3 or 4 channels last
    a = x.numpy()/255 if x.dtype == torch.uint8 else x.float().numpy()
    if a.ndim == 3: return a
    return a[:, 0] if a.shape[1] == 1 else np.moveaxis(a, 1, -1)
