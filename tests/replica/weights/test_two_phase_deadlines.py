import threading

import pytest

from omni_proxy.process_group.rank_protocol import Groups
from tests.replica.weights.stage_fixture import running
from tests.replica.weights.sync_steps import (
    BODY,
    NORM,
    UP,
    Syncing,
    announced,
    bucket_of,
    multi_bucket,
)

SHORT_SECS = 0.1
BUCKET = bucket_of([UP, NORM])


@pytest.fixture
def ready_secs():
    return 60.0


@pytest.fixture
def sync(pool, ready_secs):
    with running(weights_isolation="thread", weights_ready_secs=ready_secs) as stage:
        sync = Syncing(stage, pool.trainer())
        sync.join()
        yield sync
        stage.admin("destroy_weights_update_group", group_name="g")
        sync.trainer.tell("destroy", group="g")


@pytest.fixture
def slow_memory(monkeypatch):
    """Memory for the announced tensors is available only long after `SHORT_SECS`."""
    unset, original = threading.Event(), Groups._block_for

    def block_late(self, *arguments):
        unset.wait(5 * SHORT_SECS)
        return original(self, *arguments)

    monkeypatch.setattr(Groups, "_block_for", block_late)


@pytest.mark.parametrize("secs", [0.0, -1.0, float("nan"), float("inf")])
def test_an_invalid_deadline_is_refused_and_nothing_is_armed(sync, secs):
    result = sync.prepare(multi_bucket(BUCKET, deadline_secs=secs))
    assert not result.success
    assert f"timeout {secs!r}: it must be a positive number of seconds" in result.message
    assert sync.state() == "grouped"
    assert sync.prepare(multi_bucket(BUCKET)).success


def assert_not_armed(sync, result):
    assert not result.success
    assert f"not armed within {SHORT_SECS:g} s" in result.message
    assert (sync.state(), sync.facts()["groups"]) == ("failed", [])


@pytest.mark.usefixtures("slow_memory")
def test_a_preparation_fails_disarmed_at_the_deadline_of_its_caller(sync):
    assert_not_armed(sync, sync.prepare(multi_bucket(BUCKET, deadline_secs=SHORT_SECS)))


@pytest.mark.parametrize("ready_secs", [SHORT_SECS])
@pytest.mark.usefixtures("slow_memory")
def test_a_caller_cannot_extend_the_time_limit_for_arming(sync):
    assert_not_armed(sync, sync.prepare(multi_bucket(BUCKET, deadline_secs=100.0)))


@pytest.mark.usefixtures("slow_memory")
def test_the_deadline_of_an_update_in_one_call_limits_the_arming(sync):
    body = announced(BUCKET) | BODY | {"deadline_secs": SHORT_SECS}
    assert_not_armed(sync, sync.stage.admin("update_weights_from_distributed", body))


def test_a_sync_may_continue_after_a_preparation_within_its_deadline(sync):
    assert sync.prepare(multi_bucket(BUCKET, deadline_secs=20.0)).success
    sync.send(BUCKET)
    assert sync.complete().success
