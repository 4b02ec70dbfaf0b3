"""Responses have a weight version, requests may require one, and updates hold requests."""

import json
from contextlib import asynccontextmanager

import pytest
import trio

from tests.dataplane.loop_script import until
from tests.promises.support.clients import CHAT, STREAMED, post
from tests.promises.support.dataplane_fixture import dataplane_and_client, run_dataplane
from tests.promises.support.engines import engines
from tests.promises.support.fakes import (
    LAST_CHUNK,
    SSE_HEAD,
    answering,
    chunk,
    counted,
    fake_workers,
    resetting,
)
from tests.promises.support.fleet_program import PATIENCE_SECS, program, toml

pytestmark = pytest.mark.usefixtures("soon")
GOOD = answering(counted(b"good"))
QUEUED = "[server]\nqueue_size = 9\n"
UPDATE = {"model_path": "/m", "weight_version": "v2"}
VERSION, END = "x-omni-weight-version", "x-omni-weight-version-end"


async def ask(client, *fields, body=CHAT):
    await client.send(post(body, *fields))
    return await client.answer()


class Stepwise:
    """A worker that sends the first part of a response at once, and the rest when it is
    released."""

    def __init__(self, first, rest):
        self.first, self.rest = first, rest
        self.received, self.released = trio.Event(), trio.Event()

    async def __call__(self, call):
        await call.send(self.first)
        self.received.set()
        await self.released.wait()
        await call.send(self.rest)


async def test_a_response_has_the_weight_version_of_its_worker_if_it_is_known():
    async with dataplane_and_client(GOOD) as (opened, client):
        (worker,) = opened.fleet.workers
        response = await ask(client)
        assert not [name for name, _ in response.fields if name.startswith("x-omni-weight")]
        opened.fleet.set_version(worker, "step-7", 0)
        response = await ask(client)
        assert (response.one(VERSION), response.one("x-omni-weight-epoch")) == ("step-7", None)
        opened.fleet.set_version(worker, "step 8\r\n", 2)
        response = await ask(client)
        assert (response.one(VERSION), response.one("x-omni-weight-epoch")) == (
            "step%208%0D%0A",
            "2",
        )
        assert response.one(END) is None
        opened.fleet.set_version(worker, None, 0)
        assert (await ask(client)).one(VERSION) is None


async def test_a_local_reply_has_no_weight_version():
    async with dataplane_and_client(resetting, config="[routing]\nmax_total_retries = 1") as (
        opened,
        client,
    ):
        opened.fleet.set_version(opened.fleet.workers[0], "v1", 1)
        response = await ask(client)
        assert (response.status, response.one(VERSION)) == (502, None)


@pytest.mark.parametrize(
    ("label", "epoch", "end_label"),
    [("v2", 2, "v2"), ("v1", 2, "v1"), (None, 0, "")],
    ids=["another", "the same name again", "not known yet"],
)
async def test_a_response_that_spans_an_update_has_both_versions(label, epoch, end_label):
    worker = Stepwise(b"", counted(b"good"))
    async with dataplane_and_client(worker) as (opened, client):
        (target,) = opened.fleet.workers
        opened.fleet.set_version(target, "v1", 1)
        await client.send(post(CHAT))
        await worker.received.wait()
        opened.fleet.set_version(target, label, epoch)
        worker.released.set()
        response = await client.answer()
        assert (response.one(VERSION), response.one(END)) == ("v1", end_label)
        assert response.one("x-omni-weight-epoch-end") == (str(epoch) if epoch else None)
        await until(lambda: opened.log.records)
        assert (opened.last["weight_version"], opened.last["weight_version_end"]) == (
            "v1",
            end_label,
        )
        assert opened.dataplane.status()["answers_across_versions"] == 1


async def test_a_stream_that_spans_an_update_is_logged_and_counted():
    worker = Stepwise(SSE_HEAD + chunk(b"data: a\n\n"), chunk(b"data: [DONE]\n\n") + LAST_CHUNK)
    async with dataplane_and_client(worker) as (opened, client):
        (target,) = opened.fleet.workers
        opened.fleet.set_version(target, "v1", 1)
        await client.send(post(STREAMED))
        await client.until(b"data: a\n\n")
        opened.fleet.set_version(target, "v2", 2)
        worker.released.set()
        await client.until(LAST_CHUNK)
        await until(lambda: opened.log.records)
        line = opened.last
        assert (line["weight_version"], line["weight_epoch"]) == ("v1", 1)
        assert line["weight_version_end"] == "v2"
        assert opened.dataplane.status()["answers_across_versions"] == 1
        await ask(client, body=STREAMED)  # the worker sends all of it at once
        await until(lambda: len(opened.log.records) == 2)
        assert (opened.last["weight_version"], opened.last["weight_version_end"]) == ("v2", None)
        assert opened.dataplane.status()["answers_across_versions"] == 1


