"""A sync that fails after some buckets: its weights are never reported as whole."""

import pytest

from tests.replica.weights.stage_fixture import running
from tests.replica.weights.sync_steps import (
    BODY,
    DOWN,
    NORM,
    SHAPES,
    UP,
    Syncing,
    bucket_of,
    multi_bucket,
    single_bucket,
)

A, B = bucket_of([UP, NORM]), bucket_of([DOWN], seed=7)
DESTROY = "destroy_weights_update_group"


@pytest.fixture
def sync(pool):
    """A sync whose first bucket is applied."""
    with running(weights_isolation="thread", weights_stall_secs=3.0) as stage:
        sync = Syncing(stage, pool.trainer())
        sync.join()
        assert sync.prepare(single_bucket(A)).success
        sync.send(A)
        assert sync.complete().data["weights"] == "open"
        yield sync
        stage.admin(DESTROY, BODY)
        sync.trainer.kill()


def bucket_refused(sync):
    assert not sync.prepare(single_bucket([(NORM, "float32", [1], 0)])).success


def destroyed_while_armed(sync):
    assert sync.prepare(single_bucket(B)).success
    assert sync.stage.admin(DESTROY, BODY).success


def died_while_armed(sync):
    assert sync.prepare(single_bucket(B)).success
    sync.trainer.kill()
    sync.until("failed")


def sent_too_little(sync):
    assert sync.prepare(single_bucket(B)).success
    sync.trainer.tell("send_zeros", group="g", nbytes=SHAPES[DOWN][0] * SHAPES[DOWN][1])
    assert not sync.complete().success


def sent_two_values_for_one_tensor(sync):
    tied = [("model.embed_tokens.weight", 1), ("lm_head.weight", 2)]
    bucket = [(name, "float32", SHAPES["model.embed_tokens.weight"], seed) for name, seed in tied]
    assert sync.prepare(single_bucket(bucket)).success
    sync.send(bucket)
    assert "occurs twice" in sync.complete().message


def failed_in_one_call(sync):
    updating = sync.stage.send("update_weights_from_distributed", single_bucket(B))
    sync.trainer.kill()
    assert not sync.stage.admin_result(updating).success


@pytest.mark.parametrize(
    "interrupt",
    [
        bucket_refused,
        destroyed_while_armed,
        died_while_armed,
        sent_too_little,
        sent_two_values_for_one_tensor,
        failed_in_one_call,
    ],
)
def test_a_sync_that_fails_after_a_bucket_leaves_the_weights_uncertain(sync, interrupt):
    interrupt(sync)
    assert sync.facts()["weights"] == "uncertain"
    sync.stage.admin(DESTROY, BODY)
    assert (sync.facts()["weights"], sync.facts()["buckets_applied"]) == ("uncertain", 1)


def test_a_refused_call_out_of_order_does_not_end_the_sync(sync):
    assert not sync.complete().success
    assert not sync.stage.admin(
        "prepare_weights_update", single_bucket(B) | {"group_name": "x"}
    ).success
    assert sync.prepare(single_bucket(B)).success
    assert not sync.prepare(single_bucket(B)).success
    assert sync.facts()["weights"] == "open"
    sync.send(B)
    assert sync.complete(weight_version="v1").data["weights"] == "whole"


def test_a_sync_can_be_completed_after_a_bucket_was_refused(sync):
    bucket_refused(sync)
    assert sync.prepare(single_bucket(B)).success
    sync.send(B)
    assert sync.complete(weight_version="v1").data["weights"] == "whole"


def test_a_failed_completion_reports_the_number_of_received_buckets(sync):
    assert sync.prepare(multi_bucket(B, A)).success
    completing = sync.stage.send("complete_weights_update", BODY)
    sync.send(B)
    while sync.facts()["buckets_done"] == 0:
        pass  # the bucket may still be in transit
    sync.trainer.kill()
    result = sync.stage.admin_result(completing)
    assert not result.success
    assert result.data["num_buckets_received"] == 1
