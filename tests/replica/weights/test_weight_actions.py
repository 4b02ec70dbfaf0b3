import base64
import pickle

import pytest
import torch
from safetensors.torch import save

from omni_proxy.process_group.receiver import ThreadReceiver
from omni_proxy.replica.pipeline.stage_messages import ResultChunk, StageFailure
from omni_proxy.replica.stages.text import build
from omni_proxy.replica.weights import live_tensors
from omni_proxy.replica.weights.trainer_groups import ReceiveSettings
from omni_proxy.replica.weights.weight_actions import ModelRank, WeightActions
from tests.process_group.trainer_process import Trainer, make_tensor
from tests.replica.text.scheduler_harness import Loop
from tests.replica.weights import stage_fixture
from tests.replica.weights.stage_fixture import Stage, checksum_of, weights_of

LAST_NORM, UP = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"


def serialized(tensors) -> list[str]:
    return [base64.b64encode(save(tensors)).decode()]


def update_from_tensor(stage, tensors, **fields):
    parts = serialized(tensors) if isinstance(tensors, dict) else tensors
    return stage.admin("update_weights_from_tensor", serialized_named_tensors=parts, **fields)


def some_weights(seed=1, *names):
    weights = weights_of(seed)
    return {name: weights[name] for name in names or (UP,)}


# Tensors in a request


def test_weights_damaged_by_a_failed_swap_are_uncertain_until_they_are_replaced(stage, monkeypatch):
    def fail(pairs):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(live_tensors, "copy_tensors", fail)
    result = update_from_tensor(stage, some_weights())
    assert not result.success
    assert "The weights are damaged: update them before you continue" in result.message
    facts = stage.facts()
    assert (facts["weight_sync"]["weights"], facts["engine_paused"]) == ("uncertain", True)
    result = update_from_tensor(stage, {"no.such.weight": torch.ones(1)})
    assert "the weights are only in part those of version 'default'" in result.message
    monkeypatch.undo()
    assert update_from_tensor(stage, weights_of(2)).success
    assert stage.facts()["weight_sync"]["weights"] == "whole"


