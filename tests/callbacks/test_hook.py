"""HookCallback: in which batches its hooks are on, what they are told, and that it is as a callback should be."""
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from learner import Learner
from learner.callback import Callback
from learner.callbacks.checkpoint import Checkpoint
from learner.callbacks.hook import HookCallback
from learner.callbacks.lr_find import LRFinder
from learner.events import CancelBatchException
from tests.helpers import synth_learner, weights
from tests.resume_helpers import AskAt, noisy_learner
from tests.test_hooks import entries

assert Learner and LRFinder  # they add `lr_find`


def line(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 4), nn.ReLU(inplace=True), nn.Linear(4, 1), *more)


class Means(HookCallback):
    "Notes at the end of each batch what its hooks have stored"
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []

    def hook(self, m, inputs, output): return output.mean()

    def after_batch(self): self.seen.append((self.training, self.epoch, self.iter, {**self.stored}))


class InAll(Means): run_valid = True


def batches(cb): return [o[:3] for o in cb.seen if o[3]]


@pytest.mark.parametrize('cls, every, expected', [
    (Means, None, [(True, e, i) for e in (0, 1) for i in range(3)]),
    (Means, 2, [(True, 0, 0), (True, 0, 2), (True, 1, 1)]), (Means, 5, [(True, 0, 0), (True, 1, 2)]),
    (InAll, 2, [(True, 0, 0), (True, 0, 2), (False, 0, 0), (True, 1, 1), (False, 1, 0)])])
def test_in_which_batches(cls, every, expected):
    "Hooks are on in one of `every` training batches, counted through the fit, and in evaluations only if asked for"
    cb = cls(every=every)

    synth_learner(cb, n=3, n_valid=2, model=line()).fit(2)

    assert batches(cb) == expected and not cb.open


def test_what_is_stored():
    "Within the batch, what `hook` returned last is found by name of the module; afterwards nothing is"
    cb, found = Means(), []
    def look(loop): found.append((dict(cb.stored), [m(loop.x).mean() for m in (loop.model[0], loop.model)]))
    learn = synth_learner([cb, Callback(after_loss=look)], n=1, n_valid=0, model=line())

    learn.fit(1)

    (stored, expected), = found
    assert [*stored] == ['0', '2'] and [*stored.values()] == expected and cb.stored == {}


@pytest.mark.parametrize('cls', [Means, InAll])
def test_evaluation_within_a_batch(cls):
    "An evaluation that a callback starts within a batch adds nothing to what the batch has stored"
    cb, plain, runs = cls(), cls(), []
    def evaluate(loop):
        if not loop.training: return
        n = len(cb.seen)
        loop.learn.validate()
        runs.append(len(cb.seen)-n)
    synth_learner(plain, model=line()).fit(1)

    synth_learner([cb, Callback(after_pred=evaluate)], model=line()).fit(1)

    own = [o for o in cb.seen if o[0]]
    assert own == [o for o in plain.seen if o[0]] and runs == [int(cls is InAll)]*2 and not cb.open


@pytest.mark.parametrize('event', ['after_pred', 'before_backward'])
def test_backward_within_an_evaluation(event):
    "A backward pass is told to the batch it belongs to, also after an evaluation within it"
    def evaluate(loop):
        if loop.training: loop.learn.validate()
    grads, plain = [], []
    def add(to): return HookCallback(is_forward=False, hook=lambda m, gi, go: to.append(go[0].sum()))
    synth_learner(add(plain), model=line()).fit(1)

    synth_learner([add(grads), Callback(**{event: evaluate})], model=line()).fit(1)

    assert len(plain) == 4 and grads == plain


def test_two_at_once():
    "Each has its own modules, batches and results"
    a, b = Means('0'), Means(nn.ReLU, every=2)

    synth_learner([a, b], n=3, model=line()).fit(1)

    assert [[*o[3]] for o in a.seen if o[0]] == [['0']]*3 and [[*o[3]] for o in b.seen if o[0]] == [['1'], [], ['1']]


@pytest.mark.parametrize('options, n_values', [
    ({}, 2), (dict(pre=True), 1), (dict(is_forward=False), 2), (dict(is_forward=False, pre=True), 1)])
def test_a_function_as_hook(options, n_values):
    "`hook=f` is called with the module and what a Hook gives; it goes before the class's method"
    seen = []
    cb = Means('0', hook=lambda m, *values: seen.append((m, len(values))), **options)
    model = line()

    synth_learner(cb, n=2, model=model).fit(1)

    assert seen == [(model[0], n_values)]*2


