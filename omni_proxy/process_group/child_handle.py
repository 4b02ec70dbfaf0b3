"""A child process that joins groups for us, seen from here: start, ask, end. No torch here.

Invariant: everybody who waits for an answer of a child that has ended hears so, within
milliseconds; one that hangs holds nobody longer than he would wait, nor who only tells it
something. It ends by itself when this process does, however that happens.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec

from omni_proxy.process_group.forkserver_client import ForkServer
from omni_proxy.process_group.ipc import Begin, Ended, Logged, Moved, Ready, Reply, Up
from omni_proxy.process_group.tensor_plan import GroupError

log = logging.getLogger(__name__)

Event = Moved | Ended

# Between orders a child sleeps in one read: whoever takes nothing for so long was stopped.
TAKE_SECS: Final = 10.0


class ChildEnded(GroupError):
    """The process is gone, and with it every group that it was in."""

    def __init__(self, message: str) -> None:
        super().__init__(message, group_dropped=True)


class ChildHandle:
    """One process. Its only thread here reads what it says, and ends with it."""

    def __init__(self, begin: Begin, name: str, nest: ForkServer) -> None:
        """Returns at once; raises GroupError where none can be started."""
        self.why: str | None = None
        self.pid: int | None = None  # until it is ready
        self._imported = threading.Event()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._awaited: dict[int, _Box] = {}
        self._followed: dict[int, Callable[[Event | ChildEnded], None]] = {}
        self._up: msgspec.json.Decoder[Up] = msgspec.json.Decoder(Up)
        self._gone = threading.Event()
        self._hatched = nest.hatch()
        self._reader = threading.Thread(target=self._read, name=name, daemon=True)
        self._reader.start()
        self.tell(begin)

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
        box, until = _Box(), time.monotonic() + within_secs
        with self._lock:
            if self.why is not None:
                raise ChildEnded(self.why)
            self._awaited[number] = box
        try:
            self._say(order, min(within_secs, TAKE_SECS), *descriptors)
            answered = box.filled.wait(max(until - time.monotonic(), 0))
        finally:
            with self._lock:
                self._awaited.pop(number, None)
        if box.reply is not None:
            return box.reply
        if answered:
            raise ChildEnded(self.why or "the receiver process ended")
        raise GroupError(f"the receiver process gave no answer within {within_secs:g} s")

    def tell(self, order: msgspec.Struct) -> None:
        """What has no reply; a child that does not take it is ended."""
        try:
            self._say(order, TAKE_SECS)
        except GroupError as error:
            self.kill(str(error))

    def _say(self, order: msgspec.Struct, patience_secs: float, *descriptors: int) -> None:
        """Raises GroupError where it does not take it."""
        wire = self._hatched.wire
        try:
            wire.send(order, *descriptors, patience_secs=patience_secs)
        except TimeoutError:
            why = f"the receiver process hangs: it took no order for {patience_secs:g} s"
            if wire.torn:
                self.kill(why)
                raise ChildEnded(why) from None
            raise GroupError(why) from None
        except OSError:
            pass  # the reader sees its end

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
        self._hatched.kill()

    def reaped(self, within_secs: float) -> bool:
        return self._gone.wait(within_secs)

    def _read(self) -> None:
        try:
            for line in self._hatched.wire.lines():
                self._take(self._up.decode(line))
        except msgspec.DecodeError as error:
            self.why = self.why or f"the receiver process speaks nonsense: {error}"
        finally:
            # Whatever it was: who waits for this child must hear of its end.
            self._end()

    def _end(self) -> None:
        self._hatched.kill()
        # One that was given up before it spoke may be still to be forked: nobody waits for that.
        why = self.why if self.why and not self.ready else self._hatched.why()
        with self._lock:
            self.why = self.why or why
            awaited, followed = list(self._awaited.values()), list(self._followed.values())
            self._awaited.clear()
            self._followed.clear()
        self._hatched.close()
        self._gone.set()
        self._imported.set()  # nobody waits for that any more
        for box in awaited:
            box.filled.set()
        for heard in followed:
            heard(ChildEnded(self.why))

    def _take(self, message: Up) -> None:
        match message:
            case Ready(pid):
                self.pid = pid
                self._imported.set()
            case Logged(level, text):
                log.log(level, "receiver process %s: %s", self.pid, text)
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
