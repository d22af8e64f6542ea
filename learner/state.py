"""What decides the future of a run: taken down at a point where nothing is under way, and put back, also elsewhere.

A snapshot is all but the weights: where the fit is, random streams, the loader's position, the states of callbacks. It
holds the tensors themselves, so it is for the same process; `learner_state` adds model, loss and optimizer."""
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Real
from typing import Any

from torch import Tensor, nn
from torch.utils.data import IterableDataset

from .modes import restore_modes
from .utils import rng_state, set_rng_state
from .weights import clean, loose_buffers, misfits, named_params, put_weights, unwrapped, weights_of

__all__ = ['place', 'keyed', 'snapshot', 'restore_snapshot', 'learner_state', 'restore_weights', 'differences', 'Pause',
           'pause', 'states_of', 'rates_of', 'changeable']

counters = 'n_step', 'n_fit', 'epoch', 'n_epoch', 'n_steps', 'train_iter', 'pct_train', 'trained', 'keep_grads'


def place(
    learn: Any,          # the Learner
) -> tuple[str, int]:
    """Where it stands: 'train' (between batches), 'valid' (training is over), 'epoch' (it begins) or '', and the epoch

    '' is outside of a fit."""
    open_scopes = {scope[0] for scope in learn._scopes()} if learn.run_kind == 'fit' else {}
    if 'train' in open_scopes: return 'train', learn.epoch
    if 'epoch' in open_scopes: return ('valid' if learn.trained else 'epoch'), learn.epoch
    if 'fit' in open_scopes: return 'epoch', min(learn.epoch+1, learn.n_epoch)
    return '', learn.epoch


def keyed(
    learn: Any,          # the Learner
) -> dict[str, Any]:     # by name; a second one of a name gets a number
    "The callbacks, as their states are found in a file"
    found: dict[str, Any] = {}
    for cb in learn.cbs:
        numbered = (f'{cb.name}_{i}' for i in range(2, len(learn.cbs)+2))
        found[next(k for k in (cb.name, *numbered) if k not in found)] = cb
    return found


def states_of(
    learn: Any,          # the Learner
) -> dict[str, Any]:     # by name, copies
    "The states of the callbacks that have one; the error, if it cannot be had"
    states = {}
    for k, cb in keyed(learn).items():
        try: state = cb.state_dict()
        except Exception as e:  # no reason to end a fit, of which perhaps nothing is ever saved
            e.add_note(f"raised by the `state_dict` of callback `{cb}`")
            state = e
        if state: states[k] = _copied(state)
    return states


def _copied(o):  # containers, so that what is in them later is not in the snapshot
    if isinstance(o, dict): return {k: _copied(v) for k, v in o.items()} if type(o) is dict else o.copy()
    if type(o) in (list, tuple, set): return type(o)(map(_copied, o))
    if isinstance(o, Tensor): return o.detach().clone()
    return o.copy() if hasattr(o, 'copy') else o  # a deque, an array


def _known(state):
    if isinstance(state, Exception): raise state
    return state


def rates_of(
    learn: Any,         # the Learner, in a fit
) -> dict[str, str]:    # as text, by 'lr' and 'wd'
    "What the fit trains with, as it was given, be it to the fit or to the Learner"
    given = dict(lr=learn.lr, wd=learn.wd if learn._rates.get('wd') is None else learn._rates['wd'])
    return {k: repr(float(v) if isinstance(v, Real) else v) for k, v in given.items()}


