"""What is no number, or not one that means anything, is refused where it is given, by callback and parameter."""
import pytest
from torch import nn

from learner import (EMA, SWA, Checkpoint, CutMix, DataLoaders, EarlyStoppingCallback, GradientAccumulation,
                     GradientClip, HookCallback, MixedPrecision, MixUp, ProfilerCallback, ProgressiveResize,
                     ReduceLROnPlateau, RNNRegularizer, SaveModelCallback, ShortEpochCallback, SkipToEpoch, TakeTurns,
                     TimeLimit, TrackerCallback, accuracy)
from learner.callbacks.recompute import ActivationCheckpointing
from learner.utils import check_number
from tests.helpers import synth_dls, synth_learner

no_numbers = True, 'a', [1], object()
callbacks = {  # by class, the parameters that are numbers and one value below what each may be
    EMA: dict(decay=-.1, every=0), MixUp: dict(alpha=0), CutMix: dict(alpha=-1),
    GradientAccumulation: dict(n_acc=0), GradientClip: dict(max_norm=0, norm_type=0, eps=0),
    MixedPrecision: dict(init_scale=0, growth_factor=1, backoff_factor=0, growth_interval=0),
    TrackerCallback: dict(min_delta=-1), EarlyStoppingCallback: dict(
        patience=0, min_delta=-1, stopping_threshold=-float('inf'), divergence_threshold=-float('inf')),
    SaveModelCallback: dict(n_best=0, min_delta=-1, every_epoch=-1),
    ReduceLROnPlateau: dict(patience=0, factor=1, min_lr=-1, cooldown=-1), ShortEpochCallback: dict(pct=0, n=0),
    SkipToEpoch: dict(epoch=-1), RNNRegularizer: dict(alpha=-1, beta=-1), Checkpoint: dict(keep=0),
    ProfilerCallback: dict(wait=-1, warmup=-1, active=0)}
whole = {'every', 'n_acc', 'growth_interval', 'patience', 'n_best', 'every_epoch', 'cooldown', 'n', 'epoch', 'keep',
         'wait', 'warmup', 'active'}
given = [(cls, name, low) for cls, params in callbacks.items() for name, low in params.items()]


@pytest.mark.parametrize('cls, name, low', given, ids=[f'{cls.__name__}-{name}' for cls, name, _ in given])
def test_parameters_of_callbacks(cls, name, low):
    "A bool and a text are none, NaN and what is too small neither; the message names callback, parameter and value"
    odd = [(v, TypeError) for v in no_numbers] + [(low, ValueError)] + [(float('nan'), ValueError)]*(name not in whole)
    odd += [(2.5, TypeError), (2., TypeError)]*(name in whole)
    for value, error in odd:
        if name == 'every_epoch' and value is True: continue  # means each epoch

        with pytest.raises(error) as e: cls(**{name: value})

        assert str(e.value).startswith(cls.__name__) and f'`{name}`' in str(e.value) and repr(value) in str(e.value)

@pytest.mark.parametrize('make, error, match', [
    (lambda: HookCallback(hook=print, every=True), TypeError, 'HookCallback: `every`, .* is True'),
    (lambda: ProgressiveResize({0: True}), TypeError, 'a size is True; give a whole number of pixels'),
    (lambda: ProgressiveResize({0: (8, 0)}), ValueError, 'a size is 0'),
    (lambda: ProgressiveResize({'a': 8}), TypeError, "where a size begins is 'a'"),
    (lambda: TimeLimit(True), TypeError, 'TimeLimit: `limit` is True'),
    (lambda: TimeLimit(-1), ValueError, 'TimeLimit: `limit` is -1; give a number of seconds above 0'),
    (lambda: TimeLimit('5it'), ValueError, "TimeLimit: '5it' is no time"),
    (lambda: EMA(start='soon'), ValueError, "EMA: `start`: 'soon' is no place in a fit"),
    (lambda: SWA(True), ValueError, 'SWA: `start`: True is no place in a fit'),
    (lambda: TakeTurns('ab'), TypeError, "TakeTurns: turns='ab'; give a list of \\('generator', loss_func\\)"),
    (lambda: TakeTurns({'a': print}), TypeError, "give a list of"),
    (lambda: TakeTurns([print]), TypeError, "TakeTurns: <.*> is no turn; give \\('generator', loss_func\\)"),
    (lambda: ShortEpochCallback(.5, n=5), ValueError, 'pct=0.5 and n=5: give one of them'),
    (lambda: ProgressiveResize(4), TypeError, 'sizes=4; give them by when they begin'),
    (lambda: EarlyStoppingCallback(accuracy), TypeError, "give the name of its column, as 'accuracy'"),
    (lambda: TakeTurns([('a',)]), TypeError, "TakeTurns: \\('a',\\) is no turn"),
    (lambda: TakeTurns([('a', print, True)]), TypeError, "TakeTurns: `n` of 'a' is True"),
    (lambda: ActivationCheckpointing(None), TypeError, 'ActivationCheckpointing: `modules` is None')])
