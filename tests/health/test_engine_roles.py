import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from omni_proxy.fleet.cordon_reasons import ROLE_CORDON
from omni_proxy.health.engine_pages import MAX_RETRY_SECS, EnginePages
from omni_proxy.health.engine_readers import EngineRoles, bootstrap_port_of_info, role_of_info
from omni_proxy.upstream_http.client import CallResult
from tests.fleet.entries import NOW, entry, fleet_of, heal


def result_of(body, status=200, error=""):
    return CallResult(None, status, body, error, 0.0)


@pytest.mark.parametrize(
    ("body", "role"),
    [
        (b'{"disaggregation_mode": "prefill"}', "prefill"),
        (b'{"disaggregation_mode": "decode"}', "decode"),
        (b'{"disaggregation_mode": "null"}', ""),
        (b'{"disaggregation_mode": null}', ""),
        (b'{"disaggregation_mode": ["prefill"]}', ""),
        (b"{}", ""),
        (b"[]", ""),
        (b"no json", ""),
    ],
)
def test_the_role_is_the_disaggregation_mode_of_sglang(body, role):
    assert role_of_info(result_of(body)) == role


@pytest.mark.parametrize(
    ("value", "port"),
    [
        (b"9001", 9001),
        (b"null", None),
        (b"0", None),
        (b"65536", None),
        (b"true", None),
        (b'"1"', None),
    ],
)
def test_an_invalid_bootstrap_port_is_none(value, port):
    body = b'{"disaggregation_bootstrap_port": %b}' % value
    assert bootstrap_port_of_info(result_of(body)) == port


class Engine:
    """A fake engine: `replies` by path; `calls`: worker and path of each; `gate` delays replies."""

    def __init__(self):
        self.replies = {"/server_info": (200, b'{"disaggregation_mode": "prefill"}')}
        self.calls = []
        self.gate = trio.Event()
        self.gate.set()

    async def call(self, worker, call):
        path = call.target.partition("?")[0]
        self.calls.append((worker.display_id, path))
        await self.gate.wait()
        reply = self.replies.get(path, (404, b""))
        if reply is None:
            return result_of(b"", status=None, error="ConnectError")
        return result_of(reply[1], status=reply[0])


@pytest.fixture
def engine():
    return Engine()


async def start_reader(nursery, engine, *entries):
    fleet = fleet_of(*entries, healthy=False)
    await nursery.start(EnginePages(fleet, [EngineRoles(fleet)], engine.call).run)
    return fleet, fleet.workers


async def test_the_role_is_read_when_a_worker_without_one_becomes_healthy(nursery, engine):
    fleet, (a, b) = await start_reader(nursery, engine, entry("a"), entry("b", role="decode"))
    await wait_all_tasks_blocked()
    assert engine.calls == []
    heal(fleet, a)
    heal(fleet, b)
    await wait_all_tasks_blocked()
    assert engine.calls == [("a:1", "/server_info")]
    assert (a.role, b.role, a.routable) == ("prefill", "decode", True)


async def test_the_role_of_an_older_engine_is_read_by_the_old_path(nursery, engine):
    engine.replies = {"/get_server_info": (200, b'{"disaggregation_mode": "decode"}')}
    fleet, (a,) = await start_reader(nursery, engine, entry("a"))
    heal(fleet, a)
    await wait_all_tasks_blocked()
    assert a.role == "decode"


async def test_an_engine_without_the_route_is_regular_and_called_once(nursery, engine):
    engine.replies = {}
    fleet, (a,) = await start_reader(nursery, engine, entry("a"))
    heal(fleet, a)
    await wait_all_tasks_blocked()
    assert (a.role, a.routable, len(engine.calls)) == ("regular", True, 2)


async def test_the_role_is_read_again_after_a_restart(nursery, engine):
    fleet, (a,) = await start_reader(nursery, engine, entry("a"))
    heal(fleet, a)
    await wait_all_tasks_blocked()
    engine.replies["/server_info"] = (200, b"{}")
    fleet.cache_cleared(a)
    await wait_all_tasks_blocked()
    assert a.role == "regular"


