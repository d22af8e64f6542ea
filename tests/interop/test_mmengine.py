"""MMEngine's own hooks in a Learner, and callbacks in its Runner: `make test-mmengine` has MMEngine for it."""
import logging
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from learner.callback import Callback
from learner.callbacks.checkpoint import Checkpoint
from learner.events import CancelFitException
from learner.integrations.mmengine import as_callback, as_hook, from_sites, priority_order, sites
from tests.helpers import Counts, synth_learner
from tests.mmengine_helpers import Anew, Mosaic, as_hooks
from tests.resume_helpers import AskAt, noisy_learner, record

with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # MMEngine's own
    pytest.importorskip('mmengine', reason="MMEngine is heavy: `make test-mmengine` has it in its own environment")
    from mmengine.evaluator import BaseMetric
    from mmengine.hooks import (CheckpointHook, DistSamplerSeedHook, EarlyStoppingHook, EMAHook, EmptyCacheHook, Hook,
                                IterTimerHook, LoggerHook, ParamSchedulerHook, RuntimeInfoHook)
    from mmengine.model import BaseModel
    from mmengine.optim import CosineAnnealingLR, LinearLR, MultiStepLR
    from mmengine.runner import Runner
    from mmengine.runner.priority import Priority

pytestmark = pytest.mark.filterwarnings('ignore')


class All(Hook):
    "Notes every site, with `runner.epoch` and `runner.iter` there and the names of what it gets"
    def __init__(self): self.seen = []

def _noting(site):
    def note(self, runner, **kwargs): self.seen.append((site, runner.epoch, runner.iter, sorted(kwargs)))
    return note

for _name in sites: setattr(All, _name, _noting(_name))


# ---- MMEngine's Runner, on a regression of 2 batches and 1 of validation

class Model(BaseModel):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, x, y, mode='loss'):
        pred = self.linear(x)
        return dict(loss=(pred-y).square().mean()) if mode == 'loss' else list(pred)


class Sum(BaseMetric):
    default_prefix = 'sum'
    def process(self, data_batch, data_samples): self.results.append(float(sum(data_samples)))
    def compute_metrics(self, results): return dict(sum=sum(results))


def loader(n):
    x = torch.randn(4*n, 1, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, 2*x), 4, collate_fn=lambda b: dict(zip('xy', map(torch.stack, zip(*b)))))


def runner(path, hooks, by_epoch=True, **train_cfg):
    return Runner(Model(), str(path), train_dataloader=loader(2), val_dataloader=loader(1), test_dataloader=loader(1),
                  val_evaluator=[Sum()], test_evaluator=[Sum()], val_cfg=dict(), test_cfg=dict(),
                  train_cfg=dict(by_epoch=by_epoch, **train_cfg), custom_hooks=hooks, log_level='ERROR',
                  optim_wrapper=dict(optimizer=dict(type='SGD', lr=.01)), experiment_name=path.name)


def test_all_sites_come_as_in_mmengine(tmp_path):
    "A hook that has all 22 sees them in the same order, at the same epochs and iterations, with the same arguments"
    there, here = All(), All()
    run = runner(tmp_path, [there], max_epochs=2)
    run.train()
    run.test()
    learn = synth_learner(cbs=as_callback(here), n=2, n_valid=1)

    learn.fit(2)
    learn.validate(dl=learn.dls.valid.dl)

    assert here.seen == [row for row in there.seen if 'checkpoint' not in row[0]]
    assert {row[0] for row in here.seen} == {s for s in sites if 'checkpoint' not in s}


def test_all_sites_of_a_loop_by_iterations(tmp_path):
    "So it is in a fit by steps"
    there, here = All(), All()
    run = runner(tmp_path, [there], by_epoch=False, max_iters=2, val_interval=99)
    run.val_loop.run = lambda: None  # `fit_iters` validates where a callback does
    run.train()

    synth_learner(cbs=as_callback(here), n=2, n_valid=1).fit_iters(2)

    assert here.seen == [row for row in there.seen if 'checkpoint' not in row[0]]


def test_ema(tmp_path):
    "EMAHook averages as its formula says, validates with the average, and goes on from a file bit for bit"
    def fit(path, n, stop=(), **kwargs):
        learn, hook = noisy_learner(path), EMAHook(momentum=.1)
        learn.fit(n, 1e-2, cbs=[as_callback(hook), Checkpoint('2it'), *stop], **kwargs)
        return learn, hook
    whole, average = fit(tmp_path/'whole', 3)
    with pytest.raises(KeyboardInterrupt): fit(tmp_path, 3, [AskAt(9)])

    learn, hook = fit(tmp_path, 3, resume=True)

    pairs = zip(hook.ema_model.state_dict().values(), average.ema_model.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs) and hook.ema_model.steps == 15
    assert record(learn) == record(whole)
    assert learn.validate(cbs=as_callback(hook))['valid_loss'] == pytest.approx(learn.final_record['valid_loss'])


