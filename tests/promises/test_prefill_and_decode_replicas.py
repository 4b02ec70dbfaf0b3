"""Replicas with roles, as processes; the test is the router between client and both legs."""

import re
import signal
from contextlib import contextmanager
from itertools import count

import httpx
import pytest
import trio

from tests.ports import free_port
from tests.promises.replica_program import PATIENCE_SECS, healthy, started, until

ROOMS = count(2**40)
TEXT = "The sea is wide and the wind is cold. " * 12
CHAT = {"messages": [{"role": "user", "content": TEXT}], "temperature": 0, "max_tokens": 24}
GENERATE = {
    "text": TEXT,
    "sampling_params": {"temperature": 0.9, "sampling_seed": 3, "max_new_tokens": 24},
    "return_logprob": True,
}
COMPLETION = {"prompt": [TEXT, "short"], "temperature": 0, "max_tokens": 12, "logprobs": 2}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/generate": GENERATE,
    "/v1/completions": COMPLETION,
    "/v1/responses": {"input": TEXT, "temperature": 0, "max_output_tokens": 12},
    "/v1/messages": {"model": "tiny", "messages": CHAT["messages"], "max_tokens": 12, "top_k": 1},
    "/inference/v1/generate": {
        "token_ids": [300 + place for place in range(90)],
        "sampling_params": {"temperature": 0, "max_tokens": 12},
    },
}
OWN = re.compile(r'"(id|request_id|created|created_at|item_id|e2e_latency)": ?[^,}]*')
SHORT_CLOCKS = ("--kv-lease-secs", "0.5", "--kv-wait-secs", "0.5")


def essence(response: httpx.Response) -> str:
    """The body without ids and times, which no two requests share."""
    return OWN.sub("", response.text)


@contextmanager
def replica(*words):
    with started("--model", "tiny", *words) as running:
        yield running


@contextmanager
def prefill_replica(connector, *words):
    port = free_port()
    arguments = ("--role", "prefill", "--bootstrap-port", str(port), "--kv-connector", connector)
    with replica(*arguments, *words) as running:
        yield running, port


@pytest.fixture(scope="module")
def whole():
    with replica() as running:
        yield running


@pytest.fixture(scope="module")
def sglang():
    with prefill_replica("sglang") as (prefill, port), replica("--role", "decode") as decode:
        yield prefill, decode, port


@pytest.fixture(scope="module")
def nixl():
    decode_words = ("--role", "decode", "--kv-connector", "nixl")
    with prefill_replica("nixl") as (prefill, _), replica(*decode_words) as decode:
        yield prefill, decode


def room(port, prompts=0) -> dict:
    """The bootstrap fields of one pair of legs."""
    fields = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": next(ROOMS)}
    if not prompts:
        return fields
    rooms = [next(ROOMS) for _ in range(prompts)]
    return {name: [value] * prompts for name, value in fields.items()} | {"bootstrap_room": rooms}


async def both(prefill, decode, path, body) -> tuple[httpx.Response, httpx.Response]:
    """One body to both legs at the same time."""
    answers = {}

    async def ask(running):
        async with running.client() as client:
            await healthy(client)
            answers[running.port] = await client.post(path, json=body)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, prefill)
        nursery.start_soon(ask, decode)
    return answers[prefill.port], answers[decode.port]


async def post(running, path, body, **kwargs) -> httpx.Response:
    async with running.client() as client:
        await healthy(client)
        return await client.post(path, json=body, **kwargs)


async def fresh(*replicas) -> None:
    """Nothing of earlier tests is in their prefix caches."""
    for running in replicas:
        assert (await post(running, "/flush_cache", {})).status_code == 200


def first_leg(body) -> dict:
    """A body as a router sends it to a NIXL prefill worker."""
    wanted = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
    one = {"max_tokens": 1, "min_tokens": 1}  # as vllm-router sends it
    if "sampling_params" in body and "token_ids" in body:
        return body | wanted | {"sampling_params": body["sampling_params"] | one}
    limits = {"max_output_tokens": 1} if "input" in body else one
    return body | wanted | limits | {"stream": False}


