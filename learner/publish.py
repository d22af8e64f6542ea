"""`learn.publish`: weights under a name that holds their hash, as torch.hub verifies it, and a card for them."""
import hashlib
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from fastcore.basics import patch
from torch.nn.parameter import is_lazy

from .data import DataLoaders
from .export import export_path, versions, warn_unaveraged
from .files import write_file
from .learner import Learner
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
) -> Path:                     # of the weights
    """Write the model's `state_dict`, for the CPU, and a card with what the Learner knows of it

    The eight digits are of the file's sha256: `torch.hub.load_state_dict_from_url(…, check_hash=True)` verifies them.
    Raises: ValueError for a name in which torch.hub would find other digits, or that is of no such file, or if weights
    are lazy; TypeError for weights that are more than plain values; OSError."""
    path = export_path(self, file, '.pth', 'publish')
    model = unwrapped(self.model)
    weights = weights_of(model)
    if lazy := [k for k, v in weights.items() if is_lazy(v)]: raise ValueError(
        f"publish: the model has lazy parameters (`{lazy[0]}` …), which get their values from the first batch")
    warn_unaveraged(self, 'publish')
    state = with_versions(to_device(to_plain(weights), 'cpu'), to_plain(versions_of(model)))
    buffer = BytesIO()
    torch.save(state, buffer)
    data = buffer.getvalue()
    digits = hashlib.sha256(data).hexdigest()[:8]
    path = path.with_name(f'{path.stem}-{digits}.pth')
    if (found := torch.hub.HASH_REGEX.search(path.name)) is None or found[1] != digits: raise ValueError(
        f"publish: torch.hub would take `{found and found[0]}` in `{path.name}` for the hash: give another name")
    write_file(path, partial(_put, data))
    if card: _write_card(self, path, licence)
    return path


def _put(data, f): f.write(data)


def _write_card(learn, path, licence):
    curve, why = _curve(learn)
    if curve: write_file(path.with_suffix('.png'), partial(_put, curve))
    model, row = unwrapped(learn.model), learn.final_record
    facts = {'model': f'`{type(model).__module__}.{type(model).__qualname__}`',
             'parameters': f'{sum(p.numel() for p in model.parameters()):,}', 'a batch': _batch(learn),
             'after training': ', '.join(f'{k} {v:.4g}' if isinstance(v, float) else f'{k} {v}'
                                         for k, v in zip(getattr(row, 'names', ()), row or ())) or 'not known',
             'made with': ', '.join(f'{k} {v}' for k, v in versions().items()), 'licence': licence or 'not stated'}
    lines = [f'# {path.stem}', '', *(f'- **{k}**: {v}' for k, v in facts.items()), '', '```python',
             f"model.load_state_dict(torch.load('{path.name}', weights_only=True))",
             '# or, from where it is published, with its hash verified',
             f"url = 'https://…/{path.name}'",
             'torch.hub.load_state_dict_from_url(url, check_hash=True, weights_only=True)', '```', '',
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
