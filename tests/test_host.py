"""Scopes: what is cleaned up, in which order, and which exception is seen when several are raised."""
import pytest
import torch

from learner.callback import Callback
from learner.events import (CancelBackwardException, CancelBatchException, CancelEpochException, CancelFitException,
                            CancelStepException, CancelTrainException, CancelValidException, event_names, scopes)
from tests.helpers import Tracer, file_events, raises, synth_learner, trace, weights

ends = [CancelFitException, CancelEpochException, CancelTrainException, CancelBatchException, KeyboardInterrupt,
        ValueError]


def run(learn, n_epoch=1):  # what a fit raises
    try: learn.fit(n_epoch)
    except BaseException as e: return e


@pytest.mark.parametrize('ex', ends)
@pytest.mark.parametrize('at', ['before_fit', 'before_epoch', 'before_train', 'before_batch', 'after_loss',
                                'before_backward',
                                'before_step', 'after_step', 'after_batch', 'after_train', 'after_epoch', 'after_fit'])
def test_every_scope_entered_is_cleaned_up(at, ex):
    "However a fit ends, each `before_x` has its `cleanup_x`, innermost first"
    raiser = Callback(**{at: raises(ex)})
    raiser.order = 1000
    learn = synth_learner([tracer := Tracer(), raiser])

    run(learn)

    entered = []
    for e in tracer.seen:
        if e.startswith('before_'): entered.append(e.removeprefix('before_'))
        if e.startswith('cleanup_'): assert entered.pop() == e.removeprefix('cleanup_')
    assert entered == [] and learn._scope is None


def test_cleanup_runs_callbacks_in_reverse():
    "What was acquired last is released first"
    seen = []
    learn = synth_learner([Callback(cleanup_fit=lambda cb, i=i: seen.append(i)) for i in range(3)])

    learn.fit(1)

    assert seen == [2, 1, 0]


def test_cleanup_goes_by_the_flags_at_entry():
    "A callback that switches itself off within a scope is still cleaned up; one that was off at entry is not"
    a, b = Tracer(), Tracer()
    learn = synth_learner([a, b])
    b.run = False

    learn.fit(1, cbs=[Callback(after_train=lambda cb: setattr(b, 'run', True))])

    assert 'cleanup_fit' in a.seen and not any(e in b.seen for e in ('cleanup_fit', 'cleanup_epoch', 'cleanup_train'))


def test_a_callback_that_switches_itself_off_is_cleaned_up():
    "What was acquired in `before_fit` is released although `run` is False by then"
    released = []
    class Hooks(Callback):
        def before_fit(self): self.run = True
        def after_batch(self): self.run = False
        def cleanup_fit(self): released.append(1)
    learn = synth_learner(Hooks)

    learn.fit(1)

    assert released == [1]


@pytest.mark.parametrize('first, second, seen', [
    (ValueError('a'), KeyError('b'), 'a'), (CancelFitException(), KeyError('b'), "'b'"),
    (ValueError('a'), KeyboardInterrupt('b'), 'b'), (KeyboardInterrupt('a'), ValueError('b'), 'a'), (None,
                                                                                                     KeyError('b'),
                                                                                                     "'b'")])
def test_the_gravest_error_is_seen(first, second, seen):
    "Interrupts outrank errors, errors outrank cancels; of equals the first is raised, and the others become notes"
    cleaned = []
    learn = synth_learner([Callback(cleanup_fit=lambda cb: cleaned.append(1)), Callback(cleanup_fit=raises(second)),
                           Callback(**({'after_loss': raises(first)} if first else {}))])

    e = run(learn)

    assert str(e) == seen and cleaned == [1]
    others = [o for o in (first, second) if o is not None and o is not e and not isinstance(o, CancelFitException)]
    assert all(any(type(o).__name__ in note for note in e.__notes__) for o in others)


def test_a_cancel_in_a_cleanup_is_an_error():
    "A cleanup has nothing to cancel: a cancel raised there becomes an error that names the callback"
    learn = synth_learner(Callback(cleanup_batch=raises(CancelBatchException)))

    with pytest.raises(RuntimeError, match='CancelBatchException raised by `Callback` at `cleanup_batch`'): learn.fit(1)


@pytest.mark.parametrize('ex', [ValueError('wrong', 3), OSError(2, 'gone'), AssertionError(), KeyError('k')])
def test_errors_keep_type_args_and_traceback(ex):
    "An error in a callback reaches the user as it is, with a note that says where it came from"
    learn = synth_learner(Callback(after_loss=raises(ex, nth=2)))

    with pytest.raises(type(ex)) as e: learn.fit(2)

    assert e.value is ex and e.value.args == ex.args
    assert ex.__notes__ == ['raised by `Callback` at `after_loss`, epoch 0, batch 1']
    assert e.traceback[-1].name == '__call__' and e.traceback[-1].path.name == 'helpers.py'


