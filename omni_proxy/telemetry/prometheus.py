"""The meters and the fleet as metric families (docs/operations.md tells what each one means).

Invariant: each label is bounded by the route table, the fleet, or a list in this program. A large
family comes in parts, one right after the other, so that whoever takes them may do other things in
between; what is counted meanwhile does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from prometheus_client import Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.telemetry.histogram import FINE, FIRST_CHUNK, Histogram
from omni_proxy.telemetry.metrics import Metrics
from omni_proxy.telemetry.otel import standard
from omni_proxy.telemetry.series import Cell, Phases

PART: Final = 200  # samples: about a millisecond to make
BY_CELL: Final = ("route", "worker")

Labels = Sequence[str]
Cells = list[tuple[tuple[str, str], Cell]]


def one(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"omni_proxy_{name}", text, value=value)


def total(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"omni_proxy_{name}", text, value=value)


def gauges(
    name: str, text: str, labels: Labels, rows: Iterable[tuple[Labels, float]]
) -> Iterator[Metric]:
    return _in_parts(lambda: GaugeMetricFamily(f"omni_proxy_{name}", text, labels=labels), rows)


def counters(
    name: str, text: str, labels: Labels, rows: Iterable[tuple[Labels, float]]
) -> Iterator[Metric]:
    return _in_parts(lambda: CounterMetricFamily(f"omni_proxy_{name}", text, labels=labels), rows)


def histograms(
    name: str, text: str, labels: Labels, rows: Iterable[tuple[Labels, Histogram]]
) -> Iterator[Metric]:
    """Nothing for what never happened: it would be twenty lines of zeros."""
    told = ((key, of.buckets(_told_of(of)), of.sum) for key, of in rows if any(of.counts))
    return _in_parts(lambda: HistogramMetricFamily(f"omni_proxy_{name}", text, labels=labels), told)


def _told_of(times: Histogram) -> tuple[float, ...]:
    """What is counted finely, for quantiles of ours, is told as others tell it."""
    return FIRST_CHUNK if times.bounds is FINE else times.bounds


def _in_parts(empty: Callable[[], Any], rows: Iterable[tuple[Any, ...]]) -> Iterator[Metric]:
    family = empty()
    for row in rows:
        family.add_metric(*row)
        if len(family.samples) >= PART:
            yield family
            family = empty()
    yield family


SUMS: Final[tuple[tuple[str, str, Callable[[Cell], int]], ...]] = (
    ("request_body_bytes", "Bytes of request bodies", lambda cell: cell.bytes_in),
    ("response_body_bytes", "Bytes of answers' bodies", lambda cell: cell.bytes_out),
    ("response_chunks", "Pieces of answers relayed", lambda cell: cell.pieces),
)
TIMES: Final[tuple[tuple[str, str, Callable[[Cell], Histogram]], ...]] = (
    ("request_duration_seconds", "From first byte to last byte", lambda cell: cell.total),
    (
        "time_to_first_chunk_seconds",
        "From a request's first byte to its answer's",
        lambda cell: cell.first,
    ),
    (
        "time_between_chunks_seconds",
        "Between two pieces of a stream, each such time, also while it lasts",
        lambda cell: cell.between,
    ),
)
PHASES: Final[tuple[tuple[str, str, Callable[[Phases], Histogram]], ...]] = (
    ("queue_seconds", "Time in the queue, of requests that waited", lambda p: p.queue),
    ("connect_seconds", "Time to open a connection, where none was kept", lambda p: p.connect),
    ("response_head_seconds", "From the request's leaving to the answer's head", lambda p: p.head),
    ("overhead_seconds", "Time that was the proxy's own, not the worker's", lambda p: p.overhead),
    ("longest_chunk_gap_seconds", "Longest silence inside a stream", lambda p: p.longest_gap),
)
STATES: Final[tuple[tuple[str, str, Callable[[Worker], float]], ...]] = (
    ("worker_routable", "1 while it gets requests", lambda w: w.routable),
    ("worker_in_flight", "Requests that it has now", lambda w: w.in_flight),
    ("worker_weight_epoch", "Our number of its weights, 0 if unknown", lambda w: w.weight_epoch),
)
# Told while they hold: of nearly all workers they would be 0. No counters: a counter that comes up
# at 1 hides its first increase from rate().
WHILE_TRUE: Final[tuple[tuple[str, str, Callable[[Worker], float]], ...]] = (
    ("worker_disabled", "1 while an operator keeps it out", lambda w: w.disabled),
    ("worker_on_trial", "1 while it gets one request at a time", lambda w: w.health.is_half_open),
)


def of_meters(meters: Metrics) -> Iterator[Metric]:
    meters.forget_strangers()
    cells: Cells = [
        ((route, worker.url if worker is not None else ""), cell)
        for (route, worker), cell in meters.cells.items()
    ]
    yield from _requests(cells)
    for name, text, summed in SUMS:
        yield from counters(name, text, BY_CELL, [(key, summed(cell)) for key, cell in cells])
    for name, text, timed in TIMES:
        yield from histograms(name, text, BY_CELL, ((key, timed(cell)) for key, cell in cells))
    yield from standard([(route, worker, cell) for (route, worker), cell in meters.cells.items()])
    phases = list(meters.phases.items())
    for name, text, spent in PHASES:
        rows = (([route], spent(each)) for route, each in phases)
        yield from histograms(name, text, ("route",), rows)
    yield from _tokens(cells)
    yield from _tries(meters)


def _requests(cells: Cells) -> Iterator[Metric]:
    labels = ("route", "model", "worker", "status", "end")
    rows = (
        ((route, model or "", worker, f"{hundreds}xx" if hundreds else "none", end), count)
        for (route, worker), cell in cells
        for (model, hundreds, end), count in list(cell.ends.items())
    )
    return counters("requests", "Requests that have ended", labels, rows)


def _tokens(cells: Cells) -> Iterator[Metric]:
    summed: dict[tuple[str, str, str], int] = {}
    for (_, worker), cell in cells:
        for (model, kind), count in cell.tokens.items():
            key = (model or "", worker, kind)
            summed[key] = summed.get(key, 0) + count
    labels = ("model", "worker", "type")
    return counters("tokens", "Tokens that answers told of", labels, summed.items())


def _tries(meters: Metrics) -> Iterator[Metric]:
    yield total("retries", "Tries of requests beyond their first", meters.retries)
    tries = [((w.url, cause), count) for (w, cause), count in meters.failed_tries.items()]
    text = "Tries that came to nothing"
    yield from counters("failed_tries", text, ("worker", "cause"), tries)
    ejected = [((worker.url,), meters.ejections[worker]) for worker in meters.workers]
    text = "Times that failed requests put it out"
    yield from counters("worker_ejections", text, ("worker",), ejected)
    changes = [((w.url, state.value), count) for (w, state), count in meters.health_changes.items()]
    text = "Times that it entered a state"
    yield from counters("worker_health_changes", text, ("worker", "state"), changes)


def of_fleet(fleet: Fleet) -> Iterator[Metric]:
    workers = fleet.workers
    states = [
        ((name.removesuffix("_workers"),), count)
        for name, count in fleet.count_by_state().items()
        if name != "total_workers"
    ]
    yield from gauges("workers", "Workers in the fleet, by state", ("state",), states)
    for name, text, told in STATES:
        yield from gauges(name, text, ("worker",), (((w.url,), told(w)) for w in workers))
    for name, text, told in WHILE_TRUE:
        rows = (((w.url,), value) for w in workers if (value := told(w)))
        yield from gauges(name, text, ("worker",), rows)
    trials = (((w.url,), w.health.half_open_count) for w in workers)
    yield from counters("worker_trials", "Trial requests that it was given", ("worker",), trials)
    health = (((w.url, w.health.state.value), 1) for w in workers)
    yield from gauges("worker_health", "1 for its state", ("worker", "state"), health)
    held = (((w.url, reason), 1) for w in workers for reason in sorted(w.cordon_reasons))
    text = "1 for each reason of ours to keep it out"
    yield from gauges("worker_held", text, ("worker", "reason"), held)
    info = (((w.url, w.model or "", w.origin), 1) for w in workers)
    labels = ("worker", "model", "origin")
    yield from gauges("worker_info", "What it is; always 1", labels, info)
    weights = (((w.url, w.version.shown), 1) for w in workers if w.version.shown)
    text = "Which weights it has; always 1"
    yield from gauges("worker_weights_info", text, ("worker", "version"), weights)
