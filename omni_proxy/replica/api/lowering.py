"""From the fields of a body to what a client is asked for: the part that all text routes share.

Invariant: what a caller left out (or sent as null) stays unset, so that the stage's own defaults
hold; nothing is filled in here.
"""

from __future__ import annotations

import uuid
from typing import Annotated, Any

from msgspec import Meta, Struct

from omni_proxy.replica.api.errors import Refused
from omni_proxy.replica.api.served import Served
from omni_proxy.replica.pipeline.requests import SamplingParams
from omni_proxy.replica.text.sampling import SamplingError, biases_of

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
    n: Whole | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None
    stage_sampling: dict[str, dict[str, Any]] | None = None
    stage_params: dict[str, dict[str, Any]] | None = None
    request_id: str | None = None


def stops_of(stop: str | list[str] | None) -> tuple[str, ...]:
    """Stop strings in request order; empty ones, which would end every text at once, are none."""
    given = [stop] if isinstance(stop, str) else stop or []
    return tuple(each for each in given if each)


def sampling_of(
    body: Common, max_new_tokens: int | None, *, top: int | None, schema: str | None
) -> SamplingParams:
    """`top` is how many likeliest tokens to tell of; None tells no log probabilities at all."""
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
        logprobs=top is not None,
        ignore_eos=bool(body.ignore_eos),
        top_logprobs=top,
        presence_penalty=body.presence_penalty or None,
        frequency_penalty=body.frequency_penalty or None,
        logit_bias=body.logit_bias or None,
        json_schema=schema,
    )


def check_biases(body: Common, served: Served) -> None:
    """Raises Refused 400 for a bias that no stage would take: before a stream's head is sent."""
    try:
        biases = biases_of("logit_bias", body.logit_bias or {})
    except SamplingError as error:
        raise Refused(400, str(error)) from None
    told = (info.get("vocabulary") for info in served.client.stage_info().values())
    vocabulary = max((size for size in told if size), default=None)
    for token in biases:
        if vocabulary is not None and token >= vocabulary:
            raise Refused(
                400,
                f"logit_bias: token {token} is out of vocabulary: the model's tokens are 0 to "
                f"{vocabulary - 1}",
            )


def new_id(given: str | None = None) -> str:
    return given or str(uuid.uuid4())
