"""`get_preds` of odd loaders, models and losses: complete, in order, and right item by item."""
import pytest
import torch
from fastcore.basics import noop
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler, TensorDataset

from learner import (Callback, CancelEpochException, CancelFitException, CancelValidException, MixUp, ModelResetter)
from learner.losses import item_losses
from tests.callbacks.test_preds import by_hand, classifier, data, x, y


# ---- odd loaders

class Numbers(Sampler):
    "Gives tensors, some of them twice, and counts how often it is drawn from"
    def __init__(self): self.n = 0
    def __len__(self): return 5
    def __iter__(self):
        self.n += 1
        return iter(torch.tensor([3, 1, 1, 3, 2]))

class Fetches(torch.utils.data.Dataset):
    "Makes batches itself, of a list of numbers"
    def __len__(self): return 10
    def __getitem__(self, i): return data[i]

odd_loaders = dict(
    batch_sampler=(lambda: DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 4, True)), range(10)),
    kept=(lambda: DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 4, False)), range(10)),
    in_place=(lambda: DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 4, False)), range(10)),
    tensors=(lambda: DataLoader(data, 2, sampler=Numbers()), [1, 2, 3]),
    itself=(lambda: DataLoader(Fetches(), None, sampler=BatchSampler(RandomSampler(data), 4, True)), range(10)))

@pytest.mark.parametrize('make, expected', odd_loaders.values(), ids=odd_loaders)
def test_odd_loaders_are_read_in_order(make, expected):
    "Whoever shuffles and drops; a sampler stays as it was"
    dl = make()
    learn = classifier()

    preds, targs = learn.get_preds(dl=dl, act=noop)

    assert torch.equal(targs, y[[*expected]]) and torch.allclose(preds, by_hand(learn.model)[[*expected]], atol=1e-6)
    assert getattr(dl.sampler, 'n', 0) == 0

# ---- odd models

def test_a_dict_for_each_item():
    "As of models that detect: joined item by item, with the loss of each"
    class Finds(nn.Module):
        def __init__(self): super().__init__(); self.w = nn.Parameter(torch.ones(()))
        def forward(self, x): return [dict(boxes=self.w*o[:1].expand(i+1)) for i, o in enumerate(x)]
    def loss(pred, y): return torch.stack([o['boxes'].sum() for o in pred]).mean()
    learn = classifier(loss_func=loss)
    learn.model = Finds()

    found = learn.get_preds(with_loss=True)

    assert [len(o['boxes']) for o in found.preds] == [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
    assert torch.allclose(found.losses, torch.stack([o['boxes'].sum() for o in found.preds]))
    assert learn.predict(x[5])[2]['boxes'].tolist() == [x[5, 0].item()]

def test_what_a_model_writes_into_is_copied():
    "Inputs that are changed in place, and an output that is used again"
    class Reuses(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.out = nn.Parameter(torch.ones(())), torch.zeros(2, 3)
        def forward(self, x):
            self.out.copy_(x.mul_(2)*self.w.detach())
            return self.out
    learn = classifier(loss_func=nn.MSELoss())
    learn.model = Reuses()

    found = learn.get_preds(dl=DataLoader(data, 2), with_input=True)

    assert torch.equal(found.inputs, x) and torch.equal(found.preds, 2*x)

def test_a_model_with_a_loss_of_its_own():
    "One number a batch becomes one tensor of them"
    class Own(nn.Module):
        def __init__(self): super().__init__(); self.layer = nn.Linear(3, 2)
        def forward(self, x): return dict(loss=self.layer(x).mean(), logits=self.layer(x), n=len(x))
    learn = classifier(loss_func=None)
    learn.model = Own()

    preds = learn.get_preds(dl=DataLoader(TensorDataset(x), 4)).preds

    assert preds['loss'].shape == (3,) and preds['logits'].shape == (10, 2) and preds['n'] == [4, 4, 2]

@pytest.mark.parametrize('event', ['before_validate', 'before_fit', 'before_epoch', 'after_batch'])
@pytest.mark.parametrize('ex', [CancelValidException, CancelEpochException, CancelFitException])
def test_what_ends_it_early_is_an_error(event, ex):
    "All items are predicted, or nothing is returned"
    if ex is CancelValidException and event in ('before_fit', 'before_epoch'): ex = CancelEpochException
    if ex is CancelEpochException and event == 'before_fit': ex = CancelFitException
    def cancel(cb): raise ex
    with pytest.raises(RuntimeError, match='not all items are predicted'):
        classifier().get_preds(cbs=Callback(**{event: cancel}))

def test_within_a_mixed_batch():
    "The loss's own activation counts"
    found = []
    look = Callback(after_pred=lambda cb: cb.training and found.append(cb.learn.get_preds(with_loss=True)))
    look.order = 5
    classifier(cbs=[MixUp(), look]).fit(1)

    assert torch.allclose(found[0].preds.sum(1), torch.ones(10)) and found[0].losses.shape == (10,)

def test_recurrent_models_keep_their_state():
    "Predictions within a fit leave it"
    class Remembers(nn.Module):
        def __init__(self): super().__init__(); self.layer, self.h = nn.Linear(3, 4), None
        def reset(self): self.h = None
        def forward(self, x):
            self.h = x.sum().detach()+(0 if self.h is None else self.h)
            return self.layer(x)
    seen = []
    def look(cb):
        before = cb.model.h.clone()
        cb.learn.get_preds()
        seen.append(torch.equal(before, cb.model.h))
    learn = classifier(cbs=ModelResetter())
    learn.model = Remembers()

    learn.fit(1, cbs=Callback(after_step=look))

    assert seen and all(seen)

@pytest.mark.parametrize('loss, y, expected', [
    (nn.CrossEntropyLoss(weight=torch.tensor([1., 9., 1., 1.])), None, None),
    (nn.KLDivLoss(reduction='batchmean'), torch.full((10, 4), .25), None),
    (nn.CrossEntropyLoss(ignore_index=0), torch.arange(30).reshape(10, 3) % 4, None)])
def test_the_loss_of_an_item_is_that_of_it_alone(loss, y, expected):
    "With class weights, positions that are ignored, or another mean"
    pred = torch.randn(10, 4, 3) if y is not None and y.ndim == 2 and y.shape[1] == 3 else torch.randn(10, 4)
    y = torch.arange(10) % 4 if y is None else y

    losses = item_losses(loss, pred, (y,), 10)

    assert torch.allclose(losses, torch.stack([loss(pred[i:i+1], y[i:i+1]) for i in range(10)]), atol=1e-6)

def test_the_name_of_a_set():
    "Says which one; a loader in its place is told of"
    learn = classifier(valid=dict(a=DataLoader(data, 4), b=DataLoader(TensorDataset(x[:3], y[:3]), 3)))

    assert len(learn.get_preds('b').preds) == 3 and learn.validate('b')['valid_loss'] > 0
    for ds_idx in learn.dls.valid, 'c':
        with pytest.raises(TypeError, match="the name of one of \\['a', 'b'\\], or a loader as `dl=…`"):
            learn.get_preds(ds_idx)
