"""Uploads in multipart forms, and the audio or image that a request names by URL or by path.

Invariant: no more than the stated number of bytes is ever held, and nothing is read from a disk or
a network that the operator has not opened: without rules only `data:` URLs are taken.
"""

from __future__ import annotations

import base64
import binascii
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

import trio
from quart import Request
from werkzeug.exceptions import RequestEntityTooLarge
from werkzeug.sansio.multipart import (
    Data,
    Epilogue,
    Event,
    Field,
    File,
    MultipartDecoder,
    NeedData,
)

from omni_proxy.replica.api.audio_fetch import FetchRefused, fetch

if TYPE_CHECKING:
    from omni_proxy.replica.audio.resample import Samples

MOST_FIELD_BYTES: Final = 64 * 1024
MOST_PARTS: Final = 64
MOST_REFERENCE_BYTES: Final = 10 * 1024 * 1024
UPLOAD_SECS: Final = 600.0


class FormRefused(Exception):
    """The form cannot be read; `status` is 400, 408 or 413."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.status = status


class ReferenceRefused(ValueError):
    """What a request names is not read; the text says why and what is."""


@dataclass(frozen=True, slots=True)
class FilePart:
    """One uploaded file, whole."""

    filename: str
    content_type: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Form:
    """The plain fields and the files of a form; of equal names the last counts."""

    fields: dict[str, str] = field(default_factory=dict)
    files: dict[str, FilePart] = field(default_factory=dict)


async def read_form(request: Request, most_bytes: int) -> Form:
    """Read the request's multipart body, which may have up to `most_bytes`.

    A length announced beyond it is refused before anything is read. Raises FormRefused.
    """
    boundary = request.mimetype_params.get("boundary", "")
    if request.mimetype != "multipart/form-data" or not boundary:
        raise FormRefused("the body must be multipart/form-data with a boundary")
    if request.content_length is not None and request.content_length > most_bytes:
        raise FormRefused(_beyond(most_bytes), 413)
    body = bytearray()
    with trio.move_on_after(UPLOAD_SECS):
        async for piece in request.body:
            body += piece
            if len(body) > most_bytes:
                raise FormRefused(_beyond(most_bytes), 413)
        # Taking megabytes apart would hold up every other connection.
        return await trio.to_thread.run_sync(parse_form, bytes(body), boundary)
    raise FormRefused(f"the upload took longer than {UPLOAD_SECS:g} seconds", 408)


def _beyond(most_bytes: int) -> str:
    return f"the upload is larger than {most_bytes} bytes"


def parse_form(body: bytes, boundary: str) -> Form:
    """Take a whole multipart body apart. Raises FormRefused."""
    # The whole at once: fed in pieces, werkzeug 3.1 adds a CR to a part that ends in CR LF.
    decoder = MultipartDecoder(boundary.encode("latin-1", "replace"), max_parts=MOST_PARTS)
    parts = _Parts()
    try:
        decoder.receive_data(body)
        decoder.receive_data(None)
        while not isinstance(event := decoder.next_event(), Epilogue):
            parts.take(event)
    except RequestEntityTooLarge:
        raise FormRefused(f"the form has more than {MOST_PARTS} parts", 413) from None
    except ValueError as fault:
        raise FormRefused(f"the form is malformed: {fault}") from None
    return parts.form


class _Parts:
    """The parts of a form as they are found."""

    def __init__(self) -> None:
        self.form = Form()
        self._part: Field | File | None = None
        self._held = bytearray()

    def take(self, event: Event) -> None:
        """Raises ValueError where the form ends too soon, FormRefused for a bad part."""
        if isinstance(event, NeedData):
            raise ValueError("it ends before its last boundary")
        if isinstance(event, (Field, File)):
            self._part = event
            self._held.clear()
        elif isinstance(event, Data) and self._part is not None:
            self._hold(self._part, event)

    def _hold(self, part: Field | File, event: Data) -> None:
        self._held += event.data
        if isinstance(part, Field) and len(self._held) > MOST_FIELD_BYTES:
            raise FormRefused(f"field {part.name} is larger than {MOST_FIELD_BYTES} bytes", 413)
        if event.more_data:
            return
        if isinstance(part, File):
            kind = part.headers.get("Content-Type", "").split(";")[0].strip().lower()
            self.form.files[part.name] = FilePart(part.filename, kind, bytes(self._held))
            return
        try:
            self.form.fields[part.name] = self._held.decode()
        except UnicodeDecodeError:
            raise FormRefused(f"field {part.name} is not UTF-8 text") from None


@dataclass(frozen=True, slots=True)
class ReferenceRules:
    """What a request may name besides `data:` URLs as a reference of `kind` (audio or image).

    `allowed_domains`: hosts (and those below them) that http(s) URLs may name. `allowed_folder`:
    what file paths must lie in. `allow_private`: also addresses that are not public.
    """

    allowed_domains: tuple[str, ...] = ()
    allowed_folder: Path | None = None
    allow_private: bool = False
    most_bytes: int = MOST_REFERENCE_BYTES
    kind: str = "audio"


async def read_reference(source: str, rules: ReferenceRules) -> bytes:
    """Return the bytes behind a `data:` URL, http(s) URL, `file://` URL or path.

    Raises ReferenceRefused for what the rules do not open, or what cannot be read.
    """
    scheme = source[:12].partition(":")[0].lower()
    if scheme == "data":
        return _data_url(source, rules)
    if scheme in ("http", "https"):
        try:
            return await fetch(
                source, rules.allowed_domains, rules.most_bytes, rules.allow_private, rules.kind
            )
        except FetchRefused as refused:
            raise ReferenceRefused(str(refused)) from None
    if "://" in source and scheme != "file":
        raise ReferenceRefused(
            f"a reference may not be a {scheme}: URL; send a data:{rules.kind} URL"
        )
    path = _file_url(source) if scheme == "file" else source
    return await trio.to_thread.run_sync(_read_file, path, rules)


def decode_base64(text: str, most_bytes: int = MOST_REFERENCE_BYTES) -> bytes:
    """Return what `text` encodes; refused before decoding where it must be too large."""
    if len(text) > most_bytes * 4 // 3 + 4:
        raise ReferenceRefused(f"the reference is larger than {most_bytes} bytes")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ReferenceRefused("the reference is not valid base64") from None


def decode_samples(data: bytes) -> tuple[Samples, int]:
    """Return the file's samples as mono float32 and their rate. Raises AudioError (ValueError)."""
    from omni_proxy.replica.audio.wav import decode_audio  # keeps numpy out until audio comes

    return decode_audio(data)


