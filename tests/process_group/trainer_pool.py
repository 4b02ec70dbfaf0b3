"""A fixture with trainers that the tests of a module share."""

import pytest

from tests.process_group.trainer_process import TrainerPool


@pytest.fixture(scope="module")
def pool():
    """Each trainer is a process, which is rank 0 of real groups."""
    trainers = TrainerPool()
    yield trainers
    trainers.close()
