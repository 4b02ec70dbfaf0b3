import json
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from omni_proxy.routing.inspect.json_splice import JsonText
from omni_proxy.routing.kv_connectors import sglang
from omni_proxy.routing.kv_connectors.sglang import (
    MAX_CHOICES,
    ClientIds,
    ResponseRewriter,
    abort_body,
    batch_size,
    bootstrap_host,
    read_logprobs,
    sglang_legs,
)
from omni_proxy.wire.errors import HttpError
from omni_proxy.wire.response import UpstreamProtocolError

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
    """The batch size, written a second time for decoded JSON."""

    def length(value, *, texts_only=False):
        if not isinstance(value, list) or not value:
            return None
        first = value[0]
        number = isinstance(first, int) and not isinstance(first, bool)
        return None if number and not texts_only else len(value)

    if path == GENERATE:
        return length(body.get("input_ids")) or length(body.get("text"), texts_only=True)
    if path == COMPLETIONS:
        return length(body.get("prompt"))
    n = body.get("n")
    return n if isinstance(n, int) and not isinstance(n, bool) and n > 1 else None


@given(
    st.sampled_from([GENERATE, CHAT, COMPLETIONS]),
    bodies,
    st.sampled_from(["input_ids", "text", "prompt", "n"]),
    prompts | st.integers(-1, 4) | st.none(),
)
def test_a_batch_has_as_many_rooms_as_prompts(path, body, key, value):
    assume(not (isinstance(value, str) and value.strip().isdecimal()))  # "2" counts as 2
    body = body | {key: value}
    assert batch_size(path, text_of(body)) == size_by_definition(path, body)


@given(bodies, st.integers(0, 2**32), st.none() | st.integers(1, 65535))
def test_both_legs_get_the_body_of_the_client_and_the_same_room(body, seed, port):
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
def test_each_prompt_of_a_batch_has_its_own_room_and_id(count, seed):
    text = text_of({"text": ["a"] * count})
    legs = sglang_legs(GENERATE, text, "http://h:1", 7, Random(seed).randrange)
    body = json.loads(text.splice(legs.prefill))
    assert len(set(body["bootstrap_room"])) == count
    assert body["bootstrap_host"] == ["h"] * count
    assert body["bootstrap_port"] == [7] * count
    assert body["rid"] == [f"{legs.rid}_{number}" for number in range(count)]


def test_an_id_has_a_fixed_width_for_any_random_number():
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
def test_log_probabilities_are_merged_if_requested(path, flag, merges):
    body = text_of({"text": "a", "return_logprob": flag})
    assert sglang_legs(path, body, "http://h:1", 7, lambda _: 0).merges_logprobs == merges


@pytest.mark.parametrize(
    ("url", "host"),
    [("http://h:1", "h"), ("https://[::1]:30000", "[::1]"), ("http://10.0.0.1", "10.0.0.1")],
)
def test_the_bootstrap_host_is_that_of_the_worker_url(url, host):
    assert bootstrap_host(url) == host


def test_an_abort_body_names_the_request_id():
    assert json.loads(abort_body("ab")) == {"rid": "ab"}


def test_a_chat_with_too_many_choices_is_refused():
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
def test_an_extremely_large_number_of_choices_is_refused(n):
    with pytest.raises(HttpError, match="at most"):
        batch_size(CHAT, JsonText(b'{"n": %b}' % n))


RID = "ab" * 16
lists = st.lists(st.tuples(st.floats(-9, 0), st.integers(0, 99), st.none()).map(list), max_size=3)
metas = st.fixed_dictionaries(
    {"id": st.just(RID), "x": st.text(max_size=4)}, optional={"input_token_logprobs": lists | st.none()}
)  # fmt: skip
items = st.fixed_dictionaries({"text": st.text(max_size=9), "meta_info": metas})


def merged(own, before):
    """The item with the log probabilities of prefill in front, for decoded JSON."""
    meta = own["meta_info"]
    if before:
        meta = meta | {"input_token_logprobs": before + (meta.get("input_token_logprobs") or [])}
    return own | {"meta_info": meta}


def stream_of(items):
    return b"".join(b"data: %b\n\n" % json.dumps(item).encode() for item in items) + (
        b"data: [DONE]\n\n"
    )


def events(stream):
    lines = stream.decode().split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


