"""Nested batches of any structure are mapped, moved, joined, measured and split, without a silent guess."""
import sys
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from learner.tensors import (concat, describe, exact_device, find_bs, flat_numbers, forward_keys, map_tensors, pinned,
                             split_batch, tensors_in,
                             to_detach, to_device)

x, y = torch.arange(12.).view(4, 3), torch.arange(4)
Point = namedtuple('Point', 'x y')


@dataclass(frozen=True)
class Batch:
    image: Any
    label: Any
    note: str = field(default='plain', init=False)


class Words(list):
    "A list with an attribute"
    lang = ''


class Graph:
    "Moves itself, as batches of graphs do"
    def __init__(self, device='cpu'): self.device = device
    def to(self, device): return Graph(device)


def words():
    o = Words([x, 'a'])
    o.lang = 'en'
    return o


structures = [x, (x, y), [x, [y, x]], dict(a=x, b=(y,)), OrderedDict(a=x), UserDict(a=x), MappingProxyType(dict(a=x)),
              Point(x, dict(a=y)), Batch(x, [y]), words(), (x, 'text', None, 3), torch.max(x, 0)]


def leaves(o):
    "All tensors and other leaves, depth first"
    if isinstance(o, (tuple, list)): return [leaf for m in o for leaf in leaves(m)]
    if isinstance(o, Batch): return leaves([o.image, o.label, o.note])
    return leaves([*o.values()]) if hasattr(o, 'values') and not isinstance(o, torch.Tensor) else [o]


@pytest.mark.parametrize('b', structures, ids=lambda b: type(b).__name__)
def test_map_keeps_the_structure(b):
    "Each tensor is replaced, other leaves and all types stay, and the original is unchanged"
    before = describe(b)

    new = map_tensors(lambda t: t+1, b)

    assert describe(new) == before == describe(b)
    assert [type(o) for o in leaves(new)] == [type(o) for o in leaves(b)]
    assert all(torch.equal(m, o+1) if isinstance(o, torch.Tensor) else m is o for m, o in zip(leaves(new), leaves(b)))


def test_map_keeps_what_else_a_container_holds():
    "A default factory and attributes of a container are those of the original"
    assert map_tensors(torch.neg, defaultdict(list, a=x)).default_factory is list
    assert map_tensors(torch.neg, words()).lang == 'en'


@pytest.mark.parametrize('b', structures, ids=lambda b: type(b).__name__)
def test_nothing_to_move_returns_the_batch_itself(b):
    "A batch that is in place already is the same object afterwards, however the device is spelled"
    assert to_device(b, torch.device('cpu')) is b
    assert to_device(b, 'cpu') is b


@pytest.mark.parametrize('b', structures, ids=lambda b: type(b).__name__)
def test_moves_every_tensor(b):
    "All tensors at any depth are moved"
    assert {o.device.type for o in leaves(to_device(b, 'meta')) if isinstance(o, torch.Tensor)} == {'meta'}


def test_moves_only_what_is_elsewhere():
    "A tensor in place is not copied when others are"
    there = torch.empty(2, device='meta')

    a, b = to_device((there, x), 'meta')

    assert a is there and b.device.type == 'meta'


def test_objects_that_move_themselves():
    "An object with a `to` method moves by it: a graph, a packed sequence"
    packed = pack_sequence([torch.ones(3), torch.ones(2)])

    assert to_device([Graph()], 'meta')[0].device == torch.device('meta')
    assert to_device((packed,), 'cpu')[0] is packed


def calls(f, *args):
    "Python and C calls made by `f(*args)`, itself included"
    seen = []
    sys.setprofile(lambda _, what, __: seen.append(what) if what in ('call', 'c_call') else None)
    try: f(*args)
    finally: sys.setprofile(None)
    return len(seen) - 1  # the last one is `sys.setprofile`


