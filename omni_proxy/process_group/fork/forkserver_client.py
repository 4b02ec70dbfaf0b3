"""Starts the fork server and requests forks from it; torch is imported once, in the server.

Importing torch takes seconds and memory; a fork of a process that has imported it takes
milliseconds and shares its pages. One fork server serves all receivers of this process. Invariant:
it runs only while a holder needs it, and its forks end with it. No torch in this process.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

import msgspec

from omni_proxy.process_group.fork.ipc import Exited, ForkEvent, JsonSocket, send_at_once
from omni_proxy.process_group.tensor_plan import GroupError
from omni_proxy.shared.child_process import exit_text, program_argv

log = logging.getLogger(__name__)

# gloo aborts its process if a peer sends more than was announced (note:weight-sync 0.3).
GLOO_OVERSENT: Final = "EnforceNotMet"
STDERR_TAIL_BYTES: Final = 4096
EXIT_SECS: Final = 5.0
ENVIRONMENT: Final = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "OMP_NUM_THREADS": "1",
    # torch's store resolves the name of each address, also of 127.0.0.1: with the default timeout
    # of 5 s a lost DNS answer would delay joining.
    "RES_OPTIONS": "timeout:1 attempts:3",
}
# numpy would start a thread per core, and a process that forks must have only one.
SINGLE_THREAD: Final = {"OPENBLAS_NUM_THREADS": "1"}


class ForkedProcess:
    """A fork that runs or was requested; `channel` is the socket to it."""

    def __init__(
        self, channel: JsonSocket, events: socket.socket, stderr: int, server: _ServerProcess
    ) -> None:
        self.channel = channel
        self._events = events
        self._stderr = stderr
        self._server = server
        self._lock = threading.Lock()

    def kill(self) -> None:
        """Makes the server kill the fork: only the server has its pid. Safe from any thread."""
        self.channel.shutdown()
        with self._lock, suppress(OSError):  # the fork has exited, and the socket is closed
            self._events.shutdown(socket.SHUT_WR)
        self._server.resume()

    def exit_reason(self) -> str:
        """Waits up to EXIT_SECS for the fork's exit, and returns its reason."""
        self._events.settimeout(EXIT_SECS)
        for line in JsonSocket(self._events).lines():
            event = msgspec.json.decode(line, type=ForkEvent)
            if isinstance(event, Exited):
                return _describe_exit(event.status, self._stderr)
            return f"no receiver process could be started: {event.reason}"
        return self._server.exit_reason()

    def close(self) -> None:
        self.channel.close()
        with self._lock:
            self._events.close()
        os.close(self._stderr)


class ForkServer:
    """Reference-counted handle of the fork server. Every method is safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._process: _ServerProcess | None = None

    def hold(self) -> None:
        """Keeps the server running, once started, until `release`. Doesn't start it."""
        with self._lock:
            self._holders += 1

    def release(self) -> None:
        """The last release kills the server and its forks, and returns when it is reaped."""
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
            process, self._process = self._process, None
        if process is not None:
            process.end()

    def warm(self) -> None:
        """Starts the server if it is not running, without waiting. Raises GroupError."""
        with self._lock:
            self._running_process()

    def fork(self) -> ForkedProcess:
        """Requests a new process without waiting, even while the server still imports torch.

        Raises GroupError if none can be started.
        """
        with self._lock:
            process = self._running_process()
            try:
                return process.fork()
            except OSError as error:
                process.end()
                raise GroupError(f"no receiver process could be started: {error}") from None

    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None and process.is_alive() else None

    def _running_process(self) -> _ServerProcess:
        if self._process is not None and not self._process.is_alive():
            self._process.end()
            self._process = None
        if self._process is None:
            try:
                self._process = _ServerProcess()
            except OSError as error:
                raise GroupError(f"no receiver process could be started: {error}") from None
        return self._process


class _ServerProcess:
    """The running server. It exits when this end of `_control` closes."""

    def __init__(self) -> None:
        with ExitStack() as undo:
            self._stderr = os.memfd_create("omni-weights-errors", os.MFD_CLOEXEC)
            undo.callback(os.close, self._stderr)
            self._control, server_end = socket.socketpair()
            undo.callback(self._control.close)
            with server_end:
                self._process = _start_server(server_end.fileno(), self._stderr)
            undo.pop_all()
        self.pid = self._process.pid
        self._exit_reason: str | None = None
        self._lock = threading.Lock()

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def resume(self) -> None:
        """Sends SIGCONT: a server that was stopped could neither fork nor kill."""
        self._process.send_signal(signal.SIGCONT)

    def fork(self) -> ForkedProcess:
        """Requests a fork. Raises OSError, also if the server no longer reads requests."""
        self.resume()
        with ExitStack() as undo:
            stderr = os.memfd_create("omni-weights-errors", os.MFD_CLOEXEC)
            undo.callback(os.close, stderr)
            channel, child_end = socket.socketpair()
            undo.callback(channel.close)
            events, server_end = socket.socketpair()
            undo.callback(events.close)
            with child_end, server_end:
                descriptors = [child_end.fileno(), stderr, server_end.fileno()]
                send_at_once(self._control, b".", descriptors)
            undo.pop_all()
        return ForkedProcess(JsonSocket(channel), events, stderr, self)

    def end(self) -> None:
        # SIGKILL, because the server has no state to save, and may be in a long import.
        self._process.kill()
        self.exit_reason()

    def exit_reason(self) -> str:
        """Waits up to EXIT_SECS for the server's exit, and returns its reason."""
        with self._lock:
            if self._exit_reason is None:
                try:
                    status = self._process.wait(EXIT_SECS)
                except subprocess.TimeoutExpired:
                    return "the receiver process has ended for an unknown reason"
                self._exit_reason = _describe_exit(status, self._stderr)
                self._control.close()
                os.close(self._stderr)
            return self._exit_reason


# The fork server of all receivers of this process.
SHARED_FORK_SERVER: Final = ForkServer()


def command(descriptor: int) -> list[str]:
    """The command line of the fork server."""
    return [*program_argv(), "receiver-process", str(descriptor)]


def _start_server(descriptor: int, stderr: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command(descriptor),
        stdin=subprocess.DEVNULL,
        stdout=stderr,
        stderr=stderr,
        pass_fds=(descriptor,),
        env={**ENVIRONMENT, **os.environ, **SINGLE_THREAD, **_python_path()},
    )


def _python_path() -> dict[str, str]:
    """PYTHONPATH with the folder of this package, if it is a checkout or an unpacked archive."""
    root = Path(__file__).parents[3]
    # Every interpreter has these folders on its path.
    if root.name in ("site-packages", "dist-packages"):
        return {}
    inherited = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (inherited, str(root))))}


def _describe_exit(status: int, stderr: int) -> str:
    """Why a process exited, from its status and the end of its stderr."""
    size = os.fstat(stderr).st_size
    tail = os.pread(stderr, STDERR_TAIL_BYTES, max(0, size - STDERR_TAIL_BYTES))
    text = tail.decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if lines:
        log.warning("receiver_process_stderr status=%d text=%s", status, " | ".join(lines))
    if status == -signal.SIGABRT and GLOO_OVERSENT in text:
        return "the trainer sent more bytes than it announced, which ended the receiver process"
    last = f": {lines[-1]}" if lines else ""
    return f"the receiver process {exit_text(status)}{last}"
