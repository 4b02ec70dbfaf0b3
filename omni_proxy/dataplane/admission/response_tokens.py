"""Token counts of requests, as their responses report them, or else estimated.

Many responses are parsed in one call, because a call of msgspec costs more than the few numbers
that it returns. Invariant: the counts of a response do not depend on the others in the call. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, itemgetter
from typing import Final

import msgspec

from omni_proxy.api_keys.caller import Ended
from omni_proxy.api_keys.token_usage import BYTES_PER_TOKEN, estimate_prompt
from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.routing.inspect.response_usage import (
    OPENED_USAGE,
    USAGE,
    counts_in,
    decode_usual_ends,
)

_body: Final = itemgetter(0)
_behind: Final = itemgetter(2)
_OPENED: Final = b"[" + OPENED_USAGE
_BETWEEN: Final = b"," + OPENED_USAGE
_usage: Final = attrgetter("usage")
_prompts: Final = attrgetter("prompt_tokens")
_completions: Final = attrgetter("completion_tokens")


def count_tokens(ended: Sequence[Ended]) -> tuple[int, int]:
    """The sums of prompt tokens and of completion tokens of all `ended` requests."""
    if not ended:
        return 0, 0
    bodies = map(_body, ended)
    # The text after the last `"usage"` of a body is a JSON object again once OPENED_USAGE precedes.
    ends = map(_behind, map(bytes.rpartition, bodies, repeat(USAGE)))
    try:
        found = list(map(_usage, decode_usual_ends(_OPENED + _BETWEEN.join(ends) + b"]")))
    except (msgspec.DecodeError, ValueError, RecursionError):
        found = []
    if len(found) == len(ended):
        return sum(map(_prompts, found)), sum(map(_completions, found))
    prompts = completions = 0
    for body, size, status in ended:
        prompt, completion = counts_in(body)
        if prompt is None and completion is None and 0 < status < 400:
            prompt, completion = estimate_prompt(size), len(body) // BYTES_PER_TOKEN
        prompts += prompt or 0
        completions += completion or 0
    return prompts, completions


def tokens_of(exchange: Exchange) -> tuple[int, int]:
    """Prompt and completion tokens of an exchange that has ended. If the response does not report
    them, they are estimated from the request's size, and from the chunks of a stream or the bytes
    of another response."""
    prompt, completion = counts_in(exchange.last_chunk)
    if prompt is not None or completion is not None:
        return prompt or 0, completion or 0
    if not exchange.relayed or not 0 < exchange.status < 400:
        return 0, 0  # no worker generated tokens
    guessed = exchange.chunks if exchange.stream else exchange.bytes_out // BYTES_PER_TOKEN
    return estimate_prompt(exchange.bytes_in), guessed
