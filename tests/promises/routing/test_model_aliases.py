"""Model aliases through a data plane on a real port: what workers receive and what is logged."""

import json
from collections import Counter
from contextlib import asynccontextmanager

import pytest
import trio

from tests.dataplane.loop_script import until
from tests.promises.support.clients import post
from tests.promises.support.dataplane_fixture import run_dataplane
from tests.promises.support.fakes import answering, counted, fake_workers, unreachable_url

MIB = 1024 * 1024
FORM_KIND = "content-type: multipart/form-data; boundary=b"
BUSY = counted(b"", status="503 Service Unavailable")


def worker(url, model, more=""):
    return f'[[workers]]\nurl = "{url}"\nmodel = "{model}"\n{more}\n'


def alias(*targets, name="alias", rewrite=True):
    listed = ", ".join(f'{{ model = "{model}", weight = {weight} }}' for model, weight in targets)
    return (
        f'[[routing.models]]\nname = "{name}"\ntargets = [{listed}]\n'
        f"rewrite = {str(rewrite).lower()}\n"
    )


def chat(model="alias", **more):
    return json.dumps({"model": model, "messages": [], **more}).encode()


def models_of(worker):
    return Counter(json.loads(body)["model"] for _, body in worker.requests)


@asynccontextmanager
async def two_models(
    *scripts, targets=(("big", 3), ("small", 1)), rewrite=True, more="", name="alias"
):
    ok = answering(counted(b"{}"))
    async with fake_workers(*(scripts or [ok, ok])) as workers:
        config = more + alias(*targets, rewrite=rewrite, name=name)
        config += worker(workers[0].url, "big") + worker(workers[1].url, "small")
        async with run_dataplane(config=config) as opened, opened.client() as client:
            yield workers, opened, client


async def ask(client, body, *fields, **more):
    await client.send(post(body, *fields, **more))
    return await client.answer()


async def test_an_alias_is_split_by_weight_and_each_worker_gets_its_own_model():
    async with two_models() as ((big, small), opened, client):
        for _ in range(20):
            assert (await ask(client, chat())).status == 200
        assert (models_of(big), models_of(small)) == ({"big": 15}, {"small": 5})
        targets = Counter((row["model"], row["target_model"]) for row in opened.log.records)
        assert targets == {("alias", "big"): 15, ("alias", "small"): 5}


async def test_a_bearer_key_shared_by_all_clients_does_not_bind_them_to_a_target():
    async with two_models() as ((big, small), _, client):
        for _ in range(8):
            await ask(client, chat(), "authorization: Bearer all-the-same")
        assert (len(big.requests), len(small.requests)) == (6, 2)


@pytest.mark.parametrize("more", ["", "[routing]\nsticky_sessions = true\n"])
async def test_a_session_stays_at_one_target(more):
    async with two_models(targets=(("big", 1), ("small", 1)), more=more) as (
        (big, small),
        _,
        client,
    ):
        for number in range(12):
            before = len(big.requests)
            for _ in range(3):
                await ask(client, chat(), f"x-session-id: s{number}")
            assert len(big.requests) - before in (0, 3)
        assert big.requests
        assert small.requests


async def test_without_rewrite_the_body_is_unchanged():
    async with two_models(rewrite=False) as ((big, small), _, client):
        body = b'{ "model":"\\u0061lias", "messages" : [] , "temperature":0.10}'
        for _ in range(4):
            await ask(client, body)
        assert [received for _, received in big.requests + small.requests] == [body] * 4


async def test_only_the_model_name_changes_in_a_request_and_nothing_in_its_response():
    reply = b'{"model": "the engine\'s own", "object": "chat.completion"}'
    async with two_models(*[answering(counted(reply))] * 2) as ((big, _), __, client):
        response = await ask(client, b'{"a":1e3,  "model" :"alias" ,"b":"\\u00e9"}')
        assert response.body == reply
        assert big.requests[0][1] == b'{"a":1e3,  "model" :"big" ,"b":"\\u00e9"}'


async def test_an_alias_with_the_name_of_a_model_is_routed_to_its_targets():
    async with two_models(name="big", targets=(("small", 2), ("big", 1))) as (workers, _, client):
        for _ in range(3):
            await ask(client, chat("big"))
        assert [models_of(worker) for worker in workers] == [{"big": 1}, {"small": 2}]


async def test_a_retry_keeps_its_target_until_it_has_no_worker_left():
    ok = answering(counted(b"{}"))
    async with fake_workers(ok, ok) as (big, small), unreachable_url() as dead:
        config = alias(("big", 1), ("small", 1))
        config += worker(dead, "big") + worker(big.url, "big") + worker(small.url, "small")
        async with run_dataplane(config=config) as opened, opened.client() as client:
            for _ in range(4):
                assert (await ask(client, chat())).status == 200
            retried = [row for row in opened.log.records if row["attempts"] > 1]
            assert retried
            assert {row["target_model"] for row in retried} == {"big"}
            assert (len(big.requests), len(small.requests)) == (2, 2)
    async with fake_workers(ok) as (small,), unreachable_url() as dead:
        config = alias(("big", 1), ("small", 1)) + worker(dead, "big") + worker(small.url, "small")
        async with run_dataplane(config=config) as opened, opened.client() as client:
            for _ in range(2):
                assert (await ask(client, chat())).status == 200
            assert models_of(small) == {"small": 2}
            assert opened.log.records[0]["attempts"] == 2
            assert opened.log.records[0]["target_model"] == "small"


