"""Order, values and random draws of a Loader are those of torch's DataLoader, and any batch can be the first one."""
from itertools import islice

import pytest
import torch
from torch.utils.data import (DataLoader, RandomSampler,
                              TensorDataset)

from learner.loader import Loader
from learner.tensors import map_tensors
from learner.utils import rng_state, set_rng_state, set_seed
from tests.loader_helpers import (Batched, Lazy, Noisy, Plain, epochs, equal, gen, loaders, n, noisy, table, two_parts,
                                  x)


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
