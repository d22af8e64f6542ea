"""What a fit shows while it runs: a table of epochs, a bar under it, a loss graph; in a notebook, a terminal or a log.

`display_mode` decides where output goes (`set_display`, else the environment variable LEARNER_DISPLAY, else what the
process runs in); nothing else in the package asks. `Live` is the whole interface between a fit and what it shows: to
show it in another way, write one class. All output goes to the `sys.stdout` of the moment, or through IPython."""
import math
import os
import shutil
import sys
from base64 import b64encode
from collections.abc import Callable, Sequence
from html import escape
from numbers import Integral, Real
from time import perf_counter
from typing import Any, NamedTuple

from .utils import optional

__all__ = ['set_display', 'display_mode', 'say', 'show_result', 'Bar', 'Live', 'LogLive', 'TerminalLive',
           'NotebookLive', 'new_live', 'text_table', 'html_table', 'show_table']

modes = ('auto', 'notebook', 'terminal', 'log', 'off')
_mode = 'auto'


def _checked(mode, source):
    if mode in modes: return mode
    raise ValueError(f"{source}: there is no display {mode!r}; choose one of {', '.join(modes)}")


def set_display(
    mode: str,  # 'notebook', 'terminal', 'log' (plain lines), 'off', or 'auto' (LEARNER_DISPLAY, else detected)
) -> None:
    """Choose how all later fits show themselves

    Raises: ValueError naming the modes if `mode` is none of them."""
    global _mode
    _mode = _checked(mode, '`set_display`')


def display_mode() -> str:  # 'notebook', 'terminal', 'log' or 'off'
    """Where output goes now: what was chosen, else a notebook if a kernel runs, a terminal if stdout is one, else a log

    Raises: ValueError naming the modes if LEARNER_DISPLAY is none of them."""
    env = os.environ.get('LEARNER_DISPLAY') or 'auto'
    mode = _checked(env, 'environment variable LEARNER_DISPLAY') if _mode == 'auto' else _mode
    if mode != 'auto': return mode
    ipython = sys.modules.get('IPython')  # a kernel has imported it already; a script must not pay for it
    if ipython and hasattr(ipython.get_ipython(), 'kernel'): return 'notebook'
    return 'terminal' if getattr(sys.stdout, 'isatty', lambda: False)() else 'log'


def say(
    message: str,
) -> None:
    "Show a line that is worth knowing and asks for nothing, unless the display is off"
    if display_mode() != 'off': print(message, flush=True)


def show_result(
    text: str,  # what the value that is returned looks like
) -> None:
    "Print what is returned to be read, unless a notebook or an interactive session shows returned values by itself"
    if display_mode() in ('terminal', 'log') and not hasattr(sys, 'ps1'): print(text, flush=True)  # IPython has it too


# ---- numbers as text

def _clock(seconds):
    m, s = divmod(round(seconds), 60)
    return f'{m:02}:{s:02}' if m < 60 else f'{m//60}:{m%60:02}:{s:02}'


def _cell(column, value):
    if isinstance(value, Integral) or not isinstance(value, Real): return str(value)
    value = float(value)
    if not math.isfinite(value): return str(value)
    if column == 'time': return f'{value:.2f}s' if value < 10 else _clock(value)
    return f'{value:.6f}' if value == 0 or 1e-5 <= abs(value) < 1e7 else f'{value:.4e}'


