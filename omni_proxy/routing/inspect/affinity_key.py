"""The affinity key of a request: what keeps a session, or a client, with one worker.

The first header of `[routing] session_headers` that is present names the session, else the first
key of `session_body_keys` that the JSON body has (routers.md 1.1, features.md 6). Invariant: equal
bytes give the same key, in a header, in a body (as UTF-8) and in `POST /finish_session`; a key is
at most `MAX_KEY_BYTES` long. The body is parsed only where a key of it is configured and no header
has named the session.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec

from omni_proxy.config.schema import Config

MAX_KEY_BYTES: Final = 256  # a longer value is hashed, so that a huge cookie costs no memory
MAX_BODY_BYTES: Final = 8 * 1024 * 1024  # parsing more would keep all other requests waiting
MAX_ODD_BODY_BYTES: Final = 1024 * 1024  # of a body that only Python's own reader accepts
_KEY_HEADERS: Final = ("authorization", "x-api-key")
_ABSENT: Final = msgspec.Raw()
_MALFORMED: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_decode_value: Final = msgspec.json.Decoder().decode


class AffinityKeyReader:
    """`headers` in lower case, `body_keys` dotted; both in the order of preference."""

    def __init__(self, headers: Sequence[str], body_keys: Sequence[str] = ()) -> None:
        self._names = tuple(name.encode("latin-1") for name in headers)
        either = b"|".join(map(re.escape, self._names)) or rb"(?!)"
        self._line = re.compile(rb"(?:^|\n)(" + either + rb"):[ \t]*([^\r\n]*)", re.IGNORECASE)
        self._body_keys = [_BodyKey(key) for key in body_keys]

    def read(self, lines: bytes, body: bytes = b"") -> str:
        """Of header lines `name: value` with CRLF, and a body; "" where nothing names a session."""
        found: dict[bytes, bytes] = {}
        for line in self._line.finditer(lines):
            value = line[2].rstrip(b" \t")
            if value:
                found.setdefault(line[1].lower(), value)
        for name in self._names:
            if name in found:
                return session_key(found[name])
        return self._read_body(body) if self._body_keys and body else ""

    def _read_body(self, body: bytes) -> str:
        if len(body) > MAX_BODY_BYTES:
            return ""
        for key in self._body_keys:
            value = key.read(body)
            if value:
                return session_key(value.encode("utf-8", "surrogatepass"))
        return ""


def affinity_keys_of(config: Config) -> AffinityKeyReader:
    """As a configuration says. Where model traffic needs a key, that is the same for all, so it
    names no session."""
    headers = config.routing.session_headers
    if config.server.api_key or config.keys:
        headers = tuple(name for name in headers if name not in _KEY_HEADERS)
    return affinity_key_reader(headers, config.routing.session_body_keys)


@lru_cache(maxsize=16)
def affinity_key_reader(headers: tuple[str, ...], body_keys: tuple[str, ...]) -> AffinityKeyReader:
    """One reader for each configuration."""
    return AffinityKeyReader(headers, body_keys)


def session_key(value: bytes) -> str:
    """The key for a session's id as it was sent."""
    if len(value) > MAX_KEY_BYTES:
        return hashlib.blake2b(value, digest_size=16).hexdigest()
    return value.decode("latin-1")


class _BodyKey:
    """A dotted path of keys; everything beside it is skipped without being decoded."""

    def __init__(self, dotted: str) -> None:
        self._path = dotted.split(".")
        self._steps = [_decoder_of(name) for name in self._path]

    def read(self, body: bytes) -> str:
        """A text or a whole number there; "" for anything else."""
        raw = msgspec.Raw(bytes(body))
        try:
            for step in self._steps:
                raw = step(raw)
            value = _decode_value(raw) if len(raw) else None
        except _MALFORMED:
            value = self._read_oddly(body) if len(body) <= MAX_ODD_BODY_BYTES else None
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        return value if isinstance(value, str) else ""

    def _read_oddly(self, body: bytes) -> object:
        """Of what workers accept beside JSON: NaN, UTF-16, lone surrogates."""
        try:
            value: object = json.loads(body)
        except (ValueError, RecursionError):
            return None
        for name in self._path:
            value = value.get(name) if isinstance(value, dict) else None
        return value


def _decoder_of(name: str) -> Callable[[msgspec.Raw], msgspec.Raw]:
    """Reads the value of one key of an object; an absent one has no length."""
    struct = msgspec.defstruct(
        "BodyKey", [("value", msgspec.Raw, _ABSENT)], rename={"value": name}, gc=False
    )
    decode: Callable[[msgspec.Raw], Any] = msgspec.json.Decoder(struct).decode

    def value_of(raw: msgspec.Raw) -> msgspec.Raw:
        found: msgspec.Raw = decode(raw).value if len(raw) else raw
        return found

    return value_of