def test_a_failed_swap_that_was_undone_restores_every_tensor(stage, monkeypatch):
    before, calls, exchange = stage.checksum(), [], live_tensors._exchange

    def fail_the_second_call(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise MemoryError("no room")
        exchange(*arguments)

    # As on a model over several ranks: another rank may need this one to undo its swap.
    monkeypatch.setattr(live_tensors.LiveTensors, "split", True)
    monkeypatch.setattr(live_tensors, "_exchange", fail_the_second_call)
    result = update_from_tensor(stage, weights_of(2))
    assert not result.success
    assert result.message.startswith("The swap failed and was undone: the weights of version")
    assert stage.checksum() == before
    assert stage.facts()["weight_sync"]["weights"] == "whole"
    assert update_from_tensor(stage, weights_of(2)).success
    assert stage.checksum() == checksum_of(weights_of(2))


def test_tensors_in_a_request_change_only_the_named_weights(stage):
    new = some_weights(1, UP, LAST_NORM)
    result = update_from_tensor(stage, new, weight_version="v1")
    assert (result.success, result.message) == (True, "Succeeded to update parameter online.")
    assert result.data == {
        "num_paused_requests": 0,
        "flush_cache": True,
        "flush_success": True,
        "cache_epoch": 1,
        "keep_pause": False,
        "engine_paused": False,
        "metadata_only": False,
    }
    assert stage.checksum() == checksum_of(weights_of(0) | new)
    assert stage.facts()["weight_version"] == "v1"


def test_a_failed_tensor_update_changes_nothing_and_leaves_the_stage_paused(stage):
    before = stage.checksum()
    result = update_from_tensor(stage, [base64.b64encode(pickle.dumps({"a": 1})).decode()])
    assert not result.success
    assert "is a pickle, which is never read" in result.message
    assert result.message.endswith(
        "Nothing was changed: the weights of version 'default' are whole"
    )
    assert result.data["engine_paused"] is stage.facts()["engine_paused"] is True
    assert stage.checksum() == before
    stage.admin("continue_generation")
    assert stage.generate()["weight_version"] == "default"


# Tensors over a process group


@pytest.fixture(scope="module")
def trainer():
    trainer = Trainer()
    yield trainer
    trainer.close()


def join_group(stage, trainer, name="g"):
    port = trainer.tell("open", group=name)["port"]
    result = stage.admin(
        "init_weights_update_group",
        master_address="127.0.0.1",
        master_port=port,
        world_size=2,
        rank_offset=1,
        group_name=name,
        backend="gloo",
    )
    assert trainer.reply() == {"joined": True}
    return result


def leave_group(stage, trainer, name="g"):
    result = stage.admin("destroy_weights_update_group", group_name=name)
    assert trainer.tell("destroy", group=name) == {"destroyed": True}
    return result


def announced(names, weights):
    return {
        "names": list(names),
        "dtypes": ["float32"] * len(names),
        "shapes": [list(weights[name].shape) for name in names],
        "group_name": "g",
    }


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_a_trainer_joins_sends_and_leaves(stage, trainer, load_format):
    result = join_group(stage, trainer)
    assert (result.success, result.message) == (
        True,
        "Succeeded to initialize custom process group.",
    )
    assert result.data == {"group_name": "g", "world_size": 2, "rank_offset": 1}

    old = weights_of(0)
    sent = [("float32", list(old[name].shape), seed) for seed, name in enumerate((UP, LAST_NORM))]
    trainer.order("send", group="g", tensors=sent, flattened=load_format is not None)
    fields = {} if load_format is None else {"load_format": load_format}
    result = stage.admin(
        "update_weights_from_distributed",
        announced((UP, LAST_NORM), old) | fields,
        weight_version="v7",
    )
    assert result.success, result.message
    assert result.message == "Succeeded to update parameter online."
    assert (result.data["group_name"], result.data["names"]) == ("g", [UP, LAST_NORM])
    trainer.reply()
    new = {name: make_tensor(*spec) for name, spec in zip((UP, LAST_NORM), sent, strict=True)}
    assert stage.checksum() == checksum_of(old | new)
    assert stage.facts()["weight_version"] == "v7"

    result = leave_group(stage, trainer)
    assert (result.success, result.message) == (True, "Succeeded to destroy custom process group.")
    result = stage.admin("destroy_weights_update_group", group_name="g")
    assert (result.success, result.error) == (False, "The group to be destroyed does not exist.")
    assert result.data == {"group_name": "g"}


def test_destroying_the_group_ends_a_receive_without_a_sender(stage, trainer):
    join_group(stage, trainer)
    before = stage.checksum()
    receiving = stage.send("update_weights_from_distributed", announced([LAST_NORM], weights_of(0)))
    assert stage.facts()["engine_paused"] is True
    assert stage.admin("destroy_weights_update_group", group_name="g").success
    # The result may have arrived while the test waited for the result of destroying.
    results = [message for message in stage.received if getattr(message, "op_id", "") == receiving]
    result = results[0] if results else stage.admin_result(receiving)
    assert not result.success
    # The reason depends on whether the receive was armed yet.
    reasons = ("was destroyed", "was ended while it was armed")
    assert any(reason in result.message for reason in reasons)
    assert result.data["engine_paused"] is True
    assert stage.checksum() == before
    assert trainer.tell("destroy", group="g") == {"destroyed": True}


SHAPE = [128]
INVALID_FIELDS = {
    "must have the same length: 1 names, 2 dtypes": {"dtypes": ["float32"] * 2},
    "must have the same length": {"shapes": []},
    "no tensor is announced": {"names": [], "dtypes": [], "shapes": []},
    "must be a list": {"names": 3},
    "nothing is announced": {"names": None},
    "unknown dtype 'float33'": {"dtypes": ["float33"]},
    "has the shape [127]; the model's has [128]": {"shapes": [[127]]},
    "has the shape [128, 1]": {"shapes": [[128, 1]]},
    "an integer of 0 or more, not -128": {"shapes": [[-128]]},
    "an integer of 0 or more, not inf": {"shapes": [[float("inf")]]},
    "an integer of 0 or more, not 128.0": {"shapes": [[128.0]]},
    "larger than any memory": {"shapes": [[2**62]]},
    "at most 64": {"shapes": [[1] * 65]},
    "cannot become torch.float32": {"dtypes": ["int64"]},
    "has no tensor 'adapter'": {"names": ["adapter"]},
    "announced twice": {"names": [LAST_NORM] * 2, "dtypes": ["float32"] * 2, "shapes": [SHAPE] * 2},
    "unknown load_format 'pickle'": {"load_format": "pickle"},
    "group 'g' is not initialized": {},
}


@pytest.mark.parametrize("reason", INVALID_FIELDS, ids=lambda reason: reason.replace(" ", "-"))
def test_an_invalid_announcement_pauses_the_stage_and_changes_no_weights(stage, reason):
    before = stage.checksum()
    valid = {"names": [LAST_NORM], "dtypes": ["float32"], "shapes": [SHAPE], "group_name": "g"}
    result = stage.admin(
        "update_weights_from_distributed", valid | INVALID_FIELDS[reason], weight_version="v9"
    )
    assert not result.success
    assert reason in result.message
    facts = stage.facts()
    assert (facts["weight_version"], facts["engine_paused"]) == ("default", True)
    assert stage.checksum() == before


def test_a_distributed_update_during_active_requests_fails_and_pauses(stage):
    stage.submit(max_new_tokens=5000, stream=True)
    stage.next(ResultChunk)
    result = stage.admin("update_weights_from_distributed", announced([LAST_NORM], weights_of(0)))
    assert result.error == "active requests present during weight update"
    assert result.data["engine_paused"] is stage.facts()["engine_paused"] is True


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"master_address": ""}, "master_address"),
        ({"master_address": None}, "master_address"),
        ({"master_port": 0}, "port"),
        ({"master_port": "x"}, "port"),
        ({"master_port": 70000}, "port"),
        ({"world_size": 1}, "world_size"),
        ({"world_size": None}, "world_size"),
        ({"rank_offset": 0}, "rank 0"),
        ({"rank_offset": 2}, "rank 2"),
        ({"rank_offset": -1}, "rank_offset must be a whole number"),
        ({"rank_offset": 1.5}, "rank_offset must be a whole number"),
        ({"backend": "mpi"}, "unknown backend 'mpi'"),
    ],
)
def test_an_invalid_group_is_refused_at_once(stage, changes, reason):
    valid = {
        "master_address": "127.0.0.1",
        "master_port": 29500,
        "world_size": 2,
        "rank_offset": 1,
        "backend": "gloo",
    }
    result = stage.admin("init_weights_update_group", valid | changes)
    assert not result.success
    assert result.message.startswith("Failed to initialize custom process group: ")
    assert reason in result.message
    assert result.data["group_name"] == "weight_update_group"
    assert stage.facts()["engine_paused"] is False


