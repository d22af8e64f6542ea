"""Order, values and random draws of a Loader are those of torch's DataLoader, and any batch can be the first one."""
import gc
import os
import random
import re
import signal
import sys
from itertools import islice
from multiprocessing.util import Finalize
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import (BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler,
                              Sampler, SequentialSampler, Subset, SubsetRandomSampler, TensorDataset,
                              WeightedRandomSampler, get_worker_info)

from learner.loader import Loader, untouched
from learner.tensors import map_tensors
from learner.utils import rng_state, set_rng_state, set_seed

n = 22
x, y = torch.randn(n, 3, generator=torch.Generator().manual_seed(0)), torch.arange(n)


class Plain(Dataset):
    "Items as they are; counts what it loads"
    def __init__(self): self.loaded = []
    def __len__(self): return n

    def __getitem__(self, i):
        self.loaded.append(int(i))
        return x[i], y[i]


class Noisy(Plain):
    "Random augmentation from each of the three global streams"
    def __getitem__(self, i): return x[i] + torch.rand(3), y[i] + np.random.rand(), random.random()


class Batched(Noisy):
    "Fetches a whole batch, in an order of its own"
    def __getitems__(self, ids): return [self[i] for i in sorted(ids)]


class Lazy(Sampler):
    "A sampler of the user's that shuffles by the global stream when it starts"
    def __len__(self): return n
    def __iter__(self): yield from torch.randperm(n)


class Eager(Sampler):
    "A batch sampler that draws before its first batch is asked for"
    def __len__(self): return 4
    def __iter__(self): return iter(torch.randperm(n)[:20].view(4, 5).tolist())


class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        for i in range(info.id if info else 0, n, info.num_workers if info else 1): yield x[i] + torch.rand(3), y[i]


class Own(DataLoader):
    "A DataLoader that iterates in its own way"
    def __iter__(self): return ((b, torch.rand(2)) for b in super().__iter__())


def gen(): return torch.Generator().manual_seed(5)
def table(): return TensorDataset(x, y)
def two_parts(items): return [torch.stack([i[0] for i in items]), 'a custom collate']
def negative(): return SubsetRandomSampler([-1, 3, -5, 7])


# Each makes a loader; the first group is indexed by the batch.
loaders = dict(
    shuffle=lambda: DataLoader(table(), 5, shuffle=True),
    sequential=lambda: DataLoader(table(), 5),
    generator=lambda: DataLoader(table(), 5, shuffle=True, generator=gen()),
    sampler_generator=lambda: DataLoader(table(), 5, sampler=RandomSampler(table(), generator=gen())),
    drop_last=lambda: DataLoader(table(), 5, shuffle=True, drop_last=True),
    drop_last_generator=lambda: DataLoader(table(), 11, shuffle=True, drop_last=True, generator=gen()),
    weighted=lambda: DataLoader(table(), 5, sampler=WeightedRandomSampler(y+1., 30)),
    weighted_generator=lambda: DataLoader(table(), 5, sampler=WeightedRandomSampler(y+1., 30, generator=gen())),
    replacement=lambda: DataLoader(table(), 5, sampler=RandomSampler(table(), True, 70)),
    replacement_generator=lambda: DataLoader(table(), 5, sampler=RandomSampler(table(), True, 70, gen())),
    more_than_all=lambda: DataLoader(table(), 5, sampler=RandomSampler(table(), num_samples=50, generator=gen())),
    fewer_than_all=lambda: DataLoader(table(), 5, sampler=RandomSampler(table(), num_samples=9)),
    subset_sampler=lambda: DataLoader(table(), 3, sampler=SubsetRandomSampler(range(3, 12))),
    distributed=lambda: DataLoader(table(), 3, sampler=DistributedSampler(table(), 2, 1)),
    batch_sampler=lambda: DataLoader(table(), batch_sampler=BatchSampler(SequentialSampler(table()), 4, True)),
    subset=lambda: DataLoader(Subset(Subset(table(), [3, -1, 7, 9, 2]), range(1, 5)), 3, shuffle=True),
    one_tensor=lambda: DataLoader(TensorDataset(x), 5, shuffle=True),
    # item by item
    negative=lambda: DataLoader(table(), 3, sampler=negative()),
    tensors_custom_collate=lambda: DataLoader(table(), 5, shuffle=True, collate_fn=two_parts),
    augmented=lambda: DataLoader(Noisy(), 5, shuffle=True),
    getitems=lambda: DataLoader(Batched(), 5, shuffle=True),
    custom_collate=lambda: DataLoader(Noisy(), 5, shuffle=True, collate_fn=two_parts),
    custom_sampler=lambda: DataLoader(Noisy(), 5, sampler=Lazy()),
    list_sampler=lambda: DataLoader(table(), 2, sampler=[4, 2, -1]),
    custom_batch_sampler=lambda: DataLoader(Noisy(), batch_sampler=Eager()),
    unbatched=lambda: DataLoader(Noisy(), batch_size=None, shuffle=True),
    unbatched_sequential=lambda: DataLoader(table(), batch_size=None),
    unbatched_sampler=lambda: DataLoader(Noisy(), batch_size=None, sampler=Lazy()),
    # as it is
    iterable=lambda: DataLoader(Stream(), 5),
    own_iter=lambda: Own(table(), 5, shuffle=True),
    ready=lambda: [(x[i:i+5], y[i:i+5]) for i in range(0, n, 5)],
)
planned = [k for k in loaders if k not in ('iterable', 'own_iter', 'ready')]


