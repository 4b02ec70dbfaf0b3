"""One run: the proxy's own admission, queue, policy, retries and health with modelled engines.

The objects are those of the data plane (`ExchangeServices`) and of the fleet; only sockets, engines
and time are models. The head of a response arrives with its first token. Health checks run at the
configured interval. Invariant: the only randomness is that of `seed`; no clock is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from math import inf
from random import Random
from typing import Final, cast

from omni_proxy.config.fields import CAPABILITIES
from omni_proxy.config.overlay import WorkerSpec
from omni_proxy.config.schema import Config
from omni_proxy.dataplane.admission.inflight import InFlight
from omni_proxy.dataplane.admission.queue import Queue
from omni_proxy.dataplane.admission.update_gate import UpdateGate, reasons_to_hold_sessions
from omni_proxy.dataplane.attempt.attempt import AttemptFailed
from omni_proxy.dataplane.attempt.outlier_reports import report_failure, report_success
from omni_proxy.dataplane.attempt.retry import RetryState
from omni_proxy.dataplane.exchange.exchange import Exchange, Recorders
from omni_proxy.dataplane.exchange_io import PUBLIC, ExchangeIO
from omni_proxy.dataplane.finalize import finalize
from omni_proxy.dataplane.loop.stream import IoTask, Stream
from omni_proxy.dataplane.loop.task import PhaseTimeout, pause
from omni_proxy.dataplane.services import ExchangeServices, Totals
from omni_proxy.dataplane.settings import Settings
from omni_proxy.dataplane.upstream.balancer import Balancer
from omni_proxy.dataplane.upstream.pool import UpstreamPools
from omni_proxy.fleet.engine_load import bounds_of
from omni_proxy.fleet.health_state import Health, thresholds_of
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.voice_registry import VoiceRegistry
from omni_proxy.fleet.worker import Worker
from omni_proxy.health.prober import OUT_INTERVAL_SECS, RECOVERY_INTERVAL_SECS
from omni_proxy.routing.cache_prediction import note_first_byte
from omni_proxy.routing.disaggregation.pool_policies import PoolPolicies
from omni_proxy.routing.inspect.affinity_key import affinity_keys_of
from omni_proxy.routing.inspect.requirements import requirements_of_json
from omni_proxy.routing.kv_events.block_index import BlockIndex
from omni_proxy.routing.policies import build_policy
from omni_proxy.routing.policies.cache_cost import BYTES_PER_TOKEN
from omni_proxy.routing.policies.sticky import Sticky
from omni_proxy.routing.routes import Route, match_route
from omni_proxy.simulate.engine import Engine, EngineSpec
from omni_proxy.simulate.faults import Fault
from omni_proxy.simulate.kv_feed import KvFeed, Loss, reads_events, token_prompt
from omni_proxy.simulate.virtual_time import VirtualLoop, VirtualTime, VirtualTimers
from omni_proxy.simulate.workload import FactsCounter, Request, Workload
from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.head_caching.response_heads import ResponseHeadCache
from omni_proxy.wire.load_report import EngineLoad

EPOCH: Final = datetime(2000, 1, 1, tzinfo=UTC)  # the date of virtual time 0
MAINTAIN_SECS: Final = 0.25
REPORT_SECS: Final = 0.05  # delay of an engine's load report
PATH: Final = "/v1/completions"
HEX: Final = 16  # characters of a block's id in the text of a prompt
USAGE: Final = b'{"usage":{"prompt_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}}'


@dataclass(slots=True)
class Outcomes:
    """Results for clients. Times are seconds, of completed requests, in order of completion."""

    completed: int = 0
    failed: int = 0
    failures: Counter[str] = field(default_factory=Counter)  # by reason
    retries: int = 0
    first_token_secs: list[float] = field(default_factory=list)
    total_secs: list[float] = field(default_factory=list)


class _OpenConnection:
    """A client that never disconnects and never reads slowly."""

    peer_closed = False
    closed = False
    pending = b""


class SimulatedExchange(ExchangeIO):
    """One client's request: the steps of `dataplane.drivers.exchange_steps`, with modelled
    engines."""

    __slots__ = ("_ended", "_first_at", "_refused", "broken", "number", "request", "simulation")

    def __init__(self, simulation: Simulation, request: Request, number: int) -> None:
        services = simulation.services
        IoTask.__init__(self, services.loop)
        self.services = services
        self.settings = services.settings
        self.client = cast("Stream", _OpenConnection())
        self.role, self.peer = PUBLIC, ""
        self.exchange = self.upstream = self.body_stream = self.keepalive = self.watch = None
        self.close_after_response = False
        self.connections = "redialled"
        self.unread, self.head_bytes = b"", 0
        self.simulation = simulation
        self.request = request
        self.number = number  # unique in a run
        self._first_at = 0.0
        self._ended = self._refused = False
        self.broken = ""

    def set_timeout(self, phase: str, secs: float) -> None:
        super().set_timeout(phase, secs)
        if self.phase_deadline < inf:
            self.simulation.time.schedule(self.phase_deadline, self._expire, None)

    def _expire(self, _: object) -> None:
        loop = self.services.loop
        loop.now = self.simulation.time.now
        if self.phase_deadline <= loop.now and self in loop.tasks:
            self.on_phase_timeout()

    def await_next_request(self) -> None:
        """Does nothing: a connection has only one request."""

    async def serve(self) -> None:
        exchange = self.exchange = Exchange(self.loop.now, "")
        exchange.head_at = exchange.body_at = self.loop.now
        exchange.method, exchange.target = "POST", PATH
        exchange.route = self.simulation.route
        try:
            await self._respond(exchange)
        except HttpError as error:
            exchange.status = error.status
            exchange.end("refused", "proxy", str(error.code))
        except PhaseTimeout as error:
            exchange.end("timed_out", "proxy", str(error))
        finally:
            finalize(self.services, exchange, self.phase)
            self.simulation.on_end(self, exchange, self._first_at)

    async def _respond(self, exchange: Exchange) -> None:
        services, route = self.services, exchange.route
        assert route is not None
        if not services.inflight.admit(exchange):
            await services.queue.wait_for_slot(self, exchange, unread=True)
        body = exchange.body = self.simulation.body_of(self.request, self.number)
        need = exchange.requirements = requirements_of_json(route, body)
        exchange.stream, exchange.bytes_in = need.stream, len(body)
        if services.balancer.policy.needs_affinity_key:
            need.affinity_key = self.request.session
        exchange.policy = services.balancer.policy.name
        try:
            worker = services.balancer.acquire(exchange)
        except HttpError as error:
            worker = await services.queue.wait_for_worker(self, exchange, error)
        retry: RetryState | None = None
        while True:
            try:
                await self._attempt(exchange, worker)
            except AttemptFailed as error:
                report_failure(services.fleet, exchange, worker, error.error)
                client_error = HttpError(error.status, error.error, error.kind)
                retry = retry or RetryState(self, exchange, len(exchange.body))
                worker = await retry.next_worker(error.kind, client_error)
                continue
            break
        if exchange.error:
            report_failure(services.fleet, exchange, worker, exchange.error)
        else:
            report_success(services.fleet, exchange, worker)

    async def _attempt(self, exchange: Exchange, worker: Worker) -> None:
        """Raises AttemptFailed before the first token; after it `exchange` has the outcome."""
        engine = self.simulation.engines[worker.url]
        exchange.sent_at = self.loop.now
        if not engine.alive:
            raise AttemptFailed("connect_failure", "ConnectError: Connection refused")
        self._ended, self.broken = False, ""
        self.set_timeout("wait", self.settings.timeouts.response_head)
        engine.submit(self.request, self, self.loop.now)
        try:
            while not self._ended:
                self.waiting_on = self
                await pause
        except PhaseTimeout:
            engine.cancel(self)
            raise AttemptFailed("response_timeout", "ReadTimeout: no head in time", 504) from None
        exchange.status = 400 if self._refused else 200
        if not self.broken or self._refused:
            exchange.end("completed", "")
        elif self._first_at:
            exchange.end("stream_error", "worker", self.broken)
        else:
            raise AttemptFailed("reset_before_response", f"RemoteProtocolError: {self.broken}")

    def on_first_token(self) -> None:
        exchange = self.exchange
        assert exchange is not None
        self.phase, self.phase_deadline = "relay", inf
        self._first_at = exchange.first_at = exchange.response_head_at = self.simulation.time.now
        exchange.relayed = True
        if exchange.requirements is not None:
            note_first_byte(exchange.requirements.prediction)

    def on_completed(self, cached_tokens: int) -> None:
        exchange = self.exchange
        assert exchange is not None
        if self.settings.keeps_last_chunk:
            exchange.last_chunk = USAGE % (self.request.input_tokens, cached_tokens)
        self._ended = True
        self.loop.wake(self)

    def on_failed(self, error: str, *, refused: bool = False) -> None:
        self.broken, self._refused, self._ended = error, refused, True
        self.loop.wake(self)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Workers, workload and engines of a run. `seed`: of all randomness in the proxy."""

    workers: Sequence[WorkerSpec]
    workload: Workload
    engine: EngineSpec
    faults: Sequence[Fault] = ()
    seed: int = 0


