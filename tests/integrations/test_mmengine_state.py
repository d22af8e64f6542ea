"""MMEngine's hooks over interrupts, errors, files and evaluations: no average is lost, no weights stay swapped."""
import pytest
import torch

from learner.callback import Callback
from learner.callbacks.checkpoint import Checkpoint
from learner.files import load_file
from learner.integrations.mmengine import as_callback
from learner.integrations.mmengine_hub import HistoryBuffer, MessageHub
from learner.plain import from_plain
from tests.helpers import raises, synth_learner
from tests.mmengine_helpers import All, EMAHook, Hook
from tests.resume_helpers import AskAt, noisy_learner, record


def values(model): return [*model.state_dict().values()]
def equal(a, b): return all(torch.equal(x, y) for x, y in zip(values(a), values(b), strict=True))


def fitted(path, n=3, stop=None, resume=None, hook=None):
    "A Learner with an EMAHook after a fit that may have been stopped, and the hook"
    learn, hook = noisy_learner(path), hook or EMAHook()
    cbs = [as_callback(hook), Checkpoint('2it', keep=None), *([AskAt(stop)] if stop else [])]
    try: learn.fit(n, 1e-2, cbs=cbs, resume=resume)
    except KeyboardInterrupt: assert stop
    return learn, hook


def test_validation_is_of_the_average(tmp_path):
    "In a fit and after it `EMAHook` puts its average in for validation, and the weights are the trained ones again"
    learn, hook = fitted(tmp_path)
    plain = noisy_learner(tmp_path/'plain')
    plain.fit(3, 1e-2)

    row = learn.final_record
    assert equal(learn.model, plain.model) and not equal(hook.average, learn.model)
    assert learn.validate(cbs=as_callback(hook)) == pytest.approx(row[1:], rel=1e-6)  # buffers are not averaged
    learn.model.load_state_dict({**learn.model.state_dict(), **dict(hook.average.named_parameters())})
    assert learn.validate() == pytest.approx(row[1:], rel=1e-6)


@pytest.mark.parametrize('stop', [3, 5, 6, 7, 12])
def test_interrupted_and_resumed_in_this_process(stop, tmp_path):
    "Wherever the stop came the weights are those that were trained, and the fit goes on bit for bit, average and all"
    whole, average = fitted(tmp_path/'whole')
    learn, hook = fitted(tmp_path, stop=stop)

    learn.resume()

    assert equal(learn.model, whole.model) and equal(hook.average, average.average)
    assert record(learn) == record(whole)


@pytest.mark.parametrize('stop', [3, 5, 6, 7, 12, 14])
def test_interrupted_and_resumed_from_a_file(stop, tmp_path):
    "So it does in another process"
    whole, average = fitted(tmp_path/'whole')
    fitted(tmp_path, stop=stop)

    learn, hook = fitted(tmp_path, resume=True)

    assert equal(learn.model, whole.model) and equal(hook.average, average.average)
    assert record(learn) == record(whole)


@pytest.mark.parametrize('at', ['after_batch', 'after_pred'])
def test_error_in_validation(at, tmp_path):
    "After an error in the midst of a validation the weights are those that were trained"
    learn, hook = noisy_learner(tmp_path), EMAHook()
    fails = Callback(**{at: raises(RuntimeError('boom'), when=False, nth=2)})

    with pytest.raises(RuntimeError, match='boom'): learn.fit(2, 1e-2, cbs=[as_callback(hook), fails])

    plain = noisy_learner(tmp_path/'plain')
    plain.fit(1, 1e-2)
    assert equal(learn.model, plain.model)


def test_sites_of_a_resumed_fit(tmp_path):
    "The hook begins, takes what the file holds, and only then the training begins, at the place where it stopped"
    fitted(tmp_path, 2, stop=9, hook=All())  # after the second batch of the second epoch

    _, hook = fitted(tmp_path, 2, resume=True, hook=All())

    sites = [row[:3] for row in hook.seen if 'save' not in row[0]]
    assert sites[:5] == [('before_run', 1, 0), ('after_load_checkpoint', 1, 0), ('before_train', 1, 7),
                         ('before_train_epoch', 1, 7), ('before_train_iter', 1, 7)]
    assert [row[3]['batch_idx'] for row in hook.seen if row[0] == 'before_train_iter'] == [2, 3, 4]
    assert sites[-2:] == [('after_train', 2, 10), ('after_run', 2, 10)]


def test_one_run_over_an_interrupt(tmp_path):
    "A fit that goes on in this process is one run: no site of its beginning comes twice"
    learn, hook = noisy_learner(tmp_path), All()
    with pytest.raises(KeyboardInterrupt): learn.fit(2, 1e-2, cbs=[as_callback(hook), AskAt(3)])

    learn.resume()

    sites = [row[0] for row in hook.seen]
    once = 'before_run', 'before_train', 'after_train', 'after_run'
    assert [sites.count(s) for s in once] == [1]*4
    assert (sites.count('before_train_epoch'), sites.count('before_train_iter')) == (2, 10)


