"""Token counts of requests: estimated before they are sent, then read from their responses.

A response that reports none is estimated. Many responses are parsed in one call, because a call of
msgspec costs more than the few numbers that it returns. Invariants: the counts of a response do not
depend on the others in the call; bodies of requests are not decoded, and an estimate never raises.
Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, itemgetter
from typing import Final

import msgspec

from omni_proxy.api_keys.caller import Ended
from omni_proxy.dataplane.exchange.exchange import Exchange
from omni_proxy.routing.inspect.response_usage import (
    OPENED_USAGE,
    USAGE,
    counts_in,
    decode_common_usages,
)

BYTES_PER_TOKEN: Final = 4  # mean of English text with the JSON around it
# Never part of a JSON string, in which quotes are escaped.
_BEGINNING: Final = b'"max_'  # searched from the end first, which is much faster than the pattern
_MAX_TOKENS: Final = re.compile(
    rb'"max_(?:completion_|new_|output_)?tokens"[ \t\r\n]*:[ \t\r\n]*([0-9]{1,9})'
)


def estimate_prompt(size: int) -> int:
    """Tokens of a request body with `size` bytes."""
    return -(-size // BYTES_PER_TOKEN)


def max_tokens_in(body: bytes) -> int:
    """The limit of completion tokens in a JSON body, 0 if it has none."""
    offset = body.rfind(_BEGINNING)
    if offset < 0:
        return 0
    match = _MAX_TOKENS.match(body, offset) or _MAX_TOKENS.search(body, 0, offset)
    return int(match[1]) if match is not None else 0


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
        usages = list(map(_usage, decode_common_usages(_OPENED + _BETWEEN.join(ends) + b"]")))
    except (msgspec.DecodeError, ValueError, RecursionError):
        usages = []
    if len(usages) == len(ended):
        return sum(map(_prompts, usages)), sum(map(_completions, usages))
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
