import pytest

from omni_proxy.door import clocks


@pytest.fixture(autouse=True)
def quick_clocks(monkeypatch):
    """A deadline of a door inside the test is noticed sooner than four times a second."""
    monkeypatch.setattr(clocks, "SWEEP_SECS", 0.02)
