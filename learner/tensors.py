"""Nested batches: tensors in tuples, lists, dicts and dataclasses, at any depth.

`split_batch`, `to_device` and `find_bs` run in every batch, so their first lines deal with the common batch, a tuple or
list of tensors, in a few operations; the rest of each is the general rule.
"""
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

__all__ = ['map_tensors', 'exact_device', 'to_device', 'pinned', 'to_cuda', 'to_detach', 'concat', 'find_bs', 'n_items',
           'describe', 'split_batch', 'forward_keys', 'tensors_in',
           'flat_numbers']

label_keys = ('label', 'labels', 'target', 'targets', 'y')  # names under which a dict batch holds what is to be learned


# `_parts` takes any container apart, `_rebuild` puts it together again: all the rest is written with these two.

def _parts(b) -> dict | None:
    "The members of a container by index, key or field name; None if `b` is no container"
    if isinstance(b, (tuple, list)): return dict(enumerate(b))
    if isinstance(b, Mapping): return dict(b)
    if is_dataclass(b) and not isinstance(b, type): return {f.name: getattr(b, f.name) for f in fields(b)}


def _rebuild(b, parts: dict):
    "A container of the kind of `b` that holds `parts`"
    make: Any = type(b)
    if isinstance(b, tuple): return getattr(make, '_make', make)(parts.values())
    if isinstance(b, Mapping) and not isinstance(b, MutableMapping): return make(parts)
    new = copy(b)  # keeps what else the object holds: a default factory, fields that `__init__` does not take
    if isinstance(b, list): new[:] = parts.values()
    elif isinstance(b, Mapping):
        for k, v in parts.items(): new[k] = v
    else:
        for k, v in parts.items(): object.__setattr__(new, k, v)  # also into a frozen dataclass
    return new


def _map(f, b, is_leaf):
    "`f` of every leaf in `b`; a container in which nothing changed is returned itself"
    if is_leaf(b): return f(b)
    parts = _parts(b)
    if not parts: return b
    new = {k: _map(f, v, is_leaf) for k, v in parts.items()}
    return b if all(new[k] is v for k, v in parts.items()) else _rebuild(b, new)


def _is_tensor(o) -> bool: return isinstance(o, Tensor)
def _can_move(o) -> bool: return hasattr(o, 'to') and not isinstance(o, type)


def map_tensors(
    f: Callable[[Tensor], Any],  # called with every tensor
    b: Any,                      # tensors in tuples, lists, mappings and dataclasses, at any depth
) -> Any:                        # the same structure, of the same types; `b` itself if `f` returned every tensor itself
    "`b` with each tensor replaced by `f` of it; what is neither a tensor nor a container stays as it is"
    return _map(f, b, _is_tensor)


def tensors_in(
    b: Any,  # any nested batch
) -> Iterator[Tensor]:
    "All tensors of `b`, depth first"
    if isinstance(b, Tensor): yield b
    else:
        for o in (_parts(b) or {}).values(): yield from tensors_in(o)


def flat_numbers(
    t: Tensor,   # of any shape, also sparse or complex
) -> Tensor:     # `(n,)`, float
    "The numbers that a tensor holds: of complex ones both parts, of a sparse one what it stores"
    if t.is_nested: t = torch.cat([part.flatten() for part in t.unbind()])
    if t.is_sparse: t = t.coalesce().values()
    if t.is_complex(): t = torch.view_as_real(t)
    return t.flatten().float()


def exact_device(
    device: torch.device | str | int,  # such as 'cuda'
) -> torch.device:                     # such as 'cuda:0', as a tensor's `device` says it
    "`device` with its index"
    return torch.empty(0, device=device).device


def to_device(
    b: Any,                                # any nested batch
    device: torch.device | str | int,      # where its tensors should be
    non_blocking: bool = False,            # let copies out of pinned memory overlap with other work
) -> Any:                                  # `b` itself if all of it is there already
    "Move all tensors of `b` to `device`; other objects with a `to` method (graphs, packed sequences) move themselves"
    if type(b) is tuple or type(b) is list:
        for t in b:
            if type(t) is not Tensor or t.device != device: break
        else: return b
    to = exact_device(device)

    def move(o):
        if not isinstance(o, Tensor): return o.to(to)
        return o if o.device == to else o.to(to, non_blocking=non_blocking)
    return _map(move, b, _can_move)


def pinned(
    b: Any,  # any nested batch
) -> Any:    # the same structure
    "`b` with its tensors in page-locked memory, from which a GPU copies without waiting"
    return map_tensors(lambda t: t if t.is_cuda or t.is_pinned() else t.pin_memory(), b)


_side_stream = cache(torch.cuda.Stream)  # one a device: memory freed on one stream serves no other


def to_cuda(
    batches: Iterable,     # nested batches
    device: torch.device,  # a GPU
    ahead: bool = False,   # fetch and copy each batch while the one before it is worked on
) -> Iterator:             # the batches on `device`
    "Copy batches to a GPU without waiting for it"
    if not ahead:
        for b in batches: yield to_device(pinned(b), device, non_blocking=True)
        return
    main, side, waiting = torch.cuda.current_stream(device), _side_stream(device), []
    for b in batches:
        main.wait_stream(side)  # the batch that is given next has arrived
        side.wait_stream(main)  # memory of batches that are done with is free, so that no `record_stream` is needed
        with torch.cuda.stream(side): waiting.append(to_device(pinned(b), device, non_blocking=True))
        if len(waiting) > 1: yield waiting.pop(0)
    main.wait_stream(side)
    yield from waiting


