"""Media in requests and responses: data, HTTP and file references, and audio as stages take it.

Invariant: at most the allowed number of bytes is held, and nothing is read from a disk or a network
that the operator has not allowed: without rules only `data:` URLs are accepted.
"""

from __future__ import annotations

import base64
import binascii
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

import trio

from omni_proxy.replica.api.common.url_fetch import FetchError, fetch_url

if TYPE_CHECKING:
    from omni_proxy.replica.audio.resample import Samples

MAX_MEDIA_BYTES: Final = 10 * 1024 * 1024


class MediaError(ValueError):
    """The referenced media cannot be read; the text says why and what is accepted."""


@dataclass(frozen=True, slots=True)
class MediaRules:
    """What a request may reference besides `data:` URLs, for media of `kind` (audio or image).

    `allowed_domains`: hosts (and their subdomains) that http(s) URLs may name. `allowed_folder`:
    the folder that file paths must be in. `allow_private`: whether non-public addresses are
    allowed.
    """

    allowed_domains: tuple[str, ...] = ()
    allowed_folder: Path | None = None
    allow_private: bool = False
    most_bytes: int = MAX_MEDIA_BYTES
    kind: str = "audio"


async def read_media(source: str, rules: MediaRules) -> bytes:
    """Return the bytes behind a `data:` URL, http(s) URL, `file://` URL or path.

    Raises MediaError for what the rules do not allow, or what cannot be read.
    """
    scheme = source[:12].partition(":")[0].lower()
    if scheme == "data":
        return _data_url(source, rules)
    if scheme in ("http", "https"):
        try:
            return await fetch_url(
                source, rules.allowed_domains, rules.most_bytes, rules.allow_private, rules.kind
            )
        except FetchError as error:
            raise MediaError(str(error)) from None
    if "://" in source and scheme != "file":
        raise MediaError(f"a reference may not be a {scheme}: URL; send a data:{rules.kind} URL")
    path = _file_url(source) if scheme == "file" else source
    return await trio.to_thread.run_sync(_read_file, path, rules)


def decode_base64(text: str, most_bytes: int = MAX_MEDIA_BYTES) -> bytes:
    """Return the decoded bytes. Raises MediaError, before decoding if the result would be too
    large.
    """
    if len(text) > most_bytes * 4 // 3 + 4:
        raise MediaError(f"the reference is larger than {most_bytes} bytes")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise MediaError("the reference is not valid base64") from None


def decode_audio_samples(data: bytes) -> tuple[Samples, int]:
    """Return the file's samples as mono float32, and their rate. Raises AudioError (ValueError)."""
    from omni_proxy.replica.audio.wav import decode_audio  # numpy is imported with the first audio

    return decode_audio(data)


def to_stage_audio(samples: Samples, rate: int) -> dict[str, Any]:
    """Return audio in the form that the stages take."""
    return {"audio_data": samples.astype("<f4").tobytes(), "sample_rate": rate}


def encode_audio(audio: bytes, rate: int, response_format: str) -> bytes:
    """Return float32 little-endian mono `audio` as a whole file of that format (wav or pcm)."""
    import numpy as np  # imported only for audio

    from omni_proxy.replica.audio.wav import encode_pcm16, encode_wav

    samples = np.frombuffer(audio, "<f4")
    return encode_wav(samples, rate) if response_format == "wav" else encode_pcm16(samples)


def _data_url(source: str, rules: MediaRules) -> bytes:
    head, comma, payload = source.partition(",")
    kind, *marks = head[5:].lower().split(";")
    if not comma or not kind.strip().startswith(f"{rules.kind}/") or "base64" not in marks:
        raise MediaError(f"a data URL must read data:{rules.kind}/<type>;base64,<data>")
    return decode_base64(payload.strip(), rules.most_bytes)


def _file_url(source: str) -> str:
    parts = urlsplit(source)
    if parts.netloc not in ("", "localhost"):
        raise MediaError("a file URL may name no other machine")
    return unquote(parts.path)


def _read_file(path: str, rules: MediaRules) -> bytes:
    if rules.allowed_folder is None:
        raise MediaError(f"this server reads no local files; send a data:{rules.kind} URL")
    folder = os.path.realpath(rules.allowed_folder)
    try:
        # Symbolic links are resolved first, so that none leads out of the folder.
        resolved = os.path.realpath(os.path.join(folder, path))
        inside = os.path.commonpath((folder, resolved)) == folder and os.path.isfile(resolved)
        if inside:
            with open(resolved, "rb") as file:
                data = file.read(rules.most_bytes + 1)
        else:
            data = b""
    except (OSError, ValueError):
        inside, data = False, b""
    if not inside:
        raise MediaError(f"there is no such file in the folder for {rules.kind} files")
    if len(data) > rules.most_bytes:
        raise MediaError(f"the reference is larger than {rules.most_bytes} bytes")
    return data
