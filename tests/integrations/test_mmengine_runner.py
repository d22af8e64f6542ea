"""What MMEngine's hooks find of a runner in a Learner, and what they can do with it."""
import copy
import os
import pickle

import pytest
import torch
from torch.utils.data import DataLoader

from learner.callback import Callback
from learner.callbacks.schedule import ParamScheduler
from learner.integrations.mmengine import as_callback, sites
from learner.schedules import SchedLin
from tests.helpers import RegModel, synth_learner
from tests.mmengine_helpers import All, Hook, Mosaic, StopHook, SwitchHook, mosaic_loader, places


def test_the_runner():
    "Hooks find the Learner under the names of MMEngine's runner"
    found = {}
    class Reads(Hook):
        def after_train_iter(self, runner, **kwargs):
            loop, opt = runner.train_loop, runner.optim_wrapper
            found.update(ends=(runner.max_epochs, runner.max_iters), loop=(loop.epoch, loop.iter), model=runner.model,
                         n=len(runner.train_dataloader), n_valid=len(runner.val_dataloader), lr=opt.get_lr(),
                         groups=opt.param_groups, optimizer=opt.optimizer, data=runner.train_dataloader.dataset,
                         work_dir=runner.work_dir, rank=(runner.rank, runner.world_size, runner.distributed))
    learn = synth_learner(cbs=as_callback(Reads()), n=2, n_valid=1)

    learn.fit(3, 1e-2)

    assert (found['ends'], found['loop']) == ((3, 6), (2, 5)) and found['model'] is learn.model
    assert (found['n'], found['n_valid'], found['lr']) == (2, 1, {'lr': [1e-2]})
    assert found['groups'] is learn.opt.opt.param_groups and found['optimizer'] is learn.opt.opt
    assert found['data'] is learn.dls.train_ds and found['rank'] == (0, 1, False)
    assert found['work_dir'] == str(learn.path/'models')


@pytest.mark.parametrize('read, match', [
    (lambda runner: runner.visualizer, r'runner.visualizer: the Learner has its own; there are .*model.*'
                                       r'as_callback\(hook, visualizer=…\)'),
    (lambda runner: runner.strategy, "runner.strategy: MMEngine's Runner in a Learner has no such thing"),
    (lambda runner: runner.optim_wrapper.update_params, r'optim_wrapper.update_params: the Learner makes the backward'),
    (lambda runner: runner.train_loop.run, 'train_loop.run: there are dataloader, epoch'),
    (lambda runner: runner.message_hub.get_scalar('a'), "no scalar 'a'; there are none yet")])
def test_what_is_not_there(read, match):
    "Asking the runner for what a Learner has no counterpart of is an error that names it"
    class Asks(Hook):
        def before_train(self, runner): read(runner)

    with pytest.raises((AttributeError, KeyError), match=match) as e: synth_learner(cbs=as_callback(Asks())).fit(1)

    assert 'in `Asks.before_train`' in e.value.__notes__


def test_what_is_given():
    "`as_callback(hook, name=…)` gives the runner more"
    class Asks(Hook):
        def before_train(self, runner): runner.visualizer.append(1)

    synth_learner(cbs=as_callback(Asks(), visualizer=(seen := []))).fit(1)

    assert seen == [1]


def test_rates_can_be_set():
    "A hook that writes into `optim_wrapper.param_groups` sets the rate of the next step"
    class Halves(Hook):
        def after_train_epoch(self, runner):
            for g in runner.optim_wrapper.param_groups: g['lr'] /= 2
    learn = synth_learner(cbs=as_callback(Halves()), n=1)

    learn.fit(3, .4)

    assert learn.recorder.lrs == [.4, .2, .1]


@pytest.mark.parametrize('epoch, n', [(1, 1), (2, 2), (9, 3)])
def test_stop_training(epoch, n):
    "`train_loop.stop_training` ends the fit after the epoch, with its row and `after_train`; the next fit begins anew"
    hook, learn = All(), synth_learner()

    learn.fit(3, cbs=[as_callback(StopHook(epoch=epoch)), as_callback(hook)])

    assert len(learn.recorder.values) == n
    assert places(hook.seen)[-2:] == [('after_train', n, 2*n), ('after_run', n, 2*n)]
    learn.fit(2)
    assert len(learn.recorder.values) == 2


def test_stop_training_within_an_epoch():
    "Set in the midst of an epoch it ends the fit after that epoch; in `fit_iters` after the batch"
    learn = synth_learner(n=4, n_valid=0)

    learn.fit(3, cbs=as_callback(StopHook(iter=1)))
    steps = learn.n_step
    learn.fit_iters(9, cbs=as_callback(StopHook(iter=1)))

    assert (steps, learn.n_step) == (4, 6)


