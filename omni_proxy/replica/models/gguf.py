"""Reads a GGUF model file (version 3, little-endian): its metadata, and its tensors as float32.

Invariant: every offset and length is checked against the file before it is used, so a truncated or
foreign file raises GGUFError, never crashes or returns partial tensors. The file is never changed.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

MAGIC = b"GGUF"
VERSION = 3
DEFAULT_ALIGNMENT_BYTES = 32
BLOCK_ELEMENTS = 32
MAX_DIMENSIONS = 4
UNPACK_ELEMENTS = 1 << 16  # unpacked pieces stay in the second-level cache

Floats = NDArray[np.float32]

# The value types of metadata, by number: the types with a fixed size, then string and array.
SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
STRING, ARRAY = 8, 9


class GGUFError(ValueError):
    """The file is not a readable model; the message has the file, the position and the reason."""


def _plain(rows: NDArray[Any], out: Floats) -> None:
    out[:] = rows.reshape(out.shape)


def _q4_1(rows: NDArray[Any], out: Floats) -> None:
    # The first half of a block's 32 elements is in the low nibbles, the second in the high ones.
    np.bitwise_and(rows["q"], 0x0F, out=out[:, :16], casting="unsafe")
    np.right_shift(rows["q"], 4, out=out[:, 16:], casting="unsafe")
    out *= rows["scale"].astype(np.float32)[:, None]
    out += rows["low"].astype(np.float32)[:, None]


def _q8_0(rows: NDArray[Any], out: Floats) -> None:
    np.multiply(rows["q"], rows["scale"].astype(np.float32)[:, None], out=out)


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """The block layout of a tensor type, and how its blocks are unpacked."""

    name: str
    block: np.dtype[Any]
    block_elements: int
    unpack: Callable[[NDArray[Any], Floats], None]


BLOCK_FORMATS: Mapping[int, BlockFormat] = {
    0: BlockFormat("F32", np.dtype("<f4"), 1, _plain),
    1: BlockFormat("F16", np.dtype("<f2"), 1, _plain),
    3: BlockFormat(
        "Q4_1",
        np.dtype([("scale", "<f2"), ("low", "<f2"), ("q", "u1", (16,))]),
        BLOCK_ELEMENTS,
        _q4_1,
    ),
    8: BlockFormat("Q8_0", np.dtype([("scale", "<f2"), ("q", "i1", (32,))]), BLOCK_ELEMENTS, _q8_0),
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor as stored in the file; `shape` is outermost first, as in numpy and torch."""

    shape: tuple[int, ...]
    packing: BlockFormat
    offset: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def blocks(self) -> int:
        return self.elements // self.packing.block_elements


class _Cursor:
    """Reads values in sequence; raises GGUFError at the end of the file."""

    def __init__(self, content: memoryview, path: Path) -> None:
        self.content = content
        self.path = path
        self.position = 0

    def fail(self, reason: str) -> NoReturn:
        raise GGUFError(f"{self.path}: at byte {self.position}: {reason}")

    def skip(self, count: int, what: str) -> int:
        """Advance by `count` bytes and return where they begin."""
        start = self.position
        if count > len(self.content) - start:
            self.fail(
                f"the file ends inside {what} ({count} bytes needed, "
                f"{len(self.content) - start} left): is it truncated?"
            )
        self.position += count
        return start

    def scalar(self, code: str, what: str) -> Any:
        start = self.skip(struct.calcsize(f"<{code}"), what)
        return struct.unpack_from(f"<{code}", self.content, start)[0]

    def string(self, what: str) -> str:
        length = self.scalar("Q", what)
        start = self.skip(length, what)
        try:
            return str(self.content[start : self.position], "utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not UTF-8 text: {error.reason}")

    def value(self, kind: int, what: str) -> Any:
        if kind == STRING:
            return self.string(what)
        if kind == ARRAY:
            return self._array(what)
        if kind not in SCALARS:
            self.fail(f"{what} has the unknown value type {kind}")
        return self.scalar(SCALARS[kind], what)

    def _array(self, what: str) -> list[Any]:
        kind, count = self.scalar("I", what), self.scalar("Q", what)
        if kind == STRING:
            return [self.string(what) for _ in range(count)]
        if kind not in SCALARS:
            self.fail(f"{what} is an array of the unsupported value type {kind}")
        code = SCALARS[kind]
        # Check the size before allocating: a wrong count must not cause a huge allocation.
        start = self.skip(count * struct.calcsize(f"<{code}"), what)
        return list(struct.unpack_from(f"<{count}{code}", self.content, start))


