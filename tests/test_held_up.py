"""Faults that a hard look found, each mended at its root: what must hold however the Learner is used."""
import copy
import pickle
import signal
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from learner.callback import Callback
from learner.callbacks.csv_logger import CSVLogger
from learner.callbacks.progress import ProgressCallback
from learner.callbacks.recorder import Recorder
from learner.data import DataLoaders
from learner.events import CancelEpochException, CancelTrainException
from learner.learner import Learner
from learner.measure import Metric, ValueMetric
from tests.helpers import RegModel, raises, synth_dls, synth_learner, weights

x = torch.randn(10, 1)


class Count(Metric):
    "Counts items"
    name, greater_is_better = 'count', None
    def reset(self): self.n = 0
    def accumulate(self, learn): self.n += len(learn.yb[0])
    @property
    def value(self): return self.n


# ---- evaluations that do not end normally

@pytest.mark.parametrize('ex', [ValueError, CancelTrainException])
def test_a_failed_evaluation_leaves_the_fit_as_it_was(ex, tmp_path):
    "After a nested `validate` that fails or is cancelled, the fit goes on with its own callbacks"
    def nested(cb):
        try: cb.learn.validate(cbs=Callback(before_batch=raises(ex)))
        except ValueError: pass
    learn = synth_learner([CSVLogger, Callback(after_batch=lambda cb: cb.training and nested(cb))], path=tmp_path)

    learn.fit(3)

    assert len(learn.csv_logger.read_log()) == 3 == len(learn.history)


def test_a_stop_that_an_error_overtook_is_over():
    "A Ctrl-C that was pending when an error ended the fit does not stop the next evaluation"
    def both(cb):
        signal.raise_signal(signal.SIGINT)
        raise ValueError
    learn = synth_learner()
    with pytest.raises(ValueError): learn.fit(1, cbs=Callback(after_pred=both))

    assert learn.validate()['valid_loss'] > 0


@pytest.mark.parametrize('broken', [None, 3])
def test_a_stop_without_stderr(broken, monkeypatch):
    "Ctrl-C works where there is no stderr to write to"
    learn = synth_learner(n=3)
    monkeypatch.setattr(sys, 'stderr', broken)

    press = Callback(after_pred=lambda cb: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt): learn.fit(1, cbs=press)

    assert learn.n_step == 1


# ---- unique callbacks and their subclasses

class MyRecorder(Recorder): "A Recorder of the user's"
class MyProgress(ProgressCallback): "A bar of the user's"

@pytest.mark.parametrize('kwargs', [dict(cbs=MyRecorder), dict(default_cbs=dict(recorder=MyRecorder, progress=None))])
def test_a_subclass_of_the_recorder_takes_its_place(kwargs):
    "A Recorder of the user's own class is `learn.recorder`, and nothing is counted twice"
    learn = synth_learner(metrics=Count(), **kwargs)

    learn.fit(1)

    assert isinstance(learn.recorder,
                      MyRecorder) and learn.recorder.values[0]['count'] == 8 == learn.validate()['count']
    assert len(learn.history) == 1

def test_a_second_one_of_a_unique_kind_is_refused():
    "A subclass of a unique callback is one more of its kind"
    learn = synth_learner(default_cbs=True)

    for cb in (MyRecorder, MyProgress):
        with pytest.raises(ValueError, match='there is a `.*` already, and a `My'): learn.add_cb(cb)


# ---- numbers

def test_an_epoch_cancelled_in_training():
    "Batches of a cancelled epoch count for its own row, and not for the next one's mean"
    cb = Callback(after_batch=raises(CancelEpochException, when=True, nth=2))
    cb.order = 55
    learn = synth_learner(cb, n=4, lr=0.)

    learn.fit(2)

    raw = learn.recorder.raw_losses
    assert len(raw) == 6 and learn.history.epoch.tolist() == [0, 1] and learn.recorder.iters == [2, 6]
    assert learn.history.train_loss.tolist() == pytest.approx([sum(raw[:2])/2, sum(raw[2:])/4])
    assert learn.history.valid_loss.isna().tolist() == [True, False]

@pytest.mark.parametrize('name', ['train_loss', 'epoch', 'time', 'lr', 'smooth_loss', 'valid_loss', 'fit'])
def test_metrics_overwrite_no_column(name):
    "A metric named like a column of the table has a name of its own"
    def metric(pred, y): return pred.sum()*0 + 100
    metric.__name__ = name
    learn = synth_learner(metrics=metric)

    learn.fit(1)

    assert learn.history[f'{name}_2'][0] == 100 != learn.history[name][0]

def test_loss_parts_overwrite_no_column():
    "A loss whose part is called loss shows the total as the loss"
    learn = synth_learner(loss_func=lambda p, y: {'loss': F.mse_loss(p, y), 'kl': p.sum()*0 + 100})

    learn.fit(1)

    row = learn.recorder.values[0]
    assert row['train_loss'] == pytest.approx(row['train_loss_2'] + row['train_kl']) and row['train_loss'] > 100

