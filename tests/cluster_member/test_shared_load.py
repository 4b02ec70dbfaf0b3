"""The load of other proxies at workers of this proxy's fleet, without a store."""

from unittest.mock import MagicMock

import pytest
import trio

from omni_proxy.cluster.messages import CountsMessage, encode, target_key
from omni_proxy.cluster_member.member import ClusterMember
from omni_proxy.cluster_member.shared_load import SharedLoad
from omni_proxy.config.configuration_flags import Startup
from omni_proxy.config.tables.cluster import ClusterConfig
from omni_proxy.multiprocess.shared_memory.worker_counters import packed_offset, unpacked_offset
from omni_proxy.runtime_config.config_store import ConfigStore
from tests.fleet.entries import NOW, entry, fleet_of

TABLE = ClusterConfig()


class View:
    """The requests of this proxy: none. `shared`: the last published state by target."""

    can_wait = True
    load = (0, 0)

    def __init__(self):
        self.shared = {}

    def share(self, target):
        self.shared[target.url] = (target.inflight_bound, target.load_offset)

    def recount(self):
        pass

    def set_peer_in_flight(self, total):
        pass

    def follow_cluster(self, *, member):
        pass

    def room_made(self):
        pass


@pytest.fixture
def view():
    return View()


@pytest.fixture
def fleet():
    return fleet_of(entry("a", max_inflight=8))


@pytest.fixture
def load(fleet, view):
    return SharedLoad(fleet, view, "own")


def counts(**in_flight):
    """A message of another proxy with its requests, by the names of workers."""
    by_target = {target_key(f"http://{name}:1"): count for name, count in in_flight.items()}
    return CountsMessage("other", 1, True, sum(in_flight.values()), False, by_target)


def picked_load(target):
    """The load that policies use."""
    return target.in_flight + target.load_offset


@pytest.mark.parametrize("new", ["b", "a"], ids=["another", "replaced"])
def test_a_new_worker_has_the_known_load_of_other_proxies_at_once(load, fleet, view, new):
    load.take(counts(**{new: 20}), 0.0)
    for _ in range(200):
        load.smooth(TABLE)
    fleet.apply([], NOW)
    load.follow_fleet()
    fleet.apply([entry(new)], NOW)
    load.follow_fleet()
    worker = fleet.find(f"http://{new}:1")
    assert (worker.in_flight, picked_load(worker)) == (20, 20.0)
    assert view.shared[worker.url] == (0, 0.0)


def test_a_new_worker_is_as_loaded_for_policies_as_after_the_next_message(load, fleet, view):
    load.take(counts(a=20, b=20), 0.0)
    fleet.apply([entry("a"), entry("b")], NOW)
    load.follow_fleet()
    a, b = fleet.workers
    assert (b.in_flight, b.load_offset) == (20, a.load_offset)
    assert b.load_offset < 0  # policies get the change gradually
    assert view.shared[b.url] == (0, b.load_offset)
    load.smooth(TABLE)
    assert picked_load(a) == picked_load(b)


def test_without_a_difference_the_offset_is_an_integer(load, fleet):
    """CPython adds two integers faster than an integer and a float."""
    (worker,) = fleet.workers
    offsets = [worker.load_offset]
    load.take(counts(a=2), 0.0)
    assert worker.load_offset < 0
    for _ in range(200):
        load.smooth(TABLE)
    offsets.append(worker.load_offset)
    load.forget()
    offsets += [worker.load_offset, unpacked_offset(packed_offset(0))]
    assert (offsets, set(map(type, offsets))) == ([0] * 4, {int})


def test_new_ranks_of_a_worker_have_the_known_load_at_once():
    fleet, view = fleet_of(entry("a", ranks="auto")), View()
    load = SharedLoad(fleet, view, "own")
    (worker,) = fleet.workers
    rank = f"{worker.url}@1"
    load.take(CountsMessage("other", 1, True, 20, False, {target_key(rank): 20}), 0.0)
    for _ in range(200):
        load.smooth(TABLE)
    fleet.report_ranks(worker, 2)
    load.follow_worker(worker)
    assert [picked_load(each) for each in worker.dp_ranks] == [0, 20.0]
    assert rank in view.shared


def test_a_removed_worker_is_not_followed(load, fleet):
    (worker,) = fleet.workers
    fleet.apply([], NOW)
    load.follow_fleet()
    load.follow_worker(worker)
    load.take(counts(a=20), 0.0)
    assert worker.in_flight == 0


@pytest.mark.parametrize(("bound", "limit"), [(0, 0), (2, 2), (6, 5), (16, 12)])
def test_a_changed_bound_is_shared_at_once(load, fleet, view, bound, limit):
    """Half of the slots, and of the others every second one."""
    load.take(counts(a=0), 0.0)
    load.share_bounds(0.0, 0.0, TABLE)
    (worker,) = fleet.workers
    assert (worker.inflight_bound, view.shared[worker.url][0]) == (6, 6)
    fleet.apply([entry("a", max_inflight=bound)], NOW)
    load.follow_fleet()
    assert (worker.inflight_bound, view.shared[worker.url][0]) == (limit, limit)


async def test_the_member_follows_the_fleet_before_waiting_requests_are_served(tmp_path):
    file = tmp_path / "proxy.toml"
    file.write_text("[cluster]\nurl = 'redis://127.0.0.1:1'\nshare = ['health']\n")
    fleet = fleet_of(entry("a", ranks="auto"))
    config_store = ConfigStore(Startup(file, {}, (), ""), fleet)
    seen = {}
    fleet.watch_members(lambda: seen.update({w.url: w.in_flight for w in fleet.workers}))
    fleet.watch_worker(lambda w: seen.update({rank.url: rank.in_flight for rank in w.dp_ranks}))
    services, views = (MagicMock(), MagicMock(), MagicMock()), (View(), MagicMock())
    member = ClusterMember(fleet, config_store, services, views, lambda: "own")
    async with trio.open_nursery() as nursery:
        await nursery.start(member.run)
        await trio.testing.wait_all_tasks_blocked()
        keys = {target_key("http://b:1"): 3, target_key("http://a:1@1"): 2}
        member._on_message(b"", encode(CountsMessage("other", 1, True, 5, False, keys)))
        fleet.apply([entry("a", ranks="auto"), entry("b")], NOW)
        fleet.report_ranks(fleet.workers[0], 2)
        nursery.cancel_scope.cancel()
    assert seen == {"http://a:1": 0, "http://b:1": 3, "http://a:1@0": 0, "http://a:1@1": 2}
