"""What users of MMEngine complained about, by number: going on with a fit, and its schedules.

What files hold is in test_mmengine_complaints_files.py, fits by themselves in test_mmengine_complaints_fits.py."""
from functools import partial

import pytest
import torch
from torch.optim.lr_scheduler import (ConstantLR, CosineAnnealingLR, ExponentialLR, LambdaLR, LinearLR, MultiStepLR,
                                      SequentialLR)
from torch.optim.lr_scheduler import ReduceLROnPlateau as TorchPlateau
from torch.utils.data import DataLoader, Dataset

from learner.callback import Callback
from learner.callbacks.checkpoint import Checkpoint
from learner.callbacks.schedule import ParamScheduler
from learner.callbacks.torch_schedule import TorchScheduler
from learner.callbacks.training import GradientAccumulation
from learner.schedules import SchedCos, SchedLin
from learner.utils import set_seed
from tests.helpers import synth_learner
from tests.resume_helpers import noisy_learner, noisy_loaders, record

n_items = 20


class Numbered(Dataset):
    "Items that tell their numbers; counts, in memory that workers share, how often each is loaded"
    def __init__(self): self.loaded = torch.zeros(n_items, dtype=torch.int64).share_memory_()
    def __len__(self): return n_items

    def __getitem__(self, i):
        self.loaded[i] += 1
        return torch.tensor([i/n_items]), torch.tensor([2*i/n_items])


class Ids(Callback):
    "Notes the items of each training batch"
    run_valid = False
    def __init__(self): self.seen = []
    def before_batch(self): self.seen.append((n_items*self.x[:, 0]).round().int().tolist())


class StopAfter(Callback):
    "Asks for a stop, as a button would, once so many steps are made"
    run_valid = False
    def __init__(self, n): self.n = n
    def after_batch(self):
        if self.n_step == self.n: self.learn.request_stop()


def numbered(path, workers=0, **kwargs):
    "A Learner with five batches of four items, shuffled"
    return synth_learner(dls=(DataLoader(Numbered(), 4, shuffle=True, num_workers=workers), None), path=path, **kwargs)


def batches(path, fit):
    "The items of each batch of a fit that nobody stops"
    ids = Ids()
    fit(numbered(path/'whole'), cbs=ids)
    return ids.seen


def two_epochs(learn, **kwargs): learn.fit(2, **kwargs)


# ---- where a fit goes on

@pytest.mark.filterwarnings('ignore:This DataLoader will create 2 worker')  # more than one core can run
@pytest.mark.parametrize('workers', [0, 2])
def test_1_nothing_is_loaded_to_be_skipped(tmp_path, workers):
    "Complaint 1: a resumed epoch loads no item of the batches before, and has the same order with and without workers"
    expected = batches(tmp_path, two_epochs)
    two_epochs(numbered(tmp_path, workers), cbs=[Checkpoint(), StopAfter(3)])
    learn, ids = numbered(tmp_path, workers), Ids()

    two_epochs(learn, cbs=[Checkpoint(), ids], resume=True)

    counts = torch.tensor(sum(expected[3:], [])).bincount(minlength=n_items)
    assert ids.seen == expected[3:]
    assert learn.dls.train_ds.loaded.equal(counts) and counts.sum() == 7*4


def crash(cb):
    if cb.training and cb.n_step == 4: raise RuntimeError('the machine is gone')


@pytest.mark.parametrize('how', ['stop', 'crash'])
def test_2_an_epoch_goes_on_in_its_midst(tmp_path, how):
    "Complaint 2: a fit stopped in the midst of an epoch goes on there: no item twice, no item left out, no step more"
    expected = batches(tmp_path, two_epochs)
    learn = numbered(tmp_path)
    if how == 'stop': two_epochs(learn, cbs=[Checkpoint(), StopAfter(3)])
    else:
        with pytest.raises(RuntimeError, match='is gone'):
            two_epochs(learn, cbs=[Checkpoint('3it'), Callback(after_batch=crash)])
    learn, ids = numbered(tmp_path), Ids()

    two_epochs(learn, cbs=[Checkpoint(), ids], resume=True)

    assert sorted(sum(expected[:3]+ids.seen[:2], [])) == [*range(n_items)] == sorted(sum(ids.seen[2:], []))
    assert ids.seen == expected[3:]
    assert (learn.n_step, learn.epoch, learn.recorder.iters) == (10, 1, [5, 10])


@pytest.mark.parametrize('step', [3, 5, 7])
def test_3_iterations_go_on_with_the_next_batch(tmp_path, step):
    "Complaint 3: a fit by iterations, stopped within or between passes over the data, does not begin them anew"
    def fit(learn, **kwargs): learn.fit_iters(12, **kwargs)
    expected = batches(tmp_path, fit)
    fit(numbered(tmp_path), cbs=[Checkpoint(), StopAfter(step)])
    learn, ids = numbered(tmp_path), Ids()

    fit(learn, cbs=[Checkpoint(), ids], resume=True)

    assert ids.seen == expected[step:] and learn.n_step == 12