class Bar(NamedTuple):
    "State of the loop that a bar shows"
    epoch: int          # epochs finished before this one
    n_epoch: int        # epochs in all
    phase: str          # 'train' or 'valid'
    i: int              # batches of this phase finished
    n: int|None         # batches of this phase in all; None if unknown
    loss: float|None    # smoothed training loss; None while there is none, and in validation
    elapsed: float      # seconds since this phase began
    rate: float|None    # batches per second; None until it is known

    def parts(self) -> list[str]:  # `['epoch 1/5 train', '3/10', 'loss 0.5', '00:03<00:07', '1.00 it/s']`
        "What the bar says, the most important part first"
        time = _clock(self.elapsed)
        if self.rate and self.n is not None: time += f'<{_clock(max(self.n-self.i, 0)/self.rate)}'
        out = [f'epoch {self.epoch+1}/{self.n_epoch} {self.phase}',
               f'{self.i}' if self.n is None else f'{self.i}/{self.n}']
        if self.loss is not None: out.append(f"loss {_cell('loss', self.loss)}")
        out.append(time)
        if self.rate: out.append(f'{self.rate:.2f} it/s' if self.rate >= 1 else f'{1/self.rate:.2f} s/it')
        return out


# ---- the interface, and its four forms

class Live:
    """What a fit shows while it runs; this one shows nothing, its subclasses override what they show

    One object serves one fit: `start`, then `update`, `row` and `graph` in any order, then `close`, which comes also
    after an error or an interrupt. tqdm, for instance, is one class (give it as `ProgressCallback(TqdmLive)`):

        class TqdmLive(LogLive):
            interval, tqdm = .1, None
            def update(self, bar):
                if bar is None: return self.close()
                if self.tqdm is None: self.tqdm = tqdm(total=bar.n, desc=bar.parts()[0], leave=False)
                self.tqdm.update(bar.i-self.tqdm.n)
            def close(self, note=''):
                if self.tqdm is not None: self.tqdm.close()
                self.tqdm = None
    """
    interval = math.inf  # least number of seconds between two bars; no bar is made if infinite

    def start(self,
        columns: Sequence[str],  # names of the table's columns as known now; empty: no rows will come
    ) -> None:
        "The fit begins"

    def update(self,
        bar: Bar|None,  # None at the end of each phase: leave the line free, since others may print now
    ) -> None:
        "Show `bar`; called at most every `interval` seconds"

    def row(self,
        row: dict[str, Any],  # value by column; `time` in seconds, NaN for what was not computed
    ) -> None:
        "An epoch is over: add a row to the table"

    def graph(self,
        curves: Callable[[], dict[str, tuple[Sequence, Sequence]]],  # gives the points so far: `{'train': (xs, ys)}`
    ) -> None:
        "Draw also a graph, from what `curves` returns each time it is drawn"

    def close(self,
        note: str = '',  # where the fit stopped, if it did not reach its end
    ) -> None:
        "The fit is over: the table stays, the bar goes, `note` takes its place"


class LogLive(Live):
    "Plain lines without control characters, each flushed: the columns' names, then one line an epoch"
    def start(self, columns): self.columns = []

    def row(self, row):
        widths = [max(len(c), 9) for c in row]
        if list(row) != self.columns:  # printed with the first row: a metric may have added columns in it
            self.columns = list(row)
            print(_line(self.columns, widths), flush=True)
        print(_line([_cell(c, v) for c, v in row.items()], widths), flush=True)

    def close(self, note=''):
        if note: print(note, flush=True)

    def graph(self, curves):
        print('The loss graph is live in a notebook\'s table only; `learn.recorder.plot_loss()` draws it after the fit',
              flush=True)


class TerminalLive(LogLive):
    "As `LogLive`, with a bar on the last line, which is cleared before anything else is printed"
    interval = .1

    def start(self, columns):
        super().start(columns)
        self.shown = 0  # width of the bar on the line now

    def update(self, bar):
        if bar is None and not self.shown: return
        width = shutil.get_terminal_size().columns-1
        text = _bar_line(bar, width) if bar else ''
        print('\r' + text.ljust(min(self.shown, width)), end='' if bar else '\r', flush=True)
        self.shown = len(text)

    def row(self, row):
        self.update(None)
        super().row(row)

    def close(self, note=''):
        self.update(None)
        super().close(note)


