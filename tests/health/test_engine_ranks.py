from datetime import timedelta

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from omni_proxy.health.engine_pages import EnginePages
from omni_proxy.health.engine_readers import EngineRanks, ranks_of_info, ranks_of_metrics
from omni_proxy.upstream_http.client import CallResult
from tests.fleet.entries import NOW, entry, fleet_of, heal

SGLANG = b'{"model_path": "m", "tp_size": 8, "dp_size": 4, "disaggregation_mode": "null"}'
VLLM = b"""\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 0.0
vllm:num_requests_running{engine="1",model_name="tiny"} 2.0
vllm:num_requests_waiting{engine="7",model_name="tiny"} 2.0
"""


def result_of(body, status=200, error=""):
    return CallResult(None, status, body, error, 0.0)


@pytest.mark.parametrize(
    ("body", "ranks"),
    [
        (SGLANG, 4),
        (b'{"dp_size": 1}', 1),
        (b'{"vllm_config": {"parallel_config": {"data_parallel_size": 2}}}', 2),
        (b'{"vllm_config": "data_parallel_size=2"}', None),
        (b'{"dp_size": 0}', None),
        (b'{"dp_size": "4"}', None),
        (b'{"dp_size": 1000000}', None),
        (b"[]", None),
        (b"no json", None),
    ],
)
def test_the_number_of_ranks_is_read_in_the_forms_of_sglang_and_vllm(body, ranks):
    assert ranks_of_info(result_of(body)) == ranks


def test_the_ranks_of_vllm_are_counted_in_its_metrics():
    assert ranks_of_metrics(VLLM) == 2
    assert ranks_of_metrics(b"up 1\n") == 0


class Engine:
    """A fake engine: `replies` by path; `calls`: the paths called."""

    def __init__(self):
        self.replies = {}
        self.calls = []

    async def call(self, worker, call):
        await trio.lowlevel.checkpoint()
        path = call.target.partition("?")[0]
        self.calls.append(path)
        reply = self.replies.get(path, (404, b""))
        if reply is None:
            return result_of(b"", status=None, error="ConnectError")
        return result_of(reply[1], status=reply[0])


@pytest.fixture
def engine():
    return Engine()


async def start_reader(nursery, engine, *entries):
    fleet = fleet_of(*entries, healthy=False)
    await nursery.start(EnginePages(fleet, [EngineRanks(fleet)], engine.call).run)
    return fleet, fleet.workers[0]


async def test_a_worker_that_becomes_healthy_is_called_once(nursery, engine):
    engine.replies["/server_info"] = (200, SGLANG)
    fleet, worker = await start_reader(nursery, engine, entry("a", ranks="auto"), entry("b"))
    await wait_all_tasks_blocked()
    assert engine.calls == []
    heal(fleet, worker)
    heal(fleet, fleet.workers[1])
    await wait_all_tasks_blocked()
    assert engine.calls == ["/server_info"]
    assert (len(worker.dp_ranks), fleet.workers[1].dp_ranks) == (4, ())
    fleet.cordon(worker, "paused")
    await wait_all_tasks_blocked()
    assert engine.calls == ["/server_info"]


@pytest.mark.parametrize(
    ("replies", "ranks"),
    [
        ({"/get_server_info": (200, SGLANG)}, 4),
        ({"/metrics": (200, VLLM)}, 2),
        ({"/server_info": (200, b"{}"), "/metrics": (200, VLLM)}, 2),
        ({"/metrics": (200, b"up 1")}, 1),
        ({"/server_info": (401, b""), "/metrics": (404, b"")}, 1),
        ({}, 1),
    ],
)
async def test_the_ranks_are_read_from_any_route_that_the_engine_has(
    nursery, engine, replies, ranks
):
    engine.replies = replies
    fleet, worker = await start_reader(nursery, engine, entry("a", ranks="auto"))
    heal(fleet, worker)
    await wait_all_tasks_blocked()
    assert worker.rank_count == worker.reported_ranks == ranks


async def test_a_worker_that_returns_is_called_again(nursery, engine):
    engine.replies["/server_info"] = (200, SGLANG)
    fleet, worker = await start_reader(nursery, engine, entry("a", ranks="auto"))
    heal(fleet, worker)
    await wait_all_tasks_blocked()
    engine.replies["/server_info"] = (200, b'{"dp_size": 2}')
    for _ in range(fleet.thresholds.fall):
        fleet.observe_request_failure(worker, status=None, error="gone", at=NOW)
    await wait_all_tasks_blocked()
    assert len(worker.dp_ranks) == 4
    heal(fleet, worker)
    await wait_all_tasks_blocked()
    assert len(worker.dp_ranks) == 2
    engine.replies["/server_info"] = (200, b'{"dp_size": 3}')
    fleet.cache_cleared(worker)  # another process has the address, and no probe failed
    await wait_all_tasks_blocked()
    assert len(worker.dp_ranks) == 3


async def test_a_change_to_auto_calls_a_healthy_worker(nursery, engine):
    engine.replies["/server_info"] = (200, SGLANG)
    fleet, worker = await start_reader(nursery, engine, entry("a", ranks=2))
    heal(fleet, worker)
    fleet.apply([entry("a", ranks="auto")], NOW + timedelta(1))
    await wait_all_tasks_blocked()
    assert len(worker.dp_ranks) == 4


async def test_a_failed_call_is_repeated_while_the_worker_is_healthy(
    nursery, engine, autojump_clock
):
    assert isinstance(autojump_clock, MockClock)
    engine.replies = {"/server_info": None, "/metrics": (503, b"")}
    fleet, worker = await start_reader(nursery, engine, entry("a", ranks="auto"))
    heal(fleet, worker)
    await trio.sleep(10)
    calls = len(engine.calls)
    assert calls > 4
    assert worker.dp_ranks == ()
    engine.replies["/server_info"] = (200, SGLANG)
    await trio.sleep(60)
    assert len(worker.dp_ranks) == 4
    calls = len(engine.calls)
    await trio.sleep(100)
    assert len(engine.calls) == calls


async def test_a_removed_worker_is_not_called_again(nursery, engine, autojump_clock):
    assert isinstance(autojump_clock, MockClock)
    engine.replies = {"/server_info": None, "/metrics": None}
    fleet, worker = await start_reader(nursery, engine, entry("a", ranks="auto"))
    heal(fleet, worker)
    await trio.sleep(3)
    fleet.apply([], NOW)
    await trio.sleep(60)
    calls = len(engine.calls)
    await trio.sleep(100)
    assert len(engine.calls) == calls
