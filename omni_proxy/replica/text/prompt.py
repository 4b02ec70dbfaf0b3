"""A submitted payload, read and checked before anything is computed for it.

Invariant: what passes here fits the model: known tokens, room for an answer, sane sampling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omni_proxy.replica.pipeline.messages import FailureKind, StagePayload
from omni_proxy.replica.text.sampling import Sampling, SamplingError, parse_sampling


class PromptError(Exception):
    """The request cannot be computed; `kind` says whose fault that is."""

    def __init__(self, message: str, kind: FailureKind = "caller") -> None:
        super().__init__(message)
        self.kind: FailureKind = kind


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """What a prompt must fit in: `max_tokens` for prompt and answer, of ids below `vocabulary`."""

    stage: str
    max_tokens: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request as it arrived (at `arrived_s` of the scheduler's clock).

    `max_new_tokens` is what was asked for or what there is room for, whichever is less.
    """

    request_id: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    max_new_tokens: int
    streamed: bool
    embedded: bool
    arrived_s: float


def parse_prompt(payload: StagePayload, fit: PromptLimits, now_s: float) -> Prompt:
    """Raises PromptError."""
    request = payload.request
    embedded = request.metadata.get("task") == "embed"
    # An embedding needs no room for an answer.
    tokens = _tokens_of(payload.data, fit, fit.max_tokens if embedded else fit.max_tokens - 1)
    room = fit.max_tokens - len(tokens)
    try:
        sampling = parse_sampling(request.params, fit.stage)
    except SamplingError as error:
        raise PromptError(str(error)) from error
    for token in sampling.logit_bias:
        if token >= fit.vocabulary:
            raise PromptError(
                f"logit_bias: token {token} is out of vocabulary: the model's tokens are 0 to "
                f"{fit.vocabulary - 1}"
            )
    return Prompt(
        request_id=payload.request_id,
        token_ids=tokens,
        sampling=sampling,
        max_new_tokens=min(room, sampling.max_new_tokens or room),
        streamed=bool(request.params.get("stream")),
        embedded=embedded,
        arrived_s=now_s,
    )


def _tokens_of(data: Any, fit: PromptLimits, most: int) -> tuple[int, ...]:
    tokens = data.get("token_ids") if isinstance(data, Mapping) else None
    if not isinstance(tokens, list | tuple):
        raise PromptError(
            f"stage {fit.stage} got no token_ids: a stage that makes them has to stand before it",
            "server",
        )
    if not tokens:
        raise PromptError("The prompt is empty: it needs at least one token")
    if len(tokens) > most:
        raise PromptError(
            f"The prompt has {len(tokens)} tokens, and the model's context length is "
            f"{fit.max_tokens} tokens for prompt and answer together: shorten the prompt"
        )
    for token in tokens:
        if type(token) is not int or not 0 <= token < fit.vocabulary:
            raise PromptError(
                f"Token {token!r} is out of vocabulary: the model's tokens are 0 to "
                f"{fit.vocabulary - 1}"
            )
    return tuple(tokens)
