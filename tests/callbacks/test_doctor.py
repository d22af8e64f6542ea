"""`learn.doctor`: what is planted is found, and nothing else; nothing in healthy networks; and no trace."""
import time
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset, TensorDataset

from learner import (BnFreeze, Callback, CancelFitException, CancelStepException, DataLoaders, Learner, default_split,
                     set_seed)
from learner.findings import limits
from tests.helpers import RegModel, raises, synth_learner


@pytest.fixture(scope='module')
def digits():
    "1,797 images of 8×8 pixels, from 0 to 1, and what they show"
    x, y = load_digits(return_X_y=True)
    return torch.tensor(x/16, dtype=torch.float32), torch.tensor(y)


def learner_of(model, x, y, loss=None, lr=1e-3, bs=64, **kwargs):
    return Learner(DataLoaders.from_tensors(x, y, bs=bs), model, loss or nn.CrossEntropyLoss(), lr=lr,
                   default_cbs=dict(progress=None), **kwargs)

def conv(n_in, n_out):
    return nn.Sequential(nn.Conv2d(n_in, n_out, 3, padding=1, bias=False), nn.BatchNorm2d(n_out), nn.ReLU())

def cnn(*last):
    "The network of `make demo`"
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), conv(1, 32), conv(32, 32), nn.MaxPool2d(2), conv(32, 64),
                         nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(.3), nn.Linear(256, 10), *last)

def mlp(*sizes, act=nn.ReLU):
    layers = [o for a, b in zip(sizes, sizes[1:]) for o in (nn.Linear(a, b), act())]
    return nn.Sequential(*layers[:-1])

class Transformer(nn.Module):
    "Rows of the image are its words"
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Linear(8, 32), nn.Parameter(torch.randn(8, 32)/50)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, 10)
    def forward(self, x): return self.head(self.layers(self.embed(x.view(-1, 8, 8))+self.place).mean(1))

class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(8, 32, 2, batch_first=True, dropout=.2), nn.Linear(32, 10)
    def forward(self, x): return self.head(self.rnn(x.view(-1, 8, 8))[0][:, -1])

def frozen_body(x, y):
    "A trained body, frozen with its statistics, and a new head"
    learn = learner_of(cnn(), x, y, lr=1e-2)
    learn.fit(1)
    body = learn.model[:-2]
    learn = learner_of(nn.Sequential(body, nn.Linear(256, 10)), x, y, splitter=default_split, cbs=BnFreeze,
                       train_bn=False)
    return learn.freeze()

healthy = {'cnn': lambda x, y: learner_of(cnn(), x, y), 'transformer': lambda x, y: learner_of(Transformer(), x, y),
           'recurrent': lambda x, y: learner_of(Recurrent(), x, y), 'frozen body': frozen_body}

@pytest.mark.parametrize('make', healthy.values(), ids=healthy)
def test_nothing_is_found_in_a_healthy_network(digits, make):
    "No false alarm"
    set_seed(42)

    found = make(*digits).doctor()

    assert len(found) == 0 and [*found.columns] == ['finding', 'where', 'measured', 'usual', 'try']


# ---- one sick network of each kind

class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.spare = mlp(64, 32, 10), nn.Linear(64, 10)
    def forward(self, x): return self.body(x) + self.spare(x).detach()

def no_gradient(x, y): return learner_of(Unused(), x, y)

def not_in_the_optimizer(x, y):
    return learner_of(cnn(), x, y, splitter=lambda m: [p for n, p in m.named_parameters() if not n.startswith('1.')])

def dead_units(x, y):
    learn = learner_of(mlp(64, 100, 32, 10), x, y)
    with torch.no_grad(): learn.model[0].bias[:60] = -100
    return learn

def gradient_of_0(x, y):
    learn = learner_of(mlp(64, 32, 32, 10), x, y)
    with torch.no_grad(): learn.model[2].bias[:] = -100
    return learn