def equal(a, b):
    "Whether two nested batches have the same types and the same bits"
    if type(a) is not type(b): return False
    if isinstance(a, torch.Tensor): return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)
    if isinstance(a, np.ndarray): return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict): return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    return len(a) == len(b) and all(map(equal, a, b)) if isinstance(a, (list, tuple)) else a == b


def epochs(dl, user, n_epoch=3, draw=0):
    "Batches of some epochs, and all random states after each; `draw` numbers are drawn with each batch, as by dropout"
    set_seed(1)
    out = []
    for _ in range(n_epoch):
        batches = [(b, torch.rand(draw), np.random.rand()) for b in dl]
        out.append((batches, rng_state(), [g.get_state() for g in Loader(user).generators()]))
    return out


@pytest.mark.parametrize('name', loaders)
def test_same_batches_and_draws_as_torch(name):
    "Batches of three epochs and the random states after each are torch's, bit for bit"
    theirs, ours = loaders[name](), loaders[name]()

    assert equal(epochs(Loader(ours), ours, draw=2), epochs(theirs, theirs, draw=2))


@pytest.mark.parametrize('persistent', [False, True])
@pytest.mark.parametrize('kwargs', [dict(shuffle=True), dict(shuffle=True, generator=gen()), dict(batch_size=None)],
                         ids=['shuffle', 'generator', 'unbatched'])
def test_workers_same_order_and_draws_as_torch(kwargs, persistent):
    "With workers, too, order and main random states are torch's, for persistent workers as for others"
    def make():
        own = dict(generator=gen()) if 'generator' in kwargs else {}
        return DataLoader(Plain(), **{'batch_size': 5, **kwargs, **own}, num_workers=2, persistent_workers=persistent)
    theirs, ours = make(), make()

    assert equal(epochs(Loader(ours), ours, 2), epochs(theirs, theirs, 2))


@pytest.mark.parametrize('k', [0, 1, 3])
@pytest.mark.parametrize('name', loaders)
def test_resume_gives_the_remaining_batches(name, k):
    "From record, position and random state, a new loader of the same kind goes on exactly, in any epoch"
    set_seed(3)
    dl = Loader(loaders[name]())
    for _ in dl: torch.rand(1)
    it = iter(dl)
    for _ in islice(it, k): torch.rand(1)
    saved = dl.record, dl.position, rng_state()
    rest = [(b, torch.rand(1)) for b in it]
    after = rng_state()

    set_seed(99)
    new = Loader(loaders[name]())
    set_rng_state(saved[2])
    new.start_at(*saved[:2])

    assert equal([(b, torch.rand(1)) for b in new], rest)
    assert equal(rng_state(), after)
    assert [g.get_state().tolist() for g in new.generators()] == [g.get_state().tolist() for g in dl.generators()]
    assert new.position == dl.position


@pytest.mark.parametrize('sampler', [RandomSampler(range(n)), Lazy()])
def test_resume_loads_nothing_before_its_position(sampler):
    "Only the items of the remaining batches are loaded, also if a custom sampler is drawn lazily"
    dl = Loader(DataLoader(Plain(), 5, sampler=sampler))
    list(dl)
    order, dl.dataset.loaded = dl.dataset.loaded, []

    dl.start_at(dl.record, 3)
    list(dl)

    assert dl.dataset.loaded == order[15:]


