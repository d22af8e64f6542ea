"""Values go through a checkpoint and come back as they were, or are refused by name; digests tell all values apart."""
import io
import math
import struct
import warnings
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from datetime import datetime, timedelta, timezone
from enum import Enum, IntEnum
from pathlib import Path, PurePosixPath

import numpy as np
import pytest
import torch
from fastcore.foundation import L
from torch import Tensor, nn

from learner.plain import digest, from_plain, tensor_dtypes, to_plain
from learner.utils import rng_state

nan = struct.unpack('<d', struct.pack('<Q', 0x7ff8000000000123))[0]  # with bits of its own
lookalike = {'__kind__': 'set', 'parts': [[1]]}


class Text(str):
    def __str__(self): return 'not the text itself'

class Number(int): pass
class Real(float): pass
class Image(Tensor): pass
class Colour(Enum): red = 1
class Level(IntEnum): low = 1
Point = namedtuple('Point', 'x y')


class Wrapper(Tensor):
    "A tensor without memory of its own"
    @staticmethod
    def __new__(cls): return Tensor._make_wrapper_subclass(cls, (2,))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None): raise NotImplementedError


def saved(o):
    "The plain value as torch's file gives it back, opened without any allow-list"
    f = io.BytesIO()
    torch.save(o, f)
    f.seek(0)
    allowed = torch.serialization.get_safe_globals()  # torch's own
    torch.serialization.clear_safe_globals()
    try: return torch.load(f, weights_only=True)
    finally: torch.serialization.add_safe_globals(allowed)

def shown(o):
    inside = ', '.join(sorted(map(str, o))) if isinstance(o, (set, frozenset)) else o  # a set has no order of its own
    return f'{type(o).__name__} {inside}'[:40]

def reopened(o): return from_plain(saved(to_plain(o)))


def bits(o):
    "All that makes up a value: its type, and its content down to the bits, and the order in dicts"
    if isinstance(o, Tensor) and o.layout is not torch.strided: return type(o), o.layout, bits(o.to_dense())
    if isinstance(o, Tensor):
        data = o.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).flatten()
        return type(o), o.dtype, o.shape, data.view(torch.uint8).tolist()
    if isinstance(o, np.ndarray | np.generic): return type(o), o.dtype.str, o.shape, o.tobytes()
    if isinstance(o, dict): return type(o), [(bits(k), bits(v)) for k, v in o.items()]
    if isinstance(o, deque): return deque, o.maxlen, [bits(v) for v in o]
    if isinstance(o, list | tuple | L): return type(o), [bits(v) for v in o]
    if isinstance(o, float): return type(o), struct.pack('<d', o)
    if isinstance(o, complex): return type(o), bits(o.real), bits(o.imag)
    return type(o), o


def moved_to_end():
    o = OrderedDict(a=1, b=2)
    o.move_to_end('a')
    return o


values = [
    None, True, 0, -1, 2**31, -2**63, 2**2000, -2**2100, 1.5, -0., math.inf, nan, '', 'ä\0\ud800', b'', b'\0\xff',
    1-0j, complex(nan, -0.), [], (), {}, [1, (2., 'a'), {'b': [None]}], (1,)*5,
    {1: 'a', None: 'b', (1, 'c'): 2, .5: b'x'},
    set(), {1, 'a', (2, 3)}, frozenset(), frozenset({1, frozenset({2})}), deque([1, 2]), deque([1, 2], maxlen=3),
    OrderedDict(b=1, a=2), moved_to_end(), OrderedDict({(1, 2): 3}), Counter('aab'), L(), L(1, [2], None), bytearray(),
    bytearray(b'ab'), Path('a/b.c'), Path('/'), torch.Size([2, 3]), torch.float32, torch.uint4, torch.device('cuda', 1),
    torch.device('cpu'), datetime(2024, 5, 6, 7, 8, 9, 10), datetime(2024, 5, 6, tzinfo=timezone(timedelta(hours=-3))),
    timedelta(-1, 2, 3), np.float64(nan), np.float32(.1), np.uint32(7), np.bool_(True), np.complex64(1j),
    np.longdouble(2), np.datetime64('2024-05-06'), np.timedelta64(3, 'ms'),
    {frozenset({1}): 1, b'': 2, 2**3000: 3, np.int8(4): 5}, {(np.int8(1), torch.Size([1])): 2},
    lookalike, [lookalike, {'__kind__': None}], {'a': {'__kind__': 'no such kind'}}]

