"""Previews know of callbacks that say where a fit begins and how many steps it has."""
import pytest

from learner import GradientAccumulation, ShortEpochCallback, SkipToEpoch
from tests.helpers import synth_learner


@pytest.mark.parametrize('make, n_epoch, n_steps', [
    (lambda: GradientAccumulation(2, 'batches'), 2, 6), (lambda: ShortEpochCallback(n=2), 3, 6),
    (lambda: SkipToEpoch(2), 3, 6)], ids=['accumulation', 'short', 'skip'])
@pytest.mark.parametrize('given', [False, True])
def test_a_preview_has_the_steps_of_the_fit(make, n_epoch, n_steps, given):
    "Rates are those that the fit then has at its steps; the callback is as before"
    cb = make()
    learn = synth_learner(None if given else cb, n=6)
    before = dict(vars(cb))

    seen = learn.simulate_sched('fit_one_cycle', n_epoch, 1e-2, cbs=cb if given else None)
    assert {k: v for k, v in vars(cb).items() if k != 'learn'} == {k: v for k, v in before.items() if k != 'learn'}
    learn.fit_one_cycle(n_epoch, 1e-2, cbs=cb if given else None)

    assert len(seen['lr']) == n_steps == learn.n_step
    assert [*dict.fromkeys(learn.recorder.lrs)] == pytest.approx([*dict.fromkeys(seen['lr'][:, 0])])
