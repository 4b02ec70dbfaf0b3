import json
from functools import partial

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from omni_proxy.health.engine_pages import RETRY_SECS, EnginePages
from omni_proxy.health.engine_readers import (
    MAX_ADAPTERS,
    REFRESH_SECS,
    AdapterList,
    reported_adapters,
)
from omni_proxy.upstream_http.client import CallResult
from tests.fleet.entries import entry, fleet_of, heal


def result_of(cards, status=200):
    body = cards if isinstance(cards, bytes) else json.dumps({"data": cards}).encode()
    return CallResult(None, status, body, "" if status == 200 else "status", 0.0)


BASE = {"id": "base", "owned_by": "vllm", "root": "/models/base", "parent": None}
LORA = {"id": "sql", "owned_by": "vllm", "root": "/loras/sql", "parent": "base"}


def test_an_adapter_of_vllm_has_its_own_name():
    names = reported_adapters(result_of([BASE, LORA]), "base")
    assert names == ("sql", "base:sql", ":sql")


def test_an_adapter_of_sglang_has_only_names_with_its_model():
    cards = [BASE | {"owned_by": "sglang"}, LORA | {"owned_by": "sglang"}]
    assert reported_adapters(result_of(cards), "served") == ("base:sql", "served:sql", ":sql")
    assert reported_adapters(result_of(cards), None) == ("base:sql", ":sql")


@pytest.mark.parametrize(
    "card", [3, {}, {"id": "x"}, {"id": 3, "parent": "b"}, {"id": "a\n", "parent": "b"}]
)
def test_an_invalid_adapter_is_ignored(card):
    assert reported_adapters(result_of([BASE, card]), "base") == ()


@pytest.mark.parametrize("body", [b"no json", b"[]", b'{"data": 3}'])
def test_an_invalid_list_is_unknown(body):
    assert reported_adapters(result_of(body), "base") is None
    assert reported_adapters(result_of([LORA], status=500), "base") is None


def test_the_number_of_adapters_is_bounded():
    cards = [LORA | {"id": f"a{n}"} for n in range(MAX_ADAPTERS + 5)]
    assert len(reported_adapters(result_of(cards), None)) == 3 * MAX_ADAPTERS


class Replies(dict):
    """The model cards of each worker, by URL; `calls`: the URLs that were called."""

    def __init__(self):
        super().__init__()
        self.calls = []

    async def call(self, worker, call):
        await trio.lowlevel.checkpoint()
        self.calls.append(worker.url)
        cards = self.get(worker.url)
        return result_of(cards) if cards is not None else result_of(b"", 503)


@pytest.fixture
def replies():
    return Replies()


async def start_reader(nursery, replies, *entries):
    fleet = fleet_of(*entries, healthy=False)
    adapters = AdapterList(fleet)
    pages = EnginePages(fleet, [adapters], replies.call)
    await nursery.start(pages.run)
    return fleet, partial(pages.refresh, adapters)


async def test_the_list_is_read_when_a_worker_with_auto_becomes_healthy(nursery, replies):
    replies["http://a:1"] = [BASE, LORA]
    fleet, _ = await start_reader(
        nursery,
        replies,
        entry("a", model="base", loras="auto"),
        entry("b", model="base", loras=("x",)),
    )
    assert replies.calls == []
    for worker in fleet.workers:
        heal(fleet, worker)
    await wait_all_tasks_blocked()
    assert set(replies.calls) == {"http://a:1"}
    assert [w.display_id for w in fleet.candidates("sql", 0)] == ["a:1"]
    assert [w.display_id for w in fleet.candidates("x", 0)] == ["b:1"]


async def test_the_list_is_read_again_after_a_restart(nursery, replies):
    replies["http://a:1"] = [BASE, LORA]
    fleet, _ = await start_reader(nursery, replies, entry("a", model="base", loras="auto"))
    (worker,) = fleet.workers
    heal(fleet, worker)
    await wait_all_tasks_blocked()
    replies["http://a:1"] = [BASE, LORA | {"id": "new"}]
    fleet.cache_cleared(worker)  # another process has the address
    await wait_all_tasks_blocked()
    assert fleet.candidates("new", 0) == [worker]
    assert fleet.candidates("sql", 0) == []


async def test_a_failed_read_keeps_the_known_list_and_is_repeated(nursery, replies, autojump_clock):
    replies["http://a:1"] = [BASE, LORA]
    fleet, _ = await start_reader(nursery, replies, entry("a", model="base", loras="auto"))
    (worker,) = fleet.workers
    heal(fleet, worker)
    await trio.sleep(0.1)
    replies["http://a:1"] = None
    fleet.cache_cleared(worker)
    await trio.sleep(0.1)
    assert fleet.candidates("sql", 0) == [worker]
    replies["http://a:1"] = [BASE]
    await trio.sleep(RETRY_SECS + 0.2)
    assert fleet.candidates("sql", 0) == []


async def test_an_adapter_that_the_engine_loads_later_is_found_at_a_refresh(
    nursery, replies, autojump_clock
):
    replies["http://a:1"] = [BASE]
    fleet, _ = await start_reader(nursery, replies, entry("a", model="base", loras="auto"))
    heal(fleet, fleet.workers[0])
    await trio.sleep(0.1)
    replies["http://a:1"] = [BASE, LORA]
    await trio.sleep(REFRESH_SECS + 0.2)
    assert fleet.candidates("sql", 0) == fleet.workers


async def test_a_refresh_returns_after_the_list_is_read(nursery, replies):
    replies["http://a:1"] = [BASE]
    fleet, refresh = await start_reader(nursery, replies, entry("a", model="base", loras="auto"))
    heal(fleet, fleet.workers[0])
    await wait_all_tasks_blocked()
    replies["http://a:1"] = [BASE, LORA]
    await refresh()
    assert fleet.candidates("sql", 0) == fleet.workers
