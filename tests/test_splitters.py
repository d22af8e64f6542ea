"""Promises of learner.splitters: groups, and which parameters decay or have options of their own."""
import pickle

import pytest
import torch
from fastcore.foundation import L
from torch import nn
from torch.nn.utils import parametrizations

from learner.optim import SGD, make_opt, missing_params
from learner.splitters import default_split, split_blocks, split_patterns
from tests.helpers import synth_learner
from tests.optim_helpers import by_layer, net, one_group, weights


def decays(**modules):
    "Names of the parameters that shrink when gradients are 0"
    model = nn.ModuleDict(modules)
    opt = one_group(SGD, model, wd=.5)
    for p in opt.all_params(): p.grad = torch.zeros_like(p.data.fill_(1.))
    opt.step()
    return {n for n, p in model.named_parameters() if not torch.equal(p, torch.ones_like(p))}


# ---- groups from splitters, and what they may not be

@pytest.mark.parametrize('splitter', [
    lambda m: m.parameters(), lambda m: tuple(m.parameters()), lambda m: [list(m.parameters())],
    lambda m: L(m.parameters())])
def test_one_group(splitter):
    "Parameters in any iterable, or in a list of one list, are one group"
    model = net()

    assert [len(ps) for ps in make_opt(SGD, splitter(model), model, .1).param_lists] == [8]


@pytest.mark.parametrize('splitter,error,message', [
    (lambda m: [m[:2].parameters(), m.parameters()], ValueError, '`0.weight` is in group 0 and in group 1'),
    (lambda m: [*m.parameters(), m[0].bias], ValueError, '`0.bias` is in group 0 and in group 0'),
    (lambda m: [nn.Parameter(torch.ones(2, 3))], ValueError, r'tensor of shape \[2, 3\], no parameter of `Sequential`'),
    (lambda m: [m.parameters(), []], ValueError, 'group 1 of the 2 that `splitter` returned is empty'),
    (lambda m: [], ValueError, '`splitter` returned no parameters of `Sequential`'),
    (lambda m: [m[:2], m[2:]], TypeError, 'group 0 has a `Sequential`'),
    (lambda m: [{'params': m.parameters()}], TypeError, 'group 0 has a `dict`'),
    (lambda m: None, TypeError, 'group 0 has a `NoneType`')])
def test_bad_splitter(splitter, error, message):
    "Duplicates, foreign tensors, empty groups and other things than parameters are refused by name"
    model = net()

    with pytest.raises(error, match=message): make_opt(SGD, splitter(model), model, .1)


def test_model_without_parameters():
    "A model without parameters is an error that says so"
    with pytest.raises(ValueError, match='`ReLU` has no parameters'): one_group(SGD, nn.ReLU())


def test_left_out_parameters_are_named():
    "Trainable parameters that no group holds are named, frozen ones are not"
    model = net()
    model[0].requires_grad_(False)

    opt = make_opt(SGD, model[2:].parameters(), model, .1)

    assert missing_params(opt, model) == ['1.weight', '1.bias']


def test_parameters_that_come_later_are_found():
    "`missing_params` names what was added after the optimizer was made"
    model = net()
    opt = one_group(SGD, model)

    model.append(nn.Linear(2, 1))

    assert missing_params(opt, model) == ['5.weight', '5.bias']


def test_parameters_of_the_loss():
    "A splitter may return the loss's parameters; if it does not, they are missing"
    model, loss_func = net(), nn.Linear(2, 1)
    opt = make_opt(SGD, [model.parameters(), loss_func.parameters()], model, .1, loss_func=loss_func)

    assert 'loss_func.weight … loss_func.bias' in repr(opt)
    without = make_opt(SGD, model.parameters(), model, .1, loss_func=loss_func)
    assert missing_params(without, model, loss_func) == ['loss_func.weight', 'loss_func.bias']


# ---- decay of norms and biases, options by parameter

@pytest.mark.parametrize('layer', [
    nn.BatchNorm1d(3), nn.BatchNorm2d(3), nn.BatchNorm3d(3), nn.SyncBatchNorm(3), nn.InstanceNorm1d(3, affine=True),
    nn.InstanceNorm2d(3, affine=True), nn.InstanceNorm3d(3, affine=True), nn.LayerNorm(3), nn.GroupNorm(1, 3),
    nn.RMSNorm(3)], ids=lambda m: type(m).__name__)
def test_normalisation_layers_do_not_decay(layer):
    "No parameter of any of torch's normalisation layers decays, those of other layers do"
    assert decays(norm=layer, emb=nn.Embedding(2, 3), lin=nn.Linear(3, 3)) == {'emb.weight', 'lin.weight'}


def test_lazy_normalisation_does_not_decay():
    "A lazy normalisation layer is one before it knows its shape"
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    opt = one_group(torch.optim.AdamW, model)

    assert [[opt.names[p][0] for p in g['params']] for g in opt.opt.param_groups if g['weight_decay']] == [['0.weight']]


