"""`get_preds`: all items, in order, by the model as it is, and nothing else is changed (S40)."""
import weakref
from functools import partial

import pytest
import torch
from fastcore.basics import noop
from torch import nn
from torch.utils.data import (DataLoader, IterableDataset, Sampler, SubsetRandomSampler, TensorDataset,
                              WeightedRandomSampler)

from learner import Callback, CancelBatchException, FetchPredsCallback, Learner
from learner.callbacks.preds import Preds
from learner.losses import item_losses
from tests.helpers import synth_learner

x, y = torch.randn(10, 3, generator=torch.Generator().manual_seed(1)), torch.arange(10) % 4
data = TensorDataset(x, y)


class Stream(IterableDataset):
    def __iter__(self): return iter(data)

class ByLength(Sampler):
    "Batches in an order of its own, of several sizes"
    def __init__(self, leave=0): self.leave = leave
    def __iter__(self): return iter([[9, 0, 4], [2, 8], [7, 1, 3], [5, 6]][self.leave:])
    def __len__(self): return 4-self.leave

def classifier(train=None, valid=None, cbs=None, **kwargs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(.5), nn.Linear(8, 4))
    dls = train or DataLoader(data, 4, shuffle=True, drop_last=True), valid or DataLoader(data, 4)
    return Learner(dls, model, kwargs.pop('loss_func', nn.CrossEntropyLoss()), cbs=cbs,
                   default_cbs=dict(progress=None), **kwargs)

def by_hand(model, bs=4):
    model.eval()
    with torch.no_grad(): return torch.cat([model(xb) for xb in x.split(bs)])


# ---- complete and in order

@pytest.mark.parametrize('ds_idx', [0, 1])
def test_it_equals_a_loop_by_hand(ds_idx):
    "Bit for bit, in the dataset's order, also from a loader that shuffles and drops"
    learn = classifier()
    learn.fit(1)

    preds, targs = learn.get_preds(ds_idx, act=noop)

    assert torch.equal(preds, by_hand(learn.model)) and torch.equal(targs, y)

orders = dict(
    weighted=(lambda: DataLoader(data, 4, sampler=WeightedRandomSampler([1.]*9+[0.], 30)), range(10)),
    subset=(lambda: DataLoader(data, 2, sampler=SubsetRandomSampler([7, 2, 5]), drop_last=True), [2, 5, 7]),
    own=(lambda: DataLoader(data, 2, sampler=[8, 1, 1, 3]), [1, 3, 8]),
    batches=(lambda: DataLoader(data, batch_sampler=ByLength()), range(10)),
    some=(lambda: DataLoader(data, batch_sampler=ByLength(2)), [1, 3, 5, 6, 7]),
    stream=(lambda: DataLoader(Stream(), 4, drop_last=True), range(10)),
    workers=(lambda: DataLoader(data, 4, shuffle=True, num_workers=1), range(10)),
    listed=(lambda: [(x[6:], y[6:]), (x[:6], y[:6])], [6, 7, 8, 9, 0, 1, 2, 3, 4, 5]))

@pytest.mark.parametrize('make, expected', orders.values(), ids=orders)
def test_any_loader(make, expected):
    "What a sampler of torch's own draws from is there whole; of others what they draw, once, by number"
    learn = classifier()

    preds, targs = learn.get_preds(dl=make(), act=noop)

    assert torch.equal(targs, y[[*expected]]) and torch.allclose(preds, by_hand(learn.model)[[*expected]], atol=1e-6)

def test_the_loaders_own_order():
    "Is there if that is wanted, with what it drops"
    learn = classifier()

    _, targs = learn.get_preds(0, reorder=False)

    assert len(targs) == 8 and not torch.equal(targs, y[:8])

def test_several_validation_sets():
    "One after the other"
    learn = classifier(valid=dict(a=DataLoader(data, 4), b=DataLoader(data, 3)))

    preds, targs = learn.get_preds(act=noop)

    assert torch.equal(targs, torch.cat([y, y])) and torch.equal(preds[:10], by_hand(learn.model))

def test_nothing_to_predict():
    "Is said"
    with pytest.raises(ValueError, match='no validation set'): synth_learner(n_valid=0).get_preds()
    with pytest.raises(ValueError, match='gave no batch'): classifier().get_preds(dl=[])
    with pytest.raises(ValueError, match='gave no batch'): classifier().get_preds(dl=DataLoader(TensorDataset(x[:0])))


# ---- what is returned

