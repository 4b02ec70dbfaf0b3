import threading

import pytest

from omni_proxy.process_group.receiver import ThreadReceiver
from omni_proxy.replica.pipeline.stage_messages import Result, ResultChunk
from omni_proxy.system import memory
from tests.process_group.trainer_process import free_port
from tests.replica.text.scheduler_harness import undisturbed
from tests.replica.weights.stage_fixture import checksum_of, running, weights_of
from tests.replica.weights.sync_steps import (
    BODY,
    DOWN,
    NORM,
    SHAPES,
    UP,
    Meminfo,
    Syncing,
    announced,
    bucket_of,
    expected_values,
    multi_bucket,
    single_bucket,
)

FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
NORMS = [name for name, shape in SHAPES.items() if shape == [128]]
A, B = bucket_of([UP, NORM]), bucket_of([DOWN], seed=7)


@pytest.fixture(scope="module")
def replica():
    with running(weights_isolation="thread") as stage:
        yield stage


@pytest.fixture
def stage(replica, tmp_path):
    """The shared stage. Afterwards it has its first weights and version again, and no group."""
    yield replica
    replica.admin("destroy_weights_update_group", group_name="g")
    restore(replica, tmp_path)


def restore(stage, folder):
    from tests.replica.weights.stage_fixture import save

    file = save(folder / "first.safetensors", weights_of(0))
    stage.admin("pause_generation", mode="abort")
    result = stage.update(file, weight_version="default")
    assert result.success, result.message
    stage.admin("continue_generation")


@pytest.fixture
def sync(stage, pool):
    sync = Syncing(stage, pool.trainer())
    sync.join()
    yield sync
    if "g" in [group["group_name"] for group in sync.facts()["groups"]]:
        stage.admin("destroy_weights_update_group", group_name="g")
    if sync.trainer.living():
        sync.trainer.tell("destroy", group="g")


def has_weights(stage, *buckets):
    return stage.checksum() == checksum_of(weights_of(0) | expected_values(*buckets))


# One call for all buckets, or one for each


def test_all_buckets_are_announced_and_applied_at_once(sync):
    stage = sync.stage
    assert sync.state() == "grouped"
    result = sync.prepare(multi_bucket(A, B))
    assert (result.success, result.data["num_buckets"]) == (True, 2)
    facts = sync.facts()
    assert facts["state"] == "receiving"
    assert facts["owner"].startswith("127.0.0.1:")
    assert (facts["bytes_expected"], facts["bytes_received"]) == (result.data["num_bytes"], 0)
    sync.send(A, B)
    assert sync.until("received")["buckets_done"] == 2
    assert has_weights(stage)
    result = sync.complete(flush_cache=True, weight_version="v1")
    assert result.success, result.message
    assert result.message == "Succeeded to update parameter online."
    assert (result.data["num_buckets_received"], result.data["weight_version"]) == (2, "v1")
    assert (result.data["flush_success"], result.data["weights"]) == (True, "whole")
    assert has_weights(stage, A, B)
    assert stage.facts()["weight_version"] == "v1"
    assert sync.state() == "grouped"
    assert sync.leave().success
    assert sync.state() == "idle"


def test_buckets_are_applied_one_by_one_until_a_version_marks_the_last(sync):
    stage = sync.stage
    for bucket in (A, B):
        assert sync.prepare(single_bucket(bucket)).success
        sync.send(bucket)
        result = sync.complete(weight_version=None, transport="nccl_broadcast")
        assert result.success, result.message
        assert result.data["num_buckets_received"] == 1
        assert result.data["flush_success"] is None
        assert (result.data["weights"], result.data["weight_version"]) == ("open", "default")
    facts = sync.facts()
    assert (facts["weights"], facts["buckets_applied"]) == ("open", 2)
    last = bucket_of([NORMS[0]], seed=9)
    sync.prepare(single_bucket(last))
    sync.send(last)
    result = sync.complete(weight_version="v2", flush_cache=True)
    assert (result.data["weights"], result.data["buckets_applied"]) == ("whole", 0)
    assert stage.facts()["weight_version"] == "v2"
    assert has_weights(stage, A, B, last)


