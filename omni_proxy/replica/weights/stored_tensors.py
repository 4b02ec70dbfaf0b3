"""Tensors of safetensors data: a file on disk, or base64 in a request.

Invariant: sizes are checked against the actual data before memory is allocated. Nothing is ever
unpickled.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import struct
from typing import Any, BinaryIO

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from omni_proxy.replica.weights.live_tensors import (
    LiveTensors,
    StagedTensors,
    TensorSignature,
    WeightsError,
    short_repr,
)
from omni_proxy.shared.decoding import MALFORMED
from omni_proxy.shared.safetensors_format import MAX_HEADER_BYTES, TORCH_DTYPES

STORED_DTYPES = {stored: getattr(torch, name) for stored, name in TORCH_DTYPES.items()}
MAX_DIMENSIONS = 16
MAX_SIZE = 2**48
PICKLE = b"\x80"
ZIP = b"PK\x03\x04"  # torch.save writes pickles in ZIP files


def shape_of(sizes: Any, name: str) -> tuple[int, ...]:
    """Raises WeightsError unless `sizes` is a short list of integers within bounds."""
    listed = isinstance(sizes, list | tuple) and len(sizes) <= MAX_DIMENSIONS
    if not listed or not all(type(size) is int and 0 <= size <= MAX_SIZE for size in sizes):
        raise WeightsError(
            f"{short_repr(name)}: the shape {short_repr(sizes)} must be a list of at most "
            f"{MAX_DIMENSIONS} whole numbers within 0 and {MAX_SIZE}"
        )
    return tuple(sizes)


class HeaderEntry(Struct):
    """One entry of a safetensors header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class StoredTensors:
    """The tensors of an open safetensors file, named `title` in error messages."""

    def __init__(self, file: BinaryIO, title: str) -> None:
        """Read and check the header; raises WeightsError, and OSError from the file."""
        self._file, self.title = file, title
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        start, first = file.read(8), file.read(1)
        # A safetensors file may begin with these bytes, too, but then a JSON object follows.
        if start.startswith((PICKLE, ZIP)) and first != b"{":
            raise self._fault("is a pickle, which is never read; send safetensors")
        if len(start) < 8:
            raise self._fault(f"is truncated: {size} bytes are too short for a safetensors file")
        (header_bytes,) = struct.unpack("<Q", start)
        if header_bytes > MAX_HEADER_BYTES:
            raise self._fault("is not a safetensors file: its header is too long")
        if 8 + header_bytes > size:
            raise self._fault(f"is truncated: its header has {header_bytes} bytes, the file {size}")
        self._data_start = 8 + header_bytes
        self._entries = self._read_header(first + file.read(max(header_bytes - 1, 0)))
        self._check_layout(size - self._data_start)

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    def form(self, name: str) -> TensorSignature:
        """Raises WeightsError for a name that is not in the file."""
        entry = self._entries.get(name)
        if entry is None:
            raise self._fault(f"has no tensor {short_repr(name)}")
        return TensorSignature(STORED_DTYPES[entry.dtype], tuple(entry.shape))

    @property
    def descriptor(self) -> int:
        """The file descriptor; only for data in a file."""
        return self._file.fileno()

    def place(self, name: str) -> int:
        """The offset of a tensor in the file."""
        place: int = self._data_start + self._entries[name].data_offsets[0]
        return place

    def read(self, name: str) -> Tensor:
        """A tensor, read into new memory; raises WeightsError, and OSError from the file."""
        form = self.form(name)
        tensor = torch.empty(form.shape, dtype=form.dtype)
        room = tensor.view(-1).view(torch.uint8).numpy().data
        self._file.seek(self.place(name))
        while room:
            count = self._file.readinto(room)  # type: ignore[attr-defined]  # every real file has it
            if not count:
                raise self._fault(f"ended in the middle of {name}")
            room = room[count:]
        return tensor

    def _read_header(self, header: bytes) -> dict[str, HeaderEntry]:
        try:
            parts = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
            parts.pop("__metadata__", None)
            entries = {
                name: msgspec.json.decode(part, type=HeaderEntry) for name, part in parts.items()
            }
        except MALFORMED as error:
            raise self._fault(f"has a broken safetensors header: {error}") from None
        for name, entry in entries.items():
            shape_of(entry.shape, f"{self.title}: {name}")
            if entry.dtype not in STORED_DTYPES:
                raise self._fault(
                    f"holds {short_repr(name)} in the unknown type {short_repr(entry.dtype)}"
                )
        return entries

    def _check_layout(self, data_bytes: int) -> None:
        """The tensors must fill the data without gaps, as the format requires."""
        place = 0
        for name, entry in sorted(self._entries.items(), key=lambda item: item[1].data_offsets):
            begin, end = entry.data_offsets
            nbytes = math.prod(entry.shape) * STORED_DTYPES[entry.dtype].itemsize
            if begin != place or end - begin != nbytes:
                raise self._fault(
                    f"has a broken header: {short_repr(name)} of {entry.dtype} {entry.shape} needs "
                    f"{nbytes} bytes from {place} on, but its offsets are {begin} to {end}"
                )
            place = end
        if place > data_bytes:
            raise self._fault(f"is truncated: it has {data_bytes} of {place} bytes of data")
        if place < data_bytes:
            raise self._fault(f"has {data_bytes - place} bytes that belong to no tensor")

    def _fault(self, reason: str) -> WeightsError:
        return WeightsError(f"{self.title} {reason}")


def stage_serialized(
    payload: dict[str, Any], target: LiveTensors, rank: int, size: int
) -> StagedTensors:
    """Stage `serialized_named_tensors`: base64 of safetensors bytes, one for each rank or for all.

    Raises WeightsError.
    """
    parts = payload.get("serialized_named_tensors")
    if not isinstance(parts, list) or len(parts) not in (1, size):
        raise WeightsError(
            f"serialized_named_tensors must be a list of one string for all ranks, or of {size}"
        )
    load_format = payload.get("load_format")
    if load_format not in (None, "auto", "safetensors"):
        raise WeightsError(f"load_format {load_format!r} is not supported here: send safetensors")
    try:
        raw = base64.b64decode(parts[rank % len(parts)], validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise WeightsError("serialized_named_tensors is not valid base64") from None
    stored = StoredTensors(io.BytesIO(raw), "serialized_named_tensors")
    if not stored.names:
        raise WeightsError("serialized_named_tensors holds no tensor")
    staged = StagedTensors(target)
    for name in stored.names:
        staged.check(name, stored.form(name))
    for name in stored.names:
        staged.add(name, stored.read(name))
    return staged
