"""Keeps this proxy a member of its cluster: the connection to the store, heartbeats, what arrives.

Invariant: nothing of a request waits for the store, and no failure of it ends more than the
connection, which is made again with back-off. A batch that gets no reply in time counts as a lost
connection. While there is none, peers that are not heard of are gone after `lease_secs`, as for
everybody else. A reload that changes [cluster] begins anew.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Iterator
from typing import Any, Final

import trio

from omni_proxy.backoff import Backoff
from omni_proxy.cluster.messages import (
    ByeMessage,
    CountsMessage,
    HelloMessage,
    decode,
    encode,
)
from omni_proxy.cluster_member.credentials import (
    CredentialError,
    read_address,
    shown_url,
    tls_context,
)
from omni_proxy.cluster_member.redis_connection import (
    Command,
    RedisConnection,
    StoreError,
    StoreRefused,
    connected,
)
from omni_proxy.cluster_member.shared_load import LoadView, SharedLoad
from omni_proxy.config.schema import Config
from omni_proxy.config.tables.cluster import ClusterConfig
from omni_proxy.fleet.registry import Fleet
from omni_proxy.runtime_config.config_store import ConfigStore

_log = logging.getLogger(__name__)

FIRST_PAUSE_SECS: Final = 0.05
LONGEST_PAUSE_SECS: Final = 1.0
HEARTBEATS: Final = 4  # in the time of a lease
SHORTEST_PATIENCE_SECS: Final = 0.5  # for a reply
BYE_SECS: Final = 0.2
WRONG_PASSWORD: Final = ("WRONGPASS", "NOAUTH", "NOPERM")


class ClusterMember:
    """`node_name()`: how this proxy is called where the configuration names it not."""

    def __init__(
        self, fleet: Fleet, config_store: ConfigStore, view: LoadView, node_name: Callable[[], str]
    ) -> None:
        self._fleet = fleet
        self._config_store = config_store
        self._view = view
        self._node_name = node_name
        self._changed = trio.Event()  # the table has changed
        self._load: SharedLoad | None = None
        self._member = ""
        self._hello_heard = False
        self._heartbeat_at = float("-inf")
        self._clock_ahead = 0.0  # of the store's, beside ours
        self._connected_at: float | None = None
        self._losses = 0
        self._error = ""
        self._is_logged = False
        config_store.subscribe(self._follow_config)

    @property
    def enabled(self) -> bool:
        return self._table.enabled

    @property
    def is_connected(self) -> bool:
        return self._connected_at is not None

    @property
    def refuses(self) -> bool:
        """Whether the proxy is not ready, for want of the store."""
        return self.enabled and self._table.on_loss == "refuse" and not self.is_connected

    def status(self) -> dict[str, object] | None:
        """JSON-ready, for GET /status; None without a cluster."""
        if not self.enabled:
            return None
        table, now = self._table, trio.current_time()
        peers = self._load.counts.peers if self._load is not None else {}
        return {
            "name": table.name,
            "member": self._member or None,
            "store": shown_url(self._config_store.config),
            "connected": self.is_connected,
            "losses": self._losses,
            "error": self._error or None,
            "share": list(table.share),
            "members": 1 + len(peers),
            "peers": [
                {
                    "member": name,
                    "age_secs": round(now - peer.heard_at, 3),
                    "in_flight": peer.total,
                    "waits": peer.waits,
                }
                for name, peer in sorted(peers.items())
            ],
        }

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled; without [cluster] it waits for one."""
        task_status.started()
        while True:
            changed = self._changed
            if self.enabled:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._be_member)
                    await changed.wait()
                    nursery.cancel_scope.cancel()
            else:
                await changed.wait()

    @property
    def _table(self) -> ClusterConfig:
        return self._config_store.config.cluster

    def _follow_config(self, old: Config, new: Config) -> None:
        if new.cluster != old.cluster:
            self._changed.set()
            self._changed = trio.Event()

    async def _be_member(self) -> None:
        """With the present table, until cancelled."""
        self._member = f"{self._table.node or self._node_name()}/{secrets.token_hex(4)}"
        self._load = load = SharedLoad(self._fleet, self._view, self._member)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._stay_connected, load)
                while True:
                    now = trio.current_time()
                    load.expire(now, self._table)
                    load.smooth(self._table)
                    load.share_bounds(now, now + self._clock_ahead, self._table)
                    await trio.sleep(self._table.publish_secs)
        finally:
            load.forget()
            self._load = None

    async def _stay_connected(self, load: SharedLoad) -> None:
        backoff = Backoff(FIRST_PAUSE_SECS, LONGEST_PAUSE_SECS)
        while True:
            try:
                await self._connect(load, backoff)
            except* (StoreError, CredentialError) as errors:
                self._note_loss(_reason(errors))
            finally:
                self._connected_at = None
            await trio.sleep(backoff.next_delay())

    async def _connect(self, load: SharedLoad, backoff: Backoff) -> None:
        """Until the connection is lost. Raises StoreError, CredentialError."""
        config = self._config_store.config
        address = await trio.to_thread.run_sync(read_address, config)
        tls = await trio.to_thread.run_sync(tls_context, address, config)
        deadline = trio.current_time() + self._patience_secs
        with trio.CancelScope(deadline=deadline) as scope:
            async with connected(address, self._on_message, tls) as connection:
                await connection.call(("SUBSCRIBE", self._channel))
                hello = encode(HelloMessage(self._member))
                await connection.call(("PUBLISH", self._channel, hello))
                scope.deadline = math.inf
                backoff.reset()
                self._note_connected()
                await self._publish(connection, load)
        if scope.cancelled_caught:
            raise StoreError(f"no reply for {self._patience_secs:g} s")

    async def _publish(self, connection: RedisConnection, load: SharedLoad) -> None:
        """Again and again, until the connection is lost. Raises StoreError."""
        try:
            while True:
                batch = list(self._batch(load))
                with trio.move_on_after(self._patience_secs) as scope:
                    replies = await connection.call(*batch) if batch else []
                if scope.cancelled_caught:
                    raise StoreError(f"no reply for {self._patience_secs:g} s")
                self._note_store_clock(replies)
                await trio.sleep(self._table.publish_secs)
        except trio.Cancelled:
            with trio.move_on_after(BYE_SECS) as scope:
                scope.shield = True
                bye = encode(ByeMessage(self._member))
                await connection.send(("PUBLISH", self._channel, bye), ("DEL", self._lease_key))
            raise

    def _batch(self, load: SharedLoad) -> Iterator[Command]:
        """What is new since the last one. A heartbeat comes first: its TIME has the first reply."""
        now, table = trio.current_time(), self._table
        beats = now - self._heartbeat_at >= table.lease_secs / HEARTBEATS
        if beats:
            self._heartbeat_at = now
            yield ("TIME",)
            lease_ms = int(1000 * table.lease_secs)
            yield ("SET", self._lease_key, self._member, "PX", lease_ms)
        whole, self._hello_heard = beats or self._hello_heard, False
        message = load.own_message(now, whole=whole)
        if message is not None:
            yield ("PUBLISH", self._channel, encode(message))

    def _note_store_clock(self, replies: list[Any]) -> None:
        for reply in replies[:1]:
            if isinstance(reply, list):
                secs, microsecs = map(int, reply)
                self._clock_ahead = secs + microsecs / 1e6 - trio.current_time()

    def _on_message(self, channel: bytes, payload: bytes) -> None:
        load, message = self._load, decode(payload)
        if load is None or message is None or message.member == self._member:
            return
        match message:
            case CountsMessage():
                load.take(message, trio.current_time())
            case HelloMessage():
                self._hello_heard = True
            case ByeMessage():
                load.leave(message.member)

    @property
    def _channel(self) -> str:
        return f"{self._table.name}:members"

    @property
    def _lease_key(self) -> str:
        return f"{self._table.name}:lease:{self._member}"

    @property
    def _patience_secs(self) -> float:
        return max(SHORTEST_PATIENCE_SECS, self._table.lease_secs / 2)

    def _note_connected(self) -> None:
        self._connected_at = trio.current_time()
        self._heartbeat_at = -math.inf
        self._error = ""
        self._is_logged = False
        store = shown_url(self._config_store.config)
        _log.info("cluster_connected store=%s member=%s", store, self._member)

    def _note_loss(self, reason: str) -> None:
        """Each loss is logged once, and so is each new reason why it lasts."""
        self._losses += self._connected_at is not None
        if self._error != reason or not self._is_logged:
            store = shown_url(self._config_store.config)
            _log.warning("cluster_store_lost store=%s error=%r", store, reason)
        self._error, self._is_logged = reason, True


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, StoreRefused) and error.code in WRONG_PASSWORD:
        return f"the password is wrong: {error}"
    return str(error)
