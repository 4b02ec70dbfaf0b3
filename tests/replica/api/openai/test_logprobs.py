import pytest

from omni_proxy.replica.api.openai.logprobs import CompletionLogprobs, LogprobAligner, chat_logprobs
from tests.replica.api.api_fixture import MESSAGES

HE, LLO, END = (
    [-0.5, 7, b"He", [[-0.5, 7, b"He"], [-2.0, 1, ["<end>"]]]],
    [-1.0, 8, b"llo", []],
    [-0.1, 2, ["<end>"], []],
)
ASK = {"messages": MESSAGES, "max_tokens": 8, "temperature": 0}


def aligned(feeds):
    tokens = LogprobAligner()
    return [[each[1] for each in tokens.feed(items, text)] for items, text in feeds]


def test_a_token_is_reported_with_the_text_it_begins():
    assert aligned([([HE], "H"), ([LLO], "e"), ([], "l"), ([END], "lo")]) == [[7], [], [8], []]


def test_what_stands_behind_a_stop_string_is_never_reported():
    assert aligned([([HE, LLO], "He"), ([HE], "")]) == [[7], []]


def test_tokens_without_text_are_refused_at_once():
    assert aligned([([[-0.5, 7], [-0.5, 8, None]], "")]) == [[7, 8]]


def test_half_a_character_is_reported_with_the_whole_one():
    first, second = [-1.0, 1, b"\xc3", []], [-1.0, 2, b"\xa4", []]
    assert aligned([([first], ""), ([second], "ä")]) == [[], [1, 2]]
    (whole, half) = chat_logprobs([HE, first])["content"]
    assert (half["token"], half["bytes"]) == ("\ufffd", [0xC3])
    assert whole["top_logprobs"][1] == {"token": "<end>", "logprob": -2.0, "bytes": None}
    lists = CompletionLogprobs().feed([first, second, HE])
    assert lists["tokens"] == ["bytes:\\xc3", "bytes:\\xa4", "He"]
    assert lists["text_offset"] == [0, 0, 1]
    assert lists["top_logprobs"] == [{}, {}, {"He": -0.5, "<end>": -2.0}]


async def test_a_chats_tokens_are_its_content_byte_for_byte(tiny):
    body = await tiny.chat_json(**ASK, logprobs=True, top_logprobs=2)
    (choice,) = body["choices"]
    assert list(choice) == ["index", "message", "logprobs", "finish_reason"]
    content = choice["logprobs"]["content"]
    assert (
        b"".join(bytes(each["bytes"]) for each in content).decode()
        == (choice["message"]["content"])
    )
    for each in content:
        assert list(each) == ["token", "logprob", "bytes", "top_logprobs"]
        assert len(each["top_logprobs"]) == 2
        # Greedy: the sampled token is the most likely one.
        best = {name: each[name] for name in ("token", "logprob", "bytes")}
        assert each["top_logprobs"][0] == best


async def test_a_streams_tokens_are_those_of_the_whole_answer(tiny):
    ask = ASK | {"logprobs": True, "top_logprobs": 1, "n": 2}
    whole = await tiny.chat_json(**ask)
    streamed = [[], []]
    for event in (await tiny.chat_events(**ask))[:-1]:
        (choice,) = event["choices"]
        streamed[choice["index"]] += choice.get("logprobs", {}).get("content", [])
    for index, choice in enumerate(whole["choices"]):
        names = [
            [each["token"] for each in reported]
            for reported in (streamed[index], choice["logprobs"]["content"])
        ]
        assert names[0] == names[1]


async def test_without_a_number_only_the_chosen_tokens_are_reported(tiny):
    body = await tiny.chat_json(**ASK, logprobs=True)
    content = body["choices"][0]["logprobs"]["content"]
    assert [each["top_logprobs"] for each in content] == [[]] * 8


@pytest.mark.parametrize("stream", [False, True])
async def test_a_pipeline_without_log_probabilities_refuses_them(world, stream):
    answer = await world.chat(logprobs=True, stream=stream)
    assert b"returns no log probabilities" in await answer.get_data()
    assert answer.status_code == (200 if stream else 501)


async def test_completions_report_the_likeliest_by_name(tiny):
    ask = {"prompt": "a", "max_tokens": 3, "temperature": 0, "logprobs": 2}
    (choice,) = (await (await tiny.post("/v1/completions", ask)).get_json())["choices"]
    lists = choice["logprobs"]
    assert "".join(lists["tokens"]) == choice["text"]
    assert lists["text_offset"] == [len("".join(lists["tokens"][:count])) for count in range(3)]
    for name, logprob, top in zip(
        lists["tokens"], lists["token_logprobs"], lists["top_logprobs"], strict=True
    ):
        assert top[name] == logprob == max(top.values())


async def test_a_logit_bias_decides_the_tokens(tiny):
    free = await tiny.chat_json(**ASK, logprobs=True)
    # The 300th token is a syllable.
    body = await tiny.chat_json(**ASK, logit_bias={"300": 100})
    text = body["choices"][0]["message"]["content"]
    assert text != free["choices"][0]["message"]["content"]
    assert len(set(text.split())) == 1
    refused = await tiny.chat(**ASK, logit_bias={"512": 1})
    assert refused.status_code == 400
    assert "0 to 511" in (await refused.get_json())["detail"]