def test_resume_holds_for_one_iteration():
    "The epoch after a resumed one is whole"
    dl = Loader(DataLoader(table(), 5))
    list(dl)
    dl.start_at(dl.record, 3)

    assert [len(list(dl)), len(list(dl))] == [2, 5]


def noisy(workers, persistent=False): return Loader(DataLoader(Noisy(), 5, shuffle=True, num_workers=workers,
                                                               persistent_workers=persistent))


def test_augmentation_does_not_depend_on_workers():
    "The same seed gives the same random augmentation for one worker and for two, and other ones in other epochs"
    one, two = (epochs(dl := noisy(w), dl.dl, 2) for w in (1, 2))

    assert equal(one, two)
    assert not equal(one[0][0], one[1][0])


@pytest.mark.parametrize('persistent', [False, True])
@pytest.mark.parametrize('kind', [Noisy, Batched])
def test_resume_with_another_number_of_workers(kind, persistent):
    "The remaining batches are the same in a new loader with fewer workers, also in a later epoch of persistent ones"
    def make(w): return Loader(DataLoader(kind(), 5, shuffle=True, num_workers=w, persistent_workers=persistent))
    set_seed(3)
    dl = make(2)
    list(dl)
    it = iter(dl)
    next(it), next(it)
    record, position, rng, rest = dl.record, dl.position, rng_state(), list(it)
    following, after = list(dl), rng_state()

    set_seed(99)
    new = make(1)
    set_rng_state(rng)
    new.start_at(record, position)

    assert equal(list(new), rest)
    assert equal(list(new), following)
    assert equal(rng_state(), after)


def test_batch_seeds_differ():
    "No two batches of an epoch are augmented alike"
    noise = torch.cat([b[0]-x[b[1].long()] for b in Loader(DataLoader(Noisy(), 5, num_workers=1))])

    assert len(noise.unique()) == noise.numel()


class Witness(Dataset):
    "Tells what a worker sees"
    def __init__(self): self.mark = 0
    def __len__(self): return 8
    def __getitem__(self, i): return os.getpid(), signal.getsignal(signal.SIGINT) is signal.SIG_IGN, self.mark


def set_mark(_): get_worker_info().dataset.mark = 7  # type: ignore


class WitnessStream(Witness, IterableDataset):
    def __iter__(self): return (self[i] for i in range(4))


def witness(persistent=True, kind=Witness, **kwargs):
    return Loader(DataLoader(kind(), 2, num_workers=2, persistent_workers=persistent, **kwargs))


def pids(dl): return {int(p) for b in dl for p in b[0]}


@pytest.mark.parametrize('kind', [Witness, WitnessStream])
def test_workers_ignore_interrupts_and_run_the_init_function(kind):
    "Ctrl-C does not reach a worker, and the user's `worker_init_fn` finds the user's own dataset in it"
    _, ignored, mark = zip(*witness(False, kind, worker_init_fn=set_mark))

    assert torch.cat(ignored).all()
    assert set(torch.cat(mark).tolist()) == {7}


@pytest.mark.parametrize('kind', [Witness, WitnessStream])
def test_persistent_workers_stay_until_restarted(kind):
    "Persistent workers serve all epochs; after `restart_workers` new ones see what has changed in the dataset"
    dl = witness(kind=kind)
    first, second = pids(dl), pids(dl)
    dl.dataset.mark = 3

    dl.restart_workers()
    new, marks = pids(dl), {int(m) for b in dl for m in b[2]}

    assert first == second and len(first) == 2
    assert not first & new
    assert marks == {3}


def test_other_workers_end_with_their_epoch():
    "Workers that are not persistent are new ones in each epoch"
    dl = witness(persistent=False)

    assert not pids(dl) & pids(dl)


@pytest.mark.parametrize('kind', [Witness, WitnessStream])
def test_forgotten_workers_end_properly(kind, tmp_path):
    "Workers of a loader that is lost in a reference cycle, as a learner is, end by themselves and need not be killed"
    def init(i): Finalize(None, Path.touch, (tmp_path/str(i),), exitpriority=1)  # not called if the process is killed
    dl, cycle = witness(kind=kind, worker_init_fn=init), {}
    next(iter(dl))
    cycle.update(cycle=cycle, dl=dl)

    del dl, cycle
    gc.collect()

    assert sorted(p.name for p in tmp_path.iterdir()) == ['0', '1']


