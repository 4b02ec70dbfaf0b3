"""Members of a trainer's group behind the proxy: each worker, and the proxy's own rank.

Contract: a call ends with a result, never with a transport error, and has no timeout of its own.
After a cancelled call the state of the member is unknown; the caller undoes it with `destroy`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import inf
from typing import Any, Final, Protocol

from omni_proxy.admin_ops.results import WorkerResult
from omni_proxy.fleet.worker import Worker
from omni_proxy.upstream_http.client import Call, call_worker
from omni_proxy.weight_sync.protocol.receive_progress import ReceiveProgress, parse_progress
from omni_proxy.weight_sync.worker_calls import post_json

INIT_PATH: Final = "/init_weights_update_group"
PROGRESS_TIMEOUT_SECS: Final = 2.0


class Member(Protocol):
    """One party of a group. It has `ranks` consecutive ranks from its `rank_offset` on.

    Bodies are forwarded as the trainer sent them, except that of `init`, which gets the member's
    ranks.
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

    async def read_progress(self) -> ReceiveProgress | None:
        """How much it has received; None if it does not report that."""


class WorkerMember:
    """A worker, over its admin routes. `headers`: the credentials of the current caller."""

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
        body = {**body, "rank_offset": rank_offset, "world_size": world_size}
        return await self.call(INIT_PATH, json.dumps(body).encode())

    async def prepare(self, body: bytes) -> WorkerResult:
        return await self.call("/prepare_weights_update", body)

    async def complete(self, body: bytes) -> WorkerResult:
        return await self.call("/complete_weights_update", body)

    async def update(self, body: bytes) -> WorkerResult:
        return await self.call("/update_weights_from_distributed", body)

    async def destroy(self, body: bytes) -> WorkerResult:
        return await self.call("/destroy_weights_update_group", body)

    async def call(self, path: str, body: bytes) -> WorkerResult:
        return await post_json(self.worker, path, body, self.headers, inf)

    async def read_progress(self) -> ReceiveProgress | None:
        call = Call("GET", "/server_info", headers=self.headers, timeout_secs=PROGRESS_TIMEOUT_SECS)
        outcome = await call_worker(self.worker, call)
        return parse_progress(outcome.json()) if outcome.ok else None
