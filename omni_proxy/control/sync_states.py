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


class State(StrEnum):
    """Where the one sync stands; the diagram is above."""

    IDLE = "idle"
    JOINING = "joining"
    GROUPED = "grouped"
    ARMING = "arming"
    ARMED = "armed"
    COMMITTING = "committing"
    VERIFYING = "verifying"
    ABORTING = "aborting"


class Event(StrEnum):
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


_ENDS: Final[dict[tuple[State, Event], State]] = {
    (state, event): State.ABORTING
    for state in State
    if state not in (State.IDLE, State.ABORTING)
    for event in (Event.FAILED, Event.DESTROY)
}
LEADS_TO: Final[dict[tuple[State, Event], State]] = {
    (State.IDLE, Event.INIT): State.JOINING,
    (State.JOINING, Event.JOINED): State.GROUPED,
    (State.GROUPED, Event.PREPARE): State.ARMING,
    (State.ARMING, Event.READY): State.ARMED,
    (State.ARMED, Event.COMPLETE): State.COMMITTING,
    (State.GROUPED, Event.UPDATE): State.COMMITTING,
    (State.COMMITTING, Event.APPLIED): State.GROUPED,
    (State.COMMITTING, Event.CLOSED): State.VERIFYING,
    (State.GROUPED, Event.CLOSED): State.VERIFYING,
    (State.VERIFYING, Event.PUBLISHED): State.GROUPED,
    (State.ABORTING, Event.DISARMED): State.IDLE,
    **_ENDS,
}

NO_GROUP: Final = "there is no weights-update group: call /init_weights_update_group first"
OWNED: Final = "a weights-update group exists already"
BUSY: Final = "the members of the group are armed already, or another call of it is under way"
NOT_ARMED: Final = "complete without prepare: nothing is armed"
REFUSED: Final[dict[Event, dict[State, tuple[int, str]]]] = {
    Event.INIT: dict.fromkeys((s for s in State if s is not State.IDLE), (409, OWNED)),
    Event.PREPARE: {
        **dict.fromkeys(State, (409, BUSY)),
        **dict.fromkeys((State.IDLE, State.ABORTING), (400, NO_GROUP)),
    },
    Event.UPDATE: {
        **dict.fromkeys(State, (409, BUSY)),
        **dict.fromkeys((State.IDLE, State.ABORTING), (400, NO_GROUP)),
    },
    Event.COMPLETE: {
        **dict.fromkeys(State, (409, BUSY)),
        **dict.fromkeys((State.IDLE, State.ABORTING), (400, NO_GROUP)),
        State.GROUPED: (400, NOT_ARMED),
    },
    Event.DESTROY: dict.fromkeys((State.IDLE, State.ABORTING), (400, NO_GROUP)),
}


class OutOfPlace(Exception):
    """What was asked has no place in the present state; nothing changed."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def after(state: State, event: Event) -> State:
    """Raises OutOfPlace where it is refused."""
    found = LEADS_TO.get((state, event))
    if found is None:
        status, message = REFUSED.get(event, {}).get(state, (409, f"{event} while {state}"))
        raise OutOfPlace(status, message)
    return found
