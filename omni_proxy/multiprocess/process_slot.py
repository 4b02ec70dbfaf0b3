"""The place of one door among several: its process, started again whenever it ends unasked.

Invariant: a seat that retires starts nothing any more; `keep` returns when its process is gone.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from typing import Final

import msgspec
import trio

from omni_proxy.backoff import Backoff
from omni_proxy.config.schema import LaunchEntry
from omni_proxy.launch.command import OURSELVES, argv_of
from omni_proxy.multiprocess.ipc_channel import IpcChannel
from omni_proxy.multiprocess.messages import (
    Ack,
    Begin,
    ProcessStats,
    StateSnapshot,
    ToControl,
    ToDoor,
)

_log = logging.getLogger(__name__)

FIRST_PAUSE_SECS: Final = 0.2
LONGEST_PAUSE_SECS: Final = 30.0
CALM_SECS: Final = 60.0  # a life that lasted so long starts the back-off anew


class ProcessSlot:
    """`index`: its row on the board, from 1 on."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.link: ProcessHandle | None = None
        self.restarts = 0
        self.last_error = ""
        self.bell = trio.Event()  # set when it retires

    def retire(self) -> None:
        self.bell.set()

    @property
    def retiring(self) -> bool:
        return self.bell.is_set()

    async def keep(
        self,
        begin: Callable[[ProcessHandle], None],
        hear: Hear,
        ended: Callable[[ProcessSlot, ProcessHandle], None],
    ) -> None:
        """`begin(link)` tells a new process what it must know; `ended(seat, link)` buries it."""
        backoff = Backoff(FIRST_PAUSE_SECS, LONGEST_PAUSE_SECS, CALM_SECS)
        while not self.retiring:
            began = trio.current_time()
            how = await self._live(begin, hear, ended)
            if self.bell.is_set():
                return
            self.restarts += 1
            self.last_error = how
            pause = backoff.next_delay(trio.current_time() - began)
            _log.error("door %d %s; it is started again in %.1f s", self.index, how, pause)
            with trio.move_on_after(pause):
                await self.bell.wait()

    async def _live(
        self,
        begin: Callable[[ProcessHandle], None],
        hear: Hear,
        ended: Callable[[ProcessSlot, ProcessHandle], None],
    ) -> str:
        """One life of its process: how that ended, or why there was none."""
        try:
            link = self.link = ProcessHandle(self.index)
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


# One door process, as control has it: started, told, heard, ended.
#
# Invariant: when `live` returns, also by being cancelled, the process is gone; whoever waits for an
# acknowledgement of it waits no longer.

WORD: Final = "door-process"
EXIT_SECS: Final = 2.0  # from the end of its socket to SIGKILL
DEAF_TICKS: Final = 10  # one that acknowledges nothing for so many is killed
# A machine with too much to do takes long over the imports of all doors at once, and killing them
# has it begin all over again.
BEGINNING_TICKS: Final = 120

Hear = Callable[["ProcessHandle", ToControl], None]


class ProcessHandle:
    """`stand` is what it told last of itself."""

    def __init__(self, index: int) -> None:
        self.index = index
        ours, self._theirs = socket.socketpair()
        self._channel: IpcChannel[ToControl] = IpcChannel(ours, msgspec.msgpack.Decoder(ToControl))
        self._process: trio.Process | None = None
        self._moved = trio.Event()  # set, and replaced, when it has acknowledged
        self.acked = 0
        self.revision = 0
        self.listening = False
        self.shut_out = ""  # why it could not be given its socket, until it has it
        self.waits_for_tick = False  # before it is told of that again
        self.over = False
        self.silent_ticks = 0
        self.stand: ProcessStats | None = None
        self.trials: dict[tuple[int, int], int] = {}  # its number of a trial -> control's
        self.news: StateSnapshot | None = None  # the newest, whole
        self.voice_changes = 0  # that it told of and that are in the registry

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def told(self) -> int:
        """How many messages it should acknowledge."""
        return self._channel.told

    @property
    def ready(self) -> bool:
        """It has a fleet and a configuration."""
        return self.acked >= 2 and not self.over

    @property
    def deaf(self) -> bool:
        """It has heard nothing of what it was told for too long; who only begins has more time."""
        most = DEAF_TICKS if self.acked else BEGINNING_TICKS
        return self.acked < self.told and self.silent_ticks > most

    def tell(self, message: ToDoor, *socks: socket.socket) -> int:
        descriptors = [sock.fileno() for sock in socks]
        return 0 if self.over else self._channel.tell(message, descriptors)

    def tell_begin(self, begin: Begin, *descriptors: int) -> None:
        self._channel.tell(begin, descriptors)

    async def acknowledged(self, count: int) -> None:
        """Until so many messages have taken effect there, or it has ended."""
        while self.acked < count and not self.over:
            await self._moved.wait()

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def live(self, hear: Hear) -> str:
        """Start it and hear it until it ends; how it did. Raises OSError where it can't start."""
        try:
            with self._theirs:
                self._process = await trio.lowlevel.open_process(
                    command(self._theirs.fileno()),
                    stdin=subprocess.DEVNULL,
                    pass_fds=[self._theirs.fileno()],
                    env=dict(os.environ),
                )
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._channel.pass_on)
                await self._hear(hear)
                nursery.cancel_scope.cancel()
        finally:
            self.end()
            with trio.CancelScope(shield=True):
                status = await self._gone()
        return _told(status)

    def end(self) -> None:
        """Nothing is told or heard any more, also where it was never started."""
        self.over, self.listening = True, False
        self._theirs.close()
        self._channel.close()
        self._moved.set()

    async def _hear(self, hear: Hear) -> None:
        while heard := await self._channel.hear():
            for message in heard:
                if isinstance(message, Ack):
                    self.acked, self.revision = message.count, message.revision
                    self.silent_ticks = 0
                    self._moved.set()
                    self._moved = trio.Event()
                elif isinstance(message, ProcessStats):
                    self.stand = message
                hear(self, message)

    async def _gone(self) -> int:
        if self._process is None:
            return 0
        with trio.move_on_after(EXIT_SECS):
            return await self._process.wait()
        self.kill()
        return await self._process.wait()


def command(descriptor: int) -> list[str]:
    """Our own program again, however it was started."""
    return argv_of(LaunchEntry(command=(OURSELVES, WORD, str(descriptor))), 0, ())


def _told(status: int) -> str:
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"
