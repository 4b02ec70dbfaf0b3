"""The engine's load: GET /metrics, SGLang's load report, and vLLM's load header.

Invariant: a scrape uses the latest gauges of the stages, under SGLang's and vLLM's names, and waits
for none; a gauge that no stage reports is 0, so that every key is present. Counts are summed over
the stages; of ratios, the maximum is used. Every series has the label `model_name`.
A request with `endpoint-load-metrics-format: JSON` or `TEXT` gets a response header
`endpoint-load-metrics` with the number of waiting requests and the share of the KV cache in use.
Only non-streamed 200 responses of the completion routes have it, as in vLLM (note:real-engines
5.3).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from prometheus_client import CONTENT_TYPE_LATEST, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from quart import Response, request
from quart_trio import QuartTrio

from omni_proxy.replica.api.route_context import RouteContext

# Of a request and of its response, and the routes that have them.
LOAD_FORMAT_HEADER: Final = "endpoint-load-metrics-format"
LOAD_HEADER: Final = "endpoint-load-metrics"
LOAD_HEADER_PATHS: Final = ("/v1/chat/completions", "/v1/completions")

Stats = Mapping[str, Mapping[str, float]]


def sum_over_stages(stats: Stats, name: str) -> float:
    return sum(values.get(name, 0.0) for values in stats.values())


def max_over_stages(stats: Stats, name: str) -> float:
    return max((values.get(name, 0.0) for values in stats.values()), default=0.0)


def load_report(stats: Stats, max_running: int) -> dict[str, Any]:
    """The load of one rank under SGLang's names (note:routers 1.7)."""
    running = int(sum_over_stages(stats, "num_running_reqs"))
    waiting = int(sum_over_stages(stats, "num_waiting_reqs"))
    return {
        "dp_rank": 0,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_waiting_uncached_tokens": int(sum_over_stages(stats, "num_waiting_uncached_tokens")),
        "num_total_reqs": running + waiting,
        "num_used_tokens": int(sum_over_stages(stats, "num_used_tokens")),
        "max_total_num_tokens": int(sum_over_stages(stats, "max_total_num_tokens")),
        "token_usage": max_over_stages(stats, "token_usage"),
        "gen_throughput": sum_over_stages(stats, "gen_throughput"),
        "cache_hit_rate": max_over_stages(stats, "cache_hit_rate"),
        "utilization": min(running / max_running, 1.0) if max_running else 0.0,
        "max_running_requests": max_running,
    }


def load_summary(load: Mapping[str, Any]) -> dict[str, Any]:
    """Sums and means over all ranks, of which there is one."""
    return {
        "total_running_reqs": load["num_running_reqs"],
        "total_waiting_reqs": load["num_waiting_reqs"],
        "total_reqs": load["num_total_reqs"],
        "avg_token_usage": load["token_usage"],
        "avg_throughput": load["gen_throughput"],
        "avg_utilization": load["utilization"],
    }


# SGLang's name -> the stages' name, help text, and how to combine several stages.
GAUGES = {
    "num_running_reqs": ("num_running_reqs", "Requests being computed.", sum_over_stages),
    "num_queue_reqs": ("num_waiting_reqs", "Requests waiting to be computed.", sum_over_stages),
    "num_used_tokens": ("num_used_tokens", "Tokens held in the KV cache.", sum_over_stages),
    "max_total_num_tokens": (
        "max_total_num_tokens",
        "Tokens that the cache can hold.",
        sum_over_stages,
    ),
    "token_usage": ("token_usage", "Share of the KV cache that is in use.", max_over_stages),
    "gen_throughput": ("gen_throughput", "Tokens generated per second.", sum_over_stages),
    "cache_hit_rate": (
        "cache_hit_rate",
        "Share of prompt tokens that were cached.",
        max_over_stages,
    ),
    "engine_paused": ("paused", "1 while generation is paused.", max_over_stages),
}
# The same gauges under vLLM's names.
VLLM_GAUGES = {
    "num_requests_running": GAUGES["num_running_reqs"],
    "num_requests_waiting": GAUGES["num_queue_reqs"],
    "kv_cache_usage_perc": GAUGES["token_usage"],
}
COUNTERS = {
    "prompt_tokens": "Prompt tokens processed.",
    "generation_tokens": "Tokens generated.",
    "cached_tokens": "Prompt tokens that were cached.",
}


class StageCollector(Collector):
    """The stages' gauges at the time of the scrape."""

    def __init__(self, context: RouteContext) -> None:
        self._context = context
        self._as_vllm = context.dialect != "sglang"

    def collect(self) -> Iterator[Metric]:
        stats = self._context.client.stats()
        label = [self._context.model_name]
        for name, (source, help_text, combine) in GAUGES.items():
            gauge = GaugeMetricFamily(f"sglang:{name}", help_text, labels=["model_name"])
            gauge.add_metric(label, combine(stats, source))
            yield gauge
        for name, (source, help_text, combine) in VLLM_GAUGES.items() if self._as_vllm else ():
            gauge = GaugeMetricFamily(f"vllm:{name}", help_text, labels=["engine", "model_name"])
            gauge.add_metric(["0", *label], combine(stats, source))
            yield gauge
        for name, help_text in COUNTERS.items():
            counter = CounterMetricFamily(f"sglang:{name}", help_text, labels=["model_name"])
            counter.add_metric(label, sum_over_stages(stats, f"{name}_total"))
            yield counter


def mount(app: QuartTrio, context: RouteContext) -> None:
    registry = context.meters.registry
    registry.register(StageCollector(context))

    async def metrics() -> Response:
        return Response(generate_latest(registry), content_type=CONTENT_TYPE_LATEST)

    app.add_url_rule("/metrics", "metrics", metrics)


def add_load_header(app: QuartTrio, context: RouteContext) -> None:
    """vLLM's load header in the responses to requests that ask for it."""

    async def add_load(response: Response) -> Response:
        form = request.headers.get(LOAD_FORMAT_HEADER, "").strip().upper()
        whole = response.status_code == 200 and response.mimetype == "application/json"
        if form in ("JSON", "TEXT") and whole and request.path in LOAD_HEADER_PATHS:
            response.headers[LOAD_HEADER] = f"{form} {_load_text(context, form)}"
        return response

    app.after_request(add_load)


def _load_text(context: RouteContext, form: str) -> str:
    stats = context.client.stats()
    metrics = {
        "kv_cache_usage_perc": max_over_stages(stats, "token_usage"),
        "num_requests_waiting": sum_over_stages(stats, "num_waiting_reqs"),
    }
    if form == "JSON":
        return json.dumps({"named_metrics": metrics})
    return ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())
