"""The token ids of a request that brings its prompt as tokens, as RL rollouts do.

Invariant: a list that is returned is the whole prompt, or its first `MAX_TOKENS`, and the engine
caches it as plain tokens of the base model: a request with a text, with media, with several
prompts, with an adapter or with a cache salt has none. Takes time in proportion to the list.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Final

import msgspec

from omni_proxy.routing.inspect.body_fields import (
    BodyFields,
    NonStandardBodyFields,
    is_given,
    starts_with,
)
from omni_proxy.routing.inspect.keyed_text import KeyedBodyFields
from omni_proxy.routing.inspect.requirements import AUDIO, IMAGE, VIDEO, Requirements

MAX_TOKENS: Final = 65_536  # tokens behind them hardly change where a prompt is cached
_MEDIA: Final = IMAGE | AUDIO | VIDEO
_decode_ids: Callable[[msgspec.Raw], list[int]] = msgspec.json.Decoder(list[int]).decode
_decode_prompts: Callable[[msgspec.Raw], list[list[int]]] = msgspec.json.Decoder(
    list[list[int]]
).decode
_sources = attrgetter("input_ids", "token_ids", "prompt")
_elsewhere = attrgetter("messages", "text", "system", "lora_path", "cache_salt", "extra_key")


def prompt_tokens(requirements: Requirements) -> list[int] | None:
    """None where the request is not a single prompt of plain tokens."""
    raw = spelled_tokens(requirements)
    return None if raw is None else read_tokens(raw)


def spelled_tokens(requirements: Requirements) -> msgspec.Raw | None:
    """The value of the body that may be such a prompt, undecoded."""
    fields = requirements.body_fields
    if fields is None or type(fields) is NonStandardBodyFields:
        return None
    raw = _only_list(fields)
    if raw is None or requirements.large_body_class or requirements.mask & _MEDIA:
        return None
    return None if any(map(is_given, _elsewhere(fields))) else raw


def read_tokens(raw: msgspec.Raw) -> list[int] | None:
    """None for anything but integers, or one list of them."""
    try:
        tokens = _decode_ids(raw)
    except (msgspec.DecodeError, RecursionError):
        tokens = _one_prompt(raw)
    return tokens[:MAX_TOKENS] if len(tokens) > MAX_TOKENS else tokens or None


def _only_list(fields: BodyFields) -> msgspec.Raw | None:
    """The one value that may be a list of ids."""
    if isinstance(fields, KeyedBodyFields):
        given = [raw for _, raw in fields.keyed]
    else:
        given = [raw for raw in _sources(fields) if is_given(raw)]
    return given[0] if len(given) == 1 and starts_with(given[0], b"[") else None


def _one_prompt(raw: msgspec.Raw) -> list[int]:
    """The ids of a batch of one; else none."""
    try:
        prompts = _decode_prompts(raw)
    except (msgspec.DecodeError, RecursionError):
        return []
    return prompts[0] if len(prompts) == 1 else []
