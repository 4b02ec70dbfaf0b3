"""The same control call to many workers at once, and what each made of it.

Invariant: one outcome per worker, in the order they were given. One that is slow, broken or talks
too much costs its own outcome and nobody else's. No health, no counter changes here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import httpx
import trio

from omni_proxy.fleet.worker import Worker
from omni_proxy.upstream_http.client import Call, build, open_client, read_bounded
from omni_proxy.wire.bounded_json import read_json

AT_ONCE = 64  # connections of one broadcast; the others wait for a free one
_FAULTS = (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError)


@dataclass(frozen=True, slots=True)
class CallResult:
    """One worker's answer; without one `status` is None and `error` says why."""

    worker: Worker
    status: int | None
    body: bytes
    error: str
    secs: float
    content_type: str = ""
    detail: str = ""  # the fault's own words, beside its kind in `error`

    @property
    def ok(self) -> bool:
        return self.status is not None and 200 <= self.status < 300 and not self.error

    @property
    def why(self) -> str:
        """Why it is no success, in a few words."""
        return self.error or f"status={self.status}"

    def parsed(self) -> object:
        """The body as JSON, None where it is none, or has more values than are read at once."""
        try:
            return read_json(self.body)
        except ValueError:
            return None


async def broadcast(workers: Iterable[Worker], call: Call) -> list[CallResult]:
    """Ask all of them in parallel. Never raises for what a worker does."""
    asked = list(workers)
    outcomes: dict[Worker, CallResult] = {}
    room = trio.CapacityLimiter(AT_ONCE)

    async def one(worker: Worker) -> None:
        async with room:
            outcomes[worker] = await ask(worker, call)

    async with trio.open_nursery() as nursery:
        for worker in asked:
            nursery.start_soon(one, worker)
    return [outcomes[worker] for worker in asked]


async def ask(worker: Worker, call: Call) -> CallResult:
    """One worker's outcome. Never raises for what the worker does."""
    await trio.lowlevel.checkpoint()  # some faults come at once; callers ask again
    began = trio.current_time()
    status, body, error, content_type = None, b"", "ReadTimeout", ""
    detail = ""
    with trio.move_on_after(call.timeout_secs):
        try:
            status, found, content_type = await _exchange(worker, call)
            error = "" if found is not None else f"answer of more than {call.max_bytes} bytes"
            body = found or b""
        except _FAULTS as failure:
            error, detail = type(failure).__name__, str(failure)
    secs = round(trio.current_time() - began, 6)
    return CallResult(worker, status, body, error, secs, content_type, detail)


async def _exchange(worker: Worker, call: Call) -> tuple[int, bytes | None, str]:
    async with open_client(worker) as client:
        request = build(client, worker, worker.address, call)
        response = await client.send(request, stream=True)
        try:
            body = await read_bounded(response, call.max_bytes)
        finally:
            await response.aclose()
    return response.status_code, body, response.headers.get("content-type", "")
