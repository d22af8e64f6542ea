"""The whole state of a training run in a dict or a file, and the hash that tells whether two runs go on alike."""
from copy import deepcopy
from pathlib import Path
from typing import Any

from fastcore.basics import patch
from fastcore.foundation import L

from ..display import say
from ..files import load_file, save_file
from ..frame import current_opt
from ..learner import Learner
from ..meta import meta_of
from ..plain import digest, from_plain, to_plain
from ..state import differences, keyed, learner_state, restore_snapshot, restore_weights
from ..weights import model_path

__all__ = ['refuse', 'put_back']


def refuse(
    found: dict[str, str],  # what differs, by kind
    allow: Any,             # the kinds that may
    source: str,            # where the state is from, for the message
) -> None:
    "Raises: ValueError naming all that differs and is not allowed to; TypeError if `allow` names no kind"
    kinds = 'model', 'optimizer', 'dataset', 'batch_size', 'workers', 'n_epoch', 'lr', 'wd', 'callbacks'
    allow = {*L(allow)}
    if odd := allow - {*kinds}: raise TypeError(f"allow: {', '.join(map(repr, odd))} is none of {', '.join(kinds)}")
    if bad := {k: why for k, why in found.items() if k not in allow}: raise ValueError(
        f"{source} does not fit this Learner:" + ''.join(f'\n  {k}: {why}' for k, why in bad.items()) +
        f"\n`allow={{{', '.join(map(repr, bad))}}}` goes on nevertheless")
    for k, why in found.items(): say(f"{source}, {k}: {why}")


def put_back(
    learn: Any,               # the Learner
    state: dict[str, Any],    # of `learner_state`
    allow: Any = (),          # what may differ: 'model' and 'optimizer' matter here
) -> None:
    "Fire `before_load`, which may change `state`, put it back as a whole, then fire `after_load`"
    learn('before_load', state)
    restore_weights(learn, state, frozenset(L(allow)))
    restore_snapshot(learn, state)
    for k, v in state.get('meta', {}).get('user', {}).items(): learn.meta.setdefault(k, v)  # this script knows better
    learn('after_load', state)


@patch
def state_dict(self: Learner) -> dict[str, Any]:  # tensors are copies
    """All that decides how training goes on: weights, optimizer, random streams, callbacks, and where the fit is

    Raises: RuntimeError in the midst of a batch."""
    return deepcopy(_whole_state(self))


@patch
def load_state_dict(self: Learner,
    state: dict[str, Any],  # what `state_dict` gave, also in another process
    allow: Any = (),        # what may differ: {'model', 'optimizer'}
) -> Learner:
    """Put everything back; a fit in which it was taken goes on by `fit(resume=file)`, not by this

    Raises: ValueError naming what does not fit; RuntimeError within a fit."""
    return _load(self, deepcopy(state), allow, 'the state')


@patch
def state_hash(self: Learner) -> str:  # 64 hexadecimal digits
    """sha256 over everything that decides how training goes on: two Learners with the same hash train alike

    Times, and what else callbacks declare as `not_hashed`, are left out.
    Raises: RuntimeError in the midst of a batch; TypeError for what a file could not hold."""
    state = {k: v for k, v in _whole_state(self).items() if k not in ('version', 'data')}
    for k, cb in keyed(self).items():
        if k in state['callbacks']:
            kept = {n: v for n, v in state['callbacks'][k].items() if n not in cb.not_hashed}
            state['callbacks'] = {**state['callbacks'], k: kept}
    return digest(to_plain(state, 'learner'))


@patch
def save_state(self: Learner,
    file: str|Path,  # below `learn.path/learn.model_dir` unless absolute; '.ckpt' is added if it has no such suffix
) -> Path:           # of the file
    """Save everything in one file, durably and with a checksum; `torch.load(weights_only=True)` opens it

    It tells when it was made, with which versions, and what `learn.meta` holds: `checkpoint_meta(file)` reads that.
    Raises: OSError if it cannot be written: the file of that name is as it was; TypeError for what a callback wants
    kept, or `learn.meta` has, and a file cannot hold; RuntimeError in the midst of a batch, where
    `learn.request_save()` waits for its end."""
    state, path = _whole_state(self) | dict(meta=meta_of(self)), model_path(self, file, '.ckpt')
    self('before_save', state)
    save_file(to_plain(state, 'learner'), path)
    return path


@patch
def load_state(self: Learner,
    file: str|Path,   # as `save_state` takes it
    allow: Any = (),  # what may differ: {'model', 'optimizer'}
) -> Learner:
    """Load what `save_state` or a Checkpoint saved; a fit goes on by `fit(resume=file)`

    What `learn.meta` has not comes from the file; what it has, stays.
    Raises: DamagedFile if it is not as it was written; ValueError naming what does not fit; RuntimeError in a fit."""
    path = model_path(self, file, '.ckpt', there=True)
    return _load(self, from_plain(load_file(path)), allow, f"`{path}`")


def _whole_state(learn):
    scopes = {scope[0] for scope in learn._scopes()}
    event = learn._at_work[1] if learn._at_work else ''
    if scopes and not (learn.run_kind == 'fit' and event in ('save_point', 'after_fit')): raise RuntimeError(
        f"the state cannot be taken at `{event or 'this place'}`, where something is under way: do it in a method "
        "`save_point`, which comes after each epoch and its training, or let a Checkpoint do it after this batch, by "
        "`learn.request_save()`")
    return learner_state(learn)


def _load(learn, state, allow, source):
    if learn._scope: raise RuntimeError("a state cannot be loaded within a fit: `fit(resume=file)` begins with it")
    if not isinstance(state, dict) or 'counters' not in state: raise ValueError(
        f"{source} is no state of a Learner; `learn.load` takes weights")
    if state.get('opt'): current_opt(learn)
    found = differences(learn, state)
    refuse({k: found[k] for k in ('model', 'optimizer') if k in found}, allow, source)
    if not state.get('opt') and 'optimizer' not in L(allow): learn.opt = None  # as it was then: the next fit makes one
    put_back(learn, state, allow)
    learn.keep_grads = False
    return learn
