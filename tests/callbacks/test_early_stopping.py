"""EarlyStoppingCallback: when it stops, what it says, and that a resumed fit stops where it would have."""
from copy import deepcopy

import pytest
import torch

from learner.callback import Callback
from learner.callbacks.tracker import EarlyStoppingCallback
from learner.events import CancelValidException
from learner.learner import Learner
from tests.callbacks.test_tracker import Script, early, inf, nan, scripted
from tests.helpers import raises, synth_dls

patient = [5., 4., 3., 4., 2., 3., 4., 3., 1., 0.]  # with patience 3 the stop is due after the eighth epoch

@pytest.mark.parametrize('values, kwargs, n, stopped', [
    (patient, {}, 4, 3), (patient, dict(patience=3), 8, 7), (patient, dict(patience=4), 10, None),
    (patient, dict(comp='max'), 2, 1), (patient, dict(patience=3, min_delta=1.5), 6, 5),
    ([3., 2.9, 2.8, 2.7, 2.4, 2.3], dict(min_delta=.5, patience=3), 4, 3),
    ([3., nan, 2., nan, inf, 1.], dict(patience=2), 5, 4), ([nan, nan, nan], dict(patience=2), 2, 1)])
def test_stops_after_patience(values, kwargs, n, stopped):
    "The fit ends after `patience` epochs in a row that were no new best; a value that is not finite is none"
    learn = scripted(values, cb := EarlyStoppingCallback('score', **dict(comp='min') | kwargs))

    learn.fit(len(values))

    assert (len(learn.recorder.values), cb.stopped_epoch) == (n, stopped)

def test_epoch_without_value_is_not_counted():
    "An epoch whose validation was cancelled is no sign of no progress"
    learn = scripted([3., 9., 9., 9., 9.], cb := EarlyStoppingCallback('score', 'min', patience=2),
                     early(Callback(before_validate=raises(CancelValidException, nth=2))))

    learn.fit(5)

    assert (len(learn.recorder.values), cb.stopped_epoch) == (4, 3)

@pytest.mark.parametrize('values, said', [
    (patient, 'after epoch 4 of 10: `score` gave no new best for 1 epoch, the best is 3'),
    ([nan, nan], 'after epoch 1 of 2: `score` gave no new best for 1 epoch'), ([3., 2.], None)])
def test_says_that_it_stopped(values, said, capsys):
    "One line under the table says where and why; none does if the fit came to its end"
    learn = scripted(values, EarlyStoppingCallback('score', 'min'), default_cbs=True)

    learn.fit(len(values))
    lines = capsys.readouterr().out.splitlines()

    assert lines[len(learn.recorder.values)+1:] == ([f'Stopped {said}'] if said else [])

@pytest.mark.parametrize('done', range(1, 8))
def test_s11_patience_survives(done):
    "A fit that goes on with the state after `done` epochs stops where the uninterrupted one does: after eight"
    first = scripted(patient, cb := EarlyStoppingCallback('score', 'min', patience=3))
    first.fit(done)
    state = deepcopy(cb.state_dict())
    second = scripted(patient, cb := EarlyStoppingCallback('score', 'min', patience=3))
    resumed = Callback(before_train=lambda o: second.epoch == done and cb.load_state_dict(state))

    second.fit(10, start_epoch=done, cbs=resumed)

    assert (second.epoch, cb.stopped_epoch, cb.best, cb.wait, cb.new_best) == (7, 7, 2., 3, False)

def test_next_fit_is_patient_again():
    "A fit that was stopped has no effect on the next one, but for the best where that is kept"
    learn = scripted([2., 3., 4.], cb := EarlyStoppingCallback('score', 'min', patience=2, reset_on_fit=False))
    learn.fit(3)
    learn.metrics[0].values = [3., 2.5, 5.]

    learn.fit(0)
    between = cb.wait, cb.stopped_epoch
    learn.fit(3)

    assert between == (0, None) and (len(learn.recorder.values), cb.best, cb.stopped_epoch) == (2, 2., 1)

def test_goes_on_after_a_stop():
    "A fit that goes on with the state of one that was stopped is stopped no more once there is a new best"
    first = scripted([2., 3., 3.], cb := EarlyStoppingCallback('score', 'min'))
    first.fit(3)
    state = deepcopy(cb.state_dict())
    second = scripted([0, 0, 1.], cb := EarlyStoppingCallback('score', 'min'))

    second.fit(3, start_epoch=2, cbs=Callback(before_train=lambda o: cb.load_state_dict(state)))

    assert state['stopped_epoch'] == 1 and (cb.wait, cb.best, cb.stopped_epoch) == (0, 1., None)

def test_processes_agree():
    "What is decided goes through `agree`, in each epoch"
    class Together(Learner):
        def agree(self, flag):
            asked.append(flag)
            return False
    asked = []
    learn = Together(synth_dls(), torch.nn.Linear(1, 1), torch.nn.functional.mse_loss, default_cbs=dict(progress=None),
                     metrics=Script([2., 3., 4.]), cbs=EarlyStoppingCallback('score', 'min', patience=2))

    learn.fit(3)

    assert asked == [False, False, True] and len(learn.recorder.values) == 3


# ---- what a value says for itself

@pytest.mark.parametrize('values, kwargs, n, reason', [
    ([5., 3., 2., 1.], dict(stopping_threshold=2.), 3, '`score` is 2, and 2 was wanted'),
    ([5., 6., 7., 1.], dict(stopping_threshold=6.5, comp='max'), 3, '`score` is 7, and 6.5 was wanted'),
    ([5., 9., 2., 1.], dict(divergence_threshold=8.), 2, '`score` is 9, worse than 8'),
    ([5., 8., -2., 1.], dict(divergence_threshold=-1., comp='max'), 3, '`score` is -2, worse than -1'),
    ([5., inf, 2.], dict(divergence_threshold=8.), 2, '`score` is inf, worse than 8'),
    ([5., nan, 2.], dict(check_finite=True), 2, '`score` is nan'),
    ([5., nan, 2.], dict(stopping_threshold=1., divergence_threshold=9.), 3, ''),
    ([5., 4., 4.], dict(stopping_threshold=1., patience=1), 3,
     '`score` gave no new best for 1 epoch, the best is 4')])
def test_values_that_end_a_fit(values, kwargs, n, reason, capsys):
    "A value that is good enough, too bad or no number ends the fit, if that is asked for; `reason` says which"
    cb = EarlyStoppingCallback('score', **dict(comp='min', patience=3) | kwargs)
    learn = scripted(values, cb)

    learn.fit(len(values))
    said = capsys.readouterr().out

    assert (len(learn.recorder.values), cb.reason) == (n, reason)
    assert said == (f'Stopped after epoch {n} of {len(values)}: {reason}\n' if reason else '')

def test_reason_is_that_of_the_last_fit():
    "A fit that comes to its end has none"
    learn = scripted([2., 3.], cb := EarlyStoppingCallback('score', 'min'))
    learn.fit(2)
    first, learn.metrics[0].values = cb.reason, [3., 2.]

    learn.fit(2)

    assert first and not cb.reason

@pytest.mark.parametrize('name', ['stopping_threshold', 'divergence_threshold'])
@pytest.mark.parametrize('value', [nan, inf])
def test_odd_limits(name, value):
    "What no value can be compared with is refused"
    with pytest.raises(ValueError, match=f'`{name}` is {value}; give a number'): EarlyStoppingCallback(**{name: value})
