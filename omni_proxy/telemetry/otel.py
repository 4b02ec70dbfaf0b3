"""The request times again, under OpenTelemetry's names for clients of generative AI.

Over all workers, by operation and model, as dashboards for those names expect. Invariant: a few
series for each model that a worker names, whatever the size of the fleet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import Metric
from prometheus_client.core import HistogramMetricFamily

from omni_proxy.fleet.worker import Worker
from omni_proxy.telemetry.histogram import FINE, FIRST_CHUNK, Histogram
from omni_proxy.telemetry.series import RouteSeries

OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/generate": "generate_content",
}
LABELS: Final = ("gen_ai_operation_name", "gen_ai_request_model")
CELLS_AT_ONCE: Final = 100  # to be added up: about a millisecond
NAMES: Final[tuple[tuple[str, str, Callable[[RouteSeries], Histogram]], ...]] = (
    ("duration", "From first byte to last byte", lambda cell: cell.total),
    (
        "time_to_first_chunk",
        "From a request's first byte to its answer's",
        lambda cell: cell.first,
    ),
    (
        "time_per_output_chunk",
        "Between two pieces of a stream, each such time, also while it lasts",
        lambda cell: cell.between,
    ),
)


def otel_families(cells: list[tuple[str, Worker | None, RouteSeries]]) -> Iterator[Metric]:
    """Empty parts come in between, so that whoever takes them may do other things there."""
    known = [
        ((OPERATIONS[route], worker.model or ""), cell)
        for route, worker, cell in cells
        if route in OPERATIONS and worker is not None
    ]
    for name, text, timed in NAMES:
        metric_name = f"gen_ai_client_operation_{name}_seconds"
        sums: dict[tuple[str, str], Histogram] = {}
        for number, (key, cell) in enumerate(known, start=1):
            _add(sums, key, timed(cell))
            if number % CELLS_AT_ONCE == 0:
                yield HistogramMetricFamily(metric_name, text, labels=LABELS)
        family = HistogramMetricFamily(metric_name, text, labels=LABELS)
        for key, times in sums.items():
            bounds = FIRST_CHUNK if times.bounds is FINE else times.bounds
            family.add_metric(key, times.buckets(bounds), times.sum)
        yield family


def _add(sums: dict[tuple[str, str], Histogram], key: tuple[str, str], more: Histogram) -> None:
    if not any(more.counts):
        return
    exchange = sums.get(key)
    if exchange is None:
        exchange = sums[key] = Histogram(more.bounds)
    exchange.counts = [ours + its for ours, its in zip(exchange.counts, more.counts, strict=True)]
    exchange.sum += more.sum