@pytest.mark.parametrize('persistent', [False, True])
def test_usable_after_leaving_early(persistent):
    "An epoch left in the middle does not disturb the next one"
    dl = Loader(DataLoader(Plain(), 2, num_workers=2, persistent_workers=persistent))
    for _ in islice(dl, 3): pass

    assert torch.equal(torch.cat([b[1] for b in dl]), y)


class Broken(Plain):
    def __getitem__(self, i):
        if i == 7: raise ZeroDivisionError('item 7')
        return super().__getitem__(i)


@pytest.mark.parametrize('workers', [0, 1])
def test_error_in_a_dataset_keeps_its_type(workers):
    "The error of an item is raised as it is, and the loader can be iterated again"
    dl = Loader(DataLoader(Broken(), 2, num_workers=workers, persistent_workers=workers > 0))
    with pytest.raises(ZeroDivisionError, match='item 7'): list(dl)

    assert torch.equal(next(iter(dl))[1], y[:2])


class Interrupting(Plain):
    "Its worker sends Ctrl-C to the main process, once"
    def __getitem__(self, i):
        if i == 9 and not self.loaded: os.kill(os.getppid(), signal.SIGINT)
        return super().__getitem__(i)


@pytest.mark.parametrize('persistent', [False, True])
def test_usable_after_an_interrupt_while_waiting_for_workers(persistent):
    "An interrupt in the middle of fetching reaches the caller, and the next epoch is whole"
    dl = Loader(DataLoader(Interrupting(), 3, num_workers=1, persistent_workers=persistent, sampler=[9, *range(n)]))
    with pytest.raises(KeyboardInterrupt): list(dl)
    dl.dataset.loaded.append(9)

    assert torch.equal(torch.cat([b[1] for b in dl])[1:], y)


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
    sampler.mine = h  # type: ignore
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


gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')]


@pytest.mark.parametrize('name', [pytest.param(k, marks=gpu) for k in loaders])
def test_gpu_batches_are_the_same(name):
    "On a GPU, batches and random states are those of the CPU, whether copied ahead or just in time"
    ours, theirs = loaders[name](), loaders[name]()
    def back(b): return map_tensors(lambda t: t.cpu().contiguous(), b)
    set_seed(1)
    expected = [back(b) for b in theirs], torch.get_rng_state()
    set_seed(1)
    got = [back(b) for b in Loader(ours, 'cuda')], torch.get_rng_state()

    assert equal(got, expected)


@pytest.mark.parametrize('data', [pytest.param('cpu', marks=gpu), pytest.param('cuda', marks=gpu)])
def test_gpu_copies_ahead_are_not_overwritten(data):
    "Batches that the GPU is still working on keep their values while later ones are copied"
    big = torch.arange(64., device=data).repeat_interleave(2**18).view(64, -1)
    slow = torch.randn(4096, 4096, device='cuda')
    sums = []
    for (b,) in Loader(DataLoader(TensorDataset(big), 2), 'cuda'):
        for _ in range(3): slow = (slow @ slow).tanh()
        sums.append((b*1).amax(1))
        del b

    assert torch.equal(torch.cat(sums).cpu(), torch.arange(64.))


@pytest.mark.parametrize('workers', [pytest.param(w, marks=gpu) for w in (0, 2)])
def test_gpu_batches_come_pinned_and_moved(workers):
    "All batches arrive on the GPU, with worker processes and without, and non-tensors stay"
    dl = Loader(DataLoader(Noisy(), 5, num_workers=workers, collate_fn=two_parts), 'cuda')

    assert [(b[0].device.type, b[1]) for b in dl] == [('cuda', 'a custom collate')]*5


@pytest.mark.parametrize('to', [pytest.param('cuda', marks=gpu)])
def test_gpu_one_batch_ahead(to):
    "A ready batch is being copied while the one before it is worked on; position counts what was given"
    dl = Loader([(x,)]*3, to)
    it = iter(dl)
    next(it)

    assert dl.position == 1
    assert len(list(it)) == 2 and dl.position == 3
