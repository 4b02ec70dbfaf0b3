"""Parses and validates a submitted request before anything is computed for it.

Invariant: a parsed prompt has only tokens of the vocabulary, room for a response in the context
length, and valid sampling parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from omni_proxy.replica.kv_transfer.request_fields import TransferSpec, from_params
from omni_proxy.replica.pipeline.stage_messages import FailureKind, StagePayload
from omni_proxy.replica.text.sampling import Sampling, SamplingError, parse_sampling


class PromptError(Exception):
    """The request cannot be computed; `kind` is whose fault it is, the caller's or the server's."""

    def __init__(self, message: str, kind: FailureKind = "caller") -> None:
        super().__init__(message)
        self.kind: FailureKind = kind


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """Limits of a prompt: `max_tokens` for prompt and response, ids below `vocabulary`."""

    stage: str
    max_tokens: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """A parsed request that arrived at `arrived_s` of the scheduler's clock.

    `max_new_tokens` is the requested number or the remaining room, whichever is less. `transfer`
    names the replica that its KV is fetched from or sent to, if any.
    """

    request_id: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    max_new_tokens: int
    streamed: bool
    embedded: bool
    arrived_s: float
    transfer: TransferSpec | None = None


def parse_prompt(payload: StagePayload, limits: PromptLimits, now_s: float) -> Prompt:
    """Raises PromptError."""
    request = payload.request
    is_embedding = request.metadata.get("task") == "embed"
    # An embedding needs no room for a response.
    tokens = _tokens_of(
        payload.data, limits, limits.max_tokens if is_embedding else limits.max_tokens - 1
    )
    room = limits.max_tokens - len(tokens)
    try:
        sampling = parse_sampling(request.params, limits.stage)
    except SamplingError as error:
        raise PromptError(str(error)) from error
    for token in sampling.logit_bias:
        if token >= limits.vocabulary:
            raise PromptError(
                f"logit_bias: token {token} is out of vocabulary: the model's tokens are 0 to "
                f"{limits.vocabulary - 1}"
            )
    return Prompt(
        request_id=payload.request_id,
        token_ids=tokens,
        sampling=sampling,
        max_new_tokens=min(room, sampling.max_new_tokens or room),
        streamed=bool(request.params.get("stream")),
        embedded=is_embedding,
        arrived_s=now_s,
        transfer=_transfer(request.params.get("kv_transfer")),
    )


def _transfer(params: Any) -> TransferSpec | None:
    try:
        return None if params is None else from_params(params)
    except msgspec.ValidationError as error:
        raise PromptError(f"kv_transfer: {error}") from None


def _tokens_of(data: Any, limits: PromptLimits, max_tokens: int) -> tuple[int, ...]:
    tokens = data.get("token_ids") if isinstance(data, Mapping) else None
    if not isinstance(tokens, list | tuple):
        raise PromptError(
            f"stage {limits.stage} received no token_ids: put a tokenizing stage before it",
            "server",
        )
    if not tokens:
        raise PromptError("The prompt is empty: it needs at least one token")
    if len(tokens) > max_tokens:
        raise PromptError(
            f"The prompt has {len(tokens)} tokens, and the model's context length is "
            f"{limits.max_tokens} tokens for prompt and response together: shorten the prompt"
        )
    for token in tokens:
        if type(token) is not int or not 0 <= token < limits.vocabulary:
            raise PromptError(
                f"Token {token!r} is out of vocabulary: the model's tokens are 0 to "
                f"{limits.vocabulary - 1}"
            )
    return tuple(tokens)
