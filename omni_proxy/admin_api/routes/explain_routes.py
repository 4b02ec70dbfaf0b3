"""POST /explain: where a model request would be routed and why; nothing is sent. GET /explain: the
candidates of a request that has ended. The JSON of both: the candidates, the pick, and the alias.

Invariant: a large JSON body is parsed in slices, as in the data plane, so that it blocks no other
task.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import trio
from quart import Quart, Response, request

from omni_proxy.admin_api.responses import body_bytes, json_response
from omni_proxy.admin_api.services import DataPlaneView
from omni_proxy.dataplane.upstream.fleet_requirements import (
    RequestParts,
    complete_requirements,
    pin_request,
)
from omni_proxy.fleet.dp_rank import DpRank
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.disaggregation.explanation import (
    PickRecord,
    PlacementExplanation,
    explain_placement,
)
from omni_proxy.routing.inspect.large_json import ONE_PASS_BYTES, LargeJsonFields, walk_large_json
from omni_proxy.routing.inspect.requirements import (
    RequestFacts,
    Requirements,
    has_json_body,
    inspect_request,
    requirements_of_large_json,
)
from omni_proxy.routing.model_aliases import TargetExplanation, explain_target
from omni_proxy.routing.routes import (
    DEFAULT_PATH,
    MethodNotAllowed,
    Route,
    configured_routes,
    find_route,
)
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.telemetry.recent_window import FinishedExchange, RecentWindow
from omni_proxy.wire.errors import HttpError, bad_request
from omni_proxy.wire.header_fields import HINTED_FIELDS


class ExplainRoutes:
    """`recent`: has the candidates of requests that have ended."""

    def __init__(
        self,
        fleet: Fleet,
        config_store: ConfigStore,
        data_plane: DataPlaneView,
        recent: RecentWindow,
    ) -> None:
        self._fleet = fleet
        self._config_store = config_store
        self._data_plane = data_plane
        self._recent = recent

    def mount(self, app: Quart) -> None:
        app.add_url_rule("/explain", "explain", self.show, methods=["POST"])
        app.add_url_rule("/explain", "explain_past", self.show_past, methods=["GET"])

    async def show_past(self) -> Response:
        """The candidates of a request that has ended."""
        request_id = request.args.get("request_id", "")
        if not request_id:
            raise bad_request("request_id is missing: the id of a request of GET /feed")
        for end in self._recent.ends():
            record = end.steps.candidates
            if record is not None and end.request_id == request_id:
                return json_response(past_record(record, end))
        message = (
            "no candidates of such a request are kept: they are kept for two requests per second, "
            "among the last ones in GET /feed"
        )
        raise HttpError(404, message, "unknown_request")

    async def show(self) -> Response:
        path = request.args.get("path", DEFAULT_PATH)
        try:
            configured = configured_routes(self._config_store.config.routes)
            route = find_route(configured, "POST", path)
        except MethodNotAllowed:
            route = None
        if route is None:
            raise bad_request(
                f"path {path} is not a model route; try {DEFAULT_PATH}", "unknown_path"
            )
        body = await body_bytes()
        facts = _facts()
        requirements = await _need_of(route, body, facts)
        data_plane, parts = (
            self._data_plane,
            RequestParts(route, (_lines(),), body, path, facts.hints),
        )
        pin_request(data_plane, self._fleet, requirements, parts, time.monotonic())
        complete_requirements(data_plane, self._fleet, requirements, parts)
        target = explain_target(requirements, data_plane.target_checks)
        explained = explain_placement(
            self._fleet, requirements, data_plane.policy, data_plane.pool_policies,
            data_plane.voices.owner,
        )  # fmt: skip
        record = explanation_record(explained, requirements)
        return json_response({**record, "alias": target and alias_record(target)})


async def _need_of(route: Route, body: bytes, request_facts: RequestFacts) -> Requirements:
    """The requirements of a model request with this body. Raises HttpError 400 if that would."""
    if len(body) > ONE_PASS_BYTES and has_json_body(route, request_facts):
        return requirements_of_large_json(route, await top_of(body), request_facts)
    return inspect_request(route, body, request_facts)


async def top_of(body: bytes) -> LargeJsonFields:
    """Parse the body in slices, with a checkpoint after each. Raises HttpError 400."""
    walk = walk_large_json(body)
    while True:
        try:
            next(walk)
        except StopIteration as stop:
            top: LargeJsonFields = stop.value
            return top
        await trio.lowlevel.checkpoint()


def _lines() -> bytes:
    """The request's header lines in the form that the data plane has for a model request."""
    fields = (f"{name}: {value}\r\n" for name, value in request.headers)
    return "".join(fields).encode("latin-1", "replace")


