"""This proxy's membership in its cluster: connection to the store, heartbeats, received messages.

Invariant: no request waits for the store, and a failure of the store ends only the connection,
which is opened again with back-off. A call without a reply in time counts as a lost connection.
Without a connection, peers expire after `lease_secs`, as always. A reload that changes [cluster]
starts a new membership.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable
from typing import Final, Protocol

import trio

from omni_proxy.cluster.messages import (
    AckMessage,
    ByeMessage,
    CountsMessage,
    FiguresMessage,
    ForgottenMessage,
    HealthMessage,
    HelloMessage,
    Message,
    PrefixesMessage,
    ResumedMessage,
    SessionsMessage,
    WeightsMessage,
    WorkerMessage,
    decode,
    encode,
)
from omni_proxy.cluster.proxy_figures import WorkerFigures
from omni_proxy.cluster_member.figures import FiguresSource, SharedFigures
from omni_proxy.cluster_member.lost_lease import CutOffHold
from omni_proxy.cluster_member.membership import CallHandler, Members
from omni_proxy.cluster_member.shared_hints import HintsView, SharedHints
from omni_proxy.cluster_member.shared_load import LoadView, SharedLoad
from omni_proxy.cluster_member.shared_weights import SharedWeights
from omni_proxy.cluster_member.shared_workers import SharedHealth, SharedWorkers
from omni_proxy.cluster_member.store_connection import (
    Command,
    CredentialError,
    RedisConnection,
    StoreError,
    StoreRefused,
    connected,
    read_address,
    shown_url,
    tls_context,
)
from omni_proxy.cluster_member.weight_state import decode_state
from omni_proxy.config.schema import Config
from omni_proxy.config.tables.cluster import ClusterConfig
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.health.prober import Prober
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.runtime_config.worker_drain import WorkerDrains
from omni_proxy.shared.backoff import Backoff
from omni_proxy.weight_sync.weight_operations import WeightOperations
from omni_proxy.weight_sync.worker_calls import read_labels

_log = logging.getLogger(__name__)

FIRST_PAUSE_SECS: Final = 0.05
MAX_PAUSE_SECS: Final = 1.0
HEARTBEATS: Final = 4  # heartbeats during a lease
MIN_REPLY_SECS: Final = 0.5  # shortest timeout of a reply
BYE_SECS: Final = 0.2
CALLED_SECS: Final = 2.0
WRONG_PASSWORD: Final = ("WRONGPASS", "NOAUTH")


class ProxyView(LoadView, HintsView, Protocol):
    """The requests and the routing of this proxy."""


class ClusterMember:
    """The membership service. `node_name()`: the node's name if the configuration has none."""

    def __init__(
        self,
        fleet: Fleet,
        config_store: ConfigStore,
        services: tuple[WeightOperations, WorkerDrains, Prober],
        views: tuple[ProxyView, FiguresSource],
        node_name: Callable[[], str],
    ) -> None:
        operations, drains, prober = services
        view, figures = views
        self._fleet = fleet
        self._config_store = config_store
        self._view = view
        self._node_name = node_name
        self._changed = trio.Event()  # set if [cluster] has changed
        self._load: SharedLoad | None = None
        self.name = ""
        self.connection: RedisConnection | None = None
        self._weights = SharedWeights(fleet, operations, self)
        self._workers = SharedWorkers(config_store, drains, lambda: self.table)
        self._figures = SharedFigures(figures)
        self._health = SharedHealth(fleet, prober, lambda: self.table)
        self._hints = SharedHints(fleet, view, self._store_now, lambda: self.table)
        handler = CallHandler(self._outgoing, self._apply_call, self._take_reply)
        self._members = Members(
            lambda: (self.name, self.table.name),
            lambda: int(1000 * self.table.lease_secs),
            handler,
        )
        self._cut_off = CutOffHold(
            fleet, self._lease_left, lambda workers: read_labels(workers, {}),
            lambda: self.table.on_loss == "alone",
        )  # fmt: skip
        self._save_journal = operations.journal.save_adopted
        self._applied = trio.Event()  # set if a state of another proxy has to be acknowledged
        self._nursery: trio.Nursery | None = None
        self._listening, self._listens_at = trio.CancelScope(), ""
        self._hello_received = False
        self._heartbeat_at = float("-inf")
        self._clock_ahead = 0.0  # seconds that the store's clock is ahead of ours
        self._connected_at: float | None = None
        self._losses = 0
        self._error = ""
        self._is_logged = False
        config_store.subscribe(self._follow_config)
        # First, so that a waiting request is not sent to a new worker as if it were idle.
        fleet.watch_members(self._follow_fleet, first=True)
        fleet.watch_worker(self._follow_worker, first=True)

    @property
    def enabled(self) -> bool:
        return self.table.enabled

    @property
    def is_connected(self) -> bool:
        return self._connected_at is not None

    @property
    def refuses(self) -> bool:
        """Whether the proxy is not ready because the store is not connected."""
        return self.enabled and self.table.on_loss == "refuse" and not self.is_connected

    def status(self) -> dict[str, object] | None:
        """JSON-ready, for GET /status; None without a cluster."""
        if not self.enabled:
            return None
        table, now = self.table, trio.current_time()
        peers = self._load.counts.peers if self._load is not None else {}
        return {
            "name": table.name,
            "member": self.name or None,
            "store": shown_url(self._config_store.config),
            "connected": self.is_connected,
            "losses": self._losses,
            "error": self._error or None,
            "share": list(table.share),
            "weights": self._weights.status() if "weights" in table.share else None,
            "hints": self._hints.status(),
            "members": 1 + len(peers),
            "self": {
                "member": self.name or None,
                "in_flight": self._view.load[0],
                **self._figures.own_record(),
            },
            "peers": [
                {
                    "member": name,
                    "age_secs": round(now - peer.last_message_at, 3),
                    "in_flight": peer.total,
                    "waits": peer.waits,
                    **self._figures.record_of(name),
                }
                for name, peer in sorted(peers.items())
            ],
        }

    def peer_figures(self, worker: Worker) -> WorkerFigures | None:
        """The worker's figures through the other proxies together; None if there are none."""
        alone = self._load is None or not self._load.counts.peers
        return None if alone else self._figures.peer_figures(worker)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled; without [cluster], wait for a configuration with one."""
        task_status.started()
        while True:
            changed = self._changed
            if self.enabled:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._run_membership)
                    await changed.wait()
                    nursery.cancel_scope.cancel()
            else:
                await changed.wait()

    @property
    def table(self) -> ClusterConfig:
        return self._config_store.config.cluster

    @property
    def lock_timeout_secs(self) -> float:
        return self._config_store.config.admin.lock_timeout_secs

    async def needed(self) -> set[str]:
        """See `shared_weights.Membership`."""
        return await self._members.needed()

    def _lease_left(self) -> float | None:
        """See `lost_lease.CutOffHold`."""
        if "weights" not in self.table.share or not self._weights.in_use:
            return None
        renewed_at = self._weights.own_lease.renewed_at
        return renewed_at + self.table.lease_secs - trio.current_time()

    def _follow_config(self, old: Config, new: Config) -> None:
        if new.cluster != old.cluster:
            self._changed.set()
            self._changed = trio.Event()

    def _follow_fleet(self) -> None:
        if self._load is not None:
            self._load.follow_fleet()

    def _follow_worker(self, worker: Worker) -> None:
        if self._load is not None:
            self._load.follow_worker(worker)

    async def _run_membership(self) -> None:
        """Run a membership with the current [cluster], until cancelled."""
        self.name = f"{self.table.node or self._node_name()}/{secrets.token_hex(4)}"
        self._load = load = SharedLoad(self._fleet, self._view, self.name)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._stay_connected, load)
                nursery.start_soon(self._cut_off.run, self.table.lease_secs)
                nursery.start_soon(self._workers.run)
                nursery.start_soon(self._members.run)
                self._nursery = nursery
                while True:
                    now = trio.current_time()
                    load.expire(now, self._peer_secs)
                    load.smooth(self.table)
                    load.share_bounds(now, self._store_now(), self.table)
                    peers = load.counts.peers
                    in_flight = sum(peer.total for peer in peers.values())
                    self._figures.keep(peers, in_flight)
                    await trio.sleep(self.table.publish_secs)
        finally:
            load.forget()
            self._figures.forget()
            self._weights.disconnect()
            self._load = self._nursery = None
            self._listens_at = ""

    async def _stay_connected(self, load: SharedLoad) -> None:
        backoff = Backoff(FIRST_PAUSE_SECS, MAX_PAUSE_SECS)
        while True:
            try:
                await self._connect(load, backoff)
            except* (StoreError, CredentialError) as errors:
                self._note_loss(_reason(errors))
            finally:
                self._connected_at = self.connection = None
                self._members.disconnect()
            await trio.sleep(backoff.next_delay())

    async def _connect(self, load: SharedLoad, backoff: Backoff) -> None:
        """Connect, and run until the connection is lost. Raises StoreError, CredentialError."""
        config = self._config_store.config
        address = await trio.to_thread.run_sync(read_address, config)
        tls = await trio.to_thread.run_sync(tls_context, address, config)
        timeout_secs = self._reply_timeout_secs
        with trio.move_on_after(timeout_secs) as scope:
            async with connected(address, self._on_message, tls, timeout_secs) as connection:
                scope.deadline = math.inf  # from here each reply has its own timeout
                await connection.call(("SUBSCRIBE", self._channel))
                await self._members.connect(connection)
                await self._listen(connection.local_host)
                self._heartbeat_at = -math.inf
                await self._send_batch(connection, load)
                if "weights" in self.table.share:
                    await self._weights.connect(connection)
                await self._workers.connect(connection)
                hello = encode(HelloMessage(self.name))
                await connection.call(("PUBLISH", self._channel, hello))
                backoff.reset()
                self.connection = connection
                self._note_connected()
                self._figures.begin()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._acknowledge, connection, load)
                    await self._publish(connection, load)
        if scope.cancelled_caught:
            raise StoreError(f"no reply for {timeout_secs:g} s")

    async def _publish(self, connection: RedisConnection, load: SharedLoad) -> None:
        """Publish every `publish_secs`, until the connection is lost. Raises StoreError."""
        try:
            while True:
                await self._send_batch(connection, load)
                await self._weights.tick(connection)
                await self._workers.tick(connection, self.name)
                await self._health.tick(connection, self.name)
                await self._figures.tick(connection, self._channel, self.name)
                await self._hints.tick(connection, self.name)
                await trio.sleep(self.table.publish_secs)
        except trio.Cancelled:
            with trio.move_on_after(BYE_SECS) as scope:
                scope.shield = True
                bye = encode(ByeMessage(self.name))
                await connection.send(
                    ("PUBLISH", self._channel, bye),
                    *self._members.farewell(),
                )
            raise

    async def _send_batch(self, connection: RedisConnection, load: SharedLoad) -> None:
        """Send changed counts, and a heartbeat if it is due. Raises StoreError."""
        now, table = trio.current_time(), self.table
        beats = now - self._heartbeat_at >= table.lease_secs / HEARTBEATS
        whole, self._hello_received = beats or self._hello_received, False
        message = load.own_message(now, whole=whole)
        batch: list[Command] = []
        if message is not None:
            batch.append(("PUBLISH", self._channel, encode(message)))
        if beats:
            self._heartbeat_at = now
            batch += [*self._members.registration(), ("TIME",)]
            of_weights = self._weights.heartbeat()
            replies = (await connection.call(*batch, *of_weights))[len(batch) - 1 :]
            secs, microsecs = map(int, replies[0])
            self._clock_ahead = secs + microsecs / 1e6 - trio.current_time()
            self._weights.own_lease.renewed(now)
            self._weights.take_heartbeat(replies[1:])
        elif batch:
            await connection.call(*batch)

    async def _listen(self, host: str) -> None:
        """Listen for calls of members, if the local address has changed."""
        if host == self._listens_at or self._nursery is None or "weights" not in self.table.share:
            return
        self._listens_at = host
        self._listening.cancel()
        self._listening = trio.CancelScope()
        await self._nursery.start(self._members.listen, host, self._listening)

    def _outgoing(self) -> bytes | None:
        """See `membership.CallHandler`."""
        return self._weights.message or None if self._weights.is_holder else None

    async def _apply_call(self, payload: bytes) -> list[bytes]:
        """See `membership.CallHandler`. Called while this proxy is cut off from the store.

        Applies a state of weights; returns the acknowledgement after it is applied.
        """
        message, load = decode(payload), self._load
        state = decode_state(message.state) if isinstance(message, WeightsMessage) else None
        if state is None or load is None or "weights" not in self.table.share:
            return []
        is_new = self._weights.take(state)
        if self._weights.is_holder or self._weights.followed.state.order != state.order:
            return []
        await self._fleet.await_replicated()
        if is_new:
            self._cut_off.note_versions()
            await self._save_journal()
        counts = load.own_message(trio.current_time(), whole=True)
        acknowledged = AckMessage(self.name, state.fencing_token, state.number)
        return [encode(message) for message in (counts, acknowledged) if message is not None]

    def _take_reply(self, payload: bytes) -> None:
        self._on_message(b"", payload)

    @property
    def _peer_secs(self) -> float:
        """Time without messages after which a peer expires; longer while members are called."""
        return self.table.lease_secs + (CALLED_SECS if self._weights.is_holder else 0.0)

    async def _acknowledge(self, connection: RedisConnection, load: SharedLoad) -> None:
        """Acknowledge weight states of others, after they are applied in all processes here."""
        while True:
            await trio.lowlevel.checkpoint()
            state = self._weights.followed.state
            if state.fencing_token and state.holder != self.name:
                await self._fleet.await_replicated()
                messages: list[Message] = [AckMessage(self.name, state.fencing_token, state.number)]
                counts = load.own_message(trio.current_time(), whole=True)
                if counts is not None:
                    messages.insert(0, counts)
                for message in messages:
                    await connection.call(("PUBLISH", self._channel, encode(message)))
                await self._save_journal()
            if self._weights.followed.state is state:
                await self._applied.wait()
                self._applied = trio.Event()

    def _on_message(self, channel: bytes, payload: bytes) -> None:
        load, message = self._load, decode(payload)
        if load is None or message is None or message.member == self.name:
            return
        match message:
            case CountsMessage():
                load.take(message, trio.current_time())
            case HelloMessage():
                self._hello_received = True
                self._hints.repeat()
            case ByeMessage():
                load.leave(message.member)
                self._members.forget(message.member)
            case HealthMessage():
                self._health.take(message)
            case FiguresMessage():
                self._figures.take(message, load.counts.peers)
            case WorkerMessage():
                self._workers.take(message)
            case PrefixesMessage() | SessionsMessage() | ForgottenMessage():
                self._hints.take(message)
            case WeightsMessage() | AckMessage() | ResumedMessage():
                self._on_weights(message)

    def _on_weights(self, message: WeightsMessage | AckMessage | ResumedMessage) -> None:
        if "weights" not in self.table.share:
            return
        match message:
            case WeightsMessage():
                state = decode_state(message.state)
                if state is not None and self._weights.take(state):
                    self._applied.set()
            case AckMessage():
                self._weights.take_ack(message.member, message.fencing_token, message.number)
            case ResumedMessage():
                self._weights.take_resumed(message.urls)

    def _store_now(self) -> float:
        return trio.current_time() + self._clock_ahead

    @property
    def _channel(self) -> str:
        return f"{self.table.name}:members"

    @property
    def _reply_timeout_secs(self) -> float:
        return max(MIN_REPLY_SECS, self.table.lease_secs / 2)

    def _note_connected(self) -> None:
        self._connected_at = trio.current_time()
        self._heartbeat_at = -math.inf
        self._error = ""
        self._is_logged = False
        store = shown_url(self._config_store.config)
        _log.info("cluster_connected store=%s member=%s", store, self.name)

    def _note_loss(self, reason: str) -> None:
        """Log each loss once, and each new reason while it lasts."""
        self._losses += self._connected_at is not None
        if self._error != reason or not self._is_logged:
            store = shown_url(self._config_store.config)
            _log.warning("cluster_store_lost store=%s error=%s", store, reason)
        self._error, self._is_logged = reason, True


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, StoreRefused) and error.code in WRONG_PASSWORD:
        return f"the password is wrong: {error}"
    if isinstance(error, StoreRefused) and error.code == "NOPERM":
        return f"the store's user has no permission: {error}"
    return str(error)
