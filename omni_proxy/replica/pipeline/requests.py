"""What a caller asks of the pipeline and what it gets back, free of any HTTP.

Invariant: None (or an empty tuple) is unset; only what is set reaches a stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

QUEUE_FULL = "The request queue is full."


class QueueFullError(Exception):
    """Admission was refused: `max_in_flight` requests are live (HTTP: 503)."""

    def __init__(self, message: str = QUEUE_FULL) -> None:
        super().__init__(message)


class RequestFailed(Exception):
    """A request ended without a whole result; `status` is the HTTP status it deserves."""

    def __init__(self, message: str, status: int = 500) -> None:
        super().__init__(message)
        self.message = message
        self.status = status


class RequestAborted(RequestFailed):
    """A request was aborted under its reader (by another caller or by an admin action)."""

    def __init__(self, message: str = "aborted", status: int = 500) -> None:
        super().__init__(message, status)


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message; `content` is text or a list of OpenAI content parts."""

    role: str
    content: str | list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen; None leaves it to the stage.

    `top_logprobs` also has every token that is told of spelled; `logit_bias` has token ids as text
    for its keys, as JSON has; `json_schema` is the text of a schema that the answer must fit.
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

    prompt: str | Sequence[int] | Sequence[Message] | dict[str, Any]
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
    """A piece of an answer. `text` is new text only; `audio` is float32 LE mono.

    The last chunk alone has `terminal`, with `finish_reason` and, where known, `usage`.
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
    """A whole answer: every text piece joined, every audio piece joined (float32 LE mono)."""

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
