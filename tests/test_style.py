"""The examples of good style that the project goes by, run as they stand; stand-ins for what is not there yet."""
import gc
import math
import pickle
import sys
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial

import pytest
import torch
from fastcore.basics import patch, store_attr
from fastcore.foundation import L
from fastcore.meta import delegates
from torch import Tensor, nn

from learner import events
from learner.callback import Callback
from learner.events import CancelBatchException, event_names
from learner.learner import Learner
from learner.metrics import Metric, accuracy
from learner.plot import plot_loss
from learner.tensors import find_bs
from learner.utils import optional, replacing
from tests.helpers import raises, synth_learner, trace, weights


class MixedPrecision(Callback):  # stand-in
    order = 10

class ParamScheduler(Callback):  # stand-in: sets hyper-parameters by `pct_train`
    def __init__(self, scheds): self.scheds = scheds
    def before_batch(self):
        if self.training: self.opt.set_hypers(**{k: f(self.pct_train) for k, f in self.scheds.items()})


def test_1_events_derive_from_the_table():
    "A scope is one entry; its events follow"
    names = ('after_create', *(f'{when}_{s}' for s in events.scopes for when in ('before', 'after_cancel', 'after',
                                                                                 'cleanup')),
             'after_pred', 'after_loss', 'save_point', 'before_save', 'before_load', 'after_load')

    assert names == event_names


class GradientClip(Callback):
    "Scales all gradients down, just before each step, so that their total norm is at most `max_norm`"
    order = MixedPrecision.order + 1  # gradients must be unscaled first
    run_valid = False
    def __init__(self,
        max_norm: float = 1.,   # largest total gradient norm allowed
        norm_type: float = 2.,  # p of the p-norm; `inf` bounds the largest single entry
    ): store_attr()
    def before_step(self): nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm, self.norm_type)

def test_2_a_callback_is_its_own_specification():
    "The gradients that the step sees have at most the norm asked for"
    norms = []
    def look(cb): norms.append(nn.utils.get_total_norm([p.grad for p in cb.model.parameters()]).item())
    learn = synth_learner([GradientClip(.1), Callback(after_step=look)], n=3)

    learn.fit(1)

    assert norms == pytest.approx([.1]*3) and learn.gradient_clip.norm_type == 2


def sched_cos(start: float, end: float, pos: float) -> float:
    "Half a cosine from `start` (`pos=0`) to `end` (`pos=1`), flat at both ends"
    return start + (end-start)*(1-math.cos(math.pi*pos))/2

def SchedCos(start: float, end: float):
    "`sched_cos` as a function of `pos` alone"
    return partial(sched_cos, start, end)  # a partial pickles, a closure does not

@pytest.fixture
def fit_cos():
    @patch
    @delegates(Learner.fit)
    def fit_cos(self: Learner,
        n_epoch: int,            # epochs to train
        lr: float|None = None,   # learning rate at the start; `self.lr` if none
        div_final: float = 1e5,  # the last learning rate is `lr/div_final`
        cbs=None, **kwargs):     # callbacks for this fit only
        "Fit with the learning rate falling along half a cosine"
        lr = self.lr if lr is None else lr
        self.fit(n_epoch, lr, cbs=L(cbs)+ParamScheduler({'lr': SchedCos(lr, lr/div_final)}), **kwargs)
    yield
    del Learner.fit_cos

def test_3_patch_adds_a_way_to_fit(fit_cos):
    "A method added with @patch and @delegates trains, and takes fit's own arguments"
    learn = synth_learner(n=4)

    learn.fit_cos(2, .1, start_epoch=1)

    assert learn.recorder.lrs[0] == pytest.approx(sched_cos(.1, 1e-6, .5)) and learn.recorder.lrs[-1] < .01
    assert 'paramscheduler' not in {c.name.replace('_', '') for c in learn.cbs}


def test_4_a_context_restores_whatever_happens():
    "`replacing` puts the old values back after an error too"
    class Pair: a, b = 1, 2
    o = Pair()

    with pytest.raises(KeyError), replacing(o, a=3) as p:
        assert p is o and (o.a, o.b) == (3, 2)
        raise KeyError

    assert o.a == 1


