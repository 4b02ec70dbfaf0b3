"""`omni-proxy` as a fork of a process that has imported it: imports take seconds, a fork moments.

A fork runs `python -m omni_proxy` from its first line on, with its own arguments, environment,
folder and stderr. It is a child of the fork server, which reports its exit status; signals reach it
directly. Imported modules must not have started threads: a fork would not have them.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import trio

ROOT = Path(__file__).parents[2]
ENV = {"PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
MESSAGE_BYTES = 1 << 17
PROXY = ("omni_proxy.cli.serve", "omni_proxy.server")
REPLICA = (
    "torch",
    "tiktoken",
    "jinja2",
    "safetensors.torch",
    "omni_proxy.replica.command",
    "omni_proxy.replica.api.app",
    "omni_proxy.replica.stages.prepare",
    "omni_proxy.replica.text.stage",
    "omni_proxy.replica.models.tiny",
)


class Nest:
    """Ends at `close`; its forks outlive it."""

    def __init__(self, *imported: str) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._turn = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), *imported],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **ENV},
            )

    async def start(self, *words: str, stderr: int | None = None) -> Forked:
        """The program with these words. It gets a copy of `stderr`, or nobody hears it."""
        return Forked(*await trio.to_thread.run_sync(self._start, words, stderr, os.environ))

    def popen(self, *words: str, stderr: int | None = None) -> ForkedPopen:
        """The same where no event loop runs; the environment is that of the fork server."""
        return ForkedPopen(*self._start(words, stderr, {**os.environ, **ENV}))

    def _start(
        self, words: tuple[str, ...], stderr: int | None, environ: Mapping[str, str]
    ) -> tuple[int, int, socket.socket]:
        told = {"words": words, "environ": dict(environ), "folder": os.getcwd()}
        ended, reports = socket.socketpair()
        with self._turn, reports, open(os.devnull, "wb") as nobody:
            sent = [nobody.fileno() if stderr is None else stderr, reports.fileno()]
            socket.send_fds(self._ours, [json.dumps(told).encode()], sent)
            pid, descriptors, *_ = socket.recv_fds(self._ours, 32, 1)
        if not descriptors:
            raise RuntimeError("the nest of the programs has ended: its reason is on stderr")
        return int(pid), descriptors[0], ended

    def close(self) -> None:
        self._ours.close()
        self._process.wait()


@cache
def forkserver(*imported: str) -> Nest:
    """One for all tests of a run, until `close_nests`."""
    made = Nest(*imported)
    _NESTS.append(made)
    return made


_NESTS: list[Nest] = []


def close_nests() -> None:
    forkserver.cache_clear()
    while _NESTS:
        _NESTS.pop().close()


class _Forked:
    """A process that is no child of ours: its fork server sends its status to `ended`."""

    def __init__(self, pid: int, descriptor: int, ended: socket.socket) -> None:
        self.pid = pid
        self._descriptor = descriptor
        self._ended = ended
        self._ended.setblocking(False)
        self._status: int | None = None

    @property
    def returncode(self) -> int | None:
        if self._status is None:
            try:
                self._status = int(self._ended.recv(32))
            except BlockingIOError:
                return None
            self._ended.close()
            os.close(self._descriptor)
        return self._status

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            try:
                signal.pidfd_send_signal(self._descriptor, number)
            except ProcessLookupError:
                return  # it has ended, and its nest is about to say so

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forked(_Forked):
    """As a trio.Process."""

    def __init__(self, pid: int, descriptor: int, ended: socket.socket) -> None:
        super().__init__(pid, descriptor, ended)
        self._turn = trio.Lock()

    async def wait(self) -> int:
        async with self._turn:
            while (status := self.returncode) is None:
                await trio.lowlevel.wait_readable(self._ended)
        return status


class ForkedPopen(_Forked):
    """As a subprocess.Popen."""

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises TimeoutError."""
        while (status := self.returncode) is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise TimeoutError(f"process {self.pid} still runs after {timeout} s")
        return status


def hatch(control: socket.socket) -> list[str] | None:
    """The words of a fork in each fork; None in the nest, once nobody can ask it any more."""
    living: dict[int, tuple[int, socket.socket]] = {}
    with selectors.DefaultSelector() as waiting:
        waiting.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in waiting.select():
                if key.fileobj is not control:
                    waiting.unregister(key.fd)
                    _report(key.fd, *living.pop(key.fd))
                    continue
                asked, descriptors, *_ = socket.recv_fds(control, MESSAGE_BYTES, 2)
                if not descriptors:
                    return None
                stderr, reports = descriptors[0], socket.socket(fileno=descriptors[1])
                pid = os.fork()
                if not pid:
                    for each in (control, reports, *(reports for _, reports in living.values())):
                        each.close()
                    for each in living:
                        os.close(each)
                    return _settle(json.loads(asked), stderr)
                os.close(stderr)
                ends = os.pidfd_open(pid)
                living[ends] = (pid, reports)
                waiting.register(ends, selectors.EVENT_READ)
                socket.send_fds(control, [str(pid).encode()], [ends])


def _settle(told: dict, stderr: int) -> list[str]:
    os.dup2(stderr, 2)
    os.close(stderr)
    os.chdir(told["folder"])
    os.environ.clear()
    os.environ.update(told["environ"])
    return told["words"]


def _report(ends: int, pid: int, reports: socket.socket) -> None:
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(ends)
    with reports:
        reports.send(str(status).encode())


def main(control: int, imported: list[str]) -> list[str] | None:
    for name in imported:
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        raise RuntimeError(f"importing {imported} has started {len(threads) - 1} threads")
    with socket.socket(fileno=control) as asked:
        return hatch(asked)


if __name__ == "__main__":
    # In a fork nothing of the nest is left on the stack: it ends as any program does.
    given = main(int(sys.argv[1]), sys.argv[2:])
    if given is not None:
        sys.argv = ["omni-proxy", *given]
        runpy.run_module("omni_proxy", run_name="__main__", alter_sys=True)