async def test_with_pools_a_worker_is_not_routable_until_its_role_is_known(nursery, engine):
    fleet, (a, _d) = await start_reader(nursery, engine, entry("a"), entry("d", role="decode"))
    engine.gate = trio.Event()
    heal(fleet, a)
    await wait_all_tasks_blocked()
    assert (a.cordon_reasons, a.routable) == ({ROLE_CORDON}, False)
    engine.gate.set()
    await wait_all_tasks_blocked()
    assert (a.cordon_reasons, a.routable, a.role) == (set(), True, "prefill")


async def test_without_pools_a_worker_is_routable_at_once(nursery, engine):
    fleet, (a,) = await start_reader(nursery, engine, entry("a"))
    engine.gate = trio.Event()
    heal(fleet, a)
    await wait_all_tasks_blocked()
    assert a.routable


async def test_an_unreachable_engine_is_regular_and_called_again(
    nursery, engine, autojump_clock: MockClock
):
    engine.replies["/server_info"] = None
    fleet, (a, _d) = await start_reader(nursery, engine, entry("a"), entry("d", role="decode"))
    heal(fleet, a)
    await trio.sleep(0.5)
    assert (a.role, a.routable) == ("regular", True)
    engine.replies["/server_info"] = (200, b'{"disaggregation_mode": "prefill"}')
    await trio.sleep(MAX_RETRY_SECS)
    assert a.role == "prefill"


async def test_a_role_that_is_configured_during_the_call_has_precedence(nursery, engine):
    fleet, (a,) = await start_reader(nursery, engine, entry("a"))
    engine.gate = trio.Event()
    heal(fleet, a)
    await wait_all_tasks_blocked()
    fleet.apply([entry("a", role="regular")], NOW)
    engine.gate.set()
    await wait_all_tasks_blocked()
    assert (a.role, a.reported_role) == ("regular", "")


async def test_the_role_of_a_removed_worker_is_dropped(nursery, engine):
    fleet, (a,) = await start_reader(nursery, engine, entry("a"))
    engine.gate = trio.Event()
    heal(fleet, a)
    await wait_all_tasks_blocked()
    fleet.apply([], NOW)
    engine.gate.set()
    await wait_all_tasks_blocked()
    assert a.reported_role == ""


async def test_the_role_is_read_when_it_is_no_longer_configured(nursery, engine):
    fleet, (a,) = await start_reader(nursery, engine, entry("a", role="regular"))
    heal(fleet, a)
    await wait_all_tasks_blocked()
    assert engine.calls == []
    fleet.apply([entry("a")], NOW)
    await wait_all_tasks_blocked()
    assert a.role == "prefill"


async def test_a_flushed_cache_does_not_take_a_worker_out_of_rotation(nursery, engine):
    fleet, (a, _d) = await start_reader(nursery, engine, entry("a"), entry("d", role="decode"))
    heal(fleet, a)
    await wait_all_tasks_blocked()
    engine.gate = trio.Event()
    fleet.cache_cleared(a)
    assert (a.routable, a.role) == (True, "prefill")


PREFILL = (200, b'{"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 9001}')


@pytest.mark.parametrize(
    ("settings", "port"),
    [
        ({"role": "prefill", "bootstrap_port": None}, 9001),
        ({"role": "prefill", "bootstrap_port": 9002}, 9002),
        ({"bootstrap_port": 8998}, 9001),  # it may be the default: no role is configured
    ],
)
async def test_the_bootstrap_port_is_read_if_none_is_configured(nursery, engine, settings, port):
    engine.replies["/server_info"] = PREFILL
    fleet, (a,) = await start_reader(nursery, engine, entry("a", **settings))
    heal(fleet, a)
    await wait_all_tasks_blocked()
    assert (a.role, a.bootstrap_port) == ("prefill", port)
    assert len(engine.calls) == (port == 9001)
