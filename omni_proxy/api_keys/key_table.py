"""The table of API keys: built from the configured sources, looked up by a presented key.

Pure: the environment and the reader of files are arguments. Invariants: results and errors never
contain a key; of two entries with the same key the second is refused, for any sources of the keys.
Only hashes are stored, and each look-up compares with all of them in constant time, so that neither
memory nor timing reveals a key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from hmac import compare_digest
from typing import Final, Generic, TypeVar

from msgspec import structs

from omni_proxy.config.problem import Path, format_path
from omni_proxy.config.tables.keys import KeySource

MAX_KEY_BYTES: Final = 4096  # a longer key would hardly fit into a request head

Entry = TypeVar("Entry", bound=KeySource)
Finding = tuple[Path, str, str]  # path, reason, hint


class UnusableKey(ValueError):
    """A key can't be used; the message is the reason, without the key."""


@dataclass(frozen=True, slots=True)
class KeyReader:
    """`read_file` returns the content of a file and raises OSError."""

    environ: Mapping[str, str]
    read_file: Callable[[str], bytes]

    def sha256_of(self, entry: KeySource) -> str:
        """Raises UnusableKey."""
        if entry.key_sha256:
            return entry.key_sha256
        if entry.key_env:
            value = self.environ.get(entry.key_env)
            if not value:
                raise UnusableKey("names an environment variable that is not set")
            return sha256_of_key(value.encode("utf-8", "surrogateescape"))
        try:
            return sha256_of_key(self.read_file(entry.key_file))
        except OSError as error:
            raise UnusableKey(f"cannot be read: {error.strerror or error}") from None


def sha256_of_key(text: bytes) -> str:
    """The SHA-256, in hex, of a key from a file or pipe, without white space around it.

    Raises UnusableKey.
    """
    key = text.strip()
    if not key:
        raise UnusableKey("contains no key")
    if len(key) > MAX_KEY_BYTES:
        raise UnusableKey(f"contains more than {MAX_KEY_BYTES} bytes")
    if not all(0x21 <= byte <= 0x7E for byte in key):
        raise UnusableKey("contains more than one key, or characters not allowed in headers")
    return sha256(key).hexdigest()


def resolve(
    entries: Sequence[Entry], path: Path, reader: KeyReader
) -> tuple[tuple[Entry, ...], list[Finding]]:
    """The entries with `key_sha256` instead of their source, and findings about those that are left
    out. `path`: of the list in the configuration."""
    resolved: list[Entry] = []
    findings: list[Finding] = []
    holders: dict[str, Path] = {}
    for index, entry in enumerate(entries):
        place: Path = (*path, index)
        try:
            digest = reader.sha256_of(entry)
        except UnusableKey as error:
            findings.append(((*place, entry.source), str(error), ""))
            continue
        if digest in holders:
            hint = f"give each its own: {format_path(holders[digest])} has this one"
            findings.append(((*place, entry.source), "has the same key as another entry", hint))
            continue
        holders[digest] = place
        resolved.append(structs.replace(entry, key_env="", key_file="", key_sha256=digest))
    return tuple(resolved), findings


class KeyTable(Generic[Entry]):
    """`entries` must be resolved: each has its `key_sha256`."""

    __slots__ = ("_by_digest", "entries")

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.entries = tuple(entries)
        self._by_digest = [(bytes.fromhex(entry.key_sha256), entry) for entry in self.entries]

    def __bool__(self) -> bool:
        return bool(self.entries)

    def find(self, key: bytes) -> Entry | None:
        """The entry of a presented key, None for a wrong key."""
        digest = sha256(key).digest()
        matching_entry = None
        for known_digest, entry in self._by_digest:
            if compare_digest(known_digest, digest):
                matching_entry = entry
        return matching_entry


def bearer_token(authorization: bytes) -> bytes:
    """The token in an Authorization field's value, b"" for another scheme (RFC 6750 2.1)."""
    scheme, _, token = authorization.strip().partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


def presented_key(authorization: bytes, x_api_key: bytes) -> bytes:
    """The key in the values of these two fields, b"" for none. A bearer token takes precedence;
    clients of Anthropic's API send X-Api-Key."""
    return bearer_token(authorization) or x_api_key.strip()
