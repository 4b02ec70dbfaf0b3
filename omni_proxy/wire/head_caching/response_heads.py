"""A cache of parsed response heads, in which only the content-length differs.

The key is the head without its content-length. Invariant: a hit equals what
`UpstreamResponse.read_head` returns for the same bytes (the order of fields with different names
aside). Responses that are not framed by a length are parsed each time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from omni_proxy.wire.head_caching.lru import Doorkeeper, LruCache
from omni_proxy.wire.response import LENGTH, UpstreamResponse

ANSWERS: Final = 1024

_LENGTH_FIELD = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ?([0-9]{1,15})(?=\r\n)")
# Spelt otherwise it is read each time.
_AS_UVICORN: Final = b"\r\ncontent-length: "
_AS_OTHERS: Final = b"\r\nContent-Length: "


@dataclass(frozen=True, slots=True)
class CachedResponseHead:
    """What stays the same of a worker's answers. `name` is how it writes the content-length, which
    stands between `before` and `after`; `lines` lack it."""

    before: bytes
    name: bytes
    after: bytes  # without the blank line
    status: int
    lines: bytes
    keep_alive: bool
    sse: bool
    plain: bool = False  # with a body, no stream, no status to judge, and more may follow


NOT_CACHED: Final = CachedResponseHead(b"", _AS_UVICORN, b"", 0, b"", keep_alive=False, sse=False)


def _parted(head: bytes) -> tuple[bytes, bytes, bytes, bytes]:
    """At its content-length: what stands before it, the name as written, the value, what follows.
    No name where it has none."""
    top, name, rest = head.partition(_AS_UVICORN)
    if not name:
        top, name, rest = head.partition(_AS_OTHERS)
    length, _, rest = rest.partition(b"\r\n")
    return top, name, length, rest


class ResponseHeadCache:
    """`UpstreamResponse.read_head`, remembered for answers that are framed by a length."""

    def __init__(self) -> None:
        self._known: LruCache[tuple[bytes, bytes], CachedResponseHead] = LruCache(ANSWERS)
        self._seen_once = Doorkeeper(ANSWERS)

    def usual(self, head: bytes) -> CachedResponseHead:
        """What is known of a head without its blank line; NOT_CACHED where nothing is."""
        top, name, _, rest = _parted(head + b"\r\n\r\n")
        return (self._known.get((top, rest)) or NOT_CACHED) if name else NOT_CACHED

    def read(self, head: bytes, *, to_head: bool) -> UpstreamResponse:
        """Raises UpstreamGarbage."""
        answer = UpstreamResponse()
        top, name, length, rest = _parted(head)
        if not length.isdigit() or len(length) > 15 or to_head:
            answer.read_head(head, to_head=to_head)
            return answer
        key = (top, rest)
        known = self._known.get(key)
        if known is None:
            answer.read_head(head, to_head=False)
            self._learn(key, name, answer)
            return answer
        answer.status = known.status
        answer.lines = known.lines + b"content-length: " + length + b"\r\n"
        answer.keep_alive = known.keep_alive
        answer.sse = known.sse
        answer.remaining = int(length)
        answer.whole = answer.remaining == 0
        return answer

    def _learn(self, key: tuple[bytes, bytes], name: bytes, answer: UpstreamResponse) -> None:
        bodiless = answer.status < 200 or answer.status in (204, 304)
        if answer.framing is not LENGTH or bodiless:
            return
        if not self._seen_once.admits(key):
            return
        lines = _LENGTH_FIELD.sub(b"", answer.lines, count=1)
        before, rest = key
        usual = CachedResponseHead(
            before, name, rest.removesuffix(b"\r\n").removesuffix(b"\r\n"),
            answer.status, lines, answer.keep_alive, answer.sse,
            answer.keep_alive and not answer.sse and 200 <= answer.status < 500
            and answer.status not in (408, 429),
        )  # fmt: skip
        self._known.put(key, usual)
