"""torch's schedulers in fits that are gone on with: bit for bit as they were, or as if begun as they are now."""
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import (CosineAnnealingLR, CosineAnnealingWarmRestarts, CyclicLR, ExponentialLR, LambdaLR,
                                      LinearLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR)

from learner.callback import Callback
from learner.callbacks.checkpoint import Checkpoint
from learner.callbacks.schedule import ParamScheduler
from learner.callbacks.torch_schedule import TorchScheduler
from tests.resume_helpers import noisy_learner

step, lam = partial(StepLR, step_size=1, gamma=.5), partial(LambdaLR, lr_lambda=lambda i: .9**i)
steps3, warmup = partial(StepLR, step_size=3, gamma=.5), partial(LinearLR, start_factor=.1, total_iters=4)
cosine, decay = partial(CosineAnnealingLR, eta_min=.001), partial(ExponentialLR, gamma=.9)
plateau = partial(ReduceLROnPlateau, patience=0, factor=.5, threshold=.5)
restarts = partial(CosineAnnealingWarmRestarts, T_0=4)

def in_a_row(opt): return SequentialLR(opt, [LinearLR(opt, total_iters=2), ExponentialLR(opt, .5)], [2])
def by_step(make): return TorchScheduler(make, by='step')

chains = {
    'step+lambda': lambda: [step, lam], 'lambda+step': lambda: [lam, step],
    'steps+lambda': lambda: [by_step(steps3), lam],
    'lambda by step+step': lambda: [by_step(lam), step], 'warm-up+cosine': lambda: [by_step(warmup), by_step(cosine)],
    'warm-up by step+cosine': lambda: [by_step(warmup), cosine],
    'cosine+warm-up by step': lambda: [cosine, by_step(warmup)],
    'warm-up by step+restarts': lambda: [by_step(warmup), restarts], 'three': lambda: [step, by_step(decay), lam],
    'step+decay+plateau': lambda: [step, decay, plateau], 'plateau+cosine by step': lambda: [plateau, by_step(cosine)],
    'row+decay by step': lambda: [TorchScheduler(in_a_row), by_step(decay)]}
alone = {'step': lambda: step, 'cosine': lambda: by_step(cosine), 'OneCycleLR': lambda: OneCycleLR,
         'CyclicLR': lambda: partial(CyclicLR, base_lr=.01, step_size_up=3), 'row': lambda: TorchScheduler(in_a_row),
         'lambda': lambda: by_step(lam), 'factors': lambda: ParamScheduler(factors={'lr': lambda pos: 1-pos})}


class Hashes(Callback):
    "Notes the hash after each step, and at the end"
    run_valid = False
    def __init__(self): self.seen = {}
    def save_point(self): self.seen[self.n_step, self.learn.trained] = self.learn.state_hash()
    def after_fit(self): self.seen['end'] = self.learn.state_hash()


class StopAfter(Callback):
    "Asks for a stop once so many steps are made"
    run_valid = False
    def __init__(self, n): self.n = n
    def after_batch(self):
        if self.n_step == self.n: self.learn.request_stop()


def fit(path, cbs, *more, lr: Any = .1, n_epoch=3, **kwargs):
    "A fit of epochs of five steps, each of which is saved"
    learn = noisy_learner(path, param_opts={'*bias': dict(lr_mult=.3)})
    learn.fit(n_epoch, lr, cbs=[*more, Checkpoint('1it'), *cbs], **kwargs)
    return learn

def given(make):
    "What makes callbacks, as a list of them"
    return made if isinstance(made := make(), list) else [made]

def rates(learn): return learn.recorder.lrs


# ---- unchanged

@pytest.mark.parametrize('name', chains)
def test_unchanged_from_files(tmp_path, name):
    "Schedulers stopped after each single step, and gone on with in another process, are those of one fit, bit for bit"
    whole, parts = Hashes(), Hashes()
    one = fit(tmp_path/'whole', chains[name](), whole)
    for n in range(1, 17): learn = fit(tmp_path, chains[name](), parts, StopAfter(n), resume=True)

    assert rates(learn) == rates(one) and len({*rates(one)}) > 2
    assert parts.seen == whole.seen and learn.final_hash == one.final_hash

@pytest.mark.parametrize('name', chains)
def test_unchanged_in_process(tmp_path, name):
    "So are those of a fit in steps, and of one that is resumed in this process"
    whole, parts = Hashes(), Hashes()
    one = fit(tmp_path/'whole', chains[name](), whole)
    learn = fit(tmp_path, chains[name](), parts, StopAfter(1))

    while learn.paused and learn.n_step < 12: learn.step(1, validate=True)
    learn.resume()

    assert rates(learn) == rates(one) and parts.seen == whole.seen and learn.final_hash == one.final_hash

@pytest.mark.parametrize('name', [name for name in chains if 'plateau' not in name])
def test_from_a_later_epoch(tmp_path, name):
    "A fit that begins in a later epoch has the rates of the whole one's last epochs, bit for bit, also of a chain"
    assert rates(fit(tmp_path/'last', chains[name](), start_epoch=2)) == rates(fit(tmp_path, chains[name]()))[10:]

def test_a_chain_is_that_of_torch(tmp_path):
    "The later ones of a chain go by the rates that the fit has, not by those which the first one has set, as in torch"
    opt = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], .1)
    scheds, expected = [warmup(opt), lam(opt)], []
    for _ in range(3):
        expected += [opt.param_groups[0]['lr']]*5
        opt.step()
        for sched in scheds: sched.step()

    assert rates(fit(tmp_path, [warmup, lam])) == expected

