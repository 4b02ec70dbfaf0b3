import pytest

from tests.discovery_watch.api_server import ApiServer


@pytest.fixture
async def api(nursery):
    """The API server of a cluster."""
    server = ApiServer()
    await nursery.start(server.serve)
    return server
