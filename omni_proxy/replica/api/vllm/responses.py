"""OpenAI's Responses API: POST /v1/responses, and GET, DELETE and cancel of a stored response.

Invariant: a response is stored, only in this process, unless `store` is false or the store is off.
It is stored with the conversation before it, so that a later request can continue it. At most
`limit` responses and MAX_BYTES of text are stored; the oldest are evicted first. A background
response continues after its request, until it is cancelled or deleted or the server stops. Errors
have vLLM's format.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import trio
from msgspec import Struct
from quart import Response
from quart_trio import QuartTrio

from omni_proxy.replica.api.common.errors import CLIENT_ERRORS, json_response
from omni_proxy.replica.api.common.kv_transfers import (
    caller_request_id,
    transfer_fields,
    with_transfers,
)
from omni_proxy.replica.api.common.lenient_decode import json_body, validate
from omni_proxy.replica.api.common.sse import (
    EVENT_STREAM_HEADERS,
    DeferredStream,
    close_streams_after_requests,
    deferred_response,
)
from omni_proxy.replica.api.openai.to_generate_request import (
    NO_TOOLS,
    TEXT_TOOL_CHOICES,
    Int64,
    MediaReader,
    PositiveInt64,
    response_schema,
    sampling_params,
)
from omni_proxy.replica.api.route_context import RouteContext
from omni_proxy.replica.api.vllm.response_events import (
    ResponseEvents,
    new_id,
    response_object,
    with_output,
)
from omni_proxy.replica.api.vllm.vllm_errors import VllmError, vllm_view
from omni_proxy.replica.pipeline.requests import (
    CompletionResult,
    GenerateRequest,
    PromptMessage,
)

MAX_BYTES: Final = 64 << 20
RUNNING: Final = ("queued", "in_progress")
CALLER = "invalid_request_error"
NOT_STORED = "This server stores no responses: background needs a store (--stored-responses)"


def do_nothing() -> None:
    """The default of `cancel`."""


@dataclass(slots=True)
class StoredResponse:
    """A response with its conversation so far (`messages`), without instructions.

    `cancel` ends its generation.
    """

    body: dict[str, Any]
    messages: list[PromptMessage]
    cancel: Callable[[], None] = field(default=do_nothing)

    @property
    def running(self) -> bool:
        return self.body["status"] in RUNNING

    @property
    def nbytes(self) -> int:
        texts = sum(len(part) for message in self.messages for part in _texts(message))
        return 1024 + 4 * texts


def _texts(message: PromptMessage) -> list[str]:
    if isinstance(message.content, str):
        return [message.content]
    return [str(part.get("text") or "") for part in message.content]


class ResponseStore:
    """The stored responses, oldest first; `limit` 0 stores none, which is vLLM's default."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._sizes: dict[str, int] = {}

    def get(self, response_id: str) -> StoredResponse | None:
        return self._stored.get(response_id)

    def put(self, response: StoredResponse) -> None:
        """Store a response, or replace its stored state."""
        if not self.limit:
            return
        response_id = response.body["id"]
        self._stored[response_id] = response
        self._sizes[response_id] = response.nbytes
        while len(self._stored) > self.limit or (
            len(self._stored) > 1 and sum(self._sizes.values()) > MAX_BYTES
        ):
            self.delete(next(iter(self._stored)))

    def delete(self, response_id: str) -> bool:
        """Delete a response and end its generation; False if it is not stored."""
        response = self._stored.pop(response_id, None)
        self._sizes.pop(response_id, None)
        if response is None:
            return False
        if response.running:
            response.cancel()
        return True


class ResponsesBody(Struct, kw_only=True):
    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: PositiveInt64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int64] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    truncation: Literal["auto", "disabled"] | None = None
    request_id: str | None = None


