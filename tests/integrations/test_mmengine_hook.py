"""The way back: callbacks of the Learner's in MMEngine's Runner, for which the Learner's own stands in here."""
import sys
from types import ModuleType

import pytest
import torch

from learner import all as everything
from learner.callback import Callback
from learner.callbacks.checkpoint import Checkpoint
from learner.callbacks.control import TimeLimit
from learner.callbacks.switch import SwitchAt
from learner.callbacks.training import GradientClip
from learner.events import (CancelBatchException, CancelFitException, CancelTrainException, CancelValidException)
from learner.integrations.mmengine import as_callback, as_hook, from_sites, sites
from tests.helpers import Counts, RegModel, raises, synth_learner
from tests.mmengine_helpers import Anew, Hook, as_hooks
from tests.resume_helpers import noisy_learner

known = {e for events in from_sites.values() for e in events}


@pytest.fixture(autouse=True)
def mmengine(monkeypatch):
    "A package of that name, with the class of hooks"
    package, hooks = ModuleType('mmengine'), ModuleType('mmengine.hooks')
    vars(hooks)['Hook'] = Hook
    for m in package, hooks: monkeypatch.setitem(sys.modules, m.__name__, m)


class Traces(Callback):
    "Notes events that MMEngine has sites for, with what can be read there"
    def __init__(self, but=()):
        self.seen = []
        super().__init__(**{e: _noting(e) for e in known if e not in but})

def _noting(e):
    def note(cb):
        loop = cb.epoch, cb.n_epoch, cb.train_iter, cb.training, cb.learn.stage
        batch = [cb.iter, cb.n_iter, None if cb.loss is None else cb.loss.item()] if e.endswith('_batch') else []
        cb.seen.append((e, *(loop if e != 'before_fit' and 'cleanup' not in e else ()), *batch))
    return note


@pytest.mark.parametrize('n_valid', [0, 1])
def test_a_callback_sees_the_same_events(n_valid):
    "Over a fit a callback sees what it would see in a Learner, but for the loss in the midst of a batch"
    own, there = Traces(), Traces()
    learn = synth_learner(n=2, n_valid=n_valid)

    learn.fit(2, cbs=[own, as_callback(as_hook(there))])

    assert [row[0] for row in there.seen] == [row[0] for row in own.seen]
    train = [row for row in own.seen if row[0] == 'after_batch' and row[4]]
    assert [row for row in there.seen if row[0] == 'after_batch' and row[4]] == train and len(train) == 4


def test_evaluations_alone():
    "A test alone has a fit and an epoch around it"
    cb = Traces()
    learn = synth_learner(cbs=as_callback(as_hook(cb)))

    learn.validate(dl=learn.dls.valid.dl)

    assert [row[0] for row in cb.seen] == [
        'before_fit', 'before_epoch', 'before_validate', 'before_batch', 'after_batch', 'cleanup_batch',
        'after_validate', 'cleanup_validate', 'after_epoch', 'cleanup_epoch', 'after_fit', 'cleanup_fit']
    assert {row[5] for row in cb.seen if row[0] == 'after_batch'} == {'test'}


def test_what_a_callback_finds():
    "Model, torch's optimizer, the batch, predictions, metrics and folder are found as in a Learner"
    found = {}
    class Reads(Callback):
        def after_batch(self):
            key = 'train' if self.training else 'valid'
            found[key] = self.x.shape, self.y.shape, None if self.pred is None else self.pred.shape
        def after_epoch(self): found.update(model=self.model, opt=self.opt.opt, row=self.final_record['valid_loss'],
                                            path=self.path, device=self.device,
                                            n=len(self.dls.train), agreed=self.learn.agree(True))
    learn = synth_learner(cbs=as_callback(as_hook(Reads)), n=2)

    learn.fit(1)

    shape = torch.Size([8, 1])
    assert found['train'] == (shape, shape, None) and found['valid'] == (shape, shape, shape)
    assert found['model'] is learn.model and found['opt'] is learn.opt.opt
    assert (found['row'], found['n'], found['agreed']) == (learn.final_record['valid_loss'], 2, True)
    assert found['path'] == learn.path/'models' and found['device'] == torch.device('cpu')


