"""Damage to a file is noticed, and nothing in a file is run: it is refused, or loaded as tensors and plain values."""
import io
import os
import pickle
import random
import shutil
import subprocess
import sys
import tarfile
import warnings

import pytest
import torch

from learner.files import DamagedFile, load_file, save_file, verify_file
from learner.plain import digest, from_plain, to_plain
from tests.file_helpers import with_trailer

state = {'model': {'w': torch.randn(5000, generator=torch.Generator().manual_seed(0)), 'b': torch.zeros(700)}, 'n': 3}


@pytest.fixture
def path(tmp_path):
    save_file(state, tmp_path/'a.pth')
    return tmp_path/'a.pth'


# ---- R6: damage

def damaged(data, rng):
    "`data` with one bit flipped, with a hole of zeros, cut short or gone on with: anywhere, or at its end"
    kind, new = rng.randrange(6), bytearray(data)
    at = rng.randrange(len(data)-36*(kind % 2), len(data)) if kind % 2 else rng.randrange(len(data))
    if kind < 2: new[at] ^= 1 << rng.randrange(8)
    elif kind < 4: new[at:at+4096] = bytes(len(new[at:at+4096]))
    elif kind == 4: del new[at:]
    else: new += rng.choice([data, data[-36:], b'\0'])
    return bytes(new) if new != data else damaged(data, rng)

def test_r6_every_corruption_is_detected(path):
    "Of 1,000 damaged files, with a bit flipped, a hole, cut short or too long, none is loaded"
    rng, whole, loaded = random.Random(0), path.read_bytes(), []

    for i in range(1000):
        path.write_bytes(data := damaged(whole, rng))
        try: loaded.append((i, data, load_file(path)))
        except DamagedFile as e: assert str(path) in str(e)

    assert loaded == []
    path.write_bytes(whole)
    assert digest(load_file(path)) == digest(state)

def test_r6_torch_alone_does_not_notice(path):
    "The corruptions are such that `torch.load` gives other weights without a word: what the checksum is for"
    rng, whole, wrong = random.Random(0), path.read_bytes(), 0

    for _ in range(100):
        at = rng.randrange(len(whole)-36)
        data = bytearray(whole)
        data[at] ^= 1
        try: wrong += digest(torch.load(io.BytesIO(data), weights_only=True)) != digest(state)
        except Exception: pass  # it was in the zip file's own tables

    assert wrong > 50

@pytest.mark.parametrize('at', range(1, 37))
def test_r6_every_byte_of_the_trailer_counts(path, at):
    "A flipped bit in the trailer, its mark too, is damage to who needs a checksum"
    data = bytearray(path.read_bytes())
    data[-at] ^= 4
    path.write_bytes(data)

    with pytest.raises(DamagedFile): load_file(path)

def test_verify_tells_three_states(path):
    "A file is whole, or has no checksum, or is damaged, which is an error that names it"
    assert verify_file(path) is True
    data = bytearray(path.read_bytes())

    path.write_bytes(data[:-36])
    assert verify_file(path) is False
    path.write_bytes(b'')
    assert verify_file(path) is False
    data[100] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedFile, match=f'{path} is damaged: its content does not fit'): verify_file(path)


# ---- files of others

@pytest.mark.parametrize('zipped', [True, False], ids=['zip', 'legacy'])
def test_file_without_checksum(tmp_path, zipped):
    "A file of `torch.save` is refused, or if that is asked for loaded with a warning that it is unverified"
    path = tmp_path/'a.pth'
    torch.save(state, path, _use_new_zipfile_serialization=zipped)

    with pytest.raises(DamagedFile, match=f'{path} ends without a checksum'): load_file(path)
    with pytest.warns(UserWarning, match=f'{path} is loaded unverified') as caught:
        o = load_file(path, needs_trailer=False)
    assert digest(o) == digest(state) and [w.filename for w in caught] == [__file__]

def test_damage_counts_also_where_no_checksum_is_needed(path):
    "A file that has a checksum is verified in any case"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)

    with pytest.raises(DamagedFile, match='is damaged'): load_file(path, needs_trailer=False)

@pytest.mark.filterwarnings('ignore:.*is loaded unverified')
@pytest.mark.parametrize('cut', [slice(0), slice(10), slice(9000), slice(-50)], ids=str)
def test_what_torch_cannot_read_is_damaged(path, cut):
    "What is left of a file is an error that names it"
    path.write_bytes(path.read_bytes()[:-36][cut])

    with pytest.raises(DamagedFile, match=f'{path} is refused: .*, or is damaged'): load_file(path, needs_trailer=False)

def test_missing_file(path):
    "A missing file is an error that says what there is"
    folder = path.parent
    (folder/'.b.pth').touch()

    with pytest.raises(FileNotFoundError, match=f'no such file; in {folder} there are: a.pth: .*c.pth'):
        load_file(folder/'c.pth')
    with pytest.raises(FileNotFoundError, match=f'in {folder} there are: no .ckpt files'): verify_file(folder/'c.ckpt')
    with pytest.raises(FileNotFoundError, match=f'there is no folder {folder}/no'): load_file(f'{folder}/no/c.pth')
    with pytest.raises(IsADirectoryError): load_file(folder)
    for i in range(30): (folder/f'{i:02}.pt').touch()
    with pytest.raises(FileNotFoundError, match='18.pt, 19.pt, …: '): load_file(folder/'c.pt')


# ---- R9: hostile files

class Runs:
    "Unpickled, it calls `f(*args)`"
    def __init__(self, f, *args): self.f, self.args = f, args
    def __reduce__(self): return self.f, self.args

