import pytest

from omni_proxy.replica.api.openai.multi_generation import requests_for_choices, total_usage
from omni_proxy.replica.pipeline.requests import GenerateRequest, SamplingParams
from tests.replica.api.api_fixture import HELLO, MESSAGES, USAGE, until

SAMPLING = {"max_tokens": 6, "temperature": 1.0, "seed": 5}


def test_the_first_choice_has_the_seed_and_each_other_one_its_own():
    request = GenerateRequest("x", sampling=SamplingParams(seed=2**63 - 1))
    seeds = [choice.sampling.seed for choice in requests_for_choices(request, 3)]
    assert seeds == [2**63 - 1, -(2**63), -(2**63) + 1]
    assert requests_for_choices(GenerateRequest("x"), 2) == [GenerateRequest("x")] * 2


def test_a_prompts_tokens_count_once_for_all_its_choices():
    usage = USAGE | {"prompt_tokens_details": {"cached_tokens": 1}}
    assert total_usage([usage] * 6, n=3) == {
        "prompt_tokens": 4,
        "completion_tokens": 12,
        "total_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert total_usage([usage, None], n=2) is None


async def test_choices_of_a_chat_have_an_index_each_and_one_usage(api):
    body = await api.chat_json(HELLO, n=3)
    message = {"role": "assistant", "content": "Hello"}
    assert body["choices"] == [
        {"index": index, "message": message, "finish_reason": "stop"} for index in range(3)
    ]
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}


async def test_streamed_choices_have_an_index_and_only_the_last_event_has_the_usage(api):
    *events, done = await api.chat_events(HELLO, n=2)
    assert done == "[DONE]"
    for index in (0, 1):
        choices = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert [event["delta"] for event in choices] == [
            {"role": "assistant", "content": "Hel"}, {"content": "lo"}, {}
        ]  # fmt: skip
        assert [event["finish_reason"] for event in choices] == [None, None, "stop"]
    assert [event.get("usage") for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["usage"] == {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6}
    assert len({event["id"] for event in events}) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_differ_by_seed_and_are_reproducible(tiny, stream):
    async def texts(n):
        fields = {"messages": MESSAGES, "n": n, **SAMPLING}
        if not stream:
            body = await tiny.chat_json(**fields)
            return [choice["message"]["content"] for choice in body["choices"]]
        joined = [""] * n
        for event in (await tiny.chat_events(**fields))[:-1]:
            (choice,) = event["choices"]
            joined[choice["index"]] += choice["delta"].get("content", "")
        return joined

    three = await texts(3)
    assert len(set(three)) == 3
    assert three == await texts(3)
    assert await texts(1) == three[:1]


async def test_completions_have_n_choices_for_each_prompt(tiny):
    request = {"prompt": ["a", "b"], "n": 2, **SAMPLING}
    body = await (await tiny.post("/v1/completions", request)).get_json()
    texts = [choice["text"] for choice in body["choices"]]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    assert body["usage"]["completion_tokens"] == 24
    single_prompt = {"prompt": "b", **SAMPLING}
    single = await (await tiny.post("/v1/completions", single_prompt)).get_json()
    assert single["choices"][0]["text"] == texts[2]


async def test_a_refused_request_leaves_no_choice_running(tiny):
    response = await tiny.chat(n=3, max_tokens=2, stage_sampling={"decode": {"heat": 1}})
    assert response.status_code == 400
    await until(lambda: tiny.client.health()["total_requests"] == 0)
