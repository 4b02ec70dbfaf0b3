"""The health state machine of one worker.

    unknown ──rise──> healthy ──fall──> unhealthy ──rise──> healthy    (on_threshold = "unhealthy")
       └─────fall──────┴──fall──> dead ──revive──> unknown              (on_threshold = "dead")

rise: `success_threshold` good probes in a row. fall: `failure_threshold` failures in a row, or
`max_worker_retries` failed requests in a row. If the failures include a failed probe, the worker
goes to the state `on_threshold`; if all were requests, to that of `eject`, by the rule and with the
circuit breaker of `outlier_ejection.py`. Invariant: only `revive` leaves dead. Source:
note:omni-router 9, note:config.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from msgspec import Struct

from omni_proxy.config.schema import Config
from omni_proxy.fleet.outlier_ejection import OutlierEjection

LAST_ERROR_CHARS = 512


class Health(StrEnum):
    """The four states of the API; only `HEALTHY` is routable."""

    UNKNOWN = "unknown"
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The configured thresholds of the state machine."""

    rise: int = 2
    fall: int = 3
    on_threshold: Health = Health.UNHEALTHY
    eject: Health = Health.UNHEALTHY
    max_failed_requests: int = 0  # failed requests in a row that eject; 0: no such bound
    probe_failures_only: bool = (
        False  # `fall` counts only failed probes, as sglang-router's health check does
    )


def thresholds_of(config: Config, *, probe_failures_only: bool = False) -> Thresholds:
    eject = config.routing.eject
    return Thresholds(
        rise=config.health.success_threshold,
        fall=config.health.failure_threshold,
        on_threshold=Health(config.health.on_threshold),
        # eject = "remove": unhealthy immediately, `health/outlier_removal.py` removes it later.
        eject=Health.DEAD if eject == "dead" else Health.UNHEALTHY,
        max_failed_requests=config.routing.max_worker_retries,
        probe_failures_only=probe_failures_only,
    )


class HealthRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state of a `HealthMachine` as the next program restores it. Each field has the name of
    its attribute."""

    state: Health = Health.UNKNOWN
    since: datetime | None = None
    consecutive_failures: int = 0
    consecutive_successes: int = 0
    last_status_code: int | None = None
    last_error: str | None = None
    last_checked_at: datetime | None = None
    declared_dead: bool = False
    probe_failed: bool = False
    failed_requests: int = 0
    breaker_tripped: bool = False


class HealthMachine(OutlierEjection):
    """State and counters of one worker; every method is one atomic change."""

    __slots__ = (
        "_exit_error",
        "_failure_run",
        "consecutive_failures",
        "consecutive_successes",
        "declared_dead",
        "epoch",
        "last_checked_at",
        "last_error",
        "last_status_code",
        "probe_failed",
        "since",
        "state",
    )

    def __init__(self, now: datetime) -> None:
        super().__init__()
        self.state = Health.UNKNOWN
        self.consecutive_failures = 0
        self.consecutive_successes = 0
        self.last_status_code: int | None = None
        self.last_error: str | None = None
        self.last_checked_at: datetime | None = None
        self.since = now
        self.declared_dead = False  # by an operator, not by probes or the launcher
        self.epoch = 0  # rises with mark_dead and revive: results of earlier probes are ignored
        self.probe_failed = False  # the current run of failures has a failed probe in it
        self._exit_error = ""  # why its process exited; "" once a probe has succeeded
        self._failure_run = 0  # failures in a row since the last ejection, compared with `fall`

    def record_probe_success(
        self, thresholds: Thresholds, at: datetime, status: int | None
    ) -> None:
        """Count a good probe (successful requests do not count towards `rise`)."""
        if self.state is Health.DEAD:
            return
        self._record_result(at, status, None)
        self.consecutive_failures = self._failure_run = 0
        self.probe_failed = False
        self.consecutive_successes += 1
        if self.consecutive_successes >= thresholds.rise:
            self._enter(Health.HEALTHY, at)

    def record_probe_failure(
        self, thresholds: Thresholds, at: datetime, status: int | None, error: str
    ) -> None:
        if self.state is Health.DEAD:
            return
        self._record_result(at, status, error)
        self.probe_failed = True
        self._count()
        if self._failure_run >= thresholds.fall:
            self._enter(thresholds.on_threshold, at)

    def record_request_failure(
        self,
        thresholds: Thresholds,
        at: datetime,
        status: int | None,
        error: str,
        half_open_id: int = 0,
    ) -> bool:
        """Count a failed request that is evidence about the worker's health; True if it ejected it.

        While the worker is ejected or half-open, a failure is recorded but not counted, because the
        request began before the ejection. The exception is the half-open request, whose number is
        `half_open_id`: its failure counts.
        """
        if self.state is Health.DEAD:
            return False
        self._record_result(at, status, error)
        if self.state is Health.UNHEALTHY or not self.is_evidence(half_open_id):
            return False
        self._count(in_failure_run=not thresholds.probe_failures_only)
        over_fall = not thresholds.probe_failures_only and self._failure_run >= thresholds.fall
        if over_fall and self.probe_failed and not self.breaker_tripped:
            self.failed_requests += 1
            self._enter(thresholds.on_threshold, at)
            return False
        ejects = self.count_failure(thresholds.max_failed_requests, over_threshold=over_fall)
        if ejects:
            self._failure_run = 0
            self._enter(thresholds.eject, at)
        return ejects

    def record_request_success(self, half_open_id: int) -> bool:
        """Count a good response to request `half_open_id` (0: not half-open). True if that closed
        the breaker."""
        if self.state is not Health.HEALTHY or not self.is_evidence(half_open_id):
            return False
        closed = self.count_success()
        if not closed and not self.probe_failed:
            self.consecutive_failures = self._failure_run = 0
        return closed

    def process_exited(self, at: datetime, error: str) -> None:
        """Its process has exited: unhealthy immediately, without a threshold."""
        if self.state is Health.DEAD:
            return
        self._exit_error = error
        self._record_result(at, None, error)
        self._count()
        self.epoch += 1
        self.reset_breaker()  # a restart is another process
        self._enter(Health.UNHEALTHY, at)

    def mark_dead(self, at: datetime, *, declared: bool = False) -> None:
        """`declared`: by an operator, so only an operator's `revive` undoes it."""
        self.epoch += 1
        self.declared_dead = self.declared_dead or declared
        self._enter(Health.DEAD, at)

    def revive(self, at: datetime) -> None:
        """Reset all counters; only a dead worker changes state (it becomes unknown)."""
        self.epoch += 1
        self._exit_error = ""
        self.consecutive_failures = self._failure_run = 0
        self.consecutive_successes = 0
        self.probe_failed = False
        self.reset_breaker()
        self.declared_dead = False
        if self.state is Health.DEAD:
            self._enter(Health.UNKNOWN, at)

    def record(self) -> HealthRecord:
        """The state without a half-open request in flight: the next program may begin another."""
        names = HealthRecord.__struct_fields__
        return HealthRecord(**{name: getattr(self, name) for name in names})

    def restore(self, record: HealthRecord) -> None:
        """Continue with the state of the previous program."""
        for name in HealthRecord.__struct_fields__:
            setattr(self, name, getattr(record, name))
        self.since = record.since or self.since
        self._failure_run = record.consecutive_failures
        self.half_open_id = 0
        self.epoch += 1

    @property
    def is_half_open(self) -> bool:
        return self.breaker_tripped and self.state is Health.HEALTHY

    def _count(self, *, in_failure_run: bool = True) -> None:
        self.consecutive_successes = 0
        self.consecutive_failures += 1
        self._failure_run += in_failure_run

    def _record_result(self, at: datetime, status: int | None, error: str | None) -> None:
        """Record a result. An exit error replaces later errors until a probe succeeds."""
        self.last_checked_at = at
        self.last_status_code = status
        if error is None:
            self._exit_error = ""
        error = error and (self._exit_error or error)
        self.last_error = error[:LAST_ERROR_CHARS] if error is not None else None

    def _enter(self, state: Health, at: datetime) -> None:
        if state is not Health.HEALTHY:
            self.half_open_id = 0
        if state is not self.state:
            self.state = state
            self.since = at
