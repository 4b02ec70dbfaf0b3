"""The error envelope of the speech routes: four keys, every one always there (api-server.md 1.0).

Invariant: what the caller did wrong names the field at fault; what we did wrong names none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from quart import Response


@dataclass(slots=True)
class SpeechRefusal(Exception):
    """A speech request that ends in an error, before any audio or within a session."""

    message: str
    param: str | None = None
    status: int = 400
    kind: str = "BadRequestError"
    code: int | str | None = 400

    def error(self) -> dict[str, Any]:
        """Return what stands under "error"."""
        return {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }

    def under(self, path: str) -> SpeechRefusal:
        """Return the same refusal with `path` before its field's name."""
        param = f"{path}.{self.param}" if self.param else path
        return SpeechRefusal(self.message, param, self.status, self.kind, self.code)

    def response(self) -> Response:
        """Return the whole answer."""
        body = msgspec.json.encode({"error": self.error()})
        return Response(body, self.status, content_type="application/json")


def server_fault(message: str, status: int = 500) -> SpeechRefusal:
    """Return a refusal for which the caller is not to blame: type server_error, no code."""
    return SpeechRefusal(message, None, status, "server_error", None)


def too_large(message: str, param: str) -> SpeechRefusal:
    """Return the 413 of an upload beyond its limit."""
    return SpeechRefusal(message, param, 413, "RequestTooLargeError", 413)


def of_failure(message: str, status: int) -> SpeechRefusal:
    """Return the refusal for a request that failed in the pipeline with that status."""
    return SpeechRefusal(message) if status < 500 else server_fault(message, status)
