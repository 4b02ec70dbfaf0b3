import pytest

from tests.admin_api.api_fixture import A, B, build_api, entry
from tests.admin_api.fake_engines import Engines


@pytest.fixture
def api():
    """Two workers of FILE, not probed yet, no key."""
    return build_api(entry(A), entry(B))


@pytest.fixture
def engines(request, monkeypatch):
    """The module's `ENGINES`, or the plain ones."""
    return getattr(request.module, "ENGINES", Engines)().install(monkeypatch)


@pytest.fixture
async def settled(engines, tmp_path, nursery):
    """Two healthy workers with a model each; the weight operations have read their labels."""
    made = build_api(entry(A, model="m"), entry(B, model="n"), folder=tmp_path / "w")
    made.healthy(A, B)
    await nursery.start(made.operations.run)
    await made.settle()
    engines.requests.clear()
    return made
