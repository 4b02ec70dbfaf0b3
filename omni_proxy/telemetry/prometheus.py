"""`Metrics` and the fleet as Prometheus metric families (docs/operations.md explains each);
`admin_api.serializers.metrics_text` writes them as text.

Invariant: each label is bounded by the route table, the fleet, or a list in the code. A large
family is yielded in consecutive parts, so that the caller can yield to the event loop in between;
counting may continue in that time.

Also the request times under OpenTelemetry's names for generative AI clients: over all workers, by
operation and model, as dashboards for those names expect. Invariant: a few series for each model
that a worker serves, whatever the size of the fleet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from prometheus_client import Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.samples import Exemplar

from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.telemetry.histogram import (
    FINE,
    FIRST,
    FIRST_CHUNK,
    TOTAL,
    Exemplars,
    Histogram,
    Key,
    marked,
)
from omni_proxy.telemetry.metrics import Metrics, RoutePhases, RouteSeries

OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/generate": "generate_content",
}
LABELS: Final = ("gen_ai_operation_name", "gen_ai_request_model")
CELLS_AT_ONCE: Final = 100  # series that are summed before the caller may yield
# Name, help text, histogram, and the kind of its exemplars.
NAMES: Final[tuple[tuple[str, str, Callable[[RouteSeries], Histogram], int | None], ...]] = (
    ("duration", "From first byte to last byte", lambda cell: cell.total, TOTAL),
    (
        "time_to_first_chunk",
        "From a request's first byte to its response's",
        lambda cell: cell.first,
        FIRST,
    ),
    (
        "time_per_output_chunk",
        "Each gap between two chunks of a stream, counted while it runs",
        lambda cell: cell.between,
        None,
    ),
)


def otel_families(
    cells: list[tuple[str, Worker | None, RouteSeries]], exemplars: Exemplars | None = None
) -> Iterator[Metric]:
    """Also yields empty families, so that the caller can yield to the event loop."""
    present = [
        ((OPERATIONS[route], worker.model or ""), cell)
        for route, worker, cell in cells
        if route in OPERATIONS and worker is not None
    ]
    series: dict[tuple[str, str], list[tuple[str, Worker | None]]] = {}
    for route, worker, _ in cells if exemplars is not None else ():
        if route in OPERATIONS and worker is not None:
            series.setdefault((OPERATIONS[route], worker.model or ""), []).append((route, worker))
    for name, text, timed, kind in NAMES:
        metric_name = f"gen_ai_client_operation_{name}_seconds"
        sums: dict[tuple[str, str], Histogram] = {}
        for number, (key, cell) in enumerate(present, start=1):
            _add(sums, key, timed(cell))
            if number % CELLS_AT_ONCE == 0:
                yield HistogramMetricFamily(metric_name, text, labels=LABELS)
        family = HistogramMetricFamily(metric_name, text, labels=LABELS)
        for key, times in sums.items():
            marks: dict[str, Exemplar] = {}
            if exemplars is not None and kind is not None:
                marks = exemplars.marks(series[key], kind)
            buckets = marked(times.buckets(_exported_bounds(times)), marks)
            family.add_metric(key, buckets, times.sum)
        yield family


def _add(sums: dict[tuple[str, str], Histogram], key: tuple[str, str], more: Histogram) -> None:
    if not any(more.counts):
        return
    exchange = sums.get(key)
    if exchange is None:
        exchange = sums[key] = Histogram(more.bounds)
    exchange.counts = [ours + its for ours, its in zip(exchange.counts, more.counts, strict=True)]
    exchange.sum += more.sum


PART: Final = 200  # samples in one part of a family
BY_SERIES: Final = ("route", "worker")

Labels = Sequence[str]
SeriesRows = list[tuple[tuple[str, str], RouteSeries]]


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
    name: str,
    text: str,
    labels: Labels,
    rows: Iterable[tuple[Labels, Histogram]],
    marks_of: Callable[[Labels], Mapping[str, Exemplar]] = lambda _: {},
) -> Iterator[Metric]:
    """Empty histograms are left out: each would be twenty lines of zeros. `marks_of`: returns the
    exemplars of a row."""
    rows_with_samples = (
        (key, marked(of.buckets(_exported_bounds(of)), marks_of(key)), of.sum)
        for key, of in rows
        if any(of.counts)
    )
    return _in_parts(
        lambda: HistogramMetricFamily(f"omni_proxy_{name}", text, labels=labels), rows_with_samples
    )


def _exported_bounds(times: Histogram) -> tuple[float, ...]:
    """The recent window needs fine bounds for quantiles; coarser ones are exported."""
    return FIRST_CHUNK if times.bounds is FINE else times.bounds


def _in_parts(empty: Callable[[], Any], rows: Iterable[tuple[Any, ...]]) -> Iterator[Metric]:
    family = empty()
    for row in rows:
        family.add_metric(*row)
        if len(family.samples) >= PART:
            yield family
            family = empty()
    yield family


SUMS: Final[tuple[tuple[str, str, Callable[[RouteSeries], int]], ...]] = (
    ("request_body_bytes", "Bytes of request bodies", lambda one_series: one_series.bytes_in),
    ("response_body_bytes", "Bytes of response bodies", lambda one_series: one_series.bytes_out),
    ("response_chunks", "Chunks of responses relayed", lambda one_series: one_series.chunks),
)
TIMES: Final[tuple[tuple[str, str, Callable[[RouteSeries], Histogram], int | None], ...]] = (
    (
        "request_duration_seconds",
        "From first byte to last byte",
        lambda one_series: one_series.total,
        TOTAL,
    ),
    (
        "time_to_first_chunk_seconds",
        "From the first byte of the request to that of the response",
        lambda one_series: one_series.first,
        FIRST,
    ),
    (
        "time_between_chunks_seconds",
        "Each gap between two chunks of a stream, counted while it runs",
        lambda one_series: one_series.between,
        None,
    ),
)
PHASES: Final[tuple[tuple[str, str, Callable[[RoutePhases], Histogram]], ...]] = (
    ("queue_seconds", "Time in the admission queue, of requests that waited", lambda p: p.queue),
    ("connect_seconds", "Time to open a connection, when none was idle", lambda p: p.connect),
    (
        "response_head_seconds",
        "From sending the request to the head of the response",
        lambda p: p.head,
    ),
    ("overhead_seconds", "Time spent in the proxy itself", lambda p: p.overhead),
    (
        "longest_chunk_gap_seconds",
        "Longest gap between two chunks of a stream",
        lambda p: p.longest_gap,
    ),
)
STATES: Final[tuple[tuple[str, str, Callable[[Worker], float]], ...]] = (
    ("worker_routable", "1 while it is in rotation", lambda w: w.routable),
    ("worker_in_flight", "Requests in flight", lambda w: w.in_flight - w.peer_in_flight),
    ("worker_weight_epoch", "The weight epoch, 0 if unknown", lambda w: w.weight_epoch),
)
# Exported only while they are 1, because for nearly all workers they would be 0. Never do so with
# counters: rate() misses the first increase of one that appears with the value 1.
WHILE_TRUE: Final[tuple[tuple[str, str, Callable[[Worker], float]], ...]] = (
    ("worker_disabled", "1 while an operator has disabled it", lambda w: w.disabled),
    ("worker_half_open", "1 while its breaker is half-open", lambda w: w.health.is_half_open),
    (  # for one release
        "worker_on_trial",
        "Old name of omni_proxy_worker_half_open",
        lambda w: w.health.is_half_open,
    ),
)


def request_families(metrics: Metrics) -> Iterator[Metric]:
    metrics.drop_removed_workers()
    series: SeriesRows = [
        ((route, worker.url if worker is not None else ""), one_series)
        for (route, worker), one_series in metrics.series.items()
    ]
    yield from _requests(series)
    for name, text, summed in SUMS:
        yield from counters(
            name, text, BY_SERIES, [(key, summed(one_series)) for key, one_series in series]
        )
    cells = [(*key, one_series) for key, one_series in metrics.series.items()]
    keys: dict[Labels, Key] = {
        labels: cell[:2] for (labels, _), cell in zip(series, cells, strict=True)
    }
    for name, text, timed, kind in TIMES:
        yield from histograms(
            name, text, BY_SERIES, ((key, timed(one_series)) for key, one_series in series),
            marks_of=partial(_marks, metrics.exemplars, keys, kind),
        )  # fmt: skip
    yield from otel_families(cells, metrics.exemplars)
    phases = list(metrics.phases.items())
    for name, text, spent in PHASES:
        rows = (([route], spent(phase)) for route, phase in phases)
        yield from histograms(name, text, ("route",), rows)
    yield from _tokens(series)
    yield from _cached_tokens(metrics)
    yield from _attempts(metrics)


def _marks(
    exemplars: Exemplars, keys: Mapping[Labels, Key], kind: int | None, labels: Labels
) -> Mapping[str, Exemplar]:
    return exemplars.marks([keys[labels]], kind) if kind is not None else {}


def _requests(series: SeriesRows) -> Iterator[Metric]:
    labels = ("route", "model", "worker", "status", "end")
    rows = (
        ((route, model or "", worker, f"{hundreds}xx" if hundreds else "none", end), count)
        for (route, worker), one_series in series
        for (model, hundreds, end), count in list(one_series.ends.items())
    )
    return counters("requests", "Requests that ended", labels, rows)


def _tokens(series: SeriesRows) -> Iterator[Metric]:
    summed: dict[tuple[str, str, str], int] = {}
    for (_, worker), one_series in series:
        for (model, kind), count in one_series.tokens.items():
            key = (model or "", worker, kind)
            summed[key] = summed.get(key, 0) + count
    labels = ("model", "worker", "type")
    return counters("tokens", "Tokens that responses reported", labels, summed.items())


def _cached_tokens(metrics: Metrics) -> Iterator[Metric]:
    """Counts only responses that report their cached tokens, so that the two are comparable."""
    counts = [(worker.url, *counts) for worker, counts in metrics.cached_tokens.items()]
    for column, kind, text in (
        (1, "predicted", "Prompt tokens that were predicted to be cached at a worker"),
        (2, "reported", "Prompt tokens that a worker reported as cached in its responses"),
        (2, "told", "Old name of omni_proxy_worker_cache_reported_tokens_total"),  # for one release
    ):
        rows = (((row[0],), int(row[column])) for row in counts)
        yield from counters(f"worker_cache_{kind}_tokens", text, ("worker",), rows)


def _attempts(metrics: Metrics) -> Iterator[Metric]:
    yield from counters(
        "model_alias_requests", "Requests for an alias, by the target that they went to",
        ("alias", "target"), metrics.alias_targets.items(),
    )  # fmt: skip
    yield from histograms(
        "leg_seconds", "Time of successful legs of requests in two legs", ("leg",),
        (([leg], times) for leg, times in metrics.legs.items()),
    )  # fmt: skip
    text = "KV caches that could not be transferred to the decode worker"
    yield total("kv_transfer_failures", text, metrics.transfer_failures)
    yield from counters(
        "prefill_fallbacks", "Requests whose decode worker computed the prompt itself", ("reason",),
        (([reason], count) for reason, count in metrics.fallbacks.items()),
    )  # fmt: skip
    yield total("retries", "Attempts of requests beyond their first", metrics.retries)
    failed = [((w.url, cause), count) for (w, cause), count in metrics.failed_attempts.items()]
    yield from counters("failed_attempts", "Attempts that failed", ("worker", "cause"), failed)
    text = "Old name of omni_proxy_failed_attempts_total"  # for one release
    yield from counters("failed_tries", text, ("worker", "cause"), failed)
    ejected = [((worker.url,), metrics.ejections[worker]) for worker in metrics.workers]
    text = "Ejections for failed requests"
    yield from counters("worker_ejections", text, ("worker",), ejected)
    changes = [
        ((w.url, state.value), count) for (w, state), count in metrics.health_changes.items()
    ]
    text = "Entries into a health state"
    yield from counters("worker_health_changes", text, ("worker", "state"), changes)


def _ranks(workers: Sequence[Worker]) -> Iterator[Metric]:
    """Metrics of data-parallel ranks; yields nothing if no worker has any."""
    ranks = [((w.url, str(n)), rank) for w in workers for n, rank in enumerate(w.dp_ranks)]
    if not ranks:
        return
    rows: Iterable[tuple[Labels, float]] = (
        (key, rank.in_flight - rank.peer_in_flight) for key, rank in ranks
    )
    text = "Requests in flight at a data-parallel rank"
    yield from gauges("worker_rank_in_flight", text, ("worker", "rank"), rows)
    results = (("succeeded", "succeeded"), ("failed", "failed"))
    rows = (
        ((*key, result), sum(getattr(rank, counted).values()))
        for key, rank in ranks
        for result, counted in results
    )
    text = "Attempts at a data-parallel rank that ended"
    yield from counters("worker_rank_attempts", text, ("worker", "rank", "result"), rows)


def _engine_loads(fleet: Fleet) -> Iterator[Metric]:
    """A worker without a recent load report of its engine has no samples."""
    loads = fleet.loads
    fresh = [
        (worker, worker.engine_load.report)
        for worker in fleet.workers
        if worker.engine_load is not None and not loads.is_stale(worker.engine_load)
    ]
    text = "Requests waiting in the worker's engine, as it reported"
    waiting = [((w.url,), load.waiting) for w, load in fresh if load.waiting is not None]
    yield from gauges("worker_engine_waiting", text, ("worker",), waiting)
    text = "Share of the engine's KV cache in use, as it reported"
    usage = [((w.url,), load.kv_usage) for w, load in fresh if load.kv_usage is not None]
    yield from gauges("worker_engine_kv_usage", text, ("worker",), usage)
    text = "1 while new requests avoid the worker because of the load that its engine reported"
    rows = [((worker.url,), loads.is_overloaded(worker)) for worker, _ in fresh]
    yield from gauges("worker_overloaded", text, ("worker",), rows)


def fleet_families(fleet: Fleet) -> Iterator[Metric]:
    workers = fleet.workers
    states = [
        ((name.removesuffix("_workers"),), count)
        for name, count in fleet.count_by_state().items()
        if name != "total_workers"
    ]
    yield from gauges("workers", "Workers in the fleet, by state", ("state",), states)
    for name, text, value_of in STATES:
        yield from gauges(name, text, ("worker",), (((w.url,), value_of(w)) for w in workers))
    for name, text, value_of in WHILE_TRUE:
        rows = (((w.url,), value) for w in workers if (value := value_of(w)))
        yield from gauges(name, text, ("worker",), rows)
    yield from _ranks(workers)
    yield from _engine_loads(fleet)
    half_open = [((w.url,), w.health.half_open_count) for w in workers]
    text = "Half-open requests sent to the worker"
    yield from counters("worker_half_open_requests", text, ("worker",), half_open)
    text = "Old name of omni_proxy_worker_half_open_requests_total"  # for one release
    yield from counters("worker_trials", text, ("worker",), half_open)
    health = (((w.url, w.health.state.value), 1) for w in workers)
    yield from gauges("worker_health", "1 for its state", ("worker", "state"), health)
    cordons = (((w.url, reason), 1) for w in workers for reason in sorted(w.cordon_reasons))
    text = "1 for each cordon reason of the worker"
    yield from gauges("worker_held", text, ("worker", "reason"), cordons)
    info = (((w.url, w.model or "", w.origin), 1) for w in workers)
    labels = ("worker", "model", "origin")
    yield from gauges("worker_info", "Model and origin; always 1", labels, info)
    weights = (((w.url, w.weight_version.shown), 1) for w in workers if w.weight_version.shown)
    text = "Weight version; always 1"
    yield from gauges("worker_weights_info", text, ("worker", "version"), weights)
