"""Times training by a Learner, by hand and by other libraries, side by side: `make bench`, `python -m tests.bench.run`.

What is timed: whole fits. One epoch of 500 ready batches of 64 rows, with 1,365 parameters; three epochs of 5,000
images of 28×28 in memory, by hand through a torch DataLoader, with one layer. The loop by hand (`by_hand` in
work.py) trains and does nothing else: it keeps no loss and shows nothing. A Learner has its default callbacks: it
records every loss and learning rate and prints a line an epoch. The other libraries are set up as peers.py says.

How fair it is: each library has a process of its own, since importing some of them changes torch. What is compared runs
one right after the other in the same process, either of them first in every other round; the processes take turns, one
at work at a time. A ratio is of these two times, so that whatever else the machine does meanwhile acts on both. Times
are of the processor, on one thread. Garbage is collected before each run, and as usual during it. The table has medians
over the rounds and, in brackets, the 10th and the 90th percentile. `calls` are the Python and C calls that are added to
each batch; they are the same on any machine.

A run replaces its own section of results.md, named by the version of torch.
"""
import gc
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Callable
from datetime import date
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import NamedTuple

import numpy as np
import torch
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader

from learner import Learner
from learner.callback import Callback
from learner.callbacks.progress import ProgressCallback
from learner.callbacks.stats import ActivationStats, GradientStats
from learner.display import TerminalLive
from learner.loader import Loader
from learner.optim import Adam
from tests.bench import saving
from tests.bench.peers import peers
from tests.bench.work import (by_hand, calls_per_batch, cross_entropy, digits_net, image_loader, image_net, mse_loss,
                              ready_batches, ready_digits, small_net)

n_rounds = 30
results = Path(__file__).with_name('results.md')
head = """# Speed

Written by `make bench`, which is `python -m tests.bench.run`; run.py says what is measured and how fair it is. Other
libraries are in the section of an environment in which they are installed. Times are of one batch, medians over the
rounds. A ratio is the time to that of the base, with the 10th and 90th percentile; the base is the loop by hand, unless
the work says otherwise.
"""
small = small_net, mse_loss, ready_batches, 1
images = image_net, cross_entropy, image_loader, 3
digits = digits_net, cross_entropy, ready_digits, 1


# ---- what is compared

def hand(opt_func, work, k):  # a run by hand over `k` batches
    net, loss_func, loader, n_epoch = work
    model, batches = net(), loader(k)
    opt = opt_func(model.parameters(), lr=1e-3)
    def run():
        for _ in range(n_epoch): by_hand(model, opt, loss_func, batches)
    return run


def fits(opt_func, work, k, cbs=None):  # the same by a Learner
    net, loss_func, loader, n_epoch = work
    learn = Learner((loader(k), None), net(), loss_func, opt_func, lr=1e-3, cbs=cbs)
    return lambda: learn.fit(n_epoch)


def watched(stats, hist, k):  # with a look at one in ten batches
    return fits(Adam, digits, k, cbs=stats(hist, every=10))


def one_cycles(opt_func, work, k):  # with a schedule of learning rate and momentum
    net, loss_func, loader, n_epoch = work
    learn = Learner((loader(k), None), net(), loss_func, opt_func, lr=1e-3)
    return lambda: learn.fit_one_cycle(n_epoch)


def finds(opt_func, work, k):  # a sweep of learning rates over `k` batches, from its snapshot to its suggestion
    net, loss_func, loader, _ = work
    learn = Learner((loader(k), None), net(), loss_func, opt_func, lr=1e-3)
    return lambda: learn.lr_find(num_it=k, stop_div=False, show_plot=False, suggest_funcs=None)


def item_loader(k):  # through a torch DataLoader over `k` batches of a dataset that is no TensorDataset
    dl = DataLoader(saving.Items(64*k), 64, shuffle=True)
    return lambda: [None for _ in dl]


def planned_items(k):  # the same as a Learner goes through it
    dl = Loader(DataLoader(saving.Items(64*k), 64, shuffle=True))
    return lambda: [None for _ in dl]


class TerminalBar(ProgressCallback):
    def __init__(self): super().__init__(TerminalLive)


class Pair(NamedTuple):
    "Two ways to do the same"
    name: str
    base: Callable           # makes a run of `k` batches, `n_epoch` times over
    other: Callable          # the same
    aim: float|None = None   # ratio of times to be reached
    k: int = 500
    n_epoch: int = 1


def own_pairs():
    sgd, learn_sgd = partial(hand, SGD, small), partial(fits, SGD, small)
    return [
        Pair("ready batches, SGD", sgd, learn_sgd, 1.05),
        Pair("ready batches, SGD, with the bar of a terminal", sgd, partial(learn_sgd, cbs=TerminalBar), 1.05),
        Pair("ready batches, AdamW by hand, our Adam", partial(hand, AdamW, small), partial(fits, Adam, small), .85),
        Pair("images, SGD", partial(hand, SGD, images), partial(fits, SGD, images), .6, 79, 3),
        Pair("images, AdamW by hand, our Adam", partial(hand, AdamW, images), partial(fits, Adam, images), .5, 79, 3),
        Pair("ready batches, our Adam in both, one cycle", partial(hand, Adam, small),
             partial(one_cycles, Adam, small)),
        Pair("lr_find of 100 iterations, our Adam in both", partial(hand, Adam, digits), partial(finds, Adam, digits),
             1.15, 100),
        Pair("ready batches, SGD, 10 idle callbacks, to a Learner without", learn_sgd,
             partial(learn_sgd, cbs=[Callback]*10), 1.),
        *(Pair(f"ready digits, our Adam, {stats.__name__}{' with histograms'*hist} of one in ten batches, to a Learner "
               "without", partial(fits, Adam, digits), partial(watched, stats, hist), 1.1, 100)
          for stats in (ActivationStats, GradientStats) for hist in (False, True)),
        Pair("items one by one without a model, the plan of batches to a torch DataLoader", item_loader, planned_items,
             1.02, 500)]


