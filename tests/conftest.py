"""For all tests: Ctrl-C acts as in a terminal, also where they were started in the background, which ignores it."""
import signal
import subprocess

import pytest


@pytest.fixture(autouse=True, scope='session')
def ctrl_c_is_heard():
    "Python's own handler, as a process in the foreground has it"
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, old)


@pytest.fixture
def small_disk(tmp_path):
    "A disk of 1 MiB"
    disk = tmp_path/'disk'
    disk.mkdir()
    try: subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=1m', 'tmpfs', disk], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as e: pytest.skip(f"a small disk cannot be mounted here: {e}")
    yield disk
    subprocess.run(['umount', disk], check=True)
