"""MMEngine's hooks in evaluations: those within others, of several sets, cancelled ones, and with averages beside."""
import pytest
import torch

from learner.callback import Callback
from learner.callbacks.averaging import EMA
from learner.callbacks.swa import SWA
from learner.callbacks.validate_every import ValidateEvery
from learner.events import CancelEpochException, CancelValidException
from learner.integrations.mmengine import as_callback
from tests.helpers import raises, synth_learner
from tests.mmengine_helpers import EMAHook, Hook, StopHook
from tests.resume_helpers import AskAt


class Plain(Hook):
    "Puts zeros into the model for a validation, and what was there back"
    def before_val_epoch(self, runner):
        self.old = [p.detach().clone() for p in runner.model.parameters()]
        with torch.no_grad(): [p.zero_() for p in runner.model.parameters()]

    def after_val_epoch(self, runner, metrics=None):
        with torch.no_grad(): [p.copy_(old) for p, old in zip(runner.model.parameters(), self.old)]


class Sees(Hook):
    "Notes where the runner stands at each validation, and what it measured"
    def __init__(self): self.at, self.seen, self.n = [], [], 0

    def before_val_epoch(self, runner):
        self.at.append(runner.iter)
        self.n += 1

    def after_val_epoch(self, runner, metrics=None): self.seen.append(metrics)


def trained(cbs=(), more=(), n_epoch=1, **kwargs):
    "The weights when an epoch's training was over, and at the end of the fit"
    learn, after = synth_learner(n=3, cbs=[*cbs], lr=.1, **kwargs), []
    note = Callback(after_train=lambda cb: after.append([p.clone() for p in cb.model.parameters()]))
    learn.fit(n_epoch, cbs=[note, *more])
    return after[-1], [*learn.model.parameters()]


# ---- weights come back

@pytest.mark.parametrize('hook', [EMAHook, Plain])
def test_a_validation_that_is_cancelled_before_the_hook(hook):
    "A hook that was not told of a validation's beginning is not told of its end"
    cancel = Callback(before_validate=raises(CancelValidException))
    cancel.order = -20

    after, now = trained([as_callback(hook()), cancel])

    assert all(map(torch.equal, after, now))


@pytest.mark.parametrize('cbs', [lambda: [as_callback(Plain()), EMA(.9)], lambda: [as_callback(Plain()), SWA()],
                                 lambda: [EMAHook, Plain]], ids=['EMA', 'SWA', 'two'])
def test_who_puts_other_weights_into_the_model(cbs):
    "Two that do so for an evaluation would mix them up: it is an error, and the weights are those that were trained"
    found = [as_callback(o()) if isinstance(o, type) else o for o in cbs()]
    learn, after = synth_learner(n=3, cbs=found, lr=.1), []
    note = Callback(after_train=lambda cb: after.append([p.clone() for p in cb.model.parameters()]))

    with pytest.raises(ValueError, match='both put other weights into the model for evaluations'):
        learn.fit(1, cbs=note)

    assert all(map(torch.equal, after[0], learn.model.parameters()))


def test_hooks_that_leave_the_weights_alone_go_with_averages():
    "EMA beside a hook that only looks at validations is fine, also where a weight is NaN"
    model = torch.nn.Linear(1, 1)
    model.register_parameter('odd', torch.nn.Parameter(torch.tensor(float('nan'))))

    synth_learner(cbs=[as_callback(hook := Sees()), EMA(.9)], model=model).fit(2)

    assert len(hook.seen) == 2


@pytest.mark.parametrize('fails', [False, True])
def test_an_evaluation_within_an_evaluation(fails):
    "It is of the same weights, and if there is an error those that were trained come back"
    seen = []
    class Looks(Callback):
        order = -40
        def after_batch(self):
            if self.training or self.learn.run_kind != 'fit': return
            seen.append(self.learn.validate()['valid_loss'])
            if fails: raise KeyError('odd')
    learn, after = synth_learner(n=3, cbs=[as_callback(EMAHook()), Looks], lr=.1), []
    note = Callback(after_train=lambda cb: after.append([p.clone() for p in cb.model.parameters()]))

    try: learn.fit(1, cbs=note)
    except KeyError: assert fails

    assert all(map(torch.equal, after[0], learn.model.parameters()))
    assert fails or seen == [learn.recorder.values[0]['valid_loss']]


# ---- where it stands, and what it measures

def test_where_the_runner_stands():
    "`runner.iter` is that of the fit, at intervals and in evaluations by hand"
    learn = synth_learner(n=3, cbs=as_callback(hook := Sees()))

    learn.fit_iters(5, cbs=ValidateEvery('2it'))
    learn.fit(1, cbs=Callback(after_batch=lambda cb: cb.training and cb.learn.validate()))

    assert hook.at == [0, 2, 4, 5, 1, 2, 3, 3]


