import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.routing.inspect import model_field
from omni_proxy.routing.inspect.body_fields import MAX_PARTS, decode_body
from omni_proxy.routing.inspect.model_field import (
    check_form,
    model_spans,
    session_spans,
    walk_model_spans,
    with_model,
)
from omni_proxy.routing.inspect.requirements import RequestFacts
from omni_proxy.routing.routes import match_route
from omni_proxy.wire.errors import HttpError
from tests.routing.inspect.test_multipart import TYPE, form, part

CHAT = match_route("POST", "/v1/chat/completions")
BATCH = match_route("POST", "/v1/audio/speech/batch")
TRANSCRIPTION = match_route("POST", "/v1/audio/transcriptions")
JSON = RequestFacts(b"application/json")


def rewritten(body, model="new", route=CHAT, facts=JSON):
    spans = model_spans(route, body, facts)
    return b"".join(with_model(body, spans, model, is_json=route is not TRANSCRIPTION))


values = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    st.dictionaries(st.text(max_size=6) | st.just("model"), values, max_size=5),
    st.text(max_size=8),
    st.sampled_from([None, 2]),
    st.booleans(),
)
def test_only_the_model_differs_for_a_json_parser(fields, model, indent, ascii_only):
    fields["model"] = "old"
    body = json.dumps(fields, indent=indent, ensure_ascii=ascii_only).encode()
    ((start, end),) = model_spans(CHAT, body, JSON)
    changed = rewritten(body, model)
    assert json.loads(changed) == fields | {"model": model}
    assert changed.startswith(body[:start])
    assert changed.endswith(body[end:])


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"model":"a","x":{"model":"a"}}', b'{"model":"new","x":{"model":"a"}}'),
        (b'\xef\xbb\xbf {"x":NaN, "model" : "a" }', b'\xef\xbb\xbf {"x":NaN, "model" : "new" }'),
        (b'{"mod\\u0065l":"a","b":1}', b'{"mod\\u0065l":"new","b":1}'),
        (b'{"messages":[]}', b'{"messages":[]}'),
        (b'{"model":null}', b'{"model":"new"}'),
    ],
)
def test_all_bytes_except_the_value_are_kept(body, expected):
    assert rewritten(body) == expected


@pytest.mark.parametrize("body", [b'{"model":"a","model":"a"}', b'{"model":"a","mod\\u0065l":"b"}'])
def test_a_body_with_two_models_is_refused(body):
    with pytest.raises(HttpError) as caught:
        rewritten(body)
    assert (caught.value.status, caught.value.code) == (400, "duplicate_key")


def test_json_that_is_not_utf_8_is_refused():
    with pytest.raises(HttpError, match="UTF-8"):
        rewritten('{"model": "a"}'.encode("utf-16"))


@pytest.mark.parametrize("space", [b"", b" \n"])
def test_the_model_is_also_replaced_in_the_items_of_a_batch(space):
    body = b'{"items":[{"model":"a","x":1},%b{"y":2},3,{"model":"a"}],"model":"a"}' % space
    expected = b'{"items":[{"model":"new","x":1},%b{"y":2},3,{"model":"new"}],"model":"new"}'
    assert rewritten(body, route=BATCH) == expected % space
    assert rewritten(b'{"items":[]}', route=BATCH) == b'{"items":[]}'
    assert rewritten(b'{"items":[ ],"model":"a"}', route=BATCH) == b'{"items":[ ],"model":"new"}'
    assert rewritten(b'{"items":null,"model":"a"}', route=BATCH) == b'{"items":null,"model":"new"}'


def test_items_that_cannot_be_read_are_refused():
    with pytest.raises(HttpError):
        rewritten(b'{"items":[{"model":"a","x":NaN}]}', route=BATCH)


def test_the_model_field_of_a_form_is_replaced_and_files_are_not():
    facts = RequestFacts(TYPE)
    file = part("model", b"binary", file=True)
    body = form(part("stream", b"true"), file, part("model", b"a"), part("file", b"model"))
    expected = form(
        part("stream", b"true"), file, part("model", "né".encode()), part("file", b"model")
    )
    assert rewritten(body, "né", TRANSCRIPTION, facts) == expected
    assert rewritten(form(file), "new", TRANSCRIPTION, facts) == form(file)
    with pytest.raises(HttpError):
        rewritten(form(part("model", b"a"), part("model", b"a")), "new", TRANSCRIPTION, facts)


def test_a_body_that_is_neither_json_nor_a_form_is_unchanged():
    assert rewritten(b"model=a", facts=RequestFacts(b"text/plain")) == b"model=a"
    assert rewritten(b"") == b""


KEYS = st.sampled_from(['"model"', '"mod\\u0065l"', '"x"', '"model\\\\"'])
TEXTS = [
    '"a"',
    '"model"',
    '"a\\/b"',
    '"\\u0061"',
    '"b\\"model\\""',
    "7",
    "null",
    '{"model": "a"}',
    '"é"',
]


