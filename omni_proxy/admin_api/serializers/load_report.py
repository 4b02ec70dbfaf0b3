"""The loads of all workers in both dialects: sgl-model-gateway's records, and pairs of URL and
number.

Contract (note:routers 1.7): an engine's own report takes precedence; without one the in-flight
count of the proxy is shown, and in the older form -1 if the engine could not be reached.

Also merges the server info of several workers into that of one server with all their ranks.

Contract (note:two-phase 1): `tp_size` counts every rank behind the proxy. A value in which workers
differ is null; a flag that promises a feature is true only if all workers have it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import trio

from omni_proxy import __version__
from omni_proxy.shared.log_text import MASK
from omni_proxy.upstream_http.client import CallResult
from omni_proxy.weight_sync.protocol.requests import count_ranks

_COUNTS = (
    "num_running_reqs", "num_waiting_reqs", "num_waiting_uncached_tokens", "num_total_reqs",
    "num_used_tokens", "max_total_num_tokens", "max_running_requests",
)  # fmt: skip
MAX_RANKS = 1000  # of one engine
MAX_RECORDS = 10_000  # in a response, in addition to one per worker
LARGEST = 1e300
_RATES = ("token_usage", "gen_throughput", "cache_hit_rate", "utilization")


async def loads_response(results: Sequence[CallResult]) -> dict[str, object]:
    """The response of the load routes. There is a checkpoint after each worker."""
    records: list[dict[str, object]] = []
    for result in results:
        await trio.lowlevel.checkpoint()
        records += _records(result, MAX_RECORDS - len(records))
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "version": f"omni-proxy-{__version__}",
        "dp_rank_count": len(records),
        "loads": records,
        "aggregate": _aggregate(records),
        "workers": [
            {
                "worker": result.worker.url,
                "load": result.worker.in_flight if result.status is not None else -1,
            }
            for result in results
        ],
    }


def _records(result: CallResult, free_records: int) -> list[dict[str, object]]:
    """One record per data-parallel rank of the engine. A single one with the proxy's count if it
    reports none, or more ranks than `free_records` allows."""
    report = result.json() if result.ok else None
    ranks = report.get("loads") if isinstance(report, dict) else None
    if not isinstance(ranks, list) or len(ranks) > min(MAX_RANKS, free_records):
        ranks = []
    records = [rank for rank in ranks if isinstance(rank, dict)]
    return [_record(result, rank, index) for index, rank in enumerate(records or [{}])]


def _record(result: CallResult, report: Mapping[str, object], index: int) -> dict[str, object]:
    running = result.worker.in_flight
    counted: dict[str, object] = {
        "num_running_reqs": running, "num_total_reqs": running,
    }  # fmt: skip
    record: dict[str, object] = {
        "worker": result.worker.url,
        "worker_type": result.worker.role,
        "dp_rank": rank if isinstance(rank := report.get("dp_rank"), int) else index,
        "source": "engine" if report else "proxy",
    }
    for name in _COUNTS:
        record[name] = _number(report.get(name, counted.get(name, 0)))
    for name in _RATES:
        record[name] = float(_number(report.get(name, 0.0)))
    return record


def _aggregate(records: list[dict[str, object]]) -> dict[str, object]:
    def total(name: str) -> float:
        return sum(_number(record[name]) for record in records)

    def mean(name: str) -> float:
        return round(total(name) / len(records), 6) if records else 0.0

    return {
        "total_running_reqs": total("num_running_reqs"),
        "total_waiting_reqs": total("num_waiting_reqs"),
        "total_reqs": total("num_total_reqs"),
        "avg_token_usage": mean("token_usage"),
        "avg_throughput": mean("gen_throughput"),
        "avg_utilization": mean("utilization"),
    }


def _number(value: object) -> float:
    """The number; 0 for other values and for JSON numbers that a float can't represent."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0
    return value if -LARGEST < value < LARGEST else 0


