"""A training with everything in it, which says line by line where it is: what the kill tests kill and start again.

`python -m tests.torture.script FOLDER CELL` goes on with what is in the folder; its last line is the result."""
import hashlib
import json
import os
import sys
import time
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader

from learner import files
from learner.callback import Callback
from learner.callbacks import checkpoint
from learner.callbacks.averaging import EMA
from learner.callbacks.checkpoint import Checkpoint
from learner.callbacks.csv_logger import CSVLogger
from learner.callbacks.finetune import BnFreeze, FreezeUntil
from learner.callbacks.mixup import MixUp
from learner.callbacks.plateau import ReduceLROnPlateau as LowersRate
from learner.callbacks.precision import MixedPrecision
from learner.callbacks.recorder import Recorder
from learner.callbacks.schedule import ParamScheduler
from learner.callbacks.signals import SignalCallback
from learner.callbacks.torch_schedule import TorchScheduler
from learner.callbacks.swa import SWA
from learner.callbacks.tracker import (EarlyStoppingCallback, SaveModelCallback, TerminateOnNaNCallback,
                                       TrackerCallback)
from learner.callbacks.training import GradientAccumulation, GradientClip
from learner.display import set_display
from learner.events import CancelStepException
from learner.files import load_file
from learner.learner import Learner
from learner.metrics import Perplexity, accuracy
from learner.plain import digest
from learner.schedules import SchedCos
from learner.utils import set_seed
from tests.resume_helpers import Noisy, halves, network, record


class Cell(NamedTuple):
    "What a training is done with"
    workers: str = '0'       # a number, or 'persistent': two that are kept
    dtype: str = 'fp32'      # or 'bf16', by autocast, or a key of `kits`
    accum: str = '1'         # batches of a step
    fit: str = 'one_cycle'   # a key of `fits`

    def __str__(self): return ' '.join(self)


# ---- where it is

class Tells:
    "Writes lines, each with a tag; at the `n`-th one of a tag it waits to be killed"
    def __init__(self): self.seen, self.tag, self.n, self.pid = Counter(), '', 0, 0

    def begin(self, tag, n): self.tag, self.n, self.pid = tag, n, os.getpid()

    def __call__(self, tag, text=''):
        if os.getpid() != self.pid: return  # a worker
        self.seen[tag] += 1
        os.write(1, f'@{tag} {text}\n'.encode())
        if tag == self.tag and self.seen[tag] == self.n:
            os.write(1, b'@here\n')
            while True: time.sleep(1)

    def before(self, owner, name, tag, seconds=0.):
        "Tell each call of `owner.name`, and let it wait so long that kills come there too"
        f = getattr(owner, name)
        def call(*args, **kwargs):
            self(tag)
            time.sleep(seconds)
            return f(*args, **kwargs)
        setattr(owner, name, call)


tell = Tells()


def tell_of_files():
    "Tell of all that is done to files"
    tell.before(files._Hashed, 'write', 'write')
    for name in ('fsync', 'replace', 'unlink', 'truncate'): tell.before(os, name, name, 1e-3)
    for name in ('verify_file', 'load_file'): tell.before(checkpoint, name, name, 1e-3)
    for name in ('_begin', '_append', '_cut'): tell.before(CSVLogger, name, 'csv'+name, 1e-3)


class TellsPlaces(Callback):
    "Tells of batches, phases, saves, and of where a fit goes on"
    order = Checkpoint.order + 1
    run_in = {'fit'}
    took = 0.

    def before_fit(self): tell('fit')
    def before_train(self): tell('epoch')
    def after_batch(self): tell('train' if self.training else 'valid', f'{self.epoch} {self.iter}')
    def after_epoch(self): tell('row')
    def before_save(self, state): tell('save', self.n_step)

    def after_load(self, state):
        if 'counters' in state: tell('resumed', self.n_step)  # not only a model's weights

    def save_point(self):
        if self.took != (took := self.learn.checkpoint.took): tell('saved', self.n_step)
        self.took = took


class AsksToSave(Callback):
    "Asks for a save at some batches, also in validation and in an open window of accumulation"
    run_in = {'fit'}
    def after_batch(self):
        if self.iter % 5 == 1: self.learn.request_save()


class Accumulates(Callback):
    "Steps after each third batch, over the borders of epochs, and after the fit's last one"
    state = ('n',)
    n = 0
    run_in = {'fit'}
    run_valid = False
    def before_backward(self):
        self.n += 1
        last = self.iter+1 == self.n_iter and self.epoch+1 == self.n_epoch
        self.learn.keep_grads = self.n % 3 > 0 and not last
    def before_step(self):
        if self.learn.keep_grads: raise CancelStepException


# ---- the training

