"""`learn.export_pickle` and `load_learner`: a whole Learner but for its data, as a pickle, which runs code when loaded.

The pickle lies within a file that is verified, and opened without running anything, before it is loaded itself.
"""
import pickle
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import is_zipfile

import torch
from fastcore.basics import patch
from torch.utils.data import DataLoader

from .callback import Callback
from .data import DataLoaders
from .events import LoopState
from .export import export_path
from .files import DamagedFile, load_file, save_file, verify_file
from .host import Host
from .interrupt import StopFlag
from .learner import Learner
from .loader import Loader
from .meta import versions

__all__ = ['NoData', 'load_learner']

# of the Learner: its data and optimizer, and what belongs to a run
left_out = {'_dls', 'opt', '_stop', '_handlers', '_scope', '_at_work', '_busy', '_trained', '_rates', 'paused', 'asked',
            'loss_parts', 'stage', 'run_kind', *vars(LoopState)}
data_facts = 'vocab', 'c', 'n_inp', 'loss_func'


class NoData(Loader):
    "A loader that has no batch, in place of one that has not been saved"
    def __init__(self): super().__init__([])
    def fork(self) -> 'NoData': "Another one"; return NoData()
    def why_empty(self) -> str: "What to do"; return (
        "the Learner was loaded from a file, which holds no data: set `learn.dls`, or give `dl=…` to what takes it")


@patch
def export_pickle(self: Learner,
    file: str|Path = 'learner.pkl',  # below `learn.path` unless absolute; '.pkl' is added if need be
) -> Path:                           # of the file
    """Write the Learner with its model and callbacks, but without data and optimizer, for `load_learner`

    Classes and functions go by name: where the file is loaded, their modules have to be there. The Learner stays as it
    is, and a file of that name until the new one is whole.
    Raises: TypeError naming what cannot be pickled; ValueError for a name that no such file has; RuntimeError within a
    fit; OSError."""
    if self._scope: raise RuntimeError(f"export_pickle was called within a {self.run_kind} that is still running")
    path = export_path(self, file, '.pkl', 'export_pickle')
    try: data = _pickled(self, self)
    except Exception as e: raise TypeError(
        f"export_pickle: {_culprit(self)}cannot be pickled: {e}\nFunctions and classes have to be defined in a module, "
        "not in another function, and lambdas be given a name; `learn.export` needs neither") from e
    save_file(dict(kind='learner', versions=versions(), data=torch.frombuffer(data, dtype=torch.uint8)), path)
    return path


def load_learner(
    path: str|Path,       # what `learn.export_pickle` wrote
    trust: bool = False,  # True: whoever made the file may run code here
    cpu: bool = True,     # onto the CPU; False: to where it was
) -> Learner:             # without data: `learn.dls` can be set
    """Load a whole Learner, which is a pickle: that runs code, any that the file asks for

    Raises: ValueError without `trust=True`, or for another file, telling what reads that; DamagedFile if it is not as
    it was written; FileNotFoundError."""
    data = _outer(path)
    if trust is not True: raise ValueError(
        f"load_learner: {path} holds a pickle, and whoever made it decides which code runs when it is loaded: give "
        "`trust=True` if you know where it is from; files of `learn.export` (`load_exported`) need no trust")
    learn = torch.load(BytesIO(data), map_location='cpu' if cpu else None, weights_only=False)
    if cpu: learn.device = learn.dls.device = torch.device('cpu')
    return learn


def _outer(path) -> Any:
    "The pickle in a file, which has not been opened"
    other = ValueError(f"load_learner: {path} was not written by `learn.export_pickle`: weights are for `learn.load`, "
                       "programs of `learn.export` for `load_exported`")
    try: found = load_file(path)
    except DamagedFile:
        if str(path).endswith('.safetensors'): raise other from None
        if is_zipfile(path) and not verify_file(path): raise other from None  # it is whole, and has no checksum
        raise
    if not isinstance(found, dict) or found.get('kind') != 'learner': raise other
    return found['data'].numpy()


def _remade(cls) -> Learner:
    learn = cls.__new__(cls)
    learn._stop = StopFlag()
    return learn


def _without_data(dls) -> DataLoaders:
    new = DataLoaders(NoData(), device=dls.device, path=dls.path)
    for k in data_facts:
        try: vars(new)[k] = getattr(dls, k)
        except (AttributeError, TypeError): pass  # it knows no classes, or does not count them
    return new


def _pickled(o, learn, within: Callable[[Any], Any] = lambda o: NotImplemented) -> bytearray:
    "`o` as `torch.save` writes it, where the Learner has no data and no optimizer; `within` may write more otherwise"
    dls, opts = _without_data(learn.dls), [o for o in (learn.opt, getattr(learn.opt, 'opt', None)) if o is not None]
    state = {k: v for k, v in vars(learn).items() if k not in left_out}

    class Pickler(pickle.Pickler):
        def reducer_override(self, obj):
            if (other := within(obj)) is not NotImplemented: return other
            if obj is learn: return _remade, (type(learn),), {**state, '_dls': dls}
            if any(obj is opt for opt in opts): return type(None), ()
            if isinstance(obj, (Loader, DataLoader)): return NoData, ()
            return NotImplemented

    buffer = BytesIO()
    torch.save(o, buffer, pickle_module=SimpleNamespace(__name__='pickle', Pickler=Pickler),
               pickle_protocol=pickle.DEFAULT_PROTOCOL)
    return bytearray(buffer.getbuffer())


def _culprit(learn) -> str:
    "Which attribute of the Learner or of a callback it is, as far as that can be told"
    def apart(o): return (str, ('',)) if isinstance(o, (Host, Callback, DataLoaders)) else NotImplemented
    own = {f'learn.{k.lstrip("_")}': v for k, v in vars(learn).items() if k not in left_out}
    own |= {f'learn.dls.{k}': v for k, v in vars(_without_data(learn.dls)).items() if k in data_facts}
    parts = {f'learn.{cb.name}.{k}': v for cb in learn.cbs for k, v in vars(cb).items()}
    classes = {f'learn.{cb.name}': type(cb) for cb in learn.cbs}
    for name, v in {**parts, **classes, **own}.items():
        try: _pickled(v, learn, apart)
        except Exception: return f"`{name}` "
    return ''
