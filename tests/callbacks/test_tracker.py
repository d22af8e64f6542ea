"""Trackers: what is best, in which direction, by which name, and in which epochs."""
import math

import numpy as np
import pytest
import torch

from learner.callback import Callback
from learner.callbacks.plateau import ReduceLROnPlateau
from learner.callbacks.recorder import Recorder
from learner.callbacks.tracker import EarlyStoppingCallback, SaveModelCallback, TrackerCallback
from learner.events import CancelEpochException, CancelFitException, CancelTrainException, CancelValidException
from learner.measure import Metric
from tests.helpers import raises, synth_dls, synth_learner

nan, inf = math.nan, math.inf
every_tracker = pytest.mark.parametrize('cls', [TrackerCallback, SaveModelCallback, EarlyStoppingCallback,
                                                ReduceLROnPlateau])


class Script(Metric):
    "A metric whose value in each epoch is given"
    def __init__(self, values, better=None): self.values, self.greater_is_better, self.name = values, better, 'score'
    def reset(self): self.epoch = None
    def accumulate(self, learn): self.epoch = learn.epoch
    @property
    def value(self): return nan if self.epoch is None else self.values[self.epoch]


class Seen(TrackerCallback):
    "Notes what it looked at"
    def before_fit(self):
        super().before_fit()
        self.seen = []
    def looked(self, value): self.seen.append((value, self.best, self.new_best))


def scripted(values, *cbs, better=None, **kwargs):
    return synth_learner(cbs, n=1, metrics=Script(values, better), **kwargs)

def tracked(values, *args, cbs=(), **kwargs):
    "Whether each epoch was a new best, and the best at the end"
    learn = scripted(values, cb := Seen('score', *args, **kwargs), *cbs)
    learn.fit(len(values))
    return [new for _, _, new in cb.seen], cb.best

def early(cb):
    "A callback that acts before the Recorder and all trackers"
    cb.order = -5
    return cb


# ---- what is best

@pytest.mark.parametrize('comp, best, new', [
    ('min', .1, [1, 0, 1, 0, 0, 0, 1]), (np.less, .1, [1, 0, 1, 0, 0, 0, 1]),
    ('max', 4., [1, 0, 0, 0, 1, 0, 0]), (np.greater, 4., [1, 0, 0, 0, 1, 0, 0])])
def test_direction_that_is_given(comp, best, new):
    "`comp` says what is better; an equal value is not"
    assert tracked([3., 3., 2., 2., 4., 3., .1], comp) == ([*map(bool, new)], best)

@pytest.mark.parametrize('comp', ['min', 'max'])
def test_only_finite_numbers_are_best(comp):
    "NaN and infinity are never best, neither at first nor later"
    assert tracked([nan, inf, -inf, 2., nan, inf, -inf], comp) == ([False]*3+[True]+[False]*3, 2.)

@pytest.mark.parametrize('comp, values', [('min', [4., 3., 2.75, 2.5, 2.25]), ('max', [1., 2., 2.25, 2.5, 2.75])])
def test_min_delta(comp, values):
    "What is better by no more than `min_delta` is not better; the best stays what it was"
    assert tracked(values, comp, .5) == ([True, True, False, False, True], values[-1])

def test_looked_comes_before_best_changes():
    "A subclass sees the value and `new_best` beside the best one before"
    learn = scripted([3., 2., 4.], cb := Seen('score', 'min'))

    learn.fit(3)

    assert cb.seen == [(3., None, True), (2., 3., True), (4., 2., False)] and (cb.best, cb.new_best) == (2., False)

@pytest.mark.parametrize('reset, best, new', [(True, 3., True), (False, 2., False)])
def test_best_of_several_fits(reset, best, new):
    "`reset_on_fit` decides whether a fit begins without a best one"
    learn = scripted([2.], cb := Seen('score', 'min', reset_on_fit=reset))
    learn.fit(1)
    learn.metrics[0].values = [3.]

    learn.fit(1)

    assert (cb.best, cb.new_best) == (best, new)


# ---- epochs that are cut short

def test_best_is_not_missed_where_another_ends_the_fit():
    "An epoch counts, once, although an earlier callback ends the fit in its `after_epoch`"
    learn = scripted([3., 2., 1.], cb := Seen('score', 'min'),
                     early(Callback(after_epoch=raises(CancelFitException, nth=2))))

    learn.fit(3)

    assert [value for value, _, _ in cb.seen] == [3., 2.] and cb.best == 2.

@pytest.mark.parametrize('event, ex', [
    ('before_epoch', CancelEpochException), ('before_train', CancelEpochException),
    ('before_validate', CancelValidException), ('before_validate', CancelEpochException)])
