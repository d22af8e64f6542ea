"""The shape of the project: which file may import which, how long a file may be, what each must say and may not do."""
import ast
import importlib
import sys
from functools import cache
from pathlib import Path

import pytest

import learner

root = Path(__file__).parents[1]
package = root/'learner'

# A file imports from the levels below its own; what several files need lies below all of them.
levels = [
    '''archive events every exported files gradients hooks hypers interrupt keep layers loss_value models modes
       optimizers order outputs passing plain plan prototxt scalars schedules splitters tensors transfer utils
       weights workers''',
    '''callback calls checks data display findings frame host loader losses measure meta metrics optim pictures
       plot sizes skmetrics solver_param state''',
    'learner',
    '''callbacks.averaging callbacks.batch_size callbacks.channels callbacks.checkpoint callbacks.collect
       callbacks.compile callbacks.control callbacks.csv_logger callbacks.doctor callbacks.finetune
       callbacks.fit_call callbacks.fits callbacks.hook callbacks.iter_log callbacks.iterations callbacks.look
       callbacks.lr_find callbacks.memory callbacks.mixup
       callbacks.plateau callbacks.precision callbacks.predict callbacks.preds callbacks.preview callbacks.profile
       callbacks.progress callbacks.readings callbacks.recompute callbacks.recorder callbacks.regularize
       callbacks.rehearse callbacks.results callbacks.resume callbacks.rnn callbacks.save callbacks.saved_state
       callbacks.scalar_log callbacks.schedule
       callbacks.series callbacks.show callbacks.signals callbacks.solving callbacks.stats callbacks.summary
       callbacks.swa callbacks.switch callbacks.sync_buffers callbacks.testing callbacks.torch_schedule
       callbacks.tracker callbacks.training callbacks.turns
       callbacks.validate_every export interpret no_trace pickled publish resampled solver''',
    '''integrations.mmengine integrations.mmengine_hook integrations.mmengine_hub integrations.mmengine_runner
       integrations.mmengine_table''',
    '__init__ all',
]
# All imports within a level: a file, and those it builds on.
same_level = {
    'events': 'utils', 'exported': 'archive', 'files': 'utils', 'gradients': 'tensors',
    'hooks': 'gradients layers tensors weights', 'interrupt': 'events', 'modes': 'utils', 'scalars': 'utils',
    'transfer': 'utils',
    'checks': 'optim', 'data': 'loader losses', 'frame': 'checks metrics optim state', 'host': 'callback state',
    'metrics': 'measure', 'plot': 'display', 'sizes': 'loader', 'skmetrics': 'measure', 'solver_param': 'optim',
    'callbacks.averaging': 'callbacks.schedule', 'callbacks.batch_size': 'no_trace resampled',
    'callbacks.checkpoint': 'callbacks.tracker',
    'callbacks.channels': 'callbacks.precision', 'callbacks.doctor': 'callbacks.look no_trace resampled',
    'callbacks.finetune': 'callbacks.fits callbacks.schedule',
    'callbacks.fits': 'callbacks.schedule callbacks.training',
    'callbacks.iter_log': 'callbacks.hook callbacks.recorder callbacks.stats',
    'callbacks.iterations': 'callbacks.resume callbacks.saved_state callbacks.schedule callbacks.validate_every',
    'callbacks.lr_find': 'callbacks.recorder no_trace',
    'callbacks.validate_every': 'callbacks.control callbacks.series',
    'callbacks.plateau': 'callbacks.schedule callbacks.torch_schedule callbacks.tracker',
    'callbacks.predict': 'callbacks.preds', 'callbacks.preds': 'resampled',
    'callbacks.preview': 'callbacks.fit_call callbacks.schedule callbacks.torch_schedule',
    'callbacks.profile': 'callbacks.control callbacks.fit_call callbacks.rehearse',
    'callbacks.recorder': 'callbacks.series', 'callbacks.rehearse': 'callbacks.control callbacks.fit_call no_trace',
    'callbacks.results': 'callbacks.look no_trace resampled',
    'interpret': 'callbacks.predict callbacks.preds callbacks.results resampled',
    'callbacks.resume': 'callbacks.checkpoint callbacks.progress callbacks.saved_state callbacks.schedule',
    'callbacks.signals': 'callbacks.checkpoint', 'callbacks.stats': 'callbacks.hook',
    'callbacks.summary': 'no_trace', 'callbacks.swa': 'callbacks.averaging callbacks.schedule',
    'callbacks.switch': 'callbacks.iterations callbacks.resume', 'callbacks.sync_buffers': 'callbacks.validate_every',
    'callbacks.testing': 'callbacks.recorder', 'callbacks.readings': 'callbacks.recorder',
    'callbacks.torch_schedule': 'callbacks.schedule',
    'export': 'callbacks.averaging', 'pickled': 'export', 'publish': 'export',
    'solver': 'callbacks.iter_log callbacks.regularize callbacks.solving callbacks.tracker callbacks.training',
    'callbacks.training': 'callbacks.control callbacks.schedule callbacks.turns',
    'integrations.mmengine': '''integrations.mmengine_hook integrations.mmengine_hub integrations.mmengine_runner
                               integrations.mmengine_table''',
    'integrations.mmengine_hook': 'integrations.mmengine_runner',
    'integrations.mmengine_runner': 'integrations.mmengine_hub',
    'all': '__init__',
}
level_of = {name: i for i, names in enumerate(levels) for name in names.split()}
allowed_within = {(name, other) for name, others in same_level.items() for other in others.split()}

