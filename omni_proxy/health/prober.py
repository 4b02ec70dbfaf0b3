"""The prober: one loop per worker that is not dead, each with a client of its own.

Invariant: a dead worker is never probed, and a result is observed under the epoch its probe began
in. A probe says good or bad; what that means for the worker is the health machine's to say. It also
sees when another process answers than before, and has the fleet forget what the old one had: what
it had cached, and which weights it said it had.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from urllib.parse import quote

import httpx
import trio

from omni_proxy.config.schema import Config
from omni_proxy.config.schema import HealthConfig as HealthConfig
from omni_proxy.config.url import dial_address
from omni_proxy.fleet.health import Health
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import LAUNCH_CORDON, Worker
from omni_proxy.health.start_throttle import StartThrottle
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.system.fd_limit import is_resource_exhaustion
from omni_proxy.upstream_http.client import Call, WorkerClient, build_request, read_bounded
from omni_proxy.upstream_http.resolver import RefusedAddress, addresses
from omni_proxy.wire.proxy_headers import PROXY_FIELD, hop_line

_log = logging.getLogger(__name__)

RISING_SECS = 0.5  # a good worker should not have to wait for a whole interval to be believed
PROBES_AT_ONCE = 256  # more would wait for our own CPU, and be late: thousands, well, would be out
BODY_BYTES = 65536
CLOSE_SECS = 1
INSTANCE_FIELD = "x-omni-instance"
INSTANCE_KEYS = ("instance", "instance_id", "start_time", "started_at")  # of a health body
# ValueError: an endpoint or a key of the configuration that can't be written into a request.
_FAULTS = (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, RefusedAddress)


@dataclass(slots=True, eq=False)
class _Loop:
    """One worker's loop, as others see it: how to wake, follow and end it."""

    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    woken: trio.Event = field(default_factory=trio.Event)
    finished: trio.Event = field(default_factory=trio.Event)  # the next probe to be observed
    probing: int | None = None  # the epoch of the probe that runs now
    refused: bool = False  # nobody listened at the last probe


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    body: bytes | None
    instance: str  # what the field of that name says
    proxy_id: str  # of one that is an omni-proxy itself


class Prober:
    """Keeps a loop for each worker that may be probed; `run` owns them all."""

    def __init__(
        self, fleet: Fleet, config_store: ConfigStore, *, jitter: Callable[[], float]
    ) -> None:
        self._fleet = fleet
        self._config_store = config_store
        self._jitter = jitter
        self._nursery: trio.Nursery | None = None
        self._loops: dict[Worker, _Loop] = {}
        self._slots = trio.CapacityLimiter(PROBES_AT_ONCE)
        self._pace = StartThrottle()
        self.proxy_id = ""  # ours, see `wire.proxy_headers`
        # Who may be slow, or say that it is busy, and is well all the same: its weights change.
        self.tolerates_failures: Callable[[Worker], bool] = lambda _: False
        fleet.watch_members(self._follow_fleet)
        fleet.watch_worker(self._follow_worker)
        fleet.watch_ejected(self._look_at)
        config_store.subscribe(self._follow_config)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self._follow_fleet()
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._nursery = None
            self._loops.clear()

    async def probe_once(self, worker: Worker) -> None:
        """Wait for a probe that counts in the worker's present epoch, beginning one if none runs.

        Returns at once for a worker that is not probed: dead, gone, or the prober is not running.
        It is a checkpoint also then, so that a caller that asks again and again can be cancelled.
        """
        await trio.lowlevel.checkpoint()
        loop = self._loops.get(worker)
        while loop is not None:
            running = loop.probing
            if running != worker.health.epoch:
                loop.woken.set()
            await loop.finished.wait()
            if running in (None, worker.health.epoch):
                return
            loop = self._loops.get(worker)

    def _follow_fleet(self) -> None:
        for worker in [*self._loops, *self._fleet.workers]:
            self._follow_worker(worker)

    def _follow_worker(self, worker: Worker) -> None:
        if self._nursery is None:
            return
        here = self._fleet.find(worker.url) is worker
        if not here or worker.health.state is Health.DEAD:
            if worker in self._loops:
                self._loops.pop(worker).scope.cancel()
        elif worker not in self._loops:
            loop = self._loops[worker] = _Loop()
            self._nursery.start_soon(self._watch, worker, loop)

    def _look_at(self, worker: Worker) -> None:
        """It was ejected for failed requests: the sooner it is probed, the sooner it is back."""
        loop = self._loops.get(worker)
        if loop is not None:
            loop.woken.set()

    def _follow_config(self, old: Config, new: Config) -> None:
        if old.health != new.health:
            for loop in self._loops.values():
                loop.woken.set()

    async def _watch(self, worker: Worker, loop: _Loop) -> None:
        caller = WorkerClient(worker)
        try:
            with loop.scope:
                while True:
                    async with self._slots:  # a probe's time begins when it does
                        await self._pace.wait_turn()
                        loop.woken = trio.Event()
                        late = await self._probe(worker, caller, loop)
                    if late:
                        # A cancelled connect can leave httpcore's pool poisoned (httpcore #1093).
                        await caller.close()
                    with trio.move_on_after(self._pause_secs(worker)):
                        await loop.woken.wait()
        finally:
            loop.finished.set()
            with trio.move_on_after(CLOSE_SECS, shield=True):
                await caller.close()

    def _pause_secs(self, worker: Worker) -> float:
        machine = worker.health
        interval_secs = self._config_store.config.health.interval_secs
        if machine.consecutive_successes and machine.state is not Health.HEALTHY:
            return min(interval_secs, RISING_SECS)
        return interval_secs * (0.8 + 0.4 * self._jitter())

    async def _probe(self, worker: Worker, caller: WorkerClient, loop: _Loop) -> bool:
        """Make one probe and have it observed. True when it ran out of time."""
        health = self._config_store.config.health
        epoch = loop.probing = worker.health.epoch
        status: int | None = None
        error: str | None
        ours = False
        with trio.move_on_after(health.timeout_secs) as scope:
            try:
                answer = await _ask(worker, await caller.client(), health)
                status = answer.status
                worker.health_body = _parsed(answer.body)
                error = None if 200 <= status < 300 else _fault(status, answer.body)
                if self._is_proxy(worker, answer.proxy_id):
                    error = "this worker leads to this proxy itself: remove it"
                if error is None:
                    self._compare(worker, loop, answer.instance)
            except _FAULTS as failure:
                error = _words(failure)
                ours = is_resource_exhaustion(_root(failure))
                self._note_refusal(worker, loop, failure)
        if scope.cancelled_caught:
            error = f"no answer within {health.timeout_secs:g} s"
        loop.probing = None
        if ours:
            _log.warning("no probe of worker %s: %s", worker.url, error)
        elif error is None or loop.refused or not self.tolerates_failures(worker):
            self._fleet.observe_probe(
                worker, status=status, error=error, at=datetime.now(UTC), epoch=epoch
            )
            _tell_if_not_up(worker, error, health)
        loop.finished.set()
        loop.finished = trio.Event()
        return scope.cancelled_caught

    def _is_proxy(self, worker: Worker, proxy_id: str) -> bool:
        """Whether it is this one; any other proxy gets its requests with our mark."""
        self._fleet.set_hop_line(
            worker, hop_line(self.proxy_id) if proxy_id and self.proxy_id else b""
        )
        return bool(proxy_id) and proxy_id == self.proxy_id

    def _compare(self, worker: Worker, loop: _Loop, instance: str) -> None:
        """Whether the process that answers is the one of the last good probe."""
        instance = instance or _told_by(worker.health_body)
        another = worker.instance and instance and worker.instance != instance
        # One that listens again is told once more: while nobody did, nobody could be asked.
        if another or loop.refused:
            self._restarted(worker)
        worker.instance = instance or worker.instance
        loop.refused = False

    def _note_refusal(self, worker: Worker, loop: _Loop, failure: BaseException) -> None:
        """Where nobody listens the process is gone, and its cache with it: said once."""
        refused = isinstance(_root(failure), ConnectionRefusedError)
        if refused and not loop.refused:
            self._restarted(worker)
        loop.refused = loop.refused or refused

    def _restarted(self, worker: Worker) -> None:
        self._fleet.set_version(worker, None, 0)
        self._fleet.cache_cleared(worker)


