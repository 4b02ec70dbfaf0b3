"""Calls to workers for weight updates: admin calls, labels, checksums, continue, reachability.

Invariant: `call_all` calls all workers concurrently, without a bound: workers that join a group
wait for each other, so a bound would be a deadlock. Labels and checksums are read from the workers
only, never from the call's body; a worker that reports no label has none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import trio

from omni_proxy.admin_ops.admin_route_table import CONTINUE, AdminRoute
from omni_proxy.admin_ops.engine_dialects import (
    CHECKSUM,
    MODEL_INFO_PATHS,
    WEIGHTS_CHECKER,
    EngineCall,
    translate,
)
from omni_proxy.admin_ops.results import WorkerResult, parsed, version_of
from omni_proxy.fleet.worker import Worker
from omni_proxy.upstream_http.client import (
    JSON_TYPE,
    ROUTE_ABSENT,
    Call,
    call_each,
    call_worker,
    flush_cache,
)
from omni_proxy.upstream_http.credentials import credentials_of
from omni_proxy.weight_sync.protocol.checksum_agreement import Verdict, compare_answers

MAX_RESPONSE_BYTES = 64 * 1024 * 1024  # a checksum response lists every tensor
LARGE_BYTES: Final = 64 * 1024
OnResult = Callable[[WorkerResult], None]

# Large responses may arrive at the same time; one is parsed per turn of the event loop.
_parsing_large = trio.Lock()


@dataclass(frozen=True, slots=True)
class AdminCall:
    """One admin request to the workers. `chosen`: URLs of its targets, None for all workers.

    `target`: path and query as sent to workers. `caller`: name of the client.
    """

    route: AdminRoute
    method: str
    target: str
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    chosen: frozenset[str] | None = None
    caller: str = ""

    def to_workers(self, timeout_secs: float) -> Call:
        return Call(
            self.method,
            self.target,
            self.body,
            self.headers,
            timeout_secs=timeout_secs,
            max_bytes=MAX_RESPONSE_BYTES,
        )

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for repetitions of a request with the same credentials."""
        return self.method, self.target, self.body, self.chosen, self.headers.get("authorization")

    @property
    def credentials(self) -> dict[str, str]:
        """Headers for further calls to the workers on behalf of this one."""
        return credentials_of(self.headers)

    @property
    def engine_call(self) -> EngineCall:
        return EngineCall(self.method, self.target, self.body)

    def argument(self, name: str) -> object:
        """The value of a key of the query or of the JSON body; None if there is no such key."""
        return self.engine_call.argument(name)

    def body_field(self, name: str) -> object:
        """The value of a key of the JSON body; None if the body has no such key."""
        try:
            body = json.loads(self.body) if self.body else {}
        except (ValueError, RecursionError):
            return None
        return body.get(name) if isinstance(body, dict) else None


async def request_worker(worker: Worker, call: Call) -> WorkerResult:
    """Send one call, and parse the response. Failures of the worker are results, not exceptions.

    A worker that lacks the route is called in the dialect of the other kind of engine.
    """
    result = await call_once(worker, call)
    if result.status not in ROUTE_ABSENT:
        return result
    requests = translate(EngineCall(call.method, call.target, call.body))
    secs, retried = result.secs, result
    for number, request in enumerate(requests):
        headers = {**call.headers, **(JSON_TYPE if request.body else {})}
        renamed = replace(
            call, method=request.method, target=request.target, body=request.body, headers=headers
        )
        retried = await call_once(worker, renamed)
        if number == 0 and retried.status in ROUTE_ABSENT:
            return result  # the worker has neither route
        secs += retried.secs
        retried = replace(retried, secs=round(secs, 6), sent_to=request.path)
        if not retried.success:
            break
    return retried


async def call_once(worker: Worker, call: Call) -> WorkerResult:
    """Like `request_worker`, but only in this dialect."""
    result = await call_worker(worker, call)
    if len(result.body) < LARGE_BYTES:
        body = parsed(result.body)
    else:
        async with _parsing_large:
            body = parsed(result.body)
    return WorkerResult(worker.url, result.status, body, result.error, result.secs)


async def post_json(
    worker: Worker, path: str, body: bytes, headers: Mapping[str, str], timeout_secs: float
) -> WorkerResult:
    """POST `body`, a JSON text. The response may have up to MAX_RESPONSE_BYTES."""
    headers = {**headers, **JSON_TYPE}
    secs = timeout_secs
    call = Call("POST", path, body, headers, timeout_secs=secs, max_bytes=MAX_RESPONSE_BYTES)
    return await request_worker(worker, call)


