"""ChildProcess processes: each in a session of its own, all of them on one leash.

Invariant: when `stop` returns, nothing of the child's group is left; when this program is killed
outright, the leash kills every group. A process that leaves its group is out of reach.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import trio

log = logging.getLogger(__name__)

TERM_SECS = 10.0  # from SIGTERM to SIGKILL
KILL_SECS = 5.0  # what SIGKILL does not end in this time hangs in the kernel
LAST_WORDS_SECS = 1.0  # what is still in the pipe of a child that ended
LINE_CHARS = 2000

# Reads the groups, one whole list per line; when its input ends it kills those of the last line.
LEASH = 'while read -r line; do groups=$line; done; for g in $groups; do kill -KILL "-$g"; done'
_NOISE = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_BREAK = re.compile(rb"[\r\n]+")


class ParentDeathGuard:
    """A shell that sees our end of its pipe close, however we end, and then kills what we started.

    PR_SET_PDEATHSIG would be no leash: it fires when the spawning thread ends, which is a worker
    thread of trio that goes after 10 s of idleness.
    """

    def __init__(self) -> None:
        self._shell: trio.Process | None = None
        self._telling = trio.Lock()
        self._groups: set[int] = set()

    async def attach(self) -> None:
        try:
            self._shell = await trio.lowlevel.open_process(
                ["/bin/sh", "-c", LEASH],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C in our terminal must not end it before us
            )
        except OSError as error:
            log.warning("no /bin/sh (%s): replicas would outlive a SIGKILL of this program", error)

    async def detach(self) -> None:
        if self._shell is not None and self._shell.stdin is not None:
            with trio.move_on_after(KILL_SECS, shield=True):
                await self._shell.stdin.aclose()
                await self._shell.wait()

    async def start(
        self, argv: Sequence[str], env: Mapping[str, str], say: Callable[[str], None]
    ) -> ChildProcess:
        """Raises OSError when there is no such program."""
        process = await trio.lowlevel.open_process(
            list(argv),
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        with trio.CancelScope(shield=True):  # one small write: the pipe's reader never lingers
            await self._tell(self._groups | {process.pid})
        return ChildProcess(process, say, self)

    async def release(self, group: int) -> None:
        await self._tell(self._groups - {group})

    async def _tell(self, groups: set[int]) -> None:
        self._groups = groups
        if self._shell is None or self._shell.stdin is None:
            return
        async with self._telling:
            with suppress(trio.BrokenResourceError):  # somebody killed the shell: nothing to mend
                await self._shell.stdin.send_all(
                    b"%s\n" % " ".join(map(str, self._groups)).encode()
                )


class ChildProcess:
    """One started process, leader of its group."""

    def __init__(
        self, process: trio.Process, say: Callable[[str], None], leash: ParentDeathGuard
    ) -> None:
        self.pid = process.pid
        self._process = process
        self._say = say
        self._leash = leash
        self._lines = OutputLines()

    async def ended(self) -> str:
        """Return how it ended, as soon as it did."""
        status = await self._process.wait()
        if status >= 0:
            return f"process ended with exit status {status}"
        return f"process ended with signal {signal.Signals(-status).name}"

    @property
    def status(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._process.returncode

    async def pass_on_output(self) -> None:
        """Say what it prints, line by line, until nobody can print any more."""
        assert self._process.stdout is not None
        async for piece in self._process.stdout:
            for line in self._lines.feed(piece):
                self._say(line)
        for line in self._lines.feed(b"\n"):
            self._say(line)

    async def stop(self) -> None:
        """End the whole group; never cancelled, and never longer than the clocks above."""
        assert self._process.stdout is not None
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                # Read on: a child that blocks on a full pipe could not obey the SIGTERM.
                nursery.start_soon(self.pass_on_output)
                await self._end()
                nursery.cancel_scope.deadline = trio.current_time() + LAST_WORDS_SECS
            await self._process.stdout.aclose()
            await self._leash.release(self.pid)

    async def _end(self) -> None:
        if self._process.poll() is None:
            self._signal_group(signal.SIGTERM)
            with trio.move_on_after(TERM_SECS):
                await self._process.wait()
        self._signal_group(signal.SIGKILL)  # also what a leader that ended has left behind
        with trio.move_on_after(KILL_SECS) as waiting:
            await self._process.wait()
        if waiting.cancelled_caught:
            log.error("process %d does not end, even after SIGKILL", self.pid)

    def _signal_group(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)


class OutputLines:
    """Cuts a child's output into lines fit for a log: bounded, without control sequences."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes | bytearray) -> list[str]:
        *lines, self._rest = _BREAK.split(self._rest + piece)
        if len(self._rest) > LINE_CHARS:
            lines.append(self._rest)
            self._rest = b""
        shown = (_NOISE.sub(b"", line).decode(errors="replace").rstrip() for line in lines)
        return [_shortened(line) for line in shown if line]


def _shortened(line: str) -> str:
    return line if len(line) <= LINE_CHARS else line[:LINE_CHARS] + " [cut]"