@pytest.mark.parametrize('f, args, most', [
    (to_device, ((x, y), x.device), 1), (to_device, ([x, y], x.device), 1), (split_batch, ((x, y),), 1),
    (split_batch, ([x, y], 1), 2), (find_bs, ((y,),), 1), (find_bs, (y,), 1)])
def test_common_batches_cost_few_calls(f, args, most):
    "What runs in every batch makes no call beyond its own for a tuple or list of tensors"
    assert calls(f, *args) <= most


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
def test_gpu_device_names():
    "'cuda' is the current GPU, so that what is there is not moved again; packed sequences keep their sizes on the CPU"
    b = x.cuda(), y.cuda()
    packed = pack_sequence([torch.ones(3), torch.ones(2)])

    assert to_device(b, 'cuda') is b and to_device(b, exact_device('cuda')) is b
    assert to_device(packed, 'cuda').data.is_cuda and not to_device(packed, 'cuda').batch_sizes.is_cuda
    assert pinned((x, b))[0].is_pinned() and pinned((x, b))[1] is b


def test_detach():
    "Tensors lose their graph, other members stay"
    w = torch.ones(2, requires_grad=True)

    out = to_detach(dict(a=w*2, b='text'), cpu=True)

    assert not out['a'].requires_grad and out['b'] == 'text'
    assert not to_detach(w*2).requires_grad


@pytest.mark.parametrize('parts, expected', [
    ([x, x], torch.cat([x, x])), ([(x, y), (x, y)], (torch.cat([x, x]), torch.cat([y, y]))),
    ([dict(a=y, b=['p']), dict(b=['q', 'r'], a=y)], dict(a=torch.cat([y, y]), b=['p', 'q', 'r'])),
    ([Point(y, None), Point(y, None)], Point(torch.cat([y, y]), None)),
    ([Batch(y, [y]), Batch(y, [y])], Batch(torch.cat([y, y]), [torch.cat([y, y])])),
    ([('a', 'b'), ('c',)], ('a', 'b', 'c')), ([(), ()], ()),
    ([(y, [['a'], []])]*2, (torch.cat([y, y]), [['a'], []]*2))])
def test_concat(parts, expected):
    "Tensors are joined along the first dimension, lists of items end to end, structures by their members"
    joined = concat(parts)

    assert describe(joined) == describe(expected)
    assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
               for a, b in zip(leaves(joined), leaves(expected)))


def test_concat_along_another_dimension():
    "`dim` is the dimension that grows"
    assert concat([dict(a=x), dict(a=x)], dim=1)['a'].shape == (4, 6)


@pytest.mark.parametrize('parts, message', [
    ([], 'no batch'),
    ([x, x[:, :2]], r'float32\[4, 3\] and float32\[4, 2\]'), ([(x,), (x, x)], 'differ in structure'),
    ([dict(a=x), dict(b=x)], r'dict\(a=.*dict\(b='),
    ([x, [x]], 'differ'), (['a', 'b'], 'str cannot be joined')])
def test_concat_refuses_what_does_not_fit(parts, message):
    "The error shows what does not fit"
    with pytest.raises(ValueError, match=message): concat(parts)


@pytest.mark.parametrize('b, expected', [
    (x, 4), ((y,), 4), ([x, y], 4), (dict(n=torch.tensor(1), x=x), 4), (Batch(x, y), 4), ((torch.tensor(1.), x), 4),
    (['a', 'b', 'c', 'd'], 4), ((['a', 'b', 'c', 'd'],), 4), ((('a', 'b', 'c'),), 3), ('text', 1), ((), 1), (None, 1),
    ((torch.tensor(1.),), 1), (([['a', 'b'], ['c']],), 2), (dict(a=['p', 'q', 'r']), 3), (np.zeros((5, 2)), 5),
    ((pack_sequence([torch.ones(3), torch.ones(2)]),), 2), (x[:0], 0)])
def test_find_bs(b, expected):
    "The length of the first tensor that has one, else of the first list of items, else 1"
    assert find_bs(b) == expected


