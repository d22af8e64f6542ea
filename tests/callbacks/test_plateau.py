"""ReduceLROnPlateau: when rates fall, how far, what cannot be with it, and what later fits begin with."""
import math
from functools import partial

import pytest
import torch
from torch.optim.lr_scheduler import StepLR
from torch.optim.lr_scheduler import ReduceLROnPlateau as Torchs

from learner.callback import Callback
from learner.callbacks.checkpoint import Checkpoint
from learner.callbacks.plateau import ReduceLROnPlateau
from learner.callbacks.schedule import ParamScheduler
from learner.callbacks.swa import SWA
from learner.callbacks.torch_schedule import TorchScheduler
from learner.callbacks.tracker import EarlyStoppingCallback, SaveModelCallback
from learner.events import CancelFitException, CancelValidException
from learner.schedules import SchedCos
from tests.callbacks.test_tracker import early, nan, scripted
from tests.helpers import Counts, raises, synth_learner, weights
from tests.resume_helpers import AskAt, halves, noisy_learner, record


def plateau(**kwargs): return ReduceLROnPlateau('score', **dict(comp='min') | kwargs)

def rates(values, *cbs, lr=1., **kwargs):
    "The learning rate of each epoch"
    learn = scripted(values, *cbs, **kwargs)
    learn.fit(len(values), lr)
    return pytest.approx([h['lr'] for h in learn.recorder.history])


@pytest.mark.parametrize('values, kwargs, expected', [
    ([5., 4., 4., 3., 3., 3.], {}, [1, 1, 1, .1, .1, .01]),
    ([5., 5., 5., 5., 5.], dict(patience=2), [1, 1, 1, .1, .1]),
    ([5., 5., 4., 5., 5.], dict(patience=2), [1]*5), ([5., 6., 7.], dict(comp='max'), [1, 1, 1]),
    ([5., 5., 5., 5.], dict(factor=2.), [1, 1, .5, .25]), ([5., 5., 5., 5.], dict(min_lr=.05), [1, 1, .1, .05]),
    ([5., 5., 5., 5., 5., 5.], dict(cooldown=2), [1, 1, .1, .1, .1, .01]),
    ([5., 4.9, 4.8], dict(min_delta=.5), [1, 1, .1]), ([nan, 5., nan, 5.], {}, [1, .1, .1, .01]),
    ([5., 5., 5.], dict(min_lr=3.), [1, 1, 1])])
def test_rates_fall(values, kwargs, expected):
    "After `patience` epochs without a new best, not counting `cooldown`, by `factor`, never below `min_lr`"
    assert rates(values, plateau(**kwargs)) == expected

def test_as_torchs():
    "Torch's own one comes to the same rates; it counts one epoch of patience more"
    values = [5., 5., 4., 4., 4., 4., 3., 4., 5., 5., 5., 5.]
    torchs = TorchScheduler(partial(Torchs, patience=1, threshold=0.), monitor='score')

    assert rates(values, plateau(patience=2)) == rates(values, torchs).expected

def test_epoch_without_value_is_not_counted():
    "An epoch whose validation was cancelled is no sign of no progress"
    cancel = early(Callback(before_validate=raises(CancelValidException, nth=2)))

    assert rates([3., 9., 9., 9.], plateau(), cancel) == [1, 1, 1, .1]

def test_groups_and_fixed_rates():
    "The rate of each group falls, down to `min_lr`; one that `param_opts` fixes stays"
    learn = scripted([5.]*3, plateau(min_lr=.05), lr=[1., .2], splitter=lambda m: [[m.a], [m.b]],
                     param_opts={'b': dict(lr=.3)})
    seen = []

    learn.fit(3, cbs=Callback(after_train=lambda o: seen.append([g['lr'] for g in learn.opt.opt.param_groups])))

    assert seen == [[1., .3], [1., .3], [pytest.approx(.1), .3]]

def test_steps_are_made_with_the_rate():
    "The rate is that of the steps, not only of the table"
    seen, learn = [], scripted([5.]*3, plateau(factor=1e9), opt_func=torch.optim.SGD)

    learn.fit(3, .1, cbs=Callback(after_epoch=lambda o: seen.append(weights(learn))))

    torch.testing.assert_close(seen[1], seen[2], atol=1e-6, rtol=0)
    assert not torch.allclose(seen[0][0], seen[1][0], atol=1e-3)

@pytest.mark.parametrize('ex', [None, CancelFitException, ValueError, KeyboardInterrupt])
def test_next_fit_begins_anew(ex):
    "However the fit ends, the rates are those with which it began, and the next one counts anew"
    learn = scripted([5., 5., 5., 5.], cb := plateau())
    last = early(Callback(after_epoch=raises(ex, nth=4))) if ex else None

    try: learn.fit(4, .5, cbs=last)
    except (ValueError, KeyboardInterrupt): pass
    after, learn.metrics[0].values = learn.opt.hypers[0]['lr'], [9., 8.]
    learn.fit(2)

    assert after == .5 and cb.start is None
    assert [h['lr'] for h in learn.recorder.history[-2:]] == [1e-3]*2 and cb.best == 8.

