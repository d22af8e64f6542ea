"""The learning-rate finder leaves no trace, however it ends: scenario S28, and what else a Learner may have."""
import multiprocessing
import random
import signal
from functools import cache, partial
from types import FunctionType, ModuleType

import numpy as np
import pytest
import torch
from fastcore.foundation import L
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from learner.callback import Callback
from learner.events import (CancelBatchException, CancelEpochException, CancelFitException, CancelStepException,
                            CancelTrainException)
from learner.learner import Learner
from learner.optim import SGD, Adam
from learner.utils import rng_state, set_seed
from tests.helpers import synth_learner, weights
from tests.loader_helpers import equal

find = partial(Learner.lr_find, num_it=8, end_lr=1., stop_div=False, show_plot=False, suggest_funcs=None)


def holds(o, path='learn', found=None, seen=None):
    "All that can be reached from `o`, by path: which object it is, and what it holds"
    found, seen = {} if found is None else found, {} if seen is None else seen
    if isinstance(o, (int, float, str, type, FunctionType, ModuleType, torch.device)) or o is None:
        found[path] = o if o == o else 'nan'
        return found
    found[path] = [type(o), id(o)]
    if id(o) in seen: return found
    seen[id(o)], inside = o, {}
    if isinstance(o, torch.Tensor):
        found[path] += [o.detach().clone(), o.data_ptr(), o.requires_grad]
        inside['grad'] = o.grad
    elif isinstance(o, np.ndarray): found[path] += [o.copy()]
    elif isinstance(o, torch.Generator): found[path] += [o.get_state()]
    elif isinstance(o, random.Random): found[path] += [o.getstate()]
    elif isinstance(o, dict):
        found[path] += [k if isinstance(k, (str, int)) else id(k) for k in o]
        inside = dict(enumerate(o.values()))
    elif isinstance(o, (list, tuple, set)): inside = dict(enumerate(o))
    else:  # the curve is what a finder leaves; `_stop` is not asked for either way
        inside = {k: v for k, v in getattr(o, '__dict__', {}).items() if k not in ('lr_curve', '_stop')}
        found[path] += list(inside)
    for k, v in inside.items(): holds(v, f'{path}.{k}', found, seen)
    return found

def state(learn): return {**holds(learn), 'rng': rng_state(), 'modes': [m.training for m in learn.model.modules()]}

def changed(learn, before):
    "Where it is not as it was"
    now = state(learn)
    return [k for k in {**before, **now} if k not in now or k not in before or not equal(now[k], before[k])]


# ---- a Learner with all that a finder could change

class Net(nn.Module):
    "Batchnorm, dropout, a buffer that no state_dict has, and attributes that the prediction depends on"
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.drop, self.head = nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(.3), nn.Linear(4, 1)
        self.register_buffer('seen', torch.zeros(()), persistent=False)
        self.calls, self.log, self.cache, self.array = 0, [], {'means': [0.]}, np.zeros(2)

    def forward(self, x):
        self.calls += 1
        self.log.append(self.calls)
        self.cache['means'].append(x.mean())
        self.cache[self.calls] = self.array = self.array+1
        self.seen += x.shape[0]
        return self.head(self.drop(self.norm(self.body(x)))) + .01*self.calls + .001*self.seen + .01*len(self.log)


class Loss(nn.Module):
    "A loss with a buffer"
    def __init__(self):
        super().__init__()
        self.register_buffer('mean', torch.zeros(()))

    def forward(self, pred, y):
        if self.training: self.mean.mul_(.9).add_(.1*pred.detach().mean())
        return (pred-y-self.mean).pow(2).mean()


class Noise(Callback):
    "Draws from all random streams, its own too, and keeps what it drew in lists and dicts"
    def __init__(self):
        self.own, self.rng = torch.Generator().manual_seed(3), random.Random(3)
        self.n, self.drawn, self.deep = 0, [], {'a': [{'sum': torch.zeros(())}], 'b': ([],)}

    def before_batch(self):
        noise = random.random()+np.random.rand()+self.rng.random()+torch.rand(1)+torch.rand(1, generator=self.own)
        self.n += 1
        self.drawn.append(noise)
        self.deep['a'][0]['sum'] += noise[0]
        self.deep['b'][0].append(self.n)
        self.learn.xb = (self.learn.xb[0] + .1*noise + .01*self.deep['a'][0]['sum'],)

    def cleanup_fit(self): self.deep['last'] = self.n


def table(n=12): return TensorDataset(*torch.randn(n, 3, generator=torch.Generator().manual_seed(1)).split([2, 1], 1))

class Noisy(Dataset):
    "Items with noise of all three global streams"
    def __len__(self): return 12
    def __getitem__(self, i): return torch.rand(2) + np.random.rand(), torch.tensor([random.random()+i])

class Stream(IterableDataset):
    def __iter__(self): return (Noisy()[i] for i in range(12))

class Resumable:
    "A loader whose batches depend on its own state"
    def __init__(self): self.epoch = 0
    def state_dict(self): return {'epoch': self.epoch}
    def load_state_dict(self, state): self.epoch = state['epoch']
    def __iter__(self):
        self.epoch += 1
        yield from ((x+self.epoch, y) for x, y in DataLoader(table(), 4))