def snapshot(
    learn: Any,           # the Learner, with nothing under way
) -> dict[str, Any]:
    "All but the weights that decides how the run goes on; in an evaluation, as it was before"
    if learn._trained is not None and 'validate' in {scope[0] for scope in learn._scopes()}: return learn._trained
    (where, epoch), numbers = place(learn), {k: getattr(learn, k) for k in counters}
    if where == 'epoch' and learn.epoch == learn.n_epoch: numbers['epoch'] = max(0, epoch-1)  # no epoch was left to do
    loader, opt, inner = learn.dl if where == 'train' else learn.dls.train, learn.opt, unwrapped(learn.model)
    return dict(
        place=where, at_epoch=epoch, counters=numbers, rng=rng_state(),
        rates=rates_of(learn),
        loader=loader.place(where == 'train'), data=_data_facts(learn), callbacks=states_of(learn),
        hypers=[dict(h) for h in opt.hypers] if opt else [], frozen_idx=opt.frozen_idx if opt else 0,
        frozen=[k for k, p in named_params(learn.model, learn.loss_func) if not p.requires_grad],
        evals=[clean(k) for k, m in inner.named_modules() if not m.training],
        grads={k: p.grad for k, p in named_params(learn.model, learn.loss_func) if p.grad is not None}
        if learn.keep_grads else {})


def restore_snapshot(
    learn: Any,                # the Learner
    state: dict[str, Any],     # a snapshot
) -> None:
    "Put a snapshot back: callbacks that it does not know, and states of those that are not there, are left"
    given = ('epoch', 'n_epoch', 'n_steps') if learn.run_kind == 'fit' else ()  # by the fit
    for k in counters:
        if k not in given: setattr(learn, k, state['counters'][k])
    frozen, evals, inner = set(state['frozen']), set(state['evals']), unwrapped(learn.model)
    for k, p in named_params(learn.model, learn.loss_func):
        if p.requires_grad == (k in frozen) and (p.is_floating_point() or p.is_complex()):
            p.requires_grad_(k not in frozen)
        if k in state['grads']: p.grad = state['grads'][k].to(p.device)
    restore_modes([(m, clean(k) not in evals) for k, m in inner.named_modules()])
    if learn.opt:
        learn.opt.frozen_idx = state['frozen_idx']
        for h, old in zip(learn.opt.hypers, state['hypers']):
            h.update({k: v for k, v in old.items() if h.get(k, v) != v})
    for k, cb in keyed(learn).items():
        if k in state['callbacks']: cb.load_state_dict(_copied(_known(state['callbacks'][k])))
    if state['place'] != 'train': learn.dls.train.go_to(state['loader'])
    elif learn.dl: learn.dl.go_to(state['loader'])  # outside a fit there is no epoch to be gone on with
    set_rng_state(state['rng'])


def learner_state(
    learn: Any,          # the Learner, with nothing under way
    shot: Any = None,    # a snapshot, since which the weights have not changed; None: one of now
) -> dict[str, Any]:     # its own tensors, not copies
    "A snapshot with the weights and the optimizer"
    loss, state = learn.loss_func, shot or snapshot(learn)
    for known in state['callbacks'].values(): _known(known)
    return dict(version=1, **state, model=weights_of(learn.model), buffers=loose_buffers(learn.model),
                loss=weights_of(loss) if isinstance(loss, nn.Module) else {},
                opt=learn.opt.state_dict() if learn.opt else {})


def restore_weights(
    learn: Any,                # the Learner
    state: dict[str, Any],     # of `learner_state`
    skip: frozenset = frozenset(),  # what may differ: 'model' (what does not fit is left), 'optimizer' (is left)
) -> None:
    """Put model, loss and optimizer back

    Raises: ValueError if the optimizer is another one."""
    if state['opt'] and 'optimizer' not in skip: learn.opt.load_state_dict(state['opt'])
    bad = {*misfits(learn.model, state['model'])[2]}
    put_weights(learn.model, {k: v for k, v in state['model'].items() if k not in bad})
    for k, b in loose_buffers(learn.model).items():
        if k in state['buffers'] and b.shape == state['buffers'][k].shape: b.copy_(state['buffers'][k])
    if isinstance(learn.loss_func, nn.Module): put_weights(learn.loss_func, state['loss'])


# ---- what must not have changed

