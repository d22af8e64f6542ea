"""Promises of learner.transfer about heads: their layers, what they give, and how weights start."""
import numpy as np
import pytest
import torch
from torch import nn

from learner.models import xresnet18
from learner.transfer import AdaptiveConcatPool2d, SigmoidRange, apply_init, create_body, create_head, init_head

BN, D, Lin, R = nn.BatchNorm1d, nn.Dropout, nn.Linear, nn.ReLU


def test_concat_pool():
    "The largest value of each channel comes first, then the mean"
    x = torch.randn(2, 3, 4, 5)

    pooled = AdaptiveConcatPool2d()(x)

    torch.testing.assert_close(pooled, torch.cat([x.amax((2, 3), keepdim=True), x.mean((2, 3), keepdim=True)], 1))


@pytest.mark.parametrize('kwargs,layers,sizes,drops', [
    (dict(), [AdaptiveConcatPool2d, nn.Flatten, BN, D, Lin, R, BN, D, Lin], [(12, 512), (512, 3)], [.25, .5]),
    (dict(pool='avg', lin_ftrs=(), ps=.4), [nn.AdaptiveAvgPool2d, nn.Flatten, BN, D, Lin], [(6, 3)], [.4]),
    (dict(pool=None, lin_ftrs=[8, 4], first_bn=False, ps=[.1, .2, .3], y_range=(0, 5)),
     [nn.Flatten, D, Lin, R, BN, D, Lin, R, BN, D, Lin, SigmoidRange], [(6, 8), (8, 4), (4, 3)], [.1, .2, .3])])
def test_layers_of_a_head(kwargs, layers, sizes, drops):
    "A head has the layers, sizes and dropout asked for, and gives `(bs, n_out)`"
    head = create_head(6, 3, **kwargs)

    assert [type(m) for m in head] == layers
    assert [(m.in_features, m.out_features) for m in head if isinstance(m, Lin)] == sizes
    assert [m.p for m in head if isinstance(m, D)] == drops
    assert head(torch.randn(4, 6, *([] if kwargs.get('pool', '') is None else [2, 2]))).shape == (4, 3)


def test_y_range():
    "Scores with a `y_range` lie in it, and 0 becomes its middle"
    head = create_head(2, 1, lin_ftrs=(), pool=None, y_range=(-1, 5))
    apply_init(head, nn.init.zeros_)

    assert head(torch.randn(3, 2)).flatten().tolist() == [2]*3
    assert SigmoidRange(-1, 5)(torch.tensor([-1e4, 1e4])).tolist() == [-1, 5]


@pytest.mark.parametrize('kwargs,message', [
    (dict(pool='max'), "`pool` is 'max': give 'concat', 'avg' or None"),
    (dict(ps=[.1]), '`ps` has 1 values for 2 linear layers'), (dict(lin_ftrs=(), ps=[.1, .2]), '2 values for 1')])
def test_bad_head(kwargs, message):
    "An unknown pooling and a wrong number of dropouts are refused"
    with pytest.raises(ValueError, match=message): create_head(4, 2, **kwargs)


# ---- how weights start

def fill(w): w.fill_(3)  # fails on what requires gradients, outside of no_grad

def test_apply_init():
    "Weights of two or more dimensions are filled, their biases are 0, normalisation layers stay"
    model = nn.ModuleDict(dict(lin=nn.Linear(2, 2), conv=nn.Conv2d(2, 2, 1, bias=False), lstm=nn.LSTM(2, 2),
                               bn=nn.BatchNorm2d(2), ln=nn.LayerNorm((2, 2)), gn=nn.GroupNorm(1, 2),
                               act=nn.PReLU(2), table=nn.ParameterList([torch.ones(2, 2)])))
    for n in ('bn', 'ln', 'gn'): nn.init.ones_(model[n].bias)
    stay = 'bn', 'ln', 'gn', 'act', 'table'
    kept = {n: p.detach().clone() for n, p in model.named_parameters() if n.split('.')[0] in stay}

    apply_init(model, fill)

    wanted = {n: kept.get(n, torch.full_like(p, 0 if 'bias' in n else 3)) for n, p in model.named_parameters()}
    assert len(kept) == 8 and [n for n, p in model.named_parameters() if not torch.equal(p, wanted[n])] == []


def test_shared_weight_is_filled_once():
    "A weight of two layers is filled once"
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    before = model[0].weight.detach().clone()

    apply_init(model, lambda w: w.add_(1))

    assert torch.equal(model[0].weight, before+1)


def test_init_head():
    "Only the head starts anew; a weight that it shares with the body is the body's"
    shared = nn.Linear(6, 6)
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 6, 1), shared), create_head(6, 6).append(shared))
    body = [p.detach().clone() for p in model[0].parameters()]

    init_head(model, fill)

    assert all(map(torch.equal, model[0].parameters(), body))
    assert [m.weight.eq(3).all().item() for m in model[1] if isinstance(m, Lin)] == [True, True, False]


@pytest.mark.parametrize('model', [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), nn.ModuleList([nn.ReLU()]*2)])
def test_init_head_needs_a_head(model):
    "A model that is no Sequential of two or more is refused"
    with pytest.raises(ValueError, match='`init_head` needs an `nn.Sequential` of a body and a head, not a'):
        init_head(model)


# ---- bad input

@pytest.mark.parametrize('make,error,message', [
    (lambda: create_head('512', 10), TypeError, "`n_in` is '512'; give a whole number"),
    (lambda: create_head(8, 2, lin_ftrs=512), TypeError, '`lin_ftrs` is 512; give a list'),
    (lambda: create_head(8, 2, y_range=(5, 1)), ValueError, r'`y_range` \(5, 1\) must rise'),
    (lambda: create_body(xresnet18), TypeError, 'no nn.Module; call it: it makes one'),
    (lambda: create_body('xresnet18'), TypeError, "'xresnet18', no nn.Module"),
    (lambda: create_body(nn.Sequential(nn.ReLU(), nn.ReLU()), cut=True), TypeError, '`cut` is True: give a number')])
def test_bad_input(make, error, message):
    "What cannot be is refused by name"
    with pytest.raises(error, match=message): make()

def test_numpys_numbers():
    "numpy's numbers are numbers"
    assert len(create_body(nn.Sequential(nn.ReLU(), nn.ReLU()), cut=np.int64(1))) == 1
    assert [m.p for m in create_head(8, 2, ps=np.float32(.5)) if isinstance(m, nn.Dropout)] == [.25, .5]

class Gives(nn.Module):
    "Gives its last layer the input by name, or twice, or asks what it can catch"
    def __init__(self, how):
        super().__init__()
        self.how, self.a, self.b = how, nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        x = self.a(x)
        if self.how == 'name': return self.b(input=x)
        if self.how == 'twice': return self.b(x, x)
        try: return self.b(x)
        except Exception: return x

@pytest.mark.parametrize('how', ['name', 'catch'])
def test_cut_however_it_is_called(how):
    "A body ends at its cut also where that gets its input by name, or the model catches exceptions around it"
    model, x = Gives(how), torch.ones(1, 2)

    assert torch.equal(create_body(model, 'b')(x), model.a(x))

def test_cut_with_two_inputs():
    "A layer of two inputs is no place for a cut"
    with pytest.raises(RuntimeError, match='gives the Linear at the cut 2 inputs'):
        create_body(Gives('twice'), 'b')(torch.ones(1, 2))