@given(
    st.lists(st.tuples(KEYS, st.sampled_from(TEXTS)), max_size=4),
    st.sampled_from(["", " ", "\n\t"]),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16"]),
)
def test_the_span_is_the_same_whether_the_model_is_known_or_not(members, space, encoding):
    text = ",".join(f"{key}{space}:{space}{value}" for key, value in members)
    body = f"{space}{{{text}}}".encode(encoding)
    try:
        model = decode_body(body).model
    except HttpError:
        return
    results = []
    for known in (None, model):
        try:
            results.append(model_spans(CHAT, body, JSON, known))
        except HttpError as refused:
            results.append([refused.code])
    assert results[0] == results[1]


def test_the_span_of_a_known_model_is_found_without_a_walk(monkeypatch):
    monkeypatch.setattr(model_field, "find_members", None)
    body = b'{"messages": [{"content": "a \\"model\\""}], "model" : "a"}'
    assert model_spans(CHAT, body, JSON, "a") == [(len(body) - 4, len(body) - 1)]


@given(st.integers(0, 3), st.text(max_size=20))
def test_the_walk_in_slices_finds_the_same_spans(others, text):
    fields = {f"k{n}": [text] * n for n in range(others)} | {"model": "a", "prompt": text}
    body = json.dumps(fields).encode()
    walk = walk_model_spans(body)
    assert result_of(walk) == model_spans(CHAT, body, JSON)


def result_of(walk):
    try:
        while True:
            next(walk)
    except StopIteration as stop:
        return stop.value


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ('{"type":"session.config","session":{"voice":"v","model":"a"}}', ['"a"']),
        ('{"type":"session.config","model":"é a"}', ['"é a"']),
        ('{"model":"top","session":{"model":"inner"}}', ['"inner"']),
        ('{"type":"session.config","session":{}}', []),
        (b"bytes", []),
    ],
)
def test_the_first_message_of_a_session_names_the_model(first, expected):
    text = first.encode() if isinstance(first, str) else first
    assert [text[start:end].decode() for start, end in session_spans(first)] == expected


def test_a_session_message_with_two_sessions_is_refused():
    with pytest.raises(HttpError):
        session_spans('{"session":{"model":"a"},"session":{"model":"b"}}')


PLAIN = b'--X\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n'
FILE = (
    b'--X\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n'
    b"Content-Type: audio/wav\r\n\r\nRIFF\n--X\r\n\r\n"
)
OF_X = b"multipart/form-data; boundary=X"


@pytest.mark.parametrize("parts", [[PLAIN], [PLAIN, FILE], [FILE, PLAIN], [FILE]])
@pytest.mark.parametrize("end", [b"--X--", b"--X--\r\n"])
def test_a_form_as_clients_write_it_is_accepted(parts, end):
    check_form(b"".join(parts) + end, OF_X)
    check_form(bytearray(b"".join(parts) + end), b'multipart/form-data; boundary="X"')


def raw_part(line, more=b""):
    return b"--X\r\n" + line + b"\r\n" + more + b"\r\nz\r\n"


NAMED = b'content-disposition: form-data; name="model"'


@pytest.mark.parametrize(
    ("body", "content_type", "code"),
    [
        (PLAIN + PLAIN + b"--X--", OF_X, "duplicate_key"),
        (PLAIN + raw_part(b'content-disposition: form-data; name="MODEL"') + b"--X--", OF_X, "duplicate_key"),
        (PLAIN + raw_part(NAMED.replace(b"; ", b'; name="x"; ')) + b"--X--", OF_X, "malformed_body"),
        (PLAIN + raw_part(NAMED + b'; xfilename="q"') + b"--X--", OF_X, "malformed_body"),
        (PLAIN + raw_part(NAMED.replace(b'"', b"")) + b"--X--", OF_X, "malformed_body"),
        (PLAIN + raw_part(b'content-disposition: form-data; name="a"', NAMED + b"\r\n") + b"--X--", OF_X, "malformed_body"),
        (PLAIN + raw_part(b"x: y") + b"--X--", OF_X, "malformed_body"),
        (PLAIN + raw_part(b'content-disposition: form-data;\r\n name="model"') + b"--X--", OF_X, "malformed_body"),
        (PLAIN + b"--Xy\r\n\r\nq\r\n" + PLAIN + b"--X--", OF_X, "malformed_body"),
        (b"preamble\r\n" + PLAIN + b"--X--", OF_X, "malformed_body"),
        (PLAIN, OF_X, "malformed_body"),
        (PLAIN + b"--X--" + PLAIN, OF_X, "malformed_body"),
        (PLAIN + b"--X\r\n" + NAMED + b"\r\n\r\n--X--", OF_X, "malformed_body"),
        (PLAIN + b"--X--", OF_X + b"; boundary=Y", "malformed_body"),
        (PLAIN + b"--X--", b"text/plain", "malformed_body"),
        (FILE * (MAX_PARTS + 1) + b"--X--", OF_X, "malformed_body"),
    ],
)  # fmt: skip
def test_an_ambiguous_form_is_refused(body, content_type, code):
    with pytest.raises(HttpError) as refusal:
        check_form(body, content_type)
    assert (refusal.value.status, refusal.value.code) == (400, code)
