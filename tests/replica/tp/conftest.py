import os

import pytest
import torch

from tests.replica.weights.stage_fixture import running

torch.set_num_threads(1)
RANKS = "OMNI_TESTS_RANKS"


@pytest.fixture(scope="module", autouse=True)
def quick_followers(forked_programs):
    """Uses `forked_programs` in all tests of this folder, and marks the programs of all ranks.

    RANKS in their environment has the pid of this process: only those of rank 0 are its children.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RANKS, str(os.getpid()))
        yield


@pytest.fixture(scope="module")
def pair(quick_followers):
    """The tiny model over two processes. Tests may change its weights."""
    with running(tp=2, threads=1) as stage:
        yield stage