class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.rest = nn.Linear(64, 32), [nn.Linear(32, 10)]
    def forward(self, x): return self.rest[0](self.first(x).relu())

def not_registered(x, y): return learner_of(Listed(), x, y)

def vanishing_gradients(x, y): return learner_of(mlp(64, *[50]*7, 10, act=nn.Sigmoid), x, y)

def start_with(std, model):
    for m in model:
        if isinstance(m, nn.Linear): nn.init.normal_(m.weight, std=std)
    return model

def exploding_gradients(x, y): return learner_of(start_with(.5, mlp(64, *[50]*20, 10, act=nn.Tanh)), x, y)

def exploding_outputs(x, y): return learner_of(start_with(1., mlp(64, *[50]*8, 10)), x, y)

def updates_too_large(x, y): return learner_of(cnn(), x, y, lr=.1)

def updates_too_small(x, y): return learner_of(cnn(), x, y, lr=1e-6)

def one_layer_too_large(x, y): return learner_of(cnn(), x, y, param_opts={'8.weight': dict(lr_mult=150)})

def batch_norm_of_one_item(x, y): return learner_of(mlp(64, 32, 10, act=lambda: nn.BatchNorm1d(32)), x, y, bs=1)

def batch_norm_of_a_last_item(x, y):
    return Learner((DataLoader(TensorDataset(x[:641], y[:641]), 64), None), cnn(), nn.CrossEntropyLoss())

def loss_is_not_finite(x, y):
    return learner_of(cnn(), x, y, lambda pred, y: F.cross_entropy(pred, y)*torch.tensor(float('inf')))

def loss_does_not_fall(x, y): return learner_of(cnn(), x, y, opt_func=partial(optim.AdamW, maximize=True))

def softmax_before_the_loss(x, y): return learner_of(cnn(nn.Softmax(1)), x, y)

def relu_before_targets_below_zero(x, y):
    return learner_of(nn.Sequential(*mlp(64, 32, 1), nn.ReLU(), nn.Flatten(0)), x, (y-4.5)/3, nn.MSELoss())

def inputs_of_255(x, y): return learner_of(cnn(), x*255, y)

def one_column_of_dozens(x, y):
    wide = torch.cat([x, 12+torch.rand(len(x), 1)], 1)
    return learner_of(mlp(65, 32, 10), wide, y)

def inputs_with_nan(x, y):
    x = x.clone()
    x[::200, 3] = float('nan')
    return learner_of(cnn(), x, y, bs=256)

def targets_of_hundreds(x, y):
    return learner_of(nn.Sequential(*mlp(64, 32, 1), nn.Flatten(0)), x, 100+y*10., nn.MSELoss(), lr=1e-2)

def mse_loss(pred, y): return ((pred-y)**2).mean()  # torch's own warns by itself

def one_shape_for_a_column_and_a_row(x, y): return learner_of(mlp(64, 32, 1), x, (y-4.5)/3, mse_loss)

def one_class_in_each_batch(x, y):
    batches = [(x[y == k][:32], y[y == k][:32]) for k in range(10)]
    return Learner((batches, None), cnn(), nn.CrossEntropyLoss(), lr=1e-3)

def left_in_eval(x, y):
    learn = learner_of(cnn(), x, y)
    learn.model[2][1].eval()
    return learn

class Slow(Dataset):
    "Takes a millisecond an item"
    def __init__(self, x, y): self.x, self.y = x, y
    def __len__(self): return len(self.x)
    def __getitem__(self, i):
        time.sleep(.001)
        return self.x[i], self.y[i]

def slow_data(x, y): return Learner((DataLoader(Slow(x, y), 64), None), cnn(), nn.CrossEntropyLoss(), lr=1e-3)

