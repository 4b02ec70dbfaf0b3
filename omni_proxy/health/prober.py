"""The prober: active health checks, one loop and one HTTP client per worker that is not dead.

Invariant: a dead worker is never probed, and a result counts only in the epoch in which its probe
began. A probe reports success or failure; the health state machine determines the transition. If
another process answers than at the last probe, the fleet drops the state of the old process: its
cached prefixes and its weight version.

The probes of many workers start in different iterations of the event loop, in the order of their
arrival. If all of them started in one iteration, other tasks would wait for all of them at each
checkpoint.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from urllib.parse import quote

import httpx
import trio

from omni_proxy.config.schema import Config
from omni_proxy.config.schema import HealthConfig as HealthConfig
from omni_proxy.config.url import dial_address
from omni_proxy.fleet.cordon_reasons import LAUNCH_CORDON
from omni_proxy.fleet.health_state import Health
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.shared.engine_protocol import INSTANCE_HEADER
from omni_proxy.system.fd_limit import is_resource_exhaustion
from omni_proxy.upstream_http.client import Call, WorkerClient, build_request, read_bounded
from omni_proxy.upstream_http.resolver import RefusedAddress, addresses
from omni_proxy.wire.forwarded import PROXY_FIELD, hop_line


class StartThrottle:
    """Lets one task start per loop iteration, or per `iterations` of them."""

    def __init__(self, iterations: int = 1) -> None:
        self._lock = trio.Lock()
        self._iterations = iterations

    async def wait_turn(self) -> None:
        async with self._lock:  # its release wakes the next task in the next iteration
            for _ in range(self._iterations - 1):
                await trio.lowlevel.checkpoint()


_log = logging.getLogger(__name__)

RECOVERY_INTERVAL_SECS = 0.5  # between the first successful probe and the success threshold
OUT_INTERVAL_SECS = 10.0  # most for a worker out of rotation, however long the interval of others
MAX_PARALLEL_PROBES = 256  # with more, the proxy's own CPU time would cause time-outs
BODY_BYTES = 65536
CLOSE_SECS = 1
INSTANCE_KEYS = ("instance", "instance_id", "start_time", "started_at")  # of a health response body
# ValueError: an endpoint or a key of the configuration that can't be written into a request.
_PROBE_ERRORS = (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, RefusedAddress)


@dataclass(slots=True, eq=False)
class _ProbeLoop:
    """A handle of one worker's loop, to wake it, to wait for a probe, and to cancel it."""

    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    woken: trio.Event = field(default_factory=trio.Event)
    finished: trio.Event = field(default_factory=trio.Event)  # set when the next probe ends
    epoch: int | None = None  # of the probe that runs now
    refused: bool = False  # the last probe was refused: no process listens
    begun_at: float = field(default_factory=trio.current_time)
    started: bool = False  # it was healthy once, or was reported as failed


@dataclass(frozen=True, slots=True)
class _ProbeResponse:
    status: int
    body: bytes | None
    instance: str  # the value of INSTANCE_HEADER
    proxy_id: str  # "" unless the worker is an omni-proxy


