"""A version that is being received: files of full size whose tensors come from somebody else.

Invariant: its folder is called `vN.partial` and its record says that it is not complete, until the
store seals it. Whoever writes into its files writes through `Block`s alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from omni_proxy.process_group.tensor_plan import TensorSpec
from omni_proxy.weight_sync.store.filesystem import allot
from omni_proxy.weight_sync.store.manifest import INDEX, RECORD, Manifest, encode
from omni_proxy.weight_sync.store.safetensors_header import HeaderRow, header_of, index_of

ONLY_FILE: Final = "model.safetensors"
PARTIAL: Final = ".partial"


@dataclass(frozen=True, slots=True)
class Block:
    """A file of full size with its header; `starts` has the byte where each bucket's data begin."""

    path: Path
    starts: tuple[int, ...]
    nbytes: int


class Draft:
    """Made by the store; one thread at a time."""

    def __init__(self, number: int, folder: Path, *, in_memory: bool) -> None:
        """Raises OSError."""
        self.number = number
        self.folder = folder
        self.in_memory = in_memory
        self.over = False  # sealed or thrown away
        self._created_at = datetime.now(UTC).isoformat()
        self._files: dict[str, int] = {}
        self._rows: dict[str, HeaderRow] = {}
        folder.mkdir(mode=0o700)
        (folder / RECORD).write_bytes(encode(self.record()))

    def __len__(self) -> int:
        """How many tensors were announced."""
        return len(self._rows)

    def record(self, label: str | None = None, *, complete: bool = False) -> Manifest:
        return Manifest(
            number=self.number,
            created_at=self._created_at,
            complete=complete,
            label=label,
            files=dict(self._files),
            tensors=dict(self._rows),
        )

    def add(self, buckets: Sequence[Sequence[TensorSpec]]) -> Block:
        """Room for these tensors, in this order. Raises OSError, LayoutError.

        A name that came before is from now on what is announced here.
        """
        tensors = [tensor for bucket in buckets for tensor in bucket]
        header = header_of(tensors)
        name = ONLY_FILE if not self._files else f"model-{len(self._files) + 1:05d}.safetensors"
        nbytes = len(header) + sum(tensor.nbytes for tensor in tensors)
        allot(self.folder / name, header, nbytes)
        starts, place = [], len(header)
        for bucket in buckets:
            starts.append(place)
            for tensor in bucket:
                row = HeaderRow(tensor.dtype, tensor.shape, name, place, tensor.nbytes)
                self._rows[tensor.name] = row
                place += tensor.nbytes
        self._files[name] = nbytes
        return Block(self.folder / name, tuple(starts), nbytes)

    def digested(self, digests: Mapping[str, str]) -> None:
        """What the tensors that came were found to be."""
        for name, digest in digests.items():
            self._rows[name] = replace(self._rows[name], sha256=digest)

    def index(self) -> None:
        """Tell which file has which tensor, where they are several. Raises OSError."""
        if len(self._files) > 1:
            (self.folder / INDEX).write_bytes(index_of(self._rows))
