"""Interrupts and errors: wherever they strike, everything is put back, and a new fit works at once."""
import gc
import os
import signal
import sys
import threading
import time
import weakref

import pytest
import torch

from learner.callback import Callback
from learner.callbacks.checkpoint import Checkpoint
from learner.callbacks.csv_logger import CSVLogger
from learner.callbacks.progress import ProgressCallback
from learner.display import Live
from learner.events import event_names, scopes
from learner.interrupt import StopFlag, deferred_interrupt, free_frames
from tests.helpers import Tracer, file_events, raises, synth_learner, weights
from tests.resume_helpers import noisy_learner, record

in_fit = [e for e in event_names if e not in ('after_create', *file_events) and 'cancel' not in e]


class Watch(Callback):
    "Weak references to every batch, prediction and loss"
    order = -500
    def __init__(self): self.refs = []
    def after_loss(self): self.refs += [weakref.ref(o) for o in (self.x, self.y, self.pred, self.loss, self.loss_grad)]

    def alive(self):
        gc.collect()
        return sum(r() is not None for r in self.refs)


class Closed(Live):
    "A display that notes how often it was closed"
    n = 0
    def close(self, note=''): self.n += 1


class Holds(Callback):
    "Takes hold of what a callback may take hold of, and lets go in its cleanups"
    def before_fit(self):
        self.old, self.hook = self.loss_func, self.model.register_forward_hook(lambda *_: None)
        self.learn.loss_func = lambda *args: self.old(*args)

    def before_validate(self):
        self.own = weights(self.learn)
        for p in self.model.parameters(): p.mul_(.5)

    def cleanup_validate(self):
        for p, own in zip(self.model.parameters(), self.own): p.copy_(own)

    def cleanup_fit(self):
        self.hook.remove()
        self.learn.loss_func = self.old


def saving(): return [Checkpoint('3it'), CSVLogger('rows.csv', every='1it'), Holds()]


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    "A Learner that was not struck"
    learn = noisy_learner(tmp_path_factory.mktemp('whole'))
    learn.fit(2, 1e-2, cbs=saving())
    return learn


def struck(path, at, ex):
    "A Learner whose second epoch `ex` has struck at event `at`; all that was taken hold of is let go, and a fit works"
    watch, last, extra, live = Watch(), Tracer(), Callback(), Closed()
    learn = noisy_learner(path, default_cbs=dict(progress=ProgressCallback(lambda: live)), cbs=[watch, last])
    learn.model[1].eval()
    learn.model.train()
    modes, cbs, loss_func = [m.training for m in learn.model.modules()], list(learn.cbs), learn.loss_func
    def strike(cb):
        if cb.epoch == 1 or at.endswith('fit'): raise ex
    fails = Callback(cleanup_fit=raises(OSError('and it fails too')))

    with pytest.raises(type(ex)) as raised:
        learn.fit(2, 1e-2, cbs=[*saving(), fails, extra, Callback(**{at: strike})])

    assert raised.value is ex and ex.args == ('struck',)
    assert ex.__notes__[-1] == 'and then OSError: and it fails too'
    if isinstance(ex, Exception): ex.__traceback__ = raised = None  # whose frames a debugger may look into
    assert watch.alive() == 0 and not learn.model._forward_hooks and learn.loss_func is loss_func
    assert [m.training for m in learn.model.modules()] == modes and torch.is_grad_enabled()
    assert list(learn.cbs) == cbs and extra.learn is None and learn._scope is None
    assert last.seen.count('cleanup_fit') == 1 and last.seen[-1] == 'cleanup_fit' and live.n == (at != 'before_fit')
    assert (learn.xb, learn.yb, learn.pred, learn.loss, learn.loss_grad, learn.dl) == ((), (), None, None, None, None)
    assert not learn.dls.train.in_use and not learn.dls.valid.in_use
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler and not learn._stop.running
    before = weights(learn)
    learn.fit(1)
    assert not any(map(torch.equal, before, weights(learn))) and len(learn.recorder.values) == 1


def goes_on_like(whole, path):
    "What a new process makes of the files that are left is what it would have been"
    learn = noisy_learner(path)
    learn.fit(2, 1e-2, cbs=saving(), resume=True)

    assert learn.final_hash == whole.final_hash and record(learn) == record(whole)
    assert (learn.path/'rows.csv').read_bytes() == (whole.path/'rows.csv').read_bytes()


@pytest.mark.parametrize('at', in_fit)
def test_r11_interrupted_at_every_event(tmp_path, whole, at):
    "An interrupt at any event reaches the caller; all is put back, a new fit works, and this one goes on exactly"
    struck(tmp_path, at, KeyboardInterrupt('struck'))

    goes_on_like(whole, tmp_path)