loaders = dict(
    shuffle=lambda: DataLoader(table(), 4, shuffle=True),
    generator=lambda: DataLoader(table(), 4, shuffle=True, generator=torch.Generator()),
    workers=lambda: DataLoader(Noisy(), 4, shuffle=True, num_workers=1),
    persistent=lambda: DataLoader(Noisy(), 4, shuffle=True, num_workers=1, persistent_workers=True),
    items=lambda: DataLoader(Noisy(), 4, shuffle=True),
    stream=lambda: DataLoader(Stream(), 4),
    resumable=Resumable,
    ready=lambda: [(x, y) for x, y in DataLoader(table(), 4)])


def by_layer(m): return [[*m.body.parameters(), *m.norm.parameters()], list(m.head.parameters())]

def rich(cbs=None, loader='shuffle', fits=1):
    "A Learner with everything, after some epochs of training"
    set_seed(1)
    valid = DataLoader(table(4), 4)
    learn = Learner((loaders[loader](), valid), Net(), Loss(), partial(Adam, wd=.01), [.01, .02], by_layer,
                    [Noise(), *L(cbs)], metrics=nn.L1Loss(), default_cbs=dict(progress=None))
    if fits: learn.fit(fits)
    return learn

def after_fit(learn):
    "Weights and losses after one more epoch"
    learn.fit(1)
    return weights(learn), list(learn.recorder.raw_losses), learn.recorder.values[-1]['valid_loss']


@cache
def without(fits=1, loader='shuffle'): return after_fit(rich(loader=loader, fits=fits))


# ---- however it ends

both = pytest.mark.parametrize('fits', [0, 1])  # with a new optimizer, and with one that has a state

class At(Callback):
    "Does something the `nth` time that an event of a finder comes"
    run_in = {'lr_find'}
    order = 55  # before the finder, which ends the epoch at `after_train`

    def __init__(self, event, do, nth=1):
        super().__init__(**{event: At.act})
        self.do, self.left = do, nth

    def act(self):
        self.left -= 1
        if not self.left: self.do(self.learn)

def fail(e): raise e
def throw(e): return lambda learn: fail(e)
def ctrl_c(learn): signal.raise_signal(signal.SIGINT)
def twice(learn): ctrl_c(ctrl_c(learn))

def ended(learn, error, match):
    "What a finder has changed that ended in an error"
    before = state(learn)
    with pytest.raises(error, match=match): find(learn)
    return changed(learn, before)

@both
@pytest.mark.parametrize('args', [dict(), dict(end_lr=1e6, stop_div=True, num_it=50), dict(num_it=2), dict(num_it=3),
                                  dict(start_lr=[1e-4, 1e-3], end_lr=slice(1., 2.))])
def test_normal_end(args, fits):
    "After a sweep, whole or ended by a loss that diverges, all is as it was, and a fit as without it"
    learn = rich(fits=fits)
    before = state(learn)

    find(learn, **args)

    assert changed(learn, before) == [] and (learn.opt is None) == (not fits)
    assert equal(after_fit(learn), without(fits))

events = [f'{when}_{scope}' for when in ('before', 'after', 'cleanup')
          for scope in ('fit', 'epoch', 'train', 'batch', 'backward', 'step')]

@pytest.mark.parametrize('event,error', [
    *[(e, LookupError) for e in (*events, 'after_pred', 'after_loss', 'after_cancel_fit', 'after_cancel_epoch')],
    *[(e, KeyboardInterrupt) for e in ('before_fit', 'after_loss', 'before_step', 'after_epoch', 'cleanup_fit')]])
def test_error_in_a_callback(event, error):
    "After an error or an interrupt in a callback, at whatever event, all is as it was, and a fit as without it"
    learn = rich(At(event, throw(error('here'))))

    assert ended(learn, error, 'here') == []
    assert equal(after_fit(learn), without())

@pytest.mark.parametrize('event,nth', [('before_fit', 1), ('before_batch', 1), ('after_batch', 1), ('after_loss', 4),
                                       ('after_step', 5), ('after_train', 2), ('before_batch', 8),
                                       ('cleanup_batch', 8), ('after_fit', 1), ('cleanup_fit', 1)])
def test_ctrl_c(event, nth, capsys):
    "After a real Ctrl-C, in the first iteration, in the last one or between, all is as it was"
    learn, old = rich(At(event, ctrl_c, nth)), signal.getsignal(signal.SIGINT)

    assert ended(learn, KeyboardInterrupt, 'stopped') == []
    assert equal(after_fit(learn), without())
    assert 'Stopping' in capsys.readouterr().err and signal.getsignal(signal.SIGINT) is old

def test_ctrl_c_twice():
    "After a second Ctrl-C, which stops at once, in the midst of a step, all is as it was"
    assert ended(rich(At('before_step', twice, 5)), KeyboardInterrupt, 'the Learner is as it was before') == []

class Slow:
    "Takes long to be put back: long enough for a Ctrl-C"
    def state_dict(self): return {}
    def load_state_dict(self, state): signal.raise_signal(signal.SIGINT)

