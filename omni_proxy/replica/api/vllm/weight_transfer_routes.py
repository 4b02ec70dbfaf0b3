"""vLLM's weight routes: join a trainer, start, update, finish, and the version's label.

Each route runs one admin action of the text stage (`weights/weight_transfer.py`). Invariant: the
response is sent when every rank has finished; a refusal is vLLM's 500 with the worker's reason.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct
from quart import Response
from quart_trio import QuartTrio

from omni_proxy.replica.api.common.errors import json_response
from omni_proxy.replica.api.route_context import RouteContext
from omni_proxy.replica.api.sglang.admin_operations import admin_body, require_key
from omni_proxy.replica.api.vllm.control_routes import CONTROL_SECS, WAIT_SECS, EngineCalls
from omni_proxy.replica.api.vllm.vllm_errors import (
    VllmError,
    decode_control_body,
    http_reason,
    vllm_view,
)

# Added to the stage's deadline, so that the stage replies first.
GRACE_SECS = 30.0
FINISH_SECS = 600.0
NO_BASELINE = "action='compare' requires a 'baseline' object"


class InitTransfer(Struct):
    init_info: dict[str, Any]


class UpdateWeights(Struct):
    update_info: dict[str, Any] | list[dict[str, Any]]


class FinishUpdate(Struct):
    weight_version: str | None = None


class NameVersion(Struct):
    new_version: str


class CheckWeightsAgainst(Struct):
    action: Literal["checksum", "reset", "compare"]
    baseline: dict[str, str] | None = None


class WeightTransferRoutes:
    def __init__(self, context: RouteContext, engine: EngineCalls) -> None:
        self._context = context
        self._engine = engine

    async def init(self) -> Response:
        body = decode_control_body(InitTransfer, await admin_body(self._context))
        payload = {"init_info": body.init_info}
        await self._engine.run("init_weight_transfer_engine", payload, WAIT_SECS + GRACE_SECS)
        return json_response({"message": "Weight transfer initialized"})

    async def shutdown(self) -> Response:
        require_key(self._context)
        await self._engine.run("shutdown_weight_transfer_engine")
        return json_response({"message": "Weight transfer shut down"})

    async def start(self) -> Response:
        require_key(self._context)
        await self._engine.run("start_weight_update")
        return json_response({"message": "Weight update started"})

    async def start_draft(self) -> Response:
        require_key(self._context)
        await self._engine.run("start_weight_update", {"draft": True})
        return json_response({"message": "Draft weight update started"})

    async def update(self) -> Response:
        body = decode_control_body(UpdateWeights, await admin_body(self._context))
        payload = {"update_info": body.update_info}
        await self._engine.run("update_weights", payload, WAIT_SECS + GRACE_SECS)
        return json_response({"message": "Weights updated"})

    async def finish(self) -> Response:
        body = decode_control_body(FinishUpdate, await admin_body(self._context))
        payload = {"weight_version": body.weight_version}
        await self._engine.run("finish_weight_update", payload, FINISH_SECS)
        return json_response({"message": "Weight update finished"})

    async def set_version(self) -> Response:
        """Sets the version only: no request is aborted."""
        body = decode_control_body(NameVersion, await admin_body(self._context))
        payload = {"new_version": body.new_version, "abort_all_requests": False}
        await self._engine.run("update_weight_version", payload)
        return json_response({"success": True, "new_version": body.new_version})

    async def info(self) -> Response:
        facts = await self._engine.facts()
        return json_response({"weight_version": facts.shared["weight_version"]})

    async def check(self) -> Response:
        """Digests by name, each for one rank's part; as in vLLM 0.32, also while paused."""
        json_value = await admin_body(self._context)
        body = decode_control_body(CheckWeightsAgainst, json_value)
        if body.action == "reset":
            await self._engine.run("reset_weights")
            return json_response({"status": "reset"})
        if body.action == "compare" and body.baseline is None:
            raise VllmError(400, NO_BASELINE, kind=http_reason(400))
        payload = {"action": "checksum"}
        checksums = ranked_checksums(
            await self._engine.run("weights_checker", payload, 2 * CONTROL_SECS)
        )
        if body.baseline is None or body.action == "checksum":
            return json_response({"checksums": checksums})
        names = checksums.keys() | body.baseline.keys()
        mismatches = sorted(
            name for name in names if checksums.get(name) != body.baseline.get(name)
        )
        return json_response({"match": not mismatches, "mismatches": mismatches})


def ranked_checksums(data: dict[str, Any]) -> dict[str, str]:
    """The checker's digests of every rank, under vLLM's names."""
    rank_results = data.get("rank_results")
    parts = [rank_result["data"] for rank_result in rank_results] if rank_results else [data]
    return {
        f"dp0:pp0:pcp0:tp{rank}:{name}": digest
        for rank, part in enumerate(parts)
        for name, digest in part["checksums"].items()
    }


def mount(app: QuartTrio, context: RouteContext, engine: EngineCalls, *, alone: bool) -> None:
    """With `alone`, SGLang's routes, one of which has the same path as one here, are not served."""
    routes = WeightTransferRoutes(context, engine)
    posts = {
        "/init_weight_transfer_engine": routes.init,
        "/shutdown_weight_transfer_engine": routes.shutdown,
        "/start_weight_update": routes.start,
        "/start_draft_weight_update": routes.start_draft,
        "/update_weights": routes.update,
        "/finish_weight_update": routes.finish,
        "/weight_checker": routes.check,
    }
    if alone:
        posts["/update_weight_version"] = routes.set_version
    for path, view in posts.items():
        app.add_url_rule(path, path.strip("/"), vllm_view(view), methods=["POST"])
    app.add_url_rule("/weight_info", "weight_info", vllm_view(routes.info))
