"""What display.py shows: the mode it chooses, its text and HTML, and the interface that a replacement implements."""
import io
import re
import sys
from inspect import cleandoc

import pytest

from learner import display
from learner.display import (Bar, Live, LogLive, NotebookLive, TerminalLive, display_mode, new_live, set_display,
                             show_result, show_table)

nan = float('nan')
row = {'epoch': 0, 'train_loss': .5, 'valid_loss': nan, 'time': 61.2}


class Stream(io.StringIO):
    "A stdout that counts flushes, and may be a terminal"
    def __init__(self, tty=False, encoding='utf-8'):
        super().__init__()
        self.tty, self.codec, self.flushed = tty, encoding, 0

    def isatty(self): return self.tty
    def flush(self): self.flushed += 1
    @property
    def encoding(self): return self.codec


def screen(text):
    "The lines a terminal shows after `text`, where `\\r` goes back to the start of a line"
    lines = []
    for line in text.split('\n'):
        shown = ''
        for part in line.split('\r'): shown = part+shown[len(part):]
        lines.append(shown.rstrip())
    return lines


def mk_bar(**kw):
    return Bar(**{**dict(epoch=1, n_epoch=5, phase='train', i=3, n=10, loss=.25, elapsed=3., rate=2.), **kw})


@pytest.fixture(autouse=True)
def as_installed(monkeypatch):
    monkeypatch.delenv('LEARNER_DISPLAY', raising=False)
    monkeypatch.setattr(display, '_mode', 'auto')


@pytest.fixture
def stdout(monkeypatch):
    def use(**kw):
        monkeypatch.setattr(sys, 'stdout', stream := Stream(**kw))
        return stream
    return use


# ---- where output goes

@pytest.mark.parametrize('tty, env, chosen, mode', [
    (False, None, 'auto', 'log'), (True, None, 'auto', 'terminal'), (True, '', 'auto', 'terminal'),
    (True, 'log', 'auto', 'log'), (True, 'auto', 'auto', 'terminal'), (True, 'log', 'notebook', 'notebook'),
    (False, 'terminal', 'off', 'off')])
def test_mode(tty, env, chosen, mode, stdout, monkeypatch):
    "What was chosen holds, then the environment variable, then what stdout is"
    stdout(tty=tty)
    if env is not None: monkeypatch.setenv('LEARNER_DISPLAY', env)

    set_display(chosen)

    assert display_mode() == mode


def test_mode_of_a_stdout_that_cannot_say(monkeypatch):
    "A stdout without `isatty` is a log"
    monkeypatch.setattr(sys, 'stdout', object())

    assert display_mode() == 'log'


def test_unknown_mode():
    "An unknown mode is refused with the list of modes, and the old one stays"
    set_display('log')

    with pytest.raises(ValueError, match="'tty'; choose one of auto, notebook, terminal, log, off"): set_display('tty')

    assert display_mode() == 'log'


def test_unknown_mode_in_environment(monkeypatch):
    "So is one in the environment, which the error names"
    monkeypatch.setenv('LEARNER_DISPLAY', 'none')

    with pytest.raises(ValueError, match="LEARNER_DISPLAY: there is no display 'none'; choose one of auto"): new_live()


@pytest.mark.parametrize('mode, bar, cls', [
    ('notebook', True, NotebookLive), ('terminal', True, TerminalLive), ('log', True, LogLive), ('off', True, Live),
    ('notebook', False, LogLive), ('terminal', False, LogLive), ('off', False, Live)])
def test_new_live(mode, bar, cls):
    "Each mode has its class; without a bar rows are plain lines, and off is off"
    set_display(mode)

    assert type(new_live(bar)) is cls


# ---- text

@pytest.mark.parametrize('column, value, text', [
    ('epoch', 12, '12'), ('loss', .1234567, '0.123457'), ('loss', 0., '0.000000'), ('loss', -2.5, '-2.500000'),
    ('loss', 1.23e-7, '1.2300e-07'), ('loss', 12345678.9, '1.2346e+07'), ('loss', nan, 'nan'),
    ('loss', float('-inf'), '-inf'), ('time', 59.6, '01:00'), ('time', 3599., '59:59'),
    ('time', 3661., '1:01:01'), ('time', nan, 'nan'), ('name', 'x', 'x')])
