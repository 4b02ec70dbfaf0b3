import json
import time
from contextlib import asynccontextmanager

import pytest
import trio

from omni_proxy.admin_api.routes import dashboard_routes
from omni_proxy.admin_api.serializers.worker_records import reasons
from tests.admin_api.house import NOW, SCOPE, A, B, build_house, entry
from tests.telemetry.ends import ended


async def snapshot(house):
    answer = await house.client().get("/feed?once=true")
    assert (answer.status_code, answer.mimetype) == (200, "application/json")
    return await answer.get_json()


def work(house):
    """A stream of A that went well, and one that did not; then the second is over."""
    worker = house.worker(A)
    house.instruments.metrics.record(ended(worker), worker)
    broken = ended(worker, outcome="stream_error", ended_by="worker", error="reset")
    house.instruments.metrics.record(broken, worker)
    house.instruments.recent.tick(time.time(), 3, 1)


async def test_one_look_tells_fleet_history_ends_and_what_runs(house):
    house.healthy(A)
    work(house)
    told = await snapshot(house)
    assert told["ready"] is True
    assert told["leaving"] is False
    assert (told["revision"], told["policy"]["name"]) == (1, "round_robin")
    a, b = told["fleet"]
    assert (a["url"], a["health"], a["routable"], a["why"]) == (A, "healthy", True, None)
    assert (a["errors"], a["rate"] > 0, a["first_p50_ms"] > 0) == (1, True, True)
    assert (b["routable"], b["first_p99_ms"], b["drain"]) == (False, None, None)
    (point,) = told["history"]
    assert (point["requests"], point["errors"], point["in_flight"], point["waiting"]) == (
        2,
        1,
        3,
        1,
    )
    assert {end["end"] for end in told["recent_ends"]} == {"completed", "stream_error"}
    assert told["recent_ends"][0]["total_ms"] == pytest.approx(1100)
    assert told["last_reload"] == {"outcome": "applied"}
    assert told["weights"]["workers"][0]["worker"] == A


async def test_the_last_minute_of_the_fleet_has_the_running_second_of_its_workers(house):
    house.healthy(A)
    worker = house.worker(A)
    house.instruments.metrics.record(ended(worker), worker)
    told = await snapshot(house)
    assert told["last_minute"] == {"requests": 1, "errors": 0}
    assert told["fleet"][0]["answers"] == 1
    assert told["history"] == []


async def test_a_worker_that_has_requests_and_says_nothing_is_told(house):
    house.healthy(A)
    worker = house.worker(A)
    house.instruments.metrics.record(ended(worker), worker)
    worker.in_flight = 2
    for second in range(30, 20, -1):
        house.instruments.stall_detector.tick(time.time() - second)
    a, b = (await snapshot(house))["fleet"]
    assert a["silent_secs"] == pytest.approx(28, abs=4)
    assert b["silent_secs"] is None


async def test_nothing_of_it_is_shown_without_the_key():
    house = build_house(entry(A), key="k")
    for path in ("/feed", "/feed?once=true", "/metrics"):
        assert (await house.client().get(path)).status_code == 401
        wrong = {"Authorization": "Bearer x"}
        assert (await house.client().get(path, headers=wrong)).status_code == 403


class Reader:
    """A client of the feed, as the server below the app has it. It leaves when `left` is set."""

    def __init__(self):
        self.left = trio.Event()
        self.ended = trio.Event()
        self.status = 0
        self._heard, self._told = [{"type": "http.request", "body": b""}], None
        self._send, self._receive = trio.open_memory_channel(0)

    async def run(self, app):
        await app(SCOPE, self._next, self._take)
        self.ended.set()

    async def _next(self):
        if not self._heard:
            await self.left.wait()
            return {"type": "http.disconnect"}
        return self._heard.pop()

    async def _take(self, message):
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["body"]:
            await self._send.send(message["body"])

    async def event(self):
        """The next one, decoded."""
        *_, last = (await self._receive.receive()).decode().strip().splitlines()
        return json.loads(last.removeprefix("data: "))


@asynccontextmanager
async def reading(house):
    reader = Reader()
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reader.run, house.app)
            yield reader
            reader.left.set()
            await reader.ended.wait()


async def test_a_reader_gets_all_the_history_once_then_only_what_is_new(house):
    at = iter(range(1001, 1009))
    for _ in range(3):
        house.instruments.recent.tick(next(at), 0, 0)
    told = []
    async with reading(house) as reader:
        for _ in range(3):
            told.append(await reader.event())
            house.instruments.recent.tick(next(at), 0, 0)
    assert [[point["at"] for point in event["history"]] for event in told] == [
        [1001, 1002, 1003],
        [1004],
        [1005],
    ]


async def test_a_reader_that_leaves_frees_its_place(monkeypatch):
    monkeypatch.setattr(dashboard_routes, "READERS", 1)
    house = build_house(entry(A))
    for _ in range(2):
        async with reading(house) as reader:
            await reader.event()
            assert reader.status == 200
            refused = await house.client().get("/feed")
            assert refused.status_code == 503
            assert (await refused.get_json())["error"]["code"] == "too_many_readers"
            assert (await house.client().get("/feed?once=true")).status_code == 200


async def test_readers_are_let_go_when_the_door_drains(house):
    async with reading(house) as reader:
        await reader.event()
        house.door.draining = True
        await reader.ended.wait()
    assert (await snapshot(house))["ready"] is False


def why(house, url=A):
    return reasons(house.rooms, house.desk.journal.pauses())(house.worker(url))


def test_one_sentence_says_why_a_worker_gets_nothing(house):
    assert why(house) == "waiting for its first probe"
    failed = {"status": None, "error": "connection refused", "at": NOW, "epoch": 0}
    house.fleet.observe_probe(house.worker(A), **failed)
    assert why(house) == "not up yet: connection refused"
    house.healthy(A)
    worker = house.worker(A)
    assert why(house) is None
    house.fleet.cordon(worker, "updating")
    assert why(house) == "held: updating"
    worker.disabled = True
    assert why(house) == "disabled by an operator"
    worker.in_flight = 2
    assert why(house) == "draining: 2 in flight"
    worker.disabled = False
    house.fleet.uncordon(worker, "updating")
    worker.health.half_open_id = 1
    assert why(house).startswith("half-open")
    house.fleet.mark_dead(worker, NOW)
    assert why(house) == "dead: no reason known"
    house.fleet.mark_dead(worker, NOW, declared=True)
    assert why(house) == "dead: declared so by an operator"
    assert why(house, B).startswith("waiting")
