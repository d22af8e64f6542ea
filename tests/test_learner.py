"""The Learner: fits, rates, what may change between them, and where the forward runs."""
import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from fastcore.basics import patch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from learner.callback import Callback
from learner.callbacks.recorder import Recorder
from learner.learner import Learner
from tests.helpers import RegModel, Tracer, synth_dls, synth_learner, trace, weights


# ---- fits

def test_fit_again_trains_on():
    "A second fit goes on from the first one's weights and optimizer state"
    a, b = synth_learner(lr=.01), synth_learner(lr=.01)

    a.fit(2)
    b.fit(1)
    opt = b.opt
    b.fit(1)

    assert all(p.equal(q) for p, q in zip(weights(a), weights(b))) and b.opt is opt and b.n_step == 4

def test_reset_opt():
    "`reset_opt=True` begins with a new optimizer"
    learn = synth_learner()
    learn.fit(1)
    opt = learn.opt

    learn.fit(1, reset_opt=True)

    assert learn.opt is not opt

def test_repr():
    "A Learner shows its model, its data and how far it is"
    learn = synth_learner(n=3)
    learn.fit(1)

    assert repr(learn) == 'Learner(RegModel, DataLoaders(train: 3 batches, valid: 1 batches), 3 steps taken)'

def test_fit_zero():
    "`fit(0)` fires before_fit and after_fit, and trains nothing"
    learn = synth_learner()
    before = weights(learn)

    assert trace(learn, n_epoch=0) == ['before_fit', 'after_fit', 'cleanup_fit']
    assert all(p.equal(q) for p, q in zip(before, weights(learn)))

def test_start_epoch_skips_without_events():
    "Epochs before `start_epoch` fire nothing and leave no row"
    learn = synth_learner(n=1, n_valid=0)
    seen = []

    learn.fit(3, start_epoch=2, cbs=Callback(before_epoch=lambda cb: seen.append((cb.epoch, cb.n_epoch))))

    assert seen == [(2, 3)] and len(learn.recorder.values) == 1 and learn.history.epoch.tolist() == [2]

def test_no_validation_set():
    "Without a validation set the phase is skipped, and its columns are not there"
    learn = synth_learner(n_valid=0)

    assert not any('validate' in e for e in trace(learn))
    assert learn.recorder.metric_names == ['epoch', 'train_loss', 'time']
    with pytest.raises(ValueError, match='there is no validation set'): learn.validate()

class Endless(IterableDataset):
    def __init__(self, n): self.n = n
    def __iter__(self): return ((torch.ones(1)*i, torch.ones(1)) for i in range(self.n))

def test_unsized_loaders():
    "Loaders without a length train, validate and record"
    learn = synth_learner(dls=(DataLoader(Endless(10), 4), DataLoader(Endless(6), 4)))
    n_iter = []

    learn.fit(2, cbs=Callback(after_batch=lambda cb: n_iter.append(cb.n_iter)))

    assert n_iter == [None]*10 and learn.n_step == 6 and learn.history.valid_loss.notna().all()

def test_lists_and_one_iterable_serve_as_loaders():
    "A list of batches is a loader, and one iterable alone is a training set"
    batches = [(torch.randn(4, 1), torch.randn(4, 1)) for _ in range(3)]

    pair, single = synth_learner(dls=(batches, batches[:1])), synth_learner(dls=batches)
    pair.fit(1)
    single.fit(1)

    assert pair.n_step == single.n_step == 3 and 'valid_loss' not in single.history

def test_validate_before_any_fit():
    "`validate` needs no fit before it, and makes no optimizer"
    learn = synth_learner()

    assert learn.validate(1)[0] > 0 and learn.validate(0)[0] > 0 and learn.opt is None

def test_validate_another_loader():
    "`validate(dl=…)` takes any loader; `stage` tells it from the validation set"
    learn, stages = synth_learner(), []
    dl = synth_dls(5, 0)[0]

    row = learn.validate(dl=dl, cbs=Callback(after_batch=lambda cb: stages.append(cb.stage)))

    assert stages == ['test']*5 and row['valid_loss'] > 0

