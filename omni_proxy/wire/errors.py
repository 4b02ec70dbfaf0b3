"""Exceptions by the side that caused them, and the bytes of a local reply.

    HttpError: a local reply; 4xx: the client, 502 and 504: a worker, other 5xx: the proxy
    DownstreamError: the client, no reply is sent       ClientDisconnected, ProxyHeaderError
    UpstreamError: a worker, may be retried             UpstreamProtocolError, AttemptFailed
    PhaseTimeout: the side that the phase waits for
    any other exception: a bug; it ends its connection or service, with a traceback

Invariant: each error body is `{"error": {"message", "type", "code"}}`, and is
created only here.
"""

from __future__ import annotations

import json
from http import HTTPStatus

import msgspec


def to_json(value: object) -> bytes:
    """Encode as JSON. Lone surrogates, which a client's JSON may contain, are escaped because
    UTF-8 can't encode them."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(value)).encode()


class DownstreamError(Exception):
    """Caused by the client; no reply can be sent."""


class UpstreamError(Exception):
    """Caused by a worker."""


class HttpError(Exception):
    """A local reply: `status`, `message`, and `code`, the machine-readable reason.

    `close`: the connection can't be reused, because the rest of the request is untrusted or unread.
    `extra`: see `error_body`.
    """

    content_type = "application/json"  # of `body()`

    def __init__(
        self, status: int, message: str, code: str | int, *, close: bool = False, **extra: object
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.close = close
        self.extra = extra
        self.headers: tuple[tuple[str, str], ...] = ()

    def with_headers(self, *headers: tuple[str, str]) -> HttpError:
        self.headers += headers
        return self

    @property
    def type(self) -> str:
        explicit = self.extra.get("type")
        if isinstance(explicit, str):
            return explicit
        if self.status in (502, 504):
            return "upstream_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> bytes:
        extra = {name: value for name, value in self.extra.items() if name != "type"}
        return error_body(self.message, self.type, self.code, **extra)


def bad_request(message: str, code: str = "invalid_request") -> HttpError:
    return HttpError(400, message, code)


def error_body(message: str, type_: str, code: str | int, /, **extra: object) -> bytes:
    """The JSON error body. `reason=` goes inside `error`, any other extra (`detail=`) next to it.

    `top_code=` becomes a top-level `code`, which clients of sgl-model-gateway read.
    """
    error: dict[str, object] = {"message": message, "type": type_, "code": code}
    if "reason" in extra:
        error["reason"] = extra.pop("reason")
    if "top_code" in extra:
        extra["code"] = extra.pop("top_code")
    return to_json({"error": error, **extra})


def encode_local_reply(
    status: int,
    body: bytes,
    headers: tuple[tuple[str, str], ...] = (),
    *,
    close: bool = False,
    content_type: str = HttpError.content_type,
) -> bytes:
    """The bytes of a whole response, with content-length."""
    lines = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        f"content-type: {content_type}",
        f"content-length: {len(body)}",
        *(f"{name}: {value}" for name, value in headers),
    ]
    if close:
        lines.append("connection: close")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def stream_error_event(message: str) -> bytes:
    """The last event of a broken SSE stream (note:omni-router 10)."""
    return b"data: " + error_body(message, "upstream_error", 502, reason="stream_broken") + b"\n\n"