def test_others(make, error, match):
    "Sizes, times, places in a fit, turns"
    with pytest.raises(error, match=match): make()

@pytest.mark.parametrize('call, error, match', [
    (lambda learn: learn.fit(True), TypeError, 'fit: `n_epoch` is True; give a whole number of epochs, 0 or more'),
    (lambda learn: learn.fit(1, n_steps=0), ValueError, 'fit: `n_steps` is 0'),
    (lambda learn: learn.step(True), TypeError, 'step: `n` is True'),
    (lambda learn: learn.fit_sgdr(True, 1), TypeError, 'fit_sgdr: `n_cycles` is True'),
    (lambda learn: learn.fit_one_cycle(1, pct_start='a'), TypeError, '`pct_start`, .* is \'a\''),
    (lambda learn: learn.fit_one_cycle(1, div=0), ValueError, '`div` is 0; give a number above 0'),
    (lambda learn: learn.lr_find(num_it=True), TypeError, 'lr_find: `num_it` is True'),
    (lambda learn: learn.doctor(True), TypeError, 'doctor: `n_batches` is True'),
    (lambda learn: learn.dry_run(n_batches=True), TypeError, 'dry_run: `n_batches` is True'),
    (lambda learn: learn.trace(n_batches=0), ValueError, 'trace: `n_batches` is 0'),
    (lambda learn: learn.find_batch_size(start='a'), TypeError, "find_batch_size: `start` is 'a'"),
    (lambda learn: learn.dls.partial_dataloaders(True), TypeError, 'partial_dataloaders: `partial_n` is True'),
    (lambda learn: learn.dls.partial_dataloaders(17), ValueError, 'a whole number of items, 1 or more and at most 16'),
    (lambda learn: learn.dls.first_batches(0), ValueError, 'first_batches: `n` is 0')])
def test_methods(call, error, match):
    "Of Learner and DataLoaders"
    learn = synth_learner(dls=DataLoaders(*synth_dls()), model=nn.Linear(1, 1))

    with pytest.raises(error, match=match): call(learn)

    assert not learn.n_step

@pytest.mark.parametrize('value, kwargs, text', [
    (-1, dict(low=0), 'a number, 0 or more'), (0, dict(low=0, above=True), 'a number above 0'),
    (1, dict(low=0, high=1, below=True), 'a number, 0 or more and below 1'),
    (2, dict(low=0, high=1), 'a number, 0 or more and at most 1'), (float('inf'), {}, 'a number'),
    (-2, dict(low=1, whole=True, of='epochs'), 'a whole number of epochs, 1 or more')])
def test_the_message(value, kwargs, text):
    "It says what would do"
    with pytest.raises(ValueError) as e: check_number('X: `y`', value, **kwargs)

    assert str(e.value) == f'X: `y` is {value}; give {text}'

def test_what_will_do():
    "Limits belong to what may be, unless they do not; infinity if a limit is"
    check_number('x', 0, 0)
    check_number('x', 1, 0, 1)
    check_number('x', float('inf'), 0, float('inf'))
    check_number('x', True+1, 2, whole=True)
