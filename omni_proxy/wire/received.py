"""How a control request reached us: scheme, Host and kind of listener, from the door to the front.

The front has one private socket and sees the door as its client, so the door writes one field into
each control request. Invariant: the field is the door's; one that a client sent is dropped before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from omni_proxy.wire.request import drop_fields

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
