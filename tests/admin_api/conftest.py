import pytest

from tests.admin_api.api_fixture import A, B, build_api, entry
from tests.admin_api.fake_engines import Engines


@pytest.fixture
def api():
    """An API without a key; its two workers have not been probed."""
    return build_api(entry(A), entry(B))


@pytest.fixture
def engines(request, monkeypatch):
    """Fake engines: of the module's class `ENGINES`, or `Engines`."""
    return getattr(request.module, "ENGINES", Engines)().install(monkeypatch)


@pytest.fixture
async def settled(engines, tmp_path, nursery):
    """Two healthy workers with a model each; the weight operations have read their labels."""
    api = build_api(entry(A, model="m"), entry(B, model="n"), folder=tmp_path / "w")
    api.healthy(A, B)
    await nursery.start(api.operations.run)
    await api.settle()
    engines.requests.clear()
    return api
