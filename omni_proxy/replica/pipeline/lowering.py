"""From what a caller asks to what the stages are told: only what is set reaches them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omni_proxy.replica.pipeline.messages import OmniRequest
from omni_proxy.replica.pipeline.requests import GenerateRequest, Message, SamplingParams

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


def lowered(request: GenerateRequest) -> OmniRequest:
    """`inputs` is the prompt, or `{"messages"|"prompt": ..., "audios": [...], ...}` with media."""
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
    # A list of messages is never bare: an empty one would look like an empty list of tokens.
    return {key: inputs, **media} if media or key == "messages" else inputs


def _are_messages(prompt: Any) -> bool:
    if not isinstance(prompt, Sequence) or isinstance(prompt, str):
        return False
    return bool(prompt) and isinstance(prompt[0], Message | dict)


def _message(message: Message | dict[str, Any]) -> dict[str, Any]:
    if isinstance(message, Message):
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
    found = {key: value for key, value in fields.items() if value is not None}
    found["stop"] = list(sampling.stop)
    found["stop_token_ids"] = list(sampling.stop_token_ids)
    for flag in ("logprobs", "ignore_eos"):
        if getattr(sampling, flag):
            found[flag] = True
    return found


def _metadata(request: GenerateRequest) -> dict[str, Any]:
    metadata = dict(request.metadata)
    if request.model is not None:
        metadata["model"] = request.model
    return metadata | {
        "output_modalities": list(request.output_modalities),
        "task": request.task,
    }