def test_says_so(capsys):
    "One line tells from when on which rate is used, and why; none does where nothing changes, or no epoch follows"
    scripted([5., 5., 5., 5.], plateau(patience=2, min_lr=.1)).fit(4, 1.)
    one = capsys.readouterr().out
    scripted([5., 5.], plateau(min_lr=.1)).fit(2, .1)

    assert one == "After epoch 3 of 4 the learning rate is 0.1: `score` gave no new best for 2 epochs\n"
    assert capsys.readouterr().out == ''

@pytest.mark.parametrize('at', [3, 8, 13, 15])
def test_resumes_exactly(tmp_path, at):
    "What it has counted and lowered goes on, in a process of its own too"
    def make(path): return noisy_learner(path, cbs=[ReduceLROnPlateau('train_loss', min_delta=.15)], splitter=halves)
    whole, first = make(tmp_path/'whole'), make(tmp_path/'cut')
    whole.fit(4, 1e-2)
    first = make(tmp_path/'cut')
    with pytest.raises(KeyboardInterrupt): first.fit(4, 1e-2, cbs=[Checkpoint(), AskAt(at)])
    second = make(tmp_path/'cut')

    second.fit(4, 1e-2, cbs=Checkpoint(), resume=True)
    first.resume()

    assert record(whole) == record(first) == record(second)
    assert len({h['lr'] for h in whole.recorder.history}) > 1
    assert {learn.opt.hypers[0]['lr'] for learn in (whole, first, second)} == {1e-2}


# ---- what is refused

@pytest.mark.parametrize('cbs', [
    lambda: ParamScheduler({'lr': SchedCos(1e-2, 1e-4)}), lambda: ParamScheduler(factors={'lr': SchedCos(1., .1)}),
    lambda: partial(StepLR, step_size=1), lambda: TorchScheduler(Torchs), lambda: SWA(.5, swa_lr=.1)])
@pytest.mark.parametrize('order', [None, 70])
def test_with_a_schedule(cbs, order):
    "A schedule of the learning rate in the same fit is refused before training, wherever it comes from"
    learn = synth_learner(counts := Counts())
    learn.add_cb(ReduceLROnPlateau(), order=order)

    with pytest.raises(ValueError, match='ReduceLROnPlateau and .* both set `lr`.*leave one out'):
        learn.fit(2, cbs=cbs())

    assert counts.n == 0

@pytest.mark.parametrize('fit', ['fit_one_cycle', 'fit_flat_cos', 'fine_tune'])
def test_with_fits_that_schedule(fit):
    "So are fit methods that bring one; plain `fit` then works as before"
    learn = synth_learner([ReduceLROnPlateau(), counts := Counts()], splitter=lambda m: [[m.a], [m.b]])

    with pytest.raises(ValueError, match='ReduceLROnPlateau and ParamScheduler.* both set `lr`'): getattr(learn, fit)(2)
    n = counts.n
    learn.fit(1)

    assert n == 0 and counts.n == 3

def test_with_another_schedule():
    "One of the momentum alone is in nobody's way, and neither is the finder"
    learn = synth_learner(ReduceLROnPlateau, lr=.1)

    learn.lr_find(num_it=10, suggest_funcs=None, show_plot=False)
    learn.fit(2, cbs=ParamScheduler({'mom': SchedCos(.9, .8)}))

    assert len(learn.recorder.values) == 2

@pytest.mark.parametrize('kwargs', [dict(factor=1.), dict(factor=.1), dict(factor=math.inf), dict(patience=0),
                                    dict(patience=1.5), dict(cooldown=-1), dict(min_lr=-1.), dict(min_lr=nan)])
def test_odd_parameters(kwargs):
    "What means nothing is refused; a factor below 1, as torch has it, too"
    with pytest.raises((ValueError, TypeError), match=f'ReduceLROnPlateau: `{[*kwargs][0]}`.* is '):
        ReduceLROnPlateau(**kwargs)

def test_column_that_is_not_there():
    "It is refused before training, with those there are"
    with pytest.raises(ValueError, match='no column `valid_los` to monitor, only train_loss, valid_loss'):
        synth_learner(ReduceLROnPlateau('valid_los')).fit(1)

def test_between_saving_and_stopping():
    "It acts after the best model is saved and before the fit is stopped"
    learn = synth_learner([EarlyStoppingCallback(), ReduceLROnPlateau(), SaveModelCallback()])

    assert [type(cb) for cb in learn.ordered[-3:]] == [SaveModelCallback, ReduceLROnPlateau, EarlyStoppingCallback]
