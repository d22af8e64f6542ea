"""What a Loader tells of the loader it wraps, and what it never changes."""
import random
import re
import sys

import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset, WeightedRandomSampler

from learner.loader import Loader, untouched
from learner.utils import rng_state, set_seed
from tests.helpers import synth_learner
from tests.loader_helpers import (Lazy, Noisy, Plain, Stream, equal, gen, loaders, n, noisy, table, two_parts, x, y)


@pytest.mark.parametrize('make', [lambda: DataLoader(Plain(), 5, shuffle=True, num_workers=1, persistent_workers=True),
                                  lambda: DataLoader(Stream(), 5, num_workers=1), lambda: DataLoader(table(), 5)])
def test_users_loader_is_not_modified(make):
    "After epochs, early exits and restarts the user's loader has the attributes it had"
    user = make()
    before = dict(vars(user))
    dl = Loader(user, 'cpu')
    list(dl), next(iter(dl)), dl.restart_workers()

    assert vars(user) == before


def test_attributes_are_the_users():
    "Reading and setting an attribute reaches the user's loader; an unknown one names both classes"
    user = DataLoader(Plain(), 5)
    dl = Loader(user)
    dl.collate_fn = two_parts

    assert dl.dataset is user.dataset and user.collate_fn is two_parts
    assert next(iter(dl))[1] == 'a custom collate'
    with pytest.raises(AttributeError, match='neither `Loader` nor its `DataLoader` has `nothing`'): dl.nothing
    with pytest.raises(ValueError, match='batch_size'): dl.batch_size = 3


class Unsized:
    "Yields batches, and its length raises"
    def __len__(self): raise RuntimeError('unknown')
    def __iter__(self): return iter([x])


@pytest.mark.parametrize('dl, expected', [
    (loaders['shuffle'](), 5), (loaders['drop_last'](), 4), ([1, 2], 2), (Unsized(), None), (iter([1]), None),
    (DataLoader(Stream(), 5), None)])
def test_n_batches_is_none_without_a_length(dl, expected):
    "The number of batches, or None if there is no length or asking for it fails"
    assert Loader(dl).n_batches == expected and Loader(dl)


@pytest.mark.parametrize('dl, bs', [(loaders['shuffle'](), 5), (loaders['batch_sampler'](), 4)])
def test_bs(dl, bs):
    "The batch size, also if only a batch sampler knows it"
    assert Loader(dl).bs == bs


def test_unknown_bs():
    "A list of batches has no batch size to tell"
    with pytest.raises(AttributeError, match='neither `Loader` nor its `list` has `bs`'): Loader([x]).bs


@pytest.mark.parametrize('dl, reason', [
    (DataLoader(TensorDataset(x[:0])), 'its dataset, a `TensorDataset`, is empty'),
    (DataLoader(table(), 50, drop_last=True), r'holds 22 items, less than one batch of 50.*drop_last=False'),
    (iter([]), 'list_iterator` can be iterated only once'), ([], '`list` yields nothing')])
def test_why_empty(dl, reason):
    "An epoch without batches is explained by what is known of the loader"
    assert re.search(reason, Loader(dl).why_empty())


@pytest.mark.parametrize('data', [x, x.numpy(), Plain(), dict(a=[x]), 'text', 3])
def test_data_is_no_loader(data):
    "What would be iterated item by item is refused, with what to do"
    with pytest.raises(TypeError, match='is no loader of batches'): Loader(data)


def test_batches_are_copies():
    "Changing a batch in place changes no data, shuffled or not"
    data = TensorDataset(x.clone())
    for shuffle in (False, True):
        for b in Loader(DataLoader(data, 5, shuffle=shuffle)): b[0].zero_()

    assert torch.equal(data.tensors[0], x)


def test_index_out_of_range_is_an_error():
    "An index that the data does not have is an IndexError, as with torch's DataLoader"
    sampler = WeightedRandomSampler([0.]*2*n + [1.], 5)
    with pytest.raises(IndexError): list(Loader(DataLoader(table(), 5, sampler=sampler)))


