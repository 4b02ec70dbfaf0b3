import pytest

from omni_proxy.cli.client.admin_client import AdminClientError
from omni_proxy.cli.client.feed_model import FleetRow, read_feed

SNAPSHOT = b'{"at": "2026-01-01T00:00:00Z", "revision": 3, "ready": true, "fleet": [{"id": "a", "url": "http://a"}]}'


def test_a_snapshot_is_read_with_defaults_for_fields_that_it_lacks():
    feed = read_feed(SNAPSHOT)
    assert (feed.revision, feed.ready, feed.fleet) == (3, True, (FleetRow(id="a", url="http://a"),))
    assert (feed.version, feed.cluster) == ("", None)


def test_unknown_fields_of_a_snapshot_are_ignored():
    assert read_feed(SNAPSHOT[:-1] + b', "newer": 1}') == read_feed(SNAPSHOT)


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b"\xff", b'{"at": 1}'])
def test_an_invalid_feed_is_refused(text):
    with pytest.raises(AdminClientError, match="not a snapshot"):
        read_feed(text)
