"""`learn.publish`: weights under a name that holds their hash, as torch.hub verifies it, and a card for them."""
import hashlib
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from fastcore.basics import patch
from fastcore.foundation import L
from torch import nn
from torch.nn.parameter import is_lazy

from .data import DataLoaders
from .export import export_path, warn_unaveraged
from .files import write_file
from .learner import Learner
from .meta import meta_of, versions
from .plain import to_plain
from .plot import as_png
from .tensors import describe, to_device
from .weights import unwrapped, versions_of, weights_of, with_versions

__all__ = []


@patch
def publish(self: Learner,
    file: str|Path,            # below `learn.path` unless absolute: 'name' becomes 'name-1a2b3c4d.pth'
    licence: str|None = None,  # under which the weights may be used; None: the card says that it is not stated
    card: bool = True,         # write 'name-1a2b3c4d.md' beside it, with the curve of the loss if there is one?
    keys: Any = None,          # what else goes with them: 'opt', 'loss', 'meta', one or a list; None: the weights alone
) -> Path:                     # of the weights
    """Write the model's `state_dict`, for the CPU, and a card with what the Learner knows of it

    With `keys` the file holds a dict of 'model', the weights, and these parts: the optimizer's state, the loss's, and
    `checkpoint_meta`, whose time gives each file another name.
    The eight digits are of the file's sha256: `torch.hub.load_state_dict_from_url(…, check_hash=True)` verifies them.
    Raises: ValueError for a name in which torch.hub would find other digits, or that is of no such file, or if weights
    are lazy, or there is no part of `keys`; TypeError for what is more than plain values; OSError."""
    path = export_path(self, file, '.pth', 'publish')
    model = unwrapped(self.model)
    weights = weights_of(model)
    if lazy := [k for k, v in weights.items() if is_lazy(v)]: raise ValueError(
        f"publish: the model has lazy parameters (`{lazy[0]}` …), which get their values from the first batch")
    warn_unaveraged(self, 'publish')
    state = with_versions(to_device(to_plain(weights), 'cpu'), to_plain(versions_of(model)))
    if keys is not None: state = dict(model=state, **_beside(self, keys))
    buffer = BytesIO()
    torch.save(state, buffer)
    data = buffer.getvalue()
    digits = hashlib.sha256(data).hexdigest()[:8]
    path = path.with_name(f'{path.stem}-{digits}.pth')
    if (found := torch.hub.HASH_REGEX.search(path.name)) is None or found[1] != digits: raise ValueError(
        f"publish: torch.hub would take `{found and found[0]}` in `{path.name}` for the hash: give another name")
    write_file(path, partial(_put, data))
    if card: _write_card(self, path, licence, [*state] if keys is not None else [])
    return path


def _beside(learn, keys) -> dict[str, Any]:
    "What goes with the weights, by key"
    loss = weights_of(learn.loss_func) if isinstance(learn.loss_func, nn.Module) else {}
    parts = dict(opt=learn.opt.state_dict() if learn.opt else {}, loss=loss, meta=meta_of(learn))
    there, keys = {k: v for k, v in parts.items() if v}, [k for k in L(keys) if k != 'model']
    if odd := [k for k in keys if k not in there]: raise ValueError(
        f"publish: keys={odd[0]!r} names nothing that could go with the weights; there are model, {', '.join(there)}; "
        "`learn.save_state` saves all that a run needs to go on")
    return {k: to_device(to_plain(there[k], k), 'cpu') for k in keys}


def _put(data, f): f.write(data)


def _write_card(learn, path, licence, parts):
    curve, why = _curve(learn)
    if curve: write_file(path.with_suffix('.png'), partial(_put, curve))
    model, row, weights = unwrapped(learn.model), learn.final_record, "['model']"*bool(parts)
    facts = {'model': f'`{type(model).__module__}.{type(model).__qualname__}`',
             'parameters': f'{sum(p.numel() for p in model.parameters()):,}', 'a batch': _batch(learn),
             'after training': ', '.join(f'{k} {v:.4g}' if isinstance(v, float) else f'{k} {v}'
                                         for k, v in zip(getattr(row, 'names', ()), row or ())) or 'not known',
             **({'holds': ', '.join(f'`{k}`' for k in parts)} if parts else {}),
             'made with': ', '.join(f'{k} {v}' for k, v in versions().items()), 'licence': licence or 'not stated'}
    lines = [f'# {path.stem}', '', *(f'- **{k}**: {v}' for k, v in facts.items()), '', '```python',
             f"model.load_state_dict(torch.load('{path.name}', weights_only=True){weights})",
             '# or, from where it is published, with its hash verified',
             f"url = 'https://…/{path.name}'",
             f'torch.hub.load_state_dict_from_url(url, check_hash=True, weights_only=True){weights}', '```', '',
             f'![loss]({path.stem}.png)' if curve else f'There is no curve of the loss: {why}', '']
    write_file(path.with_suffix('.md'), partial(_put, '\n'.join(lines).encode()))


def _batch(learn) -> str:
    try: return f'`{describe(to_device(DataLoaders(learn.dls.train.fork()).one_batch(), "cpu"))}`'
    except (TypeError, ValueError): return 'not known'  # there is none, or it would be used up


def _curve(learn) -> tuple[bytes, str]:  # as PNG, or why there is none
    recorder: Any = getattr(learn, 'recorder', None)
    if not recorder or not len(recorder.losses): return b'', 'no fit was recorded'
    try: return as_png(recorder.plot_loss()), ''
    except ImportError as e: return b'', str(e)
