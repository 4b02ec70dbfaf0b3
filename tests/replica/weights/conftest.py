import pytest
import torch

from tests.replica.weights.stage_fixture import running

torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def quick_receivers(forked_programs):
    """Uses `forked_programs` in all tests of this folder."""


@pytest.fixture
def stage(tmp_path):
    """A stage that may read only below `tmp_path`."""
    with running(weights_root=str(tmp_path)) as stage:
        yield stage
