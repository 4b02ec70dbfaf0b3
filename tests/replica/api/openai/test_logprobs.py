import pytest

from omni_proxy.replica.api.openai.logprobs import CompletionLogprobs, LogprobAligner, chat_logprobs
from tests.replica.api.api_fixture import MESSAGES

HE, LLO, END = (
    [-0.5, 7, b"He", [[-0.5, 7, b"He"], [-2.0, 1, ["<end>"]]]],
    [-1.0, 8, b"llo", []],
    [-0.1, 2, ["<end>"], []],
)
REQUEST = {"messages": MESSAGES, "max_tokens": 8, "temperature": 0}


def align(feeds):
    aligner = LogprobAligner()
    return [[item[1] for item in aligner.feed(items, text)] for items, text in feeds]


def test_a_token_is_reported_with_the_text_that_it_begins():
    assert align([([HE], "H"), ([LLO], "e"), ([], "l"), ([END], "lo")]) == [[7], [], [8], []]


def test_tokens_after_a_stop_string_are_not_reported():
    assert align([([HE, LLO], "He"), ([HE], "")]) == [[7], []]


def test_tokens_without_text_are_reported_at_once():
    assert align([([[-0.5, 7], [-0.5, 8, None]], "")]) == [[7, 8]]


def test_a_token_of_half_a_character_is_reported_with_the_complete_one():
    first, second = [-1.0, 1, b"\xc3", []], [-1.0, 2, b"\xa4", []]
    assert align([([first], ""), ([second], "ä")]) == [[], [1, 2]]
    (complete, partial) = chat_logprobs([HE, first])["content"]
    assert (partial["token"], partial["bytes"]) == ("\ufffd", [0xC3])
    assert complete["top_logprobs"][1] == {"token": "<end>", "logprob": -2.0, "bytes": None}
    lists = CompletionLogprobs().feed([first, second, HE])
    assert lists["tokens"] == ["bytes:\\xc3", "bytes:\\xa4", "He"]
    assert lists["text_offset"] == [0, 0, 1]
    assert lists["top_logprobs"] == [{}, {}, {"He": -0.5, "<end>": -2.0}]


async def test_the_bytes_of_a_chats_tokens_are_its_content(tiny):
    body = await tiny.chat_json(**REQUEST, logprobs=True, top_logprobs=2)
    (choice,) = body["choices"]
    assert list(choice) == ["index", "message", "logprobs", "finish_reason"]
    content = choice["logprobs"]["content"]
    assert (
        b"".join(bytes(token["bytes"]) for token in content).decode()
        == (choice["message"]["content"])
    )
    for token in content:
        assert list(token) == ["token", "logprob", "bytes", "top_logprobs"]
        assert len(token["top_logprobs"]) == 2
        # Greedy: the sampled token is the most likely one.
        best = {name: token[name] for name in ("token", "logprob", "bytes")}
        assert token["top_logprobs"][0] == best


async def test_a_streams_tokens_are_those_of_the_complete_response(tiny):
    request = REQUEST | {"logprobs": True, "top_logprobs": 1, "n": 2}
    complete = await tiny.chat_json(**request)
    streamed = [[], []]
    for event in (await tiny.chat_events(**request))[:-1]:
        (choice,) = event["choices"]
        streamed[choice["index"]] += choice.get("logprobs", {}).get("content", [])
    for index, choice in enumerate(complete["choices"]):
        tokens = [
            [item["token"] for item in content]
            for content in (streamed[index], choice["logprobs"]["content"])
        ]
        assert tokens[0] == tokens[1]


async def test_without_top_logprobs_only_the_sampled_tokens_are_reported(tiny):
    body = await tiny.chat_json(**REQUEST, logprobs=True)
    content = body["choices"][0]["logprobs"]["content"]
    assert [token["top_logprobs"] for token in content] == [[]] * 8


@pytest.mark.parametrize("stream", [False, True])
async def test_a_pipeline_without_log_probabilities_refuses_them(api, stream):
    response = await api.chat(logprobs=True, stream=stream)
    assert b"returns no log probabilities" in await response.get_data()
    assert response.status_code == (200 if stream else 501)


async def test_completions_report_the_most_likely_tokens_by_their_text(tiny):
    request = {"prompt": "a", "max_tokens": 3, "temperature": 0, "logprobs": 2}
    (choice,) = (await (await tiny.post("/v1/completions", request)).get_json())["choices"]
    lists = choice["logprobs"]
    assert "".join(lists["tokens"]) == choice["text"]
    assert lists["text_offset"] == [len("".join(lists["tokens"][:count])) for count in range(3)]
    for name, logprob, top in zip(
        lists["tokens"], lists["token_logprobs"], lists["top_logprobs"], strict=True
    ):
        assert top[name] == logprob == max(top.values())


async def test_a_large_logit_bias_decides_the_tokens(tiny):
    free = await tiny.chat_json(**REQUEST, logprobs=True)
    # The 300th token is a syllable.
    body = await tiny.chat_json(**REQUEST, logit_bias={"300": 100})
    text = body["choices"][0]["message"]["content"]
    assert text != free["choices"][0]["message"]["content"]
    assert len(set(text.split())) == 1
    refused = await tiny.chat(**REQUEST, logit_bias={"512": 1})
    assert refused.status_code == 400
    assert "0 to 511" in (await refused.get_json())["detail"]
