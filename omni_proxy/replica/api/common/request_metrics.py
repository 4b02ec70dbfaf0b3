"""What the API counts itself: how long requests took, and how they ended.

Invariant: names and units are SGLang's, so that its dashboards and routers read them; every series
carries `model_name`. Times are those of the trio clock, in seconds. Gauges of the engine are no
part of this: they are read from the client when asked for (`metrics`).
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
    """The counters and histograms of one app, in a registry of their own."""

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

    def _count(self, name: str, told: str) -> Counter:
        return Counter(f"sglang:{name}", told, _LABELS, registry=self.registry)

    def timed(self, model_name: str) -> RequestTimer:
        return RequestTimer(self, model_name)


class RequestTimer:
    """One request's stopwatch, started when made; `ended` or `aborted` is called once."""

    __slots__ = ("_meters", "_model_name", "_open", "_started_secs", "_waiting")

    def __init__(self, meters: RequestMetrics, model_name: str) -> None:
        self._meters = meters
        self._model_name = model_name
        self._started_secs = trio.current_time()
        self._waiting = True
        self._open = True

    def first(self) -> None:
        """Note the first output; later calls change nothing."""
        if self._waiting:
            self._waiting = False
            elapsed_secs = trio.current_time() - self._started_secs
            self._meters.first_token.labels(self._model_name).observe(elapsed_secs)

    def ended(self) -> None:
        self._open = False
        meters, name = self._meters, self._model_name
        meters.latency.labels(name).observe(trio.current_time() - self._started_secs)
        meters.requests.labels(name).inc()

    def left(self) -> None:
        """Note that nothing more comes: aborted, unless it had ended."""
        if self._open:
            self._open = False
            self._meters.aborted.labels(self._model_name).inc()
