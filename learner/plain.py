"""Values as a checkpoint can hold them: tensors and plain values, which `torch.load(weights_only=True)` opens as it is.

Other kinds of value become `{'__kind__': name, 'parts': […]}`. One table says what they are and how they are made anew,
so a file can ask for nothing else: no name that is found in one is imported, or looked up anywhere but in that table.
"""
import hashlib
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from datetime import datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from fastcore.foundation import L
from torch import Tensor
from torch.nn.parameter import is_lazy

__all__ = ['to_plain', 'from_plain', 'digest']

dtypes = {str(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
# Tensors of these can be saved and opened again; those of bits, of less than a byte, and quantized ones cannot.
tensor_dtypes = {*(d for d in dtypes.values() if d.is_floating_point or d.is_complex), torch.bool, torch.int8,
                 torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64}
by_row, by_column = (Tensor.crow_indices, Tensor.col_indices), (Tensor.ccol_indices, Tensor.row_indices)
indices_of = {torch.strided: (), torch.sparse_coo: (Tensor.indices,), torch.sparse_csr: by_row,
              torch.sparse_bsr: by_row, torch.sparse_csc: by_column, torch.sparse_bsc: by_column}
numpy_kinds = 'biufcmMSU'  # numbers, times and texts; other arrays hold objects or fields
torch_has = {np.dtype(t) for t in '''bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64
                                     complex64 complex128'''.split()}  # numpy's types that torch has too
big = 2**2000  # torch's unpickler reads no integer of more than 255 bytes
value_of = {str: str.__str__, int: int.__int__, float: float.__float__, bytes: bytes.__bytes__}  # for their subclasses


# ---- the kinds that are no plain values

class Kind(NamedTuple):
    cls: type                      # objects of exactly this type
    parts: Callable[[Any], tuple]  # what such an object consists of
    make: Callable[..., Any]       # makes it of these


def _array_parts(o: np.ndarray) -> tuple:
    "A tensor on the same memory where torch can have one, else type, shape and bytes"
    if o.dtype not in torch_has: return o.dtype.str, o.shape, o.tobytes()
    return torch.from_numpy(o if o.flags.forc and o.flags.writeable else o.copy()),


def _array(o, shape: Any = (), data=b'') -> np.ndarray:
    "The array of `_array_parts`"
    if isinstance(o, Tensor): return o.numpy()
    dtype = np.dtype(o)
    if dtype.kind not in numpy_kinds: raise TypeError(f"{dtype} is refused")  # of objects, the bytes would be pointers
    return np.ndarray(shape, dtype, memoryview(data)).copy()


def _ordered(items, metadata=None) -> OrderedDict:
    "With the versions of its modules, which a model's `state_dict()` carries as an attribute"
    new: Any = OrderedDict(items)
    if metadata is not None: new._metadata = metadata
    return new


kinds = {
    'dict': Kind(dict, lambda o: ([*o.items()],), dict),  # one with keys that are not plain
    'set': Kind(set, lambda o: (list(o),), set),
    'frozenset': Kind(frozenset, lambda o: (list(o),), frozenset),
    'deque': Kind(deque, lambda o: (list(o), o.maxlen), deque),
    'OrderedDict': Kind(OrderedDict, lambda o: (dict(o), getattr(o, '_metadata', None)), _ordered),
    'Counter': Kind(Counter, lambda o: (dict(o),), Counter),
    'L': Kind(L, lambda o: (list(o),), L),
    'array': Kind(np.ndarray, _array_parts, _array),
    'scalar': Kind(np.generic, lambda o: (o.dtype.str, o.tobytes()), lambda dtype, data: _array(dtype, (), data)[()]),
    'int': Kind(int, lambda o: (hex(o),), lambda text: int(text, 16)),
    'complex': Kind(complex, lambda o: (o.real, o.imag), complex),
    'bytes': Kind(bytes, lambda o: (), bytes),  # of these torch's unpickler refuses the empty ones only
    'bytearray': Kind(bytearray, lambda o: (bytes(o),), bytearray),
    'path': Kind(type(Path()), lambda o: (o.as_posix(),), Path),
    'Size': Kind(torch.Size, lambda o: (list(o),), torch.Size),
    'dtype': Kind(torch.dtype, lambda o: (str(o),), dtypes.__getitem__),
    'device': Kind(torch.device, lambda o: (str(o),), torch.device),
    'datetime': Kind(datetime, lambda o: (o.isoformat(),), datetime.fromisoformat),  # a time zone becomes its offset
    'timedelta': Kind(timedelta, lambda o: (o.days, o.seconds, o.microseconds), timedelta),
}
name_of = {kind.cls: name for name, kind in kinds.items()}
tag = '__kind__'
no_dispatch = Tensor.__torch_dispatch__  # pyright: ignore[reportAttributeAccessIssue]
_open = object()  # stands for a container while its members are dealt with


def _tagged(name: str, parts) -> dict: return {tag: name, 'parts': list(parts)}


def _kind_name(o) -> str|None:
    "Under which name `o` is written; None if there is none"
    if isinstance(o, np.generic | np.ndarray) and o.dtype.kind not in numpy_kinds: return None
    if isinstance(o, np.generic): return None if isinstance(o, str | bytes) else 'scalar'
    return name_of.get(type(o))


# ---- writing

def to_plain(
    o: Any,           # tensors and values, nested in any of the containers above
    where: str = '',  # what it is, such as 'callbacks.my_callback', for messages
) -> Any:             # dicts, lists, tuples, str, int, float, bool, None, bytes, and tensors on the same memory
    """`o` as a checkpoint can hold it, to be turned back by `from_plain`; what it holds twice is one object there too

    Parameters and other subclasses of Tensor become tensors; those of str, int, float and bytes become these.

    Raises: TypeError naming where there is something that cannot be held, ValueError if something contains itself."""
    return _Plain()(o, where)


class _Plain:
    "One `to_plain`: what it has converted, and what it has met in memory"
    def __init__(self, quote=True):
        self.quote = quote  # write a dict that looks like one of ours so that it is not taken for one
        self.done: dict[int, tuple] = {}  # by id: the object, which keeps its id its own, and what it became
        self.dtype_at: dict[int, torch.dtype] = {}

    def __call__(self, o, where):
        if o is None or type(o) in (bool, float, str) or type(o) is int and abs(o) < big: return o
        if id(o) not in self.done:
            self.done[id(o)] = o, _open
            self.done[id(o)] = o, self.convert(o, where)
        new = self.done[id(o)][1]
        if new is _open: raise ValueError(f"{_shown(where)} contains itself, which a checkpoint cannot hold")
        return new

    def convert(self, o, where):
        if isinstance(o, Tensor): return self.tensor(o, where)
        if type(o) is dict: return self.mapping(o, where)
        if type(o) in (list, tuple): return type(o)([self(v, f'{where}[{i}]') for i, v in enumerate(o)])
        if type(o) is bytes and o: return o
        if name := _kind_name(o): return _tagged(name, [self(p, where) for p in kinds[name].parts(o)])
        base = next((b for b in value_of if isinstance(o, b) and not isinstance(o, Enum)), None)
        if base is None: raise _cannot(f"`{_type(o)}`", where)
        return self(value_of[base](o), where)

    def mapping(self, o, where):
        if any(isinstance(k, Tensor) for k in o):
            raise TypeError(f"{_shown(where)} has tensors as keys, by which nothing is found in what a checkpoint "
                            "gives back: use names or numbers")
        items: list = [[self(k, f'a key of {_shown(where)}'), self(v, _member(where, k))] for k, v in o.items()]
        try: new = dict(items)
        except TypeError: return _tagged('dict', [items])  # a key has become a dict
        return _tagged('dict', [items]) if tag in new and self.quote else new

    def tensor(self, o, where):
        if is_lazy(o): raise TypeError(f"{_shown(where)} is lazy, and gets its values from the first batch: call "
                                       "`learn.validate()`, or the model with a batch, before")
        if type(o).__torch_dispatch__ is not no_dispatch:  # it has no memory itself
            raise _cannot(f"`{_type(o)}`", where)
        if o.layout not in indices_of or o.dtype not in tensor_dtypes or o.is_nested or o.is_meta:
            raise _cannot(f"`{_type(o)}` of {o.dtype}, {o.layout}, on {o.device}", where)
        t = o.detach()
        if type(t) is not Tensor: t = t.as_subclass(Tensor)  # which sparse ones have not
        if t.layout is not torch.strided: return t
        first = self.dtype_at.setdefault(t.untyped_storage().data_ptr(), t.dtype)
        return t if first == t.dtype else t.clone()  # torch saves no memory that is seen as two types


def _type(o) -> str: return f'{type(o).__module__}.{type(o).__qualname__}'
def _shown(where: str) -> str: return f'`{where}`' if where else 'the value'
def _member(where: str, k) -> str: return f'{where}[{k!r}]' if type(k) is not str else f'{where}.{k}' if where else k


def _cannot(what: str, where: str) -> TypeError:
    return TypeError(f"{_shown(where)} is a {what}, which a checkpoint cannot hold: it holds tensors and plain values; "
                     "give the callback a `state_dict` that returns such")


# ---- reading

def from_plain(
    o: Any,  # what `to_plain` returned, or what a file gave of it
) -> Any:
    """The values that `to_plain` was given, with what it held twice held twice

    Raises: ValueError if `o` holds a kind that is not known here, or one with parts that do not fit."""
    return _from_plain(o, {})


def _from_plain(o, done):
    if type(o) not in (dict, list, tuple): return o
    if id(o) not in done:
        done[id(o)] = _open
        if type(o) is not dict: new = type(o)([_from_plain(v, done) for v in o])
        else: new = _made(o, done) if tag in o else {k: _from_plain(v, done) for k, v in o.items()}
        done[id(o)] = new
    if done[id(o)] is _open: raise ValueError("something in the checkpoint contains itself: it is not one of learner's")
    return done[id(o)]


def _made(o, done):
    name, parts = o[tag], o.get('parts')
    if type(name) is not str or name not in kinds or type(parts) is not list:
        raise ValueError(f"the checkpoint holds a value of kind {name!r}, which is not known: a newer version of "
                         "learner may have written it")
    parts = [_from_plain(p, done) for p in parts]
    try: return kinds[name].make(*parts)
    except Exception as e: raise ValueError(f"the checkpoint holds a `{name}` that cannot be made: {e}") from e


# ---- comparing

def digest(
    o: Any,  # what `to_plain` takes; what it returned has the same digest as what it was given
) -> str:    # 64 hexadecimal digits
    """The sha256 of what `o` holds, bit for bit

    Types count, also those of numbers (1, 1.0, True), shapes of tensors, and the order in lists and tuples. The order
    in dicts and sets does not, nor does where a tensor is, or how it lies in memory.

    Raises: TypeError, ValueError as `to_plain` does.
    Example:
    >>> digest({'a': 1, 'b': 2.}) == digest({'b': 2., 'a': 1}), digest(1) == digest(1.)
    (True, False)
    """
    return _hash(_Plain(quote=False)(o, '')).hex()


def _hash(o) -> bytes:
    h = hashlib.sha256()
    _feed(h, o)
    return h.digest()


def _feed(h, o):
    "Give `h` the plain value `o`, each part with its type and length, so that different ones give different bytes"
    if isinstance(o, Tensor): _feed_tensor(h, o)
    elif type(o) is dict:
        match o:
            case {'__kind__': 'dict' | 'set' | 'frozenset' as name, 'parts': [list(members)]}:
                hashes = [_hash(v) for v in members]
            case _: name, hashes = '', [_hash(k)+_hash(v) for k, v in o.items()]
        h.update(f'{name} of {len(hashes)}:'.encode() + b''.join(sorted(hashes)))
    elif type(o) in (list, tuple):
        h.update(f'{type(o).__name__} {len(o)}:'.encode())
        for v in o: _feed(h, v)
    else:
        if type(o) is str: data = o.encode('utf-8', 'surrogatepass')
        else: data = o if type(o) is bytes else struct.pack('<d', o) if type(o) is float else repr(o).encode()
        h.update(f'{type(o).__name__} {len(data)}:'.encode() + data)


def _feed_tensor(h, t):
    h.update(f'{t.dtype} {t.layout} {tuple(t.shape)}:'.encode())
    t = t.cpu()
    if t.layout is torch.strided:
        t = t.resolve_conj().resolve_neg().contiguous()
        h.update(t.as_strided((t.numel(),), (1,)).view(torch.uint8).numpy())  # a dimension of 1 may have any stride
    else:
        if t.layout is torch.sparse_coo: t = t.coalesce()
        for part in (*indices_of[t.layout], Tensor.values): _feed_tensor(h, part(t))
