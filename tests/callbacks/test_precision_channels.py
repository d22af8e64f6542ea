"""Channels last: how weights, inputs and the optimizer's state lie in memory, and that nothing else changes."""
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from learner.callback import Callback
from learner.callbacks.channels import ChannelsLast
from learner.callbacks.checkpoint import Checkpoint
from learner.callbacks.precision import MixedPrecision
from learner.callbacks.training import GradientAccumulation
from learner.optim import SGD, Adam
from tests.helpers import raises, synth_learner, weights
from tests.resume_helpers import AskAt, noisy_learner


class Images(nn.Module):
    "A convolution and a linear layer; notes how its input lies in memory"
    def __init__(self, dims=2):
        super().__init__()
        self.conv = (nn.Conv3d if dims == 3 else nn.Conv2d)(3, 4, 3)
        self.head, self.seen = nn.Linear(4, 1), set()
        self.bias = nn.Parameter(torch.zeros(1, 4, *[3]*dims))  # no convolution's

    def forward(self, x):
        self.seen.add((is_last(x), is_last(self.conv.weight), is_last(self.bias)))
        return self.head((self.conv(x)+self.bias).flatten(2).mean(2))


def is_last(t): return t.is_contiguous(memory_format=torch.channels_last if t.ndim == 4 else torch.channels_last_3d)


def learner(cbs=None, dims=2, **kwargs):
    torch.manual_seed(0)
    x = torch.randn(24, 3, *[5]*dims)
    data = TensorDataset(x, x.flatten(1).sum(1, keepdim=True)/9)
    return synth_learner(cbs, dls=(DataLoader(data, 8), DataLoader(data, 8)), model=Images(dims), lr=.01, **kwargs)


def layout(learn):
    state = learn.opt.opt.state
    return [(w.is_contiguous(), *(t.is_contiguous() for t in state[w].values() if torch.is_tensor(t)))
            for w in learn.model.parameters()]


@pytest.mark.parametrize('dims', [2, 3])
def test_during_a_run_and_afterwards(dims):
    "Inputs and convolutions, and no other weights, have channels last in training and evaluation, and not afterwards"
    learn = learner(ChannelsLast(), dims)

    learn.fit(1)
    learn.validate()

    assert learn.model.seen == {(True, True, False)}
    assert {c for row in layout(learn) for c in row} == {True}

@pytest.mark.parametrize('opt_func', [Adam, partial(SGD, mom=.9), torch.optim.AdamW], ids=['Adam', 'SGD', 'AdamW'])
def test_training_is_the_same(opt_func):
    "Fit after fit, with the callback and without, the weights are those of a Learner without it, but for rounding"
    learn, plain = learner(opt_func=opt_func), learner(opt_func=opt_func)
    momenta = []
    look = Callback(after_step=lambda cb: momenta.extend(
        t.stride() == w.stride() == w.grad.stride() for w in cb.model.parameters()
        for t in cb.opt.opt.state[w].values() if t.shape == w.shape))

    for k in range(4):
        if k % 2: learn.to_channelslast(use_amp=False)
        else: learn.to_contiguous()
        learn.fit(1, cbs=look if k % 2 else None)
        plain.fit(1)

    assert all(torch.allclose(a, b, 1e-3, 1e-5) for a, b in zip(weights(learn), weights(plain)))
    assert momenta and all(momenta)

def resumable(path, cbs):
    torch.manual_seed(0)
    x = torch.randn(40, 3, 5, 5)
    dls = DataLoader(TensorDataset(x, (x.sum((1, 2, 3)) > 0).long()), 8, shuffle=True), None
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(36, 2))
    return noisy_learner(path, dls, model, cbs=[*cbs, GradientAccumulation(2, 'batches')])

def stopped(path, at, cbs):
    learn = resumable(path, cbs)
    with pytest.raises(KeyboardInterrupt): learn.fit(3, 1e-2, cbs=[Checkpoint(), AskAt(at)])
    return learn

@pytest.mark.parametrize('at', [4, 8])
def test_resuming_is_exact(tmp_path, at):
    "A fit that was stopped, within an accumulation window too, goes on bit for bit in another process"
    whole = resumable(tmp_path/'whole', [ChannelsLast()])
    whole.fit(3, 1e-2)
    here = stopped(tmp_path/'here', at, [ChannelsLast()])

    there = resumable(tmp_path/'here', [ChannelsLast()])
    there.fit(3, 1e-2, cbs=Checkpoint(), resume=True)
    here.resume()

    assert whole.final_hash == here.final_hash == there.final_hash

@pytest.mark.parametrize('at', [5, 8, 9])
def test_going_on_with_a_fit_that_was_without(tmp_path, at):
    "What a file holds of gradients and momenta is brought in line with the weights: the same result, but for rounding"
    whole = resumable(tmp_path/'whole', [])
    whole.fit(3, 1e-2)
    stopped(tmp_path/'here', at, [])

    there = resumable(tmp_path/'here', [ChannelsLast()])
    there.fit(3, 1e-2, cbs=Checkpoint(), resume=True, allow={'callbacks'})

    assert all(torch.allclose(a, b, 1e-3, 1e-5) for a, b in zip(weights(there), weights(whole)))

@pytest.mark.parametrize('event', ['before_batch', 'after_loss', 'before_step', 'after_epoch'])
@pytest.mark.parametrize('ex', [KeyboardInterrupt, ValueError])
def test_error(event, ex):
    "Whatever ends a fit, memory is afterwards as before"
    learn = learner(ChannelsLast())
    learn.fit(1)

    with pytest.raises(ex): learn.fit(1, cbs=Callback(**{event: raises(ex('stop'))}))

    assert {c for row in layout(learn) for c in row} == {True}

def test_lr_find():
    "The finder too works so, and leaves no trace"
    learn = learner(ChannelsLast())
    learn.fit(1)
    before = learn.state_hash()

    learn.lr_find(num_it=8, show_plot=False, suggest_funcs=None)

    assert learn.state_hash() == before and {c for row in layout(learn) for c in row} == {True}

def test_methods():
    "fastai's: mixed precision comes along unless it is there or not wanted; `to_contiguous` ends it, and is harmless"
    learn = learner()

    learn.to_contiguous().to_channelslast().to_channelslast(amp_mode='bf16')
    assert learn.channels_last and learn.mixed_precision.dtype is torch.float16
    learn.to_contiguous()
    assert not hasattr(learn, 'channels_last') and learn.mixed_precision
    learn.to_channelslast().to_contiguous(to_fp32=True).to_channelslast(use_amp=False)
    assert learn.channels_last and not learn.cbs.filter(lambda cb: isinstance(cb, MixedPrecision))
