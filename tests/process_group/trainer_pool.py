"""The trainers of a module, for whichever tests want some."""

import pytest

from tests.process_group.trainer_process import TrainerPool


@pytest.fixture(scope="module")
def pool():
    """Each is a process, rank 0 of real groups."""
    made = TrainerPool()
    yield made
    made.close()
