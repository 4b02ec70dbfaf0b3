"""One launched replica: the place of one process, from its start over every restart to its stop.

    starting ──200──> ready ──ends──> backing_off ──> starting   (restart = "never": stopped)
       └─ends, late, or not startable──────┘

A server is not meant to end: every end that nobody asked for is a failure, exit status 0 too.
Invariant: the process is gone when `run` returns, also when it is cancelled.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from datetime import UTC, datetime
from enum import StrEnum
from typing import Final

import trio

from omni_proxy.backoff import Backoff
from omni_proxy.config.schema import LaunchEntry
from omni_proxy.fleet.worker import Worker
from omni_proxy.launch.child_process import ChildProcess, ParentDeathGuard
from omni_proxy.launch.command import argv_of, environment_of, recipe
from omni_proxy.launch.gpu_allocator import GpuAllocator, TooFewGpus
from omni_proxy.launch.worker_link import LaunchedWorkerLink

log = logging.getLogger("omni_proxy.launch")

FIRST_DELAY_SECS = 1.0
LAST_DELAY_SECS = 30.0
GOOD_SECS = 60.0  # ready for so long: the next failure counts as a first one


class ReplicaState(StrEnum):
    """Where a place is in its life; the diagram is above."""

    STARTING = "starting"
    READY = "ready"
    BACKING_OFF = "backing_off"
    STOPPED = "stopped"


# Exit statuses of a command line that was refused (argparse, most shells' tools), of a program that
# may not be run and of one that is not there.
REFUSED_STATUSES: Final = (2, 126, 127)
NOT_INSTALLED: Final = re.compile(r"\bnot installed\b|No module named|ModuleNotFoundError")


class ReplicaStartError(Exception):
    """There is no process to stay with; trying again may help, unless it is `fatal`."""

    def __init__(self, message: str, *, fatal: bool = False) -> None:
        super().__init__(message)
        self.fatal = fatal


class ReplicaProcess:
    """Replica `index` of `entry`; whoever sets a newer `entry` decides when to `renew`."""

    def __init__(
        self,
        entry: LaunchEntry,
        index: int,
        standing: LaunchedWorkerLink,
        leash: ParentDeathGuard,
        gpus: GpuAllocator,
    ) -> None:
        self.entry = entry
        self.state = ReplicaState.STARTING
        self.retired = False
        self._index = index
        self._standing = standing
        self._leash = leash
        self._gpus = gpus
        self._own_gpus: tuple[str, ...] = ()
        self._running = entry  # what the present process was started from
        self._called = trio.Event()
        self._since = datetime.now(UTC)
        self._ready_at = float("inf")
        self._pid: int | None = None
        self._worker: Worker | None = None
        self._restarts = 0
        self._ending = ""  # why the present life failed
        self._fatal = False  # that will be so at each further try, as far as can be told
        self._last_line = ""
        self._last_error: str | None = None

    @property
    def name(self) -> str:
        return self._running.name

    @property
    def url(self) -> str:
        return self._running.urls[self._index]

    @property
    def outdated(self) -> bool:
        """Whether the present process was started otherwise than `entry` says now."""
        return recipe(self.entry) != recipe(self._running)

    @property
    def serving(self) -> bool:
        return self.state is ReplicaState.READY and self._standing.find(self.url) is not None

    @property
    def called(self) -> bool:
        """Whether it is on its way to an end that was asked for."""
        return self._called.is_set()

    def renew(self) -> None:
        """Let it finish what it has, then start again from `entry`."""
        self._called.set()

    def retire(self) -> None:
        """Let it finish what it has, then stop for good."""
        self.retired = True
        self._called.set()

    def status(self) -> dict[str, object]:
        return {
            "name": self.name,
            "index": self._index,
            "url": self.url,
            "pid": self._pid,
            "state": self.state.value,
            "restarts": self._restarts,
            "fatal": self._fatal,
            "last_error": self._last_error,
            "since": self._since.isoformat(),
        }

    async def run(self, chance: Callable[[], float]) -> None:
        backoff = Backoff(FIRST_DELAY_SECS, LAST_DELAY_SECS, GOOD_SECS)
        try:
            while not self.retired:
                await trio.lowlevel.checkpoint()  # whatever fails at once below
                self._called = trio.Event()
                self._running = self.entry
                await self._live()
                if self._ending and not self.called:
                    await self._wait(backoff, chance)
                await self._standing.until_thawed()
        finally:
            self._gpus.give_back(self._own_gpus)
            self._enter(ReplicaState.STOPPED)

    async def _live(self) -> None:
        """Start it and stay to its end; `_ending` tells why it failed, if it did."""
        self._enter(ReplicaState.STARTING)
        self._ending = self._last_line = ""
        self._fatal = False
        self._ready_at = float("inf")
        self._worker = None
        self._standing.hold(self.url)
        try:
            child = await self._start()
        except ReplicaStartError as error:
            self._ending = self._last_error = str(error)
            self._fatal = error.fatal
            self._standing.lost(self.url, self._ending)
            return
        self._pid = child.pid
        try:
            await self._stay_with(child)
        finally:
            self._standing.hold(self.url)
            self._pid = None
            self._enter(ReplicaState.BACKING_OFF if self._ending else ReplicaState.STOPPED)
            await child.stop()
        if self._ending:
            self._last_error = f"{self._ending}; last line: {self._last_line or '(none)'}"
            self._fatal = self._is_fatal(child.status)

    def _is_fatal(self, status: int | None) -> bool:
        """Whether the life that ended so says that another one would end alike: its flags were
        refused, or something that it needs is not installed."""
        if self._ready_at != float("inf"):
            return False
        return status in REFUSED_STATUSES or bool(NOT_INSTALLED.search(self._last_line))

    async def _start(self) -> ChildProcess:
        entry, port = self._running, self._running.base_port + self._index
        try:
            for listener in await trio.open_tcp_listeners(port, host=entry.host):
                await listener.aclose()
            self._take_gpus(entry.gpus_per_replica)
            argv = argv_of(entry, self._index, self._own_gpus)
            env = environment_of(entry, self._index, self._own_gpus, os.environ)
            return await self._leash.start(argv, env, self._say)
        except OSError as error:
            reason = error.strerror or str(error)
            if error.filename is None:
                reason = f"port {port} of {entry.host}: {reason}; end the other program"
            told = f"cannot start `{entry.command[0]}`: {reason}"
            fatal = isinstance(error, FileNotFoundError | PermissionError)
            raise ReplicaStartError(told, fatal=fatal and error.filename is not None) from error
        except TooFewGpus as error:
            raise ReplicaStartError(f"cannot start `{entry.command[0]}`: {error}") from error

    async def _stay_with(self, child: ChildProcess) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child.pass_on_output)
            nursery.start_soon(self._become_ready, nursery.cancel_scope)
            nursery.start_soon(self._leave_when_called, nursery.cancel_scope)
            self._ending = await child.ended()
            nursery.cancel_scope.cancel()
        if self._ending and not self.called:
            self._standing.lost(self.url, self._ending)

    async def _become_ready(self, life: trio.CancelScope) -> None:
        late = await self._standing.until_ready(self.url, self._running.ready_timeout_secs)
        if late:
            self._ending = late
            life.cancel()
            return
        self._worker = await self._standing.ready(self.url)
        self._ready_at = trio.current_time()
        self._enter(ReplicaState.READY)

    async def _leave_when_called(self, life: trio.CancelScope) -> None:
        await self._called.wait()
        self._standing.hold(self.url)
        if self._worker is not None:
            await self._standing.until_idle(self._worker)
        life.cancel()

    async def _wait(self, backoff: Backoff, chance: Callable[[], float]) -> None:
        if self._running.restart == "never":
            self._standing.give_up(self.url)
            self._enter(ReplicaState.STOPPED)
            await self._called.wait()
            return
        delay_secs = backoff.next_delay(trio.current_time() - self._ready_at)
        delay_secs *= 0.8 + 0.4 * chance()
        self._enter(ReplicaState.BACKING_OFF)
        log.warning("%s %s; again in %.1f s", self._label, self._last_error, delay_secs)
        with trio.move_on_after(delay_secs):
            await self._called.wait()
        self._restarts += 1

    def _take_gpus(self, count: int) -> None:
        if len(self._own_gpus) != count:
            self._gpus.give_back(self._own_gpus)
            self._own_gpus = ()
            self._own_gpus = self._gpus.take(count)

    @property
    def _label(self) -> str:
        return f"{self.name}[{self._index}]"

    def _say(self, line: str) -> None:
        self._last_line = line
        log.info("%s %s", self._label, line)

    def _enter(self, state: ReplicaState) -> None:
        self.state = state
        self._since = datetime.now(UTC)
        self._standing.moved()
