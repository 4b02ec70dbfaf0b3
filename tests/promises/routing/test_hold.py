"""With a queue, requests that no worker can take now wait instead of being refused."""

from datetime import UTC, datetime

import httpx
import pytest
import trio

from omni_proxy.admin_api.serializers.worker_records import worker_record
from tests.dataplane.loop_script import until
from tests.promises.support.clients import CHAT, post
from tests.promises.support.dataplane_fixture import dataplane_and_client, run_dataplane
from tests.promises.support.fakes import PATIENCE_SECS, FakeWorker, answering, counted, fake_workers
from tests.promises.support.fleet_program import program, put, toml

GOOD = answering(counted(b"good"))
QUEUED = "[server]\nqueue_size = 50\n"


async def ask(client):
    await client.send(post(CHAT))
    return await client.answer()


class Gate:
    """A script that answers once `open` is set; counts its requests in flight."""

    def __init__(self):
        self.open, self.now, self.peak = trio.Event(), 0, 0

    async def __call__(self, call):
        self.now += 1
        self.peak = max(self.peak, self.now)
        await self.open.wait()
        await trio.lowlevel.checkpoint()
        self.now -= 1
        await call.send(counted(b"good"))


async def send_many(opened, count, answers):
    async def one():
        async with opened.client() as client:
            answers.append(await ask(client))

    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(one)


async def test_requests_above_max_inflight_wait_and_all_are_answered():
    gate, answers = Gate(), []
    config = f"{QUEUED}max_inflight = 2"
    async with (
        dataplane_and_client(gate, config=config) as (opened, _),
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(send_many, opened, 20, answers)
        await until(lambda: opened.dataplane.queue.waiting == 18)
        status = opened.dataplane.status()
        assert (status["inflight"], status["waiting"], status["phases"]["queue"]) == (2, 18, 18)
        gate.open.set()
        await until(lambda: len(answers) == 20)
        assert [answer.status for answer in answers] == [200] * 20
        assert (gate.peak, opened.dataplane.admission()["peak_waiting"]) == (2, 18)
        assert (opened.dataplane.queue.waiting, opened.dataplane.inflight.rejected) == (0, 0)
        assert sum(line["queue_ms"] > 0 for line in opened.log.records) == 18


@pytest.mark.parametrize("size", [0, 50])
async def test_max_inflight_of_a_worker_is_never_exceeded(size):
    gates, answers = [Gate(), Gate()], []
    async with fake_workers(*gates) as fakes:
        entries = "".join(
            f'[[workers]]\nurl = "{worker.url}"\nmax_inflight = 3\n' for worker in fakes
        )
        config = f"[server]\nqueue_size = {size}\n{entries}"
        async with run_dataplane(config=config) as opened, trio.open_nursery() as nursery:
            nursery.start_soon(send_many, opened, 40, answers)
            if size:
                await until(lambda: opened.dataplane.queue.waiting == 34)
            else:
                await until(lambda: len(answers) == 34)
            await until(lambda: [gate.now for gate in gates] == [3, 3])
            for gate in gates:
                gate.open.set()
            await until(lambda: len(answers) == 40)
            statuses = [answer.status for answer in answers]
            assert statuses.count(200) == (40 if size else 6)
            assert [gate.peak for gate in gates] == [3, 3]
            assert [worker.peak_in_flight for worker in opened.fleet.workers] == [3, 3]


async def test_a_full_queue_refuses_at_once():
    gate, answers = Gate(), []
    config = "[server]\nqueue_size = 1\nmax_inflight = 1"
    async with dataplane_and_client(gate, config=config) as (opened, client):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_many, opened, 2, answers)
            await until(lambda: opened.dataplane.queue.waiting == 1)
            refused = await ask(client)
            assert (refused.status, refused.one("retry-after")) == (503, "1")
            assert b'"type":"overloaded_error","code":503,"reason":"queue_full"' in refused.body
            gate.open.set()
        assert [answer.status for answer in answers] == [200, 200]
        assert opened.dataplane.inflight.rejected == 1


@pytest.mark.parametrize(
    ("more", "reason"),
    [("max_inflight = 1\n", "queue_timeout"), ("", "none_healthy")],
    ids=["no slot", "no worker"],
)
async def test_a_queue_timeout_reports_its_reason(more, reason):
    gate = Gate()
    config = f"{QUEUED}{more}queue_timeout_secs = 0.05"
    async with fake_workers(gate) as fakes, run_dataplane(*fakes, config=config) as opened:
        (worker,) = opened.fleet.workers
        async with opened.client() as holder, opened.client() as client:
            await holder.send(post(CHAT))
            await until(lambda: worker.in_flight)
            if not more:
                opened.fleet.mark_dead(worker, datetime.now(UTC))
            refused = await ask(client)
            assert (refused.status, refused.one("retry-after")) == (503, "1")
            assert f'"code":503,"reason":"{reason}"'.encode() in refused.body
            assert b"waited 0.05 s" in refused.body
            client.close()
            await until(lambda: opened.log.records)
            assert opened.last["queue_ms"] >= 50
            gate.open.set()
            assert (await holder.answer()).status == 200


async def test_a_request_leaves_the_queue_when_its_client_disconnects():
    gate = Gate()
    config = f"{QUEUED}max_inflight = 1"
    async with fake_workers(gate) as fakes, run_dataplane(*fakes, config=config) as opened:
        async with opened.client() as holder:
            await holder.send(post(CHAT))
            await until(lambda: opened.dataplane.in_flight)
            async with opened.client() as leaving:
                await leaving.send(post(CHAT))
                await until(lambda: opened.dataplane.queue.waiting)
            await until(lambda: not opened.dataplane.queue.waiting)
            assert (opened.last["outcome"], opened.last["phase"]) == (
                "client_disconnected",
                "queue",
            )
            gate.open.set()
            assert (await holder.answer()).status == 200
        assert len(fakes[0].requests) == 1


