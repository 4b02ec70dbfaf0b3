"""Trainers and replicas that fail in the middle of a sync: it ends in time, nothing is mixed, and
the next sync succeeds at its first try with nothing restarted."""

import os
import signal
import socket

import httpx
import pytest
import trio

from tests.promises.sync_program import (
    COMPLETE,
    DESTROY,
    INIT,
    PREPARE,
    Traffic,
    fleet,
    init_body,
    tree,
)
from tests.promises.sync_trainer import Trainers, checksum

pytest.importorskip("torch")
pytest.importorskip("tiktoken")
pytest.importorskip("safetensors.torch")


@pytest.fixture(autouse=True)
async def soon():
    with trio.fail_after(60):
        yield


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with fleet(tmp_path_factory.mktemp("faults"), ("--tp", "2"), ()) as it:
        yield it


@pytest.fixture(scope="module")
def trainers():
    made = Trainers()
    yield made
    made.close()


@pytest.fixture
async def seen(running):
    async with running.client() as it:
        # What the test before has left uncertain is the next trainer's to mend.
        await it.until("/workers", lambda told: told["healthy_workers"] == 2)
        pids = running.proxy.pid, *(each.pid for each in running.replicas)
        yield it
        assert pids == (running.proxy.pid, *(each.pid for each in running.replicas))
        assert all(each.process.poll() is None for each in running.replicas)
        assert running.proxy.poll() is None


class Begun:
    """A sync up to its prepare, made by hand: what follows is the test's."""

    def __init__(self, seen, trainer, seed):
        self.seen, self.trainer, self.seed = seen, trainer, seed

    async def join(self):
        self.trainer.order("open", world=4)
        port = (await self.trainer.reply())["port"]
        status, told = await self.seen.post(INIT, **init_body(port, 4))
        assert (status, told["success"]) == (200, True), told
        assert await self.trainer.reply() == {"joined": True}
        return self

    async def prepare(self):
        self.buckets = (await self.trainer.tell("announce", seed=self.seed))["buckets"]
        return await self.seen.post(
            PREPARE, num_buckets=len(self.buckets), buckets=self.buckets, group_name="steps"
        )

    async def arm(self):
        await self.join()
        status, told = await self.prepare()
        assert (status, told["status"]) == (200, "ready"), told
        return self

    async def complete(self):
        return await self.seen.post(
            COMPLETE, group_name="steps", flush_cache=True, weight_version=f"v{self.seed}"
        )


async def plain_sync(seen, trainers, seed):
    """The next trainer, at its first try."""
    done = await trainers.one().tell("sync", url=seen.fleet.url, seed=seed, version=f"v{seed}")
    assert done["why"] == "", done
    await seen.ready()
    await holds(seen, seed)


async def routable_only_by_what_they_say(seen, seed):
    """Whoever may hold anything but the weights of `seed`, the last that were published, is out."""
    told = await seen.told("/workers")
    digests = await seen.digests()
    for each in told["workers"]:
        if each["routable"] or each["weight_version"] is not None:
            assert each["weight_version"] == f"v{seed}"
            assert digests[each["url"]] == checksum(seed)


async def holds(seen, seed):
    assert set((await seen.digests()).values()) == {checksum(seed)}
    assert {version for version, _ in (await seen.versions()).values()} == {f"v{seed}"}
    answer = await seen.chat()
    assert (answer.status_code, answer.headers["x-omni-weight-version"]) == (200, f"v{seed}")


async def test_one_replica_that_refuses_disarms_the_others_and_is_named(seen, trainers):
    await plain_sync(seen, trainers, 1)
    first, second = seen.fleet.replicas
    begun = await Begun(seen, trainers.one(), 2).join()
    # Armed behind the proxy's back, it can't be armed again.
    buckets = (await begun.trainer.tell("announce", seed=2))["buckets"]
    async with httpx.AsyncClient(base_url=second.url, timeout=20) as behind:
        body = {"num_buckets": len(buckets), "buckets": buckets, "group_name": "steps"}
        assert (await behind.post(PREPARE, json=body)).json()["success"]
    status, told = await begun.prepare()
    assert status in (400, 409, 502), told
    assert (told["success"], told["status"]) == (False, "error")
    assert second.url in told["message"]
    assert first.url not in told["message"]
    await seen.post(DESTROY, group_name="steps")
    begun.trainer.kill()
    await plain_sync(seen, trainers, 3)


