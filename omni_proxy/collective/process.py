"""A child process that joins groups for us, seen from its parent: start, ask, end. No torch here.

Invariant: a child that has ended is reaped, and everybody who waits for an answer of it hears so,
within milliseconds. It ends by itself when this process does, however that happens.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

import msgspec

from omni_proxy.collective.specs import GroupError
from omni_proxy.collective.wires import Begin, Ended, Logged, Moved, Ready, Reply, Up, Wire

log = logging.getLogger(__name__)

# gloo ends its process over a peer that sends more than it was told (weight-sync.md 0.3).
OVERSENT: Final = "EnforceNotMet"
TAIL_BYTES: Final = 4096
ENVIRONMENT: Final = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "OMP_NUM_THREADS": "1",
    # torch's store asks the DNS for the name of each address: an answer that gets lost would
    # hold a meeting up for 5 s (seen with 127.0.0.1).
    "RES_OPTIONS": "timeout:1 attempts:3",
}

Event = Moved | Ended


class ChildEnded(GroupError):
    """The process is gone, and with it every group that it was in."""

    def __init__(self, message: str) -> None:
        super().__init__(message, group_dropped=True)


class Child:
    """One process. Its only thread here reads what it says, and ends with it."""

    def __init__(self, begin: Begin, name: str) -> None:
        self.why: str | None = None
        self._imported = threading.Event()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._awaited: dict[int, _Box] = {}
        self._followed: dict[int, Callable[[Event | ChildEnded], None]] = {}
        self._up: msgspec.json.Decoder[Up] = msgspec.json.Decoder(Up)
        self._gone = threading.Event()
        try:
            self._process, self._wire, self._errors = _begun()
        except OSError as error:
            raise GroupError(f"no receiver process could be started: {error}") from None
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, name=f"{name}-{self.pid}", daemon=True)
        self._reader.start()
        with suppress(OSError):  # the reader sees its end
            self._wire.send(begin)

    @property
    def ready(self) -> bool:
        return self._imported.is_set()

    def require_ready(self, within_secs: float) -> None:
        """Waits until everything is imported; raises ChildEnded, or GroupError in time."""
        if not self._imported.wait(within_secs):
            raise GroupError(f"the receiver process has not started within {within_secs:g} s")
        if self.why is not None:
            raise ChildEnded(self.why)

    def number(self) -> int:
        return next(self._numbers)

    def call(self, order: msgspec.Struct, within_secs: float, *descriptors: int) -> Reply:
        """The reply to an order; raises GroupError with its error, ChildEnded, or no answer."""
        number: int = order.number  # type: ignore[attr-defined]  # every order with a reply has one
        box = _Box()
        with self._lock:
            if self.why is not None:
                raise ChildEnded(self.why)
            self._awaited[number] = box
        self.tell(order, *descriptors)
        answered = box.filled.wait(within_secs)
        with self._lock:
            self._awaited.pop(number, None)
        if box.reply is not None:
            return box.reply
        if answered:
            raise ChildEnded(self.why or "the receiver process ended")
        raise GroupError(f"the receiver process gave no answer within {within_secs:g} s")

    def tell(self, order: msgspec.Struct, *descriptors: int) -> None:
        with suppress(OSError):  # the reader sees its end
            self._wire.send(order, *descriptors)

    def follow(self, number: int, heard: Callable[[Event | ChildEnded], None]) -> None:
        """Has `heard` called with what comes about an armed receive, or the child's end.

        From the reading thread; the last call is `Ended` or `ChildEnded`.
        """
        with self._lock:
            if self.why is None:
                self._followed[number] = heard
                return
        heard(ChildEnded(self.why))

    def unfollow(self, number: int) -> None:
        with self._lock:
            self._followed.pop(number, None)

    def kill(self, why: str) -> None:
        """Ends it at once; whoever waits for it hears `why`."""
        with self._lock:
            self.why = self.why or why
        self._process.kill()

    def reaped(self, within_secs: float) -> bool:
        return self._gone.wait(within_secs)

    def _read(self) -> None:
        try:
            for line in self._wire.lines():
                self._take(self._up.decode(line))
        except msgspec.DecodeError as error:
            self.why = self.why or f"the receiver process speaks nonsense: {error}"
        finally:
            # Whatever it was: who waits for this child must hear of its end.
            self._end()

    def _end(self) -> None:
        # Only this thread closes it: a number that is free again may be anybody's.
        self._process.kill()
        status = self._process.wait()
        with self._lock:
            self.why = self.why or _told(status, self._errors)
            awaited, followed = list(self._awaited.values()), list(self._followed.values())
            self._awaited.clear()
            self._followed.clear()
        self._wire.close()
        os.close(self._errors)
        self._gone.set()
        self._imported.set()  # nobody waits for that any more
        for box in awaited:
            box.filled.set()
        for heard in followed:
            heard(ChildEnded(self.why))

    def _take(self, message: Up) -> None:
        match message:
            case Ready():
                self._imported.set()
            case Logged(level, text):
                log.log(level, "receiver process %d: %s", self.pid, text)
            case Reply(number=number):
                with self._lock:
                    box = self._awaited.get(number)
                if box is not None:
                    box.reply = message
                    box.filled.set()
            case Moved(number=number) | Ended(number=number):
                with self._lock:
                    heard = self._followed.get(number)
                    if isinstance(message, Ended):
                        self._followed.pop(number, None)
                if heard is not None:
                    heard(message)


class _Box:
    __slots__ = ("filled", "reply")

    def __init__(self) -> None:
        self.filled = threading.Event()
        self.reply: Reply | None = None


def command(descriptor: int) -> list[str]:
    """What starts a child; a single-file build is its own interpreter."""
    if getattr(sys, "frozen", False):
        return [sys.executable, "receiver-process", str(descriptor)]
    return [sys.executable, "-m", "omni_proxy.collective.child", str(descriptor)]


def _begun() -> tuple[subprocess.Popen[bytes], Wire, int]:
    """The process, our end of the socket, and what it writes its last words into."""
    with ExitStack() as undo:
        errors = os.memfd_create("omni-weights-errors", os.MFD_CLOEXEC)
        undo.callback(os.close, errors)
        ours, theirs = socket.socketpair()
        undo.callback(ours.close)
        with theirs:
            process = _started(theirs.fileno(), errors)
        undo.pop_all()
    return process, Wire(ours), errors


def _started(descriptor: int, errors: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command(descriptor),
        stdin=subprocess.DEVNULL,
        stdout=errors,
        stderr=errors,
        pass_fds=(descriptor,),
        env={**ENVIRONMENT, **os.environ, **_path()},
    )


def _path() -> dict[str, str]:
    """Has the child find this package where it is a checkout or what an archive has unpacked."""
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
