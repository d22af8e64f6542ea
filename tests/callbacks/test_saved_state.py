"""The whole state in a dict or a file, and its hash."""
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from learner.callback import Callback
from learner.files import DamagedFile
from learner.optim import SGD
from tests.helpers import Counts, synth_learner
from tests.resume_helpers import noisy_learner, noisy_loaders, uninterrupted

kinds = {'model', 'loss', 'opt', 'callbacks', 'counters', 'rng', 'loader', 'grads', 'frozen', 'hypers'}


def test_all_is_there(tmp_path):
    "Weights, optimizer, random streams, counters, callbacks, the loader's position: all that design.md names"
    state = noisy_learner(tmp_path, cbs=Counts).state_dict()

    assert kinds <= state.keys()
    assert state['callbacks']['counts'] == {'n': 0} and state['counters']['n_step'] == 0
    assert {'python', 'numpy', 'torch'} <= state['rng'].keys()


def test_a_state_is_a_copy(tmp_path):
    "Training on changes nothing in a state that was taken; loading it brings everything back, and changes it as little"
    learn = noisy_learner(tmp_path, cbs=Counts)
    learn.fit(1, 1e-2)
    state, before = learn.state_dict(), learn.state_hash()
    learn.fit(1, 1e-2)
    after = learn.state_hash()

    learn.load_state_dict(state)
    first = learn.state_hash()
    learn.fit(1, 1e-2)
    learn.load_state_dict(state)

    assert before == first == learn.state_hash() != after


def test_a_state_without_an_optimizer_comes_back(tmp_path):
    "Taken before the first fit, it brings back that there was no optimizer, and so no momentum"
    learn = noisy_learner(tmp_path, cbs=Counts)
    learn.opt = None
    state, before = learn.state_dict(), learn.state_hash()
    learn.fit(1, 1e-2)
    changed = learn.state_hash()

    learn.load_state_dict(state)

    assert learn.opt is None and learn.state_hash() == before != changed


def test_a_model_without_parameters_has_a_state(tmp_path):
    "Saved and loaded like another"
    learn = synth_learner(model=nn.Identity(), path=tmp_path)
    learn.save_state('s')

    assert learn.load_state('s') is learn


def test_a_state_goes_on_alike(tmp_path):
    "Two fits after the same state are the same, in this process or with another Learner"
    learn = noisy_learner(tmp_path)
    learn.fit(1, 1e-2)
    state = learn.state_dict()
    learn.fit_one_cycle(1, 1e-2)
    other = noisy_learner(tmp_path)

    other.load_state_dict(state)
    other.fit_one_cycle(1, 1e-2)

    assert other.final_hash == learn.final_hash


@pytest.mark.parametrize('change', [
    lambda learn: learn.model[0].weight.data[0].add_(1e-7), lambda learn: learn.model[1].running_mean.add_(1e-7),
    lambda learn: learn.opt.set_hyper('mom', .8), lambda learn: torch.rand(1), lambda learn: np.random.rand(),
    lambda learn: learn.model[0].requires_grad_(False), lambda learn: setattr(learn.counts, 'n', 4),
    lambda learn: learn.opt.opt.state[learn.model[0].weight]['exp_avg'].mul_(2), lambda learn: learn.model[1].eval(),
    lambda learn: learn.recorder.values.clear(),
    lambda learn: learn.dls.train.dl.generator.manual_seed(1)], ids=range(11))
def test_the_hash_sees_all(tmp_path, change):
    "Whatever decides how training goes on changes the hash"
    learn = noisy_learner(tmp_path, cbs=Counts, dls=noisy_loaders(generator=torch.Generator().manual_seed(0)))
    learn.fit(1, 1e-2)
    before, same = learn.state_hash(), learn.state_hash()

    change(learn)

    assert before == same != learn.state_hash()


def test_r13_the_hash_after_looking_on(tmp_path):
    "lr_find, validate, a preview and a summary of groups leave the hash as it was"
    learn = noisy_learner(tmp_path, cbs=Counts)
    learn.fit(1, 1e-2)
    before = learn.state_hash()

    learn.lr_find(num_it=8, show_plot=False, suggest_funcs=None)
    learn.validate()
    learn.summary_groups()

    assert learn.state_hash() == before


def test_a_file(tmp_path):
    "A file brings back what a dict does, and plain torch opens it without being told what to allow"
    learn = noisy_learner(tmp_path, cbs=Counts)
    learn.fit(1, 1e-2)
    path, before = learn.save_state('all'), learn.state_hash()

    other = noisy_learner(tmp_path, cbs=Counts).load_state('all')

    assert path == tmp_path/'models'/'all.ckpt' and other.state_hash() == before
    assert torch.load(path, weights_only=True).keys() >= kinds
    assert other.history.equals(learn.history)


