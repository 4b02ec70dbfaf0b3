import pytest

from omni_proxy.replica.api.openai.multi_generation import requests_for_choices, total_usage
from omni_proxy.replica.pipeline.requests import GenerateRequest, SamplingParams
from tests.replica.api.api_fixture import HELLO, MESSAGES, USAGE, until

ASK = {"max_tokens": 6, "temperature": 1.0, "seed": 5}


def test_the_first_of_several_has_the_seed_itself_and_the_others_their_own():
    request = GenerateRequest("x", sampling=SamplingParams(seed=2**63 - 1))
    seeds = [each.sampling.seed for each in requests_for_choices(request, 3)]
    assert seeds == [2**63 - 1, -(2**63), -(2**63) + 1]
    assert requests_for_choices(GenerateRequest("x"), 2) == [GenerateRequest("x")] * 2


def test_a_prompt_counts_once_however_many_answers_it_has():
    reported = USAGE | {"prompt_tokens_details": {"cached_tokens": 1}}
    assert total_usage([reported] * 6, n=3) == {
        "prompt_tokens": 4,
        "completion_tokens": 12,
        "total_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert total_usage([reported, None], n=2) is None


async def test_several_choices_of_a_chat_have_an_index_each_and_one_usage(world):
    body = await world.chat_json(HELLO, n=3)
    message = {"role": "assistant", "content": "Hello"}
    assert body["choices"] == [
        {"index": index, "message": message, "finish_reason": "stop"} for index in range(3)
    ]
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}


async def test_several_streamed_choices_are_distinguished_and_the_last_end_has_the_usage(world):
    *events, done = await world.chat_events(HELLO, n=2)
    assert done == "[DONE]"
    for index in (0, 1):
        own = [each["choices"][0] for each in events if each["choices"][0]["index"] == index]
        assert [each["delta"] for each in own] == [
            {"role": "assistant", "content": "Hel"}, {"content": "lo"}, {}
        ]  # fmt: skip
        assert [each["finish_reason"] for each in own] == [None, None, "stop"]
    assert [each.get("usage") for each in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["usage"] == {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6}
    assert len({each["id"] for each in events}) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_differ_by_seed_and_are_reproducible(tiny, stream):
    async def texts(n):
        ask = {"messages": MESSAGES, "n": n, **ASK}
        if not stream:
            body = await tiny.chat_json(**ask)
            return [each["message"]["content"] for each in body["choices"]]
        joined = [""] * n
        for event in (await tiny.chat_events(**ask))[:-1]:
            (choice,) = event["choices"]
            joined[choice["index"]] += choice["delta"].get("content", "")
        return joined

    three = await texts(3)
    assert len(set(three)) == 3
    assert three == await texts(3)
    assert await texts(1) == three[:1]


async def test_completions_answer_each_prompt_n_times(tiny):
    ask = {"prompt": ["a", "b"], "n": 2, **ASK}
    body = await (await tiny.post("/v1/completions", ask)).get_json()
    texts = [each["text"] for each in body["choices"]]
    assert [each["index"] for each in body["choices"]] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    assert body["usage"]["completion_tokens"] == 24
    one = {"prompt": "b", **ASK}
    alone = await (await tiny.post("/v1/completions", one)).get_json()
    assert alone["choices"][0]["text"] == texts[2]


async def test_leaving_aborts_every_choice(tiny):
    one = await tiny.chat(n=3, max_tokens=2, stage_sampling={"decode": {"heat": 1}})
    assert one.status_code == 400
    await until(lambda: tiny.client.health()["total_requests"] == 0)
