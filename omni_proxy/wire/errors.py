"""Answers the router makes itself: the one error shape, and its bytes.

Every one is `{"error": {"message", "type", "code"}}` (design, "Router-made errors"); other rooms
never build an error body by hand.
"""

from __future__ import annotations

import json
from http import HTTPStatus

import msgspec


def to_json(value: object) -> bytes:
    """Of anything that came in as JSON too: that can spell half a character, which UTF-8 can't."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(value)).encode()


class HttpError(Exception):
    """A request we answer ourselves: status, reason, and whether the connection can go on.

    `code` is the machine-readable reason; `close` is set when the rest of the request can't be
    trusted or will not be read.
    """

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

    def topped(self) -> HttpError:
        """With what clients of the admin routes read beside `error` (api-server.md 9.1)."""
        self.extra |= {"success": False, "message": self.message, "status": "error"}
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


def error_body(message: str, type_: str, code: str | int, /, **extra: object) -> bytes:
    """The JSON error body; `reason=` goes inside `error`, any other extra (`detail=`) beside it.

    `top_code=` is a `code` beside `error`, where another router's clients look for it.
    """
    error: dict[str, object] = {"message": message, "type": type_, "code": code}
    if "reason" in extra:
        error["reason"] = extra.pop("reason")
    if "top_code" in extra:
        extra["code"] = extra.pop("top_code")
    return to_json({"error": error, **extra})


def answer(
    status: int, body: bytes, headers: tuple[tuple[str, str], ...] = (), *, close: bool = False
) -> bytes:
    """A whole response of our own, framed by its length."""
    lines = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        *(f"{name}: {value}" for name, value in headers),
    ]
    if close:
        lines.append("connection: close")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def stream_error_event(message: str) -> bytes:
    """The last event of a broken SSE stream (omni-router.md 10)."""
    return b"data: " + error_body(message, "upstream_error", 502, reason="stream_broken") + b"\n\n"
