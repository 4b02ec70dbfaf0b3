"""Replicas with roles, as processes; the test itself sends both legs, as a router does."""

import re
import signal
from contextlib import contextmanager
from itertools import count

import httpx
import pytest
import trio

from tests.ports import free_port
from tests.promises.support.replica_program import PATIENCE_SECS, healthy, started, until

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
VARYING = re.compile(r'"(id|request_id|created|created_at|item_id|e2e_latency)": ?[^,}]*')
SHORT_CLOCKS = ("--kv-lease-secs", "0.5", "--kv-wait-secs", "0.5")


def essence(response: httpx.Response) -> str:
    """The body without ids and times, which no two requests share."""
    return VARYING.sub("", response.text)


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


async def send_both(prefill, decode, path, body) -> tuple[httpx.Response, httpx.Response]:
    """Sends one body to both legs at the same time; returns both responses."""
    responses = {}

    async def ask(running):
        async with running.client() as client:
            await healthy(client)
            responses[running.port] = await client.post(path, json=body)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, prefill)
        nursery.start_soon(ask, decode)
    return responses[prefill.port], responses[decode.port]


async def post(running, path, body, **kwargs) -> httpx.Response:
    async with running.client() as client:
        await healthy(client)
        return await client.post(path, json=body, **kwargs)


async def clear_caches(*replicas) -> None:
    """Removes the prompts of earlier tests from the prefix caches."""
    for running in replicas:
        assert (await post(running, "/flush_cache", {})).status_code == 200


def first_leg(body) -> dict:
    """Returns the body that a router sends to a NIXL prefill worker."""
    transfer = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
    one_token = {"max_tokens": 1, "min_tokens": 1}  # as vllm-router sends it
    if "sampling_params" in body and "token_ids" in body:
        return body | transfer | {"sampling_params": body["sampling_params"] | one_token}
    limits = {"max_output_tokens": 1} if "input" in body else one_token
    return body | transfer | limits | {"stream": False}


async def keep_kv(prefill, path="/v1/chat/completions", body=CHAT, **kwargs) -> dict:
    response = await post(prefill, path, first_leg(body), **kwargs)
    assert response.status_code == 200, response.text
    return {"kv_transfer_params": response.json()["kv_transfer_params"]}


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
        del body["logprobs"]  # their last bits depend on the other prompts of a batch
    await clear_caches(prefill, whole)
    first, second = await send_both(prefill, decode, path, body | room(port, prompts))
    assert first.status_code == second.status_code == 200, first.text
    assert essence(second) == essence(await post(whole, path, body))


async def test_each_choice_has_its_own_room(sglang, whole):
    prefill, decode, port = sglang
    body = CHAT | {"n": 3, "temperature": 1.0, "seed": 7}
    await clear_caches(prefill, whole)
    _, second = await send_both(prefill, decode, "/v1/chat/completions", body | room(port, 3))
    expected = await post(whole, "/v1/chat/completions", body)
    # Which of them find the prompt in the prefix cache depends on timing: usage is not compared.
    assert second.json()["choices"] == expected.json()["choices"]


@pytest.mark.parametrize("path", [path for path in BODIES if path != "/generate"])
@pytest.mark.parametrize("stream", [False, True])
async def test_two_legs_of_one_handle_answer_as_one_replica(nixl, whole, path, stream):
    prefill, decode = nixl
    body = BODIES[path] | ({"prompt": TEXT} if path == "/v1/completions" else {})
    await clear_caches(prefill, whole)
    params = await keep_kv(prefill, path, body)
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


async def test_a_request_without_transfer_fields_fails_for_rooms_and_works_for_handles(
    sglang, nixl, whole
):
    for running in sglang[:2]:
        response = await post(running, "/generate", GENERATE)
        assert response.status_code == 400
        assert "without bootstrap room id" in response.text
    await clear_caches(*nixl, whole)
    expected = essence(await post(whole, "/v1/chat/completions", CHAT))
    for running in nixl:
        assert essence(await post(running, "/v1/chat/completions", CHAT)) == expected


