"""What MMEngine's hooks, schedulers and message hub are when a fit goes on, begins anew, or its weights are loaded."""
import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from learner.callback import Callback
from learner.callbacks.checkpoint import Checkpoint
from learner.callbacks.tracker import SaveModelCallback
from learner.integrations.mmengine import as_callback
from learner.optim import SGD
from tests.helpers import synth_learner
from tests.mmengine_helpers import EMAHook, Hook
from tests.resume_helpers import AskAt, noisy_learner


class Steps(Hook):
    "As MMEngine's ParamSchedulerHook, by iterations"
    def __init__(self): self.begun = 0
    def before_run(self, runner): self.begun += 1
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None): runner.param_schedulers[0].step()

def falling(opt): return [LambdaLR(opt, lambda i: 1/(1+i))]


def test_a_new_fit_after_a_stopped_one():
    "It begins: `before_run` comes, and schedulers are at their beginning"
    learn = synth_learner(n=4, cbs=as_callback(hook := Steps(), param_schedulers=falling))
    with pytest.raises(KeyboardInterrupt): learn.fit(1, .1, cbs=AskAt(3))

    learn.fit(1, .1)

    assert hook.begun == 2 and learn.recorder.lrs == pytest.approx([.1, .05, .1/3, .025])


class Plateau(Hook):
    def after_val_epoch(self, runner, metrics=None):
        runner.param_schedulers[0].step(1.)
        runner.message_hub.update_scalar('val/n', runner.epoch)

def plateau(opt): return [ReduceLROnPlateau(opt, patience=1, factor=.5)]


def told(learn): return learn.recorder.lrs[::5], learn._mmengine.message_hub.get_scalar('val/n').values


@pytest.mark.parametrize('stop,there', [(6, True), (13, True), (20, True), (21, True), ('error', True), (6, False),
                                        (13, False), (20, False), (21, False)])
def test_schedulers_and_numbers_go_on(tmp_path, stop, there):
    "They are as the state that is gone on with has them: a validation that is made again counts once"
    def fit(learn, *cbs, **kwargs):
        learn.fit(6, .1, cbs=[as_callback(Plateau(), param_schedulers=plateau), Checkpoint('1ep'), *cbs], **kwargs)
        return told(learn)
    expected = fit(whole := noisy_learner(tmp_path/'whole'))
    learn = noisy_learner(tmp_path)
    def fail(cb):
        if cb.epoch == 1: raise KeyError('odd')
    with pytest.raises((KeyboardInterrupt, KeyError)):
        fit(learn, AskAt(stop) if stop != 'error' else Callback(after_epoch=fail))

    if there: fit(learn := noisy_learner(tmp_path), resume=True)
    else: learn.resume()

    assert told(learn) == expected == ([.1, .1, .1, .05, .05, .025], [1, 2, 3, 4, 5, 6])
    assert all(map(torch.equal, learn.model.parameters(), whole.model.parameters()))


def test_a_rehearsal_before_it_goes_on(tmp_path):
    "`dry_run` between a stop and `resume` leaves schedulers and numbers as the fit needs them"
    learn = noisy_learner(tmp_path, cbs=as_callback(Plateau(), param_schedulers=plateau))
    with pytest.raises(KeyboardInterrupt): learn.fit(6, .1, cbs=AskAt(16))

    learn.dry_run('fit', 1)
    learn.resume()

    assert told(learn) == ([.1, .1, .1, .05, .05, .025], [1, 2, 3, 4, 5, 6])


class StopsAt7(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter == 6: runner.train_loop.stop_training = True


def test_a_stop_that_was_asked_for(tmp_path):
    "A fit that was interrupted before it could stop ends at the same place, in another process too"
    with pytest.raises(KeyboardInterrupt): noisy_learner(tmp_path).fit(
        5, cbs=[as_callback(StopsAt7()), Checkpoint(), AskAt(10)])
    learn = noisy_learner(tmp_path)

    learn.fit(5, cbs=[as_callback(StopsAt7()), Checkpoint()], resume=True)

    assert learn.n_step == 10


def test_momentum_is_put_back():
    "What MMEngine's schedulers have set is not what the next fit trains with"
    class Less(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            for g in runner.optim_wrapper.param_groups: g['momentum'] = .1
    def with_momentum(): return synth_learner(n=2, opt_func=lambda ps, **kw: SGD(ps, mom=.9, **kw))
    learn = with_momentum()
    learn.fit(1, cbs=as_callback(Less(), param_schedulers=falling))

    learn.fit(1)

    assert learn.recorder['mom'].values == [.9, .9]


# ---- files

@pytest.mark.parametrize('with_opt', [None, False])
def test_weights_with_what_the_hook_keeps(tmp_path, with_opt):
    "`learn.save` keeps a hook's part: what is loaded measures the same"
    learn = synth_learner(n=6, path=tmp_path, cbs=as_callback(EMAHook(.2)), lr=.3)
    learn.fit(2)
    expected, raw = learn.validate()['valid_loss'], [p.clone() for p in learn.model.parameters()]
    learn.save('a', with_opt=with_opt)
    learn.fit(1)

    learn.load('a')

    assert learn.validate()['valid_loss'] == expected
    assert all(map(torch.equal, raw, learn.model.parameters()))


def test_the_best_model(tmp_path):
    "SaveModelCallback loads what the best row was measured with"
    learn = synth_learner(n=6, path=tmp_path, cbs=as_callback(EMAHook(.2)), lr=.3)

    learn.fit(3, cbs=SaveModelCallback('valid_loss'))

    assert learn.validate()['valid_loss'] == min(row['valid_loss'] for row in learn.recorder.values)


def test_what_no_file_can_hold(tmp_path):
    "It is left out with a warning that names it; all else is saved"
    class Puts(Hook):
        def before_save_checkpoint(self, runner, checkpoint): checkpoint |= dict(classes=range(3), n=3)
        def after_load_checkpoint(self, runner, checkpoint): self.found = checkpoint['n'], 'classes' in checkpoint
    learn = noisy_learner(tmp_path)

    with pytest.warns(UserWarning, match='put into the checkpoint as `classes`, a `range`, is not saved'):
        learn.fit(2, cbs=[as_callback(Puts()), Checkpoint('1ep')])
    noisy_learner(tmp_path).fit(3, cbs=[as_callback(hook := Puts()), Checkpoint(at_end=False)], resume=True)

    assert hook.found == (3, False)
