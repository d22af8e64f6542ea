"""What the tests of files share: what is asked of the system while a file is written, noted, and made to fail."""
import hashlib
import io
import os
import stat
import subprocess
import sys

from learner import files
from learner.files import mark


class Asked:
    "Notes what is asked of the system; instead of the `k`-th `name` it calls `act`"
    def __init__(self, name=None, k=1, act=None): self.name, self.k, self.act, self.seen = name, k, act, []

    def __call__(self, name):
        self.seen.append(name)
        if name == self.name and self.seen.count(name) == self.k: self.act()


def raising(ex):
    def act(): raise ex
    return act


def watch(monkeypatch, asked):
    "Tell `asked` all that files.py asks of the system to write a file"
    class Raw(io.FileIO):
        def close(self):
            if not self.closed:
                super().close()
                asked('close')

    class File(io.BufferedWriter):
        def write(self, data):
            asked('write')
            return super().write(data)

        def flush(self):
            asked('flush')
            super().flush()

    def opened(path, mode):
        if mode == 'rb': return open(path, mode)
        asked('open')
        return File(Raw(path, mode))

    def telling(name, f):
        def call(*args):
            asked(name(*args) if callable(name) else name)
            return f(*args)
        return call

    def synced(fd): return 'fsync folder' if stat.S_ISDIR(os.fstat(fd).st_mode) else 'fsync'
    monkeypatch.setattr(files, 'open', opened, raising=False)
    monkeypatch.setattr(os, 'fsync', telling(synced, os.fsync))
    monkeypatch.setattr(os, 'replace', telling('replace', os.replace))
    monkeypatch.setattr(os, 'open', telling('open folder', os.open))


def with_trailer(data): return data + mark + hashlib.sha256(data).digest()

def names(folder): return sorted(p.name for p in folder.iterdir())


def python(code, *args, **kwargs):
    "A Python process that runs `code` from the project's folder"
    return subprocess.Popen([sys.executable, '-c', code, *map(str, args)], text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, **kwargs)
