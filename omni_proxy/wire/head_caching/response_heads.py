"""A cache of parsed response heads that differ only in the content-length.

The key is the head without its content-length. Invariant: a hit equals what
`UpstreamResponse.read_head` returns for the same bytes, except for the order of fields with
different names. Responses that are not framed by a length are parsed each time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from omni_proxy.wire.head_caching.lru import Doorkeeper, LruCache
from omni_proxy.wire.response import LENGTH, UpstreamResponse

MAX_ENTRIES: Final = 1024

_LENGTH_FIELD = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ?([0-9]{1,15})(?=\r\n)")
# The spellings of content-length that are cached; a head with another one is parsed each time.
_AS_UVICORN: Final = b"\r\ncontent-length: "
_AS_OTHERS: Final = b"\r\nContent-Length: "


@dataclass(frozen=True, slots=True)
class CachedResponseHead:
    """The constant parts of a worker's response heads.

    `start`: up to the value of the content-length. `end`: from the end of its line, without the
    blank line. `lines` don't include it.
    """

    start: bytes
    end: bytes
    status: int
    lines: bytes
    keep_alive: bool
    sse: bool
    plain: bool = False  # keep-alive, with a body, no event stream, no status that may be retried


NOT_CACHED: Final = CachedResponseHead(b"", b"", 0, b"", keep_alive=False, sse=False)


def _parted(head: bytes) -> tuple[bytes, bytes, bytes, bytes]:
    """Split at the content-length: text before it, the name as spelled, the value, text after it.

    The name is empty if the head has none.
    """
    top, name, rest = head.partition(_AS_UVICORN)
    if not name:
        top, name, rest = head.partition(_AS_OTHERS)
    length, _, rest = rest.partition(b"\r\n")
    return top, name, length, rest


class ResponseHeadCache:
    """`UpstreamResponse.read_head` with a cache for responses that are framed by a length."""

    def __init__(self) -> None:
        self._known: LruCache[tuple[bytes, bytes], CachedResponseHead] = LruCache(MAX_ENTRIES)
        self._seen_once = Doorkeeper(MAX_ENTRIES)

    @property
    def size(self) -> int:
        """The number of cached heads."""
        return len(self._known)

    def find(self, head: bytes) -> CachedResponseHead:
        """The entry of a head without its blank line, or NOT_CACHED."""
        top, name, _, rest = _parted(head + b"\r\n\r\n")
        return (self._known.get((top, rest)) or NOT_CACHED) if name else NOT_CACHED

    def read(self, head: bytes, *, to_head: bool) -> UpstreamResponse:
        """Raises UpstreamProtocolError."""
        response = UpstreamResponse()
        top, name, length, rest = _parted(head)
        if not length.isdigit() or len(length) > 15 or to_head:
            response.read_head(head, to_head=to_head)
            return response
        key = (top, rest)
        known = self._known.get(key)
        if known is None:
            response.read_head(head, to_head=False)
            self._learn(key, name, response)
            return response
        response.status = known.status
        response.lines = known.lines + b"content-length: " + length + b"\r\n"
        response.keep_alive = known.keep_alive
        response.sse = known.sse
        response.remaining = int(length)
        response.is_complete = response.remaining == 0
        return response

    def _learn(self, key: tuple[bytes, bytes], name: bytes, response: UpstreamResponse) -> None:
        bodiless = response.status < 200 or response.status in (204, 304)
        if response.framing is not LENGTH or bodiless:
            return
        if not self._seen_once.admits(key):
            return
        lines = _LENGTH_FIELD.sub(b"", response.lines, count=1)
        before, rest = key
        end = b"\r\n" + rest.removesuffix(b"\r\n\r\n") if rest != b"\r\n" else b""
        cached = CachedResponseHead(
            before + name, end, response.status, lines, response.keep_alive, response.sse,
            response.keep_alive and not response.sse and 200 <= response.status < 500
            and response.status not in (408, 429),
        )  # fmt: skip
        self._known.put(key, cached)
