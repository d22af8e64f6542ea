"""Starts the training of script.py, kills it, starts it again, until it is done; and compares with one left alone.

`python -m tests.torture.driver 5 '0 fp32' '2 bf16'` kills each of these cells 5 times, and prints a report of each.
Half of the kills come after a random time, the others with a line of a random kind, at which the process waits for it.
"""
import json
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
import torch._dynamo  # noqa: F401  # which the first optimizer of a process imports, for a second

from learner.files import DamagedFile, verify_file
from tests.torture.script import Cell, main

too_long = 120.                  # seconds after which what was to end by itself is taken for hung
changing = '1', '2', '3'         # workers of a cell of 'changing' ones, life by life
early = 'start', 'load_file', 'fit', 'resumed', 'csv_cut'  # tags of lines that begin a life that goes on
late = 'over', 'result', 'end'                             # of those that come when the training is over


# ---- a process

class Plan(NamedTuple):
    "How a life is to end"
    tag: str = ''               # it is killed with the `n`-th line of this tag
    n: int = 0
    seconds: float = too_long   # or when these have passed
    workers: bool = True        # its workers too? Else they have to notice
    fresh: bool = False         # is it a new Python, as a user starts it? Else a fork of this one, which is quicker


class Life:
    "A process of the script"
    wait: Callable[[], int|None]  # for its end; what it returned

    def __init__(self, folder, cell, plan):
        self.plan, self.text, self.errors, (self.out, out) = plan, '', '', os.pipe()
        args = folder, cell, plan.tag, plan.n
        with tempfile.TemporaryFile() as self.err:
            if plan.fresh:
                command = [sys.executable, '-m', 'tests.torture.script', *map(str, args)]
                p = subprocess.Popen(command, stdout=out, stderr=self.err, start_new_session=True)
                self.wait = p.wait
            else:
                p = get_context('fork').Process(target=forked, args=(out, self.err.fileno(), *args))
                p.start()
                self.wait = lambda: p.join() or p.exitcode
            os.close(out)
            self.pid: int = p.pid  # pyright: ignore[reportAttributeAccessIssue]
            self._live()
        os.close(self.out)
        self.tags = [t for t in re.findall(r'^@(\w+)', self.text, re.M) if t != 'here']

    def _live(self):
        running, end = True, perf_counter()+self.plan.seconds
        while running and not self.text.endswith('@here\n') and self._waits(end): running = self._read()
        if running:
            if not self.text.endswith('@here\n') and self.plan.seconds == too_long: self.errors = 'it hangs\n'
            self._note_errors()  # now: workers that outlive it may complain
            self._kill()
        self.code = self.wait()
        os.set_blocking(self.out, False)
        with suppress(BlockingIOError):  # such workers keep it open
            while self._read(): pass
        if not running: self._note_errors()

    def _waits(self, end): return select.select([self.out], [], [], max(0., end-perf_counter()))[0]

    def _read(self):
        data = os.read(self.out, 2**16)
        self.text += data.decode()
        return bool(data)

    def _note_errors(self):
        self.err.seek(0)
        self.errors += self.err.read().decode()

    def _kill(self):
        for kill in (os.killpg, os.kill)[not self.plan.workers:]:  # the second: it may not have a group yet
            with suppress(ProcessLookupError): kill(self.pid, signal.SIGKILL)

    def steps(self, tag): return [*map(int, re.findall(fr'^@{tag} (\d+)$', self.text, re.M))]
    def result(self): return json.loads(re.findall('^@result (.*)$', self.text, re.M)[0])


def forked(out, err, *args):
    os.setsid()
    os.dup2(out, 1)
    os.dup2(err, 2)
    torch.set_num_threads(1)
    main(*args)


# ---- trainings

@dataclass
class Report:
    "What came of the kills of a cell"
    cell: str
    kills: int = 0
    lives: int = 0
    mismatches: list[str] = field(default_factory=list)
    exceptions: list[str] = field(default_factory=list)
    places: Counter = field(default_factory=Counter)  # tags of the last lines before the kills
    seconds: float = 0.


