"""Token counts of a request in two legs: the client gets those of the decode engine, unchanged.

Engines count tokens that were transferred from the prefill worker differently; some routers
overwrite the counts.
"""

import json

import pytest

from tests.promises.disaggregation.test_disaggregation_sglang import events
from tests.promises.support.clients import post
from tests.promises.support.disaggregated_engines import fleet_of

CONNECTORS = ["sglang", "nixl", "mooncake"]
OF_PREFILL = {"prompt_tokens": 40, "completion_tokens": 1, "cached_tokens": 3}
OF_DECODE = {"prompt_tokens": 40, "completion_tokens": 9, "cached_tokens": 39}


def details(usage):
    """The same counts in vLLM's form."""
    cached = {"cached_tokens": usage["cached_tokens"]}
    return {"prompt_tokens": usage["prompt_tokens"], "prompt_tokens_details": cached}


def request_of(connector, **fields):
    if connector == "sglang":
        return post(json.dumps({"text": "a prompt", **fields}).encode(), path="/generate")
    return post(json.dumps({"messages": [], **fields}).encode())


def set_usage(fleet, connector):
    """Set the counts that both engines report; return those of the decode engine."""
    usages = (OF_PREFILL, OF_DECODE)
    of_prefill, of_decode = usages if connector == "sglang" else map(details, usages)
    fleet.prefills[0].usage, fleet.decodes[0].usage = of_prefill, of_decode
    return of_decode


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_client_gets_the_token_counts_of_the_decode_engine(connector, stream):
    async with fleet_of(connector) as (fleet, client):
        expected = set_usage(fleet, connector)
        for _ in range(3):
            await client.send(request_of(connector, stream=stream))
            answer = await client.answer()
            items = events(answer.body) if stream else [json.loads(answer.body)]
            counts = items[-1]["meta_info"] if connector == "sglang" else items[-1]["usage"]
            assert expected.items() <= counts.items()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("many", [False, True])
async def test_merged_logprobs_and_a_rid_do_not_change_the_token_counts(stream, many):
    async with fleet_of("sglang") as (fleet, client):
        expected = set_usage(fleet, "sglang")
        text, rid = (["a", "b"], ["x", "y"]) if many else ("a", "x")
        await client.send(
            request_of("sglang", text=text, rid=rid, return_logprob=True, stream=stream)
        )
        answer = await client.answer()
        items = events(answer.body) if stream else json.loads(answer.body)
        for item in items if isinstance(items, list) else [items]:
            meta = item["meta_info"]
            assert meta["input_token_logprobs"] == [[-0.5, item["index"], None]]
            assert meta["id"] in rid
            assert expected.items() <= meta.items()


async def test_without_a_prefill_worker_the_counts_are_those_of_the_decode_engine():
    async with fleet_of("nixl", prefills=0) as (fleet, client):
        fleet.decodes[0].usage = details(OF_DECODE)
        await client.send(request_of("nixl"))
        assert json.loads((await client.answer()).body)["usage"] == details(OF_DECODE)
