"""X-Forwarded-*, Via and the request id, added to a request for the worker.

`append` keeps the values of the proxy before this one; `replace` drops what clients send.
Invariant: what is the same for all requests of one head template is added once (`prepare`); only
the client's address and the id are added for each request.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

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

    False where there is nothing to write.
    """

    forwarded: str = "off"
    id_name: bytes = b""

    def __bool__(self) -> bool:
        return self.forwarded != "off" or bool(self.id_name)

    def read_fields(self) -> frozenset[bytes]:
        """The fields whose values `prepare` reads, in lower case, but for that of the id."""
        return _READ if self.forwarded != "off" else frozenset()

    def prepare(self, head: RequestHead, *, secure: bool) -> None:
        """The part that does not vary, written into `head`."""
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
        """X-Forwarded-For, a line of its own behind those that came; empty without an address."""
        address = peer.rpartition(":")[0].strip("[]")
        if self.forwarded == "off" or not address:
            return b""
        return b"x-forwarded-for: %b\r\n" % address.encode("latin-1", "replace")

    def request_id_line(self, request_id: bytes) -> bytes:
        return b"%b: %b\r\n" % (self.id_name, request_id)

    def set_request_id(self, lines: bytes, request_id: bytes) -> bytes:
        """Field lines that carry the id: the client's own field stays as it is."""
        if field_value(lines, self.id_name):
            return lines
        return drop_fields(lines, frozenset((self.id_name,))) + self.request_id_line(request_id)


def field_value(lines: bytes, name: bytes) -> bytes:
    """The value of a field in the lines of a head, empty where it is not there; `name` is lower
    case."""
    if name not in lines.lower():
        return b""
    for line in lines.split(b"\r\n")[1:]:
        found, _, value = line.partition(b":")
        if found.lower() == name and value.strip(b" \t"):
            return value.strip(b" \t")
    return b""
