"""Going on: a fit that was stopped anywhere is, bit for bit, what it would have been."""
import math
from functools import partial

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, WeightedRandomSampler

from learner.callback import Callback
from learner.callbacks.checkpoint import Checkpoint
from learner.callbacks.finetune import FreezeUntil
from learner.callbacks.schedule import ParamScheduler
from learner.callbacks.torch_schedule import TorchScheduler
from learner.callbacks.tracker import EarlyStoppingCallback
from learner.callbacks.training import GradientClip
from learner.events import CancelStepException
from learner.schedules import SchedCos
from tests.helpers import Counts
from tests.resume_helpers import AskAt, Noisy, halves, noisy_learner, noisy_loaders, record

pytestmark = pytest.mark.filterwarnings('ignore:the fit ended while only the last group')
# batches of three epochs, each of five training batches and two of validation: first, last, in validation, at borders
places = 1, 5, 6, 7, 8, 13, 19, 21


def fit(learn, cbs=(), **kwargs): learn.fit(3, 1e-2, cbs=[*cbs], **kwargs)
def one_cycle(learn, cbs=(), **kwargs): learn.fit_one_cycle(3, 1e-2, cbs=[*cbs], **kwargs)
def flat_cos(learn, cbs=(), **kwargs): learn.fit_flat_cos(3, 1e-2, cbs=[*cbs], **kwargs)
def sgdr(learn, cbs=(), **kwargs): learn.fit_sgdr(2, 1, 1e-2, cbs=[*cbs], **kwargs)
def fine_tune(learn, cbs=(), **kwargs): learn.fine_tune(2, 1e-2, cbs=[*cbs], **kwargs)
def with_cb(make): return lambda learn, cbs=(), **kwargs: learn.fit(3, 1e-2, cbs=[*cbs, make()], **kwargs)


def started_and_stopped(path, at, run, **kwargs):
    learn = noisy_learner(path, **kwargs)
    with pytest.raises(KeyboardInterrupt, match='stopped'): run(learn, cbs=[Checkpoint(), AskAt(at)])
    return learn


def same_three_ways(tmp_path, at, run, make=dict):
    "Uninterrupted; stopped and gone on with in the same process; stopped and gone on with in a new one"
    whole = noisy_learner(tmp_path/'whole', **make())
    run(whole)

    here = started_and_stopped(tmp_path/'here', at, run, **make())
    here.resume()
    started_and_stopped(tmp_path/'there', at, run, **make())
    there = noisy_learner(tmp_path/'there', **make())
    seen = AskAt(math.inf)
    run(there, cbs=[Checkpoint(), seen], resume=True)

    assert whole.final_hash == here.final_hash == there.final_hash
    assert record(whole) == record(here) == record(there)
    assert seen.seen <= 21-at+2  # the rest, and at most a validation from its start
    return whole, here, there


@pytest.mark.parametrize('at', places)
@pytest.mark.parametrize('run', [one_cycle, fit], ids=lambda f: f.__name__)
def test_stopped_anywhere(tmp_path, at, run):
    "Wherever a fit is stopped, also in validation, it goes on as if it had not been: weights, table, random streams"
    same_three_ways(tmp_path, at, run)


@pytest.mark.parametrize('at', [8])
@pytest.mark.parametrize('run', [flat_cos, sgdr, fine_tune, with_cb(lambda: OneCycleLR),
    with_cb(lambda: CosineAnnealingLR), with_cb(lambda: partial(StepLR, step_size=1)),
    with_cb(lambda: TorchScheduler(ReduceLROnPlateau, monitor='train_loss')),
    with_cb(lambda: TorchScheduler(lambda o: SequentialLR(o, [LinearLR(o), CosineAnnealingLR(o, 9)], [4]), by='step')),
    with_cb(lambda: ParamScheduler({'lr': SchedCos(1e-2, 1e-4)}, by='pos', begin='1ep')),
    with_cb(lambda: ParamScheduler(factors={'lr': lambda epoch: .5**epoch}, by='epoch')),
    with_cb(lambda: FreezeUntil('2ep')), with_cb(lambda: GradientClip(.1)),
    with_cb(lambda: EarlyStoppingCallback(patience=9)), with_cb(Counts)], ids=range(14))
