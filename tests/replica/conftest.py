"""One thread for torch, here and in what is started from here: beside any other busy process its
threads wait by spinning, and everything then takes a hundred times as long."""

import os
import sys

import pytest
import trio

from tests.process_group.trainer_pool import pool
from tests.program_forkserver import forking_interpreter

__all__ = ["pool"]

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "torch" in sys.modules:  # another test was first
    sys.modules["torch"].set_num_threads(1)


@pytest.fixture
async def soon():
    """A deadline for a test that hangs, not a claim about speed."""
    with trio.fail_after(40):
        yield


@pytest.fixture(scope="module")
def forked_programs():
    """Ranks and receivers are started as forks: each would import torch for seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", forking_interpreter())
        yield
