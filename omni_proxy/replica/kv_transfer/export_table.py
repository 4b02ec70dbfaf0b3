"""The KVs that a prefill replica keeps until decode fetches them.

Invariant: at most `max_bytes` are in the table, and each KV at most for `lease_secs`. A KV can be
claimed only once, by its key. Its memory is freed when it was fetched, its request is aborted, its
lease ends, or the weights change. Thread-safe.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import Tensor

    from omni_proxy.replica.kv_transfer.wire import Identity
    from omni_proxy.replica.models.kv import SequenceKV

REMEMBERED: Final = 4096  # removed keys that are kept with their reason, for error messages
UNKNOWN = "the key is unknown: this replica never had the KV, or was restarted"


class ClaimError(Exception):
    """There is no KV for this key; the message is the reason."""


@dataclass(frozen=True, slots=True, eq=False)
class Export:
    """The KV of one prompt of `tokens` tokens, and the logits after its last token.

    `prompt` is the digest of the tokens; `identity` is that of the model that computed the KV.
    """

    key: str
    request_id: str
    prompt: str
    tokens: int
    cached_tokens: int
    identity: Identity
    kv: SequenceKV
    logits: Tensor

    @property
    def nbytes(self) -> int:
        return self.kv.nbytes + self.logits.nbytes


@dataclass(slots=True, eq=False)
class _Entry:
    export: Export
    ends_at: float
    claimed: bool = False


class ExportTable:
    """The exported KVs by key, and the reasons of removed keys. `clock` is in seconds."""

    def __init__(self, max_bytes: int, lease_secs: float, clock: Callable[[], float]) -> None:
        self._max_bytes = max_bytes
        self._lease_secs = lease_secs
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._gone: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    @property
    def nbytes(self) -> int:
        with self._lock:
            return self._held()

    def keep(self, export: Export) -> bool:
        """Keep the KV until its lease ends; False if there is no room or the key is in use."""
        with self._lock:
            self._expire()
            if export.key in self._entries or self._held() + export.nbytes > self._max_bytes:
                return False
            self._gone.pop(export.key, None)
            self._entries[export.key] = _Entry(export, self._clock() + self._lease_secs)
            return True

    def claim(self, key: str) -> Export:
        """Claim the KV for one reader, which must call `release`. Raises ClaimError."""
        with self._lock:
            self._expire()
            entry = self._entries.get(key)
            if entry is None:
                raise ClaimError(self._gone.get(key, UNKNOWN))
            if entry.claimed:
                raise ClaimError("another decode replica is fetching it")
            entry.claimed = True
            return entry.export

    def gone(self, key: str) -> str:
        """The reason why the KV for this key was removed; "" if there never was one."""
        return self._gone.get(key, "")

    def release(self, key: str, reason: str = "it has been fetched already") -> None:
        """Free the KV; later claims of its key fail with the reason."""
        with self._lock:
            self._drop(key, reason)

    def drop(self, wanted: Callable[[Export], bool], reason: str) -> int:
        """Free the KVs that match `wanted`, even while they are read; return their number."""
        with self._lock:
            keys = [key for key, entry in self._entries.items() if wanted(entry.export)]
            for key in keys:
                self._drop(key, reason)
            return len(keys)

    def expire(self) -> float | None:
        """Free KVs whose lease has ended; return the seconds until the next lease ends."""
        with self._lock:
            self._expire()
            ends = [entry.ends_at for entry in self._entries.values() if not entry.claimed]
            return max(0.0, min(ends) - self._clock()) if ends else None

    def _expire(self) -> None:
        now = self._clock()
        for key, entry in list(self._entries.items()):
            if not entry.claimed and entry.ends_at <= now:
                self._drop(key, f"it was not fetched within {self._lease_secs:g} s")

    def _held(self) -> int:
        return sum(entry.export.nbytes for entry in self._entries.values())

    def _drop(self, key: str, reason: str) -> None:
        if self._entries.pop(key, None) is not None:
            self._gone[key] = reason
            while len(self._gone) > REMEMBERED:
                self._gone.popitem(last=False)
