import base64
import pickle

import pytest
import torch
from safetensors.torch import save

from omni_proxy.process_group.receiver import ThreadReceiver
from omni_proxy.replica.pipeline.messages import ResultChunk, StageFailure
from omni_proxy.replica.text.stage import build
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


def from_tensor(stage, tensors, **more):
    parts = serialized(tensors) if isinstance(tensors, dict) else tensors
    return stage.admin("update_weights_from_tensor", serialized_named_tensors=parts, **more)


def some(seed=1, *names):
    weights = weights_of(seed)
    return {name: weights[name] for name in names or (UP,)}


# From a request


def test_what_a_swap_that_broke_off_left_is_not_called_whole_until_it_is_replaced(
    stage, monkeypatch
):
    def break_off(pairs):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(live_tensors, "copy_tensors", break_off)
    answer = from_tensor(stage, some())
    assert not answer.success
    assert "The weights are damaged: update them before you continue" in answer.message
    facts = stage.facts()
    assert (facts["weight_sync"]["weights"], facts["engine_paused"]) == ("uncertain", True)
    answer = from_tensor(stage, {"no.such.weight": torch.ones(1)})
    assert "the weights are only in part those of version 'default'" in answer.message
    monkeypatch.undo()
    assert from_tensor(stage, weights_of(2)).success
    assert stage.facts()["weight_sync"]["weights"] == "whole"


def test_a_swap_that_was_undone_left_every_tensor_as_it_was(stage, monkeypatch):
    before, moves, move = stage.checksum(), [], live_tensors._exchange

    def refuse_the_second(*given):
        moves.append(given)
        if len(moves) == 2:
            raise MemoryError("no room")
        move(*given)

    monkeypatch.setattr(
        live_tensors.LiveTensors, "split", True
    )  # one that another rank may have undo it
    monkeypatch.setattr(live_tensors, "_exchange", refuse_the_second)
    answer = from_tensor(stage, weights_of(2))
    assert not answer.success
    assert answer.message.startswith("The swap failed and was undone: the weights of version")
    assert stage.checksum() == before
    assert stage.facts()["weight_sync"]["weights"] == "whole"
    assert from_tensor(stage, weights_of(2)).success
    assert stage.checksum() == checksum_of(weights_of(2))


