"""GET /metrics: SGLang's names for what the stages told last and what the API has counted.

Invariant: a scrape asks no stage and waits for none; every series carries `model_name`.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from quart import Response
from quart_trio import QuartTrio

from omni_proxy.replica.api.load import largest, total
from omni_proxy.replica.api.served import Served

# SGLang's name -> the stages' name, what it tells, and how several stages make one.
GAUGES = {
    "num_running_reqs": ("num_running_reqs", "Requests being computed.", total),
    "num_queue_reqs": ("num_waiting_reqs", "Requests waiting to be computed.", total),
    "num_used_tokens": ("num_used_tokens", "Tokens held in the KV cache.", total),
    "max_total_num_tokens": ("max_total_num_tokens", "Tokens that the cache can hold.", total),
    "token_usage": ("token_usage", "Share of the KV cache that is in use.", largest),
    "gen_throughput": ("gen_throughput", "Tokens generated per second.", total),
    "cache_hit_rate": ("cache_hit_rate", "Share of prompt tokens that were cached.", largest),
    "engine_paused": ("paused", "1 while generation is paused.", largest),
}
COUNTERS = {
    "prompt_tokens": "Prompt tokens taken in.",
    "generation_tokens": "Tokens generated.",
    "cached_tokens": "Prompt tokens that were cached.",
}


class StageCollector(Collector):
    """The stages' gauges as of the scrape."""

    def __init__(self, served: Served) -> None:
        self._served = served

    def collect(self) -> Iterator[Metric]:
        stats = self._served.client.stats()
        label = [self._served.model_name]
        for name, (source, told, join) in GAUGES.items():
            gauge = GaugeMetricFamily(f"sglang:{name}", told, labels=["model_name"])
            gauge.add_metric(label, join(stats, source))
            yield gauge
        for name, told in COUNTERS.items():
            counter = CounterMetricFamily(f"sglang:{name}", told, labels=["model_name"])
            counter.add_metric(label, total(stats, f"{name}_total"))
            yield counter


def mount(app: QuartTrio, served: Served) -> None:
    registry = served.meters.registry
    registry.register(StageCollector(served))

    async def metrics() -> Response:
        return Response(generate_latest(registry), content_type=CONTENT_TYPE_LATEST)

    app.add_url_rule("/metrics", "metrics", metrics)