async def _ask(worker: Worker, client: httpx.AsyncClient, health: HealthConfig) -> _Answer:
    """Status and body from the first address that takes a connection; it becomes the worker's."""
    place = dial_address(worker.url)
    target = quote(health.endpoint, safe="/%:@!$&'()*+,;=~?")
    if isinstance(place, str):
        return await _get(client, build_request(client, worker, place, Call("GET", target)))
    found = await addresses(*place)
    for address in found:
        try:
            answer = await _get(client, build_request(client, worker, address, Call("GET", target)))
        except httpx.ConnectError:
            if address is found[-1]:
                raise
        else:
            worker.address = address
            return answer
    raise OSError(f"{place[0]} has no address")


async def _get(client: httpx.AsyncClient, request: httpx.Request) -> _Answer:
    response = await client.send(request, stream=True)
    try:
        body = await read_bounded(response, BODY_BYTES)
        return _Answer(
            response.status_code,
            body,
            response.headers.get(INSTANCE_FIELD, ""),
            response.headers.get(PROXY_FIELD, ""),
        )
    finally:
        await response.aclose()


def _tell_if_not_up(worker: Worker, error: str | None, health: HealthConfig) -> None:
    """At the first failed probe of one that was not up so far: the thresholds say it much later."""
    machine = worker.health
    waits = machine.state is Health.UNKNOWN and machine.consecutive_failures == 1
    # Of what we launch, its launch tells; before it has taken hold of the worker, too.
    launched = worker.origin == "launch" or LAUNCH_CORDON in worker.cordon_reasons
    if error is not None and waits and not launched:
        every = f"it is asked again every {health.interval_secs:g} s"
        _log.warning("Worker %s is not up yet: %s; %s", worker.url, error, every)


def _parsed(body: bytes | None) -> object:
    try:
        return json.loads(body) if body else None
    except (ValueError, RecursionError):
        return None


def _told_by(body: object) -> str:
    """Which process a health body speaks of; "" where it has no key for that."""
    if not isinstance(body, dict):
        return ""
    for key in INSTANCE_KEYS:
        value = body.get(key)
        if isinstance(value, str | int | float) and value:
            return f"{key} {value}"
    return ""


def _root(failure: BaseException) -> BaseException:
    """What happened below all wrappers: "Connection refused" rather than "all attempts failed"."""
    while below := failure.__cause__ or failure.__context__:  # httpcore raises "from None"
        failure = below.exceptions[0] if isinstance(below, BaseExceptionGroup) else below
    return failure


def _words(failure: BaseException) -> str:
    failure = _root(failure)
    return str(failure) or type(failure).__name__


def _fault(status: int, body: bytes | None) -> str:
    text = body.decode("utf-8", "replace").strip() if body else ""
    return text or f"status={status}"