def test_a_damaged_file(tmp_path):
    "One flipped bit is found; a file of something else is refused; a missing one is named"
    learn = noisy_learner(tmp_path)
    path = learn.save_state('all')
    data = bytearray(path.read_bytes())
    data[len(data)//2] ^= 1
    path.write_bytes(data)
    torch.save(dict(a=1), tmp_path/'other.ckpt')

    with pytest.raises(DamagedFile, match='all.ckpt'): learn.load_state('all')
    with pytest.raises(ValueError, match='other.ckpt'): learn.load_state(tmp_path/'other.ckpt')
    with pytest.raises(FileNotFoundError, match='none.ckpt'): learn.load_state('none')


def test_what_does_not_fit(tmp_path):
    "Another model or optimizer is refused by name, before anything is loaded, unless it is allowed"
    learn = noisy_learner(tmp_path)
    learn.fit(1, 1e-2)
    path = learn.save_state('all')
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(.3), nn.Linear(8, 3))
    other, sgd = noisy_learner(tmp_path, model=model), noisy_learner(tmp_path, opt_func=SGD)
    before = other.model[0].weight.clone()

    with pytest.raises(ValueError, match=r"model: .*shape of 4.weight, 4.bias"): other.load_state(path)
    with pytest.raises(ValueError, match='optimizer: '): sgd.load_state(path)
    assert torch.equal(other.model[0].weight, before)
    other.load_state(path, allow={'model', 'optimizer'})
    sgd.load_state(path, allow='optimizer')

    assert torch.equal(other.model[0].weight, learn.model[0].weight) and other.model[4].out_features == 3
    assert torch.equal(sgd.model[4].weight, learn.model[4].weight)


@pytest.mark.parametrize('event', ['before_fit', 'before_batch', 'after_loss', 'after_step', 'after_batch',
                                   'after_train', 'before_validate', 'after_validate', 'after_epoch', 'cleanup_fit'])
def test_where_no_state_can_be_taken(tmp_path, event):
    "In the midst of something, where other callbacks have still to act, it is an error that says where it is possible"
    learn = noisy_learner(tmp_path)

    with pytest.raises(RuntimeError, match=f'`{event}`.*request_save'):
        learn.fit(1, cbs=Callback(**{event: lambda cb: cb.learn.save_state('here')}))


@pytest.mark.parametrize(('event', 'epoch'), [('save_point', 0), ('save_point', 1), ('after_fit', 1)])
def test_where_a_state_can_be_taken(tmp_path, event, epoch):
    "At save points and at the end: the fit goes on from it exactly"
    def save(cb):
        if cb.epoch == epoch and not path: path.append(cb.learn.save_state('here'))
    path, learn = [], noisy_learner(tmp_path)
    learn.fit(2, 1e-2, cbs=Callback(**{event: save}))

    again = noisy_learner(tmp_path)
    again.fit(2, 1e-2, resume=path[0])

    assert again.final_hash == learn.final_hash == uninterrupted(tmp_path, 2).final_hash


def test_not_within_a_fit(tmp_path):
    "A state is loaded between fits; a fit that is to begin with it is told so"
    learn = noisy_learner(tmp_path)
    state = learn.state_dict()

    with pytest.raises(RuntimeError, match='resume=file'):
        learn.fit(1, cbs=Callback(after_epoch=lambda cb: cb.learn.load_state_dict(state)))


def test_events(tmp_path):
    "before_save can put something into the state, and after_load finds it"
    found = []
    cb = Callback(before_save=lambda cb, state: state.update(note='kept'),
                  after_load=lambda cb, state: found.append(state['note']))
    noisy_learner(tmp_path, cbs=cb).save_state('all')

    noisy_learner(tmp_path, cbs=Callback(after_load=lambda cb, state: found.append(state['note']))).load_state('all')

    assert found == ['kept']


def test_before_load(tmp_path):
    "before_load comes first, with the state that is about to be put back, and can change it"
    seen = []
    def change(cb, state):
        seen.append(cb.learn.n_step)
        state['counters']['n_step'] = 7
    learn = noisy_learner(tmp_path)
    learn.fit(1)
    learn.save_state('all')

    other = noisy_learner(tmp_path, cbs=Callback(before_load=change)).load_state('all')

    assert seen == [0] and other.n_step == 7


def test_a_state_of_all_plain_kinds(tmp_path):
    "Whatever plain kinds a callback has, it gets the same back"
    values = dict(a=np.arange(3), b={1, 2}, c=(1, 'x'), d=Path('p'), e=Counter(a=2), f=1+2j, g=torch.ones(2).half())
    cb = Counts()
    cb.n = values
    path = noisy_learner(tmp_path, cbs=cb).save_state('all')

    other = noisy_learner(tmp_path, cbs=Counts).load_state(path)

    got = other.counts.n
    assert {k: type(v) for k, v in got.items()} == {k: type(v) for k, v in values.items()}
    assert got['e'] == values['e'] and torch.equal(got['g'], values['g']) and got['a'].tolist() == [0, 1, 2]


def test_a_state_that_names_nothing(tmp_path):
    "A callback whose `state` names what it does not have is refused when it is added"
    class Odd(Callback):
        state = ('lacking',)

    with pytest.raises(ValueError, match='its `state` names `lacking`'): synth_learner(cbs=Odd)


def test_two_of_a_class(tmp_path):
    "Each of two callbacks of a class has a state of its own"
    a, b = Counts(), Counts()
    a.n, b.n = 1, 2
    path = noisy_learner(tmp_path, cbs=[a, b]).save_state('all')
    c, d = Counts(), Counts()

    noisy_learner(tmp_path, cbs=[c, d]).load_state(path)

    assert (c.n, d.n) == (1, 2)