async def call_all(
    workers: Sequence[Worker], call: Call, on_result: OnResult = lambda _: None
) -> list[WorkerResult]:
    """Call all workers. Results are in their order; `on_result` gets each one as it arrives."""

    async def call_one(worker: Worker) -> WorkerResult:
        result = await request_worker(worker, call)
        on_result(result)
        return result

    return await call_each(workers, call_one)


def limit_secs(configured: float) -> float:
    """A configured 0 means no limit."""
    return configured or math.inf


# Labels and checksums

LABEL_SECS: Final = 30.0


async def read_labels(
    workers: Sequence[Worker], headers: Mapping[str, str]
) -> dict[Worker, str | None]:
    """The weight version that each worker reports; None if it reports none."""
    labels: dict[Worker, str | None] = dict.fromkeys(workers)
    remaining = list(workers)
    for path in MODEL_INFO_PATHS:
        call = Call("GET", path, headers=headers, timeout_secs=LABEL_SECS)
        results = await call_all(remaining, call)
        for worker, result in zip(remaining, results, strict=True):
            labels[worker] = version_of(result.body) if result.success else None
        # A worker that could not be reached is not tried on the next path.
        remaining = [w for w, result in zip(remaining, results, strict=True) if result.refused]
    return labels


async def read_label(worker: Worker) -> tuple[str | None, bool]:
    """The weight version, and whether the worker answered; if not, it may answer later."""
    for path in MODEL_INFO_PATHS:
        (result,) = await call_all([worker], Call("GET", path, timeout_secs=LABEL_SECS))
        if not result.refused:
            return (version_of(result.body), True) if result.success else (None, False)
    return None, True


async def request_checksums(
    workers: Sequence[Worker], headers: Mapping[str, str], timeout_secs: float
) -> list[WorkerResult]:
    call = Call(
        "POST",
        WEIGHTS_CHECKER,
        CHECKSUM,
        headers={**headers, **JSON_TYPE},
        timeout_secs=timeout_secs,
        max_bytes=MAX_RESPONSE_BYTES,
    )
    return await call_all(workers, call)


async def verify_checksums(
    workers: Sequence[Worker], headers: Mapping[str, str], timeout_secs: float
) -> Verdict:
    results = await request_checksums(workers, headers, timeout_secs)
    return compare_answers({result.worker: result for result in results})


# Recovery of engines that a failed update left paused, or with an old prefix cache. A one-phase
# update that fails leaves its engine paused, even if it was resumed before (note:api-server 2.4).

RECOVERY_SECS: Final = 30.0


async def continue_generation(
    workers: Iterable[Worker], paused: Container[str], headers: Mapping[str, str]
) -> None:
    """Send "continue" to all workers except `paused`: URLs of engines that a caller paused."""
    headers = {**headers, **JSON_TYPE}
    call = Call("POST", CONTINUE.path, b"{}", headers, timeout_secs=RECOVERY_SECS)
    await call_all([worker for worker in workers if worker.url not in paused], call)


async def flush_worker_cache(worker: Worker) -> bool:
    """Flush the cache; return whether it is empty. A worker without the route has no cache."""
    result = await flush_cache(worker, {}, RECOVERY_SECS)
    return result.ok or result.status in ROUTE_ABSENT


# Reachability. Each check sends a request: an idle connection may stay open after its server is
# lost. A slow worker is never reported: only two refused connections in a row count.

REACH_INTERVAL_SECS: Final = 0.5
REACH_TIMEOUT_SECS: Final = 2.0
REFUSALS_IN_A_ROW: Final = 2
REFUSED: Final = "ConnectError"


async def wait_until_refused(worker: Worker, endpoint: str) -> str:
    """Wait until nothing listens at the worker's address; return the reason as text.

    This detects a dead worker sooner than health probes do. `endpoint`: a path that is cheap to
    request.
    """
    refused = 0
    while refused < REFUSALS_IN_A_ROW:
        await trio.sleep(REACH_INTERVAL_SECS)
        result = await call_worker(worker, Call("GET", endpoint, timeout_secs=REACH_TIMEOUT_SECS))
        refused = refused + 1 if result.error == REFUSED else 0
    return "nothing listens at its address any more"
