"""A vLLM engine as a member of its trainer's weight transfer, over vLLM's own routes.

The group is the engines' and the trainer's: the proxy is no rank of it, and only gives each member
its ranks. Invariant: an engine that leaves keeps nothing of an update that was not finished. vLLM
0.32.0 collects the tensors of a layer until it has as many bytes as the layer takes, and keeps them
after a failed chunk: every later update fails on them. One that is started and finished empties
what was collected, and the next one succeeds (both run). What the engine holds in between is
unknown, and the caller has marked it so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from omni_proxy.admin_ops.results import WorkerResult
from omni_proxy.admin_ops.routes import (
    FINISH_UPDATE,
    START_DRAFT_UPDATE,
    START_UPDATE,
    TRANSFER_INIT,
    TRANSFER_SHUTDOWN,
)
from omni_proxy.upstream_http.client import ROUTE_ABSENT
from omni_proxy.weight_sync.protocol.receive_progress import ReceiveProgress
from omni_proxy.weight_sync.protocol.requests import RankRange
from omni_proxy.weight_sync.protocol.transfer_requests import TransferInit, TransferUpdate
from omni_proxy.weight_sync.session.member import WorkerMember

ACTIVE: Final = "already active"  # how vLLM words that an update is open
STARTS: Final = (START_UPDATE, START_DRAFT_UPDATE)


class TransferMember(WorkerMember):
    """`ranks_at`: its ranks, once they are assigned. `opened`: an update may not be finished."""

    ranks_at: RankRange | None = None
    opened = False

    async def join(self, request: TransferInit, ranks: RankRange) -> WorkerResult:
        self.ranks_at = ranks
        return await self.call(TRANSFER_INIT, request.body_for(ranks.offset))

    async def receive(self, path: str, request: TransferUpdate, first_rank: int) -> WorkerResult:
        assert self.ranks_at is not None
        return await self.call(path, request.body_for(self.ranks_at, first_rank))

    async def call(self, path: str, body: bytes) -> WorkerResult:
        result = await super().call(path, body)
        if path in STARTS:
            self.opened = result.success or result.status is None or ACTIVE in result.why
        elif path == FINISH_UPDATE and result.success:
            self.opened = False
        return result

    async def destroy(self, body: bytes) -> WorkerResult:
        """Leave. An engine older than the route has nothing to leave."""
        if self.opened:
            await self.call(START_UPDATE, b"")  # refused where it is still open
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