@pytest.mark.parametrize('targets', [lambda n: None, lambda n: torch.tensor(0.), lambda n: 'text', lambda n: {'id': 3},
                                     lambda n: tuple({'boxes': torch.zeros(i, 4)} for i in range(n))])
def test_items_are_those_of_the_batch(targets):
    "Weights are numbers of items, also where targets have no length of their own, or one for each item"
    batches = [(torch.ones(n, 1), targets(n)) for n in (8, 2)]
    learn = synth_learner(dls=(batches, None), loss_func=lambda p, *y: p.mean())

    learn.fit(1)

    assert [mark[0] for mark in learn.recorder.train.marks] == [8, 2]

def test_metrics_share_what_they_look_at():
    "An evaluation's copy of a metric looks at the same callback, not at a copy of it"
    class Counting(Callback):
        n = 0
        def before_validate(self): self.n = 0
        def after_batch(self): self.n += not self.training
        def count(self): return self.n
    cb = Counting()
    learn = synth_learner(cb, metrics=ValueMetric(cb.count, 'n'), n_valid=3)

    assert learn.validate()['n'] == 3 and learn.validate(dl=[(x, x)])['n'] == 1

def test_a_metric_that_cannot_be_copied_is_named():
    "A metric that holds what cannot be copied is named in the error"
    metric = Count()
    metric.held = sys._getframe()

    with pytest.raises(TypeError) as e: synth_learner(metrics=metric).validate()

    assert 'the metric `count`' in e.value.__notes__[0]

def test_final_record_is_of_the_last_fit():
    "`final_record` is None where the last fit has no row"
    learn = synth_learner()
    learn.fit(1)

    learn.fit(0)

    assert learn.final_record is None

def test_nan_is_told_of_the_right_epoch():
    "With `start_epoch`, a bad loss is told of the epoch it was in"
    learn = synth_learner(loss_func=lambda p, y: (p*float('nan')).mean())

    with pytest.warns(UserWarning, match='nan in epoch 3, batch 0'): learn.fit(5, start_epoch=3)


# ---- what changes

@pytest.mark.parametrize('change', [lambda m: m.add_module('late', nn.Linear(1, 1)),
                                    lambda m: m.register_parameter('late', nn.Parameter(torch.ones(1)))])
def test_parameters_that_appear_in_an_epoch_are_named(change):
    "Parameters that appear during a fit are named in a warning, once"
    def grow(cb):
        if cb.epoch == 1: change(cb.model)
    learn = synth_learner(Callback(before_epoch=grow))

    with pytest.warns(UserWarning, match='not trained.*late') as told: learn.fit(4)

    assert len(told) == 1

def test_gradients_outside_the_optimizer_are_dropped():
    "Gradients of parameters that no group holds do not add up over batches"
    learn = synth_learner(splitter=lambda m: [m.a])

    with pytest.warns(UserWarning, match='not trained.*: b;'): learn.fit(1)

    assert learn.model.b.grad is None and learn.model.a.grad is None

def test_a_new_optimizer_in_a_fit_has_its_rates():
    "`create_opt` during a fit keeps the fit's learning rate and decay, and the decay for that fit only"
    learn = synth_learner(wd=.1)
    before = weights(learn)

    learn.fit(1, lr=0., wd=.3, cbs=Callback(before_fit=lambda cb: cb.learn.create_opt(),
                                            after_fit=lambda cb: setattr(cb.learn, 'seen', cb.opt.hypers[0]['wd'])))

    assert learn.history.lr[0] == 0 and all(p.equal(q) for p, q in zip(before, weights(learn)))
    assert learn.seen == .3 and learn.opt.hypers[0]['wd'] == .1

def test_options_changed_in_place_take_effect():
    "A change inside `param_opts` makes a new optimizer, as assigning it does"
    learn = synth_learner(param_opts={'b': dict(lr_mult=2.)})
    learn.fit(1)
    learn.param_opts['b']['lr_mult'] = 0.
    before = learn.model.b.item()

    with pytest.warns(UserWarning, match='since `param_opts` changed'): learn.fit(1)

    assert learn.model.b.item() == before

def test_a_new_training_loader_is_used():
    "`learn.dls.train = …` trains on it"
    learn = synth_learner(n=2)
    learn.dls.train = synth_dls(5, 0)[0]

    learn.fit(1)

    assert learn.n_step == 5

def test_new_data_bring_their_loss():
    "A loss that came with the old data goes with it; one that was given stays"
    old, new = DataLoaders.from_tensors(x, x[:, 0].gt(0).long()), DataLoaders.from_tensors(x, x)
    learn, own = Learner(old, nn.Linear(1, 1), default_cbs=False), Learner(old, nn.Linear(1, 1), F.l1_loss,
                                                                           default_cbs=False)

    learn.dls = own.dls = new

    assert learn.loss_func is new.loss_func and own.loss_func is F.l1_loss