class Prober:
    """Runs a loop for each worker that is not dead; `run` owns all loops."""

    def __init__(
        self,
        fleet: Fleet,
        config_store: ConfigStore,
        *,
        jitter: Callable[[], float],
        max_parallel: int = MAX_PARALLEL_PROBES,
    ) -> None:
        self._fleet = fleet
        self._config_store = config_store
        self._jitter = jitter
        self._nursery: trio.Nursery | None = None
        self._loops: dict[Worker, _ProbeLoop] = {}
        self._slots = trio.CapacityLimiter(max_parallel)
        self._throttle = StartThrottle()
        self.proxy_id = ""  # of this proxy, see `wire.forwarded`
        # Workers under a weight update, whose failed probes are ignored: they may be slow or busy.
        self.tolerates_failures: Callable[[Worker], bool] = lambda _: False
        fleet.watch_members(self._follow_fleet)
        fleet.watch_worker(self._follow_worker)
        # A worker that was ejected for failed requests may recover soon.
        fleet.watch_ejected(self.probe_now)
        config_store.subscribe(self._follow_config)
        fleet.watch_health(self._resume_probes)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._follow_fleet()
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:  # in the body: a nursery whose tasks have ended is closed before it exits
                self._nursery = None
                self._loops.clear()

    async def probe_once(self, worker: Worker) -> None:
        """Wait for a probe that counts in the worker's current epoch; start one if none runs.

        Returns immediately if the worker is not probed: dead, removed, or the prober doesn't run.
        It is always a checkpoint, so a caller that polls can be cancelled.
        """
        await trio.lowlevel.checkpoint()
        loop = self._loops.get(worker)
        while loop is not None:
            epoch = loop.epoch
            if epoch != worker.health.epoch:
                loop.woken.set()
            await loop.finished.wait()
            if epoch in (None, worker.health.epoch):
                return
            loop = self._loops.get(worker)

    def _follow_fleet(self) -> None:
        workers = self._fleet.workers
        for worker in self._loops.keys() - set(workers):
            self._follow_worker(worker)
        for worker in workers:
            if (worker in self._loops) is (worker.health.state is Health.DEAD):
                self._follow_worker(worker)

    def _follow_worker(self, worker: Worker) -> None:
        if self._nursery is None:
            return
        present = self._fleet.find(worker.url) is worker
        if not present or worker.health.state is Health.DEAD:
            if worker in self._loops:
                self._loops.pop(worker).scope.cancel()
        elif worker not in self._loops:
            loop = self._loops[worker] = _ProbeLoop()
            self._nursery.start_soon(self._run_loop, worker, loop)

    def probe_now(self, worker: Worker) -> None:
        """Probe the worker now."""
        loop = self._loops.get(worker)
        if loop is not None:
            loop.woken.set()

    def _resume_probes(self, worker: Worker, before: Health) -> None:
        """Wake the loop of a worker that was in rotation, and therefore was not probed."""
        loop = self._loops.get(worker)
        if loop is not None and before is Health.HEALTHY and not self._health.probe_healthy:
            loop.woken.set()

    @property
    def _health(self) -> HealthConfig:
        return self._config_store.config.health

    def _follow_config(self, old: Config, new: Config) -> None:
        if old.health != new.health:
            for loop in self._loops.values():
                loop.woken.set()

    async def _run_loop(self, worker: Worker, loop: _ProbeLoop) -> None:
        client = WorkerClient(worker)
        try:
            with loop.scope:
                while True:
                    async with (
                        self._slots
                    ):  # waiting for a free slot does not count towards the probe's timeout
                        await self._throttle.wait_turn()
                        loop.woken = trio.Event()
                        timed_out = await self._probe(worker, client, loop)
                    if timed_out:
                        # A cancelled connect can leave httpcore's pool poisoned (httpcore #1093).
                        await client.close()
                    self._note_startup(worker, loop)
                    with trio.move_on_after(self._pause_secs(worker, loop)):
                        await loop.woken.wait()
        finally:
            loop.finished.set()
            with trio.move_on_after(CLOSE_SECS, shield=True):
                await client.close()

    def _note_startup(self, worker: Worker, loop: _ProbeLoop) -> None:
        """Log once that a worker was not healthy within its start-up time."""
        limit, machine = self._health.startup_timeout_secs, worker.health
        if loop.started or machine.state is Health.HEALTHY:
            loop.started = True
        elif 0 < limit <= trio.current_time() - loop.begun_at and not machine.consecutive_successes:
            loop.started = True
            _log.error(
                "worker_startup_timeout worker=%s after=%gs error=%s",
                worker.url, limit, worker.health.last_error,
            )  # fmt: skip

    def _pause_secs(self, worker: Worker, loop: _ProbeLoop) -> float:
        machine, health = worker.health, self._health
        interval_secs = health.interval_secs
        if machine.state is Health.HEALTHY and not health.probe_healthy:
            return math.inf
        if machine.state is not Health.HEALTHY:
            if machine.consecutive_successes:
                return min(interval_secs, RECOVERY_INTERVAL_SECS)
            interval_secs = min(interval_secs, OUT_INTERVAL_SECS)
        pause_secs = interval_secs * (0.8 + 0.4 * self._jitter())
        left_secs = loop.begun_at + health.startup_timeout_secs - trio.current_time()
        if left_secs > 0 and not loop.started:
            return min(pause_secs, left_secs)  # so that the timeout is detected in time
        return pause_secs

    async def _probe(self, worker: Worker, client: WorkerClient, loop: _ProbeLoop) -> bool:
        """Make one probe and report its result. Returns whether it timed out."""
        health = self._health
        epoch = loop.epoch = worker.health.epoch
        status: int | None = None
        error: str | None
        local_fault = False
        with trio.move_on_after(health.timeout_secs) as scope:
            try:
                response = await _send_probe(worker, await client.client(), health)
                status = response.status
                worker.health_body = _parse_json(response.body)
                error = None if 200 <= status < 300 else _failure_text(status, response.body)
                if self._is_proxy(worker, response.proxy_id):
                    error = "the address of this worker is this proxy itself: remove it"
                if error is None:
                    self._compare_instance(worker, loop, response.instance)
            except _PROBE_ERRORS as failure:
                error = _error_text(failure)
                local_fault = is_resource_exhaustion(_root_cause(failure))
                self._note_refusal(worker, loop, failure)
        if scope.cancelled_caught:
            error = f"no answer within {health.timeout_secs:g} s"
        loop.epoch = None
        if local_fault:
            _log.warning("probe_skipped worker=%s error=%s", worker.url, error)
        elif error is None or loop.refused or not self.tolerates_failures(worker):
            self._fleet.observe_probe(
                worker, status=status, error=error, at=datetime.now(UTC), epoch=epoch
            )
            _log_not_up(worker, error, health)
        loop.finished.set()
        loop.finished = trio.Event()
        return scope.cancelled_caught

    def _is_proxy(self, worker: Worker, proxy_id: str) -> bool:
        """Whether the worker is this proxy; requests to another proxy get this proxy's hop mark."""
        self._fleet.set_hop_line(
            worker, hop_line(self.proxy_id) if proxy_id and self.proxy_id else b""
        )
        return bool(proxy_id) and proxy_id == self.proxy_id

    def _compare_instance(self, worker: Worker, loop: _ProbeLoop, instance: str) -> None:
        """Report a restart if another process answers than at the last successful probe."""
        instance = instance or _instance_in(worker.health_body)
        is_other = worker.instance and instance and worker.instance != instance
        # Also after a refusal: requests to the worker since then did not reach it.
        if is_other or loop.refused:
            self._report_restart(worker)
        worker.instance = instance or worker.instance
        loop.refused = False

    def _note_refusal(self, worker: Worker, loop: _ProbeLoop, failure: BaseException) -> None:
        """A refused connection means that the process has exited; report it once."""
        refused = isinstance(_root_cause(failure), ConnectionRefusedError)
        if refused and not loop.refused:
            self._report_restart(worker)
        loop.refused = loop.refused or refused

    def _report_restart(self, worker: Worker) -> None:
        self._fleet.set_version(worker, None, 0)
        self._fleet.cache_cleared(worker)


