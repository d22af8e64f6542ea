"""Callback: handlers, what it may read and write, names, state; and the list of callbacks of a Learner."""
import pickle
from copy import deepcopy

import pytest
from torch import nn

from learner.callback import Callback, before_batch_cb
from tests.helpers import Counts, Reads, raises, synth_learner


# ---- handlers

@pytest.mark.parametrize('name, meant', [('befor_batch', 'before_batch'), ('begin_fit', 'before_fit'),
                                         ('before_valid', 'before_validate'), ('after_cancel_valid',
                                                                               'after_cancel_validate')])
def test_misspelt_handler_is_refused_at_class_creation(name, meant):
    "A method that is almost an event, or an old form of one, cannot be defined in silence"
    with pytest.raises(TypeError, match=f'`Odd.{name}` is not an event; did you mean `{meant}`'):
        type('Odd', (Callback,), {name: lambda self: None})

def test_other_methods_are_free():
    "Helpers may have any name that is no near miss of an event, and private ones any name"
    class Fine(Callback):
        def before_batch_training(self): return 1
        def loss(self): return 2
        def _befor_fit(self): return 3

    assert Fine().loss() == 2

def test_unknown_handler_function_is_refused():
    "`Callback(event=f)` knows the events"
    with pytest.raises(TypeError, match='did you mean `after_batch`'): Callback(after_btach=print)

def test_functions_as_handlers_get_the_callback():
    "A function given for an event is called with its callback"
    seen = []
    learn = synth_learner(Callback(after_epoch=lambda cb: seen.append((cb.epoch, cb.learn is learn))))

    learn.fit(2)

    assert seen == [(0, True), (1, True)]

def test_no_handler_by_delegation():
    "A model or Learner that happens to have a method named after an event is never called as a handler"
    class Model(nn.Linear):
        def before_epoch(self): raise AssertionError("called")
    learn = synth_learner(Callback(), model=Model(1, 1))
    learn.after_epoch = raises(AssertionError("called"))

    learn.fit(1)

    assert learn.ordered_cbs('before_epoch') == [learn.recorder]

def test_before_batch_cb():
    "`before_batch_cb` makes a callback, class or instance, that changes the batch"
    @before_batch_cb
    def shifted(self, xb, yb): return tuple(x+1000 for x in xb), yb
    class Look(Callback):
        def after_pred(self): self.low = float(self.x.min())
    learn = synth_learner([shifted, Look])

    learn.fit(1)

    assert learn.look.low > 900 and isinstance(learn.shifted, shifted)


# ---- reading and writing

def test_reading_falls_through_to_the_learner():
    "Loop fields and Learner attributes read as the callback's own"
    learn = synth_learner(reads := Reads(), n_valid=0, lr=.25)

    learn.fit(1)

    assert [s[:3] + s[4:] for s in reads.seen] == [(0, 0, True, .25), (0, 1, True, .25)]

def test_a_missing_attribute_names_both():
    "A typo is reported of the callback and its Learner, and a name that only the model has is pointed out"
    learn = synth_learner(cb := Callback(), model=nn.Linear(1, 1))

    with pytest.raises(AttributeError,
                       match='`Callback` has no `modle`, and neither has its Learner'): cb.modle  # noqa: B018
    with pytest.raises(AttributeError, match=r'the model has: `self\.model\.weight`'): cb.weight  # noqa: B018
    with pytest.raises(AttributeError, match=r'`Learner` has no `weight`; the model has: `learn\.model\.weight`'):
        learn.weight  # noqa: B018
    with pytest.raises(AttributeError,
                       match='`Callback` has no `lr`, and is not part of a Learner'): Callback().lr  # noqa: B018

def test_a_propertys_own_error_is_shown():
    "An AttributeError inside a property of callback, Learner or model is reported as it is"
    class Broken(Callback):
        @property
        def size(self): return [].shape
    class Model(nn.Linear):
        @property
        def size(self): return {}.nothing
    learn = synth_learner(cb := Broken(), model=Model(1, 1))

    with pytest.raises(AttributeError, match="'list' object has no attribute 'shape'"): cb.size  # noqa: B018
    with pytest.raises(AttributeError, match='`Learner` has no `size`'): learn.size  # noqa: B018
    learn.cbs = None
    with pytest.raises(AttributeError, match='.'): learn.ordered_callbacks  # noqa: B018

@pytest.mark.parametrize('name', ['pred', 'loss', 'xb', 'epoch', 'training', 'smooth_loss', 'x'])
def test_writing_a_loop_field_is_refused(name):
    "Assigning a loop field on a callback would change nothing in the loop, so it is an error that says how"
    learn = synth_learner(Callback(after_loss=lambda cb: setattr(cb, name, 1)))

    with pytest.raises(AttributeError, match=rf'write `self\.learn\.{name} = …`'): learn.fit(1)

def test_writing_through_the_learner_changes_training():
    "`self.learn.pred = …` is what the loss sees"
    seen = []
    def double(cb): cb.learn.pred = cb.pred*0
    learn = synth_learner([Callback(after_pred=double),
                           Callback(after_loss=lambda cb: seen.append(float(cb.pred.detach().sum())))])

    learn.fit(1)

    assert seen == [0, 0, 0]


# ---- state

def test_state_dict_holds_the_declared_attributes():
    "`state` names what `state_dict` gives and `load_state_dict` puts back"
    a, b = Counts(), Counts()
    a.n = 5

    b.load_state_dict(a.state_dict())

    assert b.n == 5 and a.state_dict() == {'n': 5}

def test_callbacks_copy_and_pickle():
    "A callback, alone, can be copied and pickled"
    cb = Counts()
    cb.n = 3

    assert deepcopy(cb).n == pickle.loads(pickle.dumps(cb)).n == 3


# ---- run flags

@pytest.mark.parametrize('attrs, n', [({}, 3), (dict(run_train=False), 1), (dict(run_valid=False), 2),
                                      (dict(run=False), 0)])
def test_run_flags(attrs, n):
    "run, run_train and run_valid decide in which batches a callback acts"
    learn = synth_learner(cb := Counts())
    for k, v in attrs.items(): setattr(cb, k, v)

    learn.fit(1)

    assert cb.n == n

def test_run_stays_off():
    "`run=False` set outside a fit stays, and can be changed in the midst of one"
    learn = synth_learner(cb := Counts())
    cb.run = False

    learn.fit(1)
    learn.fit(1, cbs=Callback(after_train=lambda o: setattr(cb, 'run', True)))

    assert cb.run and cb.n == 1

def test_run_in():
    "`run_in` says in which kinds of run a callback acts"
    class InFit(Counts): run_in = frozenset({'fit'})
    learn = synth_learner([InFit, Counts], n=2, n_valid=1)

    learn.fit(1)
    learn.validate(cbs=(both := Counts()))

    assert (learn.in_fit.n, both.n) == (3, 1)
