"""A fit saved at some place and gone on with in a new Learner, by hand, for tests of what single callbacks keep.

Batches come from lists, so that a resumed epoch only has to leave out those that were done."""
from copy import deepcopy

import torch

from learner.callback import Callback


def batches(n=4, bs=8, seed=1, last=3):
    "`n` batches of y = 2x + 3 and a little noise; the last one is smaller"
    g = torch.Generator().manual_seed(seed)
    sizes = [bs]*(n-1) + [last]
    xs = [torch.randn(k, 1, generator=g) for k in sizes]
    return [(x, 2*x + 3 + .1*torch.randn(x.shape, generator=g)) for x in xs]


class Rates(Callback):
    "Another learning rate in each batch, so that no two readings in a row are equal"
    def before_batch(self):
        if self.training: self.opt.set_hyper('lr', .01*(1 + self.n_step % 7))


class Stream:
    "Streams as a torchmetrics object does, in place"
    def __init__(self): self.reset()
    def reset(self): self.total, self.n = torch.zeros(1), 0
    def compute(self): return self.total/self.n
    def update(self, pred, y):
        self.total += (pred-y).abs().sum()
        self.n += len(y)


def taken(learn):
    "What a checkpoint would hold"
    states = {cb.name: cb.state_dict() for cb in learn.cbs}
    return deepcopy(dict(states=states, model=learn.model.state_dict(), opt=learn.opt.state_dict(), n_step=learn.n_step,
                         opt_func=learn.opt_func, epoch=learn.epoch, batch=learn.iter))


class Saver(Callback):
    "Saves at a `place`: after a 'batch', before the validation ('valid'), or after an 'epoch'"
    order = -1000  # cleaned up last

    def __init__(self, place, epoch, batch=None): self.place, self.at, self.saved = place, (epoch, batch), {}

    def _save(self, place, *at):
        if place == self.place and at == self.at[:len(at)]: self.saved = dict(taken(self.learn), place=place)

    def cleanup_batch(self):
        if self.training and self.run_kind == 'fit': self._save('batch', self.epoch, self.iter)
    def cleanup_train(self): self._save('valid', self.epoch)
    def cleanup_epoch(self): self._save('epoch', self.epoch)


class Loader(Callback):
    "Loads what was saved, when all callbacks have begun the first epoch, and leaves out what was done of it"
    order = 1000

    def __init__(self, saved): self.saved, self.loaded = saved, False

    def before_fit(self):
        self.place = self.saved['place']
        if self.place == 'valid': self.learn._do_epoch_train = self._begin_only
        if self.place == 'batch': self.learn.all_batches = self._rest
        self.learn.n_step = self.saved['n_step']

    def before_train(self):
        if self.loaded: return
        self.learn.model.load_state_dict(self.saved['model'])
        if self.learn.opt_func is not self.saved['opt_func']:
            self.learn.opt_func = self.saved['opt_func']
            self.learn.create_opt()
        self.opt.load_state_dict(self.saved['opt'])
        for name, state in deepcopy(self.saved['states']).items():
            if state: getattr(self.learn, name).load_state_dict(state)
        self.loaded = True

    def _begin_only(self):
        del self.learn._do_epoch_train
        self.learn.training = True
        self.learn('before_train')

    def _rest(self):
        del self.learn.all_batches
        for i, b in enumerate(self.dl):
            if i > self.saved['batch']: self.learn.one_batch(i, b)


def go_on(learn, saved, n_epoch):
    "Go on with a fit of `n_epoch` epochs"
    learn.fit(n_epoch, start_epoch=saved['epoch'] + (saved['place'] == 'epoch'), cbs=Loader(saved))
    return learn
