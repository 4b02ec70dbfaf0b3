"""Headers of safetensors files: written before the tensors arrive, parsed and validated later.

Pure. Tensors lie in announced order without gaps, as the format requires, so that a block of them
can be received directly into the file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from math import prod
from typing import Final

import msgspec
from msgspec import Struct

from omni_proxy.process_group.tensor_plan import ITEM_BYTES, TensorSpec

# By torch's names without "torch.".
STORED_DTYPES: Final = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_TORCH_DTYPES: Final = {stored: name for name, stored in STORED_DTYPES.items()}
LENGTH: Final = struct.Struct("<Q")
MAX_HEADER_BYTES: Final = 100_000_000  # the limit of all readers of the format
_ALIGNMENT_BYTES: Final = 64
# Other loaders refuse a file that does not name the framework of its tensor layout.
_METADATA: Final = {"format": "pt"}
_RESERVED: Final = "__metadata__"


class SafetensorsError(ValueError):
    """Not a valid safetensors file, or these tensors cannot be one; the text says why."""


class HeaderRow(Struct, frozen=True):
    """Where one tensor is stored; `offset` counts from the file's first byte.

    `dtype` is torch's name without "torch."; `sha256` is "" while the digest is not known.
    """

    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int
    sha256: str = ""


class _Entry(Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def encode_header(tensors: Iterable[TensorSpec]) -> bytes:
    """The file's bytes up to the first tensor.

    Raises SafetensorsError if the header is too long, or a tensor has a reserved name.
    """
    entries: dict[str, object] = {_RESERVED: _METADATA}
    end = 0
    for tensor in tensors:
        if tensor.name == _RESERVED:
            raise SafetensorsError(f"no tensor of a safetensors file can be called {_RESERVED!r}")
        entries[tensor.name] = _Entry(
            STORED_DTYPES[tensor.dtype], tensor.shape, (end, end := end + tensor.nbytes)
        )
    text = msgspec.json.encode(entries)
    text += b" " * (-(LENGTH.size + len(text)) % _ALIGNMENT_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise SafetensorsError(
            f"the names of {len(entries) - 1} tensors take {len(text)} bytes; a safetensors file "
            f"holds at most {MAX_HEADER_BYTES}: announce them in smaller buckets"
        )
    return LENGTH.pack(len(text)) + text


def parse_header(file: str, header: bytes) -> dict[str, HeaderRow]:
    """The rows of a header (without its length) by tensor name. Raises SafetensorsError."""
    try:
        parts = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        parts.pop(_RESERVED, None)
        entries = {name: msgspec.json.decode(part, type=_Entry) for name, part in parts.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SafetensorsError(f"{file} has a broken safetensors header: {error}") from None
    start, expected, rows = LENGTH.size + len(header), 0, {}
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        dtype = _TORCH_DTYPES.get(entry.dtype, "")
        begin, end = entry.data_offsets
        if not dtype or begin != expected or end - begin != prod(entry.shape) * ITEM_BYTES[dtype]:
            raise SafetensorsError(f"{file} has a broken safetensors header at tensor {name!r}")
        rows[name] = HeaderRow(dtype, entry.shape, file, start + begin, end - begin)
        expected = end
    return rows


def encode_index(rows: Mapping[str, HeaderRow]) -> bytes:
    """The index of tensors by file, as loaders of sharded checkpoints expect it."""
    index = {
        "metadata": {"total_size": sum(row.nbytes for row in rows.values())},
        "weight_map": {name: row.file for name, row in rows.items()},
    }
    return msgspec.json.format(msgspec.json.encode(index), indent=2) + b"\n"
