"""Steps shared by tests of syncs: a whole sync, single steps, and assertions afterwards.

Each sync has its own seed, which determines its label and its weights.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from itertools import count

import httpx
import trio

from tests.promises.support.fleet_program import POLL_SECS
from tests.promises.support.sync_program import (
    BASE,
    COMPLETE,
    DESTROY,
    INIT,
    PATIENCE_SECS,
    PREPARE,
    init_body,
)
from tests.promises.support.sync_trainer import expected_checksum

BUCKET_BYTES = 1 << 20
# Much longer than the detection of a closed connection, and much shorter than the timeouts of FILE.
NOTICED_SECS = 30
MEND_SECS = 20
# Between two checks of all tensors: each takes tens of milliseconds of CPU time, and a sync a few
# tenths of a second.
LOOK_SECS = 0.2
_seeds = count(1)


def label_of(seed):
    return f"v{seed}" if seed else BASE


async def run_sync(seen, trainers, **options):
    """Runs a trainer's whole sync, which must succeed; returns its report."""
    seed = next(_seeds)
    options = {"bucket_bytes": BUCKET_BYTES, **options}
    done = await trainers.one().tell(
        "sync", url=seen.fleet.url, seed=seed, version=label_of(seed), **options
    )
    assert done.get("why") == "", (done, seen.fleet.log()[-3000:])
    seen.fleet.seed = seed
    await seen.ready()
    await assert_all_hold(seen, seed)
    return done


async def run_failing_sync(seen, trainers, fault, **options):
    """Runs a sync with a fault; no worker may ever have its weights."""
    options = {"bucket_bytes": BUCKET_BYTES, "timeout_secs": 15.0, **options}
    return await trainers.one().tell(
        "sync", url=seen.fleet.url, seed=next(_seeds), version="never", fault=fault, **options
    )


async def assert_all_hold(seen, seed):
    """Checks that all workers have and report this seed's weights; returns a response's epoch."""
    digests, versions = await seen.digests(), await seen.versions()
    state = digests, versions, seen.fleet.log()[-3000:]
    assert set(digests.values()) == {expected_checksum(seed)}, state
    assert {version for version, _ in versions.values()} == {label_of(seed)}, state
    assert len({epoch for _, epoch in versions.values()}) == 1
    answer = await seen.chat()
    labelled = answer.status_code, answer.headers.get("x-omni-weight-version")
    assert labelled == (200, label_of(seed)), answer.text
    return int(answer.headers.get("x-omni-weight-epoch", 0))


async def assert_routable_only_with(seen, seed):
    """Checks that no worker with other weights than those of `seed`, the last published, is in
    rotation."""
    body = await seen.get_json("/workers")
    digests = await seen.digests()
    for worker in body["workers"]:
        if worker["routable"] or worker["weight_version"] is not None:
            assert worker["weight_version"] == label_of(seed)
            assert digests[worker["url"]] == expected_checksum(seed)


@asynccontextmanager
async def watch_for_early_changes(seen):
    """Checks repeatedly that only the previous weights are reported and routed to."""
    seed, looks, enough = seen.fleet.seed, 0, False

    async def look():
        nonlocal looks
        while not enough:
            before = await seen.get_json("/workers")
            digests = await seen.digests()
            after = {each["url"]: each for each in (await seen.get_json("/workers"))["workers"]}
            for each in before["workers"]:
                # A worker that left rotation in between may have begun to change.
                if each["routable"] and after[each["url"]]["routable"]:
                    assert each["weight_version"] == label_of(seed), each
                    assert digests[each["url"]] == expected_checksum(seed), each
            looks += 1
            await trio.sleep(LOOK_SECS)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        yield
        before = looks
        while looks < before + 2:
            await trio.sleep(POLL_SECS)
        enough = (
            True  # a cancelled request would leave a generator of httpx to the garbage collector
        )


async def repaired_fleet(seen, trainers):
    """Repairs what a failed test left, until the fleet waits for a trainer."""
    await seen.until("/live", lambda body: True)
    with trio.move_on_after(MEND_SECS):
        await seen.whole()
        return
    for replica in seen.fleet.replicas:
        if replica.process.poll() is not None:
            replica.start()
    await seen.client.post("/continue_generation", json={})
    await run_sync(seen, trainers)
    await seen.whole()


async def wait_disarmed(seen):
    """Waits until the proxy has no sync, and no replica waits for bytes."""
    with trio.fail_after(NOTICED_SECS):
        await seen.until("/weights", lambda body: body["sync"]["state"] == "idle")
        for replica in seen.fleet.replicas:
            async with httpx.AsyncClient(
                base_url=replica.url, trust_env=False, verify=False
            ) as client:
                while (await client.get("/server_info")).json()["weight_sync"]["groups"]:
                    await trio.sleep(POLL_SECS)


class ManualSync:
    """A sync whose steps the test runs."""

    def __init__(self, seen, trainer, *, world=4, group="steps"):
        self.seen, self.trainer = seen, trainer
        self.world, self.group = world, group
        self.seed = next(_seeds)
        self.port = 0

    def next(self):
        """Switches to other weights in the same group."""
        self.seed = next(_seeds)

    async def ask_to_join(self, **more):
        self.trainer.order("open", world=self.world, group=self.group)
        self.port = (await self.trainer.reply())["port"]
        return await self.seen.post(INIT, **init_body(self.port, self.world, self.group) | more)

    async def join(self, **more):
        status, self.joined = await self.ask_to_join(**more)
        assert (status, self.joined["success"]) == (200, True), self.joined
        assert await self.trainer.reply() == {"joined": True}
        return self

    async def announced(self):
        """Returns the body of the prepare call."""
        body = await self.trainer.tell("announce", seed=self.seed, bucket_bytes=BUCKET_BYTES)
        buckets = body["buckets"]
        return {"num_buckets": len(buckets), "buckets": buckets, "group_name": self.group}

    async def prepare(self):
        return await self.seen.post(PREPARE, **await self.announced())

    async def arm(self):
        await self.join()
        status, body = await self.prepare()
        assert (status, body["status"], body["success"]) == (200, "ready", True), body
        return self

    async def send(self, part="all"):
        reply = await self.trainer.tell(
            "send", seed=self.seed, part=part, group=self.group, bucket_bytes=BUCKET_BYTES
        )
        assert reply == {"sent": True}
        return self

    @property
    def ending(self):
        return {
            "group_name": self.group,
            "flush_cache": True,
            "weight_version": label_of(self.seed),
        }

    async def complete(self):
        return await self.seen.post(COMPLETE, **self.ending)

    async def refused(self):
        """Completes the sync, which must fail; returns the message."""
        status, body = await self.complete()
        assert (status >= 400, body["success"], body["status"]) == (True, False, "error"), body
        return body["message"]

    async def completed(self):
        status, body = await self.complete()
        assert (status, body["success"]) == (200, True), body
        self.seen.fleet.seed = self.seed
        return body

    async def end(self, *, good=True):
        """Ends the sync. `good`: no member has left the group yet."""
        status, body = await self.seen.post(DESTROY, group_name=self.group)
        assert status == 200 or not good, body
        await self.trainer.tell("leave", group=self.group)


async def wait_received(seen, count):
    """Waits until every replica has received all announced buckets."""
    with trio.fail_after(PATIENCE_SECS):
        for replica in seen.fleet.replicas:
            async with httpx.AsyncClient(
                base_url=replica.url, trust_env=False, verify=False
            ) as client:
                while (await client.get("/server_info")).json()["weight_sync"][
                    "buckets_done"
                ] < count:
                    await trio.sleep(POLL_SECS)
