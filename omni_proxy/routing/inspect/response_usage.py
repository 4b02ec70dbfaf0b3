"""Token counts at the end of a response: `usage`, and the cached tokens of the prompt. Counts that
a response does not report are estimated from sizes.

Cached tokens are `cached_tokens` of `usage` (OpenAI's APIs) or of `meta_info` (SGLang), and
`cache_read_input_tokens` (Anthropic), which is not included in `input_tokens`. Invariant: time is
linear in the bytes; a count that is null, absent, no integer or too large counts as missing. Cached
tokens are found without decoding: quotes inside JSON strings are escaped, so a model's text can't
contain a key. `usage` is decoded without the text before it: the end of a body, from a member of
its outermost object on, is a JSON object again if a brace is put before it. Many responses are
decoded in one call, because a call costs more than the few numbers; none changes another's counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, itemgetter
from typing import Annotated, Final

import msgspec

from omni_proxy.api_keys.caller_limits import Ended

TAIL_BYTES: Final = 8192  # searched at the end of the body: the counts come after the text
BYTES_PER_TOKEN: Final = 4  # mean of English text with the JSON around it
SHORT: Final = 512  # a body of up to this many bytes is decoded whole, which is faster
_COUNT: Final = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*([0-9]{1,10})(?![0-9.eE])")
# The counts as vLLM and OpenAI write them, not followed by another count.
_COMMON_FORM: Final = re.compile(
    rb'"prompt_tokens":[ ]?([0-9]{1,10}),[^{}]*"prompt_tokens_details":[ ]?'
    rb'\{[^{}]*"cached_tokens":[ ]?([0-9]{1,10})[,}][^c]*\Z'
)
_CACHED: Final = b'"cached_tokens"'
_READ: Final = b'"cache_read_input_tokens"'
_CREATED: Final = b'"cache_creation_input_tokens"'
_PROMPT: Final = b'"prompt_tokens"'
_INPUT: Final = b'"input_tokens"'
# Names that engines use; the first one present is used.
NAMES: Final = {
    "input": ("prompt_tokens", "input_tokens"),
    "output": ("completion_tokens", "output_tokens"),
}
# Ten digits. A sum of 900 million such counts fits the 64 bits of counters, so that no response can
# make them overflow.
_MAX_COUNT: Final = 10**10 - 1
USAGE: Final = b'"usage"'
OPENED_USAGE: Final = b"{" + USAGE
_decoder = json.JSONDecoder()

Count = Annotated[int, msgspec.Meta(ge=0, le=_MAX_COUNT)]


class _Counts(msgspec.Struct, gc=False):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    input_tokens: Count | None = None
    output_tokens: Count | None = None


class _End(msgspec.Struct, gc=False):
    usage: _Counts | None


_decode_end = msgspec.json.Decoder(_End).decode


class _CommonCounts(msgspec.Struct, gc=False):
    prompt_tokens: Count
    completion_tokens: Count


class _CommonEnd(msgspec.Struct, gc=False):
    usage: _CommonCounts


# Decodes OPENED_USAGE plus the bytes after the last USAGE of a body, faster than `counts_in`.
# Raises msgspec.DecodeError, ValueError or RecursionError if the usage is not in the usual form.
decode_common_usage: Final = msgspec.json.Decoder(_CommonEnd).decode
# Decodes a list of such objects.
decode_common_usages: Final = msgspec.json.Decoder(list[_CommonEnd]).decode


def counts_in(body: bytes) -> tuple[int | None, int | None]:
    """Prompt tokens and completion tokens in a response that ends with `body`."""
    end = body
    if len(body) > SHORT or not body.startswith(b"{"):
        offset = body.rfind(USAGE, -TAIL_BYTES)
        if offset < 0:
            return None, None
        end = b"{" + body[offset:].partition(b"\n\n")[0]  # up to the end of the event
    try:
        usage = _decode_end(end).usage
    except (msgspec.DecodeError, ValueError, RecursionError):
        return _counts_anywhere(body)
    if usage is None:
        return None, None
    prompt, completion = usage.prompt_tokens, usage.completion_tokens
    return (
        usage.input_tokens if prompt is None else prompt,
        usage.output_tokens if completion is None else completion,
    )


def _counts_anywhere(body: bytes) -> tuple[int | None, int | None]:
    """Like `counts_in`, by the value of the last `usage` key at any depth of the body."""
    offset = body.rfind(USAGE, -TAIL_BYTES)
    if offset < 0:
        return None, None
    text = body[offset + len(USAGE) :].decode("utf-8", "replace").lstrip(": \t\r\n")
    try:
        usage, _ = _decoder.raw_decode(text)
    except (ValueError, RecursionError):
        return None, None
    if not isinstance(usage, dict):
        return None, None
    prompt, completion = (
        next((usage[name] for name in names if _is_count(usage.get(name))), None)
        for names in NAMES.values()
    )
    return prompt, completion


def tokens_in(body: bytes) -> dict[str, int]:
    """Those of the counts `input` and `output` that a response ending with `body` has."""
    counts = zip(NAMES, counts_in(body), strict=True)
    return {kind: count for kind, count in counts if count is not None}


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_COUNT


def read_cached_tokens(body: bytes) -> tuple[int, int] | None:
    """(cached tokens, prompt tokens) of a response that ends with `body`; the first is never larger
    than the second. None if the response does not report both."""
    offset = body.rfind(_PROMPT, -TAIL_BYTES)
    common = _COMMON_FORM.match(body, offset) if offset >= 0 else None
    if common is not None:
        total, cached = int(common[1]), int(common[2])
        if total:
            return (cached if cached < total else total), total  # noqa: FURB136 - each request
    offset = body.rfind(_CACHED, -TAIL_BYTES)
    if offset < 0:
        return _read_anthropic(body) if body.rfind(_READ, -TAIL_BYTES) >= 0 else None
    match = _COUNT.match(body, offset + len(_CACHED))
    if match is None:
        return None
    cached, offset = int(match[1]), body.rfind(_PROMPT)
    match = _COUNT.match(body, offset + len(_PROMPT)) if offset >= 0 else None
    prompt = int(match[1]) if match is not None else _last_count(body, _INPUT)
    if not prompt:
        return None
    return (cached if cached < prompt else prompt), prompt  # noqa: FURB136 - each request


def _read_anthropic(body: bytes) -> tuple[int, int] | None:
    cached = _last_count(body, _READ)
    computed = _last_count(body, _INPUT) if cached is not None else None
    if cached is None or computed is None:
        return None
    prompt = cached + computed + (_last_count(body, _CREATED) or 0)
    return (cached, prompt) if prompt else None


def _last_count(body: bytes, key: bytes) -> int | None:
    offset = body.rfind(key, -TAIL_BYTES)
    match = _COUNT.match(body, offset + len(key)) if offset >= 0 else None
    return int(match[1]) if match is not None else None


def estimate_prompt(size: int) -> int:
    """Tokens of a request body with `size` bytes."""
    return -(-size // BYTES_PER_TOKEN)


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
