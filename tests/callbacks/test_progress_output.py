"""What a real fit writes: lines in a log, a bar in a terminal, one HTML output in a notebook's kernel."""
import io
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from learner.callbacks.progress import ProgressCallback
from learner.callbacks.recorder import Recorder
from tests.helpers import synth_learner

root = Path(__file__).parents[2]

program = '''
import sys
from learner.callbacks.progress import *
from learner.callbacks.recorder import Recorder
from tests.helpers import synth_learner

learn = synth_learner([Recorder, ProgressCallback, ShowGraphCallback], n=20, default_cbs=False)
learn.fit(2)
'''


@pytest.fixture(scope='module', autouse=True)
def as_installed():
    with pytest.MonkeyPatch.context() as m:
        m.delenv('LEARNER_DISPLAY', raising=False)
        yield


def test_log_of_a_script():
    "A script whose output is no terminal writes plain lines, and imports neither IPython nor matplotlib"
    code = program + "print(sorted({'IPython', 'matplotlib', 'pandas'} & sys.modules.keys()))"

    out = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True,
                         cwd=root).stdout.splitlines()

    assert 'plot_loss()' in out[0]
    assert [line.split()[0] for line in out[1:]] == ['epoch', '0', '1', '[]']
    assert len({len(line) for line in out[1:4]}) == 1 and '\r' not in ''.join(out)


def test_terminal(monkeypatch):
    "In a terminal the bar is below the rows while the fit runs, and gone at the end"
    class Terminal(io.StringIO):
        def isatty(self): return True
    monkeypatch.setattr(sys, 'stdout', out := Terminal())
    learn = synth_learner([Recorder, ProgressCallback], n=20, default_cbs=False)

    learn.fit(2)
    last = [line.split('\r')[-1].split() for line in out.getvalue().split('\n')]

    assert 'epoch 1/2 train' in out.getvalue()
    assert [words[:1] for words in last] == [['epoch'], ['0'], ['1'], []]


@pytest.fixture(scope='module')
def cells():
    "Outputs of notebook cells run in a real kernel: a fit, one that is interrupted, and what the modules say"
    codes = [program,
             "from learner.callback import Callback\n"
             "from tests.helpers import raises\n"
             "learn.fit(3, cbs=Callback(after_loss=raises(KeyboardInterrupt, nth=30)))",
             "from learner.display import show_table\n"
             "show_table(['a<b', 'n'], [['x', 1]], title='T')",
             "learn.create_mbar = False\n"
             "learn.fit(1)"]
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in codes])
    NotebookClient(nb, timeout=60, allow_errors=True, resources=dict(metadata=dict(path=str(root)))).execute()
    return [c.outputs for c in nb.cells]


def test_notebook_output(cells):
    "A fit in a notebook has one output, `text/html` alone, which at the end holds the table and the graph"
    output, = cells[0]
    html = output.data['text/html']

    assert [*output.data] == ['text/html']
    assert html.count('<tr') == 3 and html.count('<img') == 1 and 'src="data:image/svg+xml;base64,' in html
    assert not any(tag in html for tag in ('<style', '<svg', '<script', '<progress'))


def test_notebook_interrupted(cells):
    "After an interrupt the table stays and says where the fit stopped; the error follows"
    output, error = cells[1]

    assert error.ename == 'KeyboardInterrupt'
    assert output.data['text/html'].count('<tr') == 2 and 'stopped in epoch 2/3 at training batch' in str(output.data)


def test_notebook_table(cells):
    "`show_table` shows HTML, with names as text"
    output, = cells[2]

    assert '<b>T</b>' in (html := output.data['text/html'])
    assert '<th style="text-align:left;white-space:pre">a&lt;b</th>' in html


def test_notebook_without_bar(cells):
    "Without a bar a notebook gets plain lines"
    text = ''.join(o.text for o in cells[3])

    assert [line.split()[0] for line in text.splitlines()][-2:] == ['epoch', '0']
