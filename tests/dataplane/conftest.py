import pytest

from tests.dataplane.loop_script import busy, loop, wires
from tests.dataplane.manual_loop import ManualLoop

FIXTURES = (busy, loop, wires)


@pytest.fixture
def manual_loop():
    """A function that creates a `ManualLoop` with the given configuration."""
    loops = []

    def build(config=""):
        loops.append(ManualLoop(config))
        return loops[-1]

    yield build
    for manual_loop in loops:
        manual_loop.close()
