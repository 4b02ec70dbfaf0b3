import pytest

from omni_proxy.wire.proxy_protocol import format_peer


@pytest.mark.parametrize(
    ("host", "peer"),
    [
        ("1.2.3.4", "1.2.3.4:567"),
        ("::1", "[::1]:567"),
        ("fe80::1%eth0", "[fe80::1%eth0]:567"),
        ("::ffff:1.2.3.4", "1.2.3.4:567"),
        ("::ffff:0:1.2.3.4", "[::ffff:0:1.2.3.4]:567"),
    ],
)
def test_ipv6_addresses_are_written_in_brackets_and_mapped_ones_as_ipv4(host, peer):
    assert format_peer(host, 567) == peer
