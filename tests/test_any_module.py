"""Any nn.Module: requirements N1 to N4, N9, N28, N29, N31 to N33, by their numbers."""
import weakref
from functools import partial
from warnings import catch_warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from learner.callback import Callback
from learner.events import (CancelBatchException, CancelEpochException, CancelFitException, CancelTrainException,
                            CancelValidException)
from learner.learner import Learner
from tests.helpers import RegModel, raises, synth_learner, weights


find = dict(num_it=3, end_lr=1., stop_div=False, show_plot=False, suggest_funcs=None)


class Pinned(nn.Sequential):
    "A model whose `train` keeps its batch norm in eval"
    def train(self, mode=True):
        super().train(mode)
        self[1].eval()
        self.calls = [*getattr(self, 'calls', []), mode]
        return self

def bn_net(cls=nn.Sequential): return cls(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

def test_n01_modes_are_switched_by_the_models_own_methods():
    "`train()` and `eval()` of the model are called, so that overridden ones work"
    model = bn_net(Pinned)
    learn = synth_learner(model=model)
    model.train()
    stats = model[1].running_mean.clone()
    model.calls = []

    learn.fit(1)

    assert model.calls[:2] == [True, False] and stats.equal(model[1].running_mean)

@pytest.mark.parametrize('run', [lambda learn: learn.fit(1), Learner.validate, lambda learn: learn.lr_find(**find)],
                         ids=['fit', 'validate', 'lr_find'])
@pytest.mark.parametrize('ex', [
    None, ValueError, KeyboardInterrupt, CancelFitException, CancelEpochException, CancelTrainException,
    CancelValidException, CancelBatchException])
@pytest.mark.parametrize('when', [True, False], ids=['training', 'evaluating'])
def test_n02_modes_come_back(run, ex, when):
    "Every module's mode is as before after fit, validate and lr_find, wherever and however they end"
    model = bn_net().eval()
    model[0].train()
    learn = synth_learner(Callback(after_loss=raises(ex, when)) if ex else None, model=model)
    modes = [m.training for m in model.modules()]

    with catch_warnings(action='ignore'):  # that a model in eval mode as a whole is trained
        try: run(learn)
        except (ValueError, KeyboardInterrupt, RuntimeError): pass

    assert [m.training for m in model.modules()] == modes

def test_n02_a_model_in_eval_mode_is_trained():
    "A model that is in eval mode as a whole is trained as a whole, which is told, and is in eval mode afterwards"
    learn, modes = synth_learner(model=bn_net().eval()), []
    learn.add_cb(Callback(before_batch=lambda cb: modes.append({m.training for m in cb.model.modules()})))

    with pytest.warns(UserWarning, match='in eval mode as a whole, and all of it is trained'): learn.fit(1)

    assert modes == [{True}, {True}, {False}] and not any(m.training for m in learn.model.modules())

def test_n03_a_frozen_batch_norm_stays_frozen():
    "A submodule put in eval by hand keeps its statistics bit for bit, and the user is told, once"
    model = bn_net()
    model[1].eval()
    learn = synth_learner(model=model, n=3)
    stats = {k: v.clone() for k, v in model[1].named_buffers()}

    with pytest.warns(UserWarning, match=r'left so while training: 1; `learn\.model\.train\(\)`'): learn.fit(1)
    learn.fit(1)

    assert all(v.equal(dict(model[1].named_buffers())[k]) for k, v in stats.items()) and not model[1].training

def test_n04_validation_returns_to_the_exact_modes():
    "Modes set by a callback in the midst of an epoch survive an evaluation"
    modes = []
    def switch(cb):
        cb.model[1].eval()
        cb.learn.validate()
        modes.append([m.training for m in cb.model])
    learn = synth_learner(Callback(before_batch=lambda cb: cb.training and switch(cb)), model=bn_net(), n=1)

    learn.fit(1)

    assert modes == [[True, False, True]]

class Plain(nn.Module):
    "Has a buffer only"
    def __init__(self): super().__init__(); self.register_buffer('scale', torch.ones(1))
    def forward(self, x): return x*self.scale

@pytest.mark.parametrize('make', [nn.Identity, Plain])
def test_n09_a_model_without_parameters_is_validated_but_not_fitted(make, tmp_path):
    "No parameters: validate, save and load work; fit and lr_find say that there is nothing to fit"
    learn = synth_learner(model=make(), path=tmp_path)

    assert learn.validate()['valid_loss'] > 0
    learn.load(learn.save('m'))
    learn.save_state('s')
    with pytest.raises(ValueError, match=f'`{make.__name__}` has no parameters'): learn.fit(1)
    with pytest.raises(ValueError, match=f'`{make.__name__}` has no parameters'): learn.lr_find(**find)

def test_n29_the_model_is_never_copied_or_replaced():
    "`learn.model` is the very model that was given, also while it trains"
    model, seen = RegModel(), []
    learn = synth_learner(Callback(after_batch=lambda cb: seen.append(cb.model is model)), model=model)

    learn.fit(1)

    assert all(seen) and learn.model is model

class Scaled(nn.Module):
    def __init__(self): super().__init__(); self.scale = nn.Parameter(torch.ones(()))
    def forward(self, pred, y): self.seen = [*getattr(self, 'seen', []),
                                             self.training]; return self.scale*F.mse_loss(pred, y)

def test_n31_a_loss_module_is_switched_and_can_be_trained():
    "A loss that is a module is switched with the model, trained through a splitter that returns its parameters"
    loss = Scaled().eval()
    learn = synth_learner(loss_func=loss, n=1, splitter=lambda m: [list(m.parameters()), list(loss.parameters())])

    learn.fit(1)

    assert loss.seen == [True, False] and not loss.training and loss.scale != 1

def test_n31_untrained_parameters_of_the_loss_are_named():
    "Parameters of the loss that no splitter returns are named in a warning"
    with pytest.warns(UserWarning, match='not trained.*loss_func.scale'): synth_learner(loss_func=Scaled()).fit(1)

def test_n32_nothing_is_held_after_a_fit():
    "After a fit, learner and callbacks hold no batch, prediction or graph"
    refs = []
    def watch(cb): refs.extend(weakref.ref(o) for o in (cb.x, cb.pred, cb.loss_grad, cb.loss))
    learn = synth_learner(Callback(after_loss=watch), n=3, metrics=F.l1_loss)

    learn.fit(1)

    assert not any(r() is not None for r in refs)

def test_n33_validate_before_fit_changes_nothing():
    "validate before any fit, and two fits on one model, give what fresh ones give"
    a, b = synth_learner(lr=.1), synth_learner(lr=.1)

    a.validate()
    a.fit(1)
    a.fit(1)
    b.fit(2)

    assert all(p.equal(q) for p, q in zip(weights(a), weights(b)))

@pytest.mark.parametrize('when,nth', [(True, 1), (True, 2), (False, 1)])
@pytest.mark.parametrize('event', ['before_batch', 'after_loss', 'before_step', 'after_step'])
def test_n33_a_fit_after_a_failed_one(when, nth, event):
    "Once the weights are put back, a fit after one that failed is what it is on a fresh model: nothing else was left"
    learn, fresh = (synth_learner(model=RegModel(), lr=.1, opt_func=partial(torch.optim.SGD, lr=.1)) for _ in range(2))
    start = {k: v.clone() for k, v in learn.model.state_dict().items()}
    fresh.model.load_state_dict(start)

    if not when and 'step' in event: event = 'after_batch'
    with pytest.raises(ValueError): learn.fit(2, cbs=Callback(**{event: raises(ValueError, when, nth)}))
    learn.model.load_state_dict(start)
    for one in (learn, fresh): one.fit(2)

    assert all(p.equal(q) for p, q in zip(weights(learn), weights(fresh)))
    assert learn.recorder.raw_losses == fresh.recorder.raw_losses

def test_n28_errors_inside_the_model_are_shown():
    "An AttributeError raised in the model's own code is reported as it is"
    class Broken(RegModel):
        @property
        def size(self): return torch.ones(1).no_such_thing
        def forward(self, x): return super().forward(x)*self.size

    with pytest.raises(AttributeError, match='size|no_such_thing'): synth_learner(model=Broken()).fit(1)
