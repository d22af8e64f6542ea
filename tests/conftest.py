"""For all tests: Ctrl-C acts as in a terminal, also where they were started in the background, which ignores it."""
import gc
import signal
import subprocess
import sys

import pytest

from learner import set_display


@pytest.fixture(autouse=True, scope='session')
def ctrl_c_is_heard():
    "Python's own handler, as a process in the foreground has it"
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, old)


@pytest.fixture(autouse=True)
def figures_are_closed():
    "What a test draws is not there for the next"
    yield
    if plt := sys.modules.get('matplotlib.pyplot'): plt.close('all')


slow_files = 'test_nbs.py', 'test_kill.py', 'test_demo.py', 'test_signals_workers.py'

def pytest_collection_modifyitems(items):
    "Several processes share the files: slow ones come first; names are the same in each, and hold no address"
    items.sort(key=lambda item: slow_files.index(item.path.name) if item.path.name in slow_files else len(slow_files))
    if odd := [item.nodeid for item in items if ' at 0x' in item.nodeid]: raise pytest.UsageError(
        f"the name of a test differs from process to process: {odd[0]}; give `ids=`")


@pytest.fixture
def small_disk(tmp_path):
    "A disk of 1 MiB"
    disk = tmp_path/'disk'
    disk.mkdir()
    try: subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=1m', 'tmpfs', disk], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as e: pytest.skip(f"a small disk cannot be mounted here: {e}")
    yield disk
    subprocess.run(['umount', disk], check=True)


@pytest.fixture
def silent():
    "Nothing is shown"
    set_display('off')
    yield
    set_display('auto')


def pytest_collection_finish(session):
    "What is there by now stays: the many tests that collect garbage need not look through it each time"
    gc.collect()
    gc.freeze()