async def test_a_used_handle_is_an_error_that_names_the_transfer(nixl):
    prefill, decode = nixl
    params = await keep_kv(prefill)
    assert (await post(decode, "/v1/chat/completions", CHAT | params)).status_code == 200
    again = await post(decode, "/v1/chat/completions", CHAT | params)
    assert again.status_code == 500
    assert "KVTransferError: " in again.text
    assert "fetched already" in again.text


async def test_a_room_in_use_is_rejected(sglang):
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


async def test_an_abort_by_rid_frees_a_queued_leg(sglang):
    prefill, _, port = sglang
    body = GENERATE | room(port) | {"rid": "0123456789abcdef"}
    responses = {}

    async def ask(running):
        responses[running.port] = await post(running, "/generate", body)

    async with trio.open_nursery() as nursery, prefill.client() as client:
        nursery.start_soon(ask, prefill)

        async def waiting():
            return (await transfers(prefill))["waiting"] == 1

        await healthy(client)
        await until(waiting)
        response = await client.post("/abort_request", json={"rid": "0123456789abcdef"})
        assert response.status_code == 200
    assert responses[prefill.port].json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert (await transfers(prefill))["waiting"] == 0


async def test_more_prompts_than_fit_a_batch_find_their_rooms(sglang, whole):
    prefill, decode, port = sglang
    prompts = [f"{number} {TEXT[:40]}" for number in range(70)]
    body = {"prompt": prompts, "temperature": 0, "max_tokens": 3}
    _, second = await send_both(prefill, decode, "/v1/completions", body | room(port, len(prompts)))
    assert second.status_code == 200, second.text
    expected = (await post(whole, "/v1/completions", body)).json()["choices"]
    assert [choice["text"] for choice in second.json()["choices"]] == [
        choice["text"] for choice in expected
    ]


async def test_each_prompt_of_a_batch_keeps_its_id(sglang):
    prefill, decode, port = sglang
    body = GENERATE | {"text": [TEXT, "short"], "rid": ["77_0", "77_1"]}
    _, second = await send_both(prefill, decode, "/generate", body | room(port, 2))
    assert [result["meta_info"]["id"] for result in second.json()] == ["77_0", "77_1"]
    too_few = await post(decode, "/generate", body | room(port, 2) | {"rid": ["77_0"]})
    assert (too_few.status_code, "rid has 1 elements" in too_few.text) == (400, True)


async def test_an_abort_by_the_common_id_prefix_ends_all_prompts_of_a_batch(sglang):
    prefill, _, port = sglang
    body = GENERATE | {"text": [TEXT, "short"], "rid": ["88_0", "88_1"]} | room(port, 2)
    responses = []

    async def ask():
        responses.append(await post(prefill, "/generate", body))

    async def waiting():
        return (await transfers(prefill))["waiting"] == 2

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await until(waiting)
        await post(prefill, "/abort_request", {"rid": "88"})
    assert [result["meta_info"]["finish_reason"]["type"] for result in responses[0].json()] == [
        "abort"
    ] * 2


async def test_an_abort_by_request_id_frees_a_kept_kv(nixl):
    prefill, decode = nixl
    for path, body in (
        ("/abort_request", {"rid": "0123"}),
        ("/abort_requests", {"request_ids": ["chatcmpl-0123"]}),
    ):
        params = await keep_kv(prefill, headers={"X-Request-Id": "0123"})
        assert (await transfers(prefill))["kept"] == 1
        assert (await post(prefill, path, body)).status_code == 200
        assert (await transfers(prefill))["kept"] == 0
        failed = await post(decode, "/v1/chat/completions", CHAT | params)
        assert "its request was aborted" in failed.text