def _data_facts(learn):
    dl = learn.dls.train
    data = getattr(dl, 'dataset', None)
    try: items = len(data)  # pyright: ignore[reportArgumentType]
    except Exception: items = dl.n_batches  # a dataset's `__len__` raises whatever it likes
    return dict(dataset=items, batch_size=getattr(dl, 'bs', None), workers=getattr(dl, 'num_workers', 0),
                kept=getattr(dl, 'persistent_workers', False), iterable=isinstance(data, IterableDataset))


def differences(
    learn: Any,                # the Learner
    state: dict[str, Any],     # of `learner_state`
) -> dict[str, str]:           # by kind: 'model', 'optimizer', 'dataset', 'batch_size', 'workers'
    "What differs from the Learner that a state is of, so that it cannot go on exactly"
    found, then, now = {}, state['data'], _data_facts(learn)
    whats = 'it lacks', 'this model has no', 'this model has another shape of'
    told = [f"{what} {', '.join(names[:5])}{' …'*(len(names) > 5)}"
            for what, names in zip(whats, misfits(learn.model, state['model'])) if names]
    if told: found['model'] = '; '.join(told)
    if learn.opt and state['opt'] and (why := learn.opt.misfit(state['opt'])): found['optimizer'] = why
    if then['dataset'] != now['dataset']:
        found['dataset'] = f"it had {then['dataset']} items, and has {now['dataset']}"
    if then['batch_size'] != now['batch_size']:
        found['batch_size'] = f"batches had {then['batch_size']} items, and have {now['batch_size']}"
    a, b = then['workers'], now['workers']
    if a != b and (now['iterable'] or not a or not b): found['workers'] = (
        f"the loader had {a} workers, and has {b}: " + ("the data comes in another order" if now['iterable'] else
                                                        "random numbers in the dataset are others"))
    elif then['kept'] != now['kept']: found['workers'] = (  # kept ones draw a seed once, others each epoch, as in torch
        f"`persistent_workers` was {then['kept']}, and is {now['kept']}: random numbers in the dataset are others")
    return found


# ---- a fit that was stopped

@dataclass
class Pause:
    "Where a fit was stopped, and what it was called with"
    state: dict[str, Any]    # a snapshot
    cbs: list                # the callbacks that were there
    rates: dict[str, Any]    # `lr` and `wd` as the fit got them
    n_epoch: int
    n_steps: int|None
    new_rates: tuple = ()    # which of them are to be those that the next fit gets
    left: Any = None         # what people may change between fits, as the fit has left it

    def __repr__(self) -> str:
        n = self.state['counters']['n_step']
        n_epoch = '?' if self.n_epoch == sys.maxsize else self.n_epoch
        return f"Pause(epoch {self.state['at_epoch']+1} of {n_epoch}, after {n} steps)"

    def update(self, learn):
        "Take in what has been changed since, so that it is not undone"
        (lr, hypers, frozen), (old_lr, old_hypers, old_frozen) = changeable(learn), self.left
        if lr != old_lr and self.rates['lr'] is None: self.new_rates = (*self.new_rates, 'lr')
        if frozen != old_frozen: self.state |= dict(frozen=frozen, frozen_idx=learn.opt.frozen_idx)
        if len(hypers) == len(old_hypers): self.state['hypers'] = [
            {**then, **{k: v for k, v in now.items() if old.get(k) != v}}
            for then, now, old in zip(self.state['hypers'], hypers, old_hypers)]


def changeable(
    learn: Any,   # the Learner, between fits
) -> tuple:
    "Its learning rate, the optimizer's hyper-parameters, and what is frozen"
    hypers = [dict(h) for h in learn.opt.hypers] if learn.opt else []
    return repr(learn.lr), hypers, [k for k, p in named_params(learn.model, learn.loss_func) if not p.requires_grad]


def pause(
    learn: Any,   # the Learner, at a save point of a fit
) -> Pause:
    "What `learn.resume()` needs"
    if isinstance(getattr(learn.dl, 'dl', None), Iterator): learn.dl.hold()  # it cannot be begun again
    return Pause(snapshot(learn), list(learn.cbs), dict(learn._rates), learn.n_epoch, learn.n_steps)
