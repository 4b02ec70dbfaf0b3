"""GET /v1/models and /v1/models/MODEL: the merged lists of all routable workers (omni-router.md 6).

Invariant: a worker's broken, slow or huge reply drops only that worker's cards; these calls change
no health state, no counter and no in-flight count.

POST /explain: where a model request would be routed and why; nothing is sent.

Invariant: a large JSON body is parsed in slices, as in the data plane, so that it blocks no other
task.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping

import trio
from quart import Quart, Response, request

from omni_proxy.admin_api.access.key_check import named_key
from omni_proxy.admin_api.responses import bad_request, body_bytes, json_response
from omni_proxy.admin_api.serializers.model_cards import with_own_cards
from omni_proxy.admin_api.services import Services
from omni_proxy.api_keys.callers import KEY_FIELDS
from omni_proxy.api_keys.key_table import presented_key
from omni_proxy.fleet.dp_rank import DpRank
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.disaggregation.explanation import (
    PlacementExplanation,
    explain_placement,
)
from omni_proxy.routing.disaggregation.pick_record import PickRecord
from omni_proxy.routing.inspect.affinity_key import affinity_keys_of
from omni_proxy.routing.inspect.keyed_text import keyed_fields
from omni_proxy.routing.inspect.large_json import ONE_PASS_BYTES, LargeJsonFields, walk_large_json
from omni_proxy.routing.inspect.requirements import (
    RequestFacts,
    Requirements,
    has_json_body,
    inspect_request,
    requirements_of_large_json,
)
from omni_proxy.routing.inspect.requirements import settle_unread as settle_large
from omni_proxy.routing.model_aliases import TargetExplanation, explain_target, name_adapter
from omni_proxy.routing.pinning import (
    named_response,
    pin_to_rank,
    pin_to_response_owner,
    pin_to_voice_owner,
)
from omni_proxy.routing.routes import (
    RESPONSE_OWNER,
    MethodNotAllowed,
    Route,
    configured_routes,
    match_configured,
    match_route,
)
from omni_proxy.telemetry.recent_window import FinishedExchange
from omni_proxy.upstream_http.client import Call, CallResult, broadcast
from omni_proxy.wire.bounded_json import TooManyValues, read_json
from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.request import HINTED_FIELDS


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
    named: dict[str, object] = {"worker_id": worker.id, "url": worker.url}
    return {**named, "rank": target.index} if isinstance(target, DpRank) else named


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
                "url": each.url,
                **({"rank": each.rank} if each.rank is not None else {}),
                "eligible": not each.against,
                "reasons": [each.against] if each.against else [],
                "in_flight": each.in_flight,
                **each.facts,
            }
            for each in record.candidates
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
        "weight_version": worker.weight_version,
        "weight_epoch": worker.weight_epoch,
    }


LIST_BYTES = 4 * 1024 * 1024  # of one worker
LIST_SECS = 5.0  # an engine's list may take longer than a probe
ALL_LISTS_BYTES = 4 * LIST_BYTES  # bounds the time to encode the response
MAX_CARDS = 1000  # of one worker
INVALID = "invalid models payload"
TOO_MANY = f"more than {MAX_CARDS} models"
# Set for each worker, or not forwarded (omni-router.md 10).
NOT_PASSED_ON = frozenset(
    (
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection",
        "te", "trailer", "trailers", "transfer-encoding", "upgrade", "host", "content-length",
        "content-type", "accept-encoding", "remote-addr", "expect",
        "x-omni-weight-version", "x-omni-min-weight-epoch", "x-omni-received",
        # Set by browsers: the proxy has checked the origin, which is foreign to a worker.
        "origin", "referer", "sec-fetch-site", "sec-fetch-mode", "sec-fetch-dest", "sec-fetch-user",
    )
)  # fmt: skip
HINT_PREFIX = "x-sglang-omni-route-"

Cards = list[dict[str, object]]


class MergedModelRoutes:
    def __init__(self, services: Services) -> None:
        self._services = services

    def mount(self, app: Quart) -> None:
        app.add_url_rule("/v1/models", "models", self.all)
        app.add_url_rule("/v1/models/<path:model>", "model", self.one)

    async def all(self) -> Response:
        merged, answers = await self._merged()
        if merged:
            return json_response({"object": "list", "data": [*self._allowed(merged)]})
        return _nothing(answers)

    async def one(self, model: str) -> Response:
        """The card of the merged list. Raises HttpError 404 for a model that no worker serves."""
        merged, answers = await self._merged()
        for card in self._allowed(merged):
            if card.get("id") == model:
                return json_response(card)
        if not merged and answers:
            return _nothing(answers)
        raise HttpError(404, f"the model {model!r} does not exist", "model_not_found")

    def _allowed(self, cards: Cards) -> Iterable[dict[str, object]]:
        """The cards that the caller's key allows; all without such a key."""
        headers = request.headers
        key = presented_key(
            headers.get("Authorization", "").encode("latin-1", "replace"),
            headers.get("X-Api-Key", "").encode("latin-1", "replace"),
        )
        caller = self._services.find_caller(key) if key else None
        if caller is None or not caller.models:
            return cards
        return [card for card in cards if card.get("id") in caller.models]

    def _headers(self) -> dict[str, str]:
        """The request's headers for workers, without a caller's key, which is the proxy's own."""
        headers = passed_on(request.headers)
        if self._services.config_store.config.keys:
            headers = {name: headers[name] for name in headers if name.encode() not in KEY_FIELDS}
        return headers

    async def _merged(self) -> tuple[Cards, dict[str, str]]:
        """The cards of all routable workers, and the reasons of those without one."""
        workers = [worker for worker in self._services.fleet.workers if worker.routable]
        if not workers:
            raise HttpError(503, "no routable upstream", "no_routable_worker")
        call = Call(
            "GET",
            _target(request.query_string),
            headers=self._headers(),
            timeout_secs=max(LIST_SECS, self._services.config_store.config.health.timeout_secs),
            max_bytes=LIST_BYTES,
        )
        cards, reasons = await merge(await broadcast(workers, call))
        if not cards:
            return cards, reasons
        aliases = self._services.data_plane.aliases
        splits = aliases.splits if aliases is not None else {}
        created = int(self._services.started_at.timestamp())
        return with_own_cards(cards, workers, splits, created), reasons