@given(items, lists)
def test_log_probabilities_of_prefill_are_put_in_front(own, before):
    prefill_response = {"meta_info": {"input_token_logprobs": before}}
    logprobs = read_logprobs(json.dumps(prefill_response).encode(), stream=False)
    body = ResponseRewriter(None, logprobs).rewrite_body(json.dumps(own).encode())
    assert json.loads(body) == merged(own, before)


@given(st.lists(st.tuples(items, lists), min_size=1, max_size=4))
def test_each_item_of_a_batch_gets_its_own_log_probabilities(pairs):
    prefill_response = [{"meta_info": {"input_token_logprobs": before}} for _, before in pairs]
    logprobs = read_logprobs(json.dumps(prefill_response, indent=1).encode(), stream=False)
    body = json.dumps([own for own, _ in pairs], indent=1).encode()
    rewritten = json.loads(ResponseRewriter(None, logprobs).rewrite_body(body))
    assert rewritten == [merged(own, before) for own, before in pairs]


@given(
    st.lists(st.tuples(items, st.integers(0, 2)), max_size=5),
    st.lists(lists, min_size=3, max_size=3),
    st.data(),
)
def test_a_stream_is_rewritten_equally_for_any_chunks(steps, befores, data):
    prefill_response = stream_of(
        {"index": n, "meta_info": {"input_token_logprobs": before}}
        for n, before in enumerate(befores)
    )
    own = [item | {"index": index} for item, index in steps]
    stream = stream_of(own)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    rewriter = ResponseRewriter(
        ClientIds(RID, b'"mine"'), read_logprobs(prefill_response, stream=True)
    )
    rewritten = b"".join(
        rewriter.feed(stream[a:b]) for a, b in zip([0, *cuts], [*cuts, None], strict=True)
    )
    rewritten += rewriter.finish()
    expected = [merged(item, befores[item["index"]]) for item in own]
    for item in expected:
        item["meta_info"] = item["meta_info"] | {"id": "mine"}
    assert events(rewritten) == expected
    assert rewritten.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("given_rid", "text", "restored"),
    [
        (b'"mine"', f'"id":"{RID}"', '"id":"mine"'),
        (b'"\\u00e9\\""', f'"id":"{RID}"', '"id":"\\u00e9\\""'),
        (b'["a","b"]', f'["{RID}_0","{RID}_1","{RID}_2"]', f'["a","b","{RID}_2"]'),
        (b'["a",null]', f'["{RID}_0","{RID}_1"]', f'["a","{RID}_1"]'),
        (b'["a"]', f'"id":"{RID}","x":"{RID}0 {RID}_x"', f'"id":"a","x":"{RID}0 {RID}_x"'),
        (b"[]", f'"id":"{RID}"', f'"id":"{RID}"'),
        (b'"m"', f'["{RID}_0","{RID}_1"]', '["m_0","m_1"]'),
        (b"7", f'"id":"{RID}"', f'"id":"{RID}"'),
        (b'"mine"', '"id":"other"', '"id":"other"'),
    ],
)
def test_the_id_of_the_client_is_restored_byte_for_byte(given_rid, text, restored):
    assert ClientIds(RID, given_rid).restore(text.encode()) == restored.encode()


@pytest.mark.parametrize("body", [b"", b"[", b"null", b'{"meta_info": 7}', b"<html>", b"[1, 2]"])
def test_an_unreadable_response_is_passed_on_unchanged(body):
    assert ResponseRewriter(None, {0: b"[1]"}).rewrite_body(body) == body
    assert read_logprobs(body, stream=False) == {}


def test_all_other_bytes_are_kept():
    body = b'{ "a":1.0, "meta_info" : {"x":\t1e5,"input_token_logprobs":[ ]} }'
    rewritten = ResponseRewriter(None, {0: b"[1]"}).rewrite_body(body)
    assert rewritten == b'{ "a":1.0, "meta_info" : {"x":\t1e5,"input_token_logprobs":[[1]]} }'


def test_the_memory_for_an_unfinished_event_is_bounded(monkeypatch):
    monkeypatch.setattr(sglang, "MAX_EVENT_BYTES", 100)
    rewriter = ResponseRewriter(None, {0: b"[1]"})
    rewriter.feed(b"data: " + b"x" * 90)
    with pytest.raises(UpstreamProtocolError, match="100 bytes"):
        rewriter.feed(b"x" * 9)