def test_callbacks_from_a_generator():
    "A generator of callbacks is used whole"
    learn = Learner(synth_dls(), RegModel(), F.mse_loss, cbs=(Callback() for _ in range(2)))

    assert sum(type(c) is Callback for c in learn.cbs) == 2

def test_a_failed_constructor_releases_its_callbacks():
    "After a constructor that failed, its callbacks can be given to the next one"
    cb = Callback()
    with pytest.raises(TypeError, match='is no callback'): synth_learner([cb, 3])

    assert synth_learner(cb).fit(1) is None


# ---- modules

def test_a_forward_without_signature():
    "A model whose `forward` has no signature, as functions in C and TorchScript have none, can be used"
    net = nn.Linear(1, 1)
    net.forward = torch.relu

    assert synth_learner(model=net).validate()['valid_loss'] > 0

def test_a_model_that_pins_its_own_modes_is_no_surprise():
    "What the model's own `train` leaves in eval is not told of as the user's doing"
    class Pinned(nn.Sequential):
        def train(self, mode=True):
            super().train(mode)
            self[1].eval()
            return self
    learn = synth_learner(model=Pinned(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).train())

    learn.fit(3)  # warnings are errors

    assert not learn.model[1].training

def test_a_learner_can_be_pickled_after_a_fit():
    "Pickle and deepcopy work after a fit, with workers too"
    dls = DataLoader(TensorDataset(x, x), 4, num_workers=1, persistent_workers=True), None
    learn = synth_learner(dls=dls)
    learn.fit(1)

    again, twin = pickle.loads(pickle.dumps(learn)), copy.deepcopy(learn)
    again.fit(1)
    twin.fit(1)

    assert again.n_step == twin.n_step == 6


# ---- handlers and arguments

@pytest.mark.parametrize('make', [lambda: type('A', (Callback,), {'after_batch': partial(print)}),
                                  lambda: type('A', (Callback,), {'after_loss': 3})])
def test_a_handler_must_be_a_method(make):
    "What is named after an event and is no method would never be called: it is refused"
    with pytest.raises(TypeError, match='what acts at an event is a method'): make()

def test_a_misspelt_handler_in_a_mixin():
    "A mixin that is no Callback is looked through too"
    class Mixin:
        def befor_fit(self): pass

    with pytest.raises(TypeError, match='did you mean `before_fit`'): type('A', (Mixin, Callback), {})

@pytest.mark.parametrize('run_in, odd', [({'fitt'}, 'fitt'), ('train', 'train')])
def test_unknown_kinds_of_run(run_in, odd):
    "A kind of run that does not exist is refused"
    with pytest.raises(ValueError, match=f'run_in has .{odd}.; there are fit, lr_find'):
        synth_learner(type('A', (Callback,), {'run_in': run_in}))

def test_one_kind_of_run_as_text():
    "`run_in = 'fit'` is one kind"
    class InFit(Callback):
        run_in, n = 'fit', 0
        def after_batch(self): self.n += 1
    learn = synth_learner(InFit)
    learn.fit(1)
    learn.validate()

    assert learn.in_fit.n == 3

@pytest.mark.parametrize('call, error, message', [
    (lambda: synth_learner(default_cbs=None), TypeError, 'default_cbs: None is no bool'),
    (lambda: synth_learner().fit(1, lr='0.1'), TypeError, "`lr` is '0.1'"),
    (lambda: synth_learner().fit(1, lr=True), TypeError, '`lr` is True'),
    (lambda: synth_learner().fit(1, lr=float('inf')), ValueError, '`lr` must be'),
    (lambda: synth_learner().fit(1, lr=slice(None)), ValueError, 'give `slice'),
    (lambda: synth_learner().fit(1, lr=slice(0, .1)), ValueError, 'both above 0'),
    (lambda: synth_learner().fit(True), TypeError, '`n_epoch` is True'),
    (lambda: synth_learner(param_opts={'a': dict(lr_mult=-1)}).fit(1), ValueError, "`lr_mult` of 'a' is -1"),
    (lambda: DataLoaders.from_tensors(x, x, batch_size=3), TypeError, '`bs` here'),
    (lambda: DataLoaders.from_tensors(x, x.sign().long()), ValueError, 'counted from 0, but one is -1'),
    (lambda: synth_learner().validate(dl=(x, x)), TypeError, 'is a batch, not a loader'),
    (lambda: synth_learner().ordered_cbs('after_btach'), TypeError, 'did you mean `after_batch`')])
def test_arguments_that_were_taken_in_silence(call, error, message):
    "What cannot be meant is refused, with the value"
    with pytest.raises(error, match=message): call()

def test_an_optimizer_of_torch_assigned_by_hand():
    "`learn.opt = torch.optim.…` says what to give instead"
    learn = synth_learner()
    learn.opt = torch.optim.SGD(learn.model.parameters(), lr=.1)

    with pytest.raises(TypeError, match='`learn.opt` is a `SGD`: give its class'): learn.fit(1)
