"""`learn.export` and `load_exported`: the program gives what the model gives, wherever it runs, and says what it is."""
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import learner
from learner.callbacks.averaging import EMA
from learner.exported import load_exported
from learner.files import write_file
from learner.learner import Learner
from learner.plain import digest
from learner.utils import rng_state
from tests.export_helpers import close, given, images, learner_of, loader, rows
from tests.helpers import synth_learner


class Sum(nn.Module):
    "Two inputs"
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(4, 2)

    def forward(self, x, z): return self.a(x) + self.b(z)


@dataclass
class Output:
    logits: Tensor
    hidden: tuple


class Named(Sum):
    "Gives a dataclass"
    def forward(self, x, z):
        h = super().forward(x, z)
        return Output(h.softmax(1), (h, [h+1]))


class Lists(nn.Module):
    "Operators with lists, sizes, constants, and a buffer that is not saved"
    def __init__(self):
        super().__init__()
        self.register_buffer('scale', torch.arange(3.), persistent=False)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16)

    def forward(self, x):
        a, *_, b = x.chunk(4, 1)
        top, at = x.topk(2)
        rest = torch.zeros(x.shape[0]*2+1, device=x.device).sum() + torch.tensor([1., float('inf')]).clamp(max=3).sum()
        y = self.layer(x[:, None].expand(-1, 3, -1))
        best = top[torch.arange(x.shape[0]), at.argmax(1)]
        return {'y': y.mean(1)+rest, 'more': [a*b, best], 'n': x[:, :3]*self.scale}


class Branches(nn.Module):
    "Has no program"
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x): return self.layer(x if x.sum() > 0 else -x)


def state(learn):
    "All that an export could change"
    m = learn.model
    return (digest(m.state_dict()), [(k, p.requires_grad, p.data_ptr()) for k, p in m.named_parameters()],
            [sorted(vars(o)) for o in m.modules()], [o.training for o in m.modules()],
            [len(o._forward_hooks)+len(o._forward_pre_hooks) for o in m.modules()], digest(rng_state()),
            learn.forward_context, torch.is_grad_enabled(), learn.opt, learn.dls.train.position)


# ---- the program

alone = '''
import json, sys
sys.modules['learner'] = None
import torch
from small.exported import load_exported
known = torch.load('known.pt', weights_only=True)
extra = {'learner.json': ''}
program = torch.export.load('model.pt2', extra_files=extra).module()
assert json.loads(extra['learner.json'])['vocab'] == ['cat', 'dog', 'newt']
for x, y in known:
    torch.testing.assert_close(program(x), y, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(load_exported('model.pt2')(x), y, rtol=1e-6, atol=1e-6)
assert sys.modules['learner'] is None and not any(m.startswith(('learner.', 'fastcore')) for m in sys.modules)
'''

def test_torch_alone_runs_it(tmp_path):
    "Without the package, torch's own call gives what the model gives, and so do the two files that read it safely"
    learn = images(tmp_path)
    learn.export('model.pt2')
    batches = [rows((3, 6, 6), n=n, seed=n)[0] for n in (1, 2, 7)]
    torch.save([(x, given(learn, x)) for x in batches], tmp_path/'known.pt')
    (tmp_path/'small').mkdir()
    for name in ('archive.py', 'exported.py'):
        shutil.copy(Path(learner.__file__).parent/name, tmp_path/'small')

    done = subprocess.run([sys.executable, '-W', 'error', '-c', alone], cwd=tmp_path, env={}, capture_output=True,
                          text=True)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize('n', [1, 2, 7])
def test_any_size_of_batch(n, tmp_path):
    "In eval mode, whatever the size of the batch"
    learn = images(tmp_path)
    x, = rows((3, 6, 6), n=n)

    close(load_exported(learn.export())(x), given(learn, x))


def test_several_inputs(tmp_path):
    "A model of two inputs takes two"
    x, z, y = rows(3, 4, 2)
    learn = learner_of(Sum, x, z, y, path=tmp_path)

    exported = load_exported(learn.export('m'))

    close(exported(x, z), given(learn, x, z))
    assert repr(exported) == 'Exported(Sum, x float32[n, 3], z float32[n, 4])'
    with pytest.raises(TypeError, match='takes other inputs than 1 inputs by position'): exported(x)
    with pytest.raises(TypeError, match='than 1 inputs by position, `z`'): exported(x, z=z)