def test_tensors_of_a_request_change_what_they_name(stage):
    new = some(1, UP, LAST_NORM)
    answer = from_tensor(stage, new, weight_version="v1")
    assert (answer.success, answer.message) == (True, "Succeeded to update parameter online.")
    assert answer.data == {
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
    answer = from_tensor(stage, [base64.b64encode(pickle.dumps({"a": 1})).decode()])
    assert not answer.success
    assert "is a pickle, which is never read" in answer.message
    assert answer.message.endswith(
        "Nothing was changed: the weights of version 'default' are whole"
    )
    assert answer.data["engine_paused"] is stage.facts()["engine_paused"] is True
    assert stage.checksum() == before
    stage.admin("continue_generation")
    assert stage.generate()["weight_version"] == "default"


# Over a group


@pytest.fixture(scope="module")
def trainer():
    trainer = Trainer()
    yield trainer
    trainer.close()


def joined(stage, trainer, name="g"):
    port = trainer.tell("open", group=name)["port"]
    answer = stage.admin(
        "init_weights_update_group",
        master_address="127.0.0.1",
        master_port=port,
        world_size=2,
        rank_offset=1,
        group_name=name,
        backend="gloo",
    )
    assert trainer.reply() == {"joined": True}
    return answer


def left(stage, trainer, name="g"):
    answer = stage.admin("destroy_weights_update_group", group_name=name)
    assert trainer.tell("destroy", group=name) == {"destroyed": True}
    return answer


def announced(names, weights):
    return {
        "names": list(names),
        "dtypes": ["float32"] * len(names),
        "shapes": [list(weights[name].shape) for name in names],
        "group_name": "g",
    }


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_a_trainer_joins_sends_and_leaves(stage, trainer, load_format):
    answer = joined(stage, trainer)
    assert (answer.success, answer.message) == (
        True,
        "Succeeded to initialize custom process group.",
    )
    assert answer.data == {"group_name": "g", "world_size": 2, "rank_offset": 1}

    old = weights_of(0)
    sent = [("float32", list(old[name].shape), seed) for seed, name in enumerate((UP, LAST_NORM))]
    trainer.order("send", group="g", tensors=sent, flattened=load_format is not None)
    more = {} if load_format is None else {"load_format": load_format}
    answer = stage.admin(
        "update_weights_from_distributed",
        announced((UP, LAST_NORM), old) | more,
        weight_version="v7",
    )
    assert answer.success, answer.message
    assert answer.message == "Succeeded to update parameter online."
    assert (answer.data["group_name"], answer.data["names"]) == ("g", [UP, LAST_NORM])
    trainer.reply()
    new = {name: make_tensor(*each) for name, each in zip((UP, LAST_NORM), sent, strict=True)}
    assert stage.checksum() == checksum_of(old | new)
    assert stage.facts()["weight_version"] == "v7"

    answer = left(stage, trainer)
    assert (answer.success, answer.message) == (True, "Succeeded to destroy custom process group.")
    answer = stage.admin("destroy_weights_update_group", group_name="g")
    assert (answer.success, answer.error) == (False, "The group to be destroyed does not exist.")
    assert answer.data == {"group_name": "g"}


def test_a_receive_that_never_ends_is_ended_by_destroying_its_group(stage, trainer):
    joined(stage, trainer)
    before = stage.checksum()
    receiving = stage.send("update_weights_from_distributed", announced([LAST_NORM], weights_of(0)))
    assert stage.facts()["engine_paused"] is True
    assert stage.admin("destroy_weights_update_group", group_name="g").success
    # The first answer was skipped while the test waited for the other one.
    ended = [reported for reported in stage.seen if getattr(reported, "op_id", "") == receiving]
    answer = ended[0] if ended else stage.answer(receiving)
    assert not answer.success
    # Whether it still was being armed is a matter of time.
    words = ("was destroyed", "was ended while it was armed")
    assert any(each in answer.message for each in words)
    assert answer.data["engine_paused"] is True
    assert stage.checksum() == before
    assert trainer.tell("destroy", group="g") == {"destroyed": True}


SHAPE = [128]
BAD = {
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


@pytest.mark.parametrize("reported", BAD, ids=lambda reported: reported.replace(" ", "-"))
def test_an_announcement_that_cannot_be_met_changes_nothing_but_the_pause(stage, reported):
    before = stage.checksum()
    good = {"names": [LAST_NORM], "dtypes": ["float32"], "shapes": [SHAPE], "group_name": "g"}
    answer = stage.admin(
        "update_weights_from_distributed", good | BAD[reported], weight_version="v9"
    )
    assert not answer.success
    assert reported in answer.message
    facts = stage.facts()
    assert (facts["weight_version"], facts["engine_paused"]) == ("default", True)
    assert stage.checksum() == before


def test_active_requests_refuse_a_distributed_update_and_pause_the_stage(stage):
    stage.submit(max_new_tokens=5000, stream=True)
    stage.next(ResultChunk)
    answer = stage.admin("update_weights_from_distributed", announced([LAST_NORM], weights_of(0)))
    assert answer.error == "active requests present during weight update"
    assert answer.data["engine_paused"] is stage.facts()["engine_paused"] is True


@pytest.mark.parametrize(
    ("changed", "reported"),
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
def test_a_group_that_cannot_be_is_refused_at_once(stage, changed, reported):
    good = {
        "master_address": "127.0.0.1",
        "master_port": 29500,
        "world_size": 2,
        "rank_offset": 1,
        "backend": "gloo",
    }
    answer = stage.admin("init_weights_update_group", good | changed)
    assert not answer.success
    assert answer.message.startswith("Failed to initialize custom process group: ")
    assert reported in answer.message
    assert answer.data["group_name"] == "weight_update_group"
    assert stage.facts()["engine_paused"] is False


# A sync in parts


def test_updates_of_a_session_take_effect_together_at_its_end(stage):
    old, new = weights_of(0), some(1, UP, LAST_NORM)
    before = stage.checksum()
    assert stage.admin("begin_weight_update", selector="all").success
    answer = from_tensor(stage, {UP: new[UP]}, weight_version="v1")
    assert (answer.success, answer.data["flush_success"]) == (True, None)
    assert from_tensor(stage, {LAST_NORM: new[LAST_NORM]}).success
    assert stage.admin("update_weight_version", new_version="v2").success
    assert (stage.checksum(), stage.facts()["weight_version"]) == (before, "default")
    answer = stage.admin("end_weight_update")
    assert (answer.success, answer.data) == (True, {"tensors": 2, "weight_version": "v2"})
    assert stage.checksum() == checksum_of(old | new)
    assert stage.facts()["weight_version"] == "v2"


def test_a_part_that_fails_leaves_the_session_and_the_old_weights(stage):
    before = stage.checksum()
    stage.admin("begin_weight_update")
    from_tensor(stage, some(1, UP))
    assert not from_tensor(stage, {"adapter": torch.ones(1)}).success
    assert stage.checksum() == before
    assert stage.admin("end_weight_update").success
    assert stage.checksum() == checksum_of(weights_of(0) | some(1, UP))


def test_a_session_is_opened_and_closed_once(stage):
    answer = stage.admin("end_weight_update")
    assert not answer.success
    assert answer.error.startswith("no weight-update session is open; ")
    assert stage.admin("begin_weight_update").success
    answer = stage.admin("begin_weight_update")
    assert not answer.success
    assert answer.error == (
        "a weight-update session is already open; call end_weight_update() first"
    )
    assert stage.admin("end_weight_update").success
    assert not stage.admin("begin_weight_update", selector="draft").success


def test_a_session_does_not_end_under_running_requests(stage):
    stage.admin("begin_weight_update")
    from_tensor(stage, some(1, UP))
    request_id = stage.submit(max_new_tokens=300, stream=True)
    stage.next(ResultChunk)
    answer = stage.admin("end_weight_update")
    assert answer.error == "active requests present during weight update"
    # While paused, they are recomputed.
    stage.admin("pause_generation", mode="in_place")
    assert stage.admin("end_weight_update").success
    stage.admin("continue_generation")
    assert stage.result(request_id)["usage"]["completion_tokens"] == 300
    assert stage.checksum() == checksum_of(weights_of(0) | some(1, UP))


def test_whole_weights_from_disk_end_a_session_that_was_left_open(stage, tmp_path):
    stage.admin("begin_weight_update")
    from_tensor(stage, some(2, UP))
    stage_fixture.save(tmp_path / "new.safetensors", weights_of(1))
    assert stage.update("new.safetensors").success
    assert stage.checksum() == checksum_of(weights_of(1))
    assert not stage.admin("end_weight_update").success


# Names and looks


def test_a_version_is_named_and_aborts_all_unless_requested_not_to(stage):
    assert stage.facts()["weight_version"] == "default"
    request_id = stage.submit(max_new_tokens=4000, stream=True)
    stage.next(ResultChunk)
    answer = stage.admin("update_weight_version", new_version="v3", abort_all_requests=False)
    assert answer.success
    assert answer.data == {"new_version": "v3", "num_paused_requests": 0}
    answer = stage.admin("update_weight_version", new_version="v4")
    assert answer.data == {"new_version": "v4", "num_paused_requests": 1}
    (dropped,) = [reported for reported in stage.seen if isinstance(reported, StageFailure)]
    assert (dropped.request_id, dropped.kind) == (request_id, "dropped")
    assert stage.generate()["weight_version"] == "v4"
    assert not stage.admin("update_weight_version", new_version="").success
    assert not stage.admin("update_weight_version").success


def test_the_first_rows_of_a_tensor_can_be_seen(stage):
    weights = weights_of(0)
    answer = stage.admin("get_weights_by_name", name=UP, truncate_size=2)
    assert answer.data == {"name": UP, "parameter": weights[UP][:2].tolist()}
    answer = stage.admin("get_weights_by_name", name="lm_head.weight")
    assert len(answer.data["parameter"]) == 100
    assert stage.admin("get_weights_by_name", name=LAST_NORM, truncate_size=0).data[
        "parameter"
    ] == []  # fmt: skip
    for bad in ({"name": "x"}, {"name": 3}, {}, {"name": UP, "truncate_size": -1}):
        assert not stage.admin("get_weights_by_name", bad).success


def test_the_checker_answers_for_the_live_weights(stage, tmp_path):
    refused = stage.admin("weights_checker", action="compare")
    assert refused.error == "weights_checker compare requires snapshot first"
    assert stage.admin("weights_checker", action="snapshot").success
    from_tensor(stage, some(1, UP))
    answer = stage.admin("weights_checker", action="compare")
    assert (answer.success, answer.data["matched"], answer.data["changed"]) == (True, False, [UP])
    from_tensor(stage, some(0, UP))
    assert stage.admin("weights_checker", action="compare").data["matched"] is True
    answer = stage.admin("weights_checker", action="x")
    assert (answer.success, answer.data) == (False, {})


def test_a_stage_with_weights_reports_what_it_supports(stage):
    facts = stage.facts()
    assert facts["supports_weight_update"] is facts["supports_weight_checker"] is True


def test_each_rank_of_a_model_requests_its_own_gpu(monkeypatch):
    asked = []
    monkeypatch.setattr(ThreadReceiver, "init", lambda _, meeting, stop: asked.append(meeting))
    scheduler = build("decode", model="tiny", seed=0)
    WeightActions(scheduler, rank=ModelRank(3, 4), terms=ReceiveSettings(isolation="thread"))
    with Loop(scheduler) as loop:
        body = {"master_address": "localhost", "master_port": 1, "world_size": 6, "rank_offset": 2}
        answer = Stage(scheduler, loop).admin("init_weights_update_group", body)
    assert answer.success, answer.message
    assert [(each.rank, each.device) for each in asked] == [(5, 3)]