@pytest.mark.parametrize('b, expected', [
    ((x, y), '(float32[4, 3], int64[4])'), ([x], '[float32[4, 3]]'), ((x,), '(float32[4, 3],)'), (3, 'int'),
    (dict(a=x, b=['p']), 'dict(a=float32[4, 3], b=[str])'), (Point(x, None), 'Point(x=float32[4, 3], y=NoneType)'),
    (Batch(x, y), 'Batch(image=float32[4, 3], label=int64[4], note=str)'), (np.zeros((2, 1)), 'ndarray[2, 1]'),
    (['a']*9, '[str, str, str, str, str, str, str, str, … 9 in all]'),
    (torch.empty(1, device='meta'), 'float32[1] on meta')])
def test_describe(b, expected):
    "Structure, types and shapes, short enough for a message"
    assert describe(b) == expected


d, xs, ys, packed = dict(a=x), [x, x], [y, y], pack_sequence([torch.ones(3)])


@pytest.mark.parametrize('b, kwargs, expected', [
    ((x, y), {}, ((x,), (y,))), ([x, y], {}, ((x,), (y,))), ((x, x, y), {}, ((x, x), (y,))), ((x,), {}, ((x,), ())),
    ([x], {}, ((x,), ())), (x, {}, ((x,), ())), ((x, x, y, y), dict(n_inp=2), ((x, x), (y, y))),
    ((x, y), dict(n_inp=2), ((x, y), ())), ((d, y), {}, ((d,), (y,))), (Point(x, y), {}, ((x,), (y,))),
    ((xs, ys), {}, ((xs,), (ys,))), (packed, {}, ((packed,), ())), ((packed, y), {}, ((packed,), (y,))),
])
def test_split_tuples_and_tensors(b, kwargs, expected):
    "The last member is the target, or those after `n_inp`; a single one is an input, and so is a dict in a tuple"
    xb, yb = split_batch(b, **kwargs)

    assert [*map(id, xb)] == [*map(id, expected[0])] and [*map(id, yb)] == [*map(id, expected[1])]
    assert (type(xb), type(yb)) == (tuple, tuple)


@pytest.mark.parametrize('b, kwargs, keys, targs', [
    (dict(image=x, label=y), {}, 'image', [y]), (dict(labels=y, image=x), {}, 'image', [y]),
    (dict(image=x, y=y), dict(takes={'image'}), 'image', [y]),
    (dict(ids=x, labels=y), dict(takes={'ids', 'labels'}), 'ids', [y]),  # forward could take them, the loss needs them
    (dict(ids=x, labels=y), dict(takes={'ids', 'labels'}, whole=True), 'ids labels', []),
    (dict(x=x, y=x, label=y), dict(takes={'x', 'y'}), 'x y', [y]),  # `y` is an input here, since another is the label
    (dict(image=x, mask=y), dict(takes={'image'}), 'image', [y]), (dict(image=x), {}, 'image', []),
    (dict(image=x, mask=y), {}, 'image mask', []), (dict(a=x, b=x, c=y), dict(n_inp=2), 'a b', [y]),
    (OrderedDict(image=x, target=y, targets=x), {}, 'image', [y, x]), (UserDict(image=x, label=y), {}, 'image', [y]),
])
def test_split_mappings(b, kwargs, keys, targs):
    "A mapping is split by its label names, else by what `forward` takes; with a loss in the model it stays whole"
    xb, yb = split_batch(b, **kwargs)

    assert type(xb) is dict and ' '.join(xb) == keys and all(v is b[k] for k, v in xb.items())
    assert type(yb) is tuple and [*map(id, yb)] == [*map(id, targs)]


def test_split_dataclass():
    "A dataclass is split by its field names, as a mapping is"
    xb, yb = split_batch(Batch(x, y), takes={'image', 'note'})

    assert xb == dict(image=x, note='plain') and yb == (y,)