arrays = [
    np.arange(3), np.array(5.), np.zeros((0, 3)), np.frombuffer(b'ab', 'u1'),
    np.arange(6.).reshape(2, 3).T, np.arange(6.)[::-2], np.eye(3)[:, 1], np.array([True]),
    np.broadcast_to(np.float32(2), (2, 2)), np.arange(3, dtype='>i4'), np.array(['ab', 'c']), np.array([b'ab', b'']),
    np.array(['2024-05-06', 'NaT'], 'M8[D]'), np.arange(2).astype('m8[us]'), np.arange(3, dtype=np.longdouble),
    np.arange(3, dtype='u4'), np.array([], 'M8[s]'), np.float16([nan, -0.]), np.rec.array([(1, 2.)])['f1']]

with warnings.catch_warnings():  # torch calls them a beta feature, once
    warnings.simplefilter('ignore')
    compressed = [torch.eye(4).to_sparse_csr(), torch.eye(4).to_sparse_csc(), torch.eye(4).to_sparse_bsr((2, 2)),
                  torch.eye(4).to_sparse_bsc((2, 2))]

byte = torch.arange(32, dtype=torch.uint8)

tensors = [
    torch.arange(6.).view(2, 3).t(), torch.tensor(3), torch.zeros(0, 2), torch.ones(1).expand(3), torch.arange(9)[::3],
    torch.tensor([1+2j]).conj(), torch.tensor([1+2j]).conj().imag, torch.eye(3).to_sparse(), *compressed,
    *(byte.view(d) for d in sorted(tensor_dtypes - {torch.bool, torch.complex32}, key=str)), torch.tensor([True])]

all_values = [*values, *arrays, *tensors]


# ---- there and back

@pytest.mark.parametrize('o', all_values, ids=shown)
def test_value_comes_back(o):
    "What a file gives back is of the same type, and the same bit for bit, alone or within something else"
    assert bits(reopened(o)) == bits(o)
    assert bits(reopened({'a': [o, (o,)]})) == bits({'a': [o, (o,)]})


def types_in(o):
    if isinstance(o, dict): return {dict}.union(*map(types_in, (*o.keys(), *o.values())))
    return {type(o)}.union(*map(types_in, o)) if isinstance(o, list | tuple) else {type(o)}

def test_only_plain_values_are_written():
    "A file holds nothing but tensors and Python's plain values, of exactly these types"
    odd = [nn.Parameter(torch.ones(2)), Image(torch.ones(1)), Text('a'), np.str_('a'), Number(1)]

    assert types_in(to_plain([all_values, odd])) == {type(None), bool, int, float, str, bytes, list, tuple, dict,
                                                     Tensor}


@pytest.mark.parametrize('o, new', [
    (Text('a'), 'a'), (np.str_('a'), 'a'), (np.bytes_(b''), b''), (Number(2**2100), 2**2100), (Real(.1), .1),
    (nn.Parameter(torch.ones(2)), torch.ones(2)), (nn.Buffer(torch.ones(2)), torch.ones(2)),
    (Image([1.]), torch.ones(1)), ({Text('a'): Number(1)}, {'a': 1})])
def test_subclasses_become_what_they_are_of(o, new):
    "Objects of subclasses of str, bytes, int, float and Tensor come back as such"
    assert bits(reopened(o)) == bits(new)


def test_tensors_are_not_copied():
    "A tensor stays where it is in memory, and an array too; neither carries a graph or what was attached to it"
    t, a = torch.ones(3, requires_grad=True), np.ones(3)
    t.note = object()

    plain = to_plain([t, t*2, a])

    assert plain[0].data_ptr() == t.data_ptr() and plain[2]['parts'][0].data_ptr() == a.ctypes.data
    assert not plain[0].requires_grad and plain[1].grad_fn is None and vars(plain[0]) == {}


@pytest.mark.parametrize('o', [torch.ones(2), nn.Parameter(torch.ones(2)), np.ones(2), [1], {'a': 1}, {1}, deque([1])],
                         ids=lambda o: type(o).__name__)
def test_what_is_shared_stays_shared(o):
    "What stands in two places is one object in the file, and afterwards"
    a, b = reopened({'a': o, 'b': [o]}).values()

    assert a is b[0]

def test_views_share_their_memory():
    "Two tensors on the same memory, such as tied weights, share it afterwards"
    w = torch.zeros(4)

    a, b = reopened([w, w[1:]])
    a += 1

    assert b.tolist() == [1, 1, 1]