def test_5_a_schedule_is_pure_and_pickles():
    "End points are exact, and the function of the position alone can be pickled"
    sched = pickle.loads(pickle.dumps(SchedCos(1., 3.)))

    assert (sched(0), sched(.5), sched(1)) == pytest.approx((1, 2, 3))


class MeanOf(Metric):
    "Mean of `func(pred, *yb)` over all items seen; each batch weighs as many items as it holds"
    greater_is_better = None  # unknown: a tracker asks rather than guesses
    def __init__(self, func): self.func, self.name = func, func.__name__
    def reset(self): self.total, self.count = 0., 0
    def accumulate(self, learn):
        n = find_bs(learn.yb)
        self.total = self.total + self.func(learn.pred, *learn.yb).detach()*n  # on the device: no sync per batch
        self.count += n
    @property
    def value(self): return float(self.total)/self.count if self.count else math.nan

def test_6_a_metric():
    "A Metric of reset, accumulate and value has its column"
    def mae(pred, y): return (pred-y).abs().mean()
    learn = synth_learner(metrics=[MeanOf(mae), mae], n_valid=3)

    row = learn.validate()

    assert row.names[1] == 'mae' and row[1] == pytest.approx(row[2])


def test_7_cancelled_batch_is_not_stepped():
    "A batch cancelled at `after_loss` changes no weight, and still fires `after_batch`"
    learn = synth_learner(Callback(after_loss=raises(CancelBatchException)), n=1)
    before = weights(learn)

    seen = trace(learn, 'after_loss', 'cleanup_batch')

    assert seen == ['after_loss', 'after_cancel_batch', 'after_batch', 'cleanup_batch']
    assert all(torch.equal(a, b) for a, b in zip(before, weights(learn)))


def test_8_and_9_a_docstring_and_an_error():
    "accuracy does what its docstring says, and its error names values and what to ask"
    pred, targ = torch.tensor([[.1, .9], [.8, .2]]), torch.tensor([1, 1])

    value = accuracy(pred, targ)

    assert isinstance(value, Tensor) and value.ndim == 0 and value == .5
    with pytest.raises(ValueError, match='(?s)accuracy.*is `axis` the class axis'): accuracy(pred[None], targ)


def test_9_a_hint_from_the_names_there_are():
    "The event that was meant is a close match of the name"
    assert get_close_matches('befor_fit', event_names, 1) == ['before_fit']
    with pytest.raises(TypeError, match='did you mean `before_fit`'): type('A', (Callback,),
                                                                           {'befor_fit': lambda self: None})


def test_10_a_plot_returns_its_axes():
    "A plot draws on the axes given, labels them, and returns them"
    import matplotlib.pyplot as plt
    ax = plt.subplots()[1]

    assert plot_loss([3., 2., 1.], ax=ax) is ax and (ax.get_xlabel(), ax.get_ylabel()) == ('batch', 'loss')
    plt.close(ax.figure)


def test_11_a_lazy_import_says_who_needs_it():
    "`optional` imports what is there, and names the feature and the package otherwise"
    assert optional('math', 'this') is math
    with pytest.raises(ImportError, match='`WandbCallback` needs `no_such_mod.sub`: pip install no_such_mod'):
        optional('no_such_mod.sub', 'WandbCallback')


@contextmanager
def counting():  # Python and C calls within the block
    seen = []
    gc.disable()  # what it frees makes calls of its own
    sys.setprofile(lambda _, what, __: seen.append(what) if what in ('call', 'c_call') else None)
    try: yield seen
    finally:
        sys.setprofile(None)
        gc.enable()

def test_12_a_benchmark_counts():
    "An idle callback adds no call to a batch"
    def calls(n_idle, n):
        learn = synth_learner([Callback() for _ in range(n_idle)], n=n, n_valid=0, default_cbs=False)
        learn.fit(1)
        with counting() as seen: learn.fit(1)
        return len(seen)

    per_batch = [(calls(k, 20)-calls(k, 10))/10 for k in (0, 5)]

    assert per_batch[0] == per_batch[1]
