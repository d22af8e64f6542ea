"""MixUp and CutMix: what is mixed, the loss of it, and that the Learner's own loss is always put back."""
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from learner.callback import Callback
from learner.callbacks.mixup import CutMix, MixUp
from learner.losses import unreduced
from learner.events import CancelBatchException, CancelFitException, event_names
from tests.helpers import RegModel, raises, synth_learner, weights

weight = torch.tensor([.2, 1., 3.])


def items(n=24, shape=(4,)):
    g = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(n, *shape, generator=g), torch.randint(3, (n,), generator=g))

def loaders(shape=(4,)): return DataLoader(items(16, shape), 8), DataLoader(items(8, shape), 8)

def classifier(cbs, loss_func=F.cross_entropy, shape=(4,), **kwargs):
    torch.manual_seed(3)
    n = torch.Size(shape).numel()
    return synth_learner(cbs, dls=kwargs.pop('dls', None) or loaders(shape), loss_func=loss_func,
                         model=kwargs.pop('model', None) or nn.Sequential(nn.Flatten(), nn.Linear(n, 3)), **kwargs)


class Batch(Callback):
    "Keeps what was made of the last training batch"
    order = 5
    run_valid = False
    run_in = frozenset({'fit'})
    def before_batch(self):
        mix = self.learn.mix
        self.ins, self.targs, self.lam, self.perm, self.other = self.xb, self.yb, mix.lam, mix.perm, mix.other
    def after_loss(self): self.scores, self.mixed = self.learn.pred.detach(), self.learn.loss_grad

class Mix(MixUp): name = 'mix'  # pyright: ignore[reportAssignmentType]
class Cut(CutMix): name = 'mix'  # pyright: ignore[reportAssignmentType]


def both(pred, y, y2, lam, loss, reduce):
    "The two-loss form, directly"
    return reduce(lam*loss(pred, y) + (1-lam)*loss(pred, y2), y)


# ---- the loss

def by_weight(ts, y): return ts.sum()/weight[y].sum()
def not_ignored(ts, y): return ts.sum()/(y != 1).sum()
def two_parts(pred, y, reduction='mean'):
    return dict(ce=F.cross_entropy(pred, y, reduction=reduction), more=2*F.cross_entropy(pred, y, reduction=reduction))

@pytest.mark.parametrize('loss, terms, reduce', [
    (nn.CrossEntropyLoss(), F.cross_entropy, lambda ts, y: ts.mean()),
    (F.cross_entropy, F.cross_entropy, lambda ts, y: ts.mean()),
    (partial(F.cross_entropy, reduction='sum'), F.cross_entropy, lambda ts, y: ts.sum()),
    (nn.CrossEntropyLoss(reduction='sum'), F.cross_entropy, lambda ts, y: ts.sum()),
    (nn.CrossEntropyLoss(weight), partial(F.cross_entropy, weight=weight), by_weight),
    (nn.CrossEntropyLoss(ignore_index=1), partial(F.cross_entropy, ignore_index=1), not_ignored),
    (nn.CrossEntropyLoss(label_smoothing=.1), partial(F.cross_entropy, label_smoothing=.1), lambda ts, y: ts.mean()),
    (two_parts, lambda pred, y, reduction: 3*F.cross_entropy(pred, y, reduction=reduction), lambda ts, y: ts.mean())],
    ids=['module', 'function', 'partial sum', 'module sum', 'weights', 'ignored', 'smoothed', 'dict'])
def test_loss_of_classes(loss, terms, reduce):
    "Each item has its own share of both losses; they are reduced as the loss does it, and that is what is recorded"
    learn = classifier([Mix(), batch := Batch()], loss, opt_func=torch.optim.SGD, lr=.1)
    before = weights(learn)

    learn.fit(1, cbs=Callback(after_batch=raises(CancelFitException)))
    direct = both(batch.scores, *batch.targs, *batch.other, batch.lam, partial(terms, reduction='none'), reduce)
    w, b = (p.requires_grad_() for p in before)
    pred = F.linear(batch.ins[0], w, b)
    again = both(pred, *batch.targs, *batch.other, batch.lam, partial(terms, reduction='none'), reduce)
    steps = torch.autograd.grad(again, [w, b])

    torch.testing.assert_close(batch.mixed.detach(), direct)
    torch.testing.assert_close(weights(learn), [(p - .1*g).detach() for p, g in zip(before, steps)])
    assert batch.lam.shape == (8,) and batch.lam.min() >= .5 and len({*batch.lam.tolist()}) == 8

