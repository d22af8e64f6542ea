"""The scope table, what derives from it, and names that seem to be events."""
import pytest

from learner import events
from learner.callback import Callback
from learner.events import LoopState, declare_event, event, event_names, inner_events, scopes, similar_event
from tests.helpers import synth_learner


def test_every_scope_has_four_events():
    "Each scope gives before_, after_cancel_, after_ and cleanup_; seven events belong to none"
    assert len(event_names) == 4*len(scopes) + 7
    assert {f'{w}_{s}' for s in scopes for w in ('before', 'after_cancel', 'after', 'cleanup')} < set(event_names)


def test_fastai_events_are_there():
    "The 24 events that fastai's users know keep their names"
    known = ['after_create', 'after_pred', 'after_loss',
             *(f'{w}_{s}' for s in 'fit epoch train validate batch backward step'.split()
               for w in ('before', 'after_cancel', 'after'))]

    assert len(known) == 24 and set(known) < set(event_names)


def test_event_namespace(): assert event.after_loss == 'after_loss'

def test_inner_events_are_those_of_a_batch():
    "run_train and run_valid gate all events of batch, backward and step, and after_pred and after_loss"
    assert inner_events == {e for e in event_names if e.endswith(('batch', 'backward', 'step'))} | {'after_pred',
                                                                                                    'after_loss'}


@pytest.mark.parametrize('name, meant', [
    ('befor_batch', 'before_batch'), ('after_epcoh', 'after_epoch'), ('begin_fit', 'before_fit'),
    ('before_valid', 'before_validate'), ('after_cancel_valid', 'after_cancel_validate'), ('begin_validate',
                                                                                           'before_validate'),
    ('cleanup_fits', 'cleanup_fit'), ('after_batch', ''), ('before_batch_training', ''), ('loss', ''), ('on_epoch_end',
                                                                                                        '')])
def test_similar_event(name, meant):
    "Names within two edits of an event, and old and short forms, are recognised; events and other names are not"
    assert similar_event(name) == meant


@pytest.fixture
def new_event():
    name = declare_event('after_swap')
    yield name
    delattr(event, name)

def test_declared_event_fires(new_event):
    "An event declared before the class that uses it is fired by `learn(name)`, with its arguments"
    seen = []
    class Swap(Callback):
        def after_swap(self, what): seen.append(what)
    learn = synth_learner(Swap)

    learn('after_swap', 'weights')

    assert seen == ['weights']


@pytest.mark.parametrize('name', ['no event', '', '2nd_epoch'])
def test_declared_events_are_identifiers(name):
    "A name that no method can have is refused"
    with pytest.raises(ValueError, match='is no identifier'): declare_event(name)


def test_loop_state_has_no_torch():
    "events.py is about scopes and names: it names no torch"
    assert not hasattr(events, 'torch')


@pytest.mark.parametrize('xb, x', [((1,), 1), ((1, 2), (1, 2)), ((), None), ({'a': 1}, {'a': 1})])
def test_x_and_y_are_single_things_where_they_can_be(xb, x):
    "`x` is the input itself if there is one, the tuple or dict if there are several, None if there is none"
    state = LoopState()
    state.xb = state.yb = xb

    assert state.x == x and state.y == x
