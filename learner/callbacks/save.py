"""`learn.save` and `learn.load`: weights, and with them the optimizer, in files that plain torch opens too."""
import json
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from fastcore.basics import patch
from fastcore.foundation import L
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..files import DamagedFile, load_file, save_file, write_file
from ..frame import current_opt
from ..learner import Learner
from ..plain import digest, from_plain, to_plain
from ..tensors import describe
from ..utils import optional, warn
from ..weights import (clean, misfits, model_path, named_params, put_weights, tied, versions_of, weights_of,
                       with_versions)

__all__ = []

checksum = 'learner.digest'  # of the tensors: its key in the metadata of a safetensors file
opt_parts = 'state', 'param_groups', 'hypers', 'kind', 'groups', 'types'  # of `Optimizer.state_dict`


# ---- saving

@patch
def save(self: Learner,
    file: str|Path,              # below `learn.path/learn.model_dir` unless absolute; '.pth' is added if need be
    with_opt: bool|None = None,  # the optimizer too? None: yes, but not in '.safetensors', which holds tensors only
) -> Path:                       # of the file
    """Save the weights, durably and with a checksum; `torch.load` opens the file, whose names have no parts of wrappers

    It holds `{'model': …, 'opt': …}`, and 'loss' if the loss has a state; with `with_opt=False` the model's
    `state_dict` itself.
    Raises: OSError if it cannot be written: the file of that name is as it was; ValueError if there is no optimizer
    yet, or the file has no place for one, or weights are lazy; TypeError for what a file cannot hold."""
    path = model_path(self, file, '.pth')
    tensors_only = path.suffix == '.safetensors'
    if with_opt and tensors_only: raise ValueError(
        f"save: `{path.name}` holds tensors only; give `with_opt=False`, or a name that ends in '.pth'")
    if with_opt and not self.opt: raise ValueError(
        "save: there is no optimizer yet; the first fit or `learn.create_opt()` makes it; `with_opt=False` saves none")
    state = _state(self, with_opt is not False and not tensors_only)
    self('before_save', state)
    if tensors_only: _write_tensors(self, state, path)
    else: _write(self, state, path)
    return path


def _state(learn, with_opt):
    state: dict[str, Any] = dict(model=weights_of(learn.model))
    if lazy := [k for k, v in state['model'].items() if is_lazy(v)]: raise ValueError(
        f"save: the model has lazy parameters (`{lazy[0]}` …), which get their values from the first batch: call "
        "`learn.validate()`, or the model with a batch, before")
    if with_opt:
        state['opt'] = learn.opt.state_dict() if learn.opt else {}
        loss = weights_of(learn.loss_func) if isinstance(learn.loss_func, nn.Module) else {}
        if loss: state['loss'] = loss
    return state


def _write(learn, state, path):
    new = to_plain({**state, 'model': dict(state['model'])})
    new['model'] = with_versions(new['model'], to_plain(versions_of(learn.model)))
    save_file(new if len(new) > 1 else new['model'], path)


def _write_tensors(learn, state, path):
    library = optional('safetensors.torch', "learn.save('….safetensors')")
    if more := [f'`{k}`' for k in state if k != 'model']: warn(
        f"{path} holds the model's weights only, and not {', '.join(more)}, which a `before_save` put in")
    tensors, memory, aliases = {}, set(), _aliases(learn, state['model'])
    for k, v in state['model'].items():
        if k in aliases: continue
        if not isinstance(v, Tensor): raise TypeError(
            f"save: `{k}` is a {describe(v)}, and a '.safetensors' file holds tensors only; a '.pth' can hold it")
        v = v.detach().contiguous()
        tensors[k] = v.clone() if (place := v.untyped_storage().data_ptr()) in memory else v
        memory.add(place)
    try: data = library.save(tensors, {**aliases, 'format': 'pt', checksum: digest(tensors)})
    except (KeyError, ValueError) as e: raise TypeError(  # a type or a layout that the format has not
        f"save: a '.safetensors' file cannot hold all of the model, but a '.pth' can: {e}") from e
    write_file(path, lambda f: f.write(data))


def _aliases(learn, weights):  # the other names of a tensor, each with the one under which it is saved
    aliases = {}
    for names in tied(learn.model):
        names = [n for n in names if n in weights]
        aliases |= dict.fromkeys(names[1:], names[0] if names else '')
    return aliases


