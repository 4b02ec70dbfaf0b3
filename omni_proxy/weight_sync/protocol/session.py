"""One grouped weight sync over several members: who it belongs to, how each stands, what it proves.

Pure: whoever calls the members tells here what they answered, and asks what follows. A round is
everything from its first applied call to its publication. Invariants: a step succeeds only where
every member did it; a version is published only over members that took all of it and agree; who
may hold anything else is uncertain in the end; after a failure everybody is to be disarmed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from omni_proxy.admin_ops.results import WorkerResult
from omni_proxy.weight_sync.protocol.rank_layout import RankRange
from omni_proxy.weight_sync.protocol.requests import Marks
from omni_proxy.weight_sync.protocol.states import NO_GROUP, OutOfPlace, SyncEvent, SyncState, after

NO_MARKS: Final = Marks()


class Standing(StrEnum):
    """How one member stands in it."""

    OK = "ok"
    JOINING = "joining"
    UPDATING = "updating"
    UNCERTAIN = "uncertain"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Owner:
    """Who made the group; `since` in seconds of the caller's clock."""

    group_name: str
    address: str
    since: float
    caller: str = ""

    def told(self, now: float) -> dict[str, object]:
        """JSON-ready."""
        return {
            "group_name": self.group_name,
            "master": self.address,
            "caller": self.caller,
            "age_secs": round(now - self.since, 3),
        }

    def in_words(self, now: float, state: SyncState) -> str:
        by = f" of {self.caller}" if self.caller else ""
        return (
            f"group {self.group_name!r} at {self.address}{by}, "
            f"begun {now - self.since:.1f} s ago, step {state}"
        )


@dataclass(slots=True)
class Part:
    """One member's. `touched`: it may hold something that is not published.

    `refused`: it failed, and said so plainly, and that nothing was changed.
    """

    seat: RankRange
    standing: Standing = Standing.JOINING
    joined: bool = False
    armed: bool = False
    touched: bool = False
    failed: str = ""
    refused: bool = False


@dataclass(slots=True)
class Round:
    """What was applied, or announced, since the last publication."""

    batched: bool = False
    buckets: int = 0
    calls: int = 0  # that applied something
    names: set[str] = field(default_factory=set)
    last: Marks = NO_MARKS
    all_abort: bool = True

    @property
    def ends_itself(self) -> bool:
        """Nothing more is to come, by what its calls said of themselves."""
        return self.batched or (self.calls > 0 and (self.last.last or self.all_abort))