def test_stage_and_run_kind():
    "`stage` and `run_kind` say what is going on, and nothing when nothing is"
    learn, seen = synth_learner(n=1), []
    look = Callback(before_batch=lambda cb: seen.append((cb.run_kind, cb.stage)))

    learn.fit(1, cbs=look)
    learn.validate(cbs=look)

    assert seen == [('fit', 'train'), ('fit', 'valid'), ('validate', 'valid')] and (learn.run_kind,
                                                                                    learn.stage) == ('', '')

def test_pct_train_is_fastais():
    "`pct_train` is the share of all batches of the fit that is done, and ends at 1"
    seen = []
    learn = synth_learner(Callback(before_batch=lambda cb: cb.training and seen.append(round(cb.pct_train, 6))), n=4)

    learn.fit(2)

    assert seen == [0, .125, .25, .375, .5, .625, .75, .875] and learn.pct_train == 1

def test_patch_extends_learner_from_a_cell():
    "A method added with @patch works on existing Learners"
    learn = synth_learner()

    @patch
    def fit_twice(self: Learner, lr): self.fit(1, lr), self.fit(1, lr)
    learn.fit_twice(.1)

    assert learn.n_step == 4
    del Learner.fit_twice

def test_subclass_hooks_are_used():
    "The private methods that fastai's extensions override are called, and may be overridden here too"
    called = []
    class Mine(Learner):
        def _backward(self): called.append('_backward'); super()._backward()
        def _step(self): called.append('_step'); super()._step()
        def _split(self, b): called.append('_split'); super()._split(b)
        def _do_one_batch(self): called.append('_do_one_batch'); super()._do_one_batch()
        def _do_epoch_train(self): called.append('_do_epoch_train'); super()._do_epoch_train()
        def _do_epoch_validate(self, *args): called.append('_do_epoch_validate'); super()._do_epoch_validate(*args)
        def _do_epoch(self): called.append('_do_epoch'); super()._do_epoch()
        def _do_fit(self): called.append('_do_fit'); super()._do_fit()
        def _end_cleanup(self): called.append('_end_cleanup'); super()._end_cleanup()

    Mine(synth_dls(1, 0), RegModel(), F.mse_loss, default_cbs=False).fit(1)

    assert called == ['_do_fit', '_do_epoch', '_do_epoch_train', '_split', '_do_one_batch', '_backward', '_step',
                      '_do_epoch_validate', '_end_cleanup']


# ---- rates

@pytest.mark.parametrize('learner_lr, opt_func, fit_lr, used', [
    (.5, partial(torch.optim.SGD, lr=.3), .2, .2), (.5, partial(torch.optim.SGD, lr=.3), None, .5),
    (None, partial(torch.optim.SGD, lr=.3), None, .3), (None, torch.optim.SGD, None, 1e-3), (0., torch.optim.SGD, None,
                                                                                             0.)])
def test_precedence_of_lr(learner_lr, opt_func, fit_lr, used):
    "fit's argument, then the Learner's, then the one inside a partial, then 1e-3"
    learn = synth_learner(lr=learner_lr, opt_func=opt_func)

    learn.fit(1, fit_lr)

    assert learn.opt.hypers[0]['lr'] == used and learn.lr == (used if fit_lr is None else learner_lr)

def test_lr_reads_as_the_running_fits():
    "`learn.lr` is the fit's own rate while it runs, and the Learner's again afterwards; setting it then acts at once"
    seen = []
    def look(cb): seen.append((cb.lr, cb.opt.hypers[0]['lr']))
    def change(cb): cb.learn.lr = .25
    learn = synth_learner(Callback(before_train=look), lr=.1)

    learn.fit(1, .5)
    learn.fit(2, .5, cbs=Callback(after_epoch=change))

    assert seen == [(.5, .5), (.5, .5), (.25, .25)] and learn.lr == .25

