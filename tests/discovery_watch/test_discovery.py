"""How the fleet follows discovery sources: workers join and leave, locks, reloads."""

import pytest
import trio

from omni_proxy.config.configuration_flags import Startup
from omni_proxy.config.overlay import with_deleted, with_override
from omni_proxy.discovery_watch import discovery as module
from omni_proxy.discovery_watch.discovery import Discovery
from omni_proxy.fleet.cordon_reasons import DISCOVERY_CORDONS
from omni_proxy.fleet.registry import Fleet
from omni_proxy.runtime_config.config_store import ConfigStore
from omni_proxy.runtime_config.worker_drain import WorkerDrains
from tests.discovery_watch.api_server import pod
from tests.fleet.entries import heal

A, B = "http://10.0.0.1:30000", "http://10.0.0.2:30000"


@pytest.fixture(autouse=True)
def quick_clocks(monkeypatch):
    monkeypatch.setattr(module, "APPLY_PAUSE_SECS", 0)
    monkeypatch.setattr(module, "DRAIN_POLL_SECS", 0.005)


class Running:
    """A store, a fleet and the discovery of one configuration file."""

    def __init__(self, file, api, state_file="off"):
        self.file, self.api, self.state_file = file, api, state_file
        self.write()
        self.fleet = Fleet()
        self.store = ConfigStore(Startup(file, {}, (), ""), self.fleet)
        self.discovery = Discovery(self.fleet, self.store, lambda: 0.0)
        self.store.start()

    def write(self, *, named="", server="", tables=None):
        table = self.table() if tables is None else tables
        workers = "".join(f'[[workers]]\nurl = "{url}"\n' for url in named.split())
        self.file.write_text(
            f'[server]\nstate_file = "{self.state_file}"\n{server}\n{workers}{table}'
        )

    def table(self, name="pods", extra=""):
        return f'[[discover]]\nname = "{name}"\napi_server = "{self.api.url}"\nnamespace = "*"\n{extra}\n'

    async def reload(self, **changes):
        self.write(**changes)
        result = await self.store.reload("file")
        assert result.error is None, result.error

    @property
    def urls(self):
        return [worker.url for worker in self.fleet.workers]

    def open(self):
        """The URLs of workers that discovery does not cordon."""
        return [
            each.url for each in self.fleet.workers if not each.cordon_reasons & DISCOVERY_CORDONS
        ]

    async def until(self, holds):
        with trio.fail_after(20):
            while not holds():  # noqa: ASYNC110  other tasks watch
                await trio.sleep(0.002)

    async def until_open(self, *urls):
        await self.until(lambda: self.open() == list(urls))

    def worker(self, url=A):
        worker = self.fleet.find(url)
        assert worker is not None
        return worker


@pytest.fixture
async def running(tmp_path, api, nursery):
    proxy = Running(tmp_path / "proxy.toml", api)
    await nursery.start(proxy.discovery.run)
    return proxy


@pytest.fixture
async def two(running, api):
    api.put(pod("a", ip="10.0.0.1"))
    api.put(pod("b", ip="10.0.0.2"))
    await running.until_open(A, B)
    return running


async def test_a_found_worker_is_probed_before_it_gets_requests(two):
    worker = two.worker()
    assert (worker.origin, worker.routable) == ("discover", False)
    heal(two.fleet, worker)
    assert worker.routable


async def test_the_worker_of_a_pod_that_is_not_ready_stays_but_gets_no_requests(two, api):
    worker = two.worker()
    api.ready("uid-a", False)
    await two.until_open(B)
    assert (two.urls, two.discovery.reason(worker)) == ([A, B], "its pod is not ready")
    api.ready("uid-a", True)
    await two.until_open(A, B)
    assert (two.worker() is worker, two.discovery.reason(worker)) == (True, "")


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (lambda api: api.begin_deletion("uid-a"), "its pod is being deleted"),
        (lambda api: api.label("uid-a", app="other"), "its pod is gone"),
        (lambda api: api.delete("uid-a"), "its pod is gone"),
    ],
)
async def test_a_worker_leaves_when_its_last_request_has_ended(two, api, event, reason):
    worker = two.worker()
    worker.in_flight = 1
    event(api)
    await two.until_open(B)
    assert (two.urls, two.discovery.reason(worker)) == ([A, B], reason)
    worker.in_flight = 0
    await two.until(lambda: two.urls == [B])


