"""CSVLogger: the Recorder's rows in a file, those of epochs or of optimizer steps; each once, also after a resume."""
import csv
import os
from io import StringIO
from pathlib import Path
from typing import Any

from ..callback import Callback
from ..every import Every
from ..files import write_file
from ..utils import optional, warn

__all__ = ['CSVLogger']

step_columns = ['step', 'epoch', 'train_loss', 'smooth_loss', 'lr']
max_waiting = 100  # rows of steps, whose losses are then read from the device at once


class CSVLogger(Callback):
    """Writes rows to a CSV file: each epoch's as soon as the epoch is over, or rows of optimizer steps

    A row of a step has its number `learn.n_step`, the loss of its batch, the smoothed one, and the last group's `lr`.
    These rows are written a hundred at a time, at the end of an epoch's training, and before anything is saved.
    What one CSVLogger writes in several fits is one file, and what a resumed fit does again is cut off it first. A row
    that cannot be written is a warning.
    Raises: RuntimeError at the start of a fit without Recorder; ValueError if a file to be added to has other columns.
    Order: after the Recorder, whose rows it writes."""
    order = 60
    run_in = {'fit'}
    run_valid = False
    not_hashed = ('path', 'offset', 'last')

    def __init__(self,
        fname: str|Path = 'history.csv',  # relative to the Learner's path
        append: bool = False,             # add to a file that is already there, rather than replace it
        every: Any = '1ep',               # '2ep': epochs; '1it', '20it' or '10min': optimizer steps
    ):
        self.fname, self.append, self.every = fname, append, Every(every)
        self.begun, self.header, self.log_path = False, [], Path(fname)
        self.waiting: list[tuple] = []  # (Recorder, number of the batch in it, step) of rows that are not written yet
        self.last = ''                  # what the last row written is of
        self.kept: Any = None           # columns and size to which the file is to be cut before a row is written

    @property
    def _of_steps(self): return self.every.unit != 'ep'

    def before_fit(self):
        if not hasattr(self.learn, 'recorder'): raise RuntimeError(
            f"`{self}` works with `Recorder`, which this Learner is without; add it")
        self.header, self.waiting = [], []
        self.every.start()

    def after_batch(self):
        if not self.every.at_step(self.learn): return
        recorder = getattr(self.learn, 'recorder', None)
        marks = recorder.train.marks if recorder else []
        if not marks or marks[-1][1:3] != (self.iter, self.epoch): return  # the Recorder is off, or there was no loss
        self.waiting.append((recorder, len(marks)-1, self.n_step))
        if len(self.waiting) >= max_waiting: self._write_steps()

    def cleanup_train(self): self._write_steps()

    def cleanup_epoch(self):  # so that the row is written although a callback ends the fit in its `after_epoch`
        recorder = getattr(self.learn, 'recorder', None)
        if self._of_steps or recorder is None or (row := recorder.log) is None: return
        if not self.every.at_epoch(self.learn): return
        row = {c: '' if v != v else v for c, v in zip(recorder.metric_names, row, strict=True)}
        self._write([row], f'row of epoch {self.epoch} is')

    def cleanup_row(self): self.cleanup_epoch()

    def before_save(self, state):  # what refers to the rows must not be on disk before them
        try:
            if self.begun:
                with self._find().open('r+b') as f: os.fsync(f.fileno())
        except OSError as e: warn(f"CSVLogger: the rows in `{self.log_path}` may not be on disk: {e}")

    def state_dict(self) -> dict[str, Any]:
        "How far the file is written; the rows that wait are written first"
        self._write_steps()
        columns, offset = [], 0
        try:
            if (self.begun or self.append) and self._find().exists():
                columns, offset = self.kept or (self._columns(), self.log_path.stat().st_size)
        except OSError as e:
            offset = None
            warn(f"CSVLogger: a fit resumed from here will not know which rows of `{self.log_path}` come later: {e}")
        return dict(path=Path(self.fname).as_posix(), begun=self.begun, header=list(self.header), columns=columns,
                    offset=offset, last=self.last)

    def load_state_dict(self, state: dict[str, Any]) -> None:  # what `state_dict` gave
        """Go on in that file: within a fit, what came after is cut off it; else it is left as it is

        If it was over, they may be those of the next one, which may be gone on with too: they wait for its first row.
        Raises: ValueError if the file has other columns."""
        same = state['path'] == Path(self.fname).as_posix()
        if not same: warn(f"CSVLogger: the rows so far are in `{state['path']}`, and not in `{self.fname}`")
        self.begun = state['begun'] and same
        if not same or self.learn is None or self.learn.run_kind != 'fit': return
        self.header, self.last, self.waiting = list(state['header']), state['last'], []
        if self.header and self._of_steps != ({*self.header} == {*step_columns}):
            raise ValueError(
                self._differs(self.header, step_columns if self._of_steps else self.recorder.metric_names))
        if (self.begun or self.append) and state['offset'] is not None: self.kept = state['columns'], state['offset']
        if self.epoch < self.n_epoch: self._cut_off()

    def read_log(self) -> Any:  # a pandas DataFrame
        "What the file holds now, with the rows that waited"
        self._write_steps()
        return optional('pandas', 'CSVLogger.read_log').read_csv(self._find())

    # ---- the file

    def _find(self):  # where it is now; what is no longer part of a Learner knows where it was
        if self.learn is not None: self.log_path = Path(self.path)/self.fname
        return self.log_path

    def _file(self, mode): return self.log_path.open(mode, newline='', encoding='utf-8')

    def _columns(self):
        with self._file('r') as f: return next(csv.reader(f), [])

    def _differs(self, there, columns):
        return (f"CSVLogger: `{self.log_path}` has the columns {', '.join(there)}, but this fit has "
                f"{', '.join(columns)}; give another `fname`, or a new CSVLogger with `append=False`")

    def _write_steps(self):
        waiting, self.waiting = self.waiting, []
        rows = []
        for recorder, i, step in waiting:
            _, _, epoch, reading = recorder.train.marks[i]
            values = step, epoch, recorder.raw_losses[i], recorder.losses[i], reading.values['lr'][-1]
            rows.append(dict(zip(step_columns, values)))
        if rows: self._write(rows, f"rows of steps {rows[0]['step']} to {rows[-1]['step']} are")

    def _write(self, rows, which):
        self._find()
        self._cut_off()
        try:
            if not self.header or not self.log_path.exists(): self._begin([*rows[0]])
            if new := [c for c in rows[0] if c not in self.header]: self._widen(new)
            self._append(_text(self.header, rows))
            self.last = self._name(rows[-1])
        except OSError as e: warn(f"CSVLogger: the {which} not in `{self.log_path}`: {e}")

    def _name(self, row):
        key = step_columns[0] if self._of_steps else 'epoch'
        return f'{key} {row.get(key)}'

    def _append(self, data):  # all of it or nothing
        with self.log_path.open('ab', buffering=0) as f:
            size = f.tell()
            try:
                while data: data = data[f.write(data):]
            except OSError:
                f.truncate(size)
                raise

    def _widen(self, new):  # columns that a metric has only now: the rows before have nothing in them
        header = [*self.header, *new]
        with self._file('r') as f: rows = list(csv.DictReader(f))
        write_file(self.log_path, lambda f: f.write(_text(header, rows, with_header=True)))
        self.header = header

    def _begin(self, columns):
        header = []
        if (self.append or self.begun) and self.log_path.exists():
            header = self._columns()
            if header and not self.log_path.read_bytes().endswith(b'\n'):  # cut short, or edited by hand
                with self._file('a') as f: f.write('\r\n')
        if not header:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            with self._file('w') as f: csv.writer(f).writerow(columns)
        elif {*header} != {*columns}: raise ValueError(self._differs(header, columns))
        self.header, self.begun = header or columns, True

    def _cut_off(self):
        kept, self.kept = self.kept, None
        try:
            if kept: self._cut(*kept)
        except OSError as e: warn(f"CSVLogger: `{self.log_path}` cannot be cut, and may have rows twice: {e}")

    def _cut(self, columns, size):  # back to `size` bytes, when it had these columns
        there, data = [], b''
        if self._find().exists():
            there = self._columns()
            if there == columns and self.log_path.stat().st_size == size: return
            data = self.log_path.read_bytes()
        if b'\n' in data and there[:len(columns)] != columns: raise ValueError(self._differs(there, columns))
        kept, widened = data[:size], bool(columns) and len(there) > len(columns)
        if widened:  # since then
            with self._file('r') as f: kept = _text(columns, csv.DictReader(f), with_header=True)[:size]
        if len(kept) < size or widened and not kept.endswith(b'\n'):
            kept = kept[:kept.rfind(b'\n')+1]  # whole lines
            if not kept: self.header = []
            rows = list(csv.DictReader(StringIO(kept.decode(), newline='')))
            what = 'shorter than when the fit was saved: it lacks' if data else 'missing, with'
            since = f'after {self._name(rows[-1])}, ' if rows else ''
            warn(f"CSVLogger: `{self.log_path}` is {what} the rows {since}up to {self.last or 'there'}")
        if not data.startswith(kept): write_file(self.log_path, lambda f: f.write(kept))
        elif kept != data: os.truncate(self.log_path, len(kept))


def _text(header, rows, with_header=False):  # lines of a file, floats with all digits
    text = StringIO(newline='')
    writer = csv.DictWriter(text, header, extrasaction='ignore')
    if with_header: writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()
