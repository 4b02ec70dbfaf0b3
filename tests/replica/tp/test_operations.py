import base64

import pytest
import torch
from safetensors.torch import save

from omni_proxy.replica.models import tiny
from omni_proxy.replica.models.shard import Shard
from omni_proxy.replica.pipeline.stage_messages import AdminResult
from omni_proxy.replica.stages.text import build
from omni_proxy.replica.text.operations import DAMAGED, PeerError
from omni_proxy.replica.tp.sharded_model import ShardedLlama
from omni_proxy.replica.weights.lifecycle import Lifecycle, UpdateOptions, stage_in_background
from omni_proxy.replica.weights.live_tensors import DamagedWeightsError, LiveTensors, StagedTensors
from tests.process_group.trainer_process import Trainer, free_port, make_tensor
from tests.replica.text.scheduler_harness import undisturbed
from tests.replica.weights.stage_fixture import checksum_of, running, weights_of
from tests.replica.weights.stage_fixture import save as save_to

UP = "model.layers.1.mlp.up_proj.weight"
OUT = "model.layers.2.self_attn.o_proj.weight"
NORM = "model.norm.weight"


@pytest.fixture
def stage(pair):
    """The two ranks. Afterwards they have their first weights again."""
    yield pair
    pair.admin("continue_generation")
    assert update_from_tensor(pair, weights_of(0)).success
    pair.admin("continue_generation")


def update_from_tensor(stage, *parts, **fields):
    texts = [part if isinstance(part, str) else serialize(part) for part in parts]
    return stage.admin("update_weights_from_tensor", serialized_named_tensors=texts, **fields)


def serialize(tensors):
    return base64.b64encode(save(tensors)).decode()


def text_of(weights):
    """The text of a single process with these weights."""
    with running() as single:
        assert update_from_tensor(single, weights).success
        return single.generate()["text"]


def rank_checksum(weights, rank):
    shard = Shard(tiny.CONFIG, rank, 2)
    return checksum_of({n: shard.shard_of(n, t).contiguous() for n, t in weights.items()})


def assert_checksums(stage, weights):
    """Asserts that both ranks have their shards of these weights. Returns the checker's result."""
    result = stage.admin("weights_checker")
    assert result.success, result.message
    first, second = (entry["data"] for entry in result.data["rank_results"])
    assert first["full_checksum"] == checksum_of(weights)
    assert second["full_checksum"] is None
    assert first["per_gpu_checksum"] == rank_checksum(weights, 0)
    assert second["per_gpu_checksum"] == rank_checksum(weights, 1)
    return result


def test_the_checker_reports_the_checksums_of_each_rank_and_of_the_whole(stage):
    result = assert_checksums(stage, weights_of(0))
    assert (result.rank, result.role, result.data["tp_size"]) == (0, "leader", 2)
    assert result.data["layout"] == {"tp_size": 2, "rank": 0}
    first, second = result.data["rank_results"]
    assert [(entry["rank"], entry["role"]) for entry in (first, second)] == [
        (0, "leader"), (1, "follower"),
    ]  # fmt: skip
    assert (first["stage"], second["stage"]) == ("decode", "decode")
    assert second["data"]["layout"] == {"tp_size": 2, "rank": 1}
    shapes = [entry["data"]["tensor_metadata"][OUT]["shape"] for entry in (first, second)]
    assert shapes == [[128, 64], [128, 64]]
    with running() as single:
        assert single.admin("weights_checker").data["full_checksum"] == result.data["full_checksum"]


def test_the_model_info_has_the_rank_number_of_every_rank(stage):
    data = stage.facts()
    ranks = [(entry["data"]["tp_rank"], entry["data"]["tp_size"]) for entry in data["rank_results"]]
    assert ranks == [(0, 2), (1, 2)]
    assert data["tp_size"] == 2
    assert data["engine_paused"] is False


def test_weights_from_disk_equal_those_of_one_process_with_the_same_file(stage, tmp_path):
    new = weights_of(7)
    result = stage.update(save_to(tmp_path / "new.safetensors", new), weight_version="v7")
    assert result.success, result.message
    assert [each["data"]["weight_version"] for each in result.data["rank_results"]] == ["v7", "v7"]
    assert_checksums(stage, new)
    text = stage.generate()["text"]
    assert text == text_of(new)
    assert text != undisturbed(temperature=0, max_new_tokens=12)["text"]


def test_a_file_that_does_not_fit_changes_no_rank(stage, tmp_path):
    # A tensor with the shape of the shard of a rank, not of the tensor of the model.
    save_to(tmp_path / "part.safetensors", {UP: torch.zeros(192, 128)})
    result = stage.admin(
        "update_weights_from_disk",
        model_path=str(tmp_path),
        manifest={"tensors": {UP: "part.safetensors"}},
    )
    assert "has the shape [192, 128]; the model's has [384, 128]" in result.message
    assert_checksums(stage, weights_of(0))


