"""Where the time goes: Timer, ProfilerCallback (torch's profiler), and `learn.trace()`, by event and callback."""
import math
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from fastcore.basics import patch

from ..callback import Callback
from ..display import say
from ..events import events_of
from ..learner import Learner
from ..plot import plot_times, show_figure
from ..tensors import n_items
from ..utils import check_number, optional
from .control import ShortEpochCallback
from .fit_call import fit_calls
from .rehearse import rehearse

__all__ = ['Timer', 'ProfilerCallback']

loop_parts = dict(_forward='forward', _get_loss='loss', _backward='backward', _step='step')  # methods of the Learner


class Clock:
    "Times the parts of training batches, by standing in front of the methods that do them"
    def __init__(self,
        learn: Learner,
        sync: bool,      # wait for the device at the beginning and the end of each part?
    ):
        self.learn, self.seconds, self.calls = learn, {}, {}
        self.wait = sync and learn.device.type != 'cpu'
        self.ended: Any = None  # when the last batch was over; None outside of an epoch's training
        self.own = {name: vars(learn)[name] for name in (*loop_parts, 'one_batch') if name in vars(learn)}
        for name, part in loop_parts.items(): vars(learn)[name] = self.timed(getattr(learn, name), part)
        self.one_batch, vars(learn)['one_batch'] = learn.one_batch, self._batch

    def now(self) -> float:
        if self.wait: torch.accelerator.synchronize(self.learn.device)
        return perf_counter()

    def add(self, key: Any, seconds: float) -> None:
        self.seconds[key] = self.seconds.get(key, 0.)+seconds
        self.calls[key] = self.calls.get(key, 0)+1

    def timed(self, f: Callable, key: Any) -> Callable:
        "`f`, whose time counts under `key` while training"
        def call(*args):
            if not self.learn.training: return f(*args)
            start = self.now()
            try: return f(*args)
            finally: self.add(key, self.now()-start)
        return call

    def _batch(self, i, b):
        if not self.learn.training: return self.one_batch(i, b)
        start = self.now()
        if self.ended is not None: self.add('wait', start-self.ended)
        try: self.one_batch(i, b)
        finally:
            self.ended = self.now()
            self.add('batch', self.ended-start)

    def stop(self) -> None:
        "Take it out of the way"
        for name in (*loop_parts, 'one_batch'): vars(self.learn).pop(name, None)
        vars(self.learn).update(self.own)


class Timer(Callback):
    """Measures what the parts of a training batch take: waiting for it, forward, loss, backward, step, and the rest

    `learn.timer.table` has them in milliseconds a batch; `throughput` is items a second, `memory_mib` the most that was
    in use. It begins anew with each fit.
    Order: before all others, so that it measures all of the fit."""
    order = -1000
    run_in = {'fit'}
    run_valid = False
    clock: Any = None

    def __init__(self,
        sync: bool = True,  # wait for an accelerator at the end of each part; False: what the CPU waits for alone
    ):
        self.sync, self.n_items, self.n_batches = sync, 0, 0
        self.seconds: dict[str, float] = {}

    def before_fit(self):
        self.n_items = self.n_batches = 0
        self.clock = Clock(self.learn, self.sync)
        self.seconds = self.clock.seconds
        if self.device.type == 'cuda': torch.cuda.reset_peak_memory_stats(self.device)

    def before_train(self): self.clock.ended = perf_counter()

    def after_batch(self):
        self.n_batches += 1
        self.n_items += n_items(self.xb, self.yb)

    def cleanup_train(self): self.clock.ended = None

    def cleanup_fit(self):
        self.memory_mib = _peak_mib(self.device)
        self.clock.stop()
        self.clock = None

    @property
    def throughput(self) -> float:
        "Training items a second, the time between batches included; NaN before there was a batch"
        seconds = self.seconds.get('batch', 0.)+self.seconds.get('wait', 0.)
        return self.n_items/seconds if seconds else math.nan

    @property
    def table(self) -> Any:  # a pandas DataFrame
        "Milliseconds a batch and share of the time, by part; `other` is what callbacks and the loop take"
        s, n = self.seconds, max(self.n_batches, 1)
        parts = {part: s.get(part, 0.) for part in ('wait', *loop_parts.values())}
        parts['other'] = s.get('batch', 0.)-sum(v for part, v in parts.items() if part != 'wait')
        whole = sum(parts.values()) or math.nan
        rows = [(part, 1000*v/n, v/whole) for part, v in parts.items()]
        return optional('pandas', 'Timer.table').DataFrame(rows, columns=['part', 'ms', 'share'])


def _peak_mib(device) -> float:  # of the process on a CPU, since it began
    if device.type == 'cuda': return torch.cuda.max_memory_allocated(device)/2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak/2**(20 if sys.platform == 'darwin' else 10)


