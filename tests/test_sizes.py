"""sizes.py: what a model gives for a dummy image, without a trace."""
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from learner.models import xresnet18
from learner.sizes import dummy_eval, in_channels, model_sizes, num_features_model
from learner.utils import rng_state
from learner.weights import weights_of


def body(*first): return nn.Sequential(*first, nn.Conv2d(6, 8, 3, groups=2), nn.BatchNorm2d(8), nn.ReLU())


class Counting(nn.Module):
    "Changes a buffer whenever it is called, and draws"
    def __init__(self):
        super().__init__()
        self.register_buffer('n', torch.zeros(()))

    def forward(self, x):
        self.n += 1
        return x + torch.rand(()) + torch.rand(1).item()


class Large(nn.Module):
    "Takes no small images"
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 1)

    def forward(self, x):
        if x.shape[-1] < 100: raise RuntimeError("too small")
        return self.conv(x)


def test_model_sizes():
    "The shapes of the children's outputs for one image of that size, derived by hand"
    assert model_sizes(body(), (10, 12)) == [(1, 8, 8, 10)]*3

@pytest.mark.parametrize('m, size, wanted', [
    (nn.Sequential(nn.Conv1d(4, 8, 3), nn.AdaptiveAvgPool1d(1)), (20,), [(1, 8, 18), (1, 8, 1)]),
    (nn.Sequential(nn.ConvTranspose2d(4, 2, 2, 2)), (5, 5), [(1, 2, 10, 10)]),
    (nn.Sequential(spectral_norm(nn.Conv2d(4, 2, 1))), (5, 5), [(1, 2, 5, 5)])])
def test_other_convolutions(m, size, wanted):
    "Sequences, transposed and parametrized convolutions are understood too"
    assert model_sizes(m, size) == wanted

def test_children_that_are_not_called_or_give_several():
    "None stands for a child that is not called, a tuple of shapes for one that gives a tuple"
    m = body()
    m.add_module('pool', nn.MaxPool2d(2, return_indices=True))
    m.unused = nn.Linear(2, 2)
    m.forward = lambda x: m.pool(m[2](m[1](m[0](x))))

    assert model_sizes(m, (6, 6))[3:] == [((1, 8, 2, 2), (1, 8, 2, 2)), None]

@pytest.mark.parametrize('m, n', [(body(), 8), (xresnet18(10)[:-4], 512), (Large(), 5)])
def test_num_features_model(m, n):
    "The channels of the output, with an image as large as the model needs"
    assert num_features_model(m) == n

def test_nothing_is_left():
    "Modes, buffers, weights and random streams are as before"
    m = body(spectral_norm(nn.Conv2d(3, 6, 3)), Counting())
    m[3].eval()
    before, modes = {k: v.clone() for k, v in weights_of(m).items()}, [o.training for o in m.modules()]
    rng = rng_state()['torch']

    assert dummy_eval(m).shape == (1, 8, 60, 60)
    assert model_sizes(m)[-1] == (1, 8, 60, 60) and num_features_model(m) == 8

    assert torch.equal(rng, rng_state()['torch']) and modes == [o.training for o in m.modules()]
    assert all(torch.equal(v, before[k]) for k, v in weights_of(m).items())
    assert not any(o._forward_hooks or o._forward_pre_hooks for o in m.modules() if type(o) is not nn.Conv2d)

@pytest.mark.parametrize('m, match', [(nn.Linear(2, 3), '`Linear` has no convolution'),
                                      (nn.Sequential(nn.LazyConv2d(2, 3)), 'a `LazyConv2d`, knows its channels after')])
def test_channels_that_nobody_knows(m, match):
    "What the model takes is not guessed"
    with pytest.raises(ValueError, match=match): in_channels(m)

def test_models_own_error():
    "A model that takes no image raises its own error; one that gives no channels is told about"
    with pytest.raises(RuntimeError, match='expected input'): num_features_model(body(nn.Conv2d(3, 5, 1)))
    with pytest.raises(ValueError, match=r'returns \(float32'):
        num_features_model(nn.Sequential(nn.Conv2d(3, 5, 1), nn.MaxPool2d(2, return_indices=True)))


def test_a_model_without_parameters_has_no_channels():
    "The error says so"
    with pytest.raises(ValueError, match='no convolution'): num_features_model(nn.Sequential(nn.Flatten()))

def test_size_is_without_channels():
    "A number is a square; the channels are no part of it"
    conv = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1))

    assert model_sizes(conv, 8) == [(1, 4, 8, 8)]
    with pytest.raises(ValueError, match='3 numbers for a `Conv2d`; give 2, without the channels'):
        model_sizes(conv, (3, 8, 8))
