"""Weights from safetensors files: one file, a folder, or the files that a manifest names.

A manifest is one of
    {"files": ["a.safetensors", {"path": "b.safetensors", "sha256": "<of the file>"}]}
    {"tensors": {"model.norm.weight": "a.safetensors", ...}}
and changes only the named tensors; without a manifest, every tensor of the model must be present.
Invariant: no file outside the root is opened, not even through a link. A file is read completely
into memory before a live tensor is changed, so later changes of the file have no effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from omni_proxy.replica.weights.live_tensors import (
    LiveTensors,
    StagedTensors,
    WeightsError,
    short_repr,
)
from omni_proxy.replica.weights.safetensors_loader import (
    FilePrefetcher,
    FileSelection,
    ReadBufferPool,
    SafetensorsLoader,
)
from omni_proxy.shared.decoding import MALFORMED
from omni_proxy.shared.safetensors_format import INDEX_FILE

MAX_INDEX_BYTES = 64 * 2**20
FORMATS = (None, "auto", "safetensors")


class ManifestFile(Struct, forbid_unknown_fields=True):
    path: str
    sha256: str | None = None


class UpdateManifest(Struct, forbid_unknown_fields=True):
    """A manifest: exactly one of the two fields is set."""

    files: list[str | ManifestFile] | None = None
    tensors: dict[str, str] | None = None


class CheckpointIndex(Struct):
    """The index file of a sharded checkpoint."""

    weight_map: dict[str, str]


class WeightsFolder:
    """Finds files below the root; with the root "", no file is read."""

    def __init__(self, root: str) -> None:
        self._root = Path(root).resolve() if root else None
        self._buffers = ReadBufferPool()
        self._prefetcher = FilePrefetcher()

    def stage(self, payload: Mapping[str, Any], target: LiveTensors) -> StagedTensors:
        """Read the files that `model_path` and `manifest` name; raises WeightsError."""
        load_format = payload.get("load_format")
        if load_format not in FORMATS:
            raise WeightsError(
                f"load_format {short_repr(load_format)} is not supported: use auto or safetensors"
            )
        manifest = parse_manifest(payload.get("manifest"))
        try:
            parts = self._parts(self._inside(payload.get("model_path")), manifest)
            with self._prefetcher.take(parts) or self._opened(parts, target) as loading:
                if manifest is None:
                    try:
                        target.require_all(loading.names)
                    except WeightsError:
                        loading.forget()
                        raise
                return loading.stage()
        except OSError as error:
            raise WeightsError(f"{short_repr(payload.get('model_path'))}: {error}") from error

    def prefetch(self, payload: Mapping[str, Any], target: LiveTensors) -> int:
        """Prefetches the first `nbytes` of the file `model_path`, which no longer change.

        The rest of the file may still be written. A later `stage` of the same file uses them, also
        after a rename. Returns how many bytes can be prefetched in total; raises WeightsError.
        """
        name, nbytes = payload.get("model_path"), payload.get("nbytes")
        if type(nbytes) is not int or nbytes < 0:
            raise WeightsError("nbytes must be a whole number of at least 0")
        try:
            path = self._inside(name)
            parts = [FileSelection(self._file(path.parent, path.name))]
            return self._prefetcher.read(path, nbytes, partial(self._opened, parts, target))
        except OSError as error:
            raise WeightsError(f"{short_repr(name)}: {error}") from error

    def _opened(self, parts: Sequence[FileSelection], target: LiveTensors) -> SafetensorsLoader:
        """Raises WeightsError, OSError."""
        loading = SafetensorsLoader(target, self._buffers)
        try:
            for part in parts:
                loading.open_file(part)
        except (WeightsError, OSError):
            with loading:
                raise
        return loading

    def _inside(self, path: Any, folder: Path | None = None) -> Path:
        """The resolved path, relative to `folder` or the root; raises WeightsError if outside."""
        if self._root is None:
            raise WeightsError(
                "this replica reads no weights from disk: it listens on the network without an "
                "admin key and without a --weights-root"
            )
        if not isinstance(path, str) or not path:
            raise WeightsError("model_path must be the path of a safetensors file or folder")
        try:
            resolved = ((folder or self._root) / path).resolve()
        except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a NUL
            raise WeightsError(f"{short_repr(path)} is not a valid path: {error}") from None
        if not resolved.is_relative_to(self._root):
            raise WeightsError(f"{short_repr(path)} is outside --weights-root {self._root}")
        return resolved

    def _parts(self, place: Path, manifest: UpdateManifest | None) -> list[FileSelection]:
        if manifest is not None and manifest.tensors is not None:
            return self._mapped(place, manifest.tensors)
        if manifest is not None:
            files = [ManifestFile(f) if isinstance(f, str) else f for f in manifest.files or ()]
            return [
                FileSelection(self._file(place, file.path), None, file.sha256) for file in files
            ]
        if place.is_file():
            return [FileSelection(place)]
        if not place.is_dir():
            raise WeightsError(
                f"{short_repr(str(place))} does not exist, or is neither a file nor a folder"
            )
        index = self._file(place, INDEX_FILE) if (place / INDEX_FILE).exists() else None
        if index is not None:
            return self._mapped(place, _weight_map(index))
        paths = sorted(place.glob("*.safetensors"))
        if not paths:
            raise WeightsError(f"{place} has no .safetensors file; no other format is supported")
        return [FileSelection(self._file(place, path.name)) for path in paths]

    def _mapped(self, place: Path, tensors: Mapping[str, str]) -> list[FileSelection]:
        names: dict[str, list[str]] = {}
        for name, file in tensors.items():
            names.setdefault(file, []).append(name)
        return [FileSelection(self._file(place, file), tuple(names[file])) for file in names]

    def _file(self, folder: Path, name: str) -> Path:
        path = self._inside(name, folder)
        if not path.is_file():
            raise WeightsError(f"{short_repr(str(folder / name))} does not exist, or is not a file")
        return path


def parse_manifest(value: Any) -> UpdateManifest | None:
    """Raises WeightsError for an invalid manifest; None stays None."""
    if value is None:
        return None
    try:
        manifest = msgspec.convert(value, UpdateManifest)
    except msgspec.ValidationError as error:
        raise WeightsError(f"manifest: {error}") from None
    if bool(manifest.files) == bool(manifest.tensors):
        raise WeightsError(
            'manifest must name either "files" (a list) or "tensors" (tensor name to file), not '
            "both, and at least one"
        )
    return manifest


def _weight_map(index: Path) -> dict[str, str]:
    with index.open("rb") as file:
        text = file.read(MAX_INDEX_BYTES + 1)
    try:
        if len(text) > MAX_INDEX_BYTES:
            raise WeightsError(f"{index} is longer than {MAX_INDEX_BYTES} bytes")
        return msgspec.json.decode(text, type=CheckpointIndex).weight_map
    except MALFORMED as error:
        raise WeightsError(f"{index} is not an index of safetensors files: {error}") from None
