"""The largest batch size with which training steps fit in memory."""
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from learner import Learner
from learner.callbacks import batch_size
from learner.optim import Adam
from tests.helpers import synth_learner


tried: list[int] = []  # sizes, not part of the model, which is put back

@pytest.fixture(autouse=True)
def fresh(): tried.clear()


class Full(nn.Module):
    "Memory is full beyond `limit` items in a batch"
    def __init__(self, limit, error=None):
        super().__init__()
        self.lin, self.limit = nn.Linear(1, 1), limit
        self.error = error or torch.OutOfMemoryError('CUDA out of memory')

    def forward(self, x):
        tried.append(len(x))
        if len(x) > self.limit: raise self.error
        return self.lin(x)

def learner(model, n=100, bs=8):
    data = TensorDataset(torch.randn(n, 1), torch.randn(n, 1))
    return Learner((DataLoader(data, bs, shuffle=True), None), model, nn.MSELoss(), Adam, default_cbs=False)


@pytest.mark.parametrize('limit, expected, sizes', [
    (40, 32, [8, 16, 32, 64]), (3, 2, [8, 4, 2]), (1000, 100, [8, 16, 32, 64, 100]), (1, 1, [8, 4, 2, 1])])
def test_doubled_until_it_is_too_much(limit, expected, sizes, capsys):
    "Or halved until it fits; at most all items"
    assert learner(Full(limit)).find_batch_size() == expected
    assert [*dict.fromkeys(tried)] == sizes and tried.count(sizes[-2] if limit == 40 else expected) == 3
    assert capsys.readouterr().out.startswith(f'find_batch_size: {expected} items, ')

@pytest.mark.parametrize('error', [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"),
                                   RuntimeError('MPS backend out of memory')])
def test_whatever_says_that_memory_is_full(error):
    "Each backend has its own error"
    assert learner(Full(20, error)).find_batch_size(start=4) == 16

def test_limits_are_kept():
    "`start` and `most`"
    assert learner(Full(1000)).find_batch_size(start=3, most=20, n_steps=2) == 20
    assert tried == [3, 3, 6, 6, 12, 12, 20, 20]

def test_nothing_is_changed():
    "Weights, optimizer and random streams are as before"
    learn = learner(Full(40))
    learn.fit(1)
    before = learn.state_hash(), torch.get_rng_state().tolist()

    learn.find_batch_size()

    assert (learn.state_hash(), torch.get_rng_state().tolist()) == before and learn.dls.bs == 8

def test_other_errors_are_raised():
    "And memory that is too small for a single item"
    with pytest.raises(ZeroDivisionError): learner(Full(20, ZeroDivisionError())).find_batch_size()
    with pytest.raises(torch.OutOfMemoryError): learner(Full(0)).find_batch_size()

def test_the_machine_is_not_filled(monkeypatch):
    "On a CPU it stops before what may end the process"
    peak = [0]
    monkeypatch.setattr(batch_size, '_peak', lambda: peak[0])
    model = Full(1000)
    learn = learner(model)
    forward = model.forward
    def grows(x):
        peak[0] = max(peak[0], len(x)*2**40)
        return forward(x)
    model.forward = grows

    assert learn.find_batch_size() == 8

@pytest.mark.parametrize('kwargs', [dict(start=0), dict(most=1.5), dict(n_steps=True)])
def test_odd_numbers(kwargs):
    "Refused by name"
    with pytest.raises((ValueError, TypeError), match=f'find_batch_size: `{[*kwargs][0]}`'):
        learner(Full(9)).find_batch_size(**kwargs)

def test_a_list_of_batches_has_no_size():
    "It cannot be made anew"
    with pytest.raises(TypeError, match='find_batch_size needs a torch DataLoader'):
        synth_learner(dls=([(torch.randn(8, 1), torch.randn(8, 1))], None)).find_batch_size()
