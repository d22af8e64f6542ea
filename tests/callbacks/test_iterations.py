"""`learn.fit_iters(n)`: exactly n steps, as one fit however they are divided or interrupted."""
from itertools import count

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler

from learner.callback import Callback
from learner.callbacks.checkpoint import Checkpoint
from learner.callbacks.control import ShortEpochCallback, TimeLimit
from learner.callbacks.schedule import ParamScheduler
from learner.callbacks.training import GradientAccumulation
from learner.events import CancelEpochException, CancelFitException, CancelStepException
from learner.schedules import SchedLin
from tests.helpers import Counts, synth_learner, weights
from tests.resume_helpers import AskAt, noisy_learner, noisy_loaders, record


class Stream(IterableDataset):
    "Items numbered from 0; without end if `n` is None"
    def __init__(self, n=None): self.n = n
    def __iter__(self):
        for i in count() if self.n is None else range(self.n): yield torch.tensor([float(i)]), torch.tensor([0.])


class Batches:
    "Batches without a length, counted from 0 each time"
    def __init__(self, n): self.n, self.begun = n, 0
    def __iter__(self):
        self.begun += 1
        for i in range(self.n): yield torch.tensor([[float(i)]]), torch.zeros(1, 1)


class Inputs(Callback):
    "Notes the first input of each batch"
    def __init__(self): self.seen = []
    def before_batch(self): self.seen.append(float(self.x.flatten()[0]))


class Plain(Dataset):
    "Ten items, and the passes that it was told of"
    def __init__(self): self.told = []
    def __len__(self): return 10
    def __getitem__(self, i): return torch.tensor([float(i)]), torch.tensor([0.])
    def set_epoch(self, epoch): self.told.append(epoch)


def params(learn): return [*learn.model.state_dict().values()]


