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
    tries: int = 0  # failed requests in a row that eject; 0: only `fall` does
    apart: bool = False  # `fall` counts failed probes alone, as sglang-router's health check does


def thresholds_of(config: Config, *, apart: bool = False) -> Thresholds:
    eject = config.routing.eject
    return Thresholds(
        rise=config.health.success_threshold,
        fall=config.health.failure_threshold,
        on_threshold=Health(config.health.on_threshold),
        # One that is to be removed is out at once; what takes it out of the registry comes after.
        eject=Health.DEAD if eject == "dead" else Health.UNHEALTHY,
        tries=config.routing.max_worker_retries,
        apart=apart,
    )


class _Hot:
    """What every request looks at, close together as in `fleet.worker`."""

    __slots__ = ("failed_tries", "trial_owed")


class HealthMachine(_Hot):
    """State and counters of one worker; every method is one atom."""

    __slots__ = (
        "_run",
        "_trials",
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
        "trial",
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
        self.failed_tries = 0  # requests without a good answer in between; > 0 on trial
        self.trial_owed = False  # ejected: good probes alone don't bring it back whole
        self.trial = 0  # the number of the trial that runs, 0 while none does
        self._trials = 0
        self._run = 0  # failures in a row since it was ejected last: what `fall` is compared with

    def succeed(self, thresholds: Thresholds, at: datetime, status: int | None) -> None:
        """Count a good probe (requests never count as successes)."""
        if self.state is Health.DEAD:
            return
        self._note(at, status, None)
        self.consecutive_failures = self._run = 0
        self.probe_failed = False
        self.consecutive_successes += 1
        if self.consecutive_successes >= thresholds.rise:
            self._enter(Health.HEALTHY, at)

    def fail_probe(
        self, thresholds: Thresholds, at: datetime, status: int | None, error: str
    ) -> None:
        if self.state is Health.DEAD:
            return
        self._note(at, status, error)
        self.probe_failed = True
        self._count()
        if self._run >= thresholds.fall:
            self._enter(thresholds.on_threshold, at)

    def fail_request(
        self, thresholds: Thresholds, at: datetime, status: int | None, error: str, trial: int = 0
    ) -> bool:
        """Count a failed request that speaks of the worker's health; whether that ejected it.

        Of a worker that is out, or on trial, it is noted and no more: it began before that. Unless
        it is the trial (`trial` is its number).
        """
        if self.state is Health.DEAD:
            return False
        self._note(at, status, error)
        tried = self.trial_owed and trial == self.trial != 0
        if not tried and (self.trial_owed or self.state is Health.UNHEALTHY):
            return False
        self._count(in_run=not thresholds.apart)
        self.failed_tries += 1
        whole = not thresholds.apart and self._run >= thresholds.fall
        if whole and self.probe_failed and not tried:
            self._enter(thresholds.on_threshold, at)
            return False
        enough = whole or 0 < thresholds.tries <= self.failed_tries
        if tried or enough:
            self._run = 0
            self.trial_owed = True
            self._enter(thresholds.eject, at)
            return True
        return False

    def answer_well(self, trial: int) -> bool:
        """A request had a good answer; `trial` is its number if it was one. True: fully in now."""
        if self.state is not Health.HEALTHY:
            return False
        if self.trial_owed:
            if not trial or trial != self.trial:
                return False  # begun before it was ejected: that says nothing
            self.trial_owed = False
            self.trial = self.failed_tries = 0
            return True
        self.failed_tries = 0
        if not self.probe_failed:
            self.consecutive_failures = self._run = 0
        return False

    def begin_trial(self) -> int:
        """One request goes to it, and until that one is over no other; its number."""
        self._trials += 1
        self.trial = self._trials
        return self.trial

    def end_trial(self, trial: int) -> bool:
        """Over without a verdict: the next request is another trial. False if it is settled."""
        if trial != self.trial:
            return False
        self.trial = 0
        return True

    def lose(self, at: datetime, error: str) -> None:
        """Its process has ended: no threshold is needed to know that."""
        if self.state is Health.DEAD:
            return
        self._note(at, None, error)
        self._count()
        self.epoch += 1
        self.failed_tries = 0
        self.trial_owed = False  # what comes back is another process
        self._enter(Health.UNHEALTHY, at)

    def kill(self, at: datetime, *, declared: bool = False) -> None:
        """`declared`: a person said so, and only a person takes it back."""
        self.epoch += 1
        self.declared_dead = self.declared_dead or declared
        self._enter(Health.DEAD, at)

    def revive(self, at: datetime) -> None:
        """Forget the past; only a dead worker changes state (it becomes unknown)."""
        self.epoch += 1
        self.consecutive_failures = self._run = 0
        self.consecutive_successes = 0
        self.failed_tries = 0
        self.probe_failed = False
        self.trial_owed = False
        self.trial = 0
        self.declared_dead = False
        if self.state is Health.DEAD:
            self._enter(Health.UNKNOWN, at)

    @property
    def trials(self) -> int:
        """How many it has been given so far."""
        return self._trials

    @property
    def on_trial(self) -> bool:
        return self.trial_owed and self.state is Health.HEALTHY

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
            self.trial = 0
        if state is not self.state:
            self.state = state
            self.since = at