def test_ctrl_c_while_all_is_put_back():
    "A Ctrl-C that comes so late does not keep anything from being put back, and is obeyed"
    learn = rich()
    learn.noise.slow = Slow()

    assert ended(learn, KeyboardInterrupt, 'stopped after 8 of 8 iterations; the Learner is as it was') == []

@pytest.mark.parametrize('cancel', [CancelFitException, CancelEpochException, CancelTrainException,
                                    CancelBatchException, CancelStepException])
@pytest.mark.parametrize('nth', [1, 5])
def test_cancelled(cancel, nth):
    "After a sweep that a callback interferes with, all is as it was"
    learn = rich(At('before_step', throw(cancel), nth))
    before = state(learn)

    find(learn)

    assert changed(learn, before) == [] and equal(after_fit(learn), without())


# ---- whatever happens in between

def new_loss(learn): learn.loss_func = nn.functional.l1_loss
def new_model(learn): learn.model.head = nn.Sequential(learn.model.head)
def new_data(learn): learn.dls = synth_learner().dls
def new_opt(learn): learn.create_opt()
def new_metrics(learn): learn.metrics = [nn.MSELoss()]
def add_cb(learn): learn.add_cb(Callback())
def remove_cb(learn): learn.remove_cb(learn.noise)
def to_double(learn): learn.model.double(), learn.loss_func.double()
def attributes(learn): learn.moms, learn.fresh, learn.wd, learn.noise.more = (.5, .5, .5), [1], .3, {}
def frozen(learn): learn.opt.freeze()
def hypers(learn): learn.opt.set_hypers(wd=.5, mom=.1, eps=.1)
def hooked(learn): learn.model.register_forward_hook(lambda *_: None)
def seeded(learn): set_seed(99)
def history(learn): learn.recorder.history.clear()
def replaced(learn): learn.noise.drawn, learn.noise.deep['a'] = [], None
def buffers(learn): learn.model.register_buffer('late', torch.ones(1))

@pytest.mark.parametrize('do', [new_loss, new_model, new_data, new_opt, new_metrics, add_cb, remove_cb, to_double,
                                attributes, frozen, hypers, hooked, seeded, history, replaced, buffers])
@pytest.mark.parametrize('event,fits', [('before_fit', 0), ('before_fit', 1), ('after_step', 1)])
def test_meddling(do, event, fits):
    "Whatever a callback does to the Learner, to the model or to callbacks is undone"
    learn = rich(At(event, lambda learn: (do(learn), fail(LookupError('here')))), fits=fits)

    assert ended(learn, LookupError, 'here') == []
    assert equal(after_fit(learn), without(fits))

def test_decay_set_since():
    "An optimizer that the finder lays out anew, since there is a decay now, is laid out as before"
    learn = synth_learner(opt_func=SGD, model=nn.Linear(1, 1))
    learn.fit(1)
    learn.wd = .1
    before = state(learn)

    find(learn)

    assert changed(learn, before) == [] and learn.opt.hypers[0]['lr'] == learn.lr

@pytest.mark.parametrize('part', ['', 'norm'])
@pytest.mark.filterwarnings('ignore:.*eval mode')
def test_modes_and_gradients(part):
    "A model in eval mode, or a part of it, is in eval mode afterwards; gradients that somebody has left are there"
    learn = rich()
    learn.model.get_submodule(part).eval()
    for p in learn.model.parameters(): p.grad = torch.ones_like(p)
    before = state(learn)

    find(learn)

    assert changed(learn, before) == [] and not learn.model.norm.training


# ---- loaders

@both
@pytest.mark.parametrize('loader', loaders)
def test_loaders(loader, fits):
    "Of every loader the epoch, the generators and the workers are as before; a second finder sees the same batches"
    learn, curves = rich(loader=loader, fits=fits), []
    before, workers = state(learn), set(multiprocessing.active_children())

    for _ in range(2):
        find(learn, num_it=5)
        curves.append(learn.recorder.lr_curve['losses'])

    assert changed(learn, before) == [] and set(multiprocessing.active_children()) <= workers
    assert curves[0] == curves[1] and len(curves[0]) == 5
    assert equal(after_fit(learn), without(fits, loader))

def test_validation_within():
    "A callback may evaluate in each iteration: of that only the evaluated loader knows"
    learn = rich(Callback(after_step=lambda cb: cb.learn.validate()))
    before = state(learn)

    find(learn)

    assert {k for k in changed(learn, before) if not k.startswith('learn._dls.valid_sets')} == set()
    assert equal(after_fit(learn), after_fit(rich(Callback(after_step=lambda cb: cb.learn.validate()))))

def test_later_fits():
    "A finder in the midst of several fits changes none of those that follow"
    def losses(finder):
        learn = rich()
        learn.fit(2, .1)
        if finder: find(learn, end_lr=100.)
        learn.fit(2, [.1, .2], wd=.1)
        return learn.history.drop(columns='time'), weights(learn)

    (history, ws), (expected, expected_ws) = losses(True), losses(False)

    assert history.equals(expected) and equal(ws, expected_ws)
