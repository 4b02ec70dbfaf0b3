"""Header fields that the proxy adds to a request: X-Forwarded-*, Via, request id, hop.

`append` keeps the values of the previous proxy; `replace` drops the values that clients send. Loop
detection: responses of the admin API carry the proxy's id, so health checks find the workers that
are proxies; requests to those carry a hop field with the id of each proxy on the path; a request
with this proxy's own id gets 508. Invariant: fields that are the same for all requests of one head
template are added once (`prepare`); a worker that is no omni-proxy gets no hop field, and an
x-omni-received field that a client sent is dropped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.request import RequestHead, drop_fields

VIA_NAME: Final = b"omni-proxy"
# Also with underscores: CGI and WSGI map both spellings to the same name.
_CLAIMS: Final = re.compile(
    rb"(?i)(?<=\r\n)(?:x[-_]forwarded[-_][^:\r\n]*|forwarded|x[-_]real[-_]ip)(?=:)"
)

_PROTO: Final = b"x-forwarded-proto"
_HOST: Final = b"x-forwarded-host"
_READ: Final = frozenset((_PROTO, _HOST))


@dataclass(frozen=True, slots=True)
class ForwardedHeaders:
    """`forwarded`: the configured value. `id_name`: the field of the request id, or empty.
    `id_sources`: further fields that may have the id, in lower case; the first one with a value is
    used. False if there is nothing to write or read.
    """

    forwarded: str = "off"
    id_name: bytes = b""
    id_sources: tuple[bytes, ...] = ()

    def __bool__(self) -> bool:
        return self.forwarded != "off" or bool(self.id_name) or bool(self.id_sources)

    def read_fields(self) -> frozenset[bytes]:
        """Lower-case names of the fields that `prepare` reads, without `id_fields`."""
        return _READ if self.forwarded != "off" else frozenset()

    def id_fields(self) -> frozenset[bytes]:
        """Lower-case names of the fields that may have the request id."""
        return frozenset((self.id_name, *self.id_sources))

    def prepare(self, head: RequestHead, *, secure: bool) -> None:
        """Write the constant part into `head`."""
        ids = (field_value(head.lines, name) for name in self.id_sources)
        head.request_id = next(filter(None, ids), head.request_id)
        if self.id_name:
            head.request_id = field_value(head.lines, self.id_name) or head.request_id
        if self.forwarded == "off":
            return
        if self.forwarded == "replace":
            claims = {match[0].lower() for match in _CLAIMS.finditer(head.lines)}
            if claims:
                head.lines = drop_fields(head.lines, frozenset(claims))
        if not field_value(head.lines, _PROTO):
            head.lines += b"x-forwarded-proto: %b\r\n" % (b"https" if secure else b"http")
        if head.host and not field_value(head.lines, _HOST):
            head.lines += b"x-forwarded-host: %b\r\n" % head.host
        head.lines += b"via: %b %b\r\n" % (b"1.0" if head.http_1_0 else b"1.1", VIA_NAME)

    def forwarded_for_line(self, peer: str) -> bytes:
        """An X-Forwarded-For line to add after the received ones; empty without an address."""
        address = peer.rpartition(":")[0].strip("[]")
        if self.forwarded == "off" or not address:
            return b""
        return b"x-forwarded-for: %b\r\n" % address.encode("latin-1", "replace")

    def request_id_line(self, request_id: bytes) -> bytes:
        return b"%b: %b\r\n" % (self.id_name, request_id)

    def set_request_id(self, lines: bytes, request_id: bytes) -> bytes:
        """Header lines with the id; an id that the client sent is kept."""
        if field_value(lines, self.id_name):
            return lines
        return drop_fields(lines, frozenset((self.id_name,))) + self.request_id_line(request_id)


def field_value(lines: bytes, name: bytes) -> bytes:
    """The value of a field in the lines of a head, or empty; `name` is lower-case."""
    lowered, field = lines.lower(), b"\r\n%b:" % name
    start = lowered.find(field)
    while start >= 0:
        begin = start + len(field)
        value = lines[begin:].partition(b"\r\n")[0].strip(b" \t")
        if value:
            return value
        start = lowered.find(field, begin)
    return b""


HOP_FIELD: Final = "x-omni-hop"  # in requests: the id of each proxy on the path
PROXY_FIELD: Final = "x-omni-proxy"  # in responses of control routes: the id of the proxy


def hop_line(proxy_id: str) -> bytes:
    return f"{HOP_FIELD}: {proxy_id}\r\n".encode("ascii")


def reject_loop(head: bytes, proxy_id: bytes) -> None:
    """Raises HttpError 508 for a request that already passed this proxy.

    The id is random, so it is searched in the whole head.
    """
    if proxy_id and proxy_id in head:
        message = "the request already passed this proxy: the URL of some worker leads back to it"
        raise HttpError(508, message, "loop_detected", close=True)


# How an admin request was received: scheme, Host and kind of listener. The data plane forwards
# admin requests to the private socket of the admin API, and adds one field with these values.

FIELD: Final = b"x-omni-received"


@dataclass(frozen=True, slots=True)
class ReceivedVia:
    """`host`: the Host field as received, or empty. `local`: received on a Unix socket."""

    scheme: str
    host: str
    local: bool


def with_received(lines: bytes, host: bytes, *, secure: bool, local: bool) -> bytes:
    """Header lines with this field added, and any field of that name from the client dropped."""
    if FIELD in lines.lower():
        lines = drop_fields(lines, frozenset((FIELD,)))
    scheme = b"https" if secure else b"http"
    listener = b"unix" if local else b"tcp"
    return b"%b%b: %b %b %b\r\n" % (lines, FIELD, listener, scheme, host)


def read_received(value: str) -> ReceivedVia:
    """Parse the field's value. Raises ValueError for what `with_received` does not write."""
    listener, scheme, host = (*value.split(" "), "", "")[:3]
    if listener not in ("unix", "tcp") or scheme not in ("http", "https"):
        raise ValueError(f"{value!r} is not a valid {FIELD.decode()} value")
    return ReceivedVia(scheme, host, listener == "unix")
