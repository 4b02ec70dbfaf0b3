"""What tests of syncs do again and again: a whole one, one step by step, and what must hold then.

Each sync has a seed of its own, which names its label and every byte of its weights.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from itertools import count

import httpx
import trio

from tests.promises.sync_program import (
    BASE,
    COMPLETE,
    DESTROY,
    INIT,
    PATIENCE_SECS,
    PREPARE,
    init_body,
)
from tests.promises.sync_trainer import checksum

BUCKET_BYTES = 1 << 20
# Much longer than a closed connection takes to be noticed, much shorter than any deadline of FILE.
NOTICED_SECS = 30
MEND_SECS = 20
_seeds = count(1)


def label(seed):
    return f"v{seed}" if seed else BASE


async def sync(seen, trainers, **wishes):
    """A trainer's whole sync, good at its first try; what it told."""
    seed = next(_seeds)
    wishes = {"bucket_bytes": BUCKET_BYTES, **wishes}
    done = await trainers.one().tell(
        "sync", url=seen.fleet.url, seed=seed, version=label(seed), **wishes
    )
    assert done.get("why") == "", (done, seen.fleet.log()[-3000:])
    seen.fleet.seed = seed
    await seen.ready()
    await holds(seen, seed)
    return done


async def failing(seen, trainers, fault, **wishes):
    """What came of a sync with that fault; nobody may ever have its weights."""
    wishes = {"bucket_bytes": BUCKET_BYTES, "timeout_secs": 15.0, **wishes}
    return await trainers.one().tell(
        "sync", url=seen.fleet.url, seed=next(_seeds), version="never", fault=fault, **wishes
    )


async def holds(seen, seed):
    """Everybody has the weights of this seed and says so; the epoch on an answer."""
    digests, versions = await seen.digests(), await seen.versions()
    told = digests, versions, seen.fleet.log()[-3000:]
    assert set(digests.values()) == {checksum(seed)}, told
    assert {version for version, _ in versions.values()} == {label(seed)}, told
    assert len({epoch for _, epoch in versions.values()}) == 1
    answer = await seen.chat()
    told = answer.status_code, answer.headers.get("x-omni-weight-version")
    assert told == (200, label(seed)), answer.text
    return int(answer.headers.get("x-omni-weight-epoch", 0))


async def routable_only_by_what_they_say(seen, seed):
    """Whoever may hold anything but the weights of `seed`, the last that were published, is out."""
    told = await seen.told("/workers")
    digests = await seen.digests()
    for each in told["workers"]:
        if each["routable"] or each["weight_version"] is not None:
            assert each["weight_version"] == label(seed)
            assert digests[each["url"]] == checksum(seed)


@asynccontextmanager
async def witnessed(seen):
    """Meanwhile nothing but the weights of before is told or routed to, however often one looks."""
    seed, looks, enough = seen.fleet.seed, 0, False

    async def look():
        nonlocal looks
        while not enough:
            before = await seen.told("/workers")
            digests = await seen.digests()
            after = {each["url"]: each for each in (await seen.told("/workers"))["workers"]}
            for each in before["workers"]:
                # Who left routing in between may have begun to change.
                if each["routable"] and after[each["url"]]["routable"]:
                    assert each["weight_version"] == label(seed), each
                    assert digests[each["url"]] == checksum(seed), each
            looks += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        yield
        already = looks
        while looks < already + 2:
            await trio.sleep(0.02)
        enough = True  # a request that is cancelled leaves a generator of httpx to the collector


async def whole(seen, trainers):
    """A fleet that waits for a trainer: what a test that failed has left is mended here."""
    await seen.until("/live", lambda told: True)
    with trio.move_on_after(MEND_SECS):
        await seen.whole()
        return
    for each in seen.fleet.replicas:
        if each.process.poll() is not None:
            each.start()
    await seen.client.post("/continue_generation", json={})
    await sync(seen, trainers)
    await seen.whole()


async def disarmed(seen):
    """Until the proxy has no sync any more, and no replica waits for bytes."""
    with trio.fail_after(NOTICED_SECS):
        await seen.until("/weights", lambda told: told["sync"]["state"] == "idle")
        for each in seen.fleet.replicas:
            async with httpx.AsyncClient(
                base_url=each.url, trust_env=False, verify=False
            ) as client:
                while (await client.get("/server_info")).json()["weight_sync"]["groups"]:
                    await trio.sleep(0.02)


class Begun:
    """A sync by hand: whatever goes otherwise than in a whole one is the test's."""

    def __init__(self, seen, trainer, *, world=4, group="steps"):
        self.seen, self.trainer = seen, trainer
        self.world, self.group = world, group
        self.seed = next(_seeds)
        self.port = 0

    def next(self):
        """Other weights, in the same group."""
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
        """The body of its prepare."""
        told = await self.trainer.tell("announce", seed=self.seed, bucket_bytes=BUCKET_BYTES)
        buckets = told["buckets"]
        return {"num_buckets": len(buckets), "buckets": buckets, "group_name": self.group}

    async def prepare(self):
        return await self.seen.post(PREPARE, **await self.announced())

    async def arm(self):
        await self.join()
        status, told = await self.prepare()
        assert (status, told["status"], told["success"]) == (200, "ready", True), told
        return self

    async def send(self, part="all"):
        told = await self.trainer.tell(
            "send", seed=self.seed, part=part, group=self.group, bucket_bytes=BUCKET_BYTES
        )
        assert told == {"sent": True}
        return self

    @property
    def ending(self):
        return {
            "group_name": self.group,
            "flush_cache": True,
            "weight_version": label(self.seed),
        }

    async def complete(self):
        return await self.seen.post(COMPLETE, **self.ending)

    async def refused(self):
        """Complete is: what it says."""
        status, told = await self.complete()
        assert (status >= 400, told["success"], told["status"]) == (True, False, "error"), told
        return told["message"]

    async def completed(self):
        status, told = await self.complete()
        assert (status, told["success"]) == (200, True), told
        self.seen.fleet.seed = self.seed
        return told

    async def end(self, *, good=True):
        """`good`: nobody has left the group already."""
        status, told = await self.seen.post(DESTROY, group_name=self.group)
        assert status == 200 or not good, told
        await self.trainer.tell("leave", group=self.group)


async def received(seen, count):
    """Until every replica has all buckets of what was announced."""
    with trio.fail_after(PATIENCE_SECS):
        for each in seen.fleet.replicas:
            async with httpx.AsyncClient(
                base_url=each.url, trust_env=False, verify=False
            ) as client:
                while (await client.get("/server_info")).json()["weight_sync"][
                    "buckets_done"
                ] < count:
                    await trio.sleep(0.02)
