"""The process that forks receiver processes, seen from ours: torch is imported once, in there.

Importing it takes seconds and 140 MB; a fork of who has done so takes milliseconds and shares them.
One nest serves every receiver of this process. Invariant: it lives only while somebody holds it,
and what it forked ends with it. No torch here.
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

from omni_proxy.process_group.ipc import Exited, JsonSocket, News, send_at_once
from omni_proxy.process_group.tensor_plan import GroupError
from omni_proxy.self_exec import program_argv

log = logging.getLogger(__name__)

# gloo ends its process over a peer that sends more than it was told (weight-sync.md 0.3).
OVERSENT: Final = "EnforceNotMet"
TAIL_BYTES: Final = 4096
END_SECS: Final = 5.0
ENVIRONMENT: Final = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "OMP_NUM_THREADS": "1",
    # torch's store asks the DNS for the name of each address: an answer that gets lost would
    # hold a meeting up for 5 s (seen with 127.0.0.1).
    "RES_OPTIONS": "timeout:1 attempts:3",
}
# numpy would start a thread for each core, and who forks must be alone.
ALONE: Final = {"OPENBLAS_NUM_THREADS": "1"}


class ForkedProcess:
    """One forked process, or one that is still to be: `wire` is what it hears and says."""

    def __init__(self, wire: JsonSocket, news: socket.socket, errors: int, nest: _Process) -> None:
        self.wire = wire
        self._news = news
        self._errors = errors
        self._nest = nest
        self._lock = threading.Lock()

    def kill(self) -> None:
        """From any thread, any number of times; the nest does it, which alone knows its number."""
        self.wire.end()
        with self._lock, suppress(OSError):  # it is over, and closed
            self._news.shutdown(socket.SHUT_WR)
        self._nest.wake()

    def why(self) -> str:
        """Waits for its end, which has to be near, and says how that came."""
        self._news.settimeout(END_SECS)
        news = JsonSocket(self._news)
        for line in news.lines():
            told = msgspec.json.decode(line, type=News)
            if isinstance(told, Exited):
                return _told(told.status, self._errors)
            return f"no receiver process could be started: {told.why}"
        return self._nest.why()

    def close(self) -> None:
        self.wire.close()
        with self._lock:
            self._news.close()
        os.close(self._errors)


class ForkServer:
    """Every method is safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._process: _Process | None = None

    def hold(self) -> None:
        """It stays from now on; starts nothing."""
        with self._lock:
            self._holders += 1

    def release(self) -> None:
        """The last one ends it, and all that came out of it; returns when it is reaped."""
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
            process, self._process = self._process, None
        if process is not None:
            process.end()

    def warm(self) -> None:
        """Sees to it that it is there or on its way; returns at once. Raises GroupError."""
        with self._lock:
            self._living()

    def hatch(self) -> ForkedProcess:
        """A process; returns at once, also where everything is still being imported.

        Raises GroupError where none can be started.
        """
        with self._lock:
            process = self._living()
            try:
                return process.hatch()
            except OSError as error:
                process.end()
                raise GroupError(f"no receiver process could be started: {error}") from None

    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None and process.lives() else None

    def _living(self) -> _Process:
        if self._process is not None and not self._process.lives():
            self._process.end()
            self._process = None
        if self._process is None:
            try:
                self._process = _Process()
            except OSError as error:
                raise GroupError(f"no receiver process could be started: {error}") from None
        return self._process


class _Process:
    """It ends by itself when our end of `_control` is closed, however that happens."""

    def __init__(self) -> None:
        with ExitStack() as undo:
            self._errors = os.memfd_create("omni-weights-errors", os.MFD_CLOEXEC)
            undo.callback(os.close, self._errors)
            self._control, theirs = socket.socketpair()
            undo.callback(self._control.close)
            with theirs:
                self._process = _started(theirs.fileno(), self._errors)
            undo.pop_all()
        self.pid = self._process.pid
        self._why: str | None = None
        self._lock = threading.Lock()

    def lives(self) -> bool:
        return self._process.poll() is None

    def wake(self) -> None:
        """Somebody may have stopped it: then nothing would be forked or killed any more."""
        self._process.send_signal(signal.SIGCONT)

    def hatch(self) -> ForkedProcess:
        """Raises OSError, also where it takes no requests any more."""
        self.wake()
        with ExitStack() as undo:
            errors = os.memfd_create("omni-weights-errors", os.MFD_CLOEXEC)
            undo.callback(os.close, errors)
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            news, to_tell = socket.socketpair()
            undo.callback(news.close)
            with theirs, to_tell:
                descriptors = [theirs.fileno(), errors, to_tell.fileno()]
                send_at_once(self._control, b".", descriptors)
            undo.pop_all()
        return ForkedProcess(JsonSocket(ours), news, errors, self)

    def end(self) -> None:
        # It has nothing to lose, and may be deep inside an import.
        self._process.kill()
        self.why()

    def why(self) -> str:
        """Waits for its end, and says how that came."""
        with self._lock:
            if self._why is None:
                try:
                    status = self._process.wait(END_SECS)
                except subprocess.TimeoutExpired:
                    return "the receiver process has ended, and nobody told why"
                self._why = _told(status, self._errors)
                self._control.close()
                os.close(self._errors)
            return self._why


# What every receiver of this process has its children from.
SHARED: Final = ForkServer()


def command(descriptor: int) -> list[str]:
    """What starts it."""
    return [*program_argv(), "receiver-process", str(descriptor)]


def _started(descriptor: int, errors: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command(descriptor),
        stdin=subprocess.DEVNULL,
        stdout=errors,
        stderr=errors,
        pass_fds=(descriptor,),
        env={**ENVIRONMENT, **os.environ, **ALONE, **_path()},
    )


def _path() -> dict[str, str]:
    """Has it find this package where it is a checkout or what an archive has unpacked."""
    here = Path(__file__).parents[2]
    # There every interpreter looks by itself, and after its own modules.
    if here.name in ("site-packages", "dist-packages"):
        return {}
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (before, str(here))))}


def _told(status: int, errors: int) -> str:
    """Why it ended by itself, out of its status and its last words."""
    size = os.fstat(errors).st_size
    words = os.pread(errors, TAIL_BYTES, max(0, size - TAIL_BYTES)).decode(errors="replace")
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    if lines:
        log.warning("the receiver process said at its end: %s", " | ".join(lines))
    if status == -signal.SIGABRT and OVERSENT in words:
        return "the trainer sent more bytes than it announced, which ended the receiver process"
    last = f": {lines[-1]}" if lines else ""
    if status < 0:
        return f"the receiver process was ended by {signal.Signals(-status).name}{last}"
    return f"the receiver process ended with status {status}{last}"
