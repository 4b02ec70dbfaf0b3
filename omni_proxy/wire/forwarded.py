"""Header fields that the proxy adds to a request: X-Forwarded-*, Via, request id, hop.

`append` keeps the values of the proxy before this one; `replace` drops what clients send. Loop
detection: responses of the admin API carry the proxy's id, so a health check learns which workers
are proxies; requests to those carry a hop field with the id of each proxy on the path; a request
with our own id gets 508. Invariant: what is the same for all requests of one head template is added
once (`prepare`); a worker that is no omni-proxy gets no hop field, and an x-omni-received field
that a client sent is dropped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.request import RequestHead, drop_fields

VIA_NAME: Final = b"omni-proxy"
# With underscores, too: to a worker behind CGI or WSGI they are the same names.
_CLAIMS: Final = re.compile(
    rb"(?i)(?<=\r\n)(?:x[-_]forwarded[-_][^:\r\n]*|forwarded|x[-_]real[-_]ip)(?=:)"
)

_PROTO: Final = b"x-forwarded-proto"
_HOST: Final = b"x-forwarded-host"
_READ: Final = frozenset((_PROTO, _HOST))


@dataclass(frozen=True, slots=True)
class ForwardedHeaders:
    """`forwarded` as the configuration has it; `id_name` is the field of the request id, or empty.
    `id_sources` are further fields that may hold it, in lower case; the first one with a value
    counts. False if there is nothing to write or read.
    """

    forwarded: str = "off"
    id_name: bytes = b""
    id_sources: tuple[bytes, ...] = ()

    def __bool__(self) -> bool:
        return self.forwarded != "off" or bool(self.id_name) or bool(self.id_sources)

    def read_fields(self) -> frozenset[bytes]:
        """Lower-case names of the fields that `prepare` reads, without that of the id."""
        return _READ if self.forwarded != "off" else frozenset()

    def id_fields(self) -> frozenset[bytes]:
        """Lower-case names of the fields that may hold the request id."""
        return frozenset((self.id_name, *self.id_sources))

    def prepare(self, head: RequestHead, *, secure: bool) -> None:
        """Write the constant part into `head`."""
        named = (field_value(head.lines, name) for name in self.id_sources)
        head.request_id = next(filter(None, named), head.request_id)
        if self.id_name:
            head.request_id = field_value(head.lines, self.id_name) or head.request_id
        if self.forwarded == "off":
            return
        if self.forwarded == "replace":
            claims = {found[0].lower() for found in _CLAIMS.finditer(head.lines)}
            if claims:
                head.lines = drop_fields(head.lines, frozenset(claims))
        if not field_value(head.lines, _PROTO):
            head.lines += b"x-forwarded-proto: %b\r\n" % (b"https" if secure else b"http")
        if head.host and not field_value(head.lines, _HOST):
            head.lines += b"x-forwarded-host: %b\r\n" % head.host
        head.lines += b"via: %b %b\r\n" % (b"1.0" if head.http_1_0 else b"1.1", VIA_NAME)

    def forwarded_for_line(self, peer: str) -> bytes:
        """X-Forwarded-For as a separate line after the received ones; empty without an address."""
        address = peer.rpartition(":")[0].strip("[]")
        if self.forwarded == "off" or not address:
            return b""
        return b"x-forwarded-for: %b\r\n" % address.encode("latin-1", "replace")

    def request_id_line(self, request_id: bytes) -> bytes:
        return b"%b: %b\r\n" % (self.id_name, request_id)

    def set_request_id(self, lines: bytes, request_id: bytes) -> bytes:
        """Field lines with the id; a field that the client sent is unchanged."""
        if field_value(lines, self.id_name):
            return lines
        return drop_fields(lines, frozenset((self.id_name,))) + self.request_id_line(request_id)


def field_value(lines: bytes, name: bytes) -> bytes:
    """The value of a field in the lines of a head, or empty; `name` is lower-case."""
    lowered, field = lines.lower(), b"\r\n%b:" % name
    at = lowered.find(field)
    while at >= 0:
        begin = at + len(field)
        value = lines[begin:].partition(b"\r\n")[0].strip(b" \t")
        if value:
            return value
        at = lowered.find(field, begin)
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
        message = "this request came back to the proxy: some worker leads to the proxy itself"
        raise HttpError(508, message, "loop_detected", close=True)


# How an admin request was received: scheme, Host and kind of listener. The admin API listens on a
# private socket whose client is the data plane, so the data plane adds one field to each request.

FIELD: Final = b"x-omni-received"


@dataclass(frozen=True, slots=True)
class ReceivedVia:
    """`host`: the Host field as received, or empty. `local`: received on a Unix socket."""

    scheme: str
    host: str
    local: bool


def with_received(lines: bytes, host: bytes, *, secure: bool, local: bool) -> bytes:
    """Field lines with this field, and without any other of its name."""
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
