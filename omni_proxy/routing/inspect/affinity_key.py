"""The affinity key of a request, which keeps a session, or a client, on one worker.

It is the first header of `[routing] session_headers` that is present, else the first key of
`session_body_keys` in the JSON body (note:routers 1.1, note:features 6). Invariant: equal bytes
give the same key in a header, in a body (as UTF-8) and in `POST /finish_session`; a key has at most
`MAX_KEY_BYTES`. The body is parsed only if a body key is configured and no header has a value.
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
from omni_proxy.shared.decoding import MALFORMED

MAX_KEY_BYTES: Final = 256  # longer values are hashed, so that huge cookies take no memory
MAX_BODY_BYTES: Final = 8 * 1024 * 1024  # parsing more would delay all other requests
MAX_NON_STANDARD_BODY_BYTES: Final = (
    1024 * 1024
)  # for bodies that only Python's JSON reader accepts
_KEY_HEADERS: Final = ("authorization", "x-api-key")
_ABSENT: Final = msgspec.Raw()
_decode_value: Final = msgspec.json.Decoder().decode


class AffinityKeyReader:
    """`headers` in lower case, `body_keys` dotted; both in order of preference."""

    def __init__(self, headers: Sequence[str], body_keys: Sequence[str] = ()) -> None:
        self._names = tuple(name.encode("latin-1") for name in headers)
        either = b"|".join(map(re.escape, self._names)) or rb"(?!)"
        self._line = re.compile(rb"(?:^|\n)(" + either + rb"):[ \t]*([^\r\n]*)", re.IGNORECASE)
        self._body_keys = [_BodyKey(key) for key in body_keys]

    def read(self, lines: bytes, body: bytes = b"") -> str:
        """The key in header lines `name: value` with CRLF, or in a body; "" if there is none."""
        values: dict[bytes, bytes] = {}
        for line in self._line.finditer(lines):
            value = line[2].rstrip(b" \t")
            if value:
                values.setdefault(line[1].lower(), value)
        for name in self._names:
            if name in values:
                return session_key(values[name])
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
    """The reader for a configuration. If model traffic needs an API key, headers with API keys are
    left out: clients may share a key."""
    headers = config.routing.session_headers
    if config.server.api_key or config.keys:
        headers = tuple(name for name in headers if name not in _KEY_HEADERS)
    return affinity_key_reader(headers, config.routing.session_body_keys)


@lru_cache(maxsize=16)
def affinity_key_reader(headers: tuple[str, ...], body_keys: tuple[str, ...]) -> AffinityKeyReader:
    """A cached reader: one for equal arguments."""
    return AffinityKeyReader(headers, body_keys)


def session_key(value: bytes) -> str:
    """The affinity key for a session id as sent by the client."""
    if len(value) > MAX_KEY_BYTES:
        return hashlib.blake2b(value, digest_size=16).hexdigest()
    return value.decode("latin-1")


class _BodyKey:
    """A dotted path of keys; all other values are skipped without being decoded."""

    def __init__(self, dotted: str) -> None:
        self._path = dotted.split(".")
        self._steps = [_decoder_of(name) for name in self._path]

    def read(self, body: bytes) -> str:
        """The string or whole number at the path; "" for anything else."""
        raw = msgspec.Raw(bytes(body))
        try:
            for step in self._steps:
                raw = step(raw)
            value = _decode_value(raw) if len(raw) else None
        except MALFORMED:
            value = (
                self._read_non_standard(body) if len(body) <= MAX_NON_STANDARD_BODY_BYTES else None
            )
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        return value if isinstance(value, str) else ""

    def _read_non_standard(self, body: bytes) -> object:
        """For bodies beyond strict JSON that workers accept: NaN, UTF-16, lone surrogates."""
        try:
            value: object = json.loads(body)
        except (ValueError, RecursionError):
            return None
        for name in self._path:
            value = value.get(name) if isinstance(value, dict) else None
        return value


def _decoder_of(name: str) -> Callable[[msgspec.Raw], msgspec.Raw]:
    """A function that returns the raw value of one key of an object; of length 0 if absent."""
    struct = msgspec.defstruct(
        "BodyKey", [("value", msgspec.Raw, _ABSENT)], rename={"value": name}, gc=False
    )
    decode: Callable[[msgspec.Raw], Any] = msgspec.json.Decoder(struct).decode

    def value_of(raw: msgspec.Raw) -> msgspec.Raw:
        value: msgspec.Raw = decode(raw).value if len(raw) else raw
        return value

    return value_of