async def test_a_leaving_worker_is_removed_after_the_drain_timeout(two, api):
    await two.reload(server="drain_timeout_secs = 0.05")
    worker = two.worker()
    worker.in_flight = 1
    api.delete("uid-a")
    await two.until(lambda: two.urls == [B])


async def test_a_pod_whose_label_is_changed_back_keeps_its_worker(two, api):
    worker = two.worker()
    worker.in_flight = 1
    api.label("uid-a", app="other")
    await two.until_open(B)
    api.label("uid-a", app="sglang")
    await two.until_open(A, B)
    worker.in_flight = 0
    await trio.testing.wait_all_tasks_blocked(0.02)
    assert two.worker() is worker


async def test_another_pod_at_the_same_address_is_another_worker(two, api):
    worker = two.worker()
    heal(two.fleet, worker)
    worker.in_flight = 1  # this request continues when the new worker has joined
    api.delete("uid-a")
    api.put(pod("a", "other", ip="10.0.0.1"))
    await two.until(lambda: two.worker() is not worker)
    assert (two.worker().discovered.uid, two.worker().routable) == ("other", False)
    assert two.worker().in_flight == 0
    await two.until_open(B, A)


async def test_a_cordon_waits_for_no_lock_but_joining_and_removal_do(two, api):
    async with two.store.operation_lock:
        api.delete("uid-a")
        api.put(pod("c", ip="10.0.0.3"))
        await two.until_open(B)
        await trio.testing.wait_all_tasks_blocked(0.02)
        assert two.urls == [A, B]
    await two.until(lambda: two.urls == [B, "http://10.0.0.3:30000"])


async def test_the_endpoints_stay_while_a_sync_holds_the_membership_lock(two, api):
    two.store.membership_lock.acquire(lambda: "a sync")
    api.delete("uid-a")
    await two.until_open(B)
    await trio.testing.wait_all_tasks_blocked(0.02)
    assert two.urls == [A, B]
    await two.store.release_membership()
    await two.until(lambda: two.urls == [B])


async def test_a_configured_worker_is_never_changed_by_discovery(running, api):
    await running.reload(named=A)
    worker = running.worker()
    api.put(pod("a", ip="10.0.0.1"))
    api.put(pod("b", ip="10.0.0.2"))
    await running.until(lambda: B in running.urls)
    api.begin_deletion("uid-a")
    api.delete("uid-b")
    await running.until(lambda: running.urls == [A])
    assert (running.worker() is worker, worker.origin, worker.cordon_reasons) == (
        True,
        "file",
        set(),
    )


async def test_a_found_worker_that_is_configured_later_is_a_configured_worker(two, api):
    worker = two.worker()
    api.ready("uid-a", False)
    await two.until_open(B)
    await two.reload(named=A)
    assert (two.worker() is worker, worker.origin, worker.discovered) == (True, "file", None)
    assert worker.cordon_reasons == set()
    api.delete("uid-a")
    api.delete("uid-b")
    await two.until(lambda: two.urls == [A])
    await two.reload()
    assert two.urls == []


async def test_a_table_that_is_added_or_removed_takes_effect_at_once(two, api):
    api.put(pod("c", ip="10.0.0.3", labels={"app": "vllm"}))
    both = two.table() + two.table("more", 'selector = "app=vllm"')
    await two.reload(tables=both)
    await two.until_open(A, B, "http://10.0.0.3:30000")
    await two.reload(tables=two.table("more", 'selector = "app=vllm"'))
    assert two.urls == ["http://10.0.0.3:30000"]
    await two.until(lambda: api.watches == 1)
    await two.reload(tables="")
    assert (two.urls, two.discovery.reports()) == ([], [])


async def test_a_changed_table_keeps_the_workers_that_it_still_finds(two, api):
    worker = two.worker()
    api.label("uid-b", tier="x")
    await two.reload(tables=two.table(extra='selector = "app=sglang,tier!=x"\nmodel = "m"'))
    await two.until_open(A)
    await two.until(lambda: worker.model == "m")
    await two.until(lambda: two.urls == [A])
    assert two.worker() is worker


