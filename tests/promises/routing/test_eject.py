"""A worker is ejected after a few failed requests, and returns after one half-open request."""

from datetime import UTC, datetime

import pytest
import trio

from omni_proxy.admin_api.serializers.worker_records import worker_record
from omni_proxy.fleet.health_state import Health
from tests.promises.support.clients import CHAT, STREAMED, post
from tests.promises.support.dataplane_fixture import dataplane_and_client, run_dataplane
from tests.promises.support.fakes import (
    SSE_HEAD,
    answering,
    chunk,
    counted,
    fake_workers,
    resetting,
)
from tests.promises.support.fleet_program import program as running_program
from tests.promises.support.fleet_program import put, toml

GOOD = answering(counted(b"good"))
BUSY = answering(counted(b"busy", status="503 Busy"))
ONCE = "[routing]\nmax_total_retries = 1\n"


async def ask(client, body=CHAT):
    await client.send(post(body))
    return await client.answer()


def heal(opened, index=0):
    """Report successful probes, as many as the threshold requires."""
    worker = opened.fleet.workers[index]
    for _ in range(opened.fleet.thresholds.rise):
        opened.fleet.observe_probe(
            worker, status=200, error=None, at=datetime.now(UTC), epoch=worker.health.epoch
        )
    return worker


async def eject(opened, client, index=0):
    """Send requests until the worker is ejected; its script must fail them."""
    worker = opened.fleet.workers[index]
    while worker.health.state is Health.HEALTHY:
        await ask(client)
    return worker


class Switched:
    """A script that can be replaced while the worker runs."""

    def __init__(self, script):
        self.script = script

    async def __call__(self, call):
        await self.script(call)


@pytest.mark.parametrize(
    ("eject_to", "state"), [("unhealthy", "unhealthy"), ("dead", "dead"), ("remove", "unhealthy")]
)
async def test_three_failed_requests_in_a_row_eject_their_worker(eject_to, state):
    config = f'[routing]\nmax_total_retries = 1\neject = "{eject_to}"'
    async with dataplane_and_client(resetting, config=config) as (opened, client):
        (worker,) = opened.fleet.workers
        ejected = []
        opened.fleet.watch_ejected(ejected.append)
        for turn in range(3):
            assert (worker.routable, ejected) == (True, []), turn
            assert (await ask(client)).status == 502
        assert (worker.health.state, ejected) == (state, [worker])
        assert (await ask(client)).status == 503


async def test_a_successful_request_resets_the_count_of_failures():
    script = Switched(resetting)
    async with dataplane_and_client(script, config=ONCE) as (opened, client):
        (worker,) = opened.fleet.workers
        for _ in range(3):
            for answer in (resetting, resetting, GOOD):
                script.script = answer
                await ask(client)
        assert (worker.routable, worker.health.failed_requests) == (True, 0)


async def test_503_and_client_errors_never_eject():
    script = Switched(BUSY)
    async with dataplane_and_client(script, config=ONCE) as (opened, client):
        for status in ("503 Busy", "500 Oh", "429 Slow", "404 No"):
            script.script = answering(counted(b"", status=status))
            for _ in range(4):
                assert (await ask(client)).status == int(status[:3])
        assert (opened.failures(), opened.fleet.workers[0].routable) == ([0], True)


async def test_after_an_ejection_one_request_at_a_time_is_admitted():
    script, gate, asked = Switched(resetting), trio.Event(), trio.Event()

    async def slowly(call):
        asked.set()
        await gate.wait()
        await call.send(counted(b"tried"))

    async with (
        fake_workers(script, GOOD) as fakes,
        run_dataplane(*fakes) as opened,
        opened.client() as client,
    ):
        worker = await eject(opened, client)
        script.script = slowly
        heal(opened)
        assert (worker.routable, worker_record(worker)["half_open"]) == (True, True)
        before = len(fakes[0].requests)
        answers = []

        async def one():
            async with opened.client() as other:
                answers.append((await ask(other)).body)

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(one)
            with trio.fail_after(30):
                await asked.wait()
                while len(answers) < 19:
                    await trio.sleep(0.001)
            assert (worker.routable, worker.in_flight) == (False, 1)
            assert worker_record(worker)["health_state"] == "healthy"
            gate.set()
        assert sorted(answers) == [b"good"] * 19 + [b"tried"]
        assert len(fakes[0].requests) == before + 1
        assert (worker.routable, worker_record(worker)["half_open"]) == (True, False)