async def kept(prefill, path="/v1/chat/completions", body=CHAT, **kwargs) -> dict:
    answer = await post(prefill, path, first_leg(body), **kwargs)
    assert answer.status_code == 200, answer.text
    return {"kv_transfer_params": answer.json()["kv_transfer_params"]}


async def transfers(running) -> dict:
    async with running.client() as client:
        return (await client.get("/server_info")).json()["kv_transfer"]


@pytest.mark.parametrize("path", [path for path in BODIES if not path.startswith("/inference")])
@pytest.mark.parametrize("stream", [False, True])
async def test_two_legs_of_a_room_answer_as_one_replica(sglang, whole, path, stream):
    prefill, decode, port = sglang
    body = BODIES[path] | {"stream": stream}
    prompts = 0
    if path == "/v1/completions" and stream:
        body["prompt"] = TEXT
    elif path == "/v1/completions":
        prompts = 2
        del body["logprobs"]  # whose last bits depend on what else is in a batch
    await fresh(prefill, whole)
    first, second = await both(prefill, decode, path, body | room(port, prompts))
    assert first.status_code == second.status_code == 200, first.text
    assert essence(second) == essence(await post(whole, path, body))


async def test_choices_have_a_room_each(sglang, whole):
    prefill, decode, port = sglang
    body = CHAT | {"n": 3, "temperature": 1.0, "seed": 7}
    await fresh(prefill, whole)
    _, second = await both(prefill, decode, "/v1/chat/completions", body | room(port, 3))
    expected = await post(whole, "/v1/chat/completions", body)
    # Which of them finds the prompt of another in the prefix cache is a matter of time.
    assert second.json()["choices"] == expected.json()["choices"]


@pytest.mark.parametrize("path", [path for path in BODIES if path != "/generate"])
@pytest.mark.parametrize("stream", [False, True])
async def test_two_legs_of_one_handle_answer_as_one_replica(nixl, whole, path, stream):
    prefill, decode = nixl
    body = BODIES[path] | ({"prompt": TEXT} if path == "/v1/completions" else {})
    await fresh(prefill, whole)
    params = await kept(prefill, path, body)
    second = await post(decode, path, body | {"stream": stream} | params)
    assert second.status_code == 200, second.text
    assert essence(second) == essence(await post(whole, path, body | {"stream": stream}))
    assert (await transfers(prefill))["kept"] == 0


async def test_server_info_has_the_role(sglang, whole):
    prefill, decode, port = sglang
    for running, role in ((prefill, "prefill"), (decode, "decode"), (whole, "null")):
        async with running.client() as client:
            await healthy(client)
            info = (await client.get("/server_info")).json()
            assert info["disaggregation_mode"] == role
            assert (await client.get("/health_generate")).status_code == 200
    async with httpx.AsyncClient(verify=False) as client:
        (rank,) = (await client.get(f"http://127.0.0.1:{port}/query")).json().values()
    assert rank["engine_id"] == (await transfers(prefill))["engine_id"]


async def test_a_request_that_no_router_prepared(sglang, nixl, whole):
    for running in sglang[:2]:
        answer = await post(running, "/generate", GENERATE)
        assert answer.status_code == 400
        assert "without bootstrap room id" in answer.text
    await fresh(*nixl, whole)
    expected = essence(await post(whole, "/v1/chat/completions", CHAT))
    for running in nixl:
        assert essence(await post(running, "/v1/chat/completions", CHAT)) == expected


async def test_a_used_handle_is_an_error_that_names_the_transfer(nixl):
    prefill, decode = nixl
    params = await kept(prefill)
    assert (await post(decode, "/v1/chat/completions", CHAT | params)).status_code == 200
    again = await post(decode, "/v1/chat/completions", CHAT | params)
    assert again.status_code == 500
    assert "KVTransferError: " in again.text
    assert "fetched already" in again.text


