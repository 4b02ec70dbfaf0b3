"""The processes of a soak (proxy, honest and hostile workers), and the proxy's resource usage.

Invariant: all processes that are started here are ended here, by id, however the soak ends.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import trio

from tools.soak.workers import HOSTILE

HONEST: Final = 4
END_SECS: Final = 10.0
CONFIG: Final = """\
[server]
port = {port}
processes = {processes}
queue_size = 2000
queue_timeout_secs = 30
max_held_bytes = "256MiB"
[server.timeouts]
response_head_secs = 8
idle_secs = 10
client_body_secs = 5
[routing]
policy = "{policy}"
while_paused = "hold"
[health]
interval_secs = 1
timeout_secs = 2
success_threshold = 1
[admin]
worker_timeout_secs = 20
[weight_sync]
while_updating = "hold"
"""
ENTRY: Final = '[[workers]]\nurl = "http://127.0.0.1:{port}"\nmodel = "{model}"\n'


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass(slots=True)
class Usage:
    """Resources of the proxy and all processes that it has started."""

    rss_bytes: int
    descriptors: int


@dataclass(slots=True)
class Fleet:
    """The running processes; `honest` are worker processes by port."""

    folder: Path
    processes: int
    port: int = field(default_factory=free_port)
    honest: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    hostile: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    proxy: subprocess.Popen[bytes] | None = None
    generation: int = 0  # of the configuration

    @property
    def file(self) -> Path:
        return self.folder / "proxy.toml"

    @property
    def log(self) -> Path:
        return self.folder / "proxy.log"

    def configure(self) -> None:
        """Write a different configuration each time, as editors do: a new file, then a rename."""
        policy = ("cache_aware", "least_request")[self.generation % 2]
        text = CONFIG.format(port=self.port, processes=self.processes, policy=policy)
        text += "".join(ENTRY.format(port=port, model="honest") for port in self.honest)
        left_out = self.generation % 3
        for number, port in enumerate(self.hostile):
            if number % 3 != left_out:
                text += ENTRY.format(port=port, model="hostile")
        aside = self.file.with_suffix(".new")
        aside.write_text(text)
        aside.rename(self.file)
        self.generation += 1

    def start_worker(self, port: int) -> None:
        self.honest[port] = _worker(f"honest-{port}", "honest", port)

    def kill_worker(self, port: int) -> None:
        self.honest[port].kill()
        self.honest[port].wait()

    def start(self) -> None:
        for _ in range(HONEST):
            self.start_worker(free_port())
        for kind in HOSTILE:
            port = free_port()
            self.hostile[port] = _worker(kind, kind, port)
        self.configure()
        command = [sys.executable, "-m", "omni_proxy", "--config", str(self.file)]
        with self.log.open("wb") as log:
            self.proxy = subprocess.Popen(command, stdout=log, stderr=log)

    def usage(self) -> Usage:
        assert self.proxy is not None
        pids = [self.proxy.pid, *_below(self.proxy.pid)]
        return Usage(sum(map(_rss, pids)), sum(map(_descriptors, pids)))

    async def end(self) -> int | None:
        """End the proxy with SIGTERM, then the rest; return its exit status, None if killed."""
        status = None
        if self.proxy is not None:
            self.proxy.send_signal(signal.SIGTERM)
            status = await _ended(self.proxy)
        for process in (*self.honest.values(), *self.hostile.values()):
            process.kill()
            process.wait()
        return status


@asynccontextmanager
async def fleet_of(folder: Path, processes: int) -> AsyncIterator[Fleet]:
    fleet = Fleet(folder, processes)
    try:
        fleet.start()
        yield fleet
    finally:
        with trio.CancelScope(shield=True):
            await fleet.end()


def _worker(name: str, kind: str, port: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tools.soak.workers", name, kind, str(port)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


async def _ended(process: subprocess.Popen[bytes]) -> int | None:
    with trio.move_on_after(END_SECS):
        return await trio.to_thread.run_sync(process.wait, abandon_on_cancel=True)
    process.kill()
    process.wait()
    return None


def _below(pid: int) -> list[int]:
    try:
        reported = "".join(
            path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")
        )
    except OSError:
        return []
    children = [int(word) for word in reported.split()]
    return [found for child in children for found in (child, *_below(child))]


def _rss(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _descriptors(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0
