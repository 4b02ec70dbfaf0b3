"""The state machine of a rollout: which workers are next, and the effect of each outcome. Pure.

    rollout  running <-> paused; both -> rolling_back -> failed, cancelled; running -> succeeded
    worker   pending -> updating -> updated                       -> restoring -> restored
                           ├─> uncertain: its weights are unknown   ──┴─> unrestored: until resolved
                           └─> restored: it refused, and keeps its weights
Invariants: while updating, at most `max_unavailable` serving workers are out of rotation; only the
canary is updated until all its workers are; after the first failure or a cancel no further worker
is updated, and each changed one ends restored or unrestored. A state is an immutable value: a step
returns a new one, and raises InvalidStep if it is not allowed in the state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from omni_proxy.weight_sync.protocol.checksum_agreement import Digest
from omni_proxy.weight_sync.protocol.published_version import TargetVersion


class RolloutPhase(StrEnum):
    """The phase of the rollout; the diagram is above."""

    RUNNING = "running"
    PAUSED = "paused"
    ROLLING_BACK = "rolling_back"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class WorkerPhase(StrEnum):
    """The phase of one worker in a rollout; the diagram is above.

    The values are in the journal and in responses, two of them under a former name.
    """

    PENDING = "pending"
    UPDATING = "updating"
    UPDATED = "updated"
    UNCERTAIN = "broken"
    RESTORING = "restoring"
    RESTORED = "restored"
    UNRESTORED = "lost"
    SKIPPED = "skipped"


class Presence(StrEnum):
    """The state of a worker, independent of the rollout.

    `MISSED`: it restarted after its update, and no longer has the new weights. `UNKNOWN`: it was
    not probed yet, or its version is being read.
    """

    SERVING = "serving"  # in rotation
    OUT_OF_ROTATION = "out"  # healthy, but out of rotation for another reason: disabled, uncertain
    MISSED = "missed"
    UNKNOWN = "unknown"
    DOWN = "down"  # not healthy
    GONE = "gone"  # dead, or not in the fleet


_REACHABLE: Final = (Presence.SERVING, Presence.OUT_OF_ROTATION, Presence.MISSED)
_ENDED: Final = (RolloutPhase.SUCCEEDED, RolloutPhase.FAILED, RolloutPhase.CANCELLED)
_TOUCHED: Final = (WorkerPhase.UPDATING, WorkerPhase.UNCERTAIN, WorkerPhase.RESTORING)
_SETTLED: Final = (WorkerPhase.RESTORED, WorkerPhase.UNRESTORED, WorkerPhase.SKIPPED)


class FormerVersion(Struct, frozen=True, kw_only=True):
    """The version that a worker had before the rollout, for a restore.

    `path`: the path that its engine reports as loaded. `number`: its number in the store, 0 if it
    is not stored. `target`: its row in the published version. `digest`: None if not compared.
    """

    label: str
    epoch: int = 0
    path: str = ""
    number: int = 0
    target: TargetVersion | None = None
    digest: Digest | None = None


class RolloutWorker(Struct, frozen=True, kw_only=True):
    """A worker of a rollout. `dialect`: how its engine loads weights (`worker_update`).

    `former`: None if unknown; then the worker can't be restored. `served`: it was in rotation, so
    it counts as unavailable while it is out.
    """

    url: str
    dialect: str = "disk"
    phase: WorkerPhase = WorkerPhase.PENDING
    reason: str = ""
    former: FormerVersion | None = None
    served: bool = False


class RolloutState(Struct, frozen=True, kw_only=True):
    """The state that must survive a restart. Times are ISO strings.

    `model`: the model of all its workers. `number`: the stored version, 0 for `path`. `epoch`: 0
    until the first worker has the version. `digest`: the first worker's. `open_ended`: workers that
    join are included. `drain_secs`: 0 for no deadline. `epoch_before`, `label_before`: the version
    that was published before.
    """

    id: str
    label: str
    model: str | None = None
    path: str = ""
    number: int = 0
    load_format: str = ""
    caller: str = ""
    begun_at: str = ""
    ended_at: str = ""
    max_unavailable: int = 1
    canary: int = 1
    pause_after_canary: bool = False
    drain_secs: float = 0.0
    open_ended: bool = True
    phase: RolloutPhase = RolloutPhase.RUNNING
    cause: str = ""
    cancelled: bool = False
    epoch: int = 0
    epoch_before: int = 0
    label_before: str | None = None
    digest: Digest | None = None
    workers: tuple[RolloutWorker, ...] = ()

    @property
    def ended(self) -> bool:
        return self.phase in _ENDED

    @property
    def name(self) -> str:
        """The rollout's name in reasons and log lines."""
        return f"rollout {self.id[:8]} to {self.label!r}"

    def urls(self, *phases: WorkerPhase) -> tuple[str, ...]:
        return tuple(worker.url for worker in self.workers if worker.phase in phases)

    def worker(self, url: str) -> RolloutWorker:
        """Raises InvalidStep for a URL that is not part of the rollout."""
        for worker in self.workers:
            if worker.url == url:
                return worker
        raise InvalidStep(f"{url} is not part of the rollout")

    @property
    def busy(self) -> bool:
        """Whether a worker's weights are being changed now."""
        return bool(self.urls(WorkerPhase.UPDATING, WorkerPhase.RESTORING))


