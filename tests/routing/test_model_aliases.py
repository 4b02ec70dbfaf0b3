from collections import Counter

import pytest

from omni_proxy.config.fields import CAPABILITIES
from omni_proxy.config.parse import parse
from omni_proxy.fleet.worker import CAPABILITY_BITS
from omni_proxy.routing.inspect.body_fields import BodyFields, adapters_of_body
from omni_proxy.routing.inspect.large_json import LARGE_BYTES
from omni_proxy.routing.inspect.requirements import (
    RequestFacts,
    Requirements,
    inspect_request,
)
from omni_proxy.routing.model_aliases import (
    ModelAliases,
    all_targets_tried,
    any_target,
    choose_target,
    explain_target,
    name_adapter,
)
from omni_proxy.routing.routes import NAMED, match_route
from omni_proxy.wire.errors import HttpError
from tests.fleet.entries import NOW, entry, fleet_of, heal
from tests.routing.regular_workers import RegularWorkers

CHAT = CAPABILITY_BITS["chat"]
ALIAS = """
[[routing.models]]
name = "alias"
targets = [{ model = "big", weight = 3 }, { model = "small", weight = 1 }]
"""


def aliases_of(text=ALIAS, previous=None):
    return ModelAliases(parse(text), previous)


@pytest.fixture
def fleet():
    return fleet_of(entry("b1", model="big"), entry("b2", model="big"), entry("s1", model="small"))


def request(aliases, session="", model="alias", mask=CHAT):
    need = Requirements(mask, model)
    lines = f"x-session-id: {session}\r\n".encode() if session else b""
    aliases.resolve(need, lines, b"")
    return need


def workers(fleet, *names):
    return [fleet.find(f"http://{name}:1") for name in names]


def disable(fleet, *names):
    fleet.apply(
        [
            entry(
                worker.display_id.partition(":")[0],
                model=worker.model,
                disabled=worker.display_id[:2] in names,
            )
            for worker in fleet.workers
        ],
        NOW,
    )


def test_a_request_for_another_model_is_unchanged(fleet):
    need = request(aliases_of(), model="big")
    assert (need.alias, need.model, need.asked_model) == (None, "big", "big")


def test_requests_are_split_among_the_targets_by_weight(fleet):
    aliases = aliases_of()
    models = Counter()
    for _ in range(40):
        need = request(aliases)
        assert choose_target(need, RegularWorkers(fleet))
        assert (need.asked_model, need.target_model) == ("alias", need.model)
        models[need.model] += 1
    assert models == {"big": 30, "small": 10}


def test_an_alias_wins_over_a_model_of_its_name_which_can_be_a_target(fleet):
    aliases = aliases_of('[[routing.models]]\nname = "big"\ntargets = [{ model = "small" }]')
    need = request(aliases, model="big")
    choose_target(need, RegularWorkers(fleet))
    assert need.model == "small"
    aliases = aliases_of(
        '[[routing.models]]\nname = "big"\ntargets = [{ model = "small" }, { model = "big" }]'
    )
    chosen = set()
    for _ in range(2):
        need = request(aliases, model="big")
        choose_target(need, RegularWorkers(fleet))
        chosen.add(need.model)
    assert chosen == {"small", "big"}


def test_a_target_without_a_worker_gets_no_requests_while_another_has_one(fleet):
    aliases = aliases_of()
    disable(fleet, "s1")
    for _ in range(8):
        need = request(aliases)
        choose_target(need, RegularWorkers(fleet))
        assert need.model == "big"
    disable(fleet)
    heal(fleet, fleet.workers[2])
    models = Counter()
    for _ in range(8):
        need = request(aliases)
        choose_target(need, RegularWorkers(fleet))
        models[need.model] += 1
    assert models == {"big": 6, "small": 2}


def test_a_target_whose_workers_are_full_or_not_capable_is_skipped():
    fleet = fleet_of(
        entry("b1", model="big", max_inflight=1),
        entry("s1", model="small", capabilities=frozenset(CAPABILITIES) - {"image_input"}),
    )
    aliases = aliases_of()
    need = request(aliases, mask=CHAT | CAPABILITY_BITS["image_input"])
    choose_target(need, RegularWorkers(fleet))
    assert need.model == "big"
    fleet.workers[0].in_flight = 1
    need = request(aliases)
    choose_target(need, RegularWorkers(fleet))
    assert need.model == "small"


