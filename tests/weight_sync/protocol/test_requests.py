import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.process_group.tensor_plan import GroupError
from omni_proxy.weight_sync.protocol.requests import (
    LARGE_BYTES,
    RankLayoutError,
    RankRange,
    assign_ranks,
    count_ranks,
    parse_finish,
    parse_flags,
    parse_group_name,
    parse_init,
    parse_object,
    parse_prepare,
    parse_transfer_init,
    parse_transfer_update,
)

INIT = {"master_address": "10.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 3}
TENSORS = {"names": ["a", "b"], "dtypes": ["bfloat16", "float32"], "shapes": [[2, 2], [3]]}
RANKS = st.lists(st.integers(1, 8), min_size=1, max_size=6).map(
    lambda counts: {f"http://{at}": count for at, count in enumerate(counts)}
)


def test_an_init_has_the_address_and_port_of_its_trainer():
    request = parse_init(INIT)
    assert (request.address, request.group_name, request.force) == (
        "10.0.0.1:29500",
        "weight_update_group",
        False,
    )
    assert parse_init({**INIT, "master_address": "[::1]"}).address == "[::1]:29500"
    assert parse_init({**INIT, "force": True}).force


def test_numbers_of_an_init_may_be_strings():
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
def test_an_init_that_would_hang_is_refused_with_the_name_of_the_key(change, message):
    with pytest.raises(GroupError, match=message):
        parse_init({**INIT, **change})


def test_missing_keys_are_named():
    with pytest.raises(GroupError, match="it is missing"):
        parse_init({name: value for name, value in INIT.items() if name != "rank_offset"})


def test_both_forms_of_a_prepare_are_parsed():
    single = parse_prepare(TENSORS)
    assert (single.batched, single.buckets, single.names, single.nbytes) == (
        False,
        1,
        {"a", "b"},
        20,
    )
    second = {"names": ["c"], "dtypes": ["uint8"], "shapes": [[5]]}
    batch = parse_prepare({"num_buckets": 2, "buckets": [TENSORS, second], "group_name": "g"})
    assert (batch.batched, batch.buckets, batch.nbytes) == (True, 2, 25)
    assert (batch.names, batch.group_name) == ({"a", "b", "c"}, "g")


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
def test_a_body_that_is_not_an_object_is_refused(raw):
    with pytest.raises(GroupError):
        parse_object(raw)


def test_an_empty_body_is_an_empty_object():
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


INFO = {"master_address": "10.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 4}
TRANSFER_TENSORS = {
    "names": ["a", "b"],
    "dtype_names": ["bfloat16", "float32"],
    "shapes": [[2, 2], [3]],
}


def init(**fields):
    return parse_transfer_init({"init_info": {**INFO, **fields}})


def update(info, ranks=3):
    body = {"update_info": info}
    return parse_transfer_update(json.dumps(body).encode(), body, ranks)


# Init


def test_only_the_rank_offset_of_a_transfer_init_changes():
    request = init(packed=True, packed_num_buffers=2)
    assert (request.address, request.rank_offset, request.world_size) == (("10.0.0.1", 29500), 1, 4)
    init_info = json.loads(request.body_for(3))["init_info"]
    assert init_info == {**INFO, "packed": True, "packed_num_buffers": 2, "rank_offset": 3}


def test_numbers_of_a_transfer_init_may_be_strings():
    request = init(rank_offset="1", world_size="4", master_port="29500")
    assert (request.rank_offset, request.world_size, request.address[1]) == (1, 4, 29500)
    init_info = json.loads(request.body_for(2))["init_info"]
    assert (init_info["rank_offset"], init_info["world_size"]) == (2, 4)


def test_an_init_info_without_ranks_is_forwarded_unchanged():
    request = parse_transfer_init({"init_info": {}})
    assert (request.address, request.rank_offset, request.world_size) == (None, None, None)
    assert json.loads(request.body_for(7)) == {"init_info": {}}


def test_an_init_with_a_shared_nccl_id_has_no_address():
    init_info = {"rank_offset": 1, "world_size": 3, "nccl_unique_id_b64": "AAAA"}
    request = parse_transfer_init({"init_info": init_info})
    assert (request.address, request.shown_address) == (None, "no address")
    assert json.loads(request.body_for(2))["init_info"] == {**init_info, "rank_offset": 2}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "body.init_info is missing"),
        ({"init_info": []}, "body.init_info is missing"),
        ({"init_info": {**INFO, "rank_offset": "x"}}, "rank_offset must be a whole number"),
        ({"init_info": {**INFO, "rank_offset": True}}, "rank_offset must be a whole number"),
        ({"init_info": {**INFO, "world_size": None}}, "both rank_offset and world_size"),
        ({"init_info": {**INFO, "master_port": 0}}, "master_port"),
        ({"init_info": {**INFO, "master_address": ""}}, "master_address"),
        ({"init_info": {**INFO, "master_address": None}}, "master_address"),
    ],
)
def test_a_transfer_init_that_would_hang_is_refused(body, message):
    with pytest.raises(GroupError, match=message):
        parse_transfer_init(body)


