"""The state machine of receiving weights over trainers' groups. Pure.

    idle ─joined─> grouped ─prepared─> arming ─armed─> receiving ─received─> received
    received ─apply─> applying ─settled─> grouped         arming ─refused─> grouped
    arming, receiving, received ─lost─> failed ─joined, prepared─> ...
    failed, arming, receiving, received ─ended: left, or replaced by a new trainer─> grouped or idle

Invariant: one transfer at a time, for any number of groups; a late report of a superseded call is
ignored. `grouped` without a group is `idle`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from omni_proxy.process_group.tensor_plan import GroupError

OUT_OF_ORDER_STATUS: Final = 400
CONFLICT_STATUS: Final = 409
REMEMBERED_ENDS: Final = 32


class ReceivePhase(StrEnum):
    IDLE = "idle"
    GROUPED = "grouped"
    ARMING = "arming"
    RECEIVING = "receiving"
    RECEIVED = "received"
    APPLYING = "applying"
    FAILED = "failed"


class ReceiveEvent(StrEnum):
    JOINED = "joined"
    PREPARED = "prepared"
    ARMED = "armed"
    REFUSED = "refused"
    RECEIVED = "received"
    LOST = "lost"
    ENDED = "ended"
    APPLY = "apply"
    SETTLED = "settled"


_S, _E = ReceivePhase, ReceiveEvent
# A transition not listed here cannot happen. GROUPED includes IDLE: it depends on the groups.
TABLE: Final[Mapping[ReceivePhase, Mapping[ReceiveEvent, ReceivePhase]]] = {
    _S.IDLE: {_E.JOINED: _S.GROUPED},
    _S.GROUPED: {_E.JOINED: _S.GROUPED, _E.PREPARED: _S.ARMING},
    _S.FAILED: {_E.JOINED: _S.GROUPED, _E.PREPARED: _S.ARMING, _E.ENDED: _S.GROUPED},
    _S.ARMING: {
        _E.ARMED: _S.RECEIVING,
        _E.REFUSED: _S.GROUPED,
        _E.LOST: _S.FAILED,
        _E.ENDED: _S.GROUPED,
    },
    _S.RECEIVING: {_E.RECEIVED: _S.RECEIVED, _E.LOST: _S.FAILED, _E.ENDED: _S.GROUPED},
    _S.RECEIVED: {_E.APPLY: _S.APPLYING, _E.LOST: _S.FAILED, _E.ENDED: _S.GROUPED},
    # All tensors were received: they are applied even if the trainer or its group ends.
    _S.APPLYING: {_E.SETTLED: _S.GROUPED},
}
LIVE: Final = frozenset({_S.ARMING, _S.RECEIVING, _S.RECEIVED, _S.APPLYING})
DISARMED_BY_END: Final = frozenset({_S.ARMING, _S.RECEIVING, _S.RECEIVED})


class CallOutOfOrder(GroupError):
    """A call that is not allowed in this state; `status` is 409 if another operation blocks it."""

    def __init__(self, message: str, status: int = OUT_OF_ORDER_STATUS) -> None:
        super().__init__(message)
        self.status = status


class PreparedUpdateFailed(CallOutOfOrder):
    """The completion of an update that failed after it was prepared."""

    def __init__(self, fault: str) -> None:
        super().__init__(f"the prepared weights update has failed: {fault}")


@dataclass(frozen=True, slots=True)
class GroupMembership:
    """A group that this replica has joined or is joining; `rank` is the replica's first rank."""

    group_name: str
    owner: str
    rank: int
    world_size: int
    backend: str
    joined: bool = False


@dataclass(slots=True)
class TransferRecord:
    """One update, from its prepare call on; `fault` is set when it fails."""

    number: int
    group_name: str
    buckets: int
    begun_s: float
    completing: bool = False
    fault: str = ""


def do_nothing() -> None:
    """The default of `on_lost`."""


