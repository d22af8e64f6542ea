"""Hooks as MMEngine's users write them, over a base class with the same methods as its own."""
import copy
from enum import IntEnum

import torch
from torch.utils.data import DataLoader, Dataset

from learner import all as everything
from learner.callback import Callback
from learner.integrations.mmengine import sites


def generic(site):
    "The method that serves a site in all modes, and the mode"
    when, mode, what = (*site.split('_'), '')[:3]
    return (f'_{when}_{what}', mode) if mode in ('train', 'val', 'test') and what else ('', '')


class Hook:
    "All sites, doing nothing but call the generic methods"
    priority = 'NORMAL'

    def _before_epoch(self, runner, mode='train'): pass
    def _after_epoch(self, runner, mode='train'): pass
    def _before_iter(self, runner, batch_idx, data_batch=None, mode='train'): pass
    def _after_iter(self, runner, batch_idx, data_batch=None, outputs=None, mode='train'): pass

    def get_triggered_stages(self):
        def own(name): return name and getattr(type(self), name) is not getattr(Hook, name)
        return [s for s in sites if own(s) or own(generic(s)[0])]


def _site(site):
    name, mode = generic(site)
    def call(self, runner, **kwargs):
        if not name: return
        if 'epoch' in site: kwargs.pop('metrics', None)
        getattr(self, name)(runner, mode=mode, **kwargs)
    return call

for _name in sites: setattr(Hook, _name, _site(_name))


class Priority(IntEnum):
    VERY_LOW = 90


class All(Hook):
    "Notes every site: its name, `runner.epoch` and `runner.iter` there, and what it gets"
    def __init__(self, seen=None, label=None):
        self.seen, self.label = [] if seen is None else seen, label

def _noting(site):
    def note(self, runner, **kwargs):
        self.seen.append((site, self.label) if self.label else (site, runner.epoch, runner.iter, kwargs))
    return note

for _name in sites: setattr(All, _name, _noting(_name))


class EMAHook(Hook):
    "Averages the weights, and puts the average into the model for validation and test, as MMEngine's does"
    def __init__(self, momentum=.1): self.momentum = momentum
    def before_run(self, runner): self.model, self.average = runner.model, copy.deepcopy(runner.model)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        with torch.no_grad():
            for a, p in self._pairs(): a.lerp_(p, self.momentum)

    def _pairs(self): return zip(self.average.parameters(), self.model.parameters())

    def _swap(self):
        for a, p in self._pairs(): a.data, p.data = p.data.clone(), a.data.clone()

    def before_val_epoch(self, runner): self._swap()
    def after_val_epoch(self, runner, metrics=None): self._swap()
    def before_test_epoch(self, runner): self._swap()
    def after_test_epoch(self, runner, metrics=None): self._swap()

    def before_save_checkpoint(self, runner, checkpoint):
        checkpoint['ema_state_dict'] = self.average.state_dict()
        self._swap_dicts(checkpoint)

    def after_load_checkpoint(self, runner, checkpoint):
        if 'ema_state_dict' not in checkpoint: return self.average.load_state_dict(checkpoint['state_dict'])
        self._swap_dicts(checkpoint)
        self.average.load_state_dict(checkpoint['ema_state_dict'])

    def _swap_dicts(self, checkpoint):
        weights, average = checkpoint['state_dict'], checkpoint['ema_state_dict']
        for k in list(average): weights[k], average[k] = average[k], weights[k]


class StopHook(Hook):
    "Ends the training at an epoch, or an iteration, as an EarlyStoppingHook does"
    priority = 'LOWEST'
    def __init__(self, epoch=None, iter=None): self.epoch, self.iter = epoch, iter
    def after_val_epoch(self, runner, metrics): runner.train_loop.stop_training = runner.epoch == self.epoch
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter == self.iter: runner.train_loop.stop_training = True


class Mosaic(Dataset):
    "Items that tell whether the pipeline makes mosaics"
    mosaic = True
    def __len__(self): return 8
    def __getitem__(self, i): return torch.tensor([float(self.mosaic)]), torch.zeros(1)


class SwitchHook(Hook):
    "Changes the pipeline for the last epochs, by resetting private fields of the loader, as MMDetection's hooks do"
    restarted = False
    def __init__(self, last): self.last = last

    def before_train_epoch(self, runner):
        loader = runner.train_dataloader
        if runner.epoch == runner.max_epochs-self.last:
            runner.logger.info('No mosaic from here on')
            loader.dataset.mosaic = False
            if loader.persistent_workers:
                loader._DataLoader__initialized = False
                loader._iterator = None
                self.restarted = True
            runner.model.more = True
        elif self.restarted: loader._DataLoader__initialized = True


class Anew(Callback):
    "Counts training batches from the start of its fit"
    state, n = ('n',), 0
    def __init__(self, step=1): self.step = step
    def before_fit(self): self.n = 0
    def after_batch(self): self.n += self.step*self.training


# Callbacks of the package that work as hooks, on any model, each on its own
as_hooks = dict(
    ActivationCheckpointing=lambda: everything.ActivationCheckpointing(''),
    ActivationStats=lambda: everything.ActivationStats(modules=''), Callback=Callback,
    CollectDataCallback=everything.CollectDataCallback, Compiled=lambda: everything.Compiled('eager'),
    EmptyCacheCallback=everything.EmptyCacheCallback,
    HookCallback=lambda: everything.HookCallback('', hook=lambda *args: None),
    ModelResetter=everything.ModelResetter, ProfilerCallback=lambda: everything.ProfilerCallback(0, 1, 1),
    Scheduler=everything.Scheduler, SyncBuffersCallback=everything.SyncBuffersCallback)


def places(seen):
    "Sites with the epoch and the iteration that were seen there"
    return [row[:3] for row in seen]


def mosaic_loader(n_workers=1): return DataLoader(
    Mosaic(), 4, num_workers=n_workers, persistent_workers=n_workers > 0)