sick = {no_gradient: ('no gradient', 'spare.weight, spare.bias'),
        not_in_the_optimizer: ('not in the optimizer', '1.0.weight, 1.1.weight and 1 more'),
        gradient_of_0: ('gradient is 0', '0.weight, 0.bias and 3 more'),
        not_registered: ('not registered', 'Listed.rest[0]'),
        inputs_with_nan: ('inputs are not finite', 'input 0, column 3'),
        targets_of_hundreds: ('targets not normalised', 'the targets'),
        one_shape_for_a_column_and_a_row: ('outputs do not fit the loss', 'the last layer'),
        one_class_in_each_batch: ('no variety in a batch', 'the targets'),
        dead_units: ('dead units', '0'), vanishing_gradients: ('vanishing gradients', '0.weight, 2.weight and 1 more'),
        exploding_gradients: ('exploding gradients', '0.weight, 2.weight and 10 more'),
        exploding_outputs: ('exploding outputs', 'the last layer'),
        updates_too_large: ('updates too large', 'most layers'),
        updates_too_small: ('updates too small', 'most layers'),
        one_layer_too_large: ('updates too large', '8.weight'),
        batch_norm_of_one_item: ('batch norm of one item', '1'),
        batch_norm_of_a_last_item: ('batch norm of one item', "each epoch's last batch"),
        loss_is_not_finite: ('loss is not finite', 'batch 0'),
        loss_does_not_fall: ('loss does not fall', 'one batch, 30 times'),
        softmax_before_the_loss: ('outputs do not fit the loss', 'the last layer'),
        relu_before_targets_below_zero: ('outputs do not fit the loss', 'the last layer'),
        inputs_of_255: ('inputs not normalised', 'input 0'),
        one_column_of_dozens: ('inputs not normalised', 'input 0, column 64'),
        left_in_eval: ('left in eval', '2.1'), slow_data: ('slow data', 'the training loader')}

@pytest.mark.parametrize('make', sick, ids=lambda f: f.__name__)
def test_what_is_planted_is_found(digits, make):
    "One sick network of each kind: exactly that finding, at its place, in cells that a table shows whole"
    set_seed(42)

    found = make(*digits).doctor()

    assert [tuple(row)[:2] for row in found.values] == [sick[make]]
    assert all(0 < len(cell) <= 50 for row in found.values for cell in row)


# ---- what it leaves, shows and refuses

def test_the_limits_have_sources():
    "Each limit says where it is from"
    assert all(limit.source for limit in limits.values()) and limits['update_ratio'].value == (1e-4, 1e-2)

def state(learn):
    modes = [(m.training, len(m._forward_pre_hooks), len(m._forward_hooks)) for m in learn.model.modules()]
    return learn.state_hash(), torch.get_rng_state().tolist(), modes, [*learn.cbs], learn.opt, learn.history.to_json()

@pytest.mark.parametrize('event', [None, 'before_fit', 'before_batch', 'after_loss', 'before_step', 'after_step',
                                   'after_batch'])
@pytest.mark.parametrize('ex', [ValueError, KeyboardInterrupt, CancelFitException])
def test_no_trace_is_left(digits, event, ex):
    "Whatever ends the look, the Learner is as before"
    learn = learner_of(cnn(), *digits)
    learn.fit(1)
    before = state(learn)
    if event: learn.add_cb(Callback(**{event: lambda cb: cb.run_kind == 'lr_find' and raises(ex)(cb)}))

    try: learn.doctor(3)
    except (ValueError, KeyboardInterrupt): assert ex is not CancelFitException
    except RuntimeError as e: assert ex is CancelFitException and 'before its first batch' in str(e)
    learn.remove_cbs([cb for cb in learn.cbs if type(cb) is Callback])

    assert state(learn) == before

def test_the_next_fit_is_like_one_without(digits):
    "Weights after a fit are bit for bit the same, also if the doctor made the optimizer"
    def fitted(look):
        set_seed(0)
        learn = learner_of(cnn(), *digits)
        if look: learn.doctor(3)
        learn.fit(1)
        return learn.model.state_dict()

    a, b = fitted(True), fitted(False)

    assert all(torch.equal(a[k], b[k]) for k in a)

