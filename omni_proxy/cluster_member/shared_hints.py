"""Shares the location of cached prefixes and sessions: hashes of prefixes, and sessions' workers.

Invariant: nothing here delays a request: notes are published with the next batch, in bounded
messages, and received hints apply to later requests. Neither a prompt nor a session's key leaves
the proxy. A proxy that joins gets the last hints of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Protocol

from omni_proxy.cluster.messages import (
    ForgottenMessage,
    Message,
    PrefixesMessage,
    SessionsMessage,
    encode,
)
from omni_proxy.cluster.session_places import PlacedSessions
from omni_proxy.cluster_member.store_connection import RedisConnection
from omni_proxy.config.tables.cluster import ClusterConfig
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.cluster_hints import ClusterHints

MAX_HASHES: Final = 512  # hashes in one message: 4 KB
MAX_SESSIONS: Final = 256  # sessions in one message: 6 KB


class HintsView(Protocol):
    """The routing of this proxy, in all its processes."""

    @property
    def hints(self) -> ClusterHints: ...
    def receive_prefixes(self, hashes: dict[int, bytes]) -> None: ...
    def spread_prefixes(self, hashes: dict[int, bytes]) -> None: ...
    def place_sessions(self, sessions: Mapping[bytes, int]) -> None: ...
    def confirm_sessions(self, sessions: Mapping[bytes, int]) -> None: ...
    def forget_cache(self, worker: Worker) -> None: ...


class SharedHints:
    """`store_now()`: seconds of the store's clock. `table()`: the current [cluster]."""

    def __init__(
        self,
        fleet: Fleet,
        view: HintsView,
        store_now: Callable[[], float],
        table: Callable[[], ClusterConfig],
    ) -> None:
        self._fleet = fleet
        self._view = view
        self._store_now = store_now
        self._table = table
        self._placed = PlacedSessions()
        self._outgoing: list[dict[int, bytes]] = []  # session rows to publish
        self._forgotten: dict[str, None] = {}
        fleet.watch_cache_cleared(self._note_cleared)

    async def tick(self, connection: RedisConnection, member: str) -> None:
        """Publish new notes. If it raises StoreError, they are lost, as hints may be."""
        messages: list[Message] = []
        if self._forgotten:
            urls, self._forgotten = tuple(self._forgotten), {}
            messages.append(ForgottenMessage(member, urls))
        hashes = self._view.hints.prefix_notes.take(MAX_HASHES)
        if hashes:
            self._view.spread_prefixes(hashes)
            messages.append(PrefixesMessage(member, hashes))
        self._stamp()
        rows, self._outgoing = self._outgoing, []
        messages += [SessionsMessage(member, packed) for packed in rows if packed]
        if messages:
            channel = f"{self._table().name}:members"
            await connection.call(*(("PUBLISH", channel, encode(message)) for message in messages))

    def take(self, message: PrefixesMessage | SessionsMessage | ForgottenMessage) -> None:
        match message:
            case PrefixesMessage(_, hashes) if self._shares("prefixes"):
                self._view.receive_prefixes(hashes)
            case SessionsMessage(_, rows) if self._shares("sessions"):
                self._stamp()  # sessions placed here before this message get earlier stamps
                self._view.place_sessions(self._placed.receive(rows))
            case ForgottenMessage(_, urls) if self._shares("prefixes"):
                self._forget(urls)

    def repeat(self) -> None:
        """Publish recent hints again, for a proxy that joined."""
        if self._shares("prefixes"):
            self._view.hints.prefix_notes.repeat()
        if self._shares("sessions"):
            self._outgoing.append(self._placed.newest())

    def status(self) -> dict[str, object]:
        """For GET /status."""
        return {**self._view.hints.stats(), "sessions": len(self._placed)}

    def _stamp(self) -> None:
        """Give stamps to sessions that were placed here."""
        sessions = self._view.hints.session_notes.take(MAX_SESSIONS)
        if sessions:
            stamp = int(1000 * self._store_now())
            self._outgoing.append(self._placed.place(sessions, stamp))
            self._view.confirm_sessions(sessions)

    def _forget(self, urls: tuple[str, ...]) -> None:
        for url in urls:
            worker = self._fleet.find(url)
            if worker is not None:
                self._view.forget_cache(worker)

    def _note_cleared(self, worker: Worker) -> None:
        if self._shares("prefixes") and self._fleet.find(worker.url) is worker:
            self._forgotten[worker.url] = None

    def _shares(self, what: str) -> bool:
        table = self._table()
        return table.enabled and what in table.share
