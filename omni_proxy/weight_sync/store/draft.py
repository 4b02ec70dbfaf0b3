"""A version that is being received: files of full size, filled by another thread or process.

Invariant: until the store seals it, its folder is named `vN.partial`, and its manifest is not
`complete`. Its files are written only through `FileBlock`s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from omni_proxy.process_group.tensor_plan import TensorSpec
from omni_proxy.shared.safetensors_format import INDEX_FILE
from omni_proxy.weight_sync.store.filesystem import allocate
from omni_proxy.weight_sync.store.manifest import (
    MANIFEST_FILE,
    HeaderRow,
    Manifest,
    encode,
    encode_header,
    encode_index,
)

ONLY_FILE: Final = "model.safetensors"
PARTIAL: Final = ".partial"


@dataclass(frozen=True, slots=True)
class FileBlock:
    """A file of full size with its header; the data of bucket i start at byte `starts[i]`."""

    path: Path
    starts: tuple[int, ...]
    nbytes: int


class Draft:
    """Created by the store; used by one thread at a time."""

    def __init__(self, number: int, folder: Path, *, in_memory: bool) -> None:
        """Raises OSError."""
        self.number = number
        self.folder = folder
        self.in_memory = in_memory
        self.finished = False  # sealed or discarded
        self._created_at = datetime.now(UTC).isoformat()
        self._files: dict[str, int] = {}
        self._rows: dict[str, HeaderRow] = {}
        folder.mkdir(mode=0o700)
        (folder / MANIFEST_FILE).write_bytes(encode(self.manifest()))

    def __len__(self) -> int:
        """The number of announced tensors."""
        return len(self._rows)

    def manifest(self, label: str | None = None, *, complete: bool = False) -> Manifest:
        return Manifest(
            number=self.number,
            created_at=self._created_at,
            complete=complete,
            label=label,
            files=dict(self._files),
            tensors=dict(self._rows),
        )

    def add(self, buckets: Sequence[Sequence[TensorSpec]]) -> FileBlock:
        """Allocates a file for these tensors, in this order. Raises OSError, SafetensorsError.

        A tensor that was announced before is replaced.
        """
        tensors = [tensor for bucket in buckets for tensor in bucket]
        header = encode_header(tensors)
        name = ONLY_FILE if not self._files else f"model-{len(self._files) + 1:05d}.safetensors"
        nbytes = len(header) + sum(tensor.nbytes for tensor in tensors)
        allocate(self.folder / name, header, nbytes)
        starts, offset = [], len(header)
        for bucket in buckets:
            starts.append(offset)
            for tensor in bucket:
                row = HeaderRow(tensor.dtype, tensor.shape, name, offset, tensor.nbytes)
                self._rows[tensor.name] = row
                offset += tensor.nbytes
        self._files[name] = nbytes
        return FileBlock(self.folder / name, tuple(starts), nbytes)

    def set_digests(self, digests: Mapping[str, str]) -> None:
        """Records the digests of received tensors, by name."""
        for name, digest in digests.items():
            self._rows[name] = replace(self._rows[name], sha256=digest)

    def write_index(self) -> None:
        """Writes the index of tensors by file, if there are several files. Raises OSError."""
        if len(self._files) > 1:
            (self.folder / INDEX_FILE).write_bytes(encode_index(self._rows))
