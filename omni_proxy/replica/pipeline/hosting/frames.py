"""Frames on a stream socket: four bytes of length, big-endian, then a msgpack body.

Invariant: a frame is complete, or the connection is closed. Pure: no I/O here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from omni_proxy.replica.pipeline.messages import StageInput

LENGTH_BYTES = 4
MAX_BYTES = 1 << 30

Message = TypeVar("Message")


class FrameError(Exception):
    """The data is not a frame of this protocol: the connection is unusable."""


class ProcessStart(msgspec.Struct, frozen=True):
    """The first message to a stage process: its stages, and where to find their modules."""

    stages: list[StageCall]
    sys_path: list[str]
    log_level: int


class StageCall(msgspec.Struct, frozen=True):
    """One stage's factory and its parameters."""

    name: str
    factory: str
    params: dict[str, Any]


class ToStage(msgspec.Struct, frozen=True, array_like=True):
    """Later messages to a stage process: a message and its stage."""

    stage: str
    message: StageInput


_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: Any) -> bytes:
    """Raises TypeError, ValueError or OverflowError for what msgpack cannot encode."""
    body = _encoder.encode(message)
    if len(body) > MAX_BYTES:
        raise ValueError(f"a message of {len(body)} bytes is over the bound of {MAX_BYTES}")
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


class FrameDecoder:
    """Takes bytes as they arrive, yields complete bodies; raises FrameError for a length above the
    bound.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        buffer = self._buffer
        buffer += data
        while len(buffer) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(buffer[:LENGTH_BYTES], "big")
            if end > MAX_BYTES + LENGTH_BYTES:
                raise FrameError(f"a frame of {end} bytes is over the bound of {MAX_BYTES}")
            if len(buffer) < end:
                return
            body = bytes(buffer[LENGTH_BYTES:end])
            del buffer[:end]
            yield body
