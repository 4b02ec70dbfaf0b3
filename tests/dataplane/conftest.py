import pytest

from tests.dataplane.loop_script import busy, loop, wires
from tests.dataplane.manual_loop import ManualLoop

FIXTURES = (busy, loop, wires)


@pytest.fixture
def manual_loop():
    """Builds as many as a test needs, each with its own settings."""
    made = []

    def build(config=""):
        made.append(ManualLoop(config))
        return made[-1]

    yield build
    for each in made:
        each.close()