async def test_a_request_to_a_busy_target_is_retried_at_another_target():
    ok = answering(counted(b"{}"))
    async with two_models(answering(BUSY), ok) as ((big, small), _, client):
        assert (await ask(client, chat())).status == 200
        assert (models_of(big), models_of(small)) == ({"big": 1}, {"small": 1})


async def test_an_alias_of_models_without_workers_is_an_unknown_model():
    async with two_models(targets=(("x", 1), ("y", 1))) as (_, opened, client):
        response = await ask(client, chat())
        error = json.loads(response.body)["error"]
        assert (response.status, error["code"]) == (503, "model_not_found")
        assert "'alias' is an alias of 'x', 'y'" in error["message"]
        assert (opened.last["model"], opened.last["target_model"]) == ("alias", None)


async def test_a_queued_request_for_an_alias_takes_the_first_target_with_capacity():
    release = trio.Event()

    async def slow(call):
        await release.wait()
        await call.send(counted(b"{}"))

    async with fake_workers(slow, answering(counted(b"{}"))) as (big, small):
        config = "[server]\nqueue_size = 10\n" + alias(("big", 3), ("small", 1))
        config += worker(big.url, "big", "max_inflight = 1")
        config += worker(small.url, "small", "disabled = true")
        async with run_dataplane(config=config) as opened, trio.open_nursery() as nursery:
            responses = []

            async def send_one():
                async with opened.client() as client:
                    responses.append(await ask(client, chat()))

            nursery.start_soon(send_one)
            while not big.requests:
                await trio.sleep(0.005)
            nursery.start_soon(send_one)
            while not opened.dataplane.queue.waiting:
                await trio.sleep(0.005)
            opened.apply_workers(config.replace("disabled = true", ""))
            while not responses:
                await trio.sleep(0.005)
            assert models_of(small) == {"small": 1}
            release.set()
        assert [response.status for response in responses] == [200, 200]


async def test_weights_change_without_a_restart_and_move_few_sessions():
    async with two_models(targets=(("big", 1), ("small", 1))) as ((big, small), opened, client):

        async def targets_of_sessions():
            targets = []
            for number in range(30):
                before = len(big.requests)
                await ask(client, chat(), f"x-session-id: s{number}")
                targets.append("big" if len(big.requests) > before else "small")
            return targets

        first = await targets_of_sessions()
        workers = worker(big.url, "big") + worker(small.url, "small")
        opened.reload(alias(("big", 3), ("small", 1)) + workers)
        second = await targets_of_sessions()
        assert {pair for pair in zip(first, second, strict=True) if pair[0] != pair[1]} <= {
            ("small", "big")
        }
        assert second.count("small") > 0
        opened.reload(workers)
        assert (await ask(client, chat())).status == 503


def form(model=b"alias", file=b"RIFF"):
    return (
        b'--b\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
        + file
        + b'\r\n--b\r\ncontent-disposition: form-data; name="model"\r\n\r\n'
        + model
        + b"\r\n--b--\r\n"
    )


@pytest.mark.parametrize("size", [4, 300_000, 2 * MIB])
async def test_the_model_of_a_form_of_any_size_is_rewritten(size):
    async with two_models() as ((big, small), opened, client):
        response = await ask(
            client, form(file=b"x" * size), path="/v1/audio/transcriptions", kind=FORM_KIND
        )
        assert response.status == 200
        assert big.requests[0][1] == form(b"big", b"x" * size)
        assert not small.requests
        assert opened.dataplane.inflight.held_bytes == 0


@pytest.mark.parametrize("size", [300_000, 2 * MIB, 9 * MIB])
@pytest.mark.parametrize("hinted", [False, True])
async def test_a_large_json_body_is_read_whole_and_rewritten(size, hinted):
    hints = ["x-sglang-omni-route-model: alias", "x-sglang-omni-route-capabilities: chat"]
    async with two_models() as ((big, _), opened, client):
        body = b'{"prompt": "%b", "model": "alias"}' % (b"x" * size)
        response = await ask(client, body, *(hints if hinted else []), path="/v1/completions")
        assert response.status == 200
        assert big.requests[0][1] == body.replace(b"alias", b"big")
        assert opened.dataplane.inflight.held_bytes == 0


async def test_a_body_without_a_model_is_unchanged_and_its_header_names_the_alias():
    async with two_models() as ((big, _), opened, client):
        await ask(client, b'{"messages": []}', "x-sglang-omni-route-model: alias")
        assert big.requests[0][1] == b'{"messages": []}'
        assert opened.last["target_model"] == "big"


async def test_each_item_of_a_speech_batch_gets_the_target():
    async with two_models() as ((big, _), __, client):
        body = b'{"model": "alias", "items": [{"input": "a", "model": "alias"}, {"input": "b"}]}'
        response = await ask(client, body, path="/v1/audio/speech/batch")
        assert response.status == 200
        assert big.requests[0][1] == body.replace(b"alias", b"big")


async def test_a_session_waits_for_its_target_while_the_worker_is_updated():
    more = "[server]\nqueue_size = 5\n[routing]\nsticky_sessions = true\n"
    more += "[weight_sync]\nwhile_updating = 'hold'\n"
    async with two_models(more=more) as ((big, small), opened, client):
        sessions = (f"x-session-id: s{number}" for number in range(100))
        while not small.requests:
            session = next(sessions)
            await ask(client, chat(), session)
        requests_of_big = len(big.requests)
        worker_of_small = opened.fleet.find(small.url)
        opened.fleet.cordon(worker_of_small, "updating")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, client, chat(), session)
            await until(lambda: opened.dataplane.queue.waiting == 1)
            opened.fleet.uncordon(worker_of_small, "updating")
        assert (len(big.requests), models_of(small)) == (requests_of_big, {"small": 2})