def test_recorded_loss_is_the_mixed_one():
    "The Recorder has the loss that is trained with, and of a dict its parts"
    learn = classifier([Mix(), batch := Batch()], two_parts)

    learn.fit(1, cbs=Callback(after_batch=raises(CancelFitException)), lr=0.)
    parts = learn.recorder.parts
    learn.fit(1, 0.)
    row = learn.final_record

    assert parts == {} and row['train_loss'] == pytest.approx(row['train_ce']+row['train_more'])
    assert learn.recorder.raw_losses[-1] == pytest.approx(float(batch.mixed.detach()))

def squared(pred, y): return F.cross_entropy(pred, y).square()

@pytest.mark.parametrize('make, loss', [(Mix, squared), (Cut, squared), (Cut, nn.CrossEntropyLoss(weight))])
def test_one_share_a_batch(loss, make):
    "Where terms cannot be told apart, and in CutMix always, there is one share, and both losses are whole ones"
    learn = classifier([make(), batch := Batch()], loss, shape=(1, 6, 6))

    learn.fit(1)

    assert batch.lam.shape == (1,)
    direct = both(batch.scores, *batch.targs, *batch.other, batch.lam[0], loss, lambda t, y: t)
    torch.testing.assert_close(batch.mixed.detach(), direct)

@pytest.mark.filterwarnings('ignore:`torch.jit:DeprecationWarning')  # torch's own
def test_compiled_loss_is_whole():
    "A compiled loss keeps the reduction it was compiled with: it counts as one that has none"
    assert unreduced(torch.compile(nn.CrossEntropyLoss())) == (None, None)

def test_zero_loss_has_no_nan():
    "Where the loss of the own targets is nothing at all, that of the others still counts as in a mean"
    def hinge(pred, y, reduction='mean'):
        ts = torch.where(y == 0, 0*pred[:, 0], pred[:, 0]-pred[:, 0].detach()+1.)
        return ts if reduction == 'none' else ts.mean()
    zeros = DataLoader(TensorDataset(torch.randn(8, 4), torch.zeros(8).long()), 8)
    learn = classifier([Mix(), batch := Batch()], hinge, dls=(zeros, None))

    learn.fit(1)

    assert batch.mixed == 0

def test_loss_that_does_not_do_what_it_says():
    "A `reduction` that changes nothing is an error that says what to do"
    def odd(pred, y, reduction='mean'): return F.cross_entropy(pred, y)

    with pytest.raises(ValueError, match=r"reduction='none' the loss gives float32\[\], not a row for each of the 8"):
        classifier(Mix(), odd).fit(1)

def test_forward_context_is_that_of_the_loss():
    "Both losses are computed where the loss is"
    seen = []
    def loss(pred, y, reduction='mean'):
        seen.append(torch.is_autocast_enabled('cpu'))
        return F.cross_entropy(pred.float(), y, reduction=reduction)
    learn = classifier(Mix(), loss)
    learn.forward_context = lambda: torch.autocast('cpu', torch.bfloat16)

    learn.fit(1)

    assert len(seen) == 2*3+1 and all(seen)


# ---- inputs and targets

def test_floats_are_mixed_themselves():
    "Targets that are floats are mixed as inputs are, item by item, and the loss is called once, as ever"
    own = []
    learn = synth_learner([Mix(), batch := Batch()], n=1)
    first = Callback(before_batch=lambda o: own.append((o.x, o.y)))
    first.order = -5

    learn.fit(1, cbs=first)
    (x, y), lam, perm = own[0], batch.lam[:, None], batch.perm

    torch.testing.assert_close(batch.ins[0], lam*x + (1-lam)*x[perm])
    torch.testing.assert_close(batch.targs[0], lam*y + (1-lam)*y[perm])
    torch.testing.assert_close(batch.mixed.detach(), F.mse_loss(batch.scores, batch.targs[0]))
    assert batch.other is None and x is own[0][0]

