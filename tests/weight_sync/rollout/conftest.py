import pytest


@pytest.fixture
async def settled(api):
    await api.settle()
    return api
