"""The listeners of the data plane: the public one, and those configured for admin requests and for
metrics.

Contract: `prepare` opens and reads everything that a configuration needs, and may fail; the
resulting `commit` can't. An address that stays keeps its socket, whatever else changes; new sockets
are opened before old ones are closed.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from omni_proxy.config.schema import Config
from omni_proxy.dataplane.accept.listener import Listener, open_socket
from omni_proxy.dataplane.downstream.connection import Connection
from omni_proxy.dataplane.downstream.tls_termination import Certificates
from omni_proxy.dataplane.exchange_io import ListenerRole
from omni_proxy.dataplane.services import ExchangeServices

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """A host with its port, or a `unix:PATH` host. `admin`: serves only admin requests. `metrics`:
    of those, serves only metrics."""

    host: str
    port: int
    admin: bool = False
    metrics: bool = False

    @property
    def is_file(self) -> bool:
        return self.host.startswith("unix:")

    def __str__(self) -> str:
        if self.is_file:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def listen_addresses(config: Config) -> list[ListenAddress]:
    """The configured addresses, the public one first."""
    addresses = [ListenAddress(config.server.host, config.server.port)]
    if config.admin.listen:
        addresses.append(_parse_address(config.admin.listen, admin=True))
    if config.admin.metrics_listen:
        addresses.append(_parse_address(config.admin.metrics_listen, admin=True, metrics=True))
    return addresses


def _parse_address(where: str, *, admin: bool, metrics: bool = False) -> ListenAddress:
    """Parse `host:port` or `unix:PATH`."""
    if where.startswith("unix:"):
        return ListenAddress(where, 0, admin=admin, metrics=metrics)
    host, _, port = where.rpartition(":")
    return ListenAddress(host.strip("[]"), int(port), admin=admin, metrics=metrics)


class ServedAt(NamedTuple):
    """URLs of the listeners that serve model traffic and the dashboard; "" if that is a Unix socket
    or not open."""

    models: str
    dashboard: str


@dataclass(frozen=True, slots=True)
class PreparedListeners:
    """Opened listeners that are not in use yet. A call applies them; `cancel` closes them.

    `public`: the listener of [server] host and port after `commit`.
    """

    public: Listener | None
    commit: Callable[[], None]
    cancel: Callable[[], None]

    def __call__(self) -> None:
        self.commit()


def _is_bound_to(sock: socket.socket, address: ListenAddress) -> bool:
    if sock.family == socket.AF_UNIX:
        return address.is_file and sock.getsockname() == address.host[5:]
    if address.is_file:
        return False
    try:
        resolved = socket.getaddrinfo(
            address.host or None, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError:
        return False
    return sock.getsockname()[:2] in [row[4][:2] for row in resolved]


class Listeners:
    """All listeners, and the callback of each for accepted sockets."""

    def __init__(self, services: ExchangeServices) -> None:
        self.certificates = Certificates()
        self.relays = True  # connections accepted from now on may send model requests
        # New sockets are bound but do not listen yet; inherited sockets listen but accept nothing.
        self.held = False
        # Listening sockets of another program, by address as configured: used instead of new ones.
        self.inherited: dict[str, socket.socket] = {}
        self._services = services
        self._open: list[tuple[ListenAddress, Listener]] = []  # the public one first

    def prepare(self, new: Config, *, opens: bool) -> PreparedListeners:
        """Open the listeners of `new`. If `opens` is false, only the certificates are prepared.

        Raises ConfigError, and OSError with the address as its `filename`.
        """
        apply_certificates = self.certificates.prepare(new.server)
        addresses = listen_addresses(new) if opens else [address for address, _ in self._open]
        mode = int(new.server.unix_mode, 8)
        current = dict(self._open)
        opened = self._open_all([address for address in addresses if address not in current], mode)

        def commit() -> None:
            apply_certificates()
            if opens:
                self._replace(
                    [(address, opened.get(address) or current[address]) for address in addresses]
                )
                for _, listener in self._open:
                    listener.set_file_mode(mode)
            self._set_callbacks()
            for address, listener in self._open:
                if address in opened:
                    self._log_listening(address, listener)

        public = [
            opened.get(address) or current[address] for address in addresses if not address.admin
        ]
        return PreparedListeners(
            public[0] if public else None, commit, lambda: self._close_all(opened)
        )

    def _open_all(
        self, addresses: Sequence[ListenAddress], mode: int
    ) -> dict[ListenAddress, Listener]:
        """Open all; they accept from the next iteration on. Raises OSError, and then closes all."""
        opened: dict[ListenAddress, Listener] = {}
        for address in addresses:
            try:
                inherited = self.inherited.pop(str(address), None)
                sock = inherited or open_socket(
                    address.host, address.port, listening=not self.held, mode=mode
                )
                listener = opened[address] = Listener(
                    self._services.loop, sock, self._accept, keeps_file=inherited is not None
                )
                if self.held and listener.is_listening:
                    listener.pause()
            except OSError as error:
                self._close_all(opened)
                error.filename = str(address)
                raise
        return opened

    def _close_all(self, opened: dict[ListenAddress, Listener]) -> None:
        for listener in opened.values():
            listener.close()
        self._services.loop.flush()

    def _replace(self, listeners: list[tuple[ListenAddress, Listener]]) -> None:
        """Close listeners that are not in `listeners`; their connections continue."""
        stay = {address for address, _ in listeners}
        for address, listener in self._open:
            if address not in stay:
                listener.close()
        self._open = listeners
        self._services.loop.flush()

    def listen_on(self, socks: Sequence[socket.socket], *, admin: bool) -> None:
        """Replace the listeners of this kind by `socks`, whose files are kept on close.

        Raises OSError if they can't be registered. Then all of `socks` are closed, and the current
        listeners stay.
        """
        loop, on_accept = self._services.loop, self._accept
        new_listeners: list[Listener] = []
        try:
            for sock in socks:
                new_listeners.append(Listener(loop, sock, on_accept, keeps_file=True))  # noqa: PERF401  some
        except OSError:
            for listener in new_listeners:
                listener.close()
            for sock in socks:
                sock.close()
            raise
        self.close(admin=admin)
        self._open += [
            (_parse_address(listener.address, admin=admin), listener) for listener in new_listeners
        ]
        self._set_callbacks()

    def _set_callbacks(self) -> None:
        """Choose the callback of each listener once, rather than for each connection."""
        for address, listener in self._open:
            listener.on_accept = self._callback_for(address)

    def _callback_for(self, address: ListenAddress) -> Callable[[socket.socket, str], None]:
        services, certificates = self._services, self.certificates
        role = ListenerRole(
            admin_only=address.admin, metrics_only=address.metrics, relays=self.relays
        )
        if certificates.context is None or address.is_file:

            def accept(sock: socket.socket, peer: str) -> None:
                services.totals.accepted += 1
                Connection(services, sock, peer, role).start()

            return accept

        def accept_tls(sock: socket.socket, peer: str) -> None:
            context = certificates.context
            if context is not None:
                services.totals.accepted += 1
                Connection(services, sock, peer, role, context).start()

        return accept_tls

    def _accept(self, sock: socket.socket, peer: str) -> None:
        """The callback of a new listener until `_set_callbacks`."""
        self._services.totals.accepted += 1
        Connection(self._services, sock, peer).start()

    def open(self) -> None:
        """Clear `held`: listen and accept on all sockets. Raises OSError."""
        self.held = False
        for address, listener in self._open:
            listener.listen()
            listener.resume()
            self._log_listening(address, listener)

    def _log_listening(self, address: ListenAddress, listener: Listener) -> None:
        if not self.held:
            purpose = "metrics" if address.metrics else "admin" if address.admin else "requests"
            url = self._url(address, listener)
            _log.info("listener_opened url=%s purpose=%s", url, purpose)

    def _url(self, address: ListenAddress, listener: Listener) -> str:
        if address.is_file:
            return listener.address
        return f"{'http' if self.certificates.context is None else 'https'}://{listener.address}"

    def inherit(self, socks: Sequence[socket.socket], config: Config) -> list[str]:
        """Store the listening sockets that are bound to a configured address in `inherited`. Closes
        the others, and returns their addresses."""
        for address in listen_addresses(config):
            for sock in socks:
                if sock.fileno() >= 0 and _is_bound_to(sock, address):
                    self.inherited.setdefault(str(address), sock)
        unused = [sock for sock in socks if sock not in self.inherited.values()]
        names = [str(sock.getsockname()) for sock in unused]
        for sock in unused:
            sock.close()
        return names

    def dup_sockets(self) -> dict[str, socket.socket]:
        """Duplicates of the listening sockets by address as configured; the caller closes them.
        Raises OSError."""
        return {
            str(address): listener.dup_socket()
            for address, listener in self._open
            if listener.is_listening
        }

    def keep_files(self) -> None:
        """Keep the files of all sockets on close, because another program accepts on them."""
        for _, listener in self._open:
            listener.keep_file()

    def take_files(self) -> None:
        """Remove the files on close, after the previous program has handed over its sockets."""
        for _, listener in self._open:
            listener.take_file()

    def drop_inherited(self) -> None:
        """Close the inherited sockets that no configured address uses."""
        while self.inherited:
            self.inherited.popitem()[1].close()

    def addresses(self) -> list[str]:
        return [listener.address for _, listener in self._open]

    def urls(self) -> list[str]:
        """The addresses of all listeners as URLs, `unix:PATH` for a Unix socket."""
        return [self._url(address, listener) for address, listener in self._open]

    def served_at(self) -> ServedAt:
        public = [entry for entry in self._open if not entry[0].admin]
        admin = [entry for entry in self._open if entry[0].admin and not entry[0].metrics]
        models, dashboard = (
            next((self._url(*entry) for entry in entries if not entry[0].is_file), "")
            for entries in (public, admin or public)
        )
        return ServedAt(models, dashboard)

    def retry_accepting(self) -> None:
        for _, listener in self._open:
            listener.retry_accepting()

    def close(self, *, admin: bool | None = None) -> None:
        """Close the admin listeners, or the others, or all if `admin` is None."""
        for address, listener in self._open:
            if admin in (None, address.admin):
                listener.close()
        self._open = [entry for entry in self._open if admin not in (None, entry[0].admin)]
