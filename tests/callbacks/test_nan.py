"""TerminateOnNaNCallback: bad losses and gradients end the fit before they get into the weights."""
import math
import re

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from learner.callback import Callback
from learner.callbacks.csv_logger import CSVLogger
from learner.callbacks.precision import MixedPrecision
from learner.callbacks.tracker import EarlyStoppingCallback, SaveModelCallback, TerminateOnNaNCallback
from learner.callbacks.training import GradientAccumulation, GradientClip
from learner.events import CancelBatchException, CancelStepException
from learner.learner import Learner
from tests.helpers import synth_dls, synth_learner, weights

nan, inf = math.nan, math.inf
both = pytest.mark.parametrize('bad', [nan, inf, -inf])


class Spoil(Callback):
    "Makes the loss, or a gradient, of one training batch bad"
    run_valid = False
    def __init__(self, what, bad=nan, at=(1, 2)): self.what, self.bad, self.at = what, bad, at
    def before_batch(self):
        if self.what == 'loss' and (self.epoch, self.iter) == self.at: self.learn.yb = (self.y*self.bad,)
    def after_backward(self):
        if self.what == 'gradient' and (self.epoch, self.iter) == self.at: self.model.b.grad.fill_(self.bad)

class Keeps(Callback):
    "Keeps the weights after each step"
    def __init__(self): self.seen = []
    def after_step(self): self.seen.append(weights(self.learn))

def spoilt(*cbs, **kwargs): return synth_learner([Keeps(), *cbs, TerminateOnNaNCallback()], n=4, **kwargs)


@both
@pytest.mark.parametrize('what, told', [
    ('loss', 'the loss is (nan|inf)'), ('gradient', 'the gradient of `b` is not finite')])
def test_ends_before_the_step(what, told, bad, capsys):
    "The weights are those of the step before, and finite; a line says epoch, batch and what; it has its own name"
    learn = spoilt(Spoil(what, bad))

    learn.fit(3)
    reason = learn.terminate_on_nan.reason

    assert re.fullmatch(f'epoch 2 of 3, batch 3 of 4: {told}', reason)
    assert capsys.readouterr().out == f'Stopped in {reason}; the weights are those before its step\n'
    assert len(learn.keeps.seen) == 6 and all(map(torch.equal, weights(learn), learn.keeps.seen[-1]))
    assert all(p.grad is None for p in learn.model.parameters())

def test_gradient_of_a_root():
    "A finite loss whose gradient is NaN, as of a root at 0, is found before the step"
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.zeros(1))
        def forward(self, x): return (self.a*0*x).abs().sqrt()
    learn = synth_learner(TerminateOnNaNCallback, model=Root())

    learn.fit(1)

    assert 'gradient of `a` is not finite' in learn.terminate_on_nan.reason and weights(learn)[0] == 0

@pytest.mark.parametrize('at, mean', [((0, 0), False), ((1, 2), True)])
def test_row_of_the_epoch_so_far(at, mean, tmp_path):
    "The Recorder, and the file of CSVLogger, have a row with the losses before the bad batch; nothing is validated"
    learn = spoilt(Spoil('loss', at=at), CSVLogger, path=tmp_path)

    learn.fit(3)
    row, losses = learn.recorder.values[-1], learn.recorder.raw_losses

    assert len(learn.recorder.values) == at[0]+1 == len(learn.csv_logger.read_log()) and math.isnan(row['valid_loss'])
    assert len(losses) == at[0]*4+at[1] and all(map(math.isfinite, losses))
    assert math.isfinite(row['train_loss']) == mean and (not mean or row['train_loss'] == pytest.approx(
        sum(losses[4:])/2))
    assert learn.history['epoch'].tolist() == [*range(at[0]+1)]

def test_best_model_is_loaded(tmp_path):
    "Trackers look at that row as at any, and the best model is loaded as after any cancelled fit"
    learn = spoilt(Spoil('loss', at=(2, 1)), SaveModelCallback(), EarlyStoppingCallback(patience=9), path=tmp_path,
                   lr=.01)

    learn.fit(3)

    assert all(map(torch.equal, weights(learn), learn.keeps.seen[7])) and learn.early_stopping.best is not None

