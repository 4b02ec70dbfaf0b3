"""State table of a weight sync with a trainer's group, and the refusals of calls. Pure.

    idle ─init→ joining ─joined→ grouped ─prepare→ arming ─ready→ armed ─complete→ committing
                                    ├─update (one phase)──────────────────────────────→┘
                                    ├←─────applied (a bucket of several)───────────────┤
                                    └←─published── verifying ←─closed (the whole)──────┘
    any but idle ─failed, destroy→ aborting ─disarmed→ idle

Invariant: a transition that is not in `TRANSITIONS` does not happen. A call that is not allowed in
a state has a row in `REFUSALS`: the status and message of its response (weight-sync.md 6.2).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class SyncState(StrEnum):
    """The state of the one weight sync; the diagram is above."""

    IDLE = "idle"
    JOINING = "joining"
    GROUPED = "grouped"
    ARMING = "arming"
    ARMED = "armed"
    COMMITTING = "committing"
    VERIFYING = "verifying"
    ABORTING = "aborting"


class SyncEvent(StrEnum):
    """What changes the state. The first five are calls of the trainer, the others are results."""

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
BUSY: Final = "the members of the group are armed already, or another call of it is under way"
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
    """The call is not allowed in the present state; nothing changed. `status`: of its response."""

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
