import json

import pytest

from omni_proxy.wire.errors import HttpError, answer, error_body, stream_error_event


def test_every_error_has_a_message_a_type_and_a_code():
    body = json.loads(error_body("no", "server_error", "none_healthy"))
    assert body == {"error": {"message": "no", "type": "server_error", "code": "none_healthy"}}


def test_a_reason_stands_inside_the_error_and_the_rest_beside_it():
    body = json.loads(error_body("no", "t", 503, reason="full", detail="Not Found"))
    assert body["error"]["reason"] == "full"
    assert body["detail"] == "Not Found"


@pytest.mark.parametrize(
    ("status", "type_"),
    [
        (400, "invalid_request_error"),
        (426, "invalid_request_error"),
        (500, "server_error"),
        (502, "upstream_error"),
        (503, "server_error"),
        (504, "upstream_error"),
    ],
)
def test_the_type_follows_from_the_status(status, type_):
    assert HttpError(status, "no", "code").type == type_


def test_a_type_that_is_given_wins_and_is_not_told_twice():
    refusal = HttpError(503, "no", 503, type="overloaded_error", reason="max_inflight")
    assert json.loads(refusal.body()) == {
        "error": {
            "message": "no", "type": "overloaded_error", "code": 503, "reason": "max_inflight",
        }
    }  # fmt: skip


def test_a_refusal_gathers_headers():
    refusal = HttpError(405, "no", "code").with_headers(("allow", "GET")).with_headers(("a", "b"))
    assert refusal.headers == (("allow", "GET"), ("a", "b"))


def test_an_answer_of_ours_is_framed_by_its_length():
    raw = answer(503, b"{}", (("retry-after", "1"),))
    assert raw == (
        b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n"
        b"content-length: 2\r\nretry-after: 1\r\n\r\n{}"
    )


def test_an_answer_says_when_it_is_the_last_one():
    assert b"\r\nconnection: close\r\n\r\n" in answer(400, b"{}", close=True)


def test_a_broken_stream_ends_with_an_event_of_one_line():
    event = stream_error_event("upstream stream\nfailed")
    assert event.startswith(b"data: {")
    assert event.endswith(b"}\n\n")
    assert event.count(b"\n") == 2
    assert json.loads(event[6:])["error"] == {
        "message": "upstream stream\nfailed", "type": "upstream_error", "code": 502,
        "reason": "stream_broken",
    }  # fmt: skip


def test_what_utf8_cannot_hold_is_told_as_json_spells_it():
    refusal = HttpError(400, "unsupported fields: \ud800", "unsupported_fields")
    assert json.loads(refusal.body())["error"]["message"] == "unsupported fields: \ud800"