async def _send_probe(
    worker: Worker, client: httpx.AsyncClient, health: HealthConfig
) -> _ProbeResponse:
    """The response from the first address that accepts; it becomes the address of the worker."""
    target_address = dial_address(worker.url)
    target = quote(health.endpoint, safe="/%:@!$&'()*+,;=~?")
    if isinstance(target_address, str):
        return await _get(
            client, build_request(client, worker, target_address, Call("GET", target))
        )
    candidates = await addresses(*target_address)
    for address in candidates:
        try:
            response = await _get(
                client, build_request(client, worker, address, Call("GET", target))
            )
        except httpx.ConnectError:
            if address is candidates[-1]:
                raise
        else:
            worker.address = address
            return response
    raise OSError(f"{target_address[0]} has no address")


async def _get(client: httpx.AsyncClient, request: httpx.Request) -> _ProbeResponse:
    response = await client.send(request, stream=True)
    try:
        body = await read_bounded(response, BODY_BYTES)
        return _ProbeResponse(
            response.status_code,
            body,
            response.headers.get(INSTANCE_HEADER, ""),
            response.headers.get(PROXY_FIELD, ""),
        )
    finally:
        await response.aclose()


def _log_not_up(worker: Worker, error: str | None, health: HealthConfig) -> None:
    """Log the first failed probe of a worker that was never up, before the threshold is reached."""
    machine = worker.health
    is_first = machine.state is Health.UNKNOWN and machine.consecutive_failures == 1
    # The launcher logs the start of launched workers.
    launched = worker.origin == "launch" or LAUNCH_CORDON in worker.cordon_reasons
    if error is not None and is_first and not launched:
        interval_secs = min(health.interval_secs, OUT_INTERVAL_SECS)
        _log.warning(
            "worker_not_up worker=%s error=%s retry_every=%gs", worker.url, error, interval_secs
        )


def _parse_json(body: bytes | None) -> object:
    try:
        return json.loads(body) if body else None
    except (ValueError, RecursionError):
        return None


def _instance_in(body: object) -> str:
    """The process that a health body names by one of INSTANCE_KEYS; "" without one."""
    if not isinstance(body, dict):
        return ""
    for key in INSTANCE_KEYS:
        value = body.get(key)
        if isinstance(value, str | int | float) and value:
            return f"{key} {value}"
    return ""


def _root_cause(failure: BaseException) -> BaseException:
    """The innermost error: "Connection refused" rather than "all connection attempts failed"."""
    while cause := failure.__cause__ or failure.__context__:  # httpcore raises "from None"
        failure = cause.exceptions[0] if isinstance(cause, BaseExceptionGroup) else cause
    return failure


def _error_text(failure: BaseException) -> str:
    failure = _root_cause(failure)
    return str(failure) or type(failure).__name__


def _failure_text(status: int, body: bytes | None) -> str:
    text = body.decode("utf-8", "replace").strip() if body else ""
    return text or f"status={status}"


def log_health(worker: Worker, before: Health) -> None:
    """Log a change of the worker's health."""
    now, error = worker.health.state, worker.health.last_error
    if LAUNCH_CORDON in worker.cordon_reasons:  # the launcher logs its start
        _log.debug("worker_health worker=%s from=%s to=%s launching=true", worker.url, before, now)
        return
    level = logging.INFO if now in (Health.HEALTHY, Health.UNKNOWN) else logging.WARNING
    if error and level == logging.WARNING:
        _log.warning(
            "worker_health worker=%s from=%s to=%s error=%s", worker.url, before, now, error
        )
    else:
        _log.log(level, "worker_health worker=%s from=%s to=%s", worker.url, before, now)