def test_ema_by_its_formula():
    "The average is (1-m)·average + m·weights after each batch, from the first one's weights on"
    weights, hook = [], EMAHook(momentum=.25)
    class Notes(Callback):
        order = 'HIGHEST'
        def after_batch(self):
            if self.training: weights.append(self.model.a.item())

    synth_learner(n=4).fit(1, .1, cbs=[as_callback(hook), Notes()])

    expected = weights[0]
    for w in weights[1:]: expected = .75*expected + .25*w
    assert hook.ema_model.module.a.item() == pytest.approx(expected, rel=1e-5)


def test_checkpoints(tmp_path):
    "CheckpointHook saves, keeps, finds the best and publishes; the Learner loads what it wrote"
    learn = synth_learner(n=2, path=tmp_path)
    hook = CheckpointHook(interval=1, max_keep_ckpts=2, save_best='valid_loss', published_keys=['meta', 'state_dict'])

    learn.fit(4, .1, cbs=as_callback(hook))

    names = {p.name for p in (tmp_path/'models').iterdir()}
    assert {'epoch_3.pth', 'epoch_4.pth', 'best_valid_loss_epoch_4.pth', 'last_checkpoint'} < names
    assert 'epoch_2.pth' not in names and len([n for n in names if n.startswith('epoch_4-')]) == 1
    other = synth_learner(path=tmp_path, model=None).load('epoch_4', with_opt=False)
    assert torch.equal(other.model.a, learn.model.a)


def test_early_stopping():
    "EarlyStoppingHook ends the fit after the epoch in which it has waited enough"
    learn = synth_learner(n=2, lr=0.)

    learn.fit(9, cbs=as_callback(EarlyStoppingHook('valid_loss', min_delta=0., patience=3)))

    assert len(learn.recorder.values) == 9  # an equal value is not worse, for MMEngine
    learn.fit(9, cbs=as_callback(EarlyStoppingHook('valid_loss', min_delta=1., patience=3)))
    assert len(learn.recorder.values) == 4


@pytest.mark.parametrize('make, rates', [
    (lambda opt: [MultiStepLR(opt, milestones=[1, 2], gamma=.1)], [.1]*2 + [.01]*2 + [.001]*2),
    (lambda opt: [LinearLR(opt, start_factor=.5, end=3, by_epoch=False)], [.05, .075, .1, .1, .1, .1]),
    (lambda opt: [CosineAnnealingLR(opt, T_max=6, by_epoch=False)], [.1, .093301, .075, .05, .025, .006699])])
def test_schedulers(make, rates):
    "ParamSchedulerHook steps MMEngine's schedulers, and the next fit begins anew"
    learn = synth_learner(n=2)

    for _ in range(2):
        learn.fit(3, .1, cbs=as_callback(ParamSchedulerHook(), param_schedulers=make))

        assert learn.recorder.lrs == pytest.approx(rates, abs=1e-6)


def test_schedulers_of_a_resumed_fit(tmp_path):
    "They go on where they were"
    def fit(n, stop=(), **kwargs):
        learn = noisy_learner(tmp_path)
        cb = as_callback(ParamSchedulerHook(), param_schedulers=lambda opt: [
            CosineAnnealingLR(opt, T_max=15, by_epoch=False)])
        learn.fit(n, .1, cbs=[cb, Checkpoint('1it'), *stop], **kwargs)
        return learn.recorder.lrs
    with pytest.raises(KeyboardInterrupt): fit(3, [AskAt(9)])

    expected = [.05*(1+torch.cos(torch.tensor(i/15*torch.pi, dtype=torch.float64)).item()) for i in range(15)]
    assert fit(3, resume=True) == pytest.approx(expected)


def test_timer_and_runtime_info():
    "IterTimerHook and RuntimeInfoHook fill the message hub"
    learn = synth_learner(n=3)
    hooks = IterTimerHook(), RuntimeInfoHook(), DistSamplerSeedHook(), EmptyCacheHook()

    learn.fit(2, .1, cbs=[as_callback(h) for h in hooks])

    hub = learn._mmengine.message_hub
    assert len(hub.get_scalar('train/time')) == len(hub.get_scalar('train/data_time')) == 6
    assert hub.get_scalar('train/loss').values == pytest.approx(learn.recorder.raw_losses)
    assert hub.get_scalar('train/lr').values == [.1]*6 and len(hub.get_scalar('val/valid_loss')) == 2
    assert (hub.get_info('max_iters'), hub.get_info('epoch'), hub.get_info('eta')) == (6, 1, 0)


def test_logger_is_not_there():
    "LoggerHook needs what only MMEngine's Runner has, and is refused at once, with what to take"
    with pytest.raises(ValueError, match='in a Learner it is IterLogger'): as_callback(LoggerHook(interval=1))


