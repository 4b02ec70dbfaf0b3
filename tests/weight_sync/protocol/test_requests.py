import json

import pytest

from omni_proxy.process_group.tensor_plan import GroupError
from omni_proxy.weight_sync.protocol.requests import (
    LARGE_BYTES,
    parse_flags,
    parse_group_name,
    parse_init,
    parse_object,
    parse_prepare,
)

INIT = {"master_address": "10.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 3}
TENSORS = {"names": ["a", "b"], "dtypes": ["bfloat16", "float32"], "shapes": [[2, 2], [3]]}


def test_an_init_names_its_owner_by_address_and_port():
    request = parse_init(INIT)
    assert (request.address, request.group_name, request.force) == (
        "10.0.0.1:29500",
        "weight_update_group",
        False,
    )
    assert parse_init({**INIT, "master_address": "[::1]"}).address == "[::1]:29500"
    assert parse_init({**INIT, "force": True}).force


def test_numbers_may_come_as_text():
    texts = {name: str(value) for name, value in INIT.items()}
    assert parse_init(texts) == parse_init(INIT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank_offset": None}, "rank_offset must be a whole number"),
        ({"world_size": "many"}, "world_size must be a whole number"),
        ({"world_size": True}, "world_size must be a whole number"),
        ({"master_port": 0}, "master_port"),
        ({"master_port": "x"}, "master_port"),
        ({"master_address": ""}, "master_address"),
        ({"master_address": 7}, "master_address"),
        ({"backend": "mpi"}, "backend"),
        ({"group_name": ""}, "group_name"),
        ({"group_name": 3}, "group_name"),
    ],
)
def test_an_init_that_could_only_hang_is_refused_by_name(change, message):
    with pytest.raises(GroupError, match=message):
        parse_init({**INIT, **change})


def test_missing_keys_are_named():
    with pytest.raises(GroupError, match="it is missing"):
        parse_init({name: value for name, value in INIT.items() if name != "rank_offset"})


def test_both_forms_of_a_prepare_are_parsed():
    one = parse_prepare(TENSORS)
    assert (one.batched, one.buckets, one.names, one.nbytes) == (False, 1, {"a", "b"}, 20)
    more = {"names": ["c"], "dtypes": ["uint8"], "shapes": [[5]]}
    whole = parse_prepare({"num_buckets": 2, "buckets": [TENSORS, more], "group_name": "g"})
    assert (whole.batched, whole.buckets, whole.nbytes) == (True, 2, 25)
    assert (whole.names, whole.group_name) == ({"a", "b", "c"}, "g")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"num_buckets": 2, "buckets": [TENSORS]},
        {**TENSORS, "dtypes": ["bfloat16"]},
        {**TENSORS, "names": ["a", "a"]},
        {**TENSORS, "shapes": [[-1], [3]]},
        {**TENSORS, "transport": "p2p"},
    ],
)
def test_a_malformed_prepare_is_refused_before_anything_is_armed(body):
    with pytest.raises(GroupError):
        parse_prepare(body)


def test_only_explicit_flags_mark_the_last_call():
    assert not parse_flags({}).last
    assert not parse_flags({"flush_cache": False}).last
    assert parse_flags({"flush_cache": True}).last
    assert parse_flags({"weight_version": 7}).weight_version == "7"
    assert parse_flags({"weight_version": 7}).last
    assert parse_flags({"abort_all_requests": True}).abort_all_requests


@pytest.mark.parametrize("raw", [b"[]", b"{", b"\xff", b'"a"', b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused(raw):
    with pytest.raises(GroupError):
        parse_object(raw)


def test_no_body_is_an_empty_object():
    assert parse_object(b"") == {}
    assert parse_group_name(parse_object(json.dumps({"group_name": "g"}).encode())) == "g"


def test_a_large_body_is_parsed_like_a_small_one():
    count = LARGE_BYTES // 4
    bucket = {"names": [f"t{at}" for at in range(count)], "dtypes": [], "shapes": [[1]]}
    for body in ({"buckets": [bucket, TENSORS], "group_name": "g"}, {"buckets": 7, **bucket}):
        raw = json.dumps(body).encode()
        assert len(raw) > LARGE_BYTES
        assert parse_object(raw) == body
    for raw in (
        b" " * LARGE_BYTES,
        b"[" + b" " * LARGE_BYTES + b"]",
        b'{"a": ' + b"1" * LARGE_BYTES,
    ):
        with pytest.raises(GroupError):
            parse_object(raw)