# Secrets among SGLang's arguments: they are masked, because the route needs no key.
SECRET_FIELDS: Final = frozenset(
    ("api_key", "admin_api_key", "ssl_keyfile_password", "hf_token", "password", "secret")
)
MAX_FIELDS = 1000  # of one worker; an engine has some 400 arguments
SUMMED = ("tp_size", "max_total_num_tokens", "max_running_requests")
# True if it is true for one worker: clients then take more care.
TRUE_IF_ANY = ("radix_cache_enabled", "fp8_kv_cache_enabled", "fp8_kv_cache_requires_postprocess",
        "fp8_kv_cache_static_scales")  # fmt: skip
# After an update from the proxy's own files a worker reports their paths, which are private.
PATHS = ("model_path", "tokenizer_path")
OWN = ("host", "port", "instance", "instance_id", "start_time", "started_at", "internal_states")


async def merge_server_info(
    results: Sequence[CallResult], is_ours: Callable[[str], bool] = lambda _: False
) -> dict[str, Any] | None:
    """The merged info, whose `workers` has each worker's own reply; None if no worker replied.

    There is a checkpoint before each field. `is_ours(path)`: whether it is the path of a stored
    version, which is replaced by the model's name.
    """
    infos_by_url = await _reported_infos(results)
    if not infos_by_url:
        return None
    infos = [_without(info, is_ours) for info in infos_by_url.values()]
    merged: dict[str, Any] = {}
    for name in dict.fromkeys(name for info in infos for name in info):
        if name not in OWN:
            await trio.lowlevel.checkpoint()
            merged[name] = _merged(name, infos)
    for name in PATHS:
        merged.setdefault(name, merged.get("served_model_name"))
    merged["tp_size"] = sum(count_ranks(info) for info in infos)
    merged["internal_states"] = [state for info in infos for state in _states(info)]
    merged["workers"] = [
        {
            "url": result.worker.url,
            "info": infos_by_url.get(result.worker.url),
            "error": None if result.ok else result.failure,
        }
        for result in results
    ]
    return merged


async def _reported_infos(results: Sequence[CallResult]) -> dict[str, dict[str, Any]]:
    """The replies that are within the size limit, by worker URL."""
    infos_by_url = {}
    for result in results:
        await trio.lowlevel.checkpoint()
        info = result.json() if result.ok else None
        if isinstance(info, dict) and len(info) <= MAX_FIELDS:
            infos_by_url[result.worker.url] = _without_secrets(info)
    return infos_by_url


def _without_secrets(info: dict[str, Any]) -> dict[str, Any]:
    """The info with secrets masked, also in its internal states: SGLang reports all arguments of
    the engine, and repeats them in each state."""
    if states := _states(info):
        info["internal_states"] = [
            _masked(state) if isinstance(state, dict) else state for state in states
        ]
    return _masked(info)


def _masked(fields: dict[str, Any]) -> dict[str, Any]:
    secrets = {name: MASK for name in SECRET_FIELDS & fields.keys() if fields[name]}
    return {**fields, **secrets} if secrets else fields


def _without(info: Mapping[str, Any], is_ours: Callable[[str], bool]) -> dict[str, Any]:
    ours = [name for name in PATHS if isinstance(path := info.get(name), str) and is_ours(path)]
    return {name: value for name, value in info.items() if name not in ours}


def _merged(name: str, infos: Sequence[Mapping[str, Any]]) -> Any:
    values = [info.get(name) for info in infos if name in info or name not in PATHS]
    if name in TRUE_IF_ANY and any(value is True for value in values):
        return True
    if name in SUMMED and all(isinstance(value, int | float) for value in values):
        return sum(values)
    if all(isinstance(value, bool) for value in values):
        return name not in TRUE_IF_ANY and all(values)
    return values[0] if all(value == values[0] for value in values) else None


def _states(info: Mapping[str, Any]) -> list[Any]:
    states = info.get("internal_states")
    return states if isinstance(states, list) else []
