"""A file is the old one or the new one, whole and on the disk, whatever fails and whenever the process is killed."""
import errno
import io
import json
import os
import resource
import tempfile
import threading
from collections import Counter
from itertools import groupby
from pathlib import Path

import pytest
import torch

from learner import files
from learner.files import load_file, remove_temps, save_file, verify_file, write_file
from tests.file_helpers import Asked, names, python, raising, watch

old, new = [{'w': torch.full((20_000,), v), 'name': [n]} for v, n in [(1., 'old'), (2., 'new')]]


@pytest.fixture
def path(tmp_path):
    "A file that holds `old`, alone in its folder"
    (tmp_path/'models').mkdir()
    save_file(old, tmp_path/'models/a.pth')
    return tmp_path/'models/a.pth'


def asked_in_all():
    "How often saving asks the system for what; the number of writes is torch's affair"
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as m:
        watch(m, asked := Asked())
        save_file(new, f'{folder}/a.pth')
    return Counter(asked.seen)

calls = [(name, k) for name, n in asked_in_all().items() for k in range(1, n+1)]


def content(path):
    o = load_file(path)
    assert set(o['w'].tolist()) == {1. if o['name'] == ['old'] else 2.} and len(o['w']) == 20_000
    return o['name'][0]


# ---- one after the other

def test_saved_is_loaded(path):
    "What was saved comes back, on the CPU, and torch opens the file too"
    o = load_file(path)

    assert content(path) == 'old' and verify_file(path) is True
    assert torch.equal(torch.load(path, weights_only=True)['w'], o['w'])

def test_file_is_torchs_and_36_bytes(path, tmp_path):
    "Before the checksum the file is what `torch.save` writes, byte for byte"
    f = io.BytesIO()
    torch.save(old, f)

    assert path.read_bytes()[:-36] == f.getvalue()

@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
def test_saved_on_a_gpu(path):
    "Tensors that were on a GPU are loaded on the CPU"
    save_file({'w': torch.arange(3., device='cuda')}, path)

    assert torch.equal(load_file(path)['w'], torch.arange(3.))

def test_folders_are_made(tmp_path):
    "Missing folders are made"
    save_file(old, str(tmp_path/'a/b/c.pth'))

    assert content(tmp_path/'a/b/c.pth') == 'old' and names(tmp_path/'a/b') == ['c.pth']

def test_any_content_can_be_written(tmp_path, monkeypatch):
    "`write_file` writes what its function writes, also by a name without a folder"
    monkeypatch.chdir(tmp_path)

    write_file('log.csv', lambda f: f.write(b'a,b\n'))

    assert Path('log.csv').read_bytes() == b'a,b\n' and verify_file('log.csv') is False

def test_folder_is_none(path):
    "A path that leads through a file, or to a folder, is an error of the system, and leaves nothing behind"
    with pytest.raises(FileExistsError): save_file(old, path/'b.pth')
    with pytest.raises(IsADirectoryError): save_file(old, path.parent)

    assert names(path.parent) == ['a.pth'] and names(path.parent.parent) == ['models']


# ---- R5: the old one or the new one, at any moment

def test_r5_order_of_what_is_asked_of_the_system(path, monkeypatch):
    "The file is written and synced before it takes its place, and the folder is synced after that"
    asked = Asked()
    watch(monkeypatch, asked)

    save_file(new, path)

    assert [name for name, _ in groupby(asked.seen)] == [
        'open folder', 'open', 'write', 'flush', 'fsync', 'flush', 'close', 'replace', 'fsync folder']  # close flushes

def test_r5_new_folders_are_synced(tmp_path, monkeypatch):
    "For a new folder, the one in which it stands is synced as well"
    asked = Asked()
    watch(monkeypatch, asked)

    save_file(new, tmp_path/'a/b/c.pth')

    assert asked.seen.count('fsync folder') == 3 and asked.seen[:4] == ['open folder', 'fsync folder']*2


@pytest.mark.parametrize('make', [lambda: OSError(errno.EIO, 'broken'), KeyboardInterrupt], ids=['EIO', 'Ctrl-C'])
@pytest.mark.parametrize('name, k', [call for call in calls if call != ('fsync folder', 1)])
def test_r5_whatever_fails_leaves_the_old_file(path, monkeypatch, name, k, make):
    "Whichever call fails, the error comes out as it is, the old file is there, and nothing else"
    error = make()
    watch(monkeypatch, asked := Asked(name, k, raising(error)))

    with pytest.raises(type(error)) as caught: save_file(new, path)

    assert caught.value is error and asked.seen.count(name) >= k
    assert content(path) == 'old' and names(path.parent) == ['a.pth'] and not files._writing

