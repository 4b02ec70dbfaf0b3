import msgspec
import pytest

from omni_proxy.config.parse import parse
from omni_proxy.config.schema import Config
from omni_proxy.dataplane.dataplane import DataPlane, Sources, random_below
from omni_proxy.fleet.registry import Fleet
from tests.fleet.entries import NOW, entry, fleet_of


def config_of(**server) -> Config:
    lines = "\n".join(
        f"{key} = {msgspec.json.encode(value).decode()}" for key, value in server.items()
    )
    return parse(f"[server]\nport = 0\n{lines}\n")


async def test_a_reload_while_draining_opens_no_listener(nursery, tmp_path):
    dataplane = DataPlane(
        Fleet(), config_of(), admin_socket=str(tmp_path / "admin"), sources=Sources(lambda _: 0)
    )
    await nursery.start(dataplane.run)
    dataplane.prepare(config_of())()
    assert len(dataplane.addresses()) == 1
    dataplane.begin_drain()
    dataplane.prepare(config_of(host="127.0.0.2"))()
    assert dataplane.addresses() == []
    assert dataplane.settings.config.server.host == "127.0.0.2"


async def test_the_policy_is_notified_of_removals_maintained_and_in_the_status(tmp_path):
    fleet = fleet_of(entry("a"), entry("b"))
    dataplane = DataPlane(
        fleet, config_of(), admin_socket=str(tmp_path / "admin"), sources=Sources(lambda _: 0)
    )
    calls = []

    class RecordingPolicy(type(dataplane.policy)):
        def forget_worker(self, worker):
            calls.append(worker.url)

        def maintain(self, now):
            calls.append(now)

        def stats(self):
            return {"picks": 7}

    dataplane.balancer.use_policy(RecordingPolicy())
    fleet.cache_cleared(fleet.workers[1])
    fleet.apply([entry("b")], NOW)
    dataplane._sweep()
    assert calls == ["http://b:1", "http://a:1", dataplane.loop.now]
    assert dataplane.status()["policy"] == {"name": "round_robin", "picks": 7}


async def test_only_a_change_of_the_policy_creates_a_new_one(tmp_path):
    dataplane = DataPlane(
        Fleet(), config_of(), admin_socket=str(tmp_path / "admin"), sources=Sources(lambda _: 0)
    )
    first = dataplane.policy
    dataplane.configure(config_of(queue_size=7))
    assert dataplane.policy is first
    dataplane.configure(parse('[routing]\npolicy = "random"'))
    assert dataplane.policy.name == "random"


SPECIAL = [({"role": "decode"}, True), ({"loras": ("a",)}, True), ({"ranks": 2}, False)]


@pytest.mark.parametrize(("fields", "expected"), SPECIAL, ids=str)
async def test_requests_are_special_while_some_worker_has_a_role_or_adapters(
    tmp_path, fields, expected
):
    fleet = fleet_of(entry("a"))
    dataplane = DataPlane(
        fleet, config_of(), admin_socket=str(tmp_path / "admin"), sources=Sources(lambda _: 0)
    )
    seen = [dataplane.balancer.always_special]
    for entries in ([entry("a"), entry("b", **fields)], [entry("a")]):
        fleet.apply(entries, NOW)
        seen.append(dataplane.balancer.always_special)
    assert seen == [False, expected, False]


@pytest.mark.parametrize("bound", [1, 2, 3, 5, 2**63, 2**191 - 1])
def test_a_random_number_is_below_its_bound(bound):
    drawn = {random_below(bound) for _ in range(200)}
    assert all(0 <= number < bound for number in drawn)
    assert len(drawn) >= min(bound, 100)


def test_a_bound_below_1_is_an_error():
    with pytest.raises(ValueError, match="below 1"):
        random_below(0)
