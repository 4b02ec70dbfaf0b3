"""One launched replica: its process, through every restart, until it is retired.

    starting ──200──> ready ──exit──> backing_off ──> starting   (restart = "never": stopped)
       └─exit, timeout, or start failed──────┘

Every exit that was not requested is a failure, also with exit status 0.
Invariant: the process has ended when `run` returns, also when `run` is cancelled.

Also builds the argv and the environment of a launched process from its [[launch]] entry.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from enum import StrEnum
from typing import Final

import msgspec
import trio

from omni_proxy.config.schema import LaunchEntry
from omni_proxy.fleet.worker import Worker
from omni_proxy.launch.child_process import (
    ChildProcess,
    HandedReplica,
    ParentDeathGuard,
    ReplicaRecord,
)
from omni_proxy.launch.gpu_allocator import GpuAllocator, TooFewGpus
from omni_proxy.launch.worker_link import LaunchedWorkerLink
from omni_proxy.shared.backoff import Backoff
from omni_proxy.shared.child_process import program_argv

OWN_COMMAND: Final = "omni-proxy"
_NEXT_PORT: Final = re.compile(r"\{([0-9]+)\+index\}")  # {5557+index}: 5557 for the first replica
# PyInstaller sets the first for a frozen binary, and saves the original value in the second.
LIBRARY_PATH: Final = "LD_LIBRARY_PATH"
ORIGINAL_LIBRARY_PATH: Final = "LD_LIBRARY_PATH_ORIG"


def start_parameters(entry: LaunchEntry) -> tuple[object, ...]:
    """The settings that need a restart; every other key applies to a running process."""
    ports = entry.base_port, entry.base_bootstrap_port
    return entry.command, entry.env, entry.host, ports, entry.gpus_per_replica


def argv_of(entry: LaunchEntry, index: int, gpus: Sequence[str]) -> list[str]:
    return [_fill_placeholders(arg, entry, index, gpus) for arg in _command_words(entry.command)]


def environment_of(
    entry: LaunchEntry, index: int, gpus: Sequence[str], environ: Mapping[str, str]
) -> dict[str, str]:
    """`environ`, overridden by the allocated GPUs, overridden by the `env` of the entry."""
    env = {"PYTHONUNBUFFERED": "1", **environ}  # so that output to a pipe arrives line by line
    if getattr(sys, "frozen", False) and entry.command[0] != OWN_COMMAND:
        env = without_frozen_variables(env)
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    filled = {
        name: _fill_placeholders(text, entry, index, gpus) for name, text in entry.env.items()
    }
    return env | filled


def without_frozen_variables(env: Mapping[str, str]) -> dict[str, str]:
    """`env` without the variables of a frozen binary, whose libraries fit no other program."""
    clean_env = {name: text for name, text in env.items() if not name.startswith("_PYI_")}
    original = clean_env.pop(ORIGINAL_LIBRARY_PATH, None)
    clean_env.pop(LIBRARY_PATH, None)
    return clean_env if original is None else clean_env | {LIBRARY_PATH: original}


def _command_words(command: tuple[str, ...]) -> list[str]:
    if command[0] != OWN_COMMAND:
        return list(command)
    return [*program_argv(), *command[1:]]


def _fill_placeholders(text: str, entry: LaunchEntry, index: int, gpus: Sequence[str]) -> str:
    values = {
        "{host}": entry.host,
        "{port}": str(entry.base_port + index),
        "{bootstrap_port}": str(entry.base_bootstrap_port + index),
        "{gpus}": ",".join(gpus),
        "{index}": str(index),
    }
    # Not str.format: commands may contain JSON, whose braces are not placeholders.
    for placeholder, value in values.items():
        text = text.replace(placeholder, value)
    return _NEXT_PORT.sub(lambda match: str(int(match[1]) + index), text)


log = logging.getLogger("omni_proxy.launch")

FIRST_DELAY_SECS = 1.0
LAST_DELAY_SECS = 30.0
RESET_SECS = 60.0  # after being ready for this long, the next failure counts as the first


class ReplicaState(StrEnum):
    """The states of the diagram above."""

    STARTING = "starting"
    READY = "ready"
    BACKING_OFF = "backing_off"
    STOPPED = "stopped"


# Exit statuses for a refused command line (argparse, most shell tools), a program that may not be
# executed, and a program that does not exist.
REFUSED_STATUSES: Final = (2, 126, 127)
NOT_INSTALLED: Final = re.compile(r"\bnot installed\b|No module named|ModuleNotFoundError")


_ENTRY_KEYS: Final = LaunchEntry.__struct_fields__


class ReplicaStartError(Exception):
    """The process could not be started; another attempt may help unless it is `fatal`."""

    def __init__(self, message: str, *, fatal: bool = False) -> None:
        super().__init__(message)
        self.fatal = fatal


class ReplicaProcess:
    """Replica `index` of `entry`. The launcher may set a newer `entry`, and calls `restart`."""

    def __init__(
        self,
        entry: LaunchEntry,
        index: int,
        link: LaunchedWorkerLink,
        guard: ParentDeathGuard,
        gpus: GpuAllocator,
    ) -> None:
        self.entry = entry
        self.state = ReplicaState.STARTING
        self.retired = False
        self._index = index
        self._link = link
        self._guard = guard
        self._gpus = gpus
        self._allocated_gpus: tuple[str, ...] = ()
        self._running_entry = entry  # the one that the current process was started from
        self._end_requested = trio.Event()
        self._since = datetime.now(UTC)
        self._ready_at = float("inf")
        self._pid: int | None = None
        self._worker: Worker | None = None
        self._restarts = 0
        self._failure = ""  # why the current process failed
        self._fatal = False  # further attempts are expected to fail in the same way
        self._last_line = ""
        self._last_error: str | None = None
        self._child: ChildProcess | None = None
        self._handed: HandedReplica | None = None  # a running process to take over
        self._released = False  # another program has the process

    def adopt(self, handed: HandedReplica) -> None:
        """Take over a running process, before `run`."""
        record = handed.record
        self._handed = handed
        self._restarts, self._last_error = record.restarts, record.last_error
        known = {key: record.entry[key] for key in _ENTRY_KEYS if key in record.entry}
        with suppress(msgspec.ValidationError):  # from another version: treated as unchanged
            self._running_entry = msgspec.convert(known, LaunchEntry)
        self._allocated_gpus = record.gpus
        self._gpus.adopt(record.gpus)

    def hand_over(self) -> HandedReplica | None:
        """The process, for another program; None if none runs. Raises OSError."""
        descriptors = self._child.dup_descriptors() if self._child is not None else None
        if self._child is None or descriptors is None or self.ending:
            return None
        record = ReplicaRecord(
            name=self.name,
            index=self._index,
            pid=self._child.pid,
            ready=self.state is ReplicaState.READY,
            restarts=self._restarts,
            last_error=self._last_error,
            gpus=self._allocated_gpus,
            entry=msgspec.to_builtins(self._running_entry),
        )
        return HandedReplica(record, *descriptors)

    def release(self, pids: Collection[int]) -> None:
        """Another program has these processes: one of this replica is not ended by `run`."""
        self._released = self._pid in pids

    @property
    def name(self) -> str:
        return self._running_entry.name

    @property
    def url(self) -> str:
        return self._running_entry.urls[self._index]

    @property
    def outdated(self) -> bool:
        """Whether the current process needs a restart to match `entry`."""
        return start_parameters(self.entry) != start_parameters(self._running_entry)

    @property
    def serving(self) -> bool:
        return self.state is ReplicaState.READY and self._link.find(self.url) is not None

    @property
    def ending(self) -> bool:
        """Whether a restart or a stop was requested."""
        return self._end_requested.is_set()

    def restart(self) -> None:
        """Drain the replica, then start it again from `entry`."""
        self._end_requested.set()

    def retire(self) -> None:
        """Drain the replica, then stop it permanently."""
        self.retired = True
        self._end_requested.set()

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

    async def run(self, jitter: Callable[[], float]) -> None:
        """`jitter` returns random numbers in [0, 1) for the delays between restarts."""
        backoff = Backoff(FIRST_DELAY_SECS, LAST_DELAY_SECS, RESET_SECS)
        try:
            while not self.retired:
                self._end_requested = trio.Event()
                if self._handed is None:
                    self._running_entry = self.entry
                await self._run_once()
                if self._failure and not self.ending:
                    await self._back_off(backoff, jitter)
                await self._link.wait_membership_released()
                # A failed start may contain no checkpoint. This one comes after the start, because
                # cancellation before it would leave a handed-over process without an owner.
                await trio.lowlevel.checkpoint()
        finally:
            self._gpus.release(self._allocated_gpus)
            if not self._released:
                self._enter(ReplicaState.STOPPED)

    async def _run_once(self) -> None:
        """Start the process and wait for its end; `_failure` is the reason if it failed."""
        handed, self._handed = self._handed, None
        is_ready = handed is not None and handed.record.ready
        self._enter(ReplicaState.READY if is_ready else ReplicaState.STARTING)
        self._failure = self._last_line = ""
        self._fatal = False
        self._ready_at = trio.current_time() if is_ready else float("inf")
        self._worker = self._link.find(self.url) if is_ready else None
        if not is_ready:
            self._link.cordon(self.url)
        try:
            child = await (self._start() if handed is None else self._resume(handed))
        except ReplicaStartError as error:
            self._failure = self._last_error = str(error)
            self._fatal = error.fatal
            self._link.process_exited(self.url, self._failure)
            return
        self._pid, self._child = child.pid, child
        try:
            await self._supervise(child)
        finally:
            self._pid = self._child = None
            if not self._released:
                self._link.cordon(self.url)
                self._enter(ReplicaState.BACKING_OFF if self._failure else ReplicaState.STOPPED)
                await child.stop()
        if self._failure:
            self._last_error = f"{self._failure}; last line: {self._last_line or '(none)'}"
            self._fatal = self._is_fatal(child.status)

    def _is_fatal(self, status: int | None) -> bool:
        """Whether another attempt would fail in the same way: its flags were refused, or a package
        that it needs is not installed."""
        if self._ready_at != float("inf"):
            return False
        return status in REFUSED_STATUSES or bool(NOT_INSTALLED.search(self._last_line))

    async def _resume(self, handed: HandedReplica) -> ChildProcess:
        """Raises ReplicaStartError."""
        log.info("replica_handed_over replica=%s pid=%d", self._label, handed.record.pid)
        try:
            return await self._guard.adopt(handed, self._log_line)
        except OSError as error:
            message = f"cannot be taken over after an upgrade: {error.strerror}; it was ended"
            raise ReplicaStartError(message) from error

    async def _start(self) -> ChildProcess:
        """Raises ReplicaStartError."""
        entry, port = self._running_entry, self._running_entry.base_port + self._index
        try:
            for listener in await trio.open_tcp_listeners(port, host=entry.host):
                await listener.aclose()
            self._allocate_gpus(entry.gpus_per_replica)
            argv = argv_of(entry, self._index, self._allocated_gpus)
            env = environment_of(entry, self._index, self._allocated_gpus, os.environ)
            return await self._guard.start(argv, env, self._log_line)
        except OSError as error:
            reason = error.strerror or str(error)
            if error.filename is None:
                reason = f"port {port} of {entry.host}: {reason}; end the other program"
            message = f"cannot start `{entry.command[0]}`: {reason}"
            fatal = isinstance(error, FileNotFoundError | PermissionError)
            raise ReplicaStartError(message, fatal=fatal and error.filename is not None) from error
        except TooFewGpus as error:
            raise ReplicaStartError(f"cannot start `{entry.command[0]}`: {error}") from error

    async def _supervise(self, child: ChildProcess) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child.forward_output)
            if self.state is not ReplicaState.READY:
                nursery.start_soon(self._become_ready, nursery.cancel_scope)
            nursery.start_soon(self._drain_when_requested, nursery.cancel_scope)
            self._failure = await child.wait_exit()
            nursery.cancel_scope.cancel()
        if self._failure and not self.ending:
            self._link.process_exited(self.url, self._failure)

    async def _become_ready(self, supervision: trio.CancelScope) -> None:
        timeout_secs = self._running_entry.ready_timeout_secs
        failure = await self._link.wait_ready(self.url, timeout_secs)
        if failure:
            self._failure = failure
            supervision.cancel()
            return
        self._worker = await self._link.set_ready(self.url)
        self._ready_at = trio.current_time()
        self._enter(ReplicaState.READY)

    async def _drain_when_requested(self, supervision: trio.CancelScope) -> None:
        await self._end_requested.wait()
        self._link.cordon(self.url)
        if self._worker is not None:
            await self._link.drain(self._worker)
        supervision.cancel()

    async def _back_off(self, backoff: Backoff, jitter: Callable[[], float]) -> None:
        if self._running_entry.restart == "never":
            self._link.mark_dead(self.url)
            self._enter(ReplicaState.STOPPED)
            await self._end_requested.wait()
            return
        delay_secs = backoff.next_delay(trio.current_time() - self._ready_at)
        delay_secs *= 0.8 + 0.4 * jitter()
        self._enter(ReplicaState.BACKING_OFF)
        log.warning(
            "replica_failed replica=%s restart_in=%.1fs error=%s",
            self._label, delay_secs, self._last_error,
        )  # fmt: skip
        with trio.move_on_after(delay_secs):
            await self._end_requested.wait()
        self._restarts += 1

    def _allocate_gpus(self, count: int) -> None:
        if len(self._allocated_gpus) != count:
            self._gpus.release(self._allocated_gpus)
            self._allocated_gpus = ()
            self._allocated_gpus = self._gpus.allocate(count)

    @property
    def _label(self) -> str:
        return f"{self.name}[{self._index}]"

    def _log_line(self, line: str) -> None:
        self._last_line = line
        log.info("%s %s", self._label, line)

    def _enter(self, state: ReplicaState) -> None:
        self.state = state
        self._since = datetime.now(UTC)
        self._link.on_state_change()
