"""Formats of a stored version (safetensors, manifest), and the proof that a worker has it. Pure.

Headers are written before the tensors arrive, and validated when the version is read. Tensors are
in announced order without gaps, as the format requires, so a block of them can be received directly
into the file. A proof compares a worker's checksums (note:api-server 3) with the version's digests;
a tensor that the worker keeps in another dtype has another digest and is not compared. Invariants:
a manifest is `complete` only if every byte of every tensor was received; without a comparison
nothing counts as proven.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from omni_proxy.admin_ops.results import WorkerResult
from omni_proxy.process_group.broadcast.tensor_hashing import roll_up
from omni_proxy.process_group.tensor_plan import ITEM_BYTES, TensorSpec
from omni_proxy.shared.decoding import MALFORMED, decode_json_record
from omni_proxy.shared.safetensors_format import MAX_HEADER_BYTES, TORCH_DTYPES

STORED_DTYPES: Final = {name: stored for stored, name in TORCH_DTYPES.items()}
LENGTH: Final = struct.Struct("<Q")
_ALIGNMENT_BYTES: Final = 64
# Other loaders refuse a file without the framework of its tensor layout.
_METADATA: Final = {"format": "pt"}
_RESERVED: Final = "__metadata__"


class SafetensorsError(ValueError):
    """The file is not valid safetensors, or the tensors don't fit into one; see the text."""