def test_r5_first_error_is_the_one_told(path, monkeypatch):
    "An error that closing the file brings after another does not hide it"
    class Broken(io.BytesIO):
        def write(self, data): raise error
        def close(self): raise OSError(errno.EIO, 'second')
    error = KeyboardInterrupt()
    monkeypatch.setattr(files, 'open', lambda p, mode: open(p, mode) if mode == 'rb' else Broken(), raising=False)

    with pytest.raises(KeyboardInterrupt) as caught: save_file(new, path)

    assert caught.value is error and content(path) == 'old' and names(path.parent) == ['a.pth']

def test_r5_folder_that_cannot_be_synced(path, monkeypatch):
    "If syncing the folder fails, the new file is in its place, whole, and the error comes out"
    watch(monkeypatch, Asked('fsync folder', 1, raising(error := OSError(errno.EIO, 'broken'))))

    with pytest.raises(OSError) as caught: save_file(new, path)

    assert caught.value is error and content(path) == 'new' and names(path.parent) == ['a.pth']

@pytest.mark.parametrize('no', [errno.EINVAL, errno.ENOTSUP])
def test_r5_file_system_without_syncing_of_folders(path, monkeypatch, no):
    "A file system that cannot sync folders is no error; one that cannot sync the file is"
    with monkeypatch.context() as m:
        watch(m, Asked('fsync folder', 1, raising(OSError(no, 'cannot'))))
        save_file(new, path)
    watch(monkeypatch, Asked('fsync', 1, raising(OSError(no, 'cannot'))))

    with pytest.raises(OSError): save_file(old, path)

    assert content(path) == 'new'


killed_at_each_call = '''
import json, os, signal, sys, pytest
from pathlib import Path
from tests.file_helpers import Asked, names, watch
from tests.test_files import calls, content, new, old, remove_temps, save_file
path, seen = Path(sys.argv[1]), []
for name, k in calls:
    save_file(old, path)
    if not (pid := os.fork()):
        watch(pytest.MonkeyPatch(), Asked(name, k, lambda: os.kill(os.getpid(), signal.SIGKILL)))
        save_file(new, path)
        os._exit(0)
    killed, state = os.WIFSIGNALED(os.waitpid(pid, 0)[1]), content(path)
    seen.append((name, killed, state, remove_temps(path.parent) == [f'.a.pth.{pid}.tmp'], names(path.parent)))
print(json.dumps(seen))
'''

def test_r5_killed_at_each_call(path):
    "A process killed before any one of its calls leaves a whole file, and perhaps a temporary one, which is removed"
    out, err = python(killed_at_each_call, path).communicate()
    seen = json.loads(out or f'"{err}"')

    assert len(seen) == len(calls) and all(killed and left == ['a.pth'] for _, killed, _, _, left in seen)
    assert {(name, state, temp) for name, _, state, temp, _ in seen} == {
        ('open folder', 'old', False), ('open', 'old', False), ('fsync folder', 'new', False),
        *((n, 'old', True) for n in ('write', 'flush', 'fsync', 'close', 'replace'))}


half_way = '''
import sys, time
from learner.files import write_file
def write(f):
    f.write(open(sys.argv[1], 'rb').read()[:40_000])
    f.flush()
    print('half', flush=True)
    time.sleep(600)
write_file(sys.argv[1], write)
'''

def test_s17_killed_half_way_through_a_file(path):
    "A process that is killed while it writes leaves the old file, and half a temporary one, which another removes"
    process = python(half_way, path)
    said = process.stdout.readline()
    while_it_ran = remove_temps(path.parent)
    process.kill()
    process.communicate()
    temp = f'.a.pth.{process.pid}.tmp'

    assert said == 'half\n' and names(path.parent) == [temp, 'a.pth'] and while_it_ran == []
    assert content(path) == 'old' and remove_temps(path.parent) == [temp] and names(path.parent) == ['a.pth']


# ---- R8: disks that are full, broken or closed