@pytest.mark.parametrize('layer,decayed', [
    (nn.LSTM(3, 2), {'m.weight_ih_l0', 'm.weight_hh_l0'}),
    (nn.MultiheadAttention(4, 2), {'m.in_proj_weight', 'm.out_proj.weight'}),
    (parametrizations.weight_norm(nn.Linear(3, 2), 'bias'), {'m.weight'})], ids=['lstm', 'attention', 'parametrized'])
def test_biases_do_not_decay(layer, decayed):
    "Biases are found by name, in recurrent and attention layers and under a parametrization too"
    assert decays(m=layer) == decayed


def test_decay_set_later_spares_biases():
    "Decay that starts at 0 takes no group of its own in torch's optimizer, and spares norms and biases once it is set"
    model = net()
    opt = make_opt(SGD, by_layer(model), model, .1)
    assert len(opt.opt.param_groups) == 4

    opt.set_hyper('wd', .5)
    for p in opt.all_params(): p.grad = torch.zeros_like(p)
    before = weights(model)
    opt.step()

    changed = [not torch.equal(a, b) for a, b in zip(weights(model), before)]
    assert changed == [True, False, False, False, True, False, True, False]
    assert len(opt.hypers) == 4 and len(opt.opt.param_groups) == 7


def test_param_opts_multiply_and_fix():
    "A multiplier stays under `set_hyper` and schedules, a fixed value stays as it is, `hypers` shows the base"
    model = net()
    opt = one_group(torch.optim.AdamW, model, .1, wd_bn_bias=True,
                    param_opts={'4.*': dict(lr_mult=10, wd_mult=.5), 'bias': dict(wd=.25), '2.weight': dict(mom=.5)})

    opt.set_hypers(lr=.2, wd=.5)

    found = {opt.names[p][0]: (g['lr'], g['weight_decay'], g['betas'][0])
             for g in opt.opt.param_groups for p in g['params']}
    bias = (.2, .25, .9)
    assert found == {'0.weight': (.2, .5, .9), '0.bias': bias, '1.weight': (.2, .5, .9), '1.bias': bias,
                     '2.weight': (.2, .5, .5), '2.bias': bias, '4.weight': (2., .25, .9), '4.bias': (2., .25, .9)}
    assert opt.hypers == [dict(lr=.2, mom=.9, sqr_mom=.999, eps=1e-8, wd=.5)]


@pytest.mark.parametrize('param_opts,found', [
    ({'*': dict(lr_mult=10)}, {1.}), ({'0.*': dict(lr_mult=0)}, {0., .1}), ({'0.*': dict(lr=5)}, {5., .1})])
def test_hypers_show_the_base(param_opts, found):
    "`hypers` shows the value that was set, whichever parameters have a multiplier or a fixed value"
    opt = one_group(SGD, net(), .1, param_opts=param_opts)

    assert opt.hypers[0]['lr'] == .1 and {g['lr'] for g in opt.opt.param_groups} == found


@pytest.mark.parametrize('param_opts,message', [
    ({'head.*': dict(lr_mult=10)}, r"`param_opts`: 'head.\*' matches none of 0.weight, 0.bias"),
    ({'0.*': dict(lr_mul=10)}, '`param_opts`: SGD has no lr_mul, only lr, lr_mult, wd, wd_mult'),
    ({'0.*': dict(mom=.9)}, '`param_opts`: SGD has no mom, only')])
def test_bad_param_opts(param_opts, message):
    "A pattern that matches nothing and an option the optimizer has not are errors"
    with pytest.raises(ValueError, match=message): one_group(SGD, net(), param_opts=param_opts)


def test_tied_parameters():
    "A tied parameter is one parameter, stepped once, and `param_opts` finds it under each of its names"
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    opt, before = one_group(SGD, model, .1, param_opts={'1.weight': dict(lr_mult=2)}), model[0].weight.detach().clone()

    model[0].weight.grad = torch.ones(3, 3)
    opt.step()

    assert len(opt.all_params()) == 1
    torch.testing.assert_close(model[1].weight.detach(), before-.2)


# ---- splitters

class Tied(nn.Module):
    "A parameter of its own, three layers, of which the last shares the weight of the first, and one without parameters"
    def __init__(self):
        super().__init__()
        self.scale, self.enc, self.act = nn.Parameter(torch.ones(1)), nn.Linear(2, 2), nn.ReLU()
        self.mid = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.dec = nn.Linear(2, 2)
        self.dec.weight = self.enc.weight


def body_and_head(): return nn.Sequential(net(), nn.ReLU(), nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))

def named(splitter, model):
    "The groups of a splitter as names"
    names = {p: n for n, p in model.named_parameters()}
    return [[names[p] for p in ps] for ps in splitter(model)]