def _facts() -> RequestFacts:
    """The facts of the request. A body of unknown type is read as JSON, which users paste here."""
    content_type = request.headers.get("Content-Type", "application/json")
    if content_type == "application/x-www-form-urlencoded":  # curl -d sends it for any body
        content_type = "application/json"
    hints = {
        HINTED_FIELDS[field]: value.encode("latin-1", "replace")
        for name, value in request.headers
        if (field := name.lower().encode("latin-1", "replace")) in HINTED_FIELDS
    }
    return RequestFacts(content_type.encode("latin-1", "replace"), hints)


def explanation_record(explained: PlacementExplanation, need: Requirements) -> dict[str, object]:
    explanation = explained.explanation
    record: dict[str, object] = {
        "need": {
            "model": need.asked_model,
            "stream": need.stream,
            "capabilities": need.capabilities,
            "weights": str(need.version_constraint) if need.version_constraint else None,
        },
        "policy": explained.policy,
        "workers": [_verdict(worker, reasons) for worker, reasons in explanation.reasons],
        "pick": None,
    }
    if explanation.pick is not None:
        picked = explanation.pick
        record["pick"] = _pick_record(picked, explanation.reason, explanation.details)
    prefill = explained.prefill
    if prefill is not None:
        other = prefill.worker and _pick_record(prefill.worker, prefill.reason, prefill.details)
        record["prefill"] = {"policy": prefill.policy, "pick": other, "reason": prefill.reason}
    if explanation.error is not None:
        error = explanation.error
        record["refusal"] = {"status": error.status, "message": error.message, "code": error.code}
    return record


def _pick_record(target: Worker, reason: str, details: Mapping[str, object]) -> dict[str, object]:
    return {**_picked(target), "reason": reason, **details}


def _picked(target: Worker) -> dict[str, object]:
    """The worker; of a data-parallel rank its worker and the rank's index."""
    worker = target.worker
    picked: dict[str, object] = {"worker_id": worker.id, "url": worker.url}
    return {**picked, "rank": target.index} if isinstance(target, DpRank) else picked


def past_record(record: PickRecord, end: FinishedExchange) -> dict[str, object]:
    """The candidates of a past request. `reason` is null if the request went to another worker than
    the recorded pick."""
    foreseen = bool(end.worker) and end.worker == record.foreseen and end.attempts == 1
    return {
        "request_id": end.request_id,
        "policy": record.policy,
        "worker": end.worker or None,
        "reason": record.reason if foreseen else None,
        "total": record.total,
        "workers": [
            {
                "url": candidate.url,
                **({"rank": candidate.rank} if candidate.rank is not None else {}),
                "eligible": not candidate.against,
                "reasons": [candidate.against] if candidate.against else [],
                "in_flight": candidate.in_flight,
                **candidate.facts,
            }
            for candidate in record.candidates
        ],
    }


def alias_record(explanation: TargetExplanation) -> dict[str, object]:
    """The alias that the request names, and its targets. `target`: None if no target has a
    worker."""
    split = explanation.split
    targets = zip(split.models, split.weights, explanation.available, strict=True)
    return {
        "name": split.name,
        "target": explanation.target,
        "reason": explanation.reason,
        "rewrite": split.rewrite,
        "targets": [
            {"model": model, "weight": weight, "available": available}
            for model, weight, available in targets
        ],
    }


def _verdict(worker: Worker, reasons: list[str]) -> dict[str, object]:
    return {
        **_picked(worker),
        "role": worker.role,
        "eligible": not reasons,
        "reasons": reasons,
        "in_flight": worker.in_flight,
        "health_state": worker.health.state.value,
        "weight_version": worker.weight_label,
        "weight_epoch": worker.weight_epoch,
    }
