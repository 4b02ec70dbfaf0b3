"""Which workers a proxy cordons after its lease has ended, on a mock clock."""

from contextlib import asynccontextmanager
from datetime import UTC, datetime

import trio
from trio.testing import MockClock

from omni_proxy.cluster_member.lost_lease import CutOffHold
from omni_proxy.config.fields import CAPABILITIES
from omni_proxy.config.overlay import WorkerSpec
from omni_proxy.fleet.cordon_reasons import CUT_OFF
from omni_proxy.fleet.registry import Fleet

LEASE = 5.0


class Cluster:
    """A lease that was last renewed at `renewed_at`, and the versions that workers report."""

    def __init__(self, clock: MockClock) -> None:
        self.clock = clock
        self.fleet = Fleet()
        specs = [
            WorkerSpec(f"http://{name}:1", None, frozenset(CAPABILITIES), False, 1, 0, "file")
            for name in "ab"
        ]
        self.fleet.apply(specs, datetime.now(UTC))
        for worker in self.fleet.workers:
            self.fleet.set_version(worker, "v1", 1)
        self.labels: dict[str, str | None] = {worker.url: "v1" for worker in self.fleet.workers}
        self.renewed_at = 0.0
        self.weights_changed = self.trusts_workers = True

    def lease_left(self):
        return self.renewed_at + LEASE - trio.current_time() if self.weights_changed else None

    async def read(self, workers):
        await trio.lowlevel.checkpoint()
        return {worker: self.labels[worker.url] for worker in workers}

    def held(self):
        return [w.url for w in self.fleet.workers if CUT_OFF in w.cordon_reasons]


@asynccontextmanager
async def cut_off(clock):
    cluster = Cluster(clock)
    hold = cluster.hold = CutOffHold(
        cluster.fleet, cluster.lease_left, cluster.read, lambda: cluster.trusts_workers
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold.run, LEASE)
        yield cluster
        nursery.cancel_scope.cancel()


async def test_a_worker_that_reports_the_published_version_is_never_held(autojump_clock):
    async with cut_off(autojump_clock) as cluster:
        for _ in range(60):
            await trio.sleep(0.25)
            assert cluster.held() == []


async def test_a_worker_with_another_version_or_none_is_held_until_the_lease_returns(
    autojump_clock,
):
    async with cut_off(autojump_clock) as cluster:
        await trio.sleep(2)
        cluster.labels = {"http://a:1": "v2", "http://b:1": None}
        await trio.sleep(LEASE + 2)
        assert cluster.held() == ["http://a:1", "http://b:1"]
        cluster.labels["http://b:1"] = "v1"
        await trio.sleep(2)
        assert cluster.held() == ["http://a:1"]
        cluster.renewed_at = trio.current_time()
        await trio.sleep(1)
        assert cluster.held() == []


async def test_a_worker_whose_version_changes_while_the_proxy_is_cut_off_is_held(autojump_clock):
    async with cut_off(autojump_clock) as cluster:
        await trio.sleep(LEASE + 2)
        assert cluster.held() == []
        cluster.labels["http://a:1"] = "v2"
        await trio.sleep(3)
        assert cluster.held() == ["http://a:1"]


async def test_without_trust_all_workers_are_held_when_the_lease_ends(autojump_clock):
    async with cut_off(autojump_clock) as cluster:
        cluster.trusts_workers = False
        await trio.sleep(LEASE / 2)
        assert cluster.held() == []
        await trio.sleep(LEASE / 2)
        assert cluster.held() == ["http://a:1", "http://b:1"]
        cluster.renewed_at = trio.current_time()
        await trio.sleep(1)
        assert cluster.held() == []


async def test_no_worker_is_held_if_weights_were_never_changed(autojump_clock):
    async with cut_off(autojump_clock) as cluster:
        cluster.weights_changed = False
        cluster.labels = dict.fromkeys(cluster.labels)
        await trio.sleep(2 * LEASE)
        assert cluster.held() == []


async def test_a_version_published_by_another_proxy_releases_the_worker(autojump_clock):
    async with cut_off(autojump_clock) as cluster:
        await trio.sleep(2 * LEASE)
        first, second = cluster.fleet.workers
        cluster.labels[first.url] = "v2"
        await trio.sleep(3)
        assert cluster.held() == [first.url]
        cluster.fleet.set_version(first, "v2", 2)
        cluster.hold.note_versions()
        await trio.sleep(LEASE / 10)
        assert cluster.held() == []
        await trio.sleep(LEASE)
        assert cluster.held() == []
        assert second.weight_version.label == "v1"
