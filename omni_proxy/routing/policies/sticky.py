"""Sticky sessions above any policy: an affinity key stays with its worker while that is a
candidate.

Invariant: at most `sticky_max` keys are kept, least recently used evicted first; a key that was
idle for `sticky_idle_secs` expires (0: never). A flushed or restarted worker keeps its sessions; a
worker that left the fleet is no candidate, which ends them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from omni_proxy.config.schema import RoutingConfig
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.policies.policy import Policy

DROPPED_PER_SLICE = 1000


class Sessions(Protocol):
    """Where the keys are remembered. `now` is monotonic seconds."""

    def tune(self, most: int, idle_secs: float) -> None:
        """`sticky_max` and `sticky_idle_secs`."""

    def find(self, key: str, now: float) -> Worker | None: ...
    def keep(self, key: str, worker: Worker, now: float) -> None: ...
    def maintain(self, now: float) -> None: ...
    def __len__(self) -> int: ...


class OwnSessions:
    """In this process's memory."""

    __slots__ = ("_idle_secs", "_max", "_sessions")

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, tuple[Worker, float]] = OrderedDict()
        self._max = 1
        self._idle_secs = 0.0

    def tune(self, most: int, idle_secs: float) -> None:
        self._max, self._idle_secs = most, idle_secs

    def find(self, key: str, now: float) -> Worker | None:
        session = self._sessions.get(key)
        if session is None or self._idle(session[1], now):
            return None
        return session[0]

    def keep(self, key: str, worker: Worker, now: float) -> None:
        self._sessions[key] = (worker, now)
        self._sessions.move_to_end(key)
        while len(self._sessions) > self._max and len(self._sessions) > 1:
            self._sessions.popitem(last=False)

    def maintain(self, now: float) -> None:
        for _ in range(DROPPED_PER_SLICE):
            oldest = next(iter(self._sessions.values()), None)
            full = len(self._sessions) > self._max
            if oldest is None or (not full and not self._idle(oldest[1], now)):
                break
            self._sessions.popitem(last=False)

    def __len__(self) -> int:
        return len(self._sessions)

    def _idle(self, used: float, now: float) -> bool:
        return self._idle_secs > 0 and now - used > self._idle_secs


class Sticky(Policy):
    """Goes by the name of the policy below it."""

    __slots__ = ("_hits", "_misses", "_now", "_sessions", "inner", "name")
    needs_affinity_key = True

    def __init__(self, inner: Policy, routing: RoutingConfig, now: float) -> None:
        self.inner = inner
        self.name = inner.name
        self._now = now
        self._sessions: Sessions = OwnSessions()
        self._hits = self._misses = 0
        self._take(routing)

    def _take(self, routing: RoutingConfig) -> None:
        self._sessions.tune(routing.sticky_max, routing.sticky_idle_secs)

    def use_sessions(self, sessions: Sessions, routing: RoutingConfig) -> None:
        """From now on; those that are known already stay behind."""
        self._sessions = sessions
        self._take(routing)

    def reconfigure(self, routing: RoutingConfig) -> bool:
        self._take(routing)
        return self.inner.reconfigure(routing)

    def replace_inner(self, inner: Policy) -> None:
        """The sessions outlive the policy that began them."""
        self.inner = inner
        self.name = inner.name

    def pick(self, candidates: Sequence[Worker], need: Requirements) -> Worker:
        key = need.affinity_key
        if not key:
            return self.inner.pick(candidates, need)
        worker = self._kept(candidates, key)
        if worker is not None:
            self._hits += 1
            self.inner.record_pick(worker, need)
        else:
            self._misses += 1
            worker = self.inner.pick(candidates, need)
        self._sessions.keep(key, worker, self._now)
        return worker

    def preview_pick(self, candidates: Sequence[Worker], need: Requirements) -> tuple[Worker, str]:
        worker = self._kept(candidates, need.affinity_key) if need.affinity_key else None
        if worker is not None:
            return worker, "its session stays there"
        chosen, why = self.inner.preview_pick(candidates, need)
        return chosen, f"{'a new session' if need.affinity_key else 'without a session key'}: {why}"

    def explain_pick(self, candidates: Sequence[Worker], need: Requirements) -> dict[str, object]:
        return self.inner.explain_pick(candidates, need)

    def record_pick(self, worker: Worker, need: Requirements) -> None:
        self.inner.record_pick(worker, need)

    def forget_worker(self, worker: Worker) -> None:
        self.inner.forget_worker(worker)

    def maintain(self, now: float) -> None:
        self._now = now
        self.inner.maintain(now)
        self._sessions.maintain(now)

    def stats(self) -> dict[str, object]:
        sessions = {"sessions": len(self._sessions), "kept": self._hits, "begun": self._misses}
        return {**self.inner.stats(), "sticky": sessions}

    def _kept(self, candidates: Sequence[Worker], key: str) -> Worker | None:
        worker = self._sessions.find(key, self._now)
        return worker if worker in candidates else None
