"""The notebooks run from top to bottom, show a fit in HTML that lasts, and are stored clean."""
import asyncio
import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

root = Path(__file__).parents[1]
paths = {p.stem: p for p in sorted((root/'nbs').glob('[0-9][0-9]_*.ipynb'))}

# What the libraries below the notebook announce for later is not ours to mend
strict = "import warnings; warnings.simplefilter('error'); warnings.simplefilter('default', PendingDeprecationWarning)"


class Client(NotebookClient):
    "Runs a notebook in a new kernel, and notes the display id of each message that has one, by cell"
    def process_message(self, msg, cell, cell_index):
        if shown := (msg['content'].get('transient') or {}).get('display_id'):
            self.resources.setdefault('display_ids', {}).setdefault(cell_index, []).append(shown)
        return super().process_message(msg, cell, cell_index)


async def run(name, folder, turn):
    "The notebook with its new outputs, and the display ids of each cell; files go to `folder`"
    nb = nbformat.read(paths[name], 4)
    nb.cells.insert(0, nbformat.v4.new_code_cell(strict))
    env = {k: v for k, v in os.environ.items() if k != 'LEARNER_DISPLAY'}
    env |= dict(OMP_NUM_THREADS='1', PYTHONPATH=str(root), IPYTHONDIR=str(folder/'ipython'))
    client = Client(nb, timeout=100, kernel_name='python3', resources={'metadata': {'path': str(folder)}})
    async with turn: await client.async_execute(env=env)
    return nb, client.resources.get('display_ids', {})


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    "What `run` returned for each notebook, or the error in it; two at a time"
    async def all_of_them():
        turn = asyncio.Semaphore(2)
        runs = [run(name, tmp_path_factory.mktemp(name), turn) for name in paths]
        return await asyncio.gather(*runs, return_exceptions=True)
    return dict(zip(paths, asyncio.run(all_of_them())))


def checked(outcome):
    "What a run returned; its error fails the test, with the cell and the traceback in the kernel"
    if isinstance(outcome, CellExecutionError): pytest.fail(str(outcome), pytrace=False)
    if isinstance(outcome, BaseException): raise outcome
    return outcome


@pytest.mark.parametrize('name', paths)
def test_notebook_runs(runs, name):
    "Every cell of the notebook runs in a real kernel, with warnings as errors, and all of its tests hold"
    checked(runs[name])


@pytest.mark.parametrize('name, code', [('00_index', 'learn.fit('), ('03_metrics_recorder', 'ShowGraphCallback).fit(')])
def test_fit_is_one_lasting_output(runs, name, code):
    "A fit updates one output, whose HTML has no element that a notebook opened untrusted would drop"
    nb, display_ids = checked(runs[name])
    i = next(i for i, cell in enumerate(nb.cells) if cell.cell_type == 'code' and code in cell.source)

    (out,) = nb.cells[i].outputs

    assert len(display_ids[i]) > 1 and len(set(display_ids[i])) == 1
    assert out.output_type == 'display_data' and [*out.data] == ['text/html']  # and so no widget
    assert '<table' in out.data['text/html'] and not re.search('<(style|svg|script)', out.data['text/html'])
    assert ('<img' in out.data['text/html']) == ('Graph' in code)


@pytest.mark.parametrize('name', paths)
def test_notebook_is_stored_clean(name):
    "A stored notebook is valid, begins with a title and a summary, and holds no error, counter or path of a machine"
    nb = nbformat.read(paths[name], 4)
    code = [cell for cell in nb.cells if cell.cell_type == 'code']
    outputs = [out for cell in code for out in cell.outputs]
    texts = [cell.source for cell in nb.cells] + [o.get('text', '') for o in outputs] + [
        text for o in outputs for kind, text in o.get('data', {}).items() if kind.startswith('text/')]

    nbformat.validate(nb)

    assert nb.metadata.kernelspec.name == 'python3'
    assert re.match(r'# .+\n\n> .+', nb.cells[0].source)
    assert not any(o.output_type == 'error' or o.get('name') == 'stderr' for o in outputs)
    assert all(cell.execution_count is None for cell in code) and not any(cell.metadata for cell in nb.cells)
    assert not re.search(r'ipykernel_\d|[/\\](home|Users|root|tmp|work|mnt)[/\\]', '\n'.join(texts))
