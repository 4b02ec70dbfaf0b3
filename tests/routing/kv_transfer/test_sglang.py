import json
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.routing.inspect.json_splice import JsonText
from omni_proxy.routing.kv_transfer.sglang import (
    MAX_CHOICES,
    abort_body,
    batch_size,
    bootstrap_host,
    sglang_legs,
)
from omni_proxy.wire.errors import HttpError

GENERATE, CHAT, COMPLETIONS = "/generate", "/v1/chat/completions", "/v1/completions"
SPLICED = {"bootstrap_host", "bootstrap_port", "bootstrap_room", "rid"}
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
prompts = (
    st.text(max_size=5)
    | st.lists(st.text(max_size=5), max_size=4)
    | st.lists(st.integers(-3, 99), max_size=4)
    | st.lists(st.lists(st.integers(0, 99), max_size=3), max_size=4)
)
bodies = st.dictionaries(
    st.sampled_from(["messages", "model", "stream", "x"]) | st.sampled_from(sorted(SPLICED)), values
)


def text_of(body):
    return JsonText(json.dumps(body).encode())


def size_by_definition(path, body):
    """As features.md 2.1 and 2.7 have it."""

    def many(value, *, texts_only=False):
        if not isinstance(value, list) or not value:
            return None
        first = value[0]
        number = isinstance(first, int) and not isinstance(first, bool)
        return None if number and not texts_only else len(value)

    if path == GENERATE:
        return many(body.get("input_ids")) or many(body.get("text"), texts_only=True)
    if path == COMPLETIONS:
        return many(body.get("prompt"))
    n = body.get("n")
    return n if isinstance(n, int) and not isinstance(n, bool) and n > 1 else None


@given(
    st.sampled_from([GENERATE, CHAT, COMPLETIONS]),
    bodies,
    st.sampled_from(["input_ids", "text", "prompt", "n"]),
    prompts | st.integers(-1, 4) | st.none(),
)
def test_a_batch_has_as_many_rooms_as_prompts(path, body, key, value):
    body = body | {key: value}
    assert batch_size(path, text_of(body)) == size_by_definition(path, body)


@given(bodies, st.integers(0, 2**32), st.none() | st.integers(1, 65535))
def test_both_legs_get_the_clients_body_and_one_room(body, seed, port):
    text = text_of(body)
    legs = sglang_legs(GENERATE, text, "http://10.0.0.1:30000", port, Random(seed).randrange)
    prefill, decode = json.loads(text.splice(legs.prefill)), json.loads(text.splice(legs.decode))
    assert prefill == decode
    assert {k: v for k, v in prefill.items() if k not in SPLICED} == {
        k: v for k, v in body.items() if k not in SPLICED
    }
    assert prefill["bootstrap_host"] == "10.0.0.1"
    assert prefill["bootstrap_port"] == port
    assert 0 <= prefill["bootstrap_room"] < 2**63
    assert prefill["rid"] == legs.rid
    assert len(legs.rid) == 32


@given(st.integers(1, 5), st.integers(0, 2**32))
def test_each_prompt_of_a_batch_has_a_room_and_an_id_of_its_own(count, seed):
    text = text_of({"text": ["a"] * count})
    legs = sglang_legs(GENERATE, text, "http://h:1", 7, Random(seed).randrange)
    body = json.loads(text.splice(legs.prefill))
    assert len(set(body["bootstrap_room"])) == count
    assert body["bootstrap_host"] == ["h"] * count
    assert body["bootstrap_port"] == [7] * count
    assert body["rid"] == [f"{legs.rid}_{number}" for number in range(count)]


def test_an_id_is_of_fixed_width_whatever_was_drawn():
    for drawn in (0, 1, 2**128 - 1):
        legs = sglang_legs(
            CHAT, text_of({}), "http://h:1", 7, lambda bound, d=drawn: min(d, bound - 1)
        )
        assert len(legs.rid) == 32


@pytest.mark.parametrize(
    ("path", "flag", "merges"),
    [
        (GENERATE, True, True), (GENERATE, False, False), (GENERATE, None, False),
        (GENERATE, [False, True], True), (GENERATE, [False], False), (CHAT, True, False),
    ],
)  # fmt: skip
def test_log_probabilities_are_merged_where_they_were_asked_for(path, flag, merges):
    body = text_of({"text": "a", "return_logprob": flag})
    assert sglang_legs(path, body, "http://h:1", 7, lambda _: 0).merges_logprobs == merges


@pytest.mark.parametrize(
    ("url", "host"),
    [("http://h:1", "h"), ("https://[::1]:30000", "[::1]"), ("http://10.0.0.1", "10.0.0.1")],
)
def test_the_bootstrap_host_is_that_of_the_workers_url(url, host):
    assert bootstrap_host(url) == host


def test_an_abort_names_the_id():
    assert json.loads(abort_body("ab")) == {"rid": "ab"}


def test_a_chat_with_more_choices_than_any_engine_makes_is_refused():
    legs = sglang_legs(CHAT, text_of({"n": MAX_CHOICES}), "http://a:1", 1, Random(1).randrange)
    assert len(json.loads(legs.decode["bootstrap_room"])) == MAX_CHOICES
    with pytest.raises(HttpError) as refused:
        batch_size(CHAT, text_of({"n": 10**12}))
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("n", "size"),
    [(b"2", 2), (b"2.0", 2), (b'"3"', 3), (b'" 3 "', 3), (b"2.5", None), (b'"two"', None),
     (b"true", None), (b"null", None), (b"[2]", None), (b"1.0", None), (b"-2", None)],
)  # fmt: skip
def test_the_number_of_choices_is_read_as_the_engine_reads_it(n, size):
    assert batch_size(CHAT, JsonText(b'{"n": %b}' % n)) == size


@pytest.mark.parametrize("n", [b"1e300", b'"%b"' % (b"9" * 5000)], ids=["float", "digits"])
def test_a_number_of_choices_without_end_is_refused(n):
    with pytest.raises(HttpError, match="at most"):
        batch_size(CHAT, JsonText(b'{"n": %b}' % n))
