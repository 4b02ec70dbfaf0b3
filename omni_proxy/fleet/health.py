"""The health machine of one worker.

    unknown ──rise──> healthy ──fall──> unhealthy ──rise──> healthy    (on_threshold = "unhealthy")
       └─────fall──────┴──fall──> dead ──revive──> unknown              (on_threshold = "dead")

rise: `success_threshold` good probes in a row. fall: `failure_threshold` failures in a row, or
`max_worker_retries` failed requests in a row without a good answer. The first with a failed probe
among them ends in `on_threshold`, all else in `eject`; back from there it owes a trial, one request
at a time. Invariant: dead is left by `revive` only. Source: omni-router.md 9, rules of config.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from omni_proxy.config.schema import Config

LAST_ERROR_CHARS = 512


class Health(StrEnum):
    """The four states of the contract; only `HEALTHY` is routable."""

    UNKNOWN = "unknown"
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What the machine is told by the configuration."""

    rise: int = 2
    fall: int = 3
    on_threshold: Health = Health.UNHEALTHY
    eject: Health = Health.UNHEALTHY
    max_failed_requests: int = 0  # failed requests in a row that eject; 0: only `fall` does
    probe_failures_only: bool = (
        False  # `fall` counts failed probes alone, as sglang-router's health check does
    )


def thresholds_of(config: Config, *, probe_failures_only: bool = False) -> Thresholds:
    eject = config.routing.eject
    return Thresholds(
        rise=config.health.success_threshold,
        fall=config.health.failure_threshold,
        on_threshold=Health(config.health.on_threshold),
        # One that is to be removed is out at once; what takes it out of the registry comes after.
        eject=Health.DEAD if eject == "dead" else Health.UNHEALTHY,
        max_failed_requests=config.routing.max_worker_retries,
        probe_failures_only=probe_failures_only,
    )


class _Hot:
    """What every request looks at, close together as in `fleet.worker`."""

    __slots__ = ("breaker_tripped", "failed_requests")