def test_pipeline_switch():
    "A hook that resets private fields of the loader changes what persistent workers read"
    class Switch(Hook):
        again = False
        def before_train_epoch(self, runner):
            dl = runner.train_dataloader
            if runner.epoch == 2:
                dl.dataset.mosaic = False
                if hasattr(dl, 'persistent_workers') and dl.persistent_workers is True:
                    dl._DataLoader__initialized, dl._iterator, self.again = False, None, True
            elif self.again: dl._DataLoader__initialized = True
    seen = []
    learn = synth_learner(dls=(DataLoader(Mosaic(), 8, num_workers=1, persistent_workers=True), None))

    learn.fit(4, cbs=[as_callback(Switch()), Callback(before_batch=lambda cb: seen.append(cb.x[0].item()))])

    assert seen == [1, 1, 0, 0]


def test_priorities_are_mmengines():
    "Their names are all known, and numbers keep their order"
    assert [priority_order(p) for p in Priority] == sorted(priority_order(p.value) for p in Priority)


# ---- the way back

def test_callback_in_a_runner(tmp_path):
    "A callback in MMEngine's Runner acts at the events that its sites stand for, and can end the training"
    seen = []
    class Traces(Callback):
        def after_epoch(self): seen.append((self.epoch, self.n_epoch, self.train_iter, self.final_record['sum/sum']))
        def after_batch(self): seen.append((self.iter, self.training, self.loss is None, self.learn.stage))
        def after_fit(self): seen.append('end')
    class Stops(Callback):
        def after_epoch(self):
            if self.epoch == 1: raise CancelFitException
    run = runner(tmp_path, [as_hook(Traces), as_hook(Stops)], max_epochs=5)
    run.train()

    assert [row[:3] for row in seen if len(row) == 4 and type(row[1]) is int] == [(0, 5, 2), (1, 5, 4)]
    assert [row for row in seen if len(row) == 4 and type(row[1]) is bool][:3] == [
        (0, True, False, 'train'), (1, True, False, 'train'), (0, False, True, 'valid')]
    assert seen[-1] == 'end' and seen.count('end') == 1


def test_state_of_a_callback_in_a_runner(tmp_path, monkeypatch):
    "Its state is in MMEngine's checkpoints, and comes back from them"
    monkeypatch.setenv('TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD', '1')  # they have pickled objects in them
    first, second = Counts(), Counts()
    runner(tmp_path/'a', [as_hook(first)], max_epochs=2).train()
    run = runner(tmp_path/'b', [as_hook(second)], max_epochs=3)
    run._resume, run._load_from = True, str(tmp_path/'a'/'epoch_2.pth')
    run.train()

    assert (first.n, second.n) == (6, 3 + 5)  # the checkpoint is made before the second validation


@pytest.mark.parametrize('by_epoch', [True, False])
def test_states_of_callbacks_that_begin_anew(tmp_path, monkeypatch, by_epoch):
    "Two of a class go on each with its own, though they begin anew with the fit, and in a loop by iterations its epoch"
    monkeypatch.setenv('TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD', '1')
    class AnewInEpoch(Anew):
        def before_epoch(self): self.n = self.n*by_epoch
    def go(n, resume=False):
        cbs = AnewInEpoch(), AnewInEpoch(100)
        kwargs = dict(max_epochs=n) if by_epoch else dict(max_iters=2*n, val_interval=2)
        every = dict(type='CheckpointHook', interval=1 if by_epoch else 2, by_epoch=by_epoch)
        run = runner(tmp_path, [as_hook(cb) for cb in cbs], by_epoch, **kwargs)
        run.register_default_hooks(dict(checkpoint=every))
        run._resume = resume
        run.train()
        return [cb.n for cb in cbs]

    assert (go(1), go(3, True)) == ([2, 200], [6, 600])


def test_a_callback_in_one_run_after_another(tmp_path):
    "It is let go of at the end of a run; an evaluation that a callback begins within one is part of it"
    seen = []
    class Evaluates(Callback):
        def before_epoch(self):
            self.learn.runner.val_loop.run()
            seen.append((self.training, self.learn.stage))
    cb = Evaluates()

    for i in range(2): runner(tmp_path/str(i), [as_hook(cb)], max_epochs=1).train()

    assert seen == [(True, 'train')]*2 and cb.learn is None


@pytest.mark.parametrize('name', as_hooks)
def test_callbacks_of_the_package_in_a_runner(name, tmp_path, monkeypatch):
    "Those that are no Learner's alone work"
    monkeypatch.setattr(Model, 'reset', lambda self: None, raising=False)

    run = runner(tmp_path, [as_hook(as_hooks[name]())], max_epochs=2)
    run.train()

    assert run.iter == 4


def test_hook_of_a_callback_is_one_of_mmengines():
    "Its sites are known to MMEngine, and it is quiet elsewhere"
    hook = as_hook(Counts())

    assert isinstance(hook, Hook) and {*from_sites} < {*hook.get_triggered_stages()}
    assert logging.getLogger('mmengine').disabled is False
