"""From the fields of a body to what a client is asked for: the part that all text routes share.

Invariant: what a caller left out (or sent as null) stays unset, so that the stage's own defaults
hold; nothing is filled in here.
"""

from __future__ import annotations

import uuid
from typing import Annotated, Any

from msgspec import Meta, Struct

from omni_proxy.replica.pipeline.requests import SamplingParams

# What fits into a message between stages.
Whole = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Meta(ge=1, le=2**63 - 1)]


class Common(Struct, kw_only=True):
    """Fields that chat and completion bodies have alike."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: Whole | None = None
    max_tokens: Count | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Whole] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stage_sampling: dict[str, dict[str, Any]] | None = None
    stage_params: dict[str, dict[str, Any]] | None = None
    request_id: str | None = None


def stops_of(stop: str | list[str] | None) -> tuple[str, ...]:
    """Stop strings in request order; empty ones, which would end every text at once, are none."""
    given = [stop] if isinstance(stop, str) else stop or []
    return tuple(each for each in given if each)


def sampling_of(body: Common, max_new_tokens: int | None, *, logprobs: bool) -> SamplingParams:
    return SamplingParams(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        seed=body.seed,
        max_new_tokens=max_new_tokens,
        stop=stops_of(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logprobs=logprobs,
        ignore_eos=bool(body.ignore_eos),
    )


def new_id(given: str | None = None) -> str:
    return given or str(uuid.uuid4())
