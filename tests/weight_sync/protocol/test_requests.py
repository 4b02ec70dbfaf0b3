import json

import pytest

from omni_proxy.process_group.tensor_plan import GroupError
from omni_proxy.weight_sync.protocol.requests import (
    LARGE_BYTES,
    group_name_of,
    init_of,
    marks_of,
    object_of,
    prepare_of,
)

INIT = {"master_address": "10.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 3}
TENSORS = {"names": ["a", "b"], "dtypes": ["bfloat16", "float32"], "shapes": [[2, 2], [3]]}


def test_an_init_names_its_owner_by_address_and_port():
    asked = init_of(INIT)
    assert (asked.address, asked.group_name, asked.force) == (
        "10.0.0.1:29500",
        "weight_update_group",
        False,
    )
    assert init_of({**INIT, "master_address": "[::1]"}).address == "[::1]:29500"
    assert init_of({**INIT, "force": True}).force


def test_numbers_may_come_as_text():
    texts = {name: str(value) for name, value in INIT.items()}
    assert init_of(texts) == init_of(INIT)


@pytest.mark.parametrize(
    ("change", "told"),
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
def test_an_init_that_could_only_hang_is_refused_by_name(change, told):
    with pytest.raises(GroupError, match=told):
        init_of({**INIT, **change})


def test_what_is_missing_is_said_to_be_missing():
    with pytest.raises(GroupError, match="it is missing"):
        init_of({name: value for name, value in INIT.items() if name != "rank_offset"})


def test_both_forms_of_a_prepare_tell_what_comes():
    one = prepare_of(TENSORS)
    assert (one.batched, one.buckets, one.names, one.nbytes) == (False, 1, {"a", "b"}, 20)
    more = {"names": ["c"], "dtypes": ["uint8"], "shapes": [[5]]}
    whole = prepare_of({"num_buckets": 2, "buckets": [TENSORS, more], "group_name": "g"})
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
        prepare_of(body)


def test_only_what_is_said_marks_the_last_call():
    assert not marks_of({}).last
    assert not marks_of({"flush_cache": False}).last
    assert marks_of({"flush_cache": True}).last
    assert marks_of({"weight_version": 7}).weight_version == "7"
    assert marks_of({"weight_version": 7}).last
    assert marks_of({"abort_all_requests": True}).abort_all_requests


@pytest.mark.parametrize("raw", [b"[]", b"{", b"\xff", b'"a"', b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused(raw):
    with pytest.raises(GroupError):
        object_of(raw)


def test_no_body_is_an_empty_object():
    assert object_of(b"") == {}
    assert group_name_of(object_of(json.dumps({"group_name": "g"}).encode())) == "g"


def test_a_large_body_is_read_like_a_small_one():
    count = LARGE_BYTES // 4
    bucket = {"names": [f"t{at}" for at in range(count)], "dtypes": [], "shapes": [[1]]}
    for body in ({"buckets": [bucket, TENSORS], "group_name": "g"}, {"buckets": 7, **bucket}):
        raw = json.dumps(body).encode()
        assert len(raw) > LARGE_BYTES
        assert object_of(raw) == body
    for raw in (
        b" " * LARGE_BYTES,
        b"[" + b" " * LARGE_BYTES + b"]",
        b'{"a": ' + b"1" * LARGE_BYTES,
    ):
        with pytest.raises(GroupError):
            object_of(raw)