@pytest.mark.parametrize('at', in_fit)
def test_r12_an_error_at_every_event(tmp_path, whole, at):
    "An error in a callback at any event is the one that is raised, naming the event; all else is as after an interrupt"
    error = ValueError('struck')
    struck(tmp_path, at, error)

    assert f'at `{at}`' in error.__notes__[0]
    goes_on_like(whole, tmp_path)


@pytest.mark.parametrize('ex', [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize('scope', scopes)
def test_struck_after_a_cancel(scope, ex):
    "An interrupt or error at the event that follows a cancel leaves as little behind"
    watch, last = Watch(), Tracer()
    learn = synth_learner([watch, last])

    with pytest.raises(ex):
        learn.fit(1, cbs=Callback(**{f'before_{scope}': raises(scopes[scope]), f'after_cancel_{scope}': raises(ex)}))

    assert watch.alive() == 0 and learn._scope is None and last.seen[-1] == 'cleanup_fit'
    learn.fit(1)
    assert len(learn.recorder.values) == 1


def test_fit_after_a_failed_fit_equals_a_fresh_one():
    "What a failed fit leaves behind is its weights, nothing else (N33)"
    a, b = synth_learner(n=3, lr=.1), synth_learner(n=3, lr=.1)
    with pytest.raises(ValueError): a.fit(1, cbs=Callback(before_fit=raises(ValueError)))

    a.fit(2)
    b.fit(2)

    assert all(p.equal(q) for p, q in zip(weights(a), weights(b)))


def press(times=1):  # Ctrl-C, as the terminal or Jupyter's Stop button sends it
    for _ in range(times): signal.raise_signal(signal.SIGINT)


def test_the_first_ctrl_c_ends_between_two_batches(capsys):
    "A batch that is under way when Ctrl-C comes is finished first; then the interrupt reaches the caller"
    learn = synth_learner(tracer := Tracer(), n=4)

    with pytest.raises(KeyboardInterrupt): learn.fit(2, cbs=Callback(after_pred=lambda cb: cb.iter == 1 and press()))

    assert learn.n_step == 2
    assert tracer.seen[-6:] == ['after_step', 'cleanup_step', 'after_batch', 'cleanup_batch', 'cleanup_train',
                                'cleanup_epoch',
                                'cleanup_fit'][-6:]
    assert 'the batch is being finished' in capsys.readouterr().err


def test_the_second_ctrl_c_interrupts_at_once():
    "Whoever presses twice does not wait for the batch"
    learn = synth_learner(n=4)

    with pytest.raises(KeyboardInterrupt): learn.fit(1, cbs=Callback(after_pred=lambda cb: press(2)))

    assert learn.n_step == 0


@pytest.mark.parametrize('at', ['after_batch', 'after_validate', 'after_epoch', 'after_fit', 'cleanup_fit'])
def test_a_stop_after_the_last_batch_is_not_lost(at):
    "A Ctrl-C that comes too late to stop a batch still ends the cell, so that Run All stops"
    learn = synth_learner(n=1)

    with pytest.raises(KeyboardInterrupt): learn.fit(1, cbs=Callback(**{at: lambda cb: press()}))

    assert learn.n_step == 1


def test_a_stop_during_validation_ends_between_two_batches():
    "A stop takes effect between validation batches too"
    seen = []
    learn = synth_learner(Callback(after_pred=lambda cb: cb.training or (seen.append(cb.iter), press())), n_valid=5)

    with pytest.raises(KeyboardInterrupt): learn.fit(1)

    assert seen == [0]


def test_an_evaluation_within_a_batch_is_part_of_it():
    "A stop during an evaluation that a batch's callback runs waits for the end of that batch"
    seen = []
    def nested(cb): seen.append(cb.learn.validate(cbs=Callback(after_pred=lambda o: o.iter or press())))
    learn = synth_learner(n=3, n_valid=4)

    with pytest.raises(KeyboardInterrupt): learn.fit(1, cbs=Callback(before_backward=nested))

    assert len(seen) == 1 and learn.n_step == 1


def test_the_error_says_where_it_stopped():
    "The interrupt's message says where the fit stopped and how to go on"
    learn = synth_learner(n=4)

    with pytest.raises(KeyboardInterrupt, match='stopped in epoch 2 of 3, after train batch 3 of 4; `learn.resume'):
        learn.fit(3, cbs=Callback(after_pred=lambda cb: cb.training and cb.train_iter == 6 and press()))


def test_handler_is_put_back():
    "The handler of Ctrl-C is ours during a fit only, also when the fit fails"
    def mine(signum, frame): pass
    old, seen = signal.signal(signal.SIGINT, mine), []
    try:
        learn = synth_learner(Callback(before_fit=lambda cb: seen.append(signal.getsignal(signal.SIGINT))))
        with pytest.raises(ValueError): learn.fit(1, cbs=Callback(after_batch=raises(ValueError)))
        assert signal.getsignal(signal.SIGINT) is mine and isinstance(seen[0], StopFlag)
    finally: signal.signal(signal.SIGINT, old)


@pytest.mark.parametrize('handler', [signal.SIG_IGN, signal.SIG_DFL])
def test_no_handler_over_ignored_signals(handler):
    "A process told to ignore Ctrl-C, or to die of it, goes on doing so"
    old = signal.signal(signal.SIGINT, handler)
    try:
        with deferred_interrupt(StopFlag()): assert signal.getsignal(signal.SIGINT) is handler
    finally: signal.signal(signal.SIGINT, old)


def test_fit_in_another_thread():
    "A fit in a thread works, and leaves signals alone"
    learn, seen = synth_learner(), []
    old = signal.getsignal(signal.SIGINT)
    learn.add_cb(Callback(after_batch=lambda cb: seen.append(signal.getsignal(signal.SIGINT))))
    thread = threading.Thread(target=learn.fit, args=(1,))

    thread.start()
    thread.join()

    assert seen == [old]*3


def test_real_signal_from_outside():
    "A SIGINT sent to the process by another one stops the fit between two batches"
    learn = synth_learner(Callback(after_batch=lambda cb: time.sleep(.01)), n=500, n_valid=0)
    timer = threading.Timer(.2, os.kill, (os.getpid(), signal.SIGINT))

    with pytest.raises(KeyboardInterrupt):
        timer.start()
        learn.fit(1)

    assert 0 < learn.n_step < 500 and learn.n_step == len(learn.recorder.raw_losses)


# ---- memory

def deep(watch, ex):  # raises from a frame that holds tensors in locals, a cell and a cached `f_locals`
    big = torch.zeros(10)
    watch.append(weakref.ref(big))
    def inner():
        sys._getframe(1).f_locals  # noqa: B018
        return big, inner
    inner()
    raise ex


@pytest.mark.parametrize('ex, freed', [(KeyboardInterrupt(), True), (torch.OutOfMemoryError('no room'), True),
                                       (MemoryError(), True), (ValueError('bug'), False)])
def test_memory_of_a_stored_traceback(ex, freed):
    "Interrupts and out-of-memory errors let go of what their frames hold; other errors keep it for the debugger"
    watch = []
    learn = synth_learner()

    with pytest.raises(type(ex)) as stored: learn.fit(1, cbs=Callback(after_loss=lambda cb: deep(watch, ex)))

    assert (watch[0]() is None) == freed and stored.value is ex


def test_the_callers_own_exception_is_left_alone():
    "An exception that the caller is handling while it calls fit keeps its frames"
    watch = []
    try: deep(watch, ValueError('handled'))
    except ValueError as handled:
        with pytest.raises(KeyboardInterrupt): synth_learner().fit(1,
                                                                   cbs=Callback(after_loss=raises(KeyboardInterrupt)))
        assert watch[0]() is not None and handled.__traceback__.tb_next.tb_frame.f_locals['big'] is not None


def test_free_frames_follows_causes():
    "Frames of the exceptions that led to an interrupt are freed too"
    watch = []
    try:
        try: deep(watch, ValueError())
        except ValueError as e: raise KeyboardInterrupt from e
    except KeyboardInterrupt as e:
        free_frames(e)
        stored = e

    assert watch[0]() is None and isinstance(stored.__cause__, ValueError)


def test_nothing_keeps_the_graph():
    "Batches, predictions and graphs of a batch are gone before the next one's forward"
    alive = []
    watch = Watch()
    learn = synth_learner([watch,
                           Callback(before_batch=lambda cb: alive.append(sum(r() is not None for r in watch.refs)))],
                          n=200)

    learn.fit(1)

    kept = 200  # the Recorder's copies of the losses, read from the device at the end of the phase
    assert max(alive) <= kept and watch.alive() == 0


def test_one_batch_by_hand_can_be_read():
    "`learn.one_batch(0, b)` outside a fit leaves prediction and loss to look at"
    learn = synth_learner()

    learn.one_batch(0, next(iter(learn.dls.train)))

    assert learn.pred.shape == (8, 1) and learn.loss > 0 and not learn.loss.requires_grad
