"""Known faults of trainers, on a replica whose receiver is a process."""

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
    bucket_of,
    expected_values,
    multi_bucket,
    single_bucket,
)

A, B = bucket_of([UP, NORM]), bucket_of([DOWN], seed=7)
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


def assert_unchanged_and_ready(sync, pool):
    """The old weights are intact, and a sync with a new trainer of the same group succeeds."""
    stage = sync.stage
    assert stage.checksum() == sync.before
    assert stage.generate()["usage"]["completion_tokens"] == 12
    next_sync = Syncing(stage, pool.trainer())
    next_sync.join()
    assert next_sync.prepare(multi_bucket(A, B)).success
    next_sync.send(A, B)
    result = next_sync.complete(weight_version="next")
    assert result.success, result.message
    assert stage.checksum() == checksum_of(weights_of(0) | expected_values(A, B))
    next_sync.leave()
    restore_first_weights(stage)


def restore_first_weights(stage):
    """Loads the first weights again, from tensors in a request."""
    import base64

    from safetensors.torch import save

    parts = [base64.b64encode(save(weights_of(0))).decode()]
    result = stage.admin("update_weights_from_tensor", serialized_named_tensors=parts)
    assert result.success, result.message


def assert_completion_fails(sync, *words):
    result = sync.complete()
    assert not result.success
    for word in words:
        assert word in result.message, result.message
    assert result.data.get("status_code", 400) == 400
    return result


def test_a_trainer_killed_before_it_sends_fails_only_its_own_sync(sync, pool):
    sync.prepare(multi_bucket(A))
    sync.trainer.kill()
    facts = sync.until("failed")
    assert "g" not in [group["group_name"] for group in facts["groups"]]
    for _ in range(2):
        assert_completion_fails(
            sync, "the prepared weights update has failed: group 'g'", "message 1 of 2",
            "Nothing was changed: the weights of version",
        )  # fmt: skip
    assert_unchanged_and_ready(sync, pool)


def test_a_trainer_killed_before_it_prepares_fails_only_its_own_sync(sync, pool):
    sync.trainer.kill()
    if sync.prepare(multi_bucket(A)).success:
        sync.until("failed")
    assert not sync.complete().success
    assert_unchanged_and_ready(sync, pool)


def test_a_trainer_killed_during_its_transfer_fails_only_its_own_sync(sync, pool):
    sync.prepare(multi_bucket(A, B))
    sync.order_send(A)
    assert "sent" in sync.trainer.reply()
    completing = sync.stage.send("complete_weights_update", {"group_name": "g"})
    sync.trainer.kill()
    result = sync.stage.admin_result(completing)
    assert not result.success
    assert "the weights of version" in result.message
    assert result.data["weight_version"] == sync.stage.facts()["weight_version"]
    assert_unchanged_and_ready(sync, pool)


def test_an_update_completes_if_its_trainer_is_killed_after_the_last_byte(sync):
    sync.prepare(multi_bucket(B))
    sync.send(B)
    sync.until("received")
    sync.trainer.kill()
    assert sync.complete().success
    assert sync.stage.checksum() == checksum_of(weights_of(0) | expected_values(B))
    restore_first_weights(sync.stage)


def test_a_trainer_that_never_completes_is_replaced_by_the_next(sync, pool):
    sync.prepare(multi_bucket(B))
    sync.send(B)
    sync.until("received")
    sync.trainer.kill()
    assert_unchanged_and_ready(sync, pool)


def test_the_sync_of_a_stopped_trainer_fails_after_the_stall_timeout(sync, pool):
    """A receive is ended by a stall, not by its duration."""
    sync.prepare(multi_bucket(A, B))
    sync.send(A)
    os.kill(sync.trainer.process.pid, signal.SIGSTOP)
    completing = sync.stage.send("complete_weights_update", {"group_name": "g"})
    assert sync.stage.generate()["usage"]["completion_tokens"] == 12
    result = sync.stage.admin_result(completing)
    assert not result.success
    assert "nothing was received for 3 s" in result.message
    sync.trainer.kill()
    assert_unchanged_and_ready(sync, pool)


def test_the_sync_of_a_trainer_that_never_sends_fails_without_a_completion(sync, pool):
    sync.prepare(multi_bucket(A))
    assert sync.until("failed")["error"]
    assert_completion_fails(sync, "nothing was received for 6 s")
    assert sync.trainer.tell("destroy", group="g") == {"destroyed": True}
    assert_unchanged_and_ready(sync, pool)
    sync.join()


