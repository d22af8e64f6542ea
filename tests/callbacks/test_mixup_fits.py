"""Whole fits with MixUp, CutMix, MCDropout and ProgressiveResize: they resume exactly, and act where they should."""
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from learner.callback import Callback
from learner.callbacks.checkpoint import Checkpoint
from learner.callbacks.mixup import CutMix, MCDropout, MixUp, ProgressiveResize
from learner.callbacks.training import GradientAccumulation
from learner.utils import set_seed
from tests.bench.work import calls_per_batch
from tests.helpers import synth_learner, weights
from tests.resume_helpers import AskAt, Noisy, network, noisy_learner, record


class Images(Noisy):
    "Its items as images of 2 by 2"
    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x.view(1, 2, 2), y

def image_learner(path, cb):
    set_seed(3)
    dls = DataLoader(Images(), 8, shuffle=True), DataLoader(Images(16), 8)
    model = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), network())
    return noisy_learner(path, dls, model, cbs=cb)

makers = [MixUp, CutMix, lambda: ProgressiveResize({0: 2, .3: (4, 3), .7: None}), MCDropout]
every_one = pytest.mark.parametrize('make', makers, ids=['MixUp', 'CutMix', 'ProgressiveResize', 'MCDropout'])


# ---- all of them

@every_one
@pytest.mark.parametrize('at', [3, 13])
def test_resumes_exactly(tmp_path, make, at):
    "A fit that was stopped goes on, in a process of its own too, as if it had not been"
    whole = image_learner(tmp_path/'whole', make())
    whole.fit(3, 1e-2)
    first = image_learner(tmp_path/'cut', [make(), Checkpoint(every='2it')])
    with pytest.raises(KeyboardInterrupt): first.fit(3, 1e-2, cbs=AskAt(at))
    second = image_learner(tmp_path/'cut', [make(), Checkpoint(every='2it')])

    second.fit(3, 1e-2, resume=True)
    first.resume()

    assert record(first) == record(second) == record(whole)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*map(weights, (whole, first, second))))

@every_one
def test_every_fit_is_a_fresh_one(tmp_path, make):
    "The second fit of a Learner is that of one which has never seen another"
    learn = image_learner(tmp_path, make())
    start = {k: v.clone() for k, v in learn.model.state_dict().items()}
    tables = []

    for _ in range(2):
        learn.model.load_state_dict(start)
        set_seed(7)
        learn.fit(2, 1e-2, reset_opt=True)
        tables.append([tuple(row) for row in learn.recorder.values])

    assert tables[0] == tables[1]

def test_evaluation_is_not_mixed(tmp_path):
    "Where nothing is trained a mixer does nothing"
    def evaluated(cbs):
        learn = noisy_learner(tmp_path, cbs=cbs)
        return [*learn.validate(), *learn.validate(0)]

    assert evaluated(MixUp) == evaluated(None)

@pytest.mark.parametrize('make, most', [(MixUp, 280), (CutMix, 230)])
def test_work_of_a_batch(make, most):
    "What a mixer adds to a batch is known in Python calls"
    def loop(k, cb):
        g = torch.Generator().manual_seed(0)
        data = [(torch.randn(4, 1, 4, 4, generator=g), torch.arange(4) % 2)]*k
        learn = synth_learner(cb, dls=(data, None), model=nn.Sequential(nn.Flatten(), nn.Linear(16, 2)),
                              loss_func=nn.CrossEntropyLoss())
        return lambda: learn.fit(1)

    assert calls_per_batch(loop, make)-calls_per_batch(loop, None) <= most


@every_one
def test_one_of_a_kind(make):
    "A second one would undo the first one's work"
    with pytest.raises(ValueError, match='already'): synth_learner([make(), make()])


# ---- dropout in evaluations

def dropping(cbs=(), **kwargs):
    torch.manual_seed(1)
    return synth_learner(cbs, model=nn.Sequential(nn.Linear(1, 64), nn.Dropout(.5), nn.Linear(64, 1)), **kwargs)

