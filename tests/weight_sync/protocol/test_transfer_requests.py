import json

import pytest

from omni_proxy.process_group.tensor_plan import GroupError
from omni_proxy.weight_sync.protocol.requests import RankRange
from omni_proxy.weight_sync.protocol.transfer_requests import (
    parse_finish,
    parse_transfer_init,
    parse_transfer_update,
)

INFO = {"master_address": "10.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 4}
TENSORS = {"names": ["a", "b"], "dtype_names": ["bfloat16", "float32"], "shapes": [[2, 2], [3]]}


def init(**fields):
    return parse_transfer_init({"init_info": {**INFO, **fields}})


def update(info, ranks=3):
    body = {"update_info": info}
    return parse_transfer_update(json.dumps(body).encode(), body, ranks)


# Init


def test_an_init_keeps_what_the_backend_needs_and_changes_the_ranks_alone():
    request = init(packed=True, packed_num_buffers=2)
    assert (request.address, request.rank_offset, request.world_size) == (("10.0.0.1", 29500), 1, 4)
    told = json.loads(request.body_for(3))["init_info"]
    assert told == {**INFO, "packed": True, "packed_num_buffers": 2, "rank_offset": 3}


def test_numbers_may_come_as_text():
    request = init(rank_offset="1", world_size="4", master_port="29500")
    assert (request.rank_offset, request.world_size, request.address[1]) == (1, 4, 29500)
    told = json.loads(request.body_for(2))["init_info"]
    assert (told["rank_offset"], told["world_size"]) == (2, 4)


def test_a_backend_without_ranks_gets_its_words_back():
    request = parse_transfer_init({"init_info": {}})
    assert (request.address, request.rank_offset, request.world_size) == (None, None, None)
    assert json.loads(request.body_for(7)) == {"init_info": {}}


def test_ranks_that_meet_by_a_shared_id_have_no_address():
    told = {"rank_offset": 1, "world_size": 3, "nccl_unique_id_b64": "AAAA"}
    request = parse_transfer_init({"init_info": told})
    assert (request.address, request.shown_address) == (None, "no address")
    assert json.loads(request.body_for(2))["init_info"] == {**told, "rank_offset": 2}


@pytest.mark.parametrize(
    ("body", "words"),
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
def test_an_init_that_would_hang_is_refused(body, words):
    with pytest.raises(GroupError, match=words):
        parse_transfer_init(body)


def test_a_trainer_can_take_over():
    assert parse_transfer_init({"init_info": INFO, "force": True}).force is True


# Update


def test_a_chunk_goes_to_everybody_as_it_was_sent():
    request = update(TENSORS)
    assert (request.names, request.nbytes) == ({"a", "b"}, 4 * 2 + 3 * 4)
    assert request.body_for(RankRange("w", 2, 2), 1) is request.body


def test_a_list_is_divided_by_ranks():
    request = update([{**TENSORS, "names": [f"{n}0", f"{n}1"]} for n in "abc"])
    first, second = RankRange("one", 1, 1), RankRange("two", 2, 2)

    def names(ranks):
        parts = json.loads(request.body_for(ranks, 1))["update_info"]
        return [part["names"] for part in parts]

    assert names(first) == [["a0", "a1"]]
    assert names(second) == [["b0", "b1"], ["c0", "c1"]]


def test_a_backend_of_its_own_announces_nothing():
    request = update({"ipc_handles_pickled": "AAAA"})
    assert (request.names, request.nbytes, request.parts) == (frozenset(), 0, None)


@pytest.mark.parametrize(
    ("info", "words"),
    [
        (None, "body.update_info is missing"),
        ("x", "body.update_info is missing"),
        ([TENSORS], "a list of 1, and there are 3 ranks"),
        ([TENSORS, TENSORS, 1], "must be an object"),
        ({**TENSORS, "names": ["a"]}, "1 names, 2 dtype_names, 2 shapes"),
    ],
)
def test_a_chunk_that_engines_would_cut_short_is_refused(info, words):
    with pytest.raises(GroupError, match=words):
        update(info)


def test_a_size_that_is_no_size_counts_nothing():
    odd = {"names": ["a", "b"], "dtype_names": ["torch.int8", "odd"], "shapes": [[2], ["x"]]}
    assert update(odd).nbytes == 2


# Finish


def test_a_finish_may_name_the_version():
    assert parse_finish({"weight_version": "step-1"}) == "step-1"
    assert parse_finish({}) is parse_finish({"weight_version": None}) is None
    with pytest.raises(GroupError, match="weight_version must be a string"):
        parse_finish({"weight_version": 7})
