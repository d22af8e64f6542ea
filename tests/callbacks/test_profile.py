"""Where the time goes: parts of a batch, torch's profiler, `learn.trace`."""
import json

import pytest
import torch

from learner import Callback, CSVLogger, GradientClip
from learner.callbacks.profile import ProfilerCallback, Timer, loop_parts
from learner.callbacks import profile
from tests.helpers import raises, synth_learner, weights

own = {*loop_parts, 'one_batch', '_resolve'}


@pytest.fixture
def clock(monkeypatch):
    "A clock that only `tick` puts on"
    now = [0.]
    monkeypatch.setattr(profile, 'perf_counter', lambda: now[0])
    def tick(seconds): now[0] += seconds
    return tick

class Ticking(torch.nn.Module):
    "Its forward takes 3 s, its backward 5"
    def __init__(self, tick):
        super().__init__()
        self.w, self.tick = torch.nn.Parameter(torch.ones(1)), tick

    def forward(self, x):
        self.tick(3)
        y = x*self.w
        if y.requires_grad: y.register_hook(lambda g: self.tick(5))
        return y

class Slow:
    "Each batch is waited for 2 s"
    def __init__(self, tick): self.tick = tick
    def __len__(self): return 4
    def __iter__(self):
        for _ in range(4):
            self.tick(2)
            yield torch.randn(8, 1), torch.randn(8, 1)

def timed(tick, cbs, **kwargs):
    late = Callback(after_loss=lambda cb: tick(7))
    return synth_learner([*cbs, late], dls=(Slow(tick), None), model=Ticking(tick), **kwargs)


def test_a_timer_knows_the_parts_of_a_batch(clock):
    "Milliseconds and shares; what callbacks take is other; items a second include the waiting"
    learn = timed(clock, [Timer])

    learn.fit(2)

    table = learn.timer.table.set_index('part')
    assert table.ms.to_dict() == dict(wait=2000, forward=3000, loss=0, backward=5000, step=0, other=7000)
    assert table.share.sum() == pytest.approx(1) and table.share.wait == 2/17
    assert learn.timer.throughput == pytest.approx(8/17) and learn.timer.memory_mib > 1

def test_a_timer_changes_nothing_and_goes_away():
    "Also after an error; evaluations within the fit do not count"
    plain, timer = synth_learner(n=3), synth_learner([Timer, Callback(after_batch=lambda cb: cb.learn.validate())], n=3)
    plain.fit(2)
    timer.fit(2)

    assert all(map(torch.equal, weights(plain), weights(timer))) and timer.timer.clock is None
    assert not own & {*vars(timer)} and timer.timer.n_batches == 6
    timer.add_cb(Callback(before_step=raises(ValueError)))
    with pytest.raises(ValueError): timer.fit(1)
    assert not own & {*vars(timer)}

def test_each_handler_is_traced(clock):
    "Each event and callback, each part of the loop, microseconds and calls a batch, in the order of the loop"
    learn = timed(clock, [GradientClip], path='.')

    table = learn.trace(n_batches=3)

    rows = {(what, cb): us for what, cb, us, _, _ in table.itertuples(index=False)}
    assert rows[('wait', '')] == 2e6 and rows[('forward', '')] == 3e6 and rows[('backward', '')] == 5e6
    assert rows[('after_loss', 'Callback')] == 7e6 and rows[('before_step', 'GradientClip')] == 0
    assert table.share.sum() == pytest.approx(1) and (table.calls == 1).all()
    order = ['wait', 'forward', 'loss', 'after_loss', 'backward', 'step', 'the loop itself']
    assert [w for w in table.what if w in order] == order

def test_a_trace_leaves_no_trace(tmp_path):
    "Nor a file, nor a stand-in for a method"
    learn = synth_learner(CSVLogger, n=4, path=tmp_path)
    learn.fit(1)
    before, files = learn.state_hash(), (tmp_path/'history.csv').read_bytes()

    learn.trace('fit_one_cycle', 2, 1e-2, plot=tmp_path/'trace.png')

    assert learn.state_hash() == before and (tmp_path/'history.csv').read_bytes() == files
    assert not own & {*vars(learn)} and (tmp_path/'trace.png').stat().st_size > 1000

def test_a_profile_is_written(tmp_path, capfd):
    "Some batches after others, in a file that trace viewers open"
    learn = synth_learner(ProfilerCallback(wait=1, warmup=1, active=2), n=6, path=tmp_path)

    learn.fit(1)

    events = json.loads((tmp_path/'trace.json').read_text())['traceEvents']
    assert sum(e.get('name') == 'aten::mse_loss' for e in events) == 2
    assert learn.profiler.trace_path == tmp_path/'trace.json' and 'for chrome://tracing' in capfd.readouterr().out

def test_a_short_or_failing_fit_ends_its_profile(tmp_path, capfd):
    "Fewer batches than it was to record, and an error: the profiler is stopped"
    learn = synth_learner(ProfilerCallback(), n=2, path=tmp_path)
    learn.fit(1)
    learn.add_cb(Callback(after_loss=raises(ValueError)))
    with pytest.raises(ValueError): learn.fit(1)

    assert not torch.autograd._profiler_enabled()


def test_a_profiler_that_torch_refuses():
    "An error of torch's profiler is the one that is raised"
    learn = synth_learner(n=5)

    with pytest.raises(TypeError, match='nonsense') as e: learn.fit(1, cbs=ProfilerCallback(nonsense=1))

    assert len(e.value.__notes__) == 1
