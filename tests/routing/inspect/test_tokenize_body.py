"""/tokenize gets all that decides which tokens a prompt is, or is not asked."""

import json

import pytest

from omni_proxy.routing.inspect.body_fields import decode_body
from omni_proxy.routing.inspect.requirements import IMAGE, Requirements
from omni_proxy.routing.inspect.tokenize_body import template_mark, tokenize_body

CHAT = {"messages": [{"role": "user", "content": "Who keeps the lighthouse?"}]}
TOOLS = [{"type": "function", "function": {"name": "look"}}]


def need(body, *, mask=0, model=None):
    return Requirements(mask, model, decoded=decode_body(json.dumps(body).encode()))


def asked(body, **more):
    body = tokenize_body(need(body, **more))
    return None if body is None else json.loads(body)


def test_a_text_and_a_chat_are_asked_about_with_their_model_and_template():
    assert asked({"prompt": "a text", "max_tokens": 3}, model="m") == {
        "prompt": "a text", "model": "m",
    }  # fmt: skip
    assert asked({"text": "a text"}) == {"prompt": "a text"}
    assert asked({**CHAT, "stream": True, "temperature": 0}) == CHAT
    options = {"tools": TOOLS, "chat_template_kwargs": {"thinking": False}}
    assert asked({**CHAT, **options}, model="m") == {**CHAT, **options, "model": "m"}
    assert asked({"prompt": "a text", "tools": TOOLS}) == {"prompt": "a text"}


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
def test_what_a_worker_would_tokenize_otherwise_is_not_asked_about(body):
    assert asked(body) is None


def test_media_and_bodies_that_are_no_json_are_not_asked_about():
    assert asked(CHAT, mask=IMAGE) is None
    assert tokenize_body(Requirements(0)) is None
    odd = Requirements(0, decoded=decode_body(b'{"prompt": "a", "top_p": NaN}'))
    assert tokenize_body(odd) is None


def test_equal_texts_with_other_tools_have_another_mark():
    plain, tools = need(CHAT), need({**CHAT, "tools": TOOLS})
    assert template_mark(plain) == template_mark(Requirements(0)) == b""
    assert template_mark(tools) != template_mark(need({**CHAT, "tools": TOOLS * 2})) != b""
