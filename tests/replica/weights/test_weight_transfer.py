"""vLLM's calls at the stage: their order, announced tensors, and packed messages."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.process_group.tensor_plan import FLATTENED, GroupError, parse_plans
from omni_proxy.replica.weights.weight_transfer import (
    NO_MATCH,
    NOT_JOINED,
    NOT_STARTED,
    STARTED,
    WireForm,
    announced,
    packed_ends,
)
from tests.replica.weights.stage_fixture import checksum_of, running, save, weights_of
from tools.training.transfer import StatelessGroup, messages

INFO = {"names": ["a", "b"], "dtype_names": ["float32", "bfloat16"], "shapes": [[2, 3], [4]]}


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=20),
    st.integers(1, 60),
)
def test_both_sides_pack_alike_and_a_message_ends_where_it_exceeds_the_buffer(sizes, buffer):
    sent = messages([torch.zeros(size, dtype=torch.uint8) for size in sizes], buffer)
    ends = packed_ends(sizes, WireForm(packed=True, buffer_bytes=buffer))
    starts = [0, *ends[:-1]]
    sums = [sum(sizes[start:end]) for start, end in zip(starts, ends, strict=True)]
    assert sums == [message.numel() for message in sent]
    assert ends[-1] == len(sizes)
    for start, end in zip(starts, ends, strict=True):
        assert sum(sizes[start : end - 1]) <= buffer
    assert all(total > buffer for total in sums[:-1])


def test_what_is_announced_becomes_a_plan_of_one_message_each_or_packed():
    (plan,) = parse_plans(announced(INFO, WireForm()))
    assert [message.nbytes for message in plan.messages] == [24, 8]
    reported = announced(INFO, WireForm(packed=True))
    assert reported["load_format"] == FLATTENED
    (plan,) = parse_plans(reported)
    assert [message.nbytes for message in plan.messages] == [32]
    plans = parse_plans(announced(INFO, WireForm(packed=True, buffer_bytes=5)))
    assert [[message.nbytes for message in plan.messages] for plan in plans] == [[24], [8]]


@pytest.mark.parametrize(
    ("info", "why"),
    [
        ({}, "update_info.names must be a list"),
        (INFO | {"shapes": [[1]]}, "`shapes` should be of the same size as `names`: got 1 and 2"),
        (INFO | {"dtype_names": 5}, "update_info.dtype_names must be a list"),
    ],
)
def test_what_cannot_be_announced_is_refused_by_name(info, why):
    with pytest.raises(GroupError, match=why):
        announced(info, WireForm())


def test_the_format_is_that_of_the_init_unless_an_update_overrides_it():
    form = WireForm.of({"packed": True, "packed_buffer_size_bytes": 7})
    assert form == WireForm(packed=True, buffer_bytes=7)
    assert WireForm.of({}, form) == form
    assert WireForm.of({"packed": False}, form) == WireForm(packed=False, buffer_bytes=7)
    for wrong in ({"packed": 1}, {"packed_buffer_size_bytes": 0}):
        with pytest.raises(GroupError):
            WireForm.of(wrong)


def refused(stage, action, **payload):
    answer = stage.admin(action, **payload)
    assert not answer.success
    return answer.message


def test_calls_out_of_order_get_the_errors_of_vllm():
    with running() as stage:
        assert refused(stage, "update_weights", update_info=INFO) == NOT_STARTED
        assert refused(stage, "finish_weight_update") == NO_MATCH
        assert refused(stage, "start_weight_update", draft=True).startswith("there is no draft")
        assert stage.admin("start_weight_update").success
        assert refused(stage, "start_weight_update") == STARTED
        assert "during a weight update" in refused(stage, "shutdown_weight_transfer_engine")
        assert refused(stage, "update_weights", update_info=INFO) == NOT_JOINED
        assert refused(stage, "finish_weight_update") == NO_MATCH  # the failure has ended it
        assert stage.admin("start_weight_update").success
        assert stage.admin("finish_weight_update", weight_version="v1").success
        assert stage.facts()["weight_version"] == "v1"
        assert stage.admin("shutdown_weight_transfer_engine").success
        assert stage.checksum() == checksum_of(weights_of(0))


@pytest.mark.parametrize(
    ("info", "why"),
    [
        ({}, "init_info.rank_offset must be a whole number"),
        ({"rank_offset": 1, "world_size": 1}, "world_size 1"),
        ({"rank_offset": 2, "world_size": 2}, "rank 2 does not fit a group of 2"),
        ({"rank_offset": 1, "world_size": 2}, "master_address must be"),
        ({"rank_offset": 1, "world_size": 2, "nccl_unique_id_b64": "x"}, "needs NCCL"),
        ({"rank_offset": 1, "world_size": 2, "packed": "yes"}, "packed must be"),
    ],
)
def test_a_group_that_could_never_form_is_refused_before_anything_is_opened(info, why):
    with running() as stage:
        assert why in refused(stage, "init_weight_transfer_engine", init_info=info)
        assert stage.facts()["weight_sync"]["groups"] == []


def test_a_reset_makes_the_weights_random_and_uncertain():
    with running() as stage:
        before = stage.generate()["token_ids"]
        assert stage.admin("reset_weights").success
        assert stage.checksum() != checksum_of(weights_of(0))
        assert stage.facts()["weight_sync"]["weights"] == "uncertain"
        assert stage.generate()["token_ids"] != before


class Met:
    """An init call whose result the test reads."""

    def refused(self):
        return ""

    wait = refused


def joined(stage, host="127.0.0.1"):
    group = StatelessGroup(2, "127.0.0.1", 30.0)
    info = {"master_address": host, "master_port": group.port, "rank_offset": 1}
    init = stage.send("init_weight_transfer_engine", init_info=info | {"world_size": 2})
    group.join(Met())
    answer = stage.answer(init)
    assert answer.success, answer.message
    return group


def announcement(tensors):
    return {
        "names": list(tensors),
        "dtype_names": [str(each.dtype).removeprefix("torch.") for each in tensors.values()],
        "shapes": [list(each.shape) for each in tensors.values()],
    }


def receiving(stage, tensors):
    """An update whose tensors have not been sent yet."""
    update = stage.send("update_weights", update_info=announcement(tensors))
    while stage.facts()["weight_sync"]["state"] != "receiving":
        pass
    return update


def test_requests_run_beside_an_update_and_finish_waits_for_none():
    new = weights_of(1)
    with running() as stage:
        group = joined(stage)
        assert stage.admin("start_weight_update").success
        update = receiving(stage, new)
        old = stage.generate()
        assert "already in progress" in refused(stage, "finish_weight_update")
        assert "already in progress" in refused(stage, "init_weight_transfer_engine", init_info={
            "master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2})  # fmt: skip
        for tensor in new.values():
            group.broadcast(tensor)
        assert stage.answer(update).success
        assert stage.generate()["token_ids"] == old["token_ids"]  # nothing is swapped yet
        assert stage.admin("finish_weight_update", weight_version="v1").success
        assert stage.checksum() == checksum_of(new)
        assert stage.generate()["token_ids"] != old["token_ids"]


def test_a_session_that_something_else_ends_takes_its_tensors_along(tmp_path):
    new, file = weights_of(1), save(tmp_path / "w.safetensors", weights_of(2))
    with running() as stage:
        group = joined(stage)
        assert stage.admin("start_weight_update").success
        name = next(iter(new))
        first = receiving(stage, {name: new[name]})
        group.broadcast(new[name])
        assert stage.answer(first).success
        assert stage.update(file).success  # the complete model from another source
        assert refused(stage, "finish_weight_update") == NO_MATCH
        assert stage.checksum() == checksum_of(weights_of(2))


def test_a_lost_trainer_ends_the_session_and_keeps_the_old_weights():
    with running() as stage:
        group = joined(stage)
        assert stage.admin("start_weight_update").success
        update = receiving(stage, weights_of(1))
        del group
        answer = stage.answer(update)
        assert not answer.success
        assert "Nothing was changed" in answer.message
        assert refused(stage, "finish_weight_update") == NO_MATCH
        assert stage.admin("start_weight_update").success
        assert "init_weight_transfer_engine" in refused(
            stage, "update_weights", update_info=announcement(weights_of(1))
        )
        again = joined(stage)
        assert stage.admin("start_weight_update").success
        update = receiving(stage, weights_of(1))
        for tensor in weights_of(1).values():
            again.broadcast(tensor)
        assert stage.answer(update).success
        assert stage.admin("finish_weight_update").success
        assert stage.checksum() == checksum_of(weights_of(1))


def test_a_trainer_that_has_another_name_for_its_own_address_is_found():
    new = weights_of(1)
    with running() as stage:
        group = joined(stage, host="localhost")
        assert stage.admin("start_weight_update").success
        update = receiving(stage, new)
        for tensor in new.values():
            group.broadcast(tensor)
        assert stage.answer(update).success
        assert stage.admin("finish_weight_update").success
        assert stage.checksum() == checksum_of(new)