def test_cancelled_batch_is_not_stepped():
    "A batch cancelled at `after_loss` changes no weight, and still fires `after_batch`"
    learn = synth_learner(Callback(after_loss=raises(CancelBatchException)), n=1, n_valid=0)
    before = weights(learn)

    seen = trace(learn, 'after_loss', 'cleanup_batch')

    assert seen == ['after_loss', 'after_cancel_batch', 'after_batch', 'cleanup_batch']
    assert all(a.equal(b) for a, b in zip(before, weights(learn)))


def test_cancelled_backward_skips_the_step():
    "Without gradients there is no step, so no weight decay or momentum moves the weights either"
    learn = synth_learner(Callback(before_backward=raises(CancelBackwardException)), n=1, n_valid=0)
    before = weights(learn)

    seen = trace(learn, 'before_backward', 'after_batch')

    assert seen == ['before_backward', 'after_cancel_backward', 'after_backward', 'cleanup_backward', 'after_batch']
    assert all(a.equal(b) for a, b in zip(before, weights(learn))) and learn.n_step == 0


@pytest.mark.parametrize('at, ex', [('after_backward', CancelBatchException), ('after_backward', CancelTrainException),
                                    ('before_step', CancelEpochException), ('before_step', CancelStepException)])
def test_gradients_of_a_cancelled_batch_are_dropped(at, ex):
    "A batch that is cancelled after its backward leaves no gradient to the next one"
    learn = synth_learner(Callback(**{at: raises(ex)}), n=1)

    learn.fit(1)

    assert all(p.grad is None for p in learn.model.parameters()) and learn.n_step == 0


def test_an_open_accumulation_window_keeps_gradients():
    "While `keep_grads` says that a window is open, gradients add up over batches and steps are skipped"
    class Window(Callback):
        def before_step(self):
            self.learn.keep_grads = self.iter < 2
            if self.keep_grads: raise CancelStepException
    def grads(cbs):
        seen = []
        learn = synth_learner([*cbs, Callback(after_backward=lambda cb: seen.append(cb.model.a.grad.item()))], n=3,
                              n_valid=0)
        learn.fit(1, lr=0.)
        return learn, torch.tensor(seen)
    _, single = grads([])

    learn, summed = grads([Window])

    assert learn.n_step == 1 and torch.allclose(summed, single.cumsum(0))
    assert all(p.grad is None for p in learn.model.parameters())


def test_stepped_only_after_a_real_step():
    "`stepped` and `n_step` go by steps really taken"
    seen = []
    learn = synth_learner([Callback(before_step=raises(CancelStepException, nth=2)),
                           Callback(after_step=lambda cb: seen.append(cb.stepped))], n=3, n_valid=0)

    learn.fit(1)

    assert seen == [True, False, True] and learn.n_step == 2


@pytest.mark.parametrize('name', ['before_fti', 'begin_batch', 'nothing'])
def test_unknown_event_is_an_error(name):
    "`learn('…')` knows the events, and says which one was meant"
    with pytest.raises(TypeError, match=f'`learn: {name}` is not an event'): synth_learner()(name)


def test_events_can_be_fired_by_hand():
    "`learn(name)` and `learn([names])` fire events outside a fit"
    learn = synth_learner(tracer := Tracer())

    learn(['before_fit', 'after_fit'])
    learn('cleanup_epoch')

    assert tracer.seen == ['after_create', 'before_fit', 'after_fit', 'cleanup_epoch']


def test_overridden_with_events_is_used():
    "`_with_events` keeps fastai's signature, so that a subclass or a patch can wrap every scope"
    from learner.learner import Learner
    seen = []
    class Loud(Learner):
        def _with_events(self, f, event_type, ex=None, *args):
            seen.append((event_type, ex))
            return super()._with_events(f, event_type, ex, *args)
    base = synth_learner()

    Loud(base.dls, base.model, base.loss_func, default_cbs=False, lr=.1).fit(1)

    assert seen[:3] == [('fit', scopes['fit']), ('epoch', scopes['epoch']), ('train', scopes['train'])]
    assert set(seen) == set(scopes.items())


def test_cancel_valid_ends_the_evaluation_only():
    "CancelValid ends one evaluation pass; the epoch's row has what was there before"
    learn = synth_learner(Callback(before_validate=raises(CancelValidException)))

    learn.fit(2)

    assert learn.history.valid_loss.isna().tolist() == [True, False]


def test_event_table_is_complete():
    "`after_create` fires once, at the end of the constructor; save and load events are not fired by a fit"
    seen = trace(synth_learner())

    assert set(event_names) - set(seen) == {'after_create', *file_events, 'save_point',
                                            *(f'after_cancel_{s}' for s in scopes)}
