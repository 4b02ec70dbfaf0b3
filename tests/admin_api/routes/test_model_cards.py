"""Cards of aliases and adapters, added to those that workers list."""

import pytest

from omni_proxy.admin_api.routes.models_routes import with_own_cards
from omni_proxy.config.parse import parse
from omni_proxy.routing.model_aliases import ModelAliases
from tests.fleet.entries import entry, fleet_of

CREATED = 1_700_000_000


def split_of(name, *targets):
    text = ", ".join(f'{{ model = "{model}", weight = {weight} }}' for model, weight in targets)
    config = parse(f'[[routing.models]]\nname = "{name}"\ntargets = [{text}]\n')
    return ModelAliases(config).splits


def ids(cards):
    return [card["id"] for card in cards]


def test_an_adapter_that_no_worker_lists_has_a_card_with_its_model_as_parent():
    workers = fleet_of(
        entry("a", model="m", loras=("x", "listed")), entry("b", loras="auto")
    ).workers
    listed = {"id": "listed", "root": "/loras/listed"}
    assert with_own_cards([{"id": "m"}, listed], workers, {}, CREATED) == [
        {"id": "m"},
        listed,
        {
            "id": "x",
            "object": "model",
            "created": CREATED,
            "owned_by": "omni-proxy",
            "root": "x",
            "parent": "m",
        },
    ]


def test_an_adapter_of_several_workers_has_one_card():
    workers = fleet_of(*(entry(name, model="m", loras=("x",)) for name in "ab")).workers
    assert ids(with_own_cards([{"id": "m"}], workers, {}, CREATED)) == ["m", "x"]


def test_the_card_of_an_alias_has_the_heaviest_target_and_the_shortest_context():
    workers = fleet_of(entry("a", model="m"), entry("b", model="n")).workers
    cards = [{"id": "m", "max_model_len": 4096}, {"id": "n", "max_model_len": 8192}]
    *_, card = with_own_cards(cards, workers, split_of("alias", ("m", 1), ("n", 3)), CREATED)
    assert card == {
        "id": "alias",
        "object": "model",
        "created": CREATED,
        "owned_by": "omni-proxy",
        "root": "n",
        "parent": None,
        "max_model_len": 4096,
    }


def test_an_alias_replaces_a_model_of_the_same_name():
    workers = fleet_of(entry("a", model="m")).workers
    cards = with_own_cards([{"id": "alias"}, {"id": "m"}], workers, split_of("alias", ("m", 1)), 0)
    assert [(card["id"], card.get("root")) for card in cards] == [("m", None), ("alias", "m")]


def test_an_alias_without_a_worker_for_its_targets_has_no_card():
    workers = fleet_of(entry("a", model="m")).workers
    assert ids(with_own_cards([{"id": "m"}], workers, split_of("alias", ("n", 1)), 0)) == ["m"]
    assert ids(with_own_cards([], [], split_of("alias", ("n", 1)), 0)) == []


@pytest.mark.parametrize("name", [None, [], {}, 7, True])
def test_a_card_of_a_worker_may_have_anything_as_its_id(name):
    cards = [{"id": name}, {}, {"id": "m"}]
    assert with_own_cards(cards, [], {}, 0) == cards
