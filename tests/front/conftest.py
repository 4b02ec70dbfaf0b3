import pytest

from tests.front.house import A, B, build_house, entry


@pytest.fixture
def house():
    """Two workers of FILE, not probed yet, no key."""
    return build_house(entry(A), entry(B))
