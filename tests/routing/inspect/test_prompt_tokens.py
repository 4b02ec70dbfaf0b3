import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.routing.inspect import prompt_tokens as tested
from omni_proxy.routing.inspect.body_fields import decode_body, keyed_fields
from omni_proxy.routing.inspect.prompt_tokens import join_token_ids, token_id_list
from omni_proxy.routing.inspect.requirements import IMAGE, Requirements
from omni_proxy.routing.kv_events.block_keys import encode_token_ids
from omni_proxy.routing.token_id_text import TokenIdText


def prompt_tokens(need):
    raw = token_id_list(need)
    text = b"" if raw is None else join_token_ids(raw)[0]
    return [int(token) for token in text.split(b",")[1:]] or None


def tokens_of(body, *, mask=0):
    return prompt_tokens(Requirements(mask, decoded=decode_body(json.dumps(body).encode())))


@pytest.mark.parametrize("key", ["prompt", "input_ids", "token_ids"])
def test_a_list_of_integers_is_the_prompt(key):
    assert tokens_of({key: [5, 6, 7], "stream": True, "model": "m"}) == [5, 6, 7]
    assert tokens_of({key: [[5, 6, 7]]}) == [5, 6, 7]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": "text"},
        {"prompt": []},
        {"prompt": [1, "a"]},
        {"prompt": [1, 2.5]},
        {"prompt": [True, False]},
        {"prompt": [[1], [2]]},
        {"prompt": [[1, [2]]]},
        {"prompt": [1, [2]]},
        {"prompt": [-1]},
        {"prompt": [1, None]},
        {"prompt": [1, {}]},
        {"prompt": [[]]},
        {"prompt": ["a", "b"]},
        {"prompt": [1], "input_ids": [2]},
        {"prompt": [1], "messages": [{"role": "user", "content": "x"}]},
        {"input_ids": [1], "text": "x"},
        {"input_ids": [1], "lora_path": "sql"},
        {"prompt": [1], "cache_salt": "tenant"},
        {"input_ids": [1], "extra_key": "tenant"},
    ],
)
def test_any_other_body_has_no_plain_tokens(body):
    assert tokens_of(body) is None


def test_a_request_with_media_has_no_plain_tokens():
    assert tokens_of({"prompt": [1, 2]}, mask=IMAGE) is None


def test_a_salt_of_null_counts_as_absent():
    assert tokens_of({"prompt": [1], "cache_salt": None, "lora_path": None}) == [1]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"ids": [1, 2], "model": "m"}, [1, 2]),
        ({"ids": [1, 2], "instructions": "be kind"}, None),
        ({"ids": "text"}, None),
        ({"ids": [1, 2], "cache_salt": "tenant"}, None),
        ({"ids": [1, 2], "lora_path": "sql"}, None),
        ({"ids": [1, 2], "cache_salt": None}, [1, 2]),
        ({"token_ids": [1, 2]}, None),
    ],
)
def test_a_configured_route_has_the_tokens_of_its_only_present_key(body, expected):
    fields = keyed_fields(json.dumps(body).encode(), ("instructions", "ids"))
    assert prompt_tokens(Requirements(0, decoded=fields)) == expected


def test_only_the_first_tokens_of_a_long_prompt_are_compared(monkeypatch):
    monkeypatch.setattr(tested, "MAX_BYTES", len("[1,22,3"))
    assert tokens_of({"prompt": [1, 22, 333]}) == [1, 22]
    assert tokens_of({"prompt": [1, 22]}) == [1, 22]


VALUES = st.integers(0, 2**40) | st.integers(-3, 3) | st.sampled_from([True, None, 0.5, "7", [1]])
SPACES = st.text(" \t\r\n", max_size=2)


@st.composite
def id_lists(draw):
    """A list as a client may write it, with spaces anywhere."""
    values = draw(st.lists(st.integers(0, 2**20), max_size=20) | st.lists(VALUES, max_size=5))
    between = st.builds(lambda a, b: f"{a},{b}", SPACES, SPACES)
    text = "".join(
        (draw(between) if at else draw(SPACES)) + json.dumps(value)
        for at, value in enumerate(values)
    )
    body = f"[{text}{draw(SPACES)}]"
    return f"[{draw(SPACES)}{body}{draw(SPACES)}]" if draw(st.booleans()) else body


@given(id_lists())
def test_ids_are_normalized_to_what_a_parser_reads(body):
    value = json.loads(body)
    if len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    plain = all(type(token) is int and token >= 0 for token in value)
    text, _ = join_token_ids(msgspec.Raw(body.encode()))
    assert text == (encode_token_ids(value) if plain else b"")


@given(st.lists(st.integers(0, 2**20), max_size=20), st.sampled_from([",", ", ", " , ", ",\n "]))
def test_ids_with_uniform_separators_are_counted(ids, between):
    raw = msgspec.Raw(b"[%b]" % between.join(map(str, ids)).encode())
    text, tokens = join_token_ids(raw)
    assert tokens in {len(ids), None if ids else 0}
    assert TokenIdText(text, tokens).tokens == len(ids)