def test_each_evaluation_has_its_masks():
    "Dropout is on in evaluations, each time with other masks; random streams and modes are as they were before"
    learn = dropping(MCDropout)
    state = torch.get_rng_state()

    losses = [learn.validate()[0] for _ in range(5)]

    assert len({*losses}) == 5 and torch.equal(state, torch.get_rng_state()) and learn.model.training
    assert len({dropping().validate()[0] for _ in range(3)}) == 1

def test_training_is_as_without():
    "What is trained is bit for bit what it would be without"
    def trained(cbs):
        learn = dropping(cbs)
        learn.fit(2)
        return weights(learn), [row['train_loss'] for row in learn.recorder.values], learn.recorder.values[0][1]
    (a, rows, valid), (b, others, other) = trained(None), trained(MCDropout)

    assert all(map(torch.equal, a, b)) and rows == others and valid != other

@pytest.mark.parametrize('layer', [
    nn.TransformerEncoderLayer(8, 2, 16, .5, batch_first=True), nn.LSTM(8, 8, 2, dropout=.5, batch_first=True),
    nn.GRU(8, 8, 2, dropout=.5), nn.Dropout1d(.5), nn.AlphaDropout(.5)], ids=lambda m: type(m).__name__)
def test_layers_with_dropout(layer):
    "Dropout inside recurrent and transformer layers is on too, and normalisation is in eval mode"
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm, self.head = layer, nn.BatchNorm1d(4), nn.Linear(8, 1)
        def forward(self, x):
            out = self.layer(x)
            modes.append(self.norm.training)
            return self.head(self.norm(out[0] if isinstance(out, tuple) else out)).mean(1)
    modes, data = [], [(torch.randn(6, 4, 8), torch.randn(6, 1))]
    learn = synth_learner(MCDropout, dls=(data, data), model=Model())

    losses = [learn.validate()[0] for _ in range(3)]

    assert len({*losses}) == 3 and not any(modes)

def test_model_without_dropout():
    "Where there is nothing to be left on, that is said"
    learn = synth_learner(MCDropout)

    with pytest.warns(UserWarning, match='MCDropout: the RegModel has no layer with dropout'): learn.validate()


# ---- growing images

class Sees(Callback):
    "Notes the size of each batch"
    order = 5
    def __init__(self): self.seen = []
    def before_batch(self): self.seen.append((self.training, *self.x.shape[-2:]))

def sized(sizes, n_epoch=3, n=2):
    g = torch.Generator().manual_seed(0)
    data = [(torch.randn(4, 1, 8, 8, generator=g), torch.randn(4, 1)) for _ in range(n)]
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1, 1))
    learn = synth_learner([ProgressiveResize(sizes), sees := Sees()], dls=(data, data[:1]), model=model)
    learn.fit(n_epoch)
    return learn, sees.seen

def test_sizes_by_epoch():
    "Training and validation of an epoch have its size; None leaves images as they are"
    _, seen = sized({0: 4, 1: (6, 5), 2: None})

    assert seen == [(t, *size) for size in ((4, 4), (6, 5), (8, 8)) for t in (True, True, False)]

def test_sizes_by_share():
    "Shares of the fit count batches; validation has the size of the last training batch"
    _, seen = sized({0.: 4, .5: 6}, 1, 4)

    assert [h for _, h, _ in seen] == [4, 4, 6, 6, 6] and not seen[-1][0]

def test_outside_of_a_fit():
    "An evaluation on its own has the last size, one within a fit that of the training"
    learn, seen = sized({0: 4, 1: 6}, 1)
    seen.clear()

    learn.validate()
    learn.fit(1, cbs=Callback(after_batch=lambda o: o.training and learn.validate()))

    assert [h for _, h, _ in seen] == [6, 4, 4, 4, 4, 4]

