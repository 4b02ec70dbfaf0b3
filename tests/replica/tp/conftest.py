import sys

import pytest
import torch

from tests.program_forkserver import forking_interpreter
from tests.replica.weights.stage_fixture import running

torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def quick_followers(request):
    """As forks: each would import torch for seconds. Not where a module looks at its children."""
    with pytest.MonkeyPatch.context() as patch:
        if not getattr(request.module, "OWN_INTERPRETERS", False):
            patch.setattr(sys, "executable", forking_interpreter())
        yield


@pytest.fixture(scope="module")
def pair(quick_followers):
    """The tiny model over two processes, with weights that may change from test to test."""
    with running(tp=2, threads=1) as stage:
        yield stage
