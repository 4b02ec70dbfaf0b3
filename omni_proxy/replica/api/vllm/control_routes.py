"""vLLM's control routes: pause, sleep, abort, caches, version; and the admin actions they call.

Invariant: during a pause, requests wait and none is refused; requests that it aborts return their
partial output, with `finish_reason` abort. Routes that change state need the admin key, read-only
routes do not. The only state here is in `EngineCalls`: which parts of the engine sleep; whether a
stage is paused is the stage's own state.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, Literal, cast

from quart import Response, request
from quart_trio import QuartTrio

from omni_proxy import __version__
from omni_proxy.replica.api.common.errors import empty_response, json_response
from omni_proxy.replica.api.common.kv_transfers import release_kept
from omni_proxy.replica.api.common.lenient_decode import MISSING, json_body, problem
from omni_proxy.replica.api.common.request_ids import bare_id, id_matcher
from omni_proxy.replica.api.route_context import RouteContext
from omni_proxy.replica.api.sglang.admin_operations import ModelFacts, model_facts, require_key
from omni_proxy.replica.api.vllm.vllm_errors import (
    VllmError,
    http_reason,
    query_choice,
    query_flag,
    validation_error,
    vllm_view,
    worker_error,
)
from omni_proxy.replica.kv_events.publisher_settings import vllm_sources

PauseChoice = Literal["abort", "wait", "keep"]
PAUSE_MODES: Final[tuple[PauseChoice, ...]] = ("abort", "wait", "keep")
SLEEPING_PARTS: Final = ("weights", "kv_cache")
CONTROL_SECS: Final = 60.0
WAIT_SECS: Final = 3600.0  # for running requests to end, and for a trainer
SLEEP_LEVELS = ("0", "1", "2")
NO_METHOD = "'Worker' object has no attribute '{}'"


class EngineCalls:
    """vLLM's calls of its engine, as admin actions of the stages; one instance for each app."""

    def __init__(self, context: RouteContext) -> None:
        self._context = context
        self._asleep: set[str] = set()

    async def run(
        self, action: str, payload: dict[str, Any] | None = None, secs: float = CONTROL_SECS
    ) -> dict[str, Any]:
        """Run an action; return the data of the stage that ran it.

        Raises VllmError: 500 if a stage refused the action, 501 if none supports it.
        """
        aggregate = await self._context.client.admin(action, payload or {}, None, secs)
        if not aggregate["success"]:
            raise worker_error(str(aggregate["message"]))
        for result in aggregate["results"]:
            if not result["data"].get("skipped"):
                data: dict[str, Any] = result["data"]
                return data
        raise VllmError(501, f"no stage of this pipeline supports {action}")

    async def facts(self) -> ModelFacts:
        return model_facts(await self._context.client.admin("model_info", {}, None, CONTROL_SECS))

    # Pause and sleep

    async def pause(self, mode: PauseChoice, *, clear_cache: bool = True) -> None:
        """Returns when no batch is being computed; new requests wait for `resume`."""
        match mode:
            case "keep":
                await self.run("pause_generation", {"mode": "in_place"})
                return
            case "wait":
                await self.run("pause_when_idle", {}, WAIT_SECS)
            case "abort":
                await self.run("pause_generation", {"mode": "in_place"})
                self._context.client.end_early(lambda _: True)
        # Its result means that the aborts are done: a stage handles its messages in order.
        await self.run("flush_cache" if clear_cache else "model_info")

    async def resume(self) -> None:
        await self.run("continue_generation")

    async def is_paused(self) -> bool:
        facts = await self.facts()
        return any(stage["data"].get("paused") for stage in facts.stages)

    async def sleep(self, level: int, mode: PauseChoice) -> None:
        """Pause; from level 1 on, also flush the prefix cache. The weights stay in memory."""
        await self.pause(mode, clear_cache=level >= 1)
        if level >= 1:
            await self.run("flush_cache")
            self._asleep.update(SLEEPING_PARTS)

    async def wake_up(self, tags: Sequence[str]) -> bool:
        """Wake up the parts named in `tags`, or all if there are none.

        Returns whether all parts are awake now, so that requests continue.
        """
        self._asleep -= set(tags or SLEEPING_PARTS)
        if self._asleep:
            return False
        await self.resume()
        return True

    async def is_sleeping(self) -> bool:
        return bool(self._asleep) or await self.is_paused()

    # Requests

    def abort(self, request_ids: Sequence[str]) -> int:
        """Abort these requests, which return their partial output; returns how many were live."""
        return len(self._context.client.end_early(id_matcher(request_ids)))

    def abort_all(self) -> int:
        return len(self._context.client.end_early(lambda _: True))

    def world_size(self) -> int:
        return self._context.client.tp_size()


def _named(ids: list[str]) -> dict[str, Any]:
    """The named request ids, with and without the prefix that responses add."""
    return {"ids": [*ids, *map(bare_id, ids)]}


