"""Files that are made to do harm: whatever opens one, nothing in it is run, and no name in it is imported (S21)."""
import os
import sys
from contextlib import suppress

import pytest
import torch

from learner.files import save_file
from learner.plain import to_plain
from tests.file_helpers import with_trailer
from tests.resume_helpers import noisy_learner

opens = dict(load=lambda learn, path: learn.load(path), load_state=lambda learn, path: learn.load_state(path),
             resume=lambda learn, path: learn.fit(2, resume=path))
everywhere = pytest.mark.parametrize('how', opens)


class Runs:
    "Makes a folder when it is unpickled"
    def __init__(self, folder): self.folder = folder
    def __reduce__(self): return os.mkdir, (str(self.folder),)


@everywhere
@pytest.mark.parametrize('sealed', [True, False])
@pytest.mark.parametrize('place', ['whole', 'model', 'opt', 'callbacks'])
@pytest.mark.filterwarnings('ignore:.*unverified')
def test_s21_pickle_that_runs_a_function(how, place, sealed, tmp_path):
    "It is refused, with a good checksum as without one, and the function is not run"
    harm, path, learn = Runs(tmp_path/'harm'), tmp_path/'m.ckpt', noisy_learner(tmp_path)
    torch.save(harm if place == 'whole' else learn.state_dict() | {place: harm}, path)
    if sealed: path.write_bytes(with_trailer(path.read_bytes()))

    with pytest.raises(ValueError, match='m.ckpt is refused' if sealed or how == 'load' else 'without a checksum'):
        opens[how](learn, path)

    assert not harm.folder.exists()
    with suppress(ValueError): torch.load(path, weights_only=False)
    assert harm.folder.exists()


def poisoned(o):
    "All plain values replaced by the name of a function"
    if isinstance(o, dict): return {k: poisoned(v) for k, v in o.items()}
    if isinstance(o, (list, tuple)): return type(o)(map(poisoned, o))
    return o if isinstance(o, torch.Tensor) else 'harmful_module.run'


@everywhere
@pytest.mark.parametrize('part', ['opt', 'hypers', 'callbacks', 'counters', 'rates', 'rng', 'loader', 'data', 'model',
                                  'loss', 'evals', 'frozen', 'version', 'place'])
@pytest.mark.filterwarnings('ignore')
def test_s21_names_of_functions(how, part, tmp_path, monkeypatch):
    "A valid file in which values are the name of a function is refused or inert: the name is not even looked up"
    (tmp_path/'harmful_module.py').write_text("def run(*args, **kwargs): raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    learn = noisy_learner(tmp_path)
    learn.fit(1, 1e-2)
    state = to_plain(learn.state_dict())
    value = poisoned(state[part]) if state[part] else {'weight': 'harmful_module.run'}
    save_file({**state, part: value}, tmp_path/'m.ckpt')

    with suppress(Exception): opens[how](noisy_learner(tmp_path), tmp_path/'m.ckpt')

    assert 'harmful_module' not in sys.modules


@everywhere
@pytest.mark.parametrize('name', ['harmful_module.run', 'os.system', 'eval', '__import__', 'learner.plain.digest'])
def test_s21_kinds_that_are_names_of_functions(how, name, tmp_path, monkeypatch):
    "A value of a kind that is not in the table is refused, though a function of that name may be imported"
    (tmp_path/'harmful_module.py').write_text("def run(*args, **kwargs): raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    learn = noisy_learner(tmp_path)
    state = to_plain(learn.state_dict())
    save_file({**state, 'data': {'__kind__': name, 'parts': ['raise SystemExit']}}, tmp_path/'m.ckpt')

    with pytest.raises(ValueError, match=f'a value of kind {name!r}, which is not known'):
        opens[how](learn, tmp_path/'m.ckpt')

    assert 'harmful_module' not in sys.modules
