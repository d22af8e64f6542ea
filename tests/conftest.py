"""For all tests: Ctrl-C acts as in a terminal, also where they were started in the background, which ignores it."""
import signal

import pytest


@pytest.fixture(autouse=True, scope='session')
def ctrl_c_is_heard():
    "Python's own handler, as a process in the foreground has it"
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, old)