@pytest.mark.parametrize('order', [-5, 90])
def test_epoch_without_the_value(event, ex, order):
    "An epoch in which no batch was validated is looked at, and has no value, whoever cancels"
    cancel = Callback(**{event: raises(ex, nth=2)})
    cancel.order = order
    learn = scripted([3., 2., 1.], cb := Seen('score', 'min'), cancel)

    learn.fit(3)

    assert cb.seen == [(3., None, True), (None, 3., False), (1., 3., True)]

@pytest.mark.parametrize('monitor, event, ex', [('train_score', 'before_train', CancelTrainException),
                                                ('valid_score', 'before_validate', CancelValidException)])
@pytest.mark.parametrize('cancelled', [False, True])
def test_nan_of_batches_and_of_none(monitor, event, ex, cancelled):
    "A NaN that was computed is a value; one that stands for a phase without batches is none"
    cancel = early(Callback(**{event: raises(ex, nth=2)}))
    learn = synth_learner([Recorder(train_metrics=True), cb := Seen(monitor, 'min'), *[cancel]*cancelled], n=1,
                          metrics=Script([3., nan]))

    learn.fit(2)

    assert [value is None for value, _, _ in cb.seen] == [False, cancelled]

def test_other_columns_of_a_cut_epoch_count():
    "Where only the training was cancelled, the validation loss is there"
    learn = synth_learner([cb := Seen(), Callback(before_train=raises(CancelTrainException))])

    learn.fit(1)

    assert cb.best == learn.recorder.values[0]['valid_loss']

def test_half_an_epoch_is_not_looked_at():
    "An error in an epoch leaves the best one as it was"
    learn = scripted([3., 2.], cb := Seen('score', 'min'), Callback(before_validate=raises(ValueError, nth=2)))

    with pytest.raises(ValueError): learn.fit(2)

    assert cb.seen == [(3., None, True)] and (cb.best, cb.new_best) == (3., False)

def test_state_goes_on():
    "What a tracker knows after an epoch can be given to another one"
    learn, other = scripted([3., 2.], cb := TrackerCallback('score', 'min')), TrackerCallback('score', 'min')
    learn.fit(2)

    other.load_state_dict(cb.state_dict())

    assert cb.state_dict() == other.state_dict() == dict(best=2., new_best=True)

def test_order():
    "After the Recorder come trackers, then the one that saves, then the one that stops"
    learn = synth_learner([EarlyStoppingCallback, SaveModelCallback, TrackerCallback])

    assert [cb.name for cb in learn.ordered][-4:] == ['recorder', 'tracker', 'save_model', 'early_stopping']

def test_evaluation_is_not_tracked():
    "`validate`, in a fit or outside, changes nothing"
    learn = scripted([3., 2.], cb := Seen('score', 'min'), Callback(after_epoch=lambda cb: cb.learn.validate()))

    learn.fit(1)
    learn.epoch = 1
    learn.validate()

    assert cb.seen == [(3., None, True)] and cb.best == 3.


# ---- the column and its direction

def higher(pred, targ): return -(pred-targ).abs().mean()
def lower(pred, targ): return (pred-targ).abs().mean()
def pair(pred, targ): return dict(a=(pred-targ).abs().mean(), b=pred.mean())
def triplet_loss(pred, targ): return (pred-targ).abs().mean()
higher.greater_is_better, lower.greater_is_better = True, False

def two_sets():
    train, valid = synth_dls()
    return train, dict(a=valid, b=valid)


@pytest.mark.parametrize('monitor, comp, kwargs', [
    ('valid_loss', min, {}), ('train_loss', min, {}), ('higher', max, {}), ('lower', min, {}),
    ('b_valid_loss', min, dict(dls=two_sets())), ('b_higher', max, dict(dls=two_sets())),
    ('a_lower', min, dict(dls=two_sets())), ('train_higher', max, dict(cbs=Recorder(train_metrics=True))),
    ('valid_lower', min, dict(cbs=Recorder(train_metrics=True))),
    ('a_valid_higher', max, dict(dls=two_sets(), cbs=Recorder(train_metrics=True)))])
def test_direction_that_is_declared(monitor, comp, kwargs):
    "Losses are better low, metrics as they say, under whatever name the Recorder gives them"
    learn = synth_learner(metrics=[higher, lower], lr=1., opt_func=torch.optim.SGD, **kwargs)
    learn.add_cb(cb := TrackerCallback(monitor))

    learn.fit(4)

    assert cb.best == comp(row[monitor] for row in learn.recorder.values)

@pytest.mark.parametrize('metric', [Script([1.]), triplet_loss])
def test_direction_is_not_guessed(metric):
    "Where nobody says what is better the fit does not start, whatever the name; `comp` decides"
    learn = synth_learner(metrics=metric)
    name = learn.metrics[0].name

    with pytest.raises(ValueError, match=f"high or low values of `{name}` .*comp='max' or comp='min'.*greater_is"):
        learn.fit(1, cbs=TrackerCallback(name))
    learn.fit(1, cbs=(cb := TrackerCallback(name, 'max')))

    assert learn.train_iter == 2 and cb.best == learn.recorder.values[0][name]

