import threading

import pytest

from omni_proxy.process_group.receiver import ThreadReceiver
from omni_proxy.replica.pipeline.messages import Result, ResultChunk
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
    many,
    one,
    sent_of,
    values,
)

FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
WIDE = [name for name, shape in SHAPES.items() if shape == [128]]
A, B = sent_of([UP, NORM]), sent_of([DOWN], seed=7)


@pytest.fixture(scope="module")
def replica():
    with running(weights_isolation="thread") as stage:
        yield stage


@pytest.fixture
def stage(replica, tmp_path):
    """The first weights and their name again, and no group."""
    yield replica
    replica.admin("destroy_weights_update_group", group_name="g")
    restore(replica, tmp_path)


def restore(stage, folder):
    from tests.replica.weights.stage_fixture import save

    file = save(folder / "first.safetensors", weights_of(0))
    stage.admin("pause_generation", mode="abort")
    answer = stage.update(file, weight_version="default")
    assert answer.success, answer.message
    stage.admin("continue_generation")


@pytest.fixture
def sync(stage, pool):
    sync = Syncing(stage, pool.trainer())
    sync.join()
    yield sync
    if "g" in [group["group_name"] for group in sync.reported()["groups"]]:
        stage.admin("destroy_weights_update_group", group_name="g")
    if sync.trainer.living():
        sync.trainer.tell("destroy", group="g")


def holds(stage, *buckets):
    return stage.checksum() == checksum_of(weights_of(0) | values(*buckets))


# The two forms


def test_all_buckets_at_once(sync):
    stage = sync.stage
    assert sync.state() == "grouped"
    answer = sync.prepare(many(A, B))
    assert (answer.success, answer.data["num_buckets"]) == (True, 2)
    reported = sync.reported()
    assert reported["state"] == "receiving"
    assert reported["owner"].startswith("127.0.0.1:")
    assert (reported["bytes_expected"], reported["bytes_received"]) == (answer.data["num_bytes"], 0)
    sync.send(A, B)
    assert sync.until("received")["buckets_done"] == 2
    assert holds(stage)
    answer = sync.complete(flush_cache=True, weight_version="v1")
    assert answer.success, answer.message
    assert answer.message == "Succeeded to update parameter online."
    assert (answer.data["num_buckets_received"], answer.data["weight_version"]) == (2, "v1")
    assert (answer.data["flush_success"], answer.data["weights"]) == (True, "whole")
    assert holds(stage, A, B)
    assert stage.facts()["weight_version"] == "v1"
    assert sync.state() == "grouped"
    assert sync.leave().success
    assert sync.state() == "idle"


def test_buckets_follow_until_the_last_one_is_marked(sync):
    stage = sync.stage
    for bucket in (A, B):
        assert sync.prepare(one(bucket)).success
        sync.send(bucket)
        answer = sync.complete(weight_version=None, transport="nccl_broadcast")
        assert answer.success, answer.message
        assert answer.data["num_buckets_received"] == 1
        assert answer.data["flush_success"] is None
        assert (answer.data["weights"], answer.data["weight_version"]) == ("open", "default")
    reported = sync.reported()
    assert (reported["weights"], reported["buckets_applied"]) == ("open", 2)
    last = sent_of([WIDE[0]], seed=9)
    sync.prepare(one(last))
    sync.send(last)
    answer = sync.complete(weight_version="v2", flush_cache=True)
    assert (answer.data["weights"], answer.data["buckets_applied"]) == ("whole", 0)
    assert stage.facts()["weight_version"] == "v2"
    assert holds(stage, A, B, last)


def test_generation_between_two_buckets_makes_the_weights_uncertain(sync):
    sync.stage.admin("pause_generation", mode="retract")
    sync.prepare(one(B))
    sync.send(B)
    assert sync.complete().data["weights"] == "open"
    assert sync.stage.admin("continue_generation").success
    assert sync.reported()["weights"] == "uncertain"
    sync.prepare(many(A, B))
    sync.send(A, B)
    assert sync.complete().data["weights"] == "whole"


def test_a_sync_that_leaves_in_good_order_was_whole(sync):
    sync.prepare(one(B))
    sync.send(B)
    assert sync.complete().data["weights"] == "open"
    sync.leave()
    assert sync.reported()["weights"] == "whole"


@pytest.mark.parametrize("form", [many, one])
def test_flattened_buckets_of_every_float(sync, form):
    bucket = [
        (name, dtype, [128], place)
        for place, (name, dtype) in enumerate(zip(WIDE, FLOATS, strict=False))
    ]
    answer = sync.prepare(form(bucket, load_format="flattened_bucket"))
    assert answer.success, answer.message
    sync.send(bucket, flattened=True)
    assert sync.complete(load_format="flattened_bucket").success
    assert holds(sync.stage, bucket)