class InvalidStep(ValueError):
    """The step is not allowed in this state; nothing changed."""


@dataclass(frozen=True, slots=True)
class NextBatch:
    """The workers to update next; `restores`: they get their former version instead."""

    urls: tuple[str, ...]
    restores: bool = False


@dataclass(frozen=True, slots=True)
class Waiting:
    """No batch can run now; `reason` is text for users."""

    reason: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The rollout ends with this phase: no worker is left to update or restore."""

    phase: RolloutPhase
    cause: str = ""


Decision = NextBatch | Waiting | Finish


# Decisions


def decide(state: RolloutState, presence: Mapping[str, Presence]) -> Decision:
    """Decide what to do next. `presence`: by worker URL; a missing URL counts as GONE."""
    if state.ended:
        return Finish(state.phase, state.cause)
    if state.busy:
        return Waiting("workers are being updated")
    if state.phase is RolloutPhase.ROLLING_BACK:
        return _decide_rollback(state, presence)
    if state.phase is RolloutPhase.PAUSED:
        return Waiting("paused: POST /weights/rollout/resume continues")
    return _decide_forward(state, presence)


def _decide_forward(state: RolloutState, presence: Mapping[str, Presence]) -> Decision:
    present = {worker.url: presence.get(worker.url, Presence.GONE) for worker in state.workers}
    missed = [url for url in state.urls(WorkerPhase.UPDATED) if present[url] is Presence.MISSED]
    pending = [*state.urls(WorkerPhase.UNCERTAIN), *missed, *state.urls(WorkerPhase.PENDING)]
    if not pending:
        if state.urls(WorkerPhase.UPDATED):
            return Finish(RolloutPhase.SUCCEEDED)
        return Finish(RolloutPhase.FAILED, "no worker is left that could be updated")
    slots = state.max_unavailable - len(unavailable(state, presence))
    updated = len(state.urls(WorkerPhase.UPDATED)) - len(missed)
    quota = state.canary - updated if updated < state.canary else len(pending)
    selected: list[str] = []
    for url in sorted(pending, key=lambda url: _urgency(state.worker(url), present[url])):
        if len(selected) >= quota or present[url] not in _REACHABLE:
            continue
        if present[url] is Presence.SERVING and state.worker(url).phase is WorkerPhase.PENDING:
            if slots <= 0:
                continue
            slots -= 1
        elif len(selected) >= state.max_unavailable:
            continue
        selected.append(url)
    if selected:
        return NextBatch(tuple(selected))
    out = unavailable(state, presence) or [url for url in pending if present[url] not in _REACHABLE]
    return Waiting(f"waits for workers that are out of rotation: {', '.join(out)}")


def _urgency(worker: RolloutWorker, presence: Presence) -> int:
    """Sort key: changed workers first, then serving ones (a canary needs traffic), then others."""
    if worker.phase is not WorkerPhase.PENDING:
        return 0
    return 1 if presence is Presence.SERVING else 2


def _decide_rollback(state: RolloutState, presence: Mapping[str, Presence]) -> Decision:
    """The next restores. Unhealthy workers are included, so that they don't delay the end."""
    touched = state.urls(WorkerPhase.UNCERTAIN, WorkerPhase.UPDATED)
    if not touched:
        phase = RolloutPhase.CANCELLED if state.cancelled else RolloutPhase.FAILED
        return Finish(phase, state.cause)
    unknown = [url for url in touched if presence.get(url) is Presence.UNKNOWN]
    if unknown:
        return Waiting(f"waits for the first health checks of {', '.join(unknown)}")
    out = [url for url in unavailable(state, presence) if url not in touched]
    slots = max(state.max_unavailable - len(out), 1)
    uncertain = [url for url in touched if state.worker(url).phase is WorkerPhase.UNCERTAIN]
    updated = [url for url in touched if url not in uncertain]
    return NextBatch(tuple([*uncertain, *updated][:slots]), restores=True)


