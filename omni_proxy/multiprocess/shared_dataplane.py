"""The data plane of a data-plane process: other processes count, listen and keep voices beside it.

Invariant: with `[server] max_inflight`, `in_flight` is the sum over all processes, read at each
use, and never above the bound; without it, it is this process's own. The admin API is in the main
process; while that is silent, its routes answer 503.

Sticky sessions are in shared memory, so that a key means the same worker in every process: an
eight-way set-associative table with two words for each session, the key's mark with its worker, and
when it was used last; a new key replaces the one of its bucket that was idle longest. A word is
written whole; of two processes that begin the same session at once the later one wins, and both use
its worker from then on.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable
from random import randrange
from typing import Final

from omni_proxy.config.schema import Config, RoutingConfig
from omni_proxy.dataplane.admission.inflight import InFlight
from omni_proxy.dataplane.dataplane import DataPlane, Sources
from omni_proxy.dataplane.loop.event_loop import EventLoop
from omni_proxy.dataplane.loop.stream import Stream
from omni_proxy.dataplane.loop.task import ConnectionTask, EventHandler
from omni_proxy.dataplane.settings import Settings
from omni_proxy.dataplane.upstream.pool import AdminApiPool
from omni_proxy.fleet.worker import Worker
from omni_proxy.multiprocess.ipc import StartCommand, VoiceListMessage, VoicesChangedEvent
from omni_proxy.multiprocess.replicated_fleet import ReplicatedFleet, SendEvent, SharedWorker
from omni_proxy.multiprocess.shared_counters import PROCESS_CELL, Cells, fence
from omni_proxy.routing.policies import Policy
from omni_proxy.routing.policies.sticky import Sessions, Sticky
from omni_proxy.routing.responses import MAX_RESPONSES


class SharedInFlight(InFlight):
    """`row` is this process's own part of the shared counters; `fleet` knows the others'."""

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
        """Set by adding to, or subtracting from, what was read last."""
        self._own = total - self._others
        self._row[PROCESS_CELL] = self._own

    def follow(self, config: Config) -> None:
        """The bound may be another one: what was read last counts no more."""
        self._bounded = config.server.max_inflight > 0
        self._others = 0

    def is_over_limit(self) -> bool:
        fence()
        return self.in_flight > self._settings.config.server.max_inflight


class SharedDataPlane(DataPlane):
    """`row`: of this process in the shared counters; the fleet has those of the others."""

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
        self._sessions: Sessions | None = None
        super().__init__(
            fleet, config,
            admin_socket=start.admin_socket, sources=Sources(randrange), proxy_id=start.proxy_id,
        )  # fmt: skip
        self.pools.admin_api = self.main_process = MainProcessPool(self.loop, start)
        self.listens_elsewhere = True

    def _new_inflight(self) -> InFlight:
        return SharedInFlight(self.settings, self._replicated_fleet, self._row)

    def configure(self, config: Config) -> None:
        self.inflight.follow(config)
        super().configure(config)

    def apply_without_listeners(self, config: Config) -> None:
        """Apply all of `config` but the listeners and their certificates."""
        self.configure(config)

    def use_sessions(self, sessions: Sessions) -> None:
        """Sessions for the sticky policy, shared with the other processes."""
        self._sessions = sessions
        if isinstance(self.policy, Sticky):
            self.policy.use_sessions(sessions, self.settings.config.routing)

    def build_policy(self, routing: RoutingConfig) -> Policy:
        policy = super().build_policy(routing)
        if isinstance(policy, Sticky) and self._sessions is not None:
            policy.use_sessions(self._sessions, routing)
        return policy

    def follow_voices(self, voices: VoiceListMessage, changes: int) -> None:
        """Apply the main process's list, unless a change of this process is not part of it yet."""
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

    __slots__ = ("_silent_secs", "heard_at")

    def __init__(self, loop: EventLoop, start: StartCommand) -> None:
        super().__init__(loop, start.admin_socket, "front")
        self._silent_secs = start.silent_secs
        self.heard_at = loop.now

    @property
    def is_silent(self) -> bool:
        return self.loop.now - self.heard_at > self._silent_secs

    def reuse(self, task: EventHandler) -> Stream | None:
        return None if self.is_silent else super().reuse(task)

    async def dial(self, task: ConnectionTask) -> Stream:
        if self.is_silent:
            secs = self.loop.now - self.heard_at
            raise OSError(f"the main process has been silent for {secs:.0f} s")
        return await super().dial(task)


MAX_SESSIONS: Final = 10_000_000  # the upper bound of [routing] sticky_max
WAYS: Final = 8
WORD_BYTES: Final = 8
SERIAL_BITS: Final = 24
SERIALS: Final = (1 << SERIAL_BITS) - 1
SAMPLED_BUCKETS: Final = 64  # buckets, from which the size is estimated


def create_sessions() -> int:
    """The descriptor of memory for all of them, allocated by use. Raises OSError."""
    descriptor = os.memfd_create("omni-proxy-sessions", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, 2 * WORD_BYTES * MAX_SESSIONS)
    return descriptor


def shared_response_owners(
    descriptor: int, find_worker: Callable[[int], Worker | None]
) -> SharedSessions:
    """The owners of stored responses, in memory of their own. As for sessions."""
    owners = SharedSessions(descriptor, find_worker)
    owners.tune(MAX_RESPONSES, 0)
    return owners


class SharedSessions:
    """`find_worker`: a worker by its serial number. A change of the bound drops all sessions."""

    def __init__(self, descriptor: int, find_worker: Callable[[int], Worker | None]) -> None:
        self._words = memoryview(mmap.mmap(descriptor, 2 * WORD_BYTES * MAX_SESSIONS)).cast("Q")
        self._find_worker = find_worker
        self._buckets = 1
        self._idle_ms = 0

    def tune(self, most: int, idle_secs: float) -> None:
        self._buckets = max(1, most // WAYS)
        self._idle_ms = int(idle_secs * 1000)

    def find(self, key: str, now: float) -> Worker | None:
        words, (places, mark) = self._words, self._places_of(key)
        for place in places:
            word = words[place]
            if word and word >> SERIAL_BITS == mark:
                if self._idle(words[place + 1], now):
                    return None
                return self._find_worker(word & SERIALS)
        return None

    def keep(self, key: str, worker: Worker, now: float) -> None:
        if not isinstance(worker, SharedWorker):
            return
        words, (places, mark) = self._words, self._places_of(key)
        oldest, used = -1, -1
        for place in places:
            word = words[place]
            if not word or word >> SERIAL_BITS == mark:
                oldest = place
                break
            if oldest < 0 or words[place + 1] < used:
                oldest, used = place, words[place + 1]
        words[oldest + 1] = int(now * 1000)
        words[oldest] = mark << SERIAL_BITS | worker.serial & SERIALS

    def maintain(self, now: float) -> None:
        """Does nothing: an idle session is ignored, and replaced first."""

    def __len__(self) -> int:
        """An estimate."""
        sampled = min(SAMPLED_BUCKETS, self._buckets)
        words = self._words
        used = sum(1 for place in range(sampled * WAYS) if words[2 * place])
        return used * self._buckets // sampled

    def _places_of(self, key: str) -> tuple[range, int]:
        """The words of its bucket, and the mark of the key in it, never 0."""
        digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        bucket = int.from_bytes(digest[:8], "big") % self._buckets
        first = bucket * WAYS * 2
        mark = int.from_bytes(digest[8:13], "big") or 1
        return range(first, first + WAYS * 2, 2), mark

    def _idle(self, used: int, now: float) -> bool:
        return 0 < self._idle_ms < now * 1000 - used
