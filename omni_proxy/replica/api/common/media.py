"""Media in requests and responses: uploads, data URLs, HTTP and file references; audio samples.

Invariant: at most the allowed number of bytes is in memory, also of a multipart form, whose parts
are bounded in number and size. Files and hosts are read only if the operator has allowed them:
without rules, only `data:` URLs are accepted. The address that was checked is the one that is
connected to, also for each redirect, so that a name cannot resolve to a private network after the
check (DNS rebinding). There are no retries; each request has its own connection.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit

import httptools
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

from omni_proxy.shared.origins import DEFAULT_PORTS
from omni_proxy.shared.tls_client import system_context

if TYPE_CHECKING:
    from omni_proxy.replica.audio import Samples


FETCH_TIMEOUT_SECS: Final = 15.0
MAX_REDIRECTS: Final = 3
MAX_HEAD_BYTES: Final = 64 * 1024
READ_BYTES: Final = 64 * 1024
REDIRECT_STATUSES: Final = (301, 302, 303, 307, 308)
MAX_MEDIA_BYTES: Final = 10 * 1024 * 1024
MAX_FIELD_BYTES: Final = 64 * 1024
MAX_PARTS: Final = 64
UPLOAD_TIMEOUT_SECS: Final = 600.0


class FetchError(ValueError):
    """The URL was not fetched; the message is the reason."""


@dataclass(frozen=True, slots=True)
class _Target:
    """One hop: the request, and the address that was checked."""

    parts: SplitResult
    host: str
    address: str
    port: int
    kind: str

    @property
    def head(self) -> bytes:
        path = quote(self.parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
        query = (
            f"?{quote(self.parts.query, safe='/%:@!$&()*+,;=~-._?')}" if self.parts.query else ""
        )
        name = f"[{self.host}]" if ":" in self.host else self.host
        return (
            f"GET {path}{query} HTTP/1.1\r\nHost: {name}:{self.port}\r\nAccept: {self.kind}/*\r\n"
            "Accept-Encoding: identity\r\nConnection: close\r\n\r\n"
        ).encode("ascii")


class _Response:
    """A response being received; the parser calls the `on_` methods."""

    def __init__(self, max_bytes: int) -> None:
        self.location = ""
        self.body = bytearray()
        self.complete = False
        self._max_bytes = max_bytes
        self._head_bytes = 0
        self._framed = False
        self._parser = httptools.HttpResponseParser(self)

    @property
    def status(self) -> int:
        return int(self._parser.get_status_code())

    def feed(self, data: bytes) -> None:
        """Parse `data`; b"" is the end of the connection.

        Raises FetchError for a response that is incomplete, too large or not HTTP.
        """
        if not data:
            # A body without a length ends with the connection.
            self.complete = self.complete or (self.status == 200 and not self._framed)
            if not self.complete:
                raise FetchError("the URL could not be fetched: the response is incomplete")
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            raise FetchError("the URL could not be fetched: the response is not HTTP") from None
        if len(self.body) > self._max_bytes:
            raise FetchError(f"the reference is larger than {self._max_bytes} bytes")
        if self._head_bytes > MAX_HEAD_BYTES:
            raise FetchError("the URL could not be fetched: the response's head is too large")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if name.lower() == b"location":
            self.location = value.decode("latin-1")
        self._framed = self._framed or name.lower() in (b"content-length", b"transfer-encoding")

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete = True


async def fetch_url(
    url: str,
    allowed_domains: tuple[str, ...],
    max_bytes: int,
    allow_private: bool = False,
    kind: str = "audio",
) -> bytes:
    """Return the body of `url`, at most `max_bytes`; `kind` is the media type to accept.

    Raises FetchError.
    """
    with trio.move_on_after(FETCH_TIMEOUT_SECS):
        for _ in range(MAX_REDIRECTS + 1):
            target = await _resolve(url, allowed_domains, allow_private, kind)
            response = await _get(target, max_bytes)
            if response.status == 200:
                return bytes(response.body)
            if response.status not in REDIRECT_STATUSES:
                raise FetchError(f"the URL returned status {response.status}")
            url = urljoin(url, response.location)
        raise FetchError(f"the URL redirects more than {MAX_REDIRECTS} times")
    raise FetchError(f"the URL could not be fetched within {FETCH_TIMEOUT_SECS:g} seconds")


async def _resolve(url: str, allowed: tuple[str, ...], allow_private: bool, kind: str) -> _Target:
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip("."), parts.port
    except ValueError:
        raise FetchError("the URL is malformed") from None
    if parts.scheme not in ("http", "https") or not host or parts.username is not None:
        raise FetchError("the URL must be http(s)://host/path, without a user name")
    if not host.isascii() or not any(host == name or host.endswith(f".{name}") for name in allowed):
        raise FetchError(
            f"fetching {kind} from {host} is not allowed; send a data:{kind} URL instead"
        )
    port = port or DEFAULT_PORTS[parts.scheme]
    try:
        entries = await trio.socket.getaddrinfo(host, port, type=trio.socket.SOCK_STREAM)
    except OSError:
        raise FetchError(f"the host {host} cannot be resolved") from None
    addresses = [str(entry[4][0]) for entry in entries]
    if not allow_private and not all(_is_public(address) for address in addresses):
        raise FetchError(f"the host {host} has an address that is not public")
    return _Target(parts, host, addresses[0], port, kind)


def _is_public(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    return ip.is_global and not ip.is_multicast


async def _get(target: _Target, max_bytes: int) -> _Response:
    """Return the complete response of one hop."""
    response = _Response(max_bytes)
    stream: trio.abc.Stream
    try:
        stream = await trio.open_tcp_stream(target.address, target.port)
        if target.parts.scheme == "https":
            stream = trio.SSLStream(
                stream,
                system_context(),
                server_hostname=target.host,
                https_compatible=True,
            )
        async with stream:
            await stream.send_all(target.head)
            while not response.complete:
                response.feed(bytes(await stream.receive_some(READ_BYTES)))
    except (OSError, trio.BrokenResourceError) as error:
        raise FetchError(f"the URL could not be fetched: {error}") from None
    return response


class MediaError(ValueError):
    """The referenced media cannot be read; the message has the reason and what is accepted."""


@dataclass(frozen=True, slots=True)
class MediaRules:
    """References other than `data:` URLs that are allowed for media of `kind` (audio or image).

    `allowed_domains` are the hosts that http(s) URLs may name, with their subdomains;
    `allow_private` permits non-public addresses. File paths must be in `allowed_folder`.
    """

    allowed_domains: tuple[str, ...] = ()
    allowed_folder: Path | None = None
    allow_private: bool = False
    max_bytes: int = MAX_MEDIA_BYTES
    kind: str = "audio"


async def read_media(source: str, rules: MediaRules) -> bytes:
    """Return the bytes that a `data:` URL, http(s) URL, `file://` URL or path refers to.

    Raises MediaError if the rules do not allow it or it cannot be read.
    """
    scheme = source[:12].partition(":")[0].lower()
    if scheme == "data":
        return _data_url(source, rules)
    if scheme in ("http", "https"):
        try:
            return await fetch_url(
                source, rules.allowed_domains, rules.max_bytes, rules.allow_private, rules.kind
            )
        except FetchError as error:
            raise MediaError(str(error)) from None
    if "://" in source and scheme != "file":
        raise MediaError(f"{scheme}: URLs are not supported; send a data:{rules.kind} URL")
    path = _file_url(source) if scheme == "file" else source
    return await trio.to_thread.run_sync(_read_file, path, rules)


def decode_base64(text: str, max_bytes: int = MAX_MEDIA_BYTES) -> bytes:
    """Return the decoded bytes. Raises MediaError; a result too large is refused undecoded."""
    if len(text) > max_bytes * 4 // 3 + 4:
        raise MediaError(f"the reference is larger than {max_bytes} bytes")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise MediaError("the reference is not valid base64") from None


def decode_audio_samples(data: bytes) -> tuple[Samples, int]:
    """Return the file's samples as mono float32, and their rate. Raises AudioError (ValueError)."""
    from omni_proxy.replica.audio import decode_audio  # numpy is imported with the first audio

    return decode_audio(data)


