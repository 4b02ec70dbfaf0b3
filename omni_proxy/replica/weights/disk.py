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
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from torch import Tensor

from omni_proxy.replica.weights.reading import (
    ALIGNMENT_BYTES,
    CutShort,
    Piece,
    Rooms,
    bytes_of,
    fill,
    room,
)
from omni_proxy.replica.weights.target import (
    DERIVED_ENDINGS,
    Form,
    Staged,
    Target,
    WeightsFault,
    quoted,
)
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
        self._rooms = Rooms()

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
            with ExitStack() as files:
                loading = _Loading(target, files, self._rooms)
                for part in parts:
                    loading.look(part)
                if manifest is None:
                    target.require_all(each.name for each in loading.wanted)
                return loading.stage()
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


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One tensor of an open file."""

    name: str
    stored: StoredTensors
    form: Form

    def within(self, block: Tensor, start: int) -> Tensor:
        part = block[start : start + self.form.nbytes]
        return part.view(self.form.dtype).view(self.form.shape)

    def piece(self, tensor: Tensor) -> Piece:
        return self.stored.descriptor, self.stored.place(self.name), bytes_of(tensor)


class _Loading:
    """Files that are open, from the look at their headers to their last byte."""

    def __init__(self, target: Target, files: ExitStack, rooms: Rooms) -> None:
        self._target = target
        self._rooms = rooms
        self._files = files
        self._promised: list[tuple[BufferedReader, Part]] = []
        self.wanted: list[_Wanted] = []

    def look(self, part: Part) -> None:
        """At what a file gives; raises WeightsFault where its sizes do not fit, and OSError."""
        file = self._files.enter_context(part.path.open("rb"))
        stored = StoredTensors(file, str(part.path))
        staged = Staged(self._target)
        for name in part.names_in(stored):
            form = stored.form(name)
            staged.check(name, form)
            if not name.endswith(DERIVED_ENDINGS):
                self.wanted.append(_Wanted(name, stored, form))
        self._promised.append((file, part))

    def stage(self) -> Staged:
        """Read everything; raises WeightsFault, and OSError from a file."""
        for file, part in self._promised:
            _require_digest(file, part)
        as_they_are = [each for each in self.wanted if self._as_it_is(each)]
        places, nbytes = _side_by_side(as_they_are)
        block, give_back = self._rooms.take(nbytes)
        staged = Staged(self._target, give_back)
        try:
            tensors = {each: each.within(block, start) for each, start in places.items()}
            del block
            _fill([each.piece(tensors[each]) for each in as_they_are], as_they_are)
            for each in self.wanted:
                tensor = tensors.pop(each, None)
                staged.add(each.name, _alone(each) if tensor is None else tensor)
                del tensor
        except (WeightsFault, OSError):
            staged.forget()
            raise
        return staged

    def _as_it_is(self, wanted: _Wanted) -> bool:
        """Nothing has to be made of it: neither another type, nor a part, nor a GPU's tensor."""
        live = self._target.live(wanted.name)
        return Form(live.dtype, tuple(live.shape)) == wanted.form and live.device.type == "cpu"


def _side_by_side(wanted: Sequence[_Wanted]) -> tuple[dict[_Wanted, int], int]:
    """Where each begins in memory for all of them, and how much that is in bytes."""
    places, end = {}, 0
    for each in wanted:
        places[each] = start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        end = start + each.form.nbytes
    return places, end


def _alone(wanted: _Wanted) -> Tensor:
    tensor = wanted.within(room(wanted.form.nbytes), 0)
    _fill([wanted.piece(tensor)], [wanted])
    return tensor


def _fill(pieces: Sequence[Piece], wanted: Sequence[_Wanted]) -> None:
    try:
        fill(pieces)
    except CutShort:
        titles = ", ".join(dict.fromkeys(each.stored.title for each in wanted))
        raise WeightsFault(f"{titles} ended in the middle of a tensor") from None


def _require_digest(file: BufferedReader, part: Part) -> None:
    if part.sha256 is not None:
        file.seek(0)
        found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != part.sha256.lower():
            raise WeightsFault(f"{part.path} has the SHA-256 {found}, not the promised one")