def test_numbers(column, value, text):
    "Six decimals, as many integers as there are, no number shown as zero that is not, times as a clock"
    assert display._cell(column, value) == text


@pytest.mark.parametrize('bar, parts', [
    (mk_bar(), ['epoch 2/5 train', '3/10', 'loss 0.250000', '00:03<00:04', '2.00 it/s']),
    (mk_bar(rate=.25), ['epoch 2/5 train', '3/10', 'loss 0.250000', '00:03<00:28', '4.00 s/it']),
    (mk_bar(rate=None, loss=None, phase='valid'), ['epoch 2/5 valid', '3/10', '00:03']),
    (mk_bar(n=None), ['epoch 2/5 train', '3', 'loss 0.250000', '00:03', '2.00 it/s']),
    (mk_bar(n=2), ['epoch 2/5 train', '3/2', 'loss 0.250000', '00:03<00:00', '2.00 it/s'])])
def test_bar_text(bar, parts):
    "The bar says where it is, how long it took and will take, and leaves out what is not known"
    assert bar.parts() == parts


def test_log(stdout):
    "A header and one aligned line an epoch, flushed, without control characters"
    out = stdout()
    live = LogLive()

    live.start([*row])
    for i in range(2): live.row({**row, 'epoch': i})
    live.close()

    assert out.getvalue() == ('    epoch  train_loss  valid_loss       time\n'
                              '        0    0.500000         nan      01:01\n'
                              '        1    0.500000         nan      01:01\n')
    assert out.flushed >= 3


def test_log_gets_new_columns(stdout):
    "Rows with other columns come under a header of their own"
    out = stdout()
    live = LogLive()

    live.start(['epoch'])
    for r in ({'epoch': 0}, {'epoch': 1, 'f1': .5}): live.row(r)

    lines = [line.split() for line in out.getvalue().splitlines()]
    assert lines == [['epoch'], ['0'], ['epoch', 'f1'], ['1', '0.500000']]


def test_log_says_that_it_has_no_graph(stdout):
    "Where no graph can be drawn a line says so, and what to do"
    out = stdout()

    LogLive().graph(dict)

    assert 'recorder.plot_loss()' in out.getvalue()


def test_off(stdout):
    "Off shows nothing and asks for no bar"
    out = stdout(tty=True)
    live = Live()

    live.start([*row])
    for call, arg in ((live.row, row), (live.update, None), (live.graph, dict), (live.close, 'stopped')): call(arg)

    assert out.getvalue() == '' and live.interval == float('inf')


# ---- terminal

@pytest.fixture
def terminal(stdout, monkeypatch):
    def start(width=80, encoding='utf-8'):
        monkeypatch.setenv('COLUMNS', str(width))
        out, live = stdout(tty=True, encoding=encoding), TerminalLive()
        live.start([*row])
        return live, out
    return start


def test_terminal_row_replaces_bar(terminal):
    "The bar is gone before a row is printed, comes back below it, and the last line is empty at the end"
    live, out = terminal()

    live.update(mk_bar())
    above = screen(out.getvalue())
    live.row(row)
    live.update(mk_bar(phase='valid', loss=None))
    below = screen(out.getvalue())
    live.close()

    assert above == ['epoch 2/5 train ██████░░░░░░░░░░░░░░░░ 3/10 loss 0.250000 00:03<00:04 2.00 it/s']
    assert [line.split()[0] for line in below] == ['epoch', '0', 'epoch'] and '░' in below[-1]
    assert screen(out.getvalue()) == below[:-1]+['']


def test_terminal_shorter_bar_leaves_no_rest(terminal):
    "A shorter bar wipes the longer one before it"
    live, out = terminal()

    live.update(mk_bar(n=None, i=1000, loss=1e-9))
    live.update(mk_bar(n=None, i=1, loss=None, rate=None))

    assert screen(out.getvalue()) == ['epoch 2/5 train 1 00:03']


@pytest.mark.parametrize('width', [5, 20, 35, 50, 79, 120, 300])
@pytest.mark.parametrize('n', [10, None, 0])
def test_terminal_width(terminal, width, n):
    "The bar fits the terminal, the cursor with it, and keeps the most important parts"
    live, out = terminal(width)

    live.update(mk_bar(n=n))
    shown, = screen(out.getvalue())

    assert len(out.getvalue().strip('\r')) < width
    assert shown.startswith('epoch 2/5 train'[:width-1])
    assert ('3/10' in shown) == (n == 10 and width >= 35)
    assert ('it/s' in shown) == (width >= 79)


