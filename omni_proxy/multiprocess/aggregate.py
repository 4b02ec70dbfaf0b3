"""All doors as one, for the front: sums, and a row for each process.

Invariant: counters never go back: what a door counted stays counted when it ends. With one process
everything is as its door says. What doors tell of themselves is at most a second old; what is in
flight is read from the board.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from omni_proxy.dataplane.dataplane import SHOWN_CONNECTIONS
from omni_proxy.fleet.voices import VoiceRegistry
from omni_proxy.fleet.worker import Worker
from omni_proxy.multiprocess.messages import ProcessStats
from omni_proxy.multiprocess.process_manager import ProcessManager
from omni_proxy.multiprocess.process_slot import ProcessSlot
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.policies import Policy
from omni_proxy.watchdog import Watchdog

COUNTS: Final = ("accepted", "failures", "failed_tls_handshakes", "answers_across_versions")
# Of a door that has told nothing yet.
SILENCE: Final = ProcessStats(
    counts=dict.fromkeys((*COUNTS, "rejected", "stalls"), 0),
    ended={},
    connections=0,
    waiting=0,
    held_bytes=0,
    phases={},
    oldest=[],
    policy={},
    lag_ms=0.0,
    longest_turn_ms=0.0,
)
SHARES: Final = ("matched_ratio", "sessions")  # facts that are no sums


class AggregateView:
    """What `admin_api.services.Door` asks for."""

    def __init__(self, doors: ProcessManager, watchdog: Watchdog) -> None:
        self._doors = doors
        self._watchdog = watchdog
        self._door = doors.door

    @property
    def policy(self) -> Policy:
        policy = self._door.policy
        return AllPolicies(policy, self._stands()) if self._doors.seats else policy

    @property
    def draining(self) -> bool:
        return self._door.draining

    @property
    def voices(self) -> VoiceRegistry:
        return self._door.voices

    @property
    def load(self) -> tuple[int, int]:
        """In flight, and waiting."""
        if not self._doors.seats:
            return self._door.in_flight, self._door.queue.waiting
        return self._doors.roster.in_flight, self.admission()["waiting"]

    def addresses(self) -> list[str]:
        return self._door.addresses()

    def admission(self) -> dict[str, int]:
        own, roster = self._door.admission(), self._doors.roster
        stands = self._stands()
        if not self._doors.seats and not self._doors.gone:
            return own
        if self._doors.seats:
            own["inflight"] = roster.in_flight
        own["peak_inflight"] = max(own["peak_inflight"], roster.peak_in_flight)
        own["rejected_total"] += self._summed("rejected")
        own["waiting"] += sum(stand.waiting for stand in stands)
        own["peak_waiting"] = max(own["peak_waiting"], own["waiting"])
        own["held_bytes"] += sum(stand.held_bytes for stand in stands)
        return own

    def counts(self) -> dict[str, object]:
        counts = self._door.counts()
        stands = self._stands()
        if not stands and not self._doors.gone:
            return counts
        for name in COUNTS:
            counts[name] = int(str(counts[name])) + self._summed(name)
        ended = Counter(self._door.ended) + self._doors.gone_ended
        for stand in stands:
            ended.update(stand.ended)
        counts["ended"] = dict(ended)
        counts["connections"] = len(self._door.loop.tasks) + sum(s.connections for s in stands)
        return counts

    def status(self) -> dict[str, object]:
        """The door's, summed; `multiprocess` has a row for each process where there are several."""
        told = self._door.status()
        stands = self._stands()
        told.update(self.counts())
        told.update(self.admission())
        own: Any = told
        phases = Counter(own["phases"])
        oldest = list(own["oldest_connections"])
        for stand in stands:
            phases.update(stand.phases)
            oldest += stand.oldest
        oldest.sort(key=lambda row: -row["age_secs"])
        told["phases"] = dict(phases)
        told["oldest_connections"] = oldest[:SHOWN_CONNECTIONS]
        told["policy"] = {"name": self.policy.name, **self.policy.stats()}
        told["doors"] = self.rows()
        return told

    def watchdog(self) -> dict[str, object]:
        """Stalls of all processes, also of those that have ended; the rest is of this one alone."""
        stalls = self._watchdog.stalls + self._summed("stalls")
        return {**self._watchdog.status(), "stalls": stalls}

    def rows(self) -> list[dict[str, object]]:
        """One for each process; none where there is but this one."""
        return [self._row(seat) for seat in self._doors.seats.values()]

    def _row(self, seat: ProcessSlot) -> dict[str, object]:
        link = seat.link
        stand = (link.stand if link is not None else None) or SILENCE
        return {
            "door": seat.index,
            "pid": link.pid if link is not None else None,
            "state": _state(seat),
            "restarts": seat.restarts,
            "last_error": seat.last_error or None,
            "revision": link.revision if link is not None else 0,
            "in_flight": self._doors.roster.in_flight_at(seat.index),
            "connections": stand.connections,
            "waiting": stand.waiting,
            **stand.counts,
            "ended": stand.ended,
            "loop_lag_ms": stand.lag_ms,
            "longest_turn_ms": stand.longest_turn_ms,
            "policy": stand.policy,
        }

    def _stands(self) -> list[ProcessStats]:
        return [link.stand for link in self._doors.links if link.stand is not None]

    def _summed(self, name: str) -> int:
        return self._doors.gone[name] + sum(stand.counts[name] for stand in self._stands())


class AllPolicies(Policy):
    """Control's own policy for questions, and what all doors say of theirs."""

    __slots__ = ("_policy", "_stands", "name", "needs_affinity_key")

    def __init__(self, policy: Policy, stands: Sequence[ProcessStats]) -> None:
        self._policy = policy
        self._stands = stands
        self.name = policy.name
        self.needs_affinity_key = policy.needs_affinity_key

    def pick(self, candidates: Sequence[Worker], need: Requirements) -> Worker:
        return self._policy.pick(candidates, need)

    def preview_pick(self, candidates: Sequence[Worker], need: Requirements) -> tuple[Worker, str]:
        return self._policy.preview_pick(candidates, need)

    def explain_pick(self, candidates: Sequence[Worker], need: Requirements) -> dict[str, object]:
        return self._policy.explain_pick(candidates, need)

    def stats(self) -> dict[str, object]:
        return summed([self._policy.stats(), *(stand.policy for stand in self._stands)])


def summed(many: Iterable[Mapping[str, Any]]) -> dict[str, object]:
    """Numbers and tables of numbers; of a share, the mean of those who know it."""
    told: dict[str, Any] = {}
    shares: dict[str, list[float]] = {}
    for facts in many:
        for name, value in facts.items():
            if name in SHARES:
                shares.setdefault(name, []).extend([value] if value is not None else [])
            elif isinstance(value, Mapping):
                told[name] = summed([told.get(name, {}), value])
            else:
                told[name] = told.get(name, 0) + value
    means = {name: round(sum(of) / len(of), 4) if of else None for name, of in shares.items()}
    return told | means


def _state(seat: ProcessSlot) -> str:
    link = seat.link
    if link is None or link.over:
        return "backing_off"
    if seat.retiring:
        return "draining"
    if not link.ready:
        return "starting"
    return "serving" if link.listening else "ready"