@pytest.mark.parametrize('what', ['loss', 'gradient'])
def test_accumulated_gradients(what):
    "While gradients are gathered a bad loss is found at its batch, a bad gradient before the window's step"
    learn = spoilt(Spoil(what, at=(0, 2)), GradientAccumulation(16))

    learn.fit(1)

    assert learn.n_step == 1 and f'batch {3 if what == "loss" else 4} of' in learn.terminate_on_nan.reason
    assert not learn.keep_grads and all(w.isfinite().all() for w in weights(learn))

@both
@pytest.mark.parametrize('by', ['norm', 'adaptive'])
def test_clipping_hides_nothing(bad, by):
    "What clipping makes of a bad gradient is found too"
    learn = spoilt(Spoil('gradient', bad), GradientClip(1., by=by))

    learn.fit(2)

    assert learn.terminate_on_nan.reason and all(w.isfinite().all() for w in weights(learn))

def test_skipped_steps_are_not_looked_at():
    "A step that another callback leaves out, as a loss scaler does, may have had any gradient"
    def skipped(cb):
        if not cb.model.b.grad.isfinite(): raise CancelStepException
    skip = Callback(before_step=skipped)
    skip.order = 10
    learn = spoilt(Spoil('gradient'), skip)

    learn.fit(2)

    assert not learn.terminate_on_nan.reason and len(learn.recorder.values) == 2 and learn.n_step == 7

def test_mixed_precision():
    "Steps that the scaler leaves out while it finds its scale end nothing; a loss that no scale could mend does"
    learn = spoilt(Spoil('loss'), MixedPrecision(init_scale=2.**127))

    with pytest.warns(UserWarning, match='gradients (are|were) inf or nan'): learn.fit(2)

    assert 'epoch 2 of 2, batch 3 of 4: the loss is nan' in learn.terminate_on_nan.reason
    assert 0 < learn.n_step < 6 and all(w.isfinite().all() for w in weights(learn))

def test_cancelled_batch_is_told_too():
    "A bad loss counts although the batch was cancelled after it"
    def cancelled(cb):
        if not cb.loss.isfinite(): raise CancelBatchException
    learn = spoilt(Spoil('loss'), Callback(before_backward=cancelled))

    learn.fit(2)

    assert 'batch 3 of 4: the loss is nan' in learn.terminate_on_nan.reason

def test_other_runs_are_left_alone():
    "Evaluations with a bad loss are not ended; nor is the next fit, which has no reason"
    learn = spoilt(Spoil('loss'), loss_func=lambda p, y: mse_loss(p, y)*(1 if torch.is_grad_enabled() else nan))

    value = learn.validate()[0]
    learn.fit(2)
    first = learn.terminate_on_nan.reason
    learn.remove_cb(Spoil)
    learn.loss_func = mse_loss
    learn.fit(1)

    assert math.isnan(value) and first and not learn.terminate_on_nan.reason and len(learn.recorder.values) == 1

def test_large_gradients_are_fine():
    "What is finite is, also where its square is not: half precision and sparse gradients too"
    class Big(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(4, 1, sparse=True)
            self.small = nn.Parameter(torch.zeros(2).half())
        def forward(self, x): return self.emb(x.long().abs() % 4)[..., 0] + (6e4*self.small).sum().float()
    def loss(pred, y): return pred.mean()
    learn = synth_learner(TerminateOnNaNCallback, model=Big(), loss_func=loss, opt_func=torch.optim.SGD, lr=1e-9)

    learn.fit(1)

    assert not learn.terminate_on_nan.reason and learn.n_step == 2

def test_without_recorder():
    "It needs no Recorder"
    learn = spoilt(Spoil('loss'), default_cbs=False)

    learn.fit(2)

    assert learn.n_step == 6

def test_processes_agree():
    "Where another process has found something, all end"
    class Together(Learner):
        def agree(self, flag): return self.n_step == 3
    learn = Together(synth_dls(4), nn.Linear(1, 1), mse_loss, default_cbs=False, cbs=TerminateOnNaNCallback)

    learn.fit(2)

    assert learn.n_step == 3 and 'another process' in learn.terminate_on_nan.reason