def calls(dl):
    "Python and C calls made by an epoch"
    seen = []
    sys.setprofile(lambda _, what, __: seen.append(what) if what in ('call', 'c_call') else None)
    try:
        for _ in dl: pass
    finally: sys.setprofile(None)
    return len(seen)


@pytest.mark.parametrize('wrap, most', [(lambda dl: Loader(dl, 'cpu'), 6), (lambda dl: Loader(list(dl), 'cpu'), 2)])
def test_few_calls_per_batch(wrap, most):
    "A batch of tensors costs 6 calls (torch's DataLoader: 8 an item), a ready batch 2"
    def make(k): return wrap(DataLoader(TensorDataset(torch.zeros(k*8, 2), torch.zeros(k*8)), 8, shuffle=True))
    extra = calls(make(60)) - calls(make(10))

    assert extra <= 50*most


def test_generators_are_listed_once():
    "Generators of the loader, its samplers, and a custom sampler's own attribute, each once"
    g, h = gen(), gen()
    shared = Loader(DataLoader(table(), 5, shuffle=True, generator=g))
    sampler = Lazy()
    sampler.mine = h
    own = Loader(DataLoader(table(), 5, sampler=sampler, generator=g))

    assert [*map(id, shared.generators())] == [id(g)]
    assert {*map(id, own.generators())} == {id(g), id(h)}
    assert Loader([x]).generators() == []


def test_untouched_puts_all_streams_back():
    "A block that iterates a loader and draws from every stream leaves no trace, even by an error"
    dl = Loader(DataLoader(Noisy(), 5, shuffle=True, generator=gen()))
    set_seed(2)
    before = rng_state(), dl.generators()[0].get_state()
    with pytest.raises(KeyError), untouched(dl):
        list(dl), random.random()
        raise KeyError

    assert equal((rng_state(), dl.generators()[0].get_state()), before)


@pytest.mark.parametrize('workers', [0, 1])
def test_fork_leaves_an_epoch_alone(workers):
    "A fork iterated in the middle of an epoch changes neither its batches nor its record and position"
    def make(): return Loader(DataLoader(Noisy(), 5, shuffle=True, num_workers=workers, persistent_workers=workers > 0))
    set_seed(1)
    alone = list(make())
    set_seed(1)
    dl, got = make(), []
    for i, b in enumerate(dl):
        got.append(b)
        with untouched(dl): list(dl.fork())
        assert dl.position == i+1

    assert equal(got, alone)


def test_for_eval_forks_only_what_is_in_use():
    "An evaluation takes the loader itself, with its workers, unless it is being iterated"
    dl = Loader([x, x])
    assert dl.for_eval() is dl
    for _ in dl: assert dl.for_eval() is not dl
    assert dl.for_eval() is dl


def test_evaluations_before_it_do_not_change_an_evaluation():
    "What persistent workers draw depends on the random state, not on how often they were used"
    dl = noisy(1, persistent=True)
    def evaluate():
        set_seed(4)
        return list(dl.for_eval())

    assert equal(evaluate(), evaluate())


def test_batches_go_to_the_device():
    "Batches are moved to `device` if there is one, and left as they are if not"
    assert next(iter(Loader([(x, y)], 'meta')))[0].device.type == 'meta'
    batch = x, y
    assert next(iter(Loader([batch], 'cpu'))) is batch


class Told:
    "Notes the epochs that it is told of"
    def __init__(self): self.seen = []
    def set_epoch(self, n): self.seen.append(n)

class ToldData(Told, TensorDataset):
    def __init__(self, *tensors):
        Told.__init__(self)
        TensorDataset.__init__(self, *tensors)

class ToldSampler(Told, SequentialSampler):
    def __init__(self, data):
        Told.__init__(self)
        SequentialSampler.__init__(self, data)


def test_epochs_are_told():
    "A fit tells samplers and dataset the number of the epoch, as a distributed sampler needs it"
    data = ToldData(torch.randn(8, 1), torch.randn(8, 1))
    sampler = ToldSampler(data)
    learn = synth_learner(dls=(DataLoader(data, 4, sampler=sampler), None))

    learn.fit(3)

    assert data.seen == sampler.seen == [0, 1, 2]
