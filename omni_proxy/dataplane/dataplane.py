"""The data plane as a whole: builds its services, and applies changes of fleet and configuration.

Contract: `prepare` is the only step of a configuration change that may fail here (a listener that
can't be opened), and its commit can't. All methods except `run`, `drained` and `abort` are
synchronous and atomic.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import getrandbits
from time import monotonic, time

import trio

from omni_proxy.admin_ops.abort_requests import AbortFindings, AbortTarget
from omni_proxy.api_keys.caller_limits import SlotRows
from omni_proxy.api_keys.key_table import KeyTable
from omni_proxy.config.fields import Role
from omni_proxy.config.schema import Config, RoutingConfig
from omni_proxy.config.tables.keys import CallerKey
from omni_proxy.dataplane.abort import abort_requests
from omni_proxy.dataplane.accept.listeners import Listeners, PreparedListeners, ServedAt
from omni_proxy.dataplane.admission.inflight import InFlight
from omni_proxy.dataplane.admission.queue import Queue
from omni_proxy.dataplane.admission.update_gate import UpdateGate, reasons_to_hold_sessions
from omni_proxy.dataplane.downstream.connection import Connection
from omni_proxy.dataplane.engine_calls import TokenizeCalls
from omni_proxy.dataplane.exchange.exchange import Recorders
from omni_proxy.dataplane.loop import timers
from omni_proxy.dataplane.loop.event_loop import EventLoop
from omni_proxy.dataplane.loop.task import ClientDisconnected
from omni_proxy.dataplane.loop.timers import Timers
from omni_proxy.dataplane.services import ExchangeServices, Totals
from omni_proxy.dataplane.settings import Settings
from omni_proxy.dataplane.status import admission_record, status_record, totals_record
from omni_proxy.dataplane.upstream.balancer import Balancer
from omni_proxy.dataplane.upstream.pool import UpstreamPools
from omni_proxy.fleet.engine_load import bounds_of
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.voice_registry import VoiceRegistry
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.cluster_hints import ClusterHints
from omni_proxy.routing.disaggregation.pool_policies import PoolPolicies
from omni_proxy.routing.inspect.affinity_key import affinity_keys_of
from omni_proxy.routing.kv_events.block_index import BlockIndex
from omni_proxy.routing.kv_events.engine_blocks import PackedChanges, unpack_changes
from omni_proxy.routing.policies import Policy, RandomBelow, build_policy
from omni_proxy.routing.policies.session_load import Sessions
from omni_proxy.routing.policies.sticky import Sticky
from omni_proxy.wire.head_caching.response_heads import ResponseHeadCache

_log = logging.getLogger(__name__)


def random_below(bound: int) -> int:
    """A random number from 0 to `bound` - 1, as `random.randrange`, but faster. Raises ValueError
    if `bound` is below 1."""
    if bound < 1:
        raise ValueError("the bound must not be below 1")
    bits = (bound - 1).bit_length()
    drawn = getrandbits(bits)
    while drawn >= bound:
        drawn = getrandbits(bits)
    return drawn


@dataclass(frozen=True, slots=True)
class Sources:
    """Random numbers, for policies and back-off, and the clock; tests replace them."""

    random_below: RandomBelow
    clock: Callable[[], float] = monotonic


class DataPlane:
    """The composition root of the data plane; `services` is the part that exchanges use."""

    def __init__(
        self,
        fleet: Fleet,
        config: Config,
        *,
        admin_socket: str,
        sources: Sources,
        proxy_id: str = "",
    ) -> None:
        """`admin_socket`: of the admin API. `proxy_id`: see `wire.forwarded`."""
        self.proxy_id = proxy_id
        self.fleet = fleet
        self.random_below = sources.random_below
        self.loop = EventLoop(sources.clock)
        self.settings = Settings(config, proxy_id)
        self.settings.follow_fleet(has_ranks=fleet.has_ranks, has_pools=fleet.has_pools)
        self.recorders = Recorders()
        self.voices = VoiceRegistry()
        self.upstream_pools = UpstreamPools(self.loop, admin_socket)
        self.inflight = self._new_inflight()
        policy = build_policy(config.routing, self.random_below, self.loop.now)
        pools = PoolPolicies(config.routing, self.random_below, lambda: self.loop.now)
        self.balancer = Balancer(fleet, policy, pools, self.voices, self.recorders)
        self.balancer.record_from = 0.0
        self.kv_blocks = BlockIndex()
        pools.use_blocks(self.kv_blocks)
        self.cluster_hints = ClusterHints(fleet, lambda: self.loop.now)
        pools.use_hints(self.cluster_hints)
        self.update_gate = UpdateGate(self.loop, fleet, self.settings, self.balancer)
        self.queue = Queue(fleet, self.settings, self.inflight, self.balancer, self.update_gate)
        self.services = ExchangeServices(
            loop=self.loop,
            fleet=fleet,
            settings=self.settings,
            inflight=self.inflight,
            balancer=self.balancer,
            queue=self.queue,
            upstream_pools=self.upstream_pools,
            response_heads=ResponseHeadCache(),
            timers=Timers(self.loop),
            recorders=self.recorders,
            totals=Totals(),
            keep_voices_at=self.keep_voices_at,
            random_below=self.random_below,
        )
        self.tokenize_calls = TokenizeCalls(self.services, self.kv_blocks.texts)
        self.listeners_are_external = False  # another process opens the sockets of the listeners
        self._shared_sessions: Sessions | None = None
        self.listeners = Listeners(self.services)
        fleet.loads.now = sources.clock
        self.configure(config)
        fleet.watch_members(self._follow_fleet)
        fleet.watch_worker(self._follow_worker)
        fleet.watch_cache_cleared(self.forget_cache)
        fleet.watch_replaced(self._forget_target)

    def _new_inflight(self) -> InFlight:
        return InFlight(self.settings)

    @property
    def policy(self) -> Policy:
        return self.balancer.policy

    @property
    def draining(self) -> bool:
        return self.inflight.draining

    @property
    def in_flight(self) -> int:
        return self.inflight.in_flight

    def configure(self, config: Config) -> None:
        """Apply all of `config`, except for the listeners."""
        self.settings.configure(config)
        self.voices.configure(config.routing.voice_owner)
        bounds = bounds_of(config.routing)
        self.upstream_pools.ask_for_load(bool(bounds))
        if bounds != self.fleet.loads.bounds:
            self.fleet.loads.configure(bounds, self.fleet.targets())
        self.balancer.affinity_keys = affinity_keys_of(config)
        self.balancer.configure_aliases(config)
        self.cluster_hints.configure(config)
        self.balancer.use_policy(self.build_policy(config.routing))
        self.balancer.pool_policies.configure(config.routing)
        hold_reasons = reasons_to_hold_sessions(config)
        if isinstance(self.policy, Sticky):
            self.policy.hold_for(hold_reasons, self._is_member)
        self.balancer.pool_policies.hold_for(hold_reasons, self._is_member)
        self.queue.serve(changed=True)

    def follow_keys(
        self, table: KeyTable[CallerKey], slots: Mapping[str, int], rows: SlotRows
    ) -> None:
        """Apply the keys of the current configuration; see `Callers.follow`."""
        self.settings.follow_keys(table, slots, rows)

    def build_policy(self, routing: RoutingConfig) -> Policy:
        """The policy for `routing`, with the state of the current one as far as it applies."""
        policy = build_policy(routing, self.random_below, self.loop.now, self.policy)
        policy.use_blocks(self.kv_blocks)
        policy.use_hints(self.cluster_hints)
        if isinstance(policy, Sticky):
            if self._shared_sessions is not None:
                policy.use_sessions(self._shared_sessions, routing)
            policy.share_sessions(self.cluster_hints.session_notes, "")
        return policy

    def use_sessions(self, sessions: Sessions) -> None:
        """Use `sessions`, which are shared with other processes, for sticky policies."""
        self._shared_sessions = sessions
        sessions.share(self.cluster_hints.session_notes, "")
        if isinstance(self.policy, Sticky):
            self.policy.use_sessions(sessions, self.settings.config.routing)
        self.balancer.pool_policies.use_sessions(sessions)

    def finish_session(self, key: str) -> bool:
        """Remove a sticky session. Returns whether it existed."""
        in_pools = self.balancer.pool_policies.finish_session(key)
        existed = isinstance(self.policy, Sticky) and self.policy.finish_session(key)
        return existed or in_pools

    def policies(self) -> dict[Role, Policy]:
        """The policies in use: of regular workers, and of pools that have had a request."""
        return {"regular": self.policy, **self.balancer.pool_policies.built}

    def policy_of(self, role: Role) -> Policy:
        return self.policy if role == "regular" else self.balancer.pool_policies.of(role)

    def place_session(self, digest: bytes, worker: Worker | None) -> None:
        """Apply the place of a session at another proxy; `worker`: None if it was finished."""
        if self._shared_sessions is not None:
            self._shared_sessions.place(digest, worker, self.loop.now)
            return
        if isinstance(self.policy, Sticky) and (worker is None or worker.role == "regular"):
            self.policy.place_session(digest, worker)
        self.balancer.pool_policies.place_session(digest, worker)

    def session_count(self, worker: Worker) -> int:
        """The number of sticky sessions at a worker, or at its ranks."""
        targets = worker.dp_ranks or (worker,)
        if worker.role != "regular":
            return sum(map(self.balancer.pool_policies.session_count, targets))
        if not isinstance(self.policy, Sticky):
            return 0
        return sum(map(self.policy.session_count, targets))

    def _is_member(self, target: Worker) -> bool:
        worker = target.worker
        return self.fleet.find(worker.url) is worker and (
            target is worker or target in worker.dp_ranks
        )

    def forget_cache(self, worker: Worker) -> None:
        """Drop what is known of the caches of the worker and its ranks, which were lost."""
        for target in (worker, *worker.dp_ranks):
            self._forget_target(target)

    def _forget_target(self, target: Worker) -> None:
        self.kv_blocks.clear(target.url)
        self.cluster_hints.forget(target)
        self.policy.forget_worker(target)
        self.balancer.pool_policies.forget_worker(target)

    def prepare(self, new: Config) -> PreparedListeners:
        """Open and read everything that `new` needs; call the result to apply it. Raises OSError or
        ConfigError, changing nothing."""
        # A reload must not open listeners that a drain has closed.
        opens = not (self.draining or self.listeners_are_external)
        prepared = self.listeners.prepare(new, opens=opens)

        def commit() -> None:
            self.configure(new)
            prepared()

        return PreparedListeners(prepared.public, commit, prepared.cancel)

    def take_kv_changes(self, holder: str, changes: PackedChanges) -> None:
        """Apply cache changes from KV events. `holder`: URL of the worker or rank."""
        self.kv_blocks.apply(holder, unpack_changes(changes))

    def open(self) -> None:
        """Accept connections after `listeners.held`. Raises OSError."""
        self.listeners.open()

    def listen_on(self, socks: Sequence[socket.socket], *, admin: bool = False) -> None:
        """Accept only on `socks`, which another process has opened."""
        self.listeners.listen_on(socks, admin=admin)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the event loop and its timers until cancelled; then close every socket."""
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.loop.run)
                nursery.start_soon(self.services.timers.run)
                nursery.start_soon(timers.run_sweeps, self.loop, self._sweep)
                nursery.start_soon(self.listeners.certificates.run)
                task_status.started()
        finally:
            self.settings.callers.publish()
            self.listeners.close()
            self.upstream_pools.close()
            self.loop.flush()

    def begin_drain(self, *, keeps_idle: bool = False) -> None:
        """Accept no new connections; close idle ones now, the others after their response.

        `keeps_idle`: idle connections stay open for one more request; control requests on them
        reach the program that takes over. A second call without it closes them."""
        self.inflight.draining = True
        self.inflight.closes_idle = not keeps_idle
        self.listeners.close()
        self.close_after_responses(admin=True)
        if keeps_idle:
            self.upstream_pools.keep_no_admin_connections()
            self.loop.flush()
            return
        for task in [task for task in self.loop.tasks if task.phase == "idle"]:
            if isinstance(task, Connection) and not task.client.pending:
                task.throw(ClientDisconnected())
        self.loop.flush()

    def close_after_responses(self, *, admin: bool) -> None:
        """Close each connection after its next response, which announces it, so that no request is
        lost. `admin`: also connections of the [admin] listener."""
        for task in self.loop.tasks:
            if isinstance(task, Connection) and (admin or not task.role.admin_only):
                task.close_after_response = True

    async def drained(self) -> None:
        """Wait until the last connection has ended. The caller must set a deadline."""
        while self.loop.tasks:
            await self.loop.tasks_ended.wait()

    async def abort(self, target: AbortTarget) -> AbortFindings:
        """End the waiting requests that match `target`, and find the workers of the others."""
        return await abort_requests(self.services, target, time())

    def admission(self) -> dict[str, int]:
        return admission_record(self.services)

    def counts(self) -> dict[str, object]:
        return totals_record(self.services)

    def rows(self) -> list[dict[str, object]]:
        """One row for each further data-plane process: none here."""
        return []

    def addresses(self) -> list[str]:
        return self.listeners.addresses()

    def served_at(self) -> ServedAt:
        return self.listeners.served_at()

    def status(self) -> dict[str, object]:
        return status_record(self.services, self.listeners)

    def keep_voices_at(self, worker: Worker) -> None:
        """Make `worker` the voice owner, because it accepted an upload or a deletion."""
        self.voices.voices_changed(worker.url)
        self.queue.serve(changed=True)

    def _follow_features(self) -> None:
        fleet = self.fleet
        self.settings.follow_fleet(has_ranks=fleet.has_ranks, has_pools=fleet.has_pools)
        self.balancer.follow_fleet()

    def _follow_fleet(self) -> None:
        self._follow_features()
        workers = set(self.fleet.workers)
        self.upstream_pools.on_fleet_change(workers)
        removed = self.voices.update_presence({worker.url for worker in workers})
        if removed:
            _log.warning("voice_owner_removed worker=%s", removed)
        self.update_gate.on_fleet_change()
        self.queue.serve(changed=True)

    def _follow_worker(self, worker: Worker) -> None:
        self._follow_features()
        self.upstream_pools.on_worker_change(worker)
        self.update_gate.on_worker_change(worker)
        self.queue.serve(changed=True)

    def _sweep(self) -> None:
        self.policy.maintain(self.loop.now)
        self.balancer.pool_policies.maintain(self.loop.now)
        self.tokenize_calls.start_due()
        self.upstream_pools.sweep()
        self.settings.callers.publish()
        self.listeners.retry_accepting()
