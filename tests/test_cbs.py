"""The list of a Learner's callbacks: what may join it, and what joining and leaving during a fit mean."""

import pytest
from torch import nn

from learner.callback import Callback, TrainEvalCallback
from learner.callbacks.recorder import Recorder
from learner.order import CallbackOrderError
from tests.helpers import Counts, Reads, Tracer, raises, synth_learner, trace


def test_class_and_instance_can_be_added_and_removed():
    "Callbacks are found by name, and gone after removal"
    learn = synth_learner(Counts)
    cb = learn.counts

    learn.remove_cb(Counts)

    assert 'counts' not in vars(learn) and cb.learn is None and cb not in learn.cbs

def test_newest_twin_has_the_name():
    "Several instances of a class are allowed; `learn.<name>` is the newest that is still there"
    a, b = Counts(), Counts()
    learn = synth_learner([a, b])
    assert learn.counts is b

    learn.remove_cb(b)

    assert learn.counts is a

@pytest.mark.parametrize('add, message', [
    (lambda learn: learn.add_cb(learn.counts), 'is part of this Learner already'),
    (lambda learn: learn.fit(1, cbs=learn.counts), 'is part of this Learner already'),
    (lambda learn: synth_learner(learn.counts), 'belongs to another Learner'),
    (lambda learn: learn.add_cb(Recorder()), 'there is a `Recorder` already'),
    (lambda learn: learn.add_cb(TrainEvalCallback), 'there is a `TrainEvalCallback` already'),
    (lambda learn: learn.add_cb(type('ModelCallback', (Callback,), {})), 'would be found as `learn.model`'),
    (lambda learn: learn.add_cb(type('Fit', (Callback,), {})), 'would be found as `learn.fit`'),
    (lambda learn: learn.add_cb(type('Opt', (Callback,), {})), 'would be found as `learn.opt`')])
def test_what_cannot_be_added_says_why(add, message):
    "The same instance twice, one of another Learner, a second unique one, a taken name: all refused, nothing changes"
    learn = synth_learner(Counts)
    before = list(learn.cbs)

    with pytest.raises(ValueError, match=message): add(learn)

    assert list(learn.cbs) == before and learn.counts.learn is learn

@pytest.mark.parametrize('cb', [print, 3, 'Recorder', nn.Linear(1, 1)])
def test_what_is_no_callback_is_refused(cb):
    "What is no callback is named, with what is accepted"
    with pytest.raises(TypeError, match='is no callback'): synth_learner(cb)

def test_a_class_defined_anew_replaces_the_old_one():
    "Running a cell again that defines and adds a callback replaces the old one, and says so"
    def cell(learn): learn.add_cb(type('Mine', (Callback,), {'__module__': '__main__'}))
    learn = synth_learner()
    cell(learn)
    old = learn.mine

    with pytest.warns(UserWarning, match='`Mine` replaces the callback of its name'): cell(learn)

    assert learn.mine is not old and old.learn is None and sum(c.name == 'mine' for c in learn.cbs) == 1

def test_classes_made_by_a_function_are_several():
    "Classes that a function makes share their name, and do not replace each other"
    def make(value):
        class Made(Callback): n = value
        return Made
    learn = synth_learner([make(1), make(2)])

    assert [c.n for c in learn.cbs if c.name == 'made'] == [1, 2]

def test_own_recorder_replaces_the_default():
    "A default callback given in `cbs` takes the default's place"
    learn = synth_learner(Recorder(train_metrics=True), default_cbs=True)

    assert learn.recorder.train_metrics and sum(isinstance(c, Recorder) for c in learn.cbs) == 1

@pytest.mark.parametrize('default_cbs, there', [
    (True, {'train_eval', 'recorder', 'progress'}), (False, {'train_eval'}), (dict(progress=None), {'train_eval',
                                                                                                    'recorder'}),
    (dict(extra=Counts), {'train_eval', 'recorder', 'progress', 'counts'})])
def test_default_cbs(default_cbs, there):
    "`default_cbs` keeps, drops, or changes the defaults by key; the loop's own callback is always there"
    assert {c.name for c in synth_learner(default_cbs=default_cbs).cbs} == there

def test_unknown_default_is_an_error():
    "Dropping a default that does not exist is an error that lists the ones there are"
    with pytest.raises(KeyError, match='`progres` is no default callback; they are recorder, progress'):
        synth_learner(default_cbs=dict(progres=None))

def test_fit_trains_without_default_callbacks():
    "`default_cbs=False` trains all the same"
    learn = synth_learner(default_cbs=False)
    before = learn.model.a.item()

    learn.fit(1)

    assert learn.model.a.item() != before and learn.validate()['valid_loss'] > 0

def test_add_cb_order_overrides_the_class():
    "`add_cb(cb, order=…)` counts, also as a name"
    learn = synth_learner([Tracer])
    learn.add_cb(Counts, order='HIGHEST').add_cb(Callback(after_fit=print), order=-2000)

    assert [type(c).__name__ for c in learn.ordered][:3] == ['Callback', 'Tracer', 'Counts']

