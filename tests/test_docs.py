"""What is public is documented: what it does, each of its parameters, each error; and its examples are true."""
import ast
import doctest
import importlib
import inspect
import re
from functools import partial
from textwrap import dedent

import pytest
from fastcore.docments import docments

import learner
from learner import event
from learner.integrations import mmengine
from tests.test_layout import modules, tree

special = '__init__', '__call__'  # also part of what is public


def ours(o): return (getattr(o, '__module__', None) or '').startswith('learner.')

def written(o):
    "The function as it was written: without the property, class method or decorator around it"
    o = next((getattr(o, k) for k in ('fget', 'func', '__func__') if getattr(o, k, None)), o)
    return inspect.unwrap(o) if callable(o) else o


def public():
    "Name, object and class (None for a function) of all that is public: functions, classes, and what those define"
    for name, o in [(name, getattr(m, name)) for m in (learner, mmengine) for name in m.__all__]:
        if not isinstance(o, (type, partial)): yield name, written(o), None
        for cls in filter(ours, getattr(o, '__mro__', ())):
            yield cls.__name__, cls, cls
            yield from ((f'{cls.__name__}.{k}', written(m), cls) for k, m in vars(cls).items()
                        if not k.startswith('_') or k in special)

objects = {name: (o, cls) for name, o, cls in public() if inspect.isclass(o) or inspect.isfunction(o) and ours(o)}
# what `dataclass` makes has no source; its fields are described in the class
functions = {name: (f, cls) for name, (f, cls) in objects.items()
             if inspect.isfunction(f) and f.__code__.co_filename != '<string>'}


def doc(name):
    "Its docstring, which for a method may be the one of the method that it overrides"
    o, cls = objects[name]
    return inspect.getdoc(o if o is cls or cls is None else getattr(cls, name.partition('.')[2])) or ''


def described(f):
    "The parameters of a function that have a comment, or a text in their annotation"
    in_source = re.findall(r'\*\*(\w+)\b.*# ', inspect.getsource(f))  # docments misses the comment on `**kwargs`
    return {*in_source, *(name for name, text in docments(f, returns=False).items() if text)}


def raised(f):
    "Names of the errors that the body of a function raises itself; what it catches and raises again is not counted"
    def visit(node):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call): yield ast.unparse(node.exc.func)
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, (ast.FunctionDef, ast.Lambda)): yield from visit(child)
    return {e for stmt in ast.parse(dedent(inspect.getsource(f))).body for e in visit(stmt)}


def errors_told(text):
    "What a docstring says after `Raises:`, up to the next label"
    return ' '.join(re.findall(r'Raises:(.*?)(?=\n\s*(?:Source|Order|Example):|\Z)', text, re.S))


# ---- docstrings and comments

@pytest.mark.parametrize('name', [n for n in objects if n.partition('.')[2] not in (*vars(event), *special)])
def test_docstring(name):
    "All that is public has a docstring, for an override that of what it overrides; its first line stands alone"
    first, *rest = doc(name).splitlines() or ['']

    assert first.strip() and not ''.join(rest[:1])

@pytest.mark.parametrize('name', sorted(modules))
def test_module_docstring(name):
    "Each module begins with a sentence that says what it is for"
    assert ast.get_docstring(tree(name))

@pytest.mark.parametrize('name', functions)
def test_parameters_are_described(name):
    "Every parameter of a public function, constructor or method says what it is, there or where it is overridden from"
    f, cls = functions[name]
    code, kinds = f.__code__, inspect.signature(f).parameters.values()
    own = {*code.co_varnames[:code.co_argcount+code.co_kwonlyargcount],  # `@delegates` gives it those of another
           *(p.name for p in kinds if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD))} - {'self', 'cls'}
    above = [written(vars(base).get(f.__name__)) for base in (cls.__mro__[1:] if cls else ()) if ours(base)]

    assert own - {p for o in (f, *filter(inspect.isfunction, above)) for p in described(o)} == set()

@pytest.mark.parametrize('name', functions)
def test_errors_are_told(name):
    "An error that a public function raises itself is named after `Raises:`, in its docstring or in its class's"
    f, cls = functions[name]
    told = errors_told(doc(name)) + errors_told(inspect.getdoc(cls) or '')

    assert {e for e in raised(f) if e not in told} == set()


# ---- examples

examples = {test.name: test for name in modules if name not in ('__init__', 'all')
            for test in doctest.DocTestFinder().find(importlib.import_module(f'learner.{name}')) if test.examples}

@pytest.mark.parametrize('name', examples)
def test_example_is_true(name):
    "The examples in docstrings run, and give what they say"
    said = []

    assert not doctest.DocTestRunner(verbose=False).run(examples[name], out=said.append).failed, ''.join(said)

@pytest.mark.parametrize('name', modules)
def test_example_can_be_run(name):
    "What a docstring calls `Example:` is a doctest"
    docs = [ast.get_docstring(n) or '' for n in ast.walk(tree(name))
            if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef))]

    assert [d for d in docs if 'Example:' in d and '>>> ' not in d.partition('Example:')[2]] == []