class NotebookLive(Live):
    """Table, graph and bar in one output: one display id, `text/html` alone, and only what survives in a saved notebook

    That is tables, `<progress>`, inline styles and data-URI images: inline `<svg>`, `<style>` and widgets are dropped
    when a notebook is opened untrusted. Long tables show their first and last rows."""
    interval = .25
    n_head, n_tail = 5, 100  # rows of a long table that are shown
    graph_interval = 1.      # least number of seconds between two graphs

    def start(self, columns):
        self.display = optional('IPython.display', "set_display('notebook')").display
        self.columns, self.rows, self.foot, self.handle = list(columns), [], '', None
        self.curves, self.image, self.row_due, self.graph_due = dict, '', 0., 0.

    def update(self, bar):
        if bar is None: return  # it stays until the next one, so that the output does not jump
        head, *parts = [escape(o) for o in bar.parts()]
        value = '' if bar.n is None else f'value="{min(bar.i, bar.n)}" max="{bar.n}" '  # without: a moving bar
        self.foot = (f'<div>{head} <progress {value}style="width:240px;height:16px;vertical-align:middle"></progress> '
                     f'{" · ".join(parts)}</div>')
        self._draw()

    def row(self, row):
        self.columns = list(row)
        self.rows.append(row)
        self.foot = '<div>\u00a0</div>'  # the bar's place: the one of the epoch that is over says nothing any more
        if perf_counter() < self.row_due: return  # epochs of milliseconds: this row comes with the next drawing
        self._draw()
        self.row_due = perf_counter()+self.interval

    def graph(self, curves): self.curves = curves

    def close(self, note=''):
        if not note: self.graph_due = 0.  # after an error the last graph stays: drawing one reads from the device
        self.foot = f'<div>{escape(note)}</div>' if note else ''
        if self.handle or self.rows or note: self._draw()

    def _draw(self):
        if perf_counter() >= self.graph_due:
            self.image, self.graph_due = _graph_html(self.curves()), perf_counter()+self.graph_interval
        n_hidden = len(self.rows)-self.n_head-self.n_tail
        rows = self.rows if n_hidden <= 0 else self.rows[:self.n_head]+self.rows[-self.n_tail:]
        body = [[_cell(c, r.get(c, math.nan)) for c in self.columns] for r in rows]
        if n_hidden > 0: body.insert(self.n_head, [f'… {n_hidden} rows hidden …'])
        table = html_table(self.columns, body) if self.columns else ''
        data = {'text/html': f'{table}{self.image}{self.foot}'}
        if self.handle is None: self.handle = self.display(data, raw=True, display_id=True)
        else: self.handle.update(data, raw=True)


def new_live(
    bar: bool = True,  # False: plain lines also where a bar could be shown
) -> Live:             # not started yet
    "The `Live` for where output goes now"
    mode = display_mode()
    if not bar and mode != 'off': mode = 'log'
    return dict(notebook=NotebookLive, terminal=TerminalLive, log=LogLive, off=Live)[mode]()


# ---- drawing

def _line(cells, widths, left=()):
    return '  '.join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths))).rstrip()


def _bar_line(bar, width):
    full, empty = '█░' if 'utf' in (getattr(sys.stdout, 'encoding', None) or '').lower() else '#.'
    head, *parts = bar.parts()
    while parts and len(' '.join([head, *parts]))+12 > width: parts.pop()  # 12: the shortest bar, and spaces
    text = ' '.join(parts)
    n_bar = min(width-len(head)-len(text)-2, 30)
    if not bar.n or not parts: return f'{head} {text}'[:width].rstrip()
    n_full = min(bar.i, bar.n)*n_bar//bar.n
    return f'{head} {full*n_full}{empty*(n_bar-n_full)} {text}'


