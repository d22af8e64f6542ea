"""Learner: a model, its data, a loss and an optimizer, and the loop that trains them.

The loop is `fit` and what it calls, down to `_step`; each part runs in a scope (events.py), whatever else happens in
training is a callback (callback.py)."""
from collections.abc import Callable
from inspect import getattr_static
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from fastcore.foundation import L
from torch import Tensor, nn

from .callback import TrainEvalCallback
from .checks import batch_note, check_fit, check_trained
from .data import as_dls
from .events import (CancelBackwardException, CancelBatchException, CancelEpochException, CancelException,
                     CancelFitException, CancelStepException, CancelTrainException, CancelValidException)
from .frame import evaluation_frame, fit_frame, guest_frame, made_from, ready_opt, run_frame, set_rates
from .host import Host, default_callbacks
from .interrupt import StopFlag
from .loss_value import loss_without_targets, total_loss
from .metrics import mk_metrics
from .modes import choose_device
from .optim import Adam, make_opt, opt_lr, params
from .state import snapshot
from .tensors import split_batch, to_device

__all__ = ['Learner']


class Learner(Host):
    "A model, its data, its loss and its optimizer, trained by a loop that callbacks can change at every event"
    # What callbacks may read, beside LoopState
    opt: Any = None                          # the Optimizer (optim.py); made by the first fit, kept by the next ones
    device: Any = None                       # where batches, model and loss are
    stage: str = ''                          # 'train', 'valid', 'test' or 'predict': the kind of the current loader
    valid_name: str = ''                     # which validation set, where there are several
    n_step: int = 0                          # optimizer steps taken since the Learner was made
    stepped: bool = False                    # has this batch led to a step?
    keep_grads: bool = False                 # an accumulation window is open: gradients stay for the next batch
    loss_parts: dict[str, Tensor]|None = None  # what a loss that returns a dict was summed from, detached
    final_record: Any = None                 # the last row of the last fit: losses and metrics
    n_fit: int = 0                           # fits that came to their end, by themselves or by a cancel
    forward_context: Callable|None = None    # gives a fresh context for the forward and for the loss, such as autocast
    logger: Callable|None = None             # gets column names and rows instead of the table that is shown
    create_mbar: bool = True                 # show a progress bar
    _had_targets: bool = False               # did the loader's batch have any? a callback may have emptied `yb`
    _takes: Any = None                       # names that `forward` takes, for dict batches
    _rates: dict = {}                        # `lr` and `wd` as the current fit got them

    def __init__(self,
        dls: Any,                              # DataLoaders, a pair of iterables of batches (or one and None), or one
        model: nn.Module,                      # trained in place: never copied or replaced
        loss_func: Callable|None = None,       # `loss_func(pred, *yb)`; None: the data's, else the output's own `.loss`
        opt_func: Callable = Adam,             # a torch.optim class, a partial of one, or one of optim.py
        lr: float|slice|list|None = None,      # learning rate of fits that give none; None: `opt_func`'s own, else 1e-3
        splitter: Callable = params,           # model -> parameter groups, a list of lists; one group unless given
        cbs: Any = None,                       # a callback, a class of one, or a list of them
        metrics: Any = None,                   # a metric or a list: functions, modules, Metrics, torchmetrics
        path: str|Path|None = None,            # folder for all that is written; `dls.path` if None
        model_dir: str|Path = 'models',        # where models go, below `path`
        wd: float|None = None,                 # weight decay; None: `opt_func`'s own
        wd_bn_bias: bool = False,              # decay biases and normalisation layers too
        train_bn: bool = True,                 # normalisation layers of frozen groups go on training
        moms: tuple = (.95, .85, .95),         # momentum at start, middle and end of `fit_one_cycle`
        default_cbs: bool|dict = True,         # False: no Recorder, no bar; a dict adds, replaces or drops (None)
        n_inp: int|None = None,                # how many of a batch's members are inputs; None: all but the last
        param_opts: dict|None = None,          # options by parameter name pattern: `{'head.*': dict(lr_mult=10)}`
    ):
        """Raises: TypeError or ValueError naming what does not fit: data, a metric, a callback."""
        if isinstance(loss_func, type): raise TypeError(f"`loss_func` is a class: write `{loss_func.__name__}()`")
        if not isinstance(model, nn.Module): raise TypeError(f"`model` is a `{type(model).__name__}`, not an nn.Module")
        self.dls, self.model, self.opt_func, self.lr, self.splitter = dls, model, opt_func, lr, splitter
        self.loss_func = self.dls.loss_func if loss_func is None else loss_func
        self.path, self.model_dir = Path(path or getattr(self.dls, 'path', '.')), model_dir
        self.wd, self.wd_bn_bias, self.train_bn, self.moms = wd, wd_bn_bias, train_bn, moms
        self.n_inp = self.dls.n_inp if n_inp is None else n_inp
        self.param_opts, self.metrics, self.cbs, self._stop = param_opts, metrics, L(), StopFlag()
        self.device = choose_device(self.dls.device, model)
        self.add_cb(TrainEvalCallback()).add_cbs(self._defaults(default_cbs, cbs := L(cbs))).add_cbs(cbs)
        self('after_create')

    @property
    def dls(self) -> Any: "The DataLoaders"; return self._dls
    @dls.setter
    def dls(self, dls):
        old, self._dls = vars(self).get('_dls'), as_dls(dls)
        for k in ('loss_func', 'n_inp'):  # what came with the old data comes with the new
            if old and getattr(self, k) is getattr(old, k): setattr(self, k, getattr(self.dls, k))

    @property
    def lr(self) -> Any:
        "Learning rate: the running fit's, else the Learner's own, else the one inside `opt_func`, else 1e-3"
        return next(lr for lr in (self._rates.get('lr'), self._lr, opt_lr(self.opt_func), 1e-3) if lr is not None)
    @lr.setter
    def lr(self, lr):
        self._lr = lr
        if self._rates: self._rates['lr'] = set_rates(self, lr)  # a fit is running
    @property
    def metrics(self) -> L: "The metrics, as Metric objects"; return self._metrics
    @metrics.setter
    def metrics(self, metrics): self._metrics = L(mk_metrics(metrics))

    @property
    def modules(self) -> list[nn.Module]:
        "The model, and the loss if it is a module: what is moved and switched"
        return [m for m in (self.model, self.loss_func) if isinstance(m, nn.Module)]

    def __getattr__(self, name: str) -> Any:
        if isinstance(own := getattr_static(type(self), name, None), property): return own.__get__(self)  # its error
        has = not name.startswith('__') and hasattr(vars(self).get('model'), name)
        raise AttributeError(f"`Learner` has no `{name}`" + (f"; the model has: `learn.model.{name}`" if has else ''),
                             name=name, obj=self)

    def __repr__(self) -> str: return f"Learner({type(self.model).__name__}, {self.dls!r}, {self.n_step} steps taken)"

    # ---- the loop

    def create_opt(self) -> Any:  # also `learn.opt`
        "A new optimizer over the parameters that `splitter` finds in the model as it is now"
        self.opt = make_opt(self.opt_func, self.splitter(self.model), self.model, 1e-3, self.wd, self.wd_bn_bias,
                            self.train_bn, self.param_opts, self.loss_func)
        self.opt.made_from = made_from(self)
        set_rates(self)
        return self.opt

    def fit(self,
        n_epoch: int,                       # epochs to train; 0 fires `before_fit` and `after_fit` only
        lr: float|slice|list|None = None,   # learning rate, also one per group; None: `self.lr`
        wd: float|list|None = None,         # weight decay, for this fit only; None: `self.wd`
        cbs: Any = None,                    # callbacks for this fit only
        reset_opt: bool = False,            # begin with a new optimizer
        start_epoch: int = 0,               # skip the epochs before this one, without any event
        n_steps: int|None = None,           # optimizer steps an epoch, for schedules; None: one a training batch
        resume: Any = None,                 # True: go on from the newest checkpoint, if there is one; or a file
        allow: Any = (),                    # what may differ from it, as an error names it: {'workers', 'batch_size'} …
    ) -> None:
        """Train for `n_epoch` epochs, validating after each; Ctrl-C stops between two batches

        Raises: ValueError, TypeError or RuntimeError, before training, if anything does not fit."""
        check_fit(self, n_epoch, start_epoch, n_steps)
        with fit_frame(self):
            self.n_epoch, self.epoch, self.n_steps, self.stopped_by = n_epoch, start_epoch, n_steps, ''
            cbs = self._resuming(cbs, resume, allow, reset_opt)  # None: there is nothing to do
            if cbs is not None: self._fit('fit', lr, wd, cbs, reset_opt)
            self.n_fit += not self.paused

    def _fit(self, kind, lr, wd, cbs, reset_opt):  # a fit's, or the learning-rate finder's
        with run_frame(self, kind), self.added_cbs(cbs), ready_opt(self, lr, wd, reset_opt):
            self._with_events(self._do_fit, 'fit', CancelFitException, self._end_cleanup)
            if self._stop.requested: self._rest()

    def _do_fit(self):
        self.paused = None
        for epoch in takewhile(lambda i: i < self.n_epoch, count(self.epoch)):  # a callback may set `n_epoch`
            self.epoch, self.trained, self._trained = epoch, False, None
            self._with_events(self._do_epoch, 'epoch', CancelEpochException)
            self._rest()

    def _do_epoch(self):
        if not self.trained: self._do_epoch_train()
        self.trained, self._trained = True, None
        self._rest()
        self._trained = snapshot(self)
        self._do_epoch_validate()

    def _do_epoch_train(self):
        check_trained(self)
        self.dl, self.training, self.stage = self.dls.loader(0, self.device), True, 'train'
        self.n_iter = self.dl.n_batches
        self._with_events(self.all_batches, 'train', CancelTrainException)

    def _do_epoch_validate(self, ds_idx=1, dl=None):
        for name, loader in self.dls.eval_loaders(ds_idx, dl, self.device):
            with evaluation_frame(self, loader.generators()):
                self.dl, self.training, self.stage = loader, False, 'valid' if dl is None else 'test'
                self.valid_name, self.n_iter = name, loader.n_batches
                self._with_events(self.all_batches, 'validate', CancelValidException)

    def all_batches(self) -> None:
        """Go through the loader once; a stop asked for takes effect between two batches

        Raises: ValueError if the loader gives no batch."""
        stoppable = self.run_kind in ('fit', 'lr_find') and all(scope[0] != 'batch' for scope in self._scopes())
        batches, i = iter(self.dl), -1
        if stoppable and self._stop.requested: self._rest()
        for i, b in enumerate(batches, getattr(self.dl, 'position', 0)):  # a resumed epoch goes on at a later batch
            self.one_batch(i, b)
            if stoppable and self._stop.requested: self._rest()
        if i < 0 and not getattr(self.dl, 'position', 0):
            raise ValueError(f"the {self.stage} loader gave no batch: {self.dl.why_empty()}")

    def one_batch(self,
        i: int,  # its number in the phase
        b: Any,  # the batch as the loader gives it
    ) -> None:
        "Run one batch through the model; `training` decides whether it is learnt from"
        if not self.run_kind: self._resolve()  # called by hand
        self.iter, self.stepped, self.pred = i, False, None
        self.loss = self.loss_grad = self.loss_parts = None
        self._split(to_device(b, self.device))
        try: ended = self._with_events(self._do_one_batch, 'batch', CancelBatchException)
        except CancelException:
            self._zero_grad()
            raise
        if not ended: self._zero_grad()

    def _split(self, b):
        self.xb, self.yb = split_batch(b, self.n_inp, self._takes, self.loss_func is None)
        self._had_targets = bool(self.yb)

    def _do_one_batch(self):
        self.pred = self._in_context(self._forward)
        if handlers := self._handlers['after_pred']: self._fire('after_pred', handlers)
        self.loss_grad = self._in_context(self._get_loss)
        if self.loss_grad is not None: self.loss = self.loss_grad.detach().clone()  # a copy: callbacks change loss_grad
        if handlers := self._handlers['after_loss']: self._fire('after_loss', handlers)
        if not self.training or self.loss_grad is None: return
        if self._with_events(self._backward, 'backward', CancelBackwardException):
            self._with_events(self._do_step, 'step', CancelStepException)
        self._zero_grad()

    def _in_context(self, f):
        try:
            if self.forward_context is None: return f()
            with self.forward_context(): return f()
        except Exception as e:
            if not isinstance(e, CancelException): e.add_note(batch_note(self, f == self._forward))
            raise

    def _forward(self): return self.model(**self.xb) if isinstance(self.xb, dict) else self.model(*self.xb)

    def _get_loss(self):
        if not self.yb or self.loss_func is None: loss = loss_without_targets(self)
        else: loss = self.loss_func(self.pred, *self.yb)
        if type(loss) is Tensor and not loss.ndim and (loss.requires_grad or not self.training): return loss
        loss, self.loss_parts = total_loss(loss, self.loss_func, self.training)
        return loss

    def _backward(self): self.loss_grad.backward()

    def _do_step(self):
        self._step()
        self.stepped, self.n_step = True, self.n_step+1

    def _step(self): self.opt.step()

    def _zero_grad(self):
        if self.training and self.opt and not self.keep_grads: self.opt.zero_grad()

    def _end_cleanup(self):
        self.dl, self.xb, self.yb, self.pred, self.training, self.stage = None, (), (), None, False, ''
        self.loss = self.loss_grad = self.loss_parts = self._trained = None

    def validate(self,
        ds_idx: int = 1,   # 0 for the training loader, 1 for the validation set or sets
        dl: Any = None,    # another loader instead
        cbs: Any = None,   # callbacks for this evaluation only
        metrics: Any = None,  # what is measured, as the Learner takes it; None: what the Learner measures
    ) -> Any:              # loss and metrics, a sequence that can be indexed by name too
        """Evaluate; nothing else changes, wherever it is called from

        Raises: ValueError if there is nothing to evaluate on, or it gives no batch."""
        if dl is None and ds_idx == 1 and not self.dls.valid_sets:
            raise ValueError("there is no validation set: `validate(dl=…)` takes any loader")
        recorder = [] if hasattr(self, 'recorder') else [default_callbacks['recorder']]
        with guest_frame(self, metrics), run_frame(self, 'validate'), self.added_cbs([*recorder, *L(cbs)]):
            def epoch(): self._do_epoch_validate(ds_idx, dl)
            if self._scope[1]: epoch()
            else: self._with_events(lambda: self._with_events(epoch, 'epoch'), 'fit')
            return self.final_record