class ReceiveState:
    """The state of all groups and of the transfer. All methods are atomic.

    Methods for a trainer's calls raise CallOutOfOrder; those that report an outcome never do.

    `on_lost` is called when a prepared transfer cannot complete any more, for any reason.
    """

    def __init__(self) -> None:
        self.on_lost: Callable[[], None] = do_nothing
        self._state = ReceivePhase.IDLE
        self._groups: dict[str, GroupMembership] = {}
        self._joining: dict[str, GroupMembership] = {}
        self._ended: dict[str, str] = {}
        self._last = 0
        self.transfer: TransferRecord | None = None

    @property
    def state(self) -> ReceivePhase:
        depends_on_groups = self._state in (ReceivePhase.IDLE, ReceivePhase.GROUPED)
        if not depends_on_groups:
            return self._state
        joined = any(group.joined for group in self._groups.values())
        return ReceivePhase.GROUPED if joined else ReceivePhase.IDLE

    @property
    def groups(self) -> list[GroupMembership]:
        return list(self._groups.values())

    # Groups

    def begin_join(self, group: GroupMembership) -> bool:
        """A trainer's join begins; returns whether a group of that name already exists."""
        name = group.group_name
        known = self._groups.get(name)
        if name in self._joining:
            owner = known.owner if known is not None else group.owner
            raise CallOutOfOrder(
                f"group {name!r} is already being initialized, with the trainer at {owner}: wait, "
                "or destroy it",
                CONFLICT_STATUS,
            )
        self._joining[name] = group
        self._groups.setdefault(name, group)
        return known is not None

    def is_joining(self, group_name: str) -> bool:
        return group_name in self._joining

    def keep_existing(self, group: GroupMembership) -> None:
        """The trainer of the existing group is alive: the group stays unchanged."""
        if self._joining.get(group.group_name) is group:
            del self._joining[group.group_name]

    def complete_join(self, group: GroupMembership) -> bool:
        """All ranks joined; ends a transfer of the replaced group. False if it was destroyed."""
        name = group.group_name
        if self._joining.get(name) is not group:
            return False
        self._end_transfer_of(name)
        del self._joining[name]
        self._ended.pop(name, None)
        self._groups[name] = GroupMembership(
            name, group.owner, group.rank, group.world_size, group.backend, joined=True
        )
        if self._state not in LIVE:
            self._state, self.transfer = TABLE[self.state][ReceiveEvent.JOINED], None
        return True

    def abort_join(self, group: GroupMembership) -> bool:
        """The join failed: no group of that name is left. False if it was already destroyed."""
        name = group.group_name
        if self._joining.get(name) is not group:
            return False
        self._end_transfer_of(name)
        del self._joining[name]
        before = self._groups.pop(name, None)
        if before is not None and before.joined:
            # Another rank may still be in it, so a destroy must reach that rank.
            self._record_end(name, f"the trainer at {group.owner} has not replaced it")
        return True

    def require_group(self, group_name: str) -> None:
        """Raises CallOutOfOrder unless there is a group to destroy; a failed group counts."""
        if group_name not in self._groups and group_name not in self._ended:
            raise CallOutOfOrder("The group to be destroyed does not exist.")

    def leave(self, group_name: str) -> None:
        """The group was destroyed: end its transfer, and forget it."""
        self._end_transfer_of(group_name)
        self._joining.pop(group_name, None)
        self._groups.pop(group_name, None)
        self._ended.pop(group_name, None)

    # The transfer

    def require_free(self) -> None:
        """Raises CallOutOfOrder if a transfer is live."""
        transfer = self.transfer
        if self._state in LIVE and transfer is not None:
            raise CallOutOfOrder(
                f"a weights update is already in progress: group {transfer.group_name!r} is "
                f"{self._state}; complete it, or destroy its group",
                CONFLICT_STATUS,
            )

    def prepare(self, group_name: str, buckets: int, now_s: float) -> TransferRecord:
        """Begin a transfer; no memory is allocated yet."""
        self.require_free()
        self._require_joined(group_name)
        self._last += 1
        self.transfer = TransferRecord(self._last, group_name, buckets, now_s)
        self._state = TABLE[self.state][ReceiveEvent.PREPARED]
        return self.transfer

    def complete(self, group_name: str) -> TransferRecord:
        """Begin the completion of the prepared transfer and return it."""
        transfer = self.transfer
        if transfer is None and group_name in self._ended:
            raise PreparedUpdateFailed(self._ended[group_name])
        if transfer is None:
            raise CallOutOfOrder(
                "no weights update is prepared: call prepare_weights_update before "
                "complete_weights_update"
            )
        if transfer.group_name != group_name:
            raise CallOutOfOrder(
                f"the prepared weights update is that of group {transfer.group_name!r}, not of "
                f"{group_name!r}"
            )
        if transfer.fault:
            raise PreparedUpdateFailed(transfer.fault)
        if transfer.completing or self._state is ReceivePhase.ARMING:
            doing = "completed" if transfer.completing else "prepared"
            raise CallOutOfOrder(
                f"the weights update of group {group_name!r} is already being {doing}: wait for "
                "its result",
                CONFLICT_STATUS,
            )
        transfer.completing = True
        return transfer

    def is_current(self, transfer: TransferRecord) -> bool:
        return transfer is self.transfer and self._state in LIVE

    def report(self, transfer: TransferRecord, event: ReceiveEvent, fault: str = "") -> bool:
        """Apply the event; False if the transfer has ended or its state doesn't have the event."""
        if not self.is_current(transfer) or event not in TABLE[self._state]:
            return False
        self._state = TABLE[self._state][event]
        if event is ReceiveEvent.LOST:
            transfer.fault = fault
            # A failed group cannot be used again: its receiver has left it.
            self._groups.pop(transfer.group_name, None)
            self._record_end(transfer.group_name, fault)
            self.on_lost()
        elif self._state is ReceivePhase.GROUPED:
            self.transfer = None
        return True

    def _require_joined(self, group_name: str) -> None:
        known = self._groups.get(group_name)
        if known is not None and known.joined:
            return
        if known is not None:
            raise CallOutOfOrder(f"group {group_name!r} is being initialized", CONFLICT_STATUS)
        if group_name in self._ended:
            raise CallOutOfOrder(
                f"group {group_name!r} has ended ({self._ended[group_name]}): call "
                "init_weights_update_group again"
            )
        raise CallOutOfOrder(
            f"group {group_name!r} is not initialized: call init_weights_update_group first"
        )

    def _end_transfer_of(self, group_name: str) -> None:
        transfer = self.transfer
        if transfer is None or transfer.group_name != group_name:
            return
        if ReceiveEvent.ENDED in TABLE[self._state]:
            disarmed = self._state in DISARMED_BY_END
            self._state = TABLE[self._state][ReceiveEvent.ENDED]
            self.transfer = None
            if disarmed:
                self.on_lost()

    def _record_end(self, group_name: str, reason: str) -> None:
        self._ended[group_name] = reason
        while len(self._ended) > REMEMBERED_ENDS:
            self._ended.pop(next(iter(self._ended)))

    def facts(self, now_s: float) -> dict[str, Any]:
        """JSON-ready."""
        transfer, live = self.transfer, self._state in LIVE
        group_name = transfer.group_name if transfer is not None else None
        if group_name is None and len(self._groups) == 1:
            group_name = next(iter(self._groups))
        owner = self._groups[group_name].owner if group_name in self._groups else None
        return {
            "state": self.state.value,
            "group_name": group_name,
            "owner": owner,
            "groups": [
                {
                    "group_name": group.group_name,
                    "owner": group.owner,
                    "rank": group.rank,
                    "world_size": group.world_size,
                    "backend": group.backend,
                    "joined": group.joined,
                }
                for group in self._groups.values()
            ],
            "num_buckets": transfer.buckets if transfer is not None else 0,
            "secs": round(now_s - transfer.begun_s, 3) if transfer is not None and live else 0.0,
            "error": transfer.fault if transfer is not None and transfer.fault else None,
        }