async def test_a_room_twice_is_refused(sglang):
    prefill, decode, port = sglang
    body = GENERATE | room(port)
    async with trio.open_nursery() as nursery, prefill.client() as client:
        await healthy(client)

        async def waiting():
            return (await transfers(prefill))["waiting"] == 1

        nursery.start_soon(post, prefill, "/generate", body)
        await until(waiting)
        refused = await client.post("/generate", json=body)
        assert (refused.status_code, "is in use" in refused.text) == (400, True)
        assert (await post(decode, "/generate", body)).status_code == 200


async def test_a_queued_leg_is_freed_by_its_rid(sglang):
    prefill, _, port = sglang
    body = GENERATE | room(port) | {"rid": "0123456789abcdef"}
    ends = {}

    async def ask(running):
        ends[running.port] = await post(running, "/generate", body)

    async with trio.open_nursery() as nursery, prefill.client() as client:
        nursery.start_soon(ask, prefill)

        async def waiting():
            return (await transfers(prefill))["waiting"] == 1

        await healthy(client)
        await until(waiting)
        answer = await client.post("/abort_request", json={"rid": "0123456789abcdef"})
        assert answer.status_code == 200
    assert ends[prefill.port].json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert (await transfers(prefill))["waiting"] == 0


async def test_more_prompts_than_are_computed_at_once_find_their_rooms(sglang, whole):
    prefill, decode, port = sglang
    prompts = [f"{number} {TEXT[:40]}" for number in range(70)]
    body = {"prompt": prompts, "temperature": 0, "max_tokens": 3}
    _, second = await both(prefill, decode, "/v1/completions", body | room(port, len(prompts)))
    assert second.status_code == 200, second.text
    expected = (await post(whole, "/v1/completions", body)).json()["choices"]
    assert [each["text"] for each in second.json()["choices"]] == [
        each["text"] for each in expected
    ]


async def test_each_prompt_of_a_batch_has_the_id_that_it_was_given(sglang):
    prefill, decode, port = sglang
    body = GENERATE | {"text": [TEXT, "short"], "rid": ["77_0", "77_1"]}
    _, second = await both(prefill, decode, "/generate", body | room(port, 2))
    assert [each["meta_info"]["id"] for each in second.json()] == ["77_0", "77_1"]
    too_few = await post(decode, "/generate", body | room(port, 2) | {"rid": ["77_0"]})
    assert (too_few.status_code, "rid has 1 elements" in too_few.text) == (400, True)


async def test_the_prompts_of_a_batch_are_ended_by_the_id_that_they_begin_with(sglang):
    prefill, _, port = sglang
    body = GENERATE | {"text": [TEXT, "short"], "rid": ["88_0", "88_1"]} | room(port, 2)
    ends = []

    async def ask():
        ends.append(await post(prefill, "/generate", body))

    async def waiting():
        return (await transfers(prefill))["waiting"] == 2

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await until(waiting)
        await post(prefill, "/abort_request", {"rid": "88"})
    assert [each["meta_info"]["finish_reason"]["type"] for each in ends[0].json()] == ["abort"] * 2


async def test_a_kept_kv_is_freed_by_its_requests_id(nixl):
    prefill, decode = nixl
    for path, body in (
        ("/abort_request", {"rid": "0123"}),
        ("/abort_requests", {"request_ids": ["chatcmpl-0123"]}),
    ):
        params = await kept(prefill, headers={"X-Request-Id": "0123"})
        assert (await transfers(prefill))["kept"] == 1
        assert (await post(prefill, path, body)).status_code == 200
        assert (await transfers(prefill))["kept"] == 0
        failed = await post(decode, "/v1/chat/completions", CHAT | params)
        assert "its request was aborted" in failed.text


