"""The states of a grouped weight sync as a table, and what may not be asked in which.

    idle ─init→ joining ─joined→ grouped ─prepare→ arming ─ready→ armed ─complete→ committing
                                    ├─update (one phase)──────────────────────────────→┘
                                    ├←─────applied (a bucket of several)───────────────┤
                                    └←─published── verifying ←─closed (the whole)──────┘
    any but idle ─failed, destroy→ aborting ─disarmed→ idle

Invariant: what is not in `LEADS_TO` does not happen; what is asked all the same has a row in
`REFUSED`, with the status and the sentence of its answer (weight-sync.md 6.2).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class SyncState(StrEnum):
    """Where the one sync stands; the diagram is above."""

    IDLE = "idle"
    JOINING = "joining"
    GROUPED = "grouped"
    ARMING = "arming"
    ARMED = "armed"
    COMMITTING = "committing"
    VERIFYING = "verifying"
    ABORTING = "aborting"


class SyncEvent(StrEnum):
    """What moves it. The first five are asked for, the others come of what was done."""

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
LEADS_TO: Final[dict[tuple[SyncState, SyncEvent], SyncState]] = {
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
REFUSED: Final[dict[SyncEvent, dict[SyncState, tuple[int, str]]]] = {
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


class OutOfPlace(Exception):
    """What was asked has no place in the present state; nothing changed."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def after(state: SyncState, event: SyncEvent) -> SyncState:
    """Raises OutOfPlace where it is refused."""
    found = LEADS_TO.get((state, event))
    if found is None:
        status, message = REFUSED.get(event, {}).get(state, (409, f"{event} while {state}"))
        raise OutOfPlace(status, message)
    return found