@pytest.mark.parametrize('encoding', ['cp1252', 'ascii', None])
def test_terminal_encoding(terminal, encoding):
    "Where blocks cannot be written the bar is made of ASCII"
    live, out = terminal(encoding=encoding)

    live.update(mk_bar())

    assert '#.' in out.getvalue() and out.getvalue().isascii()


@pytest.mark.parametrize('bar', [mk_bar(), None])
def test_terminal_note(terminal, bar):
    "A note takes the bar's place, on a line that is ended"
    live, out = terminal()

    live.update(bar)
    live.close('stopped in epoch 2/5')

    assert screen(out.getvalue()) == ['stopped in epoch 2/5', '']


def test_terminal_writes_nothing_for_nothing(terminal):
    "A fit that is over before a bar was due leaves no trace"
    live, out = terminal()

    live.update(None)
    live.close()

    assert out.getvalue() == ''


# ---- tables, and other displays

@pytest.mark.parametrize('title', [None, 'Callbacks'])
def test_show_table_as_text(stdout, title):
    "Words are aligned left, numbers right, under their names"
    out = stdout()

    show_table(['event', 'order'], [['fit', 1], ['  epoch', 100]], title)

    assert out.getvalue() == (f'{title}\n' if title else '') + 'event    order\nfit          1\n  epoch    100\n'


def test_show_table_of_nothing(stdout):
    "A table without rows is its header"
    out = stdout()

    show_table(['a', 'b'], [])

    assert out.getvalue() == 'a  b\n'


def test_show_table_refuses_ragged_rows():
    "A row of another length is an error, not a shifted column"
    with pytest.raises(ValueError, match='zip'): show_table(['a', 'b'], [[1]])


def test_replacement():
    "The example in `Live`'s docstring works: one class shows bars with tqdm, here a stand-in with its interface"
    bars = []
    class tqdm:
        def __init__(self, total, desc, leave):
            self.total, self.desc, self.n, self.open = total, desc, 0, True
            bars.append(self)
        def update(self, n): self.n += n
        def close(self): self.open = False
        def __bool__(self): return self.total > 0  # as in tqdm: an error where the total is unknown
    names = dict(tqdm=tqdm, LogLive=LogLive)
    code = re.search(r'^class .*', cleandoc(Live.__doc__).replace('\n    ', '\n'), re.S | re.M)[0]
    exec(code, names)
    live = names['TqdmLive']()

    live.start(['epoch'])
    for bar in (mk_bar(i=1), mk_bar(i=4), None, mk_bar(i=2, n=None, phase='valid')): live.update(bar)
    live.close()

    assert [(b.desc, b.total, b.n, b.open) for b in bars] == [('epoch 2/5 train', 10, 4, False),
                                                              ('epoch 2/5 valid', None, 2, False)]


@pytest.mark.parametrize('seconds, shown', [(.157, '0.16s'), (9.99, '9.99s'), (65., '01:05'), (3700., '1:01:40')])
def test_times_in_rows(seconds, shown, capsys):
    "An epoch's time is shown in seconds while it is short, as a clock otherwise"
    set_display('log')
    try: show_table(['time'], [[seconds]])
    finally: set_display('auto')

    assert capsys.readouterr().out.split() == ['time', shown]


# ---- results

@pytest.mark.parametrize('mode, interactive, shown', [
    ('terminal', False, 'a table\n'), ('log', False, 'a table\n'), ('notebook', False, ''), ('off', False, ''),
    ('terminal', True, ''), ('log', True, '')])
def test_results_are_printed_in_scripts(mode, interactive, shown, stdout, monkeypatch):
    "What is returned to be read is printed, unless a notebook or an interactive session shows it"
    if interactive: monkeypatch.setattr(sys, 'ps1', '>>> ', raising=False)
    else: monkeypatch.delattr(sys, 'ps1', raising=False)
    out = stdout()
    set_display(mode)

    show_result('a table')

    assert out.getvalue() == shown
