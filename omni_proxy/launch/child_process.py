"""Child processes, each in its own session, that never outlive this program; and replicas that
are handed over in an upgrade.

Invariants: when `stop` returns, no process of the child's group is left; when this program is
killed, the parent-death guard kills every group. A process that leaves its group is not covered. A
handed-over process is identified by its pidfd, which its parent opened, so a reused process id is
never confused with it; its exit status is unknown, because only its parent can read it.
"""

from __future__ import annotations

import logging
import os
import re
import select
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import trio
from msgspec import Struct

from omni_proxy.shared.child_process import exit_text

log = logging.getLogger(__name__)

UNKNOWN_STATUS: Final = 1  # of a process that has ended


class ReplicaRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A running replica. `entry`: the [[launch]] table from which it was started."""

    name: str
    index: int
    pid: int
    ready: bool = False
    restarts: int = 0
    last_error: str | None = None
    gpus: tuple[str, ...] = ()
    entry: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class HandedReplica:
    """A record with the descriptors of the process and of its output, which the owner closes."""

    record: ReplicaRecord
    pidfd: int
    output: int

    def close(self) -> None:
        os.close(self.pidfd)
        os.close(self.output)

    async def end(self, term_secs: float, kill_secs: float) -> None:
        """End its group without reading its output, and close the descriptors. Can't be
        cancelled."""
        with trio.CancelScope(shield=True):
            for number, secs in (signal.SIGTERM, term_secs), (signal.SIGKILL, kill_secs):
                with suppress(ProcessLookupError):
                    os.killpg(self.record.pid, number)
                with trio.move_on_after(secs):
                    await trio.lowlevel.wait_readable(self.pidfd)
        self.close()


class HandedProcess:
    """The part of trio.Process that `ChildProcess` uses. Takes over the descriptors; if it raises
    OSError they still belong to the caller."""

    def __init__(self, handed: HandedReplica) -> None:
        self.pid = handed.record.pid
        self._pidfd = handed.pidfd
        self._lock = trio.Lock()
        # Opened again: the flags of a passed descriptor are shared with the other program, which
        # would make it blocking again when it ends.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        self.stdout = trio.lowlevel.FdStream(os.open(f"/proc/self/fd/{handed.output}", flags))
        os.close(handed.output)

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        ended = select.poll()
        ended.register(self._pidfd, select.POLLIN)
        return UNKNOWN_STATUS if ended.poll(0) else None

    async def wait(self) -> int:
        async with self._lock:
            await trio.lowlevel.wait_readable(self._pidfd)
        return UNKNOWN_STATUS

    def dup_pidfd(self) -> int:
        return os.dup(self._pidfd)

    def close(self) -> None:
        os.close(self._pidfd)


TERM_SECS = 10.0  # from SIGTERM to SIGKILL
KILL_SECS = 5.0  # a process that survives SIGKILL for this long hangs in the kernel
LAST_OUTPUT_SECS = 1.0  # for reading the remaining output of an ended child
LINE_CHARS = 2000

# Reads the process groups, a whole list per line; at the end of input it kills the last list.
GUARD_SCRIPT = (
    'while read -r line; do groups=$line; done; for g in $groups; do kill -KILL "-$g"; done'
)
_CONTROL_BYTES = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_LINE_END = re.compile(rb"[\r\n]+")


class ParentDeathGuard:
    """A shell that kills the child process groups when its pipe from this program closes.

    The pipe closes however this program ends. PR_SET_PDEATHSIG can't be used: it fires when the
    thread that spawned the child ends, and trio ends idle worker threads.
    """

    def __init__(self) -> None:
        self._shell: trio.Process | None = None
        self._lock = trio.Lock()
        self._groups: set[int] = set()

    async def attach(self) -> None:
        try:
            self._shell = await trio.lowlevel.open_process(
                ["/bin/sh", "-c", GUARD_SCRIPT],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C at the terminal must not end it first
            )
        except OSError as error:
            log.warning(
                "parent_death_guard_failed error=%s effect=replicas_outlive_sigkill", str(error)
            )

    async def detach(self) -> None:
        if self._shell is not None and self._shell.stdin is not None:
            with trio.move_on_after(KILL_SECS, shield=True):
                await self._shell.stdin.aclose()
                await self._shell.wait()

    async def start(
        self, argv: Sequence[str], env: Mapping[str, str], on_line: Callable[[str], None]
    ) -> ChildProcess:
        """`on_line` gets each line of output. Raises OSError if the program can't be started."""
        process = await trio.lowlevel.open_process(
            list(argv),
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        with trio.CancelScope(shield=True):  # short: a small write, and the shell reads promptly
            await self._send_groups(self._groups | {process.pid})
        return ChildProcess(process, on_line, self)

    async def adopt(self, handed: HandedReplica, on_line: Callable[[str], None]) -> ChildProcess:
        """Take over a process that another program started. Raises OSError if its output can't be
        read; the process is ended then."""
        try:
            process = HandedProcess(handed)
        except OSError as error:
            log.error(
                "replica_not_resumed pid=%d error=%s action=ended",
                handed.record.pid,
                error.strerror,
            )
            await handed.end(TERM_SECS, KILL_SECS)
            raise
        with trio.CancelScope(shield=True):
            await self._send_groups(self._groups | {process.pid})
        return ChildProcess(process, on_line, self)

    async def release_all(self) -> None:
        """Stop guarding all groups, which another program guards now."""
        with trio.CancelScope(shield=True):
            await self._send_groups(set())

    async def release(self, group: int) -> None:
        await self._send_groups(self._groups - {group})

    async def _send_groups(self, groups: set[int]) -> None:
        self._groups = groups
        if self._shell is None or self._shell.stdin is None:
            return
        async with self._lock:
            with suppress(trio.BrokenResourceError):  # the shell was killed: there is no guard
                await self._shell.stdin.send_all(
                    b"%s\n" % " ".join(map(str, self._groups)).encode()
                )


class ChildProcess:
    """A started process, which is the leader of its group."""

    def __init__(
        self,
        process: trio.Process | HandedProcess,
        on_line: Callable[[str], None],
        guard: ParentDeathGuard,
    ) -> None:
        self.pid = process.pid
        self._process = process
        self._on_line = on_line
        self._guard = guard
        self._lines = OutputLines()

    async def wait_exit(self) -> str:
        """Wait for the end of the process; returns a description of how it ended."""
        status = await self._process.wait()
        if isinstance(self._process, HandedProcess):
            return "process ended; it was started before an upgrade, so its status is not known"
        return f"process {exit_text(status)}"

    @property
    def status(self) -> int | None:
        """The exit status, negative for a signal; None while the process runs."""
        return self._process.returncode

    def dup_descriptors(self) -> tuple[int, int] | None:
        """Descriptors of the process and of its output, to be closed by the caller; None once it
        has ended. Raises OSError."""
        if self._process.returncode is not None or self._process.stdout is None:
            return None
        handed = isinstance(self._process, HandedProcess)
        pidfd = self._process.dup_pidfd() if handed else os.pidfd_open(self.pid)  # type: ignore[union-attr]
        return pidfd, os.dup(self._process.stdout.fileno())  # type: ignore[attr-defined]

    async def forward_output(self) -> None:
        """Forward each line of output until every writer has closed the pipe."""
        assert self._process.stdout is not None
        async for chunk in self._process.stdout:
            for line in self._lines.feed(chunk):
                self._on_line(line)
        for line in self._lines.feed(b"\n"):
            self._on_line(line)

    async def stop(self) -> None:
        """End the whole group. Can't be cancelled; the constants above bound its duration."""
        assert self._process.stdout is not None
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                # Keep reading: a child that blocks on a full pipe could not react to SIGTERM.
                nursery.start_soon(self.forward_output)
                await self._terminate()
                nursery.cancel_scope.deadline = trio.current_time() + LAST_OUTPUT_SECS
            await self._process.stdout.aclose()
            if isinstance(self._process, HandedProcess):
                self._process.close()
            await self._guard.release(self.pid)

    async def _terminate(self) -> None:
        if self._process.poll() is None:
            self._signal_group(signal.SIGTERM)
            with trio.move_on_after(TERM_SECS):
                await self._process.wait()
        self._signal_group(signal.SIGKILL)  # also for processes that an ended leader has left
        with trio.move_on_after(KILL_SECS) as scope:
            await self._process.wait()
        if scope.cancelled_caught:
            log.error("process_survived_sigkill pid=%d", self.pid)

    def _signal_group(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)


class OutputLines:
    """Splits the output of a child into lines for the log: bounded, without control sequences."""

    def __init__(self) -> None:
        self._partial = b""

    def feed(self, chunk: bytes | bytearray) -> list[str]:
        *lines, self._partial = _LINE_END.split(self._partial + chunk)
        if len(self._partial) > LINE_CHARS:
            lines.append(self._partial)
            self._partial = b""
        texts = (_CONTROL_BYTES.sub(b"", line).decode(errors="replace").rstrip() for line in lines)
        return [_truncate(text) for text in texts if text]


def _truncate(line: str) -> str:
    return line if len(line) <= LINE_CHARS else line[:LINE_CHARS] + " [cut]"
