import pytest

from omni_proxy.door import clocks
from tests.promises.takers import Taking


@pytest.fixture(autouse=True)
def quick_clocks(monkeypatch):
    """A deadline of a door inside the test is noticed sooner than four times a second."""
    monkeypatch.setattr(clocks, "SWEEP_SECS", 0.02)


@pytest.fixture
async def taking(nursery):
    """A worker that runs `script(taker)` for each request."""

    async def made(script):
        worker = Taking(script)
        await nursery.start(worker.serve)
        return worker

    return made
