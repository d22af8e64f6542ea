"""What a fit or an evaluation saves and puts back, so that whatever called it goes on as if nothing had happened."""
import sys
from collections.abc import Iterable
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch

from .checks import end_first_step
from .events import CancelException, LoopState, scopes
from .interrupt import deferred_interrupt, free_frames, frees_memory
from .keep import kept
from .metrics import mk_metrics
from .modes import choose_device, restore_modes, snapshot_modes
from .optim import Optimizer
from .state import changeable
from .tensors import forward_keys
from .utils import replacing, rng_state, set_rng_state, warn

__all__ = ['fit_frame', 'run_frame', 'current_opt', 'ready_opt', 'set_rates', 'made_from', 'evaluation_frame',
           'guest_frame']

loop_fields = frozenset([*vars(LoopState), 'stage', 'valid_name', 'stepped', 'n_step', 'loss_parts', '_had_targets'])


@contextmanager
def fit_frame(
    learn: Any,  # the Learner that trains
):
    "Ctrl-C between two batches only, modes afterwards as they were, and no memory held by an interrupt's traceback"
    modes, handled = snapshot_modes(*learn.modules), sys.exc_info()[1]
    others = [dl for dl in learn.dls.loaders if dl.in_use]  # by another Learner, within which this one trains
    try:
        with deferred_interrupt(learn._stop): yield
    except BaseException as e:
        if frees_memory(e): free_frames(e, handled)
        raise
    finally:
        restore_modes(modes)
        for dl in learn.dls.loaders:
            if not any(dl is o for o in others): dl.close()  # it may have been left, and a traceback may hold it
        if learn.paused and not learn.paused.left: learn.paused.left = changeable(learn)


@contextmanager
def run_frame(
    learn: Any,  # the Learner
    kind: str,   # 'fit', 'validate', 'predict' or 'lr_find'
):
    """A run: its kind, its device, and who acts at which event

    Raises: RuntimeError from a cancel that nothing could catch, saying who raised it and which scope it would end."""
    device = choose_device(learn.dls.device, learn.model)
    with replacing(learn, run_kind=kind, device=device, _takes=forward_keys(learn.model)):
        learn._resolve()
        try: yield
        except CancelException as e:
            if learn._scope and learn._scope[1]: raise  # for a scope of the fit around this evaluation
            scope = next(s for s, ex in scopes.items() if isinstance(e, ex))
            raise RuntimeError(f"{type(e).__name__}, raised by {e.origin or 'the model or the loop'}: no `{scope}` "
                               "scope is open there that it could end") from e


def made_from(
    learn: Any,          # the Learner
) -> dict[str, Any]:     # by name
    "What an optimizer depends on, beside the model's parameters"
    made = {k: getattr(learn, k) for k in ('opt_func', 'splitter', 'wd_bn_bias', 'train_bn')}
    return {**made, 'param_opts': deepcopy(learn.param_opts)}


def set_rates(
    learn: Any,       # the Learner
    lr: Any = None,   # learning rate; None: the current fit's, else the Learner's
) -> Any:             # `lr`
    "Set learning rate and decay of the optimizer: the current fit's, else the Learner's, else for the decay its own"
    opt, wd = learn.opt, learn._rates.get('wd')
    opt.set_hyper('lr', learn.lr if lr is None else lr)
    if learn.wd is not None: opt.set_hyper('wd', learn.wd)
    opt.own_wd = [h.get('wd') for h in opt.hypers]
    if wd is not None: opt.set_hyper('wd', wd)
    return lr


def current_opt(
    learn: Any,           # the Learner
    reset: bool = False,  # a new one in any case
) -> Optimizer:
    """The optimizer that a fit would use now: the present one, or a new one if what it depends on has changed

    Raises: TypeError if `learn.opt` was set to something else."""
    opt = learn.opt
    if not isinstance(opt, Optimizer | None): raise TypeError(
        f"`learn.opt` is a `{type(opt).__name__}`: give its class, or a partial of it, as `opt_func`")
    old, now = (opt and opt.made_from) or {}, made_from(learn)
    changed = [k for k in old if old[k] != now[k]]
    if opt and old and {p for m in learn.modules for p in m.parameters()} != opt.names.keys(): changed.append('model')
    if changed and not reset: warn(f"the optimizer is made anew, since `{'`, `'.join(changed)}` changed")
    return learn.create_opt() if opt is None or reset or changed else opt


@contextmanager
def ready_opt(
    learn: Any,   # the Learner that trains
    lr: Any,      # learning rate; None: the Learner's
    wd: Any,      # weight decay for this fit only; None: the Learner's
    reset: bool,  # a new optimizer in any case
):
    "The optimizer for a fit, with the rates of this fit"
    with replacing(learn, _rates=dict(lr=lr, wd=wd)):
        current_opt(learn, reset)
        set_rates(learn)
        learn.opt.zero_grad()
        try: yield
        finally:
            end_first_step(learn.opt)
            if wd is not None: learn.opt.set_hyper('wd', learn.opt.own_wd)


@contextmanager
def evaluation_frame(
    learn: Any,                                # the Learner that evaluates
    generators: Iterable[torch.Generator] = (),  # the loader's own ones, and its samplers'
):
    "Without autograd, and with loop state, modes and all random streams afterwards as they were"
    state = {k: v for k, v in vars(learn).items() if k in loop_fields}
    modes, rng, own = snapshot_modes(*learn.modules), rng_state(), [(g, g.get_state()) for g in generators]
    try:
        with torch.no_grad(): yield
    finally:
        for k in loop_fields & vars(learn).keys() - state.keys(): delattr(learn, k)
        vars(learn).update(state)
        restore_modes(modes)
        set_rng_state(rng)
        for g, s in own: g.set_state(s)


@contextmanager
def guest_frame(
    learn: Any,           # the Learner that evaluates
    metrics: Any = None,  # what is measured; None: the Learner's own metrics
):
    "Also metrics, hyper-parameters and the declared state of callbacks are afterwards as they were"
    states = [(vars(cb), k) for cb in learn.cbs for k in cb.state if k in vars(cb)]
    values = [(attrs, k, attrs[k]) for attrs, k in states]
    hypers = [dict(h) for h in learn.opt.hypers] if learn.opt else []
    work, busy = learn._at_work, set()
    while work: busy, work = busy | {(id(work[0]), work[1])}, work[2]
    measured = learn.metrics if metrics is None else mk_metrics(metrics)
    now = dict(_metrics=[_copy_metric(m, learn) for m in measured], _scope=['frame', learn._scope, []],
               _at_work=learn._at_work, _busy=frozenset(busy), final_record=None)
    try:
        with evaluation_frame(learn), replacing(learn, **now), kept(*[v for *_, v in values], apart=(learn,)): yield
    finally:
        for attrs, k, v in values: attrs[k] = v
        for h, old in zip(learn.opt.hypers if learn.opt else [], hypers):
            if dict(h) != old: h.update(old)
        learn._resolve()  # the handlers of whatever goes on


def _copy_metric(metric, learn):  # of what it has accumulated: the functions it calls, and their owners, are shared
    shared = [learn, *learn.cbs, *learn.modules, getattr(metric, 'func', None), getattr(metric, 'sums', None)]
    try: return deepcopy(metric, {id(o): o for o in shared})
    except Exception as e:
        e.add_note(f"an evaluation works with a copy of the metric `{metric.name}`, and it cannot be copied")
        raise
