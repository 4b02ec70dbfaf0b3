"""The weight-transfer calls of vLLM: their order, announced tensors, and packed messages."""

import time

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
def test_both_sides_end_a_message_where_it_exceeds_the_buffer(sizes, buffer):
    sent = messages([torch.zeros(size, dtype=torch.uint8) for size in sizes], buffer)
    ends = packed_ends(sizes, WireForm(packed=True, buffer_bytes=buffer))
    starts = [0, *ends[:-1]]
    sums = [sum(sizes[start:end]) for start, end in zip(starts, ends, strict=True)]
    assert sums == [message.numel() for message in sent]
    assert ends[-1] == len(sizes)
    for start, end in zip(starts, ends, strict=True):
        assert sum(sizes[start : end - 1]) <= buffer
    assert all(total > buffer for total in sums[:-1])


def test_announced_tensors_are_planned_one_by_one_or_packed():
    (plan,) = parse_plans(announced(INFO, WireForm()))
    assert [message.nbytes for message in plan.messages] == [24, 8]
    announcement = announced(INFO, WireForm(packed=True))
    assert announcement["load_format"] == FLATTENED
    (plan,) = parse_plans(announcement)
    assert [message.nbytes for message in plan.messages] == [32]
    plans = parse_plans(announced(INFO, WireForm(packed=True, buffer_bytes=5)))
    assert [[message.nbytes for message in plan.messages] for plan in plans] == [[24], [8]]


@pytest.mark.parametrize(
    ("info", "reason"),
    [
        ({}, "update_info.names must be a list"),
        (INFO | {"shapes": [[1]]}, "`shapes` should be of the same size as `names`: got 1 and 2"),
        (INFO | {"dtype_names": 5}, "update_info.dtype_names must be a list"),
    ],
)
def test_an_invalid_announcement_is_refused_by_the_name_of_its_field(info, reason):
    with pytest.raises(GroupError, match=reason):
        announced(info, WireForm())


def test_the_format_is_that_of_the_init_unless_an_update_overrides_it():
    form = WireForm.of({"packed": True, "packed_buffer_size_bytes": 7})
    assert form == WireForm(packed=True, buffer_bytes=7)
    assert WireForm.of({}, form) == form
    assert WireForm.of({"packed": False}, form) == WireForm(packed=False, buffer_bytes=7)
    for invalid in ({"packed": 1}, {"packed_buffer_size_bytes": 0}):
        with pytest.raises(GroupError):
            WireForm.of(invalid)


def refusal_of(stage, action, **payload):
    result = stage.admin(action, **payload)
    assert not result.success
    return result.message


def test_calls_out_of_order_fail_with_the_messages_of_vllm():
    with running() as stage:
        assert refusal_of(stage, "update_weights", update_info=INFO) == NOT_STARTED
        assert refusal_of(stage, "finish_weight_update") == NO_MATCH
        assert refusal_of(stage, "start_weight_update", draft=True).startswith("there is no draft")
        assert stage.admin("start_weight_update").success
        assert refusal_of(stage, "start_weight_update") == STARTED
        assert "during a weight update" in refusal_of(stage, "shutdown_weight_transfer_engine")
        assert refusal_of(stage, "update_weights", update_info=INFO) == NOT_JOINED
        # The failure has ended the update.
        assert refusal_of(stage, "finish_weight_update") == NO_MATCH
        assert stage.admin("start_weight_update").success
        assert stage.admin("finish_weight_update", weight_version="v1").success
        assert stage.facts()["weight_version"] == "v1"
        assert stage.admin("shutdown_weight_transfer_engine").success
        assert stage.checksum() == checksum_of(weights_of(0))


@pytest.mark.parametrize(
    ("info", "reason"),
    [
        ({}, "init_info.rank_offset must be a whole number"),
        ({"rank_offset": 1, "world_size": 1}, "world_size 1"),
        ({"rank_offset": 2, "world_size": 2}, "rank 2 does not fit a group of 2"),
        ({"rank_offset": 1, "world_size": 2}, "master_address must be"),
        ({"rank_offset": 1, "world_size": 2, "nccl_unique_id_b64": "x"}, "needs NCCL"),
        ({"rank_offset": 1, "world_size": 2, "packed": "yes"}, "packed must be"),
    ],
)
def test_an_invalid_group_is_refused_before_anything_is_opened(info, reason):
    with running() as stage:
        assert reason in refusal_of(stage, "init_weight_transfer_engine", init_info=info)
        assert stage.facts()["weight_sync"]["groups"] == []