async def test_a_failed_trial_ejects_the_worker_at_once():
    async with dataplane_and_client(resetting, GOOD) as (opened, client):
        worker = await eject(opened, client)
        heal(opened)
        while worker.health.is_half_open:
            assert (await ask(client)).body == b"good"
        assert worker.health.state is Health.UNHEALTHY


async def test_a_trial_that_ends_in_503_or_a_disconnect_is_repeated():
    script, asked = Switched(resetting), trio.Event()

    async def hold_until_left(call):
        asked.set()
        await call.until_left()

    async with (
        fake_workers(script) as fakes,
        run_dataplane(*fakes, config=ONCE) as opened,
        opened.client() as client,
    ):
        worker = await eject(opened, client)
        heal(opened)
        script.script = BUSY
        assert (await ask(client)).status == 503
        assert (worker.routable, worker.health.is_half_open) == (True, True)
        script.script = hold_until_left
        async with opened.client() as leaving:
            await leaving.send(post(CHAT))
            await asked.wait()
            refused = await ask(client)
            assert (refused.status, b"half-open" in refused.body) == (503, True)
        with trio.fail_after(30):
            while not worker.routable:
                await trio.sleep(0.001)
        script.script = GOOD
        assert (await ask(client)).status == 200
        assert not worker.health.is_half_open


async def test_a_stream_passes_its_trial_with_its_first_byte():
    script, gate = Switched(resetting), trio.Event()

    async def stream(call):
        await call.send(SSE_HEAD, chunk(b"data: one\n\n"))
        await gate.wait()
        await call.send(chunk(b""))

    async with (
        fake_workers(script) as fakes,
        run_dataplane(*fakes, config=ONCE) as opened,
        opened.client() as client,
        opened.client() as other,
    ):
        worker = await eject(opened, client)
        heal(opened)
        script.script = stream
        await client.send(post(STREAMED))
        await client.until(b"data: one")
        assert (worker.routable, worker.health.is_half_open) == (True, False)
        script.script = GOOD
        assert (await ask(other)).status == 200
        gate.set()
        await client.until(b"0\r\n\r\n")


async def test_an_ejection_probes_the_worker_at_once(tmp_path):
    """Probes run every hour: only one that the ejection triggers can readmit the worker in time."""
    script = Switched(resetting)
    file = tmp_path / "proxy.toml"
    more = "[routing]\nmax_total_retries = 1\n"
    async with fake_workers(script) as fakes:
        text = toml(fakes, more=more).replace("interval_secs = 0.2", "interval_secs = 3600")
        put(file, text)
        async with running_program("--config", file) as program:
            await program.until_routable(*fakes)
            for _ in range(3):
                assert (await program.ask()).status_code == 502
            script.script = GOOD
            body = await program.until("/workers", lambda body: body["routable_workers"] == 1)
            assert body["workers"][0]["trial"]
            assert (await program.ask()).status_code == 200
            assert not (await program.get_json("/workers"))["workers"][0]["trial"]


async def test_with_eject_remove_a_worker_stays_removed_until_its_entry_changes(tmp_path):
    file = tmp_path / "proxy.toml"
    more = '[routing]\neject = "remove"\n'
    async with fake_workers(resetting, GOOD) as fakes:
        put(file, toml(fakes, more=more))
        async with running_program("--config", file) as program:
            await program.until_routable(*fakes)
            while (await program.get_json("/workers"))["total_workers"] == 2:
                assert (await program.ask()).status_code == 200
            assert [row["url"] for row in (await program.get_json("/workers"))["workers"]] == [
                fakes[1].url
            ]
            await program.until_logged("worker_removed")
            assert (await program.client.post("/reload")).json()["outcome"] == "unchanged"
            entry = f'[[workers]]\nurl = "{fakes[0].url}"\n'
            put(file, toml(fakes, more=more).replace(entry, entry + 'model = "new"\n'))
            await program.until("/workers", lambda body: body["total_workers"] == 2)