async def test_a_client_that_leaves_the_prefill_leg_ends_the_decode_leg(sglang):
    prefill, decode, port = sglang
    body = GENERATE | room(port)
    ends = []

    async def decoding():
        ends.append(await post(decode, "/generate", body))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(post, prefill, "/pause_generation", {"mode": "in_place"})

        async def paused():
            async with prefill.client() as client:
                return (await client.get("/is_paused")).json()["is_paused"]

        await until(paused)
        with trio.move_on_after(PATIENCE_SECS):
            async with trio.open_nursery() as leaving:
                leaving.start_soon(post, prefill, "/generate", body)
                nursery.start_soon(decoding)

                async def met():
                    facts = await transfers(decode)
                    return facts["fetching"] == 1 and (await transfers(prefill))["waiting"] == 0

                await until(met)
                leaving.cancel_scope.cancel()
    assert ends[0].status_code == 500
    assert "KVTransferError" in ends[0].text
    await post(prefill, "/continue_generation", {})


async def test_timeouts_end_requests_whose_other_leg_is_missing():
    words = ("--role", "decode", *SHORT_CLOCKS)
    with prefill_replica("sglang", *SHORT_CLOCKS) as (prefill, port), replica(*words) as decode:
        for running in (prefill, decode):
            with trio.fail_after(PATIENCE_SECS):
                alone = await post(running, "/generate", GENERATE | room(port))
            assert alone.status_code == 500
            assert "KVTransferError" in alone.text


async def test_a_lease_ends():
    words = ("--role", "decode", "--kv-connector", "nixl")
    with prefill_replica("nixl", *SHORT_CLOCKS) as (prefill, _), replica(*words) as decode:
        params = await kept(prefill)

        async def freed():
            return (await transfers(prefill))["kept_bytes"] == 0

        await until(freed)
        failed = await post(decode, "/v1/chat/completions", CHAT | params)
        assert (failed.status_code, "within 0.5 s" in failed.text) == (500, True)


async def test_a_killed_or_restarted_prefill_is_an_error_at_once_and_decode_continues(nixl, whole):
    _, decode = nixl
    await fresh(whole)
    expected = essence(await post(whole, "/v1/chat/completions", CHAT))
    with prefill_replica("nixl") as (prefill, port):
        params = await kept(prefill)
        prefill.process.send_signal(signal.SIGKILL)
        prefill.process.wait(PATIENCE_SECS)
        lost = await post(decode, "/v1/chat/completions", CHAT | params)
        assert (lost.status_code, "KVTransferError" in lost.text) == (500, True)
        words = ("--role", "prefill", "--bootstrap-port", str(port), "--kv-connector", "nixl")
        with replica(*words) as again:
            renewed = await kept(again)
            stale = await post(decode, "/v1/chat/completions", CHAT | params)
            assert (stale.status_code, "restarted since" in stale.text) == (500, True)
            answer = await post(decode, "/v1/chat/completions", CHAT | renewed)
    assert essence(answer) == expected


async def test_a_prefill_killed_while_decode_waits_for_it_is_an_error_at_once(sglang):
    _, decode, _ = sglang
    with prefill_replica("sglang") as (prefill, port):
        body = GENERATE | room(port)
        ends = []

        async def decoding():
            ends.append(await post(decode, "/generate", body))

        async with trio.open_nursery() as nursery, prefill.client() as client:
            await healthy(client)
            nursery.start_soon(decoding)

            async def fetching():
                return (await transfers(decode))["fetching"] == 1

            await until(fetching)
            prefill.process.send_signal(signal.SIGKILL)
    assert ends[0].status_code == 500
    assert "KVTransferError" in ends[0].text


async def test_new_weights_between_the_legs_are_an_error_and_after_both_are_updated_none(nixl):
    prefill, decode = nixl
    params = await kept(prefill)
    update = {"model_path": "tiny", "weight_version": "v2"}
    assert (await post(decode, "/update_weights_from_disk", update)).status_code == 200
    failed = await post(decode, "/v1/chat/completions", CHAT | params)
    assert failed.status_code == 500
    assert "'default' at prefill, 'v2' at decode" in failed.text
    params = await kept(prefill)
    assert (await post(prefill, "/update_weights_from_disk", update)).status_code == 200
    failed = await post(decode, "/v1/chat/completions", CHAT | params)
    assert "the weights have changed since" in failed.text
    params = await kept(prefill)
    assert (await post(decode, "/v1/chat/completions", CHAT | params)).status_code == 200
