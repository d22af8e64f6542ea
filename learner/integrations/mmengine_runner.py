"""Runner: what a hook of MMEngine's gets as its runner, which is the Learner under the names that it has there."""
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..callbacks.testing import test_name
from ..display import say
from ..files import save_file
from ..learner import Learner
from ..order import order_names
from ..passing import Passing
from ..plain import to_plain
from ..tensors import map_tensors
from ..utils import warn
from ..weights import unwrapped
from .mmengine_hub import LoaderView, MessageHub, OptimWrapper, holds

__all__ = ['Runner', 'modes', 'priorities', 'priority_order', 'sites']

# In the order in which a run of training, validation and test comes to them.
sites = ('before_run', 'after_load_checkpoint', 'before_train', 'before_train_epoch', 'before_train_iter',
         'after_train_iter', 'after_train_epoch', 'before_val', 'before_val_epoch', 'before_val_iter', 'after_val_iter',
         'after_val_epoch', 'after_val', 'before_save_checkpoint', 'after_train', 'before_test', 'before_test_epoch',
         'before_test_iter', 'after_test_iter', 'after_test_epoch', 'after_test', 'after_run')
priorities = dict(zip(order_names, (0, 10, 30, 40, 50, 60, 70, 90, 100)))  # MMEngine's numbers of its names
modes = dict(train='train', valid='val', test='test')  # MMEngine's, by `learn.stage`
not_here = 'visualizer', 'log_processor', 'val_evaluator', 'test_evaluator', 'train', 'val', 'test', 'resume'
inner = ('learn', 'at', 'trains', 'n_batches', 'begin', 'callbacks', 'collect', 'checkpoint', 'add_to', 'take_from',
         'set_values', 'values', 'left_out', 'held', 'put_back', 'before_guest', 'state_dict',
         'load_state_dict')  # no names of MMEngine's


class _Says(logging.Handler):
    def emit(self, record): say(self.format(record))

logger = logging.getLogger('learner.mmengine')
logger.addHandler(_Says())
logger.setLevel(logging.INFO)
logger.propagate = False


def priority_order(
    priority: Any,       # one of MMEngine's names, a number from 0 to 100, or a Priority
    owner: str = '',     # whose it is, for the message
) -> float:
    """Where a hook of this priority stands among callbacks: their `order`

    Raises: ValueError for another name or number; TypeError for what is neither.
    Example:
    >>> priority_order('VERY_LOW'), priority_order(50), priority_order(20)
    (90, 0, -35)
    """
    name = getattr(priority, 'name', priority)
    if isinstance(name, str) and name.upper() in order_names: return order_names[name.upper()]
    wanted = f"`priority` of {owner} is {priority!r}: give a number from 0 to 100, or one of {', '.join(order_names)}"
    if isinstance(priority, bool) or not isinstance(priority, (int, float, str)): raise TypeError(wanted)
    if isinstance(priority, str) or not 0 <= priority <= 100: raise ValueError(wanted)
    place = float(np.interp(priority, list(priorities.values()), list(order_names.values())))
    return int(place) if place.is_integer() else place


class TrainLoop:
    "`runner.train_loop`; a hook that sets `stop_training` ends the fit, after the epoch, or in `fit_iters` the batch"
    def __init__(self, runner): self.runner, self.stop_training = runner, False
    @property
    def dataloader(self) -> LoaderView: "The training loader"; return self.runner.train_dataloader

    def __getattr__(self, name: str) -> Any:
        if name in ('epoch', 'iter', 'max_epochs', 'max_iters'): return getattr(self.runner, name)
        raise AttributeError(f"train_loop.{name}: there are dataloader, epoch, iter, max_epochs, max_iters and "
                             "stop_training", name=name, obj=self)