def to_detach(
    b: Any,             # any nested batch
    cpu: bool = False,  # also copy to the CPU, which waits for the device
) -> Any:               # the same structure
    "`b` with its tensors cut from their graph"
    return map_tensors((lambda t: t.detach().cpu()) if cpu else Tensor.detach, b)


def concat(
    batches: Sequence,  # nested batches of one structure, at least one
    dim: int = 0,       # the dimension along which tensors are joined
) -> Any:               # one batch of that structure
    """Join batches: tensors along `dim`, sequences without tensors (such as lists of strings) end to end

    None, or a text or number that is the same in all batches, stays; other numbers make a list, and tensors without
    dimensions one with as many numbers. A list of dicts holds one for each item.

    Raises: ValueError if there is no batch, if structures or shapes differ, or if a member cannot be joined."""
    if not batches: raise ValueError("concat: there is no batch to join")
    first = batches[0]
    if all(isinstance(b, Tensor) for b in batches): return _cat(batches, dim)
    for b in batches:
        if type(b) is not type(first): raise _unlike(first, b)
    plain = isinstance(first, (str, int, float))
    if first is None or plain and all(b == first for b in batches): return first
    if plain and not isinstance(first, str): return [*batches]
    if isinstance(first, list) and all(isinstance(o, Mapping) for b in batches for o in b):  # one for each item
        return _rebuild(first, dict(enumerate(o for b in batches for o in b)))
    if isinstance(first, (tuple, list)) and not hasattr(first, '_make') and next(tensors_in(batches), None) is None:
        return _rebuild(first, dict(enumerate(o for b in batches for o in b)))
    parts = [_parts(b) for b in batches]
    names = parts[0]
    if names is None: raise ValueError(f"concat: {describe(first)} cannot be joined; only tensors and sequences can")
    for b, p in zip(batches, parts):
        if p is None or p.keys() != names.keys(): raise _unlike(first, b)
    return _rebuild(first, {k: concat([p[k] for p in parts if p], dim) for k in names})


def _cat(ts, dim):
    "`torch.cat` with an error that shows what did not fit"
    try: return torch.cat(tuple(ts), dim) if ts[0].ndim else torch.stack(tuple(ts))
    except (RuntimeError, IndexError) as e:
        odd = next((t for t in ts if t.ndim != ts[0].ndim or t.shape[1:] != ts[0].shape[1:]), ts[-1])
        raise ValueError(f"concat: tensors {describe(ts[0])} and {describe(odd)} cannot be joined along {dim=}; "
                         "they may differ there only") from e


def _unlike(a, b): return ValueError(f"concat: batches differ in structure: {describe(a)} and {describe(b)}")


def find_bs(
    b: Any,  # any nested batch
) -> int:    # 1 if nothing in it has a length
    "Number of items in a batch: the first tensor's length, or without tensors that of the first list or tuple of items"
    t: Any = b[0] if type(b) is tuple and b else b  # `yb` nearly always is a tuple that starts with a tensor
    if type(t) is Tensor and t.shape: return t.shape[0]
    if isinstance(t, PackedSequence): return int(t.batch_sizes[0])  # its tensors are as long as all sequences together
    ts = list(tensors_in(b))
    return next((len(t) for t in ts if t.ndim), 1) if ts else _n_items(b) or 1


def _n_items(b) -> int | None:
    "Length of the first list, or of the first tuple of plain values: other tuples and mappings are structure"
    if isinstance(b, (str, bytes)): return None
    parts = None if isinstance(b, list) else _parts(b)
    if parts is None: return len(b) if hasattr(b, '__len__') else None
    inner = next((n for n in map(_n_items, parts.values()) if n), None)
    return inner or (len(parts) if isinstance(b, tuple) else None)


def n_items(
    xb: Any,  # inputs: a tuple, or a dict
    yb: Any,  # targets: a tuple
) -> int:     # 1 if nothing has a length
    "Number of items in a split batch: as its targets tell, or else its inputs; a list of dicts holds one for each item"
    t: Any = yb[0] if yb else None
    if type(t) is Tensor and t.shape: return t.shape[0]
    for o in (*yb, *(xb.values() if isinstance(xb, Mapping) else xb)):
        if isinstance(o, (list, tuple)) and o and all(isinstance(i, Mapping) for i in o): return len(o)
        if isinstance(o, PackedSequence) or any(t.ndim for t in tensors_in(o)): return find_bs(o)
        if isinstance(o, (list, tuple)) and (n := _n_items(o)): return n
    return 1