def test_probabilities_decisions_and_losses():
    "In fastai's order and by name; `act` is the loss's unless another one is given"
    learn = classifier()

    found = learn.get_preds(with_input=True, with_decoded=True, with_loss=True)

    scores = by_hand(learn.model)
    assert found.names == ('inputs', 'preds', 'targs', 'decoded', 'losses') and isinstance(found, Preds)
    assert torch.equal(found.inputs, x) and torch.equal(found[1], scores.softmax(1))
    assert torch.equal(found.decoded, scores.argmax(1))
    assert torch.allclose(found.losses, nn.functional.cross_entropy(scores, y, reduction='none'))
    assert torch.equal(learn.get_preds(act=torch.sigmoid).preds, scores.sigmoid())
    with pytest.raises(AttributeError, match='no `loss`, only inputs, preds'): found.loss

def smooth(pred, y): return nn.functional.cross_entropy(pred, y, label_smoothing=.1)
def parts(pred, y): return dict(a=smooth(pred, y), b=pred.square().mean())

@pytest.mark.parametrize('loss', [
    nn.CrossEntropyLoss(reduction='sum'), smooth, parts,
    partial(nn.functional.cross_entropy, label_smoothing=.1), lambda p, y: nn.functional.mse_loss(p[:, 0], y.float())])
def test_the_loss_of_each_item(loss):
    "Whatever the loss is: that of the item by itself"
    learn = classifier(loss_func=loss)

    losses = learn.get_preds(with_loss=True, act=noop).losses

    def total(o): return sum(o.values()) if isinstance(o, dict) else o
    scores = by_hand(learn.model)
    each = [total(loss(scores[i:i+1], y[i:i+1])) for i in range(10)]
    assert torch.allclose(losses, torch.stack(each).detach(), atol=1e-6)

def test_terms_within_an_item():
    "Count by their mean"
    pred, targ = torch.randn(4, 5), torch.randn(4, 5)

    losses = item_losses(nn.MSELoss(), pred, (targ,), 4)

    assert torch.allclose(losses, (pred-targ).square().mean(1))

def test_no_loss_is_computed_unless_asked_for():
    "Targets need not suit it; asked for without a loss, it is an error"
    def never(pred, y): raise AssertionError
    odd = DataLoader(TensorDataset(x, torch.full((10,), -1)), 4)
    assert classifier(loss_func=never).get_preds(dl=odd).targs.tolist() == [-1]*10

    for learn, dl in (classifier(), [x]), (classifier(loss_func=never), [x]):
        with pytest.raises(ValueError, match='`with_loss` needs'): learn.get_preds(dl=dl, with_loss=True)

@pytest.mark.parametrize('wrap', [lambda a: (a, a[:, :1]), lambda a: dict(a=a, b=[a, a]), lambda a: [a, (a,)]])
def test_nested_outputs(wrap):
    "Are joined wherever they have tensors"
    class Nested(nn.Module):
        def __init__(self): super().__init__(); self.a = nn.Linear(3, 2)
        def forward(self, x): return wrap(self.a(x))
    learn = classifier(loss_func=lambda p, y: 0)
    learn.model = Nested()

    preds, _ = learn.get_preds()

    expected = wrap(by_hand(learn.model.a))
    assert str(preds) == str(expected)

def test_batches_of_several_lengths():
    "Cannot be joined, and come as lists if that is wanted"
    dl = [(torch.randn(2, n, 3), torch.zeros(2)) for n in (4, 5)]
    learn = classifier(loss_func=nn.MSELoss())
    learn.model = nn.Linear(3, 1)
    with pytest.raises(ValueError, match='cannot be joined'): learn.get_preds(dl=dl)

    preds, targs = learn.get_preds(dl=dl, concat_dim=None)

    assert [p.shape[1] for p in preds] == [4, 5] and len(targs) == 2

def test_parts_that_are_not_wanted():
    "Are None; so are targets that are not there"
    assert classifier().get_preds(with_preds=False)[0] is None
    assert classifier().get_preds(with_targs=False)[1] is None
    assert classifier().get_preds(dl=[(x,)]).targs is None


# ---- little memory

def test_reducing_keeps_no_batch():
    "Of 1,000 batches at most two are there at any time"
    alive, most = weakref.WeakSet(), []
    def count(total, batch):
        alive.add(batch.preds)
        most.append(len(alive))
        return (0 if total is None else total)+batch.preds.sum(0)
    learn = classifier()

    total = learn.get_preds(dl=[(x, y)]*1000, reduce=count, with_targs=False)

    assert len(most) == 1000 and max(most) <= 2
    assert torch.allclose(total, 1000*by_hand(learn.model, 10).softmax(1).sum(0), rtol=1e-4)

def test_files(tmp_path):
    "A file for each batch, in order"
    learn = classifier()

    found = learn.get_preds(save_preds=tmp_path/'p', save_targs=tmp_path/'t', act=noop)

    assert found.preds == sorted((tmp_path/'p').iterdir())
    read = [torch.cat([torch.load(f) for f in paths]) for paths in found]
    assert torch.equal(read[0], by_hand(learn.model)) and torch.equal(read[1], y)


# ---- nothing else changes

