"""Files that are whole or not there: written durably, verified when read, and opened without running what they hold.

Such a file is what `torch.save` writes, and 36 bytes: a mark, and the sha256 of all before it. `torch.load` opens it
too, but would not notice a flipped bit.
"""
import errno
import hashlib
import os
import re
import sys
from collections.abc import Callable
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from .utils import warn

__all__ = ['DamagedFile', 'write_file', 'save_file', 'verify_file', 'load_file', 'remove_temps']

mark = b'LRN1'
n_trailer = len(mark) + hashlib.sha256().digest_size  # bytes
temp_name = re.compile(r'\..+\.(\d+)\.tmp', re.DOTALL)
_writing: set[str] = set()  # the temporary files that this process is writing


class DamagedFile(ValueError):
    "A file is not what was written"


# ---- writing

def write_file(
    path: str|Path,                    # the file to write; its folder is made if need be
    write: Callable[[IO[bytes]], Any],  # writes the content into the binary file it is given
) -> None:
    """Write a file so that at any moment, also after a crash, either the old one is there or the new one, whole

    After an error the old file is as it was; only if syncing the folder is what fails, the new one is in its place.

    Raises: OSError from the system or if `path` is being written already, and what `write` raises."""
    path = Path(path)
    with _kept(_make_folder(path.parent)):
        temp = os.path.realpath(path.parent/f'.{path.name}.{os.getpid()}.tmp')
        if temp in _writing: raise OSError(errno.EBUSY, "another thread is writing this file", str(path))
        try:
            _writing.add(temp)
            _write(temp, write)
            os.replace(temp, path)
        except BaseException:
            with suppress(OSError): os.unlink(temp)
            raise
        finally: _writing.discard(temp)


def _write(temp, write):
    "Write `temp` down to the disk"
    f = open(temp, 'wb')
    try:
        write(f)
        f.flush()
        os.fsync(f.fileno())
    except BaseException:
        with suppress(OSError): f.close()  # which flushes again, and would hide the error by its own
        raise
    f.close()


def _make_folder(folder: Path) -> Path:
    "Make `folder` and those above it that are missing, for good"
    new = [p for p in (folder, *folder.parents) if not p.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for p in new:
        with _kept(p.parent): pass
    return folder


@contextmanager
def _kept(folder: Path):
    "What the block changes in `folder` is down on the disk afterwards; a folder that cannot be opened fails before"
    if os.name == 'nt':  # opens no folders
        yield
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        yield
        try: os.fsync(fd)
        except OSError as e:
            if e.errno not in (errno.EINVAL, errno.ENOTSUP): raise  # a file system that cannot do it
    finally: os.close(fd)


def save_file(
    o: Any,          # of what `to_plain` returns
    path: str|Path,  # the file to write, as by `write_file`
) -> None:
    """`torch.save` to a file that `load_file` can verify

    Raises: OSError from the system, as it came."""
    write_file(path, partial(_save, o))


def _save(o, f):
    out: Any = _Hashed(f)
    handled = sys.exception()
    try: torch.save(o, out)
    except BaseException as e:
        stop = e.__context__  # Ctrl-C at the entry of `out.write` comes through torch as a RuntimeError
        if out.error is None: out.error = stop if isinstance(stop, KeyboardInterrupt) and stop is not handled else e
    out.write(mark + out.sha.digest())
    if out.error: raise out.error


class _Hashed:
    "Hashes what is written to `f`; an error is kept, and all after it dropped: torch would go on and raise another"
    def __init__(self, f):
        self.f, self.sha = f, hashlib.sha256()
        self.error: BaseException|None = None

    def write(self, data):
        size = memoryview(data).nbytes
        if self.error is None:
            try:
                if (n := self.f.write(data)) != size: raise OSError(errno.EIO, f"only {n} of {size} bytes were written")
                self.sha.update(data)
            except BaseException as e: self.error = e
        return size

    def flush(self): pass  # `write_file` does


# ---- reading

def verify_file(
    path: str|Path,  # any file
) -> bool:           # False if it carries no checksum
    """Is the file as `save_file` wrote it?

    Raises: DamagedFile if its checksum does not fit, OSError from the system."""
    with _open(path) as f: return _verify(f, path)


def load_file(
    path: str|Path,              # the file to read
    needs_trailer: bool = True,  # refuse a file without checksum; if False it is loaded, with a warning
) -> Any:                        # what was saved, with all tensors on the CPU
    """Load what `save_file` wrote, or with `needs_trailer=False` any file of `torch.save`, once it is found undamaged

    Nothing that the file holds is run: what is not a tensor or a plain value is refused.

    Raises: DamagedFile if the checksum does not fit, or is missing and needed, or torch cannot open a file without;
    ValueError if it cannot open a whole one; FileNotFoundError, which says what there is instead."""
    with _open(path) as f:
        if not (whole := _verify(f, path)):
            if needs_trailer: raise DamagedFile(f"{path} ends without a checksum: it is damaged, or no checkpoint")
            warn(f"{path} is loaded unverified: it ends without a checksum, so damage to it would not be noticed")
        f.seek(0)
        try: return torch.load(f, map_location='cpu', weights_only=True, mmap=False)
        except MemoryError: raise
        except Exception as e:  # of any type, also OSError where a file was cut short
            error, more = (ValueError, '') if whole else (DamagedFile, ', or is damaged')
            raise error(f"{path} is refused: it is no file of `torch.save`, or holds more than tensors and plain values"
                        f"{more}; nothing in it was run") from e


def _open(path) -> IO[bytes]:
    "Open for reading, or say what could be"
    try: return open(path, 'rb')
    except FileNotFoundError:
        folder, suffix = Path(path).parent, Path(path).suffix
        names = sorted(p.name for p in folder.glob(f'[!.]*{suffix}'))
        if len(names) > 20: names[20:] = ['…']
        there = f"in {folder} there are: {', '.join(names) or f'no {suffix} files'}"
        if not folder.is_dir(): there = f"there is no folder {folder}"
        raise FileNotFoundError(errno.ENOENT, f"no such file; {there}", str(path)) from None


def _verify(f, path) -> bool:
    left = f.seek(0, os.SEEK_END) - n_trailer
    if left < 0: return False
    f.seek(left)
    trailer = f.read()
    if not trailer.startswith(mark): return False
    f.seek(0)
    sha, buffer = hashlib.sha256(), memoryview(bytearray(2**20))
    while left > 0 and (n := f.readinto(buffer[:left])):
        sha.update(buffer[:n])
        left -= n
    if mark + sha.digest() == trailer: return True
    raise DamagedFile(f"{path} is damaged: its content does not fit the checksum at its end")


# ---- what killed processes leave

def remove_temps(
    folder: str|Path,  # where files are written
) -> list[str]:        # the names of what was removed
    "Remove what processes left that were killed while they wrote; files of those that run on this machine stay"
    gone = []
    for p in sorted(Path(folder).glob('.*.tmp')):
        match = temp_name.fullmatch(p.name)
        if not match or os.path.realpath(p) in _writing or _is_running(int(match[1])): continue
        with suppress(OSError):
            p.unlink()
            gone.append(p.name)
    return gone


def _is_running(pid: int) -> bool:
    "Is another process of that number at work?"
    if os.name == 'nt': return True  # there the question would end it
    if pid == os.getpid(): return False  # an earlier one: what this one is writing is in `_writing`
    try: os.kill(pid, 0)
    except (ProcessLookupError, OverflowError): return False
    except PermissionError: pass
    return True
