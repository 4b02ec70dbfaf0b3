"""A door process: takes what control tells, serves, and tells what it has seen.

Invariant: it does not outlive control: the end of their socket ends it at once. Signals are left to
control, which drains it. What it is told has taken effect when it is acknowledged.
"""

from __future__ import annotations

import gc
import logging
import signal
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from heapq import nsmallest
from time import monotonic
from typing import Final

import msgspec
import trio

from omni_proxy.config.parse import ConfigError
from omni_proxy.config.schema import Config
from omni_proxy.dataplane.dataplane import SHOWN_CONNECTIONS
from omni_proxy.dataplane.downstream.connection import Connection
from omni_proxy.multiprocess.ipc_channel import IpcChannel
from omni_proxy.multiprocess.messages import (
    Ack,
    Begin,
    DrainCommand,
    Failed,
    Forget,
    Good,
    Listen,
    LogLines,
    ProcessStats,
    Shut,
    StateSnapshot,
    ToControl,
    ToDoor,
)
from omni_proxy.multiprocess.metrics_delta import MetricsDelta
from omni_proxy.multiprocess.replicated_fleet import ReplicatedFleet
from omni_proxy.multiprocess.shared_counters import SharedCounters
from omni_proxy.multiprocess.shared_dataplane import SharedDataPlane
from omni_proxy.multiprocess.shared_sessions import SharedSessions
from omni_proxy.telemetry.line_log import OFF, QUEUE_BYTES
from omni_proxy.telemetry.logs import configure
from omni_proxy.watchdog import Watchdog

_log = logging.getLogger(__name__)

LINES_SECS: Final = 0.1
TALLY_SECS: Final = 0.25
STAND_SECS: Final = 1.0
ROOM_SECS: Final = 0.005  # how often room that another door has made is looked for
CALM_SECS: Final = 0.1  # ... while nobody waits for it
BEHIND_BYTES: Final = 1 << 20  # control reads nothing: counts wait here, failures are not told


def main(argv: Sequence[str]) -> int:
    """`argv` is the number of the socket's descriptor; returns when control is gone, or drained."""
    if len(argv) != 1 or not argv[0].isdecimal():
        sys.exit("door-process is for omni-proxy itself, which starts it where processes > 1")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    trio.run(run, socket.socket(fileno=int(argv[0])))
    return 0


async def run(sock: socket.socket) -> None:
    """Until the other side closes, or the drain that it asked for is over."""
    channel: IpcChannel[ToDoor] = IpcChannel(sock, msgspec.msgpack.Decoder(ToDoor))
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(channel.pass_on)
            await _serve(channel, nursery)
            nursery.cancel_scope.cancel()
    finally:
        channel.close()


async def _serve(channel: IpcChannel[ToDoor], nursery: trio.Nursery) -> None:
    house: DataPlaneProcess | None = None
    begin: Begin | None = None
    taken = 0
    while heard := await channel.hear():
        for message in heard:
            if isinstance(message, Begin):
                begin = message
            elif house is None:
                assert begin is not None
                assert isinstance(message, StateSnapshot)
                house = DataPlaneProcess(begin, message, channel)
                await nursery.start(house.run)
            else:
                house.take(message)
            taken += 1
        if house is not None:
            house.heard()
            channel.tell(Ack(taken, house.revision))


