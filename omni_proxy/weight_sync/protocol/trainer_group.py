"""State machine of a trainer's process group: owner, participants, current round. Pure.

    idle ─init→ joining ─joined→ grouped ─prepare→ arming ─ready→ armed ─complete→ committing
                                    ├─update (one phase)──────────────────────────────→┘
                                    ├←─────applied (a bucket of several)───────────────┤
                                    └←─published── verifying ←─closed (the whole)──────┘
    any but idle ─failed, destroy→ aborting ─disarmed→ idle
Invariants: only `TRANSITIONS` occur; a refused call has a row in `REFUSALS` (note:weight-sync 6.2);
a step succeeds only if it does at every participant; a version is published only for participants
that applied all of it and agree; a participant that may have other weights ends uncertain; a
failure ends the group. `GroupOwner.to_dict` is the `owner` in refusals of other trainers' calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from omni_proxy.admin_ops.results import WorkerResult
from omni_proxy.weight_sync.protocol.requests import RankRange, UpdateFlags


class SyncState(StrEnum):
    """The state of the weight sync; the diagram is above."""

    IDLE = "idle"
    JOINING = "joining"
    GROUPED = "grouped"
    ARMING = "arming"
    ARMED = "armed"
    COMMITTING = "committing"
    VERIFYING = "verifying"
    ABORTING = "aborting"


class SyncEvent(StrEnum):
    """Events of the state machine: the first five are calls of the trainer, the others results."""

    INIT = "init"
    PREPARE = "prepare"
    COMPLETE = "complete"
    UPDATE = "update"
    DESTROY = "destroy"
    JOINED = "joined"
    READY = "ready"
    APPLIED = "applied"
    CLOSED = "closed"
    PUBLISHED = "published"
    FAILED = "failed"
    DISARMED = "disarmed"


_ENDS: Final[dict[tuple[SyncState, SyncEvent], SyncState]] = {
    (state, event): SyncState.ABORTING
    for state in SyncState
    if state not in (SyncState.IDLE, SyncState.ABORTING)
    for event in (SyncEvent.FAILED, SyncEvent.DESTROY)
}
TRANSITIONS: Final[dict[tuple[SyncState, SyncEvent], SyncState]] = {
    (SyncState.IDLE, SyncEvent.INIT): SyncState.JOINING,
    (SyncState.JOINING, SyncEvent.JOINED): SyncState.GROUPED,
    (SyncState.GROUPED, SyncEvent.PREPARE): SyncState.ARMING,
    (SyncState.ARMING, SyncEvent.READY): SyncState.ARMED,
    (SyncState.ARMED, SyncEvent.COMPLETE): SyncState.COMMITTING,
    (SyncState.GROUPED, SyncEvent.UPDATE): SyncState.COMMITTING,
    (SyncState.COMMITTING, SyncEvent.APPLIED): SyncState.GROUPED,
    (SyncState.COMMITTING, SyncEvent.CLOSED): SyncState.VERIFYING,
    (SyncState.GROUPED, SyncEvent.CLOSED): SyncState.VERIFYING,
    (SyncState.VERIFYING, SyncEvent.PUBLISHED): SyncState.GROUPED,
    (SyncState.ABORTING, SyncEvent.DISARMED): SyncState.IDLE,
    **_ENDS,
}

NO_GROUP: Final = "there is no weights-update group: call /init_weights_update_group first"
OWNED: Final = "a weights-update group exists already"
BUSY: Final = "the participants of the group are armed already, or another call of it is under way"
NOT_ARMED: Final = "complete without prepare: nothing is armed"
REFUSALS: Final[dict[SyncEvent, dict[SyncState, tuple[int, str]]]] = {
    SyncEvent.INIT: dict.fromkeys((s for s in SyncState if s is not SyncState.IDLE), (409, OWNED)),
    SyncEvent.PREPARE: {
        **dict.fromkeys(SyncState, (409, BUSY)),
        **dict.fromkeys((SyncState.IDLE, SyncState.ABORTING), (400, NO_GROUP)),
    },
    SyncEvent.UPDATE: {
        **dict.fromkeys(SyncState, (409, BUSY)),
        **dict.fromkeys((SyncState.IDLE, SyncState.ABORTING), (400, NO_GROUP)),
    },
    SyncEvent.COMPLETE: {
        **dict.fromkeys(SyncState, (409, BUSY)),
        **dict.fromkeys((SyncState.IDLE, SyncState.ABORTING), (400, NO_GROUP)),
        SyncState.GROUPED: (400, NOT_ARMED),
    },
    SyncEvent.DESTROY: dict.fromkeys((SyncState.IDLE, SyncState.ABORTING), (400, NO_GROUP)),
}


class InvalidTransition(Exception):
    """The call is not allowed in the current state; nothing changed. `status`: its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def next_state(state: SyncState, event: SyncEvent) -> SyncState:
    """Raises InvalidTransition if the event is not allowed in this state."""
    target = TRANSITIONS.get((state, event))
    if target is None:
        status, message = REFUSALS.get(event, {}).get(state, (409, f"{event} while {state}"))
        raise InvalidTransition(status, message)
    return target