def test_tensors_that_one_rank_cannot_read_are_applied_at_none(stage):
    new = weights_of(7)
    result = update_from_tensor(stage, new, serialize(new)[:4000], weight_version="v8")
    assert not result.success
    assert "rank 1: " in result.message
    assert [each["success"] for each in result.data["rank_results"]] == [False, False]
    assert stage.facts()["weight_version"] != "v8"
    assert_checksums(stage, weights_of(0))


def test_get_weights_by_name_returns_the_whole_tensor(stage):
    result = stage.admin("get_weights_by_name", name=OUT, truncate_size=2)
    assert result.data["parameter"] == weights_of(0)[OUT][:2].tolist()


def test_a_distributed_update_reaches_every_rank(stage):
    trainer = Trainer()
    try:
        port = trainer.tell("open", group="g", world=3)["port"]
        result = stage.admin(
            "init_weights_update_group",
            master_address="127.0.0.1",
            master_port=port,
            world_size=3,
            rank_offset=1,
            group_name="g",
            backend="gloo",
        )
        assert result.success, result.message
        assert trainer.reply() == {"joined": True}
        old = weights_of(0)
        names = (UP, OUT, NORM)
        sent = [("float32", list(old[name].shape), seed) for seed, name in enumerate(names)]
        trainer.order("send", group="g", tensors=sent, flattened=False)
        result = stage.admin(
            "update_weights_from_distributed",
            names=list(names),
            dtypes=["float32"] * 3,
            shapes=[shape for _, shape, _ in sent],
            group_name="g",
        )
        assert result.success, result.message
        trainer.reply()
        assert_checksums(
            stage, old | {n: make_tensor(*spec) for n, spec in zip(names, sent, strict=True)}
        )
        assert stage.admin("destroy_weights_update_group", group_name="g").success
    finally:
        trainer.close()


def test_destroying_an_unopened_group_ends_the_join_at_every_rank(stage):
    joining = stage.send(
        "init_weights_update_group",
        master_address="127.0.0.1",
        master_port=free_port(),
        world_size=3,
        rank_offset=1,
        backend="gloo",
    )
    destroyed = stage.send("destroy_weights_update_group")
    results = {}
    while len(results) < 2:
        result = stage.next(AdminResult)
        results[result.op_id] = result
    assert not results[joining].success
    assert [entry["rank"] for entry in results[destroyed].data["rank_results"]] == [0, 1]
    assert stage.generate()["text"] == undisturbed(temperature=0, max_new_tokens=12)["text"]


def test_a_swap_that_cannot_be_undone_pauses_and_reports_the_damage(tmp_path, monkeypatch):
    scheduler = build("decode", model="tiny", weights_root=str(tmp_path))
    target = LiveTensors(ShardedLlama(scheduler.worker.text.model, Shard(tiny.CONFIG, 0, 2), id))
    staged = StagedTensors(target)

    def fail():
        raise DamagedWeightsError("RuntimeError: no memory")

    monkeypatch.setattr(staged, "undo", fail)
    steps = Lifecycle(scheduler, target).update_when_idle(
        UpdateOptions(weight_version="v7"), stage_in_background(lambda: staged), {}
    )
    stage = next(steps)
    steps.send(stage())
    steps.throw(PeerError("rank 0: its device is full"))
    with pytest.raises(StopIteration) as caught:
        steps.send(None)
    success, message, data, _ = caught.value.value
    assert (success, data[DAMAGED], data["engine_paused"], scheduler.paused) == (
        False, True, True, True,
    )  # fmt: skip
    assert message.startswith("The weights are damaged")


def test_damage_at_another_rank_pauses_this_rank_and_makes_its_weights_uncertain(tmp_path):
    scheduler = build("decode", model="tiny", weights_root=str(tmp_path))
    assert (scheduler.paused, scheduler.sync_facts()["weights"]) == (False, "whole")
    scheduler.weights_damaged()
    assert (scheduler.paused, scheduler.sync_facts()["weights"]) == (True, "uncertain")


def test_a_swap_that_failed_at_another_rank_is_undone(tmp_path):
    scheduler = build("decode", model="tiny", weights_root=str(tmp_path))
    shard = Shard(tiny.CONFIG, 0, 2)
    target = LiveTensors(ShardedLlama(scheduler.worker.text.model, shard, lambda part: part))
    staged = StagedTensors(target)
    for name, tensor in weights_of(7).items():
        staged.add(name, tensor)
    steps = Lifecycle(scheduler, target).update_when_idle(
        UpdateOptions(weight_version="v7"), stage_in_background(lambda: staged), {}
    )
    stage = next(steps)
    swap = steps.send(stage())
    swap()
    assert checksum_of(dict(target)) == rank_checksum(weights_of(7), 0)
    forget = steps.throw(PeerError("rank 1: its device is full"))
    forget.call()
    with pytest.raises(StopIteration) as caught:
        steps.send(None)
    success, message, _, _ = caught.value.value
    assert not success
    assert "undone: the weights of version 'default' are whole. rank 1: its device" in message
    assert checksum_of(dict(target)) == rank_checksum(weights_of(0), 0)