def unavailable(state: RolloutState, presence: Mapping[str, Presence]) -> list[str]:
    """Workers that served and are out of rotation now for any reason, except GONE ones."""
    return [
        worker.url
        for worker in state.workers
        if worker.served
        and worker.phase not in (WorkerPhase.SKIPPED, WorkerPhase.UNRESTORED)
        and presence.get(worker.url, Presence.GONE) is not Presence.GONE
        and (worker.phase in _TOUCHED or presence.get(worker.url) is not Presence.SERVING)
    ]


# Steps


def join(state: RolloutState, workers: Iterable[RolloutWorker]) -> RolloutState:
    """Add workers that joined the fleet or returned to it.

    A worker that is already part of the rollout is unchanged, unless it was skipped.
    """
    if state.ended or state.phase is RolloutPhase.ROLLING_BACK:
        raise InvalidStep(f"no worker can join while the rollout is {state.phase}")
    rows = {worker.url: worker for worker in state.workers}
    for worker in workers:
        row = rows.get(worker.url)
        if row is None or row.phase is WorkerPhase.SKIPPED:
            rows[worker.url] = worker
    return replace(state, workers=tuple(rows.values()))


def observe(state: RolloutState, presence: Mapping[str, Presence]) -> RolloutState:
    """Record which workers serve, and skip those that are GONE."""
    return replace(
        state, workers=tuple(_observed(other_row, presence) for other_row in state.workers)
    )


def _observed(worker: RolloutWorker, presence: Mapping[str, Presence]) -> RolloutWorker:
    now = presence.get(worker.url, Presence.GONE)
    if now is Presence.SERVING and not worker.served:
        return replace(worker, served=True)
    working = (WorkerPhase.UPDATING, WorkerPhase.RESTORING)
    if now is Presence.GONE and worker.phase not in (*working, *_SETTLED):
        return replace(worker, phase=WorkerPhase.SKIPPED, reason="it is no longer in the fleet")
    return worker


def begin(state: RolloutState, urls: Collection[str]) -> RolloutState:
    """Begin to update workers: from here on their weights are unknown."""
    _require(state, RolloutPhase.RUNNING)
    allowed = (WorkerPhase.PENDING, WorkerPhase.UNCERTAIN, WorkerPhase.UPDATED)
    return _transition(state, urls, allowed, WorkerPhase.UPDATING)


def undo_begin(state: RolloutState, rows: Iterable[RolloutWorker]) -> RolloutState:
    """Undo `begin`, after nothing was sent. `rows`: the workers' rows before it."""
    for row in rows:
        if state.worker(row.url).phase is not WorkerPhase.UPDATING:
            raise InvalidStep(f"{row.url} is {state.worker(row.url).phase}, not begun")
        state = _replace_row(state, row)
    return state


def begin_restore(state: RolloutState, urls: Collection[str]) -> RolloutState:
    _require(state, RolloutPhase.ROLLING_BACK)
    allowed = (WorkerPhase.UPDATED, WorkerPhase.UNCERTAIN)
    return _transition(state, urls, allowed, WorkerPhase.RESTORING, None)


def record_former_version(state: RolloutState, url: str, former: FormerVersion) -> RolloutState:
    """Record the worker's former version, read just before its update."""
    row = state.worker(url)
    if row.phase is not WorkerPhase.PENDING:
        raise InvalidStep(f"{url} is {row.phase}: its former version can't be read any more")
    return _replace_row(state, replace(row, former=former))


