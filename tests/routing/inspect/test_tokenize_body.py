"""The body for /tokenize has all that determines the tokens of a prompt, or there is none."""

import json

import pytest

from omni_proxy.routing.inspect.body_fields import decode_body
from omni_proxy.routing.inspect.prompt_tokens import template_mark, tokenize_body
from omni_proxy.routing.inspect.requirements import IMAGE, Requirements

CHAT = {"messages": [{"role": "user", "content": "Who keeps the lighthouse?"}]}
TOOLS = [{"type": "function", "function": {"name": "look"}}]


def need(body, *, mask=0, model=None):
    return Requirements(mask, model, decoded=decode_body(json.dumps(body).encode()))


def tokenize_json(body, **more):
    body = tokenize_body(need(body, **more))
    return None if body is None else json.loads(body)


def test_texts_and_chats_are_tokenized_with_their_model_and_template():
    assert tokenize_json({"prompt": "a text", "max_tokens": 3}, model="m") == {
        "prompt": "a text", "model": "m",
    }  # fmt: skip
    assert tokenize_json({"text": "a text"}) == {"prompt": "a text"}
    assert tokenize_json({**CHAT, "stream": True, "temperature": 0}) == CHAT
    options = {"tools": TOOLS, "chat_template_kwargs": {"thinking": False}}
    assert tokenize_json({**CHAT, **options}, model="m") == {**CHAT, **options, "model": "m"}
    assert tokenize_json({"prompt": "a text", "tools": TOOLS}) == {"prompt": "a text"}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": [1, 2]},
        {"prompt": ["a", "b"]},
        {"prompt": "a", "text": "b"},
        {**CHAT, "prompt": "a"},
        {**CHAT, "system": "b"},
        {**CHAT, "cache_salt": "tenant"},
        {**CHAT, "lora_path": "sql"},
        {**CHAT, "continue_final_message": True},
        {**CHAT, "chat_template": "{{ messages }}"},
        {**CHAT, "documents": [{"text": "x"}]},
    ],
)
def test_a_body_that_would_be_tokenized_differently_has_no_tokenize_body(body):
    assert tokenize_json(body) is None


def test_media_and_nonstandard_json_have_no_tokenize_body():
    assert tokenize_json(CHAT, mask=IMAGE) is None
    assert tokenize_body(Requirements(0)) is None
    odd = Requirements(0, decoded=decode_body(b'{"prompt": "a", "top_p": NaN}'))
    assert tokenize_body(odd) is None


def test_equal_texts_with_different_tools_have_different_marks():
    plain, tools = need(CHAT), need({**CHAT, "tools": TOOLS})
    assert template_mark(plain) == template_mark(Requirements(0)) == b""
    assert template_mark(tools) != template_mark(need({**CHAT, "tools": TOOLS * 2})) != b""
