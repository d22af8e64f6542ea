"""Going on: `fit(resume=…)` in another process, `learn.resume()` in this one, and `learn.step(n)`, a fit in pieces."""
import math
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from fastcore.basics import patch
from fastcore.foundation import L

from ..callback import Callback
from ..display import say
from ..files import load_file
from ..frame import current_opt, set_rates
from ..host import as_callback
from ..interrupt import PauseFit
from ..learner import Learner
from ..plain import from_plain
from ..state import Pause, differences, keyed, rates_of, restore_snapshot, restore_weights
from ..utils import check_number, replacing, warn
from .checkpoint import Checkpoint, newest, was_written_by_another
from .progress import ProgressCallback, ShowGraphCallback
from .saved_state import put_back, refuse
from .schedule import ParamScheduler, Scheduler

__all__ = ['Resuming', 'Steps']


class Resuming(Callback):
    """Puts a state back when the fit comes to the scope in which it was taken; `fit(resume=…)` adds it

    Raises: ValueError, before training, naming what does not fit.
    Order: after all others, whose `before_x` is part of what the state holds."""
    order = math.inf
    toward_end = True
    run_in = {'fit'}
    run_valid = False
    done = False  # is it put back?
    ended: int|None = None  # the last epoch of a fit that was over
    over: Any = None  # the state at its end
    other_epochs = False  # does an epoch have another number of batches?
    n_step_before: Any = None  # value of `learn.n_step` before that of the state was set

    def __init__(self,
        state: dict[str, Any],       # of `learner_state`, or a snapshot if it is of this process
        source: str,                 # where it is from, for messages
        allow: Any = (),             # what may differ
        paused: Pause|None = None,   # it is of this process
        new_rates: Any = (),         # which of 'lr' and 'wd' are to be those of this fit; found out for a file
    ):
        self.source, self.allow, self.paused, self.new_rates = source, allow, paused, new_rates
        self.data: Any = state

    def before_fit(self):
        if not self.paused: self._check()
        if self.data['place'] == 'epoch': self._put_back()

    def before_epoch(self):
        if self.data and self.data['place'] == 'valid': self._put_back()

    def before_train(self):
        if self.data and self.data['place'] == 'train': self._put_back()

    def after_fit(self):
        if self.over:  # what the others have just done again is part of it, such as loading the best model
            restore_weights(self.learn, self.over, frozenset(L(self.allow)))
            restore_snapshot(self.learn, self.over)
        if self.ended is not None: self.learn.epoch = self.ended  # as the fit left it

    def cleanup_fit(self):
        if self.done: return
        if self.paused: self.learn.paused = self.paused  # interrupted before: it can be gone on with
        else: self.learn.n_step = self.n_step_before

    def _check(self):  # what can be known only when all callbacks are there
        then, found, learn = self.data['counters'], {}, self.learn
        scheds = [cb for cb in learn.cbs if isinstance(cb, Scheduler)]
        if scheds and (then['n_epoch'], then['n_steps']) != (learn.n_epoch, learn.n_steps): found['n_epoch'] = (
            f"it is of a fit of {then['n_epoch']} epochs, and this one has {learn.n_epoch}, so that {scheds[0]} is "
            "stretched over them: from here on it is that of the longer fit")
        for k, name in dict(lr='learning rate', wd='weight decay').items():
            if (old := self.data['rates'][k]) != (new := rates_of(learn)[k]):
                found[k] = f"it trained with the {name} {old}, and this fit is to with {new}"
                self.new_rates = (*self.new_rates, k)
        here, saved = keyed(learn), self.data['callbacks']
        gone = [k for k in saved if k not in here and not k.startswith('checkpoint')]  # who saves decides nothing
        new = [k for k, cb in here.items() if k not in saved and isinstance(cb, Scheduler)]
        if gone or new: found['callbacks'] = '; '.join([f"`{k}` is missing, whose state it holds" for k in gone] +
                                                       [f"it holds no state of `{k}`" for k in new])
        refuse(found, self.allow, self.source)
        if begun := [k for k, cb in here.items() if k not in saved and cb.state_dict() and k not in new]: warn(
            f"{self.source} holds no state of {', '.join(f'`{k}`' for k in begun)}: begun anew")

    def _put_back(self):
        if self.paused: restore_snapshot(self.learn, self.data)
        else: put_back(self.learn, self.data, self.allow)
        if self.new_rates: set_rates(self.learn, None if 'lr' in self.new_rates else [h['lr'] for h in self.opt.hypers])
        for cb in self.learn.ordered:
            if isinstance(cb, Scheduler): cb.gone_on(self.new_rates)
        for cb in self.learn.cbs if self.other_epochs else ():  # counted by what an epoch has now
            if isinstance(cb, ParamScheduler): cb.first, cb.acted_at = self.learn.n_step-cb._steps_done(), -1
        if self.learn.epoch == self.n_epoch: self.ended = self.data['counters']['epoch']  # nothing is left to do
        if self.ended is not None and self.data.get('done'): self.over = self.data
        self.data, self.done = None, True
        if not self.paused: say(f"{self.source}: " + (
            f"the fit was over after {self.n_step} steps" if self.ended is not None else
            f"goes on in epoch {self.epoch+1}{f' of {self.n_epoch}'*(self.n_epoch < sys.maxsize)}, after {self.n_step} "
            "steps"))


