"""Solver where things go wrong, or twice: snapshots stay good, requests are obeyed, nothing is left behind."""
import os
import signal

import pytest
import torch
from torch import nn

from learner import (Callback, CancelFitException, EarlyStoppingCallback, GradientAccumulation, IterLogger, Learner,
                     ValidateEvery)
from learner.optim import SGD
from learner.solver import Solver
from tests.helpers import synth_learner
from tests.test_solver import digits_solver, weights


def test_a_good_snapshot_is_not_spoilt(tmp_path):
    "By a solve that is over at once, or a second snapshot; what it holds can be gone on with"
    digits_solver(tmp_path).solve()
    file = tmp_path/'solver_iter_20.ckpt'
    data = file.read_bytes()
    other = digits_solver(tmp_path)
    other.solve(resume=file)
    other.restore('solver_iter_20.ckpt')
    other.snapshot()
    assert file.read_bytes() == data

    other.step(2)

    assert other.iter == 22

def test_where_there_is_nothing_to_save(tmp_path):
    "Before the first iteration, and in the midst of one, it is an error"
    solver = digits_solver(tmp_path)
    with pytest.raises(RuntimeError, match='no iteration yet'): solver.snapshot()
    for event in 'on_start', 'on_gradients_ready':
        solver = digits_solver(tmp_path)
        solver.add_callback(**{event: solver.snapshot})
        with pytest.raises(RuntimeError, match="let `action_request` return 'snapshot'"): solver.step(1)
        assert not solver.loop.is_on

def test_steps_go_on_after_a_stop(tmp_path):
    "Which holds for the call that it came in; tests go on too"
    solver = digits_solver(tmp_path, test_interval=0, test_iter=[])
    solver.action_request = lambda: 'stop' if solver.iter == 3 else None

    for _ in range(2): solver.step(10)

    assert solver.iter == 13

@pytest.mark.parametrize('asks', [lambda s: 'snapshot' if s.iter == 7 else None, lambda s: 'stop'])
def test_what_is_asked_for_again_and_again_is_done_once(tmp_path, asks):
    "Before the batches of a test too"
    solver = digits_solver(tmp_path)
    solver.action_request = lambda: asks(solver)

    solver.solve()

    assert solver.iter == (20 if not solver.stopped else 0)

def test_a_hangup_and_a_stop_in_one_iteration(tmp_path):
    "Are both obeyed"
    solver, n = digits_solver(tmp_path, test_interval=0, test_iter=[], snapshot=0), [0]
    def ask(cb):
        n[0] += 1
        if n[0] in (3, 4): os.kill(os.getpid(), signal.SIGHUP if n[0] == 3 else signal.SIGINT)
    solver.learn.add_cb(Callback(after_loss=ask))

    solver.step(9)

    assert solver.stopped and solver.iter == 2 and (tmp_path/'solver_iter_2.ckpt').exists()

@pytest.mark.parametrize('sig, stopped', [('SIGHUP', False), ('SIGINT', True)])
def test_signals_in_the_last_test(tmp_path, sig, stopped):
    "Do what they do before"
    from learner import accuracy
    solver, asked = digits_solver(tmp_path, max_iter=7, display=0), []
    def during(pred, targ):
        if solver.iter == 7 and not asked: asked.append(os.kill(os.getpid(), getattr(signal, sig)))
        return accuracy(pred, targ)
    solver.learn.metrics = during

    solver.solve()

    assert asked and solver.stopped == stopped and solver.iter == 7

@pytest.mark.parametrize('fields', [dict(momentum=.5), dict(weight_decay=.1), dict(lr_policy='fixed'),
                                    dict(clip_gradients=-1.), dict(iter_size=1)])
def test_other_settings_are_refused(tmp_path, fields):
    "By name, when a snapshot is restored; another rate may be set"
    file = digits_solver(tmp_path)
    file.step(2)
    path = file.snapshot()

    with pytest.raises(ValueError, match=f'made with other settings: .*`{[*fields][0]}`'):
        digits_solver(tmp_path, **fields).restore(path)
    other = digits_solver(tmp_path, base_lr=.01)
    other.restore(path)
    other.step(1)

    assert other.learn.opt.hypers[0]['lr'] == pytest.approx(other.lr_at(2))

