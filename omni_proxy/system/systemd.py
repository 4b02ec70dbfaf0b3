"""The systemd protocol: readiness, reloads, the watchdog, sockets.

Sources: sd_notify(3), sd_watchdog_enabled(3), sd_listen_fds(3). Invariant: the variables are
removed from the environment, so that no child process sends messages for the program; without them
nothing is sent. Sending a message never blocks and never raises.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Final

import trio

FIRST_DESCRIPTOR: Final = 3
MICROS: Final = 1_000_000
NOTIFY_SOCKET: Final = "NOTIFY_SOCKET"
WATCHDOG_USEC: Final = "WATCHDOG_USEC"


class ServiceManager:
    """`variables`: those that the next program of an upgrade needs. `silent`: another program has
    taken over and sends the messages."""

    def __init__(self, environ: MutableMapping[str, str], pid: int) -> None:
        self.silent = False
        self.variables = {
            name: environ.pop(name) for name in (NOTIFY_SOCKET, WATCHDOG_USEC) if name in environ
        }
        if environ.pop("WATCHDOG_PID", str(pid)) != str(pid):
            self.variables.pop(WATCHDOG_USEC, None)
        count = environ.pop("LISTEN_FDS", "")
        environ.pop("LISTEN_FDNAMES", None)
        ours = environ.pop("LISTEN_PID", "") == str(pid)
        self._socket_count = int(count) if ours and count.isdecimal() else 0

    def take_sockets(self) -> list[socket.socket]:
        """The listening sockets of socket activation; further calls return none."""
        count, self._socket_count = self._socket_count, 0
        socks = [socket.socket(fileno=FIRST_DESCRIPTOR + index) for index in range(count)]
        for sock in socks:
            sock.set_inheritable(False)
            sock.setblocking(False)
        return [sock for sock in socks if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)]

    def ready(self, *, taken_over: bool = False) -> None:
        """Report readiness, also after a reload. `taken_over`: this is the main process from now
        on."""
        self._send(*([f"MAINPID={os.getpid()}"] if taken_over else []), "READY=1")

    def reloading(self) -> None:
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    async def run_watchdog(self) -> None:
        """Send two messages per interval from the event loop, so that none is sent if it hangs."""
        usecs = self.variables.get(WATCHDOG_USEC, "")
        if not usecs.isdecimal() or not int(usecs):
            return
        while True:
            self._send("WATCHDOG=1")
            await trio.sleep(int(usecs) / MICROS / 2)

    def _send(self, *lines: str) -> None:
        path = self.variables.get(NOTIFY_SOCKET, "")
        if not path or self.silent:
            return
        address = "\0" + path[1:] if path.startswith("@") else path
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            sock.sendto("\n".join(lines).encode(), address)


SILENT: Final = ServiceManager({}, 0)
