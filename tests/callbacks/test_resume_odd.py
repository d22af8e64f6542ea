"""Going on with fits whose callbacks, data and models are unusual, and with what was changed in between."""
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Sampler

from learner.callback import Callback
from learner.callbacks.checkpoint import Checkpoint
from learner.callbacks.tracker import SaveModelCallback
from learner.learner import Learner
from tests.callbacks.test_resume import fit, same_three_ways, started_and_stopped, with_cb
from tests.resume_helpers import AskAt, halves, network, noisy_learner, noisy_loaders, uninterrupted


class Exchanged(Callback):
    "Validates with averaged weights, by exchanging the contents"
    state = ('average',)
    average = ()
    def before_fit(self): self.average = [p.detach().clone() for p in self.model.parameters()]
    def after_step(self):
        for a, p in zip(self.average, self.model.parameters()): a.lerp_(p.detach(), .1)
    def before_validate(self):
        for a, p in zip(self.average, self.model.parameters()):
            kept = p.detach().clone()
            p.data.copy_(a)
            a.copy_(kept)
    cleanup_validate = before_validate


class Hits(Callback):
    "Counts all batches in a tensor, in place, and in nested lists"
    state = ('hits', 'nested')
    def __init__(self): self.hits, self.nested = torch.zeros(1), [[0], {'n': np.zeros(1)}]
    def after_batch(self):
        self.hits += 1
        self.nested[0].append(1)
        self.nested[1]['n'] += 1


@pytest.mark.parametrize('at', [3, 6, 7, 8, 13])
@pytest.mark.parametrize('make', [Exchanged, Hits])
def test_states_that_change_in_validation(tmp_path, make, at):
    "Weights exchanged for a validation, and tensors changed in place by it, are those before it when it is run again"
    same_three_ways(tmp_path, at, with_cb(make))


def test_an_evaluation_leaves_states_as_they_were():
    "validate() puts back tensors, arrays and nested lists of callbacks"
    learn = noisy_learner('.', cbs=Hits)
    hits = learn.hits

    learn.validate()

    assert hits.hits.item() == 0 and hits.nested == [[0], {'n': np.zeros(1)}]


class Centred(nn.Module):
    "Has a running mean that its state_dict leaves out"
    def __init__(self):
        super().__init__()
        self.net = network()
        self.register_buffer('mean', torch.zeros(4), persistent=False)

    def forward(self, x):
        if self.training: self.mean = .9*self.mean + .1*x.mean(0)
        return self.net(x-self.mean)


class Permuted(Sampler):
    "Draws from a generator of numpy's"
    def __init__(self): self.rng = np.random.default_rng(0)
    def __len__(self): return 40
    def __iter__(self): return iter(self.rng.permutation(40).tolist())


@pytest.mark.parametrize('at', [4, 8])
@pytest.mark.parametrize('make', [lambda: dict(model=Centred()), lambda: dict(dls=noisy_loaders(sampler=Permuted()))])
def test_what_no_state_dict_has(tmp_path, make, at):
    "Buffers that are not persistent, and generators of numpy's in samplers, go on too"
    def seeded():
        torch.manual_seed(1)
        return make()
    same_three_ways(tmp_path, at, fit, seeded)


def test_one_shot_loader(tmp_path):
    "A generator of batches is gone on with where it is, in the same process"
    seen = []
    def batches():
        for i in range(8):
            seen.append(i)
            yield torch.randn(8, 4), torch.arange(8) % 2
    learn = noisy_learner(tmp_path, (batches(), None))

    learn.fit(1, 1e-2, cbs=AskAt(3, 'stop'))
    learn.resume()

    assert learn.n_step == 8 and seen == [*range(8)]


def test_workers_after_a_quiet_stop(tmp_path):
    "The iteration that was stopped is closed at once, so that the loader is the same when the fit goes on"
    def dls(): return noisy_loaders(num_workers=1, persistent_workers=True)
    whole = noisy_learner(tmp_path/'whole', dls())
    whole.fit(2, 1e-2)
    learn = noisy_learner(tmp_path, dls())

    learn.fit(2, 1e-2, cbs=AskAt(3, 'stop'))
    free = not learn.dls.train.in_use
    learn.resume()

    assert free and learn.final_hash == whole.final_hash


# ---- what is changed in between

def test_changes_between_steps_hold(tmp_path):
    "Freezing, and rates that are set, between two steps are not undone by the next"
    learn = noisy_learner(tmp_path, splitter=halves)
    learn.step(2, 1e-2)
    learn.freeze()
    first = learn.model[0].weight.clone()

    learn.step(2)
    frozen = torch.equal(first, learn.model[0].weight)
    learn.opt.set_hyper('lr', 0.)
    last = learn.model[4].weight.clone()
    learn.step(2)

    assert frozen and torch.equal(last, learn.model[4].weight) and learn.opt.hypers[1]['lr'] == 0


