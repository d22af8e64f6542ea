"""Meta: what a checkpoint tells of how it was made: when, with which versions, and what the user wants told."""
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from .files import load_file
from .plain import from_plain, to_plain

__all__ = ['versions', 'made_now', 'meta_of', 'checkpoint_meta']


def versions() -> dict[str, str]:
    "Of what a file was made with"
    package = __name__.partition('.')[0]
    return {'python': platform.python_version(), 'torch': str(torch.__version__),
            package: sys.modules[package].__version__}


def made_now() -> dict[str, Any]: "Time (ISO, UTC) and versions"; return dict(
    time=datetime.now(UTC).isoformat(timespec='seconds'), versions=versions())


def meta_of(
    learn: Any,         # the Learner
) -> dict[str, Any]:    # 'time' (ISO, UTC), 'versions', and as 'user' what `learn.meta` has
    """What a file made now tells of how it was made

    Raises: TypeError naming what in `learn.meta` a file cannot hold."""
    if not isinstance(learn.meta, dict): raise TypeError(
        f"`learn.meta` is a `{type(learn.meta).__name__}`: give a dict, as `learn.meta['dataset'] = 'v3'` fills it")
    for k, v in learn.meta.items():
        try: to_plain({k: v}, 'learn.meta')
        except (TypeError, ValueError) as e: raise TypeError(
            f"`learn.meta[{k!r}]`, a `{type(v).__name__}`, is or holds what a checkpoint cannot: give texts, numbers, "
            "and lists or dicts of these, such as `vars(args)`") from e
    return made_now() | dict(user=dict(learn.meta))


def checkpoint_meta(
    file: str|Path,      # what `learn.save_state` or a Checkpoint wrote
) -> dict[str, Any]:     # 'time' (ISO, UTC), 'versions', 'n_fit', 'epoch', 'n_step'; as 'user' what `learn.meta` had
    """What a checkpoint tells of how it was made; it needs no Learner, and none of the classes that the file is of

    `file` is a path as it stands, not one below a Learner's. What the file does not have is not there: weights alone
    have nothing of it.
    Raises: DamagedFile if it is not as it was written; FileNotFoundError."""
    state = load_file(file)
    if not isinstance(state, dict): return {}
    counters = {k: v for k, v in state.get('counters', {}).items() if k in ('n_fit', 'epoch', 'n_step')}
    return {**from_plain(state.get('meta', {})), **counters}