def test_a_session_that_waits_for_its_worker_keeps_its_target(fleet):
    aliases, (small,) = aliases_of(), workers(fleet, "s1")
    needs = [request(aliases, f"s{number}") for number in range(60)]
    fleet.cordon(small, "updating")
    for need in needs:
        choose_target(need, RegularWorkers(fleet, held=[small]))
    assert {need.model for need in needs} == {"small"}
    fleet.uncordon(small, "updating")
    for need in needs:
        assert not choose_target(need, RegularWorkers(fleet))
    fleet.cordon(small, "updating")
    for need in needs:  # no session waits, as when updates refuse requests
        choose_target(need, RegularWorkers(fleet))
    assert {need.model for need in needs} == {"big"}


def test_an_explanation_shows_that_a_session_waits_for_its_target(fleet):
    aliases, (small,) = aliases_of(), workers(fleet, "s1")
    fleet.cordon(small, "updating")
    explained = explain_target(request(aliases, "one"), RegularWorkers(fleet, held=[small]))
    assert (explained.target, explained.reason) == ("small", "its session waits for a worker there")


def test_a_session_stays_with_its_target_and_returns_to_it(fleet):
    aliases = aliases_of()
    home = {}
    for number in range(60):
        need = request(aliases, f"s{number}")
        choose_target(need, RegularWorkers(fleet))
        home[number] = need.model
    assert set(home.values()) == {"big", "small"}

    def targets_now():
        targets = {}
        for number in home:
            need = request(aliases, f"s{number}")
            choose_target(need, RegularWorkers(fleet))
            targets[number] = need.model
        return targets

    assert targets_now() == home
    disable(fleet, "s1")
    assert set(targets_now().values()) == {"big"}
    disable(fleet)
    heal(fleet, fleet.workers[2])
    assert targets_now() == home
    assert aliases_of().splits["alias"].session_order("s1") == (
        aliases.splits["alias"].session_order("s1")
    )


@pytest.mark.parametrize("header", ["authorization", "x-forwarded-for"])
def test_a_client_header_names_a_session_only_where_it_is_configured(fleet, header):
    aliases = aliases_of()
    need = Requirements(CHAT, "alias")
    aliases.resolve(need, f"{header}: one\r\n".encode(), b"")
    assert need.alias.session == ""
    configured = aliases_of(f'[routing]\nsession_headers = ["{header}"]\n' + ALIAS)
    need = Requirements(CHAT, "alias")
    configured.resolve(need, f"{header}: one\r\n".encode(), b"")
    assert need.alias.session == "one"


def test_the_affinity_key_of_the_policy_is_also_that_of_the_split(fleet):
    need = Requirements(CHAT, "alias", affinity_key="key")
    aliases_of().resolve(need, b"x-session-id: other\r\n", b"")
    assert need.alias.session == "key"


def test_a_configured_body_key_names_the_session(fleet):
    aliases = aliases_of('[routing]\nsession_body_keys = ["user"]\n' + ALIAS)
    need = Requirements(CHAT, "alias")
    aliases.resolve(need, b"", b'{"user": "me"}')
    assert need.alias.session == "me"


def test_a_retry_stays_with_its_target_until_all_its_workers_are_tried(fleet):
    need = request(aliases_of())
    choose_target(need, RegularWorkers(fleet))
    assert need.model == "big"
    first, second, small = workers(fleet, "b1", "b2", "s1")
    assert not choose_target(need, RegularWorkers(fleet), {first})
    assert need.model == "big"
    assert choose_target(need, RegularWorkers(fleet), {first, second})
    assert need.model == "small"
    assert not choose_target(need, RegularWorkers(fleet), {first, second, small})
    assert need.model == "small"


def test_without_any_worker_the_error_is_model_not_found(fleet):
    aliases = aliases_of(
        '[[routing.models]]\nname = "alias"\ntargets = [{ model = "x" }, { model = "y" }]'
    )
    with pytest.raises(HttpError) as caught:
        choose_target(request(aliases), RegularWorkers(fleet))
    assert "'alias' is an alias of 'x', 'y'" in caught.value.message
    assert (caught.value.status, caught.value.code) == (503, "model_not_found")


def test_the_error_is_that_of_a_target_that_can_recover(fleet):
    aliases = aliases_of(
        '[[routing.models]]\nname = "alias"\ntargets = [{ model = "x" }, { model = "small" }]'
    )
    disable(fleet, "s1")
    need = request(aliases)
    with pytest.raises(HttpError) as caught:
        choose_target(need, RegularWorkers(fleet))
    assert (caught.value.code, need.model) == ("all_disabled", "small")
    assert need.target_model is None


def test_a_request_that_names_a_worker_gets_the_target_of_that_worker(fleet):
    aliases = aliases_of()
    small = workers(fleet, "s1")[0]
    for _ in range(3):
        need = request(aliases)
        need.pinning, need.named_worker = NAMED, small.id
        choose_target(need, RegularWorkers(fleet))
        assert need.model == "small"


