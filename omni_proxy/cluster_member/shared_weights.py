"""Weight operations in a cluster: one at a time over all proxies, by a lease in the store.

Invariant: while an operation calls workers, each member of the cluster has acknowledged that it
holds these workers, or its own lease has ended; otherwise the operation is refused (503). The store
drops writes of a holder that has lost its lease (`cluster.operation_lease`). The result of an
operation is published before the lease is released. If the holder is lost during an operation, its
workers are uncertain at all members.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final, Protocol

import trio
from msgspec.structs import replace

from omni_proxy.cluster.messages import ResumedMessage, WeightsMessage, encode
from omni_proxy.cluster.operation_lease import (
    ACQUIRE,
    READ,
    RELEASE,
    RENEW,
    RESTORE,
    WRITE,
    Acknowledgements,
    MemberLease,
    fencing_token_of,
)
from omni_proxy.cluster_member.store_connection import Command, RedisConnection, StoreError
from omni_proxy.cluster_member.weight_state import (
    FollowedWeights,
    WeightState,
    collect,
    decode_state,
    encode_state,
)
from omni_proxy.config.tables.cluster import ClusterConfig
from omni_proxy.fleet.registry import Fleet
from omni_proxy.weight_sync.weight_operations import WeightOperations
from omni_proxy.wire.errors import HttpError

_log = logging.getLogger(__name__)

POLL_SECS: Final = 0.02
ACQUIRE_POLL_SECS: Final = 0.1
END_SECS: Final = 2.0  # wait for acknowledgements of an operation's end; others get it later
PUBLISH_SECS: Final = 0.2  # interval of checks for changes during a long operation


class Membership(Protocol):
    """The membership that this is a part of."""

    @property
    def name(self) -> str: ...
    @property
    def table(self) -> ClusterConfig: ...
    @property
    def connection(self) -> RedisConnection | None: ...
    @property
    def lock_timeout_secs(self) -> float: ...
    async def needed(self) -> set[str]:
        """Members that have to acknowledge: with a valid lease, or possibly cut off from the store.

        Raises StoreError.
        """


class SharedWeights:
    def __init__(self, fleet: Fleet, operations: WeightOperations, member: Membership) -> None:
        self.followed = FollowedWeights(fleet, operations.journal)
        self.own_lease = MemberLease()
        self._fleet = fleet
        self._operations = operations
        self._member = member
        self._acks: Acknowledgements | None = None  # while this proxy has the lease
        self._number = 0
        self._published = WeightState()
        self.message = b""  # the last published message
        self._published_at = float("-inf")
        # The value of a lease that was lost during an operation whose result is not published yet.
        self._lost_lease = ""
        fleet.await_cluster = self.hold
        operations.queue.acquire_cluster = self.acquire
        operations.queue.release_cluster = self.release
        operations.is_updated_by_peer = self.followed.is_held
        operations.on_resumed = self._note_resumed
        self._resumed: list[str] = []

    @property
    def is_holder(self) -> bool:
        return self._acks is not None

    @property
    def fencing_token(self) -> int:
        return self._acks.fencing_token if self._acks is not None else 0

    @property
    def in_use(self) -> bool:
        """Whether weights were ever changed, as far as this proxy has recorded."""
        return self.followed.state.fencing_token > 0 or self._operations.journal.published.epoch > 0

    def status(self) -> dict[str, object]:
        state = self.followed.state
        return {
            "holder": (
                self._member.name if self.is_holder else state.holder if state.busy else None
            ),
            "token": max(self.fencing_token, state.fencing_token),
            "busy": self.is_holder or state.busy,
            "held_elsewhere": [w.url for w in self._fleet.workers if self.followed.is_held(w)],
        }

    async def acquire(self) -> None:
        """Acquire the lease. Raises HttpError 503 after the lock timeout."""
        if not self._shares or self.is_holder:
            return
        deadline = trio.current_time() + self._member.lock_timeout_secs
        while True:
            fencing_token, holder = await self._call_store(self._acquire_once)
            if fencing_token:
                break
            if trio.current_time() >= deadline:
                message = f"another proxy of the cluster has the lease on weights: {holder}"
                error = HttpError(503, message, "update_in_progress")
                raise error.with_headers(("retry-after", "1"))
            await trio.sleep(ACQUIRE_POLL_SECS)
        self._acks, self._number = Acknowledgements(fencing_token), 0
        if self.followed.state.busy and self.followed.state.holder != self._member.name:
            self.followed.orphan(_lost(self.followed.state))
        self._lost_lease = ""
        _log.info("cluster_weights_acquired token=%d", fencing_token)

    async def hold(self) -> None:
        """Publish the current cordons, and wait until all members have applied them.

        Raises HttpError 503.
        """
        if not self._shares:
            return
        await self.acquire()
        number = await self._call_store(lambda connection: self._write(connection, busy=True))
        deadline = trio.current_time() + self._member.table.lease_secs + 1
        missing = await self._missing(number, deadline)
        if missing:
            names = ", ".join(missing)
            message = f"nothing was sent: proxies of the cluster did not acknowledge: {names}"
            raise HttpError(503, message, "cluster_unacknowledged")

    async def release(self) -> None:
        """Publish the result of an operation, and release the lease. Never raises."""
        if not self.is_holder:
            self._mark_own_result_uncertain()
            return
        try:
            busy = self._keeps_lease
            number = await self._call_store(lambda connection: self._write(connection, busy=busy))
            missing = await self._missing(number, trio.current_time() + END_SECS)
            if missing:
                _log.warning("cluster_weights_unacknowledged members=%s", ",".join(missing))
            if not busy:
                await self._call_store(self._release_lease)
        except HttpError as error:
            self._on_lease_lost(error.message)

    def heartbeat(self) -> list[Command]:
        """Commands that renew the lease and read its holder; for `take_heartbeat`."""
        renew: list[Command] = []
        if self.is_holder:
            renew = [("EVAL", RENEW, 1, self._lease_key, self._lease_value, self._lease_ms)]
        return [("EVAL", READ, 1, self._lease_key, self._lease_ms), *renew]

    def take_heartbeat(self, replies: list[Any]) -> None:
        value = replies[0]
        if self.is_holder and len(replies) > 1 and not replies[1]:
            self._on_lease_lost("it has ended in the store")
        state = self.followed.state
        fencing_token = fencing_token_of(value)
        if state.busy and fencing_token != state.fencing_token and not self.is_holder:
            if state.holder != self._member.name:
                self.followed.orphan(_lost(state))
            self.followed.note(replace(state, busy=False))

    async def connect(self, connection: RedisConnection) -> None:
        """Read the state from the store, after the member was registered. Raises StoreError."""
        (payload,) = await connection.call(("GET", self._state_key))
        state = decode_state(payload) if payload else None
        known = self.followed.state
        if state is not None and state.order > known.order:
            self.take(state)
        elif known.fencing_token and (state is None or state.order < known.order):
            # The store was restarted and has lost its data.
            keys = ("EVAL", RESTORE, 2, self._token_key, self._state_key)
            await connection.call((*keys, known.fencing_token, known.number, encode_state(known)))

    def take(self, state: WeightState) -> bool:
        """Apply a state. Returns whether it was applied, and has to be acknowledged."""
        if self.is_holder or not self.followed.apply(state):
            return False
        if self._operations.queue.current is None:
            self._lost_lease = ""  # the state of another proxy replaces ours
        return True

    def take_ack(self, member: str, fencing_token: int, number: int) -> None:
        if self._acks is not None:
            self._acks.take(member, fencing_token, number)

    def take_resumed(self, urls: tuple[str, ...]) -> None:
        workers = [worker for url in urls if (worker := self._fleet.find(url)) is not None]
        self._operations.clear_pauses(workers)

    async def tick(self, connection: RedisConnection) -> None:
        """Publish changes of a running operation. Raises StoreError."""
        if self._resumed:
            urls, self._resumed = tuple(self._resumed), []
            message = encode(ResumedMessage(self._member.name, urls))
            await connection.call(("PUBLISH", self._channel, message))
        now = trio.current_time()
        if now - self._published_at < PUBLISH_SECS:
            return
        self._published_at = now
        busy = self._keeps_lease or self._operations.queue.current is not None
        if self._lost_lease and not busy:
            await self._publish_late(connection)
        if not self.is_holder:
            return
        state = collect(self._fleet, self._operations.journal, holder=self._member.name, busy=busy)
        if state != self._published:
            await self._write(connection, busy=busy)
        if not busy and self.is_holder:
            await self._release_lease(connection)

    def disconnect(self) -> None:
        """Drop the lease locally, when [cluster] has changed or the program ends."""
        self._acks = None

    async def _publish_late(self, connection: RedisConnection) -> None:
        """Publish the result of an operation that lost its lease, if no other proxy acquired it."""
        await connection.call(("EVAL", RELEASE, 1, self._lease_key, self._lost_lease))
        fencing_token, _ = await self._acquire_once(connection)
        if fencing_token:
            self._acks, self._number = Acknowledgements(fencing_token), 0
            if self._lost_lease:
                await self._write(connection, busy=False)
            self._lost_lease = ""
            await self._release_lease(connection)

    def _mark_own_result_uncertain(self) -> None:
        """Mark the operation's targets uncertain if another proxy acquired the lease during it:
        both may have changed the same workers."""
        operation, state = self._operations.queue.current, self.followed.state
        lost_fencing_token = int(self._lost_lease.partition(":")[0] or 0)
        if (
            operation is not None
            and lost_fencing_token
            and state.fencing_token > lost_fencing_token
        ):
            self._lost_lease = ""
            reason = "the lease on weights of the cluster was lost during the update"
            self._operations.journal.mark_uncertain(dict.fromkeys(operation.targets, reason))

    @property
    def _keeps_lease(self) -> bool:
        """Whether there is a trainer's group or a rollout, whose next operations need the lease."""
        journal = self._operations.journal
        return journal.in_group or journal.rollout is not None

    @property
    def _shares(self) -> bool:
        return self._member.table.enabled and "weights" in self._member.table.share

    async def _call_store(self, call: Callable[[RedisConnection], Any]) -> Any:
        """Run `call` with the connection. Raises HttpError 503 if the store can't be used."""
        connection = self._member.connection
        reason = "it is not connected"
        if connection is not None:
            try:
                with trio.fail_after(self._member.table.lease_secs):
                    return await call(connection)
            except StoreError as error:
                reason = str(error)
            except trio.TooSlowError:
                reason = "it does not answer"
        message = f"nothing was sent: the store of the cluster can't be used: {reason}"
        refusal = HttpError(503, message, "cluster_store_lost")
        raise refusal.with_headers(("retry-after", "1"))

    async def _acquire_once(self, connection: RedisConnection) -> tuple[int, str]:
        """Try to acquire; return the fencing token, or 0 and the holder.

        Also applies the stored state.
        """
        command = ("EVAL", ACQUIRE, 2, self._lease_key, self._token_key)
        reply, payload = await connection.call(
            (*command, self._member.name, self._lease_ms), ("GET", self._state_key)
        )
        state = decode_state(payload) if payload else None
        if state is not None:
            self.take(state)
        return int(reply[0]), bytes(reply[1]).decode(errors="replace").partition(":")[2]

    async def _write(self, connection: RedisConnection, *, busy: bool) -> int:
        """Publish the current state; return its number. Raises StoreError."""
        state = collect(self._fleet, self._operations.journal, holder=self._member.name, busy=busy)
        self._number += 1
        numbered = replace(state, fencing_token=self.fencing_token, number=self._number)
        payload = encode_state(numbered)
        message = encode(WeightsMessage(self._member.name, payload))
        (written,) = await connection.call(
            ("EVAL", WRITE, 2, self._lease_key, self._state_key, self._lease_value,
             self._lease_ms, payload, self._channel, message)
        )  # fmt: skip
        if not written:
            raise StoreError("the lease on weights was lost")
        self._published, self.message = state, message
        self.followed.note(numbered)
        return numbered.number

    async def _release_lease(self, connection: RedisConnection) -> None:
        value, self._acks = self._lease_value, None
        await connection.call(("EVAL", RELEASE, 1, self._lease_key, value))

    async def _missing(self, number: int, deadline: float) -> list[str]:
        """Wait for acknowledgements until `deadline`; return the members without one."""
        while True:
            needed = await self._call_store(lambda _: self._member.needed())
            missing = (
                self._acks.missing(needed, number) if self._acks is not None else sorted(needed)
            )
            if not missing or trio.current_time() >= deadline:
                return missing
            await trio.sleep(POLL_SECS)

    def _on_lease_lost(self, reason: str) -> None:
        if self.is_holder:
            _log.error("cluster_weights_lost token=%d error=%s", self.fencing_token, reason)
            self._lost_lease, self._acks = self._lease_value, None

    def _note_resumed(self, urls: Any) -> None:
        if self._shares:
            self._resumed += urls

    @property
    def _lease_value(self) -> str:
        return f"{self.fencing_token}:{self._member.name}"

    @property
    def _lease_ms(self) -> int:
        return int(1000 * self._member.table.lease_secs)

    @property
    def _channel(self) -> str:
        return f"{self._member.table.name}:members"

    @property
    def _lease_key(self) -> str:
        return f"{self._member.table.name}:weights-lease"

    @property
    def _token_key(self) -> str:
        return f"{self._member.table.name}:weights-token"

    @property
    def _state_key(self) -> str:
        return f"{self._member.table.name}:weights"


def _lost(state: WeightState) -> str:
    return f"the proxy {state.holder} was lost while it was updating weights"