# ---- loading

@patch
def load(self: Learner,
    file: str|Path,              # as `save` takes it: what it or `save_state` wrote, a `state_dict`, or safetensors
    with_opt: bool|None = None,  # the optimizer's state too? None: if there is one in the file
    strict: bool = True,         # False: load what fits, and warn of what does not
    drop: Any = (),              # names to leave out, as the file or the model has them; one or a list, with wildcards
    rename: dict[str, str]|None = None,  # by regular expression, what `re.sub` puts in its place in the file's names
) -> Learner:
    """Load weights into the model as it is, on its device and in its types, and with them the optimizer's state

    Names in the file may have parts of wrappers (`module.`, `_orig_mod.`) that the model has not. Of weights that are
    left out the optimizer gets no state. Files of fastai can be read if they were saved with `with_opt=False`, those
    with a `state_dict` beside other things if these are plain values. `before_load(state)` comes first, and may change
    what was read; `after_load(state)` last.
    Raises: ValueError naming what is missing, not in the model or of another shape, or why the optimizer's state does
    not fit, before anything is changed; DamagedFile if the file is not as it was written; FileNotFoundError."""
    path = model_path(self, file, '.pth', there=True)
    state = _read(path)
    self('before_load', state)
    weights, report, names = _fitting(self, state, strict, drop, rename or {}, path)
    opt = _opt_state(self, state, weights, with_opt, path)
    if report: warn(f"`{path}` is loaded in part:{report}")
    if opt: self.opt.load_state_dict(opt)
    put_weights(self.model, weights, self.loss_func)
    averages = {k: v | _named(v, names) for k, v in state.items() if isinstance(v, dict) and 'n_averaged' in v}
    self('after_load', state | averages)
    for k in averages:
        if not hasattr(self, k): warn(
            f"`{path}` holds an average of weights too, '{k}', with which evaluations were done: the weights that were "
            f"trained are loaded. With its callback among `learn.cbs` both are")
    return self


def _read(path):
    found = _read_tensors(path) if path.suffix == '.safetensors' else load_file(path, needs_trailer=False)
    parts: dict = found if isinstance(found, dict) else {}
    if isinstance(parts.get('model'), dict): state = parts
    else: state = dict(model=parts['state_dict'] if isinstance(parts.get('state_dict'), dict) else found)
    weights = state['model']
    if not isinstance(weights, dict) or not all(isinstance(k, str) for k in weights): raise ValueError(
        f"{path} holds no weights by their names, but {describe(weights)}")
    new = from_plain({**state, 'model': dict(weights)})  # an OrderedDict would be left as it is
    return {**new, 'model': with_versions(new['model'], getattr(weights, '_metadata', None))}


def _read_tensors(path):
    library, data = optional('safetensors.torch', "learn.load('….safetensors')"), path.read_bytes()
    try: tensors = library.load(data)
    except MemoryError: raise
    except Exception as e: raise DamagedFile(f"{path} is refused: it is no safetensors file, or is damaged") from e
    n_header = int.from_bytes(data[:8], 'little')
    expected = json.loads(data[8:8+n_header]).get('__metadata__', {}).get(checksum)
    if expected is None: warn(f"{path} is loaded unverified: it has no checksum, so damage to it would not be noticed")
    elif expected != digest(tensors): raise DamagedFile(f"{path} is damaged: its tensors do not fit their checksum")
    return tensors


def _fitting(learn, state, strict, drop, rename, path):  # what to load, by its names here; and what does not fit
    loss = state['loss'] if isinstance(state.get('loss'), dict) else {}
    theirs = {**state['model'], **{f'loss_func.{k}': v for k, v in loss.items()}}
    loss_func, drop = learn.loss_func if loss else None, [*L(drop)]
    own = weights_of(learn.model, loss_func)
    names, left_out = _without(drop, _mapped(theirs, own, rename), own)
    new = {n: theirs[k] for k, n in names.items()}
    lacking, extra, other = misfits(learn.model, new, loss_func)
    fitting = {k: v for k, v in new.items() if k in own and k not in other}
    report = _told([k for k in lacking if k not in left_out], extra, other, own, new)
    if own and not fitting: raise ValueError(f"nothing in `{path}` fits this model:{report}")
    if report and strict: raise ValueError(
        f"`{path}` does not fit this model:{report}\n`strict=False` loads what fits; `drop` leaves names out, `rename` "
        "changes those of the file")
    versions = getattr(state['model'], '_metadata', None) if all(k == n for k, n in names.items()) else None
    return with_versions(fitting, versions), report, names