class Torture:
    "Trainings of one cell in one folder, compared with the first one, which is left alone"
    def __init__(self, cell, folder, seed):
        self.cell, self.folder, self.rng, self.report = cell, folder, random.Random(f'{cell} {seed}'), Report(str(cell))
        start, life = perf_counter(), self.live(0, Plan())
        self.seconds, self.tags = perf_counter()-start, Counter(life.tags)
        self.whole = life.result() if life.code == 0 else {}

    def live(self, i, plan):
        "The `i`-th life of a training"
        workers = changing[i % len(changing)] if self.cell.workers == 'changing' else self.cell.workers
        life = Life(self.folder, self.cell._replace(workers=workers), plan)
        self.where = f"{self.cell}, life {i+1} of {plan}, ended after {life.tags[-3:]}"
        if life.errors or life.code not in (0, -signal.SIGKILL):
            self.report.exceptions.append(f"{self.where} with {life.code}: {life.errors}")
        return life

    def plan(self, i, n_kills):
        "For the `i`-th of `n_kills`, all of which are to fit into a training"
        rng, kind, share = self.rng, self.rng.random(), min(.6, 3/n_kills)  # 3: not all of them get so far
        ways: dict = dict(workers=rng.random() < .7, fresh=rng.random() < .1)
        if kind < .5:
            return Plan(seconds=rng.uniform(0, share*self.seconds) + 2*ways['fresh'], **ways)  # 2: it imports first
        if kind < .6 and i: return Plan(rng.choice(early), 1, **ways)
        if kind < .8 and i >= n_kills-2: return Plan(rng.choice(late), 1, **ways)
        tag = rng.choice(sorted(self.tags.keys() - {*early, *late}))
        return Plan(tag, rng.randint(1, max(1, int(share*self.tags[tag]))), **ways)

    def train(self, n_kills):
        "One training, killed so often at most"
        saved, left = 0, []
        for i in range(n_kills+1):
            life = self.live(i, self.plan(i, n_kills) if i < n_kills else Plan())
            self.report.lives += 1
            begun = max([0, *life.steps('resumed')])
            if 'train' in life.tags and begun < saved: self.mismatch(f"began after step {begun} of {saved} saved ones")
            saved = max([saved, *life.steps('saved')])
            if life.code != -signal.SIGKILL: break
            self.report.kills += 1
            self.report.places[life.tags[-1] if life.tags else 'import'] += 1
            self.check_files()
            if not life.plan.workers: left.append(life.pid)
        for group in left:  # a worker whose parent was gone before it looked does not notice
            with suppress(ProcessLookupError): os.killpg(group, signal.SIGKILL)
        if life.code == 0 and (bad := life.result().items() ^ self.whole.items()):
            self.mismatch(f"not equal: {', '.join(sorted({k for k, _ in bad}))}")

    def check_files(self):
        for path in [p for p in self.folder.rglob('*') if p.suffix in ('.ckpt', '.pth')]:
            try: verify_file(path)
            except DamagedFile as e: self.mismatch(str(e))

    def mismatch(self, what): self.report.mismatches.append(f"{self.where}: {what}")


def torture(n_kills, per_training, seed, cell):
    "Kill trainings of a cell so often, each at most `per_training` times; a Report"
    start = perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        it = Torture(cell, Path(folder)/'run', seed)
        while it.report.kills < n_kills and not it.report.exceptions:
            shutil.rmtree(it.folder)
            it.train(min(per_training, n_kills-it.report.kills))
    it.report.seconds = perf_counter()-start
    return it.report


def torture_all(cells, n_kills, per_training=6, seed=0, jobs=2):
    "Reports of the cells, as they come"
    with ProcessPoolExecutor(jobs, get_context('fork')) as pool:
        yield from pool.map(partial(torture, n_kills, per_training, seed), cells)


if __name__ == '__main__':
    cells = [Cell(*cell.split()) for cell in sys.argv[2:]]
    for report in torture_all(cells, int(sys.argv[1])): print(json.dumps(vars(report)), flush=True)
