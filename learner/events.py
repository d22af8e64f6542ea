"""The seven scopes of training, the events that follow from them, and the state that callbacks may read.

Every event name, every `except` in the loop and every check of a handler's name derives from the table `scopes`."""
import math
from types import SimpleNamespace
from typing import Any

from .utils import is_near

__all__ = ['CancelException', 'CancelFitException', 'CancelEpochException', 'CancelTrainException',
           'CancelValidException', 'CancelBatchException', 'CancelBackwardException', 'CancelStepException',
           'scopes', 'events_of', 'event', 'event_names', 'inner_events', 'declare_event', 'similar_event', 'no_event',
           'LoopState']


class CancelException(Exception):
    "Base of the exceptions by which a callback ends a scope early"
    origin = ''  # which callback raised it at which event: filled in by the loop, for its error messages

class CancelFitException(CancelException): "Ends the fit: `after_cancel_fit` and `after_fit` follow"
class CancelEpochException(CancelException): "Ends the epoch; the next one follows"
class CancelTrainException(CancelException): "Ends the epoch's training batches; its validation follows"
class CancelValidException(CancelException): "Ends one evaluation pass"
class CancelBatchException(CancelException): "Ends the batch, and drops its gradients; the next one follows"
class CancelBackwardException(CancelException): "Skips the backward pass, and so the step"
class CancelStepException(CancelException): "Skips the optimizer's step"


# Outermost first; `validate` stands beside `train`, `step` beside `backward`.
scopes = dict(fit=CancelFitException, epoch=CancelEpochException, train=CancelTrainException,
              validate=CancelValidException, batch=CancelBatchException,
              backward=CancelBackwardException, step=CancelStepException)

events_of = {s: tuple(f'{when}_{s}' for when in ('before', 'after_cancel', 'after', 'cleanup')) for s in scopes}
event_names = ('after_create', *(e for events in events_of.values() for e in events),
               'after_pred', 'after_loss', 'save_point', 'before_save', 'before_load', 'after_load')
event = SimpleNamespace(**{e: e for e in event_names})  # `event.after_loss == 'after_loss'`; declared events join it
inner_events = frozenset([*events_of['batch'], *events_of['backward'], *events_of['step'], 'after_pred', 'after_loss'])


def declare_event(
    name: str,  # any identifier
) -> str:       # the name
    """Make `name` an event that callbacks may handle and `learn(name)` fires; call it before the classes that use it

    Raises: ValueError if `name` is no identifier."""
    if not name.isidentifier(): raise ValueError(f"declare_event: {name!r} is no identifier, so no method can be it")
    setattr(event, name, name)
    return name


def similar_event(
    name: str,  # name of a method or event
) -> str:       # the event it seems to mean, or '' if it is an event or nothing like one
    "The event that a misspelt, old (`begin_fit`) or short (`before_valid`) name stands for"
    if name in vars(event): return ''
    words = [dict(begin='before', valid='validate', val='validate').get(w, w) for w in name.split('_')]
    if '_'.join(words) in vars(event): return '_'.join(words)
    return next((e for e in vars(event) if is_near(e, name, 2)), '')


def no_event(name: str, owner: str) -> str:  # what names something that is no event, and the name
    "The message that `name` is not an event, with the one that was meant or all there are"
    near = similar_event(name)
    advice = f"did you mean `{near}`? (a helper needs another name)" if near else f"there are {', '.join(vars(event))}"
    return f"`{owner}{name}` is not an event; {advice}"


class LoopState:
    "Where the loop stands: callbacks read these as their own, and write them with `self.learn.pred = …`"
    xb: Any = ()               # inputs of the batch: a tuple, or a dict that goes in by name
    yb: tuple = ()             # targets of the batch; a callback that empties it skips the loss
    pred: Any = None           # what the model returned; None until then
    loss: Any = None           # the batch's loss, 0-d and detached; None if there is none
    loss_grad: Any = None      # the loss that backward is called on
    dl: Any = None             # the loader that is being iterated
    training: bool = False     # in the training phase?
    trained: bool = False      # is the training of this epoch over?
    epoch: int = 0             # number of the epoch, from 0
    n_epoch: int = 1           # epochs that the fit asks for
    iter: int = 0              # number of the batch in its phase, from 0
    n_iter: int|None = None    # batches of the phase; None if the loader does not know
    n_steps: int|None = None   # optimizer steps an epoch of this fit, for schedules; None: one a training batch
    train_iter: int = 0        # training batches done in this fit
    pct_train: float = 0.      # share of the fit that is done, 0 to 1
    smooth_loss: Any = math.nan  # the Recorder's moving average of the training loss; reading it may wait for a GPU

    @property
    def x(self) -> Any: "The input itself if there is one, else all of them"; return _only(self.xb)
    @property
    def y(self) -> Any: "The target itself if there is one, else all; None if there are none"; return _only(self.yb)

def _only(b): return b if isinstance(b, dict) or len(b) > 1 else b[0] if b else None
