"""The way back: `as_hook` lets a callback of the Learner's run in MMEngine's Runner, as far as that has its events.

`from_sites` says which site of a hook stands for which events; callbacks that act at others are refused."""
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from fastcore.foundation import L

from ..callback import Callback
from ..callbacks.recorder import Row
from ..events import CancelException, CancelFitException, LoopState, event
from ..order import order_names, order_number
from ..state import keyed
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
# Of these some part would go unheard: they cancel or shorten what the Runner does not, give it other batches, set modes
# which it sets after its hooks, or ask what only a Learner has.
of_learner = {'BnFreeze', 'ChannelsLast', 'FetchPredsCallback', 'FreezeUntil', 'MCDropout', 'ProgressiveResize',
              'ShortEpochCallback', 'ShowGraphCallback', 'SignalCallback', 'SkipToEpoch', 'SwitchAt', 'TimeLimit',
              'Timer', 'TrainEvalCallback'}


def as_hook(
    callback: Any,   # a Callback, or a class of one
) -> Any:            # an object of MMEngine's class Hook, for `custom_hooks` or `runner.register_hook`
    """A hook that runs a callback in MMEngine's Runner

    The callback finds as its Learner what the Runner tells of itself: the fields of the loop, `model`, `device`,
    `opt.opt`, which is torch's optimizer, `dls`, `path`, `stage`, `final_record`, `recorder.row` with the metrics of an
    evaluation, `note`, which writes into the message hub. What else it asks for is an AttributeError that names it.
    `CancelFitException` ends the training where MMEngine can: after the epoch, or the iteration of an iteration-based
    loop; other cancels are errors. What the callback's `state_dict` gives is in MMEngine's checkpoints. After an error
    MMEngine calls no hook, so there is no cleanup. What the Runner would not see is an AttributeError too: a callback
    that sets a field of the loop, such as `xb`.
    Raises: TypeError for what is no callback, acts at an event that MMEngine has no site for, or is one of the
    package's that work on a Learner alone; ValueError for one that is part of a Learner; ImportError without MMEngine.
    """
    cb = callback() if isinstance(callback, type) and issubclass(callback, Callback) else callback
    if not isinstance(cb, Callback): raise TypeError(f"as_hook: {callback!r} is no Callback")
    if odd := [e for e in vars(event) if e not in (*known, 'after_create') and cb.handler(e)]: raise TypeError(
        f"as_hook: `{cb}` acts at {', '.join(odd)}, which MMEngine's Runner has no site for; there are "
        f"{', '.join(e for e in vars(event) if e in known)}")
    if not of_learner.isdisjoint(c.__name__ for c in type(cb).__mro__): raise TypeError(
        f"as_hook: `{cb}` works on a Learner alone: MMEngine's Runner has nothing that does what it asks for")
    if not isinstance(cb.learn, _Stand | None): raise ValueError(  # a stand is of a run that has ended by an error
        f"as_hook: `{cb}` is part of a Learner: remove it there first")
    base = optional('mmengine.hooks', 'as_hook').Hook
    return type('HookOfLearner', (_Sites, base), {})(cb)


class _Stand(LoopState):
    "What the callback finds as its Learner"
    run_kind, stage, final_record, passes = 'fit', '', None, 0
    stepped, n_step, loss_parts = False, 0, None
    total_steps, rehearsing, paused = None, False, None
    at_work = ''  # the event at which the callback is

    def __init__(self, runner): self.runner = runner
    def __setattr__(self, name, value):
        if self.at_work and hasattr(LoopState, name): raise AttributeError(
            f"`learn.{name}` is set at `{self.at_work}`, which MMEngine's Runner would not see", name=name, obj=self)
        super().__setattr__(name, value)

    def _scopes(self): return ()  # an evaluation is never within a batch
    def agree(self, flag): return flag
    def note(self, name, value, n=1): self.runner.message_hub.update_scalar(name, value, n)

    @property
    def cbs(self): return L([hook.cb for hook in self.runner.hooks if isinstance(hook, _Sites)])
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
        self.loaded: Any = None  # the callback's state in a checkpoint, before its `before_fit`
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
            learn.at_work = e
            try: f()
            except CancelFitException: self._end(e)
            except CancelException as x: raise RuntimeError(
                f"{type(x).__name__} raised by `{cb}` at `{e}`: in MMEngine's Runner only CancelFitException can end "
                "something") from x
            finally: learn.at_work = ''

    def _end(self, e):
        if not self.in_fit: raise RuntimeError(f"CancelFitException raised by `{self.cb}` at `{e}` outside of training")
        self.ended = self.cb.learn.runner.train_loop.stop_training = True

    # ---- training

    def before_run(self, runner):
        self.cb.learn, self.in_fit, self.in_epoch, self.ended = _Stand(runner), False, False, False

    def after_run(self, runner): self.cb.learn = self.loaded = None

    def _ready(self, runner):
        if self.cb.learn is None: self.before_run(runner)  # a loop that is run by hand, after the run

    def before_train(self, runner):
        self._ready(runner)
        learn, self.in_fit = self.cb.learn, True
        learn.epoch, learn.n_epoch, learn.train_iter = runner.epoch, runner.max_epochs, runner.iter
        learn.n_step = runner.iter
        self._fire('before_train')
        if not hasattr(runner.train_loop, 'dataloader_iterator'): self._put_back(runner)

    def before_train_epoch(self, runner):
        self._close_epoch()
        learn, self.in_epoch = self.cb.learn, True
        learn.epoch, learn.training, learn.trained, learn.stage = runner.epoch, True, False, 'train'
        self._begin(learn, runner.train_dataloader)
        self._fire('before_train_epoch')
        self._put_back(runner)  # in an iteration-based loop, whose one epoch goes on

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

    def before_val(self, runner): self._alone(runner, 'before_fit', 'before_epoch')
    def before_test(self, runner): self._alone(runner, 'before_fit', 'before_epoch')
    def after_val(self, runner): self._alone(runner, 'after_epoch', 'cleanup_epoch', 'after_fit', 'cleanup_fit')
    def after_test(self, runner): self._alone(runner, 'after_epoch', 'cleanup_epoch', 'after_fit', 'cleanup_fit')

    def _alone(self, runner, *events):
        self._ready(runner)
        if not self.in_fit:
            self.cb.learn.run_kind = 'validate'
            self._fire('', events)
            self._put_back(runner)
        elif self.cb.learn.trained and 'after_epoch' in events: self._close_epoch()

    def before_val_epoch(self, runner): self._before_evaluation('val', 'valid', runner.val_dataloader)
    def before_test_epoch(self, runner): self._before_evaluation('test', 'test', runner.test_dataloader)

    def _before_evaluation(self, mode, stage, dl):
        learn = self.cb.learn
        self.outer = learn.training, learn.stage, learn.dl, learn.n_iter, learn.iter  # of an iteration-based loop
        learn.at_work = ''  # a callback may have begun it
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

    def _key(self, runner): return next(k for k, cb in keyed(_Stand(runner)).items() if cb is self.cb)

    def before_save_checkpoint(self, runner, checkpoint):
        if state := self.cb.state_dict(): checkpoint.setdefault('learner_callbacks', {})[self._key(runner)] = state

    def after_load_checkpoint(self, runner, checkpoint):
        self.loaded = checkpoint.get('learner_callbacks', {}).get(self._key(runner))

    def _put_back(self, runner):  # after `before_fit`, in which it may begin anew
        if self.loaded and runner._resume: self.cb.load_state_dict(self.loaded)
        self.loaded = None