def test_probabilities_as_targets():
    "With one-hot targets the mixed loss is that of classes: cross entropy is linear in them"
    onehot = DataLoader(TensorDataset(items(8).tensors[0], F.one_hot(items(8).tensors[1]).float()), 8)
    losses = []

    for data in onehot, DataLoader(items(8), 8):
        learn = classifier([Mix(), batch := Batch()], dls=(data, None))
        learn.fit(1)
        losses.append(batch.mixed.detach())

    torch.testing.assert_close(*losses)

def test_dict_batches():
    "All inputs of floats are mixed alike, others are left, and each target has its other one"
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = nn.Linear(4, 3)
        def forward(self, a, b, ids): return self.f(a+b)+ids[:, None]
    data = [dict(a=torch.randn(8, 4), b=torch.randn(8, 4).double(), ids=torch.arange(8), labels=torch.arange(8) % 3)]
    learn = classifier([Mix(), batch := Batch()], dls=(data, None), model=Two().double())
    data[0]['a'] = data[0]['a'].double()

    learn.fit(1)
    lam, perm = batch.lam.double()[:, None], batch.perm

    for k in 'ab': torch.testing.assert_close(batch.ins[k], lam*data[0][k] + (1-lam)*data[0][k][perm])
    assert batch.ins['ids'] is data[0]['ids'] and torch.equal(batch.other[0], data[0]['labels'][perm])

def test_classes_and_values():
    "Where one of several targets is of classes, the loss of all is mixed"
    def loss(pred, y, v): return F.cross_entropy(pred, y)+F.mse_loss(pred[:, 0], v)
    data = [(torch.randn(8, 4), torch.arange(8) % 3, torch.randn(8))]
    learn = classifier([Mix(), batch := Batch()], loss, dls=(data, None), n_inp=1)

    learn.fit(1)
    a, b = loss(batch.scores, *batch.targs), loss(batch.scores, *batch.other)

    torch.testing.assert_close(batch.mixed.detach(), batch.lam[0]*a + (1-batch.lam[0])*b)

def test_box_of_another_image():
    "CutMix: a pixel is the item's own, or within the box the other one's; the share is what the box really leaves"
    learn = classifier([Cut(), batch := Batch()], shape=(2, 9, 7))
    own = [x for x, _ in learn.dls.train]
    copies, shares = [x.clone() for x in own], []
    learn.dls = ([*zip(own, [y for _, y in learn.dls.train])]*20, None)
    def look(cb):
        x = copies[cb.iter % 2]
        y, y_end, x0, x_end = learn.mix.box
        inside = torch.zeros(9, 7).bool()
        inside[y:y_end, x0:x_end] = True
        shares.append(float(batch.lam[0]))
        assert torch.equal(cb.x, torch.where(inside, x[batch.perm], x))
        assert shares[-1] == pytest.approx(1-inside.float().mean().item())

    learn.fit(1, cbs=Callback(after_pred=look))

    assert all(map(torch.equal, own, copies)) and min(shares) < .5 and max(shares) > .9


# ---- where it acts

@pytest.mark.parametrize('make', [Mix, Cut])
def test_s29_finder_fit_and_validation(make, tmp_path):
    "Given to the constructor: the finder and the fit mix, validation is plain, and the loss stays the same object"
    loss = nn.CrossEntropyLoss()
    learn = classifier(make(), loss, shape=(1, 4, 4), path=tmp_path)
    mixed = []
    watch = Callback(after_loss=lambda o: o.training and mixed.append(learn.mix.lam is not None))

    with learn.added_cbs(watch):
        learn.lr_find(num_it=10, suggest_funcs=None)
        learn.fit(2)
    n, valid = len(mixed), learn.validate()
    (x, y), = learn.dls.valid
    expected = loss(learn.model(x), y).detach()

    assert learn.loss_func is loss and loss.reduction == 'mean' and n >= 14 and all(mixed)
    assert valid[0] == pytest.approx(float(expected)) == learn.recorder.values[-1]['valid_loss']

@pytest.mark.parametrize('order, ex', [(-1, CancelBatchException), (1, CancelFitException), (-1, ValueError),
                                       (1, KeyboardInterrupt)])
@pytest.mark.parametrize('name', [e for e in event_names if e.split('_', 1)[1] in (
    'batch', 'pred', 'loss', 'backward', 'step') and not e.startswith(('cleanup', 'after_cancel'))])