lr = .1  # so high that the last epoch is not the best one

def one_cycle(learn, steps, cbs, go_on):
    cbs = [*cbs, FreezeUntil('1ep'), ParamScheduler({'wd': SchedCos(.1, .01)})]
    learn.fit_one_cycle(4, lr, cbs=cbs, n_steps=steps, resume=go_on)

def fine_tune(learn, steps, cbs, go_on): learn.fine_tune(3, lr, cbs=cbs, n_steps=steps, resume=go_on)

def plateau(learn, steps, cbs, go_on):  # and ends early
    stop = EarlyStoppingCallback('valid_accuracy', patience=2)
    sched = TorchScheduler(partial(ReduceLROnPlateau, patience=0), monitor='valid_loss')
    learn.fit(8, lr, cbs=[*cbs, sched, stop], n_steps=steps, resume=go_on)

def two_fits(learn, steps, cbs, go_on):
    for n in (1, 3): learn.fit(n, lr, cbs=[*cbs, OneCycleLR], n_steps=steps, resume=go_on)

def own_plateau(learn, steps, cbs, go_on):
    learn.fit(6, lr, cbs=[*cbs, LowersRate('valid_accuracy')], n_steps=steps, resume=go_on)

fits = {f.__name__: f for f in (one_cycle, fine_tune, plateau, two_fits)}

def _kit(average):  # techniques that change steps, weights and what is kept: all that go together
    return lambda: [MixedPrecision('fp16', init_scale=2.**22, growth_interval=3), GradientAccumulation(20), average(),
                    MixUp(), TerminateOnNaNCallback(), SaveModelCallback('valid_accuracy', fname='many', n_best=2),
                    EarlyStoppingCallback(patience=8, stopping_threshold=1e-9)]

kits = dict(ema=_kit(lambda: EMA(.9)), swa=_kit(lambda: SWA('2ep')))


def loaders(workers, bs=8):
    "Eight batches of training, three of validation"
    n = 2 if workers == 'persistent' else int(workers)
    kwargs: dict = dict(num_workers=n, persistent_workers=workers == 'persistent')
    return DataLoader(Noisy(64), bs, shuffle=True, **kwargs), DataLoader(Noisy(24), bs, **kwargs)


def learner(folder, cell):
    set_seed(3)
    best = 'valid_loss', 'valid_accuracy'
    cbs = [Recorder(add_time=False, train_metrics=True), CSVLogger('steps.csv', every='1it'), CSVLogger(), BnFreeze(),
           GradientClip(.5), TrackerCallback('valid_accuracy'), SaveModelCallback(fname='best'),
           EarlyStoppingCallback(patience=9), SignalCallback(), Checkpoint('3it', monitor=best), AsksToSave(),
           TellsPlaces()]
    learn = Learner(loaders(cell.workers), network(), nn.CrossEntropyLoss(), AdamW, splitter=halves, cbs=cbs,
                    metrics=[accuracy, Perplexity()], path=folder, train_bn=False)
    if cell.dtype in kits: learn.add_cbs(kits[cell.dtype]())
    if cell.dtype == 'bf16': learn.forward_context = lambda: torch.autocast('cpu', torch.bfloat16)
    return learn


def result(learn, folder):
    "All that is to be as if nothing had happened, as texts; of a checkpoint what holds no times"
    decides = 'model', 'opt', 'rng', 'counters', 'loader'
    found = dict(state=learn.state_hash(), history=record(learn))
    for path in folder.rglob('*'):
        if path.suffix == '.csv': found[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else: found[path.name] = ''
        o = load_file(path) if path.suffix in ('.pth', '.ckpt') else {}
        for k in decides if path.suffix == '.ckpt' else o: found[f'{k} of {path.name}'] = digest(o[k])
    return found


def main(folder, cell, tag='', n=0):
    "Train, or go on with it; wait to be killed at the `n`-th line of `tag`"
    tell.begin(tag, n)
    tell('start')
    set_display('log')
    warnings.filterwarnings('ignore', 'This DataLoader will create')
    warnings.filterwarnings('ignore', r'MixedPrecision\(.*(no step|were left out)|.*was made for')  # it begins too high
    tell_of_files()
    learn = learner(folder, cell)
    accumulates = [Accumulates()] if cell.accum == '3' else []
    (fits | dict(own_plateau=own_plateau))[cell.fit](learn, 3 if accumulates else None, accumulates, True)
    tell('over')
    tell('result', json.dumps(result(learn, folder)))
    tell('end')


if __name__ == '__main__':
    torch.set_num_threads(1)
    folder, cell, tag, n = [*sys.argv[1:], '', '0'][:4]
    main(Path(folder), Cell(*cell.split()), tag, int(n))