class SyncSession:
    """`cause`: why the last one ended, "" where it ended well."""

    def __init__(self) -> None:
        self.state = SyncState.IDLE
        self.owner: Owner | None = None
        self.parts: dict[str, Part] = {}
        self.round = Round()
        self.cause = ""

    @property
    def open(self) -> bool:
        """Something is applied that is not published."""
        return self.round.calls > 0

    @property
    def whole(self) -> bool:
        """Nobody has failed in it."""
        return not any(part.failed for part in self.parts.values())

    def begin(self, owner: Owner, seats: Iterable[RankRange]) -> None:
        """Raises OutOfPlace while another one is there."""
        self._enter(SyncEvent.INIT)
        self.owner, self.cause, self.round = owner, "", Round()
        self.parts = {seat.name: Part(seat) for seat in seats}

    def arm(self, *, batched: bool, buckets: int, names: Iterable[str]) -> None:
        """Raises OutOfPlace. A whole sync is none of several parts."""
        if batched and self.state is SyncState.GROUPED and self.open:
            message = "a sync in parts is open: end it before a whole one is announced"
            raise OutOfPlace(409, message)
        self._enter(SyncEvent.PREPARE)
        self.round.batched = batched
        self._announce(buckets, names)

    def commit(self, marks: Marks) -> None:
        """Raises OutOfPlace."""
        self._enter(SyncEvent.COMPLETE)
        self._apply(marks)

    def update(self, marks: Marks, names: Iterable[str]) -> None:
        """Raises OutOfPlace."""
        self._enter(SyncEvent.UPDATE)
        self._announce(1, names)
        self._apply(marks)

    def commit_end(self) -> None:
        """Everybody is told that the round is over. Raises OutOfPlace where none is open."""
        if not self.open:
            raise OutOfPlace(400, "no weights-update session is open")
        self._enter(SyncEvent.UPDATE)
        self.round.last = Marks(flush_cache=True)
        self.round.batched = True  # nothing more is to come of it

    def hear(self, answer: WorkerResult, *, touched: bool = True) -> None:
        """What a member made of the present step. `touched`: it may have applied something."""
        part, ok = self.parts[answer.worker], answer.success
        if not ok:
            part.failed, part.refused = answer.why, answer.unchanged
        if self.state is SyncState.JOINING:
            part.joined = ok
            part.standing = Standing.OK if ok else Standing.LOST
        elif self.state is SyncState.ARMING:
            part.armed = ok
        elif self.state is SyncState.COMMITTING:
            part.touched = part.touched or touched
            part.armed = part.armed and not ok

    def settle(self) -> SyncState:
        """Everybody was heard, or was given up. What follows is in the state."""
        if self.state is SyncState.COMMITTING:
            return self._settle_applied()
        went = {SyncState.JOINING: SyncEvent.JOINED, SyncState.ARMING: SyncEvent.READY}[self.state]
        self._enter(went if self.whole else SyncEvent.FAILED)
        if not self.whole:
            self.cause = self.cause or self.first_cause
        return self.state

    def close(self) -> None:
        """Raises OutOfPlace. The round is over: what all hold is to be compared."""
        self._enter(SyncEvent.CLOSED)

    def publish(self, agreed: Iterable[str]) -> dict[str, str]:
        """`agreed`: who proved to hold the same. Who is doubted instead, by name and reason.

        Where a member had failed the group is of no more use, and is to be left.
        """
        good, doubted = set(agreed), {}
        for name, part in self.parts.items():
            if name in good and not part.failed:
                part.touched, part.standing = False, Standing.OK
            else:
                doubted[name] = part.failed or "its weights differ from those of the others"
                part.standing = Standing.UNCERTAIN
        self.round = Round()
        self._enter(SyncEvent.PUBLISHED)
        if not self.whole:
            self.fail(self.first_cause)
        return doubted

    def abandon(self) -> dict[str, str]:
        """The round will not be ended: who holds a part of it is doubted, by name and reason."""
        reason = self.cause or "the sync was not ended before generation went on"
        doubted = {n: part.failed or reason for n, part in self.parts.items() if part.touched}
        for name in doubted:
            self.parts[name].standing = Standing.UNCERTAIN
            self.parts[name].touched = False
        self.round = Round()
        return doubted

    def fail(self, cause: str, name: str = "") -> None:
        """From outside: the owner or a member is gone, or somebody wants it ended."""
        self.cause = self.cause or cause
        if name in self.parts:
            self.parts[name].failed = self.parts[name].failed or cause
        self._enter(SyncEvent.FAILED)

    def leave(self) -> None:
        """Asked for. Raises OutOfPlace where there is nothing to leave."""
        self._enter(SyncEvent.DESTROY)

    def disarm(self, name: str, *, ok: bool) -> None:
        """A member was told to leave the group; `ok`: it has, or never was in it."""
        part = self.parts[name]
        part.armed, part.joined = part.armed and not ok, part.joined and not ok
        if not ok and part.standing is not Standing.UNCERTAIN:
            part.standing = Standing.LOST

    def end(self) -> dict[str, str]:
        """Everybody was told. Who is doubted from now on, by name and reason."""
        doubted = self.abandon()
        self._enter(SyncEvent.DISARMED)
        return doubted

    def place(self, event: SyncEvent) -> None:
        """Raises OutOfPlace where it may not be asked now, with what ended the last one."""
        try:
            after(self.state, event)
        except OutOfPlace as error:
            if str(error) == NO_GROUP and self.cause:
                told = f"{error}; the last one ended: {self.cause}"
                raise OutOfPlace(error.status, told) from None
            raise

    @property
    def first_cause(self) -> str:
        failed = [(name, part.failed) for name, part in self.parts.items() if part.failed]
        return f"{failed[0][0]}: {failed[0][1]}" if failed else ""

    def standings(self) -> Mapping[str, str]:
        moving = (SyncState.COMMITTING, SyncState.VERIFYING)
        return {
            name: Standing.UPDATING.value
            if self.state in moving and part.standing is Standing.OK
            else part.standing.value
            for name, part in self.parts.items()
        }

    def _enter(self, event: SyncEvent) -> None:
        self.place(event)
        self.state = after(self.state, event)

    def _announce(self, buckets: int, names: Iterable[str]) -> None:
        self.round.buckets += buckets
        self.round.names |= set(names)

    def _apply(self, marks: Marks) -> None:
        self.round.calls += 1
        self.round.last = marks
        self.round.all_abort = self.round.all_abort and marks.abort_all_requests

    def _settle_applied(self) -> SyncState:
        """All: a bucket more, or the whole. Some: the whole over those, if it was the whole."""
        survivors = [name for name, part in self.parts.items() if not part.failed]
        if self.whole and not self.round.batched:
            self._enter(SyncEvent.APPLIED)
        elif survivors and (self.whole or self.round.batched or self.round.last.last):
            self._enter(SyncEvent.CLOSED)
        else:
            self.cause = self.cause or self.first_cause
            self._enter(SyncEvent.FAILED)
        return self.state