class Simulation:
    """One fleet under one workload."""

    def __init__(self, config: Config, scenario: Scenario) -> None:
        workers, seed = scenario.workers, scenario.seed
        self.time = VirtualTime()
        self.outcomes = Outcomes()
        self.facts = FactsCounter()
        self.engines: dict[str, Engine] = {}
        self.feeds: dict[str, KvFeed] = {}  # of KV events, if the policy uses them
        self.blocks = BlockIndex()
        self.route = _route()
        self._config = config
        self._workload = scenario.workload
        self._spec = scenario.engine
        self._random = Random(f"{seed} probes")
        self._members = list(workers)
        self._reads_events = reads_events(config.routing)
        share = max((fault.share for fault in scenario.faults), default=0.0)
        self._loss = Loss(share, Random(f"{seed} lost events"))
        self._active = 0  # known requests that have not ended, including future ones
        self._loop = VirtualLoop(self.time)
        self._fleet = Fleet()
        self._fleet.thresholds = thresholds_of(config)
        self._fleet.loads.now = self.time.clock
        self._fleet.loads.configure(bounds_of(config.routing), [])
        self.services = self._build_services(Random(f"{seed} proxy"))
        for worker in workers:
            self._add_engine(worker)
        self._fleet.apply(workers, EPOCH)
        for member in self._fleet.workers:
            for _ in range(self._fleet.thresholds.rise):
                self._observe(member, None)
            self._schedule_probe(member)
            self._schedule_poll(member)
        for fault in scenario.faults:
            if fault.kind == "lose_events":
                continue
            self.time.schedule(fault.at, self._apply, fault)

    def run(self) -> Outcomes:
        """Run until every request has ended."""
        arrivals = iter(self._workload.requests)
        self._active = len(self._workload.requests)
        self.time.schedule(0.0, self._maintain, None)

        def arrive(request: Request) -> None:
            self._start(request)
            if (following := next(arrivals, None)) is not None:
                self.time.schedule(following.at, arrive, following)

        if (first := next(arrivals, None)) is not None:
            self.time.schedule(first.at, arrive, first)
        try:
            while self._active and self.time.advance():
                self._loop.step_ready()
        finally:
            self._loop.close()
        return self.outcomes

    def body_of(self, request: Request, number: int) -> bytes:
        """A request of the completions API: prompts share leading bytes if and only if they share
        leading blocks. `number`: unique for the request."""
        if self._reads_events:
            prompt = token_prompt(request, number)
        else:
            prompt = b'"%b"' % _text(request, number).encode()
        model = f'"model":"{request.model}",'.encode() if request.model else b""
        return b'{%b"stream":true,"prompt":%b}' % (model, prompt)

    def on_end(self, io: SimulatedExchange, exchange: Exchange, first_at: float) -> None:
        """Record the result for the client."""
        outcomes, now = self.outcomes, self.time.now
        self._active -= 1
        outcomes.retries += max(0, exchange.attempts - 1)
        if exchange.outcome == "completed" and exchange.status == 200:
            outcomes.completed += 1
            outcomes.first_token_secs.append(first_at - exchange.started_at)
            outcomes.total_secs.append(now - exchange.started_at)
        else:
            outcomes.failed += 1
            outcomes.failures[io.broken or exchange.error or f"status {exchange.status}"] += 1
        for request in self._workload.next_after(io.request, now):
            self._active += 1
            self.time.schedule(request.at, self._start, request)

    def _build_services(self, random: Random) -> ExchangeServices:
        loop, fleet, config = self._loop, self._fleet, self._config
        settings, recorders = Settings(config, ""), Recorders()
        policy = build_policy(config.routing, random.randrange, 0.0)
        policy.use_blocks(self.blocks)
        if isinstance(policy, Sticky):
            policy.hold_for(
                reasons_to_hold_sessions(config), lambda worker: fleet.find(worker.url) is worker
            )
        pools = PoolPolicies(config.routing, random.randrange, self.time.clock)
        balancer = Balancer(fleet, policy, pools, VoiceRegistry(), recorders)
        balancer.affinity_keys = affinity_keys_of(config)
        inflight = InFlight(settings)
        update_gate = UpdateGate(loop, fleet, settings, balancer)
        queue = Queue(fleet, settings, inflight, balancer, update_gate)
        fleet.watch(lambda: queue.serve(changed=True))
        fleet.watch_cache_cleared(policy.forget_worker)
        return ExchangeServices(
            loop=loop, fleet=fleet, settings=settings, inflight=inflight, balancer=balancer,
            queue=queue, upstream_pools=UpstreamPools(loop, ""), response_heads=ResponseHeadCache(),
            timers=VirtualTimers(loop, self.time), recorders=recorders, totals=Totals(),
            keep_voices_at=lambda worker: None, random_below=random.randrange,
        )  # fmt: skip

    def _add_engine(self, worker: WorkerSpec) -> None:
        feed: KvFeed | None = None
        if self._reads_events and not self._spec.slots and self._publishes(worker):
            feed = self.feeds[worker.url] = KvFeed(
                worker.url, self.time, self.blocks, self._loss, replays=_has_replays(worker)
            )
        self.engines[worker.url] = Engine(
            self._spec, self.time.schedule, started_at=self.time.now, publisher=feed
        )

    def _publishes(self, worker: WorkerSpec) -> bool:
        """Whether the engine publishes KV events: all do, unless the configuration names some."""
        return worker.kv_events != "off" or all(
            member.kv_events == "off" for member in self._members
        )

    def _start(self, request: Request) -> None:
        self.facts.add(request)
        self._loop.now = self.time.now
        SimulatedExchange(self, request, self.facts.requests).start()

    def _maintain(self, _: object) -> None:
        self.services.balancer.policy.maintain(self.time.now)
        for feed in self.feeds.values():
            feed.tick()
        self.time.schedule(self.time.now + MAINTAIN_SECS, self._maintain, None)

    def _probe(self, worker: Worker) -> None:
        if self._fleet.find(worker.url) is not worker or worker.health.state is Health.DEAD:
            return
        alive = self.engines[worker.url].alive
        self._observe(worker, None if alive else "ConnectError: Connection refused")
        self._schedule_probe(worker)

    def _observe(self, worker: Worker, error: str | None) -> None:
        probed_at = EPOCH + timedelta(seconds=self.time.now)
        self._fleet.observe_probe(
            worker,
            status=None if error else 200,
            error=error,
            at=probed_at,
            epoch=worker.health.epoch,
        )

    def _schedule_probe(self, worker: Worker) -> None:
        secs, machine = self._config.health.interval_secs, worker.health
        if machine.state is not Health.HEALTHY:
            out_secs = (
                RECOVERY_INTERVAL_SECS if machine.consecutive_successes else OUT_INTERVAL_SECS
            )
            secs = min(secs, out_secs)
        secs *= 0.8 + 0.4 * self._random.random()
        self.time.schedule(self.time.now + secs, self._probe, worker)

    def _schedule_poll(self, worker: Worker) -> None:
        """Schedule polls like `health.engine_readers`; streams, as used here, report no load."""
        if secs := self._config.routing.load_poll_secs:
            self.time.schedule(self.time.now + secs * self._random.random(), self._poll, worker)

    def _poll(self, worker: Worker) -> None:
        engine = self.engines[worker.url]
        if self._fleet.find(worker.url) is worker and engine.alive:
            load = EngineLoad(engine.load, self.time.now)
            self.time.schedule(self.time.now + REPORT_SECS, self._report, (worker, load))
        secs = self._config.routing.load_poll_secs
        self.time.schedule(self.time.now + secs, self._poll, worker)

    def _report(self, reported: tuple[Worker, EngineLoad]) -> None:
        self._fleet.loads.report(*reported)

    def _apply(self, fault: Fault) -> None:
        if fault.kind == "join":
            self._join()
            return
        engine = self.engines[self._members[fault.worker].url]
        self._loop.now = self.time.now
        if fault.kind == "die":
            engine.die()
        elif fault.kind == "slow":
            engine.factor *= fault.factor
        else:
            engine.evict()

    def _join(self) -> None:
        """Add a worker like the first one; it gets requests once its probes have succeeded."""
        spec = simulated_worker(len(self._members), self._members[0])
        self._members.append(spec)
        self._add_engine(spec)
        change = self._fleet.apply(self._members, EPOCH + timedelta(seconds=self.time.now))
        for worker in change.added:
            self._probe(worker)
            self._schedule_poll(worker)