async def test_a_retry_has_the_weight_version_of_the_worker_that_responded():
    async with dataplane_and_client(resetting, GOOD) as (opened, client):
        for number, worker in enumerate(opened.fleet.workers, 1):
            opened.fleet.set_version(worker, f"v{number}", number)
        response = await ask(client)
        assert (response.one("x-sglang-omni-route-attempt"), response.one(VERSION)) == ("2", "v2")
        assert response.one(END) is None


async def test_version_constraints_limit_the_choice_and_are_not_forwarded():
    async with dataplane_and_client(GOOD, GOOD, GOOD) as (opened, client):
        for number, worker in enumerate(opened.fleet.workers, 1):
            opened.fleet.set_version(worker, f"v{number}", number)
        for _ in range(3):
            assert (await ask(client, f"{VERSION}: =v2")).one(VERSION) == "v2"
            constrained = await ask(client, "X-Omni-Min-Weight-Epoch: 2", f"{VERSION}: =v3")
            assert constrained.one(VERSION) == "v3"
        epochs = {
            (await ask(client, "x-omni-min-weight-epoch: 2")).one("x-omni-weight-epoch")
            for _ in range(4)
        }
        assert epochs == {"2", "3"}
        assert not opened.workers[0].requests
        for worker in opened.workers:
            for call in worker.calls:
                assert not [name for name, _ in call.fields if name.startswith("x-omni-")]


@pytest.mark.parametrize(
    "field",
    [
        f"{VERSION}: v1",
        f"{VERSION}: =",
        "x-omni-min-weight-epoch: v1",
        "x-omni-min-weight-epoch: -1",
        "x-omni-min-weight-epoch: 1\r\nx-omni-min-weight-epoch: 2",
    ],
)
async def test_an_invalid_version_constraint_is_rejected(field):
    async with dataplane_and_client(GOOD) as (opened, client):
        assert (await ask(client, field)).status == 400
        assert not opened.workers[0].requests


async def test_without_a_queue_no_request_waits_for_weights():
    async with dataplane_and_client(GOOD) as (_, client):
        response = await ask(client, f"{VERSION}: =v2")
        assert (response.status, response.one("retry-after")) == (503, "1")
        error = json.loads(response.body)["error"]
        assert error["code"] == "weight_version_unavailable"
        assert "no eligible upstream" in error["message"]


async def test_with_a_queue_a_request_waits_until_a_worker_has_the_weights():
    async with dataplane_and_client(GOOD, config=QUEUED) as (opened, client):
        (worker,) = opened.fleet.workers
        await client.send(post(CHAT, "x-omni-min-weight-epoch: 3"))
        await until(lambda: opened.dataplane.queue.waiting)
        for epoch in (1, 2, 3):
            assert opened.dataplane.queue.waiting == 1
            opened.fleet.set_version(worker, f"v{epoch}", epoch)
        response = await client.answer()
        assert (response.status, response.one("x-omni-weight-epoch")) == (200, "3")


async def test_the_error_of_a_request_that_waited_too_long_names_missing_weights():
    config = f"{QUEUED}queue_timeout_secs = 0.05"
    async with dataplane_and_client(GOOD, config=config) as (_, client):
        response = await ask(client, f"{VERSION}: =v2")
        error = json.loads(response.body)["error"]
        assert (response.status, response.one("retry-after")) == (503, "1")
        assert (error["code"], error["reason"]) == (503, "weight_version_unavailable")


@pytest.mark.parametrize(
    ("reason", "rules", "code"),
    [
        ("updating", "[weight_sync]\nwhile_updating = 'shed'", "weights_updating"),
        ("uncertain", "[weight_sync]\nwhile_updating = 'shed'", "weights_uncertain"),
        ("paused", "[routing]\nwhile_paused = 'shed'", "paused"),
    ],
)
async def test_shed_rejects_requests_at_once_although_there_is_a_queue(reason, rules, code):
    async with dataplane_and_client(GOOD, config=QUEUED + rules) as (opened, client):
        (worker,) = opened.fleet.workers
        opened.fleet.cordon(worker, reason)
        response = await ask(client)
        error = json.loads(response.body)["error"]
        assert (response.status, response.one("retry-after"), error["code"]) == (503, "1", code)
        assert "s so far" in error["message"]
        opened.fleet.uncordon(worker, reason)
        assert (await ask(client)).status == 200


async def test_held_requests_get_no_error():
    async with (
        fake_workers(GOOD, GOOD) as workers,
        run_dataplane(*workers, config=QUEUED) as opened,
    ):
        responses = []

        async def send_one():
            async with opened.client() as client:
                responses.append(await ask(client))

        async with trio.open_nursery() as nursery:
            for worker in opened.fleet.workers:
                opened.fleet.cordon(worker, "updating")
            for _ in range(5):
                nursery.start_soon(send_one)
            await until(lambda: opened.dataplane.queue.waiting == 5)
            for worker in opened.fleet.workers:
                opened.fleet.set_version(worker, "v2", 1)
                opened.fleet.uncordon(worker, "updating")
        assert [(response.status, response.one(VERSION)) for response in responses] == [
            (200, "v2")
        ] * 5


