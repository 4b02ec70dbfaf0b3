"""What is written beside a version's tensors, and what is told of a version. Pure.

Invariant: `complete` stands in a record only once every byte of every tensor is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from omni_proxy.weight_sync.checksum import roll_up
from omni_proxy.weight_sync.store.safetensors_header import HeaderRow

FORMAT: Final = 1
RECORD: Final = "record.json"
INDEX: Final = "model.safetensors.index.json"


class Manifest(Struct, frozen=True, kw_only=True):
    """`epoch` is 0 until the fleet was found to have it. `files`: name to size in bytes.

    `created_at` is an ISO time.
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
    """Nothing can be said of the version that it stands beside."""


def encode(record: Manifest) -> bytes:
    return msgspec.json.encode(record) + b"\n"


def decode(raw: bytes) -> Manifest:
    """Raises UnreadableManifest."""
    try:
        record = msgspec.json.decode(raw, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableManifest(str(error)) from None
    if record.format != FORMAT:
        raise UnreadableManifest(f"format {record.format} is not known")
    return record


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """A whole version as it stood when it was asked for; `folder` is the fastest place it is at."""

    record: Manifest
    folder: Path
    in_memory: bool
    on_disk: bool

    @property
    def number(self) -> int:
        return self.record.number

    @property
    def label(self) -> str | None:
        return self.record.label

    @property
    def epoch(self) -> int:
        """0 where it was received, and never found on the whole fleet."""
        return self.record.epoch

    @property
    def name(self) -> str:
        """How to speak of it."""
        label = "" if self.label is None else f" ({self.label!r})"
        return f"version {self.number}{label}"

    @property
    def nbytes(self) -> int:
        return sum(self.record.files.values())

    @property
    def digests(self) -> Mapping[str, str]:
        """By tensor name; {} while one of them is not known."""
        found = {name: row.sha256 for name, row in self.record.tensors.items()}
        return found if all(found.values()) else {}

    def told(self, *, current: bool) -> dict[str, object]:
        """JSON-ready, for whoever asks which versions there are."""
        digests = self.digests
        return {
            "version": self.number if self.label is None else self.label,
            "number": self.number,
            "weight_epoch": self.epoch,
            "current": current,
            "published": self.epoch > 0,
            "created_at": self.record.created_at,
            "tensors": len(self.record.tensors),
            "bytes": self.nbytes,
            "checksum": roll_up(digests) if digests else None,
            "path": str(self.folder),
            "in_memory": self.in_memory,
            "on_disk": self.on_disk,
        }