@pytest.mark.parametrize('n_workers', [0, 1])
def test_pipeline_is_switched(n_workers):
    "A hook that resets the loader's private fields has its workers started anew: they see the dataset as it is then"
    class Inputs(Callback):
        def __init__(self): self.seen = []
        def before_batch(self): self.seen.append((self.epoch, self.x.unique().tolist()))
    learn, inputs = synth_learner(dls=(mosaic_loader(n_workers), None)), Inputs()
    user = dict(vars(learn.dls.train.dl))

    learn.fit(4, cbs=[as_callback(SwitchHook(2)), inputs])

    assert inputs.seen == [(e, [float(e < 2)]) for e in range(4) for _ in range(2)]
    assert learn.model.more and vars(learn.dls.train.dl) == user


def test_workers_are_kept_without_a_switch():
    "Nothing is restarted where nothing was reset"
    pids = set()
    class Pids(Mosaic):
        def __getitem__(self, i): return torch.tensor([float(os.getpid() % 1000)]), torch.zeros(1)
    class Notes(Callback):
        def before_batch(self): pids.update(self.x.flatten().tolist())
    learn = synth_learner(dls=(DataLoader(Pids(), 4, num_workers=1, persistent_workers=True), None))

    learn.fit(3, cbs=[as_callback(SwitchHook(9)), Notes()])

    assert len(pids) == 1


def test_schedulers():
    "`param_schedulers` may be a function of torch's optimizer: MMEngine's own hook steps what it makes"
    class Steps:
        def __init__(self, opt): self.opt, self.n = opt, 0
        def step(self):
            for g in self.opt.param_groups: g['lr'] *= .5
    class SchedulerHook(Hook):
        def after_train_epoch(self, runner):
            for s in runner.param_schedulers: s.step()
    learn = synth_learner(n=1)

    learn.fit(3, .4, cbs=as_callback(SchedulerHook(), param_schedulers=lambda opt: [Steps(opt)]))

    assert learn.recorder.lrs == [.4, .2, .1]
    with pytest.raises(ValueError, match='`param_schedulers`, and there is `.*`: leave one out'):
        learn.fit(1, cbs=[as_callback(SchedulerHook(), param_schedulers=[]), ParamScheduler({'lr': SchedLin(1, 0)})])


def test_errors_keep_type_and_traceback():
    "An error in a hook is raised as it is, with a note of hook and site (complaint 16)"
    class Fails(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None): return len(runner)

    with pytest.raises(TypeError, match='has no len') as e: synth_learner(cbs=as_callback(Fails())).fit(1)

    assert e.traceback[-1].name == 'after_train_iter' and 'in `Fails.after_train_iter`' in e.value.__notes__


def test_a_hook_that_does_nothing_in_batches_costs_nothing_there():
    "It has no handler of batches, and the loader is not watched"
    learn = synth_learner(cbs=[cb := as_callback(SwitchHook(9)), as_callback(Hook(), 'LOW')])

    assert [e for e in ('before_batch', 'after_batch') if cb.handler(e)] == [] and len(sites) == 22
    learn.fit(1)


def test_predictions_and_lr_find_call_no_hook():
    "MMEngine has no site for them"
    hook = All()
    learn = synth_learner(cbs=as_callback(hook), model=RegModel())

    learn.get_preds()
    learn.lr_find(show_plot=False)

    assert hook.seen == []


@pytest.mark.parametrize('again', [copy.copy, copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_loader_that_a_hook_keeps(again):
    "It can be copied and pickled, and is then another view of a loader"
    class Keeps(Hook):
        def before_train(self, runner): self.loader = runner.train_dataloader
    synth_learner(n=3, cbs=as_callback(hook := Keeps())).fit(1)

    new = again(hook.loader)

    assert type(new) is type(hook.loader) and len(new) == len([*new]) == 3


@pytest.mark.parametrize('priority', ['HIGHEST', 'NORMAL', 'LOWEST'])
def test_places_for_a_hook_without_batches(priority):
    "`runner.epoch` and `runner.iter` are right for a hook that acts in no batch, from whichever place"
    class Sees(Hook):
        def __init__(self): self.seen = []
        def note(self, runner, *args, **kwargs): self.seen.append((runner.epoch, runner.iter))
        before_run = before_train = after_train_epoch = after_val_epoch = after_run = note
    learn = synth_learner(n=3, cbs=as_callback(hook := Sees(), priority))

    for _ in range(2):
        hook.seen.clear()
        learn.fit(2)

        assert hook.seen[1:] == [(0, 0), (0, 3), (1, 3), (1, 6), (2, 6), (2, 6)] and hook.seen[0][1] == 0
