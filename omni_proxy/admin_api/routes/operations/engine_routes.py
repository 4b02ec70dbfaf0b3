"""Routes that request reports from all engines and merge them into one response.

They are those of sglang and sgl-model-gateway: loads, server and model info, cache flush, a health
check that generates, metrics (note:routers 1.6, 1.7). Invariant: if a worker does not answer, only
its own part of the response is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quart import Quart, Response, request

from omni_proxy.admin_api.forwarded_request import forwarded_headers
from omni_proxy.admin_api.responses import json_response
from omni_proxy.admin_api.selector_resolution import SelectorResolver
from omni_proxy.admin_api.serializers.load_report import loads_response, merge_server_info
from omni_proxy.admin_api.serializers.metrics_text import CONTENT_TYPE, merge_metrics
from omni_proxy.fleet.health_state import Health
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.upstream_http.client import (
    MAX_PARALLEL_CALLS,
    ROUTE_ABSENT,
    Call,
    CallResult,
    broadcast,
    call_each,
    call_worker,
    flush_cache,
    generate_token,
)
from omni_proxy.upstream_http.credentials import credentials_of
from omni_proxy.weight_sync.weight_operations import WeightOperations
from omni_proxy.wire.errors import HttpError

GENERATE_SECS = 20.0  # the token of the health check waits for running requests
METRICS_BYTES = 8 * 1024 * 1024
INFO_SECS = 15.0  # server info may be slower than a probe


class EngineRoutes:
    def __init__(
        self,
        fleet: Fleet,
        config_store: ConfigStore,
        weight_operations: WeightOperations,
        selectors: SelectorResolver,
    ) -> None:
        self._fleet = fleet
        self._config_store = config_store
        self._weight_operations = weight_operations
        self._selectors = selectors

    def mount(self, app: Quart) -> None:
        rule = app.add_url_rule
        rule("/health_generate", "health_generate", self.health_generate)
        rule("/get_model_info", "get_model_info", self.model_info)
        for path in ("/server_info", "/get_server_info"):
            rule(path, path[1:], self.server_info)
        for path in ("/get_loads", "/v1/loads"):
            rule(path, path[1:].replace("/", "_"), self.loads)
        rule("/flush_cache", "flush_cache", self.flush_cache, methods=["GET", "POST"])
        rule("/engine_metrics", "engine_metrics", self.metrics)

    async def health_generate(self) -> Response:
        """Make a routable worker generate a token; the least loaded one is tried first."""
        reasons = {}
        for worker in sorted(self._routable(), key=lambda worker: worker.in_flight):
            result = await generate_token(worker, _credentials(), GENERATE_SECS)
            if result.ok:
                return json_response({"status": "ok", "worker": worker.url})
            reasons[worker.url] = result.failure
        message = "no worker generated: " + ", ".join(
            f"{u}: {reason}" for u, reason in reasons.items()
        )
        raise HttpError(503, message, "generation_failed")

    async def model_info(self) -> Response:
        """The first routable worker's reply: replicas of one model agree."""
        reasons = {}
        for worker in self._routable():
            response = await self._first_of(worker, ("/get_model_info", "/model_info"))
            info = response.json() if response.ok else None
            if response.status in ROUTE_ABSENT:  # vLLM has neither route
                models = await self._first_of(worker, ("/v1/models",))
                info = _info_of_models(models.json()) if models.ok else None
            if isinstance(info, dict):  # encoded again: NaN becomes null
                return json_response(info)
            reasons[worker.url] = "no JSON object" if response.ok else response.failure
        raise _no_response_error("model_info", reasons)

    async def server_info(self) -> Response:
        mode = self._config_store.config.weight_sync.mode
        # A trainer's group has the ranks of every worker that is alive, routable or not.
        workers = self._routable() if mode == "off" else self._alive()
        results = await broadcast(workers, self._get("/server_info"))
        old = [result.worker for result in results if result.status in ROUTE_ABSENT]
        retried = {
            result.worker: result for result in await broadcast(old, self._get("/get_server_info"))
        }
        results = [retried.get(result.worker, result) for result in results]
        holding = self._weight_operations.version_service
        merged = await merge_server_info(results, holding.store_service.has_path)
        if merged is None:
            raise _no_response_error(
                "server_info", {result.worker.url: result.failure for result in results}
            )
        merged["tp_size"] = holding.rank_count(merged["tp_size"])
        return json_response(merged)

    async def loads(self) -> Response:
        results = await broadcast(self._alive(), self._get("/v1/loads"))
        return json_response(await loads_response(results))

    async def flush_cache(self) -> Response:
        """200 if all targets flushed, 502 if one did not; the proxy drops its records of their
        cached prefixes."""
        urls = await self._selectors.urls(request.args.get("selector"))
        alive = [worker for worker in self._alive() if urls is None or worker.url in urls]
        if urls is not None and not alive:
            raise HttpError(404, "the selector matches no live worker", "no_workers_match")
        results = await self._flushed(alive)
        flushed = [result for result in results if result.ok]
        for result in flushed:
            self._fleet.cache_cleared(result.worker)
        all_did = len(flushed) == len(results)
        response = {
            "status": "success" if all_did else "partial" if flushed else "failed",
            "message": f"{len(flushed)} of {len(results)} workers flushed their cache",
            "workers_flushed": len(flushed),
            "total_http_workers": len(results),
            "total_grpc_workers": 0,
            "total_zmq_workers_skipped": 0,
            "total_workers": len(self._fleet.workers),
            "failed": {result.worker.url: result.failure for result in results if not result.ok},
        }
        return json_response(response, 200 if all_did else 502)

    async def _flushed(self, workers: Sequence[Worker]) -> list[CallResult]:
        """The results in the order of the workers."""
        headers = _credentials()
        return await call_each(
            workers,
            lambda worker: flush_cache(worker, headers, self._secs),
            max_parallel=MAX_PARALLEL_CALLS,
        )

    async def metrics(self) -> Response:
        workers = self._alive()
        call = Call("GET", "/metrics", timeout_secs=self._secs, max_bytes=METRICS_BYTES)
        merged = await merge_metrics(await broadcast(workers, call))
        return Response(merged, 200, content_type=CONTENT_TYPE)

    @property
    def _secs(self) -> float:
        """Time limit of a call; an engine's first answer may take longer than a probe."""
        return max(INFO_SECS, self._config_store.config.health.timeout_secs)

    def _routable(self) -> list[Worker]:
        """The routable workers. Raises HttpError 503 if there is none."""
        workers = [worker for worker in self._fleet.workers if worker.routable]
        if not workers:
            raise HttpError(503, "no routable upstream", "no_routable_worker")
        return workers

    def _alive(self) -> list[Worker]:
        return [w for w in self._fleet.workers if w.health.state is not Health.DEAD]

    def _get(self, target: str) -> Call:
        return Call("GET", target, timeout_secs=self._secs, headers=_credentials())

    async def _first_of(self, worker: Worker, targets: Sequence[str]) -> CallResult:
        """The reply of the first of these routes that the worker has."""
        result = None
        for target in targets:
            call = Call("GET", target, timeout_secs=self._secs, headers=_credentials())
            result = await call_worker(worker, call)
            if result.status not in ROUTE_ABSENT:
                break
        assert result is not None
        return result


def _info_of_models(models: object) -> dict[str, object] | None:
    """The model info that a reply of GET /v1/models has of its first model."""
    cards = models.get("data") if isinstance(models, dict) else None
    card = cards[0] if isinstance(cards, list) and cards else None
    name = card.get("root") or card.get("id") if isinstance(card, dict) else None
    if not isinstance(card, dict) or not isinstance(name, str):
        return None
    length = card.get("max_model_len")
    return {"model_path": name} | ({"max_model_len": length} if isinstance(length, int) else {})


def _credentials() -> dict[str, str]:
    return credentials_of(forwarded_headers(request.headers))


def _no_response_error(name: str, reasons: Mapping[str, str]) -> HttpError:
    return HttpError(
        502, f"no worker returned its {name}", f"{name}_unavailable", details=dict(reasons)
    )
