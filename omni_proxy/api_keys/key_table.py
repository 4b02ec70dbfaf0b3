"""Look-up of the entry of a presented key.

Invariant: only hashes are stored, and each look-up compares with all of them in constant time, so
that neither memory nor timing reveals a key.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from hmac import compare_digest
from typing import Generic, TypeVar

from omni_proxy.config.api_keys import KeySource

Entry = TypeVar("Entry", bound=KeySource)


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
        found = None
        for known, entry in self._by_digest:
            if compare_digest(known, digest):
                found = entry
        return found


def bearer_token(authorization: bytes) -> bytes:
    """The token in an Authorization field's value, b"" for another scheme (RFC 6750 2.1)."""
    scheme, _, token = authorization.strip().partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


def presented_key(authorization: bytes, x_api_key: bytes) -> bytes:
    """The key in the values of these two fields, b"" for none. A bearer token takes precedence;
    clients of Anthropic's API send X-Api-Key."""
    return bearer_token(authorization) or x_api_key.strip()
