import pytest

from omni_proxy.wire.forwarded import ReceivedVia, read_received, with_received

LINES = b"GET / HTTP/1.1\r\na: b\r\n"


@pytest.mark.parametrize(
    ("host", "secure", "local", "reported"),
    [
        (b"a:1", False, False, ReceivedVia("http", "a:1", local=False)),
        (b"[::1]", True, False, ReceivedVia("https", "[::1]", local=False)),
        (b"admin", False, True, ReceivedVia("http", "admin", local=True)),
        (b"", False, False, ReceivedVia("http", "", local=False)),
    ],
)
def test_what_is_written_is_read(host, secure, local, reported):
    lines = with_received(LINES, host, secure=secure, local=local)
    assert lines.startswith(LINES)
    name, _, value = lines[len(LINES) :].decode().partition(":")
    assert name == "x-omni-received"
    assert read_received(value.strip()) == reported


def test_what_a_client_wrote_is_dropped():
    claimed = LINES + b"X-OMNI-Received: unix http localhost\r\n"
    assert with_received(claimed, b"a", secure=False, local=False) == with_received(
        LINES, b"a", secure=False, local=False
    )


@pytest.mark.parametrize("value", ["", "tcp", "udp http a", "tcp ftp a"])
def test_anything_else_is_refused(value):
    with pytest.raises(ValueError, match="not a valid x-omni-received value"):
        read_received(value)
