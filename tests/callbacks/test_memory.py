"""EmptyCacheCallback: cached memory goes back to the device when it is asked to, and nothing else changes."""
import pytest
import torch

from learner.callback import Callback
from learner.callbacks.memory import EmptyCacheCallback
from tests.helpers import synth_learner, weights

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')]


@pytest.mark.parametrize('kwargs,at', [
    ({}, ['after_epoch']), (dict(before_epoch=True, after_epoch=False), ['before_epoch']),
    (dict(after_batch=True, after_epoch=False), ['after_batch']*3),
    (dict(before_epoch=True, after_batch=True), ['before_epoch', *['after_batch']*3, 'after_epoch'])])
def test_when(monkeypatch, kwargs, at):
    "The device's own function is called at the chosen places, batches of validation included, in fits only"
    seen = []
    learn = synth_learner(EmptyCacheCallback(**kwargs))
    monkeypatch.setattr(torch.cpu, 'empty_cache', lambda: seen.append(learn._at_work[1]), raising=False)

    learn.fit(1)
    learn.validate()

    assert seen == at

def test_without_an_accelerator():
    "On a CPU it says once that there is nothing to free, and trains as ever"
    whole, learn = synth_learner(), synth_learner(EmptyCacheCallback(True, True, True))
    whole.fit(2)

    with pytest.warns(UserWarning, match='EmptyCacheCallback: there is no accelerator.*the fit is on `cpu`') as told:
        for _ in range(2): learn.fit(1)

    assert len(told) == 1
    assert all(map(torch.equal, weights(learn), weights(whole)))

def test_nothing_chosen():
    "One that would do nothing is refused"
    with pytest.raises(ValueError, match='before_epoch, after_epoch, after_batch are all False'):
        EmptyCacheCallback(after_epoch=False)

@pytest.mark.parametrize('name', [pytest.param('after_epoch', marks=gpu), pytest.param('after_batch', marks=gpu)])
def test_gpu_memory_is_given_back(name):
    "What torch has reserved and does not use is the device's again"
    reserved = []
    def fill(cb):
        torch.empty(2**28, device=cb.device)
        look(cb)
    def look(cb): reserved.append(torch.cuda.memory_reserved(cb.device))
    before, after = Callback(**{name: fill}), Callback(**{name: look})
    after.order = 1001
    learn = synth_learner([before, EmptyCacheCallback(**{'after_epoch': False, name: True}), after])

    learn.fit(1)

    assert reserved[0] - reserved[1] >= 2**28