@pytest.mark.parametrize("dtype", FLOATS)
def test_tensor_by_tensor_of_every_float(sync, dtype):
    bucket = sent_of([UP, NORM], dtype=dtype)
    assert sync.prepare(many(bucket)).success
    sync.send(bucket)
    assert sync.complete().success
    assert holds(sync.stage, bucket)


def test_buckets_of_a_session_are_shown_together_at_its_end(sync):
    stage = sync.stage
    assert stage.admin("begin_weight_update").success
    for bucket in (A, B):
        assert sync.prepare(one(bucket)).success
        sync.send(bucket)
        assert sync.complete(weight_version="v3").success
        assert holds(stage)
        assert stage.facts()["weight_version"] == "default"
    assert sync.reported()["session_tensors"] == 3
    sync.prepare(one(A))
    refused = stage.admin("end_weight_update")
    assert (refused.success, refused.data["status_code"]) == (False, 409)
    sync.send(A)
    assert sync.complete().success
    assert stage.admin("end_weight_update").success
    assert holds(stage, A, B)
    assert stage.facts()["weight_version"] == "v3"
    assert sync.reported()["weights"] == "whole"


def test_the_single_phase_takes_turns_with_the_two_phases(sync):
    stage = sync.stage
    sync.order_send(A)
    answer = stage.admin("update_weights_from_distributed", one(A), weight_version="v4")
    assert answer.success, answer.message
    sync.trainer.reply()
    assert sync.prepare(one(B)).success
    refused = stage.admin("update_weights_from_distributed", one(A))
    assert (refused.success, refused.data["status_code"]) == (False, 409)
    assert "already in progress" in refused.message
    stage.admin("continue_generation")
    sync.send(B)
    assert sync.complete(weight_version="v5").success
    assert holds(stage, A, B)


# Generation during a transfer


def test_requests_are_computed_until_the_swap_and_after_it(sync):
    stage = sync.stage
    assert sync.prepare(many(B)).success
    greedy = {"temperature": 0, "max_new_tokens": 12}
    assert stage.generate()["text"] == undisturbed(**greedy)["text"]
    completing = stage.send("complete_weights_update", BODY | {"weight_version": "v6"})
    long = stage.submit(max_new_tokens=500, stream=True)
    stage.next(ResultChunk, lambda reported: reported.request_id == long)
    assert stage.facts()["engine_paused"] is False
    # Other operations are answered meanwhile: the checksum is that of the old weights.
    assert holds(stage)
    assert stage.admin("pause_generation", mode="in_place").success
    assert stage.admin("continue_generation").success
    assert stage.generate()["weight_version"] == "default"
    zeros = SHAPES[DOWN][0] * SHAPES[DOWN][1] * 4
    sync.trainer.tell("big", group="g", nbytes=zeros)
    answer = stage.answer(completing)
    assert answer.success, answer.message
    stage.admin("pause_generation", mode="in_place")
    stage.admin("continue_generation")
    assert stage.generate()["weight_version"] == "v6"
    ended = [
        reported
        for reported in stage.seen
        if isinstance(reported, Result) and reported.request_id == long
    ]
    data = ended[0].data if ended else stage.result(long)
    assert data["usage"]["completion_tokens"] == 500


def test_the_swap_waits_for_a_checker_that_is_at_work(sync, monkeypatch):
    from omni_proxy.replica.weights import checker

    stage, begun, go_on = sync.stage, threading.Event(), threading.Event()
    digest = checker.tensor_digest

    def slowly(*tensor):
        begun.set()
        assert go_on.wait(20)
        return digest(*tensor)

    sync.prepare(many(A))
    completing = stage.send("complete_weights_update", BODY)
    monkeypatch.setattr(checker, "tensor_digest", slowly)
    checking = stage.send("weights_checker")
    assert begun.wait(20)
    sync.send(A)
    # Two operations run, and the state shows both.
    while sync.state() != "applying":
        pass
    go_on.set()
    assert stage.answer(checking).data["per_gpu_checksum"] == checksum_of(weights_of(0))
    assert stage.answer(completing).success
    assert holds(stage, A)


# Refusals


