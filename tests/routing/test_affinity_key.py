import json

import pytest

from omni_proxy.config.schema import Config, RoutingConfig, ServerConfig
from omni_proxy.routing.inspect.affinity_key import (
    MAX_BODY_BYTES,
    MAX_KEY_BYTES,
    AffinityKeyReader,
    affinity_keys_of,
    session_key,
)

ALL = [
    b"X-SMG-Routing-Key: routing",
    b"X-Session-Id: session",
    b"X-Claude-Code-Session-Id: code",
    b"Session-Id: plain",
    b"Authorization: Bearer abc",
    b"X-Forwarded-For: 10.0.0.1",
    b"Cookie: a=b",
]


affinity_key_of = AffinityKeyReader(RoutingConfig().session_headers).read


def head(*lines: bytes) -> bytes:
    return b"".join(line + b"\r\n" for line in lines)


@pytest.mark.parametrize("first", range(len(ALL)))
def test_the_key_is_the_header_that_is_first_in_order_of_preference(first):
    value = ALL[first].partition(b": ")[2].decode()
    assert affinity_key_of(head(b"Accept: */*", *reversed(ALL[first:]))) == value


def test_header_names_match_in_any_case_and_values_are_stripped():
    assert affinity_key_of(head(b"x-smg-ROUTING-key: \t me \t")) == "me"
    assert affinity_key_of(head(b"x-session-id:me")) == "me"


def test_an_empty_value_is_no_key():
    assert affinity_key_of(head(b"X-Session-Id:  ", b"Cookie: c")) == "c"


def test_without_a_matching_header_the_key_is_empty():
    assert affinity_key_of(b"") == ""
    assert (
        affinity_key_of(head(b"Host: cookie: no", b"X-Cookie: no", b"Accept: authorization: x"))
        == ""
    )


def test_the_first_line_of_a_name_wins():
    assert affinity_key_of(head(b"X-Session-Id: one", b"X-Session-Id: two")) == "one"


def test_long_values_are_shortened_and_stay_distinct():
    keys = {affinity_key_of(head(b"Cookie: " + b"c" * length)) for length in range(256, 300)}
    assert len(keys) == 44
    assert max(map(len, keys)) == MAX_KEY_BYTES
    assert len(affinity_key_of(head(b"Cookie: " + b"c" * 2**20))) == 32


def test_any_bytes_can_be_a_key():
    assert affinity_key_of(head(b"X-Session-Id: \xff\x00\xe9")) == "\xff\x00\xe9"


def test_a_megabyte_of_other_header_lines_is_skipped():
    assert affinity_key_of(head(*[b"X-Filler: " + b"cookie:" * 10] * 13_000, b"Cookie: c")) == "c"


KEYS = ("session_params.session_id", "session_id", "user")
of_body = AffinityKeyReader(("x-session-id",), KEYS).read


def test_only_configured_headers_name_a_session():
    of_trace = AffinityKeyReader(("x-trace", "x.y+z")).read
    assert of_trace(head(b"X-Session-Id: s", b"X-Trace: t")) == "t"
    assert of_trace(head(b"xay+z: no", b"X.Y+Z: literal")) == "literal"
    assert AffinityKeyReader(()).read(head(*ALL)) == ""


@pytest.mark.parametrize(
    ("body", "key"),
    [
        ({"user": "u", "session_id": "s", "session_params": {"session_id": "p"}}, "p"),
        ({"user": "u", "session_id": "s", "session_params": {"other": "p"}}, "s"),
        ({"user": "u", "session_id": "", "session_params": None}, "u"),
        ({"user": "u", "session_id": ["s"], "session_params": "text"}, "u"),
        ({"user": 7}, "7"),
        ({"user": True}, ""),
        ({"user": 7.5}, ""),
        ({"session_params": {"session_params": {"session_id": "too deep"}}}, ""),
        ({"messages": [{"user": "nested"}]}, ""),
        ([{"user": "no object"}], ""),
        ("user", ""),
    ],
)
def test_the_first_key_of_the_body_that_has_a_value_names_the_session(body, key):
    assert of_body(b"", json.dumps(body).encode()) == key


def test_a_header_wins_over_the_body():
    assert of_body(head(b"X-Session-Id: header"), b'{"user": "body"}') == "header"


@pytest.mark.parametrize(
    "body",
    [
        b'{"temperature": NaN, "user": "me"}',
        '{"user": "me"}'.encode("utf-16"),
        b'{"x": "\\ud800", "user": "m\\u0065"}',
        bytearray(b'{"user": "me"}'),
    ],
    ids=["NaN", "UTF-16", "escapes", "bytearray"],
)
def test_bodies_that_workers_accept_name_their_session(body):
    assert of_body(b"", body) == "me"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"user": "me"', b"\xff\xfe", b"--boundary\r\n", b"[" * 100_000,
     b'{"user": ' + b"[" * 100_000],
)  # fmt: skip
def test_a_body_that_is_not_json_names_no_session(body):
    assert of_body(b"", body) == ""


def test_a_body_too_large_to_parse_at_once_names_no_session():
    body = b'{"user": "me", "pad": "%b"}'
    assert of_body(b"", body % (b"x" * (MAX_BODY_BYTES - len(body)))) == "me"
    assert of_body(b"", body % (b"x" * MAX_BODY_BYTES)) == ""


def test_a_session_has_the_same_key_in_a_header_and_in_a_body():
    for name in ("me", "\u00e9\u4e2d\U0001f600", "c" * 1000, "a b%+"):
        encoded = name.encode()
        key = session_key(encoded)
        assert of_body(head(b"X-Session-Id: " + encoded)) == key
        for ascii_only in (True, False):
            body = json.dumps({"user": name}, ensure_ascii=ascii_only).encode()
            assert of_body(b"", body) == key


def test_the_api_key_that_all_clients_send_names_no_session():
    lines = b"POST / HTTP/1.1\r\nAuthorization: Bearer k\r\nX-Api-Key: k\r\nCookie: c=1\r\n"
    headers = ("authorization", "x-api-key", "cookie")
    plain = Config(routing=RoutingConfig(session_headers=headers))
    assert affinity_keys_of(plain).read(lines) == "Bearer k"
    guarded = Config(server=ServerConfig(api_key="k"), routing=plain.routing)
    assert affinity_keys_of(guarded).read(lines) == "c=1"
