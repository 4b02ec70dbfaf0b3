"""One of the data-plane processes: its slot, which outlives restarts, and the handle of a process.

`ProcessSlot` restarts its process with back-off when it exits unexpectedly, until the slot is
retired. `ProcessHandle` starts one process, sends commands to it and receives its events.
Invariant: when `ProcessHandle.run` returns, also by cancellation, the process has ended, and no
task waits for its acknowledgements. A retired slot starts no process.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
from collections.abc import Callable
from typing import Final

import msgspec
import trio

from omni_proxy.config.schema import LaunchEntry
from omni_proxy.launch.replica_process import OWN_COMMAND, argv_of
from omni_proxy.multiprocess.ipc.channel import IpcChannel
from omni_proxy.multiprocess.ipc.messages import (
    AckEvent,
    ProcessCommand,
    ProcessEvent,
    ProcessStats,
    StateSnapshot,
)
from omni_proxy.shared.backoff import Backoff
from omni_proxy.shared.child_process import exit_text, wait_or_kill

_log = logging.getLogger(__name__)

SUBCOMMAND: Final = "data-plane-process"
RESTART_BACKOFF_SECS: Final = 0.2
MAX_RESTART_BACKOFF_SECS: Final = 30.0
BACKOFF_RESET_SECS: Final = 60.0  # after this run time a restart has no accumulated delay
MAX_UNACKED_TICKS: Final = 10  # without an acknowledgement; then the process is killed
# On a busy machine simultaneous starts are slow; killing the processes would only repeat them.
MAX_STARTUP_TICKS: Final = 120

EventCallback = Callable[["ProcessHandle", ProcessEvent], None]


class ProcessSlot:
    """`index`: its row in the shared counters, from 1 on."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.handle: ProcessHandle | None = None  # of the newest process
        self.restarts = 0
        self.last_error = ""
        self._retired = trio.Event()

    def retire(self) -> None:
        """Start no further process; a running one continues until it is drained or killed."""
        self._retired.set()

    @property
    def is_retiring(self) -> bool:
        return self._retired.is_set()

    @property
    def state(self) -> str:
        """As GET /status shows it."""
        handle = self.handle
        if handle is None or handle.closed:
            return "backing_off"
        if self.is_retiring:
            return "draining"
        if not handle.ready:
            return "starting"
        return "serving" if handle.listening else "ready"

    async def run_until_retired(
        self,
        on_start: Callable[[ProcessHandle], None],
        on_event: EventCallback,
        on_exit: Callable[[ProcessSlot, ProcessHandle], None],
    ) -> None:
        """Run a process, and a new one when it exits. `on_start` sends its first commands."""
        backoff = Backoff(RESTART_BACKOFF_SECS, MAX_RESTART_BACKOFF_SECS, BACKOFF_RESET_SECS)
        while not self.is_retiring:
            started_at = trio.current_time()
            reason = await self._run_once(on_start, on_event, on_exit)
            if self._retired.is_set():
                return
            self.restarts += 1
            self.last_error = reason
            delay = backoff.next_delay(trio.current_time() - started_at)
            _log.error(
                "dataplane_process_exited process=%d reason=%s restart_in=%.1fs",
                self.index, reason, delay,
            )  # fmt: skip
            with trio.move_on_after(delay):
                await self._retired.wait()

    async def _run_once(
        self,
        on_start: Callable[[ProcessHandle], None],
        on_event: EventCallback,
        on_exit: Callable[[ProcessSlot, ProcessHandle], None],
    ) -> str:
        """Run one process; returns how it exited, or why it could not be started."""
        try:
            handle = self.handle = ProcessHandle(self.index)
        except OSError as error:
            return _start_error(error)
        try:
            on_start(handle)
            return await handle.run(on_event)
        except OSError as error:
            return _start_error(error)
        finally:
            handle.close()
            on_exit(self, handle)


