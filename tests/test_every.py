"""Every: which steps, epochs and times are due, in real fits; and what is no such text."""
import sys

import pytest

from learner import every as every_module
from learner.callback import Callback
from learner.events import CancelStepException
from learner.every import Every
from tests.helpers import synth_learner
from tests.schedule_helpers import Window


class Due(Callback):
    "Notes what is due: the number of the step, or 'e' and that of the epoch"
    order = 90
    def __init__(self, *args, **kwargs): self.every, self.seen = Every(*args, **kwargs), []
    def before_fit(self): self.every.start()
    def after_batch(self):
        if self.every.at_step(self.learn): self.seen.append(self.learn.n_step)
    def after_epoch(self):
        if self.every.at_epoch(self.learn): self.seen.append(f'e{self.epoch+1}')


def due(n_epoch, *args, n=4, cbs=(), **kwargs):
    "What is due in a fit of `n` batches an epoch"
    learn = synth_learner([cb := Due(*args, **kwargs), *cbs], n=n)
    learn.fit(n_epoch)
    return cb.seen


@pytest.mark.parametrize('text, kwargs, expected', [
    ('1ep', {}, 'e1 e2 e3 e4 e5 e6 e7'), ('3ep', {}, 'e3 e6 e7'), ('3ep', dict(last=False), 'e3 e6'),
    ('7ep', {}, 'e7'), ('9ep', {}, 'e7'), ('9ep', dict(last=False), ''),
    ('2ep', dict(begin=3), 'e3 e5 e7'), ('2ep', dict(begin=2, last=False), 'e2 e4 e6'),
    ('2ep', dict(begin=1, end=5, last=False), 'e1 e3 e5'), ('2ep', dict(end=4, last=False), 'e2 e4'),
    ('2ep', dict(end=5), 'e2 e4 e7'), ('1ep', dict(begin=6, last=False), 'e6 e7'), ('3ep', dict(begin=20), 'e7')])
def test_epochs(text, kwargs, expected):
    "Epochs are due from `begin` on, `n` apart, up to `end`; with `last` the last one is, but not twice"
    assert due(7, text, **kwargs) == expected.split()


@pytest.mark.parametrize('text, kwargs, expected', [
    ('5it', {}, [5, 10, 'e3']), ('4it', {}, [4, 8, 12]), ('5it', dict(last=False), [5, 10]), ('50it', {}, ['e3']),
    ('1it', dict(begin=10), [10, 11, 12]), ('5it', dict(begin=2), [2, 7, 12]),
    ('2it', dict(begin=3, end=7, last=False), [3, 5, 7]), ('2it', dict(end=4), [2, 4, 'e3'])])
def test_steps(text, kwargs, expected):
    "Steps likewise; the end of the fit is due unless its last step was; batches of validation are no steps"
    assert due(3, text, **kwargs) == expected


def test_steps_are_the_optimizers():
    "A batch without a step is not due, also if it follows a step that was"
    assert due(2, '2it', cbs=[Window(2)]) == [2, 4]


def test_no_step_at_all():
    "Where no step was made none was due, so that the end of the fit is"
    def skip(cb): raise CancelStepException
    assert due(2, '3it', cbs=[Callback(before_step=skip)]) == ['e2']


def test_steps_go_on_in_the_next_fit():
    "What is counted is `learn.n_step`, which is of all fits"
    learn = synth_learner(cb := Due('3it', last=False), n=4)

    learn.fit(1)
    learn.fit(1)

    assert cb.seen == [3, 6]


# ---- time

class Clock(Callback):
    "A clock that shows `now`; a training batch takes 10 seconds, a validation 3"
    now = 0.
    def __call__(self): return self.now
    def before_batch(self): self.now += 10*self.training
    def after_validate(self): self.now += 3


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(every_module, 'perf_counter', clock := Clock())
    return clock


@pytest.mark.parametrize('text, kwargs, expected', [
    ('25s', {}, [3, 6, 9, 12, 'e3']), ('25s', dict(last=False), [3, 6, 9, 12]),  # at 30, 63, 96, 126 seconds
    ('0.5min', dict(last=False), [3, 6, 9, 12]), ('42s', dict(last=False), ['e1', 'e2', 'e3']),
    ('1h', {}, ['e3']), ('1h', dict(last=False), []),
    ('30s', dict(begin=60, last=False), [6, 9, 12]), ('10s', dict(begin=15, end=40, last=False), [2, 3, 4])])
