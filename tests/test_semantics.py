"""What a fastai user runs into while training, each case as it should be: losses, windows, NaN, epochs, odd data."""
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from learner import (Callback, CancelBackwardException, Checkpoint, GradientAccumulation, Learner, ReduceLROnPlateau,
                     SaveModelCallback, TerminateOnNaNCallback)
from learner.metrics import mse
from learner.optim import SGD
from tests.helpers import raises, synth_dls, synth_learner, weights


def spoil(learn):
    with torch.no_grad(): learn.model.a.fill_(math.nan)

def items(n): return TensorDataset(torch.randn(n, 1), torch.randn(n, 1))


# ---- trackers

@pytest.mark.parametrize('metrics', [None, mse])
def test_an_evaluation_saves_no_model(tmp_path, metrics):
    "A permanent SaveModelCallback leaves the best model alone, though the weights are others by now"
    learn = synth_learner(save := SaveModelCallback(), path=tmp_path, metrics=metrics)
    learn.fit(1)
    best, saved = save.best, (tmp_path/'models'/'model.pth').read_bytes()
    spoil(learn)

    learn.validate()

    assert save.best == best and (tmp_path/'models'/'model.pth').read_bytes() == saved

@pytest.mark.parametrize('is_nan', [False, True])
def test_no_model_of_an_older_run_is_loaded(tmp_path, is_nan):
    "By a fit without epochs, or one that never had a finite loss, which a warning tells"
    synth_learner(path=tmp_path).save('model')
    learn = synth_learner(SaveModelCallback(), path=tmp_path)
    with torch.no_grad(): learn.model.a.fill_(math.nan if is_nan else 7.)
    before = learn.model.a.item()

    if is_nan:
        with pytest.warns(UserWarning) as told: learn.fit(1)
        assert any('no model was saved' in str(w.message) for w in told)
    else: learn.fit(0)

    assert learn.model.a.item() == before or is_nan and math.isnan(learn.model.a.item())

def test_it_tells_which_weights_are_loaded(tmp_path, capsys):
    "If they are not those of the last epoch"
    def told(values):
        left = iter(values)
        def score(pred, y): return next(left)
        synth_learner(SaveModelCallback('score', 'min'), path=tmp_path, metrics=score).fit(len(values))
        return [s for s in capsys.readouterr().out.splitlines() if 'weights' in s]

    assert told([3., 2., 4.]) == ['The weights are those after epoch 2 of 3, the best: `score` was 2']
    assert told([3., 2.]) == []

def test_a_plateau_and_a_schedule_are_refused():
    "They would set the learning rate against each other"
    learn = synth_learner(ReduceLROnPlateau())

    with pytest.raises(ValueError, match='both set `lr`'): learn.fit_one_cycle(1)

    assert not learn.n_step


# ---- gradients

def test_a_window_larger_than_the_data_is_stepped():
    "At the end of each epoch; nothing is left for the next fit"
    learn = synth_learner(GradientAccumulation(1000), n=3)

    learn.fit(2)

    assert learn.n_step == 2 and all(p.grad is None for p in learn.model.parameters())

def test_a_window_that_is_no_multiple_of_the_batch():
    "6 items in batches of 4: a step for 8, with their mean"
    x, y = torch.randn(8, 1, dtype=torch.float64), torch.randn(8, 1, dtype=torch.float64)
    def fitted(bs, *cbs):
        torch.manual_seed(0)
        dl = DataLoader(TensorDataset(x, y), bs)
        learn = Learner((dl, None), nn.Linear(1, 1).double(), nn.MSELoss(), SGD, lr=.1, cbs=cbs, default_cbs=False)
        learn.fit(3)
        return learn

    parts, whole = fitted(4, GradientAccumulation(6)), fitted(8)

    assert parts.n_step == whole.n_step == 3
    assert max(float((a-b).abs().max()) for a, b in zip(weights(parts), weights(whole))) < 1e-12

def test_no_step_without_a_backward_pass():
    "Not even one by weight decay or momentum"
    learn = synth_learner(n=4, opt_func=torch.optim.AdamW, wd=.5)
    learn.fit(1)
    before = weights(learn)

    learn.fit(1, cbs=Callback(before_backward=lambda cb: (_ for _ in ()).throw(CancelBackwardException)))

    assert learn.n_step == 4 and all(map(torch.equal, before, weights(learn)))