class _Turn:
    """One request in flight: its body, and its response so far."""

    def __init__(self, body: ResponsesBody, response: dict[str, Any]) -> None:
        self.body = body
        self.response = response
        self.messages: list[PromptMessage] = []

    @property
    def request_id(self) -> str:
        return str(self.response["id"])

    def stored(self, response: dict[str, Any], text: str) -> StoredResponse:
        reply = [PromptMessage("assistant", text)] if text else []
        return StoredResponse(response, [*self.messages, *reply])


class ResponseRoutes:
    def __init__(self, context: RouteContext, store: ResponseStore, app: QuartTrio) -> None:
        self._context = context
        self._store = store
        self._app = app

    async def create(self) -> Response:
        payload = await json_body()
        body = validate(ResponsesBody, payload)
        if body.background and (body.store is False or not self._store.limit):
            raise VllmError(400, NOT_STORED, kind=CALLER, param="background")
        if body.background and body.stream:
            text = "a background response cannot be streamed: get it by its id"
            raise VllmError(400, text, kind=CALLER, param="stream")
        if body.tool_choice not in TEXT_TOOL_CHOICES:
            raise VllmError(400, f"tool_choice must be auto or none: {NO_TOOLS}", kind=CALLER)
        model = body.model or self._context.model_name
        response_id = caller_request_id(self._context, body.request_id) or new_id("resp")
        turn = _Turn(body, response_object(payload, response_id, model))
        request = await self._to_request(turn)
        request = with_transfers(self._context, payload, [request], response_id)[0]
        if body.background:
            return self._in_background(turn, request)
        return await (self._streamed if body.stream else self._whole)(turn, request)

    async def _whole(self, turn: _Turn, request: GenerateRequest) -> Response:
        timing = self._context.meters.timed(self._context.model_name)
        with timing:
            result = await self._context.client.completion(request, turn.request_id)
        return json_response(self._ended(turn, result) | transfer_fields([result]))

    async def _streamed(self, turn: _Turn, request: GenerateRequest) -> Response:
        def finished(final: dict[str, Any], text: str) -> None:
            self._keep(turn, final, text)

        context = self._context
        events = ResponseEvents(turn.response, finished)
        generation = context.client.generate(request, turn.request_id)
        stream = DeferredStream(generation, events, context.meters.timed(context.model_name))
        try:
            await stream.begin()
        except BaseException:
            await stream.aclose()
            raise
        return deferred_response(stream, EVENT_STREAM_HEADERS)

    def _in_background(self, turn: _Turn, request: GenerateRequest) -> Response:
        scope = trio.CancelScope()
        turn.response |= {"status": "queued"}
        stored = StoredResponse(turn.response, turn.messages, scope.cancel)
        self._store.put(stored)
        self._app.add_background_task(self._generate, turn, request, stored, scope)
        return json_response(turn.response)

    async def _generate(
        self, turn: _Turn, request: GenerateRequest, stored: StoredResponse, scope: trio.CancelScope
    ) -> None:
        """Run a background response and store its outcome, unless it was deleted."""
        with scope:
            stored.body = turn.response = turn.response | {"status": "in_progress"}
            try:
                result = await self._context.client.completion(request, turn.request_id)
            except CLIENT_ERRORS as error:
                failure = {"code": "server_error", "message": str(error)}
                stored.body = turn.response | {"status": "failed", "error": failure}
            else:
                if self._store.get(turn.request_id) is stored:
                    self._ended(turn, result)

    def _ended(self, turn: _Turn, result: CompletionResult) -> dict[str, Any]:
        final = with_output(turn.response, result.text, result, new_id("msg"))
        self._keep(turn, final, result.text)
        return final

    def _keep(self, turn: _Turn, final: dict[str, Any], text: str) -> None:
        if turn.body.store is not False:
            self._store.put(turn.stored(final, text))

    # Stored responses

    async def retrieve(self, response_id: str) -> Response:
        return json_response(self._stored(response_id).body)

    async def delete(self, response_id: str) -> Response:
        self._stored(response_id)
        self._store.delete(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, response_id: str) -> Response:
        stored = self._stored(response_id)
        if not stored.running:
            text = "Cannot cancel a synchronous response."
            raise VllmError(400, text, kind=CALLER, param="response_id")
        stored.body = stored.body | {"status": "cancelled"}
        stored.cancel()
        return json_response(stored.body)

    def _stored(self, response_id: str) -> StoredResponse:
        stored = self._store.get(response_id)
        if stored is None:
            text = f"Response with id '{response_id}' not found."
            raise VllmError(404, text, kind=CALLER, param="response_id")
        return stored

    # Requests

    async def _to_request(self, turn: _Turn) -> GenerateRequest:
        """Raises VllmError and DetailError."""
        body = turn.body
        earlier: list[PromptMessage] = []
        if body.previous_response_id is not None:
            earlier = self._stored(body.previous_response_id).messages
        reader = MediaReader(self._context)
        turn.messages = [*earlier, *await reader.messages(_turns_of(body.input), {})]
        system = [PromptMessage("system", body.instructions)] if body.instructions else []
        schema = await response_schema(self._context, _text_format(body.text))
        sampling = sampling_params(body, body.max_output_tokens, schema=schema)
        return GenerateRequest(
            prompt=[*system, *turn.messages], model=body.model, sampling=sampling,
            stream=bool(body.stream), task="chat", media=reader.media,
        )  # fmt: skip


