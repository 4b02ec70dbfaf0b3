"""Statistics of all processes together, for the admin API: sums, and a row for each process.

Invariant: counters never decrease: those of a process are kept after it has exited. With one
process the values are those of its data plane. Reports of processes are at most a second old;
requests in flight are read from the shared counters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from omni_proxy.admin_ops.abort_requests import AbortFindings, AbortTarget
from omni_proxy.dataplane.accept.listeners import ServedAt
from omni_proxy.dataplane.status import COUNTERS, MAX_CONNECTIONS
from omni_proxy.fleet.voice_registry import VoiceRegistry
from omni_proxy.fleet.worker import Worker
from omni_proxy.multiprocess.ipc.messages import ProcessStats
from omni_proxy.multiprocess.process_manager import ProcessManager
from omni_proxy.multiprocess.process_slot import ProcessSlot
from omni_proxy.routing.disaggregation.pool_policies import PoolPolicies
from omni_proxy.routing.inspect.affinity_key import AffinityKeyReader
from omni_proxy.routing.inspect.requirements import Requirements
from omni_proxy.routing.model_aliases import ModelAliases, TargetChecks
from omni_proxy.routing.pinning import ResponseOwners
from omni_proxy.routing.policies import Policy
from omni_proxy.shared.watchdog import Watchdog

# For a process that has not reported yet.
NO_STATS: Final = ProcessStats(
    counts=dict.fromkeys((*COUNTERS, "rejected", "stalls"), 0),
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
RATIOS: Final = ("matched_ratio", "sessions")  # means, not sums


class AggregateView:
    """The data plane of all processes, see `admin_api.services.DataPlaneView`."""

    def __init__(self, manager: ProcessManager, watchdog: Watchdog) -> None:
        self._manager = manager
        self._watchdog = watchdog
        self._dataplane = manager.dataplane

    @property
    def policy(self) -> Policy:
        policy = self._dataplane.policy
        return AggregatePolicy(policy, self._all_stats()) if self._manager.slots else policy

    @property
    def pool_policies(self) -> PoolPolicies:
        """The pool policies of the main process."""
        return self._dataplane.balancer.pool_policies

    @property
    def needs_affinity_key(self) -> bool:
        return self._dataplane.balancer.needs_affinity_key

    @property
    def affinity_keys(self) -> AffinityKeyReader:
        return self._dataplane.balancer.affinity_keys

    @property
    def draining(self) -> bool:
        return self._dataplane.draining

    @property
    def voices(self) -> VoiceRegistry:
        return self._dataplane.voices

    @property
    def response_owners(self) -> ResponseOwners:
        return self._dataplane.balancer.response_owners

    @property
    def aliases(self) -> ModelAliases | None:
        return self._dataplane.balancer.aliases

    @property
    def target_checks(self) -> TargetChecks:
        return self._dataplane.balancer

    @property
    def load(self) -> tuple[int, int]:
        """The numbers of requests in flight and waiting."""
        if not self._manager.slots:
            return self._dataplane.in_flight, self._dataplane.queue.waiting
        return self._manager.worker_ids.in_flight, self.admission()["waiting"]

    async def abort(self, target: AbortTarget) -> AbortFindings:
        return await self._manager.abort(target)

    def finish_session(self, key: str) -> bool:
        return self._dataplane.finish_session(key)

    def session_count(self, worker: Worker) -> int:
        return self._dataplane.session_count(worker)

    def addresses(self) -> list[str]:
        return self._dataplane.addresses()

    def served_at(self) -> ServedAt:
        return self._dataplane.served_at()

    def admission(self) -> dict[str, int]:
        totals, worker_ids = self._dataplane.admission(), self._manager.worker_ids
        all_stats = self._all_stats()
        if not self._manager.slots and not self._manager.exited_counts:
            return totals
        if self._manager.slots:
            totals["inflight"] = worker_ids.in_flight
        totals["peak_inflight"] = max(totals["peak_inflight"], worker_ids.peak_in_flight)
        totals["rejected_total"] += self._sum_of("rejected")
        totals["waiting"] += sum(stats.waiting for stats in all_stats)
        totals["peak_waiting"] = max(totals["peak_waiting"], totals["waiting"])
        totals["held_bytes"] += sum(stats.held_bytes for stats in all_stats)
        return totals

    def counts(self) -> dict[str, object]:
        counts = self._dataplane.counts()
        all_stats = self._all_stats()
        if not all_stats and not self._manager.exited_counts:
            return counts
        for name in COUNTERS:
            counts[name] = int(str(counts[name])) + self._sum_of(name)
        counts["failed_proxy_introductions"] = counts["failed_proxy_headers"]  # the old name
        ended = (
            Counter(self._dataplane.services.totals.ended_by_outcome())
            + self._manager.exited_outcomes
        )
        for stats in all_stats:
            ended.update(stats.ended)
        counts["ended"] = dict(ended)
        counts["connections"] = self._dataplane.loop.connections + sum(
            s.connections for s in all_stats
        )
        return counts

    def status(self) -> dict[str, object]:
        """The summed status of all data planes; `processes` has a row for each process."""
        status = self._dataplane.status()
        all_stats = self._all_stats()
        status.update(self.counts())
        status.update(self.admission())
        totals: Any = status
        phases = Counter(totals["phases"])
        oldest = list(totals["oldest_connections"])
        for stats in all_stats:
            phases.update(stats.phases)
            oldest += stats.oldest
        oldest.sort(key=lambda row: -row["age_secs"])
        status["phases"] = dict(phases)
        status["oldest_connections"] = oldest[:MAX_CONNECTIONS]
        status["policy"] = {"name": self.policy.name, **self.policy.stats()}
        status["pool_policies"] = self.pool_stats()
        status["processes"] = status["doors"] = self.rows()  # "doors": the old name
        return status

    def pool_stats(self) -> dict[str, Mapping[str, object]]:
        """The summed statistics of the prefill and the decode pool's policies, by role."""
        tables = [self.pool_policies.stats(), *(stats.pool_policies for stats in self._all_stats())]
        roles = dict.fromkeys(role for table in tables for role in table)
        return {role: sum_stats(table[role] for table in tables if role in table) for role in roles}

    def watchdog(self) -> dict[str, object]:
        """Stalls of all processes, exited ones included; the other values are this process's."""
        stalls = self._watchdog.stalls + self._sum_of("stalls")
        return {**self._watchdog.status(), "stalls": stalls}

    def rows(self) -> list[dict[str, object]]:
        """One row per data-plane process; none if the main process serves alone."""
        return [self._row(slot) for slot in self._manager.slots.values()]

    def _row(self, slot: ProcessSlot) -> dict[str, object]:
        handle = slot.handle
        stats = (handle.stats if handle is not None else None) or NO_STATS
        return {
            "process": slot.index,
            "door": slot.index,  # the old name
            "pid": handle.pid if handle is not None else None,
            "state": slot.state,
            "restarts": slot.restarts,
            "last_error": slot.last_error or None,
            "revision": handle.revision if handle is not None else 0,
            "in_flight": self._manager.worker_ids.in_flight_at(slot.index),
            "connections": stats.connections,
            "waiting": stats.waiting,
            **stats.counts,
            "ended": stats.ended,
            "loop_lag_ms": stats.lag_ms,
            "longest_turn_ms": stats.longest_turn_ms,
            "policy": stats.policy,
        }

    def _all_stats(self) -> list[ProcessStats]:
        return [handle.stats for handle in self._manager.handles if handle.stats is not None]

    def _sum_of(self, name: str) -> int:
        return self._manager.exited_counts[name] + sum(
            stats.counts[name] for stats in self._all_stats()
        )