def _found(learn, cbs, resume):  # the file to go on from, and what is in it
    if resume is not True:
        path = Path(resume)
        return newest([path], learn.n_fit) if path.is_dir() else (path, from_plain(load_file(path)))
    folders = [cb.folder(learn) for cb in [*learn.cbs, *cbs] if isinstance(cb, Checkpoint)]
    if not folders: raise ValueError("resume=True: there is no Checkpoint among the callbacks, whose folder would be "
                                     "looked into; give `cbs=Checkpoint(…)`, or resume='file'")
    return newest(folders, learn.n_fit)


def _moved(state, found, dl):  # the loader's place in an epoch, where other data was allowed
    place = state['loader']
    if 'dataset' in found: return dict(record=None, position=0)  # in another order: the epoch is begun again
    if 'batch_size' not in found: return place
    return place | dict(position=place['position']*state['data']['batch_size']//dl.bs)  # no item is left out


@patch
def _resuming(self: Learner, cbs, resume, allow, reset_opt):  # the callbacks of a fit, which may go on with another
    self.going_on = isinstance(resume, Pause)
    if not resume:
        if L(allow): raise ValueError(f"fit: allow={allow!r} says what may differ from a checkpoint: it needs `resume`")
        return L(cbs)
    if reset_opt or self.epoch: raise ValueError(
        f"fit: `{'reset_opt' if reset_opt else 'start_epoch'}` and `resume` exclude each other: a file has its own")
    if isinstance(resume, Pause):
        resume.update(self)
        self.epoch = resume.state['at_epoch']
        return [*L(cbs), Resuming(resume.state, 'what was stopped', allow, resume, new_rates=resume.new_rates)]
    return _from_file(self, [as_callback(cb) for cb in L(cbs)], resume, allow)


def _from_file(learn, cbs, resume, allow):
    path, state = _found(learn, cbs, resume)
    if state is None:
        if path: learn.paused = None
        say(f"`{path}` is of a later fit: this one is over, and passed by; the weights come with the later one"
            if path else "no checkpoint yet: the fit starts anew")
        return None if path else cbs
    learn.epoch = _first_epoch(learn, state, path)
    current_opt(learn)
    found = differences(learn, state)
    refuse(found, allow, f"`{path}`")
    if path and learn.epoch == learn.n_epoch and was_written_by_another(learn, path): warn(
        f"resume: `{path}` is of a fit that another Learner of this process has finished: give each its own `path`")
    if state['place'] == 'train': state['loader'] = _moved(state, found, learn.dls.train)
    cb = Resuming(state, f"`{path}`", allow)
    cb.other_epochs = not {*found}.isdisjoint(('dataset', 'batch_size'))
    cb.n_step_before, learn.n_step = learn.n_step, state['counters']['n_step']
    return [*cbs, cb]


def _first_epoch(learn, state, path):
    if not isinstance(state, dict) or not state.get('place'): raise ValueError(
        f"`{path}` holds no state of a fit under way: `learn.load_state` takes one from outside a fit, `learn.load` "
        "takes weights")
    n_epoch = state['counters']['n_epoch']
    if 'iterations' in state['callbacks']: learn.n_epoch = max(learn.n_epoch, n_epoch)  # `fit_iters` ends by steps
    if state.get('done') and learn.n_epoch <= state['counters']['n_epoch']: return learn.n_epoch
    if state['at_epoch'] > learn.n_epoch: raise ValueError(
        f"`{path}` is of a fit that has done {state['at_epoch']} epochs; this one has {learn.n_epoch} in all")
    return state['at_epoch']


@patch
def resume(self: Learner) -> None:
    """Go on with the fit that was stopped in this process, with its callbacks, as if it had not been

    Raises: RuntimeError if there is none, or it has no end."""
    paused = _paused(self)
    if paused.n_epoch == sys.maxsize: raise RuntimeError(
        "resume: the fit that `learn.step` began has no `n_epoch`, and so no end; `learn.step(n)` goes on with it")
    _go_on(self, paused)


def _paused(learn):
    if learn.paused is None: raise RuntimeError(
        "resume: no fit of this Learner was stopped between two batches in this process; one that a Checkpoint has "
        "saved goes on with the same call of fit, and `resume=True`")
    return learn.paused


def _go_on(learn, paused, *cbs, lr=None, wd=None):
    old = [cb for cb in paused.cbs if cb.learn is None and not isinstance(cb, (Resuming, Steps))]
    rates = paused.rates | {k: v for k, v in dict(lr=lr, wd=wd).items() if v is not None}
    paused.new_rates = tuple(k for k, v in dict(lr=lr, wd=wd).items() if v is not None)
    learn.fit(paused.n_epoch, rates['lr'], rates['wd'], [*old, *cbs], n_steps=paused.n_steps, resume=paused)


class Steps(Callback):
    """Pauses the fit after so many steps of the optimizer

    Order: after all others, which the batch is to be over for."""
    order = math.inf
    toward_end = True
    run_in = {'fit'}
    run_valid = False
    at_border = False  # was it the last batch of an epoch? Then after its validation
    seen: int|None = None  # `learn.n_step` when steps were counted last

    def __init__(self,
        n: int,  # steps
    ): self.left = n

    def before_batch(self):
        if self.seen is None: self.seen = self.learn.n_step

    def _is_last(self):
        made, self.seen = self.learn.n_step-self.seen, self.learn.n_step
        self.left -= made
        return made and self.left <= 0

    def after_train(self):  # gradients that were left over may have been stepped
        if self.seen is not None and self._is_last(): self.at_border = True

    def after_batch(self):
        if not self._is_last(): return
        self.at_border = self.iter+1 == self.n_iter
        if self.at_border: return
        self.dl.hold()
        self.learn._stop.ask('pause')

    def cleanup_epoch(self):
        if self.at_border and self.epoch+1 < self.n_epoch: self.learn._stop.ask('pause')


def _new(cbs, there): return [cb for cb in cbs if not any(cb is old for old in there)]  # some may define `==`


def _evaluates(learn, *args, **kwargs):  # what callbacks ask for, but nothing at the end of an epoch
    if learn.run_kind != 'fit': type(learn)._do_epoch_validate(learn, *args, **kwargs)


@patch
def step(self: Learner,
    n: int = 1,                         # steps of the optimizer
    lr: float|slice|list|None = None,   # learning rate from now on; None: as it is
    wd: float|list|None = None,         # weight decay, likewise
    cbs: Any = None,                    # callbacks for all steps to come
    n_epoch: int|None = None,           # of the fit that the first step begins, for schedules; None: it has no end
    n_steps: int|None = None,           # optimizer steps an epoch, for schedules; None: one a training batch
    validate: bool = False,             # also validate at the end of each epoch?
    resume: Any = None,                 # a file: the first step is the one after those it has, as `fit` takes it
    allow: Any = (),                    # what may differ from it, as `fit` takes it
) -> int:                               # the steps made: `n`, or fewer if the fit is over
    """Train for `n` steps and return; the next call goes on from there, as one long fit would

    It also goes on with a fit that was stopped. When a fit is over `learn.paused` is None, and the next call begins
    another, so a loop over one fit is `while learn.step(10, n_epoch=2) and learn.paused:`, whose block runs between its
    pieces. Nothing is shown; the Recorder's rows are there as usual.
    Raises: ValueError or TypeError if anything does not fit."""
    check_number('step: `n`', n, 1, whole=True, of='steps')
    steps, shows = Steps(n), [cb for cb in self.cbs if isinstance(cb, (ProgressCallback, ShowGraphCallback))]
    with ExitStack() as stack:
        for cb in shows: stack.enter_context(replacing(cb, run=False))
        if not validate:
            vars(self)['_do_epoch_validate'] = partial(_evaluates, self)
            stack.callback(vars(self).pop, '_do_epoch_validate')
        try:
            if resume or not self.paused:
                self.fit(n_epoch or sys.maxsize, lr, wd, [*L(cbs), steps], n_steps=n_steps, resume=resume,
                         allow=allow)
            else: _go_on(self, self.paused, *_new(L(cbs), self.paused.cbs), steps, lr=lr, wd=wd)
        except PauseFit: pass
    return n-steps.left