def test_a_transfer_init_can_force_a_takeover():
    assert parse_transfer_init({"init_info": INFO, "force": True}).force is True


# Update


def test_a_chunk_is_forwarded_unchanged_to_all_workers():
    request = update(TRANSFER_TENSORS)
    assert (request.names, request.nbytes) == ({"a", "b"}, 4 * 2 + 3 * 4)
    assert request.body_for(RankRange("w", 2, 2), 1) is request.body


def test_a_list_of_chunks_is_divided_by_ranks():
    request = update([{**TRANSFER_TENSORS, "names": [f"{n}0", f"{n}1"]} for n in "abc"])
    first, second = RankRange("one", 1, 1), RankRange("two", 2, 2)

    def names(ranks):
        parts = json.loads(request.body_for(ranks, 1))["update_info"]
        return [part["names"] for part in parts]

    assert names(first) == [["a0", "a1"]]
    assert names(second) == [["b0", "b1"], ["c0", "c1"]]


def test_an_update_of_a_custom_backend_announces_no_tensors():
    request = update({"ipc_handles_pickled": "AAAA"})
    assert (request.names, request.nbytes, request.parts) == (frozenset(), 0, None)


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (None, "body.update_info is missing"),
        ("x", "body.update_info is missing"),
        ([TRANSFER_TENSORS], "a list of 1, and there are 3 ranks"),
        ([TRANSFER_TENSORS, TRANSFER_TENSORS, 1], "must be an object"),
        ({**TRANSFER_TENSORS, "names": ["a"]}, "1 names, 2 dtype_names, 2 shapes"),
    ],
)
def test_an_inconsistent_chunk_is_refused(info, message):
    with pytest.raises(GroupError, match=message):
        update(info)


def test_tensors_of_unknown_size_count_as_zero_bytes():
    info = {"names": ["a", "b"], "dtype_names": ["torch.int8", "odd"], "shapes": [[2], ["x"]]}
    assert update(info).nbytes == 2


# Finish


def test_a_finish_may_name_the_weight_version():
    assert parse_finish({"weight_version": "step-1"}) == "step-1"
    assert parse_finish({}) is parse_finish({"weight_version": None}) is None
    with pytest.raises(GroupError, match="weight_version must be a string"):
        parse_finish({"weight_version": 7})


@given(RANKS, st.integers(-2, 12), st.integers(0, 60))
def test_a_layout_assigns_each_rank_once_and_none_outside_the_group(ranks, offset, world):
    fits = offset >= 1 and offset + sum(ranks.values()) <= world
    try:
        layout = assign_ranks(offset, world, ranks)
    except RankLayoutError:
        assert not fits
        return
    assert fits
    assigned = [
        rank_range.offset + at for rank_range in layout for at in range(rank_range.rank_count)
    ]
    assert assigned == list(range(offset, offset + sum(ranks.values())))
    assert {rank_range.name: rank_range.rank_count for rank_range in layout} == ranks


def test_ranks_that_do_not_fit_are_refused_with_the_sum():
    with pytest.raises(RankLayoutError) as refused:
        assign_ranks(4, 4, {"http://a": 2, "http://b": 1})
    message = str(refused.value)
    assert "rank_offset 4 + 3 ranks" in message
    assert "http://a: 2, http://b: 1" in message
    assert "= 7, but world_size is 4" in message


def test_rank_zero_cannot_be_assigned():
    with pytest.raises(RankLayoutError, match="rank_offset 0"):
        assign_ranks(0, 9, {"http://a": 1})


@pytest.mark.parametrize("ranks", [{}, {"http://a": 0}])
def test_a_participant_without_ranks_is_refused(ranks):
    with pytest.raises(RankLayoutError, match="at least one rank"):
        assign_ranks(1, 9, ranks)


@pytest.mark.parametrize(
    ("info", "ranks"),
    [({"tp_size": 2}, 2), ({"tp_size": 0}, 1), ({"tp_size": True}, 1), ({}, 1), (None, 1)],
)
def test_a_server_that_reports_no_ranks_counts_as_one_rank(info, ranks):
    assert count_ranks(info) == ranks