def test_a_second_solver_is_refused(tmp_path):
    "And one that could not be made leaves nothing"
    solver = digits_solver(tmp_path)
    with pytest.raises(ValueError, match='has a Solver already'):
        Solver(solver.learn, base_lr=.1, lr_policy='fixed', test_iter=[1, 1], test_interval=1)
    learn = synth_learner(n_valid=0, path=tmp_path)
    n = len(learn.cbs)
    with pytest.raises(FileNotFoundError): Solver(learn, base_lr=.1, lr_policy='fixed', weights=['none'])
    assert len(learn.cbs) == n

def test_another_fit_is_not_gone_on_with(tmp_path):
    "One that was paused before"
    solver = digits_solver(tmp_path, test_interval=0, test_iter=[])
    solver.learn.step(3, n_epoch=1)

    solver.solve()

    assert solver.iter == 20

def test_who_else_ends_it_is_told_of(tmp_path):
    "It is no stop that was asked for, and no end"
    solver = digits_solver(tmp_path, test_interval=0, test_iter=[])
    def end(cb):
        if cb.learn.n_step == 3: raise CancelFitException
    solver.learn.add_cb(Callback(after_batch=end))

    with pytest.warns(UserWarning, match='a callback has ended the training after 3 iterations'): solver.solve()

    assert solver.stopped

def test_trackers_are_told_that_there_are_no_rows(tmp_path):
    "Which they would act on"
    learn = synth_learner(EarlyStoppingCallback(), path=tmp_path)

    with pytest.warns(UserWarning, match='EarlyStoppingCallback acts on rows, and there are none'):
        Solver(learn, base_lr=.1, lr_policy='fixed')

@pytest.mark.parametrize('call, error, match', [
    (lambda s: s.test(2), ValueError, 'no test net 2, but 2'),
    (lambda s: s.test('one'), ValueError, "no test net 'one'"),
    (lambda s: s.add_callback(3), TypeError, 'give a function'), (lambda s: s.add_callback(), TypeError, 'give a fun'),
    (lambda s: setattr(s.param, 'momentum', .5), AttributeError, '`momentum` cannot be set any more; average_loss'),
    (lambda s: setattr(s.param, 'base_lrr', .5), AttributeError, '`base_lrr` cannot be set'),
    (lambda s: Solver.from_prototxt(s.learn, 'a'), TypeError, 'give the text first')])
def test_odd_calls(tmp_path, call, error, match):
    "Are refused by name"
    with pytest.raises(error, match=match): call(digits_solver(tmp_path))

def test_a_request_that_means_nothing(tmp_path):
    "Is an error"
    solver = digits_solver(tmp_path)
    solver.action_request = lambda: 'quit'
    with pytest.raises(ValueError, match="`action_request` gave 'quit'"): solver.step(1)

def test_no_step_within_a_step(tmp_path):
    "It would begin another fit in the midst of this one"
    solver = digits_solver(tmp_path)
    solver.add_callback(on_start=lambda: solver.step(1))
    with pytest.raises(RuntimeError, match='it is running'): solver.step(1)

def test_debug_info_is_of_the_iterations_that_are_shown(tmp_path):
    "0, and each so many more"
    solver = digits_solver(tmp_path, debug_info=True, display=3, iter_size=1)

    solver.step(7)

    assert solver.learn.debug_info.table.batch.unique().tolist() == [0, 3, 6]
    with pytest.raises(ValueError, match='`debug_info` is shown with each line'):
        digits_solver(tmp_path, debug_info=True, display=0)


# ---- the velocity

