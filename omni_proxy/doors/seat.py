"""The place of one door among several: its process, started again whenever it ends unasked.

Invariant: a seat that retires starts nothing any more; `keep` returns when its process is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import trio

from omni_proxy.doors.link import Hear, Link

_log = logging.getLogger(__name__)

FIRST_PAUSE_SECS: Final = 0.2
LONGEST_PAUSE_SECS: Final = 30.0
CALM_SECS: Final = 60.0  # a life that lasted so long starts the back-off anew


class Seat:
    """`index`: its row on the board, from 1 on."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.link: Link | None = None
        self.restarts = 0
        self.last_error = ""
        self.bell = trio.Event()  # set when it retires

    def retire(self) -> None:
        self.bell.set()

    @property
    def retiring(self) -> bool:
        return self.bell.is_set()

    async def keep(
        self, begin: Callable[[Link], None], hear: Hear, ended: Callable[[Seat, Link], None]
    ) -> None:
        """`begin(link)` tells a new process what it must know; `ended(seat, link)` buries it."""
        pause = FIRST_PAUSE_SECS
        while not self.retiring:
            began = trio.current_time()
            how = await self._live(begin, hear, ended)
            if self.bell.is_set():
                return
            self.restarts += 1
            self.last_error = how
            if trio.current_time() - began > CALM_SECS:
                pause = FIRST_PAUSE_SECS
            _log.error("door %d %s; it is started again in %.1f s", self.index, how, pause)
            with trio.move_on_after(pause):
                await self.bell.wait()
            pause = min(pause * 2, LONGEST_PAUSE_SECS)

    async def _live(
        self, begin: Callable[[Link], None], hear: Hear, ended: Callable[[Seat, Link], None]
    ) -> str:
        """One life of its process: how that ended, or why there was none."""
        try:
            link = self.link = Link(self.index)
        except OSError as error:
            return _not_started(error)
        try:
            begin(link)
            return await link.live(hear)
        except OSError as error:
            return _not_started(error)
        finally:
            link.end()
            ended(self, link)


def _not_started(error: OSError) -> str:
    return f"could not be started: {error.strerror or error}"