async def test_a_trainer_that_dies_when_all_are_ready_is_replaced_by_the_next_one(seen, trainers):
    await plain_sync(seen, trainers, 4)
    begun = await Begun(seen, trainers.one(), 5).arm()
    begun.trainer.kill()
    await holds(seen, 4)
    await plain_sync(seen, trainers, 6)


async def test_a_trainer_that_dies_in_the_middle_of_a_bucket_leaves_the_old_weights_whole(
    seen, trainers
):
    await plain_sync(seen, trainers, 7)
    begun = await Begun(seen, trainers.one(), 8).arm()
    assert await begun.trainer.tell("send", seed=8, part="half") == {"sent": True}
    begun.trainer.kill()
    status, told = await begun.complete()
    assert (status >= 400, told["success"], told["status"]) == (True, False, "error"), told
    await seen.ready()
    await holds(seen, 7)
    await plain_sync(seen, trainers, 9)


async def test_a_trainer_that_stops_in_the_middle_is_given_up_while_chats_go_on(seen, trainers):
    await plain_sync(seen, trainers, 10)
    begun = await Begun(seen, trainers.one(), 11).arm()
    assert await begun.trainer.tell("send", seed=11, part="half") == {"sent": True}
    begun.trainer.signal(signal.SIGSTOP)
    traffic = Traffic(seen)
    async with traffic.going_on():
        status, told = await begun.complete()
        assert (status >= 400, told["success"]) == (True, False), told
    begun.trainer.kill()
    assert not traffic.failures()
    assert set(traffic.texts()) == {"v10"}
    await seen.ready()
    await holds(seen, 10)
    await plain_sync(seen, trainers, 12)


@pytest.mark.parametrize("part", ["long", "short"])
async def test_a_trainer_that_sends_other_bytes_than_it_announced_is_refused_and_kills_nobody(
    seen, trainers, part
):
    seed = {"long": 20, "short": 30}[part]
    await plain_sync(seen, trainers, seed)
    begun = await Begun(seen, trainers.one(), seed + 1).arm()
    begun.trainer.order("send", seed=seed + 1, part=part)
    status, told = await begun.complete()
    assert (status >= 400, told["success"], told["status"]) == (True, False, "error"), told
    begun.trainer.kill()
    await routable_only_by_what_they_say(seen, seed)
    await plain_sync(seen, trainers, seed + 2)


async def test_a_port_that_never_speaks_holds_nobody_for_ever(seen, trainers):
    await plain_sync(seen, trainers, 40)
    before = await processes_below(seen)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        status, told = await seen.post(INIT, **init_body(silent.getsockname()[1], 4))
    assert (status >= 400, told["success"]) == (True, False), told
    await seen.ready()
    with trio.fail_after(10):
        while await processes_below(seen) > before:
            await trio.sleep(0.05)
    await plain_sync(seen, trainers, 41)


async def processes_below(seen):
    return sum(len(tree(pid)) for pid in seen.fleet.processes())


@pytest.mark.parametrize(
    ("fault", "dies"),
    [
        ("die-before", True),
        ("die-during", True),
        ("die-after", True),
        ("wrong-shape", False),
        ("short-bucket", False),
        ("long-bucket", False),
        ("never-sends", False),
    ],
)
@pytest.mark.parametrize("form", ["two-phase", "single"])
async def test_after_every_fault_of_a_real_trainer_the_next_one_succeeds(
    seen, trainers, fault, dies, form
):
    await plain_sync(seen, trainers, 50)
    wishes = {"form": form, "group_name": "faulty", "timeout_secs": 15.0}
    trainer = trainers.one()
    done = await trainer.tell(
        "sync", url=seen.fleet.url, seed=51, version="v51", fault=fault, **wishes
    )
    assert done == {"gone": True} if dies else done["why"], done
    if dies:
        # As a trainer's supervisor does: the new one comes at once, and nobody said continue.
        await seen.post("/continue_generation")
    await routable_only_by_what_they_say(seen, 50)
    await plain_sync(seen, trainers, 52)


async def test_every_process_is_still_the_one_that_was_started(seen):
    for each in seen.fleet.replicas:
        os.kill(each.pid, 0)