def test_steps_by_hand(tmp_path):
    "So are steps by hand"
    learn, hook = noisy_learner(tmp_path), All()
    learn.add_cb(as_callback(hook))

    for _ in range(7): learn.step(n_epoch=2)

    sites = [row[0] for row in hook.seen]
    assert [sites.count(s) for s in ('before_run', 'before_train', 'before_train_epoch')] == [1, 1, 2]
    assert [row[2] for row in hook.seen if row[0] == 'before_train_iter'] == list(range(7))


def test_a_fit_without_the_hook_is_told(tmp_path):
    "A checkpoint has the trained weights beside the average: without the hook it goes on with them, but not unnoticed"
    whole, _ = fitted(tmp_path, 2)
    with pytest.raises(ValueError, match='`ema_hook` is missing, whose state it holds'):
        noisy_learner(tmp_path).fit(3, 1e-2, cbs=Checkpoint('2it'), resume=True)

    learn = noisy_learner(tmp_path)
    learn.fit(2, 1e-2, cbs=Checkpoint('2it'), resume=True, allow={'callbacks'})

    assert equal(learn.model, whole.model)


def test_loaded_weights_reach_the_hook(tmp_path):
    "`learn.load` tells a hook that has begun, so that a validation is of what was loaded"
    learn, hook = fitted(tmp_path)
    learn.add_cb(as_callback(hook, None))
    learn.fit(1)
    other = noisy_learner(tmp_path)
    other.save('other')

    learn.load('other')

    assert equal(hook.average, other.model)
    with torch.no_grad(): assert learn.validate() == other.validate()


def test_state_of_hooks_outside_a_fit(tmp_path):
    "`load_state` outside of a fit tells of a hook that is not ready for its part; weights alone have none"
    fitted(tmp_path)
    learn = noisy_learner(tmp_path, cbs=as_callback(EMAHook()))

    with pytest.warns(UserWarning, match=r'as_callback\(EMAHook\) does not get what is loaded'):
        learn.load_state('checkpoints/run1_step15.ckpt', allow={'model'})
    learn.load(learn.save('w', with_opt=False))


def test_a_hook_that_is_ready_outside_a_fit(tmp_path):
    "One that makes nothing in `before_run` takes its part of a file at once, and no warning says otherwise"
    fitted(tmp_path)
    class Looks(Hook):
        def after_load_checkpoint(self, runner, checkpoint): self.found = 'ema_state_dict' in checkpoint
    learn = noisy_learner(tmp_path, cbs=as_callback(hook := Looks()))

    learn.load_state('checkpoints/run1_step15.ckpt', allow={'model'})

    assert hook.found


def test_meta_of_a_hook(tmp_path):
    "What a hook notes in the `meta` of a checkpoint comes back"
    class Notes(Hook):
        def before_save_checkpoint(self, runner, checkpoint): checkpoint['meta']['note'] = 'hello'
        def after_load_checkpoint(self, runner, checkpoint): self.meta = checkpoint['meta']
    learn = noisy_learner(tmp_path)
    learn.fit(1, cbs=[as_callback(Notes()), Checkpoint()])

    noisy_learner(tmp_path).fit(2, cbs=[as_callback(hook := Notes()), Checkpoint()], resume=True)

    assert hook.meta['note'] == 'hello' and hook.meta['iter'] == 5


