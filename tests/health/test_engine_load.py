import json

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from omni_proxy.health.engine_pages import EnginePages
from omni_proxy.health.engine_readers import SILENT_SECS, EngineLoadReader
from omni_proxy.upstream_http.client import CallResult
from omni_proxy.wire.load_report import LoadReport
from tests.fleet.entries import entry, fleet_of, heal

VLLM = (
    b'vllm:num_requests_waiting{engine="0"} 3.0\nvllm:kv_cache_usage_perc{engine="0"} 0.5\n'
    b'vllm:num_requests_waiting{engine="1"} 1.0\n'
)


def records(**load):
    return (200, json.dumps({"loads": [load]}).encode())


class PolledEngine:
    """A fleet of one engine; `replies` by path, None for no connection; `calls`: the paths called."""

    def __init__(self, nursery):
        self.replies, self.calls, self.poll_secs = {}, [], 1.0
        self.nursery = nursery

    async def start(self, **fields):
        self.fleet = fleet_of(entry("a", **fields), healthy=False)
        (self.worker,) = self.fleet.workers
        self.reader = EngineLoadReader(self.fleet, lambda: self.poll_secs, trio.current_time)
        self.pages = EnginePages(self.fleet, [self.reader], self._call)
        await self.nursery.start(self.pages.run)
        heal(self.fleet, self.worker)

    async def _call(self, worker, call):
        await trio.lowlevel.checkpoint()
        self.calls.append(call.target)
        reply = self.replies.get(call.target, (404, b""))
        status, body = (None, b"") if reply is None else reply
        return CallResult(None, status, body, "" if status else "ConnectError", 0.0)

    @property
    def report(self):
        return self.worker.engine_load and self.worker.engine_load.report


@pytest.fixture
def polled(nursery):
    return PolledEngine(nursery)


@pytest.mark.parametrize(
    ("path", "reply", "report"),
    [
        ("/v1/loads", records(dp_rank=0, num_waiting_reqs=2, token_usage=0.25), (2.0, 0.25)),
        ("/metrics", (200, VLLM), (4.0, 0.5)),
        ("/prometheus/metrics", (200, b"trtllm_num_requests_waiting 1\n"), (1.0, None)),
    ],
)
async def test_the_page_with_the_load_is_found_and_polled(
    polled, autojump_clock, path, reply, report
):
    polled.replies[path] = reply
    await polled.start()
    await trio.sleep(2.5)
    assert polled.report == LoadReport(*report)
    assert polled.calls[-2:] == [path, path]
    assert polled.calls.count(path) == 3


async def test_a_page_of_several_engines_is_split_over_the_ranks(polled):
    polled.replies["/metrics"] = (200, VLLM)
    await polled.start(ranks=2)
    await wait_all_tasks_blocked()
    ranks = [rank.engine_load.report for rank in polled.worker.dp_ranks]
    assert ranks == [LoadReport(3.0, 0.5), LoadReport(1.0, None)]


async def test_polling_starts_when_an_interval_is_set(polled, autojump_clock):
    polled.replies["/v1/loads"] = records(num_waiting_reqs=2)
    polled.poll_secs = 0.0
    await polled.start()
    await trio.sleep(5)
    assert polled.calls == []
    polled.poll_secs = 10.0
    polled.pages.restart(polled.reader)
    await trio.sleep(11)
    assert len(polled.calls) == 2
    polled.poll_secs = 1.0
    polled.pages.restart(polled.reader)
    await trio.sleep(2.5)
    assert len(polled.calls) == 5
    polled.poll_secs = 0.0
    await trio.sleep(60)
    assert len(polled.calls) == 5


async def test_an_engine_without_a_load_is_called_rarely(polled, autojump_clock):
    polled.replies["/metrics"] = (200, b"up 1\n")
    await polled.start()
    await trio.sleep(SILENT_SECS - 1)
    assert polled.calls == ["/v1/loads", "/metrics", "/prometheus/metrics"]
    await trio.sleep(2)
    assert len(polled.calls) == 6


@pytest.mark.parametrize("reply", [None, (503, b""), (200, b"[]")])
async def test_an_engine_whose_load_is_missing_now_is_called_again_soon(
    polled, autojump_clock, reply
):
    polled.replies["/v1/loads"] = records(num_waiting_reqs=2)
    await polled.start()
    await trio.sleep(0.5)
    at = polled.worker.engine_load.at
    polled.replies["/v1/loads"] = reply
    await trio.sleep(1)
    assert polled.worker.engine_load.at == at
    polled.replies["/v1/loads"] = records(num_waiting_reqs=7)
    await trio.sleep(5)
    assert polled.report == LoadReport(7.0, None)


class TaskSteps(trio.abc.Instrument):
    """`count`: how often a task has run."""

    count = 0

    def before_task_step(self, task):
        self.count += 1


async def test_other_tasks_run_while_a_long_page_is_parsed(polled, autojump_clock):
    await polled.start()
    steps, counts = TaskSteps(), []
    trio.lowlevel.add_instrument(steps)
    for page in VLLM, VLLM, b"# x\n" * 300_000 + VLLM:  # the first read also finds the page
        polled.replies["/metrics"] = (200, page)
        before = steps.count
        await polled.pages.refresh(polled.reader)
        counts.append(steps.count - before)
        assert polled.report == LoadReport(4.0, 0.5)
    trio.lowlevel.remove_instrument(steps)
    _, short, long = counts
    assert long - short >= len(page) // (1 << 18)
