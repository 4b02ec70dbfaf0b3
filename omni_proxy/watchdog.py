"""The watchdog: a thread that notices when the event loop has had no turn for `STALL_SECS`.

Invariant: it costs the loop ten timers a second and nothing per request. The stacks of all threads
are logged once per stall. A Python thread can't run while a C call holds the GIL: it reports such a
stall when the call returns, in the frame that made it. Time in which the watchdog itself did not
run counts only as far as the loop's thread computed: a stopped process, or a suspended machine, is
no stall. What it must not do: wait for anything that the loop's thread may hold.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import trio

_log = logging.getLogger(__name__)

STALL_SECS: Final = 1.0
BEAT_SECS: Final = 0.1
LOOK_SECS: Final = 0.25
STALLED: Final = "the event loop has had no turn for"  # what the log says; tests look for it


@dataclass(slots=True)
class Stall:
    """How long no beat has come, in seconds by the watchdog's own count."""

    now: float
    cpu: float  # of the loop's thread
    beats: int = 0
    secs: float = 0.0
    told: bool = False

    def stalled(self, now: float, cpu: float, beats: int) -> bool:
        """True once per stall. `now` and `cpu` are clocks in seconds that only rise."""
        elapsed, computed = now - self.now, cpu - self.cpu
        self.now, self.cpu = now, cpu
        if beats != self.beats:
            self.beats, self.secs, self.told = beats, 0.0, False
            return False
        self.secs += min(elapsed, max(2 * LOOK_SECS, computed))
        if self.told or self.secs < STALL_SECS:
            return False
        self.told = True
        return True


class Watchdog:
    """Watches the loop that runs `run`.

    `longest_turn_secs`: the longest that a task had to wait while the loop's thread computed, since
    `begin`. Waiting for the machine's CPUs is not in it.
    """

    def __init__(self) -> None:
        self.stalls = 0
        self.last_stall_at: datetime | None = None
        self.last_stall_secs = 0.0
        self.longest_turn_secs = 0.0
        self._beats = 0
        self._stalled = False
        self._starts = False  # the turn that goes on now is part of the start

    def begin(self) -> None:
        """The start is over: what it took, up to this turn, is no long turn."""
        self.longest_turn_secs = 0.0
        self._starts = True

    def status(self) -> dict[str, object]:
        """As GET /status shows it."""
        at = self.last_stall_at
        return {
            "stalls": self.stalls,
            "last_stall_at": at.isoformat(timespec="milliseconds") if at else None,
            "last_stall_secs": round(self.last_stall_secs, 3) if at else None,
            "longest_turn_ms": round(self.longest_turn_secs * 1000, 2),
        }

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled; the thread ends with it."""
        over = threading.Event()
        watched = threading.get_ident()
        threading.Thread(
            target=self._watch, args=(watched, over), name="watchdog", daemon=True
        ).start()
        try:
            task_status.started()
            while True:
                cpu, due = time.thread_time(), trio.current_time() + BEAT_SECS
                await trio.sleep_until(due)
                self._beats += 1
                late = trio.current_time() - due
                computed = time.thread_time() - cpu
                if not self._starts:
                    self.longest_turn_secs = max(self.longest_turn_secs, min(late, computed))
                self._starts = False
                if self._stalled:
                    self._stalled = False
                    self.last_stall_secs = late
                    _log.warning("the event loop goes on after %.1f s", late)
        finally:
            over.set()

    def _watch(self, watched: int, over: threading.Event) -> None:
        """The thread's whole life."""
        clock = time.pthread_getcpuclockid(watched)
        silence = Stall(time.monotonic(), time.clock_gettime(clock))
        while not over.wait(LOOK_SECS):
            now, cpu = time.monotonic(), time.clock_gettime(clock)
            if silence.stalled(now, cpu, self._beats) and not over.is_set():
                self._report(silence.secs, watched)

    def _report(self, secs: float, watched: int) -> None:
        stacks = _stacks(watched)
        self.stalls += 1
        self.last_stall_at = datetime.now(UTC)
        self.last_stall_secs = secs
        self._stalled = True
        _log.error("%s %.1f s; what each thread does now:\n%s", STALLED, secs, stacks)


def _stacks(watched: int) -> str:
    """The loop's first; the innermost call of each comes last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != own}
    told = []
    for ident in sorted(frames, key=lambda ident: ident != watched):
        role = ", the event loop" if ident == watched else ""
        lines = "".join(traceback.format_stack(frames[ident]))
        told.append(f"thread {names.get(ident, ident)}{role}:\n{lines}")
    return "".join(told).rstrip("\n")