def pairs_of(library):
    if library == 'learner': return own_pairs()
    return [Pair("ready batches, SGD", partial(hand, SGD, small), peers[library])]


# ---- timing

def serve(library, conn):
    "Say when ready; time each pair of `library` for each number of a round that comes; at last count calls"
    torch.set_num_threads(1)
    warnings.simplefilter('ignore')
    sys.stdout = open(os.devnull, 'w')
    pairs = pairs_of(library)
    runs = [(p.base(p.k), p.other(p.k)) for p in pairs]
    for run in chain(*runs): run()  # what is imported and cached at first
    gc.freeze()
    conn.send('ready')
    for i in iter(conn.recv, None): conn.send([timed(pair, i) for pair in runs])
    conn.send([(calls_per_batch(p.other)-calls_per_batch(p.base))/p.n_epoch for p in pairs])


def timed(pair, i):
    "Seconds that both runs take, the second of them first if `i` is odd"
    times = [0., 0.]
    for which in (0, 1) if i % 2 == 0 else (1, 0):
        gc.collect()
        start = process_time()
        pair[which]()
        times[which] = process_time()-start
    return times


def race(libraries):
    "Seconds by library, as an array (rounds, pairs, 2), and calls"
    conns = {}
    for library in libraries:
        conns[library], theirs = (ctx := get_context('spawn')).Pipe()
        ctx.Process(target=serve, args=(library, theirs), daemon=True).start()
        theirs.close()  # so that the end of the process is seen here
        conns[library].recv()  # one at work at a time
    times, counts = {library: [] for library in libraries}, {}
    for i in range(n_rounds):
        for library, conn in conns.items():
            conn.send(i)
            times[library].append(conn.recv())
    for library, conn in conns.items():
        conn.send(None)
        counts[library] = conn.recv()
    return {library: np.array(t) for library, t in times.items()}, counts


def import_ms(n=15):
    """Milliseconds that `import learner` adds to `import torch`, from compiled files, in `n` new processes

    What the import of torch leaves to be collected, some 80 ms, is collected before."""
    code = ('import gc, torch; from time import process_time as t; gc.collect(); start = t(); import learner; '
            'print((t()-start)*1e3)')
    with TemporaryDirectory() as cache:
        env = {**os.environ, 'PYTHONPYCACHEPREFIX': cache}
        env.pop('PYTHONDONTWRITEBYTECODE', None)
        times = [float(subprocess.check_output([sys.executable, '-c', code], env=env)) for _ in range(n+1)]
    return np.array(times[1:])  # the first one has compiled


# ---- the report

def spread(x, form='.2f'):  # median, and 10th to 90th percentile
    low, mid, high = (format(q, form) for q in np.percentile(x, [10, 50, 90]))
    return f'{mid} ({low}–{high})'


def row(library, pair, times, count):
    base, other = np.median(times, axis=0)/pair.k/pair.n_epoch*1e6
    return [library, pair.name, f'{base:.0f}', f'{other:.0f}', spread(times[:, 1]/times[:, 0]),
            f'{pair.aim:.2f}' if pair.aim else '', f'{count:+.0f}']


def machine():
    info = Path('/proc/cpuinfo')
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = next((line.partition(': ')[2] for line in lines if line.startswith('model name')), platform.processor())
    return f'{cpu}, {os.cpu_count()} cores, Python {platform.python_version()}'


def report(libraries, times, counts, load):
    "A section of the results"
    table = [['library', 'work', 'base, µs', 'time, µs', 'ratio', 'aim', 'calls'], ['---']*7]
    for library in libraries:
        table += map(partial(row, library), pairs_of(library), np.moveaxis(times[library], 1, 0), counts[library])
    others = [f"{k} {version('pytorch-ignite' if k == 'ignite' else k)}" for k in libraries[1:]]
    where = ', '.join([str(date.today()), machine(), *others])
    return '\n'.join([
        f'torch {torch.__version__}', '',
        f'{where}; {n_rounds} rounds, load {load[0]:.1f} to {load[1]:.1f}', '',
        *(f"| {' | '.join(cells)} |" for cells in table), '',
        f'`import learner` adds {spread(import_ms(), ".0f")} ms to `import torch`, garbage of which is collected '
        'before (aim: under 50).', '',
        *(line for text in saving.lines() for line in (text, ''))])


def main():
    libraries = ['learner', *filter(find_spec, peers)]
    load = [os.getloadavg()[0]]
    times, counts = race(libraries)
    load.append(os.getloadavg()[0])
    new = report(libraries, times, counts, load)
    print(new)
    old = results.read_text(encoding='utf-8').split('\n## ')[1:] if results.exists() else []
    sections = {section.partition('\n')[0]: section for section in [*old, new]}
    results.write_text('\n## '.join([head, *sections.values()]), encoding='utf-8')


if __name__ == '__main__': main()
