"""Snapshots, and what differs from one; that a fit goes on exactly is tested in callbacks/test_resume*.py."""
import numpy as np
import pytest
import torch

from learner.callback import Callback
from learner.state import differences, keyed, learner_state, place, rates_of, snapshot, states_of
from tests.helpers import Counts, synth_learner


@pytest.mark.parametrize(('event', 'seen'), [('before_epoch', ('epoch', 0)), ('after_batch', ('train', 0)),
                                             ('before_validate', ('valid', 0)), ('after_fit', ('epoch', 2))])
def test_place(event, seen):
    "Where a fit stands when it first comes to an event, and nowhere outside of one"
    places = []
    learn = synth_learner(Callback(**{event: lambda cb: places.append(place(cb.learn))}))

    learn.fit(2)

    assert places[0] == seen and place(learn)[0] == ''


def test_two_of_a_name():
    "Each callback is found under a key of its own"
    learn = synth_learner([Counts(), Counts(), Counts()])

    assert [k for k in keyed(learn) if k.startswith('counts')] == ['counts', 'counts_2', 'counts_3']


def test_states_are_copies():
    "What a callback changes in place later is not in its state"
    cb = Counts()
    cb.n = dict(a=[torch.zeros(1)], b=np.zeros(1))
    learn = synth_learner(cb)
    state = states_of(learn)['counts']['n']

    cb.n['a'][0] += 1
    cb.n['a'].append(2)
    cb.n['b'] += 1

    assert state == dict(a=[torch.zeros(1)], b=np.zeros(1))


def test_a_state_that_fails_is_told_when_it_is_needed():
    "A broken state_dict ends no fit that saves nothing; a state of all says whose it is"
    class Broken(Counts):
        def state_dict(self): raise LookupError('odd')
    learn = synth_learner(Broken)
    learn.fit(1)

    with pytest.raises(LookupError, match='odd') as caught: learner_state(learn)
    assert '`state_dict` of callback `Broken`' in caught.value.__notes__[-1]


@pytest.mark.parametrize('lr', [.01, np.float64(.01), [.01], None])
def test_rates_are_as_they_are_given(lr):
    "Numbers of any type are the same rate; without one it is the Learner's"
    seen = []
    learn = synth_learner(Callback(before_fit=lambda cb: seen.append(rates_of(cb.learn)['lr'])), lr=.01)

    learn.fit(1, lr)

    assert seen == ['[0.01]' if isinstance(lr, list) else '0.01']


def test_nothing_differs_from_itself():
    "A Learner fits its own state"
    learn = synth_learner()
    learn.fit(1)

    assert differences(learn, learner_state(learn)) == {} and snapshot(learn)['place'] == ''