def describe(
    b: Any,  # anything, a nested batch above all
) -> str:    # such as `(float32[64, 1, 28, 28], int64[64])`
    "Structure, types and shapes of a batch, for messages"
    if isinstance(b, Tensor):
        where = '' if b.device.type == 'cpu' else f' on {b.device}'
        return f"{str(b.dtype).removeprefix('torch.')}{list(b.shape)}{where}"
    parts = _parts(b)
    if parts is None: return f"{type(b).__name__}{list(b.shape) if hasattr(b, 'shape') else ''}"
    named = isinstance(b, Mapping) or is_dataclass(b) or hasattr(b, '_fields')
    names = getattr(b, '_fields', parts)
    shown = [f"{k}={describe(v)}" if named else describe(v) for k, v in zip(names, list(parts.values())[:8])]
    if len(parts) > len(shown): shown.append(f"… {len(parts)} in all")
    if type(b) is list: return f"[{', '.join(shown)}]"
    if type(b) is tuple: return f"({', '.join(shown)}{',' if len(parts) == 1 else ''})"
    return f"{type(b).__name__}({', '.join(shown)})"


def split_batch(
    b: Any,                                # a batch as the loader gives it
    n_inp: int | None = None,              # how many members are inputs; all but the last if None
    takes: Iterable[str] | None = None,    # the keywords `forward` accepts (see `forward_keys`); None: any
    whole: bool = False,                   # the model computes its own loss: a mapping goes in undivided
) -> tuple[tuple | dict, tuple]:           # inputs (a dict to be passed by keyword if `b` is a mapping) and targets
    """Split a batch into inputs `xb` and targets `yb`

    - tuple or list: the first `n_inp` members are inputs, or all but the last; a single member is an input.
    - tensor: it is the input, there is no target.
    - mapping, or dataclass (by its field names): `xb` is a dict. Targets are the members named label, labels, target,
      targets or y, but for those that `takes` names too if there are others; without such names, the members that
      `takes` lacks. With `n_inp` the first `n_inp` members are inputs.

    Raises: TypeError for other objects, ValueError where no rule fits, showing the batch and what to do."""
    if type(b) is tuple or type(b) is list:
        if n_inp is None: xb, yb = tuple(b[:-1]), tuple(b[-1:])
        else: xb, yb = tuple(b[:n_inp]), tuple(b[n_inp:])
        if xb and type(xb[0]) is Tensor and (n_inp is None or n_inp <= len(b)): return xb, yb
    return _split(b, n_inp, takes, whole)


def _split(b, n_inp, takes, whole):
    "`split_batch` for everything but the common batch"
    if isinstance(b, (Tensor, PackedSequence)): return (b,), ()
    parts = _parts(b)
    if parts is None:
        raise TypeError(f"a batch of type `{type(b).__name__}` cannot be split into inputs and targets: {describe(b)}; "
                        "give the DataLoader a `collate_fn` that returns `(x, y)` or a dict")
    by_key = not isinstance(b, (tuple, list))
    if n_inp is not None and not 0 < n_inp <= len(parts):
        raise ValueError(f"`n_inp={n_inp}` does not fit a batch of {len(parts)} members: {describe(b)}")
    if by_key: return _split_keys(b, parts, n_inp, takes, whole)
    if all(isinstance(o, (str, bytes, int, float)) for o in b):
        raise TypeError(f"a batch without tensors cannot be split into inputs and targets: {describe(b)}; "
                        "give the DataLoader a `collate_fn` that returns `(x, y)` or a dict")
    n = n_inp or len(b)-1 or 1
    return tuple(b[:n]), tuple(b[n:])


def _split_keys(b, parts, n_inp, takes, whole):
    "`split_batch` for a mapping or dataclass, whose members are `parts`"
    if odd := [k for k in parts if not isinstance(k, str)]:
        raise TypeError(f"a dict batch goes to the model by keyword, but {odd[0]!r} is no string: {describe(b)}")
    if whole: return parts, ()
    takes = parts if takes is None else takes
    labels = [k for k in parts if k in label_keys]
    targs = [k for k in labels if k not in takes] or labels or [k for k in parts if k not in takes]
    if n_inp is not None: targs = list(parts)[n_inp:]
    xb = {k: v for k, v in parts.items() if k not in targs}
    odd = [k for k in xb if k not in takes]
    if odd or not xb:
        what = f"`{odd[0]}` is no target and no input: " if odd else "no member is an input: "
        raise ValueError(f"the batch {describe(b)} cannot be split: {what}forward takes {', '.join(takes)}; "
                         "rename or drop members in the DataLoader's `collate_fn`, or return a tuple `(x, y)`")
    return xb, tuple(parts[k] for k in targs)


def forward_keys(
    model: Any,           # a module, or any callable
) -> set[str] | None:     # None if it takes any keyword
    "Names that the model's `forward` accepts as keywords, seen through wrappers such as `torch.compile`'s and DDP"
    try: sig = inspect.signature(getattr(model, 'forward', model))
    except (TypeError, ValueError): return None  # TorchScript and functions in C have none
    kinds = {p.kind for p in sig.parameters.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        inner = getattr(model, '_orig_mod', getattr(model, 'module', None))
        return forward_keys(inner) if isinstance(inner, torch.nn.Module) else None
    named = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    return {p.name for p in sig.parameters.values() if p.kind in named}