async def test_two_tables_can_find_the_same_pod(two, api):
    worker = two.worker()
    await two.reload(tables=two.table() + two.table("more", 'selector = "tier=x"'))
    api.label("uid-a", tier="x")
    await two.until(lambda: len(list(two.discovery.reports())) == 2)
    await two.until(lambda: two.discovery.reports()[1].workers["open"] == 1)
    assert worker.discovered.source == "pods"
    api.label("uid-a", app="other")
    await two.until(lambda: worker.discovered.source == "more")
    await two.until(lambda: A in two.open())
    assert two.worker() is worker


async def test_settings_by_an_operator_last_as_long_as_the_pod(two, api):
    await two.store.change(lambda state, _: with_override(state, A, disabled=True, weight=3))
    api.ready("uid-a", False)
    await two.until_open(B)
    api.ready("uid-a", True)
    await two.until_open(A, B)
    assert (two.worker().disabled, two.worker().weight) == (True, 3)
    api.label("uid-a", app="other")
    await two.until(lambda: two.urls == [B])
    api.label("uid-a", app="sglang")
    await two.until(lambda: A in two.urls)
    assert two.worker().disabled
    api.delete("uid-a")
    api.put(pod("a", "other", ip="10.0.0.1"))
    await two.until(lambda: A in two.urls and two.worker().discovered.uid == "other")
    assert (two.worker().disabled, two.store.state.switches) == (False, {})


async def test_a_worker_that_was_deleted_over_http_does_not_rejoin_with_the_same_pod(two, api):
    await two.store.change(lambda state, config: with_deleted(state, config, A))
    assert two.urls == [B]
    api.ready("uid-a", False)
    api.ready("uid-a", True)
    api.put(pod("c", ip="10.0.0.3"))
    await two.until(lambda: len(two.urls) == 2)
    assert A not in two.urls
    api.delete("uid-a")
    api.put(pod("a", "other", ip="10.0.0.1"))
    await two.until(lambda: A in two.urls)


async def test_a_large_fleet_joins_in_steps(running, api, monkeypatch):
    monkeypatch.setattr(module, "MAX_NEW", 4)
    steps = []
    running.fleet.watch_members(lambda: steps.append(len(running.urls)))
    for number in range(10):
        api.put(pod(f"p{number}", ip=f"10.0.1.{number}"))
    await running.until(lambda: len(running.urls) == 10)
    await running.until(lambda: running.discovery.reports()[0].workers["open"] == 10)
    assert all(after - before <= 4 for before, after in zip([0, *steps], steps, strict=False))


async def test_workers_without_a_model_name_among_others_with_one_are_logged(two, api, caplog):
    assert "workers_without_model" not in caplog.text
    api.put(pod("c", ip="10.0.0.3", annotations={"omni-proxy.dev/model": "m"}))
    await two.until(lambda: len(two.urls) == 3)
    assert f"workers_without_model workers=2 first={A}" in caplog.text
    caplog.clear()
    api.put(pod("d", ip="10.0.0.4", annotations={"omni-proxy.dev/model": "m"}))
    await two.until(lambda: len(two.urls) == 4)
    assert "workers_without_model" not in caplog.text


async def test_an_unfinished_removal_continues_after_a_restart(tmp_path, api, nursery):
    (tmp_path / "proxy.state.toml").write_text(
        f'leaving = ["{A}"]\n[switches."{A}"]\ndisabled = true\nfound = "uid-a"\n'
    )
    api.put(pod("a", ip="10.0.0.1"))
    running = Running(tmp_path / "proxy.toml", api, state_file="auto")
    drains = WorkerDrains(running.fleet, running.store)
    await nursery.start(drains.run)
    await nursery.start(running.discovery.run)
    await running.until(lambda: running.store.state.tombstones == {A: "found:uid-a"})
    assert (running.urls, running.store.state.leaving) == ([], ())


async def test_operations_on_all_workers_exclude_leaving_workers(two, api):
    worker = two.worker()
    worker.in_flight = 1
    api.ready("uid-a", False)
    await two.until_open(B)
    assert [each.url for each in two.fleet.live_workers] == [A, B]
    api.begin_deletion("uid-a")
    await two.until(lambda: [each.url for each in two.fleet.live_workers] == [B])
    assert worker.cordon_reasons == {"leaving"}
    worker.in_flight = 0
    await two.until(lambda: two.urls == [B])
