"""GET /v1/models and /v1/models/MODEL: the merged lists of all routable workers, and the proxy's
own cards of aliases and adapters.

Invariants: a worker's broken, slow or huge response drops only that worker's cards; these calls
change no health state, no counter and no in-flight count. Source: note:omni-router 6. An own card
has the keys of the engines' cards (`id`, `object`, `created`, `owned_by`, `root`, `parent`), and is
listed only while a routable worker could serve its model. A worker's own card of an adapter is
kept; an alias replaces a model of the same name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime

import trio
from quart import Quart, Response, request

from omni_proxy.admin_api.forwarded_request import forwarded_headers
from omni_proxy.admin_api.responses import json_response
from omni_proxy.admin_api.services import DataPlaneView
from omni_proxy.api_keys.caller_lookup import KEY_FIELDS
from omni_proxy.api_keys.key_table import presented_key
from omni_proxy.config.tables.keys import CallerKey
from omni_proxy.fleet.registry import Fleet
from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.weighted_split import Split
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.upstream_http.client import Call, CallResult, broadcast
from omni_proxy.wire.bounded_json import TooManyValues, read_json
from omni_proxy.wire.errors import HttpError

LIST_BYTES = 4 * 1024 * 1024  # of one worker
LIST_SECS = 5.0  # an engine's list may take longer than a probe
ALL_LISTS_BYTES = 4 * LIST_BYTES  # bounds the time to encode the response
MAX_CARDS = 1000  # of one worker
INVALID = "invalid models payload"
TOO_MANY = f"more than {MAX_CARDS} models"
Cards = list[dict[str, object]]


class MergedModelRoutes:
    """`started_at`: the creation time of models that only the proxy has."""

    def __init__(
        self,
        fleet: Fleet,
        config_store: ConfigStore,
        data_plane: DataPlaneView,
        find_caller: Callable[[bytes], CallerKey | None],
        started_at: datetime,
    ) -> None:
        self._fleet = fleet
        self._config_store = config_store
        self._data_plane = data_plane
        self._find_caller = find_caller
        self._created = int(started_at.timestamp())

    def mount(self, app: Quart) -> None:
        app.add_url_rule("/v1/models", "models", self.all)
        app.add_url_rule("/v1/models/<path:model>", "model", self.one)

    async def all(self) -> Response:
        merged, answers = await self._merged()
        if merged:
            return json_response({"object": "list", "data": [*self._allowed(merged)]})
        return _no_lists_response(answers)

    async def one(self, model: str) -> Response:
        """The card of the merged list. Raises HttpError 404 for a model that no worker serves."""
        merged, answers = await self._merged()
        for card in self._allowed(merged):
            if card.get("id") == model:
                return json_response(card)
        if not merged and answers:
            return _no_lists_response(answers)
        raise HttpError(404, f"the model {model!r} does not exist", "model_not_found")

    def _allowed(self, cards: Cards) -> Iterable[dict[str, object]]:
        """The cards that the caller's key allows; all without such a key."""
        headers = request.headers
        key = presented_key(
            headers.get("Authorization", "").encode("latin-1", "replace"),
            headers.get("X-Api-Key", "").encode("latin-1", "replace"),
        )
        caller = self._find_caller(key) if key else None
        if caller is None or not caller.models:
            return cards
        return [card for card in cards if card.get("id") in caller.models]

    def _headers(self) -> dict[str, str]:
        """The request's headers for workers, without a caller's key, which is the proxy's own."""
        headers = forwarded_headers(request.headers)
        if self._config_store.config.keys:
            headers = {name: headers[name] for name in headers if name.encode() not in KEY_FIELDS}
        return headers

    async def _merged(self) -> tuple[Cards, dict[str, str]]:
        """The cards of all routable workers, and the reasons of those without one."""
        workers = [worker for worker in self._fleet.workers if worker.routable]
        if not workers:
            raise HttpError(503, "no routable upstream", "no_routable_worker")
        call = Call(
            "GET",
            _target(request.query_string),
            headers=self._headers(),
            timeout_secs=max(LIST_SECS, self._config_store.config.health.timeout_secs),
            max_bytes=LIST_BYTES,
        )
        cards, reasons = await merge(await broadcast(workers, call))
        if not cards:
            return cards, reasons
        aliases = self._data_plane.aliases
        splits = aliases.splits if aliases is not None else {}
        return with_own_cards(cards, workers, splits, self._created), reasons


async def merge(results: Iterable[CallResult]) -> tuple[Cards, dict[str, str]]:
    """One card per model, from the first worker that has it, and by URL the reasons of workers
    without cards. There is a checkpoint after each worker.
    """
    cards: dict[str, dict[str, object]] = {}
    reasons: dict[str, str] = {}
    bytes_left = ALL_LISTS_BYTES
    for result in results:
        await trio.lowlevel.checkpoint()
        bytes_left -= len(result.body)
        stop = _cards_of(result) if bytes_left >= 0 else "the other workers' lists are too long"
        if isinstance(stop, str):
            reasons[result.worker.url] = stop
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


def _cards_of(result: CallResult) -> Cards | str:
    """The worker's cards, or the reason why there are none."""
    if result.status is None:
        return result.error
    if result.status != 200:
        return f"status={result.status}"
    return _cards(None if result.error else result.body)


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


def _no_lists_response(details: Mapping[str, str]) -> Response:
    error = {
        "message": "failed to fetch models from workers",
        "type": "upstream_error",
        "code": "models_unavailable",
        "details": details,
    }
    return json_response({"error": error}, 502)


OWNER = "omni-proxy"
Card = dict[str, object]


def with_own_cards(
    cards: Sequence[Card], workers: Sequence[Worker], splits: Mapping[str, Split], created: int
) -> list[Card]:
    """`cards`: those of the routable workers. `created`: Unix time of the proxy's start."""
    listed = {_id_of(card) for card in cards}
    adapters = {
        str(card["id"]): card
        for worker in workers
        for card in _adapter_cards(worker, created)
        if card["id"] not in listed
    }
    served = [*cards, *adapters.values()]
    aliases = [
        _alias_card(split, served, created)
        for split in splits.values()
        if _is_served(split, workers)
    ]
    names = {card["id"] for card in aliases}
    return [*(card for card in served if _id_of(card) not in names), *aliases]


def _id_of(card: Card) -> str | None:
    """The card's id; None if it is not a string: workers may send anything."""
    name = card.get("id")
    return name if isinstance(name, str) else None


def _adapter_cards(worker: Worker, created: int) -> Iterable[Card]:
    """Cards of adapters that the configuration names; of "auto" the worker's own list has them."""
    for name in () if worker.loras == "auto" else worker.loras:
        yield _card(name, created, root=name, parent=worker.model)


def _is_served(split: Split, workers: Sequence[Worker]) -> bool:
    any_named = any(worker.model for worker in workers)
    return any(
        not any_named or worker.serves(model) for model in split.models for worker in workers
    )


def _alias_card(split: Split, cards: Sequence[Card], created: int) -> Card:
    """`root`: the target with the highest weight. The context length is the shortest of all
    targets."""
    weights = dict(zip(split.models, split.weights, strict=True))
    root = max(split.models, key=weights.__getitem__)
    card = _card(split.name, created, root=root, parent=None)
    lengths = [
        length
        for target_card in cards
        if _id_of(target_card) in weights
        and isinstance(length := target_card.get("max_model_len"), int)
    ]
    return card | {"max_model_len": min(lengths)} if lengths else card


def _card(name: str, created: int, *, root: str, parent: str | None) -> Card:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": OWNER,
        "root": root,
        "parent": parent,
    }