def test_each_schedule_goes_on(tmp_path, at, run):
    "Schedules, freezing, patience and counters of callbacks go on where they were"
    whole, *others = same_three_ways(tmp_path, at, run, lambda: dict(splitter=halves))

    for learn in others: assert learn.recorder.lrs == whole.recorder.lrs


def test_lambda_is_refused_before_training(tmp_path):
    "A callback's state that no file can hold is an error when the fit starts, and names the callback"
    learn = noisy_learner(tmp_path)
    odd = Counts()
    odd.n = object()

    with pytest.raises(TypeError, match=r'callbacks\.counts\.n'): learn.fit(1, cbs=[odd, Checkpoint()])
    assert learn.n_step == 0


class Blocks(Sampler):
    "A user's own sampler, with a state in its generator"
    def __init__(self, n): self.n, self.g = n, torch.Generator().manual_seed(9)
    def __len__(self): return self.n
    def __iter__(self): return iter(torch.randperm(self.n, generator=self.g).tolist())


class Stream(IterableDataset):
    def __len__(self): return 40
    def __iter__(self):
        for i in range(40): yield torch.randn(4)+i % 2, i % 2


class Positioned:
    "A user's loader that keeps its own position"
    def __init__(self): self.k = 0
    def __len__(self): return 5
    def __iter__(self):
        g = torch.Generator().manual_seed(5)
        batches = [(torch.randn(8, 4, generator=g), torch.arange(8) % 2) for _ in range(5)]
        while self.k < 5:
            self.k += 1
            yield batches[self.k-1]
        self.k = 0
    def state_dict(self): return dict(k=self.k)
    def load_state_dict(self, state): self.k = state['k']


def loader_kinds():
    def seeded(): return torch.Generator().manual_seed(5)
    def batched(): return BatchSampler(RandomSampler(range(40), generator=seeded()), 8, False)
    return dict(
        generator=lambda: noisy_loaders(generator=seeded()),
        weighted=lambda: noisy_loaders(sampler=WeightedRandomSampler(torch.arange(1., 41), 40)),
        replacement=lambda: noisy_loaders(sampler=RandomSampler(range(40), replacement=True, num_samples=40)),
        batch_sampler=lambda: (DataLoader(Noisy(), batch_sampler=batched()), noisy_loaders()[1]),
        own_sampler=lambda: noisy_loaders(sampler=Blocks(40)),
        workers=lambda: noisy_loaders(num_workers=2),
        persistent=lambda: noisy_loaders(num_workers=2, persistent_workers=True, generator=seeded()),
        stream=lambda: (DataLoader(Stream(), 8), noisy_loaders()[1]),
        own_position=lambda: (Positioned(), noisy_loaders()[1]),
        ready=lambda: ([(torch.randn(8, 4, generator=torch.Generator().manual_seed(i)), torch.arange(8) % 2)
                        for i in range(5)], noisy_loaders()[1]))


@pytest.mark.parametrize('at', [3, 8])
@pytest.mark.parametrize('kind', loader_kinds())
def test_each_loader_goes_on(tmp_path, kind, at):
    "Whatever gives the batches, the fit goes on with the next one"
    same_three_ways(tmp_path, at, one_cycle, lambda: dict(dls=loader_kinds()[kind]()))


def test_s07_persistent_workers_give_the_rest(tmp_path):
    "The epoch that is gone on with has the rest of its batches, later ones have all"
    def dls(): return noisy_loaders(n=128, num_workers=2, persistent_workers=True)
    started_and_stopped(tmp_path, 13, one_cycle, dls=dls())
    learn, counts = noisy_learner(tmp_path, dls=dls()), []

    one_cycle(learn, cbs=[Checkpoint(), Callback(after_train=lambda cb: counts.append(cb.train_iter))], resume=True)

    assert counts == [16, 32, 48] and learn.recorder.iters == [16, 32, 48]


