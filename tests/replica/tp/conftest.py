import os

import pytest
import torch

from tests.replica.weights.stage_fixture import running

torch.set_num_threads(1)
RANKS = "OMNI_TESTS_RANKS"


@pytest.fixture(scope="module", autouse=True)
def quick_followers(forked_programs):
    """For all tests of this folder. Programs that the ranks start have this process in RANKS: other
    ranks than the first are no children of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RANKS, str(os.getpid()))
        yield


@pytest.fixture(scope="module")
def pair(quick_followers):
    """The tiny model over two processes, with weights that may change from test to test."""
    with running(tp=2, threads=1) as stage:
        yield stage