@pytest.mark.filterwarnings('ignore:This DataLoader will create 2 worker')  # more than one core can run
@pytest.mark.parametrize('workers', [0, 2])
def test_13_random_streams_go_on(tmp_path, workers):
    "Complaint 13: python's, numpy's and torch's streams are in the file, and put back before a batch is loaded"
    def make(path): return noisy_learner(path, dls=noisy_loaders(num_workers=workers))
    whole = make(tmp_path/'whole')
    two_epochs(whole)
    two_epochs(make(tmp_path), cbs=[Checkpoint(), StopAfter(3)])
    learn = make(tmp_path)
    set_seed(99)  # a new process begins with any

    two_epochs(learn, cbs=[Checkpoint()], resume=True)

    assert learn.final_hash == whole.final_hash and record(learn) == record(whole)


# ---- schedules

def by_step(make): return lambda: TorchScheduler(make, by='step')

halving = dict(factor=lambda: ParamScheduler(factors={'lr': lambda i: .5**i}, by='step'),
               value=lambda: ParamScheduler({'lr': lambda i: .1*.5**i}, by='step'),
               torch=by_step(partial(ExponentialLR, gamma=.5)))


@pytest.mark.parametrize('kind', halving)
def test_10_schedules_count_steps_of_the_optimizer(kind):
    "Complaint 10: five batches, a step for three of them: a rate that halves each step has halved once, not five times"
    rates = []
    look = Callback(after_step=lambda cb: rates.append(cb.opt.hypers[0]['lr']) if cb.stepped else None)
    learn = synth_learner([GradientAccumulation(3, 'batches'), look], n=5, lr=.1)

    learn.fit(2, cbs=halving[kind]())

    assert rates == pytest.approx([.1, .05, .025, .0125])


def test_10_schedules_end_with_the_last_step():
    "Complaint 10: a schedule over the whole fit has its end value at the last of these steps, and not before"
    rates = []
    look = Callback(after_step=lambda cb: rates.append(cb.opt.hypers[0]['lr']) if cb.stepped else None)
    learn = synth_learner([GradientAccumulation(3, 'batches'), look], n=5)

    learn.fit(2, cbs=ParamScheduler({'lr': SchedLin(.3, 0.)}))

    assert rates == pytest.approx([.3, .2, .1, 0])


longer = dict(ours=lambda: ParamScheduler({'lr': SchedCos(.1, 0.)}), torch=lambda: CosineAnnealingLR)


@pytest.mark.parametrize('stop', [3, 7, None])
@pytest.mark.parametrize('kind', longer)
def test_11_a_longer_fit_has_the_longer_schedule(tmp_path, monkeypatch, capsys, kind, stop):
    "Complaint 11: a cosine over 2 epochs, resumed with 4: refused, or if that is allowed said, and then that over 4"
    monkeypatch.setenv('LEARNER_DISPLAY', 'log')
    whole, learn = numbered(tmp_path/'whole', lr=.1), numbered(tmp_path, lr=.1)
    whole.fit(4, cbs=longer[kind]())
    numbered(tmp_path, lr=.1).fit(2, cbs=[Checkpoint(), StopAfter(stop), longer[kind]()])
    def go_on(**kwargs): learn.fit(4, cbs=[Checkpoint(), longer[kind]()], resume=True, **kwargs)

    with pytest.raises(ValueError, match='n_epoch: it is of a fit of 2 epochs, and this one has 4'): go_on()
    go_on(allow='n_epoch')

    assert 'from here on it is that of the longer fit' in capsys.readouterr().out and learn.n_step == 20
    done = 10 if stop is None or kind == 'torch' else stop  # torch's changes between epochs
    assert learn.recorder.lrs[done:] == pytest.approx(whole.recorder.lrs[done:], abs=1e-12)


def test_11_a_new_schedule_wins(tmp_path, monkeypatch, capsys):
    "Complaint 11: what the new call gives holds from where the fit goes on, at the place that was reached, and is said"
    monkeypatch.setenv('LEARNER_DISPLAY', 'log')
    def fit(learn, end, *cbs, **kwargs):
        learn.fit(2, cbs=[Checkpoint(), ParamScheduler({'lr': SchedCos(.1, end)}), *cbs], **kwargs)
    whole, learn = numbered(tmp_path/'whole'), numbered(tmp_path)
    fit(whole, .05)
    fit(numbered(tmp_path), 0., StopAfter(5))

    fit(learn, .05, resume=True)

    assert learn.recorder.lrs[5:] == whole.recorder.lrs[5:] and learn.recorder.lrs[1:5] != whole.recorder.lrs[1:5]
    assert "another schedule, whose `lr` at step 4 of the fit is 0.0793" in capsys.readouterr().out