class Sets:
    "Unpickled, it is built by a function of its module"
    def __init__(self, text): self.text = text
    def __setstate__(self, state): exec(state['text'])


def by_hand(marker):
    "Opcodes: getattr(__import__('os'), 'system')('touch …')"
    return f"cbuiltins\ngetattr\n(cbuiltins\n__import__\n(S'os'\ntRS'system'\ntR(S'touch {marker}'\ntR.".encode()

def zipped(o, **kwargs):
    f = io.BytesIO()
    torch.save(o, f, **kwargs)
    return f.getvalue()

def in_tar(data):
    "An archive of torch's oldest kind"
    f = io.BytesIO()
    with tarfile.open(fileobj=f, mode='w') as tar:
        for name in ('storages', 'tensors', 'pickle'):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return f.getvalue()


def touching(marker): return f"__import__('pathlib').Path({marker!r}).touch()"

hostile = {
    'os.system': lambda m: zipped(Runs(os.system, f'touch {m}')),
    'beside tensors': lambda m: zipped({**state, 'loss_func': [Runs(os.system, f'touch {m}')]}),
    'subprocess': lambda m: zipped(Runs(subprocess.check_call, ['touch', m])),
    'eval': lambda m: zipped(Runs(eval, touching(m))),
    'exec': lambda m: zipped(Runs(exec, touching(m))),
    'copy': lambda m: zipped(Runs(shutil.copyfile, __file__, m)),
    'in a list': lambda m: zipped([[[Runs(shutil.copyfile, __file__, m)]]]),
    'state': lambda m: zipped(Sets(touching(m))),
    'another load': lambda m: zipped(Runs(pickle.loads, pickle.dumps(Runs(shutil.copyfile, __file__, m)))),
    'as a key': lambda m: zipped({Runs(shutil.copyfile, __file__, m): 1}),
    'legacy': lambda m: zipped(Runs(os.system, f'touch {m}'), _use_new_zipfile_serialization=False),
    'protocol 4': lambda m: zipped(Runs(os.system, f'touch {m}'), pickle_protocol=4),
    'pickle': lambda m: pickle.dumps(Runs(os.system, f'touch {m}')), 'by hand': by_hand,
    'tar': lambda m: in_tar(by_hand(m)),
}

@pytest.mark.filterwarnings('ignore:.*is loaded unverified', 'ignore:Detected pickle protocol')
@pytest.mark.parametrize('trailer', [True, False], ids=['with a checksum', 'without'])
@pytest.mark.parametrize('make', hostile.values(), ids=hostile)
def test_r9_nothing_is_run(tmp_path, make, trailer):
    "A file that would run something is refused by name, with a checksum or without, and nothing has run"
    marker, path = tmp_path/'ran', tmp_path/'a.pth'
    data = make(str(marker))
    path.write_bytes(with_trailer(data) if trailer else data)

    with pytest.raises(ValueError, match=f'{path} is refused: .*; nothing in it was run'):
        load_file(path, needs_trailer=trailer)

    assert not marker.exists()

@pytest.mark.parametrize('make', [f for name, f in hostile.items() if name != 'tar'],
                         ids=[name for name in hostile if name != 'tar'])
def test_r9_the_files_are_hostile(tmp_path, make):
    "Opened without the care that `load_file` takes, each of these files does run something"
    marker = tmp_path/'ran'
    data = make(str(marker))

    try: torch.load(io.BytesIO(data), weights_only=False)
    except Exception: pickle.loads(data)  # a bare pickle

    assert marker.exists()

@pytest.mark.filterwarnings('ignore:.*is loaded unverified', "ignore:'torch.load' received a zip file that looks like")
def test_r9_torchscript_is_refused(tmp_path):
    "An archive of TorchScript, which holds code, is refused"
    path = tmp_path/'a.pt'
    with warnings.catch_warnings():  # deprecated, but files of it are about
        warnings.simplefilter('ignore')
        torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), path)

    with pytest.raises(DamagedFile, match='is refused'): load_file(path, needs_trailer=False)
    path.write_bytes(with_trailer(path.read_bytes()))
    with pytest.raises(ValueError, match='is refused'): load_file(path)


def test_r9_texts_stay_texts(tmp_path, monkeypatch):
    "A text that names something to import or to call is a text, at any place of a checkpoint; nothing is imported"
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path/'gadget.py').write_text(f"open({str(tmp_path/'ran')!r}, 'w').close()\ndef run(*args): pass\n")
    texts = ['gadget.run', 'gadget:run', '!!python/object:gadget.run', "__import__('gadget')", 'os.system']
    o = {'loss_func': texts[0], '_target_': texts[1], 'hypers': {t: t for t in texts}, '__class__': 'gadget.run',
         '__reduce__': ('gadget.run', ('a',)), 'L': {'__kind__': 'gadget.run', 'parts': ['a']}}
    save_file(to_plain(o), tmp_path/'a.pth')

    new = from_plain(load_file(tmp_path/'a.pth'))

    assert new == o and 'gadget' not in sys.modules and not (tmp_path/'ran').exists()

def test_r9_a_kind_that_names_something_is_refused(tmp_path):
    "A file whose tag names something to import is refused, and nothing is imported"
    save_file({'a': {'__kind__': 'antigravity.geohash', 'parts': []}}, tmp_path/'a.pth')

    with pytest.raises(ValueError, match='antigravity.geohash.*not known'): from_plain(load_file(tmp_path/'a.pth'))

    assert 'antigravity' not in sys.modules
