import pytest

from tests.replica.kv_transfer.transfer_stages import Pair, stage


@pytest.fixture(scope="package")
def pair():
    """Nothing is cached from test to test."""
    with stage("prefill") as prefill, stage("decode") as decode, stage() as whole:
        yield Pair(prefill, decode, whole)
