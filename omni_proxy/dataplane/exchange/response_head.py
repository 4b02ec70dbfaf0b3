"""The head of a response as the client gets it, and whether its body must be framed anew.

Invariant: the worker's own bytes are relayed unchanged where the client can read them as they are.
Nothing is sent or awaited here. `diagnostic_fields` is the one writer of the headers of
omni-router.md 10, for the fast path, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.upstream.pool import ResponseStart
from omni_proxy.wire.chunked import LAST_CHUNK, encode_chunk
from omni_proxy.wire.cors import drop_cors_fields
from omni_proxy.wire.request import RequestHead, drop_fields
from omni_proxy.wire.response import CHUNKED, LENGTH, Unchunker, UpstreamResponse, add_reason_phrase

REQUEST_ID: Final = b"X-SGLang-Omni-Request-ID: "
_ATTEMPT: Final = b"\r\nX-SGLang-Omni-Route-Attempt: %d\r\n"
_FIRST_ATTEMPT: Final = _ATTEMPT % 1  # not formatted each time: that costs a hundred cache lines


def diagnostic_fields(exchange: Exchange) -> tuple[bytes, ...]:
    """Header lines, in parts, of a response of a worker or about one: the worker, the request id,
    the number of the attempt, and each attempt's result where there were several."""
    worker = exchange.worker or exchange.last_worker
    worker_line = worker.route_line if worker is not None else b""
    if exchange.tried is None:
        return worker_line, REQUEST_ID, exchange.request_id, _FIRST_ATTEMPT
    number = _ATTEMPT % exchange.attempts
    results = ", ".join(
        f"{worker.display_id}={result}" for worker, result in exchange.attempt_results()
    )
    results_line = b"x-omni-attempts: %b\r\n" % results.encode("latin-1", "replace")
    return worker_line, REQUEST_ID, exchange.request_id, number, results_line


def version_fields(exchange: Exchange) -> bytes:
    """Header lines: the weight version that the response began with, and that of now if it is
    another."""
    begun, worker = exchange.version, exchange.worker
    if worker is None or worker.version is begun:
        return begun.lines
    return begun.lines + worker.version.end_header_lines(begun)


def encode_head(
    exchange: Exchange, start: ResponseStart, head: RequestHead, *, keep: bool
) -> bytes:
    """`keep`: the client's connection goes on after this response."""
    response = start.response
    parts: list[bytes]
    if exchange.route is None:
        parts = [add_reason_phrase(response)]
    else:
        lines = drop_cors_fields(response.lines) if head.origin else response.lines
        parts = [lines, *diagnostic_fields(exchange), version_fields(exchange)]
        if head.origin:
            parts.append(exchange.cors)
    if exchange.request_id_line:
        name = exchange.request_id_line.partition(b":")[0].lower()
        parts[0] = drop_fields(parts[0], frozenset((name,)))
        parts.append(exchange.request_id_line)
    if not start.bodiless and not head.http_1_0 and response.framing is not LENGTH:
        parts.append(b"transfer-encoding: chunked\r\n")
    if not keep:
        parts.append(b"connection: close\r\n")
    elif head.http_1_0:
        parts.append(b"connection: keep-alive\r\n")
    parts.append(b"\r\n")
    return b"".join(parts)


class BodyFraming:
    """How chunks of a body are changed for a client that can't read the worker's framing."""

    __slots__ = ("last", "self_delimiting", "wrap")

    def __init__(
        self, wrap: Callable[[bytes], bytes], last: bytes, *, self_delimiting: bool
    ) -> None:
        self.wrap = wrap
        self.last = last
        self.self_delimiting = self_delimiting  # its end shows without closing the connection


def new_framing(start: ResponseStart, head: RequestHead, *, begun: bool) -> BodyFraming | None:
    """None where the worker's own bytes go on. `begun`: the proxy has begun a chunked response."""
    response = start.response
    if start.bodiless and not begun:
        return None
    if response.framing is CHUNKED:
        return BodyFraming(Unchunker().feed, b"", self_delimiting=False) if head.http_1_0 else None
    if head.http_1_0:
        return BodyFraming(bytes, b"", self_delimiting=False)
    if response.framing is LENGTH:
        return BodyFraming(lambda chunk: _as_last_chunk(chunk, response), b"", self_delimiting=True)
    return BodyFraming(encode_chunk, LAST_CHUNK, self_delimiting=True)


def _as_last_chunk(chunk: bytes, response: UpstreamResponse) -> bytes:
    """Of a body with a content-length, which is over when that was reached."""
    return encode_chunk(chunk) + LAST_CHUNK if response.whole else encode_chunk(chunk)
