"""SwitchAt in fits that are stopped: they go on, here and in a new process, as if they had not been."""
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from learner.callbacks.checkpoint import Checkpoint
from learner.callbacks.switch import SwitchAt
from tests.resume_helpers import AskAt, Noisy, noisy_learner, record


class Flagged(Noisy):
    "Noise is added as long as `noisy`"
    noisy = True
    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return (x if self.noisy else 2*self.x[i] + .01*torch.randn(4)), y


def flagged_learner(path, workers):
    kwargs = dict(num_workers=workers, persistent_workers=workers > 0, shuffle=True)
    return noisy_learner(path, dls=(DataLoader(Flagged(), 8, **kwargs), DataLoader(Noisy(16), 8)))

def set_noisy(learn, noisy):
    "Changes data and model, and draws random numbers"
    learn.dls.train_ds.noisy = noisy
    learn.model[3].p = .3 if noisy else float(.1*torch.rand(1))
    with torch.no_grad(): learn.model[4].bias += torch.rand(2)

def run(learn, undo, *cbs, **kwargs):
    back = partial(set_noisy, noisy=True) if undo else None
    kwargs = dict(lr=1e-2) | kwargs
    learn.fit(4, cbs=[SwitchAt(-2, partial(set_noisy, noisy=False), back), Checkpoint(), *cbs], **kwargs)

# of 28 batches: five of training, two of validation, four times
@pytest.mark.parametrize('workers,at', [(0, 5), (0, 14), (0, 15), (0, 16), (0, 20), (0, 22), (0, 27), (2, 14), (2, 16),
                                        (2, 20)])
@pytest.mark.parametrize('undo', [True, False])
def test_resumed_anywhere(tmp_path, undo, at, workers):
    "Stopped before, at, in or after the switch it goes on bit for bit, here and in a new process"
    whole = flagged_learner(tmp_path/'whole', workers)
    run(whole, undo)

    here = flagged_learner(tmp_path/'here', workers)
    with pytest.raises(KeyboardInterrupt, match='stopped'): run(here, undo, AskAt(at))
    here.resume()
    stopped = flagged_learner(tmp_path/'there', workers)
    with pytest.raises(KeyboardInterrupt, match='stopped'): run(stopped, undo, AskAt(at))
    there = flagged_learner(tmp_path/'there', workers)
    run(there, undo, seen := AskAt(math.inf), resume=True)

    assert whole.final_hash == here.final_hash == there.final_hash
    assert record(whole) == record(here) == record(there)
    assert there.dls.train_ds.noisy is undo and seen.seen <= 28-at+2

@pytest.mark.parametrize('undo', [True, False])
def test_resumed_when_it_was_over(tmp_path, undo):
    "A fit that was over before is so: what it has switched is as it left it, and the weights are those of the file"
    whole = flagged_learner(tmp_path, 0)
    run(whole, undo)

    again = flagged_learner(tmp_path, 0)
    run(again, undo, resume=True)

    assert again.dls.train_ds.noisy is undo
    assert again.n_step == whole.n_step and again.model[0].weight.equal(whole.model[0].weight)

def test_refused_resume_leaves_nothing(tmp_path):
    "A checkpoint that is refused after `do` was called leaves nothing switched"
    with pytest.raises(KeyboardInterrupt): run(flagged_learner(tmp_path, 0), True, AskAt(22))
    learn = flagged_learner(tmp_path, 0)

    with pytest.raises(ValueError, match='learning rate'):
        run(learn, True, lr=1, resume=True)

    assert learn.dls.train_ds.noisy

def test_it_cannot_be_forgotten(tmp_path):
    "A checkpoint of a fit with a switch is not gone on with by one that lacks it"
    with pytest.raises(KeyboardInterrupt): run(flagged_learner(tmp_path, 0), True, AskAt(22))

    with pytest.raises(ValueError, match='`switch_at` is missing'):
        flagged_learner(tmp_path, 0).fit(4, 1e-2, cbs=Checkpoint(), resume=True)

def test_added_parameters_are_refused(tmp_path):
    "What a checkpoint holds of parameters that `do` adds is not known before: that is said, not left out"
    def fit(**kwargs):
        def do(learn):
            learn.model.append(nn.Linear(2, 2))
            learn.create_opt()
        noisy_learner(tmp_path).fit(3, 1e-2, cbs=[SwitchAt(1, do), Checkpoint(), *kwargs.pop('cbs', ())], **kwargs)
    with pytest.raises(KeyboardInterrupt): fit(cbs=[AskAt(10)])

    with pytest.raises(ValueError, match='model: this model has no 5.weight, 5.bias'): fit(resume=True)