torchs = {ExponentialLR: (dict(gamma=.5), dict(gamma=.9)),  # rates that are halved each epoch, and others
          MultiStepLR: (dict(milestones=[1, 2, 3], gamma=.5), dict(milestones=[2, 3], gamma=.9)),
          CosineAnnealingLR: (dict(), dict(eta_min=.02)),
          SequentialLR: tuple(dict(schedulers=s, milestones=[1]) for s in ([.5, .7], [.5, .8]))}


def by_torch(cls, kwargs):
    "The scheduler; one in sequence of others is a function of torch's optimizer"
    if cls is not SequentialLR: return partial(cls, **kwargs)
    one_by_one = kwargs['schedulers']
    return TorchScheduler(lambda opt: SequentialLR(opt, [ExponentialLR(opt, g) for g in one_by_one], [1]))


@pytest.mark.parametrize('cls', torchs, ids=lambda cls: cls.__name__)
def test_11_a_new_schedule_of_torchs_wins(tmp_path, monkeypatch, capsys, cls):
    monkeypatch.setenv('LEARNER_DISPLAY', 'log')
    "Complaint 11: so do arguments of torch's schedulers, and that is said"
    def fit(path, kwargs, *cbs, **more):
        learn = numbered(path, lr=.1)
        learn.fit(4, cbs=[Checkpoint(), by_torch(cls, kwargs), *cbs], **more)
        return learn.recorder.lrs
    old, new = torchs[cls]
    whole = fit(tmp_path/'whole', new)
    fit(tmp_path, old, StopAfter(12))

    rates = fit(tmp_path, new, resume=True)

    assert rates[12:] == whole[12:] and rates[10] != whole[10]
    assert 'TorchScheduler' in (out := capsys.readouterr().out) and 'from here on it is' in out


def test_11_of_torchs_schedulers_in_a_chain_one_may_be_new(tmp_path):
    "Complaint 11: a warm-up as it was, with a decay that is another one, gives the rates of these two from then on"
    def fit(path, gamma, *cbs, **more):
        learn = numbered(path, lr=.1)
        learn.fit(4, cbs=[Checkpoint(), by_step(partial(LinearLR, start_factor=.1, total_iters=14))(),
                          partial(ExponentialLR, gamma=gamma), *cbs], **more)
        return learn.recorder.lrs
    whole = fit(tmp_path/'whole', .9)
    fit(tmp_path, .5, StopAfter(12))

    rates = fit(tmp_path, .9, resume=True)

    assert rates[12:] == pytest.approx(whole[12:], rel=1e-12) and rates[10] != pytest.approx(whole[10])


@pytest.mark.parametrize('kwargs, rate', [(dict(factor=.5), .05), (dict(factor=.1), .01)])
def test_11_a_plateau_goes_by_what_it_has_seen(tmp_path, kwargs, rate):
    "Complaint 11: a rate that falls where the loss stands still does so with the new factor, at the epoch it is due"
    def fit(factor, *cbs, **more):
        learn = numbered(tmp_path, lr=.1)
        plateau = partial(TorchPlateau, patience=1, factor=factor, threshold=.999)  # no loss gets better by so much
        watch = TorchScheduler(plateau, monitor='train_loss')
        learn.fit(4, cbs=[Checkpoint(), watch, *cbs], **more)
        return learn.recorder.lrs
    fit(.5, StopAfter(12))

    assert fit(kwargs['factor'], resume=True)[14:16] == pytest.approx([.1, rate])


def test_11_a_new_function_holds_from_when_it_is_asked(tmp_path):
    "Complaint 11: which function a LambdaLR has no file can tell, so that the new one shows at the next epoch"
    def fit(f, *cbs, **more):
        learn = numbered(tmp_path, lr=.1)
        learn.fit(4, cbs=[Checkpoint(), partial(LambdaLR, lr_lambda=f), *cbs], **more)
        return learn.recorder.lrs
    fit(lambda epoch: .5**epoch, StopAfter(7))

    rates = fit(lambda epoch: .9**epoch, resume=True)

    assert rates[4::5] == pytest.approx([.1, .05, .081, .0729])


kept = dict(none=lambda: Callback(), factor=halving['factor'], constant=by_step(partial(ConstantLR, factor=.3)),
            warmup=by_step(partial(LinearLR, start_factor=.1, total_iters=4)), decay=halving['torch'])


@pytest.mark.parametrize('kind', kept)
def test_12_restoring_changes_no_rate(tmp_path, kind):
    "Complaint 12: a fit stopped after each single step has the rates of one that never was, in its steps and after it"
    whole = numbered(tmp_path/'whole')
    two_epochs(whole, cbs=kept[kind]())
    for step in range(1, 11):
        learn = numbered(tmp_path)
        two_epochs(learn, cbs=[Checkpoint(), StopAfter(step), kept[kind]()], resume=True)

    assert learn.recorder.lrs == whole.recorder.lrs and len(whole.recorder.lrs) == 10
    assert learn.opt.hypers == whole.opt.hypers
