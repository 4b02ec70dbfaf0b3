"""Status routes: health, the model card, and SGLang's server info and load.

Invariant: the keys of /health and of a card are exactly those of note:api-server 1.1 and 1.2, in
that order. /health never waits for a stage, and server info waits only briefly: if a stage is busy
with an operation, the last known values are returned. These routes need no key; the aggregate of
all stages, which needs the admin key, is /model_info.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import trio
from quart import Response
from quart_trio import QuartTrio

from omni_proxy import __version__
from omni_proxy.replica.api.common.errors import (
    CLIENT_ERRORS,
    DetailError,
    OpenAIError,
    json_response,
    status_and_message,
)
from omni_proxy.replica.api.metrics import load_report, load_summary
from omni_proxy.replica.api.route_context import RouteContext
from omni_proxy.replica.api.sglang.admin_operations import (
    MODEL_FACTS,
    SHARED_FACTS,
    model_facts,
    require_key,
)
from omni_proxy.replica.kv_events.publisher_settings import sglang_source
from omni_proxy.replica.pipeline.requests import GenerateRequest, RequestFailed, SamplingParams
from omni_proxy.shared.engine_protocol import INSTANCE_HEADER

HEALTH_KEYS = (
    "status",
    "running",
    "stages",
    "entry_stage",
    "total_requests",
    "pending_completions",
    "request_states",
    "stream_delivery",
)
OWNER = "sglang-omni"
FACTS_TIMEOUT_SECS = 2.0
FLUSH_TIMEOUT_SECS = 60.0
GENERATE_TIMEOUT_SECS = 20.0
# Features of SGLang's servers that this one lacks, reported explicitly for its clients.
# `quantization` is None, since weights of quantized files are unpacked when they are loaded.
UNSUPPORTED_FEATURES = {
    "quantization": None,
    "fp8_kv_cache_enabled": False,
    "fp8_kv_cache_requires_postprocess": False,
    "fp8_kv_cache_static_scales": False,
    "speculative_algorithm": None,
    "enable_lora": False,
    "max_lora_rank": None,
}


class HealthRoutes:
    def __init__(self, context: RouteContext) -> None:
        self._context = context

    async def health(self) -> Response:
        report = health_report(self._context)
        status = 200 if report["status"] == "healthy" else 503
        return json_response(report, status, {INSTANCE_HEADER: self._context.instance})

    async def icon(self) -> Response:
        return Response(b"", 404)


def health_report(context: RouteContext) -> dict[str, Any]:
    """The client's health; `starting` while the server warms up."""
    report = context.client.health()
    public = {key: report[key] for key in HEALTH_KEYS if key in report}
    if public.get("status") == "healthy" and context.ready is not None and not context.ready():
        public["status"] = "starting"
    return public


class ModelListRoutes:
    def __init__(self, context: RouteContext) -> None:
        self._context = context

    async def list_models(self) -> Response:
        return json_response({"object": "list", "data": [self._card()]})

    async def get_model(self, name: str) -> Response:
        """Return the model's card; raises OpenAIError 404 for any other name."""
        if name != self._context.model_name:
            message = (
                f"the model {name!r} does not exist; this server has {self._context.model_name!r}"
            )
            raise OpenAIError(404, message, "model", "model_not_found")
        return json_response(self._card())

    def _card(self) -> dict[str, Any]:
        name = self._context.model_name
        permission = {
            "id": "modelperm-default",
            "object": "model_permission",
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
        }
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": OWNER,
            "permission": [permission],
            "root": name,
        }