async def update(running):
    response = await running.client.post("/update_weights_from_disk", json=UPDATE)
    assert response.status_code == 200


def config_of(fleet, rules, policy="round_robin"):
    more = f"queue_size = 9\n{rules}[routing]\npolicy = '{policy}'\n"
    return toml(fleet, more=more)


async def test_an_update_holds_requests_until_the_new_weights(tmp_path):
    file, responses = tmp_path / "proxy.toml", []
    async with engines(2) as fleet:
        file.write_text(config_of(fleet, ""))
        for engine in fleet:
            engine.wait_at("/update_weights_from_disk")
        async with program("--config", file) as running:
            await running.until_routable(*fleet)
            await running.until(
                "/workers",
                lambda body: (
                    {worker["weight_version"] for worker in body["workers"]} == {"default"}
                ),
            )
            assert (await running.ask()).headers[VERSION] == "default"

            async def send_one(**headers):
                responses.append(
                    await running.client.post(
                        "/v1/chat/completions", content=CHAT,
                        headers={"content-type": "application/json", **headers},
                    )
                )  # fmt: skip

            async with trio.open_nursery() as nursery:
                nursery.start_soon(update, running)
                for engine in fleet:
                    await engine.asked["/update_weights_from_disk"].wait()
                for _ in range(3):
                    nursery.start_soon(send_one)
                body = await running.until(
                    "/health", lambda body: body["admission"]["waiting"] == 3
                )
                assert body["status"] == "healthy"
                for engine in fleet:
                    engine.gates["/update_weights_from_disk"].set()
            labels = [(response.status_code, response.headers[VERSION]) for response in responses]
            assert labels == [(200, "v2")] * 3
            assert [response.headers["x-omni-weight-epoch"] for response in responses] == ["1"] * 3


@asynccontextmanager
async def updating(tmp_path, rule):
    """A program whose only worker is being updated, with this rule of `while_updating`."""
    file = tmp_path / "proxy.toml"
    async with engines(1) as (engine,):
        file.write_text(config_of([engine], f"[weight_sync]\nwhile_updating = '{rule}'\n"))
        engine.wait_at("/update_weights_from_disk")
        async with program("--config", file) as running, trio.open_nursery() as nursery:
            await running.until_routable(engine)
            nursery.start_soon(update, running)
            with trio.fail_after(PATIENCE_SECS):
                await engine.asked["/update_weights_from_disk"].wait()
            yield running
            engine.gates["/update_weights_from_disk"].set()


async def test_an_update_sheds_requests_if_so_configured(tmp_path):
    async with updating(tmp_path, "shed") as running:
        response = await running.ask()
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json()["error"]["code"] == "weights_updating"
        body = (await running.client.post("/explain", content=CHAT)).json()
        assert body["refusal"]["code"] == "weights_updating"
        assert body["workers"][0]["reasons"] == ["held: updating"]


async def test_requests_pass_during_an_update_if_so_configured(tmp_path):
    async with updating(tmp_path, "pass") as running:
        assert (await running.ask()).status_code == 200


async def test_a_request_waits_for_the_epoch_that_it_requires(tmp_path):
    file, responses = tmp_path / "proxy.toml", []
    min_epoch = {"x-omni-min-weight-epoch": "1", "content-type": "application/json"}
    async with engines(1) as (engine,):
        file.write_text(config_of([engine], ""))
        async with program("--config", file) as running:
            await running.until_routable(engine)
            body = (await running.client.post("/explain", content=CHAT, headers=min_epoch)).json()
            assert body["refusal"]["code"] == "weight_version_unavailable"
            assert "epoch 1 or later" in body["workers"][0]["reasons"][0]

            async def send_one():
                path = "/v1/chat/completions"
                responses.append(await running.client.post(path, content=CHAT, headers=min_epoch))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(send_one)
                await running.until("/health", lambda body: body["admission"]["waiting"] == 1)
                await update(running)
            assert responses[0].headers["x-omni-weight-epoch"] == "1"


async def test_an_update_that_flushes_clears_the_prefix_tree(tmp_path):
    file = tmp_path / "proxy.toml"
    async with engines(1) as (engine,):
        file.write_text(config_of([engine], "", policy="cache_aware"))
        async with program("--config", file) as running:
            await running.until_routable(engine)
            await running.ask()

            async def cached_after(**keys):
                path = "/update_weights_from_disk"
                response = await running.client.post(path, json=UPDATE | keys)
                assert response.status_code == 200
                return (await running.get_json("/status"))["data_plane"]["policy"][
                    "tree_size_by_worker"
                ]

            assert list(await cached_after(flush_cache=False)) == [engine.url]
            assert await cached_after() == {}