class ProfilerCallback(Callback):
    """Runs torch's profiler over some training batches, and writes a trace that chrome://tracing or Perfetto opens

    It skips `wait` batches, warms up for `warmup`, and records `active`. `learn.profiler.table` is torch's own table.
    Order: before all others, so that what these do is in the trace."""
    order = -999
    run_in = {'fit'}
    run_valid = False
    profiler: Any = None
    trace_path: Path|None = None  # of the trace that was written

    def __init__(self,
        wait: int = 1,      # batches that are skipped
        warmup: int = 1,    # batches that are profiled and thrown away
        active: int = 3,    # batches that are recorded
        fname: str|Path = 'trace.json',  # relative to the Learner's path
        **options: Any,     # for torch.profiler.profile: `record_shapes`, `profile_memory`, `with_stack` …
    ):
        for name, n, least in ('wait', wait, 0), ('warmup', warmup, 0), ('active', active, 1):
            check_number(f'ProfilerCallback: `{name}`', n, least, whole=True, of='batches')
        self.wait, self.warmup, self.active, self.fname, self.options = wait, warmup, active, fname, options

    def before_fit(self):
        from torch.profiler import profile, schedule
        plan = schedule(wait=self.wait, warmup=self.warmup, active=self.active, repeat=1)
        self.profiler = profile(schedule=plan, on_trace_ready=self._write, **self.options)
        self.profiler.start()

    def __getstate__(self): return {k: v for k, v in vars(self).items() if k != 'profiler'}  # torch's has no copy

    def cleanup_batch(self): self.profiler.step()

    def cleanup_fit(self):
        if self.profiler: self.profiler.stop()  # else torch has refused it

    def _write(self, profiler):
        path = Path(self.learn.path)/self.fname
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        self.trace_path = path
        say(f"ProfilerCallback: {self.active} batches are in `{path}`, for chrome://tracing")


class _Tracer(Callback):
    "Times each handler of training batches, beside the parts that a Clock knows; order: before all others"
    order = -math.inf
    run_in = {'fit'}
    run_valid = False
    n_batches = 0

    def __init__(self, sync): self.sync = sync

    def before_fit(self):
        learn, self.clock = self.learn, Clock(self.learn, self.sync)
        resolve = learn._resolve
        def timed():  # whenever the callbacks change
            resolve()
            learn._handlers = {e: tuple((cb, f if cb is self else self.clock.timed(f, (e, repr(cb)))) for cb, f in fs)
                               if e in batch_events else fs for e, fs in learn._handlers.items()}
        vars(learn)['_resolve'] = timed
        timed()

    def before_train(self): self.clock.ended = perf_counter()
    def after_batch(self): self.n_batches += 1
    def cleanup_train(self): self.clock.ended = None

    def cleanup_fit(self):
        del vars(self.learn)['_resolve']
        self.clock.stop()

    def rows(self) -> list[tuple]:  # what, by whom, µs a batch, calls a batch, share; in the order of the loop
        seconds, n = dict(self.clock.seconds), max(self.n_batches, 1)
        batch, wait = seconds.pop('batch', 0.), seconds.get('wait', 0.)
        seconds['the loop itself'] = batch+wait-sum(seconds.values())
        after = dict(wait='', forward='before_batch', loss='after_pred', backward='before_backward', step='before_step')
        def place(key):
            name = after.get(key, key) if isinstance(key, str) else key[0]
            return batch_events.index(name)+.5*isinstance(key, str) if name in batch_events else (
                -1 if key == 'wait' else len(batch_events))
        found = []
        for key in sorted(seconds, key=place):
            name, cb = (key, '') if isinstance(key, str) else key
            found.append((name, cb, seconds[key]/n*1e6, self.clock.calls.get(key, n)/n, seconds[key]/(batch+wait)))
        return found


# in the order of a batch
batch_events = ['before_batch', 'after_pred', 'after_loss', *(e for s in ('backward', 'step') for e in events_of[s]),
                *events_of['batch'][1:]]


def _traced(learn, call, n_batches, sync):
    tracer = _Tracer(sync)
    def done(): return f'{tracer.n_batches} batches'
    cbs = [tracer, ShortEpochCallback(n=n_batches)]
    with learn.no_bar(), learn.no_logging(), rehearse(learn, call, cbs, 'trace', done): return tracer.rows()


@patch
def trace(self: Learner,
    fit: str|Callable = 'fit',  # a fit method: `learn.fit_one_cycle`, or its name
    *args: Any,                 # what it is called with; nothing: one epoch
    n_batches: int = 50,        # training batches of each epoch
    sync: bool = True,          # wait for an accelerator at the end of each part; False: where the CPU waits
    plot: bool|str|Path = False,  # also draw it; or a file for that
    **kwargs: Any,              # what it is called with
) -> Any:                       # a pandas DataFrame: `what`, `callback`, `us` and `calls` a batch, `share`
    """Measure what each callback at each event, and each part of the loop, takes in a training batch

    It is a rehearsal: the fit is run as it would be, files are written to a temporary folder, and all is as before.
    Raises: whatever the fit would raise; KeyboardInterrupt if it is stopped."""
    check_number('trace: `n_batches`', n_batches, 1, whole=True, of='batches')
    rows: list = []
    for call in fit_calls(self, 'trace', fit, args or (1,), kwargs): rows += _traced(self, call, n_batches, sync)
    table = optional('pandas', 'learn.trace').DataFrame(rows, columns=['what', 'callback', 'us', 'calls', 'share'])
    if plot:
        ax = plot_times([f'{what}  {cb}'.strip() for what, cb, *_ in rows], [us for *_, us, _, _ in rows])
        if plot is not True: ax.figure.savefig(plot)
        show_figure(ax)
    return table
