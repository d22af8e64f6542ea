"""Batches of every structure are split right, trained on and validated on; and the losses they may have."""
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from learner.callback import Callback
from learner.data import DataLoaders
from learner.events import CancelBatchException
from learner.learner import Learner
from tests.helpers import RegModel, synth_learner, weights


class TwoIn(nn.Module):
    def __init__(self): super().__init__(); self.lin = nn.Linear(1, 1)
    def forward(self, a, b): return self.lin(a+b)

class TwoOut(nn.Module):
    def __init__(self): super().__init__(); self.lin = nn.Linear(1, 2)
    def forward(self, x): return tuple(self.lin(x).split(1, 1))

class ByName(nn.Module):
    def __init__(self): super().__init__(); self.lin = nn.Linear(1, 1)
    def forward(self, x, scale=1.): return {'out': self.lin(x)*scale}

class OwnLoss(nn.Module):
    def __init__(self): super().__init__(); self.lin = nn.Linear(1, 1)
    def forward(self, x, labels=None):
        @dataclass
        class Output:
            logits: torch.Tensor
            loss: torch.Tensor
        out = self.lin(x)
        return Output(out, F.mse_loss(out, labels))

class Mapped(nn.Module):
    def __init__(self): super().__init__(); self.lin = nn.Linear(1, 1)
    def forward(self, d): return self.lin(d['x'])

@dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor

t = torch.arange(12.).reshape(4, 3)[:, :1]
def mean(pred): return pred.abs().mean()
def two(pred, y1, y2): return F.mse_loss(pred[0], y1) + F.mse_loss(pred[1], y2)
def out_mse(pred, y): return F.mse_loss(pred['out'], y)

@pytest.mark.parametrize('batch, model, loss_func, n_inp, n_yb', [
    ((t, t), RegModel, F.mse_loss, None, 1), ([t, t], RegModel, F.mse_loss, None, 1), ((t, t, t), TwoIn, F.mse_loss,
                                                                                       None, 1),
    ((t, t, t), TwoOut, two, 1, 2), (t, RegModel, mean, None, 0), ((t,), RegModel, mean, None, 0),
    ({'x': t, 'y': t}, ByName, out_mse, None, 1), ({'x': t, 'scale': 2., 'label': t}, ByName, out_mse, None, 1),
    ({'x': t, 'labels': t}, OwnLoss, None, None, 0), ({'x': t, 'other': t}, ByName, out_mse, None, 1),
    (({'x': t}, t), Mapped, F.mse_loss, None, 1), (Batch(t, t), ByName, out_mse, None, 1)],
    ids=['tuple', 'list', 'two inputs', 'two targets', 'tensor', 'one', 'dict', 'dict label', 'own loss',
         'unnamed target',
         'dict and tensor', 'dataclass'])
def test_n25_batches_of_every_structure(batch, model, loss_func, n_inp, n_yb):
    "Whatever the structure of a batch, it is split right and trained on, and validated on (N25)"
    class Look(Callback):
        def before_batch(self): self.n = len(self.yb)
    learn = synth_learner(Look, dls=DataLoaders([batch]*2, [batch]), model=model(), loss_func=loss_func, n_inp=n_inp,
                          lr=.1)
    before = weights(learn)

    learn.fit(1)

    assert learn.look.n == n_yb and not before[0].equal(weights(learn)[0])
    assert learn.recorder.values[0]['valid_loss'] >= 0 and all(m[0] == 4 for m in learn.recorder.train.marks)

def test_bare_tensor_is_the_whole_input():
    "A bare tensor is one input, not a row for each argument"
    shapes = []
    learn = synth_learner(Callback(after_pred=lambda cb: shapes.append(tuple(cb.x.shape))), dls=[torch.randn(4, 1)],
                          loss_func=mean)

    learn.fit(1)

    assert shapes == [(4, 1)]

def test_emptied_targets_skip_the_loss():
    "A callback that empties `yb` skips loss, backward and step, also if the loss could be called without"
    learn = synth_learner(Callback(before_batch=lambda cb: setattr(cb.learn, 'yb', ())), loss_func=lambda pred,
                          y=None: F.mse_loss(pred, y))
    before = weights(learn)

    learn.fit(1)

    assert all(p.equal(q) for p, q in zip(before, weights(learn))) and learn.n_step == 0
    assert learn.history.train_loss.isna().all()

def test_no_loss_in_evaluation_is_no_error():
    "An evaluation on data without targets runs without a loss"
    seen = []
    learn = synth_learner(Callback(after_batch=lambda cb: seen.append((cb.loss, cb.pred.shape))))

    learn.validate(dl=[t, t])

    assert seen == [(None, (4, 1))]*2

def test_loss_of_parts():
    "A loss that returns a dict of scalars is summed, and its parts are recorded, weighted by items"
    def loss(pred, y): return {'fit': F.mse_loss(pred, y), 'size': .1*pred.abs().mean()}
    learn = synth_learner(loss_func=loss, n=3)

    learn.fit(1)

    row = learn.recorder.values[0]
    assert row.names == ('train_loss', 'train_fit', 'train_size', 'valid_loss', 'valid_fit', 'valid_size')
    assert row['train_loss'] == pytest.approx(row['train_fit'] + row['train_size'])
    assert row['valid_loss'] == pytest.approx(row['valid_fit'] + row['valid_size'])
    assert list(learn.history)[2:] == ['train_loss', 'smooth_loss', *row.names[1:], 'time', 'lr', 'mom', 'wd']

def test_loss_from_the_data():
    "Without `loss_func`, the data's own is used"
    ds = TensorDataset(t, t)
    ds.loss_func = F.l1_loss
    learn = Learner((DataLoader(ds, 2), None), RegModel(), default_cbs=False)

    assert learn.loss_func is F.l1_loss

def test_prediction_set_before_a_cancel_is_gathered():
    "A cancelled batch is never recorded with stale values, but a prediction that a callback made counts"
    def own(cb):
        cb.learn.pred = torch.zeros_like(cb.y)
        raise CancelBatchException
    def size(pred, y): return pred.abs().mean()
    learn = synth_learner(metrics=size, n_valid=2)

    row = learn.validate(cbs=Callback(before_batch=own))

    assert row['size'] == 0 and row['valid_loss'] != row['valid_loss']