def test_the_learners_rate_between_steps(tmp_path):
    "`learn.lr` set between two steps holds, if the fit was given none"
    learn = noisy_learner(tmp_path, lr=1e-2)
    learn.step(2)

    learn.lr = 1e-3
    learn.step(2)

    assert learn.recorder.lrs == [1e-2]*2 + [1e-3]*2


def test_the_same_callbacks_again(tmp_path):
    "Callbacks given again to each step are taken once"
    learn, cb = noisy_learner(tmp_path), Hits()

    for _ in range(3): learn.step(2, 1e-2, cbs=cb)

    assert cb.hits.item() == 6


def test_an_error_before_training_keeps_what_was_stopped(tmp_path):
    "A call that is refused loses nothing: the fit that was stopped can still be gone on with"
    learn = noisy_learner(tmp_path)
    learn.fit(3, 1e-2, cbs=AskAt(8, 'stop'))
    for kwargs in (dict(cbs='typo'), dict(resume='nowhere.ckpt')):
        with pytest.raises((TypeError, FileNotFoundError)): learn.fit(3, **kwargs)

    learn.resume()

    assert learn.final_hash == uninterrupted(tmp_path, 3).final_hash


def test_steps_without_an_end_are_not_resumed(tmp_path):
    "resume() would never end"
    learn = noisy_learner(tmp_path)
    learn.step(3)

    with pytest.raises(RuntimeError, match='no `n_epoch`'): learn.resume()
    assert learn.step(2) == 2 and repr(learn.paused).startswith('Pause(epoch 2 of ?, after 5')


# ---- files of other fits

def test_another_learner_of_this_process(tmp_path):
    "A loop over folds that all have one folder is told that the second takes what the first has done"
    def fold(i):
        torch.manual_seed(i)
        learn = Learner(noisy_loaders(), network(), nn.CrossEntropyLoss(), path=tmp_path, default_cbs=False)
        learn.fit(1, 1e-2, cbs=Checkpoint(), resume=True)
    fold(0)

    with pytest.warns(UserWarning, match='another Learner of this process has finished'): fold(1)


def test_a_fit_that_is_passed_by_fires_nothing(tmp_path):
    "Where only a later fit's file is left, the one before does nothing, so that no callback acts on untrained weights"
    def script(*cbs):
        learn = noisy_learner(tmp_path)
        learn.fit(1, 1e-2, cbs=[saves := Checkpoint('2it', keep=1), SaveModelCallback(fname='first', at_end=True)],
                  resume=True)
        learn.add_cb(saves) if saves.learn is None else None
        learn.fit(2, 1e-2, cbs=cbs, resume=True)
        return learn
    with pytest.raises(KeyboardInterrupt): script(AskAt(9))
    first = (tmp_path/'models/first.pth').read_bytes()

    learn = script()

    assert (tmp_path/'models/first.pth').read_bytes() == first and learn.n_step == 15 and learn.n_fit == 2


def test_other_batches_under_a_schedule(tmp_path):
    "With another batch size a schedule goes on at the same part of the fit, and comes to its end"
    def run(learn, cbs=(), **kwargs): learn.fit_one_cycle(3, 1e-2, cbs=[*cbs], **kwargs)
    started_and_stopped(tmp_path, 13, run)
    learn = noisy_learner(tmp_path, noisy_loaders(bs=4))

    run(learn, cbs=[Checkpoint()], resume=True, allow='batch_size')

    assert learn.recorder.lrs[-1] == pytest.approx(1e-7) and max(learn.recorder.lrs[11:]) <= max(learn.recorder.lrs)


# ---- saving

def test_time_goes_on_over_steps(tmp_path):
    "A Checkpoint by time saves in a loop of steps as in a fit: its clock is not begun again by each"
    learn, cb = noisy_learner(tmp_path), Checkpoint('1h')
    learn.step(1, 1e-2, cbs=cb)
    started = cb.every._started

    learn.step(1)

    assert cb.every._started == started


@pytest.mark.filterwarnings('ignore:Checkpoint. the last')
def test_what_cannot_be_saved_ends_no_fit(tmp_path):
    "A state that a callback comes to have, and no file can hold, costs the file, not the training"
    class Best(Callback):
        state = ('best',)
        best = None
        def after_epoch(self): self.best = nn.Linear(2, 2)
    learn = noisy_learner(tmp_path)

    with pytest.warns(UserWarning, match=r'step 6 is not saved: TypeError: .*best\.best'):
        learn.fit(3, 1e-2, cbs=[Checkpoint('3it'), Best()])

    assert learn.n_step == 15