def _text_format(text: dict[str, Any] | None) -> dict[str, Any] | None:
    """`text.format` in the format of `response_format`."""
    wanted = (text or {}).get("format")
    if not isinstance(wanted, dict) or wanted.get("type") in (None, "text"):
        return None
    if wanted["type"] != "json_schema":
        return {"type": wanted["type"]}
    json_schema = {key: wanted[key] for key in ("schema", "strict") if key in wanted}
    return {"type": "json_schema", "json_schema": json_schema}


def _turns_of(items: str | list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """Input items as roles and contents; raises VllmError 400 for an unknown kind."""
    if isinstance(items, str):
        return [("user", items)]
    turns: list[tuple[str, Any]] = []
    for index, item in enumerate(items):
        match item.get("type", "message"):
            case "message":
                turns.append((_role(item, index), _content(item.get("content"))))
            case "function_call":
                turns.append(("assistant", f"{item.get('name')}({item.get('arguments')})"))
            case "function_call_output":
                turns.append(("user", _content(item.get("output"))))
            case "reasoning":
                pass  # the reasoning of an earlier turn is not passed to the model again
            case kind:
                text = f"input[{index}].type {kind!r} is not supported"
                raise VllmError(400, text, kind=CALLER, param="input")
    return turns


def _role(item: dict[str, Any], index: int) -> str:
    role = item.get("role")
    if not isinstance(role, str):
        text = f"input[{index}].role must be a string"
        raise VllmError(400, text, kind=CALLER, param="input")
    return "system" if role == "developer" else role


def _content(content: Any) -> Any:
    """Content parts in the chat format, in which output text is plain text."""
    if not isinstance(content, list):
        return content
    return [
        part | {"type": "text"}
        if isinstance(part, dict) and part.get("type") in ("output_text", "refusal")
        else part
        for part in content
    ]


def mount(app: QuartTrio, context: RouteContext) -> None:
    close_streams_after_requests(app)
    routes = ResponseRoutes(context, ResponseStore(context.stored_responses), app)
    one = "/v1/responses/<response_id>"
    for path, name, view, method in (
        ("/v1/responses", "v1_responses", routes.create, "POST"),
        (one, "v1_response", routes.retrieve, "GET"),
        (one, "v1_response_delete", routes.delete, "DELETE"),
        (f"{one}/cancel", "v1_response_cancel", routes.cancel, "POST"),
    ):
        app.add_url_rule(path, name, vllm_view(view), methods=[method])
