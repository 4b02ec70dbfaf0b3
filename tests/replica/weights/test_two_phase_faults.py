"""Known faults of trainers (two-phase.md 4), on a replica whose receiver is a process."""

import os
import resource
import signal
import socket
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.process_group.trainer_process import free_port
from tests.process_group.wait_helpers import wait_until
from tests.replica.weights.stage_fixture import checksum_of, running, weights_of
from tests.replica.weights.sync_steps import (
    DOWN,
    NORM,
    SHAPES,
    UP,
    Syncing,
    many,
    one,
    sent_of,
    values,
)

A, B = sent_of([UP, NORM]), sent_of([DOWN], seed=7)
INIT = "init_weights_update_group"
PATIENCE = {"weights_stall_secs": 3.0, "weights_ready_secs": 6.0, "weights_receive_secs": 20.0}


@pytest.fixture(scope="module")
def replica():
    with running(**PATIENCE) as stage:
        yield stage


@pytest.fixture
def sync(replica, pool):
    sync = Syncing(replica, pool.trainer())
    sync.join()
    sync.before = replica.checksum()
    yield sync
    if sync.trainer.living():
        replica.admin("destroy_weights_update_group", group_name="g")
        sync.trainer.tell("destroy", group="g")
    replica.admin("continue_generation")


def untouched_and_ready_for_the_next(sync, pool):
    """The old weights are intact, and a new trainer with the same group name succeeds at once."""
    stage = sync.stage
    assert stage.checksum() == sync.before
    assert stage.generate()["usage"]["completion_tokens"] == 12
    again = Syncing(stage, pool.trainer())
    again.join()
    assert again.prepare(many(A, B)).success
    again.send(A, B)
    answer = again.complete(weight_version="next")
    assert answer.success, answer.message
    assert stage.checksum() == checksum_of(weights_of(0) | values(A, B))
    again.leave()
    zeroed(stage)


def zeroed(stage):
    """The first weights again, from disk."""
    import base64

    from safetensors.torch import save

    parts = [base64.b64encode(save(weights_of(0))).decode()]
    answer = stage.admin("update_weights_from_tensor", serialized_named_tensors=parts)
    assert answer.success, answer.message


def failed(sync, *words):
    answer = sync.complete()
    assert not answer.success
    for each in words:
        assert each in answer.message, answer.message
    assert answer.data.get("status_code", 400) == 400
    return answer


def test_a_trainer_that_is_killed_before_it_sends(sync, pool):
    """Rows 11, 12, 15: no state is left that breaks the next sync."""
    sync.prepare(many(A))
    sync.trainer.kill()
    body = sync.until("failed")
    assert "g" not in [group["group_name"] for group in body["groups"]]
    for _ in range(2):
        failed(sync, "the prepared weights update has failed: group 'g'", "message 1 of 2")
    untouched_and_ready_for_the_next(sync, pool)


def test_a_trainer_that_is_killed_before_it_prepares(sync, pool):
    sync.trainer.kill()
    if sync.prepare(many(A)).success:
        sync.until("failed")
    assert not sync.complete().success
    untouched_and_ready_for_the_next(sync, pool)


def test_a_trainer_that_is_killed_in_the_middle(sync, pool):
    sync.prepare(many(A, B))
    sync.order_send(A)
    assert "sent" in sync.trainer.reply()
    completing = sync.stage.send("complete_weights_update", {"group_name": "g"})
    sync.trainer.kill()
    answer = sync.stage.answer(completing)
    assert not answer.success
    assert "the weights of version" in answer.message
    assert answer.data["weight_version"] == sync.stage.facts()["weight_version"]
    untouched_and_ready_for_the_next(sync, pool)


def test_an_update_completes_if_its_trainer_is_killed_after_the_last_byte(sync):
    sync.prepare(many(B))
    sync.send(B)
    sync.until("received")
    sync.trainer.kill()
    assert sync.complete().success
    assert sync.stage.checksum() == checksum_of(weights_of(0) | values(B))
    zeroed(sync.stage)


def test_a_trainer_that_never_completes_is_replaced_by_the_next(sync, pool):
    sync.prepare(many(B))
    sync.send(B)
    sync.until("received")
    sync.trainer.kill()
    untouched_and_ready_for_the_next(sync, pool)


def test_a_stopped_trainer_is_given_up_after_a_silence(sync, pool):
    """Row 21: a receive is ended by a stall, not by its duration."""
    sync.prepare(many(A, B))
    sync.send(A)
    os.kill(sync.trainer.process.pid, signal.SIGSTOP)
    completing = sync.stage.send("complete_weights_update", {"group_name": "g"})
    assert sync.stage.generate()["usage"]["completion_tokens"] == 12
    answer = sync.stage.answer(completing)
    assert not answer.success
    assert "nothing was received for 3 s" in answer.message
    sync.trainer.kill()
    untouched_and_ready_for_the_next(sync, pool)


