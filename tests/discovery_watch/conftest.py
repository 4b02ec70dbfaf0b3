import pytest

from tests.discovery_watch.api_server import ApiServer


@pytest.fixture
async def api(nursery):
    """The API server of a cluster."""
    made = ApiServer()
    await nursery.start(made.serve)
    return made