def test_detach_and_cpu():
    "With `detach=False` a hook gets the graph, so that what it returns can be part of the loss"
    def penalize(loop): loop.learn.loss_grad = loop.loss_grad + sum(cb.stored.values())
    cb = Means(detach=False)
    learn = synth_learner([cb, Callback(after_loss=lambda loop: loop.training and penalize(loop))], model=line())
    plain = synth_learner(Means(), model=line())

    learn.fit(1)
    plain.fit(1)

    assert cb.seen[0][3]['0'].requires_grad and not any(a.equal(b) for a, b in zip(weights(learn), weights(plain)))


odd: Any = (0, -1, 1.5, True, '2')

@pytest.mark.parametrize('make, error, message', [
    (lambda: HookCallback('0'), TypeError, 'HookCallback has no `hook` to call: give `hook=f`, or write a method'),
    *[(lambda e=e: Means(every=e), (ValueError, TypeError), f'`every`, 10 for one batch in ten, is {e!r}; give')
      for e in odd]])
def test_refused(make: Callable, error, message):
    "What cannot be meant is an error at once"
    with pytest.raises(error, match=re.escape(message)): make()


@pytest.mark.parametrize('is_forward', [True, False])
def test_errors_say_which_hook(is_forward):
    "An error in a hook names callback and module, and leaves no hook behind"
    def fail(m, *values): raise KeyError('mine')
    learn = synth_learner(HookCallback('2', is_forward=is_forward, hook=fail), model=line())

    with pytest.raises(KeyError, match='mine') as info: learn.fit(1)

    assert "raised by the hook of `HookCallback` on module `2`" in info.value.__notes__ and not entries(learn.model)


def test_a_hook_may_cancel():
    "A cancel raised in a hook ends what it says"
    def cancel(m, *values): raise CancelBatchException
    learn = synth_learner(HookCallback('2', every=2, hook=cancel), n=3, model=line())

    learn.fit(1)

    assert learn.n_step == 1 and not entries(learn.model)


def test_modules_of_another_model():
    "The modules are those of the model that the fit begins with"
    learn = synth_learner(cb := Means(), model=line())
    learn.fit(1)
    learn.model = nn.Sequential(nn.Sequential(nn.Linear(1, 1)))

    with pytest.warns(UserWarning, match='made anew, since `model` changed'): learn.fit(1)

    assert [*cb.names.values()] == ['0.0'] and [*cb.seen[-2][3]] == ['0.0']


def test_same_weights_with_and_without():
    "Hooks change nothing in training, be they of whatever kind"
    plain = synth_learner(n=4, model=line(nn.Dropout(.2)))
    cbs = [Means(), *[HookCallback(lambda m: True, hook=lambda *values: 1, is_forward=f, pre=p)
                      for f in (True, False) for p in (True, False)]]
    hooked = synth_learner(cbs, n=4, model=line(nn.Dropout(.2)))

    for learn in (plain, hooked):
        torch.manual_seed(1)
        learn.fit(2)

    assert all(a.equal(b) for a, b in zip(weights(plain), weights(hooked), strict=True))


class Total(Means):
    "Keeps a sum in its state"
    state = ('total',)
    total = 0.

    def before_fit(self):
        super().before_fit()
        self.total = 0.

    def after_batch(self): self.total += float(sum(self.stored.values()))


def test_state_goes_on_after_resume(tmp_path):
    "What a subclass declares as its state is the same after a resume, with `every` in step"
    def learner(folder, *cbs):
        return noisy_learner(tmp_path/folder, cbs=[Checkpoint(every='1it'), Total(every=3), *cbs])
    whole = learner('whole')
    whole.fit(2, 1e-2)
    with pytest.raises(KeyboardInterrupt): learner('cut', AskAt(4)).fit(2, 1e-2)
    learn = learner('cut')

    learn.fit(2, 1e-2, resume=True)

    assert learn.final_hash == whole.final_hash and learn.total.total == whole.total.total != 0


def test_in_lr_find():
    "It acts in lr_find too, which leaves Learner and callback as they were"
    calls, cb = [], Total()
    learn = synth_learner(cb, n=4, model=line())
    learn.fit(1)
    learn.add_cb(HookCallback('0', hook=lambda *values: calls.append(1)))
    before, total = learn.state_hash(), cb.total

    learn.lr_find(num_it=5, show_plot=False, suggest_funcs=None)

    assert learn.state_hash() == before and cb.total == total and len(calls) >= 5 and not entries(learn.model)
