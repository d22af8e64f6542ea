"""The way back: `as_hook` lets a callback of the Learner's run in MMEngine's Runner, as far as that has its events.

`from_sites` says which site of a hook stands for which events; callbacks that act at others are refused."""
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ..callback import Callback
from ..callbacks.recorder import Row
from ..events import CancelException, CancelFitException, LoopState, event
from ..order import order_names, order_number
from ..tensors import split_batch
from ..utils import optional
from .mmengine_runner import priorities, sites

__all__ = ['as_hook', 'from_sites']

# MMEngine's sites and the events that they stand for. An epoch ends with its validation; where none follows, that is
# known only when the next one begins. An evaluation alone has a fit and an epoch around it, as in a Learner.
from_sites = dict(
    before_train=('before_fit',), before_train_epoch=('before_epoch', 'before_train'),
    before_train_iter=('before_batch',), after_train_iter=('after_batch', 'cleanup_batch'),
    after_train_epoch=('after_train', 'cleanup_train'),
    before_val_epoch=('before_validate',), before_val_iter=('before_batch',),
    after_val_iter=('after_batch', 'cleanup_batch'), after_val_epoch=('after_validate', 'cleanup_validate'),
    before_test_epoch=('before_validate',), before_test_iter=('before_batch',),
    after_test_iter=('after_batch', 'cleanup_batch'), after_test_epoch=('after_validate', 'cleanup_validate'),
    after_train=('after_epoch', 'cleanup_epoch', 'after_cancel_fit', 'after_fit', 'cleanup_fit'))
known = {e for events in from_sites.values() for e in events}


def as_hook(
    callback: Any,   # a Callback, or a class of one
) -> Any:            # an object of MMEngine's class Hook, for `custom_hooks` or `runner.register_hook`
    """A hook that runs a callback in MMEngine's Runner

    The callback finds as its Learner what the Runner tells of itself: the fields of the loop, `model`, `device`,
    `opt.opt`, which is torch's optimizer, `dls`, `path`, `stage`, `final_record`, `recorder.row` with the metrics of an
    evaluation, `note`, which writes into the message hub. What else it asks for is an AttributeError that names it.
    `CancelFitException` ends the training where MMEngine
    can: after the epoch, or the iteration of an iteration-based loop; other cancels are errors. What the callback's
    `state_dict` gives is in MMEngine's checkpoints. After an error MMEngine calls no hook, so there is no cleanup.
    Raises: TypeError for what is no callback, or acts at an event that MMEngine has no site for; ValueError for one
    that is part of a Learner; ImportError without MMEngine."""
    cb = callback() if isinstance(callback, type) and issubclass(callback, Callback) else callback
    if not isinstance(cb, Callback): raise TypeError(f"as_hook: {callback!r} is no Callback")
    if odd := [e for e in vars(event) if e not in (*known, 'after_create') and cb.handler(e)]: raise TypeError(
        f"as_hook: `{cb}` acts at {', '.join(odd)}, which MMEngine's Runner has no site for; there are "
        f"{', '.join(e for e in vars(event) if e in known)}")
    if cb.learn is not None: raise ValueError(f"as_hook: `{cb}` is part of a Learner: remove it there first")
    base = optional('mmengine.hooks', 'as_hook').Hook
    return type('HookOfLearner', (_Sites, base), {})(cb)


class _Stand(LoopState):
    "What the callback finds as its Learner"
    run_kind, stage, final_record, passes = 'fit', '', None, 0
    stepped, n_step, loss_parts = False, 0, None

    def __init__(self, runner): self.runner = runner
    def agree(self, flag): return flag
    def note(self, name, value, n=1): self.runner.message_hub.update_scalar(name, value, n)

    @property
    def model(self): return self.runner.model
    @property
    def opt(self): return SimpleNamespace(opt=self.runner.optim_wrapper.optimizer)
    @property
    def device(self): return next((p.device for p in self.model.parameters()), torch.device('cpu'))
    @property
    def recorder(self): return SimpleNamespace(row=dict(zip(self.final_record.names, self.final_record))
                                               if self.final_record else {})
    @property
    def path(self): return Path(self.runner.work_dir)
    @property
    def dls(self): return SimpleNamespace(train=self.runner.train_dataloader, valid=self.runner.val_dataloader)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"`{name}`: MMEngine's Runner has nothing that stands for it", name=name, obj=self)


