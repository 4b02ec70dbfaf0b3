import httpx
import pytest
import trio

from omni_proxy.weight_sync.worker_calls import wait_until_refused
from tests.admin_api.api_fixture import A, build_api, entry
from tests.admin_api.fake_engines import Engines

ENGINES = Engines
REFUSED = httpx.ConnectError("refused")


def worker():
    return build_api(entry(A)).worker(A)


async def test_a_worker_is_gone_after_two_refused_connections_in_a_row(engines, autojump_clock):
    ok = (200, b"{}")
    engines.replies[A, "/health"] = [ok, ok, REFUSED, ok, REFUSED, REFUSED]
    assert "nothing listens" in await wait_until_refused(worker(), "/health")
    assert len(engines.requests) == 6
    assert trio.current_time() == 3


@pytest.mark.parametrize("reply", [(503, b""), httpx.ReadError("gone"), httpx.ReadTimeout("slow")])
async def test_a_busy_or_slow_worker_is_not_gone(engines, autojump_clock, reply):
    engines.replies[A, "/health"] = reply
    with trio.move_on_after(60) as scope:
        await wait_until_refused(worker(), "/health")
    assert scope.cancelled_caught
