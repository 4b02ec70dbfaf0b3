import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.wire.proxy_protocol import (
    MAX_BYTES,
    ProxyHeader,
    ProxyHeaderError,
    parse_proxy_header,
)

SIGNATURE = b"\r\n\r\n\x00\r\nQUIT\n"
V4 = bytes((10, 1, 2, 3, 10, 0, 0, 1)) + struct.pack("!HH", 5555, 80)
MAPPED = bytes(10) + b"\xff\xff" + bytes((10, 1, 2, 3)) + bytes(16) + struct.pack("!HH", 1, 2)
V6 = bytes(15) + b"\x01" + bytes(16) + struct.pack("!HH", 1, 2)


def v2(command=0x21, family=0x11, rest=V4, length=None):
    length = len(rest) if length is None else length
    return SIGNATURE + bytes((command, family)) + struct.pack("!H", length) + rest


GOOD = {
    "TCP4": (b"PROXY TCP4 192.168.0.1 10.0.0.1 56324 443\r\n", "192.168.0.1:56324"),
    "TCP6": (b"PROXY TCP6 2001:DB8::1 ::1 1 65535\r\n", "[2001:db8::1]:1"),
    "UNKNOWN": (b"PROXY UNKNOWN\r\n", ""),
    "UNKNOWN with words": (b"PROXY UNKNOWN ffff::1 ::2 a b\r\n", ""),
    "v2": (v2(), "10.1.2.3:5555"),
    "v2 of IPv6": (v2(family=0x21, rest=V6), "[::1]:1"),
    "TCP6, an IPv4 client": (b"PROXY TCP6 ::ffff:10.1.2.3 ::1 1 65535\r\n", "10.1.2.3:1"),
    "v2 of IPv6, an IPv4 client": (v2(family=0x21, rest=MAPPED), "10.1.2.3:1"),
    "v2 with extensions": (v2(rest=V4 + b"\x03\x00\x04abcd"), "10.1.2.3:5555"),
    "v2, LOCAL": (v2(command=0x20, family=0x00, rest=b""), ""),
    "v2, a Unix socket": (v2(family=0x31, rest=bytes(216)), ""),
}


@pytest.mark.parametrize(("raw", "peer"), GOOD.values(), ids=GOOD)
def test_a_header_in_any_pieces_is_read_to_its_end_and_not_further(raw, peer):
    assert [parse_proxy_header(raw[:at]) for at in range(len(raw))] == [None] * len(raw)
    assert (
        parse_proxy_header(raw)
        == parse_proxy_header(raw + b"GET / HTTP/1.1\r\n")
        == ProxyHeader(len(raw), peer)
    )


GARBAGE = {
    "a request": b"GET / HTTP/1.1\r\n",
    "TLS": b"\x16\x03\x01\x02\x00",
    "lower case": b"proxy TCP4 1.1.1.1 2.2.2.2 1 2\r\n",
    "another family": b"PROXY TCP5 1.1.1.1 2.2.2.2 1 2\r\n",
    "IPv6 as TCP4": b"PROXY TCP4 ::1 ::2 1 2\r\n",
    "IPv4 as TCP6": b"PROXY TCP6 1.1.1.1 2.2.2.2 1 2\r\n",
    "no address": b"PROXY TCP4 300.1.1.1 2.2.2.2 1 2\r\n",
    "a bad destination": b"PROXY TCP4 1.1.1.1 2.2.2.256 1 2\r\n",
    "a port too high": b"PROXY TCP4 1.1.1.1 2.2.2.2 65536 2\r\n",
    "a signed port": b"PROXY TCP4 1.1.1.1 2.2.2.2 +1 2\r\n",
    "two spaces": b"PROXY TCP4  1.1.1.1 2.2.2.2 1 2\r\n",
    "a bare LF": b"PROXY TCP4 1.1.1.1 2.2.2.2 1 2\n",
    "too few words": b"PROXY TCP4 1.1.1.1 2.2.2.2 1\r\n",
    "controls after UNKNOWN": b"PROXY UNKNOWN \x01\r\n",
    "a bare LF after UNKNOWN": b"PROXY UNKNOWN \na\r\n",
    "a bare CR after UNKNOWN": b"PROXY UNKNOWN \ra\r\n",
    "no end": b"PROXY TCP4 " + b"1" * 100,
    "v2, another version": v2(command=0x11),
    "v2, another command": v2(command=0x22),
    "v2, another family": v2(family=0x13),
    "v2, too short for its addresses": v2(rest=V4[:-1]),
    "v2, too long": v2(length=MAX_BYTES),
    "a signature with a mistake": SIGNATURE[:-1] + b"\r",
}


@pytest.mark.parametrize("raw", GARBAGE.values(), ids=GARBAGE)
def test_invalid_headers_are_rejected(raw):
    with pytest.raises(ProxyHeaderError):
        parse_proxy_header(raw)


@given(
    st.sampled_from([raw for raw, _ in GOOD.values()]), st.integers(0, 60), st.binary(max_size=6)
)
def test_arbitrary_bytes_raise_no_other_error(raw, at, junk):
    try:
        header = parse_proxy_header(raw[:at] + junk + raw[at + len(junk) :])
    except ProxyHeaderError:
        return
    assert header is None or 0 < header.length <= MAX_BYTES
