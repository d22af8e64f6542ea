"""Caffe's update rules: the iterates of one weight by our optimizers equal those of the vectors, in float64.

Clipping is left to tests/test_solver.py: Caffe clips a sum over batches, `GradientClip` their mean."""
import json
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from learner import L1, Adadelta, Adagrad, Adam, Callback, GradientAccumulation, Learner, RMSProp
from learner.optim import SGD
from tests.helpers import synth_learner

cases = {c['name']: c for c in json.loads((Path(__file__).parent/'data'/'caffe_updates.json').read_text())['cases']}
unclipped = [name for name, c in cases.items() if 'clip_gradients' not in c['params']]


class Weight(nn.Module):
    "(w - target)², with w = 3"
    def __init__(self): super().__init__(); self.weight = nn.Parameter(torch.tensor(3., dtype=torch.float64))
    def forward(self, x): return (self.weight-x)**2

def opt_func(type, momentum=0., rms_decay=.99, delta=1e-8, **_):
    if type == 'AdaGrad': return partial(Adagrad, eps=delta, decouple_wd=False)
    if type == 'RMSProp': return partial(RMSProp, sqr_mom=rms_decay, eps=delta, decouple_wd=False)
    if type == 'AdaDelta': return partial(Adadelta, sqr_mom=momentum, eps=delta, decouple_wd=False)
    if type == 'Adam':
        return partial(Adam, mom=momentum, sqr_mom=.999, eps=delta, wd=0., decouple_wd=False, eps_hat=True)
    return partial(SGD, mom=momentum, decouple_wd=False, nesterov=type == 'Nesterov', lr_in_velocity=True)

def iterates(case, opt_func):
    "The weight before each step and after the last one"
    params, seen, rates = case['params'], [3.], iter(case['lr'])
    batches = [(torch.tensor([t], dtype=torch.float64), torch.zeros(1)) for t in case['targets']]
    note = Callback(before_batch=lambda cb: cb.opt.set_hyper('lr', next(rates)) if not cb.iter else None,
                    after_step=lambda cb: cb.learn.stepped and seen.append(cb.model.weight.item()))
    decay = params.get('weight_decay', 0.)
    l1 = [L1(decay)] if params.get('regularization_type') == 'L1' else []
    learn = Learner((batches, None), Weight(), lambda pred, y: pred.mean(), opt_func,
                    cbs=[note, *l1, GradientAccumulation(len(batches), 'batches')], default_cbs=False,
                    wd=None if l1 else decay, wd_bn_bias=True,
                    param_opts={'weight': {k: params[f'{other}_mult'] for k, other in (('lr_mult', 'lr'),
                                ('wd_mult', 'decay')) if f'{other}_mult' in params}})
    learn.fit(len(case['lr']))
    return seen


@pytest.mark.parametrize('name', unclipped)
def test_iterates(name):
    "To 1e-9, whatever the solver, its decay, multipliers, micro-batches, and changes of the rate"
    case = cases[name]

    assert iterates(case, opt_func(**case['params'])) == pytest.approx(case['w'], abs=1e-9)

@pytest.mark.parametrize('name', ['sgd_momentum_lr_step(gamma=.1,stepsize=2)', 'nesterov_lr_step(gamma=.1,stepsize=2)'])
def test_torchs_velocity_is_another(name):
    "Unless the rate is inside, an old velocity is slowed by the new rate"
    case = cases[name]
    plain = partial(SGD, mom=.9, decouple_wd=False, nesterov=case['params']['type'] == 'Nesterov')

    assert abs(iterates(case, plain)[4]-case['w'][4]) > .1

@pytest.mark.parametrize('nesterov', [False, True])
@pytest.mark.parametrize('rates', [[.1, .1, 0., 0., .05], [0., .1, 0., .1], [.1, .01, .1, .001]])
def test_any_rate(rates, nesterov):
    "Also one of 0, at which the velocity that there was goes on"
    w, v, expected = 3., 0., [3.]
    for lr in rates:
        old, v = v, .9*v+lr*2*(w-1)
        w -= 1.9*v-.9*old if nesterov else v
        expected.append(w)

    found = iterates(dict(params={}, targets=[1.], lr=rates),
                     partial(SGD, mom=.9, nesterov=nesterov, lr_in_velocity=True))

    assert found == pytest.approx(expected, abs=1e-12)

@pytest.mark.parametrize('make', [partial(SGD, mom=.9, lr_in_velocity=True), partial(Adam, eps=.1, eps_hat=True)])
@pytest.mark.parametrize('how', ['copy', 'state'])
def test_they_go_on_as_ever(make, how):
    "From a copy and from a saved state, with what the hooks keep; `eps` is what it was set to"
    whole, learn = (synth_learner(opt_func=make, lr=.1, n=4) for _ in range(2))
    for o in whole, learn:
        o.fit(1)
        o.opt.set_hyper('lr', .01)
    if how == 'copy':
        made_from = learn.opt.made_from
        learn.opt = deepcopy(learn.opt, {id(p): p for p in learn.model.parameters()})
        learn.opt.made_from = made_from
    else:
        state = learn.opt.state_dict()
        learn.create_opt()
        learn.opt.load_state_dict(state)

    for o in whole, learn: o.fit(1, lr=.02)

    assert all(map(torch.equal, whole.model.parameters(), learn.model.parameters()))
    if 'eps' in make.keywords: assert learn.opt.hypers[0]['eps'] == .1

def test_l1_leaves_what_does_not_decay():
    "Biases; a weight of 0 stays; the loss that is recorded is the plain one"
    model = nn.Linear(1, 1)
    model.weight.data.zero_()
    learn = synth_learner(L1(.5), model=model, opt_func=torch.optim.SGD, lr=.1, loss_func=lambda p, y: p.sum()*0, n=1)
    bias = model.bias.item()

    learn.fit(1)
    model.weight.data.fill_(-2.)
    learn.fit(1)

    assert model.bias.item() == bias and model.weight.item() == pytest.approx(-2+.1*.5)
    assert learn.final_record['train_loss'] == 0

def test_sparse_gradients_are_refused():
    "L1 would change rows that took no part"
    class Words(nn.Module):
        def __init__(self): super().__init__(); self.e = nn.Embedding(5, 1, sparse=True)
        def forward(self, x): return self.e(x).sum(1)
    dls = [(torch.tensor([[1, 2]]), torch.zeros(1, 1))], None

    with pytest.raises(TypeError, match='the gradient of `e.weight` is sparse'):
        synth_learner(L1(.1), model=Words(), dls=dls, opt_func=torch.optim.SGD).fit(1)