async def merge(outcomes: Iterable[CallResult]) -> tuple[Cards, dict[str, str]]:
    """One card per model, from the first worker that has it, and by URL the reasons of workers
    without cards. There is a checkpoint after each worker.
    """
    cards: dict[str, dict[str, object]] = {}
    reasons: dict[str, str] = {}
    bytes_left = ALL_LISTS_BYTES
    for outcome in outcomes:
        await trio.lowlevel.checkpoint()
        bytes_left -= len(outcome.body)
        stop = _cards_of(outcome) if bytes_left >= 0 else "the other workers' lists are too long"
        if isinstance(stop, str):
            reasons[outcome.worker.url] = stop
            continue
        for card in stop:
            cards.setdefault(_key(card), card)
    return list(cards.values()), reasons


def _key(card: Mapping[str, object]) -> str:
    for name in ("id", "model"):
        value = card.get(name)
        if isinstance(value, str) and value:
            return value
    return json.dumps(card, sort_keys=True)


def _cards_of(outcome: CallResult) -> Cards | str:
    """The worker's cards, or the reason why there are none."""
    if outcome.status is None:
        return outcome.error
    if outcome.status != 200:
        return f"status={outcome.status}"
    return _cards(None if outcome.error else outcome.body)


def _cards(body: bytes | None) -> Cards | str:
    if body is None:
        return INVALID
    try:
        payload = read_json(body)
    except TooManyValues:
        return INVALID
    except ValueError:
        return "JSONDecodeError"
    cards = payload.get("data") if isinstance(payload, dict) else None
    if not isinstance(cards, list):
        return INVALID
    if len(cards) > MAX_CARDS:
        return TOO_MANY
    return [card for card in cards if isinstance(card, dict)]


def _target(query: bytes) -> str:
    return "/v1/models" + (f"?{query.decode('ascii', 'ignore')}" if query else "")


def passed_on(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The header fields of the current request that are forwarded to workers. They include the
    caller's Authorization, because workers may have the proxy's key, but no key of
    [[admin.keys]]."""
    lowered = ((name.lower(), value) for name, value in headers)
    return {
        name: value
        for name, value in lowered
        if name not in NOT_PASSED_ON
        and not name.startswith(HINT_PREFIX)
        and not (name == "authorization" and named_key())
    }


def _nothing(details: Mapping[str, str]) -> Response:
    error = {
        "message": "failed to fetch models from workers",
        "type": "upstream_error",
        "code": "models_unavailable",
        "details": details,
    }
    return json_response({"error": error}, 502)


DEFAULT_PATH = "/v1/chat/completions"


class ExplainRoutes:
    def __init__(self, services: Services) -> None:
        self._services = services

    def mount(self, app: Quart) -> None:
        app.add_url_rule("/explain", "explain", self.show, methods=["POST"])
        app.add_url_rule("/explain", "explain_past", self.show_past, methods=["GET"])

    async def show_past(self) -> Response:
        """The candidates of a request that has ended."""
        request_id = request.args.get("request_id", "")
        if not request_id:
            raise bad_request("request_id is missing: the id of a request of GET /feed")
        for end in self._services.instruments.recent.ends():
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
            configured = configured_routes(self._services.config_store.config.routes)
            route = match_route("POST", path) or match_configured(configured, "POST", path)
        except MethodNotAllowed:
            route = None
        if route is None:
            raise bad_request(
                f"path {path} is not a model route; try {DEFAULT_PATH}", "unknown_path"
            )
        body = await body_bytes()
        requirements = await _need_of(route, body, _facts())
        if requirements.large_body_class:
            settle_large(self._services.fleet, requirements)
        if self._services.fleet.has_ranks:
            pin_to_rank(requirements, _facts().hints, body)
        data_plane = self._services.data_plane
        pin_to_voice_owner(data_plane.voices, route.traffic, requirements)
        if route.text and not requirements.large_body_class:
            requirements.body_fields = keyed_fields(body, route.text)
        if route.pinning is RESPONSE_OWNER:
            named_id = named_response(path, b"" if requirements.large_body_class else body)
            owners, now = data_plane.response_owners, time.monotonic()
            pin_to_response_owner(requirements, named_id, owners, now)
        requirements.legs = route.legs
        if data_plane.needs_affinity_key:
            keys = affinity_keys_of(self._services.config_store.config)
            requirements.affinity_key = keys.read(_lines(), body)
        if self._services.fleet.has_adapters:
            name_adapter(requirements, data_plane.aliases, body)
        if data_plane.aliases is not None:
            data_plane.aliases.resolve(requirements, _lines(), body)
        target = explain_target(requirements, data_plane.target_checks)
        explained = explain_placement(
            self._services.fleet, requirements, data_plane.policy, data_plane.pool_policies,
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
