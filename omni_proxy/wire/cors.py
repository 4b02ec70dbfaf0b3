"""CORS: the fields that let a page of another origin read a response (Fetch, 3.2).

Credentials are never allowed. Invariant: an origin that is not allowed gets no field.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from omni_proxy.wire.header_fields import DIAGNOSTICS, TOKEN, as_texts

ANY: Final = "*"
PREFLIGHT_SECS: Final = 600
# Response fields that scripts may read in addition to the CORS-safelisted ones.
EXPOSED: Final = (
    "x-request-id",
    *as_texts(DIAGNOSTICS),
    "retry-after",
    "etag",
    "location",
)
# Fields that report a caller's limits: see `api_keys.caller_limits`.
RATE_FIELDS: Final = tuple(
    f"x-ratelimit-{what}-{noun}"
    for noun in ("requests", "tokens")
    for what in ("limit", "remaining", "reset")
)
_OF_WORKERS: Final = re.compile(rb"(?i)(?<=\r\n)access-control-[^\r\n]*\r\n")
_NAMES: Final = re.compile(rf"(?:{TOKEN.decode()}|[,\t ])*")

Fields = tuple[tuple[str, str], ...]


class Cors:
    """`origins`: the configured values. `more`: further fields that scripts may read."""

    def __init__(self, origins: Sequence[str], more: Iterable[str] = ()) -> None:
        self._any = ANY in origins
        self._origins = frozenset(origins)
        self._exposed = ", ".join(dict.fromkeys((*EXPOSED, *(name.lower() for name in more))))
        self._lines = encode_fields(self.fields("")) if self._any else b""

    def __bool__(self) -> bool:
        """Whether any page of another origin is allowed."""
        return bool(self._origins)

    def allows(self, origin: str) -> bool:
        return self._any or origin.lower() in self._origins

    def fields(self, origin: str) -> Fields:
        """The fields to add to a response; () if the origin is not allowed."""
        if not self.allows(origin):
            return ()
        return (
            *self._allow_origin_fields(origin),
            ("access-control-expose-headers", self._exposed),
        )

    def lines(self, origin: bytes) -> bytes:
        """The same fields as header lines."""
        return self._lines or encode_fields(self.fields(origin.decode("latin-1")))

    def preflight(self, origin: str, methods: Iterable[str], asked: str | None) -> Fields:
        """The fields of the response to a preflight; () if the origin is not allowed. `asked`: its
        Access-Control-Request-Headers."""
        if not self.allows(origin):
            return ()
        fields = [
            *self._allow_origin_fields(origin),
            ("access-control-allow-methods", ", ".join(sorted(methods))),
            ("access-control-max-age", str(PREFLIGHT_SECS)),
        ]
        if asked and _NAMES.fullmatch(asked):
            fields.append(("access-control-allow-headers", asked))
        return tuple(fields)

    def _allow_origin_fields(self, origin: str) -> Fields:
        if self._any:
            return (("access-control-allow-origin", ANY),)
        return (("access-control-allow-origin", origin), ("vary", "Origin"))


def encode_fields(fields: Fields) -> bytes:
    return "".join(f"{name}: {value}\r\n" for name, value in fields).encode("latin-1")


def drop_cors_fields(lines: bytes) -> bytes:
    """Header lines of a worker without its own CORS policy: the proxy's policy applies instead."""
    return _OF_WORKERS.sub(b"", lines)
