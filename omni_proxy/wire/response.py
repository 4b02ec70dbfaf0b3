"""A worker's response: the head cleaned, the body followed to its exact end.

Invariant: only the framing makes `is_complete` true, and no byte past the end is forwarded
(response splitting). `excess`: such bytes arrived, and the connection can't be reused. Body bytes
are never changed here.
"""

from __future__ import annotations

import re
from enum import Enum
from http import HTTPStatus

import httptools

from omni_proxy.wire.chunked import LAST_CHUNK
from omni_proxy.wire.errors import UpstreamError
from omni_proxy.wire.header_fields import DIAGNOSTICS, HOP_BY_HOP
from omni_proxy.wire.request import (
    MAX_HEAD_BYTES,
    PLAIN_OPTIONS,
    connection_options,
    drop_fields,
    is_persistent,
)
from omni_proxy.wire.scan.whole_chunks import READS_CHUNKS, are_whole_chunks

# Limit of interim (1xx) heads before one response: more than two or three are never useful, and
# each costs an iteration.
INTERIM_HEADS = 100
MAX_LENGTH = 10**18  # as for requests: byte counts must not overflow in the native build
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] [0-9]{3}(?: [\t -~\x80-\xff]*)?\r\n")
_CHUNK_SIZE = re.compile(rb"(?:\A|(?<=\r\n))([0-9A-Fa-f]{1,15})(?:[ \t]*;[^\r\n]*)?\r\n")
# A worker can't remove the length from the client's response by nominating it.
_STAYING = PLAIN_OPTIONS | {b"content-length"}
_OURS = re.compile(
    rb"\r\n(?i:(%b|x-(?:%b))|(content-length|content-type))[ \t]*:[ \t]*([^\r\n]*)"
    % (b"|".join(HOP_BY_HOP), b"|".join(name.removeprefix(b"x-") for name in DIAGNOSTICS))
)


class Framing(Enum):
    """How the end of the body is determined (RFC 9112 6.3)."""

    LENGTH = "length"
    CHUNKED = "chunked"
    CLOSE = "close"


# Looking up a module global is much faster than a member of an enum (Python 3.11).
LENGTH, CHUNKED, CLOSE = Framing


class UpstreamProtocolError(UpstreamError):
    """The worker's bytes are not an HTTP/1.1 response."""


class UpstreamResponse:
    """One response: call `read_head`, then `feed` its body. Also the callback object of llhttp."""

    __slots__ = (
        "between",
        "excess",
        "framing",
        "is_complete",
        "keep_alive",
        "lines",
        "parser",
        "refused",
        "remaining",
        "sse",
        "status",
    )  # fmt: skip

    def __init__(self) -> None:
        self.parser: httptools.HttpResponseParser | None = None  # set by `read_head`
        self.status = 0
        self.lines = b""  # status line and the worker's own fields, each ended by CRLF
        self.framing = LENGTH
        self.remaining = 0
        self.keep_alive = False
        self.sse = False
        self.is_complete = False
        self.excess = False
        self.between = READS_CHUNKS  # llhttp is between two chunks, so it can skip whole chunks
        self.refused = b""  # the piece of a chunked body with the framing error

    def read_head(self, head: bytes, *, to_head: bool) -> None:
        """Parse one complete head; `to_head`: the request was a HEAD.

        Raises UpstreamProtocolError. After a 1xx head the response is yet to arrive: parse the next
        head with a new UpstreamResponse.
        """
        if b"\r\n " in head or b"\r\n\t" in head:
            raise UpstreamProtocolError("folded header line")
        if not _STATUS_LINE.match(head):
            raise UpstreamProtocolError("malformed status line")
        self.parser = httptools.HttpResponseParser(self)
        try:
            self.parser.feed_data(head)
        except httptools.HttpParserUpgrade:
            pass
        except httptools.HttpParserError as error:
            raise UpstreamProtocolError(str(error)) from None
        self.status = self.parser.get_status_code()
        if not 100 <= self.status <= 599:
            raise UpstreamProtocolError(f"status {self.status}")
        self._clean(head)
        if to_head or self.status in (204, 304) or self.status < 200:
            self.is_complete = True  # RFC 9112 6.3: no body, regardless of the fields
        elif self.framing is LENGTH:
            self.is_complete = self.remaining == 0
        else:
            self.is_complete = False
            self.keep_alive &= self.framing is CHUNKED

    def _clean(self, head: bytes) -> None:
        kept: list[bytes] = []
        start = 0
        length = -1
        codings: list[bytes] = []
        connection: list[bytes] = []
        for match in _OURS.finditer(head):
            ours, read, value = match.groups()
            if ours is not None:
                kept.append(head[start : match.start()])
                start = match.end()
                name = ours.lower()
                if name == b"transfer-encoding":
                    codings.append(value.strip().lower())
                elif name == b"connection":
                    connection.append(value)
            elif read.lower() == b"content-length":
                length = int(value)  # llhttp has validated it: below 2**64
                if length >= MAX_LENGTH:
                    raise UpstreamProtocolError("the content-length is too large")
            else:
                self.sse = value[:17].lower() == b"text/event-stream"
        kept.append(head[start:-2])
        lines = b"HTTP/1.1" + b"".join(kept)[8:]  # a worker may use HTTP/1.0
        nominated = connection_options(connection)
        self.keep_alive = is_persistent(nominated, http_1_0=head.startswith(b"HTTP/1.0"))
        names = nominated - _STAYING
        self.lines = drop_fields(lines, names) if names else lines
        if codings:
            # With any other coding, llhttp would read until the end of the connection as the body.
            if codings != [b"chunked"]:
                raise UpstreamProtocolError("a transfer-encoding other than chunked")
            self.framing = CHUNKED
        elif length >= 0:
            self.framing, self.remaining = LENGTH, length
        else:
            self.framing = CLOSE

    def feed(self, piece: bytes) -> bytes:
        """Follow the body; returns the part of `piece` that belongs to it.

        Raises UpstreamProtocolError if the framing is invalid, or if bytes follow the last chunk:
        then it is unknown where the body ends, and the rest could be taken for another response.
        """
        if self.framing is CHUNKED and self.parser is not None:
            if self.between and are_whole_chunks(piece):
                return piece
            self.between = False
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserUpgrade:  # another response follows this one
                self.excess = True
            except httptools.HttpParserError as error:
                self.refused = piece
                raise UpstreamProtocolError(str(error)) from None
            if self.excess:
                self.refused = piece
                raise UpstreamProtocolError("bytes after the end of the response")
            if self.is_complete:
                return self._without_stray_lines(piece)
        elif self.framing is LENGTH:
            self.remaining -= len(piece)
            if self.remaining <= 0:
                self.is_complete = True
                if self.remaining < 0:
                    self.excess = True
                    return piece[: self.remaining]
        return piece

    def _without_stray_lines(self, piece: bytes) -> bytes:
        """Drop empty lines after the last chunk: llhttp skips them, but a client may not."""
        end = len(piece.rstrip(b"\r\n")) + 4
        if 4 < end < len(piece):
            self.excess = True
            return piece[:end]
        return piece

    def is_between_chunks(self, last: bytes) -> bool:
        """Whether the accepted body, whose last piece is `last`, ends at the end of a chunk.

        Call it once: nothing can be fed afterwards. A callback for each chunk would slow down every
        event, so instead a last chunk is fed, which llhttp accepts only between chunks. After a
        refused piece that is impossible: then `last` must end with a complete chunk, and the
        refused piece must be invalid after one.
        """
        if self.parser is None:
            return False
        if self.refused:
            ended = not last or _ends_with_chunk(last)
            return ended and _is_refused_after_a_chunk(self.refused)
        if self.is_complete:
            return False
        try:
            self.parser.feed_data(LAST_CHUNK)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            return False
        return self.is_complete

    def on_message_complete(self) -> None:
        self.is_complete = True

    def on_message_begin(self) -> None:
        self.excess = self.is_complete


