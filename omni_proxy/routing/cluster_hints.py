"""Hints between the proxies of a cluster, for the policies of one process: received and to publish.

Prompts: hints contain the workers to which other proxies sent a prompt's prefixes. Sessions:
placements made here; received ones go directly into the table of sessions. Invariant: without
`[cluster]`, or without `prefixes` and `sessions` in `share`, there are no notes and no hints. A
hint only makes a candidate more likely. Pure: `cluster_member.shared_hints` publishes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final

from omni_proxy.cluster.messages import target_key
from omni_proxy.cluster.prefix_hashes import (
    PrefixHints,
    PrefixNotes,
    beginnings,
    count_beginnings,
    length_of,
)
from omni_proxy.cluster.session_places import SessionNotes
from omni_proxy.config.schema import Config
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker

# Of prompts that their worker already has in full, one in this many is noted again, because other
# proxies drop hints that are not repeated.
REPEAT_ONE_IN: Final = 16


class ClusterHints:
    """`now()` is monotonic seconds."""

    def __init__(self, fleet: Fleet, now: Callable[[], float]) -> None:
        self.shares_prefixes = False
        self.prefixes = PrefixHints()
        self.prefix_notes = PrefixNotes()
        self.session_notes = SessionNotes()
        self._fleet = fleet
        self._now = now
        self._revision = -1
        self._targets: dict[int, Worker] = {}
        self._last: tuple[bytes, list[int]] = (b"", [])  # cached, as one pick needs it twice
        self._skipped = 0

    def configure(self, config: Config) -> None:
        table = config.cluster
        self.shares_prefixes = table.enabled and "prefixes" in table.share
        self.session_notes.enabled = table.enabled and "sessions" in table.share
        if not self.shares_prefixes:
            self.prefixes.clear()

    @property
    def shares_any(self) -> bool:
        return self.shares_prefixes or self.session_notes.enabled

    def target(self, key: int) -> Worker | None:
        """The worker or rank with this `target_key`."""
        if self._fleet.revision != self._revision:
            self._revision = self._fleet.revision
            self._targets = {target_key(worker.url): worker for worker in self._fleet.targets()}
        return self._targets.get(key)

    def hinted_lengths(
        self, text: bytes, sent_bytes: int, candidates: Collection[Worker]
    ) -> dict[Worker, int]:
        """Bytes of the text that other proxies sent to each candidate, if more than `sent_bytes`:
        the bytes that this proxy sent to one of them."""
        count = count_beginnings(len(text))
        if not self.shares_prefixes or not len(self.prefixes) or sent_bytes >= length_of(count):
            return {}
        lengths = {}
        for key, depth in self.prefixes.depths(self._beginnings(text)).items():
            target = self.target(key) if length_of(depth) > sent_bytes else None
            if target is not None and target in candidates:
                lengths[target] = length_of(depth)
        return lengths

    def note_prompt(self, text: bytes, cached_bytes: int, worker: Worker) -> None:
        """The text is sent to the worker, which already had its first `cached_bytes` bytes."""
        if not self.shares_prefixes:
            return
        if cached_bytes >= length_of(count_beginnings(len(text))):
            self._skipped += 1
            if self._skipped % REPEAT_ONE_IN:
                return
        if hashes := self._beginnings(text):
            self.prefix_notes.note(hashes, target_key(worker.url), self._now())

    def forget(self, worker: Worker) -> None:
        """The worker's cache is empty: drop its hints and notes."""
        if self.shares_prefixes:
            key = target_key(worker.url)
            self.prefixes.forget(key)
            self.prefix_notes.forget(key)

    def take_notes(self, limit: int) -> tuple[dict[int, bytes], dict[bytes, int]]:
        """Packed hashes by target, and targets by session digest: at most `limit` of each."""
        return self.prefix_notes.take(limit), self.session_notes.take(limit)

    def add_notes(self, prefixes: dict[int, bytes], sessions: Mapping[bytes, int]) -> None:
        """Add the notes of another process of this proxy."""
        self.prefix_notes.add(prefixes, self._now())
        for digest, target in sessions.items():
            self.session_notes.note(digest, target)

    def stats(self) -> dict[str, int]:
        """JSON-serializable."""
        notes, sessions = self.prefix_notes, self.session_notes
        return {
            "prefixes": len(self.prefixes),
            "unpublished": notes.pending + sessions.pending,
            "dropped": notes.dropped + sessions.dropped,
        }

    def _beginnings(self, text: bytes) -> list[int]:
        if self._last[0] is not text:
            self._last = (text, beginnings(text))
        return self._last[1]
