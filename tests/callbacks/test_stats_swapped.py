"""Statistics and hooks while the model, or a part of it, is replaced in the midst of a fit."""
import pytest
from torch import nn

from learner import ActivationStats, Callback, GradientStats, HookCallback
from tests.helpers import synth_learner


def net(*more): return nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1), *more)

def swap(change):
    "Makes `change` before the second epoch"
    def before_epoch(cb):
        if cb.epoch == 1: change(cb.learn)
    return Callback(before_epoch=before_epoch)


@pytest.mark.parametrize('kind', [ActivationStats, GradientStats])
def test_a_layer_of_the_same_name_goes_on(kind):
    "A layer that takes another's place is recorded in its row"
    learn = synth_learner([cb := kind(), swap(lambda learn: learn.model.__setitem__(2, nn.Linear(4, 1)))], model=net(),
                          n=2)
    with pytest.warns(UserWarning, match='not trained, since the optimizer was made without'): learn.fit(2)

    assert cb.layers == ['0', '2'] and len(cb.table) == 4*2 and cb.table['mean'].notna().all()

@pytest.mark.parametrize('kind', [ActivationStats, GradientStats])
def test_other_layers_are_told(kind):
    "Layers that were not there when the fit began are named, once"
    learn = synth_learner([cb := kind(), swap(lambda learn: learn.model.append(nn.Linear(1, 1).requires_grad_(False)))],
                          model=net(), n=2)

    with pytest.warns(UserWarning, match=f'{kind.__name__}: not recorded, .* when the fit began: 3'): learn.fit(2)

    assert cb.layers == ['0', '2'] and len(cb.table) == 4*2

def test_hooks_go_to_the_new_modules():
    "And none is left on the old ones, nor on these"
    old, new, seen = net(), net(), []
    learn = synth_learner([HookCallback('0', hook=lambda m, i, o: seen.append(m)),
                           swap(lambda learn: setattr(learn, 'model', new))], model=old, n=1)

    with pytest.warns(UserWarning, match='not trained'), pytest.warns(UserWarning, match='first step'): learn.fit(2)

    assert seen == [old[0], new[0]]
    assert sum(len(m._forward_hooks) for model in (old, new) for m in model.modules()) == 0
