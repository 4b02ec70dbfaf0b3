"""Engines that an update has left standing still, or with what they had computed before it, mended
before they get requests again.

An update in one phase that fails leaves its engine paused, whoever said "continue" before that
(api-server.md 2.4). Invariant: an engine that somebody has paused stays so until somebody says
otherwise; whoever has no such route can't have been paused.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Final

from omni_proxy.admin_ops.routes import CONTINUE
from omni_proxy.fleet.worker import Worker
from omni_proxy.upstream_http.client import ROUTE_ABSENT, Call
from omni_proxy.upstream_http.engine_calls import flush_cache
from omni_proxy.weight_sync.operations.worker_calls import call_all

LIMIT_SECS: Final = 30.0


async def go_on(
    workers: Iterable[Worker], stopped: Container[str], headers: Mapping[str, str]
) -> None:
    """All of them but `stopped`, URLs of those whose pause was asked for."""
    own = {**headers, "content-type": "application/json"}
    call = Call("POST", CONTINUE.path, b"{}", own, timeout_secs=LIMIT_SECS)
    await call_all([worker for worker in workers if worker.url not in stopped], call)


async def forgets(worker: Worker) -> bool:
    """Whether what it had cached is gone, by its own word; who has no such route has no cache."""
    outcome = await flush_cache(worker, {}, LIMIT_SECS)
    return outcome.ok or outcome.status in ROUTE_ABSENT
