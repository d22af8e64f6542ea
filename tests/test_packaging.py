"""What is released: settings.ini is the one place for its metadata, and a wheel holds the package and nothing else."""
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from configparser import ConfigParser
from email import message_from_bytes
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

import learner

root = Path(__file__).parents[1]
ini = ConfigParser(delimiters=['='])
ini.read(root/'settings.ini', encoding='utf-8')
settings = ini['DEFAULT']


def run(*args, cwd):
    "What a command prints; all of its output if it fails"
    env = {k: v for k, v in os.environ.items() if k != 'PYTHONPATH'}
    done = subprocess.run(list(map(str, args)), cwd=cwd, env=env, capture_output=True, encoding='utf-8')
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope='module')
def built(tmp_path_factory):
    "A wheel, made from a source distribution, which is made from a copy of the checkout"
    src, out = tmp_path_factory.mktemp('src')/'checkout', tmp_path_factory.mktemp('dist')
    made = shutil.ignore_patterns('.*', '__pycache__', '*.egg-info', 'build', 'dist', 'runs')
    shutil.copytree(root, src, ignore=made)
    run(sys.executable, '-m', 'build', '--no-isolation', '--outdir', out, src, cwd=out)
    return {path.suffix: path for path in out.iterdir()}

@pytest.fixture(scope='module', params=['.whl', '.gz'])
def metadata(request, built):
    "The metadata of the wheel, and of the source distribution"
    path, stem = built[request.param], f"torch_learner-{settings['version']}"
    if path.suffix == '.gz':
        with tarfile.open(path) as f: f.extract(f'{stem}/PKG-INFO', out := path.parent, filter='data')
        return message_from_bytes((out/stem/'PKG-INFO').read_bytes())
    with zipfile.ZipFile(path) as f: return message_from_bytes(f.read(f'{stem}.dist-info/METADATA'))


def test_version():
    "`learner.__version__` is that of settings.ini"
    assert learner.__version__ == settings['version']

@pytest.mark.parametrize('key', """lib_name lib_path nbs_path doc_path version min_python description keywords author
    author_email license branch requirements dev_requirements""".split())
def test_nbdev_keys(key):
    "settings.ini has the keys of nbdev's convention"
    assert settings[key]

@pytest.mark.parametrize('field, key', [('Name', 'lib_name'), ('Version', 'version'), ('Summary', 'description'),
    ('Author', 'author'), ('Author-email', 'author_email'), ('License-Expression', 'license')])
def test_metadata_is_that_of_settings(metadata, field, key):
    "What a release says of itself comes from settings.ini"
    assert metadata[field] == settings[key]

def test_name_and_licence(metadata):
    "It is released as torch-learner, under the Apache License 2.0, whose text it carries"
    assert (metadata['Name'], metadata['License-Expression']) == ('torch-learner', 'Apache-2.0')
    assert metadata['License-File'] == 'LICENSE'

def test_requirements(metadata):
    "Requirements and extras are those of settings.ini; the former have lower bounds, and no upper ones"
    extras = {k.removesuffix('_requirements'): v.split() for k, v in settings.items() if k.endswith('_requirements')}
    needed = settings['requirements'].split()
    optional = [f'{r}; extra == "{extra}"' for extra, rs in extras.items() for r in rs]

    assert metadata.get_all('Requires-Dist') == needed + optional
    assert metadata['Requires-Python'] == f">={settings['min_python']}"
    assert [r for r in needed if '>=' not in r or '<' in r or '==' in r] == []

def pins(name):
    "Version by package, as a constraints file has it"
    lines = (root/name).read_text(encoding='utf-8').splitlines()
    return dict(line.split('==') for line in lines if not line.startswith('#'))

@pytest.mark.parametrize('requirement', settings['requirements'].split())
def test_lower_bound_was_run(requirement):
    "`make floors` runs the tests with exactly the versions that settings.ini calls the oldest"
    name, bound = requirement.split('>=')

    assert Version(pins('constraints-floors.txt')[name]) == Version(bound)

@pytest.mark.parametrize('requirement', f"{settings['requirements']} {settings['dev_requirements']}".split())
def test_version_is_pinned(requirement):
    "constraints.txt says with which version of each package the tests ran, and settings.ini allows it"
    needed = Requirement(requirement)

    assert needed.specifier.contains(pins('constraints.txt')[needed.name])

def test_readme_is_the_long_description(metadata):
    "A release carries the README"
    assert metadata.get_payload(decode=True).decode() == (root/'README.md').read_text(encoding='utf-8')

def test_wheel_holds_the_package_only(built):
    "All files of learner/, py.typed among them if it is there, and none beside it"
    package = {p for p in (root/'learner').rglob('*') if p.is_file() and p.suffix != '.pyc'}
    with zipfile.ZipFile(built['.whl']) as f: names = set(f.namelist())

    assert {n for n in names if '.dist-info/' not in n} == {p.relative_to(root).as_posix() for p in package}

def test_wheel_works_elsewhere(built, tmp_path):
    "Installed in an environment of its own, it is imported from there, without the checkout"
    env = tmp_path/'env'
    run(sys.executable, '-m', 'venv', '--without-pip', env, cwd=tmp_path)
    python = env/'bin/python'
    pip = sys.executable, '-m', 'pip', '--python', python
    run(*pip, 'install', '--no-index', '--no-deps', built['.whl'], cwd=tmp_path)
    site = Path(run(python, '-c', "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    (site/'what_it_needs.pth').write_text(str(Path(torch.__file__).parents[1]))

    said = run(python, '-c', "import learner, learner.callbacks.show; from importlib.metadata import version; "
               "print(learner.__file__, learner.__version__, version('torch-learner'))", cwd=tmp_path)

    assert said.split() == [str(site/'learner/__init__.py'), settings['version'], settings['version']]
