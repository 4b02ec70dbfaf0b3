"""The cards of GET /v1/models that the proxy adds to those of the workers: aliases and adapters.

Invariant: a card has the keys of the engines' cards (`id`, `object`, `created`, `owned_by`, `root`,
`parent`), and is listed only while a routable worker could serve its model. A worker's own card of
an adapter is kept; an alias replaces a model of the same name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from omni_proxy.fleet.worker import Worker
from omni_proxy.routing.weighted_split import Split

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
