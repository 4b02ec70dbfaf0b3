"""One operation on the fleet, from the queue to the resulting state of each worker.

    waiting -> draining -> recording -> calling -> reading -> verifying -> restoring -> over
       └──────────────────────┴─ refused: nothing was sent ─────────────────────────────┘

Afterwards a worker is `restored` (to its state before), `uncertain` (its weights are unknown: out
of rotation until it is resolved or fully updated) or `disabled` (until an operator acts); see
`worker_dispositions`. Invariant: a worker that succeeded is never in a worse state than before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from omni_proxy.admin_ops.admin_route_table import AdminRoute, Kind
from omni_proxy.admin_ops.engine_dialects import INIT
from omni_proxy.admin_ops.results import WorkerResult


class Step(StrEnum):
    """The step of an operation; see the diagram above."""

    WAITING = "waiting"
    DRAINING = "draining"
    RECORDING = "recording"
    CALLING = "calling"
    READING = "reading"
    VERIFYING = "verifying"
    RESTORING = "restoring"
    OVER = "over"


_ORDER: Final = tuple(Step)


class WorkerOutcome(StrEnum):
    """State of a worker after an operation."""

    RESTORED = "restored"
    UNCERTAIN = "uncertain"
    DISABLED = "disabled"


@dataclass(frozen=True, slots=True)
class Disposition:
    """The state of a worker after the operation, and the reason unless it is restored."""

    outcome: WorkerOutcome
    reason: str = ""


RESTORED: Final = Disposition(WorkerOutcome.RESTORED)


def worker_dispositions(
    route: AdminRoute, results: Sequence[WorkerResult]
) -> dict[str, Disposition]:
    """The disposition of each worker, by URL.

    | route | failure | outcome for failed workers |
    |---|---|---|
    | init of a group | any | disabled |
    | pause, other group calls, version labels | any | restored: no weight was touched |
    | whole update | 4xx without a change from all workers | restored: nothing was applied |
    | any other update | any | uncertain |

    If the route discards weights, workers that discarded them, or may have, are uncertain, too.
    """
    failed = {result.worker: result for result in results if not result.success}
    dispositions = {result.worker: RESTORED for result in results}
    if route.path == INIT:
        reason = "the group could not be joined: "
        return dispositions | {
            url: Disposition(WorkerOutcome.DISABLED, reason + result.reason)
            for url, result in failed.items()
        }
    if route.discards:
        reason = f"{route.name} discarded its weights"
        return dispositions | {
            result.worker: Disposition(WorkerOutcome.UNCERTAIN, reason)
            for result in results
            if not result.unchanged
        }
    untouched = route.kind is not Kind.UPDATE or route.labels
    if untouched or (route.whole and all(result.unchanged for result in results)):
        return dispositions
    reason = f"{route.name} failed: "
    return dispositions | {
        url: Disposition(WorkerOutcome.UNCERTAIN, reason + result.reason)
        for url, result in failed.items()
    }


@dataclass(slots=True)
class Operation:
    """`since`: start of the present step; all times are seconds of one clock.

    `was`: the cordon reasons that each target had before the operation.
    """

    id: str
    route: AdminRoute
    caller: str
    requested_at: float
    step: Step = Step.WAITING
    since: float = 0.0
    targets: tuple[str, ...] = ()
    was: dict[str, frozenset[str]] = field(default_factory=dict)
    results: dict[str, WorkerResult] = field(default_factory=dict)
    trace_parent: str = ""  # the traceparent of its request, as received

    def enter(self, step: Step, at: float) -> None:
        """Enter a later step; steps may be skipped. Raises ValueError for the same or an earlier
        step."""
        if _ORDER.index(step) <= _ORDER.index(self.step):
            raise ValueError(f"{self.step} is not followed by {step}")
        self.step, self.since = step, at

    def target(self, holds: Mapping[str, frozenset[str]]) -> None:
        """Set the workers of the operation, in order, with their cordon reasons."""
        self.targets = tuple(holds)
        self.was = dict(holds)

    def on_result(self, result: WorkerResult) -> None:
        self.results[result.worker] = result

    @property
    def has_called(self) -> bool:
        """Whether workers have been called."""
        return _ORDER.index(self.step) >= _ORDER.index(Step.CALLING)

    @property
    def failed_targets(self) -> list[str]:
        """Targets that failed or have no result."""
        return [
            url
            for url in self.targets
            if (result := self.results.get(url)) is None or not result.success
        ]

    def describe(self, at: float) -> str:
        """A sentence for a caller that waits for this operation."""
        by = f" of {self.caller}" if self.caller else ""
        text = f"{self.route.name}{by} began {at - self.requested_at:.1f} s ago, step {self.step}"
        if self.step is Step.CALLING:
            text += f", {len(self.results)} of {len(self.targets)} workers have answered"
        return text
