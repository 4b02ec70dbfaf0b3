"""Metrics that the API counts itself: request duration, time to first token, outcome.

Invariant: names and units are SGLang's, so that its dashboards and routers read them; every series
carries `model_name`. Times are those of the trio clock, in seconds. Gauges of the engine are not
here: `native.metrics` reads them from the client for each scrape.
"""

from __future__ import annotations

import trio
from prometheus_client import CollectorRegistry, Counter, Histogram

FIRST_TOKEN_BUCKETS_SECS = (
    0.005, 0.01, 0.02, 0.04, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60,
)  # fmt: skip
LATENCY_BUCKETS_SECS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 120, 240)
_LABELS = ("model_name",)


class RequestMetrics:
    """The counters and histograms of one app, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.first_token = Histogram(
            "sglang:time_to_first_token_seconds",
            "Time until a streamed request's first piece of output.",
            _LABELS,
            registry=self.registry,
            buckets=FIRST_TOKEN_BUCKETS_SECS,
        )
        self.latency = Histogram(
            "sglang:e2e_request_latency_seconds",
            "Time from a request's submission to its end.",
            _LABELS,
            registry=self.registry,
            buckets=LATENCY_BUCKETS_SECS,
        )
        self.requests = self._count("num_requests", "Requests that finished.")
        self.aborted = self._count("num_aborted_requests", "Requests that did not finish.")

    def _count(self, name: str, help_text: str) -> Counter:
        return Counter(f"sglang:{name}", help_text, _LABELS, registry=self.registry)

    def timed(self, model_name: str) -> RequestTimer:
        return RequestTimer(self, model_name)


class RequestTimer:
    """Timer of one request, started when created; `finish` or `close` ends it once."""

    __slots__ = ("_awaits_output", "_metrics", "_model_name", "_open", "_started_secs")

    def __init__(self, metrics: RequestMetrics, model_name: str) -> None:
        self._metrics = metrics
        self._model_name = model_name
        self._started_secs = trio.current_time()
        self._awaits_output = True
        self._open = True

    def mark_first_output(self) -> None:
        """Record the time of the first output; later calls do nothing."""
        if self._awaits_output:
            self._awaits_output = False
            elapsed_secs = trio.current_time() - self._started_secs
            self._metrics.first_token.labels(self._model_name).observe(elapsed_secs)

    def finish(self) -> None:
        self._open = False
        metrics, name = self._metrics, self._model_name
        metrics.latency.labels(name).observe(trio.current_time() - self._started_secs)
        metrics.requests.labels(name).inc()

    def close(self) -> None:
        """Count the request as aborted unless it has finished."""
        if self._open:
            self._open = False
            self._metrics.aborted.labels(self._model_name).inc()