def test_time(text, kwargs, expected, clock):
    "A time acts after the batch or the epoch in which it has passed, whichever comes first, and counts anew from there"
    assert due(3, text, cbs=[clock], **kwargs) == expected


def test_time_counts_from_the_start_of_a_fit(clock):
    "What has passed before a fit does not count"
    learn = synth_learner([cb := Due('30s', last=False), clock], n=4)
    clock.now += 25

    learn.fit(1)

    assert cb.seen == [3]


# ---- what it is

@pytest.mark.parametrize('text, n, unit', [
    ('500it', 500, 'it'), ('2ep', 2, 'ep'), ('2 ep', 2, 'ep'), ('30s', 30., 's'), ('10min', 600., 's'),
    ('1.5h', 5400., 's'), ('1.0it', 1, 'it')])
def test_number_and_unit(text, n, unit):
    "`n` is a number of `unit`: whole for steps and epochs, seconds for time"
    every = Every(text)

    assert (every.n, every.unit, type(every.n)) == (n, unit, float if unit == 's' else int)


@pytest.mark.parametrize('args, kwargs, text', [
    (('10min',), {}, "Every('10min')"), (('2ep',), dict(begin=0, end=None, last=True), "Every('2ep')"),
    (('500it',), dict(begin=3, end=900, last=False), "Every('500it', begin=3, end=900, last=False)")])
def test_repr_is_what_was_written(args, kwargs, text):
    "Its text can be run, and gives the same"
    assert repr(Every(*args, **kwargs)) == text and repr(eval(text)) == text


def test_an_every_is_copied(clock):
    "An Every is taken with all it has, and the copy has a clock of its own"
    first = Every('30s', begin=10, end=99, last=False)
    second = Every(first)
    clock.now = 10.

    passed = [first.at_step(None), second.at_step(None), second.at_step(None)]

    assert repr(second) == repr(first) and passed == [True, True, False]


def test_an_every_has_its_own_last():
    "The `last` that a callback passes is for plain texts, and gives way to that of an Every"
    assert Every(Every('2ep', last=False), last=True).last is False


@pytest.mark.parametrize('text', ['0ep', 'ep', '', '1.5it', '0.5ep', '-1it', '+1it', '2', '2 steps', '1min30s', 'nans',
                                  'infs', '1e3it', '0s', '٣it', '9'*400+'s'])
def test_text_that_means_nothing(text):
    "What is no number with a unit is refused, with what is accepted"
    with pytest.raises(ValueError, match="every=.*'500it' .*'2ep' .*'10min'"): Every(text)


@pytest.mark.parametrize('every', [5, 2., True, None, ['2ep']])
def test_no_unit(every):
    "A number without unit is refused, and a bool"
    with pytest.raises(TypeError, match="every=.* has no unit: give '500it'"): Every(every)


@pytest.mark.parametrize('text, kwargs, error, message', [
    ('2ep', dict(begin=-1), ValueError, '`begin` is -1'), ('2it', dict(end=2.5), ValueError, '`end` is 2.5'),
    ('2ep', dict(begin=float('nan')), ValueError, '`begin` is nan'), ('2s', dict(end=-.1), ValueError, '`end` is -0.1'),
    ('2ep', dict(begin=True), TypeError, '`begin` is True.*such as 3 for .3ep.'),
    ('2ep', dict(end='5ep'), TypeError, "`end` is '5ep'"),
    ('5ep', dict(end=4), ValueError, 'would never be due: the first time is at 5ep'),
    ('5it', dict(begin=9, end=8), ValueError, 'never be due.*9it'),
    ('5s', dict(begin=float('inf')), ValueError, 'never be due'),
    (Every('2ep'), dict(begin=3), ValueError, 'its own `begin` and `end`'),
    (Every('2ep'), dict(end=3), ValueError, 'its own `begin` and `end`')])
def test_limits_that_mean_nothing(text, kwargs, error, message):
    "`begin` and `end` are numbers in the unit, from 0 on, between which something is due"
    with pytest.raises(error, match=message): Every(text, **kwargs)


# ---- cost

@pytest.mark.parametrize('text, calls', [('2ep', 1), ('500it', 2), ('10min', 3)])
def test_asking_costs_little(text, calls):
    "A batch in which nothing is due costs so many calls"
    every, learn, seen = Every(text), synth_learner(), []
    learn.stepped = True

    sys.setprofile(lambda _, what, __: seen.append(what) if what in ('call', 'c_call') else None)
    every.at_step(learn)
    sys.setprofile(None)

    assert len(seen)-1 == calls  # the last one is setprofile itself
