import pytest

from tests.admin_api.engines_at_hand import Engines
from tests.admin_api.house import A, B, build_house, entry


@pytest.fixture
def house():
    """Two workers of FILE, not probed yet, no key."""
    return build_house(entry(A), entry(B))


@pytest.fixture
def engines(request, monkeypatch):
    """Those that the test's module names in `ENGINES`, or the plain ones."""
    return getattr(request.module, "ENGINES", Engines)().install(monkeypatch)


@pytest.fixture
async def settled(engines, tmp_path, nursery):
    """Two healthy workers of a model each, and a desk that has asked them what they hold."""
    made = build_house(entry(A, model="m"), entry(B, model="n"), folder=tmp_path / "w")
    made.healthy(A, B)
    await nursery.start(made.desk.run)
    await made.settle()
    engines.asked.clear()
    return made
