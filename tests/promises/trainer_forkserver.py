"""Trainers as forks of one process: importing torch takes seconds, and a fork milliseconds.

Tests kill, stop and wedge their trainers: whatever becomes of one, the next is a fork away.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENV = {"PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
# What trainers import; none of it may start a thread, which no fork would have.
IMPORTED = (
    "torch.distributed",
    "safetensors.torch",
    "omni_proxy.replica.models.tiny",
    "tools.training.__main__",
)


class TrainerForkServer:
    """The process that has imported everything. It ends when this one does, its forks later."""

    def __init__(self, module: str) -> None:
        self._ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), module]
        with theirs:
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **ENV},
            )

    def fork(self, connection: socket.socket) -> Forked:
        """One that runs `main(lines_in, lines_out)` of the module over the connection."""
        socket.send_fds(self._ours, [b"."], [connection.fileno()])
        return Forked(int(self._ours.recv(32)))

    def close(self) -> None:
        self._ours.close()
        self._process.wait()


class Forked:
    """A process that is not our child, as far as a Popen would show it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)

    def send_signal(self, number: int) -> None:
        if self.living():
            signal.pidfd_send_signal(self._descriptor, number)

    def living(self) -> bool:
        return not self._ended(0)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        self.wait()

    def wait(self) -> None:
        self._ended(None)

    def close(self) -> None:
        os.close(self._descriptor)

    def _ended(self, within_secs: float | None) -> bool:
        # poll, not select: a test process may hold more than select's 1,024 descriptors.
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(None if within_secs is None else within_secs * 1000))


def serve(control: socket.socket, module: str) -> None:
    """Forks for each connection that comes."""
    for name in IMPORTED:
        importlib.import_module(name)
    main = importlib.import_module(module).main
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        _, descriptors, *_ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        pid = os.fork()
        if not pid:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            with socket.socket(fileno=descriptors[0]) as connection:
                main(connection.makefile("r"), connection.makefile("w"))
            os._exit(0)
        os.close(descriptors[0])
        control.send(str(pid).encode())


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