@pytest.mark.parametrize("phases", [1, 2])
def test_a_trainer_that_sends_too_much_fails_only_its_own_sync(sync, pool, phases):
    body = {"group_name": "g"} | single_bucket(B)
    if phases == 2:
        sync.prepare(body)
    else:
        updating = sync.stage.send("update_weights_from_distributed", body)
    nbytes = 8 * SHAPES[DOWN][0] * SHAPES[DOWN][1]
    sync.trainer.order("send_zeros", group="g", nbytes=nbytes)
    result = sync.complete() if phases == 2 else sync.stage.admin_result(updating)
    assert not result.success
    assert "more than it announced" in result.message or "sent more" in result.message
    sync.stage.admin("continue_generation")
    sync.trainer.kill()
    assert_unchanged_and_ready(sync, pool)


def test_a_trainer_that_sends_too_little_gets_the_reason(sync, pool):
    sync.prepare(single_bucket(B))
    sync.trainer.tell("send_zeros", group="g", nbytes=SHAPES[DOWN][0] * SHAPES[DOWN][1])
    assert_completion_fails(sync, f"tensor '{DOWN}'", "the trainer sent fewer")
    sync.trainer.tell("destroy", group="g")
    assert_unchanged_and_ready(sync, pool)
    sync.join()


def test_the_refusal_of_a_second_trainer_names_the_first(sync, pool):
    sync.prepare(multi_bucket(A))
    other = Syncing(sync.stage, pool.trainer())
    result = sync.stage.admin(INIT, other.rendezvous(free_port()))
    assert (result.success, result.data["status_code"]) == (False, 409)
    assert sync.facts()["owner"] in result.message
    sync.send(A)
    assert sync.complete().success
    restore_first_weights(sync.stage)


def test_a_join_at_a_silent_port_ends_at_its_deadline(replica):
    """Generation continues during the join."""
    with silent_port() as port:
        threads = threading.active_count()
        rendezvous = Syncing(replica, None).rendezvous(port) | {"deadline_secs": 0.5}
        joining = replica.send(INIT, rendezvous)
        assert replica.generate()["usage"]["completion_tokens"] == 12
        assert replica.facts()["engine_paused"] is False
        result = replica.admin_result(joining)
    assert not result.success
    assert "0.5 s" in result.message
    assert replica.facts()["weight_sync"]["groups"] == []
    # Threads that have finished their work may take a moment to end.
    wait_until(lambda: threading.active_count() <= threads)


@contextmanager
def silent_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_the_prefix_cache_of_the_old_weights_is_not_used(sync):
    stage, prompt = sync.stage, list(range(300, 400))
    stage.generate(prompt=prompt)
    details = stage.generate(prompt=prompt)["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] > 0
    sync.prepare(single_bucket(B))
    sync.trainer.tell("send_zeros", group="g", nbytes=4 * SHAPES[DOWN][0] * SHAPES[DOWN][1])
    assert sync.complete(flush_cache=False).success
    details = stage.generate(prompt=prompt)["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == 0
    restore_first_weights(stage)


def test_repeated_syncs_leak_no_resources(replica, pool):
    trainer = pool.trainer()

    def run_sync(number):
        sync = Syncing(replica, trainer)
        sync.join()
        form = multi_bucket if number % 2 else single_bucket
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
        run_sync(number)
    before = used_resources()
    for number in range(10):
        run_sync(number)
    after = used_resources()
    # A leak in each sync would add ten. Threads of earlier tests may still open and close files.
    assert after["descriptors"] <= before["descriptors"] + 5
    assert after["threads"] <= before["threads"] + 1
    assert after["children"] <= before["children"] + 1
    assert after["resident_mib"] < before["resident_mib"] + 16
    assert replica.checksum() == checksum_of(weights_of(0) | expected_values(B))
    restore_first_weights(replica)


def used_resources():
    process = Path("/proc/self")
    pages = int((process / "statm").read_text().split()[1])
    return {
        "descriptors": len(os.listdir(process / "fd")),
        "threads": threading.active_count(),
        "children": sum(
            len(children.read_text().split()) for children in process.glob("task/*/children")
        ),
        "resident_mib": pages * resource.getpagesize() >> 20,
    }
