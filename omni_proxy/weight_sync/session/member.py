"""Who takes part in a trainer's group behind us: each worker, and perhaps a rank of our own.

Contract: a call ends with an answer, never with an error of the transport; it has no deadline of
its own. Whoever cancels it learns nothing more, and undoes it with `destroy`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, Protocol

from omni_proxy.admin_ops.results import WorkerResult, parsed
from omni_proxy.fleet.worker import Worker
from omni_proxy.upstream_http.client import Call, call_worker
from omni_proxy.weight_sync.operations.worker_calls import ANSWER_BYTES
from omni_proxy.weight_sync.protocol.receive_progress import ReceiveProgress, receiving_of

NO_LIMIT = float("inf")
INIT_PATH = "/init_weights_update_group"
LOOK_SECS: Final = 2.0


class Member(Protocol):
    """One party of a group. `ranks` follow each other from its `rank_offset` on.

    Bodies are the trainer's own bytes, except that of `init`, whose ranks are each member's own.
    """

    @property
    def name(self) -> str:
        """A worker's URL, or "proxy"."""

    @property
    def ranks(self) -> int: ...

    async def init(
        self, body: Mapping[str, Any], rank_offset: int, world_size: int
    ) -> WorkerResult: ...

    async def prepare(self, body: bytes) -> WorkerResult: ...

    async def complete(self, body: bytes) -> WorkerResult: ...

    async def update(self, body: bytes) -> WorkerResult: ...

    async def destroy(self, body: bytes) -> WorkerResult: ...

    async def look(self) -> ReceiveProgress | None:
        """How far it has come, soon; None where it does not tell."""


class WorkerMember:
    """A worker, over its control routes. `headers`: those of the caller, of each call anew."""

    def __init__(self, worker: Worker, ranks: int) -> None:
        self.worker = worker
        self.ranks = ranks
        self.headers: dict[str, str] = {}

    @property
    def name(self) -> str:
        return self.worker.url

    async def init(
        self, body: Mapping[str, Any], rank_offset: int, world_size: int
    ) -> WorkerResult:
        own = {**body, "rank_offset": rank_offset, "world_size": world_size}
        return await self.call(INIT_PATH, json.dumps(own).encode())

    async def prepare(self, body: bytes) -> WorkerResult:
        return await self.call("/prepare_weights_update", body)

    async def complete(self, body: bytes) -> WorkerResult:
        return await self.call("/complete_weights_update", body)

    async def update(self, body: bytes) -> WorkerResult:
        return await self.call("/update_weights_from_distributed", body)

    async def destroy(self, body: bytes) -> WorkerResult:
        return await self.call("/destroy_weights_update_group", body)

    async def call(self, path: str, body: bytes) -> WorkerResult:
        headers = {**self.headers, "content-type": "application/json"}
        request = Call("POST", path, body, headers, timeout_secs=NO_LIMIT, max_bytes=ANSWER_BYTES)
        outcome = await call_worker(self.worker, request)
        body_of = parsed(outcome.body)
        return WorkerResult(self.name, outcome.status, body_of, outcome.error, outcome.secs)

    async def look(self) -> ReceiveProgress | None:
        call = Call("GET", "/server_info", headers=self.headers, timeout_secs=LOOK_SECS)
        outcome = await call_worker(self.worker, call)
        return receiving_of(outcome.json()) if outcome.ok else None
