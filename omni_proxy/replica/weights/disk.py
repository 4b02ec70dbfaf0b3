"""Weights from safetensors files: one, a folder of them, or what a manifest names of a folder.

A manifest is one of
    {"files": ["a.safetensors", {"path": "b.safetensors", "sha256": "<of the file>"}]}
    {"tensors": {"model.norm.weight": "a.safetensors", ...}}
and changes what it names alone; without one, every tensor of the model must be there.
Invariant: no file outside the root is opened, by whatever link. A file is read into memory whole
before anything is changed, so that what happens to it afterwards does not matter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from omni_proxy.replica.weights.target import Staged, Target, WeightsFault, quoted
from omni_proxy.replica.weights.tensors import NOT_JSON, StoredTensors

INDEX = "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 * 2**20
FORMATS = (None, "auto", "safetensors")


class ManifestFile(Struct, forbid_unknown_fields=True):
    path: str
    sha256: str | None = None


class Manifest(Struct, forbid_unknown_fields=True):
    """See above; exactly one of the two is given."""

    files: list[str | ManifestFile] | None = None
    tensors: dict[str, str] | None = None


class Index(Struct):
    """The list of its files that a sharded checkpoint has."""

    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True)
class Part:
    """A file, the names wanted from it (None: all), and its SHA-256 where one is promised."""

    path: Path
    names: tuple[str, ...] | None = None
    sha256: str | None = None

    def names_in(self, stored: StoredTensors) -> list[str]:
        """Raises WeightsFault where there are none."""
        names = stored.names if self.names is None else list(self.names)
        if not names:
            raise WeightsFault(f"{stored.title} holds no tensor")
        return names


class WeightsFolder:
    """Finds files under `root`; "" is no root at all, and then nothing is read."""

    def __init__(self, root: str) -> None:
        self._root = Path(root).resolve() if root else None

    def stage(self, payload: Mapping[str, Any], target: Target) -> Staged:
        """Read what `model_path` and `manifest` name; raises WeightsFault."""
        load_format = payload.get("load_format")
        if load_format not in FORMATS:
            raise WeightsFault(
                f"load_format {quoted(load_format)} is not supported: it is auto or safetensors"
            )
        manifest = manifest_of(payload.get("manifest"))
        try:
            parts = self._parts(self._inside(payload.get("model_path")), manifest)
            names = [name for part in parts for name in _checked(part, target)]
            if manifest is None:
                target.require_all(names)
            return _stage(parts, target)
        except OSError as error:
            raise WeightsFault(f"{quoted(payload.get('model_path'))}: {error}") from error

    def _inside(self, path: Any, folder: Path | None = None) -> Path:
        """Where `path` really is; relative ones are the folder's, else the root's."""
        if self._root is None:
            raise WeightsFault(
                "this replica reads no weights from disk: it listens for others and has neither an "
                "admin key nor a --weights-root"
            )
        if not isinstance(path, str) or not path:
            raise WeightsFault("model_path must be the path of a safetensors file or folder")
        try:
            found = ((folder or self._root) / path).resolve()
        except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a NUL
            raise WeightsFault(f"{quoted(path)} is no path: {error}") from None
        if not found.is_relative_to(self._root):
            raise WeightsFault(f"{quoted(path)} is outside --weights-root {self._root}")
        return found

    def _parts(self, place: Path, manifest: Manifest | None) -> list[Part]:
        if manifest is not None and manifest.tensors is not None:
            return self._mapped(place, manifest.tensors)
        if manifest is not None:
            named = [ManifestFile(f) if isinstance(f, str) else f for f in manifest.files or ()]
            return [Part(self._file(place, each.path), None, each.sha256) for each in named]
        if place.is_file():
            return [Part(place)]
        if not place.is_dir():
            raise WeightsFault(f"{quoted(str(place))} does not exist, or is no file and no folder")
        index = self._file(place, INDEX) if (place / INDEX).exists() else None
        if index is not None:
            return self._mapped(place, _weight_map(index))
        found = sorted(place.glob("*.safetensors"))
        if not found:
            raise WeightsFault(f"{place} holds no .safetensors file; no other format is read")
        return [Part(self._file(place, path.name)) for path in found]

    def _mapped(self, place: Path, tensors: Mapping[str, str]) -> list[Part]:
        names: dict[str, list[str]] = {}
        for name, file in tensors.items():
            names.setdefault(file, []).append(name)
        return [Part(self._file(place, file), tuple(names[file])) for file in names]

    def _file(self, folder: Path, name: str) -> Path:
        path = self._inside(name, folder)
        if not path.is_file():
            raise WeightsFault(f"{quoted(str(folder / name))} does not exist, or is no file")
        return path


def manifest_of(value: Any) -> Manifest | None:
    """Raises WeightsFault for what is no manifest; None stays None."""
    if value is None:
        return None
    try:
        manifest = msgspec.convert(value, Manifest)
    except msgspec.ValidationError as error:
        raise WeightsFault(f"manifest: {error}") from None
    if bool(manifest.files) == bool(manifest.tensors):
        raise WeightsFault(
            'manifest must name either "files" (a list) or "tensors" (tensor name to file), not '
            "both, and at least one"
        )
    return manifest


def _weight_map(index: Path) -> dict[str, str]:
    with index.open("rb") as file:
        text = file.read(MAX_INDEX_BYTES + 1)
    try:
        if len(text) > MAX_INDEX_BYTES:
            raise WeightsFault(f"{index} is longer than {MAX_INDEX_BYTES} bytes")
        return msgspec.json.decode(text, type=Index).weight_map
    except NOT_JSON as error:
        raise WeightsFault(f"{index} is no index of safetensors files: {error}") from None


def _checked(part: Part, target: Target) -> list[str]:
    """The names a file gives, whose sizes fit; nothing of it is in memory yet."""
    with part.path.open("rb") as file:
        stored = StoredTensors(file, str(part.path))
        names = part.names_in(stored)
        staged = Staged(target)
        for name in names:
            staged.check(name, stored.form(name))
    return names


def _stage(parts: Iterable[Part], target: Target) -> Staged:
    staged = Staged(target)
    try:
        for part in parts:
            with part.path.open("rb") as file:
                _require_digest(file, part)
                stored = StoredTensors(file, str(part.path))
                for name in part.names_in(stored):
                    staged.add(name, stored.read(name))
    except (WeightsFault, OSError):
        staged.forget()
        raise
    return staged


def _require_digest(file: BufferedReader, part: Part) -> None:
    if part.sha256 is not None:
        found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != part.sha256.lower():
            raise WeightsFault(f"{part.path} has the SHA-256 {found}, not the promised one")