# An open update of several calls


def test_the_parts_of_an_open_update_take_effect_together_at_its_end(stage):
    old, new = weights_of(0), some_weights(1, UP, LAST_NORM)
    before = stage.checksum()
    assert stage.admin("begin_weight_update", selector="all").success
    result = update_from_tensor(stage, {UP: new[UP]}, weight_version="v1")
    assert (result.success, result.data["flush_success"]) == (True, None)
    assert update_from_tensor(stage, {LAST_NORM: new[LAST_NORM]}).success
    assert stage.admin("update_weight_version", new_version="v2").success
    assert (stage.checksum(), stage.facts()["weight_version"]) == (before, "default")
    result = stage.admin("end_weight_update")
    assert (result.success, result.data) == (True, {"tensors": 2, "weight_version": "v2"})
    assert stage.checksum() == checksum_of(old | new)
    assert stage.facts()["weight_version"] == "v2"


def test_a_failed_part_leaves_the_update_open_and_the_old_weights(stage):
    before = stage.checksum()
    stage.admin("begin_weight_update")
    update_from_tensor(stage, some_weights(1, UP))
    assert not update_from_tensor(stage, {"adapter": torch.ones(1)}).success
    assert stage.checksum() == before
    assert stage.admin("end_weight_update").success
    assert stage.checksum() == checksum_of(weights_of(0) | some_weights(1, UP))


def test_an_update_is_opened_and_closed_once(stage):
    result = stage.admin("end_weight_update")
    assert not result.success
    assert result.error.startswith("no weight-update session is open; ")
    assert stage.admin("begin_weight_update").success
    result = stage.admin("begin_weight_update")
    assert not result.success
    assert result.error == (
        "a weight-update session is already open; call end_weight_update() first"
    )
    assert stage.admin("end_weight_update").success
    assert not stage.admin("begin_weight_update", selector="draft").success