def test_a_nan_ends_the_fit_before_the_step(capsys):
    "Weights stay finite, and the epoch has its row"
    def bad(cb):
        if cb.training and cb.iter == 2: cb.learn.loss_grad, cb.learn.loss = cb.loss_grad*math.nan, cb.loss*math.nan
    learn = synth_learner([Callback(after_loss=bad), TerminateOnNaNCallback()], n=4)

    learn.fit(2)

    assert all(p.isfinite().all() for p in learn.model.parameters()) and learn.n_step == 2
    assert len(learn.recorder.values) == 1 and 'Stopped in epoch 1 of 2, batch 3' in capsys.readouterr().out

def test_a_nan_is_told_once():
    "Without that callback"
    learn = synth_learner(n=4)
    spoil(learn)

    with pytest.warns(UserWarning) as told: learn.fit(2)

    assert len([w for w in told if 'nan' in str(w.message).lower()]) == 1

def test_the_losses_of_a_row_are_means_over_items():
    "Of the epoch; the moving average has a name of its own"
    learn = synth_learner(n=4, lr=0.)
    losses = []
    learn.fit(2, cbs=Callback(after_loss=lambda cb: losses.append(cb.loss.item()) if cb.training else None))

    assert [row['train_loss'] for row in learn.recorder.values] == pytest.approx([sum(losses[:4])/4, sum(losses[4:])/4])
    assert learn.smooth_loss != learn.recorder.values[-1]['train_loss']


# ---- epochs

def test_a_start_beyond_the_end():
    "Is refused"
    with pytest.raises(ValueError, match='start_epoch=3'): synth_learner().fit(2, start_epoch=3)

def test_the_epoch_comes_from_the_checkpoint(tmp_path):
    "A fit that failed goes on there bit for bit, with dropout and shuffled data"
    def make(path, cbs=None):
        model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(.5), nn.Linear(8, 1))
        return synth_learner([Checkpoint(every='1it'), *(cbs or [])], n=3, shuffle=True, model=model, path=path)
    torch.manual_seed(1)
    whole = make(tmp_path/'whole')
    whole.fit_one_cycle(3)
    torch.manual_seed(1)
    with pytest.raises(OSError):
        make(tmp_path/'parts', [Callback(before_step=raises(OSError, nth=5))]).fit_one_cycle(3)

    learn = make(tmp_path/'parts')
    torch.manual_seed(99)
    learn.fit_one_cycle(3, resume=True)

    assert all(map(torch.equal, weights(whole), weights(learn)))
    assert [row['valid_loss'] for row in learn.recorder.values] == [
        row['valid_loss'] for row in whole.recorder.values][-len(learn.recorder.values):]


# ---- the parts of a Learner

def test_a_new_model_is_trained():
    "The optimizer is made for it"
    learn = synth_learner()
    learn.fit(1)
    learn.model = nn.Linear(1, 1)
    before = weights(learn)

    with pytest.warns(UserWarning, match='the optimizer is made anew, since `model` changed'): learn.fit(1)

    assert not any(map(torch.equal, before, weights(learn)))

def test_without_default_callbacks_it_trains():
    "The loop needs none"
    learn = synth_learner(default_cbs=False)
    before = weights(learn)

    learn.fit(1)

    assert not any(map(torch.equal, before, weights(learn)))

@pytest.mark.parametrize('train, valid, name', [
    (DataLoader(items(3), 8, drop_last=True), None, 'train'), (synth_dls()[0], DataLoader([], 8), 'valid'),
    ([], None, 'train')])
def test_loaders_without_a_batch(train, valid, name):
    "Are refused by name, by a fit as by `lr_find`"
    learn = synth_learner(dls=(train, valid))

    with pytest.raises(ValueError, match=f'the {name} loader g[ai]ve'): learn.fit(1)
    if name == 'train':
        with pytest.raises(ValueError, match='the train loader g[ai]ve'): learn.lr_find()

    assert not learn.n_step
