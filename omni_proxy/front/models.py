"""GET /v1/models and one of them: the lists of all routable workers as one (omni-router.md 6).

Invariant: one worker's broken, slow or huge reply costs its own cards and nothing else; asking
changes no health, no counter and no in-flight count.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from quart import Quart, Response, request

from omni_proxy.front.replies import reply
from omni_proxy.front.rooms import Rooms
from omni_proxy.watch.broadcast import Outcome, broadcast
from omni_proxy.watch.calls import Call
from omni_proxy.wire.errors import Refusal

LIST_BYTES = 4 * 1024 * 1024
LIST_SECS = 5.0  # an engine may take longer over its list than over a probe
INVALID = "invalid models payload"
# Written anew for each worker, or ours alone (omni-router.md 10).
NOT_PASSED_ON = frozenset(
    (
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection",
        "te", "trailer", "trailers", "transfer-encoding", "upgrade", "host", "content-length",
        "content-type", "accept-encoding", "remote-addr", "expect",
        "x-omni-weight-version", "x-omni-min-weight-epoch", "x-omni-received",
        # Of a page that was judged here: to a worker any page of ours would be a stranger's.
        "origin", "referer", "sec-fetch-site", "sec-fetch-mode", "sec-fetch-dest", "sec-fetch-user",
    )
)  # fmt: skip
HINT_PREFIX = "x-sglang-omni-route-"

Cards = list[dict[str, object]]


class ModelRoutes:
    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms

    def mount(self, app: Quart) -> None:
        app.add_url_rule("/v1/models", "models", self.all)
        app.add_url_rule("/v1/models/<path:model>", "model", self.one)

    async def all(self) -> Response:
        merged, answers = await self._merged()
        if merged:
            return reply({"object": "list", "data": merged})
        return _nothing(answers)

    async def one(self, model: str) -> Response:
        """The card out of the merged list. Raises Refusal 404 for a model that nobody serves."""
        merged, answers = await self._merged()
        for card in merged:
            if card.get("id") == model:
                return reply(card)
        if not merged and answers:
            return _nothing(answers)
        raise Refusal(404, f"the model {model!r} does not exist", "model_not_found")

    async def _merged(self) -> tuple[Cards, dict[str, str]]:
        """The cards of all routable workers, and why those told none that did not."""
        workers = [worker for worker in self._rooms.fleet.workers if worker.routable]
        if not workers:
            raise Refusal(503, "no routable upstream", "no_routable_worker")
        call = Call(
            "GET",
            _target(request.query_string),
            headers=passed_on(request.headers),
            timeout_secs=max(LIST_SECS, self._rooms.keeper.config.health.timeout_secs),
            max_bytes=LIST_BYTES,
        )
        found = await broadcast(workers, call)
        answers = {outcome.worker.url: _cards_of(outcome) for outcome in found}
        merged = merge(cards for cards in answers.values() if isinstance(cards, list))
        return merged, {url: why for url, why in answers.items() if isinstance(why, str)}


def merge(lists: Iterable[Cards]) -> Cards:
    """One card per model; the first worker that has it is believed."""
    cards: dict[str, dict[str, object]] = {}
    for found in lists:
        for card in found:
            cards.setdefault(_key(card), card)
    return list(cards.values())


def _key(card: Mapping[str, object]) -> str:
    for name in ("id", "model"):
        value = card.get(name)
        if isinstance(value, str) and value:
            return value
    return json.dumps(card, sort_keys=True)


def _cards_of(outcome: Outcome) -> Cards | str:
    """The worker's cards, or why there are none."""
    if outcome.status is None:
        return outcome.error
    if outcome.status != 200:
        return f"status={outcome.status}"
    return _cards(None if outcome.error else outcome.body)


def _cards(body: bytes | None) -> Cards | str:
    if body is None:
        return INVALID
    try:
        payload = json.loads(body)
    except RecursionError:
        return INVALID
    except ValueError:
        return "JSONDecodeError"
    found = payload.get("data") if isinstance(payload, dict) else None
    if not isinstance(found, list):
        return INVALID
    return [card for card in found if isinstance(card, dict)]


def _target(query: bytes) -> str:
    return "/v1/models" + (f"?{query.decode('ascii', 'ignore')}" if query else "")


def passed_on(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    lowered = ((name.lower(), value) for name, value in headers)
    return {
        name: value
        for name, value in lowered
        if name not in NOT_PASSED_ON and not name.startswith(HINT_PREFIX)
    }


def _nothing(details: Mapping[str, str]) -> Response:
    error = {
        "message": "failed to fetch models from workers",
        "type": "upstream_error",
        "code": "models_unavailable",
        "details": details,
    }
    return reply({"error": error}, 502)