class ControlRoutes:
    def __init__(self, context: RouteContext, engine: EngineCalls) -> None:
        self._context = context
        self._engine = engine

    # Pause and sleep

    async def pause(self) -> Response:
        require_key(self._context)
        mode = _mode()
        clear_cache = query_flag("clear_cache", default=True)
        await self._engine.pause(mode, clear_cache=clear_cache)
        return json_response({"status": "paused"})

    async def resume(self) -> Response:
        require_key(self._context)
        await self._engine.resume()
        return json_response({"status": "resumed"})

    async def is_paused(self) -> Response:
        return json_response({"is_paused": await self._engine.is_paused()})

    async def sleep(self) -> Response:
        require_key(self._context)
        level = _level()
        await self._engine.sleep(level, _mode())
        return json_response({"status": "sleeping", "level": level})

    async def wake_up(self) -> Response:
        require_key(self._context)
        tags = request.args.getlist("tags")
        awake = await self._engine.wake_up(tags)
        status = "awake" if awake else "sleeping"
        return json_response({"status": status, "tags": tags or None})

    async def is_sleeping(self) -> Response:
        return json_response({"is_sleeping": await self._engine.is_sleeping()})

    # Requests and caches

    async def abort_requests(self) -> Response:
        """Abort all requests, or those named; as in vLLM, the count includes unknown names."""
        ids = await self._ids_of_body()
        if ids:
            self._engine.abort(ids)
            await release_kept(self._context, _named(ids))
            return json_response({"status": "aborted", "aborted": len(ids)})
        aborted = self._engine.abort_all()
        await release_kept(self._context, {"all": True})
        return json_response({"status": "aborted", "aborted": aborted})

    async def abort_inference_requests(self) -> Response:
        ids = await self._ids_of_body()
        if ids is None:
            raise _framework_error("Missing 'request_ids' in request body")
        self._engine.abort(ids)
        await release_kept(self._context, _named(ids))
        return empty_response()

    async def _ids_of_body(self) -> list[str] | None:
        """The ids in the body, or None; raises VllmError."""
        body = await _object_body()
        require_key(self._context)
        ids = body.get("request_ids")
        if ids is None:
            return None
        if not isinstance(ids, list) or not all(isinstance(request_id, str) for request_id in ids):
            raise _framework_error("'request_ids' must be a list of strings")
        return ids

    async def reset_prefix_cache(self) -> Response:
        """Flush the prefix cache; never fails, because running requests have their own copies."""
        require_key(self._context)
        query_flag("reset_running_requests", default=False)
        query_flag("reset_external", default=False)
        await self._engine.run("flush_cache")
        return json_response({"success": True})

    async def reset_other_cache(self) -> Response:
        """A no-op: there is no cache of media or encodings."""
        require_key(self._context)
        return empty_response()

    # Calls of the engine's workers

    async def call_workers(self) -> Response:
        body = await _object_body()
        require_key(self._context)
        method = body.get("method")
        if method is None:
            raise _framework_error("Missing 'method' in request body")
        if method != "reload_weights":
            raise worker_error(NO_METHOD.format(method))
        await self._reload(body)
        return json_response({"results": [None] * self._engine.world_size()})

    async def _reload(self, body: dict[str, Any]) -> None:
        kwargs = body.get("kwargs") or {}
        path = kwargs.get("weights_path") if isinstance(kwargs, dict) else None
        if not isinstance(path, str) or not path:
            raise worker_error("reload_weights needs kwargs.weights_path here")
        timeout = body.get("timeout")
        secs = float(timeout) if isinstance(timeout, int | float) else 600.0
        payload = {"model_path": path, "flush_cache": True, "beside_requests": True}
        await self._engine.run("update_weights_from_disk", payload, secs)

    # Server info

    async def world_size(self) -> Response:
        query_flag("include_dp", default=True)
        return json_response({"world_size": self._engine.world_size()})

    async def version(self) -> Response:
        return json_response({"version": __version__})

    async def load(self) -> Response:
        return json_response({"server_load": self._context.client.health()["pending_completions"]})

    async def kv_event_sources(self) -> Response:
        return json_response(vllm_sources(self._context.client.stage_info().values()))

    async def ping(self) -> Response:
        return empty_response()


def _mode() -> PauseChoice:
    return cast("PauseChoice", query_choice("mode", PAUSE_MODES, "abort"))


def _level() -> int:
    level = request.args.get("level", "1")
    if level in SLEEP_LEVELS:
        return int(level)
    kind, text = "int_parsing", "Input should be a valid integer, unable to parse string"
    if re.fullmatch(r"-\d+", level):
        kind, text = "greater_than_equal", "Input should be greater than or equal to 0"
    elif level.isdecimal():
        kind, text = "less_than_equal", "Input should be less than or equal to 2"
    raise validation_error([problem(kind, ("query", "level"), text, level)])


def _framework_error(message: str) -> VllmError:
    return VllmError(400, message, kind=http_reason(400))


async def _object_body() -> dict[str, Any]:
    """The JSON object in the body; raises VllmError if there is none, as in vLLM."""
    body = await json_body()
    if body is MISSING:
        raise _framework_error("Invalid JSON format")
    if not isinstance(body, dict):
        raise _framework_error("Request body must be a JSON object")
    return body


def mount(app: QuartTrio, context: RouteContext, engine: EngineCalls) -> None:
    routes = ControlRoutes(context, engine)
    posts = {
        "/pause": routes.pause,
        "/resume": routes.resume,
        "/sleep": routes.sleep,
        "/wake_up": routes.wake_up,
        "/abort_requests": routes.abort_requests,
        "/inference/v1/abort_requests": routes.abort_inference_requests,
        "/reset_prefix_cache": routes.reset_prefix_cache,
        "/reset_mm_cache": routes.reset_other_cache,
        "/reset_encoder_cache": routes.reset_other_cache,
        "/collective_rpc": routes.call_workers,
    }
    gets = {
        "/is_paused": routes.is_paused,
        "/is_sleeping": routes.is_sleeping,
        "/get_world_size": routes.world_size,
        "/version": routes.version,
        "/load": routes.load,
        "/kv_event_sources": routes.kv_event_sources,
        "/ping": routes.ping,
    }
    for method, views in (("POST", posts), ("GET", gets)):
        for path, view in views.items():
            name = path.strip("/").replace("/", "_")
            app.add_url_rule(path, name, vllm_view(view), methods=[method])