def test_numbers_of_a_callback():
    "What it notes is in the message hub, and an evaluation's metrics are in `recorder.row`"
    class Notes(Callback):
        def after_batch(self): self.learn.note('my/iter', self.iter)
        def after_validate(self): self.row = dict(self.recorder.row)
    learn = synth_learner(cbs=as_callback(as_hook(cb := Notes())), n=3)

    learn.fit(1)

    hub = learn.hook_of_learner_hook.runner.message_hub
    assert hub.get_scalar('my/iter').values == [0, 1, 2, 0]
    assert cb.row == {'valid_loss': learn.final_record['valid_loss']}


def test_cancel_fit_ends_the_training():
    "After the epoch, as MMEngine can"
    cb, learn = Traces(but=['after_cancel_fit']), synth_learner()
    stop = Callback(after_cancel_fit=lambda cb: cb.learn.runner.message_hub.update_info('cancelled', True),
                    after_epoch=raises(CancelFitException, nth=2))

    learn.fit(4, cbs=[as_callback(as_hook(cb)), as_callback(as_hook(stop))])

    assert [row[0] for row in cb.seen].count('after_epoch') == 2 == len(learn.recorder.values)
    assert learn._mmengine.message_hub.get_info('cancelled') and cb.seen[-1] == ('cleanup_fit',)


@pytest.mark.parametrize('event, ex', [('before_batch', CancelBatchException), ('before_train', CancelTrainException),
                                       ('before_validate', CancelValidException)])
def test_other_cancels_are_errors(event, ex):
    "MMEngine can end nothing else"
    cb = as_hook(Callback(**{event: raises(ex)}))

    with pytest.raises(RuntimeError, match=f'{ex.__name__} raised by `Callback` at `{event}`: in MMEngine'):
        synth_learner(cbs=as_callback(cb)).fit(1)


def test_cancel_fit_outside_of_training():
    "There is nothing to end"
    hook = as_hook(Callback(before_validate=raises(CancelFitException)))

    with pytest.raises(RuntimeError, match='outside of training'): synth_learner(cbs=as_callback(hook)).validate()


@pytest.mark.parametrize('cb, match', [
    (GradientClip(), '`GradientClip` acts at before_step, which MMEngine'),
    (Callback(after_pred=print, after_epoch=print), 'acts at after_pred, which'),
    (SwitchAt(1, print), '`SwitchAt` works on a Learner alone'),
    (type('Mine', (TimeLimit,), {})('1h'), '`Mine` works on'),
    (torch.optim.SGD, 'is no Callback')])
def test_what_cannot_run_there(cb, match):
    "Callbacks of events without a site, and what is none, are refused"
    with pytest.raises(TypeError, match=match): as_hook(cb)


def test_a_callback_of_a_learner():
    "One that is part of a Learner cannot run elsewhere too"
    synth_learner(cbs=(cb := Counts()))

    with pytest.raises(ValueError, match='is part of a Learner: remove it there first'): as_hook(cb)


def test_one_that_has_been_in_a_run():
    "When the run is over, also by an error, it can be in another one; after its end in a Learner too"
    cb, stop = Counts(), Callback(after_epoch=raises(KeyError))
    with pytest.raises(KeyError): synth_learner(cbs=[as_callback(as_hook(cb)), as_callback(as_hook(stop))]).fit(1)

    for _ in range(2): synth_learner(cbs=as_callback(as_hook(cb))).fit(1)
    synth_learner(cbs=cb).fit(1)

    assert cb.n == 4*3


def test_without_mmengine(monkeypatch):
    "Its package is needed, which the error says"
    monkeypatch.setitem(sys.modules, 'mmengine.hooks', None)

    with pytest.raises(ImportError, match='`as_hook` needs `mmengine.hooks`: pip install mmengine'): as_hook(Counts())