def test_everything_is_as_before():
    "State, modes, random streams and rows; the next fit is like one without"
    learn, plain = classifier(), classifier()
    for o in learn, plain:
        torch.manual_seed(4)
        o.fit(1)
    before, rows, random = learn.state_hash(), [*learn.recorder.values], torch.get_rng_state()

    learn.get_preds(0, with_loss=True)

    assert learn.state_hash() == before and learn.recorder.values == rows
    assert torch.equal(random, torch.get_rng_state()) and learn.run_kind == '' and learn.model.training
    torch.manual_seed(5)
    learn.fit(1)
    torch.manual_seed(5)
    plain.fit(1)
    assert learn.recorder.values == plain.recorder.values

@pytest.mark.parametrize('event', ['before_fit', 'after_batch', 'after_validate', 'after_epoch', 'before_validate'])
def test_within_a_fit(event):
    "From any event, also within an evaluation; the fit is as without"
    seen, found = [], []
    def predict(cb): found.append(cb.learn.get_preds(act=noop).preds)
    def also(cb): seen.append(cb.run_kind)
    cbs = Callback(before_fit=also, before_validate=also, before_epoch=also)
    learn, plain = classifier(cbs=cbs), classifier()
    torch.manual_seed(3)
    learn.fit(1, cbs=Callback(**{event: predict}))
    torch.manual_seed(3)
    plain.fit(1)

    assert found and all(p.shape == (10, 4) for p in found) and seen.count('fit') == 3
    assert learn.recorder.values == plain.recorder.values

def test_events_are_fastais():
    "Outside of a fit those of a validation, with `run_kind` 'predict'; inner: without those around it"
    learn, seen = classifier(), []
    events = ['before_fit', 'before_epoch', 'before_validate', 'after_validate', 'after_epoch', 'after_fit']
    cb = Callback(**{e: lambda cb, e=e: seen.append((e, cb.run_kind)) for e in events})

    learn.get_preds(cbs=cb)
    learn.get_preds(cbs=[cb], inner=True)

    assert seen == [(e, 'predict') for e in [*events, 'before_validate', 'after_validate']]

def test_callbacks_that_stay_away():
    "`remove_on_fetch` leaves one out, an error brings it back"
    seen = []
    cb = Callback(after_batch=lambda cb: seen.append(1))
    cb.remove_on_fetch = True
    learn = classifier(cbs=cb)

    learn.get_preds()
    with pytest.raises(ValueError, match='gave no batch'): learn.get_preds(dl=[])

    assert not seen and cb.run

def test_cancelled_batches():
    "One with a prediction is there, one without is an error"
    def cancel(cb): raise CancelBatchException
    learn = classifier()

    assert len(learn.get_preds(cbs=Callback(after_pred=cancel)).preds) == 10
    with pytest.raises(RuntimeError, match='batch 0 was cancelled before it had a prediction'):
        learn.get_preds(cbs=Callback(before_batch=cancel))

def test_others_see_the_targets():
    "They are kept from the loss only"
    seen = []
    learn = classifier(cbs=Callback(after_batch=lambda cb: seen.append(cb.y), after_loss=lambda cb: seen.append(cb.y)))

    learn.get_preds()

    assert len(seen) == 6 and all(len(t) for t in seen)

def test_fetching_each_epoch():
    "With what `get_preds` takes"
    learn = classifier(cbs=(fetch := FetchPredsCallback(with_decoded=True)))

    learn.fit(2)

    assert torch.equal(fetch.preds, by_hand(learn.model).softmax(1)) and torch.equal(fetch.targs, y)
    assert fetch.found.decoded.shape == (10,)

@pytest.mark.parametrize('event', ['after_validate', 'before_validate', 'after_batch', 'after_pred', 'after_loss'])
def test_an_evaluation_within(event):
    "Is nothing to the one around it, whatever is asked of it"
    learn, plain = classifier(), classifier()
    inner = Callback(**{event: lambda cb: cb.learn.get_preds(with_loss=True, with_targs=False, dl=[(x[:3], y[:3])])})

    found = learn.get_preds(cbs=inner)

    assert [*map(torch.equal, found, plain.get_preds())] == [True, True]

def test_odd_parameters(tmp_path):
    "Are refused before anything is predicted; files of an earlier call are replaced"
    learn = classifier()
    with pytest.raises(TypeError, match="act='softmax'; give a function"): learn.get_preds(act='softmax')
    with pytest.raises(TypeError, match="reduce='mean'; give a function"): learn.get_preds(reduce='mean')
    with pytest.raises(ValueError, match='would both go to'): learn.get_preds(save_preds=tmp_path, save_targs=tmp_path)

    for dl in [(x, y)]*5, [(x, y)]*2: found = learn.get_preds(dl=dl, save_preds=tmp_path)

    assert [*found.preds] == sorted(tmp_path.iterdir()) and len(found.preds) == 2
