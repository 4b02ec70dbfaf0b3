import json
import logging
import re
from urllib.parse import parse_qsl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.shared.log_text import (
    MASK,
    SECRETS,
    LogfmtFormatter,
    ascii_json,
    escape_unprintable,
    mask_secrets,
    mask_secrets_in_text,
    quote_value,
)
from omni_proxy.wire.request import parse_request_head

VALUE = "S3CRET"


@st.composite
def spelled(draw, name):
    """The name in any case, with any of its characters percent-encoded."""
    parts = []
    for char in name:
        char = draw(st.sampled_from([char, char.upper()]))
        code = draw(st.sampled_from([f"%{ord(char):02x}", f"%{ord(char):02X}", char, char]))
        parts.append(code)
    return "".join(parts)


secrets = st.sampled_from(SECRETS).flatmap(spelled)
others = st.sampled_from(["a", "url", "keys", "tokens", "max_tokens", "monkey", "", "x%5Fkey"])


@given(st.lists(st.tuples(secrets | others, st.sampled_from(["=", ""]), st.sampled_from("&;"))))
def test_secrets_in_a_target_are_masked(parts):
    masked, query = False, ""
    for name, equals, separator in parts:
        is_secret = dict(parse_qsl(f"{name}=x", keep_blank_values=True)).popitem()[0].lower()
        is_secret = is_secret in SECRETS and bool(equals)
        value = (VALUE if is_secret else "v") if equals else ""
        query += f"{name}{equals}{value}{separator}"
        masked = masked or is_secret
    logged = mask_secrets(f"/path?{query}")
    assert VALUE not in logged
    assert (MASK in logged) == masked
    if not masked:
        assert logged == f"/path?{query}"


@pytest.mark.parametrize(
    ("target", "logged"),
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
def test_logged_targets(target, logged):
    assert mask_secrets(target) == logged


def test_secrets_of_a_target_are_masked_in_the_log_but_not_for_the_worker():
    head = parse_request_head(b"GET /a?access_token=abc HTTP/1.1\r\nhost: a\r\n\r\n")
    assert head.target == b"/a?access_token=abc"
    assert head.log_words == ("GET", "/a?access_token=***", "/a")


def test_secrets_of_every_url_in_a_text_are_masked():
    line = '{"target":"/a?key=abc","error":"GET http://w/b?x=1&token=def failed; key=kept"}'
    masked = '{"target":"/a?key=***","error":"GET http://w/b?x=1&token=*** failed; key=kept"}'
    assert mask_secrets_in_text(line) == masked


@given(st.recursive(st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_ascii_json_is_printable_and_has_the_same_value(value):
    record = ascii_json(json.dumps(value, ensure_ascii=False).encode())
    assert record.decode("ascii").isprintable()
    assert json.loads(record) == value


@given(st.text())
def test_escaped_text_is_printable_except_for_line_ends_and_tabs(text):
    escaped = escape_unprintable(text)
    assert escaped.replace("\n", "").replace("\t", "").isprintable()
    if text.isprintable():
        assert escaped == text


def formatted(text, *values):
    record = logging.LogRecord("a", logging.INFO, "a.py", 1, text, values, None)
    line = LogfmtFormatter().format(record)
    assert record.args == values  # other handlers get the same record
    return line


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (("http://a:1", "refused"), "worker_lost worker=http://a:1 error=refused after=2s"),
        (("a", "no such file"), 'worker_lost worker=a error="no such file" after=2s'),
        (("a", 'say "no"'), r'worker_lost worker=a error="say \"no\"" after=2s'),
        (("a", "x=1"), 'worker_lost worker=a error="x=1" after=2s'),
        (("a", ""), 'worker_lost worker=a error="" after=2s'),
        (("a", "two\nlines"), r'worker_lost worker=a error="two\nlines" after=2s'),
        ((None, OSError(2, "gone")), 'worker_lost worker=None error="[Errno 2] gone" after=2s'),
    ],
)
def test_values_are_quoted_if_they_are_not_one_word(values, line):
    assert formatted("worker_lost worker=%s error=%s after=%ds", *values, 2) == line


def test_an_explanation_may_follow():
    assert formatted("a_b c=%s: it stays", "x") == "a_b c=x: it stays"
    assert formatted("a_b c=%s, every %d s", "x y", 3) == 'a_b c="x y", every 3 s'


def test_only_values_of_keys_are_quoted():
    assert formatted("%s %s", "chat[0]", "a line") == "chat[0] a line"
    assert formatted("worker_%s 100%% a=%5.1fs b=%s", "up", 1.25, "c d") == (
        'worker_up 100% a=  1.2s b="c d"'
    )
    assert formatted("a=%s") == "a=%s"


@given(st.text())
def test_every_value_can_be_read_back(value):
    quoted = quote_value(value)
    assert "\n" not in quoted
    if quoted.startswith('"'):
        assert json.loads(quoted) == value
    else:
        assert quoted == value
        assert re.fullmatch(r'[^\s"=]+', quoted)
