"""Modes and devices of a model: look, switch, put back."""
import pytest
import torch
from torch import nn

from learner.modes import choose_device, devices, move, restore_modes, snapshot_modes, train_mode


def net(): return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.Dropout()), nn.BatchNorm1d(2))


def flags(m): return [o.training for o in m.modules()]


def test_restore_puts_every_flag_back():
    "Every module gets its own mode back, whatever happened to it"
    model = net()
    model[1][0].eval()
    old, modes = flags(model), snapshot_modes(model)
    model.eval()
    model[0].train()

    restore_modes(modes)

    assert flags(model) == old


def test_restore_uses_the_models_own_train_method():
    "A model whose `train` does more than set a flag is switched by that method"
    calls = []
    class Own(nn.Linear):
        def train(self, mode=True): calls.append(mode); return super().train(mode)
    model = Own(1, 1)
    modes = snapshot_modes(model)
    model.eval()
    calls.clear()

    restore_modes(modes)

    assert calls == [True] and model.training


def test_train_mode_keeps_submodules_in_eval():
    "A submodule in eval under a training parent stays so, and its outermost name is told"
    model = net()
    model[1].eval()

    assert train_mode(model) == ['1']
    assert [m.training for m in model] == [True, False, True] and not model[1][0].training


def test_train_mode_trains_a_model_wholly_in_eval():
    "A model that is in eval as a whole is trained as a whole"
    model = net().eval()

    assert train_mode(model) == [] and all(flags(model))


def test_choose_device():
    "What is asked for wins, but for a model spread over devices, which has batches sent to its first one"
    spread = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device='meta'))

    assert choose_device('meta', net()) == torch.device('meta')
    assert choose_device(None, nn.Linear(1, 1, device='meta')) == torch.device('meta')
    assert choose_device('cpu', spread) == torch.device('cpu') == devices(spread)[0]
    assert choose_device('cpu', nn.ReLU()) == torch.device('cpu') and devices(nn.ReLU()) == []


def test_move_leaves_a_spread_model_alone():
    "A model on several devices is not moved, and a warning says so"
    spread = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device='meta'))

    with pytest.warns(UserWarning, match='`Sequential` is spread over cpu, meta'): move(spread, torch.device('cpu'))

    assert [d.type for d in devices(spread)] == ['cpu', 'meta']


def test_move_calls_to_only_where_needed():
    "A model that is in place is not touched, one that is elsewhere is moved"
    class Counting(nn.Linear):
        def to(self, *args, **kwargs): raise AssertionError("moved without need")
    model = nn.Linear(1, 1)

    move(Counting(1, 1), torch.device('cpu'))
    move(model, torch.device('meta'))

    assert devices(model) == [torch.device('meta')]