class ProcessHandle:
    """One data-plane process. `stats`: its newest report."""

    def __init__(self, index: int) -> None:
        self.index = index
        ours, self._theirs = socket.socketpair()
        self._channel: IpcChannel[ProcessEvent] = IpcChannel(
            ours, msgspec.msgpack.Decoder(ProcessEvent)
        )
        self._process: trio.Process | None = None
        self._acked_more = trio.Event()  # set, and replaced by a new one, at an acknowledgement
        self.acked = 0
        self.revision = 0
        self.listening = False
        self.listen_error = ""  # why it has no listening socket, until it has one
        self.listen_retry_pending = False  # until the next tick
        self.closed = False
        self.silent_ticks = 0
        self.stats: ProcessStats | None = None
        self.half_open_ids: dict[tuple[int, int], int] = {}  # (serial, its number) -> ours
        self.last_snapshot: StateSnapshot | None = None  # with all parts
        self.voice_changes = 0  # changes that it reported and that are in the registry

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def sent(self) -> int:
        """The number of commands sent to the process."""
        return self._channel.sent

    @property
    def ready(self) -> bool:
        """Whether the process has a fleet and a configuration."""
        return self.acked >= 2 and not self.closed

    @property
    def accepts(self) -> bool:
        """Whether the process accepts on its listening socket."""
        return self.listening and self.acked == self.sent

    @property
    def is_unresponsive(self) -> bool:
        """Whether it has acknowledged nothing for too long; a starting process has more time."""
        max_ticks = MAX_UNACKED_TICKS if self.acked else MAX_STARTUP_TICKS
        return self.acked < self.sent and self.silent_ticks > max_ticks

    def send(self, command: ProcessCommand, *socks: socket.socket) -> int:
        """The command's number, 0 after `close`. Raises OSError, see `IpcChannel.send`."""
        descriptors = [sock.fileno() for sock in socks]
        return 0 if self.closed else self._channel.send(command, descriptors)

    def send_files(self, command: ProcessCommand, *descriptors: int) -> int:
        """Like `send`, with descriptors of files or shared memory."""
        return 0 if self.closed else self._channel.send(command, descriptors)

    async def wait_acknowledged(self, count: int) -> None:
        """Wait until `count` commands have taken effect in the process, or it has ended."""
        while self.acked < count and not self.closed:
            await self._acked_more.wait()

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def run(self, on_event: EventCallback) -> str:
        """Start the process and receive its events until it exits; returns how it did.

        Raises OSError if it can't be started.
        """
        try:
            with self._theirs:
                self._process = await trio.lowlevel.open_process(
                    process_argv(self._theirs.fileno()),
                    stdin=subprocess.DEVNULL,
                    pass_fds=[self._theirs.fileno()],
                    env=dict(os.environ),
                )
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._channel.run_writer)
                await self._receive_events(on_event)
                nursery.cancel_scope.cancel()
        finally:
            self.close()
            with trio.CancelScope(shield=True):
                status = await self._wait_exit()
        return exit_text(status)

    def close(self) -> None:
        """Close the socket. Nothing is sent or received any more, and the process exits."""
        self.closed, self.listening = True, False
        self._theirs.close()
        self._channel.close()
        self._acked_more.set()

    async def _receive_events(self, on_event: EventCallback) -> None:
        while events := await self._channel.receive():
            for event in events:
                if isinstance(event, AckEvent):
                    self.acked, self.revision = event.count, event.revision
                    self.silent_ticks = 0
                    self._acked_more.set()
                    self._acked_more = trio.Event()
                elif isinstance(event, ProcessStats):
                    self.stats = event
                on_event(self, event)

    async def _wait_exit(self) -> int:
        if self._process is None:
            return 0
        return await wait_or_kill(self._process)


def process_argv(descriptor: int) -> list[str]:
    """The command that runs this program as a data-plane process; `descriptor`: its end of the
    socket."""
    return argv_of(LaunchEntry(command=(OWN_COMMAND, SUBCOMMAND, str(descriptor))), 0, ())


def _start_error(error: OSError) -> str:
    return f"could not be started: {error.strerror or error}"
