"""A step goes past torch's wrapper only while nobody listens there: hooks, schedulers and profilers see every step."""
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from learner.optim import Adam, make_opt


def made(opt_func=torch.optim.SGD):
    model = nn.Linear(2, 1)
    opt = make_opt(opt_func, list(model.parameters()), model, .1)
    for p in model.parameters(): p.grad = torch.ones_like(p)
    return model, opt


@contextmanager
def through_torch():  # how often torch's wrapped step was run
    seen, wrapped = [], torch.optim.SGD.step
    def counting(self, *args, **kwargs):
        seen.append(1)
        return wrapped(self, *args, **kwargs)
    counting.hooked, counting.__wrapped__ = True, wrapped.__wrapped__
    torch.optim.SGD.step = counting
    try: yield seen
    finally: torch.optim.SGD.step = wrapped


@pytest.mark.parametrize('opt_func', [torch.optim.SGD, torch.optim.AdamW, Adam])
def test_the_short_way_is_the_same_step(opt_func):
    "A step without torch's wrapper changes the parameters as one with it does"
    torch.manual_seed(0)
    a, opt_a = made(opt_func)
    torch.manual_seed(0)
    b, opt_b = made(opt_func)

    for _ in range(3): opt_a.step()
    for _ in range(3): opt_b.opt.step()

    assert all(p.equal(q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.weight, made(opt_func)[0].weight)


def test_the_short_way_is_taken():
    "While nobody listens, torch's wrapper is left out"
    _, opt = made()

    with through_torch() as seen: opt.step()

    assert seen == []


@pytest.mark.parametrize('listen', [
    lambda opt: opt.register_step_pre_hook(lambda *args: None),
                                    lambda opt: opt.register_step_post_hook(lambda *args: None)])
def test_hooks_are_called(listen):
    "With a hook on the optimizer, the step is torch's own"
    _, opt = made()
    handle = listen(opt.opt)

    with through_torch() as seen: opt.step()
    handle.remove()
    with through_torch() as seen_after: opt.step()

    assert (seen, seen_after) == ([1], [])


@pytest.mark.parametrize('register', [torch_optimizer.register_optimizer_step_pre_hook,
                                      torch_optimizer.register_optimizer_step_post_hook])
def test_global_hooks_are_called(register):
    "A hook on all optimizers is called too"
    calls = []
    _, opt = made()

    handle = register(lambda *args: calls.append(1))
    opt.step()
    handle.remove()
    opt.step()

    assert calls == [1]


def test_a_patched_step_is_called():
    "A step that somebody replaced on the instance, as torch's schedulers do, is called"
    _, opt = made()
    scheduler = torch.optim.lr_scheduler.StepLR(opt.opt, 1, .5)

    opt.step()
    scheduler.step()  # warns if it has not seen the step

    assert opt.hypers[0]['lr'] == .05


def test_profilers_see_the_step():
    "Under a profiler, the step has torch's own mark"
    _, opt = made()

    with torch.autograd.profiler.profile() as prof: opt.step()

    assert any('Optimizer.step#SGD.step' in e.name for e in prof.function_events)
