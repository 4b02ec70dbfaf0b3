"""The data plane of a data-plane process, which shares counters and voices with other processes.

Invariant: with `[server] max_inflight`, `in_flight` is the sum over all processes, read at each
use, and never exceeds the bound; otherwise it is this process's own. The admin API is in the main
process; while that sends no messages, its routes answer 503.
"""

from __future__ import annotations

from omni_proxy.config.schema import Config
from omni_proxy.dataplane.admission.inflight import InFlight
from omni_proxy.dataplane.dataplane import DataPlane, Sources, random_below
from omni_proxy.dataplane.loop.event_loop import EventLoop
from omni_proxy.dataplane.loop.stream import Stream
from omni_proxy.dataplane.loop.task import ConnectionTask, EventHandler
from omni_proxy.dataplane.settings import Settings
from omni_proxy.dataplane.upstream.pool import CLIENT_HOST, AdminApiPool
from omni_proxy.fleet.worker import Worker
from omni_proxy.multiprocess.ipc.messages import StartCommand, VoiceListMessage, VoicesChangedEvent
from omni_proxy.multiprocess.replicated_fleet import ReplicatedFleet, SendEvent, SharedWorker
from omni_proxy.multiprocess.shared_memory.worker_counters import PROCESS_CELL, Cells, fence


class SharedInFlight(InFlight):
    """`row` is this process's row of the shared counters; `fleet` has the rows of the others."""

    def __init__(self, settings: Settings, fleet: ReplicatedFleet, row: Cells) -> None:
        self._row = row
        self._fleet = fleet
        self._own = self._others = 0
        self._bounded = False
        super().__init__(settings)

    @property
    def in_flight(self) -> int:
        if self._bounded:
            self._others = sum(row[PROCESS_CELL] for row in self._fleet.others)
        return self._own + self._others

    @in_flight.setter
    def in_flight(self, total: int) -> None:
        """The new value must be the last read one plus or minus own requests."""
        self._own = total - self._others
        self._row[PROCESS_CELL] = self._own

    def follow(self, config: Config) -> None:
        """Apply a changed bound; the last read value becomes invalid."""
        self._bounded = config.server.max_inflight > 0
        self._others = 0

    def is_over_limit(self) -> bool:
        fence()
        return self.in_flight > self._settings.limits.in_flight


class SharedDataPlane(DataPlane):
    """`row`: this process's row of the shared counters; the fleet has the rows of the others."""

    inflight: SharedInFlight

    def __init__(
        self,
        start: StartCommand,
        fleet: ReplicatedFleet,
        config: Config,
        row: Cells,
        send_event: SendEvent,
    ) -> None:
        self._row = row
        self._send_event = send_event
        self._voice_changes = 0
        self._replicated_fleet = fleet
        super().__init__(
            fleet, config,
            admin_socket=start.admin_socket, sources=Sources(random_below), proxy_id=start.proxy_id,
        )  # fmt: skip
        self.upstream_pools.admin_api = self.main_process = MainProcessPool(self.loop, start)
        self.listeners_are_external = True

    def _new_inflight(self) -> InFlight:
        return SharedInFlight(self.settings, self._replicated_fleet, self._row)

    def configure(self, config: Config) -> None:
        self.inflight.follow(config)
        super().configure(config)

    def apply_without_listeners(self, config: Config) -> None:
        """Apply `config` except the listeners and their certificates."""
        self.configure(config)

    def follow_voices(self, voices: VoiceListMessage, changes: int) -> None:
        """Apply the main process's list, unless it lacks a change of this process."""
        if changes == self._voice_changes:
            self.voices.follow(voices.owner, voices.names)
            self.queue.serve(changed=True)

    def keep_voices_at(self, worker: Worker) -> None:
        super().keep_voices_at(worker)
        if isinstance(worker, SharedWorker):
            self._voice_changes += 1
            self._send_event(VoicesChangedEvent(worker.serial))


class MainProcessPool(AdminApiPool):
    """Connections to the admin API; refused while the main process is silent."""

    __slots__ = ("_silent_secs", "last_message_at")

    def __init__(self, loop: EventLoop, start: StartCommand) -> None:
        super().__init__(loop, start.admin_socket, CLIENT_HOST)
        self._silent_secs = start.silent_secs
        self.last_message_at = loop.now

    @property
    def is_silent(self) -> bool:
        return self.loop.now - self.last_message_at > self._silent_secs

    def reuse(self, task: EventHandler) -> Stream | None:
        return None if self.is_silent else super().reuse(task)

    async def dial(self, task: ConnectionTask) -> Stream:
        if self.is_silent:
            secs = self.loop.now - self.last_message_at
            raise OSError(f"the main process has been silent for {secs:.0f} s")
        return await super().dial(task)
