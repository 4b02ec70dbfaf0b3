"""The door of a door process: as ever, but that others count, listen and keep voices beside it.

Invariant: where there is a max_inflight, `in_flight` is that of all doors, read anew each time, and
never above it; where there is none it is this door's own. The front is control's; while that is
silent its routes answer 503.
"""

from __future__ import annotations

from random import randrange

from omni_proxy.config.schema import Config, RoutingConfig
from omni_proxy.dataplane.dataplane import DataPlane
from omni_proxy.dataplane.loop.event_loop import EventLoop
from omni_proxy.dataplane.loop.stream import Stream
from omni_proxy.dataplane.loop.task import ConnectionTask, EventHandler
from omni_proxy.dataplane.upstream.pool import AdminApiPool
from omni_proxy.fleet.worker import Worker
from omni_proxy.multiprocess.messages import Begin, KeptVoices, VoiceListMessage
from omni_proxy.multiprocess.replicated_fleet import ReplicatedFleet, SharedWorker, Tell
from omni_proxy.multiprocess.shared_counters import Cells, fence
from omni_proxy.routing.policies import Policy
from omni_proxy.routing.policies.sticky import Sessions, Sticky

DOOR_CELL = 0


class SharedDataPlane(DataPlane):
    """`row` is its own on the board; the fleet knows those of the others."""

    def __init__(
        self, begin: Begin, fleet: ReplicatedFleet, config: Config, row: Cells, tell: Tell
    ) -> None:
        self._row = row
        self._tell = tell
        self._own = self._others = 0
        self._bounded = False
        self._voice_changes = 0
        self._following = fleet
        self._sessions: Sessions | None = None
        super().__init__(
            fleet, config,
            front_socket=begin.front_socket, below=randrange, proxy_id=begin.proxy_id,
        )  # fmt: skip
        self.front = self.control = MainProcessPool(self.loop, begin)
        self.port_elsewhere = True

    @property
    def in_flight(self) -> int:
        if self._bounded:
            self._others = sum(row[DOOR_CELL] for row in self._following.others)
        return self._own + self._others

    @in_flight.setter
    def in_flight(self, total: int) -> None:
        """Raised or lowered from what was read last."""
        self._own = total - self._others
        self._row[DOOR_CELL] = self._own

    def is_over_limit(self) -> bool:
        fence()
        return self.in_flight > self.config.server.max_inflight

    def _take(self, config: Config) -> None:
        self._bounded = config.server.max_inflight > 0
        self._others = 0
        super()._take(config)

    def keep_entrances(self, config: Config) -> None:
        """All of it is in force from here on, but how clients are received."""
        self._take(config)

    def use_sessions(self, sessions: Sessions) -> None:
        """Sticky sessions, where there are any."""
        self._sessions = sessions
        if isinstance(self.policy, Sticky):
            self.policy.use_sessions(sessions, self.config.routing)

    def build_policy(self, routing: RoutingConfig) -> Policy:
        policy = super().build_policy(routing)
        if isinstance(policy, Sticky) and self._sessions is not None:
            policy.use_sessions(self._sessions, routing)
        return policy

    def follow_voices(self, voices: VoiceListMessage, changes: int) -> None:
        """What control knows; nothing while a change of ours is still on its way there."""
        if changes == self._voice_changes:
            self.voices.follow(voices.owner, voices.names)
            self.queue.serve(changed=True)

    def keep_voices_at(self, worker: Worker) -> None:
        super().keep_voices_at(worker)
        if isinstance(worker, SharedWorker):
            self._voice_changes += 1
            self._tell(KeptVoices(worker.serial))


class MainProcessPool(AdminApiPool):
    """To the front, as long as control is heard of."""

    __slots__ = ("_silent_secs", "heard_at")

    def __init__(self, loop: EventLoop, begin: Begin) -> None:
        super().__init__(loop, begin.front_socket, "front")
        self._silent_secs = begin.silent_secs
        self.heard_at = loop.now

    @property
    def silent(self) -> bool:
        return self.loop.now - self.heard_at > self._silent_secs

    def take(self, task: EventHandler) -> Stream | None:
        return None if self.silent else super().take(task)

    async def dial(self, task: ConnectionTask) -> Stream:
        if self.silent:
            secs = self.loop.now - self.heard_at
            raise OSError(f"the control process has been silent for {secs:.0f} s")
        return await super().dial(task)