NO_FLAGS: Final = UpdateFlags()


class ParticipantStatus(StrEnum):
    """The status of one participant, "standing" in responses."""

    OK = "ok"
    JOINING = "joining"
    UPDATING = "updating"
    UNCERTAIN = "uncertain"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class GroupOwner:
    """The trainer that created the group; `since`: seconds of the caller's clock."""

    group_name: str
    address: str
    since: float
    caller: str = ""

    def to_dict(self, now: float) -> dict[str, object]:
        """JSON-ready."""
        return {
            "group_name": self.group_name,
            "master": self.address,
            "caller": self.caller,
            "age_secs": round(now - self.since, 3),
        }

    def describe(self, now: float, state: SyncState) -> str:
        by = f" of {self.caller}" if self.caller else ""
        return (
            f"group {self.group_name!r} at {self.address}{by}, "
            f"begun {now - self.since:.1f} s ago, step {state}"
        )


@dataclass(slots=True)
class ParticipantState:
    """One participant. `modified`: it may have weights that are not published.

    `failed`: the reason, or "". `refused`: it refused the call and changed nothing.
    """

    rank_range: RankRange
    status: ParticipantStatus = ParticipantStatus.JOINING
    joined: bool = False
    armed: bool = False
    modified: bool = False
    failed: str = ""
    refused: bool = False


@dataclass(slots=True)
class Round:
    """The weights that were announced and applied since the last publication.

    `started`: it began with a start call, so only a finish call ends it. `whole`: it has all
    weights, whatever the names of its tensors.
    """

    started: bool = False
    whole: bool = False
    batched: bool = False
    buckets: int = 0
    calls: int = 0  # calls that applied weights
    names: set[str] = field(default_factory=set)
    last: UpdateFlags = NO_FLAGS
    all_abort: bool = True

    @property
    def is_complete(self) -> bool:
        """Whether a call was marked as the last one."""
        if self.started:
            return self.batched
        return self.batched or (self.calls > 0 and (self.last.last or self.all_abort))


