"""Measures a running worker: how fast it computes prompts, and how long a decode step takes.

Requests go to its `/v1/completions`, streamed. Prefill: a straight line through the time to the
first token of long new prompts and of short ones, over the tokens that were computed. The short
ones have a cached beginning, as most have in service, if the worker tells what it had cached.
Decode: the time between tokens with one request and with several at once; a straight line through
both gives the step and what each request adds. Each figure is a median. It blocks, in threads of
its own.
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
LONG_WORDS: Final = (512, 256, 128)  # the longest that its context can hold
ANSWER_TOKENS: Final = 32
REPEATS: Final = 5
AT_ONCE: Final = 4
NEW_WORDS: Final = 12  # behind a cached beginning
TIMEOUT_SECS: Final = 300.0


class CalibrationError(Exception):
    """The worker could not be measured; the text says why."""


class _RefusedError(CalibrationError):
    """Status 400, as for a prompt that does not fit into the model's context."""


@dataclass(frozen=True, slots=True)
class _Timing:
    computed_tokens: int  # of the prompt
    cached_tokens: int
    first_secs: float
    step_secs: float  # between two tokens of the answer


def measure(url: str, progress: Callable[[str], None] = lambda text: None) -> EngineSpec:
    """Raises CalibrationError."""
    base = url.rstrip("/")
    # llama.cpp closes a connection after a stream without a word of it.
    with httpx.Client(timeout=TIMEOUT_SECS, headers={"connection": "close"}) as client:
        model, slots = _model(client, base), _llamacpp_slots(client, base)
        progress("warming up")
        _ask(client, base, model, _words(SHORT_WORDS))
        progress("prefill")
        count = _longest(client, base, model)
        long = [_ask(client, base, model, _words(count)) for _ in range(REPEATS)]
        short = _short(client, base, model, count // 2)
        progress(f"decode, {AT_ONCE} requests at once")
        with ThreadPoolExecutor(AT_ONCE) as threads:
            calls = [
                threads.submit(_ask, client, base, model, _words(SHORT_WORDS))
                for _ in range(AT_ONCE * REPEATS)
            ]
            together = [call.result() for call in calls]
    tokens = _median(long, "computed_tokens") - _median(short, "computed_tokens")
    secs = _median(long, "first_secs") - _median(short, "first_secs")
    if tokens <= 0 or secs <= 0:
        raise CalibrationError(
            f"{url}: a longer prompt takes no longer, so prefill is not measured"
        )
    overhead_secs = _median(short, "first_secs") - _median(short, "computed_tokens") * secs / tokens
    alone_ms = _median(short, "step_secs") * 1000
    more_ms = max(0.0, (_median(together, "step_secs") * 1000 - alone_ms) / (AT_ONCE - 1))
    return replace(
        EngineSpec(),
        **slots,
        prefill_tokens_per_sec=tokens / secs,
        prefill_overhead_ms=max(0.0, overhead_secs * 1000),
        decode_step_ms=max(0.0, alone_ms - more_ms),
        decode_step_ms_per_request=more_ms,
    )


def _llamacpp_slots(client: httpx.Client, base: str) -> dict[str, int]:
    """llama.cpp's server says how many requests it computes at a time; nothing of others."""
    try:
        slots = client.get(f"{base}/props").json()["total_slots"]
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return {}
    return {"slots": slots, "max_batch": slots} if isinstance(slots, int) and slots > 0 else {}


def _longest(client: httpx.Client, base: str, model: str) -> int:
    """Raises CalibrationError."""
    for words in LONG_WORDS[:-1]:
        try:
            _ask(client, base, model, _words(words))
        except _RefusedError:
            continue
        return words
    return LONG_WORDS[-1]


def _short(client: httpx.Client, base: str, model: str, cached_words: int) -> list[_Timing]:
    """Short prompts behind a cached beginning, or without one if the worker tells of no cache.
    Raises CalibrationError."""
    beginning = _words(cached_words)
    _ask(client, base, model, beginning)
    behind = [_ask(client, base, model, f"{beginning} {_words(NEW_WORDS)}") for _ in range(REPEATS)]
    if all(timing.cached_tokens > timing.computed_tokens for timing in behind):
        return behind
    return [_ask(client, base, model, _words(SHORT_WORDS)) for _ in range(REPEATS)]


def _words(count: int) -> str:
    """Text that no cache can hold."""
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


def _ask(client: httpx.Client, base: str, model: str, prompt: str) -> _Timing:
    """One request. Raises CalibrationError."""
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
    # Not their mean: between two tokens the worker may compute the prompt of another request.
    gaps = sorted(later - earlier for earlier, later in pairwise(times))
    first_secs = times[0] - began_at
    cached = usage.cached or 0
    return _Timing(usage.input - cached, cached, first_secs, percentile(gaps, 50))