def text_table(
    columns: Sequence[str],         # names, one a column
    rows: Sequence[Sequence[str]],  # cells, in the order of `columns`
    left: Any = (),                 # numbers of the columns that are aligned left
) -> str:
    "An aligned table"
    widths = [max(map(len, column)) for column in zip(columns, *rows)]
    return '\n'.join(_line(r, widths, left) for r in [columns, *rows])


def html_table(
    columns: Sequence[str],         # names, one a column
    rows: Sequence[Sequence[str]],  # cells, in the order of `columns`; a row with fewer is one cell, as wide as all
    left: Any = (),                 # numbers of the columns that are aligned left
) -> str:
    "An HTML table that survives in a saved notebook"
    style = [' style="text-align:left;white-space:pre"' if i in left else '' for i in range(len(columns))]
    def line(tag, cells):
        if len(cells) < len(columns): return f'<tr><td colspan="{len(columns)}">{escape(cells[0])}</td></tr>'
        inner = ''.join(f'<{tag}{s}>{escape(c)}</{tag}>' for s, c in zip(style, cells))
        return f'<tr style="text-align:right">{inner}</tr>'
    return f'<table><thead>{line("th", columns)}</thead><tbody>{"".join(line("td", r) for r in rows)}</tbody></table>'


def show_table(
    columns: Sequence[str],         # names, one a column
    rows: Sequence[Sequence[Any]],  # values, in the order of `columns`
    title: str|None = None,         # a line above the table
) -> None:
    "Show a table: as HTML in a notebook, as aligned text elsewhere; columns with words in them are aligned left"
    cells = [[_cell(c, v) for c, v in zip(columns, r, strict=True)] for r in rows]
    left = {i for r in rows for i, v in enumerate(r) if isinstance(v, str)}
    if display_mode() == 'notebook':
        display = optional('IPython.display', "set_display('notebook')").display
        head = f'<div><b>{escape(title)}</b></div>' if title else ''
        display({'text/html': head+html_table(columns, cells, left)}, raw=True)
    else:
        print('\n'.join(([title] if title else []) + [text_table(columns, cells, left)]))


def _graph_html(curves, width=480, height=220):  # an `<img>`: inline `<svg>` is dropped from untrusted notebooks
    curves = {name: [(x, y) for x, y in _thinned(xs, ys) if math.isfinite(y)] for name, (xs, ys) in curves.items()}
    points = [p for curve in curves.values() for p in curve]
    if not points: return ''
    (x0, x1), (y0, y1) = [(min(v), max(v)) for v in zip(*points)]
    x_unit, y_unit = (width-80)/((x1-x0) or 1), (height-50)/((y1-y0) or 1)
    out = [f'<rect width="{width}" height="{height}" fill="white"/>',
           f'<path d="M60 15V{height-30}H{width-15}" fill="none" stroke="#888"/>']
    def text(x, y, s, anchor='end', colour='#333'):
        out.append(f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}">{escape(s)}</text>')
    for y, s in ((25, f'{y1:.4g}'), (height-32, f'{y0:.4g}'), (height//2, 'loss')): text(55, y, s)
    for x, s in ((65, f'{x0}'), (width//2, 'batch'), (width-20, f'{x1}')): text(x, height-12, s, 'middle')
    for i, (name, curve) in enumerate(curves.items()):
        colour = ('#1f77b4', '#ff7f0e', '#2ca02c', '#d62728')[i % 4]
        at = [(f'{62+(x-x0)*x_unit:.1f}', f'{height-33-(y-y0)*y_unit:.1f}') for x, y in curve]
        line = ' '.join(map(','.join, at))
        out.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if len(at) < 30: out += [f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>' for x, y in at]
        text(width-20, 25+16*i, name, colour=colour)
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" ' \
          f'font-size="12">{"".join(out)}</svg>'
    return f'<div><img alt="loss" src="data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}"/></div>'


def _thinned(xs, ys, n=500):  # at most `n` points, the last one among them
    step = -(-len(xs)//n) or 1
    return [*zip(xs[::-step], ys[::-step])][::-1]
