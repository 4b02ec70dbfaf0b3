"""What a router or a benchmark asks of an SGLang server: its facts, its load, and proof of life.

Invariant: facts never wait long for a stage: one that is busy with an operation is told as it was
last seen. These routes are open; the aggregate of the stages behind the admin key is /model_info.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import trio
from quart import Response
from quart_trio import QuartTrio

from omni_proxy import __version__
from omni_proxy.replica.api.admin import MODEL_FACTS, SHARED_FACTS, facts_of
from omni_proxy.replica.api.auth import require_key
from omni_proxy.replica.api.errors import CLIENT_ERRORS, Refused, refusal_of, reply
from omni_proxy.replica.api.health import health_of
from omni_proxy.replica.api.load import aggregate_of, load_of
from omni_proxy.replica.api.served import Served
from omni_proxy.replica.pipeline.requests import GenerateRequest, RequestFailed, SamplingParams

FACTS_SECS = 2.0
FLUSH_SECS = 60.0
PROOF_SECS = 20.0
# What SGLang's servers may have and this one has not: whoever reads it need not guess. Weights of
# quantized files are unpacked when they are loaded, and served so.
ABSENT = {
    "quantization": None,
    "fp8_kv_cache_enabled": False,
    "fp8_kv_cache_requires_postprocess": False,
    "fp8_kv_cache_static_scales": False,
    "speculative_algorithm": None,
    "enable_lora": False,
    "max_lora_rank": None,
}


class InfoRoutes:
    def __init__(self, served: Served) -> None:
        self._served = served
        self._facts: dict[str, Any] = dict.fromkeys((*SHARED_FACTS, *MODEL_FACTS))

    async def model_info(self) -> Response:
        facts = await self._latest_facts()
        name = self._served.model_name
        return reply(
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
        served = self._served
        facts = await self._latest_facts()
        load = self._load()
        return reply(
            {
                "model_path": self._model_path(facts),
                "served_model_name": served.model_name,
                "tokenizer_path": self._model_path(facts),
                "is_generation": True,
                "tp_size": self._tp_size(),
                "dp_size": 1,
                "version": __version__,
                "weight_version": facts["weight_version"],
                "load_format": facts["load_format"],
                **{name: facts[name] for name in MODEL_FACTS},
                **ABSENT,
                "disaggregation_mode": "null",
                "max_total_num_tokens": load["max_total_num_tokens"],
                "max_running_requests": load["max_running_requests"],
                "start_time": served.started_unix_secs,
                "uptime_secs": round(time.time() - served.started_unix_secs, 3),
                "instance_id": served.instance,
                "stages": list(served.client.health().get("stages", ())),
                "internal_states": [load | {"last_gen_throughput": load["gen_throughput"]}],
            }
        )

    async def loads(self) -> Response:
        load = self._load()
        return reply(
            {
                "timestamp": datetime.now(UTC).isoformat(),
                "version": __version__,
                "dp_rank_count": 1,
                "loads": [load],
                "aggregate": aggregate_of(load),
            }
        )

    async def load(self) -> Response:
        """The older shape: one object for each rank."""
        load = self._load()
        return reply(
            [
                {
                    "dp_rank": 0,
                    "num_reqs": load["num_total_reqs"],
                    "num_waiting_reqs": load["num_waiting_reqs"],
                    "num_tokens": load["num_used_tokens"],
                }
            ]
        )

    async def prove(self) -> Response:
        """Generate one token. 200 with an empty body, or 503 that says why not."""
        health = health_of(self._served)
        if health["status"] != "healthy":
            raise Refused(503, f"the server is {health['status']}")
        if self._served.can("chat"):
            await self._generate_one()
        return Response(b"", 200, content_type="text/plain; charset=utf-8")

    async def _generate_one(self) -> None:
        sampling = SamplingParams(temperature=0.0, max_new_tokens=1)
        asked = GenerateRequest(prompt="1", sampling=sampling, task="completion")
        try:
            with trio.fail_after(PROOF_SECS):
                await self._served.client.completion(asked)
        except trio.TooSlowError:
            raise Refused(503, f"no token was generated within {PROOF_SECS:g} s") from None
        except CLIENT_ERRORS as error:
            raise Refused(503, refusal_of(error)[1]) from None

    async def flush(self) -> Response:
        require_key(self._served)
        aggregate = await self._served.client.admin("flush_cache", {}, None, FLUSH_SECS)
        status = 200 if aggregate["success"] else 400
        told = "Cache flushed.\n" if status == 200 else f"{aggregate['message']}\n"
        return Response(told, status, content_type="text/plain; charset=utf-8")

    async def _latest_facts(self) -> dict[str, Any]:
        with trio.move_on_after(FACTS_SECS):
            try:
                aggregate = await self._served.client.admin("model_info", {}, None, FACTS_SECS)
            except RequestFailed:
                return self._facts
            self._facts = facts_of(aggregate).shared
        return self._facts

    def _model_path(self, facts: dict[str, Any]) -> str:
        return facts.get("model_path") or self._served.model_path or self._served.model_name

    def _tp_size(self) -> int:
        """Over how many processes a stage's model is split."""
        infos = self._served.client.stage_info().values()
        return max((info.get("tp_size", 1) for info in infos), default=1)

    def _load(self) -> dict[str, Any]:
        client = self._served.client
        told = [info.get("max_running") or 0 for info in client.stage_info().values()]
        return load_of(client.stats(), int(sum(told)))


def mount(app: QuartTrio, served: Served) -> None:
    routes = InfoRoutes(served)
    views = {
        "/get_model_info": routes.model_info,
        "/server_info": routes.server_info,
        "/get_server_info": routes.server_info,
        "/v1/loads": routes.loads,
        "/get_loads": routes.loads,
        "/get_load": routes.load,
        "/health_generate": routes.prove,
    }
    for path, view in views.items():
        app.add_url_rule(path, path.strip("/").replace("/", "_"), view)
    app.add_url_rule("/flush_cache", "flush_cache", routes.flush, methods=["GET", "POST"])
