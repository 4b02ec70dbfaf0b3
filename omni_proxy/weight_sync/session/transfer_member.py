"""A vLLM engine as a member of its trainer's weight transfer, over vLLM's own routes.

The group is the engines' and the trainer's: the proxy is no rank of it, and only gives each member
its ranks. Invariant: leaving works whatever state the engine is in. vLLM refuses to release a
trainer while an update is open, and a new update as long as one is: so an open one is finished
first. What it then holds is unknown, and the caller has marked it so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from omni_proxy.admin_ops.results import WorkerResult
from omni_proxy.admin_ops.routes import FINISH_UPDATE, TRANSFER_INIT, TRANSFER_SHUTDOWN
from omni_proxy.upstream_http.client import ROUTE_ABSENT
from omni_proxy.weight_sync.protocol.receive_progress import ReceiveProgress
from omni_proxy.weight_sync.protocol.requests import RankRange
from omni_proxy.weight_sync.protocol.transfer_requests import TransferInit, TransferUpdate
from omni_proxy.weight_sync.session.member import WorkerMember

OPEN_UPDATE: Final = "during a weight update"  # how vLLM words that it keeps its trainer


class TransferMember(WorkerMember):
    """`ranks_at`: its ranks, once they are assigned."""

    ranks_at: RankRange | None = None

    async def join(self, request: TransferInit, ranks: RankRange) -> WorkerResult:
        self.ranks_at = ranks
        return await self.call(TRANSFER_INIT, request.body_for(ranks.offset))

    async def receive(self, path: str, request: TransferUpdate, first_rank: int) -> WorkerResult:
        assert self.ranks_at is not None
        return await self.call(path, request.body_for(self.ranks_at, first_rank))

    async def destroy(self, body: bytes) -> WorkerResult:
        """Leave. An engine older than the route has nothing to leave."""
        result = await self.call(TRANSFER_SHUTDOWN, b"")
        if not result.success and OPEN_UPDATE in result.why:
            await self.call(FINISH_UPDATE, b"")
            result = await self.call(TRANSFER_SHUTDOWN, b"")
        if result.status in ROUTE_ABSENT:
            return WorkerResult(self.name, 200, {"success": True, "message": "no such route"})
        return result

    async def init(
        self, body: Mapping[str, Any], rank_offset: int, world_size: int
    ) -> WorkerResult:
        return self._not_of_this_kind()

    async def prepare(self, body: bytes) -> WorkerResult:
        return self._not_of_this_kind()

    async def complete(self, body: bytes) -> WorkerResult:
        return self._not_of_this_kind()

    async def update(self, body: bytes) -> WorkerResult:
        return self._not_of_this_kind()

    async def read_progress(self) -> ReceiveProgress | None:
        return None

    def _not_of_this_kind(self) -> WorkerResult:
        return WorkerResult(self.name, None, error="its group is of vLLM's kind")
