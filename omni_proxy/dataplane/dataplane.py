"""The door as a whole: its listeners, its lanes to the workers, its bounds, and what it can tell.

Contract: `prepare` is the only step of a configuration change that may fail here (a listener that
can't be opened), and its commit can't. Lanes follow the fleet: a removed worker's idle connections
close at once, those in use at the end of their exchange. All methods but `run` are synchronous
atoms.
"""

from __future__ import annotations

import logging
import socket
from collections import Counter, defaultdict
from collections.abc import Sequence

import trio

from omni_proxy.config.schema import Config, RoutingConfig
from omni_proxy.dataplane.accept.listeners import Listeners, PreparedListeners
from omni_proxy.dataplane.admission.limits import limits_of
from omni_proxy.dataplane.admission.queue import Queue
from omni_proxy.dataplane.admission.update_gate import UpdateGate
from omni_proxy.dataplane.downstream.connection import Connection
from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.dataplane.exchange.fast_path import FastPathCache
from omni_proxy.dataplane.exchange.observer import LineSink, RequestObserver
from omni_proxy.dataplane.exchange.request_body import too_much_held
from omni_proxy.dataplane.loop import timeouts
from omni_proxy.dataplane.loop.event_loop import EventLoop
from omni_proxy.dataplane.loop.task import ClientDisconnected
from omni_proxy.dataplane.loop.timeouts import Timers
from omni_proxy.dataplane.upstream.pool import PIECE_BYTES, AdminApiPool, UpstreamPool, lane_to
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.voices import VoiceRegistry
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.policies import Policy, RandomBelow, build_policy
from omni_proxy.wire.cors import Cors
from omni_proxy.wire.forwarded import ForwardedHeaders
from omni_proxy.wire.head_caching.request_heads import RequestHeadCache
from omni_proxy.wire.head_caching.response_heads import ResponseHeadCache

_log = logging.getLogger(__name__)

SHOWN_CONNECTIONS = 100
ADMIN_HOST = (
    "admin"  # the Host of requests that came by the [admin] listener: see `admin_api.access.auth`
)