def test_memory_seen_as_two_types():
    "Tensors that see the same memory as different types, which `torch.save` refuses, are saved"
    w = torch.ones(4)

    assert bits(reopened([w, w.view(torch.int32), w])) == bits([w, w.view(torch.int32), w])


def test_state_of_a_model():
    "A model's state keeps the versions of its modules, by which they take in older ones"
    state = nn.Sequential(nn.BatchNorm1d(2)).state_dict()

    new = reopened(state)

    assert bits(new) == bits(state) and new._metadata == state._metadata

def test_random_states():
    "The states of all random generators come back"
    assert bits(reopened(rng_state())) == bits(rng_state())


# ---- what cannot be held

@pytest.mark.parametrize('o, name', [
    (Colour.red, 'Colour'), (Level.low, 'Level'), (Point(1, 2), 'Point'), (defaultdict(list), 'defaultdict'),
    (print, 'builtin_function_or_method'), (nn.ReLU(), 'torch.nn.modules.activation.ReLU'), (Number, 'builtins.type'),
    (np.array([object()]), 'numpy.ndarray'), (np.zeros(1, 'i4,f4'), 'numpy.ndarray'),
    (np.ma.array([1]), 'MaskedArray'), (np.zeros(1, 'i4,f4')[0], 'numpy.void'), (PurePosixPath('a'), 'PurePosixPath'),
    (torch.Generator(), 'torch._C.Generator'), (Wrapper(), 'Wrapper'),
    (torch.ones(2, device='meta'), 'torch.Tensor` of torch.float32, torch.strided, on meta'),
    (torch.empty(1, dtype=torch.bits8), 'torch.bits8')],
    ids=lambda o: o if isinstance(o, str) else type(o).__name__)
def test_other_objects_are_refused(o, name):
    "Anything else is an error that says where it is, of which type, and what to do"
    state = {'mine': {'best': [0, o]}}

    with pytest.raises(TypeError, match=rf'^`callbacks.mine.best\[1\]` is a `.*{name}.*give .* a `state_dict`'):
        to_plain(state, 'callbacks')

def test_lazy_parameters_are_refused():
    "One that has no values yet is an error that says how it gets them"
    with pytest.raises(TypeError, match=r'^`model.weight` is lazy.*`learn.validate\(\)`'):
        to_plain({'weight': nn.LazyLinear(1).weight}, 'model')

@pytest.mark.parametrize('o, where', [
    (object(), 'the value is a'), ({'a': {3: object()}}, r'`a\[3\]` is a'), ({object(): 1}, '`a key of the value`'),
    (OrderedDict(a=deque([object()])), r'`a\[0\]` is a')], ids=['itself', 'in dicts', 'a key', 'in a deque'])
def test_an_error_says_where(o, where):
    "The place is told by names and indices, through all containers"
    with pytest.raises(TypeError, match=f'^{where}'): to_plain(o)

def test_tensors_are_no_keys():
    "A dict by tensors, such as an optimizer's own state, is refused, since nothing would be found in it"
    with pytest.raises(TypeError, match='`opt` has tensors as keys'): to_plain({'opt': {torch.ones(1): 1}})


def within_itself():
    a = {}
    a['b'] = [a]
    return a

def test_what_contains_itself_is_refused():
    "A structure that contains itself is an error that says where, not an endless recursion; in a file too"
    with pytest.raises(ValueError, match=r'`state.b\[0\]` contains itself'): to_plain(within_itself(), 'state')
    with pytest.raises(ValueError, match='contains itself'): from_plain(saved(within_itself()))


@pytest.mark.parametrize('kind, parts', [
    ('os.system', ['true']), ('builtins.eval', ['1']), (['set'], [[]]), (None, [[]]), ('set', None), ('set', [5]),
    ('set', [[[]]]), ('array', ['O', (1,), b'\0'*8]), ('array', ['i4,O', (1,), b'\0'*16]),
    ('array', ['f8', (99,), b'\0'*8]), ('array', ['f8', (2,), None]),
    ('dtype', ['torch.load']), ('device', ['nowhere']), ('int', ['x']), ('path', [5]),
    ('deque', [[1], 2, 3]), ('complex', ['x'])], ids=str)
def test_unknown_kinds_are_refused(kind, parts):
    "A file cannot ask for anything that is not in the table, nor for what does not fit"
    with pytest.raises(ValueError, match='the checkpoint holds a'): from_plain([{'__kind__': kind, 'parts': parts}])


# ---- digests

