"""Chunked transfer coding: request bodies parsed to their exact end, and chunks encoded.

llhttp does not report how many bytes belong to a message, and the next request may follow
immediately. So the framing is parsed here, strictly: sizes are plain hexadecimal, lines end with
CRLF, trailers are dropped. Invariant: `feed` never consumes a byte past the end of the body.
"""

from __future__ import annotations

import re

from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.header_fields import TOKEN

LAST_CHUNK = b"0\r\n\r\n"
MAX_LINE_BYTES = 4096  # a size line with its extensions
MAX_TRAILER_BYTES = 16384
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n\x00]*)?\Z")
# Trailers are dropped, but validated like header fields, so that no other parser reads them
# differently.
_FIELD = re.compile(rb"%b+:[\t -~\x80-\xff]*\Z" % TOKEN)


def encode_chunk(payload: bytes) -> bytes:
    """`payload` must not be empty: an empty chunk ends the body."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def _bad(message: str) -> HttpError:
    return HttpError(400, message, "malformed_body", close=True)


class ChunkedBody:
    """Pass received bytes to `feed`; once `is_complete` is true, `payload` is the body and `rest`
    the bytes after it."""

    __slots__ = ("_buffer", "_chunk", "_limit", "_read", "_trailer", "is_complete", "payload")

    def __init__(self, limit: int) -> None:
        self.payload: list[bytes] = []
        self.is_complete = False
        self._buffer = bytearray()
        self._chunk = 0  # bytes missing from the current chunk, including its CRLF
        self._read = 0
        self._limit = limit
        self._trailer = -1  # bytes of trailer read; -1 before the last chunk

    @property
    def rest(self) -> bytes:
        return bytes(self._buffer)

    def feed(self, piece: bytes) -> None:
        """Raises HttpError 400 for broken framing, 413 past the limit."""
        self._buffer += piece
        while not self.is_complete and self._step():
            pass

    def _step(self) -> bool:
        if self._chunk:
            return self._take_chunk()
        line = self._line()
        if line is None:
            return False
        if self._trailer >= 0:
            self._trailer += len(line) + 2
            if self._trailer > MAX_TRAILER_BYTES:
                raise _bad("the trailer is too long")
            if line and not _FIELD.match(line):
                raise _bad("a trailer line is not a valid field")
            self.is_complete = not line
            return True
        match = _SIZE.match(line)
        if not match:
            raise _bad("a chunk size is not a plain hexadecimal number")
        size = int(match[1], 16)
        self._read += size
        if self._read > self._limit:
            raise HttpError(413, "payload too large", "payload_too_large", close=True)
        if size:
            self._chunk = size + 2
        else:
            self._trailer = 0
        return True

    def _take_chunk(self) -> bool:
        """Move payload as it arrives, so that a large chunk is never in memory twice."""
        have = len(self._buffer)
        if self._chunk > 2 and have:
            part = bytes(self._buffer[: min(have, self._chunk - 2)])
            del self._buffer[: len(part)]
            self.payload.append(part)
            self._chunk -= len(part)
            return True
        if have < 2 or self._chunk > 2:
            return False
        if self._buffer[:2] != b"\r\n":
            raise _bad("a chunk is longer than its size")
        del self._buffer[:2]
        self._chunk = 0
        return True

    def _line(self) -> bytes | None:
        end = self._buffer.find(b"\n", 0, MAX_LINE_BYTES)
        if end < 0:
            if len(self._buffer) >= MAX_LINE_BYTES:
                raise _bad("a chunk's size line is too long")
            return None
        if end == 0 or self._buffer[end - 1] != 0x0D:
            raise _bad("a chunk's size line must end with CRLF")
        line = bytes(self._buffer[: end - 1])
        del self._buffer[: end + 1]
        return line