@pytest.mark.parametrize('mom, gamma', [(0., .9), (.9, .5), (.9, .1)])
def test_a_rate_that_falls_fast(mom, gamma):
    "Leaves finite weights, and those of the rule in float64"
    opt = SGD([p := nn.Parameter(torch.tensor([3.]))], lr=.1, mom=mom, decouple_wd=False, lr_in_velocity=True)
    w, v = 3., 0.
    for i in range(400):
        opt.param_groups[0]['lr'] = lr = .1*gamma**i
        p.grad = 2*(p.detach()-1)
        v = mom*v+lr*2*(w-1)
        w -= v
        opt.step()

    assert p.item() == pytest.approx(w, abs=1e-5) and p.grad is not None

def test_a_group_without_gradients():
    "Stays, whatever the rates are"
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    opt = SGD([[a], [b]], lr=.1, mom=.9, lr_in_velocity=True)
    for lr in .1, .01:
        for g in opt.param_groups: g['lr'] = lr
        b.grad = torch.ones(1)
        opt.step()

    assert a.item() == 1 and b.item() == pytest.approx(1-.1-.1)

def test_rows_by_steps_have_names_by_steps(tmp_path):
    "Of what is saved, and of the place that is told"
    from learner import SaveModelCallback
    values = iter([3., 1., 2., 4., 5., 6.])
    def score(pred, targ): return next(values)
    learn = synth_learner([SaveModelCallback('score', 'min', n_best=2)], n=20, metrics=score, path=tmp_path)

    learn.fit_iters(10, cbs=ValidateEvery('2it', first=False))

    assert [name for _, name in learn.save_model.kept] == ['model_4', 'model_6']
    assert learn.save_model.best_at == 'step 4' and isinstance(learn, Learner) and weights


# ---- what an epoch's end leaves

class Unsized:
    "Batches whose number nobody knows"
    def __init__(self, dl): self.dl = dl
    def __iter__(self): return iter(self.dl)

def test_updates_of_what_is_left_count(tmp_path):
    "In sets of unknown length too"
    solver = digits_solver(tmp_path, test_interval=0, test_iter=[], iter_size=3)
    solver.learn.dls.train.dl = Unsized([*solver.learn.dls.train.dl])  # five batches: updates of three and of two

    for _ in range(2): solver.step(4)

    assert solver.iter == solver.learn.n_step == 8

def test_rows_after_what_is_left(tmp_path):
    "Of ValidateEvery"
    x = torch.randn(10, 8, 1)
    learn = synth_learner([GradientAccumulation(3, 'batches')], dls=(Unsized([*zip(x, x)]), [(x[0], x[0])]))

    learn.fit_iters(12, cbs=ValidateEvery('4it'))

    assert [int(row['step']) for row in learn.recorder.values] == [0, 4, 8, 12]

def test_the_sum_of_what_is_left_is_clipped(tmp_path):
    "By as many batches as there are"
    class Line(nn.Module):
        def __init__(self): super().__init__(); self.w = nn.Parameter(torch.zeros(()))
        def forward(self, x): return self.w*x
    dls = [(torch.full((2,), 4.), torch.zeros(2))]*5, None
    learn = Learner(dls, Line(), lambda pred, y: pred.mean(), path=tmp_path, default_cbs=dict(progress=None))
    solver = Solver(learn, base_lr=1., lr_policy='fixed', iter_size=4, clip_gradients=2.)

    solver.step(2)

    assert learn.model.w.item() == pytest.approx(-2/4-2)  # 16 clipped to 2, a mean over four; 4 clipped to 2

def test_the_window_of_iter_logger_ends_with_the_epoch(tmp_path):
    "What is dropped is no part of the next step"
    x = torch.arange(1., 6)[:, None, None]
    class Echo(nn.Module):
        def __init__(self): super().__init__(); self.w = nn.Parameter(torch.zeros(()))
        def forward(self, x): return x+0*self.w
    learn = synth_learner(GradientAccumulation(3, 'batches', drop_last=True), model=Echo(),
                          dls=([*zip(x, x)], None), loss_func=lambda p, y: p.mean())

    learn.fit_iters(2, cbs=IterLogger(1, 1))

    assert learn.recorder.iters_table.loss.tolist() == [2., 2.]
