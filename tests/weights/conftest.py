import pytest

from omni_proxy.watch import broadcast
from tests.weights.desks import Gated, house_with


@pytest.fixture
def engines(monkeypatch):
    return Gated().install(monkeypatch)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "proxy.weights"


@pytest.fixture
async def house(engines, folder, nursery):
    """Two healthy workers and a running desk."""
    assert broadcast.open_client.__name__ == "open_client"
    made = house_with(folder)
    await nursery.start(made.desk.run)
    return made
