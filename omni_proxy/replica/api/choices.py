"""Several answers to one prompt (`n`), and the usage of all of them. Pure.

Invariant: the first of several is the one that a request without `n` gets; the others differ from
it by their seed alone. A prompt counts once, however many answers it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from omni_proxy.replica.api.errors import Refused
from omni_proxy.replica.pipeline.requests import GenerateRequest

MOST = 128  # OpenAI's bound
USAGE_KEYS = ("prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details")
SEEDS = 2**64


def count_of(n: int | None) -> int:
    """How many answers a prompt shall have. Raises Refused 400."""
    count = 1 if n is None else n
    if not 1 <= count <= MOST:
        raise Refused(400, f"n must be within 1 and {MOST}, not {count}")
    return count


def repeated(request: GenerateRequest, count: int) -> list[GenerateRequest]:
    """The same request `count` times, each with a seed of its own where it has one."""
    seed = request.sampling.seed
    if seed is None or count == 1:
        return [request] * count
    return [
        replace(request, sampling=replace(request.sampling, seed=_wrapped(seed + index)))
        for index in range(count)
    ]


def _wrapped(seed: int) -> int:
    """A seed of 64 bits with its sign."""
    return (seed + SEEDS // 2) % SEEDS - SEEDS // 2


def usage_of(usage: dict[str, Any] | None) -> dict[str, Any] | None:
    """The OpenAI keys of a pipeline's usage; None is not known."""
    if usage is None:
        return None
    told = {key: usage[key] for key in USAGE_KEYS if usage.get(key) is not None}
    if "total_tokens" not in told and {"prompt_tokens", "completion_tokens"} <= told.keys():
        told["total_tokens"] = told["prompt_tokens"] + told["completion_tokens"]
    return told


def usage_of_all(usages: Sequence[dict[str, Any] | None], n: int = 1) -> dict[str, Any] | None:
    """The sum over several prompts of `n` answers each, in order; None where one is not known."""
    if any(usage is None for usage in usages):
        return None
    known = [usage_of(usage) or {} for usage in usages]
    prompt = _sum(known[::n], "prompt_tokens")
    written = _sum(known, "completion_tokens")
    total: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
    }
    details = [each["prompt_tokens_details"] for each in known[::n] if each.get(USAGE_KEYS[-1])]
    if not details:
        return total
    return total | {"prompt_tokens_details": {"cached_tokens": _sum(details, "cached_tokens")}}


def _sum(counts: Iterable[dict[str, Any]], name: str) -> int:
    return sum(each.get(name) or 0 for each in counts)