class AggregatePolicy(Policy):
    """The main process's policy, with the statistics of all processes."""

    __slots__ = ("_policy", "_stats", "name", "needs_affinity_key")

    def __init__(self, policy: Policy, all_stats: Sequence[ProcessStats]) -> None:
        self._policy = policy
        self._stats = all_stats
        self.name = policy.name
        self.needs_affinity_key = policy.needs_affinity_key

    def pick(self, candidates: Sequence[Worker], need: Requirements) -> Worker:
        return self._policy.pick(candidates, need)

    def preview_pick(self, candidates: Sequence[Worker], need: Requirements) -> tuple[Worker, str]:
        return self._policy.preview_pick(candidates, need)

    def explain_pick(self, candidates: Sequence[Worker], need: Requirements) -> dict[str, object]:
        return self._policy.explain_pick(candidates, need)

    def stats(self) -> dict[str, object]:
        return sum_stats([self._policy.stats(), *(stats.policy for stats in self._stats)])


def sum_stats(tables: Iterable[Mapping[str, Any]]) -> dict[str, object]:
    """Sums of numbers, also in nested tables; for a ratio the mean of the tables that have it."""
    status: dict[str, Any] = {}
    ratios: dict[str, list[float]] = {}
    for table in tables:
        for name, value in table.items():
            if name in RATIOS:
                ratios.setdefault(name, []).extend([value] if value is not None else [])
            elif isinstance(value, Mapping):
                before = status.get(name)
                status[name] = sum_stats([before if isinstance(before, Mapping) else {}, value])
            elif isinstance(value, int | float) and isinstance(status.get(name, 0), int | float):
                status[name] = status.get(name, 0) + value
            else:  # a policy of another package may report values without a sum
                status[name] = value
    means = {
        name: round(sum(values) / len(values), 4) if values else None
        for name, values in ratios.items()
    }
    return status | means