def test_inputs_by_name(tmp_path):
    "What goes into the model by keyword is given so, and a dataclass that it gives becomes a dict"
    x, z, y = rows(3, 4, 2)
    torch.manual_seed(0)
    learn = Learner([dict(x=x, z=z, label=y)], Named(), lambda out, y: F.mse_loss(out.logits, y), default_cbs=False,
                    path=tmp_path)

    exported = load_exported(learn.export())

    out, known = exported(z=z[:1], x=x[:1]), given(learn, x[:1], z[:1])
    close(out, dict(logits=known.logits, hidden=known.hidden))
    close(exported.predict(x=x, z=z)[2], given(learn, x, z).logits)


@pytest.mark.parametrize('size, model', [(8, Lists), ((5, 3), partial(nn.LSTM, 3, 4, batch_first=True)),
                                         ((2, 8, 8), partial(nn.Conv2d, 2, 3, 3, padding='same'))],
                         ids=['lists', 'lstm', 'conv'])
def test_kinds_of_operators(size, model, tmp_path):
    "Lists, several outputs, sizes, constants and recurrent layers are as in the model"
    x, y = rows(size, 2)
    learn = learner_of(model, x, y, path=tmp_path)

    exported = load_exported(learn.export())

    close(exported(x[:3]), given(learn, x[:3]))


def test_values_of_other_types(tmp_path):
    "Half precision, and integers for an embedding"
    x, y = torch.arange(12).view(12, 1), rows(2)[0].half()
    learn = learner_of(lambda: nn.Sequential(nn.Embedding(12, 4), nn.Flatten(), nn.Linear(4, 2)).half(), x, y,
                       path=tmp_path)

    exported = load_exported(learn.export())

    close(exported(x), given(learn, x))
    with pytest.raises(ValueError, match=r'takes input int64\[n, 1\], and got float32\[12, 1\]'): exported(x.float())


def test_one_item_to_go_by(tmp_path):
    "Where the loader gives single items, other sizes work all the same"
    x, y = rows(3, 2)
    learn = Learner(loader(x, y, bs=1), nn.Linear(3, 2), F.mse_loss, default_cbs=False, path=tmp_path)

    close(load_exported(learn.export())(x), given(learn, x))


def test_no_data_and_no_path_is_in_it(tmp_path):
    "Neither the batch that was used nor where the code lies goes into the file"
    learn = images(tmp_path)
    data = learn.export().read_bytes()

    assert str(Path(__file__).parent).encode() not in data
    assert not any(x.numpy().tobytes()[:32] in data for x in learn.dls.train_ds.tensors[0])


# ---- the average

def averaging(path):
    x, y = rows(4, 2)
    learn = learner_of(lambda: nn.Linear(4, 2), x, y, path=path)
    learn.add_cb(EMA(start=.5))
    return learn, x


def test_average_is_asked_for(tmp_path):
    "If evaluations use an average, and the trained weights are written, it is said how the average is"
    learn, x = averaging(tmp_path)
    learn.export()  # there is no average yet
    learn.fit(2, .1)

    with pytest.warns(UserWarning, match=r'average of EMA.*; `with learn.averaged\(\): learn.export\(…\)`'):
        raw = load_exported(learn.export())
    with learn.averaged(): average, known = load_exported(learn.export()), given(learn, x)

    close(raw(x), given(learn, x))
    close(average(x), known)
    assert not torch.allclose(raw(x), known)


# ---- what it leaves alone

class Fails(nn.Linear):
    "Fails when it is traced, once it has changed something"
    def forward(self, x):
        self.note = 1
        self.train()
        raise RuntimeError("no way\nand more")


class Odd(nn.Linear):
    "Gives something else each time it is called"
    calls = count(1)
    def forward(self, x): return super().forward(x)*next(self.calls)


