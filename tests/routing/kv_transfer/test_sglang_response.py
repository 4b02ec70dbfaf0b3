import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.routing.kv_transfer import sglang_response
from omni_proxy.routing.kv_transfer.sglang_response import (
    ClientIds,
    ResponseRewriter,
    read_logprobs,
)
from omni_proxy.wire.response import UpstreamProtocolError

RID = "ab" * 16
lists = st.lists(st.tuples(st.floats(-9, 0), st.integers(0, 99), st.none()).map(list), max_size=3)
metas = st.fixed_dictionaries(
    {"id": st.just(RID), "x": st.text(max_size=4)}, optional={"input_token_logprobs": lists | st.none()}
)  # fmt: skip
items = st.fixed_dictionaries({"text": st.text(max_size=9), "meta_info": metas})


def merged(own, before):
    """As a reader of decoded JSON would merge."""
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
def test_prefills_log_probabilities_go_in_front(own, before):
    answer = {"meta_info": {"input_token_logprobs": before}}
    logprobs = read_logprobs(json.dumps(answer).encode(), stream=False)
    body = ResponseRewriter(None, logprobs).rewrite_body(json.dumps(own).encode())
    assert json.loads(body) == merged(own, before)


@given(st.lists(st.tuples(items, lists), min_size=1, max_size=4))
def test_each_of_a_batch_gets_its_own(pairs):
    answer = [{"meta_info": {"input_token_logprobs": before}} for _, before in pairs]
    logprobs = read_logprobs(json.dumps(answer, indent=1).encode(), stream=False)
    body = json.dumps([own for own, _ in pairs], indent=1).encode()
    rewritten = json.loads(ResponseRewriter(None, logprobs).rewrite_body(body))
    assert rewritten == [merged(own, before) for own, before in pairs]


@given(
    st.lists(st.tuples(items, st.integers(0, 2)), max_size=5),
    st.lists(lists, min_size=3, max_size=3),
    st.data(),
)
def test_a_stream_is_rewritten_alike_however_it_is_cut(steps, befores, data):
    answer = stream_of(
        {"index": n, "meta_info": {"input_token_logprobs": before}}
        for n, before in enumerate(befores)
    )
    own = [item | {"index": index} for item, index in steps]
    stream = stream_of(own)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    rewriter = ResponseRewriter(ClientIds(RID, b'"mine"'), read_logprobs(answer, stream=True))
    out = b"".join(
        rewriter.feed(stream[a:b]) for a, b in zip([0, *cuts], [*cuts, None], strict=True)
    )
    out += rewriter.finish()
    expected = [merged(item, befores[item["index"]]) for item in own]
    for item in expected:
        item["meta_info"] = item["meta_info"] | {"id": "mine"}
    assert events(out) == expected
    assert out.endswith(b"data: [DONE]\n\n")


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
def test_the_clients_id_is_restored_as_it_was_spelled(given_rid, text, restored):
    assert ClientIds(RID, given_rid).restore(text.encode()) == restored.encode()


@pytest.mark.parametrize("body", [b"", b"[", b"null", b'{"meta_info": 7}', b"<html>", b"[1, 2]"])
def test_what_cannot_be_read_is_passed_on_as_it_came(body):
    assert ResponseRewriter(None, {0: b"[1]"}).rewrite_body(body) == body
    assert read_logprobs(body, stream=False) == {}


def test_all_other_bytes_stay():
    body = b'{ "a":1.0, "meta_info" : {"x":\t1e5,"input_token_logprobs":[ ]} }'
    rewritten = ResponseRewriter(None, {0: b"[1]"}).rewrite_body(body)
    assert rewritten == b'{ "a":1.0, "meta_info" : {"x":\t1e5,"input_token_logprobs":[[1]]} }'


def test_an_event_without_end_is_no_endless_memory(monkeypatch):
    monkeypatch.setattr(sglang_response, "MAX_EVENT_BYTES", 100)
    rewriter = ResponseRewriter(None, {0: b"[1]"})
    rewriter.feed(b"data: " + b"x" * 90)
    with pytest.raises(UpstreamProtocolError, match="100 bytes"):
        rewriter.feed(b"x" * 9)
