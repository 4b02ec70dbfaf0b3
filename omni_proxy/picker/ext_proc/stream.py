"""State machine of one ext_proc stream: the responses to Envoy's messages about one request.

    request headers ─> [request body] ─> pick ─> response headers ─> [response body] ─> over

Invariant: a pick is requested once, when the body is complete, or at the headers if Envoy sends no
body; each message of Envoy gets its responses in order, and bodies are changed only as the
destination requires. Pure: it neither picks nor waits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from omni_proxy.picker.ext_proc import messages
from omni_proxy.picker.ext_proc.messages import Destination
from omni_proxy.picker.ext_proc.protocol import (
    HttpBody,
    HttpHeaders,
    ProcessingMode,
    ProcessingRequest,
    ProcessingResponse,
)
from omni_proxy.wire.errors import HttpError

_NONE: Final = ProcessingMode.NONE
_BUFFERED: Final = (ProcessingMode.BUFFERED, ProcessingMode.BUFFERED_PARTIAL)
_DUPLEX: Final = ProcessingMode.FULL_DUPLEX_STREAMED
_STATUS: Final = re.compile(r"[1-9][0-9]{2}\Z")
KEPT_CHUNK_BYTES: Final = 65536  # kept of a response's last chunk, which has the usage


class ProxiedRequest(msgspec.Struct, gc=False):
    """A request to pick for. `subset`: the allowed endpoints, None for any."""

    headers: dict[str, str]
    body: bytes
    subset: frozenset[str] | None


class EnvoyStream:
    """Pass each message to `receive`. If that sets `pending`, `picked` or `refused` returns the
    responses.

    `status`: of the response, 0 before its headers. `complete`: the response has arrived
    completely. `over`: Envoy gets no further responses.
    """

    def __init__(self, max_body: int) -> None:
        self._max_body = max_body
        self._request_mode = self._response_mode = int(_NONE)
        self._headers: dict[str, str] = {}
        self._subset: frozenset[str] | None = None
        self._parts: list[bytes] = []
        self._begun = self._picked = False
        self._waits_for = ""  # the kind of message that requested the pick
        self._ends = True  # no trailers follow the request's body
        self._added_headers: Sequence[tuple[str, str]] = ()
        self.pending: ProxiedRequest | None = None
        self.has_pair = False  # a prefill worker waits for the head of the response
        self.held_bytes = 0  # buffered bytes of the request's body
        self.status = 0
        self.complete = self.over = False
        self.bytes_out = self.chunks = 0
        self.last_chunk = b""  # of the response

    @property
    def ends_unseen(self) -> bool:
        """Whether the end of the stream is the only sign that the response is complete.

        So it is if the response has begun, and Envoy does not send its body.
        """
        return self.status > 0 and self._response_mode == _NONE and not self.over

    def receive(self, message: ProcessingRequest) -> list[ProcessingResponse]:
        """The responses; [] if they depend on a pick.

        Raises HttpError 413, for `refused`, and ValueError for an unexpected message.
        """
        kind = message.WhichOneof("request")
        self._check_order(kind)
        if message.HasField("protocol_config"):
            self._request_mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        elif kind == "request_headers":  # an Envoy that does not send its modes
            self._request_mode, self._response_mode = (
                ProcessingMode.BUFFERED,
                ProcessingMode.STREAMED,
            )
        if kind == "request_headers":
            self._begun = True
            self._subset = messages.subset_of(message)
            return self._request_headers(message.request_headers)
        if kind == "request_body":
            return self._request_body(message.request_body)
        if kind == "request_trailers":
            return self._request_trailers()
        if kind == "response_headers":
            return self._response_headers(message.response_headers)
        if kind == "response_body":
            return self._response_body(message.response_body)
        if kind == "response_trailers":
            self._complete()
            return [messages.response_trailers()]
        raise ValueError(f"not a message of a request or response: {kind}")

    def _check_order(self, kind: str | None) -> None:
        """Raises ValueError for request messages in the wrong order.

        Response messages may come first: Envoy may answer itself before it sends the request here.
        """
        if kind == "request_headers" and self._begun:
            raise ValueError("a second request_headers in one stream: a stream has one request")
        if kind in ("request_body", "request_trailers") and not self._begun:
            raise ValueError(f"{kind} without request_headers: request_header_mode must be SEND")

    def picked(self, destination: Destination) -> list[ProcessingResponse]:
        """The responses after the pick for `pending`."""
        pending, self.pending = self.pending, None
        assert pending is not None
        self._added_headers = destination.added_headers
        self.has_pair = messages.PREFILLER in destination.headers
        if self._waits_for == "headers":
            return [messages.headers_to(destination)]
        if self._request_mode != _DUPLEX:
            return [messages.body_to(destination)]
        body = pending.body if destination.body is None else destination.body
        length = len(body) if self._ends else None
        head = messages.headers_to(destination, length)
        responses = [head, *messages.request_chunks(body, end=self._ends)]
        return responses if self._ends else [*responses, messages.request_trailers()]

    def refused(self, error: HttpError) -> list[ProcessingResponse]:
        """The responses if there is no destination."""
        self.pending, self.over, self.status = None, True, error.status
        return [messages.refusal(error)]

    def _ask(self, waits_for: str) -> list[ProcessingResponse]:
        self._picked, self._waits_for = True, waits_for
        self.pending = ProxiedRequest(self._headers, b"".join(self._parts), self._subset)
        self._parts = []
        self.held_bytes = 0
        return []

    def _request_headers(self, head: HttpHeaders) -> list[ProcessingResponse]:
        self._headers = messages.read_headers(head.headers)
        if head.end_of_stream or self._request_mode not in (*_BUFFERED, _DUPLEX):
            return self._ask("headers")
        return [] if self._request_mode == _DUPLEX else [messages.request_headers()]

    def _request_body(self, body: HttpBody) -> list[ProcessingResponse]:
        if self._picked:
            return [messages.request_body()]
        self.held_bytes += len(body.body)
        if self.held_bytes > self._max_body:
            raise HttpError(413, "payload too large", "payload_too_large")
        self._parts.append(body.body)
        if body.end_of_stream or self._request_mode != _DUPLEX:
            return self._ask("body")
        return []

    def _request_trailers(self) -> list[ProcessingResponse]:
        if self._picked:
            return [messages.request_trailers()]
        self._ends = False
        return self._ask("trailers")

    def _response_headers(self, head: HttpHeaders) -> list[ProcessingResponse]:
        text = messages.read_headers(head.headers).get(":status", "")
        self.status = int(text) if _STATUS.match(text) else 0
        if head.end_of_stream:
            self._complete()
        return [messages.response_headers(self._added_headers)]

    def _response_body(self, body: HttpBody) -> list[ProcessingResponse]:
        chunk = body.body
        if chunk:
            self.chunks += 1
            self.bytes_out += len(chunk)
            self.last_chunk = chunk[-KEPT_CHUNK_BYTES:]
        if body.end_of_stream:
            self._complete()
        if self._response_mode == _DUPLEX:
            return [messages.response_chunk(chunk, end=body.end_of_stream)]
        return [messages.response_body()]

    def _complete(self) -> None:
        self.complete = True
