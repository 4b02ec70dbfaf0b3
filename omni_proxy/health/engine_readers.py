"""What engines report about themselves: role and bootstrap port, ranks, load, LoRA adapters.

Invariants: while the fleet has prefill or decode workers, a worker without a role gets no request
until its engine has been called once; it counts as regular if the call fails. With `ranks = "auto"`
and with `loras = "auto"` a failed read keeps the previous value. A page without a load causes no
report; a long page is parsed in pieces with checkpoints. The time of a load report is the start of
the call. Adapters are read again after a call that loads or unloads one, and every half minute.
Sources: note:features 2.1, 8 and 10, captures of vLLM 0.32.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Final, TypeGuard

import trio

from omni_proxy.fleet.cordon_reasons import ROLE_CORDON
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import ReportedRole, Worker, adapter_names
from omni_proxy.health.engine_pages import (
    METRICS,
    MODELS,
    SERVER_INFO,
    EnginePage,
    Fetch,
    PageReader,
    was_reached,
)
from omni_proxy.shared.origins import MAX_PORT
from omni_proxy.upstream_http.client import CallResult
from omni_proxy.wire.bounded_json import TooManyValues, read_json
from omni_proxy.wire.load_report import (
    MAX_RANKS,
    LoadReport,
    add_loads,
    loads_of_metrics,
    loads_of_records,
    pieces_of,
)

_log = logging.getLogger(__name__)


class EngineRoles(PageReader):
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def wants(self, worker: Worker) -> bool:
        return not worker.configured_role or worker.needs_bootstrap_port

    def begin(self, worker: Worker, *, first: bool) -> None:
        if first and self._fleet.has_pools and not worker.configured_role:
            self._fleet.cordon(worker, ROLE_CORDON)

    def end(self, worker: Worker) -> None:
        if ROLE_CORDON in worker.cordon_reasons:
            self._fleet.uncordon(worker, ROLE_CORDON)

    async def read(self, worker: Worker, fetch: Fetch) -> bool:
        result = await fetch(SERVER_INFO)
        if not was_reached(result):
            self.end(worker)
            return False
        role = role_of_info(result)
        if role != worker.reported_role:
            _log.info("worker_role worker=%s role=%s", worker.url, role or "regular")
        self._fleet.report_bootstrap_port(worker, bootstrap_port_of_info(result))
        self._fleet.report_role(worker, role)
        return True


def role_of_info(result: CallResult) -> ReportedRole:
    """SGLang's `disaggregation_mode`; "" if it is null, "null" or missing."""
    mode = _field(result, "disaggregation_mode")
    if mode == "prefill":
        return "prefill"
    return "decode" if mode == "decode" else ""


def bootstrap_port_of_info(result: CallResult) -> int | None:
    """SGLang's `disaggregation_bootstrap_port`; None if it is missing or not a port."""
    port = _field(result, "disaggregation_bootstrap_port")
    if not isinstance(port, int) or isinstance(port, bool):
        return None
    return port if 1 <= port <= MAX_PORT else None


def _field(result: CallResult, name: str) -> object:
    body = result.json() if result.ok else None
    return body.get(name) if isinstance(body, dict) else None


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
    """The engine's number of ranks; 1 if it reports none, None if it did not answer."""
    info = await fetch(SERVER_INFO)
    ranks = ranks_of_info(info) if info.ok else None
    if ranks is not None:
        return ranks
    metrics = await fetch(METRICS)
    if metrics.ok:
        return ranks_of_metrics(metrics.body) or 1
    return 1 if was_reached(metrics) and was_reached(info) else None


def ranks_of_info(result: CallResult) -> int | None:
    """SGLang's `dp_size`, or that of vLLM's configuration; None if there is neither."""
    body = result.json()
    if not isinstance(body, dict):
        return None
    count = body.get("dp_size")
    config = body.get("vllm_config")
    parallel = config.get("parallel_config") if isinstance(config, dict) else None
    if count is None and isinstance(parallel, dict):
        count = parallel.get("data_parallel_size")
    return count if isinstance(count, int) and 1 <= count <= MAX_RANKS else None


def ranks_of_metrics(text: bytes) -> int:
    """The number of vLLM's engines behind the URL, each of which has a series; 0 without any."""
    return min(len(set(_ENGINE_SERIES.findall(text))), MAX_RANKS)


TIMEOUT_SECS: Final = 5.0
LOADS: Final = EnginePage(("/v1/loads",), TIMEOUT_SECS, 1024 * 1024)
LOAD_METRICS: Final = EnginePage(("/metrics",), TIMEOUT_SECS, 8 * 1024 * 1024)
TRTLLM_METRICS: Final = EnginePage(("/prometheus/metrics",), TIMEOUT_SECS, 8 * 1024 * 1024)
PAGES: Final = (LOADS, LOAD_METRICS, TRTLLM_METRICS)
SILENT_SECS: Final = 30.0  # between two polls of an engine that reports no load


class EngineLoadReader(PageReader):
    """`poll_secs`: returns the configured interval. `clock`: that of `fleet.loads`.

    SGLang and the proxy's replica report their load in /v1/loads; vLLM, and SGLang with metrics, in
    /metrics; TensorRT-LLM in /prometheus/metrics. After the first report only that page is read.
    """

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
            asked_at = self._clock()
            result = await fetch(page)
            loads = await _loads_of(page, result) if result.ok else {}
            if loads:
                self._pages[worker] = page
                self._fleet.loads.report_engines(worker, loads, asked_at)
                return True
            answered &= was_reached(result)
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


MAX_ADAPTERS: Final = 1000  # of one worker
MAX_NAME_CHARS: Final = 1024
REFRESH_SECS: Final = 30.0  # of the adapters


class AdapterList(PageReader):
    """Both engines list an adapter with its base model as `parent`. vLLM takes the adapter as the
    model, SGLang only `model:adapter` or `lora_path`."""

    refresh_secs = REFRESH_SECS

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def wants(self, worker: Worker) -> bool:
        return worker.loras == "auto"

    async def read(self, worker: Worker, fetch: Fetch) -> bool:
        names = reported_adapters(await fetch(MODELS), worker.model)
        if names is None:
            return False
        if names != worker.reported_adapters:
            shown = ",".join(name for name in names if not name.startswith(":")) or "none"
            _log.info("worker_adapters_reported worker=%s adapters=%s", worker.url, shown)
            self._fleet.report_adapters(worker, names)
        return True


def reported_adapters(result: CallResult, model: str | None) -> tuple[str, ...] | None:
    """The names by which requests may use the adapters in a worker's list; None without a list.
    `model`: the worker's configured model."""
    if not result.ok:
        return None
    try:
        body = read_json(result.body)
    except (TooManyValues, ValueError):
        return None
    cards = body.get("data") if isinstance(body, dict) else None
    if not isinstance(cards, list):
        return None
    names: dict[str, None] = {}
    for card in cards[:MAX_ADAPTERS]:
        if not isinstance(card, dict):
            continue
        lora, parent = card.get("id"), card.get("parent")
        if _is_name(lora) and _is_name(parent):
            bare = card.get("owned_by") != "sglang"
            names.update(dict.fromkeys(adapter_names(lora, (parent, model), bare=bare)))
    return tuple(names)


def _is_name(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME_CHARS and value.isprintable()