class DataPlane:
    """What every connection shares. `admin_api` is the lane to the control routes."""

    def __init__(
        self,
        fleet: Fleet,
        config: Config,
        *,
        front_socket: str,
        below: RandomBelow,
        proxy_id: str = "",
    ) -> None:
        self.loop = EventLoop()
        self.proxy_id = proxy_id.encode()  # see `wire.proxy_headers`
        self.fleet = fleet
        # The front tells them apart by the Host, which nobody but we can write.
        self.front: AdminApiPool = AdminApiPool(self.loop, front_socket, "front")
        self.admin_front: AdminApiPool = AdminApiPool(self.loop, front_socket, ADMIN_HOST)
        self.draining = False
        self.in_flight = 0
        self.peak_in_flight = 0
        self.rejected = 0
        self.held_bytes = 0  # of requests, see door.upload
        self.port_elsewhere = False  # others open the sockets that we listen on
        self.accepted = 0
        self.failed_handshakes = 0  # of TLS
        self.failed_introductions = 0  # that were no PROXY protocol
        self.ended: defaultdict[str, int] = defaultdict(int)
        self.across_versions = 0  # answers whose worker got other weights meanwhile
        self.queue = Queue(self)
        self.update_gate = UpdateGate(self)
        self.timers = Timers(self.loop)
        self.voices = VoiceRegistry()
        self.access_log: LineSink | None = None
        self.route_log: LineSink | None = None
        self.meters: RequestObserver | None = None
        self.below = below  # chance, for policies and for pauses
        self.stamps: ForwardedHeaders | None = None
        self.requests = self._templates(None)
        self.answers = ResponseHeadCache()
        self._lanes: dict[Worker, UpstreamPool] = {}
        self.listeners = Listeners(self)
        self.policy: Policy = build_policy(config.routing, below, self.loop.now)
        self._take(config)
        fleet.watch_members(self._follow_fleet)
        fleet.watch_worker(self._follow_worker)
        fleet.watch_cache_cleared(lambda worker: self.policy.forget_worker(worker))

    @property
    def voice_owner(self) -> str:
        """The URL of the worker that keeps the uploaded voices, "" while none does."""
        return self.voices.owner

    def _take(self, config: Config) -> None:
        self.config = config
        self.voices.configure(config.routing.voice_owner)
        self.limits = limits_of(config)
        self._stamp(
            ForwardedHeaders(
                config.server.forwarded, config.server.request_id_header.lower().encode()
            )
        )
        named = filter(None, (config.server.request_id_header,))
        self.cors = Cors(config.server.cors_allow_origins, named)
        self.half_close_aborts = config.server.half_close == "abort"
        self.access_json = config.server.log_format == "json"
        self.keeps_tail = config.server.metrics and config.server.usage_metrics
        self.policy = self.build_policy(config.routing)
        # Where there is something that the short way does not know of, nobody goes it.
        plain = not self.stamps and not self.limits.sse_keepalive
        self.usuals = FastPathCache() if plain and self.limits.max_body >= PIECE_BYTES else None
        self.queue.serve(changed=True)

    def build_policy(self, routing: RoutingConfig) -> Policy:
        """What of the present one still serves lives on in it."""
        return build_policy(routing, self.below, self.loop.now, self.policy)

    def prepare(self, new: Config) -> PreparedListeners:
        """Open and read what `new` needs; the result puts it in force. Raises OSError, ConfigError,
        changing nothing."""
        # A reload does not open what a drain has closed.
        enter = self.listeners.prepare(new, opens=not (self.draining or self.port_elsewhere))

        def commit() -> None:
            self._take(new)
            enter()

        return PreparedListeners(enter.public, commit, enter.cancel)

    def open(self) -> None:
        """Let them in where `entrances.held` kept them out. Raises OSError."""
        self.listeners.open()

    def listen_on(self, socks: Sequence[socket.socket], *, admin: bool = False) -> None:
        """Accept on these, which were opened elsewhere, and on no others."""
        self.listeners.listen_on(socks, admin=admin)

    def accept_connection(self, sock: socket.socket, peer: str) -> None:
        self.accepted += 1
        Connection(self, sock, peer).start()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """The pump and its clocks, until cancelled; then every socket is closed."""
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.loop.run)
                nursery.start_soon(self.timers.run)
                nursery.start_soon(timeouts.run_sweeps, self.loop, self._sweep)
                nursery.start_soon(self.listeners.certificates.run)
                task_status.started()
        finally:
            self.listeners.close()
            for lane in (self.front, self.admin_front, *self._lanes.values()):
                lane.close()
            self.loop.flush()

    def lane(self, worker: Worker) -> UpstreamPool:
        lane = self._lanes.get(worker)
        if lane is None:
            lane = self._lanes[worker] = lane_to(self.loop, worker)
        return lane

    def _stamp(self, stamps: ForwardedHeaders) -> None:
        """What was remembered of heads goes where they are to be written in another way."""
        wanted = stamps or None
        if wanted != self.stamps:
            self.stamps = wanted
            self.requests = self._templates(wanted)

    def _templates(
        self, stamps: ForwardedHeaders | None
    ) -> tuple[RequestHeadCache, RequestHeadCache]:
        """For what comes plain, and over TLS."""
        return (
            RequestHeadCache(stamps, proxy_id=self.proxy_id),
            RequestHeadCache(stamps, secure=True, proxy_id=self.proxy_id),
        )

    def has_slot(self) -> bool:
        bound = self.config.server.max_inflight
        return not bound or self.in_flight < bound

    def count_in(self, mine: Exchange) -> bool:
        """False where the bound of the fleet is reached: then it is not counted."""
        bound, before = self.config.server.max_inflight, self.in_flight
        if bound and before >= bound:
            return False
        self.in_flight = before + 1
        if bound and self.is_over_limit():
            self.in_flight -= 1
            return False
        mine.admitted = True
        if before >= self.peak_in_flight:
            self.peak_in_flight = before + 1
        return True

    def is_over_limit(self) -> bool:
        """Whether another door has been quicker to the last slot: there is none."""
        return False

    def count_out(self, mine: Exchange) -> None:
        if mine.admitted:
            mine.admitted = False
            self.in_flight -= 1

    def check_room(self, size: int) -> None:
        """Raises Refusal 503 where so many bytes more of requests may not be held."""
        if self.held_bytes + size > self.limits.held:
            self.rejected += 1
            raise too_much_held()

    def begin_drain(self) -> None:
        """No new connection; idle ones close now, the others after the answer they wait for."""
        self.draining = True
        self.listeners.close()
        self.close_after_answers(admin=True)
        for task in [task for task in self.loop.tasks if task.phase == "idle"]:
            if task.client is None or not task.client.pending:
                task.throw(ClientDisconnected())
        self.loop.flush()

    def close_after_answers(self, *, admin: bool) -> None:
        """Each connection ends with its next answer, which says so: nobody's request is lost.
        `admin`: also those of the listener for control requests."""
        for task in self.loop.tasks:
            if isinstance(task, Connection) and (admin or not task.admin_only):
                task.closing = True

    async def drained(self) -> None:
        """Until the last connection has ended; the caller's scope bounds it."""
        while self.loop.tasks:
            await self.loop.tasks_ended.wait()

    def admission(self) -> dict[str, int]:
        return {
            "inflight": self.in_flight,
            "max_inflight": self.config.server.max_inflight,
            "peak_inflight": self.peak_in_flight,
            "rejected_total": self.rejected,
            "waiting": self.queue.waiting,
            "peak_waiting": self.queue.peak_waiting,
            "held_bytes": self.held_bytes,
        }

    def counts(self) -> dict[str, object]:
        """What costs little to tell, however many connections there are."""
        return {
            "accepted": self.accepted,
            "connections": len(self.loop.tasks),
            "ended": dict(self.ended),
            "failures": self.loop.failures,
            "failed_tls_handshakes": self.failed_handshakes,
            "failed_proxy_introductions": self.failed_introductions,
            "answers_across_versions": self.across_versions,
        }

    def rows(self) -> list[dict[str, object]]:
        """One for each door process: there is but this one."""
        return []

    def addresses(self) -> list[str]:
        return self.listeners.addresses()

    def status(self) -> dict[str, object]:
        tasks = self.loop.tasks
        oldest = sorted(tasks, key=lambda task: task.started_at)[:SHOWN_CONNECTIONS]
        return {
            "draining": self.draining,
            "tls": self.listeners.certificates.status(),
            **self.counts(),
            "phases": dict(Counter(task.phase for task in tasks)),
            **self.admission(),
            "voice_owner": self.voice_owner or None,
            "policy": {"name": self.policy.name, **self.policy.stats()},
            "oldest_connections": [
                self.shown(task) for task in oldest if isinstance(task, Connection)
            ],
        }

    def shown(self, conn: Connection) -> dict[str, object]:
        mine = conn.present()
        return {
            "peer": conn.peer,
            "phase": conn.phase,
            "age_secs": round(self.loop.now - conn.started_at, 3),
            "target": mine.target if mine else None,
            "worker": mine.worker.url if mine and mine.worker else None,
        }

    def _follow_fleet(self) -> None:
        workers = set(self.fleet.workers)
        for worker, lane in list(self._lanes.items()):
            if worker not in workers or not lane.suits(worker):
                lane.close()
                del self._lanes[worker]
        gone = self.voices.update_presence({worker.url for worker in workers})
        if gone:
            _log.warning("the worker that kept the uploaded voices was removed: %s", gone)
        self.update_gate.on_fleet_change()
        self.queue.serve(changed=True)

    def _follow_worker(self, worker: Worker) -> None:
        lane = self._lanes.get(worker)
        if lane is not None and not lane.suits(worker):
            lane.close()
            del self._lanes[worker]
        self.update_gate.on_worker_change(worker)
        self.queue.serve(changed=True)

    def keep_voices_at(self, worker: Worker) -> None:
        """It took an upload or a deletion: it has the uploaded voices from now on."""
        self.voices.voices_changed(worker.url)
        self.queue.serve(changed=True)

    def _sweep(self) -> None:
        self.policy.maintain(self.loop.now)
        self.front.sweep()
        self.admin_front.sweep()
        for lane in self._lanes.values():
            lane.sweep()
        self.listeners.retry_accepting()
