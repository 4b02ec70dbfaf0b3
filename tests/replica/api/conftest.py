import pytest

from tests.replica.api.api_fixture import TINY, opened


@pytest.fixture
async def world():
    """One scripted stage."""
    async with opened() as world:
        yield world


@pytest.fixture
async def tiny():
    """The built-in text pipeline over the tiny model: a stage without and one with admin calls."""
    async with opened(TINY) as world:
        yield world