def test_a_reset_makes_the_weights_random_and_uncertain():
    with running() as stage:
        before = stage.generate()["token_ids"]
        assert stage.admin("reset_weights").success
        assert stage.checksum() != checksum_of(weights_of(0))
        assert stage.facts()["weight_sync"]["weights"] == "uncertain"
        assert stage.generate()["token_ids"] != before


class InitCall:
    """The init call, as `StatelessGroup.join` sees it. The test itself reads its result."""

    def refused(self):
        return ""

    wait = refused


def join_group(stage, host="127.0.0.1"):
    group = StatelessGroup(2, "127.0.0.1", 30.0)
    info = {"master_address": host, "master_port": group.port, "rank_offset": 1}
    init = stage.send("init_weight_transfer_engine", init_info=info | {"world_size": 2})
    group.join(InitCall())
    result = stage.admin_result(init)
    assert result.success, result.message
    return group


def announcement(tensors):
    return {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


def start_receiving(stage, tensors):
    """An update whose tensors have not been sent yet."""
    update = stage.send("update_weights", update_info=announcement(tensors))
    end = time.monotonic() + 60
    while stage.facts()["weight_sync"]["state"] != "receiving":  # the stage answers in its own time
        assert time.monotonic() < end, stage.facts()["weight_sync"]
    return update


def test_requests_run_during_an_update_with_the_old_weights():
    new = weights_of(1)
    with running() as stage:
        group = join_group(stage)
        assert stage.admin("start_weight_update").success
        update = start_receiving(stage, new)
        old = stage.generate()
        assert "already in progress" in refusal_of(stage, "finish_weight_update")
        assert "already in progress" in refusal_of(
            stage,
            "init_weight_transfer_engine",
            init_info={
                "master_address": "127.0.0.1",
                "master_port": 1,
                "rank_offset": 1,
                "world_size": 2,
            },
        )
        for tensor in new.values():
            group.broadcast(tensor)
        assert stage.admin_result(update).success
        assert stage.generate()["token_ids"] == old["token_ids"]  # nothing is swapped yet
        assert stage.admin("finish_weight_update", weight_version="v1").success
        assert stage.checksum() == checksum_of(new)
        assert stage.generate()["token_ids"] != old["token_ids"]


def test_an_update_from_disk_ends_an_open_update_and_drops_its_tensors(tmp_path):
    new, file = weights_of(1), save(tmp_path / "w.safetensors", weights_of(2))
    with running() as stage:
        group = join_group(stage)
        assert stage.admin("start_weight_update").success
        name = next(iter(new))
        first = start_receiving(stage, {name: new[name]})
        group.broadcast(new[name])
        assert stage.admin_result(first).success
        assert stage.update(file).success  # the complete model from another source
        assert refusal_of(stage, "finish_weight_update") == NO_MATCH
        assert stage.checksum() == checksum_of(weights_of(2))


def test_a_lost_trainer_ends_the_open_update_and_keeps_the_old_weights():
    with running() as stage:
        group = join_group(stage)
        assert stage.admin("start_weight_update").success
        update = start_receiving(stage, weights_of(1))
        del group
        result = stage.admin_result(update)
        assert not result.success
        assert "Nothing was changed" in result.message
        assert refusal_of(stage, "finish_weight_update") == NO_MATCH
        assert stage.admin("start_weight_update").success
        assert "init_weight_transfer_engine" in refusal_of(
            stage, "update_weights", update_info=announcement(weights_of(1))
        )
        new_group = join_group(stage)
        assert stage.admin("start_weight_update").success
        update = start_receiving(stage, weights_of(1))
        for tensor in weights_of(1).values():
            new_group.broadcast(tensor)
        assert stage.admin_result(update).success
        assert stage.admin("finish_weight_update").success
        assert stage.checksum() == checksum_of(weights_of(1))


def test_a_trainer_may_be_addressed_by_a_host_name():
    new = weights_of(1)
    with running() as stage:
        group = join_group(stage, host="localhost")
        assert stage.admin("start_weight_update").success
        update = start_receiving(stage, new)
        for tensor in new.values():
            group.broadcast(tensor)
        assert stage.admin_result(update).success
        assert stage.admin("finish_weight_update").success
        assert stage.checksum() == checksum_of(new)