def test_cycle_is_refused_when_it_is_made():
    "A callback that makes the order impossible is refused when added, and is not part of the Learner then"
    class A(Callback): run_after = 'B'
    class B(Callback): run_after = 'A'
    learn = synth_learner(A)

    with pytest.raises(CallbackOrderError, match='runs after'): learn.add_cb(B)

    assert 'b' not in vars(learn) and all(type(c) is not B for c in learn.cbs)

def test_added_and_removed_cbs_leave_the_list_as_it_was():
    "The contexts restore the very same callbacks at their places, also after an error"
    learn = synth_learner([Counts, Reads])
    before = list(learn.cbs)

    with pytest.raises(KeyError), learn.removed_cbs(Counts), learn.added_cbs([Counts, Tracer]):
        assert learn.counts is not before[-2]
        raise KeyError

    assert all(a is b for a, b in zip(learn.cbs, before, strict=True)) and learn.counts is before[-2]

@pytest.mark.parametrize('cb', [TrainEvalCallback, Counts()])
def test_what_cannot_be_removed(cb):
    "The loop's own callback stays, and removing what is not there is no silent no-op"
    with pytest.raises(ValueError, match='cannot be removed'): synth_learner().remove_cb(cb)


# ---- during a fit

def test_added_in_a_fit_gets_the_open_scopes():
    "A callback added within a batch gets `before_x` of all open scopes, outermost first, and their cleanups at the end"
    late = Tracer()
    learn = synth_learner(Callback(after_pred=lambda cb: late.learn or cb.learn.add_cb(late)), n=1, n_valid=0)

    learn.fit(1)

    assert late.seen == ['before_fit', 'before_epoch', 'before_train', 'before_batch', 'after_loss',
                         'before_backward', 'after_backward', 'cleanup_backward', 'before_step', 'after_step',
                         'cleanup_step',
                         'after_batch', 'cleanup_batch', 'after_train', 'cleanup_train', 'after_epoch', 'cleanup_epoch',
                         'after_fit', 'cleanup_fit']

def test_removed_in_a_fit_gets_the_cleanups():
    "A callback removed within a batch gets `cleanup_x` of all open scopes, innermost first, then nothing"
    class Mine(Tracer):
        def after_loss(self): self.learn.remove_cb(self)
    learn = synth_learner(n=2)
    mine = Mine()
    del vars(mine)['after_loss']
    had = []
    vars(mine)['cleanup_fit'] = lambda: had.append(mine.learn)

    learn.fit(1, cbs=mine)

    assert mine.seen[-4:] == ['after_pred', 'cleanup_batch', 'cleanup_train', 'cleanup_epoch']
    assert had == [learn] and mine.learn is None and mine not in learn.cbs

def test_all_cleanups_of_a_removed_callback_run():
    "A cleanup that fails when its callback is removed does not stop the others, nor the removal"
    done = []
    cb = Callback(cleanup_batch=raises(ValueError('bad')), cleanup_train=lambda cb: done.append(cb.learn is learn),
                  cleanup_fit=lambda cb: done.append(cb.learn is learn))
    learn = synth_learner(cb)

    with pytest.raises(ValueError, match='bad'): learn.fit(1, cbs=Callback(after_loss=lambda o: learn.remove_cb(cb)))

    assert done == [True, True] and cb.learn is None and cb not in learn.cbs

def test_removed_within_a_nested_evaluation():
    "A callback removed within an evaluation gets the cleanups of the fit around it too"
    late = Tracer()
    learn = synth_learner(late, n=1)
    def drop(cb): cb.learn.validate(cbs=Callback(after_pred=lambda o: learn.remove_cb(late)))

    learn.fit(1, cbs=Callback(after_batch=lambda cb: cb.training and drop(cb)))

    assert late.seen[-6:] == ['cleanup_batch', 'cleanup_validate', 'cleanup_batch', 'cleanup_train', 'cleanup_epoch',
                              'cleanup_fit']
    assert late.learn is None

def test_a_callback_removed_by_another_is_not_called_any_more():
    "Within one event, a callback that an earlier one removes is skipped"
    victim = Counts()
    learn = synth_learner([Callback(after_batch=lambda cb: victim.learn and cb.learn.remove_cb(victim)), victim])

    learn.fit(1)

    assert victim.n == 0

def test_patching_a_handler_in_place_works():
    "A cell that replaces a handler of a callback's class works on an existing Learner from the next fit on"
    from fastcore.basics import patch
    class Mine(Callback): pass
    learn, seen = synth_learner(Mine), []
    learn.fit(1)

    @patch
    def after_batch(self: Mine): seen.append(self.iter)
    learn.fit(1)

    assert seen == [0, 1, 0]

def test_patching_the_recorder_in_place_works(monkeypatch):
    "A cell that replaces the Recorder's own after_batch works on an existing Learner, and can call the old one"
    learn, seen, old = synth_learner(), [], Recorder.after_batch
    learn.fit(1)

    def after_batch(self):
        old(self)
        seen.append(len(self.train.marks))
    monkeypatch.setattr(Recorder, 'after_batch', after_batch)
    learn.fit(1)

    assert seen == [1, 2, 2] and len(learn.recorder.raw_losses) == 2

def test_idle_callbacks_do_not_change_the_trace():
    "Callbacks without handlers take part in nothing"
    assert trace(synth_learner([Callback() for _ in range(5)])) == trace(synth_learner())