def test_comp_outranks_the_metric():
    "What is given is taken, also against what the metric says"
    learn = scripted([3., 2.], cb := TrackerCallback('score', 'min'), better=True)

    learn.fit(2)

    assert cb.best == 2.

class Unmeasured(Recorder):
    def __init__(self): super().__init__(valid_metrics=False)

@every_tracker
@pytest.mark.parametrize('monitor, comp, kwargs, columns', [
    ('acuracy', None, dict(metrics=lower), 'train_loss, valid_loss, lower'),
    ('time', None, {}, 'train_loss, valid_loss'), ('score', 'max', {}, 'train_loss, valid_loss'),
    ('valid_loss', None, dict(n_valid=0), 'train_loss'), ('valid_loss', 'min', dict(n_valid=0), 'train_loss'),
    ('lower', 'min', dict(metrics=lower, cbs=Unmeasured), 'train_loss, valid_loss')])
def test_no_such_column(cls, monitor, comp, kwargs, columns):
    "A column that cannot come is refused before training, and those that there are are named"
    learn = synth_learner(**kwargs)

    message = f'{cls.__name__}: there is no column `{monitor}` to monitor, only {columns}'
    with pytest.raises(ValueError, match=message) as e:
        learn.fit(1, cbs=cls(monitor, comp))

    assert learn.train_iter == 0 and ('needs `comp`' in str(e.value)) == (comp is None)

def parts(pred, y): return dict(part=(pred-y).abs().mean(), rest=pred.square().mean())

@pytest.mark.parametrize('monitor, kwargs', [('b', dict(metrics=pair)), ('valid_part', dict(loss_func=parts))])
@pytest.mark.parametrize('cancelled', [False, True])
def test_column_that_comes_with_the_first_row(monitor, kwargs, cancelled):
    "A member of a dict, of a metric or the loss, can be watched if `comp` is given, also if it comes later than that"
    cancel = [early(Callback(before_validate=raises(CancelValidException)))] if cancelled else []
    learn = synth_learner([cb := TrackerCallback(monitor, 'max'), *cancel], **kwargs)

    learn.fit(3)

    assert cb.best == max(row[monitor] for row in learn.recorder.values[cancelled:])

def test_column_that_does_not_come():
    "If it is not in the first row it is an error then, not a tracker without effect"
    learn = synth_learner(cb := TrackerCallback('c', 'max'), metrics=pair)

    with pytest.raises(ValueError, match='no column `c` to monitor, only train_loss, valid_loss, a, b\n'): learn.fit(2)

    assert learn.epoch == 0 and cb.best is None

def joined(tracker, **kwargs):
    "A learner in whose second epoch the tracker comes in"
    def join(self): self.learn.add_cb(tracker) if self.epoch == 1 else None
    return synth_learner(Callback(before_train=join), metrics=higher, **kwargs)

def test_tracker_joins_a_running_fit():
    "One that is added during a fit finds its column and direction"
    learn = joined(cb := TrackerCallback('higher'))

    learn.fit(3)

    assert cb.best == max(row['higher'] for row in learn.recorder.values[1:])

def test_direction_is_not_that_of_another_column():
    "Nor does it take the direction of a metric for that of a part of the loss"
    with pytest.raises(ValueError, match='high or low values of `valid_part`'):
        joined(TrackerCallback('valid_part'), loss_func=parts).fit(3)

def test_needs_recorder():
    "Without a Recorder it says so before training"
    learn = synth_learner(TrackerCallback, default_cbs=False)

    with pytest.raises(RuntimeError, match='`TrackerCallback` works with `Recorder`'): learn.fit(1)

    assert learn.train_iter == 0

@pytest.mark.parametrize('cls, kwargs', [
    (TrackerCallback, dict(comp='less')), (TrackerCallback, dict(comp=np.less_equal)),
    (TrackerCallback, dict(min_delta=-.1)), (TrackerCallback, dict(min_delta=nan)),
    (EarlyStoppingCallback, dict(patience=0)), (EarlyStoppingCallback, dict(patience=1.5)),
    (EarlyStoppingCallback, dict(comp='auto')), (SaveModelCallback, dict(min_delta=inf)),
    (SaveModelCallback, dict(every_epoch=-1)), (SaveModelCallback, dict(every_epoch=.5))])
def test_parameter_that_means_nothing(cls, kwargs):
    "It is refused when the callback is made; the error has its value"
    (name, value), = kwargs.items()

    with pytest.raises((ValueError, TypeError), match=f'{cls.__name__}: `?{name}(=|` is ){value!r}; give '):
        cls(**kwargs)