def test_pixels_are_torchs():
    "They are torch's bilinear antialiased ones, and the batch itself is as it was"
    learn, _ = sized({0: 4}, 1)
    x = learn.dls.train.dl[0][0]
    kept, seen = x.clone(), []

    learn.fit(1, cbs=Callback(after_pred=lambda o: seen.append(o.x)))

    expected = nn.functional.interpolate(x, (4, 4), mode='bilinear', antialias=True)
    assert torch.equal(seen[0], expected) and torch.equal(x, kept)

@pytest.mark.parametrize('sizes', [{0: 4, 1: 6}, {0.: 4, .1: 6}])
def test_finder_has_the_first_size(sizes):
    "The sizes of a sweep do not change, which would show in its losses"
    (learn, _), sides = sized(sizes, 1), set()
    late = Callback(before_batch=lambda o: sides.add(o.x.shape[-1]))
    late.order = 5

    with learn.added_cbs(late): learn.lr_find(num_it=10, suggest_funcs=None, show_plot=False)

    assert sides == {4}

@pytest.mark.parametrize('sizes', [{}, {1: 4}, {0: 4, 3: 4, 2: 5}, {0: 4, 1.5: 4}, {0: 0}, {0: (4,)}, {0: 'a'},
                                   {0: (4, 0)}, {0: 4, .5: 3., .7: 2}])
def test_odd_sizes(sizes):
    "What is no size, or has no place in a fit, is refused"
    with pytest.raises((ValueError, TypeError), match='ProgressiveResize'): ProgressiveResize(sizes)

def test_batches_without_images():
    "A batch that has none is an error"
    with pytest.raises(TypeError, match=r'no input is a 4-d tensor of floats: \(float32\[8, 1\],\)'):
        synth_learner(ProgressiveResize({0: 4})).fit(1)

def test_shares_reach_no_end():
    "The share 1 is the end of the fit, where nothing is left"
    with pytest.raises(ValueError, match='shares of the fit'): ProgressiveResize({0: 4, .5: 8, math.nextafter(1, 2): 9})


# ---- with accumulated gradients

@pytest.mark.parametrize('lengths', [(3, 3, 3, 3), (10, 1, 7, 2)])
def test_mixed_tokens_add_up(lengths):
    "Of masked tokens, weighted by how many there are: the step is that of the mean over all terms of the window"
    g = torch.Generator().manual_seed(4)
    x, y = torch.randn(8, 10, 3, generator=g, dtype=torch.float64), torch.randint(5, (8, 10), generator=g)
    for i, n in enumerate(lengths): y[2*i:2*i+2, n:] = -100
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(5)
            self.layer = nn.Linear(3, 5).double()
        def forward(self, x): return self.layer(x).transpose(1, 2)
    drawn = []
    mixup, keep = MixUp(1.), Callback(after_pred=lambda cb: drawn.append((mixup.lam, mixup.perm)))
    by_tokens = GradientAccumulation(1000, 'tokens', weight=lambda learn: int((learn.y != -100).sum()))
    dls = list(zip(x.split(2), y.split(2))), None
    learn = synth_learner([mixup, keep, by_tokens], dls=dls, model=Tokens(), loss_func=nn.CrossEntropyLoss(),
                          opt_func=torch.optim.SGD, lr=.1)
    model, total = Tokens(), torch.zeros((), dtype=torch.float64)

    learn.fit(1)

    for (lam, perm), xb, yb in zip(drawn, x.split(2), y.split(2)):
        lam = lam.double().view(-1, 1, 1)
        pred = model(lam*xb + (1-lam)*xb[perm])
        terms = [nn.functional.cross_entropy(pred, t, reduction='none') for t in (yb, yb[perm])]
        total = total + (lam[..., 0]*terms[0] + (1-lam[..., 0])*terms[1]).sum()
    (total/(y != -100).sum()).backward()
    for p, new in zip(model.parameters(), weights(learn)):
        assert p.grad is not None and float((p.detach()-.1*p.grad-new).abs().max()) < 1e-12
