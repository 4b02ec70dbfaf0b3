import threading

import pytest

from omni_proxy.process_group.rank_protocol import Groups
from tests.replica.weights.stage_fixture import running
from tests.replica.weights.sync_steps import BODY, NORM, UP, Syncing, announced, many, sent_of

SHORT_SECS = 0.1
BUCKET = sent_of([UP, NORM])


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
def memory(monkeypatch):
    """Memory for the announced tensors is available only long after `SHORT_SECS`."""
    never, real = threading.Event(), Groups._block_for

    def late(self, *more):
        never.wait(5 * SHORT_SECS)
        return real(self, *more)

    monkeypatch.setattr(Groups, "_block_for", late)


@pytest.mark.parametrize("secs", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused_and_nothing_is_armed(sync, secs):
    answer = sync.prepare(many(BUCKET, deadline_secs=secs))
    assert not answer.success
    assert f"timeout {secs!r}: it must be a positive number of seconds" in answer.message
    assert sync.state() == "grouped"
    assert sync.prepare(many(BUCKET)).success


def ended_disarmed(sync, answer):
    assert not answer.success
    assert f"not armed within {SHORT_SECS:g} s" in answer.message
    assert (sync.state(), sync.reported()["groups"]) == ("failed", [])


@pytest.mark.usefixtures("memory")
def test_a_preparation_ends_disarmed_when_its_callers_time_is_over(sync):
    ended_disarmed(sync, sync.prepare(many(BUCKET, deadline_secs=SHORT_SECS)))


@pytest.mark.parametrize("ready_secs", [SHORT_SECS])
@pytest.mark.usefixtures("memory")
def test_no_caller_can_make_the_time_to_be_armed_longer(sync):
    ended_disarmed(sync, sync.prepare(many(BUCKET, deadline_secs=100.0)))


@pytest.mark.usefixtures("memory")
def test_an_update_in_one_call_has_no_more_time_to_be_armed_than_it_has(sync):
    body = announced(BUCKET) | BODY | {"deadline_secs": SHORT_SECS}
    ended_disarmed(sync, sync.stage.admin("update_weights_from_distributed", body))


def test_a_preparation_within_the_deadline_may_end_after_it(sync):
    assert sync.prepare(many(BUCKET, deadline_secs=20.0)).success
    sync.send(BUCKET)
    assert sync.complete().success
