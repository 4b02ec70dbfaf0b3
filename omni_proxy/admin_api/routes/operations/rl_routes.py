"""sgl-model-gateway's control routes for RL, on the proxy's operation queue (note:routers 1.8).

Invariant: a path that is an admin route is handled as one, with its lock, its cordon and its
journal record; any other path is sent to the engines unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote

from quart import Quart, Response, request

from omni_proxy.admin_api.access.key_check import caller
from omni_proxy.admin_api.access.roles import ANY_METHOD
from omni_proxy.admin_api.fleet_changes import lookup_worker
from omni_proxy.admin_api.forwarded_request import target_of, worker_headers
from omni_proxy.admin_api.responses import body_bytes, json_response
from omni_proxy.admin_api.routes.operations.weight_routes import refuse_no_object, shown
from omni_proxy.admin_api.selector_resolution import Facts, SelectorResolver
from omni_proxy.admin_api.serializers.worker_records import WorkerRecords
from omni_proxy.admin_ops.admin_route_table import BY_PATH, AdminRoute, Kind
from omni_proxy.admin_ops.engine_dialects import with_defaults
from omni_proxy.admin_ops.results import AdminResponse
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.weight_sync.weight_operations import WeightOperations
from omni_proxy.weight_sync.worker_calls import AdminCall
from omni_proxy.wire.errors import HttpError

PROTOCOL_VERSION = 1
CAPABILITIES = {
    "source": "static",
    "pause_modes": ["abort", "retract", "in_place"],
    "update_from": ["disk", "tensor", "distributed"],
    "abort": True,
    "flush_cache": True,
    "sleep_wake": False,
    "reports_weight_version": True,
}
ENGINE = "/engine/"


class RlRoutes:
    def __init__(
        self,
        fleet: Fleet,
        weight_operations: WeightOperations,
        records: WorkerRecords,
        selectors: SelectorResolver,
    ) -> None:
        self._fleet = fleet
        self._weight_operations = weight_operations
        self._records = records
        self._selectors = selectors

    def mount(self, app: Quart) -> None:
        rule = app.add_url_rule
        rule("/v1/rl/workers", "rl_workers", self.all)
        rule("/v1/rl/workers/<path:name>", "rl_worker", self.one)
        engine_rule = "/v1/rl/workers/<path:name>/engine/<path:path>"
        rule(engine_rule, "rl_worker_engine", self.engine_of_one, methods=list(ANY_METHOD))
        rule("/v1/rl/engine/<path:path>", "rl_engine", self.engine, methods=list(ANY_METHOD))

    async def all(self) -> Response:
        workers = self._fleet.workers
        reported = await self._selectors.engine_facts(workers)
        records = [self._record(worker, reported.get(worker.url, {})) for worker in workers]
        return json_response({"protocol_version": PROTOCOL_VERSION, "workers": records})

    async def one(self, name: str) -> Response:
        worker = self._find(name)
        reported = await self._selectors.engine_facts([worker])
        return json_response(self._record(worker, reported.get(worker.url, {})))

    async def engine_of_one(self, name: str, path: str) -> Response:
        worker = self._find(name)
        response = await self._send(path, frozenset((worker.url,)))
        results = _results(response)
        if not results:
            return shown(response)
        result = self._result(results[0])
        if results[0]["success"]:
            return json_response(result)
        failure = self._failure(results[0])
        error = {"message": failure["message"], "type": "upstream_error", "code": failure["error"]}
        status = failure["status"] if isinstance(failure["status"], int) else 502
        return json_response({**result, "error": error}, status if status >= 400 else 502)

    async def engine(self, path: str) -> Response:
        """Send the call to the selected workers; 200 if all succeeded, else 207 with the failed
        ones."""
        text = request.args.get("selector")
        if not text:
            raise HttpError(400, "name the workers with ?selector=", "selector_required")
        response = await self._send(path, await self._selectors.urls(text) or frozenset())
        results = _results(response)
        if not results:
            return shown(response)
        failed = [self._failure(result) for result in results if not result["success"]]
        reported = {
            "results": {
                self._id(result): self._result(result) for result in results if result["success"]
            },
            "failed": failed,
            "total": len(results),
            "succeeded": len(results) - len(failed),
        }
        return json_response(reported, 207 if failed else 200)

    async def _send(self, path: str, urls: frozenset[str]) -> AdminResponse:
        """Raises HttpError 400 for a path that could resolve to another one."""
        if ".." in path.split("/") or "\\" in path:
            raise HttpError(400, f"no engine has the path /{path}", "invalid_engine_path")
        target = "/" + quote(path, safe="/:@!$&'()*+,;=~")
        admin_route = BY_PATH.get(target)
        if admin_route is not None and request.method not in admin_route.methods:
            admin_route = None
        route = admin_route or AdminRoute(target, Kind.READ)
        body = await body_bytes()
        if admin_route is not None:
            await refuse_no_object(admin_route, body)
            body = with_defaults(admin_route.path, body)
        headers = worker_headers(body)
        call = AdminCall(route, request.method, target_of(target), body, headers, urls, caller())
        return await self._weight_operations.submit(call)

    def _find(self, name: str) -> Worker:
        worker = lookup_worker(self._fleet, name)
        if worker is None:
            raise HttpError(404, "worker not found", "worker_not_found")
        return worker

    def _record(self, worker: Worker, reported: Facts) -> dict[str, object]:
        record = self._records.record(worker)
        return {
            "id": worker.id,
            "url": worker.url,
            "base_url": worker.url,
            "engine": reported.get("engine"),
            "engine_version": reported.get("engine_version"),
            "model_id": worker.model,
            "worker_type": worker.role,
            "connection_mode": "http",
            "control_url": worker.url,
            **{name: _number(reported.get(name)) for name in ("tp_size", "dp_size", "pp_size")},
            "dp_ranks": None,
            "role": worker.role,
            "health": record["status"],
            "weight_version": worker.weight_label,
            "labels": record["labels"],
            "capabilities": CAPABILITIES,
        }

    def _id(self, entry: Mapping[str, object]) -> str:
        worker = self._fleet.find(str(entry["worker"]))
        return worker.id if worker else str(entry["worker"])

    def _result(self, entry: Mapping[str, object]) -> dict[str, object]:
        secs = entry["seconds"]
        return {
            "worker_id": self._id(entry),
            "url": entry["worker"],
            "status": entry.get("status_code"),
            "latency_ms": round(secs * 1000, 3) if isinstance(secs, float | int) else None,
            "body": entry.get("body"),
        }

    def _failure(self, entry: Mapping[str, object]) -> dict[str, object]:
        unreached = "status_code" not in entry
        reason = entry.get("error") or entry.get("reason") or f"status {entry.get('status_code')}"
        return {
            "worker_id": self._id(entry),
            "url": entry["worker"],
            "error": "upstream_unreachable" if unreached else "upstream_error",
            "message": reason,
            "status": entry.get("status_code"),
            "body": entry.get("body"),
        }


def _results(response: AdminResponse) -> list[dict[str, object]]:
    """The reply of each worker; [] if none was called."""
    detail = response.body.get("detail")
    for container in (response.body, detail):
        results = container.get("results") if isinstance(container, Mapping) else None
        if isinstance(results, list):
            return results
    return []


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None