WRONG = {
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


@pytest.mark.parametrize("reported", WRONG, ids=lambda reported: reported.replace(" ", "-"))
def test_what_cannot_be_met_is_refused_before_anything_is_armed(sync, reported):
    good = one([(NORM, "float32", [128], 1)])
    answer = sync.prepare(good | WRONG[reported])
    assert not answer.success
    assert reported in answer.message
    assert sync.state() == "grouped"
    assert sync.stage.facts()["engine_paused"] is False
    assert sync.prepare(good).success


def test_a_tensor_in_two_buckets_is_refused(sync):
    answer = sync.prepare(many(A, B, A))
    assert not answer.success
    assert f"bucket 3 of 3: tensor '{UP}' is in bucket 1 already" in answer.message


def test_a_plan_that_memory_does_not_hold_is_refused_with_the_numbers(sync, monkeypatch):
    from omni_proxy.process_group.broadcast import mapped_file

    monkeypatch.setattr(mapped_file, "MEMINFO", Meminfo(1))
    everything = sent_of(SHAPES)  # more than any other test has left in kept memory
    answer = sync.prepare(many(everything))
    assert not answer.success
    reported = f"need {bytes_of(everything)} bytes, but only 1024"
    assert reported in answer.message
    assert sync.state() == "grouped"
    monkeypatch.undo()
    assert sync.prepare(many(everything)).success


def bytes_of(bucket):
    """The tensors as stored: each begins at a multiple of 64 bytes."""
    ends = 0
    for _, _, shape, _ in bucket:
        size = 4
        for each in shape:
            size *= each
        ends = -(-ends // 64) * 64 + size
    return ends


def test_calls_out_of_place_get_a_sentence_and_change_nothing(sync, tmp_path):
    stage = sync.stage
    answer = sync.complete()
    assert not answer.success
    assert "no weights update is prepared" in answer.message
    assert sync.prepare(one(A)).success
    second = sync.prepare(one(B))
    assert (second.success, second.data["status_code"]) == (False, 409)
    assert "already in progress: group 'g' is receiving" in second.message
    other = stage.admin("complete_weights_update", group_name="other")
    assert (other.success, other.data["status_code"]) == (False, 400)
    assert "that of group 'g', not of 'other'" in other.message
    elsewhere = stage.admin("prepare_weights_update", announced(A) | {"group_name": "other"})
    assert elsewhere.data["status_code"] == 409
    disk = stage.update(tmp_path / "whatever")
    assert (disk.success, disk.data["status_code"]) == (False, 409)
    completing = stage.send("complete_weights_update", BODY)
    again = sync.complete()
    assert (again.success, again.data["status_code"]) == (False, 409)
    assert "already being completed" in again.message
    sync.send(A)
    assert stage.answer(completing).success
    assert "no weights update is prepared" in sync.complete().message
    assert holds(stage, A)


def test_an_unknown_group_is_distinguished_from_one_that_has_ended(stage):
    answer = stage.admin("prepare_weights_update", announced(A) | {"group_name": "none"})
    assert not answer.success
    assert "group 'none' is not initialized: call init_weights_update_group" in answer.message


@pytest.mark.parametrize("secs", [0.0, -1.0, float("nan"), float("inf")])
def test_a_deadline_that_is_none_is_refused_and_ends_nothing(sync, secs):
    assert sync.prepare(many(A)).success
    answer = sync.complete(deadline_secs=secs)
    assert (answer.success, answer.data["status_code"]) == (False, 400)
    assert "must be a positive number of seconds" in answer.message
    assert sync.state() == "receiving"


def test_a_deadline_beyond_all_bounds_is_the_longest_there_is(sync):
    assert sync.prepare(many(A)).success
    completing = sync.stage.send("complete_weights_update", BODY | {"deadline_secs": 1e300})
    sync.send(A)
    assert sync.stage.answer(completing).success


@pytest.mark.parametrize("step", ["init", "arm"])
def test_an_unexpected_error_leaves_the_replica_ready_for_the_next_sync(
    stage, pool, monkeypatch, step
):
    def fails(*_, **__):
        raise RuntimeError("a bug")

    sync = Syncing(stage, pool.trainer())
    if step == "arm":
        sync.join()
    monkeypatch.setattr(ThreadReceiver, step, fails)
    if step == "arm":
        answer = sync.prepare(many(A))
    else:
        answer = stage.admin("init_weights_update_group", sync.rendezvous(free_port()))
    assert not answer.success
    assert "RuntimeError: a bug" in answer.message
    monkeypatch.undo()
    assert sync.reported()["groups"] == []
    if step == "arm":
        assert sync.state() == "failed"
        sync.trainer.tell("destroy", group="g")
    sync.join()
    assert sync.prepare(many(A)).success
    sync.send(A)
    assert sync.complete().success
    sync.leave()
