"""A prompt as OpenAI and SGLang take it: text, token ids, or a list of either.

Invariant: what comes out is never empty, and a token id is a whole number from 0 on.
"""

from __future__ import annotations

from typing import Any, TypeAlias, TypeGuard

from omni_proxy.replica.api.errors import Refused

MOST = 2048  # OpenAI's bound for inputs, and one of what a single body may make us compute
MOST_IDS = 1 << 20  # of one prompt; no model here reads as many, and each is looked at
Prompt: TypeAlias = str | list[int]


def prompts_of(value: Any, name: str) -> tuple[list[Prompt], bool]:
    """The prompts, and whether `value` was a list of them. Raises Refused 400."""
    if isinstance(value, list) and len(value) > MOST_IDS:
        raise Refused(400, f"{name} has {len(value)} elements; at most {MOST_IDS} are taken")
    if isinstance(value, str) or is_ids(value):
        return [value], False
    if isinstance(value, list) and value:
        if len(value) > MOST:
            raise Refused(400, f"{name} has {len(value)} elements; at most {MOST} are taken")
        if all(isinstance(each, str) for each in value) or all(map(is_ids, value)):
            return value, True
    told = "must be a string, a list of token ids, or a list that is not empty of either"
    raise Refused(400, f"{name} {told}")


def is_ids(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and bool(value) and all(map(_is_id, value))


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
