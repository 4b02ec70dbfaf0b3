import pytest
import torch

from tests.replica.weights.stage_fixture import running

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pair():
    """The tiny model over two processes, with weights that may change from test to test."""
    with running(tp=2, threads=1) as stage:
        yield stage