enc, mid = ['enc.weight', 'enc.bias'], ['mid.0.weight', 'mid.0.bias', 'mid.1.weight', 'mid.1.bias']

@pytest.mark.parametrize('splitter,groups', [
    (split_blocks(), [['scale', *enc], mid, ['dec.bias']]),
    (split_blocks('enc'), [['scale'], [*enc, *mid, 'dec.bias']]),
    (split_blocks('mid', 'dec'), [['scale', *enc], mid, ['dec.bias']]),
    (split_blocks('act', 'mid.1'), [['scale', *enc], mid[:2], [*mid[2:], 'dec.bias']]),
    (split_patterns('mid.*', 'dec.*'), [['scale', 'enc.bias'], mid, ['enc.weight', 'dec.bias']]),
    (split_patterns('bias', 'mid.*'), [['scale', 'enc.weight'], ['enc.bias', *mid[1::2], 'dec.bias'], mid[::2]]),
    (split_patterns('mid.?.weight', '*'), [mid[::2], ['scale', *enc, *mid[1::2], 'dec.bias']])])
@pytest.mark.parametrize('copied', [lambda s: s, lambda s: pickle.loads(pickle.dumps(s))], ids=['made', 'pickled'])
def test_groups_of_splitters(splitter, groups, copied):
    "Groups begin at the layers named, or have the parameters that match; each parameter is in the first that fits"
    assert named(copied(splitter), Tied()) == groups


def test_default_split():
    "The first child is a group, all that comes after it the other; what they share is in the first"
    model = body_and_head()
    model[2][0].bias = model[0][0].bias

    body, head = named(default_split, model)

    assert body == [n for n, _ in model.named_parameters() if n.startswith('0.')]
    assert head == ['2.0.weight', '2.1.weight', '2.1.bias']


@pytest.mark.parametrize('model,groups', [
    (net(), [['0.weight', '0.bias'], ['1.weight', '1.bias'], ['2.weight', '2.bias'], ['4.weight', '4.bias']]),
    (nn.Linear(2, 1), [['weight', 'bias']]), (nn.Sequential(nn.ParameterList([torch.ones(1)])), [['0.0']])])
def test_children_are_groups(model, groups):
    "Without names each child with parameters is a group; a model without such children is one"
    assert named(split_blocks(), model) == groups


def test_blocks_from_the_first_layer():
    "There is no empty group before the first start"
    assert [len(ps) for ps in split_blocks('0', '2')(net())] == [4, 4]


@pytest.mark.parametrize('splitter,lrs', [
    (default_split, [1e-4, 1e-2]), (split_blocks('0.2', '2'), [1e-4, 1e-3, 1e-2]), (split_blocks(), [1e-4, 1e-2]),
    (split_patterns('2.0.*', '2.1.*'), [1e-4, 1e-3, 1e-2])])
def test_splitter_of_a_learner(splitter, lrs):
    "A learner trains the groups of its splitter at rates from the first to the last of a slice, and freezes them"
    learn = synth_learner(model=body_and_head(), splitter=splitter, lr=slice(1e-4, 1e-2))

    learn.create_opt()
    learn.opt.freeze()

    assert [h['lr'] for h in learn.opt.hypers] == pytest.approx(lrs)
    assert missing_params(learn.opt, learn.model) == [] and not learn.model[0][0].weight.requires_grad
    assert learn.model[2][1].bias.requires_grad and len(learn.opt.all_params()) == 12


@pytest.mark.parametrize('splitter,model,message', [
    (default_split, nn.Linear(2, 2), '`default_split` needs an `nn.Sequential` .* not a `Linear` with 0 children'),
    (default_split, nn.Sequential(nn.Linear(2, 2)), 'not a `Sequential` with 1 children'),
    (split_blocks('mid', 'head'), Tied(), "`Tied` has no submodule 'head'; its children are enc, act, mid, dec"),
    (split_blocks('dec', 'mid'), Tied(), "'mid' does not come after 'dec' in `Tied`"),
    (split_blocks('mid', 'mid'), Tied(), "'mid' does not come after 'mid'"),
    (split_blocks('act', 'mid'), Tied(), "the group that begins at 'act' has no parameters"),
    (split_patterns('mid.*', 'head.*'), Tied(), r"'head.\*' matches none of scale, enc.weight, enc.bias, mid.0.weight"),
    (split_patterns('mid.*', 'mid.0.*'), Tied(), r"'mid.0.\*' matches none .* or only what an earlier")])
def test_bad_splits(splitter, model, message):
    "A name or pattern that makes no group is refused, with the names there are"
    with pytest.raises(ValueError, match=message): splitter(model)

@pytest.mark.parametrize('split', [split_blocks, split_patterns])
@pytest.mark.parametrize('names', [(['0', '1'],), (0, 1)])
def test_names_are_texts(split, names):
    "Names are given one by one, as text"
    with pytest.raises(TypeError, match='is no text; give names one by one'): split(*names)
