"""Multipart form uploads, read into memory with bounds.

Invariant: never more bytes are held than the caller of `read_form` allows; field size and number of
parts are bounded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

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

MAX_FIELD_BYTES: Final = 64 * 1024
MAX_PARTS: Final = 64
UPLOAD_TIMEOUT_SECS: Final = 600.0


class MultipartError(Exception):
    """The form cannot be read; `status` is 400, 408 or 413."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.status = status


@dataclass(frozen=True, slots=True)
class UploadedFile:
    """One uploaded file, complete."""

    filename: str
    content_type: str
    data: bytes


@dataclass(frozen=True, slots=True)
class MultipartForm:
    """The plain fields and the files of a form; the last of equal names wins."""

    fields: dict[str, str] = field(default_factory=dict)
    files: dict[str, UploadedFile] = field(default_factory=dict)


async def read_form(request: Request, most_bytes: int) -> MultipartForm:
    """Read the request's multipart body of up to `most_bytes`.

    A Content-Length above that is refused before anything is read. Raises MultipartError.
    """
    boundary = request.mimetype_params.get("boundary", "")
    if request.mimetype != "multipart/form-data" or not boundary:
        raise MultipartError("the body must be multipart/form-data with a boundary")
    if request.content_length is not None and request.content_length > most_bytes:
        raise MultipartError(_beyond(most_bytes), 413)
    body = bytearray()
    with trio.move_on_after(UPLOAD_TIMEOUT_SECS):
        async for chunk in request.body:
            body += chunk
            if len(body) > most_bytes:
                raise MultipartError(_beyond(most_bytes), 413)
        # Parsing megabytes on the event loop would block every other connection.
        return await trio.to_thread.run_sync(parse_form, bytes(body), boundary)
    raise MultipartError(f"the upload took longer than {UPLOAD_TIMEOUT_SECS:g} seconds", 408)


def _beyond(most_bytes: int) -> str:
    return f"the upload is larger than {most_bytes} bytes"


def parse_form(body: bytes, boundary: str) -> MultipartForm:
    """Parse a complete multipart body. Raises MultipartError."""
    # All data at once: fed in chunks, werkzeug 3.1 adds a CR to a part that ends in CR LF.
    decoder = MultipartDecoder(boundary.encode("latin-1", "replace"), max_parts=MAX_PARTS)
    parts = _Parts()
    try:
        decoder.receive_data(body)
        decoder.receive_data(None)
        while not isinstance(event := decoder.next_event(), Epilogue):
            parts.take(event)
    except RequestEntityTooLarge:
        raise MultipartError(f"the form has more than {MAX_PARTS} parts", 413) from None
    except ValueError as error:
        raise MultipartError(f"the form is malformed: {error}") from None
    return parts.form


class _Parts:
    """Collects the parts of a form."""

    def __init__(self) -> None:
        self.form = MultipartForm()
        self._part: Field | File | None = None
        self._held = bytearray()

    def take(self, event: Event) -> None:
        """Add one event. Raises ValueError if the form ends too soon, MultipartError for a bad
        part.
        """
        if isinstance(event, NeedData):
            raise ValueError("it ends before its last boundary")
        if isinstance(event, (Field, File)):
            self._part = event
            self._held.clear()
        elif isinstance(event, Data) and self._part is not None:
            self._hold(self._part, event)

    def _hold(self, part: Field | File, event: Data) -> None:
        self._held += event.data
        if isinstance(part, Field) and len(self._held) > MAX_FIELD_BYTES:
            raise MultipartError(f"field {part.name} is larger than {MAX_FIELD_BYTES} bytes", 413)
        if event.more_data:
            return
        if isinstance(part, File):
            kind = part.headers.get("Content-Type", "").split(";")[0].strip().lower()
            self.form.files[part.name] = UploadedFile(part.filename, kind, bytes(self._held))
            return
        try:
            self.form.fields[part.name] = self._held.decode()
        except UnicodeDecodeError:
            raise MultipartError(f"field {part.name} is not UTF-8 text") from None
