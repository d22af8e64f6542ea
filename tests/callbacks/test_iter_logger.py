"""IterLogger: lines and rows by steps, with the loss over a true window; DebugInfo: magnitudes by layer."""
import math
from contextlib import suppress

import pytest
import torch
from pandas import Series
from torch import nn

from learner.callback import Callback
from learner.callbacks.checkpoint import Checkpoint
from learner.callbacks.iter_log import DebugInfo, IterLogger
from learner.callbacks.schedule import ParamScheduler
from learner.callbacks.training import GradientAccumulation, GradientClip
from learner.callbacks.validate_every import ValidateEvery
from learner.events import CancelEpochException, CancelFitException, CancelTrainException
from learner.every import Every
from learner.schedules import SchedLin
from tests.helpers import raises, synth_learner
from tests.resume_helpers import AskAt, noisy_learner

timed = ['items_per_s', 'wait_ms', 'compute_ms', 'eta_s']


class Falls(Callback):
    "A loss that begins at 1e8, and falls to some 1e-4"
    def after_loss(self): self.learn.loss = torch.tensor(1e8*10**(-12*min(1., self.learn.n_step/30)))


def rows(learn): return learn.recorder.iters_table.drop(columns=timed)


# ---- IterLogger

@pytest.mark.parametrize('window', [1, 3, 20, 100])
@pytest.mark.parametrize('every', [1, 7, '5it'])
def test_a_true_window(window, every):
    "The loss is the mean over exactly the last steps, without drift after a huge first loss"
    learn = synth_learner(Falls, n=10)

    learn.fit_iters(40, cbs=IterLogger(every, window))

    raw, table = learn.recorder.raw_losses, learn.recorder.iters_table
    expected = [math.fsum(now := raw[max(0, n-window):n])/len(now) for n in table.step]
    assert table.loss.tolist() == pytest.approx(expected, rel=1e-12) and len(table) == math.ceil(40/int(str(every)[0]))


def test_a_row():
    "The rate is the one that the step was made with; epochs, steps and fits are counted on"
    learn = synth_learner(n=5)
    for _ in range(2): learn.fit(2, cbs=[IterLogger(3), ParamScheduler({'lr': SchedLin(1e-3, 0.)})])

    table = learn.recorder.iters_table

    assert table.step.tolist() == [3, 6, 9, 10, 12, 15, 18, 20] and table.fit.tolist() == [0]*4 + [1]*4
    assert table.epoch.tolist() == [0, 1, 1, 1, 0, 0, 1, 1]
    assert table.lr.tolist()[:4] == [learn.recorder.lrs[i] for i in (2, 5, 8, 9)]
    assert (table[timed[:3]] > 0).all(axis=None) and (table.eta_s >= 0).all()


@pytest.mark.parametrize('every, steps', [('20it', [15]), (Every('20it', last=False), []), (5, [5, 10, 15])], ids=str)
def test_the_last_line(every, steps):
    "What is left at the end of a fit has a line too, unless that is not wanted; of nothing there is none"
    learn = synth_learner(n=5)

    learn.fit(3, cbs=IterLogger(every))

    assert learn.recorder.iters_table.get('step', Series()).tolist() == steps


@pytest.mark.parametrize('end, steps', [(CancelFitException, [3, 5]), (KeyError, [3])])
def test_the_last_line_of_a_fit_that_ends_early(end, steps):
    "One that a callback ends has it, one that an error ends has not"
    learn = synth_learner(n=5)

    with suppress(KeyError): learn.fit(3, cbs=[IterLogger(3), Callback(after_epoch=raises(end))])

    assert learn.recorder.iters_table.step.tolist() == steps


@pytest.mark.parametrize('end', [CancelFitException, CancelEpochException, CancelTrainException])
@pytest.mark.parametrize('every, steps', [(3, [3, 4]), (2, [2, 4]), ('9it', [4])])
def test_the_last_step_is_ended_by_another(end, every, steps):
    "A callback that comes first and ends the training after a step takes nothing away: its line is there, as its loss"
    stop = Callback(after_batch=raises(end, nth=4))
    stop.order = 1000  # the Recorder has the loss, and the logger is yet to come
    learn = synth_learner([IterLogger(every, 2), stop], n=5, n_valid=0)

    learn.fit(1)

    table, raw = learn.recorder.iters_table, learn.recorder.raw_losses
    assert table.step.tolist() == steps and table.loss.iloc[-1] == pytest.approx(math.fsum(raw[2:4])/2)


