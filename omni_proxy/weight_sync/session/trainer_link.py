"""The trainer that owns a group, watched over one plain connection to its store.

Invariant: the blocking parts run in threads of a limiter of their own, and at most one of them at a
time asks the connection anything; the loop never waits for the network.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

import trio

from omni_proxy.process_group.store_connection import StoreConnection, connect_store
from omni_proxy.process_group.tensor_plan import GroupError

LOOK_SECS: Final = 0.05
PING_SECS: Final = 1.0
PATIENT_SECS: Final = 5.0  # for one answer; a machine that has a lot to do is asked again
THREADS: Final = 8
SILENT_SECS: Final = 10.0


class TrainerLink:
    """`open` once, `close` once; between them it can be asked whether the owner lives."""

    _threads: trio.CapacityLimiter | None = None

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._link: StoreConnection | None = None
        self._closed = False
        self._asking = trio.Lock()

    @property
    def is_open(self) -> bool:
        return self._link is not None

    async def open(self, silent_secs: float = SILENT_SECS) -> None:
        """Wait until the store answers. Raises GroupError where something else answers there."""
        await trio.to_thread.run_sync(
            self._open, silent_secs, abandon_on_cancel=True, limiter=self._limiter()
        )

    async def until_gone(self, silent_secs: Callable[[], float]) -> str:
        """Why the owner is taken for dead: it closed, or was silent for as long as that says."""
        heard_at = trio.current_time()
        while True:
            if await self.has_ended():
                return "its connection has ended"
            silent = trio.current_time() - heard_at
            if silent >= PING_SECS:
                # An end is noticed in the middle of it, too.
                left = max(silent_secs(), PING_SECS) - silent
                if await self.answers(min(max(left, LOOK_SECS), PATIENT_SECS)):
                    heard_at = trio.current_time()
                elif trio.current_time() - heard_at >= silent_secs():
                    return f"its store has not answered for {silent_secs():g} s"
            await trio.sleep(LOOK_SECS)

    async def answers(self, within_secs: float) -> bool:
        """Whether its store still speaks; False where it was never heard."""
        async with self._asking:
            link = self._link
            if link is None:
                return False
            return await trio.to_thread.run_sync(
                self._speaks, link, within_secs, abandon_on_cancel=True, limiter=self._limiter()
            )

    def close(self) -> None:
        """Returns at once; a question that is under way may hold the connection for a while."""
        self._closed = True
        if self._link is not None:
            threading.Thread(target=self._link.close, name="owner-close", daemon=True).start()

    async def has_ended(self) -> bool:
        """Whether its side has hung up; that of one that is not open yet has not."""
        async with self._asking:
            return self._link is not None and self._link.has_ended()

    def _speaks(self, link: StoreConnection, within_secs: float) -> bool:
        """On a new connection where the old one is late: its answer may come after all, and would
        be taken for that to the next question. Both have `within_secs` together."""
        each_secs = within_secs / 2
        if link.answers(each_secs):
            return True
        ends_at = time.monotonic() + each_secs
        if link.has_ended():
            return False
        try:
            fresh = connect_store(
                self._address, each_secs, lambda: self._closed or time.monotonic() >= ends_at
            )
        except GroupError:
            return False
        self._link = fresh
        link.close()
        if self._closed:
            fresh.close()
        return True

    def _open(self, silent_secs: float) -> None:
        link = connect_store(self._address, silent_secs, lambda: self._closed)
        self._link = link
        if self._closed:
            link.close()

    @classmethod
    def _limiter(cls) -> trio.CapacityLimiter:
        if cls._threads is None:
            cls._threads = trio.CapacityLimiter(THREADS)
        return cls._threads


async def reachable(host: str, port: int, within_secs: float) -> bool:
    """Whether a store answers there now; for an owner whose link never came up."""
    link = TrainerLink(host, port)
    try:
        with trio.move_on_after(within_secs):
            await link.open(within_secs)
            return True
    except GroupError:
        return False
    finally:
        link.close()
    return False
