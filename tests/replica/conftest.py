"""Torch gets one thread, in the test process and in the processes that tests start.

Its worker threads wait by spinning: while another process uses the CPUs, everything takes a hundred
times as long.
"""

import os
import sys

import pytest
import trio

from tests.process_group.trainer_pool import pool
from tests.program_forkserver import forking_interpreter

__all__ = ["pool"]

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "torch" in sys.modules:  # another test imported it
    sys.modules["torch"].set_num_threads(1)


@pytest.fixture
async def soon():
    """Fails a test that hangs. The limit makes no claim about speed."""
    with trio.fail_after(40):
        yield


@pytest.fixture(scope="module")
def forked_programs():
    """Ranks and receivers are forked, so that none spends seconds on importing torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", forking_interpreter())
        yield
