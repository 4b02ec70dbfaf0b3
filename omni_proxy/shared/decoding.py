"""Decoding of bytes from another program, JSON and MessagePack: what it raises, and helpers."""

from __future__ import annotations

from typing import Final, Protocol, TypeVar

import msgspec

# Too many levels are an error, too, even of fields that the type does not have.
MALFORMED: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

T = TypeVar("T")


def decode_or_none(decoder: msgspec.msgpack.Decoder[T], payload: bytes) -> T | None:
    """The decoded payload; None if it is malformed."""
    try:
        return decoder.decode(payload)
    except MALFORMED:
        return None


class _Versioned(Protocol):
    @property
    def format(self) -> int: ...


V = TypeVar("V", bound=_Versioned)


def decode_json_record(
    raw: bytes, kind: type[V], supported_format: int, unreadable: type[Exception]
) -> V:
    """A record in JSON that has a format number. Raises `unreadable`."""
    try:
        record = msgspec.json.decode(raw, type=kind)
    except MALFORMED as error:
        raise unreadable(str(error)) from None
    if record.format != supported_format:
        raise unreadable(f"format {record.format} is not known")
    return record