class Cond(nn.Module):
    "Has an operator with programs within"
    def forward(self, x): return torch.cond(x.sum() > 0, lambda x: x[:, :2]+1, lambda x: x[:, :2]-1, (x,))


class Fixed(nn.Module):
    "Has the size of a batch as a number"
    def forward(self, x): return x.view(4, 2, 2).sum(1)


@pytest.mark.parametrize('model, why', [
    (Branches, 'cannot make a program of `Branches`: [^\n]+\n.*torch.where'),
    (Fixed, r'specialized it to be a constant \(4\)[^\n]+\n.*not by `len\(x\)`'),
    (Cond, "program .* `Cond` has what cannot .* 'torch.ops.higher_order.cond' is not among the operators"),
    (partial(Fails, 4, 2), 'RuntimeError: no way\n'), (partial(Odd, 4, 2), "that differ from the model's")],
    ids=['branches', 'fixed', 'cond', 'fails', 'odd'])
def test_failure_changes_nothing(model, why, tmp_path):
    "If it fails, the Learner, all random streams and the old file are as before"
    x, y = rows(4, 2)
    learn = learner_of(model, x, y, path=tmp_path)
    learn.model.register_forward_hook(lambda m, args, out: None)
    write_file(tmp_path/'model.pt2', lambda f: f.write(b'old'))
    before = state(learn)

    with pytest.raises(ValueError, match=why): learn.export()

    assert state(learn) == before
    assert (tmp_path/'model.pt2').read_bytes() == b'old' and len([*tmp_path.iterdir()]) == 1


@pytest.mark.parametrize('compiled', [False, True])
def test_success_changes_nothing(compiled, tmp_path):
    "So are they if it works, and a compiled model stays compiled; batches are shuffled as without"
    x, y = rows((3, 4), (3, 2))
    learn = Learner(DataLoader(TensorDataset(x, y), 4, shuffle=True), nn.LSTM(4, 2, batch_first=True),
                    lambda o, y: F.mse_loss(o[0], y), default_cbs=False, path=tmp_path)
    if compiled: learn.model = cast(nn.Module, torch.compile(learn.model, backend='eager'))
    before = state(learn)

    learn.export()

    assert state(learn) == before and hasattr(learn.model, '_orig_mod') == compiled


def test_values_that_are_no_tensors(tmp_path):
    "An input that would be the same for ever is refused"
    x, z, y = rows(3, 4, 2)
    learn = Learner([(x, 2, y)], nn.Bilinear(3, 4, 2), F.mse_loss, default_cbs=False, path=tmp_path)
    learn.model.forward = lambda x, k: x[:, :2]*k

    with pytest.raises(TypeError, match='given a int in .* the same for ever'): learn.export()


def test_lazy_weights(tmp_path):
    "They have no values yet"
    learn = synth_learner(model=nn.LazyLinear(1), path=tmp_path)

    with pytest.raises(ValueError, match='lazy parameters'): learn.export()


@pytest.mark.parametrize('name, why', [
    ('.', "'.' names no file; give one, such as 'model.pt2'"), ('', 'no file'), ('..', 'no file'), ('sub/', 'no file'),
    ('.pt2', 'no file'), ('m.pkl', '`learn.export_pickle`; what `export` writes'), ('m.onnx', '`learn.export_onnx`'),
    ('m.pth', '`learn.save`'), ('m.safetensors', '`learn.save`'), ('m.ckpt', '`learn.save_state`')])
def test_names_of_other_files(name, why, tmp_path):
    "A name that is a folder's, or another method's, is refused before anything is done"
    learn = synth_learner(path=tmp_path, model=nn.LazyLinear(1))

    with pytest.raises(ValueError, match=f'export: .*{why}'): learn.export(name)


def test_names_of_onnx(tmp_path):
    "Also for ONNX"
    with pytest.raises(ValueError, match="export_onnx: 'm.pt2' .* `learn.export`"):
        synth_learner(path=tmp_path).export_onnx('m.pt2')


def test_onnx_is_optional(tmp_path):
    "Without the packages for it, the error says what to install"
    with pytest.raises(ImportError, match='`learn.export_onnx` needs `onnx`: pip install onnx'):
        images(tmp_path).export_onnx()
