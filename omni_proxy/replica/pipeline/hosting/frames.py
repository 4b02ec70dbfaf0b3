"""Messages on a stream socket: four bytes of length, big-endian, then that much msgpack.

Invariant: a frame is whole or the connection is over. Nothing here reads or writes.
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
    """What came is no frame of ours: the connection is of no more use."""


class ProcessStart(msgspec.Struct, frozen=True):
    """First to a child: what to run, and where the parent finds its modules."""

    stages: list[StageCall]
    sys_path: list[str]
    log_level: int


class StageCall(msgspec.Struct, frozen=True):
    """One stage's factory and its parameters."""

    name: str
    factory: str
    params: dict[str, Any]


class ToStage(msgspec.Struct, frozen=True, array_like=True):
    """To a child, after the first: a message and the stage it is for."""

    stage: str
    message: StageInput


_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: Any) -> bytes:
    """Raises TypeError, ValueError or OverflowError for what msgpack cannot hold."""
    body = _encoder.encode(message)
    if len(body) > MAX_BYTES:
        raise ValueError(f"a message of {len(body)} bytes is over the bound of {MAX_BYTES}")
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


class FrameDecoder:
    """Bytes in as they come, whole bodies out; raises FrameError for a length past the bound."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        held = self._held
        held += data
        while len(held) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(held[:LENGTH_BYTES], "big")
            if end > MAX_BYTES + LENGTH_BYTES:
                raise FrameError(f"a frame of {end} bytes is over the bound of {MAX_BYTES}")
            if len(held) < end:
                return
            body = bytes(held[LENGTH_BYTES:end])
            del held[:end]
            yield body
