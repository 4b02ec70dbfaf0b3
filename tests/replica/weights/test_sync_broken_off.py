"""A sync bucket by bucket that is not finished: its weights are never reported as whole."""

import pytest

from tests.replica.weights.stage_fixture import running
from tests.replica.weights.sync_steps import (
    BODY,
    DOWN,
    NORM,
    SHAPES,
    UP,
    Syncing,
    many,
    one,
    sent_of,
)

A, B = sent_of([UP, NORM]), sent_of([DOWN], seed=7)
DESTROY = "destroy_weights_update_group"


@pytest.fixture
def sync(pool):
    """Of this sync one bucket is applied."""
    with running(weights_isolation="thread", weights_stall_secs=3.0) as stage:
        sync = Syncing(stage, pool.trainer())
        sync.join()
        assert sync.prepare(one(A)).success
        sync.send(A)
        assert sync.complete().data["weights"] == "open"
        yield sync
        stage.admin(DESTROY, BODY)
        sync.trainer.kill()


def refused(sync):
    assert not sync.prepare(one([(NORM, "float32", [1], 0)])).success


def destroyed_while_armed(sync):
    assert sync.prepare(one(B)).success
    assert sync.stage.admin(DESTROY, BODY).success


def died_while_armed(sync):
    assert sync.prepare(one(B)).success
    sync.trainer.kill()
    sync.until("failed")


def sent_too_little(sync):
    assert sync.prepare(one(B)).success
    sync.trainer.tell("big", group="g", nbytes=SHAPES[DOWN][0] * SHAPES[DOWN][1])
    assert not sync.complete().success


def sent_two_values_for_one_tensor(sync):
    tied = [("model.embed_tokens.weight", 1), ("lm_head.weight", 2)]
    bucket = [(name, "float32", SHAPES["model.embed_tokens.weight"], seed) for name, seed in tied]
    assert sync.prepare(one(bucket)).success
    sync.send(bucket)
    assert "occurs twice" in sync.complete().message


def failed_in_one_call(sync):
    updating = sync.stage.send("update_weights_from_distributed", one(B))
    sync.trainer.kill()
    assert not sync.stage.answer(updating).success


@pytest.mark.parametrize(
    "end",
    [
        refused,
        destroyed_while_armed,
        died_while_armed,
        sent_too_little,
        sent_two_values_for_one_tensor,
        failed_in_one_call,
    ],
)
def test_what_breaks_off_after_a_bucket_leaves_the_weights_uncertain(sync, end):
    end(sync)
    assert sync.reported()["weights"] == "uncertain"
    sync.stage.admin(DESTROY, BODY)
    assert (sync.reported()["weights"], sync.reported()["buckets_applied"]) == ("uncertain", 1)


def test_a_call_at_the_wrong_time_breaks_nothing_off(sync):
    assert not sync.complete().success
    assert not sync.stage.admin("prepare_weights_update", one(B) | {"group_name": "x"}).success
    assert sync.prepare(one(B)).success
    assert not sync.prepare(one(B)).success
    assert sync.reported()["weights"] == "open"
    sync.send(B)
    assert sync.complete(weight_version="v1").data["weights"] == "whole"


def test_a_caller_that_mends_the_refused_bucket_may_still_make_it_whole(sync):
    refused(sync)
    assert sync.prepare(one(B)).success
    sync.send(B)
    assert sync.complete(weight_version="v1").data["weights"] == "whole"


def test_a_failed_completion_reports_the_received_amount(sync):
    assert sync.prepare(many(B, A)).success
    completing = sync.stage.send("complete_weights_update", BODY)
    sync.send(B)
    while sync.reported()["buckets_done"] == 0:
        pass  # what the trainer has sent may still be on its way
    sync.trainer.kill()
    answer = sync.stage.answer(completing)
    assert not answer.success
    assert answer.data["num_buckets_received"] == 1
