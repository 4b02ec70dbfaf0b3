"""Sessions on top of any policy: a key stays with its worker while that one can take it.

Invariant: at most `sticky_max` keys are remembered, those used last; one that was idle for
`sticky_idle_secs` is forgotten (0: none is). A worker that was flushed or restarted keeps its
sessions: staying is what was asked for. One that is gone is no candidate any more, which ends them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from omni_proxy.config.schema import Routing
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.inspect import Need
from omni_proxy.routing.policies.contract import Policy

DROPPED_PER_SLICE = 1000


class Sticky(Policy):
    """Goes by the name of the policy below it."""

    __slots__ = ("_hits", "_idle_secs", "_max", "_misses", "_now", "_sessions", "inner", "name")
    wants_key = True

    def __init__(self, inner: Policy, routing: Routing, now: float) -> None:
        self.inner = inner
        self.name = inner.name
        self._now = now
        self._sessions: OrderedDict[str, tuple[Worker, float]] = OrderedDict()
        self._hits = self._misses = 0
        self._take(routing)

    def _take(self, routing: Routing) -> None:
        self._idle_secs = routing.sticky_idle_secs
        self._max = routing.sticky_max

    def tune(self, routing: Routing) -> bool:
        return self.adopt(routing) and routing.sticky_sessions

    def adopt(self, routing: Routing) -> bool:
        self._take(routing)
        return self.inner.adopt(routing)

    def move_onto(self, inner: Policy) -> None:
        """The sessions outlive the policy that began them."""
        self.inner = inner
        self.name = inner.name

    def pick(self, candidates: Sequence[Worker], need: Need) -> Worker:
        key = need.key
        if not key:
            return self.inner.pick(candidates, need)
        worker = self._kept(candidates, key)
        if worker is not None:
            self._hits += 1
            self.inner.took(worker, need)
        else:
            self._misses += 1
            worker = self.inner.pick(candidates, need)
        self._sessions[key] = (worker, self._now)
        self._sessions.move_to_end(key)
        while len(self._sessions) > self._max and len(self._sessions) > 1:
            self._sessions.popitem(last=False)
        return worker

    def preview(self, candidates: Sequence[Worker], need: Need) -> tuple[Worker, str]:
        worker = self._kept(candidates, need.key) if need.key else None
        if worker is not None:
            return worker, "its session stays there"
        chosen, why = self.inner.preview(candidates, need)
        return chosen, f"{'a new session' if need.key else 'without a session key'}: {why}"

    def details(self, candidates: Sequence[Worker], need: Need) -> dict[str, object]:
        return self.inner.details(candidates, need)

    def took(self, worker: Worker, need: Need) -> None:
        self.inner.took(worker, need)

    def forget(self, worker: Worker) -> None:
        self.inner.forget(worker)

    def tend(self, now: float) -> None:
        self._now = now
        self.inner.tend(now)
        for _ in range(DROPPED_PER_SLICE):
            oldest = next(iter(self._sessions.values()), None)
            if oldest is None or (not self._idle(oldest[1]) and len(self._sessions) <= self._max):
                break
            self._sessions.popitem(last=False)

    def facts(self) -> dict[str, object]:
        sessions = {"sessions": len(self._sessions), "kept": self._hits, "begun": self._misses}
        return {**self.inner.facts(), "sticky": sessions}

    def _idle(self, used: float) -> bool:
        return self._idle_secs > 0 and self._now - used > self._idle_secs

    def _kept(self, candidates: Sequence[Worker], key: str) -> Worker | None:
        session = self._sessions.get(key)
        if session is None or self._idle(session[1]) or session[0] not in candidates:
            return None
        return session[0]