different = [
    None, True, 1, 1., '1', b'1', np.int64(1), np.int32(1), np.float64(1), 1+0j, 0., -0., math.nan, nan, '', b'', [],
    (), {}, set(), frozenset(), L(), deque(), deque(maxlen=1), OrderedDict(), Counter(), [1], (1,), {1}, [[1], 2],
    [[1, 2]], ['ab', 'c'], ['a', 'bc'], [1, 2], [2, 1], {'a': 1}, {'a': 1.}, {'a': 2}, {'b': 1}, {1: 'a', 2: 'b'},
    {1: 'b', 2: 'a'}, {'1': 'a', 2: 'b'}, {(1, b''): 2}, {(1, b''): 3}, {b'': 1, 'a': 2}, {b'': 2, 'a': 1},
    '?', '\ud800', torch.Size([1]), torch.float32, 'torch.float32', torch.device('cpu'), 'cpu', Path('a'), 'a',
    torch.tensor(1), torch.tensor([1]), torch.tensor([[1]]), torch.tensor([1.]), torch.tensor([1.]).view(torch.int32),
    torch.tensor([True]), np.array([1]), torch.zeros(0), torch.zeros(0, 1), torch.zeros(1, 0), torch.zeros(1),
    -torch.zeros(1), torch.ones(6).bfloat16(), torch.ones(6).half(), torch.arange(6.).view(2, 3),
    torch.arange(6.).view(3, 2), torch.arange(6.).view(3, 2).t(), torch.tensor([1j]), torch.tensor([1j]).conj(),
    torch.eye(2), torch.eye(2).to_sparse(), torch.eye(2).to_sparse()*2, *compressed[:2]]

def test_different_values_have_different_digests():
    "Type, structure, shape and every bit count"
    assert len({digest(o) for o in different}) == len(different)

same = {
    'dicts': ({'a': 1, 'b': {2: 3, 'c': 4}, None: 5}, {None: 5, 'b': {'c': 4, 2: 3}, 'a': 1}),
    'keys with tags': ({b'': 1, np.int8(2): 2}, {np.int8(2): 2, b'': 1}),
    'ordered': (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
    'sets': ({0, 8, 'a'}, {8, 'a', 0}), 'frozensets': (frozenset([0, 8]), frozenset([8, 0])),
    'strides': (torch.arange(6.).view(2, 3), torch.arange(6.).view(2, 3).t().contiguous().t()),
    'steps': (torch.arange(0, 8, 2), torch.arange(8)[::2]), 'repeated': (torch.ones(3), torch.ones(1).expand(3)),
    'conjugate': (torch.tensor([1j]).conj(), torch.tensor([complex(0, -1)])),
    'arrays': (np.eye(3)[::-1], np.eye(3)[::-1].copy()),
    'sparse': (torch.sparse_coo_tensor([[0, 0]], [1., 2.], (2,), check_invariants=True),
               torch.tensor([3., 0]).to_sparse()),
    'parameter': (nn.Parameter(torch.ones(2)), torch.ones(2)), 'text': (np.str_('a'), 'a')}

@pytest.mark.parametrize('a, b', same.values(), ids=same)
def test_what_is_the_same_has_the_same_digest(a, b):
    "The order in dicts and sets, the way a tensor lies in memory, and subclasses that files do not know do not count"
    assert digest(a) == digest(b) == digest(to_plain(a))
    assert digest([a, {'c': a}]) == digest([b, {'c': b}]) != digest([b, {'c': 0}])

@pytest.mark.parametrize('o', [o for o in all_values if 'kind' not in str(o)], ids=shown)
def test_digest_goes_through_a_file(o):
    "A value, its plain form, and what a file gives back of it have one digest"
    assert digest(o) == digest(to_plain(o)) == digest(reopened(o))

def test_every_bit_of_a_tensor_counts():
    "Flipping any one bit of a tensor's memory changes the digest"
    t = torch.randn(5, generator=torch.Generator().manual_seed(0)).bfloat16()
    digests = {digest(t)}

    for i in range(80):
        flipped = t.clone()
        flipped.view(torch.uint8)[i//8] ^= 1 << i % 8
        digests.add(digest(flipped))

    assert len(digests) == 81

def test_digests_are_the_same_everywhere():
    "A digest depends on nothing but the value: it can be written down"
    o = {'a': [1, 2., 'b', None], (1, b''): {True}, 'w': torch.arange(3.), 'x': np.array(['2024'], 'M8[s]')}

    assert digest(o) == '23a8e7b76c7ddd817f67541d15103c6d7e5aecbdb1af6b628e2356082b1af852'