def check_interim(count: int) -> None:
    """Raises UpstreamProtocolError for too many interim heads before a response."""
    if count > INTERIM_HEADS:
        raise UpstreamProtocolError(f"more than {INTERIM_HEADS} interim heads before the response")


def _ends_with_chunk(piece: bytes) -> bool:
    """Whether a piece ends with a complete chunk.

    It may begin inside a chunk, so parsing starts at the first line that begins a valid chunk.
    """
    for match in _CHUNK_SIZE.finditer(piece):
        ended = _ends_after_chunks(piece, match)
        if ended is not None:
            return ended
    return False


def _ends_after_chunks(piece: bytes, size: re.Match[bytes]) -> bool | None:
    """Whether the piece ends after a chunk, parsed from a size line; None if no chunk begins
    there."""
    match: re.Match[bytes] | None = size
    while match is not None:
        end = match.end() + int(match[1], 16)
        if piece[end : end + 2] != b"\r\n":
            return False if match is not size or end + 2 > len(piece) else None
        if end + 2 == len(piece):
            return True
        match = _CHUNK_SIZE.match(piece, end + 2)
    return False


def _is_refused_after_a_chunk(piece: bytes) -> bool:
    other = UpstreamResponse()
    other.read_head(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", to_head=False)
    try:
        other.feed(piece)
    except UpstreamProtocolError:
        return True
    return False


def find_response_head_end(buffer: bytes | bytearray) -> int:
    """The end of the head (past its blank line), 0 while it is incomplete.

    Raises UpstreamProtocolError.
    """
    end = buffer.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
    if end >= 0:
        return end + 4
    if len(buffer) > MAX_HEAD_BYTES:
        raise UpstreamProtocolError("the head is too large")
    if not b"HTTP/".startswith(buffer[:5]) and not buffer.startswith(b"HTTP/"):
        raise UpstreamProtocolError("not an HTTP response")
    return 0


class Unchunker:
    """The payload of a chunked body, for a client that can't read chunks (HTTP/1.0)."""

    __slots__ = ("_parser", "_payload")

    def __init__(self) -> None:
        self._payload: list[bytes] = []
        self._parser = httptools.HttpResponseParser(self)
        self._parser.feed_data(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")

    def on_body(self, payload: bytes) -> None:
        self._payload.append(payload)

    def feed(self, piece: bytes) -> bytes:
        """The payload in `piece`, which an `UpstreamResponse` has accepted."""
        self._parser.feed_data(piece)
        payload = b"".join(self._payload)
        self._payload.clear()
        return payload


def add_reason_phrase(response: UpstreamResponse) -> bytes:
    """The response's lines, with the standard reason phrase if the server sent an empty one, as
    Hypercorn does."""
    bare = b"HTTP/1.1 %d \r\n" % response.status
    if not response.lines.startswith(bare):
        return response.lines
    reasons = HTTPStatus.__members__.values()
    reason = next((known.phrase for known in reasons if known == response.status), "")
    return bare[:-2] + reason.encode() + b"\r\n" + response.lines[len(bare) :]
