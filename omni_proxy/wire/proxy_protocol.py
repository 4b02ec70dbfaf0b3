"""The PROXY protocol, versions 1 and 2: the client's address as sent by a load balancer.

Invariant: `parse_proxy_header` gets the bytes received so far and never reads past the end of the
header; bytes that are no header, or a header longer than `MAX_BYTES`, raise ProxyHeaderError.
Extensions are skipped. Source: haproxy.org, proxy-protocol.txt.
"""

from __future__ import annotations

import re
import struct
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from typing import Final, NamedTuple

from omni_proxy.shared.origins import MAX_PORT
from omni_proxy.wire.errors import DownstreamError

MAX_BYTES: Final = 4096
_V1_BYTES: Final = 107
_SIGNATURE: Final = b"\r\n\r\n\x00\r\nQUIT\n"
_V2_HEAD_BYTES: Final = 16
_LINE: Final = re.compile(
    rb"PROXY (TCP4|TCP6) ([0-9A-Fa-f.:]{2,45}) ([0-9A-Fa-f.:]{2,45}) ([0-9]{1,5}) ([0-9]{1,5})\Z"
)
_UNKNOWN: Final = re.compile(rb"PROXY UNKNOWN(?: [ -~]*)?\Z")
_V2_ADDRESSES: Final = {0x11: struct.Struct("!4s4sHH"), 0x21: struct.Struct("!16s16sHH")}
_V2_OTHERS: Final = (0x00, 0x12, 0x22, 0x31, 0x32)  # unknown, datagrams, Unix sockets
_LOCAL, _PROXY = 0x20, 0x21


class ProxyHeaderError(DownstreamError):
    """The bytes are not a valid PROXY header."""


class ProxyHeader(NamedTuple):
    """`length`: its size in bytes. `peer`: HOST:PORT of the client, "" if the header has none."""

    length: int
    peer: str


def parse_proxy_header(data: bytes) -> ProxyHeader | None:
    """None while the header is incomplete. Raises ProxyHeaderError."""
    if data.startswith(_SIGNATURE):
        return _read_v2(data)
    if _SIGNATURE.startswith(data):
        return None
    return _read_v1(data)


def _read_v1(data: bytes) -> ProxyHeader | None:
    if not (data.startswith(b"PROXY ") or b"PROXY ".startswith(data)):
        raise ProxyHeaderError("the connection does not begin with a PROXY header")
    end = data.find(b"\r\n", 0, _V1_BYTES)
    if end < 0:
        if len(data) >= _V1_BYTES or b"\n" in data or b"\r" in data[:-1]:
            raise ProxyHeaderError("the version 1 line is too long or does not end with CRLF")
        return None
    line = data[:end]
    if _UNKNOWN.match(line):
        return ProxyHeader(end + 2, "")
    match = _LINE.match(line)
    if match is None:
        raise ProxyHeaderError("the version 1 line is malformed")
    kind = IPv4Address if match[1] == b"TCP4" else IPv6Address
    try:
        source, _ = (kind(text.decode()) for text in match.group(2, 3))
    except AddressValueError as error:
        raise ProxyHeaderError(str(error)) from None
    if max(int(match[4]), int(match[5])) > MAX_PORT:
        raise ProxyHeaderError(f"port above {MAX_PORT}")
    return ProxyHeader(end + 2, _format_address(source, int(match[4])))


def _read_v2(data: bytes) -> ProxyHeader | None:
    if len(data) < _V2_HEAD_BYTES:
        return None
    command, family = data[12], data[13]
    length = _V2_HEAD_BYTES + int.from_bytes(data[14:16], "big")
    if command not in (_LOCAL, _PROXY):
        raise ProxyHeaderError(f"unsupported version and command {command:#04x}")
    if length > MAX_BYTES:
        raise ProxyHeaderError(f"the header of {length} bytes exceeds {MAX_BYTES}")
    if len(data) < length:
        return None
    if command == _LOCAL or family in _V2_OTHERS:
        return ProxyHeader(length, "")
    layout = _V2_ADDRESSES.get(family)
    if layout is None or length < _V2_HEAD_BYTES + layout.size:
        raise ProxyHeaderError(f"address family {family:#04x}, {length - _V2_HEAD_BYTES} bytes")
    source, _, port, _ = layout.unpack_from(data, _V2_HEAD_BYTES)
    address = IPv4Address(source) if len(source) == 4 else IPv6Address(source)
    return ProxyHeader(length, _format_address(address, port))


def _format_address(address: IPv4Address | IPv6Address, port: int) -> str:
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return format_peer(str(mapped or address), port)


# The client's address as text, `1.2.3.4:567` or `[::1]:567`, and the field that sends it to the
# admin API. An IPv4 client of a dual-stack socket is shown as IPv4.

FIELD: Final = b"x-omni-peer"  # in a control request; only the last one is from the proxy
_MAPPED: Final = "::ffff:"


def format_peer(host: str, port: int) -> str:
    """HOST:PORT; `host` as the kernel formats it."""
    address = host.removeprefix(_MAPPED)
    if ":" not in address:
        return f"{address}:{port}"
    return f"[{host}]:{port}"


def peer_field(peer: str) -> bytes:
    """A header line with the client's address; empty if it has none (a Unix socket)."""
    return b"%b: %b\r\n" % (FIELD, peer.encode("latin-1", "replace")) if peer else b""


def peer_host(peer: str) -> str:
    """The address without its port."""
    return peer.rpartition(":")[0].strip("[]")
