import pytest

from omni_proxy.wire.forwarded import ReceivedVia, read_received, with_received

LINES = b"GET / HTTP/1.1\r\na: b\r\n"


@pytest.mark.parametrize(
    ("host", "secure", "local", "received"),
    [
        (b"a:1", False, False, ReceivedVia("http", "a:1", local=False)),
        (b"[::1]", True, False, ReceivedVia("https", "[::1]", local=False)),
        (b"admin", False, True, ReceivedVia("http", "admin", local=True)),
        (b"", False, False, ReceivedVia("http", "", local=False)),
    ],
)
def test_a_written_field_can_be_read(host, secure, local, received):
    lines = with_received(LINES, host, secure=secure, local=local)
    assert lines.startswith(LINES)
    name, _, value = lines[len(LINES) :].decode().partition(":")
    assert name == "x-omni-received"
    assert read_received(value.strip()) == received


def test_the_clients_own_field_is_dropped():
    spoofed = LINES + b"X-OMNI-Received: unix http localhost\r\n"
    assert with_received(spoofed, b"a", secure=False, local=False) == with_received(
        LINES, b"a", secure=False, local=False
    )


@pytest.mark.parametrize("value", ["", "tcp", "udp http a", "tcp ftp a"])
def test_invalid_values_are_rejected(value):
    with pytest.raises(ValueError, match="not a valid x-omni-received value"):
        read_received(value)