def as_media(samples: Samples, rate: int) -> dict[str, Any]:
    """Return the form in which the stages take audio."""
    return {"audio_data": samples.astype("<f4").tobytes(), "sample_rate": rate}


def _data_url(source: str, rules: ReferenceRules) -> bytes:
    head, comma, payload = source.partition(",")
    kind, *marks = head[5:].lower().split(";")
    if not comma or not kind.strip().startswith(f"{rules.kind}/") or "base64" not in marks:
        raise ReferenceRefused(f"a data URL must read data:{rules.kind}/<type>;base64,<data>")
    return decode_base64(payload.strip(), rules.most_bytes)


def _file_url(source: str) -> str:
    parts = urlsplit(source)
    if parts.netloc not in ("", "localhost"):
        raise ReferenceRefused("a file URL may name no other machine")
    return unquote(parts.path)


def _read_file(path: str, rules: ReferenceRules) -> bytes:
    if rules.allowed_folder is None:
        raise ReferenceRefused(f"this server reads no local files; send a data:{rules.kind} URL")
    folder = os.path.realpath(rules.allowed_folder)
    try:
        # Links are followed first, so that none leads out of the folder.
        whole = os.path.realpath(os.path.join(folder, path))
        inside = os.path.commonpath((folder, whole)) == folder and os.path.isfile(whole)
        if inside:
            with open(whole, "rb") as file:
                data = file.read(rules.most_bytes + 1)
        else:
            data = b""
    except (OSError, ValueError):
        inside, data = False, b""
    if not inside:
        raise ReferenceRefused(f"there is no such file in the folder for {rules.kind} files")
    if len(data) > rules.most_bytes:
        raise ReferenceRefused(f"the reference is larger than {rules.most_bytes} bytes")
    return data