class HealthMachine(_Hot):
    """State and counters of one worker; every method is one atom."""

    __slots__ = (
        "_run",
        "_trials",
        "consecutive_failures",
        "consecutive_successes",
        "declared_dead",
        "epoch",
        "half_open_id",
        "last_checked_at",
        "last_error",
        "last_status_code",
        "probe_failed",
        "since",
        "state",
    )

    def __init__(self, now: datetime) -> None:
        self.state = Health.UNKNOWN
        self.consecutive_failures = 0
        self.consecutive_successes = 0
        self.last_status_code: int | None = None
        self.last_error: str | None = None
        self.last_checked_at: datetime | None = None
        self.since = now
        self.declared_dead = False  # by a person, not by probes or by the launcher
        self.epoch = 0  # raised by mark_dead and revive: a probe begun before is void
        self.probe_failed = False  # the present run of failures holds a failed probe
        self.failed_requests = 0  # requests without a good answer in between; > 0 on trial
        self.breaker_tripped = False  # ejected: good probes alone don't bring it back whole
        self.half_open_id = 0  # the number of the trial that runs, 0 while none does
        self._trials = 0
        self._run = 0  # failures in a row since it was ejected last: what `fall` is compared with

    def record_probe_success(
        self, thresholds: Thresholds, at: datetime, status: int | None
    ) -> None:
        """Count a good probe (requests never count as successes)."""
        if self.state is Health.DEAD:
            return
        self._note(at, status, None)
        self.consecutive_failures = self._run = 0
        self.probe_failed = False
        self.consecutive_successes += 1
        if self.consecutive_successes >= thresholds.rise:
            self._enter(Health.HEALTHY, at)

    def record_probe_failure(
        self, thresholds: Thresholds, at: datetime, status: int | None, error: str
    ) -> None:
        if self.state is Health.DEAD:
            return
        self._note(at, status, error)
        self.probe_failed = True
        self._count()
        if self._run >= thresholds.fall:
            self._enter(thresholds.on_threshold, at)

    def record_request_failure(
        self,
        thresholds: Thresholds,
        at: datetime,
        status: int | None,
        error: str,
        half_open_id: int = 0,
    ) -> bool:
        """Count a failed request that speaks of the worker's health; whether that ejected it.

        Of a worker that is out, or on trial, it is noted and no more: it began before that. Unless
        it is the trial (`half_open_id` is its number).
        """
        if self.state is Health.DEAD:
            return False
        self._note(at, status, error)
        tried = self.breaker_tripped and half_open_id == self.half_open_id != 0
        if not tried and (self.breaker_tripped or self.state is Health.UNHEALTHY):
            return False
        self._count(in_run=not thresholds.probe_failures_only)
        self.failed_requests += 1
        whole = not thresholds.probe_failures_only and self._run >= thresholds.fall
        if whole and self.probe_failed and not tried:
            self._enter(thresholds.on_threshold, at)
            return False
        enough = whole or 0 < thresholds.max_failed_requests <= self.failed_requests
        if tried or enough:
            self._run = 0
            self.breaker_tripped = True
            self._enter(thresholds.eject, at)
            return True
        return False

    def record_request_success(self, half_open_id: int) -> bool:
        """A request had a good answer; `half_open_id` is its number if it was one. True: fully in now."""
        if self.state is not Health.HEALTHY:
            return False
        if self.breaker_tripped:
            if not half_open_id or half_open_id != self.half_open_id:
                return False  # begun before it was ejected: that says nothing
            self.breaker_tripped = False
            self.half_open_id = self.failed_requests = 0
            return True
        self.failed_requests = 0
        if not self.probe_failed:
            self.consecutive_failures = self._run = 0
        return False

    def begin_half_open(self) -> int:
        """One request goes to it, and until that one is over no other; its number."""
        self._trials += 1
        self.half_open_id = self._trials
        return self.half_open_id

    def end_half_open(self, half_open_id: int) -> bool:
        """Over without a verdict: the next request is another trial. False if it is settled."""
        if half_open_id != self.half_open_id:
            return False
        self.half_open_id = 0
        return True

    def process_exited(self, at: datetime, error: str) -> None:
        """Its process has ended: no threshold is needed to know that."""
        if self.state is Health.DEAD:
            return
        self._note(at, None, error)
        self._count()
        self.epoch += 1
        self.failed_requests = 0
        self.breaker_tripped = False  # what comes back is another process
        self._enter(Health.UNHEALTHY, at)

    def mark_dead(self, at: datetime, *, declared: bool = False) -> None:
        """`declared`: a person said so, and only a person takes it back."""
        self.epoch += 1
        self.declared_dead = self.declared_dead or declared
        self._enter(Health.DEAD, at)

    def revive(self, at: datetime) -> None:
        """Forget the past; only a dead worker changes state (it becomes unknown)."""
        self.epoch += 1
        self.consecutive_failures = self._run = 0
        self.consecutive_successes = 0
        self.failed_requests = 0
        self.probe_failed = False
        self.breaker_tripped = False
        self.half_open_id = 0
        self.declared_dead = False
        if self.state is Health.DEAD:
            self._enter(Health.UNKNOWN, at)

    @property
    def half_open_count(self) -> int:
        """How many it has been given so far."""
        return self._trials

    @property
    def is_half_open(self) -> bool:
        return self.breaker_tripped and self.state is Health.HEALTHY

    def _count(self, *, in_run: bool = True) -> None:
        self.consecutive_successes = 0
        self.consecutive_failures += 1
        self._run += in_run

    def _note(self, at: datetime, status: int | None, error: str | None) -> None:
        self.last_checked_at = at
        self.last_status_code = status
        self.last_error = error[:LAST_ERROR_CHARS] if error is not None else None

    def _enter(self, state: Health, at: datetime) -> None:
        if state is not Health.HEALTHY:
            self.half_open_id = 0
        if state is not self.state:
            self.state = state
            self.since = at
