"""The watchdog: a thread that reports when the event loop is blocked for `STALL_SECS`.

Invariant: it costs the loop a few timers a second and nothing per request. The stacks of all
threads are logged once per stall. A Python thread can't run while a C call holds the GIL: such a
stall is reported when the call returns, in the frame that made it. Time in which the watchdog did
not run counts only as far as the loop's thread used the CPU, and time in which that thread waited
for a CPU does not count: neither a stopped process nor an overloaded machine is a stall. It must
not wait for a lock that the loop's thread may hold.
"""

from __future__ import annotations

import logging
import os
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
HEARTBEAT_SECS: Final = 0.1
CHECK_SECS: Final = 0.25
SCHEDSTAT_BYTES: Final = 128
STALL_EVENT: Final = "event_loop_stalled"  # name of the log event


@dataclass(slots=True)
class StallTimer:
    """Measures the time since the last heartbeat: `secs`, as counted by the watchdog."""

    now: float
    cpu: float  # CPU time of the loop's thread
    waited: float = 0.0  # time that the loop's thread waited for a CPU
    beats: int = 0
    secs: float = 0.0
    reported: bool = False

    def update(self, now: float, cpu: float, beats: int, waited: float = 0.0) -> bool:
        """True once per stall. `now`, `cpu` and `waited` are clocks in seconds that only rise."""
        elapsed, computed = now - self.now - (waited - self.waited), cpu - self.cpu
        self.now, self.cpu, self.waited = now, cpu, waited
        if beats != self.beats:
            self.beats, self.secs, self.reported = beats, 0.0, False
            return False
        # Negative if this thread lost the CPU between reading `now` and `waited`; the next or
        # previous value is then too large by as much.
        self.secs += min(elapsed, max(2 * CHECK_SECS, computed))
        if self.reported or self.secs < STALL_SECS:
            return False
        self.reported = True
        return True


class Watchdog:
    """Watches the event loop that runs `run`.

    `longest_turn_secs`: the longest time that a task had to wait while the loop's thread computed,
    since `end_startup`, without time in which the thread waited for a CPU. `heartbeats`: how often
    the loop has woken the watchdog's task, which it should do every `heartbeat_secs`.
    """

    def __init__(self, heartbeat_secs: float = HEARTBEAT_SECS) -> None:
        self._heartbeat_secs = heartbeat_secs
        self.stalls = 0
        self.last_stall_at: datetime | None = None
        self.last_stall_secs = 0.0
        self.longest_turn_secs = 0.0
        self.heartbeats = 0
        self._stalled = False
        self._in_startup = False  # the current iteration is part of the start

    def end_startup(self) -> None:
        """Iterations of the start, up to the current one, don't count as long ones."""
        self.longest_turn_secs = 0.0
        self._in_startup = True

    def status(self) -> dict[str, object]:
        """The record in GET /status."""
        at = self.last_stall_at
        return {
            "stalls": self.stalls,
            "last_stall_at": at.isoformat(timespec="milliseconds") if at else None,
            "last_stall_secs": round(self.last_stall_secs, 3) if at else None,
            "longest_turn_ms": round(self.longest_turn_secs * 1000, 2),
        }

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch until cancelled; the thread ends at the same time."""
        stop = threading.Event()
        threading.Thread(
            target=self._watch,
            # Not from the Thread object, which has the native id of the parent in a forked process.
            args=(threading.get_ident(), threading.get_native_id(), stop),
            name="watchdog",
            daemon=True,
        ).start()
        try:
            task_status.started()
            while True:
                cpu, due = time.thread_time(), trio.current_time() + self._heartbeat_secs
                await trio.sleep_until(due)
                self.heartbeats += 1
                late = trio.current_time() - due
                computed = time.thread_time() - cpu
                if not self._in_startup:
                    self.longest_turn_secs = max(self.longest_turn_secs, min(late, computed))
                self._in_startup = False
                if self._stalled:
                    self._stalled = False
                    self.last_stall_secs = late
                    _log.warning("event_loop_resumed stalled=%.1fs", late)
        finally:
            stop.set()

    def _watch(self, loop: int, native_id: int, stop: threading.Event) -> None:
        """Runs in the thread."""
        clock = time.pthread_getcpuclockid(loop)
        timer = StallTimer(time.monotonic(), time.clock_gettime(clock), cpu_wait_secs(native_id))
        while not stop.wait(CHECK_SECS):
            now, cpu = time.monotonic(), time.clock_gettime(clock)
            stalled = timer.update(now, cpu, self.heartbeats, cpu_wait_secs(native_id))
            if stalled and not stop.is_set():
                self._report(timer.secs, loop)

    def _report(self, secs: float, loop_thread: int) -> None:
        stacks = _stacks(loop_thread)
        self.stalls += 1
        self.last_stall_at = datetime.now(UTC)
        self.last_stall_secs = secs
        self._stalled = True
        _log.error("%s secs=%.1f stacks_of=all_threads\n%s", STALL_EVENT, secs, stacks)


def cpu_wait_secs(native_id: int) -> float:
    """The total time in which that thread of this process was ready to run, but had no CPU.

    proc(5), /proc/pid/schedstat; 0.0 from a kernel that does not count it.
    """
    try:
        # Without a file object, which makes four times the system calls: this runs beside the loop.
        file = os.open(f"/proc/self/task/{native_id}/schedstat", os.O_RDONLY)
        try:
            return int(os.read(file, SCHEDSTAT_BYTES).split()[1]) / 1e9
        finally:
            os.close(file)
    except (OSError, IndexError, ValueError):
        return 0.0


def _stacks(loop_thread: int) -> str:
    """The event loop's stack first; the innermost call of each comes last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != own}
    texts = []
    for ident in sorted(frames, key=lambda ident: ident != loop_thread):
        role = ", the event loop" if ident == loop_thread else ""
        lines = "".join(traceback.format_stack(frames[ident]))
        texts.append(f"thread {names.get(ident, ident)}{role}:\n{lines}")
    return "".join(texts).rstrip("\n")
