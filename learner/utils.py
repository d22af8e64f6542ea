"""Small tools every other file may use: a context that swaps attributes, a lazy import, and random-number states."""
import random
import sys
import warnings
from contextlib import contextmanager
from importlib import import_module
from numbers import Integral, Real
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch

__all__ = ['replacing', 'optional', 'warn', 'check_number', 'edit_distance', 'is_near', 'rng_state', 'set_rng_state',
           'set_seed']

largest = sys.float_info.max


@contextmanager
def replacing(
    o: Any,   # object whose attributes are swapped
    **attrs,  # new values by attribute name
):
    """Set `attrs` on `o` for the block, and put the old values back even after an error

    Example:
    >>> from types import SimpleNamespace
    >>> o = SimpleNamespace(lr=.1)
    >>> with replacing(o, lr=1): print(o.lr)
    1
    >>> o.lr
    0.1
    """
    old = {k: getattr(o, k) for k in attrs}
    try:
        for k, v in attrs.items(): setattr(o, k, v)
        yield o
    finally:
        for k, v in old.items(): setattr(o, k, v)


def optional(
    mod: str,      # module to import, such as `'sklearn.metrics'`
    user: str,     # the feature that needs it, for the message
    pip: str = '',  # what to install; the first part of `mod` if empty
) -> ModuleType:
    """Import `mod`, or say which feature needs it and how to get it

    Raises: ImportError naming `user` and the package if `mod` is not installed."""
    try: return import_module(mod)
    except ImportError as e:
        raise ImportError(f"`{user}` needs `{mod}`: pip install {pip or mod.split('.')[0]}") from e


def warn(
    message: str,  # what happened, and what to do
) -> None:
    "Warn, pointing at the line outside this package that led here"
    level, frame, inside = 1, sys._getframe(), (__name__.partition('.')[0], 'contextlib')
    while frame and frame.f_globals.get('__name__', '').partition('.')[0] in inside:
        level, frame = level+1, frame.f_back
    warnings.warn(message, stacklevel=level)


def check_number(
    what: str,               # whose number, and which, for the message: 'MixUp: `alpha`'
    value: Any,              # as it was given
    low: float = -largest,   # it may not be less
    high: float = largest,   # nor more; `inf` lets it be infinite
    above: bool = False,     # nor `low` itself
    below: bool = False,     # nor `high` itself
    whole: bool = False,     # has it to be a whole number?
    of: str = '',            # of what: 'epochs'
) -> None:
    """Refuse what is no number, or not one of these

    Raises: TypeError if it is no number, as a bool or a text is not, or not a whole one; ValueError for another number.
    Example:
    >>> check_number('MixUp: `alpha`', -1, 0, above=True)
    Traceback (most recent call last):
    ValueError: MixUp: `alpha` is -1; give a number above 0
    """
    is_one, x = isinstance(value, Integral if whole else Real) and not isinstance(value, bool), cast(Any, value)
    if is_one and low <= x <= high and not (above and x == low or below and x == high): return
    kind = f"a {'whole '*whole}number{f' of {of}'*bool(of)}"
    limits = [f" above {low:g}" if above else f", {low:g} or more"]*(low > -largest)
    limits += [f" {'below' if below else 'at most'} {high:g}"]*(high < largest)
    raise (ValueError if is_one else TypeError)(f"{what} is {value!r}; give {kind}{' and'.join(limits)}")


def edit_distance(a: str, b: str) -> int:
    """How many insertions, deletions and replacements of letters turn `a` into `b`

    Source: V. Levenshtein, Soviet Physics Doklady 10 (1966).
    Example:
    >>> edit_distance('befor_fitt', 'before_fit')
    2
    """
    row = list(range(len(b)+1))
    for i, ca in enumerate(a):
        last, row = row, [i+1]
        for j, cb in enumerate(b): row.append(min(last[j]+(ca != cb), last[j+1]+1, row[j]+1))
    return row[-1]


def is_near(a: str, b: str, most: int) -> bool:
    "Is their `edit_distance` at most that? Nearly always lengths or letters tell at once, which classes are made by"
    return abs(len(a)-len(b)) <= most and len({*a} ^ {*b}) <= 2*most and edit_distance(a, b) <= most


def rng_state() -> dict[str, Any]:  # states of python's, numpy's, torch's and every initialised GPU's generator
    "The states of all global random-number generators, to be given back to `set_rng_state`"
    state: dict[str, Any] = dict(python=random.getstate(), numpy=np.random.get_state(), torch=torch.get_rng_state())
    if torch.cuda.is_initialized(): state['cuda'] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(
    state: dict[str, Any],  # what `rng_state` returned
) -> None:
    "Put all global random-number generators back to `state`"
    random.setstate(state['python'])
    np.random.set_state(state['numpy'])
    torch.set_rng_state(state['torch'])
    if 'cuda' in state: torch.cuda.set_rng_state_all(state['cuda'])


def set_seed(
    seed: int,                  # any integer; numpy takes it modulo 2**32
    reproducible: bool = False,  # also ask torch for deterministic algorithms, which may be slower
) -> None:
    """Seed python, numpy, torch and all GPUs; call it before the DataLoaders are made if they shuffle with a generator

    With `reproducible=True`, operations without a deterministic form raise when they run."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if reproducible:
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)
