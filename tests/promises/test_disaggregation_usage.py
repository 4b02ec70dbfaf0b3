"""Token counts of a request in two legs: the client gets what the decode engine says, unchanged.

Engines count what came from the prefill worker in different ways; some routers write over it.
"""

import json

import pytest

from tests.promises.clients import post
from tests.promises.disaggregated_engines import fleet_of
from tests.promises.test_disaggregation_sglang import events

CONNECTORS = ["sglang", "nixl", "mooncake"]
OF_PREFILL = {"prompt_tokens": 40, "completion_tokens": 1, "cached_tokens": 3}
OF_DECODE = {"prompt_tokens": 40, "completion_tokens": 9, "cached_tokens": 39}


def details(usage):
    """As vLLM writes it."""
    cached = {"cached_tokens": usage["cached_tokens"]}
    return {"prompt_tokens": usage["prompt_tokens"], "prompt_tokens_details": cached}


def request_of(connector, **fields):
    if connector == "sglang":
        return post(json.dumps({"text": "a prompt", **fields}).encode(), path="/generate")
    return post(json.dumps({"messages": [], **fields}).encode())


def tell(fleet, connector):
    """What both engines say of their caches."""
    ours = (OF_PREFILL, OF_DECODE)
    of_prefill, of_decode = ours if connector == "sglang" else map(details, ours)
    fleet.prefills[0].usage, fleet.decodes[0].usage = of_prefill, of_decode
    return of_decode


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_client_gets_the_token_counts_of_the_decode_engine(connector, stream):
    async with fleet_of(connector) as (fleet, client):
        expected = tell(fleet, connector)
        for _ in range(3):
            await client.send(request_of(connector, stream=stream))
            answer = await client.answer()
            items = events(answer.body) if stream else [json.loads(answer.body)]
            counts = items[-1]["meta_info"] if connector == "sglang" else items[-1]["usage"]
            assert expected.items() <= counts.items()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("many", [False, True])
async def test_neither_a_merge_of_log_probabilities_nor_a_rid_changes_them(stream, many):
    async with fleet_of("sglang") as (fleet, client):
        expected = tell(fleet, "sglang")
        text, rid = (["a", "b"], ["x", "y"]) if many else ("a", "x")
        await client.send(
            request_of("sglang", text=text, rid=rid, return_logprob=True, stream=stream)
        )
        answer = await client.answer()
        whole = events(answer.body) if stream else json.loads(answer.body)
        for item in whole if isinstance(whole, list) else [whole]:
            meta = item["meta_info"]
            assert meta["input_token_logprobs"] == [[-0.5, item["index"], None]]
            assert meta["id"] in rid
            assert expected.items() <= meta.items()


async def test_without_a_prefill_worker_they_are_those_of_the_engine_that_did_all():
    async with fleet_of("nixl", prefills=0) as (fleet, client):
        fleet.decodes[0].usage = details(OF_DECODE)
        await client.send(request_of("nixl"))
        assert json.loads((await client.answer()).body)["usage"] == details(OF_DECODE)
