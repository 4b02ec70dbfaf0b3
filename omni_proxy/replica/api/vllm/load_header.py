"""vLLM's load header: adds the replica's load to a response if the request asks for it.

A request with `endpoint-load-metrics-format: JSON` or `TEXT` gets a response header
`endpoint-load-metrics` with the number of waiting requests and the share of the KV cache in use, as
last reported by the stages. Invariant: only non-streamed 200 responses of the completion routes
have the header, as in vLLM.
Source: note:real-engines 5.3.
"""

from __future__ import annotations

import json
from typing import Final

from quart import Response, request
from quart_trio import QuartTrio

from omni_proxy.replica.api.route_context import RouteContext
from omni_proxy.replica.api.sglang.metrics import max_over_stages, sum_over_stages

ASKED: Final = "endpoint-load-metrics-format"
ANSWERED: Final = "endpoint-load-metrics"
PATHS: Final = ("/v1/chat/completions", "/v1/completions")


def mount(app: QuartTrio, context: RouteContext) -> None:
    async def add_load(response: Response) -> Response:
        form = request.headers.get(ASKED, "").strip().upper()
        whole = response.status_code == 200 and response.mimetype == "application/json"
        if form in ("JSON", "TEXT") and whole and request.path in PATHS:
            response.headers[ANSWERED] = f"{form} {_load_text(context, form)}"
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