@pytest.mark.parametrize('name, event', [('xb', 'before_batch'), ('dl', 'before_train'), ('epoch', 'before_fit')])
def test_what_the_runner_would_not_see(name, event):
    "A callback that sets a field of the loop, as to change a batch, is told that nothing comes of it"
    cb = Callback(**{event: lambda cb: setattr(cb.learn, name, None)})

    with pytest.raises(AttributeError, match=f'`learn.{name}` is set at `{event}`, which MMEngine'):
        synth_learner(cbs=as_callback(as_hook(cb))).fit(1)


@pytest.mark.parametrize('name', sorted(k for k, v in vars(everything).items()
                                        if isinstance(v, type) and issubclass(v, Callback)))
@pytest.mark.filterwarnings('ignore:.*(no accelerator|Profiler)')
def test_each_callback_of_the_package(name, tmp_path):
    "Each is refused at once, or works in a fit"
    class Model(RegModel):
        def reset(self): pass
    if name not in as_hooks:
        cls = type(name, (vars(everything)[name],), dict(__repr__=lambda cb: name))
        with pytest.raises(TypeError, match=f'as_hook: `{name}`'): as_hook(object.__new__(cls))
        return

    learn = synth_learner(model=Model(), cbs=as_callback(as_hook(as_hooks[name]())), path=tmp_path)
    learn.fit(2)

    assert len(learn.recorder.values) == 2


def test_unknown_things():
    "What MMEngine's Runner does not tell is an error"
    cb = Callback(after_epoch=lambda cb: cb.progress)

    with pytest.raises(AttributeError, match='progress'): synth_learner(cbs=as_callback(as_hook(cb))).fit(1)


@pytest.mark.parametrize('order, priority', [('VERY_LOW', 90), (0, 50), (-1000, 0), (500, 100), (10, 55)])
def test_priority(order, priority):
    "The order of the callback is MMEngine's number for it"
    cb = Counts()
    cb.order = order

    assert as_hook(cb).priority == priority


def test_switches_are_obeyed():
    "`run_valid` and `run_in` say where a callback acts"
    class Some(Counts): run_valid, run_in = False, {'fit'}
    learn = synth_learner(cbs=as_callback(as_hook(cb := Some())), n=2)

    learn.fit(1)
    learn.validate()

    assert cb.n == 2


def test_state_is_in_checkpoints(tmp_path):
    "What a callback keeps comes back from MMEngine's checkpoints"
    def run(n, **kwargs):
        cb = Counts()
        noisy_learner(tmp_path).fit(n, 1e-2, cbs=[as_callback(as_hook(cb)), Checkpoint('5it')], **kwargs)
        return cb.n

    assert (run(1), run(2, resume=True)) == (7, 14)  # batches of training and validation


def test_one_that_begins_anew(tmp_path):
    "It has what was loaded after its `before_fit`, as in a Learner"
    def run(n, wrap, **kwargs):
        cb = Anew()
        noisy_learner(tmp_path/wrap.__name__).fit(n, 1e-2, cbs=[wrap(cb), Checkpoint('5it')], **kwargs)
        return cb.n
    def hook(cb): return as_callback(as_hook(cb))
    def own(cb): return cb

    found = [(run(1, wrap), run(3, wrap, resume=True)) for wrap in (hook, own)]

    assert found == [(5, 15)]*2


def test_two_of_a_class(tmp_path):
    "Each has its own state back"
    def run(n, **kwargs):
        cbs = Anew(), Anew(100)
        noisy_learner(tmp_path).fit(n, 1e-2, cbs=[*(as_callback(as_hook(cb)) for cb in cbs), Checkpoint('5it')],
                                    **kwargs)
        return [cb.n for cb in cbs]

    assert (run(1), run(2, resume=True)) == ([5, 500], [10, 1000])


def test_sites_of_the_hook():
    "It says which sites it acts at, and those are MMEngine's"
    stages = as_hook(Counts()).get_triggered_stages()

    assert {*from_sites} < {*stages} <= {*sites}