def test_a_batch_without_step_that_ends_its_epoch():
    "Its loss is in no step of the next epoch"
    learn = synth_learner([IterLogger(1, 1), Callback(after_loss=raises(CancelEpochException, nth=3))], n=3, n_valid=0)

    learn.fit(2)

    table, raw = learn.recorder.iters_table, learn.recorder.raw_losses
    assert table.step.tolist() == [1, 2, 3, 4, 5] and table.loss.tolist()[2:] == pytest.approx(raw[-3:])


def test_the_last_line_of_a_fit_by_steps():
    "A fit that is made in pieces has it once, at its end"
    learn = synth_learner([IterLogger(2)], n=5)

    for _ in range(4): learn.step(1, n_epoch=1)
    assert learn.recorder.iters_table.step.tolist() == [2, 4]
    learn.step(1, n_epoch=1)

    assert learn.recorder.iters_table.step.tolist() == [2, 4, 5]


def test_with_accumulation():
    "A step's loss is the mean of its batches'"
    learn = synth_learner(n=6)

    learn.fit(1, cbs=[GradientAccumulation(2, 'batches'), IterLogger(1, 2)])

    raw = learn.recorder.raw_losses
    means = [(a+b)/2 for a, b in zip(raw[::2], raw[1::2])]
    assert learn.recorder.iters_table.loss.tolist() == pytest.approx([means[0], sum(means[:2])/2, sum(means[1:])/2])


def test_without_length():
    "Where nobody knows how many steps there are, neither does the line; `fit_iters` knows"
    batches = synth_learner(n=4).dls.train.dl
    class Unsized:
        def __iter__(self): return iter(batches)
    learn = synth_learner(dls=(Unsized(), None))

    learn.fit(1, cbs=IterLogger(2))
    learn.fit_iters(8, cbs=IterLogger(2))

    assert learn.recorder.iters_table.eta_s.isna().tolist() == [True]*2 + [False]*4
    assert learn.recorder.iters_table.eta_s.iloc[-1] == 0


def test_lines(capsys, monkeypatch):
    "A line for each row, between those of the table"
    monkeypatch.setenv('LEARNER_DISPLAY', 'log')
    learn = synth_learner(n=4, default_cbs=True)

    learn.fit(1, cbs=[IterLogger(2), ValidateEvery('2it', first=False)])

    lines = capsys.readouterr().out.splitlines()
    assert [line.split(':')[0] for line in lines if 'items/s' in line] == ['step 2', 'step 4']
    assert lines[0].startswith('step 2: loss ') and lines[0].endswith(' left') and lines[2].split()[1] == '2'


def test_the_device_is_waited_for_once_a_line(monkeypatch):
    "No number is read but for a line, and then all at once"
    reads = []
    learn = synth_learner(n=20, default_cbs=False)
    learn.add_cb(type(synth_learner().recorder)())
    real = {name: getattr(torch.Tensor, name) for name in ('item', 'tolist', '__float__', '__bool__', 'cpu')}
    def note(name): return lambda t, *args: (reads.append(learn.n_step), real[name](t, *args))[1]
    def begin(cb):
        for name in real: monkeypatch.setattr(torch.Tensor, name, note(name))

    learn.fit(1, cbs=[IterLogger(5, 7), Callback(before_train=begin, after_train=lambda cb: monkeypatch.undo())])

    assert [n for n in reads if 0 < n < 20] == [5, 10, 15]  # 0: what is looked at before the first batch


@pytest.mark.parametrize('kwargs', [dict(every=0), dict(every=1.5), dict(window=0), dict(every='2ep'), dict(every='x')])
def test_refused(kwargs):
    "What is no interval of steps or time, and no window"
    with pytest.raises((ValueError, TypeError)): IterLogger(**kwargs)


