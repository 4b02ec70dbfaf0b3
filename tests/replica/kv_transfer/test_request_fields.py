import msgspec
import pytest

from omni_proxy.replica.kv_transfer.request_fields import (
    PARAMS,
    Fetch,
    InvalidTransfer,
    Serve,
    TransferFields,
    from_params,
    nixl_params,
    to_params,
)

ROOM = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 9000, "bootstrap_room": 7}
NIXL_FETCH = nixl_params("req-1", "engine", ("10.0.0.1", 9000), 2)
NIXL_NAMES = ("remote_host", "remote_port", "remote_engine_id", "remote_request_id")
MOONCAKE_FETCH = {
    "do_remote_prefill": True,
    "remote_bootstrap_addr": "http://10.0.0.1:8998",
    "remote_engine_id": "engine",
    "transfer_id": "xfer-1",
}


def specs(role, connector, fields, count=1, prompts=1):
    return TransferFields(role, connector).specs(fields, "request", count, prompts)


def test_a_replica_without_a_role_reads_no_field():
    assert specs("null", "sglang", {"bootstrap_room": "nonsense"}, 2) == [None, None]
    assert specs("null", "nixl", {PARAMS: 5}) == [None]


def test_a_room_is_served_by_prefill_and_fetched_by_decode():
    assert specs("prefill", "sglang", ROOM) == [Serve("room:7", waits=True)]
    assert specs("decode", "sglang", ROOM) == [Fetch("10.0.0.1", 9000, "room:7", "", "room:7")]


def test_a_null_port_means_the_port_of_the_replica():
    request = ROOM | {"bootstrap_port": None}
    fields = TransferFields("decode", "sglang", 1234)
    assert fields.specs(request, "request", 1)[0].port == 1234


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_several_prompts_have_lists_of_rooms(role):
    request = {name: [value, value] for name, value in ROOM.items()} | {"bootstrap_room": [3, 9]}
    assert [spec.key for spec in specs(role, "sglang", request, 2, 2)] == ["room:3", "room:9"]


def test_one_room_for_several_prompts_is_incremented_as_in_sglang():
    keys = [spec.key for spec in specs("prefill", "sglang", ROOM, 3)]
    assert keys == ["room:7", "room:8", "room:9"]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_sglang_legs_need_a_room(role):
    with pytest.raises(InvalidTransfer, match="without bootstrap room id"):
        specs(role, "sglang", {"bootstrap_room": None})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"bootstrap_room": [1]}, "list of 2 rooms"),
        ({"bootstrap_room": [1, 1]}, "duplicates"),
        ({"bootstrap_room": [1, -1]}, "within 0"),
        ({"bootstrap_room": [1, 2**63]}, "within 0"),
        ({"bootstrap_room": [1, True]}, "within 0"),
        ({"bootstrap_room": "7"}, "must be a room"),
        ({"bootstrap_host": ["a"]}, "bootstrap_host has 1"),
        ({"bootstrap_host": None}, "bootstrap_host"),
        ({"bootstrap_port": 0}, "bootstrap_port"),
        ({"bootstrap_port": "9000"}, "bootstrap_port"),
    ],
)
def test_invalid_rooms_are_refused_with_the_reason(changes, reason):
    with pytest.raises(InvalidTransfer, match=reason):
        specs("decode", "sglang", ROOM | changes, 2, 2)


def test_nixl_serves_a_kv_only_if_the_request_asks_for_it():
    assert specs("prefill", "nixl", {PARAMS: {"do_remote_decode": True}}) == [Serve()]
    assert specs("prefill", "nixl", {}) == [None]
    assert specs("prefill", "nixl", {PARAMS: {"do_remote_decode": False}}) == [None]
    assert specs("decode", "nixl", {PARAMS: {"do_remote_decode": True}}) == [None]


def test_decode_fetches_the_kv_that_the_nixl_prefill_named():
    fetch = Fetch("10.0.0.1", 9000, "kept:req-1", "engine", "request kept:req-1")
    assert specs("decode", "nixl", {PARAMS: NIXL_FETCH}) == [fetch]


def test_the_choices_of_a_prompt_share_one_kv():
    assert specs("prefill", "nixl", {PARAMS: {"do_remote_decode": True}}, 2) == [Serve(), None]
    first, second = specs("decode", "nixl", {PARAMS: NIXL_FETCH}, 2)
    assert first == second


def test_one_handle_for_several_prompts_is_refused():
    with pytest.raises(InvalidTransfer, match="one prompt, not for 2"):
        specs("decode", "nixl", {PARAMS: NIXL_FETCH}, 2, 2)


def test_a_request_with_several_prompts_keeps_no_kv():
    request = {PARAMS: {"do_remote_decode": True}}
    assert specs("prefill", "nixl", request, 2, 2) == [None, None]


def test_mooncake_legs_are_matched_by_their_transfer_id():
    request = {PARAMS: {"do_remote_decode": True, "transfer_id": "xfer-1"}}
    (served,) = specs("prefill", "mooncake", request)
    (fetched,) = specs("decode", "mooncake", {PARAMS: MOONCAKE_FETCH})
    assert served == Serve("transfer:xfer-1")
    assert (fetched.host, fetched.port, fetched.key) == ("10.0.0.1", 8998, served.key)


@pytest.mark.parametrize(
    ("connector", "params"),
    [
        ("nixl", 5),
        *(("nixl", {**NIXL_FETCH, name: None}) for name in NIXL_NAMES),
        ("nixl", {**NIXL_FETCH, "remote_request_id": "x" * 256}),
        *(
            ("mooncake", {**MOONCAKE_FETCH, name: None})
            for name in MOONCAKE_FETCH
            if name != "do_remote_prefill"
        ),
        ("mooncake", {**MOONCAKE_FETCH, "remote_bootstrap_addr": "10.0.0.1:8998"}),
        ("mooncake", {**MOONCAKE_FETCH, "remote_bootstrap_addr": "http://10.0.0.1:99999"}),
        ("mooncake", {**MOONCAKE_FETCH, "remote_bootstrap_addr": "http://[::1"}),
    ],
)
def test_an_invalid_transfer_object_is_refused_by_the_name_of_its_field(connector, params):
    with pytest.raises(InvalidTransfer, match=PARAMS):
        specs("decode", connector, {PARAMS: params})


def test_a_prefill_replica_does_not_fetch():
    with pytest.raises(InvalidTransfer, match="this one is prefill"):
        specs("prefill", "nixl", {PARAMS: NIXL_FETCH})


def test_fields_of_another_connector_are_ignored():
    assert specs("decode", "nixl", ROOM) == [None]


@pytest.mark.parametrize("spec", [Serve(), Serve("room:1", waits=True), Fetch("h", 1, "room:1")])
def test_a_spec_survives_serialization(spec):
    params = msgspec.msgpack.decode(msgspec.msgpack.encode(to_params(spec)))
    assert from_params(params) == spec