class InfoRoutes:
    def __init__(self, context: RouteContext) -> None:
        self._context = context
        self._facts: dict[str, Any] = dict.fromkeys((*SHARED_FACTS, *MODEL_FACTS))

    async def model_info(self) -> Response:
        facts = await self._latest_facts()
        name = self._context.model_name
        return json_response(
            {
                "model_path": self._model_path(facts),
                "served_model_name": name,
                "tokenizer_path": self._model_path(facts),
                "is_generation": True,
                "weight_version": facts["weight_version"],
                "load_format": facts["load_format"],
            }
        )

    async def server_info(self) -> Response:
        context = self._context
        facts = await self._latest_facts()
        load = self._load()
        return json_response(
            {
                "model_path": self._model_path(facts),
                "served_model_name": context.model_name,
                "tokenizer_path": self._model_path(facts),
                "is_generation": True,
                "tp_size": self._context.client.tp_size(),
                "dp_size": 1,
                "version": __version__,
                "weight_version": facts["weight_version"],
                "load_format": facts["load_format"],
                **{name: facts[name] for name in MODEL_FACTS},
                **UNSUPPORTED_FEATURES,
                **self._roles(facts),
                "kv_events": sglang_source(context.client.stage_info().values()),
                "max_total_num_tokens": load["max_total_num_tokens"],
                "max_running_requests": load["max_running_requests"],
                "start_time": context.started_unix_secs,
                "uptime_secs": round(time.time() - context.started_unix_secs, 3),
                "instance_id": context.instance,
                "stages": list(context.client.health().get("stages", ())),
                "internal_states": [load | {"last_gen_throughput": load["gen_throughput"]}],
            }
        )

    async def loads(self) -> Response:
        load = self._load()
        return json_response(
            {
                "timestamp": datetime.now(UTC).isoformat(),
                "version": __version__,
                "dp_rank_count": 1,
                "loads": [load],
                "aggregate": load_summary(load),
            }
        )

    async def load(self) -> Response:
        """The older format: one object for each rank."""
        load = self._load()
        return json_response(
            [
                {
                    "dp_rank": 0,
                    "num_reqs": load["num_total_reqs"],
                    "num_waiting_reqs": load["num_waiting_reqs"],
                    "num_tokens": load["num_used_tokens"],
                }
            ]
        )

    async def generate_health(self) -> Response:
        """Generate one token: 200 with an empty body, or 503 with the reason."""
        health = health_report(self._context)
        if health["status"] != "healthy":
            raise DetailError(503, f"the server is {health['status']}")
        if self._context.can("chat"):
            await self._generate_one()
        return Response(b"", 200, content_type="text/plain; charset=utf-8")

    async def _generate_one(self) -> None:
        sampling = SamplingParams(temperature=0.0, max_new_tokens=1)
        request = GenerateRequest(prompt="1", sampling=sampling, task="completion")
        try:
            with trio.fail_after(GENERATE_TIMEOUT_SECS):
                await self._context.client.completion(request)
        except trio.TooSlowError:
            raise DetailError(
                503, f"no token was generated within {GENERATE_TIMEOUT_SECS:g} s"
            ) from None
        except CLIENT_ERRORS as error:
            raise DetailError(503, status_and_message(error)[1]) from None

    async def flush_cache(self) -> Response:
        require_key(self._context)
        aggregate = await self._context.client.admin("flush_cache", {}, None, FLUSH_TIMEOUT_SECS)
        status = 200 if aggregate["success"] else 400
        text = "Cache flushed.\n" if status == 200 else f"{aggregate['message']}\n"
        return Response(text, status, content_type="text/plain; charset=utf-8")

    async def _latest_facts(self) -> dict[str, Any]:
        with trio.move_on_after(FACTS_TIMEOUT_SECS):
            try:
                aggregate = await self._context.client.admin(
                    "model_info", {}, None, FACTS_TIMEOUT_SECS
                )
            except RequestFailed:
                return self._facts
            self._facts = model_facts(aggregate).shared
        return self._facts

    def _roles(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Whether prefill and decode run on separate replicas, and where KVs are fetched."""
        transfer = self._context.transfer
        if transfer.role == "null":
            return {"disaggregation_mode": "null"}
        port = (facts.get("kv_transfer") or {}).get("port") or transfer.port
        return {
            "disaggregation_mode": transfer.role,
            "disaggregation_transfer_backend": transfer.connector,
            "disaggregation_bootstrap_port": port,
            "kv_transfer": facts.get("kv_transfer"),
        }

    def _model_path(self, facts: dict[str, Any]) -> str:
        return facts.get("model_path") or self._context.model_path or self._context.model_name

    def _load(self) -> dict[str, Any]:
        client = self._context.client
        max_running = [info.get("max_running") or 0 for info in client.stage_info().values()]
        return load_report(client.stats(), int(sum(max_running)))


def mount(app: QuartTrio, context: RouteContext) -> None:
    health = HealthRoutes(context)
    app.add_url_rule("/health", "health", health.health)
    app.add_url_rule("/favicon.ico", "icon", health.icon)
    models = ModelListRoutes(context)
    app.add_url_rule("/v1/models", "models", models.list_models)
    # A name may contain slashes; the router gives it percent-decoded.
    app.add_url_rule("/v1/models/<path:name>", "model", models.get_model)
    if context.dialect != "vllm":
        _mount_sglang_info(app, InfoRoutes(context))


def _mount_sglang_info(app: QuartTrio, routes: InfoRoutes) -> None:
    views = {
        "/get_model_info": routes.model_info,
        "/server_info": routes.server_info,
        "/get_server_info": routes.server_info,
        "/v1/loads": routes.loads,
        "/get_loads": routes.loads,
        "/get_load": routes.load,
        "/health_generate": routes.generate_health,
    }
    for path, view in views.items():
        app.add_url_rule(path, path.strip("/").replace("/", "_"), view)
    app.add_url_rule("/flush_cache", "flush_cache", routes.flush_cache, methods=["GET", "POST"])
