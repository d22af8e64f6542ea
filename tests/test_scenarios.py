"""Scenarios that any training loop must get right, each distilled from a public report; their numbers are kept."""
import gc
import weakref

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from learner.callback import Callback
from learner.callbacks.recorder import Recorder
from learner.events import CancelBatchException
from tests.helpers import Tracer, raises, synth_learner


def test_s23_ctrl_c():
    "S23: an interrupt at batch 3 of epoch 2 reaches the caller; finished batches are recorded; a new fit works at once"
    def strike(cb):
        if cb.training and (cb.epoch, cb.iter) == (1, 2): raise KeyboardInterrupt
    learn = synth_learner(n=5)
    learn.model.train()

    with pytest.raises(KeyboardInterrupt): learn.fit(3, cbs=Callback(before_backward=strike))

    assert len(learn.recorder.raw_losses) == 5+2 and learn.history.epoch.tolist() == [0] and learn.model.training
    learn.fit(1)
    assert len(learn.history) == 2


def test_s24_temporary_callbacks_and_hooks_go_away():
    "S24: a ValueError is what the user sees; the extra callback and its hooks are gone; other cleanups ran"
    class Hooks(Callback):
        def before_fit(self): self.handles = [m.register_forward_hook(lambda *args: None) for m in self.model.modules()]
        def cleanup_fit(self):
            for h in self.handles: h.remove()
    learn = synth_learner(tracer := Tracer())

    with pytest.raises(ValueError, match='second'):
        learn.fit(1, cbs=[hooks := Hooks(), Callback(after_batch=raises(ValueError('second'), nth=2))])

    assert hooks.learn is None and hooks not in learn.cbs
    assert not any(m._forward_hooks for m in learn.model.modules()) and tracer.seen[-1] == 'cleanup_fit'


@pytest.mark.parametrize('train_metrics', [True, False])
def test_s25_cancelled_batches(train_metrics):
    "S25: every other batch cancelled before the forward: no error, averages and counts of the computed batches only"
    def skip(cb):
        if cb.iter % 2: raise CancelBatchException
    def first(pred, y): return y.mean()
    x = torch.arange(12.).reshape(6, 2, 1)
    batches = [(b, b) for b in x]
    learn = synth_learner([Callback(before_batch=skip), Recorder(train_metrics=train_metrics)], dls=(batches,
                                                                                                     batches[:3]),
                          metrics=first, lr=0.)

    learn.fit(1)

    row = learn.recorder.values[0]
    assert learn.n_step == len(learn.recorder.raw_losses) == 3
    assert row['valid_first' if train_metrics else 'first'] == pytest.approx(x[[0, 2]].mean().item())
    if train_metrics: assert row['train_first'] == pytest.approx(x[[0, 2, 4]].mean().item())


def test_s27_nothing_keeps_the_graph():
    "S27: loss and prediction of a batch are dead before the next forward, and the number of live tensors is flat"
    refs, alive, live = [], [], []
    def keep(cb): refs.extend([weakref.ref(cb.pred), weakref.ref(cb.loss_grad)])
    def count(cb):
        alive.append(sum(r() is not None for r in refs))
        if cb.iter in (20, 190):
            gc.collect()
            live.append(sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()))
    learn = synth_learner([Callback(after_loss=keep), Callback(before_batch=count)], n=200, n_valid=0)

    learn.fit(1)

    assert max(alive) == 0 and len(refs) == 400
    assert live[1]-live[0] == 170  # one 0-d loss a batch, which the Recorder reads when the epoch ends


def test_s27_after_an_exception():
    "S27: after an exception inside the loss, learner and callbacks hold no batch or prediction"
    refs = []
    def loss(pred, y):
        refs.extend([weakref.ref(pred), weakref.ref(y)])
        raise ValueError
    learn = synth_learner(loss_func=loss)

    with pytest.raises(ValueError): learn.fit(1)

    gc.collect()
    assert refs and not any(r() is not None for r in refs)


class Stream(IterableDataset):
    def __iter__(self): return iter([(torch.ones(1), torch.ones(1))]*10)

def test_s40_repeated_and_unsized_fit():
    "S40: the second fit(1) really trains one more epoch, and a dataset without length is trained on"
    x = torch.randn(10, 1)
    learn = synth_learner(dls=(DataLoader(TensorDataset(x, x), 4, shuffle=True, drop_last=True), None), lr=.1)
    learn.fit(1)
    before = learn.model.a.item()
    learn.fit(1)
    assert learn.model.a.item() != before and learn.n_step == 4

    stream = synth_learner(dls=(DataLoader(Stream(), 4), None))
    stream.fit(2)

    assert stream.n_step == 6
