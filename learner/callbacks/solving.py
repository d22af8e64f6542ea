"""What a Solver (solver.py) is made of: its place in the loop, tests by batches, and Caffe's clipping."""
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice, repeat
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from ..callback import Callback
from ..events import CancelBackwardException
from ..measure import AvgMetric

__all__ = ['ClipSum', 'Outputs', 'TestBatches', 'listening', 'Loop']


class ClipSum(Callback):
    "Bounds the norm of the sum of gradients over `iter_size` batches, whose mean is there; order: GradientClip's"
    order = 11
    run_in = {'fit'}
    run_valid = False
    def __init__(self, limit): self.limit = limit

    def before_step(self):
        grads = [p.grad for p in self.learn.opt.all_params() if p.grad is not None]
        windows = getattr(self.learn, 'gradient_accumulation', None)
        norm = get_total_norm(grads)*(windows.count if windows else 1)
        scale = torch.where(norm > self.limit, self.limit/norm, 1.)
        for g in grads: g.mul_(scale.to(g.device))


class Outputs(Callback):
    "Adds up what each batch of a test gives; order: after what changes predictions and losses"
    order = 20
    run_in = {'validate'}
    def __init__(self, with_loss): self.with_loss, self.sums, self.n = with_loss, {}, 0

    def after_batch(self):
        pred, found = self.learn.pred, {}
        named = dict(pred) if isinstance(pred, dict) else {'output': pred}
        found |= {k: v for k, v in named.items() if isinstance(v, Tensor) and v.is_floating_point()}
        found |= {m.name: m.func(pred, *self.learn.yb) for m in self.learn.metrics if isinstance(m, AvgMetric)}
        if self.with_loss: found['loss'] = self.learn.loss
        self.n += 1
        for k, v in found.items(): self.sums.setdefault(k, []).append(torch.as_tensor(v).detach())

    def means(self) -> dict[str, Any]:
        "Elementwise over batches; without what differs in shape from batch to batch"
        alike = {k: vs for k, vs in self.sums.items() if len(vs) == self.n and len({v.shape for v in vs}) == 1}
        means = {k: torch.stack([v.double() for v in vs]).mean(0) for k, vs in alike.items()}
        return {k: v.item() if not v.ndim else v for k, v in means.items()}


class TestBatches:
    "So many batches of a loader, from its start, and around if it has fewer; before each, requests are looked for"
    def __init__(self, solver, dl, n): self.solver, self.dl, self.n, self.done = solver, dl, n, 0
    def __len__(self): return self.n

    def __iter__(self) -> Iterator:
        for b in islice(chain.from_iterable(repeat(self.dl)), self.n):
            if self._is_stopped(): return
            self.done = self.solver.test_batches = self.done+1
            yield b

    def _is_stopped(self):  # after all that is asked for has been done
        solver = self.solver
        while actions := solver.requested():
            if 'stop' in actions: solver.stopped = True
            if 'snapshot' in actions and solver.saved_at != solver.iter: solver.snapshot()
            else: break  # what is asked for again and again is done once
        return solver.stopped


@contextmanager
def listening(
    learn: Any,  # the Learner: a SIGHUP asks it for 'hangup'
):
    "Hear SIGHUP within the block, in the main thread and where there is such a signal; Ctrl-C is a fit's own"
    n = getattr(signal, 'SIGHUP', None)
    if n is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    old = signal.signal(n, lambda *_: learn._stop.ask('hangup'))
    try: yield
    finally: signal.signal(n, old)


class Loop(Callback):
    "What a Solver does in a fit; order: after accumulation (6), before what clips (11)"
    name = 'solver_loop'  # pyright: ignore[reportAssignmentType]
    order = 7
    run_in = {'fit'}
    run_valid = False

    def __init__(self, solver):
        self.solver, self.type, self.count = solver, solver.param.type, 0
        self.losses: list = []   # of the last iterations, one each
        self.micro: list = []    # of the batches of the present one
        self.is_on = False
        self.only_forward = False  # no update: a last look at the loss

    def state_dict(self) -> dict[str, Any]:
        "Iterations, the solver's type and the losses that the next line is the mean of"
        return dict(iter=self.count, type=self.type, losses=[float(v) for v in self.losses],
                    settings=self.solver.param.settings)

    def load_state_dict(self, state: dict[str, Any]) -> None:  # what `state_dict` gave
        "Go on from there"
        self.count, self.losses = state['iter'], list(state['losses'])

    def before_fit(self):
        if self.is_on: vars(self.learn)['_step'] = self.solver.update
    def cleanup_fit(self): vars(self.learn).pop('_step', None)
    def before_train(self):
        if self.is_on: self.learn._stop.ask('between')  # the first batch waits for a test
        self.micro = []

    def before_batch(self):
        if self.is_on and not self.learn.keep_grads and not self.micro:
            self.learn.opt.set_hyper('lr', self.solver.lr_at(self.count))
            if not self.only_forward: self.solver.call('on_start')

    def after_loss(self):
        if self.is_on: self.micro.append(self.learn.loss)

    def before_backward(self):
        if not self.only_forward or not self.is_on: return
        self._take_loss()
        self.solver.show(final=True)
        self.learn.dl.hold()
        self.learn._stop.ask('pause')
        raise CancelBackwardException

    def _take_loss(self):
        self.losses.append(torch.stack(self.micro).mean())
        self.micro = []
        del self.losses[:-self.solver.param.average_loss]

    def before_step(self):  # of an update
        if not self.is_on: return
        self._take_loss()
        p = self.solver.param
        if p.display and self.count % p.display == 0: self.solver.show()
        self.solver.call('on_gradients_ready')

    def after_batch(self):
        if not self.is_on or not self.learn.stepped: return
        self.solver.actions |= self.solver.requested()
        self.learn._stop.ask('between')

    def save_point(self):
        if self.is_on: self.solver.between(self.learn.asked)
