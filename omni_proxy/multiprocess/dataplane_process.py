"""A data-plane process: applies the main process's commands, serves requests, reports events.

Invariant: it does not outlive the main process: it exits as soon as their socket is closed. It
ignores signals, which the main process handles. A command has taken effect when it is acknowledged.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from heapq import nsmallest
from typing import Final

import msgspec
import trio

from omni_proxy.api_keys.key_table import KeyTable
from omni_proxy.config.parse import ConfigError
from omni_proxy.config.schema import Config
from omni_proxy.dataplane.downstream.connection import Connection
from omni_proxy.dataplane.status import MAX_CONNECTIONS, connection_record, counters
from omni_proxy.multiprocess.ipc.channel import IpcChannel
from omni_proxy.multiprocess.ipc.messages import (
    AbortCommand,
    AbortedEvent,
    AckEvent,
    ClearCacheCommand,
    ClusterHintsCommand,
    ClusterHintsEvent,
    DrainCommand,
    EngineLoadsCommand,
    EngineLoadsEvent,
    KvChangesCommand,
    ListenCommand,
    ListenFailedEvent,
    LoadRow,
    LoadTreesCommand,
    LogLinesEvent,
    ProcessCommand,
    ProcessEvent,
    ProcessStats,
    RequestFailedEvent,
    RequestSucceededEvent,
    SaveTreesCommand,
    StartCommand,
    StateSnapshot,
)
from omni_proxy.multiprocess.load_reports import LoadCollector, take_rows
from omni_proxy.multiprocess.metrics_delta import MetricsDelta
from omni_proxy.multiprocess.replicated_fleet import ReplicatedFleet, shared_ids
from omni_proxy.multiprocess.shared_dataplane import SharedDataPlane
from omni_proxy.multiprocess.shared_keys import KeyCounters
from omni_proxy.multiprocess.shared_memory.prefix_trees import load_trees, save_trees
from omni_proxy.multiprocess.shared_memory.sessions import (
    SharedSessions,
    WorkerDirectory,
    shared_response_owners,
)
from omni_proxy.multiprocess.shared_memory.worker_counters import SharedCounters
from omni_proxy.routing.tree_key import hash_with
from omni_proxy.shared.watchdog import Watchdog
from omni_proxy.system.garbage import collect_before_serving
from omni_proxy.telemetry.line_log import OFF, QUEUE_BYTES
from omni_proxy.telemetry.logs import configure

_log = logging.getLogger(__name__)

SEND_LINES_SECS: Final = 0.1
SEND_HINTS_SECS: Final = 0.05
MAX_HINTS: Final = 512  # of prompts, and of sessions, in one message
SEND_METRICS_SECS: Final = 0.25
SEND_STATS_SECS: Final = 1.0
QUEUE_POLL_SECS: Final = 0.005  # between two checks for capacity that another process has freed
IDLE_POLL_SECS: Final = 0.1  # ... while no request waits
MAX_UNSENT_BYTES: Final = (
    1 << 20
)  # beyond it the main process reads too slowly: metrics wait, optional events are dropped


def main(argv: Sequence[str]) -> int:
    """`argv`: the number of the socket's descriptor. Returns when a drain has ended or the main
    process has exited."""
    if len(argv) != 1 or not argv[0].isdecimal():
        sys.exit("data-plane-process is internal: omni-proxy starts it if [server] processes > 1")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    trio.run(run, socket.socket(fileno=int(argv[0])))
    return 0


async def run(sock: socket.socket) -> None:
    """Run until the main process closes the socket or a drain that it requested has ended."""
    channel: IpcChannel[ProcessCommand] = IpcChannel(sock, msgspec.msgpack.Decoder(ProcessCommand))
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(channel.run_writer)
            await _serve(channel, nursery)
            nursery.cancel_scope.cancel()
    finally:
        channel.close()


async def _serve(channel: IpcChannel[ProcessCommand], nursery: trio.Nursery) -> None:
    process: DataPlaneProcess | None = None
    begin: StartCommand | None = None
    applied = 0
    while commands := await channel.receive():
        for message in commands:
            if isinstance(message, StartCommand):
                begin = message
                hash_with(begin.tree_seed)
            elif process is None:
                assert begin is not None
                assert isinstance(message, StateSnapshot)
                process = DataPlaneProcess(begin, message, channel)
                await nursery.start(process.run)
            elif isinstance(message, AbortCommand):
                await process.abort(message)
            elif isinstance(message, SaveTreesCommand | LoadTreesCommand):
                await process.move_trees(message)
            else:
                process.take(message)
            applied += 1
        if process is not None:
            process.on_main_message()
            channel.send(AckEvent(applied, process.revision))


class LogLineBuffer:
    """A sink that collects at most `max_bytes` of log lines, and counts those that it drops."""

    def __init__(self, max_bytes: int) -> None:
        self.lines: list[bytes] = []
        self.dropped = 0
        self._bytes = 0
        self._max_bytes = max_bytes

    def write(self, record: bytes) -> None:
        if self._bytes + len(record) > self._max_bytes:
            self.dropped += 1
            return
        self._bytes += len(record)
        self.lines.append(record)

    def take(self) -> tuple[list[bytes], int]:
        """The lines and the number of dropped ones since the last call."""
        taken = self.lines, self.dropped
        self.lines, self.dropped, self._bytes = [], 0, 0
        return taken


class LineBatches:
    """The sinks of the three logs, whose lines are sent together."""

    def __init__(self, max_bytes: int = QUEUE_BYTES) -> None:
        self.access, self.route = LogLineBuffer(max_bytes), LogLineBuffer(max_bytes)
        self.spans = LogLineBuffer(max_bytes)

    def take(self) -> LogLinesEvent | None:
        """The lines since the last call; None if there are none."""
        buffers = self.access, self.route, self.spans
        if not any(buffer.lines for buffer in buffers):
            return None
        access, route, spans = (buffer.take() for buffer in buffers)
        return LogLinesEvent(access[0], route[0], spans[0], (access[1], route[1], spans[1]))


class DataPlaneProcess:
    """One data-plane process: applies commands and sends events."""

    def __init__(
        self, begin: StartCommand, first: StateSnapshot, channel: IpcChannel[ProcessCommand]
    ) -> None:
        assert first.config is not None
        self.revision = 0
        self._channel = channel
        self._drain_started = trio.Event()
        counts, keys_fd, sessions_fd, responses_fd = channel.take_descriptors()
        counters = SharedCounters(counts)
        fleet = ReplicatedFleet(counters, begin.index, lambda: self.dataplane.loop.now, self._send)
        row = counters.row(begin.index)
        self.fleet = fleet
        self._key_counters = KeyCounters(keys_fd, begin.index)
        self.dataplane = SharedDataPlane(begin, fleet, first.config, row, self._send)
        directory = WorkerDirectory(fleet.serial, shared_ids, fleet.targets)
        self.dataplane.use_sessions(SharedSessions(sessions_fd, directory))
        self.dataplane.balancer.response_owners = shared_response_owners(responses_fd, directory)
        self._loads = LoadCollector(fleet.loads, shared_ids, self._send_loads)
        self._meters = MetricsDelta(fleet)
        self._lines = LineBatches()
        self._max_lag_secs = 0.0
        self._watchdog = Watchdog()
        self.take(first)

    def _send(self, message: ProcessEvent) -> None:
        optional = isinstance(
            message, RequestFailedEvent | RequestSucceededEvent | EngineLoadsEvent
        )
        if not optional or self._channel.waiting_bytes < MAX_UNSENT_BYTES:
            self._channel.send(message)

    def _send_loads(self, rows: list[LoadRow]) -> None:
        self._send(EngineLoadsEvent(rows))

    def on_main_message(self) -> None:
        self.dataplane.main_process.last_message_at = self.dataplane.loop.clock()

    def take(self, message: ProcessCommand) -> None:
        match message:
            case StateSnapshot():
                self._apply_snapshot(message)
            case ListenCommand(count):
                self._listen(count)
            case ClearCacheCommand(serial):
                worker = self.fleet.serial(serial)
                if worker is not None:
                    self.fleet.cache_cleared(worker)
            case EngineLoadsCommand(rows):
                take_rows(self.fleet.loads, rows, self.fleet.serial)
            case KvChangesCommand(holder, changes):
                self.dataplane.take_kv_changes(holder, changes)
            case ClusterHintsCommand(prefixes):
                self.dataplane.cluster_hints.prefixes.add(prefixes)
            case DrainCommand(keeps_idle):
                self.dataplane.begin_drain(keeps_idle=keeps_idle)
                self._drain_started.set()
            case StartCommand():
                raise AssertionError("a process gets StartCommand once")
            case _:
                raise AssertionError("it is awaited")

    async def abort(self, message: AbortCommand) -> None:
        findings = await self.dataplane.abort(message.target)
        self._send(AbortedEvent(message.number, findings))

    async def move_trees(self, message: SaveTreesCommand | LoadTreesCommand) -> None:
        try:
            (descriptor,) = self._channel.take_descriptors()
        except OSError as error:  # the descriptor limit
            _log.warning("prefix_trees_left_out error=%s", error.strerror)
            return
        try:
            saves = isinstance(message, SaveTreesCommand)
            await (save_trees if saves else load_trees)(self.dataplane, descriptor)
        finally:
            os.close(descriptor)

    def _listen(self, count: int) -> None:
        try:
            numbers = self._channel.take_descriptors() if count else []
            socks = [socket.socket(fileno=number) for number in numbers]
            for sock in socks:
                sock.setblocking(False)
            self.dataplane.listen_on(socks)
        except OSError as error:  # the descriptor limit
            self._send(ListenFailedEvent(error.strerror or str(error)))

    def _apply_snapshot(self, snapshot: StateSnapshot) -> None:
        self.revision = snapshot.revision
        if snapshot.config is not None:
            self._apply_config(snapshot.config)
        callers = snapshot.callers
        if callers is not None:
            self._key_counters.highest = callers.highest
            slots = {e.name: slot for e, slot in zip(callers.entries, callers.slots, strict=True)}
            self.dataplane.follow_keys(KeyTable(callers.entries), slots, self._key_counters)
        self.fleet.reach(snapshot.processes)
        if snapshot.rows is not None:
            self.fleet.follow(snapshot.rows, datetime.now(UTC))
        self.dataplane.follow_voices(snapshot.voices, snapshot.voice_changes)

    def _apply_config(self, config: Config) -> None:
        server, dataplane = config.server, self.dataplane
        configure(server.log_level, server.log_format)
        try:
            dataplane.prepare(config)()
        except (OSError, ConfigError) as error:  # changed since the main process read them
            _log.error(
                "certificate_reload_failed file=%s error=%s was=certificates_not_reloaded",
                server.tls_cert,
                error,
            )
            dataplane.apply_without_listeners(config)
        lines = self._lines
        dataplane.recorders.access_log = lines.access if server.access_log != OFF else None
        dataplane.recorders.route_log = lines.route if server.route_log != OFF else None
        dataplane.recorders.spans = lines.spans if config.observe.otlp_endpoint else None
        dataplane.recorders.meters = self._meters if server.metrics else None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled or drained; after a drain, send what is left and close the socket."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self._watchdog.run)
            await nursery.start(self.dataplane.run)
            chores = (
                self._send_lines, self._send_reports, self._poll_queue_room, self._loads.run,
                self._send_hints,
            )  # fmt: skip
            for chore in chores:
                nursery.start_soon(chore)
            collect_before_serving()
            self._watchdog.end_startup()
            task_status.started()
            await self._drain_started.wait()
            await self.dataplane.drained()
            self._send_line_batch()
            self._send_stats()
            await self._channel.wait_flushed()
            self._channel.shut()
            nursery.cancel_scope.cancel()

    async def _send_lines(self) -> None:
        while True:
            recorders = self.dataplane.recorders
            off = recorders.access_log is recorders.route_log is recorders.spans is None
            await trio.sleep(SEND_STATS_SECS if off else SEND_LINES_SECS)
            self._send_line_batch()

    def _send_line_batch(self) -> None:
        if self._channel.waiting_bytes > MAX_UNSENT_BYTES:
            return  # lines that still fit are kept
        batch = self._lines.take()
        if batch is not None:
            self._channel.send(batch)

    async def _send_hints(self) -> None:
        """Send hints for the other proxies of a cluster."""
        hints = self.dataplane.cluster_hints
        while True:
            await trio.sleep(SEND_HINTS_SECS if hints.shares_any else SEND_STATS_SECS)
            if self._channel.waiting_bytes < MAX_UNSENT_BYTES:
                prefixes, sessions = hints.take_notes(MAX_HINTS)
                if prefixes or sessions:
                    self._channel.send(ClusterHintsEvent(prefixes, sessions))

    async def _send_reports(self) -> None:
        stats_at = trio.current_time()
        while True:
            due = trio.current_time() + SEND_METRICS_SECS
            await trio.sleep_until(due)
            self._max_lag_secs = max(self._max_lag_secs, trio.current_time() - due)
            if self._channel.waiting_bytes > MAX_UNSENT_BYTES:
                continue
            if due >= stats_at:
                stats_at = due + SEND_STATS_SECS
                self._send_stats()
            else:
                self._send_metrics()

    def _send_stats(self) -> None:
        self._send_metrics()
        self._channel.send(self._stats())
        self._max_lag_secs = 0.0

    def _send_metrics(self) -> None:
        metrics = self._meters.take()
        if metrics.series or metrics.worker_counts or metrics.seconds:
            self._channel.send(metrics)

    async def _poll_queue_room(self) -> None:
        """Serve the queue after another process has freed capacity."""
        queue = self.dataplane.queue
        while True:
            await trio.sleep(QUEUE_POLL_SECS if queue.waiting else IDLE_POLL_SECS)
            if queue.waiting:
                self.fleet.recount()
                queue.serve()

    def _stats(self) -> ProcessStats:
        dataplane, tasks = self.dataplane, self.dataplane.loop.tasks
        oldest = nsmallest(MAX_CONNECTIONS, tasks, key=lambda task: task.started_at)
        return ProcessStats(
            counts={
                **counters(dataplane.services),
                "rejected": dataplane.inflight.rejected,
                "stalls": self._watchdog.stalls,
            },
            ended=dataplane.services.totals.ended_by_outcome(),
            connections=dataplane.loop.connections,
            waiting=dataplane.queue.waiting,
            held_bytes=dataplane.inflight.held_bytes,
            phases=dict(Counter(task.phase for task in tasks)),
            oldest=[connection_record(task) for task in oldest if isinstance(task, Connection)],
            policy=dataplane.policy.stats(),
            pool_policies=dataplane.balancer.pool_policies.stats(),
            lag_ms=round(self._max_lag_secs * 1000, 2),
            longest_turn_ms=round(self._watchdog.longest_turn_secs * 1000, 2),
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