class _Sites:
    "The methods of the hook"
    def __init__(self, cb):
        self.cb, self.in_fit, self.in_epoch, self.ended = cb, False, False, False
        self.outer: Any = ()  # what an evaluation in the midst of an iteration-based loop puts back
        places, numbers = list(order_names.values()), list(priorities.values())
        self.priority = round(float(np.interp(order_number(cb.order, str(cb)), places, numbers)))

    def get_triggered_stages(self): return [s for s in sites if hasattr(_Sites, s)]

    def _fire(self, site, only=None):
        cb, learn = self.cb, self.cb.learn
        if not cb.run or learn.run_kind not in cb.run_in: return
        for e in from_sites[site] if only is None else only:
            inner = e.endswith('_batch')
            if inner and not (cb.run_train if learn.training else cb.run_valid): continue
            if (f := cb.handler(e)) is None: continue
            try: f()
            except CancelFitException: self._end(e)
            except CancelException as x: raise RuntimeError(
                f"{type(x).__name__} raised by `{cb}` at `{e}`: in MMEngine's Runner only CancelFitException can end "
                "something") from x

    def _end(self, e):
        if not self.in_fit: raise RuntimeError(f"CancelFitException raised by `{self.cb}` at `{e}` outside of training")
        self.ended = self.cb.learn.runner.train_loop.stop_training = True

    # ---- training

    def before_run(self, runner):
        self.cb.learn, self.in_fit, self.in_epoch, self.ended = _Stand(runner), False, False, False

    def before_train(self, runner):
        learn, self.in_fit = self.cb.learn, True
        learn.epoch, learn.n_epoch, learn.train_iter = runner.epoch, runner.max_epochs, runner.iter
        learn.n_step = runner.iter
        self._fire('before_train')

    def before_train_epoch(self, runner):
        self._close_epoch()
        learn, self.in_epoch = self.cb.learn, True
        learn.epoch, learn.training, learn.trained, learn.stage = runner.epoch, True, False, 'train'
        self._begin(learn, runner.train_dataloader)
        self._fire('before_train_epoch')

    def _begin(self, learn, dl):
        learn.dl = dl
        try: learn.n_iter = len(dl)
        except TypeError: learn.n_iter = None  # it has no end

    def before_train_iter(self, runner, batch_idx, data_batch=None): self._before_iter(batch_idx, data_batch, 'train')

    def _before_iter(self, batch_idx, data_batch, mode):
        learn = self.cb.learn
        try: learn.xb, learn.yb = split_batch(data_batch)
        except (TypeError, ValueError): learn.xb, learn.yb = (data_batch,), ()  # no rule of ours knows it
        learn.iter, learn.pred, learn.loss, learn.loss_parts, learn.stepped = batch_idx, None, None, None, False
        self._fire(f'before_{mode}_iter')

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        learn, parts = self.cb.learn, dict(outputs or {})
        loss = parts.pop('loss', None)
        learn.loss, learn.loss_parts, learn.stepped = None if loss is None else loss.detach(), parts or None, True
        learn.train_iter, learn.n_step = learn.train_iter+1, learn.n_step+1
        learn.pct_train = learn.train_iter/runner.max_iters if runner.max_iters else 0.
        self._fire('after_train_iter')

    def after_train_epoch(self, runner):
        self._fire('after_train_epoch')
        self.cb.learn.training, self.cb.learn.trained, self.cb.learn.stage = False, True, ''
        if runner.val_loop is None: self._close_epoch()

    def _close_epoch(self):
        if self.in_epoch: self._fire('after_train', ('after_epoch', 'cleanup_epoch'))
        self.in_epoch = False

    def after_train(self, runner):
        self._close_epoch()
        self._fire('after_train', ('after_cancel_fit',)*self.ended + ('after_fit', 'cleanup_fit'))
        self.in_fit = False

    # ---- evaluation

    def before_val(self, runner): self._alone('before_fit', 'before_epoch')
    def before_test(self, runner): self._alone('before_fit', 'before_epoch')
    def after_val(self, runner): self._alone('after_epoch', 'cleanup_epoch', 'after_fit', 'cleanup_fit')
    def after_test(self, runner): self._alone('after_epoch', 'cleanup_epoch', 'after_fit', 'cleanup_fit')

    def _alone(self, *events):
        if not self.in_fit:
            self.cb.learn.run_kind = 'validate'
            self._fire('', events)
        elif self.cb.learn.trained and 'after_epoch' in events: self._close_epoch()

    def before_val_epoch(self, runner): self._before_evaluation('val', 'valid', runner.val_dataloader)
    def before_test_epoch(self, runner): self._before_evaluation('test', 'test', runner.test_dataloader)

    def _before_evaluation(self, mode, stage, dl):
        learn = self.cb.learn
        self.outer = learn.training, learn.stage, learn.dl, learn.n_iter, learn.iter  # of an iteration-based loop
        learn.training, learn.stage = False, stage
        self._begin(learn, dl)
        self._fire(f'before_{mode}_epoch')

    def before_val_iter(self, runner, batch_idx, data_batch=None): self._before_iter(batch_idx, data_batch, 'val')
    def before_test_iter(self, runner, batch_idx, data_batch=None): self._before_iter(batch_idx, data_batch, 'test')
    def after_val_iter(self, runner, batch_idx, data_batch=None, outputs=None): self._after_iter(outputs, 'val')
    def after_test_iter(self, runner, batch_idx, data_batch=None, outputs=None): self._after_iter(outputs, 'test')

    def _after_iter(self, outputs, mode):
        self.cb.learn.pred = outputs
        self._fire(f'after_{mode}_iter')

    def after_val_epoch(self, runner, metrics=None): self._after_evaluation(metrics, 'val')
    def after_test_epoch(self, runner, metrics=None): self._after_evaluation(metrics, 'test')

    def _after_evaluation(self, metrics, mode):
        learn, metrics = self.cb.learn, metrics or {}
        learn.final_record = Row(metrics, metrics.values())
        self._fire(f'after_{mode}_epoch')
        (learn.training, learn.stage, learn.dl, learn.n_iter, learn.iter), learn.pred = self.outer, None

    # ---- checkpoints

    def before_save_checkpoint(self, runner, checkpoint):
        if state := self.cb.state_dict(): checkpoint.setdefault('learner_callbacks', {})[self.cb.name] = state

    def after_load_checkpoint(self, runner, checkpoint):
        state = checkpoint.get('learner_callbacks', {}).get(self.cb.name)
        if state and runner._resume: self.cb.load_state_dict(state)
