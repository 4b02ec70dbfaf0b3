"""The reply to a request that was aborted while queued; it equals an engine's for an aborted one.

Pure: `made_at` is Unix time in seconds. Invariant: the reply has the shape of the route's own
responses, no tokens, and the finish reason `abort`. A stream is one such event, followed by
`[DONE]` if the route's streams end with it. Routes that generate no text get an error. Sources:
note:features 3.1 and 4 (contracts); the Messages and Responses APIs for the events of those two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

from omni_proxy.wire.errors import HttpError, to_json

MESSAGE: Final = "aborted while it waited in the queue of the proxy"
CODE: Final = "request_aborted"
JSON: Final = "application/json"
EVENT_STREAM: Final = "text/event-stream; charset=utf-8"
DONE: Final = b"data: [DONE]\n\n"
Fields = dict[str, object]


class AbortedRequest(NamedTuple):
    """`ids`: the request ids in its body, several for a batch. `request_id`: used if the body has
    none."""

    path: str
    request_id: str
    ids: tuple[str, ...]
    model: str
    stream: bool
    made_at: int

    @property
    def id(self) -> str:
        return self.ids[0] if self.ids else self.request_id


class AbortedReply(HttpError):
    """A complete response with status 200, sent instead of a worker's response."""

    def __init__(self, payload: bytes, content_type: str) -> None:
        super().__init__(200, MESSAGE, CODE)
        self._payload = payload
        self.content_type = content_type

    def body(self) -> bytes:
        return self._payload


def aborted_reply(request: AbortedRequest) -> HttpError:
    shape = _SHAPES.get(request.path)
    if shape is None:
        return HttpError(400, f"the request was {MESSAGE}", CODE)
    if not request.stream:
        return AbortedReply(to_json(shape(request)), JSON)
    events = _STREAMS.get(request.path, _plain_events)
    return AbortedReply(b"".join(events(request)), EVENT_STREAM)


def _generate(request: AbortedRequest) -> object:
    """SGLang: one object, or a list of them for a batch."""
    outputs = [_generated(generation_id) for generation_id in request.ids or (request.request_id,)]
    return outputs if len(outputs) > 1 else outputs[0]


def _generated(request_id: str) -> Fields:
    return {
        "text": "",
        "output_ids": [],
        "meta_info": {
            "id": request_id,
            "finish_reason": {"type": "abort", "message": MESSAGE},
            "prompt_tokens": 0,
            "completion_tokens": 0,
            "cached_tokens": 0,
        },
    }


def _chat(request: AbortedRequest) -> Fields:
    name = "delta" if request.stream else "message"
    choice = {"index": 0, name: {"role": "assistant", "content": ""}, "finish_reason": "abort"}
    return _completed(
        request, "chat.completion.chunk" if request.stream else "chat.completion", choice
    )


def _text(request: AbortedRequest) -> Fields:
    choice = {"index": 0, "text": "", "logprobs": None, "finish_reason": "abort"}
    return _completed(request, "text_completion", choice)


def _completed(request: AbortedRequest, kind: str, choice: Mapping[str, object]) -> Fields:
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    return {
        "id": request.id,
        "object": kind,
        "created": request.made_at,
        "model": request.model,
        "choices": [choice],
        **({} if request.stream else {"usage": usage}),
    }


def _tokens(request: AbortedRequest) -> Fields:
    """vLLM's /inference/v1/generate."""
    choice = {"index": 0, "token_ids": [], "logprobs": None, "finish_reason": "abort"}
    return {"request_id": request.id, "choices": [choice]}


def _message(request: AbortedRequest) -> Fields:
    """The Messages API has no stop reason for an abort: null, as vLLM returns."""
    return {
        "id": request.id,
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 0, "output_tokens": 0},
    }


def _response(request: AbortedRequest) -> Fields:
    """The Responses API reports an abort as the status `cancelled`."""
    return {
        "id": request.id,
        "object": "response",
        "created_at": request.made_at,
        "model": request.model,
        "status": "cancelled",
        "output": [],
    }


def _plain_events(request: AbortedRequest) -> Iterator[bytes]:
    output = _SHAPES[request.path](request)
    for event in output if isinstance(output, list) else (output,):
        yield b"data: %b\n\n" % to_json(event)
    yield DONE


def _message_events(request: AbortedRequest) -> Iterator[bytes]:
    """A stream of the Messages API ends with its own last event."""
    usage = {"output_tokens": 0}
    delta = {"stop_reason": None, "stop_sequence": None}
    yield _named("message_start", message=_message(request))
    yield _named("message_delta", delta=delta, usage=usage)
    yield _named("message_stop")


def _response_events(request: AbortedRequest) -> Iterator[bytes]:
    ended = {
        **_response(request),
        "status": "incomplete",
        "incomplete_details": {"reason": "abort"},
    }
    yield _named("response.incomplete", sequence_number=0, response=ended)
    yield DONE


def _named(kind: str, **fields: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), to_json({"type": kind, **fields}))


_SHAPES: Final[Mapping[str, Callable[[AbortedRequest], object]]] = {
    "/generate": _generate,
    "/v1/chat/completions": _chat,
    "/v1/completions": _text,
    "/inference/v1/generate": _tokens,
    "/v1/messages": _message,
    "/v1/responses": _response,
}
_STREAMS: Final[Mapping[str, Callable[[AbortedRequest], Iterator[bytes]]]] = {
    "/v1/messages": _message_events,
    "/v1/responses": _response_events,
}