def _named(average, names):  # as the weights are, for which it is
    parts = dict(model='', loss='loss_func.')
    return {part: {names[prefix+k].removeprefix(prefix): v for k, v in average[part].items() if prefix+k in names}
            for part, prefix in parts.items() if part in average}


def _mapped(names, own, rename):  # by name in the file, the name here
    new = {k: k for k in names}
    for pattern, text in rename.items():
        try: found = {k: re.subn(pattern, text, n) for k, n in new.items()}
        except (re.error, IndexError) as e: raise ValueError(f"load: rename={{{pattern!r}: {text!r}}}: {e}") from e
        if not any(n for _, n in found.values()): raise _unused('rename', pattern, names)
        new = {k: n for k, (n, _) in found.items()}
    return {k: _cleaned(n, own) for k, n in new.items()}


def _cleaned(name, own):  # without the parts of wrappers, if the model has it then
    bare = clean(name)
    inner = '.'.join(part for part in bare.split('.') if part != 'module')
    return next((n for n in (name, bare, bare.removeprefix('module.'), inner) if n in own), name)


def _without(drop, names, own):  # the names that are left, and those here of what is left out
    known = *names, *names.values(), *own
    if unused := [p for p in drop if not any(fnmatchcase(n, p) for n in known)]: raise _unused('drop', unused[0], names)
    def is_out(*names): return any(fnmatchcase(n, pattern) for n in names for pattern in drop)
    left, first = {k: n for k, n in names.items() if not is_out(k, n)}, {}
    for k, n in left.items():
        if first.setdefault(n, k) != k: raise ValueError(
            f"load: `{first[n]}` and `{k}` both become `{n}`; leave one out by `drop`")
    return left, {*filter(is_out, own), *(n for k, n in names.items() if k not in left)}


def _unused(what, pattern, names):
    return ValueError(f"load: {what}={pattern!r} matches none of {', '.join([*names][:20])}{' …'*(len(names) > 20)}")


def _told(lacking, extra, other, own, new):  # '' if there is nothing to tell
    def tell(o):
        if not isinstance(o, Tensor): return describe(o)
        return 'lazy' if is_lazy(o) else describe(o) + f' {o.layout}'*(o.layout is not torch.strided)
    rows = {'missing in the file': [f'`{k}` {tell(own[k])}' for k in lacking],
            'not in the model': [f'`{k}` {tell(new[k])}' for k in extra],
            'of another shape or type': [f'`{k}` {tell(new[k])} in the file, {tell(own[k])} here' for k in other]}
    return ''.join(f"\n  {what}: {', '.join(named[:5])}{f' … {len(named)} in all'*(len(named) > 5)}"
                   for what, named in rows.items() if named)


def _opt_state(learn, state, weights, with_opt, path):  # what is to be loaded, without that of weights which are not
    saved, advice = state.get('opt'), '`with_opt=False` loads the weights alone'
    if with_opt is False or with_opt is None and not saved: return None
    if not saved: raise ValueError(f"`{path}` holds no state of an optimizer; {advice}")
    if not isinstance(saved, dict) or not saved.keys() >= {*opt_parts}: raise ValueError(
        f"`{path}` holds the state of an optimizer that is not this package's; {advice}")
    opt = learn.opt if learn.opt and learn._scope else current_opt(learn)
    own, ps = weights_of(learn.model, learn.loss_func), opt.all_params()
    left_out = {p for k, p in named_params(learn.model, learn.loss_func) if k in own and k not in weights}
    if why := opt.misfit(saved, left_out): raise ValueError(
        f"the optimizer's state in `{path}` does not fit: {why}\n{advice}")
    state = {i: s for i, s in saved['state'].items() if ps[i] not in left_out}
    return {**saved, 'state': state, 'groups': opt.state_dict()['groups']}  # as they have just been compared