class HeaderRow(Struct, frozen=True):
    """Location of a tensor; `offset` counts from the file's first byte.

    `dtype` is torch's name without "torch."; `sha256` is "" until the digest is computed.
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
            f"the header of {len(entries) - 1} tensors takes {len(text)} bytes; in a safetensors "
            f"file it may have {MAX_HEADER_BYTES}: announce the tensors in smaller buckets"
        )
    return LENGTH.pack(len(text)) + text


def parse_header(file: str, header: bytes) -> dict[str, HeaderRow]:
    """The rows of a header (without its length) by tensor name. Raises SafetensorsError."""
    try:
        parts = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        parts.pop(_RESERVED, None)
        entries = {name: msgspec.json.decode(part, type=_Entry) for name, part in parts.items()}
    except MALFORMED as error:
        raise SafetensorsError(f"{file} has a broken safetensors header: {error}") from None
    start, expected, rows = LENGTH.size + len(header), 0, {}
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        dtype = TORCH_DTYPES.get(entry.dtype, "")
        begin, end = entry.data_offsets
        if not dtype or begin != expected or end - begin != prod(entry.shape) * ITEM_BYTES[dtype]:
            raise SafetensorsError(f"{file} has a broken safetensors header at tensor {name!r}")
        rows[name] = HeaderRow(dtype, entry.shape, file, start + begin, end - begin)
        expected = end
    return rows


def encode_index(rows: Mapping[str, HeaderRow]) -> bytes:
    """The index file (tensor name to file) that loaders of sharded checkpoints expect."""
    index = {
        "metadata": {"total_size": sum(row.nbytes for row in rows.values())},
        "weight_map": {name: row.file for name, row in rows.items()},
    }
    return msgspec.json.format(msgspec.json.encode(index), indent=2) + b"\n"


FORMAT: Final = 1
# Not "manifest.json", because folders of versions that older releases wrote have this name.
MANIFEST_FILE: Final = "record.json"


class Manifest(Struct, frozen=True, kw_only=True):
    """The record of a stored version.

    `epoch` is 0 until the whole fleet serves the version. `files`: name to size in bytes.
    `created_at`: ISO 8601 time.
    """

    format: int = FORMAT
    number: int
    created_at: str
    complete: bool = False
    label: str | None = None
    epoch: int = 0
    files: dict[str, int] = {}
    tensors: dict[str, HeaderRow] = {}


class UnreadableManifest(ValueError):
    """The manifest is broken, so its version cannot be used."""


def encode(manifest: Manifest) -> bytes:
    return msgspec.json.encode(manifest) + b"\n"


def decode(raw: bytes) -> Manifest:
    """Raises UnreadableManifest."""
    return decode_json_record(raw, Manifest, FORMAT, UnreadableManifest)


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """A snapshot of a stored version; `folder` is in memory if `in_memory`, otherwise on disk."""

    manifest: Manifest
    folder: Path
    in_memory: bool
    on_disk: bool

    @property
    def number(self) -> int:
        return self.manifest.number

    @property
    def label(self) -> str | None:
        return self.manifest.label

    @property
    def epoch(self) -> int:
        """0 if the version was never served by the whole fleet."""
        return self.manifest.epoch

    @property
    def name(self) -> str:
        """Number and label, for messages."""
        label = "" if self.label is None else f" ({self.label!r})"
        return f"version {self.number}{label}"

    @property
    def nbytes(self) -> int:
        return sum(self.manifest.files.values())

    @property
    def digests(self) -> Mapping[str, str]:
        """SHA-256 by tensor name; {} until all of them are computed."""
        digests = {name: row.sha256 for name, row in self.manifest.tensors.items()}
        return digests if all(digests.values()) else {}

    def to_dict(self, *, current: bool) -> dict[str, object]:
        """JSON-ready, for listings of versions."""
        digests = self.digests
        return {
            "version": self.number if self.label is None else self.label,
            "number": self.number,
            "weight_epoch": self.epoch,
            "current": current,
            "published": self.epoch > 0,
            "created_at": self.manifest.created_at,
            "tensors": len(self.manifest.tensors),
            "bytes": self.nbytes,
            "checksum": roll_up(digests) if digests else None,
            "path": str(self.folder),
            "in_memory": self.in_memory,
            "on_disk": self.on_disk,
        }


@dataclass(frozen=True, slots=True)
class WorkerProof:
    """Comparison of a worker with a stored version.

    `differs`: how its tensors differ, or "". `reason`: why nothing could be compared, or "".
    """

    checked: int = 0  # number of tensors
    whole: str = ""  # the worker's digest over all tensors
    differs: str = ""
    reason: str = ""

    @property
    def proven(self) -> bool:
        return self.checked > 0 and not self.differs

    def to_dict(self) -> dict[str, object]:
        """JSON-ready."""
        reason = {"unverified": self.reason} if self.reason else {}
        return {"checked_tensors": self.checked, "checksum": self.whole or None, **reason}


def prove_version(result: WorkerResult, version: StoredVersion) -> WorkerProof:
    """Compare `result`, a worker's response to a checksum call, with the version's digests."""
    if not result.success:
        return WorkerProof(reason=f"its checker failed: {result.reason}")
    if not version.digests:
        return WorkerProof(reason=f"the digests of {version.name} are not computed yet")
    for data in _stage_results(result.body):
        sums, digest = data.get("checksums"), data.get("full_checksum")
        if isinstance(sums, dict) and sums:
            return _compare(data, sums, digest if isinstance(digest, str) else "", version)
    return WorkerProof(reason="its checker reports no checksum that can be compared")


def _compare(
    data: Mapping[str, Any], sums: Mapping[str, Any], digest: str, version: StoredVersion
) -> WorkerProof:
    digests, converted = version.digests, _converted_tensors(data, version)
    comparable = [name for name in sums if name in digests and name not in converted]
    if not comparable:
        return WorkerProof(whole=digest, reason="it keeps none of the tensors as they were sent")
    if len(comparable) == len(sums) and digest:
        expected = roll_up({name: digests[name] for name in comparable})
        differs = "" if digest == expected else f"its full_checksum is {digest}, not {expected}"
        return WorkerProof(len(comparable), digest, differs)
    if _tp_size(data) > 1:
        return WorkerProof(
            whole=digest, reason="it reports no digest over whole tensors that can be compared"
        )
    different = [name for name in comparable if sums[name] != digests[name]]
    differs = f"tensor {different[0]!r} and {len(different) - 1} more differ" if different else ""
    return WorkerProof(len(comparable), digest, differs)


def _stage_results(body: object) -> Iterator[dict[str, Any]]:
    rows = body.get("results") if isinstance(body, dict) else None
    for row in rows if isinstance(rows, list) else ():
        data = row.get("data") if isinstance(row, dict) else None
        if isinstance(data, dict):
            yield data


def _converted_tensors(data: Mapping[str, Any], version: StoredVersion) -> set[str]:
    """Names of tensors whose dtype at the worker differs from the sent one."""
    rows = data.get("tensor_metadata")
    if not isinstance(rows, dict):
        return set()
    dtypes = {
        name: str(row.get("dtype")).removeprefix("torch.")
        for name, row in rows.items()
        if isinstance(row, dict)
    }
    stored = version.manifest.tensors
    return {
        name for name, dtype in dtypes.items() if name in stored and stored[name].dtype != dtype
    }


def _tp_size(data: Mapping[str, Any]) -> int:
    layout = data.get("layout")
    size = layout.get("tp_size") if isinstance(layout, dict) else 1
    return size if isinstance(size, int) else 1
