"""`forward_context`: a fresh context around the forward and around the loss, and around nothing else."""
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from learner.callback import Callback
from tests.helpers import RegModel, raises, synth_learner


def test_forward_context_is_entered_once_for_forward_and_loss():
    "`forward_context` wraps forward and loss, each with a fresh context, and no event"
    entered = []
    class Context:
        def __enter__(self): entered.append(self)
        def __exit__(self, *args): entered.remove(self)
    inside, total = [], []
    class Model(RegModel):
        def forward(self, x): inside.append(len(entered)); total.extend(entered); return super().forward(x)
    def loss(pred, y): inside.append(len(entered)); total.extend(entered); return F.mse_loss(pred, y)
    learn = synth_learner(Callback(after_pred=lambda cb: inside.append(len(entered))), model=Model(), loss_func=loss,
                          n=1, n_valid=0)
    learn.forward_context = Context

    learn.fit(1)

    assert inside == [1, 0, 1] and len(set(map(id, total))) == 2

def test_autocast_as_forward_context():
    "autocast given as a factory computes in bfloat16 within the forward, and is off afterwards, also after an error"
    types = []
    learn = synth_learner(Callback(after_pred=lambda cb: types.append(cb.pred.dtype)), model=nn.Linear(1, 1), n=1,
                          loss_func=lambda p, y: F.mse_loss(p.float(), y))
    learn.forward_context = partial(torch.autocast, 'cpu', torch.bfloat16)

    learn.fit(1)
    with pytest.raises(ValueError): learn.fit(1, cbs=Callback(after_pred=raises(ValueError)))

    assert types[0] == torch.bfloat16 and not torch.is_autocast_enabled('cpu')
