"""The state of a rollout in memory and in the journal; tasks can wait for its changes.

Invariant: each change of the state wakes every task that waits on `changed`. The state in memory
is authoritative: if the disk fails, only steps that have not begun are refused.
"""

from __future__ import annotations

from datetime import UTC, datetime

import trio

from omni_proxy.weight_sync.protocol.rollout_state_machine import RolloutState, RolloutWorker
from omni_proxy.weight_sync.state_journal import StateJournal


class RolloutProgress:
    """`state`: the current or the last rollout; None if there was none since the start.

    `steps`: the current step of each worker, by URL. `waits_for`: why no batch runs, or "".
    """

    def __init__(self, journal: StateJournal) -> None:
        self._journal = journal
        self.state: RolloutState | None = journal.rollout
        self.steps: dict[str, str] = {}
        self.waits_for = ""
        self.changed = trio.Event()
        self.revision = 0  # incremented by each change
        self.ending = False  # the rollout's end is being written

    @property
    def active(self) -> RolloutState | None:
        """The rollout that has not ended."""
        return None if self.state is None or self.state.ended else self.state

    @property
    def now(self) -> RolloutState:
        assert self.state is not None
        return self.state

    def put(self, state: RolloutState) -> None:
        if state != self.state:
            self.state = state
            self._notify()

    async def save(self) -> None:
        """Write the state; a disk error is only reported."""
        await self._journal.save_rollout(self.now)

    async def end(self, state: RolloutState) -> None:
        """End the rollout; it is removed from the journal before its end is visible."""
        await self._journal.save_rollout(None)
        self.waits_for = ""
        self.put(state)

    async def record(self) -> None:
        """Write the state before a batch. Raises OSError: then send nothing."""
        await self._journal.record_rollout(self.now)

    async def begin(self, state: RolloutState) -> None:
        """Begin a rollout. Raises OSError if it can't be recorded; then there is none."""
        await self._journal.record_rollout(state)
        self.put(state)

    def enter(self, url: str, step: str) -> None:
        """Set the current step of a worker; "" for none."""
        if step:
            self.steps[url] = step
        else:
            self.steps.pop(url, None)
        self._notify()

    def clear_steps(self) -> None:
        if self.steps:
            self.steps.clear()
            self._notify()

    def wait_for(self, reason: str) -> None:
        if reason != self.waits_for:
            self.waits_for = reason
            self._notify()

    def _notify(self) -> None:
        self.revision += 1
        self.changed.set()
        self.changed = trio.Event()

    def to_dict(self) -> dict[str, object] | None:
        """JSON-ready; None if there was no rollout. The keys are documented in docs/rollout.md."""
        state = self.state
        if state is None:
            return None
        counted = [row for row in state.workers if row.phase != "skipped"]
        return {
            "id": state.id,
            "state": self._word(state),
            "weight_version": state.label,
            "model_path": state.path or None,
            "version": state.number or None,
            "model": state.model,
            "caller": state.caller,
            "begun_at": state.begun_at,
            "ended_at": state.ended_at or None,
            "max_unavailable": state.max_unavailable,
            "canary": state.canary,
            "cause": state.cause or None,
            "waits_for": (self.waits_for or None) if not state.ended else None,
            "weight_epoch": state.epoch or None,
            "updated": len([row for row in counted if row.phase == "updated"]),
            "total": len(counted),
            "workers": [self._row(row) for row in state.workers],
        }

    def shown(self) -> dict[str, object]:
        """Like `to_dict`, but with the state "none" if there was no rollout."""
        return self.to_dict() or {"id": None, "state": "none", "workers": []}

    def _word(self, state: RolloutState) -> str:
        pausing = state.phase == "paused" and (state.busy or bool(self.steps))
        return "pausing" if pausing else state.phase.value

    def _row(self, row: RolloutWorker) -> dict[str, object]:
        former = row.former
        return {
            "worker": row.url,
            "state": row.phase.value,
            "step": self.steps.get(row.url),
            "reason": row.reason or None,
            "former_version": former.label if former is not None else None,
        }


def now_text() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