def _text(request: Request, number: int) -> str:
    size = request.block_tokens * BYTES_PER_TOKEN
    if request.blocks:
        text = "".join([_block_text(block, size) for block in request.blocks])
        return text[: request.input_tokens * BYTES_PER_TOKEN]
    length = request.input_tokens * BYTES_PER_TOKEN
    return (f"{number:0{HEX}x}" * (length // HEX + 1))[:length]


@lru_cache(maxsize=8192)
def _block_text(block: int, size: int) -> str:
    return f"{block:0{HEX}x}" * (size // HEX)


def _route() -> Route:
    route = match_route("POST", PATH)
    assert route is not None
    return route


def _has_replays(worker: WorkerSpec) -> bool:
    """Whether there is a replay socket: unless only `kv_events` names an endpoint."""
    return worker.kv_events in ("off", "auto") or bool(worker.kv_replay)


def simulated_worker(place: int, like: WorkerSpec | None = None) -> WorkerSpec:
    """A worker with an address to which no connection is made."""
    url = f"http://10.{place >> 16 & 255}.{place >> 8 & 255}.{place & 255}:8000"
    if like is not None:
        return replace(like, url=url)
    return WorkerSpec(
        url=url, model=None, capabilities=frozenset(CAPABILITIES), disabled=False, weight=1,
        max_inflight=0, origin="flag",
    )  # fmt: skip
