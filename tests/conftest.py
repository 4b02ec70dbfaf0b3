"""What every process here should have, and those that it starts.

torch asks the DNS for the name of each address that it connects to or hears from, 127.0.0.1 too:
where an answer gets lost, that takes 5 s unless somebody says less.
"""

import os
import threading
import time

os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")


GIVEN_UP_SECS = 90.0


def pytest_sessionfinish():
    """A thread that gloo still holds when the interpreter ends would abort it: let it come back."""
    until = time.monotonic() + GIVEN_UP_SECS
    for thread in threading.enumerate():
        if thread.name.startswith("weights-") and thread is not threading.current_thread():
            thread.join(max(until - time.monotonic(), 0.0))
