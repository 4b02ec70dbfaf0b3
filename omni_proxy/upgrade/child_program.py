"""The new program, its process and output, and the socket between it and the running one.

Over the socket go messages and descriptors. A frame is the message's length (four bytes), the
number of descriptors (four bytes), and the message; the descriptors follow in batches, each with
one byte. All calls block, so the running program calls them in threads. Invariants: a received
descriptor is either returned or closed; the new program's stderr passes through the running program
until it has taken over, so that its error can be shown, and every line is forwarded. It is ended by
`kill`, or continues independently.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final, TypeVar

import trio

from omni_proxy.launch.replica_process import without_frozen_variables
from omni_proxy.shared import fd_passing
from omni_proxy.shared.child_process import exit_text, program_argv
from omni_proxy.upgrade.state import Message, UnreadableMessage, decode, encode

ENVIRONMENT: Final = "OMNI_PROXY_UPGRADE"  # descriptors of the socket and of the later stderr
ERROR_LINES: Final = 20
EXIT_SECS: Final = 2.0  # wait for the process's end after the end of its connection
LAST_OUTPUT_SECS: Final = 1.0
HEAD_BYTES: Final = 8
PEER: Final = struct.Struct("3i")  # pid, user, group
MAX_BYTES: Final = 1 << 30
BATCH: Final = 200  # descriptors in one message: an older program receives no more

Expected = TypeVar("Expected")


class ChannelClosed(Exception):
    """The other program has closed the socket, or it has ended."""


class PeerProcess:
    """The process at the other end, which created the socket pair, observed by a pidfd."""

    def __init__(self, sock: socket.socket) -> None:
        self._pidfd: int | None = None
        self._was_gone = False
        peer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
        pid, _, _ = PEER.unpack(peer)
        if pid:  # 0: it is in another pid namespace, so it can't be observed
            try:
                self._pidfd = os.pidfd_open(pid)
            except OSError as error:
                self._was_gone = isinstance(error, ProcessLookupError)

    def has_ended(self, secs: float) -> bool:
        """Whether the process ends within `secs`; False if it can't be observed. Blocks."""
        if self._pidfd is None:
            return self._was_gone
        ended = select.poll()
        ended.register(self._pidfd, select.POLLIN)
        return bool(ended.poll(secs * 1000))

    def close(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


class HandoverChannel:
    """One end of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        sock.set_inheritable(False)
        self._sock = sock

    def peer_process(self) -> PeerProcess:
        return PeerProcess(self._sock)

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message with descriptors. Raises ChannelClosed."""
        body = encode(message)
        head = len(body).to_bytes(4, "big") + len(descriptors).to_bytes(4, "big")
        try:
            self._sock.sendall(head + body)
            for start in range(0, len(descriptors), BATCH):
                batch = descriptors[start : start + BATCH]
                self._sock.sendmsg([b"F"], fd_passing.ancillary_for(batch))
        except OSError as error:
            raise ChannelClosed(str(error)) from None

    def receive(self) -> tuple[Message, list[int]]:
        """The next message with its descriptors. Raises ChannelClosed, UnreadableMessage."""
        head = self._read(HEAD_BYTES)
        size, count = int.from_bytes(head[:4], "big"), int.from_bytes(head[4:], "big")
        if size > MAX_BYTES:
            raise ChannelClosed(f"a message of {size} bytes is too large")
        message = decode(self._read(size))
        return message, self._read_descriptors(count)

    def wake_receivers(self) -> None:
        """Threads that wait in `receive`, at both ends, get ChannelClosed."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                piece = self._sock.recv(min(size - len(data), 1 << 20))
            except OSError as error:
                raise ChannelClosed(str(error)) from None
            if not piece:
                raise ChannelClosed("the other program has closed the connection")
            data += piece
        return bytes(data)

    def _read_descriptors(self, count: int) -> list[int]:
        descriptors: list[int] = []
        try:
            while len(descriptors) < count:
                data, batch, _ = fd_passing.receive(self._sock, 1)
                descriptors += batch
                if not data or not batch:
                    raise ChannelClosed("descriptors are missing: is the limit of open files low?")
        except (OSError, ChannelClosed) as error:
            fd_passing.close_all(descriptors)
            raise ChannelClosed(str(error)) from None
        return descriptors


class NewProgramFailed(Exception):
    """The new program has ended, or sent a wrong message; the text has its error."""


def new_program_argv(binary: str | None) -> list[str]:
    """This program's command line, with its own or another executable."""
    first = program_argv() if binary is None else [binary]
    return [*first, *sys.argv[1:]]


class NewProgram:
    """A new program, created by `start`. `pid`: of the started process."""

    def __init__(self, process: trio.Process, channel: HandoverChannel) -> None:
        self.pid = process.pid
        self._process = process
        self._channel = channel
        self._lines: deque[str] = deque(maxlen=ERROR_LINES)
        self._output_ended = trio.Event()

    @classmethod
    async def start(cls, argv: Sequence[str], environ: Mapping[str, str]) -> NewProgram:
        """Start a new program. Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            stderr = os.dup(2)
            try:
                process = await trio.lowlevel.open_process(
                    list(argv),
                    stderr=subprocess.PIPE,
                    pass_fds=[theirs.fileno(), stderr],
                    env=_environment(environ) | {ENVIRONMENT: f"{theirs.fileno()} {stderr}"},
                )
            except OSError:
                ours.close()
                raise
            finally:
                os.close(stderr)
        return cls(process, HandoverChannel(ours))

    async def forward_output(self) -> None:
        """Forward its output, until it has taken over or has ended."""
        assert self._process.stderr is not None
        try:
            async with self._process.stderr as output:
                async for chunk in output:
                    await trio.to_thread.run_sync(_write_all, bytes(chunk))
                    self._lines.extend(chunk.decode(errors="replace").splitlines())
        finally:
            self._output_ended.set()

    async def receive(self, kind: type[Expected]) -> tuple[Expected, list[int]]:
        """Receive its next message, of type `kind`. Raises NewProgramFailed."""
        try:
            message, descriptors = await trio.to_thread.run_sync(
                self._channel.receive, abandon_on_cancel=True
            )
        except UnreadableMessage as error:
            raise NewProgramFailed(f"its message can't be read: {error}") from None
        except ChannelClosed:
            raise NewProgramFailed(await self._end_text()) from None
        if not isinstance(message, kind):
            raise NewProgramFailed(f"it sent {type(message).__name__} instead of {kind.__name__}")
        return message, descriptors

    async def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message. Raises NewProgramFailed."""
        try:
            await trio.to_thread.run_sync(self._channel.send, message, descriptors)
        except ChannelClosed:
            raise NewProgramFailed(await self._end_text()) from None

    async def kill(self) -> None:
        """Kill the program, and end all calls that wait for it. Can't be cancelled."""
        self._channel.wake_receivers()
        if self._process.returncode is None:
            self._process.kill()
            with trio.move_on_after(EXIT_SECS, shield=True):
                await self._process.wait()  # else it would stay a zombie
        self._channel.close()

    def close(self) -> None:
        """Close the connection, by which the new program detects that this one has ended."""
        self._channel.wake_receivers()
        self._channel.close()

    async def _end_text(self) -> str:
        """How the program ended, and its last lines of output."""
        status: int | None = None
        with trio.move_on_after(EXIT_SECS):
            status = await self._process.wait()
        with trio.move_on_after(LAST_OUTPUT_SECS):
            await self._output_ended.wait()
        end = "it closed the connection" if status is None else f"it {exit_text(status)}"
        lines = "\n".join(line for line in self._lines if line.strip())
        return f"{end}\n{lines}" if lines else end


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without variables of a frozen binary, because the new one unpacks itself."""
    env = {name: text for name, text in environ.items() if name != ENVIRONMENT}
    return without_frozen_variables(env) if getattr(sys, "frozen", False) else env


def _write_all(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(2, view) :]