def test_a_trainer_that_never_sends_is_given_up_without_anybody_asking(sync, pool):
    sync.prepare(many(A))
    assert sync.until("failed")["error"]
    failed(sync, "nothing was received for 6 s")
    assert sync.trainer.tell("destroy", group="g") == {"destroyed": True}
    untouched_and_ready_for_the_next(sync, pool)
    sync.join()


@pytest.mark.parametrize("phases", [1, 2])
def test_a_peer_that_sends_too_much_ends_no_replica(sync, pool, phases):
    body = {"group_name": "g"} | one(B)
    if phases == 2:
        sync.prepare(body)
    else:
        updating = sync.stage.send("update_weights_from_distributed", body)
    nbytes = 8 * SHAPES[DOWN][0] * SHAPES[DOWN][1]
    sync.trainer.order("big", group="g", nbytes=nbytes)
    answer = sync.complete() if phases == 2 else sync.stage.answer(updating)
    assert not answer.success
    assert "more than it announced" in answer.message or "sent more" in answer.message
    sync.stage.admin("continue_generation")
    sync.trainer.kill()
    untouched_and_ready_for_the_next(sync, pool)


def test_a_peer_that_sends_too_little_gets_that_reason(sync, pool):
    sync.prepare(one(B))
    sync.trainer.tell("big", group="g", nbytes=SHAPES[DOWN][0] * SHAPES[DOWN][1])
    failed(sync, f"tensor '{DOWN}'", "the trainer sent fewer")
    sync.trainer.tell("destroy", group="g")
    untouched_and_ready_for_the_next(sync, pool)
    sync.join()


def test_a_second_trainer_is_refused_by_the_name_of_the_first(sync, pool):
    """Row 13."""
    sync.prepare(many(A))
    other = Syncing(sync.stage, pool.trainer())
    answer = sync.stage.admin(INIT, other.rendezvous(free_port()))
    assert (answer.success, answer.data["status_code"]) == (False, 409)
    assert sync.reported()["owner"] in answer.message
    sync.send(A)
    assert sync.complete().success
    zeroed(sync.stage)


def test_a_silent_port_costs_the_join_its_deadline_only(replica):
    """Row 22: generation continues during it."""
    with silent_port() as port:
        threads = threading.active_count()
        rendezvous = Syncing(replica, None).rendezvous(port) | {"deadline_secs": 0.5}
        joining = replica.send(INIT, rendezvous)
        assert replica.generate()["usage"]["completion_tokens"] == 12
        assert replica.facts()["engine_paused"] is False
        answer = replica.answer(joining)
    assert not answer.success
    assert "0.5 s" in answer.message
    assert replica.facts()["weight_sync"]["groups"] == []
    wait_until(
        lambda: threading.active_count() <= threads
    )  # they have answered, and are about to end


@contextmanager
def silent_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_cached_keys_of_the_old_weights_are_not_used(sync):
    """Row 10: with and without a flush."""
    stage, prompt = sync.stage, list(range(300, 400))
    stage.generate(prompt=prompt)
    details = stage.generate(prompt=prompt)["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] > 0
    sync.prepare(one(B))
    sync.trainer.tell("big", group="g", nbytes=4 * SHAPES[DOWN][0] * SHAPES[DOWN][1])
    assert sync.complete(flush_cache=False).success
    details = stage.generate(prompt=prompt)["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == 0
    zeroed(stage)


def test_ten_syncs_leave_nothing_behind(replica, pool):
    trainer = pool.trainer()

    def round_of(number):
        sync = Syncing(replica, trainer)
        sync.join()
        form = many if number % 2 else one
        assert sync.prepare(form(B)).success
        if number % 5 == 4:
            # The trainer does not send, and disconnects.
            sync.leave()
            return
        sync.send(B)
        assert sync.complete(weight_version=str(number)).success
        assert replica.facts()["weight_version"] == str(number)
        sync.leave()

    for number in range(4):
        round_of(number)
    before = used()
    for number in range(10):
        round_of(number)
    after = used()
    # One left by each would be ten. Threads of earlier tests may still open and close theirs.
    assert after["descriptors"] <= before["descriptors"] + 5
    assert after["threads"] <= before["threads"] + 1
    assert after["children"] <= before["children"] + 1
    assert after["resident_mib"] < before["resident_mib"] + 16
    assert replica.checksum() == checksum_of(weights_of(0) | values(B))
    zeroed(replica)


def used():
    me = Path("/proc/self")
    pages = int((me / "statm").read_text().split()[1])
    return {
        "descriptors": len(os.listdir(me / "fd")),
        "threads": threading.active_count(),
        "children": sum(len(each.read_text().split()) for each in me.glob("task/*/children")),
        "resident_mib": pages * resource.getpagesize() >> 20,
    }