def test_it_is_shown(digits, capsys):
    "A script sees a line, and the table if there is one"
    learner_of(cnn(), *digits).doctor(3)
    assert capsys.readouterr().out == 'learn.doctor: nothing found in 3 batches with a learning rate of 0.001\n'

    left_in_eval(*digits).doctor(3, lr=2e-3)

    assert capsys.readouterr().out.splitlines()[:2] == [
        'learn.doctor: 1 thing found in 3 batches with a learning rate of 0.002 (left in eval)',
        'finding       where  measured  usual  try']

def test_it_draws_what_it_measured(digits, monkeypatch):
    "`plot=True` shows gradients and updates by layer, and the loss on one batch"
    shown = []
    monkeypatch.setattr('learner.callbacks.doctor.show_figure', lambda ax: shown.append(ax.figure))

    learner_of(cnn(), *digits).doctor(3, plot=True)

    axs = shown[0].axes
    assert [len(ax.lines[0].get_ydata()) for ax in axs] == [4, 4, 30]
    assert [t.get_text() for t in axs[0].get_xticklabels()] == ['1.0.weight', '2.0.weight', '4.0.weight', '8.weight']

@pytest.mark.parametrize('n', [0, 1, True, 2.5, '3'])
def test_bad_numbers_are_refused(n):
    "`n_batches` is a number of 2 or more"
    with pytest.raises((ValueError, TypeError), match='doctor: `n_batches` is .*2 or more'): synth_learner().doctor(n)

def test_what_a_fit_would_raise_is_raised():
    "All frozen, no parameters, a loader that can be iterated only once"
    with pytest.raises(ValueError, match='all parameters .* are frozen'):
        synth_learner(model=RegModel().requires_grad_(False)).doctor()
    with pytest.raises(ValueError, match='has no parameters'): synth_learner(model=nn.Identity()).doctor()
    once = iter([(torch.randn(8, 1), torch.randn(8, 1))]*5)
    with pytest.raises(ValueError, match='doctor would use up the training loader'):
        synth_learner(dls=(once, None)).doctor()

@pytest.mark.parametrize('event', ['before_batch', 'after_loss'])
def test_other_errors_are_raised(event):
    "Where batch normalisation got one item, only torch's own refusal of that is a finding"
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 1))
    batches = [(torch.randn(1, 3, 8, 8), torch.randn(1, 1))]*5
    learn = synth_learner(Callback(**{event: lambda cb: cb.run_kind == 'lr_find' and raises(ValueError('mine'))(cb)}),
                          model=model, dls=(batches, None))

    with pytest.raises(ValueError, match='mine'): learn.doctor()

def test_nothing_looked_at_is_no_clean_bill():
    "A fit that ends before its first batch is an error; one that makes no step a finding"
    with pytest.raises(RuntimeError, match='before its first batch'):
        synth_learner(Callback(before_fit=raises(CancelFitException))).doctor()

    found = synth_learner(Callback(before_step=lambda cb: raises(CancelStepException)(cb))).doctor()

    assert [*found.finding] == ['no step']

def test_odd_batches_and_layers():
    "Sparse inputs, inputs of several shapes, layers whose weight is computed: looked at, or left alone"
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.utils.parametrizations.weight_norm(nn.Linear(4, 1))
        def forward(self, x): return self.lin(x.to_dense() if x.is_sparse else x.flatten(1)[:, :4])
    x = torch.randn(8, 4)

    for batches in ([x.to_sparse()]*3, [x, x.view(8, 2, 2), x]):
        assert len(synth_learner(model=Odd(), dls=([(b, x[:, :1]) for b in batches], None)).doctor(3)) == 0

def test_few_batches_are_gone_through_again():
    "An epoch of two batches serves for ten"
    learn = synth_learner(n=2)
    seen = []
    learn.add_cb(Callback(after_batch=lambda cb: seen.append(cb.training)))

    learn.doctor(10)

    assert len(seen) == 10+30 and all(seen)