def test_generation_between_two_buckets_makes_the_weights_uncertain(sync):
    sync.stage.admin("pause_generation", mode="retract")
    sync.prepare(single_bucket(B))
    sync.send(B)
    assert sync.complete().data["weights"] == "open"
    assert sync.stage.admin("continue_generation").success
    assert sync.facts()["weights"] == "uncertain"
    sync.prepare(multi_bucket(A, B))
    sync.send(A, B)
    assert sync.complete().data["weights"] == "whole"


def test_leaving_the_group_makes_the_weights_whole(sync):
    sync.prepare(single_bucket(B))
    sync.send(B)
    assert sync.complete().data["weights"] == "open"
    sync.leave()
    assert sync.facts()["weights"] == "whole"


@pytest.mark.parametrize("body_of", [multi_bucket, single_bucket])
def test_a_flattened_bucket_may_have_tensors_of_every_float_type(sync, body_of):
    bucket = [
        (name, dtype, [128], index)
        for index, (name, dtype) in enumerate(zip(NORMS, FLOATS, strict=False))
    ]
    result = sync.prepare(body_of(bucket, load_format="flattened_bucket"))
    assert result.success, result.message
    sync.send(bucket, flattened=True)
    assert sync.complete(load_format="flattened_bucket").success
    assert has_weights(sync.stage, bucket)


@pytest.mark.parametrize("dtype", FLOATS)
def test_tensors_of_every_float_type_may_be_sent_one_by_one(sync, dtype):
    bucket = bucket_of([UP, NORM], dtype=dtype)
    assert sync.prepare(multi_bucket(bucket)).success
    sync.send(bucket)
    assert sync.complete().success
    assert has_weights(sync.stage, bucket)


def test_the_buckets_of_an_open_update_are_applied_together_at_its_end(sync):
    stage = sync.stage
    assert stage.admin("begin_weight_update").success
    for bucket in (A, B):
        assert sync.prepare(single_bucket(bucket)).success
        sync.send(bucket)
        assert sync.complete(weight_version="v3").success
        assert has_weights(stage)
        assert stage.facts()["weight_version"] == "default"
    assert sync.facts()["open_update_tensors"] == sync.facts()["session_tensors"] == 3
    sync.prepare(single_bucket(A))
    refused = stage.admin("end_weight_update")
    assert (refused.success, refused.data["status_code"]) == (False, 409)
    sync.send(A)
    assert sync.complete().success
    assert stage.admin("end_weight_update").success
    assert has_weights(stage, A, B)
    assert stage.facts()["weight_version"] == "v3"
    assert sync.facts()["weights"] == "whole"


def test_updates_in_one_call_and_in_two_phases_may_alternate(sync):
    stage = sync.stage
    sync.order_send(A)
    result = stage.admin("update_weights_from_distributed", single_bucket(A), weight_version="v4")
    assert result.success, result.message
    sync.trainer.reply()
    assert sync.prepare(single_bucket(B)).success
    refused = stage.admin("update_weights_from_distributed", single_bucket(A))
    assert (refused.success, refused.data["status_code"]) == (False, 409)
    assert "already in progress" in refused.message
    stage.admin("continue_generation")
    sync.send(B)
    assert sync.complete(weight_version="v5").success
    assert has_weights(stage, A, B)


# Generation during a transfer


