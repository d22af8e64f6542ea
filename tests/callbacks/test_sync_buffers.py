"""SyncBuffersCallback: two processes that train apart evaluate, and end, with the mean of their running statistics."""
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fastcore.foundation import L
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from learner import set_display
from learner.callback import Callback
from learner.callbacks.sync_buffers import SyncBuffersCallback
from learner.callbacks.validate_every import ValidateEvery
from learner.events import CancelEpochException, CancelTrainException
from tests.helpers import raises, synth_learner, weights

x = torch.randn(32, 1, generator=torch.Generator().manual_seed(0))
third = torch.tensor([1/3, 2/3])


class Net(nn.Sequential):
    "With a constant, and a count"
    def __init__(self):
        torch.manual_seed(1)
        super().__init__(nn.Linear(1, 1), nn.BatchNorm1d(1))
        self.register_buffer('third', third.clone())


def statistics(learn): return [b.clone() for b in learn.model[1].buffers()]


class Notes(Callback):
    "The statistics at the end of each training, before they are averaged, and at each evaluation"
    order = -1
    def __init__(self): self.own, self.seen = [], []
    def after_train(self): self.own.append(statistics(self.learn))
    def after_validate(self): self.seen.append(statistics(self.learn))


def learner_of(rank, n=2, cbs=()):
    "The same weights, other data; the second process has one batch more"
    data = [TensorDataset(v, 2*v) for v in (x[:8*n] + 3*rank, x)]
    return synth_learner([SyncBuffersCallback(), *L(cbs)], dls=[DataLoader(d, 8) for d in data], model=Net(), lr=.1)


# ---- what each of two processes does; all of it is given back

def epochs(rank):
    "Two epochs, of two and of three batches"
    learn = learner_of(rank, 2+rank, notes := Notes())
    learn.fit(2)
    return dict(own=notes.own, seen=notes.seen, third=learn.model.third)

def cancelled(rank, at, order, ex, when=None, nth=2):
    "One process cancels its second epoch"
    cancels = Callback(**{at: raises(ex, when, nth)})
    cancels.order = order
    learn = learner_of(rank, cbs=[notes := Notes(), *[cancels]*rank])
    learn.fit(3)
    return dict(seen=notes.seen, end=statistics(learn))

def every_steps(rank):
    "Validation by steps, in the midst of passes"
    learn = learner_of(rank, 2+rank, [ValidateEvery('1it', first=True), notes := Notes()])
    learn.fit_iters(4)
    return dict(seen=notes.seen, end=statistics(learn))

def steps(rank):
    "A fit by steps, without validation, that comes to its end in other passes"
    learn = learner_of(rank, 2+2*rank)
    learn.fit_iters(5)
    return dict(end=statistics(learn))

def alone(rank):
    "Evaluations of one process, before, in and after the fit"
    def evaluates(cb):
        if rank: cb.learn.validate()
    learn = learner_of(rank, cbs=[Callback(after_batch=evaluates, after_epoch=evaluates)])
    evaluates(learn.sync_buffers)
    learn.fit(1)
    evaluates(learn.sync_buffers)
    return dict(end=statistics(learn))

def by_time(rank):
    "What could wait for ever is refused"
    try: learner_of(rank, cbs=[ValidateEvery('1s')]).fit(1)
    except ValueError as e: return str(e)


cancels = {'before_epoch': ('before_epoch', 0, CancelEpochException),
           'before_train': ('before_train', 0, CancelEpochException),
           'a batch': ('after_batch', 0, CancelEpochException, True, 3),
           'training': ('after_batch', 0, CancelTrainException, True, 3),
           'after_train, before it': ('after_train', -5, CancelEpochException),
           'after_train, after it': ('after_train', 5, CancelEpochException),
           'validation': ('after_batch', 0, CancelEpochException, False, 5)}
tasks = dict(epochs=(epochs,), every_steps=(every_steps,), steps=(steps,), alone=(alone,), by_time=(by_time,),
             **{name: (cancelled, *args) for name, args in cancels.items()})


def process(rank, folder):
    torch.set_num_threads(1)
    set_display('off')
    dist.init_process_group('gloo', init_method=f'file://{folder}/store', rank=rank, world_size=2,
                            timeout=timedelta(seconds=10))
    torch.save({name: f(rank, *args) for name, (f, *args) in tasks.items()}, f'{folder}/{rank}.pth')
    dist.destroy_process_group()


@pytest.fixture(scope='module')
def both(tmp_path_factory):
    "What the two processes have given, by task"
    folder = tmp_path_factory.mktemp('both')
    mp.spawn(process, (folder,), 2)
    found = [torch.load(folder/f'{rank}.pth') for rank in (0, 1)]
    return {name: [f[name] for f in found] for name in tasks}


def same(a, b):
    "Are floating-point buffers of both equal?"
    return all(torch.equal(t, u) for t, u in zip(a, b, strict=True) if t.is_floating_point())


def test_mean_before_validation(both):
    "Each validation is with the mean of what both had at the end of training, which differed; counts are their own"
    a, b = both['epochs']

    assert len(a['seen']) == len(b['seen']) == 2
    for own_a, own_b, seen_a, seen_b in zip(a['own'], b['own'], a['seen'], b['seen']):
        assert not same(own_a, own_b) and same(seen_a, seen_b)
        assert same(seen_a, [(t.double() + u.double()).div(2).float() if t.is_floating_point() else t
                             for t, u in zip(own_a, own_b)])
    assert [int(seen[-1]) for seen in a['seen']] == [2, 4] and [int(seen[-1]) for seen in b['seen']] == [3, 6]

def test_constants_stay(both):
    "A buffer that is the same everywhere stays as it is, bit for bit"
    assert all(torch.equal(o['third'], third) for o in both['epochs'])

@pytest.mark.parametrize('name', cancels)
def test_cancelled_epochs(both, name):
    "A process that cancels an epoch keeps nobody waiting, and goes on with the mean like the others"
    a, b = both[name]

    assert same(a['end'], b['end']) and same(a['seen'][-1], b['seen'][-1])

def test_validate_every(both):
    "Evaluations by steps have the mean too, wherever in their passes the processes are, and so has the end"
    a, b = both['every_steps']

    assert len(a['seen']) == len(b['seen']) == 5
    assert all(map(same, a['seen'], b['seen'])) and same(a['end'], b['end']) and not same(a['seen'][1], a['seen'][2])

@pytest.mark.parametrize('name', ['steps', 'alone'])
def test_the_end(both, name):
    "A fit by steps ends with the mean; what one process evaluates by itself, within a fit or not, waits for nobody"
    a, b = both[name]

    assert same(a['end'], b['end'])

def test_times_are_refused(both):
    "ValidateEvery by time is refused, since the processes would come to it at different steps"
    assert all('would wait for the others for ever' in message for message in both['by_time'])


def test_one_process(capsys):
    "A single process trains as ever, and is told so once"
    whole, learn = synth_learner(model=Net()), synth_learner(SyncBuffersCallback(), model=Net())
    whole.fit(2)

    for _ in range(2): learn.fit(1)
    learn.validate()

    assert capsys.readouterr().out.count('this is the only process of its group') == 1
    assert all(map(torch.equal, weights(learn), weights(whole)))
    assert all(map(torch.equal, learn.model.buffers(), whole.model.buffers()))