def to_stage_audio(samples: Samples, rate: int) -> dict[str, Any]:
    """Return audio in the format of the stages."""
    return {"audio_data": samples.astype("<f4").tobytes(), "sample_rate": rate}


def encode_audio(audio: bytes, rate: int, response_format: str) -> bytes:
    """Return float32 little-endian mono `audio` as a whole file of that format (wav or pcm)."""
    import numpy as np  # imported only for audio

    from omni_proxy.replica.audio import encode_pcm16, encode_wav

    samples = np.frombuffer(audio, "<f4")
    return encode_wav(samples, rate) if response_format == "wav" else encode_pcm16(samples)


def _data_url(source: str, rules: MediaRules) -> bytes:
    head, comma, payload = source.partition(",")
    kind, *marks = head[5:].lower().split(";")
    if not comma or not kind.strip().startswith(f"{rules.kind}/") or "base64" not in marks:
        raise MediaError(f"a data URL must have the form data:{rules.kind}/<type>;base64,<data>")
    return decode_base64(payload.strip(), rules.max_bytes)


def _file_url(source: str) -> str:
    parts = urlsplit(source)
    if parts.netloc not in ("", "localhost"):
        raise MediaError("a file URL must not name another host")
    return unquote(parts.path)


def _read_file(path: str, rules: MediaRules) -> bytes:
    if rules.allowed_folder is None:
        raise MediaError(f"this server reads no local files; send a data:{rules.kind} URL")
    folder = os.path.realpath(rules.allowed_folder)
    try:
        # Resolve symbolic links first, so that none leads out of the folder.
        resolved = os.path.realpath(os.path.join(folder, path))
        inside = os.path.commonpath((folder, resolved)) == folder and os.path.isfile(resolved)
        if inside:
            with open(resolved, "rb") as file:
                data = file.read(rules.max_bytes + 1)
        else:
            data = b""
    except (OSError, ValueError):
        inside, data = False, b""
    if not inside:
        raise MediaError(f"there is no such file in the folder for {rules.kind} files")
    if len(data) > rules.max_bytes:
        raise MediaError(f"the reference is larger than {rules.max_bytes} bytes")
    return data