def test_requests_are_computed_until_the_swap_and_after_it(sync):
    stage = sync.stage
    assert sync.prepare(multi_bucket(B)).success
    greedy = {"temperature": 0, "max_new_tokens": 12}
    assert stage.generate()["text"] == undisturbed(**greedy)["text"]
    completing = stage.send("complete_weights_update", BODY | {"weight_version": "v6"})
    long = stage.submit(max_new_tokens=500, stream=True)
    stage.next(ResultChunk, lambda message: message.request_id == long)
    assert stage.facts()["engine_paused"] is False
    # Other operations run during the transfer: the checksum is that of the old weights.
    assert has_weights(stage)
    assert stage.admin("pause_generation", mode="in_place").success
    assert stage.admin("continue_generation").success
    assert stage.generate()["weight_version"] == "default"
    zeros = SHAPES[DOWN][0] * SHAPES[DOWN][1] * 4
    sync.trainer.tell("send_zeros", group="g", nbytes=zeros)
    result = stage.admin_result(completing)
    assert result.success, result.message
    stage.admin("pause_generation", mode="in_place")
    stage.admin("continue_generation")
    assert stage.generate()["weight_version"] == "v6"
    results = [
        message
        for message in stage.received
        if isinstance(message, Result) and message.request_id == long
    ]
    data = results[0].data if results else stage.result(long)
    assert data["usage"]["completion_tokens"] == 500


def test_the_swap_waits_for_a_running_checker(sync, monkeypatch):
    from omni_proxy.replica.weights import checker

    stage, checker_started, may_continue = sync.stage, threading.Event(), threading.Event()
    digest = checker.tensor_digest

    def slow_digest(*tensor):
        checker_started.set()
        assert may_continue.wait(20)
        return digest(*tensor)

    sync.prepare(multi_bucket(A))
    completing = stage.send("complete_weights_update", BODY)
    monkeypatch.setattr(checker, "tensor_digest", slow_digest)
    checking = stage.send("weights_checker")
    assert checker_started.wait(20)
    sync.send(A)
    # The update waits for its swap while the checker runs.
    while sync.state() != "applying":
        pass
    may_continue.set()
    assert stage.admin_result(checking).data["per_gpu_checksum"] == checksum_of(weights_of(0))
    assert stage.admin_result(completing).success
    assert has_weights(stage, A)


# Refusals


INVALID_FIELDS = {
    "3 names, 1 dtypes": {"names": [NORM, UP, DOWN]},
    "unknown dtype 'float33'": {"dtypes": ["float33"]},
    "an integer of 0 or more": {"shapes": [[-128]]},
    "has the shape [127]; the model's has [128]": {"shapes": [[127]]},
    "cannot become torch.float32": {"dtypes": ["int64"]},
    "has no tensor 'adapter'": {"names": ["adapter"]},
    "transport 'p2p'": {"transport": "p2p"},
    "unknown load_format 'flattened_bucket_chunked:4'": {
        "load_format": "flattened_bucket_chunked:4"
    },
    "num_buckets is 3, but 1": {"num_buckets": 3},
    "nothing is announced": {"names": None},
    "is announced twice": {"names": [NORM] * 2, "dtypes": ["float32"] * 2, "shapes": [[128]] * 2},
}


@pytest.mark.parametrize("reason", INVALID_FIELDS, ids=lambda reason: reason.replace(" ", "-"))
def test_an_invalid_announcement_is_refused_before_anything_is_armed(sync, reason):
    valid = single_bucket([(NORM, "float32", [128], 1)])
    result = sync.prepare(valid | INVALID_FIELDS[reason])
    assert not result.success
    assert reason in result.message
    assert sync.state() == "grouped"
    assert sync.stage.facts()["engine_paused"] is False
    assert sync.prepare(valid).success


def test_a_tensor_in_two_buckets_is_refused(sync):
    result = sync.prepare(multi_bucket(A, B, A))
    assert not result.success
    assert f"bucket 3 of 3: tensor '{UP}' is in bucket 1 already" in result.message


