import pytest

from tests.replica.kv_transfer.transfer_stages import Pair, stage


@pytest.fixture(scope="package")
def pair():
    """Stages without a prefix cache, so tests can share them."""
    with stage("prefill") as prefill, stage("decode") as decode, stage() as whole:
        yield Pair(prefill, decode, whole)