class MultipartError(Exception):
    """The form cannot be read; `status` is 400, 408 or 413."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.status = status


@dataclass(frozen=True, slots=True)
class UploadedFile:
    """One uploaded file with its complete content."""

    filename: str
    content_type: str
    data: bytes


@dataclass(frozen=True, slots=True)
class MultipartForm:
    """The plain fields and the files of a form; the last of equal names wins."""

    fields: dict[str, str] = field(default_factory=dict)
    files: dict[str, UploadedFile] = field(default_factory=dict)


async def read_form(request: Request, max_bytes: int) -> MultipartForm:
    """Read the request's multipart body of up to `max_bytes`.

    A Content-Length above that is refused before anything is read. Raises MultipartError.
    """
    boundary = request.mimetype_params.get("boundary", "")
    if request.mimetype != "multipart/form-data" or not boundary:
        raise MultipartError("the body must be multipart/form-data with a boundary")
    if request.content_length is not None and request.content_length > max_bytes:
        raise MultipartError(_beyond(max_bytes), 413)
    body = bytearray()
    with trio.move_on_after(UPLOAD_TIMEOUT_SECS):
        async for chunk in request.body:
            body += chunk
            if len(body) > max_bytes:
                raise MultipartError(_beyond(max_bytes), 413)
        # Parsing megabytes on the event loop would block every other connection.
        return await trio.to_thread.run_sync(parse_form, bytes(body), boundary)
    raise MultipartError(f"the upload took longer than {UPLOAD_TIMEOUT_SECS:g} seconds", 408)


def _beyond(max_bytes: int) -> str:
    return f"the upload is larger than {max_bytes} bytes"


def parse_form(body: bytes, boundary: str) -> MultipartForm:
    """Parse a complete multipart body. Raises MultipartError."""
    # Feed all data in one call: in chunks, werkzeug 3.1 adds a CR to a part that ends in CR LF.
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
        """Add one event. Raises MultipartError for an invalid part, ValueError for an early end."""
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
