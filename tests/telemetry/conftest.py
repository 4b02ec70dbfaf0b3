import pytest

from omni_proxy.telemetry.metrics import Metrics
from omni_proxy.telemetry.recent_window import RecentWindow


@pytest.fixture
def recent():
    return RecentWindow()


@pytest.fixture
def meters(fleet, recent):
    """Metrics of the module's own fixture `fleet`."""
    return Metrics(fleet, recent)