def test_several_sets_are_one_validation():
    "Hooks are told of one, whose metrics are those of all sets"
    dl = synth_learner().dls.valid.dl
    learn = synth_learner(cbs=as_callback(hook := Sees()))
    learn.dls = (learn.dls.train.dl, dict(near=dl, far=dl))

    learn.fit(2)
    row = learn.validate()

    assert len(hook.seen) == len(hook.at) == 3
    assert all({*metrics} == {'near_valid_loss', 'far_valid_loss'} for metrics in hook.seen)
    assert hook.seen[2] == dict(zip(row.names, row))


@pytest.mark.parametrize('event, ex', [('after_validate', CancelEpochException), ('after_validate', KeyError),
                                       ('after_batch', KeyError)])
def test_broken_off_between_sets(event, ex):
    "If there is no second set any more, the hook is told of the end, and puts its weights back"
    dl = synth_learner().dls.valid.dl
    learn, after = synth_learner(n=3, cbs=as_callback(EMAHook()), lr=.1), []
    learn.dls = (learn.dls.train.dl, dict(near=dl, far=dl))
    note = Callback(after_train=lambda cb: after.append([p.clone() for p in cb.model.parameters()]))

    try: learn.fit(1, cbs=[note, Callback(**{event: raises(ex, when=False) if 'batch' in event else raises(ex)})])
    except KeyError: assert ex is KeyError

    assert all(map(torch.equal, after[0], learn.model.parameters()))


# ---- what does not count

class Patient(Hook):
    "Ends a fit at the third validation"
    n = 0
    def after_val_epoch(self, runner, metrics=None):
        self.n += 1
        runner.train_loop.stop_training = self.n >= 3


def test_evaluations_by_hand_in_a_fit_do_not_count():
    "What they set of a hook's attributes is put back; those of ValidateEvery count"
    learn = synth_learner(n=4, cbs=as_callback(Patient()))
    learn.fit(9, cbs=Callback(after_batch=lambda cb: cb.training and cb.learn.validate()))
    n_epoch = len(learn.recorder.values)
    learn = synth_learner(n=4, cbs=as_callback(Patient()))
    learn.fit_iters(20, cbs=ValidateEvery('2it', first=False))

    assert (n_epoch, learn.n_step) == (3, 6)


class Lowers(Hook):
    "A plateau by hand: the third validation lowers the rate, and the hub counts them"
    def after_val_epoch(self, runner, metrics=None):
        n = runner.message_hub.get_info('n', 0)+1
        runner.message_hub.update_info('n', n)
        runner.message_hub.update_scalar('val/n', n)
        if n == 3: runner.optim_wrapper.param_groups[0]['lr'] = .01


@pytest.mark.parametrize('by_hand', [False, True])
def test_what_a_validation_makes_of_rates(by_hand):
    "It counts at the intervals of ValidateEvery as at epochs; one by hand leaves the rate and the hub alone"
    def looks(cb): return by_hand and cb.training and cb.learn.validate()
    plain, learn = (synth_learner(n=2, lr=.1, cbs=[as_callback(Lowers()), Callback(after_batch=looks)])
                    for _ in range(2))
    plain.fit(4)
    learn.fit_iters(8, cbs=ValidateEvery('2it', first=False))

    assert plain.recorder.lrs == learn.recorder.lrs == [.1]*6 + [.01]*2
    assert learn._mmengine.message_hub.get_scalar('val/n').values == [1, 2, 3, 4]


def test_a_validation_that_is_given_up():
    "A stop in the midst of one is no validation for hooks; it comes when the fit goes on"
    learn = synth_learner(n=4, n_valid=3, cbs=[as_callback(hook := Sees()), AskAt(4)])

    with pytest.raises(KeyboardInterrupt): learn.fit_iters(4, cbs=ValidateEvery('3it', first=False))
    given_up = hook.seen.pop()
    learn.resume()

    assert given_up == {} and [*map(len, hook.seen)] == [1, 1]
    assert [metrics['valid_loss'] for metrics in hook.seen] == [row['valid_loss'] for row in learn.recorder.values]


def test_several_sets_where_an_error_is_being_handled():
    "A fit within an `except` is like any other"
    dl = synth_learner().dls.valid.dl
    learn = synth_learner(cbs=as_callback(hook := Sees()))
    learn.dls = (learn.dls.train.dl, dict(near=dl, far=dl))

    try: raise KeyError
    except KeyError: learn.fit(1)

    assert [{*metrics} for metrics in hook.seen] == [{'near_valid_loss', 'far_valid_loss'}]


def test_a_rehearsal_does_not_count():
    "After `dry_run` a hook is as before"
    learn = synth_learner(n=4, cbs=as_callback(hook := Patient()))

    learn.dry_run('fit', 3)

    assert vars(hook) == {}
    learn.fit(9)
    assert len(learn.recorder.values) == 3


def test_stop_after_evaluations_alone():
    "An evaluation outside of a fit is what `runner.val()` is: a hook acts on it, and a fit after it begins anew"
    learn = synth_learner(n=2, cbs=as_callback(hook := StopHook(epoch=1)))

    learn.validate()
    learn.fit(3)

    assert hook.epoch == 1 and learn.n_step == 2
