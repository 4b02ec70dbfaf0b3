import pytest

from tests.replica.api.api_fixture import TINY, opened


@pytest.fixture
async def api():
    """The API of a pipeline with one scripted stage."""
    async with opened() as api:
        yield api


@pytest.fixture
async def tiny():
    """The API of the built-in text pipeline over the tiny model; one of two stages has admin calls."""
    async with opened(TINY) as api:
        yield api
