"""Measures a running worker: its prefill speed, and the duration of a decode step.

Sends streamed requests to its `/v1/completions`. Prefill: a line through the times to the first
token of long new prompts and of short ones, over the computed tokens. The short ones have a cached
prefix, as most prompts have in service, if the worker reports cached tokens. Decode: the time
between tokens with one request and with several concurrent ones; a line through both gives the step
and the additional time per request. Each figure is a median. Blocks, and starts threads.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from time import perf_counter
from typing import Final

import httpx

from omni_proxy.simulate.engine import EngineSpec
from omni_proxy.simulate.report import percentile
from omni_proxy.upstream_http.event_stream import (
    EventStreamError,
    EventStreamReader,
    TokenUsage,
    read_chunk,
)

SHORT_WORDS: Final = 64
LONG_WORDS: Final = (512, 256, 128)  # the first one that fits into the context is used
ANSWER_TOKENS: Final = 32
REPEATS: Final = 5
AT_ONCE: Final = 4
NEW_WORDS: Final = 12  # after a cached prefix
TIMEOUT_SECS: Final = 300.0


class CalibrationError(Exception):
    """The worker could not be measured; the message is the reason."""


class _RefusedError(CalibrationError):
    """Status 400, as for a prompt that does not fit into the model's context."""


@dataclass(frozen=True, slots=True)
class _Timing:
    computed_tokens: int  # of the prompt
    cached_tokens: int
    first_secs: float
    step_secs: float  # between two generated tokens


def measure(url: str, progress: Callable[[str], None] = lambda text: None) -> EngineSpec:
    """Raises CalibrationError."""
    base = url.rstrip("/")
    # llama.cpp closes a connection after a stream without announcing it.
    with httpx.Client(timeout=TIMEOUT_SECS, headers={"connection": "close"}) as client:
        model, slots = _model(client, base), _llamacpp_slots(client, base)
        progress("warming up")
        _send_prompt(client, base, model, _words(SHORT_WORDS))
        progress("prefill")
        count = _longest_prompt(client, base, model)
        long = [_send_prompt(client, base, model, _words(count)) for _ in range(REPEATS)]
        short = _short_prompts(client, base, model, count // 2)
        progress(f"decode, {AT_ONCE} concurrent requests")
        with ThreadPoolExecutor(AT_ONCE) as threads:
            calls = [
                threads.submit(_send_prompt, client, base, model, _words(SHORT_WORDS))
                for _ in range(AT_ONCE * REPEATS)
            ]
            together = [call.result() for call in calls]
    tokens = _median(long, "computed_tokens") - _median(short, "computed_tokens")
    secs = _median(long, "first_secs") - _median(short, "first_secs")
    if tokens <= 0 or secs <= 0:
        raise CalibrationError(
            f"{url}: prefill can't be measured: longer prompts take no longer than short ones"
        )
    overhead_secs = _median(short, "first_secs") - _median(short, "computed_tokens") * secs / tokens
    alone_ms = _median(short, "step_secs") * 1000
    extra_ms = max(0.0, (_median(together, "step_secs") * 1000 - alone_ms) / (AT_ONCE - 1))
    return replace(
        EngineSpec(),
        **slots,
        prefill_tokens_per_sec=tokens / secs,
        prefill_overhead_ms=max(0.0, overhead_secs * 1000),
        decode_step_ms=max(0.0, alone_ms - extra_ms),
        decode_step_ms_per_request=extra_ms,
    )


def _llamacpp_slots(client: httpx.Client, base: str) -> dict[str, int]:
    """The number of concurrent requests of llama.cpp's server; {} for other engines."""
    try:
        slots = client.get(f"{base}/props").json()["total_slots"]
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return {}
    return {"slots": slots, "max_batch": slots} if isinstance(slots, int) and slots > 0 else {}


def _longest_prompt(client: httpx.Client, base: str, model: str) -> int:
    """The number of words for long prompts. Raises CalibrationError."""
    for words in LONG_WORDS[:-1]:
        try:
            _send_prompt(client, base, model, _words(words))
        except _RefusedError:
            continue
        return words
    return LONG_WORDS[-1]


def _short_prompts(client: httpx.Client, base: str, model: str, cached_words: int) -> list[_Timing]:
    """Timings of short prompts after a cached prefix, or without one if the worker reports no
    cached tokens. Raises CalibrationError."""
    beginning = _words(cached_words)
    _send_prompt(client, base, model, beginning)
    after_prefix = [
        _send_prompt(client, base, model, f"{beginning} {_words(NEW_WORDS)}")
        for _ in range(REPEATS)
    ]
    if all(timing.cached_tokens > timing.computed_tokens for timing in after_prefix):
        return after_prefix
    return [_send_prompt(client, base, model, _words(SHORT_WORDS)) for _ in range(REPEATS)]


def _words(count: int) -> str:
    """Random text, which can't be cached."""
    return " ".join(secrets.token_hex(2) for _ in range(count))


def _median(timings: list[_Timing], name: str) -> float:
    return percentile(sorted(getattr(timing, name) for timing in timings), 50)


def _model(client: httpx.Client, base: str) -> str:
    try:
        response = client.get(f"{base}/v1/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise CalibrationError(f"{base}/v1/models: {str(error) or type(error).__name__}") from None


def _send_prompt(client: httpx.Client, base: str, model: str, prompt: str) -> _Timing:
    """Send one request. Raises CalibrationError."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    times: list[float] = []
    reader, usage = EventStreamReader(), TokenUsage(0, 0)
    began_at = perf_counter()
    try:
        with client.stream("POST", f"{base}/v1/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                kind = _RefusedError if response.status_code == 400 else CalibrationError
                raise kind(
                    f"{base}/v1/completions: status {response.status_code}: {response.text[:200]}"
                )
            for data in chain.from_iterable(map(reader.feed, response.iter_bytes())):
                chunk = read_chunk(data)
                if chunk.generated:
                    times.append(perf_counter())
                usage = chunk.usage or usage
    except (httpx.HTTPError, EventStreamError) as error:
        raise CalibrationError(
            f"{base}/v1/completions: {str(error) or type(error).__name__}"
        ) from None
    if len(times) < 2 or not usage.input:
        raise CalibrationError(f"{base}/v1/completions: no stream of tokens with usage at its end")
    # A median, as between two tokens the worker may compute the prompt of another request.
    gaps = sorted(later - earlier for earlier, later in pairwise(times))
    first_secs = times[0] - began_at
    cached = usage.cached or 0
    return _Timing(usage.input - cached, cached, first_secs, percentile(gaps, 50))