@pytest.mark.parametrize('workers', [(1, 2), (2, 1)])
def test_r3_any_number_of_workers(tmp_path, workers):
    "The number of workers may change, from 1 up, and nothing else does"
    def make(n): return dict(dls=noisy_loaders(num_workers=n))
    whole = noisy_learner(tmp_path/'whole', **make(workers[0]))
    one_cycle(whole)
    started_and_stopped(tmp_path, 8, one_cycle, **make(workers[0]))

    learn = noisy_learner(tmp_path, **make(workers[1]))
    one_cycle(learn, cbs=[Checkpoint()], resume=True)

    assert learn.final_hash == whole.final_hash


def test_r3_resuming_loads_nothing_that_came_before(tmp_path):
    "S01, S09: no item of a batch that was trained is loaded again, and each is seen once an epoch"
    whole, order = noisy_learner(tmp_path/'whole'), []
    whole.dls.train_ds.asked = order
    one_cycle(whole)
    started_and_stopped(tmp_path, 10, one_cycle)  # three batches into the second epoch

    learn = noisy_learner(tmp_path)
    one_cycle(learn, cbs=[Checkpoint()], resume=True)

    assert learn.dls.train_ds.asked == order[8*8:]
    assert [sorted(order[i:i+40]) for i in (0, 40, 80)] == [[*range(40)]]*3


@pytest.mark.parametrize('n', [3, 5])
def test_r4_stopped_again_and_again(tmp_path, n):
    "Any number of stops, several in one epoch, one in a validation, change nothing"
    whole = noisy_learner(tmp_path/'whole')
    one_cycle(whole)

    for at in [1, 2, 1, 3, 5][:n]:
        learn = noisy_learner(tmp_path)
        with pytest.raises(KeyboardInterrupt): one_cycle(learn, cbs=[Checkpoint(), AskAt(at)], resume=True)
    learn = noisy_learner(tmp_path)
    one_cycle(learn, cbs=[Checkpoint()], resume=True)

    assert learn.final_hash == whole.final_hash and record(learn) == record(whole)


class Accumulates(Callback):
    "Steps after each third batch"
    state = ('n',)
    n = 0
    run_valid = False
    def before_backward(self):
        self.n += 1
        self.learn.keep_grads = bool(self.n % 3)
    def before_step(self):
        if self.n % 3: raise CancelStepException


@pytest.mark.parametrize('at', [1, 2, 3, 4, 8])
def test_r4_in_an_open_window(tmp_path, at):
    "Gradients that were added up are kept, and the window goes on"
    same_three_ways(tmp_path, at, with_cb(Accumulates))


def test_s03_each_epoch_has_its_own_order(tmp_path):
    "Stopped at the end of each epoch, with the seed set at the start of each process: four orders, those of one run"
    whole, orders = noisy_learner(tmp_path/'whole'), []
    whole.fit(4, 1e-2)
    for epoch in range(4):
        learn = noisy_learner(tmp_path)
        stop = Callback(after_epoch=lambda cb, epoch=epoch: cb.epoch == epoch < 3 and cb.learn.request_stop())
        learn.fit(4, 1e-2, cbs=[Checkpoint(), stop], resume=True)
        orders.append(tuple(learn.dls.train_ds.asked))

    assert [len(o) for o in orders] == [40]*4 and len({*orders}) == 4
    assert [i for o in orders for i in o] == whole.dls.train_ds.asked
    assert learn.final_hash == whole.final_hash


def test_s06_saved_before_validation(tmp_path):
    "Stopped with an epoch's last training batch: its validation is run once, and the epoch is not run again"
    started_and_stopped(tmp_path, 5, fit)
    learn, seen = noisy_learner(tmp_path), []

    fit(learn, cbs=[Checkpoint(), Callback(after_batch=lambda cb: seen.append((cb.epoch, cb.training)))], resume=True)

    assert seen == [(0, False)]*2 + [(e, t) for e in (1, 2) for t in [True]*5+[False]*2]
