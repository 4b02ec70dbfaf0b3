"""Manages the data-plane processes: their number, their state, which of them listen.

Invariant: when `await_replicated` returns, every serving process has the state. A process that does
not acknowledge in time is killed, because one with an old snapshot must not route. A process that
exits unexpectedly is replaced, and its requests in flight are subtracted from the counters.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable
from typing import Final

import trio
from msgspec import structs
from msgspec.structs import replace

from omni_proxy.admin_ops.abort_requests import AbortFindings, AbortTarget, merged
from omni_proxy.config.schema import Config
from omni_proxy.config.tables.keys import CallerKey
from omni_proxy.dataplane.accept.listener import Listener
from omni_proxy.dataplane.dataplane import DataPlane
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.multiprocess.ipc.messages import (
    UNCHANGING,
    AbortCommand,
    AbortedEvent,
    CallersMessage,
    ClearCacheCommand,
    DrainCommand,
    EngineLoadsCommand,
    KvChangesCommand,
    ListenCommand,
    ListenFailedEvent,
    LoadRow,
    ProcessEvent,
    StartCommand,
)
from omni_proxy.multiprocess.load_reports import LoadCollector, load_rows
from omni_proxy.multiprocess.process_slot import ProcessHandle, ProcessSlot
from omni_proxy.multiprocess.replication import ReportHandler, SnapshotPublisher
from omni_proxy.multiprocess.reuseport_group import GroupSockets, ReuseportGroup
from omni_proxy.multiprocess.shared_keys import SharedKeys
from omni_proxy.multiprocess.shared_memory.sessions import (
    SharedSessions,
    WorkerDirectory,
    create_sessions,
    shared_response_owners,
)
from omni_proxy.multiprocess.shared_memory.worker_counters import WorkerIds
from omni_proxy.routing.kv_events.engine_blocks import PackedChanges
from omni_proxy.runtime_config.key_sources import KeySources
from omni_proxy.telemetry.instruments import Instruments

_log = logging.getLogger(__name__)

SILENT_SECS: Final = 10.0  # without a message a process answers /ready with 503
TICK_SECS: Final = 1.0
RECOUNT_SECS: Final = 0.1  # between two recounts; a caller that needs an exact count recounts
PUBLISH_PAUSE_SECS: Final = 0.002  # between two snapshots, so that many changes share one
PUBLISH_PAUSE_FACTOR: Final = 4  # times the duration of the last one, which grows with the fleet
ABORT_SECS: Final = 2.0  # for a process to end its waiting requests; a hung one may not answer
HANDOVER_SECS: Final = 1.0  # for connection attempts to complete while new ones are steered away


def process_count(config: Config) -> int:
    return config.server.processes or len(os.sched_getaffinity(0))


def per_process_config(config: Config, process_count: int) -> Config:
    """The configuration of one of `process_count` processes: limits are divided, and rounded up."""
    server = structs.replace(
        config.server,
        queue_size=-(-config.server.queue_size // process_count),
        max_held_bytes=-(-config.server.max_held_bytes // process_count),
    )
    return structs.replace(config, server=server, workers=(), launch=())


class ProcessManager:
    """All data-plane processes, and the main process's own data plane, which serves if
    `[server] processes = 1`."""

    def __init__(
        self,
        fleet: Fleet,
        dataplane: DataPlane,
        instruments: Instruments,
        admin_socket: str,
        caller_keys: KeySources[CallerKey] | None = None,
    ) -> None:
        self.dataplane = dataplane
        self._fleet = fleet
        self.draining = False
        self.tree_seed = 0  # seed of the hashes in prefix trees
        self.slots: dict[int, ProcessSlot] = {}  # by index
        self.worker_ids = WorkerIds(fleet, dataplane)
        self.exited_counts: Counter[str] = Counter()
        self.exited_outcomes: Counter[str] = Counter()
        self._publisher = SnapshotPublisher(fleet, self.worker_ids)
        self._loads = LoadCollector(fleet.loads, self.worker_ids.ids, self._send_loads)
        self._report_handler = ReportHandler(
            fleet, dataplane, self.worker_ids, instruments, self._loads,
            self.exited_counts, self.exited_outcomes,
        )  # fmt: skip
        self._admin_socket = admin_socket
        # The descriptors of the shared sessions, and of the owners of stored responses.
        self._tables: tuple[int, int] | None = None
        self.session_tables: tuple[SharedSessions, ...] = ()  # mapped when a process starts
        self._aborts: dict[int, list[AbortFindings]] = {}  # by the number of their command
        self._last_abort = 0
        self._port: ReuseportGroup | None = None
        self.inherited = GroupSockets()  # from the old program, for the first port
        self._start_watchers: list[Callable[[], None]] = []
        self._process_count = 0
        self._nursery: trio.Nursery | None = None
        self._has_slots = trio.Event()  # set while there are slots
        self._no_slots = trio.Event()
        self._changed = trio.Event()
        key_sources = caller_keys or KeySources(("keys",), lambda config: config.keys)
        self.keys = SharedKeys(dataplane, key_sources, self._publish_keys)
        fleet.watch(lambda: self._changed.set())
        dataplane.voices.watch(lambda: self._changed.set())
        dataplane.voices.watch_names(lambda: self._changed.set())
        fleet.watch_cache_cleared(self._clear_cache)

    @property
    def handles(self) -> list[ProcessHandle]:
        """The handles of the processes that are alive."""
        handles = [slot.handle for slot in self.slots.values()]
        return [handle for handle in handles if handle is not None and not handle.closed]

    def prepare(self, new: Config) -> Callable[[], None]:
        """Like `DataPlane.prepare`: the result applies `new`. Raises OSError, ConfigError."""
        prepared = self.dataplane.prepare(new)
        try:
            self.keys.prepare(new)
            port = self._prepare_port(new, prepared.public)
        except OSError:
            prepared.cancel()
            raise

        def commit() -> None:
            prepared()
            self.keys.apply()
            self._apply(new, port)

        return commit

    def _publish_keys(self, callers: CallersMessage) -> None:
        self._publisher.callers = callers
        self._changed.set()

    def open(self) -> None:
        """Start to listen if `listeners.held` has prevented it. Raises OSError."""
        self.dataplane.open()
        if self.slots and self._port is not None:
            self._port.paused = False
            self._stop_accepting(self._port)
        self._assign_sockets()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the configured number of processes, until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._repeat, RECOUNT_SECS, self.worker_ids.recount)
                nursery.start_soon(self._repeat, TICK_SECS, self._tick)
                nursery.start_soon(self._repeat, TICK_SECS / 4, self._publish)
                nursery.start_soon(self._loads.run)
                nursery.start_soon(self.keys.report_wrong_keys)
                task_status.started()
                await self._publish_changes()
        finally:
            if self._port is not None:
                self._port.close_all()

    async def _publish_changes(self) -> None:
        while True:
            await self._changed.wait()
            self._changed = trio.Event()
            started_at = trio.current_time()
            self._publish()
            spent_secs = trio.current_time() - started_at
            await trio.sleep(max(PUBLISH_PAUSE_SECS, PUBLISH_PAUSE_FACTOR * spent_secs))

    async def await_replicated(self) -> None:
        """Wait until every serving process has the current state."""
        self._publish()
        await self.acknowledged()
        self.count()

    async def acknowledged(self) -> None:
        """Wait until every serving process has executed the commands sent to it."""
        for handle in [handle for handle in self.handles if handle.ready]:
            await handle.wait_acknowledged(handle.sent)

    async def abort(self, target: AbortTarget) -> AbortFindings:
        """`DataPlane.abort` in every process. If one does not answer in time, no id counts as
        known, and the caller then calls all workers."""
        self._last_abort += 1
        number = self._last_abort
        parts = self._aborts[number] = list[AbortFindings]()
        handles = [handle for handle in self.handles if handle.ready]
        try:
            with trio.move_on_after(ABORT_SECS) as deadline:
                for handle in handles:
                    handle.send(AbortCommand(number, target))
                parts.append(await self.dataplane.abort(target))
                for handle in handles:
                    await handle.wait_acknowledged(handle.sent)
        finally:
            del self._aborts[number]
        findings = merged(parts)
        return replace(findings, known=()) if deadline.cancelled_caught else findings

    def take_kv_changes(self, holder: str, changes: PackedChanges) -> None:
        """`DataPlane.take_kv_changes` in every process."""
        self.dataplane.take_kv_changes(holder, changes)
        for handle in self.handles:
            handle.send(KvChangesCommand(holder, changes))

    def watch_started(self, callback: Callable[[], None]) -> None:
        """`callback()` runs after the start of a process, which has no KV changes yet."""
        self._start_watchers.append(callback)

    def count(self) -> None:
        """Read the shared counters now."""
        if self.slots:
            self.worker_ids.recount()

    def begin_drain(self, *, keeps_idle: bool = False) -> None:
        """Accept no new connection anywhere; each process exits after its last one has ended."""
        self.draining = True
        if self._port is not None:
            self._port.close_all()
        self.dataplane.begin_drain(keeps_idle=keeps_idle)
        for slot in self.slots.values():
            slot.retire()
        for handle in self.handles:
            handle.send(DrainCommand(keeps_idle))

    def dup_sockets(self) -> GroupSockets | None:
        """The processes' sockets for another program; None without processes. Raises OSError."""
        return self._port.dup_sockets() if self._port is not None else None

    async def drained(self) -> None:
        """Wait until the last connection has ended; the caller sets the time limit."""
        while self.slots:
            await self._no_slots.wait()
        await self.dataplane.drained()

    async def _repeat(self, secs: float, chore: Callable[[], None]) -> None:
        """Call `chore` periodically while there are slots."""
        while True:
            await self._has_slots.wait()
            chore()
            await trio.sleep(secs)

    def _prepare_port(self, new: Config, listener: Listener | None) -> ReuseportGroup | None:
        """Sockets for the processes of `listener`; None if they have them. Raises OSError."""
        if listener is None or self.draining or not (process_count(new) > 1 or self.slots):
            return None
        if self._port is not None and self._port.listener is listener:
            return None
        return ReuseportGroup(self.dataplane.loop, listener, self.inherited)

    def _apply(self, new: Config, port: ReuseportGroup | None) -> None:
        """Adjust the number of slots to `new`; `port`: new sockets, if any. Can't fail."""
        accepting = self._process_count == 1
        self._process_count = process_count(new)
        multiple = self._process_count > 1
        if self.draining or (not multiple and not self.slots):
            return
        self._publisher.config = per_process_config(new, self._process_count)
        if port is not None:
            self._replace_port(port, accepting=accepting)
        active = self._active_slots()
        for slot in active[self._process_count if multiple else 0 :]:
            self._retire(slot)
        for _ in range(self._process_count - len(active) if multiple else 0):
            self._add_slot()
        self._assign_sockets()
        self._changed.set()

    def _close_port(self) -> None:
        """Close the group's sockets once the main process serves alone, on its own listener."""
        if self._port is not None and self._process_count == 1:
            self._port.close_all()
            self._port = None

    def _replace_port(self, port: ReuseportGroup, *, accepting: bool) -> None:
        """`accepting`: the main process accepts until the first of the other processes can."""
        if self._port is not None:
            self._port.close_all()
        self._port = port
        if not accepting and self._first_slot_stays():
            self._stop_accepting(port)
        for handle in self.handles:
            handle.listening = handle.listen_retry_pending = False

    def _stop_accepting(self, port: ReuseportGroup) -> None:
        """Let only the other processes accept; idle clients of the main process reconnect."""
        port.pause()
        self.dataplane.close_after_responses(admin=False)

    def _add_slot(self) -> None:
        assert self._nursery is not None
        index = next(free for free in range(1, len(self.slots) + 2) if free not in self.slots)
        slot = self.slots[index] = ProcessSlot(index)
        self.worker_ids.processes = max(self.slots)
        self.keys.extend(index)
        self._has_slots.set()
        self._nursery.start_soon(self._run_slot, slot)

    async def _run_slot(self, slot: ProcessSlot) -> None:
        try:
            await slot.run_until_retired(self._on_start, self._on_event, self._on_exit)
        finally:
            del self.slots[slot.index]
            self.worker_ids.processes = max(self.slots, default=0)
            if self._port is not None:
                self._assign_sockets()
                self._port.close(slot.index - 1)
            if not self.slots:
                self.worker_ids.recount()
                self._close_port()
                self._has_slots = trio.Event()
                self._no_slots.set()
                self._no_slots = trio.Event()

    def _retire(self, slot: ProcessSlot) -> None:
        assert self._nursery is not None
        slot.retire()
        self._nursery.start_soon(self._drain_and_stop, slot)

    async def _drain_and_stop(self, slot: ProcessSlot) -> None:
        """Steer new connections away, wait for pending ones to complete, then drain: a drain would
        close a connection that has not sent its first request."""
        config, handle = self._publisher.config, slot.handle
        if handle is None or config is None:
            return
        if slot.index > 1:  # another process may also serve the first socket
            await trio.sleep(HANDOVER_SECS / 2)
        handle.send(ListenCommand(0))
        await trio.sleep(HANDOVER_SECS / 2)
        handle.send(DrainCommand())
        await trio.sleep(config.server.drain_timeout_secs)
        handle.kill()

    def _on_start(self, handle: ProcessHandle) -> None:
        if self._tables is None:
            self._tables = create_sessions(), create_sessions()
            sessions, responses = self._tables
            directory = WorkerDirectory(
                self.worker_ids.find, self.worker_ids.ids, self._fleet.targets
            )
            self.session_tables = (
                SharedSessions(sessions, directory, recounts=True),
                shared_response_owners(responses, directory),
            )
            self.dataplane.use_sessions(self.session_tables[0])
            self.dataplane.balancer.response_owners = self.session_tables[1]
        proxy_id = self.dataplane.proxy_id
        start = StartCommand(
            handle.index, self._admin_socket, SILENT_SECS, proxy_id, self.tree_seed
        )
        counters = self.worker_ids.counters.descriptor, self.keys.counters.descriptor
        handle.send_files(start, *counters, *self._tables)
        self._publisher.send_all([handle])
        if rows := load_rows(self._fleet.targets(), self.worker_ids.ids):
            handle.send(EngineLoadsCommand(rows))
        for callback in self._start_watchers:
            callback()

    def _send_loads(self, rows: list[LoadRow]) -> None:
        for handle in self.handles:
            handle.send(EngineLoadsCommand(rows))

    def _on_event(self, handle: ProcessHandle, message: ProcessEvent) -> None:
        self._report_handler.on_event(handle, message)
        if isinstance(message, AbortedEvent):
            self._aborts.get(message.number, []).append(message.findings)
        if isinstance(message, ListenFailedEvent):
            self._on_listen_error(handle, message.error)
        if handle.ready and not (handle.listening or handle.listen_retry_pending):
            self._assign_sockets()
        if not isinstance(message, UNCHANGING):
            self._changed.set()

    def _on_exit(self, slot: ProcessSlot, handle: ProcessHandle) -> None:
        self.worker_ids.clear(handle.index)
        self.keys.drop_in_flight(handle.index)
        self._report_handler.on_process_exit(handle)
        self._assign_sockets()
        self._changed.set()

    def _assign_sockets(self) -> None:
        """Give a socket to every process that is ready, and steer new connections to those."""
        port = self._port
        if port is None or self.draining or self.dataplane.listeners.held:
            return
        for handle in self.handles:
            if handle.listening or handle.listen_retry_pending or not handle.ready:
                continue
            if not self.slots[handle.index].is_retiring:
                try:
                    handle.send(ListenCommand(1), port.listen(handle.index - 1))
                except OSError as error:
                    self._on_listen_error(handle, error.strerror or str(error))
                    continue
                handle.listening = True
        serving = [handle.index - 1 for handle in self.handles if self._is_serving(handle)]
        if self._process_count == 1 or not (port.shared or self._first_slot_stays()):
            port.resume()  # otherwise nothing would accept connections of the first socket
        elif not port.paused and (0 in serving or (port.shared and serving)):
            self._stop_accepting(port)
        if self._process_count == 1 or not (serving or port.paused):
            port.steer([0])
        else:
            port.steer(serving or [slot.index - 1 for slot in self._active_slots()])

    def _on_listen_error(self, handle: ProcessHandle, error: str) -> None:
        """Log the error once and retry with the next tick."""
        if not handle.listen_error:
            _log.error("dataplane_process_listen_failed process=%d error=%s", handle.index, error)
        handle.listen_error = error
        handle.listening, handle.listen_retry_pending = False, True

    def _retry_listen(self, handle: ProcessHandle) -> None:
        if handle.listen_retry_pending:
            handle.listen_retry_pending = False
            self._assign_sockets()
        elif handle.listen_error and handle.listening and handle.acked == handle.sent:
            handle.listen_error = ""
            _log.info("dataplane_process_listen_recovered process=%d", handle.index)

    def _is_serving(self, handle: ProcessHandle) -> bool:
        return handle.listening and not self.slots[handle.index].is_retiring

    def _active_slots(self) -> list[ProcessSlot]:
        return [slot for slot in self.slots.values() if not slot.is_retiring]

    def _first_slot_stays(self) -> bool:
        return any(slot.index == 1 for slot in self._active_slots())

    def _publish(self) -> None:
        handles = self.handles
        self._publisher.rotate_leases(handles, trio.current_time())
        self._publisher.send_all(handles)

    def _tick(self) -> None:
        """Send a heartbeat, and kill processes that are unresponsive."""
        for handle in self.handles:
            handle.silent_ticks += 1
            if handle.is_unresponsive:
                _log.error("dataplane_process_unresponsive_killed process=%d", handle.index)
                handle.kill()
            self._retry_listen(handle)
        self._publisher.send_all(self.handles, heartbeat=True)

    def _clear_cache(self, worker: Worker) -> None:
        for handle in self.handles:
            handle.send(ClearCacheCommand(self.worker_ids.serial(worker)))