class _Lines:
    """A sink of log lines that leave in batches."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.dropped = 0
        self._bytes = 0

    def write(self, record: bytes) -> None:
        if self._bytes + len(record) > QUEUE_BYTES:
            self.dropped += 1
            return
        self._bytes += len(record)
        self.lines.append(record)

    def taken(self) -> list[bytes]:
        lines, self.lines, self._bytes = self.lines, [], 0
        return lines


class DataPlaneProcess:
    """Every part of a door process, wired once."""

    def __init__(self, begin: Begin, first: StateSnapshot, channel: IpcChannel[ToDoor]) -> None:
        assert first.config is not None
        self.revision = 0
        self._channel = channel
        self._leaving = trio.Event()
        counts, kept = channel.descriptors()
        board = SharedCounters(counts)
        sessions = SharedSessions(kept, lambda serial: self.fleet.serial(serial))
        fleet = ReplicatedFleet(board, begin.index, lambda: self.door.loop.now, self._tell)
        row = board.row(begin.index)
        self.fleet = fleet
        self.door = SharedDataPlane(begin, fleet, first.config, row, self._tell)
        self.door.use_sessions(sessions)
        self._meters = MetricsDelta(fleet)
        self._access, self._route = _Lines(), _Lines()
        self._late_secs = 0.0
        self._watchdog = Watchdog()
        self.take(first)

    def _tell(self, message: ToControl) -> None:
        optional = isinstance(message, Failed | Good)
        if not optional or self._channel.waiting_bytes < BEHIND_BYTES:
            self._channel.tell(message)

    def heard(self) -> None:
        self.door.control.heard_at = monotonic()

    def take(self, message: ToDoor) -> None:
        match message:
            case StateSnapshot():
                self._take_news(message)
            case Listen(count):
                self._listen(count)
            case Forget(serial):
                worker = self.fleet.serial(serial)
                if worker is not None:
                    self.fleet.cache_cleared(worker)
            case DrainCommand():
                self.door.begin_drain()
                self._leaving.set()
            case Begin():
                raise AssertionError("a door begins once")

    def _listen(self, count: int) -> None:
        try:
            numbers = self._channel.descriptors() if count else []
            socks = [socket.socket(fileno=number) for number in numbers]
            for sock in socks:
                sock.setblocking(False)
            self.door.listen_on(socks)
        except OSError as error:  # we have used all that we may
            self._tell(Shut(error.strerror or str(error)))

    def _take_news(self, news: StateSnapshot) -> None:
        self.revision = news.revision
        if news.config is not None:
            self._take_config(news.config)
        self.fleet.reach(news.doors)
        if news.rows is not None:
            self.fleet.follow(news.rows, datetime.now(UTC))
        self.door.follow_voices(news.voices, news.voice_changes)

    def _take_config(self, config: Config) -> None:
        server, door = config.server, self.door
        configure(server.log_level, server.log_format)
        try:
            door.prepare(config)()
        except (OSError, ConfigError) as error:  # control could read them a moment ago
            _log.error("the certificates stay as they were: %s", error)
            door.keep_entrances(config)
        door.access_log = self._access if server.access_log != OFF else None
        door.route_log = self._route if server.route_log != OFF else None
        door.meters = self._meters if server.metrics else None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled, or drained: then control hears what is left to say, and our end."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self._watchdog.run)
            await nursery.start(self.door.run)
            for chore in (self._send_lines, self._send_tallies, self._look_for_room):
                nursery.start_soon(chore)
            gc.collect()
            gc.freeze()
            gc.set_threshold(10_000, 20, 50)
            self._watchdog.begin()
            task_status.started()
            await self._leaving.wait()
            await self.door.drained()
            self._tell_lines()
            self._tell_counts()
            await self._channel.flushed()
            self._channel.shut()
            nursery.cancel_scope.cancel()

    async def _send_lines(self) -> None:
        while True:
            off = self.door.access_log is None and self.door.route_log is None
            await trio.sleep(STAND_SECS if off else LINES_SECS)
            self._tell_lines()

    def _tell_lines(self) -> None:
        if self._channel.waiting_bytes > BEHIND_BYTES:
            return  # those that still fit are kept
        access, route = self._access, self._route
        if access.lines or route.lines:
            dropped, access.dropped, route.dropped = access.dropped + route.dropped, 0, 0
            self._channel.tell(LogLines(access.taken(), route.taken(), dropped))

    async def _send_tallies(self) -> None:
        stand_at = trio.current_time()
        while True:
            due = trio.current_time() + TALLY_SECS
            await trio.sleep_until(due)
            self._late_secs = max(self._late_secs, trio.current_time() - due)
            if self._channel.waiting_bytes > BEHIND_BYTES:
                continue
            if due >= stand_at:
                stand_at = due + STAND_SECS
                self._tell_counts()
            else:
                self._tell_tally()

    def _tell_counts(self) -> None:
        self._tell_tally()
        self._channel.tell(self._stand())
        self._late_secs = 0.0

    def _tell_tally(self) -> None:
        tally = self._meters.taken()
        if tally.cells or tally.worker_ends or tally.slots:
            self._channel.tell(tally)

    async def _look_for_room(self) -> None:
        """Of an exchange that ends at another door nobody here would hear."""
        queue = self.door.queue
        while True:
            await trio.sleep(ROOM_SECS if queue.waiting else CALM_SECS)
            if queue.waiting:
                self.fleet.recount()
                queue.serve()

    def _stand(self) -> ProcessStats:
        door, tasks = self.door, self.door.loop.tasks
        oldest = nsmallest(SHOWN_CONNECTIONS, tasks, key=lambda task: task.started_at)
        return ProcessStats(
            counts={
                "accepted": door.accepted,
                "failures": door.loop.failures,
                "failed_tls_handshakes": door.failed_handshakes,
                "answers_across_versions": door.across_versions,
                "rejected": door.rejected,
                "stalls": self._watchdog.stalls,
            },
            ended=dict(door.ended),
            connections=len(tasks),
            waiting=door.queue.waiting,
            held_bytes=door.held_bytes,
            phases=dict(Counter(task.phase for task in tasks)),
            oldest=[door.shown(task) for task in oldest if isinstance(task, Connection)],
            policy=door.policy.stats(),
            lag_ms=round(self._late_secs * 1000, 2),
            longest_turn_ms=round(self._watchdog.longest_turn_secs * 1000, 2),
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