class Runner:
    """The Learner under the names of MMEngine's Runner; hooks may set further attributes, for each other to find

    `epoch` and `iter` count from 0 and are those that a Runner has at each site: `iter` is still that of the batch in
    `after_train_iter`, `epoch` one more from validation on. With `fit_iters` it is the iteration-based loop's: one
    epoch, 0. Both are of the present fit, or of the last one."""
    deterministic = False

    def __init__(self,
        learn: Learner,  # whose runner it is
        wrap: Callable,  # makes a callback of a hook and its priority
    ):
        self.learn, self._wrap, self.optim_wrapper, self.logger = learn, wrap, OptimWrapper(learn), logger
        self.timestamp = time.strftime('%Y%m%d_%H%M%S')
        self.experiment_name = f'{type(unwrapped(learn.model)).__name__}_{self.timestamp}'
        self.cfg = SimpleNamespace(pretty_text=repr(learn), filename=None)
        self.train_loop = TrainLoop(self)
        self.begin()

    def begin(self) -> None:
        "A fit begins"
        self.message_hub, self.train_loop.stop_training = MessageHub(self._note), False
        self.param_schedulers: Any = None  # a list of MMEngine's schedulers, or None
        self.trains = False                # has the training of this fit begun?
        self.at = 0                        # number of the present training batch
        self.n_batches: int|None = None    # of a training phase, as far as known
        self.set_values: dict|None = None  # of the present validation set, whose batches are over
        self.values: dict = {}             # of all sets of the present evaluation so far
        self.before_guest: dict|None = None  # what it was before a guest's evaluation
        self._resume = False               # is what is loaded with the hooks' parts?
        self.left_out: set[str] = set()    # of checkpoints, since no file can hold it

    def _note(self, key, value, count):  # a number of the hub's, for all that the Learner tells
        if not hasattr(self.learn, 'recorder'): return
        with suppress(ValueError, RuntimeError): self.learn.note(key, value, count)  # the Recorder has that name itself

    # ---- where it is

    @property
    def by_iter(self) -> bool: "Is it a fit by steps, `fit_iters`?"; return 'iterations' in vars(self.learn)
    @property
    def epoch(self) -> int: "Epochs done"; return 0 if self.by_iter else self.learn.epoch+bool(self.learn.trained)
    @property
    def max_epochs(self) -> int: "Epochs of the fit"; return 1 if self.by_iter else self.learn.n_epoch
    @property
    def iter(self) -> int:
        "Training batches done"
        in_batch = self.learn.training and any(scope[0] == 'batch' for scope in self.learn._scopes())
        if in_batch: return self.at  # `train_iter` is one more as soon as the batch has been trained on
        return self.learn.train_iter if self.trains else 0

    @property
    def max_iters(self) -> Any:  # `inf` if the training loader has no length
        "Training batches of the fit"
        learn, n = self.learn, self.n_batches or self.learn.dls.train.n_batches
        if self.by_iter: return math.ceil(learn.iterations.n*(n/learn.n_steps if n and learn.n_steps else 1))
        return math.inf if n is None else n*learn.n_epoch

    @property
    def mode(self) -> str: "'train', 'val', 'test', or '' outside of these"; return modes.get(self.learn.stage, '')

    @property
    def model(self) -> Any: "The model"; return self.learn.model
    @property
    def work_dir(self) -> str: "Where models go"; return str(Path(self.learn.path)/self.learn.model_dir)
    @property
    def log_dir(self) -> str: "Where logs of this Learner would go"; return str(Path(self.work_dir)/self.timestamp)
    @property
    def seed(self) -> int: "torch's"; return torch.initial_seed()
    @property
    def distributed(self) -> bool: "Are there several processes?"; return self.world_size > 1
    @property
    def rank(self) -> int: "Number of this process"; return torch.distributed.get_rank() if _has_group() else 0
    @property
    def world_size(self) -> int: "Processes"; return torch.distributed.get_world_size() if _has_group() else 1

    def _loader(self, mode, dl):
        learn = self.learn
        here = learn.dl if self.mode == mode and learn.dl is not None else dl
        while isinstance(here, Passing): here = here.inner
        return None if here is None else LoaderView(here, learn.n_iter if self.mode == mode else None)

    @property
    def train_dataloader(self) -> Any: "The training loader"; return self._loader('train', self.learn.dls.train)
    @property
    def val_dataloader(self) -> Any: "The validation loader, or None"; return self._loader('val', self.learn.dls.valid)
    @property
    def test_dataloader(self) -> Any: "That of the present `learn.test`, else None"; return self._loader('test', None)
    @property
    def val_loop(self) -> Any: "Has the validation `dataloader`; None without one"; return _loop(self.val_dataloader)
    @property
    def test_loop(self) -> Any: "Has that of the present test; None outside of it"; return _loop(self.test_dataloader)
    @property
    def _train_loop(self) -> TrainLoop: return self.train_loop

    # ---- hooks

    @property
    def callbacks(self) -> list[Any]:
        "Those of the Learner that run hooks, in their order"
        return [cb for cb in self.learn.ordered if hasattr(type(cb), 'fire_site') and cb.run]

    @property
    def hooks(self) -> list: "The hooks, in the order they run"; return [cb.hook for cb in self.callbacks]

    def call_hook(self,
        fn_name: str,   # any name; hooks without such a method are passed by
        **kwargs,       # what the methods get after the runner
    ) -> None:
        "Call a method of all hooks, in their order"
        for cb in self.callbacks: cb.fire_site(fn_name, **kwargs)

    def register_hook(self,
        hook: Any,              # an object; no config dict
        priority: Any = None,   # a name, a number from 0 to 100 or a Priority; None: the hook's own
    ) -> None:
        """Add a hook for good; those of the same priority run in the order of adding

        Raises: TypeError for a dict or what is no hook; ValueError for an odd priority."""
        self.learn.add_cb(self._wrap(hook, priority))

    def get_hooks_info(self) -> str:
        "The hooks of each site, in the order they run, with their place among the Learner's callbacks"
        rows = {s: [f'({cb.order}) {type(cb.hook).__name__}' for cb in self.callbacks if s in cb.sites] for s in sites}
        return '\n'.join('\n  '.join([f'{site}:', *names]) for site, names in rows.items() if names)

    def collect(self) -> None:
        "Take up loss and metrics of the present validation set, by column of the table"
        if self.set_values is not None: return  # another hook has
        recorder: Any = getattr(self.learn, 'recorder', None)
        found: dict = recorder._results('valid', recorder.valid) if recorder else {}
        of_test, own = self.mode == 'test', {m.name for m in self.learn.metrics}
        self.set_values = {test_name(k, own) if of_test else k: v for k, v in found.items()}
        self.values |= self.set_values

    # ---- files

    def checkpoint(self,
        state: dict[str, Any],  # with the Learner's 'model' and 'opt'
    ) -> dict[str, Any]:        # its own dicts, with the same tensors
        "The state as hooks expect it in `before_save_checkpoint` and `after_load_checkpoint`"
        meta = dict(epoch=self.epoch, iter=self.iter, seed=self.seed, experiment_name=self.experiment_name,
                    time=time.strftime('%Y%m%d_%H%M%S'))
        found: dict[str, Any] = dict(meta=meta, state_dict=dict(state['model']),
                                     message_hub=self.message_hub.state_dict())
        if state.get('opt'): found['optimizer'] = state['opt']
        if self.param_schedulers: found['param_schedulers'] = [dict(s.state_dict()) for s in self.param_schedulers]
        return found

    def held(self) -> dict[str, Any]:
        "All that an evaluation or a rehearsal may change of it"
        hub = self.message_hub
        return dict(own={k: v for k, v in vars(self).items() if k != 'before_guest'}, info=dict(hub.runtime_info),
                    numbers={k: len(v) for k, v in hub.log_scalars.items()}, stop=self.train_loop.stop_training,
                    schedulers=[deepcopy(dict(s.state_dict())) for s in self.param_schedulers or ()])

    def put_back(self,
        held: dict[str, Any],  # what `held` gave
    ) -> None:
        "Be again what it was then"
        vars(self).update(held['own'], before_guest=None)
        self.message_hub.shorten(held['numbers'], held['info'])
        self.train_loop.stop_training = held['stop']
        for s, old in zip(self.param_schedulers or (), held['schedulers']): s.load_state_dict(old)

    def state_dict(self) -> dict[str, Any]:
        "What goes on with a fit, beside what the hooks keep"
        return dict(hub=self.message_hub.state_dict(), stop=self.train_loop.stop_training,
                    schedulers=[dict(s.state_dict()) for s in self.param_schedulers or ()])

    def load_state_dict(self,
        state: dict[str, Any],  # what `state_dict` gave
    ) -> None:
        "Go on from there"
        self.message_hub.load_state_dict(state['hub'])
        self.train_loop.stop_training = state['stop']
        for s, old in zip(self.param_schedulers or (), state['schedulers']): s.load_state_dict(old)

    def add_to(self,
        state: dict[str, Any],  # of the Learner's, about to be saved
    ) -> None:
        "Put in what the hooks do to a checkpoint, beside the weights, which stay those that are trained"
        if 'counters' not in state and not self._ready('before_save_checkpoint'): return
        found, before = self.checkpoint(state), self.checkpoint(state)
        for cb in self._ready('before_save_checkpoint'): cb.fire_site('before_save_checkpoint', checkpoint=found)
        weights, own = found.pop('state_dict'), before.pop('state_dict')
        more = {k: v for k, v in found.items() if k not in before or k == 'meta'}
        for k in [k for k, v in more.items() if not holds(v)]: self._leave_out(k, more.pop(k))
        state['mmengine'] = more | dict(weights={k: v for k, v in weights.items() if v is not own.get(k)})

    def _leave_out(self, name, value):
        if name not in self.left_out: warn(
            f"what a hook has put into the checkpoint as `{name}`, a `{type(value).__name__}`, is not saved: it is or "
            "holds no plain value")
        self.left_out.add(name)

    def take_from(self,
        state: dict[str, Any],  # that was read
    ) -> None:
        "Let the hooks take theirs out of it, and change its weights"
        more = dict(state.get('mmengine', {}))
        self._resume = bool(more)
        found = self.checkpoint(state) | more
        kept = next((s for s in state.get('callbacks', {}).values() if isinstance(s, dict) and 'hub' in s), None)
        if kept: found |= dict(message_hub=kept['hub'], param_schedulers=kept['schedulers'])
        found['state_dict'] = {**state['model'], **found.pop('weights', {})}
        ready = self._ready('after_load_checkpoint')
        late = [cb for cb in self.callbacks if 'after_load_checkpoint' in cb.sites and cb not in ready]
        if late and more: warn(
            f"{late[0]} does not get what is loaded, since what its `before_run` makes is not there yet; "
            "`fit(resume=file)` brings it")
        for cb in ready: cb.fire_site('after_load_checkpoint', checkpoint=found)
        for k in state['model'].keys() - found['state_dict'].keys(): del state['model'][k]
        state['model'].update(found['state_dict'])

    def _ready(self, site): return [cb for cb in self.callbacks if site in cb.sites and cb.ready]

    def save_checkpoint(self,
        out_dir: str|Path,                  # folder
        filename: str,                      # of the file in it
        file_client_args: Any = None,       # not here: files are local
        save_optimizer: bool = True,        # the optimizer's state too?
        save_param_scheduler: bool = True,  # that of `param_schedulers`?
        meta: dict|None = None,             # what is noted beside
        by_epoch: bool = True,              # is the epoch counted as done, rather than the batch?
        backend_args: Any = None,           # not here: files are local
    ) -> None:
        """Save weights in MMEngine's layout, on the CPU, as its hooks leave them; `learn.load` takes the file

        It is no point to go on from exactly: that is what a Checkpoint saves.
        Raises: ValueError for the arguments that are not here; OSError."""
        if file_client_args or backend_args: raise ValueError(
            "save_checkpoint: `file_client_args` and `backend_args` are not here: files are local")
        opt = self.learn.opt.state_dict() if self.learn.opt else {}
        found = self.checkpoint(dict(model=unwrapped(self.model).state_dict(), opt=opt))
        found['meta'] |= dict(epoch=self.epoch+by_epoch, iter=self.iter+(not by_epoch)) | (meta or {})
        if not save_optimizer: found.pop('optimizer', None)
        if not save_param_scheduler: found.pop('param_schedulers', None)
        self.call_hook('before_save_checkpoint', checkpoint=found)
        path = Path(out_dir)/filename
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(map_tensors(Tensor.cpu, to_plain(found)), path)

    def __getattr__(self, name: str) -> Any:
        there = [k for k in (*vars(self), *vars(Runner)) if k[0] != '_' and k not in inner]
        advice = "the Learner has its own" if name in not_here else "MMEngine's Runner in a Learner has no such thing"
        raise AttributeError(
            f"runner.{name}: {advice}; there are {', '.join(there)}. "
            f"A hook that needs it gets it from you: `as_callback(hook, {name}=…)`", name=name, obj=self)


def _loop(dl): return None if dl is None else SimpleNamespace(dataloader=dl)
def _has_group(): return torch.distributed.is_available() and torch.distributed.is_initialized()