def test_an_open_update_does_not_end_under_running_requests(stage):
    stage.admin("begin_weight_update")
    update_from_tensor(stage, some_weights(1, UP))
    request_id = stage.submit(max_new_tokens=300, stream=True)
    stage.next(ResultChunk)
    result = stage.admin("end_weight_update")
    assert result.error == "active requests present during weight update"
    # A pause allows the end of the update: the requests are computed again.
    stage.admin("pause_generation", mode="in_place")
    assert stage.admin("end_weight_update").success
    stage.admin("continue_generation")
    assert stage.result(request_id)["usage"]["completion_tokens"] == 300
    assert stage.checksum() == checksum_of(weights_of(0) | some_weights(1, UP))


def test_an_update_of_all_weights_from_disk_ends_an_open_update(stage, tmp_path):
    stage.admin("begin_weight_update")
    update_from_tensor(stage, some_weights(2, UP))
    stage_fixture.save(tmp_path / "new.safetensors", weights_of(1))
    assert stage.update("new.safetensors").success
    assert stage.checksum() == checksum_of(weights_of(1))
    assert not stage.admin("end_weight_update").success


# Versions and inspection


def test_naming_a_version_aborts_all_requests_unless_disabled(stage):
    assert stage.facts()["weight_version"] == "default"
    request_id = stage.submit(max_new_tokens=4000, stream=True)
    stage.next(ResultChunk)
    result = stage.admin("update_weight_version", new_version="v3", abort_all_requests=False)
    assert result.success
    assert result.data == {"new_version": "v3", "num_paused_requests": 0}
    result = stage.admin("update_weight_version", new_version="v4")
    assert result.data == {"new_version": "v4", "num_paused_requests": 1}
    (dropped,) = [message for message in stage.received if isinstance(message, StageFailure)]
    assert (dropped.request_id, dropped.kind) == (request_id, "dropped")
    assert stage.generate()["weight_version"] == "v4"
    assert not stage.admin("update_weight_version", new_version="").success
    assert not stage.admin("update_weight_version").success


def test_the_first_rows_of_a_tensor_can_be_read(stage):
    weights = weights_of(0)
    result = stage.admin("get_weights_by_name", name=UP, truncate_size=2)
    assert result.data == {"name": UP, "parameter": weights[UP][:2].tolist()}
    result = stage.admin("get_weights_by_name", name="lm_head.weight")
    assert len(result.data["parameter"]) == 100
    assert stage.admin("get_weights_by_name", name=LAST_NORM, truncate_size=0).data[
        "parameter"
    ] == []  # fmt: skip
    for invalid in ({"name": "x"}, {"name": 3}, {}, {"name": UP, "truncate_size": -1}):
        assert not stage.admin("get_weights_by_name", invalid).success


def test_the_checker_compares_the_live_weights(stage, tmp_path):
    refused = stage.admin("weights_checker", action="compare")
    assert refused.error == "weights_checker compare requires snapshot first"
    assert stage.admin("weights_checker", action="snapshot").success
    update_from_tensor(stage, some_weights(1, UP))
    result = stage.admin("weights_checker", action="compare")
    assert (result.success, result.data["matched"], result.data["changed"]) == (True, False, [UP])
    update_from_tensor(stage, some_weights(0, UP))
    assert stage.admin("weights_checker", action="compare").data["matched"] is True
    result = stage.admin("weights_checker", action="x")
    assert (result.success, result.data) == (False, {})


def test_a_stage_with_weights_reports_what_it_supports(stage):
    facts = stage.facts()
    assert facts["supports_weight_update"] is facts["supports_weight_checker"] is True


def test_each_rank_of_a_model_joins_with_its_own_device(monkeypatch):
    meetings = []
    monkeypatch.setattr(ThreadReceiver, "init", lambda _, meeting, stop: meetings.append(meeting))
    scheduler = build("decode", model="tiny", seed=0)
    WeightActions(scheduler, rank=ModelRank(3, 4), terms=ReceiveSettings(isolation="thread"))
    with Loop(scheduler) as loop:
        body = {"master_address": "localhost", "master_port": 1, "world_size": 6, "rank_offset": 2}
        result = Stage(scheduler, loop).admin("init_weights_update_group", body)
    assert result.success, result.message
    assert [(meeting.rank, meeting.device) for meeting in meetings] == [(5, 3)]