def test_wd_of_a_fit_is_for_that_fit():
    "`fit(wd=…)` holds for that fit only; the Learner's own holds for all that give none"
    seen = []
    def look(cb): seen.append(cb.opt.hypers[0]['wd'])
    learn = synth_learner(Callback(before_train=look), wd=.1, opt_func=torch.optim.AdamW)

    learn.fit(1, wd=.3)
    learn.fit(1)
    learn.wd = .2
    learn.fit(1)

    assert seen == [.3, .1, .2]


# ---- what changes between fits

def test_a_new_model_is_trained():
    "Assigning `learn.model` between fits makes a new optimizer, and says so"
    learn = synth_learner()
    learn.fit(1)
    learn.model = RegModel()
    before = weights(learn)

    with pytest.warns(UserWarning, match='made anew, since `model` changed'): learn.fit(1)

    assert not before[0].equal(weights(learn)[0])

@pytest.mark.parametrize('name, value', [('opt_func', torch.optim.SGD), ('splitter', lambda m: [[m.a], [m.b]])])
def test_a_new_optimizer_where_needed(name, value):
    "Assigning opt_func or splitter between fits takes effect, and says so"
    learn = synth_learner()
    learn.fit(1)
    setattr(learn, name, value)

    with pytest.warns(UserWarning, match=f'since `{name}` changed'): learn.fit(1)

    assert len(learn.opt.hypers) == (2 if name == 'splitter' else 1)
    assert isinstance(learn.opt.opt, torch.optim.SGD) == (name == 'opt_func')

def test_new_data_takes_effect():
    "Assigning `learn.dls` between fits trains on the new data"
    learn = synth_learner(n=2)
    learn.fit(1)
    learn.dls = synth_dls(5, 1)

    learn.fit(1)

    assert learn.n_step == 7

def test_a_model_swapped_in_a_fit_keeps_the_optimizer():
    "A callback may wrap the model during a fit; the optimizer, which holds the same parameters, stays"
    class Wrapped(nn.Module):
        def __init__(self, m): super().__init__(); self.m = m
        def forward(self, x): return self.m(x)
    learn = synth_learner()
    learn.fit(1)
    opt = learn.opt

    learn.fit(1, cbs=Callback(before_fit=lambda cb: setattr(cb.learn, 'model', Wrapped(cb.model))))
    learn.fit(1)

    assert learn.opt is opt and learn.n_step == 6

def test_parameters_that_appear_late_are_named():
    "Parameters added in before_fit, when the optimizer exists, are named in a warning"
    def add(cb): cb.model.late = nn.Parameter(torch.ones(1))

    with pytest.warns(UserWarning, match='not trained, since the optimizer was made without them: late'):
        synth_learner(Callback(before_fit=add)).fit(1)


# ---- metrics and copies

def test_learner_can_be_copied_with_its_model():
    "A deep copy of a Learner trains on its own"
    a = synth_learner()
    a.fit(1)

    b = copy.deepcopy(a)
    b.fit(1)

    assert b.model is not a.model and (a.n_step, b.n_step) == (2, 4) and not weights(a)[0].equal(weights(b)[0])

def test_metrics_can_be_reassigned():
    "`learn.metrics = …` wraps what it is given"
    learn = synth_learner()
    learn.metrics = [F.l1_loss]

    learn.fit(1)

    assert learn.recorder.values[0].names == ('train_loss', 'valid_loss', 'l1_loss')

def test_train_metrics():
    "`Recorder(train_metrics=True)` has columns for both phases, as fastai names them"
    learn = synth_learner(Recorder(train_metrics=True), metrics=F.l1_loss)

    learn.fit(1)

    assert learn.recorder.metric_names == ['epoch', 'train_loss', 'train_l1_loss', 'valid_loss', 'valid_l1_loss',
                                           'time']

def test_agree_is_the_identity():
    "In one process, everybody agrees"
    assert synth_learner().agree(True) is True and Tracer().learn is None
