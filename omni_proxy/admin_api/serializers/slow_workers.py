"""Finds workers that are slower than the others of their model, and the likely cause.

The only implementation of this rule: the feed has its results, which the dashboard, `omni-proxy
status` and `top` show. Pure: it reads rows of the feed. Cost: one sort of each group's times.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple, TypeAlias

SLOW_FACTOR: Final = 2.0  # time to first chunk, as a multiple of the others'
SLOW_MS: Final = 20.0  # and at least this much longer: otherwise 2 ms against 1 ms would be slow
# Time between two chunks. It is measured in buckets: adjacent buckets never differ by both limits.
SLOW_GAP_FACTOR: Final = 3.0
SLOW_GAP_MS: Final = 20.0
SLOW_ANSWERS: Final = 5  # responses in the last minute; a median of fewer is not meaningful
FULL_KV: Final = 0.9  # share of the KV cache in use above which an engine preempts requests
MORE_REQUESTS: Final = 1.3
FEWER_CACHED: Final = 0.2
# Rates are compared only between workers that served for the same part of the last minute.
SAME_SECS: Final = 3.0
MINUTE_SECS: Final = 60.0

Row: TypeAlias = Mapping[str, Any]


class Slowness(NamedTuple):
    """`times`: the worker's time as a multiple of the others'. `text`: what is slow, and why."""

    times: float
    text: str


def slow_workers(rows: Sequence[Row], at: float) -> dict[str, Slowness]:
    """The slow workers by id, also those out of rotation. `at`: Unix time of the rows."""
    firsts = _others_median_ms(rows, lambda row: (row.get("model"), row.get("first_p50_ms")))
    # A prefill worker streams nothing to clients: its legs are not comparable with others.
    gaps = _others_median_ms(rows, lambda row: ((row.get("model"), row.get("role")), _gap(row)))
    slow = {}
    for row in rows:
        name, reasons, times = row["id"], [], 0.0
        own, median = row.get("first_p50_ms") or 0.0, firsts.get(name)
        if median is not None and _is_slow(own, median, SLOW_FACTOR, SLOW_MS):
            times = own / max(median, 0.1)
            reasons.append(f"first chunk after {_millis(own)}, the others' after {_millis(median)}")
        own, median = _gap(row) or 0.0, gaps.get(name)
        if median is not None and _is_slow(own, median, SLOW_GAP_FACTOR, SLOW_GAP_MS):
            times = max(times, own / max(median, 0.1))
            reasons.append(f"{_millis(own)} between two chunks, the others' {_millis(median)}")
        if reasons:
            text = "; ".join((*reasons, *_causes(row, rows, at)))
            slow[name] = Slowness(round(times, 1), text)
    return slow


def _gap(row: Row) -> Any:
    return (row.get("minute") or {}).get("between_p50_ms")


def _others_median_ms(
    rows: Sequence[Row], measure: Callable[[Row], tuple[object, float | None]]
) -> dict[str, float]:
    """The median time of the other workers of its group, by worker id. `measure`: a row's group and
    its time, None without one."""
    measured: defaultdict[object, list[tuple[str, float]]] = defaultdict(list)
    for row in rows:
        group, millis = measure(row)
        if millis is not None and row.get("answers", 0) >= SLOW_ANSWERS:
            measured[group].append((row["id"], millis))
    median = {}
    for members in measured.values():
        if len(members) < 2:
            continue
        times = sorted(millis for _, millis in members)
        for worker_id, millis in members:
            median[worker_id] = _median_without(times, bisect_left(times, millis))
    return median


def _median_without(ordered: Sequence[float], index: int) -> float:
    """The median without the element at `index`; `ordered` has at least two."""
    count = len(ordered) - 1
    middle = ((count - 1) // 2, count // 2)
    return sum(ordered[rank + (rank >= index)] for rank in middle) / 2


def _median(values: Iterable[float]) -> float:
    """The median. The standard library's would add fractions and decimals to the binary."""
    ordered = sorted(values)
    return _median_without(ordered + ordered[-1:], len(ordered))


def _is_slow(own: float, median: float, factor: float, min_difference: float) -> bool:
    return own >= factor * median and own - median >= min_difference


def _causes(row: Row, rows: Sequence[Row], at: float) -> Iterator[str]:
    """Likely causes: its engine's load report, and how its requests differ from the others'."""
    load = row.get("engine_load") or {}
    others = [
        other
        for other in rows
        if other is not row
        and other.get("routable")
        and not other.get("paused")
        and other.get("model") == row.get("model")
    ]
    explained = False
    if load.get("waiting"):
        explained = True
        yield f"{load['waiting']:g} wait in its engine"
    if (load.get("kv_usage") or 0.0) >= FULL_KV:
        explained = True
        yield f"its KV cache is {load['kv_usage']:.0%} full"
    present = _present_secs(row, at)
    beside = [other for other in others if abs(_present_secs(other, at) - present) <= SAME_SECS]
    median = _median(_rate(other) for other in beside) * row.get("weight", 1) if beside else 0.0
    if beside and _rate(row) * row.get("weight", 1) > MORE_REQUESTS * median:
        explained = True
        yield f"it gets {_all(row):.1f} requests/s, the others {median:.1f}"
    own = _cached(row)
    cached = [share for other in others if (share := _cached(other)) is not None]
    if own is not None and cached and own < _median(cached) - FEWER_CACHED:
        explained = True
        yield f"{own:.0%} of its prompts are cached, of the others' {_median(cached):.0%}"
    if not explained and beside:
        yield "it gets no more requests than they do, so its machine or engine is slow"
    elif not explained and others:
        yield "their requests can't be compared yet: they have not served for as long"


def _all(row: Row) -> float:
    """Requests per second, through all proxies of a cluster."""
    return float(row.get("rate", 0.0) + (row.get("elsewhere") or {}).get("requests_per_sec", 0.0))


def _rate(row: Row) -> float:
    return _all(row) / float(row.get("weight", 1))


def _cached(row: Row) -> float | None:
    share = (row.get("minute") or {}).get("cache_hit_ratio")
    return None if share is None else float(share)


def _present_secs(row: Row, at: float) -> float:
    """The part of the last minute for which the worker was in its current state."""
    since = row.get("state_since") or row.get("since")
    if not since:
        return MINUTE_SECS
    return min(MINUTE_SECS, at - datetime.fromisoformat(since).timestamp())


def _millis(value: float) -> str:
    """In the form that the screens use."""
    if value < 10:
        return f"{value:.1f} ms"
    return f"{value:.0f} ms" if value < 1000 else f"{value / 1000:.1f} s"