# What may be imported at the top of a file, beside the standard library: all else is imported where it is used.
third_party = ('torch', 'numpy', 'fastcore.basics', 'fastcore.foundation', 'fastcore.meta')

core = 'events', 'callback', 'learner'


def name_of(path): return '.'.join(path.relative_to(package).with_suffix('').parts)

modules = {name_of(p): p for p in sorted(package.rglob('*.py')) if p.stat().st_size}  # `callbacks/__init__` is empty
every_module = pytest.mark.parametrize('name', modules)
sources = [p for folder in (package, root/'tests', root/'nbs') for p in sorted(folder.rglob('*.py'))]


@cache
def tree(name): return ast.parse(modules[name].read_text(encoding='utf-8'))

def n_lines(path): return len(path.read_text(encoding='utf-8').splitlines())


def at_import(node):
    "All that runs when a module is imported: what lies outside functions"
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield child
            yield from at_import(child)


def imported(name, nodes):
    "What the import statements among `nodes` of a module import: full dotted names, of members too"
    folder = ['learner', *name.split('.')[:-1]]
    for node in nodes:
        if isinstance(node, ast.Import): yield from (a.name for a in node.names)
        if isinstance(node, ast.ImportFrom):
            above = folder[:len(folder)-node.level+1] if node.level else []
            yield from ('.'.join([*above, *filter(None, [node.module]), a.name]) for a in node.names)


def edges(name):
    "The modules of the package that a module imports, at its top or inside a function"
    for full in imported(name, ast.walk(tree(name))):
        top, *parts = full.split('.')
        if top != 'learner': continue
        while parts and '.'.join(parts) not in modules: parts.pop()  # a member: of the module before it
        yield '.'.join(parts) or '__init__'

all_edges = {(name, other) for name in modules for other in edges(name)}


# ---- size

@pytest.mark.parametrize('path', sources, ids=lambda p: str(p.relative_to(root)))
def test_file_is_short(path):
    "Every file has less than 350 lines"
    assert n_lines(path) < 350

def test_core_is_read_in_one_sitting():
    "The three files of the core have less than 500 lines together"
    assert sum(n_lines(modules[name]) for name in core) < 500


# ---- imports

def test_every_module_has_a_level():
    "The table of levels names every file of the package, and no other"
    assert set(level_of) == set(modules)

@every_module
def test_no_upward_import(name):
    "A file imports nothing from a higher level, and within its level only what the table says"
    others = {o for a, o in all_edges if a == name}

    assert {o for o in others if level_of[o] > level_of[name]} == set()
    assert {(name, o) for o in others if level_of[o] == level_of[name]} - allowed_within == set()

def test_table_is_not_stale():
    "Each import within a level that the table allows is there"
    assert allowed_within - all_edges == set()

def test_no_cycle():
    "The files can be read in an order in which each needs only those before it"
    left = dict.fromkeys(modules, ())
    while ready := [n for n in left if not any(a == n and o in left for a, o in all_edges)]:
        for n in ready: del left[n]
    assert list(left) == []

@pytest.mark.parametrize('name', sorted(modules.keys() - {'all'}))
def test_third_party_imports_are_lazy(name):
    "At the top of a file, but for all.py, only torch, numpy and three small parts of fastcore are imported"
    allowed = *third_party, 'learner', *sys.stdlib_module_names
    found = set(imported(name, at_import(tree(name))))

    assert {o for o in found if not any(f'{o}.'.startswith(f'{a}.') for a in allowed)} == set()


# ---- names

@every_module
def test_all_is_explicit_and_true(name):
    "Each module lists what it offers in `__all__`, without repetition, and has it"
    mod = importlib.import_module('learner' if name == '__init__' else f'learner.{name}')

    assert any(isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == '__all__' for n in tree(name).body)
    assert len(set(mod.__all__)) == len(mod.__all__)
    assert [n for n in mod.__all__ if not hasattr(mod, n)] == []

def test_no_public_name_is_a_modules():
    "`learner.x` is a module or what `learner` offers, never both"
    assert set(learner.__all__) & {part for name in modules for part in name.split('.')} == set()


# ---- habits

@every_module
def test_only_display_prints(name):
    "Whether anything is shown, and how, is decided in display.py"
    calls = [n.lineno for n in ast.walk(tree(name)) if isinstance(n, ast.Call) and ast.unparse(n.func) == 'print']

    assert calls == [] or name == 'display'

@every_module
def test_only_plot_names_matplotlib(name):
    "Drawing is plot.py's and pictures.py's, which import matplotlib when something is drawn"
    texts = [n.value for n in ast.walk(tree(name)) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    named = [t for t in [*imported(name, ast.walk(tree(name))), *texts] if t.startswith('matplotlib')]

    assert named == [] or name in ('plot', 'pictures', 'all')

@every_module
def test_functions_are_short(name):
    "The body of a function, without its docstring, has at most 25 lines"
    functions = [n for n in ast.walk(tree(name)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    bodies = [(f, f.body[1:] or f.body if ast.get_docstring(f) else f.body) for f in functions]

    assert [f.name for f, body in bodies if (body[-1].end_lineno or 0) - body[0].lineno + 1 > 25] == []
