"""Polls the load of engines every `[routing] load_poll_secs`.

SGLang and the proxy's replica report it in /v1/loads; vLLM, and SGLang with metrics, in /metrics;
TensorRT-LLM in /prometheus/metrics. After the first report only the page that had it is read.
Invariant: a page without a load causes no report; a long page is parsed in pieces with checkpoints.
The time of a report is the start of the call, since its values may be that old.
Sources: features.md 10, captures of vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.health.engine_pages import EnginePage, Fetch, PageReader, could_be_asked
from omni_proxy.upstream_http.client import CallResult
from omni_proxy.wire.load_report import (
    LoadReport,
    add_loads,
    loads_of_metrics,
    loads_of_records,
    pieces_of,
)

TIMEOUT_SECS: Final = 5.0
LOADS: Final = EnginePage(("/v1/loads",), TIMEOUT_SECS, 1024 * 1024)
LOAD_METRICS: Final = EnginePage(("/metrics",), TIMEOUT_SECS, 8 * 1024 * 1024)
TRTLLM_METRICS: Final = EnginePage(("/prometheus/metrics",), TIMEOUT_SECS, 8 * 1024 * 1024)
PAGES: Final = (LOADS, LOAD_METRICS, TRTLLM_METRICS)
SILENT_SECS: Final = 30.0  # between two polls of an engine that reports no load


class EngineLoadReader(PageReader):
    """`poll_secs`: returns the configured interval. `clock`: that of `fleet.loads`."""

    def __init__(
        self, fleet: Fleet, poll_secs: Callable[[], float], clock: Callable[[], float]
    ) -> None:
        self._fleet = fleet
        self._poll_secs = poll_secs
        self._clock = clock
        self._pages: dict[Worker, EnginePage] = {}  # the page that has a load

    def wants(self, worker: Worker) -> bool:
        return self._poll_secs() > 0

    def refresh_secs_of(self, worker: Worker) -> float:
        secs = self._poll_secs()
        return secs if worker in self._pages else max(secs, SILENT_SECS)

    def end(self, worker: Worker) -> None:
        self._pages.pop(worker, None)

    async def read(self, worker: Worker, fetch: Fetch) -> bool:
        known = self._pages.get(worker)
        answered = True
        for page in PAGES if known is None else (known,):
            at = self._clock()
            result = await fetch(page)
            loads = await _loads_of(page, result) if result.ok else {}
            if loads:
                self._pages[worker] = page
                self._fleet.loads.report_engines(worker, loads, at)
                return True
            answered &= could_be_asked(result)
        self._pages.pop(worker, None)
        return answered and known is None


async def _loads_of(page: EnginePage, result: CallResult) -> dict[int, LoadReport]:
    if page is LOADS:
        return loads_of_records(result.json())
    loads: dict[int, LoadReport] = {}
    for piece in pieces_of(result.body):
        await trio.lowlevel.checkpoint()
        add_loads(loads, loads_of_metrics(piece))
    return loads
