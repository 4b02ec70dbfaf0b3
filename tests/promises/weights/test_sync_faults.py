"""Trainers and replicas that fail during a sync: it ends in time, no weights are mixed, and the
next sync succeeds at once without a restart."""

import signal
import socket
from contextlib import AsyncExitStack

import httpx
import pytest
import trio

from tests.promises.support.process_resources import tree
from tests.promises.support.sync_program import DESTROY, INIT, PREPARE, init_body
from tests.promises.support.sync_steps import (
    ManualSync,
    assert_all_hold,
    assert_routable_only_with,
    label_of,
    run_failing_sync,
    run_sync,
    wait_disarmed,
    watch_for_early_changes,
)
from tests.promises.support.sync_traffic import Traffic

# Only these timeouts end such a sync.
WAITS_FOR = {"never-sends": "receive_timeout_secs", "wrong-port": "init_timeout_secs"}


@pytest.fixture(scope="module")
def running(fleets):
    return fleets.of("wide", "one")


@pytest.fixture
async def seen(seen, running, trainers):
    """A fleet with a trainer's version; checks afterwards that no process was restarted."""
    if not running.seed:
        await run_sync(seen, trainers)
    pids = running.processes()
    yield seen
    assert pids == running.processes()
    assert all(replica.process.poll() is None for replica in running.replicas)
    assert running.proxy.poll() is None


async def test_a_replica_that_refuses_is_named_and_the_others_are_disarmed(seen, trainers):
    first, second = seen.fleet.replicas
    sync = await ManualSync(seen, trainers.one()).join()
    # A replica that was armed without the proxy can't be armed again.
    body = await sync.announced()
    async with httpx.AsyncClient(
        base_url=second.url, timeout=20, trust_env=False, verify=False
    ) as replica_client:
        assert (await replica_client.post(PREPARE, json=body)).json()["success"]
    status, result = await seen.post(PREPARE, **body)
    assert status in (400, 409, 502), result
    assert (result["success"], result["status"]) == (False, "error")
    assert second.url in result["message"]
    assert first.url not in result["message"]
    await seen.post(DESTROY, group_name=sync.group)
    await wait_disarmed(seen)
    sync.trainer.kill()
    await run_sync(seen, trainers)


async def test_a_trainer_that_dies_after_arming_is_replaced_by_the_next_one(seen, trainers):
    sync = await ManualSync(seen, trainers.one()).arm()
    sync.trainer.kill()
    await wait_disarmed(seen)
    await assert_all_hold(seen, seen.fleet.seed)
    await run_sync(seen, trainers)


async def test_a_trainer_that_dies_within_a_bucket_leaves_the_old_weights_intact(seen, trainers):
    sync = await ManualSync(seen, trainers.one()).arm()
    await sync.send("half")
    sync.trainer.kill()
    assert await sync.refused()
    await wait_disarmed(seen)
    await seen.ready()
    await assert_all_hold(seen, seen.fleet.seed)
    await run_sync(seen, trainers)


async def test_a_stopped_trainer_times_out_while_chats_continue(seen, trainers):
    traffic, old = Traffic(seen), seen.fleet.seed
    async with seen.fleet.changed(seen, stall_timeout_secs=2):
        sync = await ManualSync(seen, trainers.one()).arm()
        await sync.send("half")
        sync.trainer.signal(signal.SIGSTOP)
        async with traffic.keep_asking():
            assert await sync.refused()
            await wait_disarmed(seen)
    sync.trainer.kill()
    assert not traffic.failures()
    assert set(traffic.texts()) == {label_of(old)}
    await seen.ready()
    await assert_all_hold(seen, old)
    await run_sync(seen, trainers)


@pytest.mark.parametrize("part", ["long", "short"])
async def test_a_bucket_of_the_wrong_length_is_rejected_and_kills_no_replica(seen, trainers, part):
    sync = await ManualSync(seen, trainers.one()).arm()
    sync.trainer.order("send", seed=sync.seed, part=part)
    assert await sync.refused()
    sync.trainer.kill()
    await assert_routable_only_with(seen, seen.fleet.seed)
    await run_sync(seen, trainers)


async def test_a_silent_port_times_out_and_leaves_no_process(seen, trainers):
    before = processes_below(seen)
    async with seen.fleet.changed(seen, init_timeout_secs=2):
        with socket.create_server(("127.0.0.1", 0)) as silent:
            status, body = await seen.post(INIT, **init_body(silent.getsockname()[1], 4))
        assert (status >= 400, body["success"]) == (True, False), body
        await wait_disarmed(seen)
    await seen.ready()
    with trio.fail_after(30):
        while processes_below(seen) > before:
            await trio.sleep(0.05)
    await run_sync(seen, trainers)


def processes_below(seen):
    return sum(len(tree(pid)) for pid in seen.fleet.processes())


@pytest.mark.parametrize(
    ("form", "fault"),
    [
        ("two-phase", "die-before"),
        ("single", "die-during"),
        ("two-phase", "die-after"),
        ("two-phase", "wrong-shape"),
        ("single", "wrong-shape"),
        ("buckets", "short-bucket"),
        ("single", "long-bucket"),
        ("two-phase", "never-sends"),
        ("two-phase", "wrong-port"),
    ],
)
async def test_after_every_fault_of_a_real_trainer_the_next_one_succeeds(
    seen, trainers, form, fault
):
    dies = fault.startswith("die")
    async with AsyncExitStack() as changed:
        if fault in WAITS_FOR:
            change = seen.fleet.changed(seen, **{WAITS_FOR[fault]: 2})
            await changed.enter_async_context(change)
        async with watch_for_early_changes(seen):
            done = await run_failing_sync(seen, trainers, fault, form=form, group_name="faulty")
            assert done == {"gone": True} if dies else done["why"], done
            if dies:
                # A trainer's supervisor does so before it starts the next one.
                await seen.post("/continue_generation")
    await assert_routable_only_with(seen, seen.fleet.seed)
    await run_sync(seen, trainers)
    assert (await seen.chat()).headers["x-omni-weight-version"] == label_of(seen.fleet.seed)
