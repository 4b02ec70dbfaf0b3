import importlib
import json

import pytest

from omni_proxy.wire.errors import (
    DownstreamError,
    HttpError,
    UpstreamError,
    encode_local_reply,
    error_body,
    stream_error_event,
)


def test_every_error_has_a_message_a_type_and_a_code():
    body = json.loads(error_body("no", "server_error", "none_healthy"))
    assert body == {"error": {"message": "no", "type": "server_error", "code": "none_healthy"}}


def test_a_reason_is_part_of_error_and_other_extras_are_not():
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
def test_the_default_type_depends_on_the_status(status, type_):
    assert HttpError(status, "no", "code").type == type_


def test_an_explicit_type_overrides_the_default():
    error = HttpError(503, "no", 503, type="overloaded_error", reason="max_inflight")
    assert json.loads(error.body()) == {
        "error": {
            "message": "no", "type": "overloaded_error", "code": 503, "reason": "max_inflight",
        }
    }  # fmt: skip


def test_headers_of_an_error_accumulate():
    error = HttpError(405, "no", "code").with_headers(("allow", "GET")).with_headers(("a", "b"))
    assert error.headers == (("allow", "GET"), ("a", "b"))


def test_a_local_reply_has_a_content_length():
    raw = encode_local_reply(503, b"{}", (("retry-after", "1"),))
    assert raw == (
        b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n"
        b"content-length: 2\r\nretry-after: 1\r\n\r\n{}"
    )


def test_the_last_reply_of_a_connection_has_connection_close():
    assert b"\r\nconnection: close\r\n\r\n" in encode_local_reply(400, b"{}", close=True)


def test_a_broken_stream_ends_with_a_one_line_event():
    event = stream_error_event("upstream stream\nfailed")
    assert event.startswith(b"data: {")
    assert event.endswith(b"}\n\n")
    assert event.count(b"\n") == 2
    assert json.loads(event[6:])["error"] == {
        "message": "upstream stream\nfailed", "type": "upstream_error", "code": 502,
        "reason": "stream_broken",
    }  # fmt: skip


def test_lone_surrogates_are_escaped():
    error = HttpError(400, "unsupported fields: \ud800", "unsupported_fields")
    assert json.loads(error.body())["error"]["message"] == "unsupported fields: \ud800"


@pytest.mark.parametrize(
    ("module", "name", "base"),
    [
        ("dataplane.loop.task", "ClientDisconnected", DownstreamError),
        ("wire.proxy_protocol", "ProxyHeaderError", DownstreamError),
        ("wire.response", "UpstreamProtocolError", UpstreamError),
        ("dataplane.attempt.attempt", "AttemptFailed", UpstreamError),
    ],
)
def test_errors_are_classified_by_the_side_that_caused_them(module, name, base):
    error_class = getattr(importlib.import_module(f"omni_proxy.{module}"), name)
    assert issubclass(error_class, base)
