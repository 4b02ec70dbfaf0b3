"""Header fields that proxies and their parts add for each other: x-omni-hop, -proxy, -received.

Loop detection: responses of the admin API carry the proxy's id, so a health check learns which
workers are proxies. Requests to those carry a hop field with the id of each proxy on the path; a
request with our own id gets 508. Invariant: a worker that is no omni-proxy gets no hop field, and
an x-omni-received field that a client sent is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.request import drop_fields

HOP_FIELD: Final = "x-omni-hop"  # in requests: the id of each proxy that it came through
PROXY_FIELD: Final = "x-omni-proxy"  # in answers of control routes: the id of the proxy


def hop_line(proxy_id: str) -> bytes:
    return f"{HOP_FIELD}: {proxy_id}\r\n".encode("ascii")


def reject_loop(head: bytes, proxy_id: bytes) -> None:
    """Raises HttpError 508 for a request that has been here before. An id is random: it is looked
    for anywhere in the head."""
    if proxy_id and proxy_id in head:
        told = "this request came back to the proxy: some worker leads to the proxy itself"
        raise HttpError(508, told, "loop_detected", close=True)


# How an admin request was received: scheme, Host and kind of listener. The admin API listens on a
# private socket whose client is the data plane, so the data plane adds one field to each request.

FIELD: Final = b"x-omni-received"


@dataclass(frozen=True, slots=True)
class ReceivedVia:
    """`host` is the Host field as it came, empty without one. `local`: by a Unix socket."""

    scheme: str
    host: str
    local: bool


def with_received(lines: bytes, host: bytes, *, secure: bool, local: bool) -> bytes:
    """Field lines with the field, and with no other of that name."""
    if FIELD in lines.lower():
        lines = drop_fields(lines, frozenset((FIELD,)))
    scheme = b"https" if secure else b"http"
    listener = b"unix" if local else b"tcp"
    return b"%b%b: %b %b %b\r\n" % (lines, FIELD, listener, scheme, host)


def read_received(value: str) -> ReceivedVia:
    """Of the field's value. Raises ValueError for what `with_received` does not write."""
    listener, scheme, host = (*value.split(" "), "", "")[:3]
    if listener not in ("unix", "tcp") or scheme not in ("http", "https"):
        raise ValueError(f"{value!r} does not say how a request was received")
    return ReceivedVia(scheme, host, listener == "unix")
