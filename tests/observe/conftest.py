import pytest

from omni_proxy.observe.metrics import Meters
from omni_proxy.observe.recent import Recent


@pytest.fixture
def recent():
    return Recent()


@pytest.fixture
def meters(fleet, recent):
    """Of the fleet that each module builds for itself."""
    return Meters(fleet, recent)