class GGUFFile:
    """An open model file. Raises GGUFError while opening if its structure is invalid."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._bytes: NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")
        except OSError as error:
            raise GGUFError(f"{path}: cannot be read: {error.strerror}") from error
        except ValueError as error:  # raised by numpy for an empty file
            raise GGUFError(f"{path}: the file is empty") from error
        cursor = _Cursor(self._bytes.data, path)
        tensors, pairs = _read_head(cursor)
        self.metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = cursor.string("a metadata key")
            kind = cursor.scalar("I", f"the type of {key!r}")
            self.metadata[key] = cursor.value(kind, f"the metadata {key!r}")
        self.tensors: dict[str, GGUFTensor] = {}
        for _ in range(tensors):
            name = cursor.string("a tensor's name")
            if name in self.tensors:
                cursor.fail(f"the tensor {name!r} is listed twice")
            self.tensors[name] = _tensor(cursor, name)
        self._base = self._aligned(cursor)
        self._check_extents()

    def require(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """Return a metadata value; GGUFError if it is missing or of another type."""
        value = self.metadata.get(key)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            actual = "missing" if value is None else f"a {type(value).__name__}"
            raise GGUFError(f"{self.path}: the metadata {key!r} is {actual}")
        return value

    def read(self, name: str, out: Floats) -> None:
        """Unpack a tensor into `out`, a C-contiguous float32 array of the tensor's shape.

        Raises GGUFError if the file has no such tensor, or one of another shape.
        """
        stored = self.tensors.get(name)
        if stored is None:
            raise GGUFError(f"{self.path}: there is no tensor {name!r}")
        if stored.shape != out.shape:
            raise GGUFError(
                f"{self.path}: the tensor {name!r} has the shape {stored.shape}, not {out.shape}"
            )
        packing, start = stored.packing, self._base + stored.offset
        stored_bytes = self._bytes[start : start + stored.blocks * packing.block.itemsize]
        blocks = np.asarray(stored_bytes).view(packing.block)
        target = out.reshape(stored.blocks, packing.block_elements)
        step = UNPACK_ELEMENTS // packing.block_elements
        for first in range(0, stored.blocks, step):
            packing.unpack(blocks[first : first + step], target[first : first + step])

    def _aligned(self, cursor: _Cursor) -> int:
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT_BYTES)
        if not isinstance(alignment, int) or alignment < 1:
            cursor.fail(f"the alignment {alignment!r} is not a positive number")
        return -(-cursor.position // alignment) * alignment

    def _check_extents(self) -> None:
        for name, stored in self.tensors.items():
            end = self._base + stored.offset + stored.blocks * stored.packing.block.itemsize
            if end > len(self._bytes):
                raise GGUFError(
                    f"{self.path}: the tensor {name!r} ends at byte {end} of a file of "
                    f"{len(self._bytes)} bytes: is it truncated?"
                )


def _read_head(cursor: _Cursor) -> tuple[int, int]:
    start = cursor.skip(len(MAGIC), "the magic bytes")
    magic = bytes(cursor.content[start : cursor.position])
    if magic != MAGIC:
        cursor.position = start
        cursor.fail(f"this is not a GGUF file: it begins with {magic!r}")
    version = cursor.scalar("I", "the version")
    if version != VERSION:
        cursor.fail(f"GGUF version {version} is not supported, only version {VERSION}")
    return cursor.scalar("Q", "the number of tensors"), cursor.scalar("Q", "the number of pairs")


def _tensor(cursor: _Cursor, name: str) -> GGUFTensor:
    what = f"the tensor {name!r}"
    dimensions = cursor.scalar("I", what)
    if dimensions > MAX_DIMENSIONS:
        cursor.fail(f"{what} has {dimensions} dimensions, more than {MAX_DIMENSIONS}")
    sizes = [cursor.scalar("Q", what) for _ in range(dimensions)]
    kind, offset = cursor.scalar("I", what), cursor.scalar("Q", what)
    if 0 in sizes:
        cursor.fail(f"{what} is empty: its dimensions are {sizes}")
    packing = BLOCK_FORMATS.get(kind)
    if packing is None:
        known = ", ".join(block_format.name for block_format in BLOCK_FORMATS.values())
        cursor.fail(f"{what} has the type {kind}; only {known} can be read")
    row = math.prod(sizes[:1])  # 1 if there are no dimensions
    if row % packing.block_elements:
        cursor.fail(f"{what} has rows of {row}, not a multiple of {packing.block_elements}")
    return GGUFTensor(tuple(reversed(sizes)), packing, offset)