def succeed(
    state: RolloutState, url: str, epoch: int, digest: Digest | None = None
) -> RolloutState:
    """The worker has the new version, as far as that can be proven."""
    state = _transition(state, [url], (WorkerPhase.UPDATING,), WorkerPhase.UPDATED)
    state = replace(state, epoch=state.epoch or epoch, digest=state.digest or digest)
    ready = len(state.urls(WorkerPhase.UPDATED)) == state.canary
    unfinished = state.urls(WorkerPhase.PENDING, WorkerPhase.UNCERTAIN, WorkerPhase.UPDATING)
    if state.pause_after_canary and ready and unfinished and state.phase is RolloutPhase.RUNNING:
        return replace(state, phase=RolloutPhase.PAUSED)
    return state


def refuse(state: RolloutState, url: str, reason: str) -> RolloutState:
    """The worker refused, and still has its former version."""
    state = _transition(state, [url], (WorkerPhase.UPDATING,), WorkerPhase.RESTORED, reason)
    return fail(state, f"{url}: {reason}")


def mark_uncertain(state: RolloutState, url: str, reason: str) -> RolloutState:
    """The update failed, and the worker's weights are unknown."""
    state = _transition(state, [url], (WorkerPhase.UPDATING,), WorkerPhase.UNCERTAIN, reason)
    return fail(state, f"{url}: {reason}")


def restore(state: RolloutState, url: str) -> RolloutState:
    """The worker has its former version again."""
    return _transition(state, [url], (WorkerPhase.RESTORING,), WorkerPhase.RESTORED, None)


def fail_restore(state: RolloutState, url: str, reason: str) -> RolloutState:
    """The worker could not be restored: it stays out of rotation."""
    return _transition(state, [url], (WorkerPhase.RESTORING,), WorkerPhase.UNRESTORED, reason)


def fail(state: RolloutState, cause: str) -> RolloutState:
    """Roll back; the first cause is kept."""
    if state.ended:
        raise InvalidStep(f"the rollout is {state.phase} already")
    return replace(state, phase=RolloutPhase.ROLLING_BACK, cause=state.cause or cause)


def pause(state: RolloutState) -> RolloutState:
    """Pause: the current batch ends, and no further one begins."""
    _require(state, RolloutPhase.RUNNING, RolloutPhase.PAUSED)
    return replace(state, phase=RolloutPhase.PAUSED)


def resume(state: RolloutState) -> RolloutState:
    _require(state, RolloutPhase.RUNNING, RolloutPhase.PAUSED)
    return replace(state, phase=RolloutPhase.RUNNING)


def cancel(state: RolloutState, by: str) -> RolloutState:
    """Cancel and roll back; a rollback that already runs is unchanged."""
    if state.phase is RolloutPhase.ROLLING_BACK:
        return state
    _require(state, RolloutPhase.RUNNING, RolloutPhase.PAUSED)
    cause = f"cancelled by {by}" if by else "cancelled"
    return replace(state, phase=RolloutPhase.ROLLING_BACK, cancelled=True, cause=cause)


def recover(state: RolloutState) -> RolloutState:
    """Recover after a restart: workers that were being changed have unknown weights."""
    urls = state.urls(WorkerPhase.UPDATING, WorkerPhase.RESTORING)
    reason = "the proxy ended while it was being updated"
    working = (WorkerPhase.UPDATING, WorkerPhase.RESTORING)
    return _transition(state, urls, working, WorkerPhase.UNCERTAIN, reason)


def finish(state: RolloutState, end: Finish, ended_at: str) -> RolloutState:
    if state.busy:
        raise InvalidStep("the rollout is still updating workers")
    if state.ended:
        raise InvalidStep(f"the rollout is {state.phase} already")
    return replace(state, phase=end.phase, cause=end.cause, ended_at=ended_at)


def _require(state: RolloutState, *phases: RolloutPhase) -> None:
    if state.phase not in phases:
        raise InvalidStep(f"the rollout is {state.phase}")


def _transition(
    state: RolloutState,
    urls: Collection[str],
    allowed: Collection[WorkerPhase],
    phase: WorkerPhase,
    reason: str | None = "",
) -> RolloutState:
    """Move workers to `phase`; a `reason` of None keeps their reasons."""
    for url in urls:
        row = state.worker(url)
        if row.phase not in allowed:
            raise InvalidStep(f"{url} cannot go from {row.phase} to {phase}")
        text = row.reason if reason is None else reason
        state = _replace_row(state, replace(row, phase=phase, reason=text))
    return state


def _replace_row(state: RolloutState, row: RolloutWorker) -> RolloutState:
    rows = tuple(row if other_row.url == row.url else other_row for other_row in state.workers)
    return replace(state, workers=rows)