@pytest.mark.parametrize('n', [1, 4, 5, 6, 14, 15])
def test_exactly_n(tmp_path, n):
    "There are `n` steps, in the epochs that it takes, each of which has a row"
    learn, cb = noisy_learner(tmp_path), Counts()

    learn.fit_iters(n, 1e-2, cbs=cb)

    assert (learn.n_step, cb.n, learn.n_fit) == (n, n, 1)
    assert learn.n_epoch == len(learn.recorder.values) == -(-n//5)
    assert learn.pct_train == 1 and learn.total_steps is None


def test_as_fit(tmp_path):
    "Whole epochs are those of a fit, bit for bit, also in what is drawn"
    learn = noisy_learner(tmp_path)
    learn.fit_iters(15, 1e-2)

    whole = noisy_learner(tmp_path)
    whole.fit(3, 1e-2)

    assert all(map(torch.equal, params(learn), params(whole)))
    assert learn.recorder.losses == whole.recorder.losses
    assert learn.history.valid_loss.isna().all()


@pytest.mark.parametrize('sizes', [(7, 5), (5, 7), (1, 1, 10), (4, 1, 5, 2)])
@pytest.mark.parametrize('workers', [0, 1])
def test_calls_go_on(tmp_path, sizes, workers):
    "The next call goes on with the next batch: in pieces it is one fit, whatever happens between"
    def dls(): return noisy_loaders(num_workers=workers)
    learn = noisy_learner(tmp_path, dls())
    for n in sizes:
        learn.fit_iters(n, 1e-2)
        learn.validate()
        learn.lr_find(num_it=3, show_plot=False, suggest_funcs=None)

    whole = noisy_learner(tmp_path, dls())
    whole.fit_iters(sum(sizes), 1e-2)

    assert all(map(torch.equal, params(learn), params(whole))) and learn.n_step == 12


def test_a_fit_between_begins_anew():
    "A plain fit begins an epoch, and so does the call after it"
    learn, cb = synth_learner(dls=(Batches(4), None), loss_func=lambda p, y: (p-y).mean()), Inputs()
    learn.add_cb(cb)

    learn.fit_iters(2)
    learn.fit(1, n_steps=4)
    learn.fit_iters(2)

    assert cb.seen == [0, 1, 0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize('make, expected', [
    (lambda: DataLoader(Stream(), 1), [0, 1, 2, 3, 4, 5, 6]),
    (lambda: DataLoader(Stream(3), 1), [0, 1, 2, 0, 1, 2, 0]),
    (lambda: DataLoader(Stream(), 1, num_workers=1), [0, 1, 2, 3, 4, 5, 6]),
    (lambda: Batches(3), [0, 1, 2, 0, 1, 2, 0]),
    (lambda: iter(Batches(9)), [0, 1, 2, 3, 4, 5, 6]),
    (lambda: [*Batches(3)], [0, 1, 2, 0, 1, 2, 0])])
def test_any_loader(make, expected):
    "Infinite and unsized data, and what can be iterated only once, over two calls"
    learn, cb = synth_learner(dls=(make(), None)), Inputs()

    learn.fit_iters(5, cbs=cb)
    learn.fit_iters(2, cbs=[sched := ParamScheduler({'lr': SchedLin(1., 0.)}), cb])

    assert cb.seen == expected and learn.n_step == 7
    assert learn.recorder.lrs == [1., 0.] and sched.planned == 2


def test_infinite_data_is_loaded_once():
    "What the first call took from a stream is not taken again by the second"
    learn = synth_learner(dls=(Batches(100), None))

    for _ in range(5): learn.fit_iters(3)

    assert learn.dls.train.dl.begun == 1


def test_used_up():
    "Data that can be had only once, and ends before, is an error that says so"
    learn = synth_learner(dls=(iter(Batches(3)), None))

    with pytest.raises(ValueError, match='used up after 3 of 5 steps'): learn.fit_iters(5)

@pytest.mark.parametrize('n', [0, -1, 1.5, True, None, '5'])
def test_bad_number(n):
    "What is no number of steps is refused"
    with pytest.raises((ValueError, TypeError), match='fit_iters: `n`'): synth_learner().fit_iters(n)


# ---- schedules and callbacks

@pytest.mark.parametrize('n', [3, 10, 12])
@pytest.mark.parametrize('make', [lambda: ParamScheduler({'lr': SchedLin(1., 0.)}), lambda: OneCycleLR])
def test_schedules_span_the_steps(tmp_path, n, make):
    "A schedule ends with step `n`, also if that is in the midst of an epoch"
    learn = noisy_learner(tmp_path, dls=[[torch.zeros(8, 4), torch.zeros(8).long()]]*n)
    learn.fit(1, 1e-2, cbs=make())
    expected = learn.recorder.lrs

    learn = noisy_learner(tmp_path)
    learn.fit_iters(n, 1e-2, cbs=make())

    assert learn.recorder.lrs == expected and len(expected) == n


def test_places_in_a_schedule(tmp_path):
    "Shares are of the steps, epochs are passes over the data"
    learn = noisy_learner(tmp_path)
    scheds = [ParamScheduler({'lr': lambda x: 1.}, begin=0, end='1ep'),
              ParamScheduler({'lr': lambda x: 2.}, begin='1ep', end=.75),
              ParamScheduler({'lr': lambda x: 3.}, begin=.75)]

    learn.fit_iters(12, cbs=scheds)

    assert learn.recorder.lrs == [1.]*5 + [2.]*4 + [3.]*3


def test_preview_and_rehearsal(tmp_path):
    "What is planned is previewed as it comes, and a rehearsal leaves nothing"
    learn = noisy_learner(tmp_path)
    before = weights(learn)
    sched = ParamScheduler({'lr': SchedLin(1., 0.)})

    lrs = learn.simulate_sched('fit_iters', 12, cbs=sched)['lr'][:, 0].tolist()
    learn.dry_run('fit_iters', 12)

    assert all(map(torch.equal, before, weights(learn))) and learn.total_steps is None
    learn.fit_iters(12, cbs=ParamScheduler({'lr': SchedLin(1., 0.)}))
    assert learn.recorder.lrs == lrs


def test_accumulation(tmp_path):
    "Steps are counted, not batches; the epochs are as many as that takes"
    learn, cb = noisy_learner(tmp_path), Counts()

    learn.fit_iters(7, 1e-2, cbs=[GradientAccumulation(2, 'batches'), cb, ParamScheduler({'lr': SchedLin(1., 0.)})])

    assert learn.n_step == 7 and learn.n_epoch == 3 and cb.n == 5+5+2
    assert learn.recorder.lrs[-1] == 0.


def test_left_out_steps_are_made_up(tmp_path):
    "Steps that a callback leaves out do not count: the fit takes another epoch"
    def skip(cb):
        if cb.epoch == 0: raise CancelStepException
    learn = noisy_learner(tmp_path)

    learn.fit_iters(10, cbs=Callback(before_step=skip))

    assert learn.n_step == 10 and learn.n_epoch == 3


def test_never_a_step(tmp_path):
    "A fit that makes no step does not go on for ever"
    def skip(cb): raise CancelStepException
    learn = synth_learner(n=1)

    with pytest.raises(RuntimeError, match='led to no step; 0 of 2'): learn.fit_iters(2, cbs=Callback(before_step=skip))


def test_cancelled_epochs_and_fits(tmp_path):
    "A cancelled epoch is followed by others, a cancelled fit is over"
    def cancel(cb):
        if cb.learn.n_step == 11: raise CancelFitException
        if (cb.epoch, cb.iter) == (0, 2): raise CancelEpochException
    learn = noisy_learner(tmp_path)

    learn.fit_iters(8, cbs=Callback(after_batch=cancel))
    learn.fit_iters(8, cbs=Callback(after_batch=cancel))

    assert learn.n_step == 11 and learn.n_fit == 2


def test_short_epochs_and_time_limits(tmp_path):
    "Shortened epochs are more of them; a time limit ends the fit before"
    learn = noisy_learner(tmp_path)
    for n, cb in (7, ShortEpochCallback(n=2)), (7, TimeLimit(1e-9)): learn.fit_iters(n, cbs=cb)
    assert learn.n_step == 8 and len(learn.history) == 5


def test_set_epoch(tmp_path):
    "Whatever has a `set_epoch` gets the number of the pass over the data, which goes on over calls"
    class Told(RandomSampler):
        def set_epoch(self, epoch): self.seen = [*getattr(self, 'seen', []), epoch]
    data = Plain()
    batches = BatchSampler(sampler := Told(data), 2, False)
    learn = synth_learner(dls=(DataLoader(data, batch_sampler=batches), None))

    for n in (7, 2, 1, 5): learn.fit_iters(n)

    assert data.told == sampler.seen == [0, 1, 1, 1, 2]


def test_distributed_sampler():
    "Passes are shuffled differently"
    data, cb = Plain(), Inputs()
    learn = synth_learner(dls=(DataLoader(data, 1, sampler=DistributedSampler(data, 1, 0)), None))

    learn.fit_iters(20, cbs=cb)

    assert sorted(cb.seen[:10]) == sorted(cb.seen[10:]) and cb.seen[:10] != cb.seen[10:]


def test_persistent_workers_are_not_told():
    "A dataset that persistent workers have copied cannot be told of the pass, which is said"
    learn = synth_learner(dls=(DataLoader(Plain(), 2, num_workers=1, persistent_workers=True), None))

    with pytest.warns(UserWarning, match='does not reach the copies'): learn.fit_iters(6)


# ---- going on

@pytest.mark.parametrize('k', [1, 4, 5, 6, 11, 12])
def test_interrupted(tmp_path, k):
    "A fit that was interrupted goes on bit for bit, up to its step `n`"
    learn = noisy_learner(tmp_path)
    def cbs(*more): return [*more, ParamScheduler({'lr': SchedLin(1., 0.)})]
    with pytest.raises(KeyboardInterrupt): learn.fit_iters(12, 1e-2, cbs=cbs(AskAt(k)))

    if learn.paused: learn.resume()

    found = learn.state_hash(), record(learn)
    whole = noisy_learner(tmp_path)
    whole.fit_iters(12, 1e-2, cbs=cbs())
    assert found == (whole.state_hash(), record(whole)) and learn.n_step == 12


def script(path, kill=None, dls=None):
    "Two calls, of which a part may be done; `kill` is the batch, over both, after which the process ends"
    learn, counts = noisy_learner(path, dls and dls()), Callback(after_batch=lambda cb: die(cb))
    def die(cb):
        if cb.learn.n_step == kill and cb.stepped: raise MemoryError
    for n in (7, 8): learn.fit_iters(n, 1e-2, cbs=[ParamScheduler({'lr': SchedLin(1., 0.)}), Checkpoint('1it'), counts],
                                     resume=True)
    return learn


@pytest.mark.parametrize('kill', [1, 3, 5, 6, 7, 8, 10, 11, 15])
@pytest.mark.parametrize('dls', [None, lambda: noisy_loaders(num_workers=1)])
def test_resumed_in_another_process(tmp_path, kill, dls):
    "A script of several calls, begun again, goes on in the one and at the batch where it was, bit for bit"
    whole = script(tmp_path/'whole', dls=dls)

    with pytest.raises(MemoryError): script(tmp_path/'a', kill, dls)
    learn = script(tmp_path/'a', dls=dls)

    assert all(map(torch.equal, params(learn), params(whole)))
    assert record(learn) == record(whole) and learn.n_step == 15


def test_resumed_between_calls(tmp_path):
    "The place in the data is known also when one call is over and the next has yet to begin"
    def call(path, n, **kwargs):
        learn = noisy_learner(tmp_path/path) if n == 7 else kwargs.pop('learn')
        learn.fit_iters(n, 1e-2, cbs=Checkpoint('3it'), **kwargs)
        return learn
    whole = call('b', 8, learn=call('b', 7))
    call('a', 7)

    learn = call('a', 8, learn=call('a', 7, resume=True))

    assert all(map(torch.equal, params(learn), params(whole))) and learn.n_step == 15


def test_unsized_data_is_resumed(tmp_path):
    "So does a fit whose number of epochs nobody knew"
    def learner(): return synth_learner(dls=(Batches(3), None), path=tmp_path, lr=1e-2)
    def stop(cb):
        if cb.learn.n_step == 8: raise MemoryError
    with pytest.raises(MemoryError): learner().fit_iters(10, cbs=[Checkpoint('1it'), Callback(after_batch=stop)])
    learn, cb = learner(), Inputs()

    learn.fit_iters(10, cbs=[Checkpoint('1it'), cb], resume=True)

    assert cb.seen == [1, 2, 0] and learn.n_step == 10 and learn.n_epoch == 4


def test_what_does_not_fit_is_refused(tmp_path):
    "A checkpoint of a plain fit, and one of another number of steps over which a schedule would be stretched"
    def cbs(): return [Checkpoint('1it'), ParamScheduler({'lr': SchedLin(1., 0.)})]
    with pytest.raises(KeyboardInterrupt): noisy_learner(tmp_path/'a').fit_iters(12, cbs=[*cbs(), AskAt(4)])
    with pytest.raises(KeyboardInterrupt): noisy_learner(tmp_path/'b').fit(3, cbs=[Checkpoint('1it'), AskAt(4)])

    with pytest.raises(ValueError, match='of 12 steps, and this one has 14'):
        noisy_learner(tmp_path/'a').fit_iters(14, cbs=cbs(), resume=True)
    with pytest.raises(ValueError, match='another fit method than `fit_iters`'):
        noisy_learner(tmp_path/'b').fit_iters(12, cbs=Checkpoint(), resume=True)
    with pytest.raises(ValueError, match='has made 4 of 12 steps: one of 3 cannot'):
        noisy_learner(tmp_path/'a').fit_iters(3, cbs=Checkpoint(), resume=True)
    learn = noisy_learner(tmp_path/'a')
    learn.fit_iters(14, cbs=cbs(), resume=True, allow='n_epoch')
    with pytest.raises(ValueError, match='has made 14 of 14'):
        noisy_learner(tmp_path/'a').fit_iters(15, cbs=Checkpoint(), resume=True)