def test_needs_a_recorder():
    "There is no table without a Recorder"
    with pytest.raises(RuntimeError, match='Recorder'): synth_learner(default_cbs=False).fit(1, cbs=IterLogger())


@pytest.mark.parametrize('k', [3, 5, 9])
@pytest.mark.parametrize('elsewhere', [False, True])
def test_resumed(tmp_path, k, elsewhere):
    "The window goes on, and no row is lost or there twice"
    def cbs(): return [IterLogger(2, 4), GradientAccumulation(2, 'batches'), Checkpoint()]
    learn = noisy_learner(tmp_path/'a')
    with pytest.raises(KeyboardInterrupt): learn.fit(3, 1e-2, cbs=[*cbs(), AskAt(k)])

    if not elsewhere: learn.resume()
    else:
        learn = noisy_learner(tmp_path/'a')
        learn.fit(3, 1e-2, cbs=cbs(), resume=True)
    found = learn.state_hash()

    whole = noisy_learner(tmp_path/'b')
    whole.fit(3, 1e-2, cbs=cbs())
    assert rows(learn).equals(rows(whole)) and found == whole.state_hash()


# ---- DebugInfo

def test_magnitudes():
    "They are those of the step's batch: what a loop by hand finds"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 1))
    learn, info = synth_learner(n=5, model=model), DebugInfo('3it')
    found = {}
    def note(cb):
        if cb.learn.n_step != 2: return
        found['weight'] = [torch.cat([p.detach().flatten() for p in m.parameters()]).abs().mean() for m in model[::2]]
        found['gradient'] = [torch.cat([p.grad.flatten() for p in m.parameters()]).abs().mean() for m in model[::2]]
        with torch.no_grad(): found['activation'] = [model[0](cb.x).abs().mean(), cb.pred.abs().mean()]

    learn.fit(1, cbs=[info, Callback(before_step=note), GradientClip(1e-9)])

    assert info.layers == ['0', '2'] and info.table.batch.tolist() == [2, 2]
    assert {k: info.table[k].tolist() for k in found} == {k: pytest.approx([float(v) for v in vs])
                                                          for k, vs in found.items()}


def test_layers_and_lines(capsys, monkeypatch):
    "A line a layer; one without parameters has no number for them"
    monkeypatch.setenv('LEARNER_DISPLAY', 'log')
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    learn, info = synth_learner(n=4, model=model), DebugInfo('2it', [nn.Linear, nn.ReLU])

    learn.fit(1, cbs=info)

    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith('step')]
    assert [line.split(':')[0] for line in lines] == ['step 2, 0', 'step 2, 1', 'step 4, 0', 'step 4, 1']
    assert 'weight' in lines[0] and 'gradient' in lines[0] and 'weight' not in lines[1]
    assert info.table.weight.isna().tolist() == [False, True]*2
    assert not model[0]._forward_hooks


def test_only_where_it_is_due():
    "Hooks are on the model for the batches of these steps alone"
    learn, seen = synth_learner(n=6, model=nn.Linear(1, 1)), []
    def note(cb): seen.append(len(cb.model._forward_hooks))

    learn.fit(1, cbs=[DebugInfo('3it'), Callback(after_pred=lambda cb: note(cb) if cb.training else None)])

    assert seen == [0, 0, 1, 0, 0, 1]


@pytest.mark.parametrize('every', ['1ep', '10s', 5])
def test_only_steps(every):
    "Whether it is due has to be known before the batch"
    with pytest.raises((ValueError, TypeError)): DebugInfo(every)


def test_debug_info_is_resumed(tmp_path):
    "The record goes on"
    learn, info = noisy_learner(tmp_path), DebugInfo('2it')
    with pytest.raises(KeyboardInterrupt): learn.fit(2, 1e-2, cbs=[info, AskAt(3), Checkpoint()])
    again, new = noisy_learner(tmp_path), DebugInfo('2it')
    again.fit(2, 1e-2, cbs=[new, Checkpoint()], resume=True)

    whole, one = noisy_learner(tmp_path/'b'), DebugInfo('2it')
    whole.fit(2, 1e-2, cbs=one)

    assert new.table.equals(one.table)