@pytest.mark.parametrize('no', [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EDQUOT])
def test_r8_error_of_the_system_keeps_its_number(path, monkeypatch, no):
    "What is wrong with the disk comes through torch's writer as it was"
    watch(monkeypatch, Asked('write', 5, raising(OSError(no, os.strerror(no), str(path)))))

    with pytest.raises(OSError, match=os.strerror(no)) as caught: save_file(new, path)

    assert caught.value.errno == no and content(path) == 'old' and names(path.parent) == ['a.pth']

def test_r8_real_limit(path):
    "A file that the system lets grow to half its size only is an error, and leaves the old one"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))
    try:
        with pytest.raises(OSError) as caught: save_file(new, path)
    finally: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert caught.value.errno == errno.EFBIG and content(path) == 'old' and names(path.parent) == ['a.pth']

def test_r8_full_disk(small_disk):
    "On a disk that is too small for both, the old file stays, nothing else does, and what is small enough can be saved"
    path = small_disk/'a.pth'
    save_file({'w': torch.ones(100_000)}, path)

    with pytest.raises(OSError) as caught: save_file({'w': torch.zeros(200_000)}, path)

    assert caught.value.errno == errno.ENOSPC and names(small_disk) == ['a.pth']
    assert load_file(path)['w'].sum() == 100_000
    save_file(new, path)
    assert content(path) == 'new'

def test_r8_write_that_is_cut_short(path, monkeypatch):
    "A write that takes less than it was given, and says so, is an error"
    class Short(io.FileIO):
        def write(self, data): return super().write(memoryview(data)[:-1])
    monkeypatch.setattr(files, 'open', lambda p, mode: Short(p, mode) if mode == 'wb' else open(p, mode), raising=False)

    with pytest.raises(OSError, match=r'only \d+ of \d+ bytes were written'): save_file(new, path)

    assert content(path) == 'old' and names(path.parent) == ['a.pth']


# ---- interrupts

@pytest.mark.parametrize('k', [k for name, k in calls if name == 'write'])
def test_interrupt_at_the_entry_of_a_write(path, monkeypatch, k):
    "Ctrl-C while torch is at work, of which torch would make a RuntimeError, is a KeyboardInterrupt"
    asked, write = Asked('write', k, raising(KeyboardInterrupt())), files._Hashed.write
    monkeypatch.setattr(files._Hashed, 'write', lambda self, data: (asked('write'), write(self, data))[1])

    with pytest.raises(KeyboardInterrupt): save_file(new, path)

    assert content(path) == 'old' and names(path.parent) == ['a.pth']

def test_error_of_torchs_while_an_interrupt_is_handled(path):
    "What torch cannot save is told as such, also by a save that is made because of an interrupt"
    w = torch.ones(3)

    try: raise KeyboardInterrupt
    except KeyboardInterrupt:
        with pytest.raises(RuntimeError, match='view the same data as different types'):
            save_file([w, w.view(torch.int32)], path)

    assert content(path) == 'old' and names(path.parent) == ['a.pth']

def test_two_threads_do_not_mix(path):
    "A file that is being written is not written by another thread at the same time"
    begun, go_on = threading.Event(), threading.Event()
    def slowly(f):
        begun.set()
        go_on.wait()
        f.write(b'slow')
    thread = threading.Thread(target=write_file, args=(path, slowly))
    thread.start()
    begun.wait()

    try:
        with pytest.raises(OSError, match='another thread is writing'): write_file(path, lambda f: f.write(b'quick'))
        removed = remove_temps(path.parent)
    finally:
        go_on.set()
        thread.join()

    assert removed == [] and path.read_bytes() == b'slow'


# ---- what killed processes leave

def test_only_leftovers_are_removed(tmp_path):
    "Removed are temporary files of processes that have ended, or had this one's number; all others stay"
    ended = python('')
    ended.communicate()
    left = [f'.a.pth.{ended.pid}.tmp', f'.b.{os.getpid()}.tmp', f'.c.{2**80}.tmp']
    stay = [f'.a.pth.{os.getppid()}.tmp', '.a.pth.tmp', '.x.tmp', f'a.pth.{ended.pid}.tmp', f'.a.{ended.pid}.tmp.pth']
    for name in [*left, *stay]: (tmp_path/name).touch()

    assert remove_temps(tmp_path) == sorted(left) and names(tmp_path) == sorted(stay)
    assert remove_temps(tmp_path/'none') == []