def test_loss_is_put_back(name, ex, order):
    "Whatever ends a batch, wherever: the loss is the Learner's own again, and nothing is kept"
    cb = Callback(**{name: raises(ex)})
    cb.order = order
    learn = classifier(mix := Mix(), loss := nn.CrossEntropyLoss())

    try: learn.fit(1, cbs=cb)
    except (ValueError, KeyboardInterrupt, RuntimeError): pass

    assert learn.loss_func is loss and loss.reduction == 'mean'
    assert mix.lam is mix.perm is mix.other is mix.plain is None

def test_failing_loss_is_put_back():
    "Likewise where the loss itself fails"
    loss = nn.CrossEntropyLoss()
    learn = classifier(Mix(), loss, model=nn.Linear(4, 2))

    with pytest.raises(IndexError): learn.fit(1)

    assert learn.loss_func is loss and loss.reduction == 'mean'

def test_removed_in_mid_batch():
    "Taken away between the forward pass and the loss, it takes its loss with it"
    cb = Callback(after_pred=lambda o: o.learn.remove_cb(o.learn.mix))
    cb.order = 1
    learn = classifier(Mix(), loss := nn.CrossEntropyLoss())

    learn.fit(1, cbs=[cb, Callback(after_loss=lambda o: learn.remove_cb(cb) if cb.learn else None)])

    assert learn.loss_func is loss and not learn.cbs.filter(lambda o: isinstance(o, Mix))

@pytest.mark.parametrize('name', ['before_batch', 'after_pred', 'after_loss', 'before_step', 'after_batch'])
@pytest.mark.parametrize('order', [-1, 1])
def test_validation_within_a_batch_is_plain(name, order):
    "An evaluation from within a mixed batch has the plain loss, and the batch goes on as if there had been none"
    def own_loss(model): return F.cross_entropy(model(items(8).tensors[0]), items(8).tensors[1])
    found, expected = [], []
    def look(cb): found.append(float(cb.learn.validate()[0])) if cb.training else None
    def direct(cb): expected.append(float(own_loss(cb.model).detach()))
    cb, other = Callback(**{name: look}), Callback(**{name: lambda o: direct(o) if o.training else None})
    cb.order = other.order = order
    alone, looked = classifier(Mix()), classifier(Mix())

    for learn, cbs in (alone, []), (looked, [cb, other]):
        torch.manual_seed(5)
        learn.fit(1, cbs=cbs)

    assert found == pytest.approx(expected) and len(found) == 2
    assert all(map(torch.equal, weights(alone), weights(looked)))


# ---- what is refused

def test_two_mixers():
    "A second one is refused, also of the other kind"
    with pytest.raises(ValueError, match='already'): synth_learner([MixUp(), CutMix()])

@pytest.mark.parametrize('make', [MixUp, CutMix])
@pytest.mark.parametrize('alpha', [0, -1., float('inf'), float('nan')])
def test_odd_alpha(make, alpha):
    "Such a distribution does not exist"
    with pytest.raises(ValueError, match='give a number above 0'): make(alpha)

@pytest.mark.parametrize('cb, batch, error', [
    (MixUp, (torch.arange(8), torch.arange(8)), r'no input is a tensor of floats with a row for each of the 8'),
    (MixUp, (torch.randn(8, 4), ['a']*8), r'a target is \[str'),
    (MixUp, (torch.randn(8, 4), torch.arange(8), torch.tensor(1)), r'a target is int64\[\]'),
    (CutMix, (torch.randn(8, 4), torch.arange(8)), r'takes images of one size.*float32\[8, 4\].*MixUp mixes anything'),
    (CutMix, (torch.randn(8, 1, 4, 4), torch.randn(8, 1, 2, 2), torch.arange(8)), 'takes images of one size')])
def test_batches_that_cannot_be_mixed(cb, batch, error):
    "They are named, with what would do"
    n_inp = 2 if cb is CutMix and len(batch) == 3 else 1
    learn = classifier(cb, lambda *o: None, dls=([batch], None), n_inp=n_inp)

    with pytest.raises(TypeError, match=error): learn.fit(1)

def test_loss_of_the_model():
    "A model that computes its loss cannot be trained so: that is known before training"
    learn = synth_learner(MixUp, loss_func=None, model=RegModel())

    with pytest.raises(ValueError, match='the model computes its loss by itself'): learn.fit(1)
