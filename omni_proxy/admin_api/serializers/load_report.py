"""The loads of all workers in both dialects: sgl-model-gateway's records, and pairs of URL and
number.

Contract (routers.md 1.7): an engine's own report wins; for one without a report the proxy's in-
flight count is shown, and -1 in the older form if it could not be reached at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

import trio

from omni_proxy import __version__
from omni_proxy.upstream_http.client import CallResult

_COUNTS = (
    "num_running_reqs", "num_waiting_reqs", "num_waiting_uncached_tokens", "num_total_reqs",
    "num_used_tokens", "max_total_num_tokens", "max_running_requests",
)  # fmt: skip
MAX_RANKS = 1000  # of one engine
MAX_RECORDS = 10_000  # in an answer, beside one per worker: some 3 MB
LARGEST = 1e300
_RATES = ("token_usage", "gen_throughput", "cache_hit_rate", "utilization")


async def loads_answer(outcomes: Iterable[CallResult]) -> dict[str, object]:
    """Others have their turn between two workers."""
    results = list(outcomes)
    records: list[dict[str, object]] = []
    for outcome in results:
        await trio.lowlevel.checkpoint()
        records += _records(outcome, MAX_RECORDS - len(records))
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "version": f"omni-proxy-{__version__}",
        "dp_rank_count": len(records),
        "loads": records,
        "aggregate": _aggregate(records),
        "workers": [
            {"worker": o.worker.url, "load": o.worker.in_flight if o.status is not None else -1}
            for o in results
        ],
    }


def _records(outcome: CallResult, room: int) -> list[dict[str, object]]:
    """One per data-parallel rank of the engine; one of our own counting where it tells nothing,
    or of more ranks than there is `room` for."""
    report = outcome.json() if outcome.ok else None
    ranks = report.get("loads") if isinstance(report, dict) else None
    if not isinstance(ranks, list) or len(ranks) > min(MAX_RANKS, room):
        ranks = []
    found = [rank for rank in ranks if isinstance(rank, dict)]
    return [_record(outcome, rank, index) for index, rank in enumerate(found or [{}])]


def _record(outcome: CallResult, report: Mapping[str, object], index: int) -> dict[str, object]:
    running = outcome.worker.in_flight
    counted: dict[str, object] = {
        "num_running_reqs": running, "num_total_reqs": running,
    }  # fmt: skip
    record: dict[str, object] = {
        "worker": outcome.worker.url,
        "worker_type": "regular",
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
    """JSON can spell numbers that no float holds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0
    return value if -LARGEST < value < LARGEST else 0