def test_numbers_of_hooks_are_noted(tmp_path):
    "What hooks write into the hub is found at the Recorder too, also when a fit goes on, but for names of its own"
    class Writes(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            runner.message_hub.update_scalars({'my/iter': runner.iter, 'loss': -1.})
    cbs = [as_callback(Writes()), Checkpoint(), AskAt(3)]
    with pytest.raises(KeyboardInterrupt): noisy_learner(tmp_path).fit(1, cbs=cbs)
    learn = noisy_learner(tmp_path)

    learn.fit(1, cbs=[as_callback(Writes()), Checkpoint()], resume=True)

    assert learn.recorder['my/iter'].values == [0, 1, 2, 3, 4] and min(learn.recorder['loss'].values) >= 0


def test_a_hook_changes_what_is_loaded(tmp_path):
    "`after_load_checkpoint` comes before the weights get into the model, and may change or drop some"
    class Zeroes(Hook):
        def after_load_checkpoint(self, runner, checkpoint):
            weights = checkpoint['state_dict']
            weights['a'] = torch.zeros_like(weights['a'])
            del weights['b']
    synth_learner(path=tmp_path).save('m', with_opt=False)
    learn = synth_learner(path=tmp_path, cbs=as_callback(Zeroes()))

    with pytest.warns(UserWarning, match='missing in the file: `b`'): learn.load('m', strict=False)

    assert learn.model.a == 0 != learn.model.b


# ---- files in MMEngine's layout

class Saves(Hook):
    priority = 'VERY_LOW'
    def after_train_epoch(self, runner): runner.save_checkpoint(runner.work_dir, f'epoch_{runner.epoch+1}.pth')


def test_save_checkpoint(tmp_path):
    "`runner.save_checkpoint` writes MMEngine's layout as its hooks leave it, which torch opens and `learn.load` takes"
    learn, hook = noisy_learner(tmp_path), EMAHook()
    learn.fit(2, 1e-2, cbs=[as_callback(hook), as_callback(Saves())])

    found = from_plain(load_file(tmp_path/'models'/'epoch_2.pth'))

    assert found.keys() == {'meta', 'state_dict', 'message_hub', 'optimizer', 'ema_state_dict'}
    assert (found['meta']['epoch'], found['meta']['iter']) == (2, 10)
    assert all(torch.equal(v, found['state_dict'][k]) for k, v in hook.average.state_dict().items())
    assert torch.load(tmp_path/'models'/'epoch_2.pth', weights_only=True)['meta']['epoch'] == 2
    assert equal(noisy_learner(tmp_path).load('epoch_2', with_opt=False).model, hook.average)


@pytest.mark.parametrize('kwargs, keys', [
    (dict(save_optimizer=False), {'meta', 'state_dict', 'message_hub'}),
    (dict(meta=dict(note='mine'), by_epoch=False), {'meta', 'state_dict', 'message_hub', 'optimizer'})])
def test_parts_of_a_checkpoint(kwargs, keys, tmp_path):
    "Parts can be left out, and notes put in"
    class Own(Hook):
        def after_train_iter(self, runner, **_): runner.save_checkpoint(tmp_path, 'm.pth', **kwargs)

    synth_learner(cbs=as_callback(Own()), n=3).fit(1)

    found = load_file(tmp_path/'m.pth')
    assert found.keys() == keys and found['meta'].get('note') == kwargs.get('meta', {}).get('note')
    assert (found['meta']['epoch'], found['meta']['iter']) == ((1, 2) if kwargs.get('by_epoch', True) else (0, 3))


def test_backends_are_refused(tmp_path):
    "Files are local"
    class Own(Hook):
        def after_train(self, runner): runner.save_checkpoint(tmp_path, 'm.pth', backend_args=dict(backend='s3'))

    with pytest.raises(ValueError, match='`backend_args` are not here'): synth_learner(cbs=as_callback(Own())).fit(1)


# ---- the message hub

def test_message_hub():
    "Numbers by name with means over windows, other things by name; tensors are read when somebody asks"
    hub = MessageHub(lambda *args: None)
    hub.update_scalars({'loss': torch.tensor(1.), 'acc': dict(value=.5, count=3)})
    hub.update_scalar('loss', torch.tensor(3.), 3)
    hub.update_info_dict(dict(epoch=3, best='a'))

    loss = hub.get_scalar('loss')
    assert (loss.current(), loss.mean(), loss.mean(1), loss.min(), loss.statistics('max')) == (3, 2.5, 3, 1, 3)
    assert loss.data == ([1, 3], [1, 3]) and hub.get_scalar('acc').mean(99) == .5
    assert [hub.get_info('epoch'), hub.get_info('none', 7)] == [3, 7]
    assert [hub.pop_info('best'), hub.pop_info('best')] == ['a', None]
    assert [*hub.log_scalars] == ['loss', 'acc'] and hub.runtime_info == dict(epoch=3)


def test_unknown_statistics():
    "A name that is none is refused"
    with pytest.raises(KeyError, match="'median' is none of mean, min, max, current"):
        HistoryBuffer().statistics('median')


def test_what_checkpoints_hold_of_the_hub(tmp_path):
    "All but what is not to be kept, or cannot be"
    class Notes(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            runner.message_hub.update_scalar('loss', (outputs or {})['loss'])
            runner.message_hub.update_scalar('time', 1., resumed=False)
            runner.message_hub.update_info('model', runner.model)
            runner.message_hub.update_info('n', runner.iter)
    def run(**kwargs):
        learn, cb = noisy_learner(tmp_path), as_callback(Notes())
        learn.fit(kwargs.pop('n'), 1e-2, cbs=[cb, Checkpoint('5it')], **kwargs)
        return learn, learn._mmengine.message_hub

    run(n=1)
    learn, hub = run(n=2, resume=True)

    assert hub.get_scalar('loss').values == pytest.approx(learn.recorder.raw_losses)
    assert (len(hub.get_scalar('loss')), len(hub.get_scalar('time')), hub.get_info('n')) == (10, 5, 9)