class WeightSync:
    """The state machine. `cause`: why the last sync failed, "" if it did not."""

    def __init__(self) -> None:
        self.state = SyncState.IDLE
        self.owner: GroupOwner | None = None
        self.participant_states: dict[str, ParticipantState] = {}
        self.round = Round()
        self.cause = ""

    @property
    def has_unpublished(self) -> bool:
        """Whether weights were applied that are not published."""
        return self.round.calls > 0

    @property
    def all_ok(self) -> bool:
        """Whether no participant has failed."""
        return not any(participant.failed for participant in self.participant_states.values())

    def begin(self, owner: GroupOwner, ranges: Iterable[RankRange]) -> None:
        """Raises InvalidTransition while there is another sync."""
        self._enter(SyncEvent.INIT)
        self.owner, self.cause, self.round = owner, "", Round()
        self.participant_states = {
            rank_range.name: ParticipantState(rank_range) for rank_range in ranges
        }

    def arm(self, *, batched: bool, buckets: int, names: Iterable[str]) -> None:
        """Announce buckets. Raises InvalidTransition, also if a whole sync would join a round."""
        if batched and self.state is SyncState.GROUPED and self.has_unpublished:
            message = "a sync in parts is open: end it before a whole one is announced"
            raise InvalidTransition(409, message)
        self._enter(SyncEvent.PREPARE)
        self.round.batched = batched
        self._announce(buckets, names)

    def commit(self, flags: UpdateFlags) -> None:
        """Raises InvalidTransition."""
        self._enter(SyncEvent.COMPLETE)
        self._apply(flags)

    def update(self, flags: UpdateFlags, names: Iterable[str]) -> None:
        """Raises InvalidTransition."""
        self._enter(SyncEvent.UPDATE)
        self._announce(1, names)
        self._apply(flags)

    def start(self, *, whole: bool) -> None:
        """The trainer opens a round: from now on no participant has complete weights.

        Raises InvalidTransition while a round is open.
        """
        if self.has_unpublished:
            raise InvalidTransition(409, "a weight update is open already: finish it first")
        self._enter(SyncEvent.UPDATE)
        self.round.calls += 1
        self.round.started, self.round.whole = True, whole

    def commit_end(self, flags: UpdateFlags | None = None) -> None:
        """The trainer ends the round. Raises InvalidTransition if none is open."""
        if not self.has_unpublished:
            raise InvalidTransition(400, "no weight-update session is open")
        self._enter(SyncEvent.UPDATE)
        self.round.last = flags or UpdateFlags(flush_cache=True)
        self.round.batched = True  # this is the last call of the round

    def on_result(self, result: WorkerResult, *, modified: bool = True) -> None:
        """Record a participant's result of the current step.

        `modified`: it may have applied weights.
        """
        participant, ok = self.participant_states[result.worker], result.success
        if not ok:
            participant.failed, participant.refused = result.reason, result.unchanged
        if self.state is SyncState.JOINING:
            participant.joined = ok
            participant.status = ParticipantStatus.OK if ok else ParticipantStatus.LOST
        elif self.state is SyncState.ARMING:
            participant.armed = ok
        elif self.state is SyncState.COMMITTING:
            participant.modified = participant.modified or modified
            participant.armed = participant.armed and not ok

    def finish_step(self) -> SyncState:
        """End the step, after each participant has a result or timed out.

        Returns the next state.
        """
        if self.state is SyncState.COMMITTING:
            return self._finish_commit()
        succeeded = {
            SyncState.JOINING: SyncEvent.JOINED,
            SyncState.ARMING: SyncEvent.READY,
        }[self.state]
        self._enter(succeeded if self.all_ok else SyncEvent.FAILED)
        if not self.all_ok:
            self.cause = self.cause or self.first_failure
        return self.state

    def close(self) -> None:
        """End the round: the participants' weights are compared next. Raises InvalidTransition."""
        self._enter(SyncEvent.CLOSED)

    def publish(self, agreed: Iterable[str]) -> dict[str, str]:
        """Publish for the `agreed` participants, proven to have the same weights.

        Returns the names of the others with reasons. If a participant failed, the sync fails,
        because its group is unusable.
        """
        matching, uncertain = set(agreed), {}
        for name, participant in self.participant_states.items():
            if name in matching and not participant.failed:
                participant.modified, participant.status = False, ParticipantStatus.OK
            else:
                uncertain[name] = (
                    participant.failed or "its weights differ from those of the others"
                )
                participant.status = ParticipantStatus.UNCERTAIN
        self.round = Round()
        self._enter(SyncEvent.PUBLISHED)
        if not self.all_ok:
            self.fail(self.first_failure)
        return uncertain

    def abandon(self) -> dict[str, str]:
        """Drop the round.

        Returns the names of participants that have a part of it, with reasons.
        """
        reason = self.cause or "the sync was not ended before generation continued"
        uncertain = {
            name: participant.failed or reason
            for name, participant in self.participant_states.items()
            if participant.modified
        }
        for name in uncertain:
            self.participant_states[name].status = ParticipantStatus.UNCERTAIN
            self.participant_states[name].modified = False
        self.round = Round()
        return uncertain

    def fail(self, cause: str, name: str = "") -> None:
        """Fail the sync: its owner or the participant `name` is lost, or it was interrupted."""
        self.cause = self.cause or cause
        if name in self.participant_states:
            self.participant_states[name].failed = self.participant_states[name].failed or cause
        self._enter(SyncEvent.FAILED)

    def leave(self) -> None:
        """The trainer destroys the group. Raises InvalidTransition if there is none."""
        self._enter(SyncEvent.DESTROY)

    def on_left(self, name: str, *, ok: bool) -> None:
        """Record that a participant was called to leave the group; `ok`: it has left."""
        participant = self.participant_states[name]
        participant.armed, participant.joined = (
            participant.armed and not ok,
            participant.joined and not ok,
        )
        if not ok and participant.status is not ParticipantStatus.UNCERTAIN:
            participant.status = ParticipantStatus.LOST

    def end(self) -> dict[str, str]:
        """End the sync after all participants were called to leave.

        Returns the names of uncertain participants with reasons.
        """
        uncertain = self.abandon()
        self._enter(SyncEvent.DISARMED)
        return uncertain

    def check(self, event: SyncEvent) -> None:
        """Raises InvalidTransition, with the last failure, if the event is not allowed now."""
        try:
            next_state(self.state, event)
        except InvalidTransition as error:
            if str(error) == NO_GROUP and self.cause:
                message = f"{error}; the last one ended: {self.cause}"
                raise InvalidTransition(error.status, message) from None
            raise

    @property
    def first_failure(self) -> str:
        failed = [
            (name, participant.failed)
            for name, participant in self.participant_states.items()
            if participant.failed
        ]
        return f"{failed[0][0]}: {failed[0][1]}" if failed else ""

    def participant_statuses(self) -> Mapping[str, str]:
        moving = (SyncState.COMMITTING, SyncState.VERIFYING)
        return {
            name: ParticipantStatus.UPDATING.value
            if self.state in moving and participant.status is ParticipantStatus.OK
            else participant.status.value
            for name, participant in self.participant_states.items()
        }

    def _enter(self, event: SyncEvent) -> None:
        self.check(event)
        self.state = next_state(self.state, event)

    def _announce(self, buckets: int, names: Iterable[str]) -> None:
        self.round.buckets += buckets
        self.round.names |= set(names)

    def _apply(self, flags: UpdateFlags) -> None:
        self.round.calls += 1
        self.round.last = flags
        self.round.all_abort = self.round.all_abort and flags.abort_all_requests

    def _finish_commit(self) -> SyncState:
        """End a commit step and return the next state.

        If all participants succeeded, the round continues, or closes after its last call. If some
        failed, the last call closes the round for the others; an earlier call fails the sync.
        """
        survivors = [
            name for name, participant in self.participant_states.items() if not participant.failed
        ]
        if self.all_ok and not self.round.batched:
            self._enter(SyncEvent.APPLIED)
        elif survivors and (self.all_ok or self.round.batched or self.round.last.last):
            self._enter(SyncEvent.CLOSED)
        else:
            self.cause = self.cause or self.first_failure
            self._enter(SyncEvent.FAILED)
        return self.state
