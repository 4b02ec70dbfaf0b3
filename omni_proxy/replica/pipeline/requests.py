"""Requests and results of the pipeline client, without HTTP, and their conversion for the stages.

Invariant: None (or an empty tuple) is unset; only fields that are set reach a stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omni_proxy.replica.pipeline.stage_messages import OmniRequest

QUEUE_FULL = "The request queue is full."


class QueueFullError(Exception):
    """Admission was refused: `max_in_flight` requests are live (HTTP: 503)."""

    def __init__(self, message: str = QUEUE_FULL) -> None:
        super().__init__(message)


class RequestFailed(Exception):
    """A request ended without a complete result; `status` is the matching HTTP status."""

    def __init__(self, message: str, status: int = 500) -> None:
        super().__init__(message)
        self.message = message
        self.status = status


class RequestAborted(RequestFailed):
    """A request was aborted while it was read (by another caller or an admin operation)."""

    def __init__(self, message: str = "aborted", status: int = 500) -> None:
        super().__init__(message, status)


@dataclass(frozen=True, slots=True)
class PromptMessage:
    """One chat message; `content` is text or a list of OpenAI content parts."""

    role: str
    content: str | list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters; None leaves the choice to the stage.

    `top_logprobs` also requests the text of the tokens; the keys of `logit_bias` are token ids as
    strings, as in JSON; `json_schema` is the text of a schema that the response must match.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: bool = False
    ignore_eos: bool = False
    top_logprobs: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[str, float] | None = None
    json_schema: str | None = None


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request. `media` holds lists under "images", "audios" (bytes) and "videos"."""

    prompt: str | Sequence[int] | Sequence[PromptMessage] | dict[str, Any]
    model: str | None = None
    sampling: SamplingParams = SamplingParams()
    stream: bool = False
    output_modalities: Sequence[str] = ("text",)
    task: str = "chat"
    metadata: Mapping[str, Any] = field(default_factory=dict)
    stage_sampling: Mapping[str, Any] = field(default_factory=dict)
    stage_params: Mapping[str, Any] = field(default_factory=dict)
    extra_params: Mapping[str, Any] = field(default_factory=dict)
    media: Mapping[str, Sequence[Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateChunk:
    """A chunk of a response. `text` is new text only; `audio` is float32 LE mono.

    Only the last chunk has `terminal`, with `finish_reason` and, if known, `usage`.
    """

    request_id: str
    text: str = ""
    token_ids: Sequence[int] = ()
    audio: bytes | None = None
    sample_rate: int = 0
    modality: str = "text"
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    logprobs: list[Any] | None = None
    weight_version: str | None = None
    stage: str = ""
    terminal: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionResult:
    """A complete response: all text and all audio joined (float32 LE mono)."""

    request_id: str
    text: str = ""
    audio: bytes | None = None
    sample_rate: int = 0
    finish_reason: str = "stop"
    usage: dict[str, Any] | None = None
    logprobs: list[Any] | None = None
    weight_version: str | None = None
    token_ids: Sequence[int] = ()
    extra: dict[str, Any] = field(default_factory=dict)


# Conversion of the caller's request to the message for the stages.

_OPTIONAL = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "seed",
    "max_new_tokens",
    "top_logprobs",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "json_schema",
)


def to_omni_request(request: GenerateRequest) -> OmniRequest:
    """Convert for the stages; only fields that are set are passed on."""
    return OmniRequest(_inputs(request), _params(request), _metadata(request))


def _inputs(request: GenerateRequest) -> Any:
    prompt: Any = request.prompt
    inputs: Any = prompt
    key = "prompt"
    if _are_messages(prompt):
        inputs = [_message(message) for message in prompt]
        key = "messages"
    elif not isinstance(prompt, str | dict):
        inputs = list(prompt)
    media = {kind: list(items) for kind, items in request.media.items() if items}
    if isinstance(inputs, dict):
        return {**inputs, **media}
    # A list of messages is always in a dict: an empty one would look like an empty token list.
    return {key: inputs, **media} if media or key == "messages" else inputs


def _are_messages(prompt: Any) -> bool:
    if not isinstance(prompt, Sequence) or isinstance(prompt, str):
        return False
    return bool(prompt) and isinstance(prompt[0], PromptMessage | dict)


def _message(message: PromptMessage | dict[str, Any]) -> dict[str, Any]:
    if isinstance(message, PromptMessage):
        return {"role": message.role, "content": message.content}
    return message


def _params(request: GenerateRequest) -> dict[str, Any]:
    params: dict[str, Any] = dict(_set_fields(request.sampling))
    params["stream"] = request.stream
    for key in ("stage_sampling", "stage_params"):
        if value := getattr(request, key):
            params[key] = dict(value)
    return params | dict(request.extra_params)


def _set_fields(sampling: SamplingParams) -> dict[str, Any]:
    fields = {key: getattr(sampling, key) for key in _OPTIONAL}
    params = {key: value for key, value in fields.items() if value is not None}
    params["stop"] = list(sampling.stop)
    params["stop_token_ids"] = list(sampling.stop_token_ids)
    for flag in ("logprobs", "ignore_eos"):
        if getattr(sampling, flag):
            params[flag] = True
    return params


def _metadata(request: GenerateRequest) -> dict[str, Any]:
    metadata = dict(request.metadata)
    if request.model is not None:
        metadata["model"] = request.model
    return metadata | {
        "output_modalities": list(request.output_modalities),
        "task": request.task,
    }
