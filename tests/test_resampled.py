"""DataLoaders made from others."""
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from learner import DataLoaders, Learner
from learner.resampled import Repeated, remade
from tests.helpers import synth_learner, weights

x, y = torch.arange(40.).view(20, 2), torch.arange(20) % 2


@pytest.fixture
def dls():
    torch.manual_seed(0)
    return DataLoaders.from_tensors(x, y, valid=(x[:4], y[:4]), bs=4)

def items(dl): return [int(i) for xb, _ in dl for i in xb[:, 0]/2]


def test_items_are_drawn_by_weight(dls):
    "As many as before, with repetition; the rest of the DataLoaders is the same"
    new = dls.weighted_dataloaders([0]*15+[1, 1, 1, 1, 6])

    seen = items(new.train)+items(new.train)
    assert len(seen) == 40 and {*seen} == {15, 16, 17, 18, 19} and seen.count(19) > 15
    assert new.valid is dls.valid and new.loss_func is dls.loss_func and new.c == 2 and new.bs == 4
    assert len(items(dls.train)) == 20

@pytest.mark.parametrize('wgts', [[1]*19, [1]*19+[-1], [0]*20, [1]*19+[float('nan')]])
def test_weights_are_checked(dls, wgts):
    "One for each item, 0 or more, not all 0"
    with pytest.raises(ValueError, match='weights .* for 20 training items'): dls.weighted_dataloaders(wgts)

def test_epochs_of_a_part(dls):
    "Other items each epoch, none twice in one"
    new = dls.partial_dataloaders(8, bs=2)

    a, b = items(new.train), items(new.train)
    assert len({*a}) == len({*b}) == 8 and a != b and new.bs == 2

@pytest.mark.parametrize('n', [0, 21, 2.5, None])
def test_the_part_is_checked(dls, n):
    "A number of items that are there"
    with pytest.raises((ValueError, TypeError), match='partial_dataloaders: `partial_n` is'): dls.partial_dataloaders(n)

def test_a_network_learns_two_batches_by_heart():
    "Training goes through them for as many batches as before, validation once; what can learn gets them right"
    torch.manual_seed(0)
    dls = DataLoaders.from_tensors(torch.randn(20, 8), y, valid=(torch.randn(4, 8), y[:4]), bs=4)
    first = dls.first_batches(2)
    assert len(first.train) == len(dls.train) == 5 and len(first.valid) == 2
    assert [b[0][0, 0] for b in first.train] == [b[0][0, 0] for b in [*first.valid]*3][:5]
    learn = Learner(first, nn.Sequential(nn.Linear(8, 50), nn.ReLU(), nn.Linear(50, 2)), lr=1e-2,
                    default_cbs=dict(progress=None))

    learn.fit(30)

    assert learn.recorder.values[-1]['valid_loss'] < .01 < learn.recorder.values[0]['valid_loss']

def test_repeated_batches_are_copies():
    "A callback that changes one in place changes no later one"
    for b in Repeated([(torch.zeros(2),)], 3):
        assert b[0].sum() == 0
        b[0].fill_(1)

def test_first_batches_draw_nothing():
    "The random streams are as before"
    learn = synth_learner(shuffle=True)
    state = torch.get_rng_state()

    learn.dls.first_batches()

    assert torch.equal(state, torch.get_rng_state()) and len(weights(learn)) == 2

@pytest.mark.parametrize('dl', [[(x, y)], DataLoader(TensorDataset(x, y), batch_size=None)])
def test_what_draws_no_items_cannot_draw_others(dl):
    "An error that says what is needed"
    with pytest.raises(TypeError, match='mine needs a torch DataLoader'): remade(dl, 'mine', batch_size=2)

def test_first_batches_of_an_iterator():
    "They would be used up"
    with pytest.raises(TypeError, match='would use up'): DataLoaders(iter([(x, y)]), None).first_batches()
    with pytest.raises(ValueError, match='first_batches: `n` is 0'): DataLoaders([(x, y)], None).first_batches(0)
