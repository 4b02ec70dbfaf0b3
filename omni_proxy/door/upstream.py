"""Connections to one worker: its idle ones, and the lines of a head that are always the same for
it.

Invariant: an idle connection stays in the epoll set; any event but "writable" means it is dead, and
it is dropped, so taking one needs no probe. One that broke, was cut, or holds unread bytes never
comes back.
"""

from __future__ import annotations

from typing import Final

from omni_proxy.door.conn import Conn, connect
from omni_proxy.door.pump import Pump
from omni_proxy.door.task import Task

IDLE_SECS: Final = 30.0  # shorter than any server's keep-alive that we know, the front's included
PIECE_BYTES: Final = 16384


class Lane:
    """The way to one upstream: a worker, or the front on its Unix socket."""

    __slots__ = ("address", "closed", "host_line", "idle", "pump")

    def __init__(self, pump: Pump, address: tuple[str, int] | str, host: str) -> None:
        self.pump = pump
        self.address = address
        self.host_line = f"host: {host}\r\n".encode("latin-1")
        self.idle: list[Conn] = []  # last in, first out: the rest may grow old and go
        self.closed = False

    def take(self, task: Task) -> Conn | None:
        """An idle connection, now owned by `task`."""
        if not self.idle:
            return None
        conn = self.idle.pop()
        conn.task = task
        return conn

    async def dial(self, task: Task) -> Conn:
        """A new connection. Raises OSError."""
        return await connect(task, self.address)

    def give_back(self, conn: Conn) -> None:
        """Keep a connection whose last answer has ended cleanly."""
        if self.closed or conn.ended or (conn.hot and not _drained(conn)):
            conn.close()
            return
        conn.task = None
        conn.on_idle_news = self._drop
        conn.idle_since = self.pump.now
        self.idle.append(conn)

    def _drop(self, conn: Conn) -> None:
        self.idle.remove(conn)
        conn.close()

    def sweep(self) -> None:
        """Close what has been idle for too long; the oldest stand first."""
        limit = self.pump.now - IDLE_SECS
        old = 0
        while old < len(self.idle) and self.idle[old].idle_since < limit:
            self.idle[old].close()
            old += 1
        del self.idle[:old]

    def close(self) -> None:
        """No idle connection stays; those in use are closed by their exchanges at their end."""
        self.closed = True
        for conn in self.idle:
            conn.close()
        self.idle.clear()


def _drained(conn: Conn) -> bool:
    """Whether nothing is left to read after an answer that filled the last read to the brim."""
    try:
        conn.recv(1)
    except BlockingIOError:
        conn.hot = False
        return True
    except OSError:
        return False
    return False