def test_fixed_rates_stay_in_the_first_step(tmp_path):
    "A scheduler that begins with another rate leaves those that `param_opts` fixes"
    seen, learn = [], noisy_learner(tmp_path, param_opts={'*bias': dict(lr=1e-3)})
    look = Callback(before_step=lambda cb: seen.append({g['lr'] for g in cb.opt.opt.param_groups}))

    learn.fit(1, .1, cbs=[warmup, look])

    assert seen == [{1e-3, .1*.1}]*5

def fit_instance(path, name, *more, lr=.1, **kwargs):
    "A fit with a scheduler that was made over the Learner's optimizer"
    learn = noisy_learner(path, lr=lr)
    opt = learn.create_opt().opt
    sched = OneCycleLR(opt, lr, 15) if name == 'OneCycleLR' else instances[name](opt)
    learn.fit(3, cbs=[Checkpoint('1it'), TorchScheduler(sched, by='step'), *more], **kwargs)
    return learn

instances = {'step': steps3, 'lambda': lam, 'cosine': partial(cosine, T_max=15), 'OneCycleLR': None}

@pytest.mark.parametrize('name', instances)
def test_instances(tmp_path, name):
    "An instance goes on too, from a file and in this process, and with another rate as if begun with it"
    whole, other = fit_instance(tmp_path/'1', name), fit_instance(tmp_path/'2', name, lr=.2)
    fit_instance(tmp_path/'3', name, StopAfter(7))
    fit_instance(tmp_path/'4', name, StopAfter(7))

    again = fit_instance(tmp_path/'3', name, resume=True)
    faster = fit_instance(tmp_path/'4', name, lr=.2, resume=True, allow='lr')
    learn = fit_instance(tmp_path/'5', name, StopAfter(7))
    learn.resume()

    assert rates(learn) == rates(again) == rates(whole) and rates(faster)[7:] == rates(other)[7:]
    assert learn.final_hash == again.final_hash

def test_a_rate_that_was_changed_between(tmp_path):
    "A rate that was set between two steps is gone on from, by all groups"
    learn = fit(tmp_path, [by_step(decay)], StopAfter(3))

    learn.opt.set_hyper('lr', .01)
    learn.step(3)

    assert rates(learn) == pytest.approx([.1, .09, .081, .01, .009, .0081])


# ---- another rate, or another scheduler

@pytest.mark.parametrize('name', alone | {k: make for k, make in chains.items() if 'plateau' not in k})
def test_another_rate(tmp_path, name):
    "Resumed with another rate that is allowed, a fit has those as if begun with it, and puts that one back at the end"
    make = (alone | chains)[name]
    whole = rates(fit(tmp_path/'whole', given(make), lr=.2))
    for n, end in (4, 7), (7, 16):
        (tmp_path/str(n)).mkdir()
        fit(tmp_path/str(n), given(make), StopAfter(n))

        learn = fit(tmp_path/str(n), given(make), StopAfter(end), lr=.2, resume=True, allow='lr')

        assert rates(learn)[n:] == whole[n:len(rates(learn))] and len(rates(learn)) > n
        assert learn.opt.hypers[0]['lr'] == .2

@pytest.mark.parametrize('least, rate', [(0., .2*.3*.3), (.015, .2*.3*.3), (.019, .019), (.08, .08)])
def test_another_rate_and_a_plateau(tmp_path, least, rate):
    "What ReduceLROnPlateau has made of the rate, it has made of the other one; but for no less than its `min_lr`"
    def cbs(): return [partial(plateau, min_lr=least, factor=.3)]
    whole = rates(fit(tmp_path/'whole', cbs(), lr=.2, n_epoch=4))
    fit(tmp_path, cbs(), StopAfter(17), n_epoch=4)

    learn = fit(tmp_path, cbs(), lr=.2, n_epoch=4, resume=True, allow='lr')

    assert rates(learn)[15:17] == [max(.1*.3*.3, least)]*2
    assert rates(learn)[17:] == whole[17:] == [rate]*3

def test_another_decay(tmp_path):
    "Another decay that is allowed leaves the rate where its schedule is"
    fit(tmp_path, chains['step+decay+plateau'](), StopAfter(12))

    learn = fit(tmp_path, chains['step+decay+plateau'](), wd=.1, resume=True, allow='wd')

    assert rates(learn)[12:] == rates(fit(tmp_path/'whole', chains['step+decay+plateau'](), wd=.1))[12:]

@pytest.mark.parametrize('name', ['step+decay+plateau', 'plateau+cosine by step'])
def test_another_rate_and_a_plateau_in_a_chain(tmp_path, name):
    "That is refused where nobody can know it"
    fit(tmp_path, chains[name](), StopAfter(7))

    with pytest.raises(ValueError, match='has to be alone if .* another rate: what it has made of the rates cannot be'):
        fit(tmp_path, chains[name](), lr=.2, resume=True, allow='lr')

@pytest.mark.parametrize('was, now', [('step', 'epoch'), ('epoch', 'step')])
def test_another_by(tmp_path, monkeypatch, capsys, was, now):
    "Another `by` is another schedule: it is said, and holds from there on, as if the fit had been begun with it"
    monkeypatch.setenv('LEARNER_DISPLAY', 'log')
    fit(tmp_path, [TorchScheduler(steps3, by=was)], StopAfter(7), n_epoch=6)

    learn = fit(tmp_path, [TorchScheduler(steps3, by=now)], n_epoch=6, resume=True)

    assert rates(learn)[7:] == rates(fit(tmp_path/'whole', [TorchScheduler(steps3, by=now)], n_epoch=6))[7:]
    assert f"from here on it is by='{now}', which was '{was}'" in capsys.readouterr().out
