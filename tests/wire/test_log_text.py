import json
from urllib.parse import parse_qsl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.wire.log_text import (
    MASK,
    SECRETS,
    ascii_json,
    escape_unprintable,
    mask_secrets,
    mask_secrets_in_text,
)
from omni_proxy.wire.request import parse_request_head

VALUE = "S3CRET"


@st.composite
def spelled(draw, name):
    """A parameter's name in any case, any of its characters percent-encoded."""
    parts = []
    for char in name:
        char = draw(st.sampled_from([char, char.upper()]))
        code = draw(st.sampled_from([f"%{ord(char):02x}", f"%{ord(char):02X}", char, char]))
        parts.append(code)
    return "".join(parts)


secrets = st.sampled_from(SECRETS).flatmap(spelled)
others = st.sampled_from(["a", "url", "keys", "tokens", "max_tokens", "monkey", "", "x%5Fkey"])


@given(st.lists(st.tuples(secrets | others, st.sampled_from(["=", ""]), st.sampled_from("&;"))))
def test_no_value_of_a_secret_stands_in_a_target_and_all_else_stays(parts):
    plain, wanted, query, hidden = [], [], "", False
    for name, equals, separator in parts:
        is_secret = dict(parse_qsl(f"{name}=x", keep_blank_values=True)).popitem()[0].lower()
        is_secret = is_secret in SECRETS and bool(equals)
        value = (VALUE if is_secret else "v") if equals else ""
        query += f"{name}{equals}{value}{separator}"
        plain.append(name)
        wanted.append((is_secret, value))
    hidden = any(is_secret for is_secret, _ in wanted)
    reported = mask_secrets(f"/path?{query}")
    assert VALUE not in reported
    assert (MASK in reported) == hidden
    if not hidden:
        assert reported == f"/path?{query}"


@pytest.mark.parametrize(
    ("target", "reported"),
    [
        ("/workers?api_key=SECRET", "/workers?api_key=***"),
        ("/add_worker?url=http://a:1&api%5Fkey=SECRET&x=1", "/add_worker?url=http://a:1&api%5Fkey=***&x=1"),
        ("/a?Authorization=Bearer%20abc;def&b=2", "/a?Authorization=***&b=2"),
        ("/a?b=1;token=abc", "/a?b=1;token=***"),
        ('/a?key=a"b\'c', "/a?key=***"),
        ("/a?key=", "/a?key="),
        ("/key=1", "/key=1"),
        ("/v1/chat/completions", "/v1/chat/completions"),
    ],
)  # fmt: skip
def test_what_is_logged_of_a_target(target, reported):
    assert mask_secrets(target) == reported


def test_a_head_keeps_its_target_for_the_worker_and_loses_the_secret_for_all_logs():
    head = parse_request_head(b"GET /a?access_token=abc HTTP/1.1\r\nhost: a\r\n\r\n")
    assert head.target == b"/a?access_token=abc"
    assert head.log_words == ("GET", "/a?access_token=***", "/a")


def test_a_text_loses_secrets_of_every_url_in_it():
    line = '{"target":"/a?key=abc","error":"GET http://w/b?x=1&token=def failed; key=kept"}'
    reported = '{"target":"/a?key=***","error":"GET http://w/b?x=1&token=*** failed; key=kept"}'
    assert mask_secrets_in_text(line) == reported


@given(st.recursive(st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_json_in_ascii_is_the_same_json(value):
    record = ascii_json(json.dumps(value, ensure_ascii=False).encode())
    assert record.decode("ascii").isprintable()
    assert json.loads(record) == value


@given(st.text())
def test_what_is_shown_is_printable_but_for_line_ends_and_tabs(text):
    reported = escape_unprintable(text)
    assert reported.replace("\n", "").replace("\t", "").isprintable()
    if text.isprintable():
        assert reported == text
