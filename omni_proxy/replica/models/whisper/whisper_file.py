"""Reads CTranslate2's `model.bin`, version 6, and the two files beside it.

Invariant: every length is checked against the file before reading; an unsupported variable is an
error and is never skipped. models.md 3 has the layout.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

VERSION = 6
SPEC = "WhisperSpec"
# CTranslate2's numbers for its element types.
ELEMENT_TYPES = {0: "<f4", 1: "<i1", 2: "<i2", 3: "<i4", 4: "<f2"}


class WhisperFileError(Exception):
    """The model's files are not readable; the text says which and why."""


@dataclass(frozen=True, slots=True)
class WhisperFile:
    """Variables by their names in the file (views of it), vocabulary, and suppressed ids.

    `suppressed` are never emitted, `suppressed_first` not as the first token of a window.
    """

    variables: Mapping[str, NDArray[Any]]
    vocabulary: tuple[str, ...]
    suppressed: tuple[int, ...]
    suppressed_first: tuple[int, ...]


def read_whisper_file(path: Path) -> WhisperFile:
    """Read `path` (a model.bin) with vocabulary.txt and config.json beside it.

    Raises WhisperFileError.
    """
    try:
        with path.open("rb") as file:
            # Copy-on-write, hence writable: torch warns about read-only arrays.
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        words = path.with_name("vocabulary.txt").read_text("utf-8").split("\n")
        config = json.loads(path.with_name("config.json").read_text("utf-8"))
        suppressed = tuple(int(token) for token in config["suppress_ids"])
        first = tuple(int(token) for token in config["suppress_ids_begin"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise WhisperFileError(f"cannot read the model at {path}: {error}") from error
    variables = read_variables(data)
    return WhisperFile(variables, tuple(words[:-1]), suppressed, first)


def read_variables(data: memoryview) -> dict[str, NDArray[Any]]:
    """Return every variable of a model.bin, aliases included; raises WhisperFileError."""
    cursor = _Cursor(data)
    version = cursor.number("I")
    if version != VERSION:
        raise WhisperFileError(f"the model file has version {version}, not {VERSION}")
    spec = cursor.name()
    if spec != SPEC:
        raise WhisperFileError(f"the model file holds a {spec!r}, not a {SPEC}")
    cursor.number("I")  # the revision of the spec
    variables = {}
    for _ in range(cursor.number("I")):
        name, variable = cursor.variable()
        variables[name] = variable
    for _ in range(cursor.number("I")):
        alias, name = cursor.name(), cursor.name()
        if name not in variables:
            raise WhisperFileError(f"the model file names {name!r}, which it does not hold")
        variables[alias] = variables[name]
    if cursor.at != len(data):
        raise WhisperFileError(f"the model file goes on after its end at byte {cursor.at}")
    return variables


class _Cursor:
    """A position in the file that advances over what is read; reading past the end is an error."""

    __slots__ = ("_data", "at")

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.at = 0

    def number(self, kind: str) -> int:
        return int(struct.unpack("<" + kind, self._take(struct.calcsize("<" + kind)))[0])

    def name(self) -> str:
        """Return a string with a length prefix and a NUL terminator within that length."""
        text = bytes(self._take(self.number("H")))
        try:
            return text.removesuffix(b"\0").decode("ascii")
        except UnicodeDecodeError as error:
            raise WhisperFileError(f"the model file has an unreadable name {text!r}") from error

    def variable(self) -> tuple[str, NDArray[Any]]:
        name = self.name()
        shape = [self.number("I") for _ in range(self.number("B"))]
        kind = self.number("B")
        body = self._take(self.number("I"))
        if kind not in ELEMENT_TYPES:
            raise WhisperFileError(f"{name} has elements of an unknown type, {kind}")
        elements = np.dtype(ELEMENT_TYPES[kind])
        expected_bytes = elements.itemsize
        for length in shape:
            expected_bytes *= length
        if len(body) != expected_bytes:
            raise WhisperFileError(f"{name} has {len(body)} bytes for its shape {shape}")
        return name, np.frombuffer(body, elements).reshape(shape)

    def _take(self, length: int) -> memoryview:
        end = self.at + length
        if end > len(self._data):
            raise WhisperFileError(
                f"the model file is cut: it has {len(self._data)} bytes, {end} are needed"
            )
        taken = self._data[self.at : end]
        self.at = end
        return taken