async def test_an_upload_that_waits_in_the_queue_is_read_afterwards():
    gate = Gate()
    body = b'{"messages": [], "pad": "%b"}' % (b"x" * 300_000)
    config = f"{QUEUED}max_inflight = 1"
    async with dataplane_and_client(gate, config=config) as (opened, client):
        async with opened.client() as holder, trio.open_nursery() as nursery:
            await holder.send(post(CHAT))
            await until(lambda: opened.dataplane.in_flight)
            nursery.start_soon(client.send, post(body))
            await until(lambda: opened.dataplane.queue.waiting)
            gate.open.set()
            assert (await client.answer()).status == 200
            await holder.answer()
        assert opened.workers[0].requests[1][1] == body


async def test_a_failed_request_waits_in_the_queue_until_a_worker_recovers():
    """Two failures eject the only worker: the third attempt waits until it is healthy again."""
    calls = []

    async def script(call):
        calls.append(call)
        if len(calls) < 3:
            call.reset()
        else:
            await call.send(counted(b"good"))

    config = f"{QUEUED}[routing]\nmax_worker_retries = 2"
    async with dataplane_and_client(script, config=config) as (opened, client):
        (worker,) = opened.fleet.workers
        async with trio.open_nursery() as nursery:

            async def heal():
                await until(lambda: opened.dataplane.queue.waiting)
                for _ in range(2):
                    opened.fleet.observe_probe(
                        worker, status=200, error=None, at=datetime.now(UTC), epoch=0
                    )

            nursery.start_soon(heal)
            answer = await ask(client)
        assert (answer.status, answer.body) == (200, b"good")
        assert answer.one("x-omni-attempts").count("reset_before_response") == 2
        assert opened.last["queue_ms"] > 0
        assert worker_record(worker)["half_open"] is False


async def test_health_and_status_never_wait_in_the_queue(tmp_path):
    gate, file = Gate(), tmp_path / "proxy.toml"
    async with fake_workers(gate) as fakes:
        put(file, toml(fakes, more="queue_size = 5\nmax_inflight = 1\n"))
        async with program("--config", file) as running, trio.open_nursery() as nursery:
            await running.until_routable(*fakes)
            for _ in range(2):
                nursery.start_soon(running.ask)
            body = await running.until("/health", lambda body: body["admission"]["waiting"] == 1)
            assert body["admission"]["inflight"] == 1
            assert (await running.get_json("/status"))["data_plane"]["phases"]["queue"] == 1
            gate.open.set()


async def test_a_drain_still_serves_queued_requests(tmp_path):
    gate, file = Gate(), tmp_path / "proxy.toml"
    async with fake_workers(gate) as fakes:
        put(file, toml(fakes, more="queue_size = 5\nmax_inflight = 1\n"))
        async with program("--config", file) as running, trio.open_nursery() as nursery:
            await running.until_routable(*fakes)
            statuses = []

            async def one():
                statuses.append((await running.ask()).status_code)

            for _ in range(3):
                nursery.start_soon(one)
            await running.until("/health", lambda body: body["admission"]["waiting"] == 2)
            running.process.terminate()
            await running.until_logged("drain_started")
            gate.open.set()
            with trio.fail_after(PATIENCE_SECS):
                assert await running.process.wait() == 0
        assert statuses == [200, 200, 200]


class Restartable(FakeWorker):
    """A worker that can be killed and started again at its address."""

    async def run(self, *, task_status=trio.TASK_STATUS_IGNORED):
        port = int(self.url.rpartition(":")[2]) if self.url else 0
        with trio.CancelScope() as self.scope:
            (listener,) = await trio.open_tcp_listeners(port, host="127.0.0.1")
            self.url = "http://{}:{}".format(*listener.socket.getsockname())
            await trio.serve_listeners(self._connection, [listener], task_status=task_status)


async def test_a_restart_of_all_workers_causes_no_error(tmp_path):
    """All workers are killed under traffic and started again, so for a while there is none."""
    file = tmp_path / "proxy.toml"
    fakes = [Restartable(GOOD), Restartable(GOOD)]
    statuses, enough = [], trio.Event()
    async with trio.open_nursery() as nursery:
        for worker in fakes:
            await nursery.start(worker.run)
        put(file, toml(fakes, more="queue_size = 100\n"))
        async with program("--config", file) as running:
            await running.until_routable(*fakes)

            async def traffic():
                async with httpx.AsyncClient(
                    base_url=running.client.base_url,
                    timeout=PATIENCE_SECS,
                    trust_env=False,
                    verify=False,
                ) as client:
                    while not enough.is_set():
                        answer = await client.post("/v1/chat/completions", content=CHAT)
                        statuses.append(answer.status_code)

            async with trio.open_nursery() as clients:
                for _ in range(8):
                    clients.start_soon(traffic)
                await until(lambda: len(statuses) > 20)
                for worker in fakes:
                    worker.scope.cancel()
                await running.until("/workers", lambda body: not body["routable_workers"])
                await running.until("/health", lambda body: body["admission"]["waiting"] == 8)
                for worker in fakes:
                    await nursery.start(worker.run)
                    before = len(statuses)
                    await until(lambda before=before: len(statuses) > before + 20)
                await running.until_routable(*fakes)
                enough.set()
            assert set(statuses) == {200}
        nursery.cancel_scope.cancel()
