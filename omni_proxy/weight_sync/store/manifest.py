"""The manifest file of a stored version, and a version as callers see it. Pure.

Invariant: a manifest is `complete` only if every byte of every tensor was received.
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
MANIFEST_FILE: Final = "record.json"
INDEX_FILE: Final = "model.safetensors.index.json"


class Manifest(Struct, frozen=True, kw_only=True):
    """`epoch` is 0 until the whole fleet serves the version. `files`: name to size in bytes.

    `created_at` is an ISO 8601 time.
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
    try:
        manifest = msgspec.json.decode(raw, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableManifest(str(error)) from None
    if manifest.format != FORMAT:
        raise UnreadableManifest(f"format {manifest.format} is not known")
    return manifest


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """A snapshot of a stored version; `folder` is in memory if the version is, else on the disk."""

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
        """0 if it was received but never served by the whole fleet."""
        return self.manifest.epoch

    @property
    def name(self) -> str:
        """For messages: number and label."""
        label = "" if self.label is None else f" ({self.label!r})"
        return f"version {self.number}{label}"

    @property
    def nbytes(self) -> int:
        return sum(self.manifest.files.values())

    @property
    def digests(self) -> Mapping[str, str]:
        """SHA-256 by tensor name; {} while one of them is not known."""
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
