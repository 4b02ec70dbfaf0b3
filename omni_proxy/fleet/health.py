"""The health machine of one worker.

    unknown ──rise──> healthy ──fall──> unhealthy ──rise──> healthy    (on_threshold = "unhealthy")
       └─────fall──────┴──fall──> dead ──revive──> unknown              (on_threshold = "dead")

rise: `success_threshold` good probes in a row. fall: `failure_threshold` failures in a row; a run
that holds a failed probe ends in `on_threshold`, one of request failures alone in `eject`.
Invariant: dead is left by `revive` only, and a result of an older epoch never counts. Source:
omni-router.md 9 and the rules of config.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

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
    on_threshold: Health = Health.DEAD
    eject: Health = Health.UNHEALTHY


class HealthMachine:
    """State and counters of one worker; every method is one atom."""

    __slots__ = (
        "consecutive_failures",
        "consecutive_successes",
        "epoch",
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
        self.epoch = 0  # raised by mark_dead and revive: a probe begun before is void
        self.probe_failed = False  # the present run of failures holds a failed probe

    def succeed(self, thresholds: Thresholds, at: datetime, status: int | None) -> None:
        """Count a good probe (requests never count as successes)."""
        if self.state is Health.DEAD:
            return
        self._note(at, status, None)
        self.consecutive_failures = 0
        self.probe_failed = False
        self.consecutive_successes += 1
        if self.consecutive_successes >= thresholds.rise:
            self._enter(Health.HEALTHY, at)

    def fail(
        self, thresholds: Thresholds, at: datetime, status: int | None, error: str, *, probe: bool
    ) -> None:
        """Count a failed probe, or a failed request that speaks of the worker's health."""
        if self.state is Health.DEAD:
            return
        self._note(at, status, error)
        self.consecutive_successes = 0
        self.consecutive_failures += 1
        self.probe_failed |= probe
        if self.consecutive_failures >= thresholds.fall:
            self._enter(thresholds.on_threshold if self.probe_failed else thresholds.eject, at)

    def lose(self, at: datetime, error: str) -> None:
        """Its process has ended: no threshold is needed to know that."""
        if self.state is Health.DEAD:
            return
        self._note(at, None, error)
        self.consecutive_successes = 0
        self.consecutive_failures += 1
        self.epoch += 1
        self._enter(Health.UNHEALTHY, at)

    def kill(self, at: datetime) -> None:
        self.epoch += 1
        self._enter(Health.DEAD, at)

    def revive(self, at: datetime) -> None:
        """Forget the past; only a dead worker changes state (it becomes unknown)."""
        self.epoch += 1
        self.consecutive_failures = 0
        self.consecutive_successes = 0
        self.probe_failed = False
        if self.state is Health.DEAD:
            self._enter(Health.UNKNOWN, at)

    def _note(self, at: datetime, status: int | None, error: str | None) -> None:
        self.last_checked_at = at
        self.last_status_code = status
        self.last_error = error[:LAST_ERROR_CHARS] if error is not None else None

    def _enter(self, state: Health, at: datetime) -> None:
        if state is not self.state:
            self.state = state
            self.since = at
