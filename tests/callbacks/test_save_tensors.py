"""`learn.save('….safetensors')`: weights alone in a file of another format, verified as well."""
import sys

import pytest
import torch
from torch import nn

from learner.callback import Callback
from learner.callbacks.save import checksum
from learner.files import DamagedFile
from tests.callbacks.test_save import equal, opt_digest, state, trained
from tests.helpers import synth_learner
from tests.resume_helpers import network, noisy_learner

safetensors = pytest.importorskip('safetensors', reason="safetensors is not installed")
library = pytest.importorskip('safetensors.torch')


class Tied(nn.Module):
    "One weight under two names, buffers of many kinds, and if `parts` two that are parts of one tensor"
    def __init__(self, parts=False):
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)
        self.b.weight = self.a.weight
        both = torch.arange(4.)
        if parts:
            self.register_buffer('first', both[:3])
            self.register_buffer('last', both[1:])
        self.register_buffer('turned', torch.randn(2, 3).T)
        self.register_buffer('none', torch.empty(0, 2))
        self.register_buffer('small', torch.randn(2).bfloat16())
    def forward(self, x): return self.b(self.a(x))


def metadata(path):
    with safetensors.safe_open(path, 'pt') as f: return f.metadata()


def test_there_and_back(tmp_path):
    "The weights come back, the optimizer stays, and the library's own functions open the file"
    learn, model = trained(tmp_path), network()
    path = learn.save('m.safetensors')
    other = trained(tmp_path)
    other.fit(1, 1e-2)
    known = opt_digest(other)

    other.load('m.safetensors')
    library.load_model(model, path)

    assert equal(state(other), state(learn)) and opt_digest(other) == known
    assert equal(model.state_dict(), state(learn)) and metadata(path).keys() == {'format', checksum}


def test_tied_weights(tmp_path):
    "What is one tensor is saved once, and the metadata says under which name"
    learn, other = synth_learner(model=Tied(), path=tmp_path), synth_learner(model=Tied(), path=tmp_path)
    model = Tied()
    path = learn.save('m.safetensors', with_opt=False)

    other.load('m.safetensors')
    library.load_model(model, path)

    assert equal(state(other), state(learn)) and equal(model.state_dict(), state(learn))
    assert other.model.b.weight is other.model.a.weight and metadata(path)['b.weight'] == 'a.weight'
    assert library.load_file(path).keys() == state(learn).keys() - {'b.weight'}


def test_parts_of_one_tensor(tmp_path):
    "Tensors that share memory otherwise are saved each on its own, which the library refuses"
    learn, other = (synth_learner(model=Tied(parts=True), path=tmp_path) for _ in range(2))
    learn.model.first += 1

    other.load(learn.save('m.safetensors'))

    assert equal(state(other), state(learn)) and other.model.last.tolist() == [2, 3, 3]


def test_file_of_the_library(tmp_path):
    "A file without checksum is loaded, and it is said"
    learn, model = synth_learner(model=Tied(), path=tmp_path), Tied()
    library.save_model(model, str(tmp_path/'m.safetensors'))

    with pytest.warns(UserWarning, match='m.safetensors is loaded unverified'): learn.load(tmp_path/'m.safetensors')

    assert equal(state(learn), model.state_dict())


@pytest.mark.filterwarnings('ignore:.*unverified')
@pytest.mark.parametrize('part', ['header', 'tensors'])
def test_damage_is_found(part, tmp_path):
    "Whatever bit is flipped in the tensors, the file is refused; elsewhere it is, or the weights are the right ones"
    learn = synth_learner(path=tmp_path)
    path, right = learn.save('m.safetensors'), state(learn)
    data, n_refused, loaded = path.read_bytes(), 0, []
    n_tensors = 8*sum(v.nbytes for v in right.values())
    bits = range(8*len(data)-n_tensors, 8*len(data)) if part == 'tensors' else range(8*len(data)-n_tensors)

    for bit in bits:
        damaged = bytearray(data)
        damaged[bit//8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        nn.init.zeros_(learn.model.a)
        try: loaded.append(equal(state(learn.load(path)), right))
        except ValueError: n_refused += 1

    assert all(loaded) and n_refused + len(loaded) == len(bits) and n_refused > len(bits)/2
    assert part == 'header' or n_refused == 64


@pytest.mark.parametrize('n', [0, 7, 50, -1])
def test_cut_short(n, tmp_path):
    "A part of a file is refused"
    learn = synth_learner(path=tmp_path)
    path = learn.save('m.safetensors')
    path.write_bytes(path.read_bytes()[:n])

    with pytest.raises(DamagedFile, match='m.safetensors is refused'): learn.load(path)


def test_no_optimizer(tmp_path):
    "It has no place for an optimizer: to ask for one is an error, when saving as when loading"
    learn = trained(tmp_path)
    learn.save('m.safetensors')

    with pytest.raises(ValueError, match='m.safetensors` holds tensors only; give `with_opt=False`'):
        learn.save('m.safetensors', with_opt=True)
    with pytest.raises(ValueError, match='no state of an optimizer'): learn.load('m.safetensors', with_opt=True)


def test_what_it_cannot_hold(tmp_path):
    "An extra state, or a type, is named; what a callback would add is left out with a warning"
    more = Callback(before_save=lambda cb, state: state.update(more={}))
    extra = Callback(before_save=lambda cb, state: state['model'].update(_extra_state={'a': 1}))

    with pytest.warns(UserWarning, match='not `more`, which a `before_save` put in'):
        synth_learner(more, path=tmp_path).save('m.safetensors')
    with pytest.raises(TypeError, match=r'`_extra_state` is a dict\(a=int\), and a .*only; a .\.pth. can'):
        synth_learner(extra, path=tmp_path).save('m.safetensors')
    with pytest.raises(TypeError, match='cannot hold all of the model, but .*torch.complex128'):
        synth_learner(model=nn.Linear(1, 1, dtype=torch.complex128), path=tmp_path).save('m.safetensors')


def test_partly(tmp_path):
    "Names can be left out and changed as in other files"
    learn = noisy_learner(tmp_path)
    path = learn.save('m.safetensors')
    other = noisy_learner(tmp_path, model=nn.Sequential(*network()[:4], nn.Identity(), nn.Linear(8, 2)))

    other.load(path, drop='*.bias', rename={r'^4\.': '5.'})

    assert torch.equal(other.model[5].weight, learn.model[4].weight)


def test_without_the_library(monkeypatch, tmp_path):
    "Where it is not installed, an error says what needs it and how to get it; other files work"
    monkeypatch.setitem(sys.modules, 'safetensors.torch', None)
    learn = synth_learner(path=tmp_path)
    (tmp_path/'m.safetensors').touch()

    for act in (learn.save, learn.load):
        with pytest.raises(ImportError, match='needs `safetensors.torch`: pip install safetensors'):
            act(tmp_path/'m.safetensors')
    learn.load(learn.save('m'))