@pytest.mark.parametrize('b, kwargs, error, message', [
    ('text', {}, TypeError, '`str` cannot be split.*collate_fn'), (3, {}, TypeError, '`int` cannot be split'),
    (Graph(), {}, TypeError, '`Graph` cannot be split'), (None, {}, TypeError, 'NoneType'),
    (['a', 'b'], {}, TypeError, r'without tensors.*\[str, str\]'), ((), {}, TypeError, 'without tensors'),
    ((x, y), dict(n_inp=3), ValueError, r'`n_inp=3` does not fit a batch of 2 members: \(float32'),
    ((x, y), dict(n_inp=0), ValueError, '`n_inp=0`'), (dict(a=x), dict(n_inp=2), ValueError, '`n_inp=2`'),
    ({0: x, 'a': y}, {}, TypeError, '0 is no string'),
    (dict(image=x, label=y, path='p'), dict(takes={'image'}), ValueError, '`path` is no target and no.*takes image'),
    (dict(image=x, mask=y), dict(takes={'input'}), ValueError, r'dict\(image=.*no member is an input.*takes input'),
    (dict(label=y), {}, ValueError, 'no member is an input')])
def test_unsplittable(b, kwargs, error, message):
    "What no rule splits is an error that shows the batch and what to do"
    with pytest.raises(error, match=message): split_batch(b, **kwargs)


class Net(nn.Module):
    def forward(self, a, /, b, *args, c=None): pass


class AnyKey(nn.Module):
    def forward(self, **kwargs): pass


@pytest.mark.parametrize('model, keys', [
    (Net(), {'b', 'c'}), (AnyKey(), None), (nn.Linear(1, 1), {'input'}), (nn.DataParallel(Net()), {'b', 'c'}),
    (nn.DataParallel(AnyKey()), None), (lambda p, q=1: p, {'p', 'q'})])
def test_forward_keys(model, keys):
    "The names that can be passed by keyword, also through a wrapper; None if any can"
    assert forward_keys(model) == keys


def test_forward_keys_of_a_compiled_model():
    "`torch.compile` does not hide what `forward` takes"
    assert forward_keys(torch.compile(Net(), backend='eager')) == {'b', 'c'}


@pytest.mark.parametrize('t, numbers', [
    (torch.tensor([[1, 2], [3, 4]]), [1, 2, 3, 4]), (torch.tensor([1+2j]), [1, 2]), (torch.tensor(5.).half(), [5]),
    (torch.sparse_coo_tensor([[1, 1, 0]], [1., 2, 4], (3,), check_invariants=False), [4, 3]),
    (torch.nested.nested_tensor([[1., 2], [3.]], layout=torch.jagged), [1, 2, 3]), (torch.empty(0, 3), [])],
    ids=['matrix', 'complex', 'half', 'sparse', 'nested', 'empty'])
def test_the_numbers_of_any_tensor(t, numbers):
    "One flat float tensor: both parts of complex numbers, what a sparse tensor stores with duplicates added"
    flat = flat_numbers(t)

    assert flat.dtype == torch.float32 and flat.tolist() == numbers

def test_tensors_are_found_at_any_depth():
    "In order, depth first; what is no tensor is left out"
    a, b, c = torch.zeros(3, 1)

    assert [*map(id, tensors_in([a, dict(x=(b, 'no'), y=[c]), 3]))] == [id(a), id(b), id(c)]


def test_concat_of_single_numbers():
    "Tensors without dimensions make one, other numbers a list unless they are the same; dicts in a list are items"
    assert concat([x.sum(), x.sum()]).shape == (2,)
    assert concat([3, 3]) == 3 and concat([3, 4]) == [3, 4] and concat([dict(a=1), dict(a=1)]) == dict(a=1)
    assert concat([[dict(a=x)]*3, [dict(a=x)]*2]) == [dict(a=x)]*5 and concat([[], [dict(a=x)]]) == [dict(a=x)]
