"""The socket over which `omni-proxy upgrade` requests an upgrade of the running program.

It is in the program's private folder, so only its user and root can use it: HTTP clients must not
choose a program to start. A client sends one line of JSON, an `UpgradeRequest`, and gets lines of
`UpgradeReport`, the last of which has an `outcome`. A client that disconnects cancels nothing.
"""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import trio
from msgspec import Struct

from omni_proxy.upgrade.outgoing import Outgoing, UpgradeFailed
from omni_proxy.upgrade.program_parts import ProgramParts

_log = logging.getLogger(__name__)

NAME: Final = "upgrade.sock"  # in the program's private folder
MAX_LINE_BYTES: Final = 1 << 16
REPORT_SECS: Final = 2.0
DONE: Final = "done"
FAILED: Final = "failed"


class UpgradeRequest(Struct, frozen=True):
    """`binary`: the executable to start; null for the running program's executable."""

    binary: str | None = None


class UpgradeReport(Struct, frozen=True, omit_defaults=True):
    """A progress report, or with an `outcome` the result. `pid`: of the new program."""

    text: str
    outcome: str = ""
    pid: int = 0


class UpgradeService:
    """Runs upgrades that SIGUSR2 or clients of the socket request."""

    def __init__(self, parts: ProgramParts) -> None:
        self.parts = parts
        self.path = parts.admin_socket.with_name(NAME)
        self.outgoing = Outgoing(parts, self._start_soon)
        self._nursery: trio.Nursery | None = None
        self.opened = trio.Event()  # set when all services run; a request waits for it
        self._clients = 0
        self._clients_gone = trio.Event()

    async def wait_reported(self) -> None:
        """Wait up to REPORT_SECS until every client has the outcome of its upgrade."""
        with trio.move_on_after(REPORT_SECS):
            while self._clients:
                await self._clients_gone.wait()

    def status(self) -> dict[str, object]:
        return {**self.outgoing.status(), "socket": str(self.path)}

    def request(self) -> None:
        """Start an upgrade on SIGUSR2."""
        if self._nursery is not None:
            self._nursery.start_soon(self._upgrade_by_signal)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        self.path.unlink(missing_ok=True)
        listener = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with listener:
            await listener.bind(str(self.path))
            self.path.chmod(0o600)
            listener.listen()
            try:
                async with trio.open_nursery() as self._nursery:
                    task_status.started()
                    await trio.serve_listeners(self._serve, [trio.SocketListener(listener)])
            finally:
                self._nursery = None

    def _start_soon(self, task: object) -> None:
        assert self._nursery is not None
        self._nursery.start_soon(task)  # type: ignore[arg-type]

    async def _upgrade_by_signal(self) -> None:
        await self.opened.wait()
        with suppress(UpgradeFailed):  # `upgrade` has logged it
            await self.outgoing.upgrade(None, partial(_log.info, "upgrade_progress text=%s"))

    async def _serve(self, stream: trio.SocketStream) -> None:
        assert self._nursery is not None
        try:
            request = await _read_request(stream)
        except (trio.BrokenResourceError, msgspec.DecodeError):
            await stream.aclose()
            return
        self._clients += 1
        send, receive = trio.open_memory_channel[UpgradeReport](64)
        self._nursery.start_soon(self._upgrade_for_client, request, send)
        try:
            async with stream:
                with suppress(trio.BrokenResourceError):
                    async for report in receive:
                        await stream.send_all(msgspec.json.encode(report) + b"\n")
        finally:
            self._clients -= 1
            self._clients_gone.set()
            self._clients_gone = trio.Event()

    async def _upgrade_for_client(
        self, request: UpgradeRequest, reports: trio.MemorySendChannel[UpgradeReport]
    ) -> None:
        def report(text: str) -> None:
            with suppress(trio.WouldBlock, trio.BrokenResourceError):
                reports.send_nowait(UpgradeReport(text))

        await self.opened.wait()
        try:
            pid = await self.outgoing.upgrade(request.binary, report)
            last = UpgradeReport("the new program serves", DONE, pid)
        except UpgradeFailed as error:
            last = UpgradeReport(str(error), FAILED)
        with suppress(trio.WouldBlock, trio.BrokenResourceError):
            reports.send_nowait(last)
        reports.close()


async def _read_request(stream: trio.SocketStream) -> UpgradeRequest:
    """Raises trio.BrokenResourceError, msgspec.DecodeError."""
    line = b""
    while not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:
        piece = await stream.receive_some()
        if not piece:
            break
        line += piece
    return msgspec.json.decode(line, type=UpgradeRequest)


def request_upgrade(path: Path, binary: str | None) -> Iterator[UpgradeReport]:
    """Request an upgrade, for the command; yields its reports. Blocks.

    Raises OSError, also if the connection ends before the outcome.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(str(path))
        sock.sendall(json.dumps({"binary": binary}).encode() + b"\n")
        with sock.makefile("rb") as lines:
            for line in lines:
                report = msgspec.json.decode(line, type=UpgradeReport)
                yield report
                if report.outcome:
                    return
    raise ConnectionError("the program closed the connection before the outcome")
