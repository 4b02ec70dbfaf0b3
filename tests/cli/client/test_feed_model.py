import pytest

from omni_proxy.cli.client.admin_client import AdminClientError
from omni_proxy.cli.client.feed_model import read_feed


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b"\xff", b'{"at": 1}'])
def test_an_invalid_feed_is_refused(text):
    with pytest.raises(AdminClientError, match="not a snapshot"):
        read_feed(text)
