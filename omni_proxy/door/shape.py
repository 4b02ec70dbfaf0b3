"""What an answer looks like to the client: its head, and its body's framing where that must change.

Invariant: the worker's own bytes go on wherever the client can read them as they are. Nothing is
sent or awaited here.
"""

from __future__ import annotations

from collections.abc import Callable

from omni_proxy.door.account import Exchange, diagnostics
from omni_proxy.door.ask import First
from omni_proxy.wire.answer import CHUNKED, LENGTH, Answer, Unchunker, with_reason
from omni_proxy.wire.chunked import LAST_CHUNK, as_chunk
from omni_proxy.wire.cors import without_cors
from omni_proxy.wire.head import RequestHead, drop_fields


class Shape:
    """How pieces are changed where the client can't take the worker's framing as it is."""

    __slots__ = ("ends", "last", "wrap")

    def __init__(self, wrap: Callable[[bytes], bytes], last: bytes, *, ends: bool) -> None:
        self.wrap = wrap
        self.last = last
        self.ends = ends  # the client can tell the end without our closing


def shape_of(first: First, head: RequestHead, *, begun: bool) -> Shape | None:
    """None where the very bytes of the worker go on. `begun`: in chunks of ours."""
    answer = first.answer
    if first.bodiless and not begun:
        return None
    if answer.framing is CHUNKED:
        return Shape(Unchunker().feed, b"", ends=False) if head.http_1_0 else None
    if head.http_1_0:
        return Shape(bytes, b"", ends=False)
    if answer.framing is LENGTH:
        return Shape(lambda piece: _as_last_chunk(piece, answer), b"", ends=True)
    return Shape(as_chunk, LAST_CHUNK, ends=True)


def _as_last_chunk(piece: bytes, answer: Answer) -> bytes:
    """Of a counted body, which tells of its end by its count."""
    return as_chunk(piece) + LAST_CHUNK if answer.whole else as_chunk(piece)


def head_bytes(mine: Exchange, first: First, head: RequestHead, *, keep: bool) -> bytes:
    """The answer's head as the client gets it; `keep`: its connection may go on."""
    answer = first.answer
    parts = [answer.lines if mine.route is not None else with_reason(answer)]
    if mine.route is not None:
        parts.append(diagnostics(mine))
        parts.append(mine.version.lines)
        if mine.worker is not None and mine.worker.version is not mine.version:
            parts.append(mine.worker.version.end_lines(mine.version))
        if head.origin:
            parts[0] = without_cors(parts[0])
            parts.append(mine.cors)
    if mine.id_line:
        parts[0] = drop_fields(parts[0], frozenset((mine.id_line.partition(b":")[0].lower(),)))
        parts.append(mine.id_line)
    if not first.bodiless and not head.http_1_0 and answer.framing is not LENGTH:
        parts.append(b"transfer-encoding: chunked\r\n")
    if not keep:
        parts.append(b"connection: close\r\n")
    elif head.http_1_0:
        parts.append(b"connection: keep-alive\r\n")
    parts.append(b"\r\n")
    return b"".join(parts)
