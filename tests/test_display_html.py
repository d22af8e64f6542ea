"""What display.py shows in a notebook: one output of table, bar and graph, in HTML that survives untrusted."""
import xml.etree.ElementTree as ET
from base64 import b64decode

import pytest

from learner import display
from learner.display import NotebookLive
from tests.test_display import mk_bar, nan, row


class Published:
    "A stand-in for IPython's `display` and its handle: keeps what is shown"
    def __init__(self): self.htmls, self.n_outputs = [], 0

    def __call__(self, data, raw, display_id=None):
        self.n_outputs += 1
        return self.update(data, raw)

    def update(self, data, raw):
        assert raw and [*data] == ['text/html']
        self.htmls.append(data['text/html'])
        return self

    def tree(self): return ET.fromstring(f'<out>{self.htmls[-1]}</out>')
    def tags(self): return {o.tag for o in self.tree().iter()}
    def rows(self): return [[c.text for c in tr] for tr in self.tree().iter('tr')]


@pytest.fixture
def notebook(monkeypatch):
    "A started NotebookLive, where its output goes, and a clock that stands at `clock[0]` seconds"
    clock = [100.]
    monkeypatch.setattr(display, 'perf_counter', lambda: clock[0])
    live, out = NotebookLive(), Published()
    live.start([*row])
    live.display = out
    return live, out, clock


def test_notebook_output(notebook):
    "One output holds table, bar and graph, in elements that survive in an untrusted notebook"
    live, out, clock = notebook
    live.graph(lambda: dict(train=(range(1, 4), [3., 2., 1.]), valid=([3], [1.5])))

    live.update(mk_bar())
    live.row(row)
    live.update(mk_bar(phase='valid'))

    assert out.n_outputs == 1 and len(out.htmls) == 3
    assert out.tags() == {'out', 'table', 'thead', 'tbody', 'tr', 'th', 'td', 'div', 'progress', 'img'}
    assert out.rows() == [['epoch', 'train_loss', 'valid_loss', 'time'], ['0', '0.500000', 'nan', '01:01']]
    assert out.tree().find('.//progress').attrib.items() >= dict(value='3', max='10').items()


@pytest.mark.parametrize('note, n_graphs', [('', 2), ('stopped <here>', 1)])
def test_notebook_close(notebook, note, n_graphs):
    "At the end the table stays; the bar is gone, or a note is in its place, and then the graph is not asked for again"
    live, out, clock = notebook
    graphs = []
    live.graph(lambda: graphs.append(1) or {})
    live.update(mk_bar())
    live.row(row)

    live.close(note)

    assert 'progress' not in out.tags() and len(out.rows()) == 2
    assert (out.tree().findtext('div') or '') == note and len(graphs) == n_graphs


def test_notebook_shows_nothing_for_nothing(notebook):
    "A fit that showed no bar and no row makes no output"
    live, out, clock = notebook

    live.close()

    assert out.n_outputs == 0


def test_notebook_escapes(notebook):
    "Names and values are text, whatever they contain"
    live, out, clock = notebook

    live.row({'<b>&': '<script>alert(1)</script>'})
    live.update(mk_bar(phase='<i>'))

    assert out.rows() == [['<b>&'], ['<script>alert(1)</script>']]
    assert not out.tags() & {'b', 'i', 'script'}


def test_notebook_bar_without_end(notebook):
    "Without a number of batches the bar has no value: it moves, and the count stands beside it"
    live, out, clock = notebook

    live.update(mk_bar(n=None, i=7))

    assert 'value' not in out.tree().find('.//progress').attrib and '7 · loss' in out.htmls[-1]


def test_notebook_without_table(notebook):
    "Without columns there is only the bar"
    live, out, clock = notebook

    live.start([])
    live.display = out
    live.update(mk_bar())

    assert out.tags() == {'out', 'div', 'progress'}


def test_notebook_long_table(notebook):
    "A long table shows its first and last rows and says how many are hidden, so that its size is bounded"
    live, out, clock = notebook

    for i in range(1000):
        clock[0] += 1
        live.row({**row, 'epoch': i})
    shown = [r[0] for r in out.rows()[1:]]

    assert shown == [*'01234', '… 895 rows hidden …', *map(str, range(900, 1000))]
    assert len(out.htmls[-1]) < 20_000


def test_notebook_fast_epochs(notebook):
    "Epochs of milliseconds are drawn a few times a second; the last rows come at the end at the latest"
    live, out, clock = notebook

    for i in range(100):
        clock[0] += .01
        live.row({**row, 'epoch': i})
    n_drawn = len(out.htmls)
    live.close()

    assert n_drawn == 4 and out.rows()[-1][0] == '99'


# ---- graph

def graph(**curves):
    img = ET.fromstring(display._graph_html(curves)).find('img')
    return ET.fromstring(b64decode(img.attrib['src'].removeprefix('data:image/svg+xml;base64,')))


def texts(svg): return [o.text for o in svg.iter('{http://www.w3.org/2000/svg}text')]
def points(svg):
    return [[tuple(map(float, p.split(','))) for p in o.attrib['points'].split()]
            for o in svg.iter('{http://www.w3.org/2000/svg}polyline')]


def test_graph():
    "Both curves lie inside the picture, to one scale; axes have their names and ends"
    svg = graph(train=(range(1, 5), [4., 3., 2., 1.]), valid=([2, 4], [3.5, 2.]))
    train, valid = points(svg)

    assert texts(svg) == ['4', '1', 'loss', '1', 'batch', '4', 'train', 'valid']
    assert train[1][0] == valid[0][0] and train[2][1] == valid[1][1]
    assert all(0 < x < 480 and 0 < y < 220 for x, y in train+valid)
    assert train[0][1] < train[-1][1]  # a falling loss falls


def test_graph_leaves_out_what_is_no_number():
    "NaN and infinite losses have no point"
    train, valid = points(graph(train=(range(1, 5), [1., nan, float('inf'), 2.]), valid=([2, 4], [nan, 1.])))

    assert (len(train), len(valid)) == (2, 1)


@pytest.mark.parametrize('ys', [[], [nan, nan]])
def test_graph_of_nothing(ys):
    "Without a point there is no picture"
    assert display._graph_html(dict(train=(range(len(ys)), ys))) == ''


@pytest.mark.parametrize('n', [1, 2, 500, 501, 100_000])
def test_graph_of_long_curve(n):
    "Long curves are thinned, to their very end"
    svg = graph(train=(range(1, n+1), [1.]*n))
    train, = points(svg)

    assert min(n, 250) <= len(train) <= 500 and texts(svg)[5] == str(n)


def test_graph_is_drawn_now_and_then(notebook):
    "The graph is drawn anew once a second, and at the end"
    live, out, clock = notebook
    n_asked = []
    live.graph(lambda: n_asked.append(clock[0]) or {})

    for _ in range(12):
        live.update(mk_bar())
        clock[0] += .25
    live.close()

    assert n_asked == [100., 101., 102., 103.]
