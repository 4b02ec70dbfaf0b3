"""The listeners of the door: the public one, and that for control requests where there is one.

Contract: `prepare` opens and reads everything that a configuration needs, and alone may fail; its
commit can't. A place that stays keeps its socket, whatever else changes about it; one that is new
is open before an old one closes.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omni_proxy.config.schema import Config
from omni_proxy.dataplane.accept.certificates import Certificates
from omni_proxy.dataplane.accept.listener import Listener, open_socket
from omni_proxy.dataplane.accept.tls_connection import (
    AdminConnection,
    TlsAdminConnection,
    TlsConnection,
)

if TYPE_CHECKING:
    from omni_proxy.dataplane.dataplane import DataPlane

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Where to listen: an address with its port, or a `unix:PATH` host."""

    host: str
    port: int
    admin: bool = False

    @property
    def is_file(self) -> bool:
        return self.host.startswith("unix:")

    def __str__(self) -> str:
        if self.is_file:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def listen_addresses(config: Config) -> list[ListenAddress]:
    """The public one first."""
    places = [ListenAddress(config.server.host, config.server.port)]
    if config.admin.listen:
        places.append(_place(config.admin.listen, admin=True))
    return places


def _place(where: str, *, admin: bool) -> ListenAddress:
    """Of `host:port` or `unix:PATH`."""
    if where.startswith("unix:"):
        return ListenAddress(where, 0, admin=admin)
    host, _, port = where.rpartition(":")
    return ListenAddress(host.strip("[]"), int(port), admin=admin)


@dataclass(frozen=True, slots=True)
class PreparedListeners:
    """All that a configuration needs, open. Called, it is in force; `cancel` closes it again.

    `public`: the listener of [server] host and port, as it will be.
    """

    public: Listener | None
    commit: Callable[[], None]
    cancel: Callable[[], None]

    def __call__(self) -> None:
        self.commit()


class Listeners:
    """Where the door lets clients in, and how each is received."""

    def __init__(self, door: DataPlane) -> None:
        self.certificates = Certificates()
        self.held = False  # the places are taken, yet nobody is let in
        self._door = door
        self._open: list[tuple[ListenAddress, Listener]] = []  # the public one first

    def prepare(self, new: Config, *, opens: bool) -> PreparedListeners:
        """Without `opens` the listeners stay as they are. Raises OSError, whose `filename` is the
        place, and ConfigError."""
        renew = self.certificates.prepare(new.server)
        wanted = listen_addresses(new) if opens else [place for place, _ in self._open]
        mode = int(new.server.unix_mode, 8)
        here = dict(self._open)
        opened = self._opened([place for place in wanted if place not in here], mode)

        def commit() -> None:
            renew()
            if opens:
                self._move([(place, opened.get(place) or here[place]) for place in wanted])
                for _, listener in self._open:
                    listener.set_file_mode(mode)
            self._receive()
            for place, listener in self._open:
                if place in opened:
                    self._tell(place, listener)

        coming = [opened.get(place) or here[place] for place in wanted if not place.admin]
        return PreparedListeners(coming[0] if coming else None, commit, lambda: self._shut(opened))

    def _opened(self, places: Sequence[ListenAddress], mode: int) -> dict[ListenAddress, Listener]:
        """Nobody comes in before the pump's next batch. Raises OSError, and none is open."""
        opened: dict[ListenAddress, Listener] = {}
        for place in places:
            try:
                sock = open_socket(place.host, place.port, listening=not self.held, mode=mode)
                opened[place] = Listener(self._door.loop, sock, self._door.accept_connection)
            except OSError as error:
                self._shut(opened)
                error.filename = str(place)
                raise
        return opened

    def _shut(self, opened: dict[ListenAddress, Listener]) -> None:
        for listener in opened.values():
            listener.close()
        self._door.loop.flush()

    def _move(self, wanted: list[tuple[ListenAddress, Listener]]) -> None:
        """The new listeners are open before the old ones close; connections live on."""
        stay = {place for place, _ in wanted}
        for place, listener in self._open:
            if place not in stay:
                listener.close()
        self._open = wanted
        self._door.loop.flush()

    def listen_on(self, socks: Sequence[socket.socket], *, admin: bool) -> None:
        """In the place of those of this kind; whoever opened them removes their files. Raises
        OSError where they can't be watched: all of these are closed then, and no other."""
        loop, welcome = self._door.loop, self._door.accept_connection
        fresh: list[Listener] = []
        try:
            for sock in socks:
                fresh.append(Listener(loop, sock, welcome, keeps_file=True))  # noqa: PERF401  some
        except OSError:
            for listener in fresh:
                listener.close()
            for sock in socks:
                sock.close()
            raise
        self.close(admin=admin)
        self._open += [(_place(listener.address, admin=admin), listener) for listener in fresh]
        self._receive()

    def _receive(self) -> None:
        """What is done with those that come: decided per listener, so that no connection pays."""
        for place, listener in self._open:
            listener.on_accept = self._reception(place)

    def _reception(self, place: ListenAddress) -> Callable[[socket.socket, str], None]:
        door, certificates = self._door, self.certificates
        if certificates.context is not None and not place.is_file:
            secured = TlsAdminConnection if place.admin else TlsConnection

            def shake(sock: socket.socket, peer: str) -> None:
                if certificates.context is not None:
                    door.accepted += 1
                    secured(door, sock, peer, certificates.context).start()

            return shake
        if not place.admin:
            return door.accept_connection

        def admit(sock: socket.socket, peer: str) -> None:
            door.accepted += 1
            AdminConnection(door, sock, peer).start()

        return admit

    def open(self) -> None:
        """Let them in where `held` kept them out. Raises OSError."""
        self.held = False
        for place, listener in self._open:
            listener.listen()
            self._tell(place, listener)

    def _tell(self, place: ListenAddress, listener: Listener) -> None:
        if not self.held:
            whose = " for control requests" if place.admin else ""
            _log.info("listening on %s%s", self._url(place, listener), whose)

    def _url(self, place: ListenAddress, listener: Listener) -> str:
        if place.is_file:
            return listener.address
        return f"{'http' if self.certificates.context is None else 'https'}://{listener.address}"

    def addresses(self) -> list[str]:
        return [listener.address for _, listener in self._open]

    def urls(self) -> list[str]:
        """The addresses with their schemes."""
        return [self._url(place, listener) for place, listener in self._open]

    def sweep(self) -> None:
        for _, listener in self._open:
            listener.sweep()

    def close(self, *, admin: bool | None = None) -> None:
        """All of them, or those of one kind."""
        for place, listener in self._open:
            if admin in (None, place.admin):
                listener.close()
        self._open = [each for each in self._open if admin not in (None, each[0].admin)]