def test_a_plan_that_exceeds_the_memory_is_refused_with_the_sizes(sync, monkeypatch):
    monkeypatch.setattr(memory, "MEMINFO", Meminfo(1))
    # These need more memory than other tests have left in the kept buffers.
    everything = bucket_of(SHAPES)
    result = sync.prepare(multi_bucket(everything))
    assert not result.success
    reason = f"need {bytes_of(everything)} bytes, but only 1024"
    assert reason in result.message
    assert sync.state() == "grouped"
    monkeypatch.undo()
    assert sync.prepare(multi_bucket(everything)).success


def bytes_of(bucket):
    """The size of the buffer for these tensors: each begins at a multiple of 64 bytes."""
    end = 0
    for _, _, shape, _ in bucket:
        size = 4
        for dimension in shape:
            size *= dimension
        end = -(-end // 64) * 64 + size
    return end


def test_calls_out_of_order_are_refused_with_a_reason_and_change_nothing(sync, tmp_path):
    stage = sync.stage
    result = sync.complete()
    assert not result.success
    assert "no weights update is prepared" in result.message
    assert sync.prepare(single_bucket(A)).success
    second = sync.prepare(single_bucket(B))
    assert (second.success, second.data["status_code"]) == (False, 409)
    assert "already in progress: group 'g' is receiving" in second.message
    other = stage.admin("complete_weights_update", group_name="other")
    assert (other.success, other.data["status_code"]) == (False, 400)
    assert "that of group 'g', not of 'other'" in other.message
    other_group = stage.admin("prepare_weights_update", announced(A) | {"group_name": "other"})
    assert other_group.data["status_code"] == 409
    disk = stage.update(tmp_path / "whatever")
    assert (disk.success, disk.data["status_code"]) == (False, 409)
    completing = stage.send("complete_weights_update", BODY)
    again = sync.complete()
    assert (again.success, again.data["status_code"]) == (False, 409)
    assert "already being completed" in again.message
    sync.send(A)
    assert stage.admin_result(completing).success
    assert "no weights update is prepared" in sync.complete().message
    assert has_weights(stage, A)


def test_a_preparation_for_an_unknown_group_is_refused(stage):
    result = stage.admin("prepare_weights_update", announced(A) | {"group_name": "none"})
    assert not result.success
    assert "group 'none' is not initialized: call init_weights_update_group" in result.message


@pytest.mark.parametrize("secs", [0.0, -1.0, float("nan"), float("inf")])
def test_an_invalid_deadline_is_refused_and_ends_nothing(sync, secs):
    assert sync.prepare(multi_bucket(A)).success
    result = sync.complete(deadline_secs=secs)
    assert (result.success, result.data["status_code"]) == (False, 400)
    assert "must be a positive number of seconds" in result.message
    assert sync.state() == "receiving"


def test_a_huge_deadline_is_accepted(sync):
    assert sync.prepare(multi_bucket(A)).success
    completing = sync.stage.send("complete_weights_update", BODY | {"deadline_secs": 1e300})
    sync.send(A)
    assert sync.stage.admin_result(completing).success


@pytest.mark.parametrize("step", ["init", "arm"])
def test_an_unexpected_error_leaves_the_replica_ready_for_the_next_sync(
    stage, pool, monkeypatch, step
):
    def fail(*_, **__):
        raise RuntimeError("a bug")

    sync = Syncing(stage, pool.trainer())
    if step == "arm":
        sync.join()
    monkeypatch.setattr(ThreadReceiver, step, fail)
    if step == "arm":
        result = sync.prepare(multi_bucket(A))
    else:
        result = stage.admin("init_weights_update_group", sync.rendezvous(free_port()))
    assert not result.success
    assert "RuntimeError: a bug" in result.message
    monkeypatch.undo()
    assert sync.facts()["groups"] == []
    if step == "arm":
        assert sync.state() == "failed"
        sync.trainer.tell("destroy", group="g")
    sync.join()
    assert sync.prepare(multi_bucket(A)).success
    sync.send(A)
    assert sync.complete().success
    sync.leave()