def test_an_alias_is_available_if_one_of_its_targets_is(fleet):
    need, checks = request(aliases_of()), RegularWorkers(fleet)
    assert any_target(need, checks.can_take)
    assert need.model == "alias"
    b1, b2, small = workers(fleet, "b1", "b2", "s1")
    assert not all_targets_tried(need, checks, {b1, b2})
    assert all_targets_tried(need, checks, {b1, b2, small})
    disable(fleet, "s1")
    assert all_targets_tried(need, checks, {b1, b2})
    disable(fleet, "s1", "b1", "b2")
    assert not any_target(need, checks.can_take)
    assert not all_targets_tried(need, checks, {b1, b2, small})


def test_an_explanation_names_the_next_target_and_changes_nothing(fleet):
    aliases = aliases_of()
    for _ in range(5):
        explained = explain_target(request(aliases), RegularWorkers(fleet))
        need = request(aliases)
        choose_target(need, RegularWorkers(fleet))
        assert (explained.target, explained.reason) == (need.model, "next in turn by weight")
    assert explained.available == [True, True]
    assert (
        explain_target(request(aliases, "s"), RegularWorkers(fleet)).reason
        == "its session belongs there"
    )
    disable(fleet, "s1")
    reasons = {
        explain_target(request(aliases, f"{n}"), RegularWorkers(fleet)).reason for n in range(20)
    }
    assert reasons == {"no other target has a worker for it now"}
    disable(fleet, "s1", "b1", "b2")
    explained = explain_target(request(aliases), RegularWorkers(fleet))
    assert explained.target is None
    assert "is an alias of" in explained.reason
    assert explain_target(request(aliases, model="big"), RegularWorkers(fleet)) is None


def test_a_reload_keeps_the_position_of_aliases_that_stay(fleet):
    aliases = aliases_of()
    for _ in range(2):
        choose_target(request(aliases), RegularWorkers(fleet))
    expected = aliases.splits["alias"].preview((0, 1))
    assert expected != aliases_of().splits["alias"].preview((0, 1))
    assert aliases_of(previous=aliases).splits["alias"].preview((0, 1)) == expected


@pytest.mark.parametrize(
    ("model", "adapter", "expected"),
    [
        (None, "a", ":a"),
        ("base", "a", "base:a"),
        ("base:b", "a", "base:b"),
        ("base", "", "base"),
        ("alias", "a", "alias"),
    ],
)
def test_the_adapter_field_selects_a_model_as_sglang_reads_it(model, adapter, expected):
    need = Requirements(CHAT, model, decoded=BodyFields())
    name_adapter(need, aliases_of(), b'{"lora_path": "%b"}' % adapter.encode())
    assert need.model == expected
    need = Requirements(CHAT, model, decoded=BodyFields(), large_body_class="generation")
    need.adapters_in_large_body = frozenset(filter(None, [adapter]))
    name_adapter(need, aliases_of(), b"")
    assert need.model == expected


@pytest.mark.parametrize(
    ("body", "adapters"),
    [
        (b'{"lora_path": "a"}', {"a"}),
        (b'{"lora_path": ["a", null, "a"]}', {"a"}),
        (b'{"lora_path": ["a", "b"]}', {"a", "b"}),
        (b'{"lora_path": null}', set()),
        (b'{"lora_path": 3}', set()),
        (b"{}", set()),
    ],
)
def test_the_adapters_of_a_body_are_read(body, adapters):
    assert adapters_of_body(body) == adapters
    route = match_route("POST", "/generate")
    large = body[:-1] + (b"," if len(body) > 2 else b"") + b'"text": "%b"}' % bytes(LARGE_BYTES)
    large = large.replace(b"\0", b"x")
    need = inspect_request(route, large, RequestFacts(b"application/json"))
    assert need.adapters_in_large_body == adapters


def test_a_batch_with_several_adapters_keeps_its_model():
    need = Requirements(CHAT, "base", decoded=BodyFields())
    name_adapter(need, aliases_of(), b'{"lora_path": ["a", "b"]}')
    assert need.model == "base"


def test_a_body_that_is_not_json_names_no_adapter():
    assert adapters_of_body(b'{"lora_path": ') == frozenset()


def test_a_target_may_be_an_adapter():
    fleet = fleet_of(entry("a", model="base", loras=("x",)), entry("b", model="base"))
    aliases = aliases_of('[[routing.models]]\nname = "tuned"\ntargets = [{ model = "base:x" }]')
    need = request(aliases, model="tuned")
    choose_target(need, RegularWorkers(fleet))
    assert fleet.candidates(need.model, CHAT) == workers(fleet, "a")
