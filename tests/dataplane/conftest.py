import pytest

from tests.dataplane.by_hand import ByHand
from tests.dataplane.pumping import busy, loop, wires

FIXTURES = (busy, loop, wires)


@pytest.fixture
def by_hand(monkeypatch):
    """Builds as many as a test needs, each with its own settings."""
    made = []

    def build(config=""):
        made.append(ByHand(monkeypatch, config))
        return made[-1]

    yield build
    for each in made:
        each.close()