async def test_a_client_that_leaves_the_prefill_leg_ends_the_decode_leg(sglang):
    prefill, decode, port = sglang
    body = GENERATE | room(port)
    responses = []

    async def decoding():
        responses.append(await post(decode, "/generate", body))

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

                async def both_legs_met():
                    state = await transfers(decode)
                    return state["fetching"] == 1 and (await transfers(prefill))["waiting"] == 0

                await until(both_legs_met)
                leaving.cancel_scope.cancel()
    assert responses[0].status_code == 500
    assert "KVTransferError" in responses[0].text
    await post(prefill, "/continue_generation", {})


async def test_timeouts_end_requests_whose_other_leg_is_missing():
    words = ("--role", "decode", *SHORT_CLOCKS)
    with prefill_replica("sglang", *SHORT_CLOCKS) as (prefill, port), replica(*words) as decode:
        for running in (prefill, decode):
            with trio.fail_after(PATIENCE_SECS):
                alone = await post(running, "/generate", GENERATE | room(port))
            assert alone.status_code == 500
            assert "KVTransferError" in alone.text


async def test_a_kept_kv_is_freed_when_its_lease_expires():
    words = ("--role", "decode", "--kv-connector", "nixl")
    with prefill_replica("nixl", *SHORT_CLOCKS) as (prefill, _), replica(*words) as decode:
        params = await keep_kv(prefill)

        async def freed():
            return (await transfers(prefill))["kept_bytes"] == 0

        await until(freed)
        failed = await post(decode, "/v1/chat/completions", CHAT | params)
        assert (failed.status_code, "within 0.5 s" in failed.text) == (500, True)


async def test_a_killed_or_restarted_prefill_worker_is_an_error_and_decode_continues(nixl, whole):
    _, decode = nixl
    await clear_caches(whole)
    expected = essence(await post(whole, "/v1/chat/completions", CHAT))
    with prefill_replica("nixl") as (prefill, port):
        params = await keep_kv(prefill)
        prefill.process.send_signal(signal.SIGKILL)
        prefill.process.wait(PATIENCE_SECS)
        lost = await post(decode, "/v1/chat/completions", CHAT | params)
        assert (lost.status_code, "KVTransferError" in lost.text) == (500, True)
        words = ("--role", "prefill", "--bootstrap-port", str(port), "--kv-connector", "nixl")
        with replica(*words) as again:
            renewed = await keep_kv(again)
            stale = await post(decode, "/v1/chat/completions", CHAT | params)
            assert (stale.status_code, "restarted since" in stale.text) == (500, True)
            response = await post(decode, "/v1/chat/completions", CHAT | renewed)
    assert essence(response) == expected


async def test_a_prefill_worker_killed_while_decode_waits_is_an_error_at_once(sglang):
    _, decode, _ = sglang
    with prefill_replica("sglang") as (prefill, port):
        body = GENERATE | room(port)
        responses = []

        async def decoding():
            responses.append(await post(decode, "/generate", body))

        async with trio.open_nursery() as nursery, prefill.client() as client:
            await healthy(client)
            nursery.start_soon(decoding)

            async def fetching():
                return (await transfers(decode))["fetching"] == 1

            await until(fetching)
            prefill.process.send_signal(signal.SIGKILL)
    assert responses[0].status_code == 500
    assert "KVTransferError" in responses[0].text


async def test_an_update_between_the_legs_is_an_error_until_both_are_updated(nixl):
    prefill, decode = nixl
    params = await keep_kv(prefill)
    update = {"model_path": "tiny", "weight_version": "v2"}
    assert (await post(decode, "/update_weights_from_disk", update)).status_code == 200
    failed = await post(decode, "/v1/chat/completions", CHAT | params)
    assert failed.status_code == 500
    assert "'default' at prefill, 'v2' at decode" in failed.text
    params = await keep_kv(prefill)
    assert (await post(prefill, "/update_weights_from_disk", update)).status_code == 200
    failed = await post(decode, "/v1/chat/completions", CHAT | params)
    assert "the weights have changed since" in failed.text
    params = await keep_kv(prefill)
    assert (await post(decode, "/v1/chat/completions", CHAT | params)).status_code == 200
