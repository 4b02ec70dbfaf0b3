"""Reads how many data-parallel ranks an engine has, for workers with `ranks = "auto"`.

Invariant: until an engine has said it, and while it can't be asked, the number that is known stays
(at first 1: the engine spreads its requests itself).
Sources: features.md 8 (`dp_size` of SGLang's /server_info), captures of vLLM 0.32 (one series for
each engine in /metrics; /server_info in development mode only).
"""

from __future__ import annotations

import logging
import re
from typing import Final

from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.health.engine_pages import (
    METRICS,
    SERVER_INFO,
    Fetch,
    PageReader,
    could_be_asked,
)
from omni_proxy.upstream_http.client import CallResult

_log = logging.getLogger(__name__)

MAX_RANKS: Final = 1024  # as the key `ranks` takes
_ENGINE_SERIES: Final = re.compile(
    rb'^vllm:num_requests_running\{[^}]*engine="(\d+)"', re.MULTILINE
)


class EngineRanks(PageReader):
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def wants(self, worker: Worker) -> bool:
        return worker.ranks == "auto"

    async def read(self, worker: Worker, fetch: Fetch) -> bool:
        ranks = await _engine_ranks(fetch)
        if ranks is None:
            return False
        if ranks != worker.reported_ranks:
            _log.info("worker_ranks_reported worker=%s ranks=%d", worker.url, ranks)
        self._fleet.report_ranks(worker, ranks)
        return True


async def _engine_ranks(fetch: Fetch) -> int | None:
    """What the engine says; 1 if it says nothing of ranks, None if it could not be asked."""
    info = await fetch(SERVER_INFO)
    ranks = ranks_of_info(info) if info.ok else None
    if ranks is not None:
        return ranks
    metrics = await fetch(METRICS)
    if metrics.ok:
        return ranks_of_metrics(metrics.body) or 1
    return 1 if could_be_asked(metrics) and could_be_asked(info) else None


def ranks_of_info(result: CallResult) -> int | None:
    """SGLang's `dp_size`, or that of vLLM's configuration; None if there is neither."""
    body = result.json()
    if not isinstance(body, dict):
        return None
    found = body.get("dp_size")
    config = body.get("vllm_config")
    parallel = config.get("parallel_config") if isinstance(config, dict) else None
    if found is None and isinstance(parallel, dict):
        found = parallel.get("data_parallel_size")
    return found if isinstance(found, int) and 1 <= found <= MAX_RANKS else None


def ranks_of_metrics(text: bytes) -> int:
    """vLLM has a series for each engine behind the URL; 0 without any."""
    return min(len(set(_ENGINE_SERIES.findall(text))), MAX_RANKS)
