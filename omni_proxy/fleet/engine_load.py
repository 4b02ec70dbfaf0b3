"""Loads as engines report them, and the veto that excludes overloaded workers from picks.

A worker, or a data-parallel rank, whose engine reported a value at or above a bound gets no new
request while another candidate is below the bounds. Invariants: `below_bounds` never returns an
empty list for a non-empty one; a report older than `max_age_secs` is ignored; without bounds no
worker is overloaded. Policies still compare requests in flight: a report is only a veto. Must not
read a clock: `now` is set to the clock of the caller that picks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from omni_proxy.config.schema import RoutingConfig
from omni_proxy.fleet.worker import Worker
from omni_proxy.wire.load_report import EngineLoad, LoadReport, total_load


class LoadBounds(NamedTuple):
    """Bounds on reported loads; 0: no bound."""

    waiting: int = 0
    kv_usage: float = 0.0
    max_age_secs: float = 5.0

    def __bool__(self) -> bool:
        return bool(self.waiting or self.kv_usage)

    def are_reached(self, report: LoadReport) -> bool:
        waiting, usage = report
        return bool(
            (self.waiting and waiting is not None and waiting >= self.waiting)
            or (self.kv_usage and usage is not None and usage >= self.kv_usage)
        )

    def reason_against(self, report: LoadReport) -> str:
        """Why the engine counts as overloaded; "" if it does not."""
        waiting, usage = report
        if self.waiting and waiting is not None and waiting >= self.waiting:
            return f"{waiting:g} requests wait in its engine (limit: {self.waiting})"
        if self.kv_usage and usage is not None and usage >= self.kv_usage:
            return f"{usage:.0%} of its KV cache is in use (limit: {self.kv_usage:.0%})"
        return ""


def bounds_of(routing: RoutingConfig) -> LoadBounds:
    return LoadBounds(
        routing.overload_waiting, routing.overload_kv_usage, routing.load_max_age_secs
    )


def _never() -> float:
    return -math.inf


class EngineLoads:
    """`bounds`: change them by `configure` only. `overloaded`: empty while no target is overloaded,
    so that a pick only has to check for an empty dict."""

    __slots__ = ("_watchers", "bounds", "now", "overloaded")

    def __init__(self) -> None:
        self.bounds = LoadBounds()
        self.now: Callable[[], float] = _never
        self.overloaded: dict[Worker, float] = {}  # worker or rank -> time at which it expires
        self._watchers: list[Callable[[Worker], None]] = []

    def watch(self, callback: Callable[[Worker], None]) -> None:
        """`callback(target)` after each report of an engine to this process."""
        self._watchers.append(callback)

    def configure(self, bounds: LoadBounds, targets: Sequence[Worker]) -> None:
        """Set the bounds, and compare the last reports of `targets`, all workers and ranks."""
        self.bounds = bounds
        self.overloaded.clear()
        for target in targets:
            if target.engine_load is not None:
                self._judge(target, target.engine_load)

    def report(self, target: Worker, load: EngineLoad) -> None:
        """Record what the engine of a worker or a rank reported, and notify the watchers."""
        if self.take(target, load):
            for callback in self._watchers:
                callback(target)

    def take(self, target: Worker, load: EngineLoad) -> bool:
        """Record a report without notifying, also one received by another process. False if it is
        older than the last one."""
        before = target.engine_load
        if before is not None and before.at > load.at:
            return False
        target.engine_load = load
        self._judge(target, load)
        return True

    def report_engines(
        self, worker: Worker, loads: Mapping[int, LoadReport], reported_at: float
    ) -> None:
        """Record the reports of all engines behind the worker's URL, by rank index. The worker
        itself gets the sum of the queue lengths and the mean of the KV cache usage."""
        for index, rank in enumerate(worker.dp_ranks):
            if index in loads:
                self.report(rank, EngineLoad(loads[index], reported_at))
        self.report(worker, EngineLoad(total_load(loads), reported_at))

    def below_bounds(self, candidates: Sequence[Worker]) -> Sequence[Worker]:
        """The candidates that are not overloaded; all candidates if every one is."""
        now = self.now()
        for target in [worker for worker, until in self.overloaded.items() if until < now]:
            del self.overloaded[target]
        if not self.overloaded:
            return candidates
        return [
            candidate for candidate in candidates if not self.is_overloaded(candidate)
        ] or candidates

    def is_overloaded(self, target: Worker) -> bool:
        """Uses the target's own report. A rank without one uses its worker's; a worker with ranks
        is overloaded if all of its ranks are."""
        if target.dp_ranks:
            return all(map(self.is_overloaded, target.dp_ranks))
        judged = target if target.engine_load is not None else target.worker
        until = self.overloaded.get(judged)
        return until is not None and until >= self.now()

    def reason(self, target: Worker) -> str:
        """Why it is overloaded, in a few words; "" if it is not."""
        load = target.engine_load
        return (
            self.bounds.reason_against(load.report)
            if load is not None and self.is_overloaded(target)
            else ""
        )

    def reasons(self, eligible: Sequence[Worker]) -> Iterator[tuple[Worker, str]]:
        """The eligible targets that a pick leaves out, each with the reason."""
        below = set(self.below_bounds(eligible))
        for target in eligible:
            load = target.engine_load or target.worker.engine_load
            if target not in below and load is not None:
                yield target, "overloaded: " + self.bounds.reason_against(load.report)

    def is_stale(self, load: EngineLoad) -> bool:
        return load.at < self.now() - self.bounds.max_age_secs

    def _judge(self, target: Worker, load: EngineLoad) -> None:
        if self.bounds.are_reached(load.report):
            self.overloaded[target] = load.at + self.bounds.max_age_secs
        elif self.overloaded:
            self.overloaded.pop(target, None)
